"""What the benchmarks show and write: a progress bar while they run, then JSON and the tables as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(console: Console) -> Progress:
    """Description, bar, cells done of all, and time taken."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def write_results(found: dict[str, Any], console: Console, json_path: Path | None, txt: Path | None) -> None:
    """``found`` as JSON and what a recording ``console`` printed, each where a path is given."""
    if json_path:
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    if txt:
        txt.write_text(console.export_text())
