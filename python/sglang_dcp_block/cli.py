"""``python -m sglang_dcp_block explain | advise | doctor``.

Exit status: 0 fine, 1 doctor found a fault, 2 bad input. Bad input prints one sentence on stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from sglang_dcp_block import advise as advise_
from sglang_dcp_block import doctor as doctor_
from sglang_dcp_block import explain as explain_

app = typer.Typer(
    name="sglang-dcp-block",
    no_args_is_help=True,
    add_completion=False,
    help="Block round-robin KV layout for decode context parallelism in SGLang: see it, choose it, check it.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the picture or table.")]
Dtype = Annotated[str, typer.Option(help="KV dtype: bf16, fp16, fp32 or fp8.")]


def _print_json(value: Any) -> None:
    # Not through rich: it would wrap long lines.
    print(json.dumps(value, indent=2))


@app.command()
def explain(
    tokens: Annotated[int, typer.Option(help="Length of the request.")],
    dcp_size: Annotated[int, typer.Option(help="Ranks that share a request's KV (P).")],
    block_size: Annotated[int, typer.Option(help="Tokens of one block (B); 1 is token round-robin.")],
    page_size: Annotated[int, typer.Option(help="SGLang's --page-size.")],
    prefix: Annotated[
        int | None, typer.Option(help="Tokens that are in KV already, or shared with another request.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens that the next extend adds after the prefix.")] = None,
    model: Annotated[Path | None, typer.Option(help="config.json or model folder; adds bytes.")] = None,
    dtype: Dtype = "bf16",
    memory: Annotated[str | None, typer.Option(help="KV memory of one GPU, such as 40GB; adds what fits.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw the picture into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show which rank owns which tokens, and what follows from it. Pages begin at rank 0, as without --dcp-rotate."""
    report = explain_.explain(
        tokens,
        dcp_size,
        block_size,
        page_size,
        prefix=prefix,
        chunk=chunk,
        shape=advise_.load_model(model) if model else None,
        dtype=dtype,
        memory=advise_.parse_size(memory) if memory else None,
    )
    if png:
        explain_.render_png(report, png)
    if as_json:
        _print_json(report)
    else:
        explain_.render_text(report, Console(highlight=False))


@app.command()
def advise(
    model: Annotated[Path, typer.Option(help="config.json or model folder.")],
    tp: Annotated[int, typer.Option(help="SGLang's --tp-size.")],
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU, such as 141GB or 131GiB.")],
    context: Annotated[str, typer.Option(help="Tokens of a typical request, such as 128K (1024 each).")],
    concurrency: Annotated[int, typer.Option(help="Requests at the same time.")],
    dtype: Dtype = "bf16",
    mem_fraction: Annotated[float, typer.Option(help="SGLang's --mem-fraction-static.")] = advise_.MEM_FRACTION_STATIC,
    as_json: Json = False,
) -> None:
    """Recommend dcp_size, page and block size, with the reasons and the price."""
    result = advise_.advise(
        advise_.load_model(model),
        tp_size=tp,
        gpu_memory=advise_.parse_size(gpu_memory),
        context=advise_.parse_tokens(context),
        concurrency=concurrency,
        dtype=dtype,
        mem_fraction=mem_fraction,
    )
    if as_json:
        _print_json(result)
    else:
        advise_.render_text(result, Console(highlight=False))


@app.command()
def doctor(
    tp: Annotated[int | None, typer.Option(help="--tp-size you mean to start with.")] = None,
    dcp_size: Annotated[int | None, typer.Option(help="--dcp-size you mean to start with.")] = None,
    block_size: Annotated[int | None, typer.Option(help="--dcp-block-size you mean to start with.")] = None,
    page_size: Annotated[int | None, typer.Option(help="--page-size you mean to start with.")] = None,
    backend: Annotated[str | None, typer.Option(help="--attention-backend you mean to start with.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Running server to compare with, http://host:port.")] = None,
    as_json: Json = False,
) -> int:
    """Check the installation, a launch you plan, and running peers; exit status 1 when something is broken."""
    checks = doctor_.diagnose(doctor_.Settings(tp, dcp_size, block_size, page_size, backend), peer or ())
    report = doctor_.as_json(checks)
    if as_json:
        _print_json(report)
    else:
        doctor_.render_text(checks, Console(highlight=False))
    return 0 if report["ok"] else 1


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        # Not standalone: the library would wrap errors into a box of several lines.
        status = app(arguments, standalone_mode=False)
    except Exception as error:
        # typer has its own copy of click in some versions and imports click in others; both carry format_message.
        if not isinstance(error, ValueError) and not hasattr(error, "format_message"):
            raise
        message = str(error) or getattr(error, "message", "") or error.format_message()  # type: ignore[attr-defined]
        if hasattr(error, "format_message"):
            message = error.format_message()
        if message:
            Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), _one_sentence(message)))
        return 2
    return status if isinstance(status, int) else 0


def _one_sentence(message: str) -> str:
    text = " ".join(message.split()).strip()
    return text if text.endswith((".", "?", "!")) else text + "."


def main() -> None:
    sys.exit(run())
