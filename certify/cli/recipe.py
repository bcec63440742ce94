"""``certdp recipe``: check a recipe, or explain every field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from certify.cli.console import out


def command(
    path: Annotated[Path | None, typer.Argument(help="Recipe to check; without it every field is explained.")] = None,
) -> None:
    """Check a recipe, or explain every field."""
    from certify.recipe import explain, load

    if path is not None:
        out.print_json(data=load(path).to_dict())
        return
    table = RichTable(show_lines=False)
    for name in ("field", "accepts", "default", "meaning"):
        table.add_column(name, overflow="fold")
    for row in explain():
        table.add_row(*map(str, row))
    out.print(table)
