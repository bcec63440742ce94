"""``certdp envelope check``: every rule of the envelope file, one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from certify.cli.console import out

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Check envelope files."""


@app.command("check")
def check_command(path: Annotated[Path, typer.Argument(help="Envelope file to check.")]) -> None:
    """Check a file's structure, order, nesting and digest; exit code 2 when something is wrong."""
    from certify.envelope import check
    from certify.errors import EnvelopeError

    report = check(path)
    table = RichTable(show_header=False, box=None)
    for line in report:
        table.add_row("[green]ok[/]" if line.ok else "[bold red]FAILED[/]", line.name, line.detail)
    out.print(table)
    first = next((line for line in report if not line.ok), None)
    if first is not None:
        raise EnvelopeError(f"{path}: {first.detail.removeprefix(f'{path}: ')}")
