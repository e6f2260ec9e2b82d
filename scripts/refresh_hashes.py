"""Write the source hashes of the installed SGLang into the hook table (part of upgrading: read the diffs first).

python scripts/refresh_hashes.py            # show what changed
python scripts/refresh_hashes.py --write    # and write it to plugin.py
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sglang_dcp_block import hooks, plugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the new hashes to plugin.py")
    write = parser.parse_args().write
    path = Path(plugin.__file__)
    text = path.read_text()
    for hook in plugin.HOOKS:
        found = hooks.source_hash(hooks._resolve(hook.target)[2])
        if found != hook.source:
            print(f"{hook.target}: {hook.source} -> {found}")
            row = rf'("{re.escape(hook.target)}",\s*(?:f?"[^"]*",\s*){{2}})"[^"]*"'
            text, n = re.subn(row, rf'\1"{found}"', text)
            assert n == 1, f"{hook.target}: {n} rows match"
    if write:
        path.write_text(text)


if __name__ == "__main__":
    main()
