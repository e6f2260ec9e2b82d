"""Write the source hashes of the installed SGLang into the hook table (part of upgrading: read the diffs first).

python scripts/refresh_hashes.py            # show what changed
python scripts/refresh_hashes.py --write    # and write it where the row stands: plugin.py, disaggregation/*.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from sglang_dcp_block import hooks, plugin


def refreshed(texts: Mapping[Path, str], changes: Iterable[tuple[str, str, str]]) -> dict[Path, str]:
    """``texts`` with new hashes; ``changes``: (target, old hash, new hash) of a row.

    Raises:
        ValueError: an old hash stands nowhere, or in more than one place, so that its row can't be told.
    """
    new = {}
    for target, old, found in changes:
        places = sum(text.count(f'"{old}"') for text in texts.values())
        if places != 1:
            raise ValueError(f"{target}: its hash {old} stands in {places} places: write this row by hand.")
        new[old] = found
    # All at once: a new hash may be another row's old one.
    return {path: re.sub(r'"([0-9a-f]{16})"', lambda m: f'"{new.get(m[1], m[1])}"', t) for path, t in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the new hashes to the rows")
    write = parser.parse_args().write
    package = Path(plugin.__file__).parent
    texts = {path: path.read_text() for path in [Path(plugin.__file__), *package.glob("disaggregation/*.py")]}
    found = [(hook, hooks.source_hash(hooks._resolve(hook.target)[2])) for hook in plugin.HOOKS]
    changes = [(hook.target, hook.source, now) for hook, now in found if now != hook.source]
    for target, old, now in changes:
        print(f"{target}: {old} -> {now}")
    if write:
        for path, text in refreshed(texts, changes).items():
            path.write_text(text)


if __name__ == "__main__":
    main()
