"""``python -m sglang_dcp_block``."""

from sglang_dcp_block.cli import main

if __name__ == "__main__":
    main()
