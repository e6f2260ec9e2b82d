"""Write the source hashes of the installed SGLang into the hook table (part of upgrading: read the diffs first).

python scripts/refresh_hashes.py            # show what changed
python scripts/refresh_hashes.py --write    # and write it where the row stands: plugin.py, disaggregation/*.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_dcp_block import hooks, plugin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the new hashes to the rows")
    write = parser.parse_args().write
    package = Path(plugin.__file__).parent
    texts = {path: path.read_text() for path in [Path(plugin.__file__), *package.glob("disaggregation/*.py")]}
    for hook in plugin.HOOKS:
        found = hooks.source_hash(hooks._resolve(hook.target)[2])
        if found != hook.source:
            print(f"{hook.target}: {hook.source} -> {found}")
            holders = [path for path, text in texts.items() if f'"{hook.source}"' in text]
            assert len(holders) == 1, f"{hook.target}: {len(holders)} files have its hash"
            texts[holders[0]] = texts[holders[0]].replace(f'"{hook.source}"', f'"{found}"')
    if write:
        for path, text in texts.items():
            path.write_text(text)


if __name__ == "__main__":
    main()
