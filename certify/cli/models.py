"""``certdp models``: what is in an ONNX file and whether it can be certified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from models.reader import ModelReport


def command(
    model: Annotated[Path, typer.Argument(help="ONNX file.")],
    picture: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation
        typer.Option("--picture", help="Draw the graph into this file (png, svg, pdf)."),
    ] = None,
    trainable: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--trainable", help="Pattern of parameters to train; may be repeated."),
    ] = None,
    frozen: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--frozen", help="Pattern of parameters to freeze; may be repeated."),
    ] = None,
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--output", help="The regression output, when the model has several."),
    ] = None,
) -> None:
    """Show a model: graph, operators, parameters that train, and what is not supported.

    Exit code 2 when the model cannot be certified.
    """
    from rich.console import Console

    from models import reader

    report = reader.inspect(model, trainable or None, tuple(frozen or ()), output)
    console = Console()
    show(report, console)
    if report.graph is None:
        raise typer.Exit(2)
    if picture is not None:
        from models.draw import draw

        console.print(f"Picture: {draw(report.graph, picture)}")


def show(report: ModelReport, console: Console) -> None:
    """Prints a report as tables."""
    from rich.markup import escape

    opsets = ", ".join(f"{domain} {version}" for domain, version in report.opsets)
    console.print(f"[bold]{escape(report.path)}[/bold]  {escape(report.producer)}  opset {opsets}")
    for title, rows in (("input", report.inputs), ("output", report.outputs)):
        for name, kind in rows:
            console.print(f"  {title} {escape(name)}: {escape(kind)}")
    _table(console, "ONNX operators", ("operator", "nodes"), [(k, str(v)) for k, v in report.operators.items()])
    if report.graph is not None:
        _table(console, "Graph", ("node", "operator", "shape", "inputs"), report.graph.describe())
        rows = [
            (p.name, "x".join(map(str, p.shape)) or "1", str(p.value.size), "yes" if p.trainable else "no")
            for p in report.graph.parameters
        ]
        _table(console, "Parameters", ("parameter", "shape", "numbers", "trained"), rows)
        count = sum(p.value.size for p in report.graph.trainable)
        console.print(f"{count} trained numbers; the graph agrees with onnxruntime.")
    for note in report.notes:
        console.print(f"[yellow]Note:[/yellow] {escape(note)}")
    if report.unsupported:
        rows = [(p.name, p.operator, p.reason) for p in report.unsupported]
        _table(console, "Not supported", ("node", "operator", "reason"), rows)
    if report.problem is not None:
        from models.reader import supported_operators

        console.print(f"[red]Cannot be certified:[/red] {escape(report.problem)}")
        console.print(f"Supported operators: {', '.join(supported_operators())}")


def _table(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
