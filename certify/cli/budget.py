"""``certdp budget``: privacy budgets of data sets, what was spent and what is left."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.table import Table as RichTable

from certify.cli.console import out

app = typer.Typer(no_args_is_help=True)

_Ledger = Annotated[Path, typer.Argument(help="Ledger file (private: keep it where the records are).")]
_Epsilon = Annotated[str, typer.Option(help="An exact decimal, such as 2 or 0.1.")]
_Delta = Annotated[str, typer.Option(help="An exact decimal, such as 1e-6.")]
_WIDTH = 24


@app.callback()
def _group() -> None:
    """Privacy budgets of data sets: create, show, add, export."""


@app.command("create")
def create_command(
    ledger: _Ledger,
    name: Annotated[str, typer.Argument(help="Name of the data set; every data set has one budget.")],
    epsilon: _Epsilon,
    delta: _Delta = "0",
    adjacency: Annotated[str, typer.Option(help="replace-one or zero-out; that of the envelopes.")] = "replace-one",
) -> None:
    """Decide what a data set may give away; makes the ledger if there is none."""
    from privacy.ledger import Ledger

    _show([Ledger(ledger).create_budget(name, epsilon, delta, adjacency)])


@app.command("show")
def show_command(
    ledger: _Ledger,
    name: Annotated[Optional[str], typer.Argument(help="One budget; default all.")] = None,  # noqa: UP045 - typer
    entries: Annotated[bool, typer.Option("--entries", help="Also list every cost.")] = False,
) -> None:
    """Show what is spent and what is left."""
    from privacy.ledger import Ledger

    book = Ledger(ledger)
    budgets = [book.budget(name)] if name is not None else book.budgets()
    _show(budgets)
    if entries:
        for budget in budgets:
            _show_entries(budget.name, book.entries(budget.name))


@app.command("add")
def add_command(
    ledger: _Ledger,
    name: Annotated[str, typer.Argument(help="Name of the budget.")],
    reason: Annotated[str, typer.Option(help="Why; kept in the ledger.")],
    epsilon: _Epsilon = "0",
    delta: _Delta = "0",
) -> None:
    """Let a data set give away more than was decided; the reason is recorded, and nothing can be taken back."""
    from privacy.ledger import Ledger

    _show([Ledger(ledger).add(name, epsilon, delta, reason=reason)])


@app.command("export")
def export_command(
    ledger: _Ledger,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="File; default stdout.")] = None,  # noqa: UP045
) -> None:
    """Write budgets, grants, costs and released answers as JSON, without keys and secrets."""
    from certify.envelope import write_atomically
    from privacy.ledger import Ledger, LedgerError

    text = json.dumps(Ledger(ledger).export(), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        write_atomically(output, text.encode())
    except OSError as error:
        raise LedgerError(f"{output}: cannot be written ({error.strerror}); give a path you may write to") from error
    out.print(f"[bold]written[/]    {output}: costs, descriptions and released answers; no keys, no secrets.")


def _show(budgets) -> None:
    from rich.markup import escape

    from privacy.amounts import text

    table = RichTable(title="privacy budgets", title_justify="left")
    for heading, where in (("data set", "left"), ("adjacency", "left"), ("", "left"), ("spent", "right"),
                           ("of", "right"), ("left", "right"), ("", "left")):  # fmt: skip
        table.add_column(heading, justify=where)
    for budget in budgets:
        for field in ("epsilon", "delta"):
            granted, spent, left = (getattr(part, field) for part in (budget.granted, budget.spent, budget.left))
            first = field == "epsilon"
            table.add_row(
                escape(budget.name) if first else "",
                budget.adjacency if first else "",
                field,
                text(spent),
                text(granted),
                text(left),
                bar(spent, granted),
            )
    out.print(table)


def bar(spent: Decimal, granted: Decimal) -> str:
    """Full where spent; one cell is left empty unless everything is spent, and one is full once anything is."""
    share = spent / granted if granted else Decimal(1)
    full = min(max(int(share * _WIDTH), int(spent > 0)), _WIDTH - int(spent < granted)) if granted else 0
    return "█" * full + "░" * (_WIDTH - full)


def _show_entries(name: str, entries) -> None:
    from rich.markup import escape

    from privacy.amounts import text

    table = RichTable(title=f"costs of {escape(name)}", title_justify="left")
    for heading in ("entry", "day", "epsilon", "delta", "state", "description"):
        table.add_column(heading, justify="right" if heading in ("entry", "epsilon", "delta") else "left")
    for e in entries:
        table.add_row(str(e.id), e.day, text(e.epsilon), text(e.delta), e.state, escape(e.description))
    out.print(table)
