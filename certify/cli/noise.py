"""``certdp noise``: the noise families side by side for a budget and a dimension."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from certify.cli.console import out

_UNITS = {"pure": "pure", "approximate": "(ε, δ)", "concentrated": "zCDP"}


def command(
    epsilon: Annotated[float, typer.Option(help="Budget of one release of all values together.")],
    dim: Annotated[int, typer.Option(help="Number of values released together.")] = 1,
    delta: Annotated[float, typer.Option(help="With delta > 0 the (epsilon, delta) families are listed, too.")] = 0.0,
    moves: Annotated[
        int | None, typer.Option(help="How many of the values one record can move (public); default: all.")
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also list every admissible pair (a, beta).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare noise for a smooth bound S and recommend a family, from public facts alone."""
    from privacy.noise import FAMILIES, admissible_pairs, check_budget
    from privacy.noise.compare import compare, recommend

    check_budget(FAMILIES["gaussian" if delta else "cauchy"].load(), epsilon, delta, dim)
    rows = compare(epsilon, delta, dim, moves)
    best = recommend(rows)
    listed = {}
    if pairs:
        for row in rows:
            if row.name in FAMILIES:
                spent = 0.0 if row.privacy == "pure" else delta
                listed[row.name] = admissible_pairs(row.name, epsilon, spent, dim)
    if as_json:
        facts = {
            "epsilon": epsilon,
            "delta": delta,
            "dim": dim,
            "rows": [{key: _finite(value) for key, value in asdict(row).items()} for row in rows],
            "recommended": best.name,
            "pairs": {name: [asdict(pair) for pair in found] for name, found in listed.items()},
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    out.print(_table(rows, best, epsilon, delta, dim))
    for name, found in listed.items():
        out.print(f"[bold]{name}[/]  " + ", ".join(f"(a {pair.a:.4g}, β {pair.beta:.4g})" for pair in found))
    moved = "all values" if moves in (None, dim) else f"{moves} of {dim} values"
    out.print(
        "[bold]S[/]            the smooth bound in the family's norm; the release is value + (S/a) Z\n"
        "[bold]typical[/]      mean of |noise| per value for S = 1 (* median: the mean is infinite), and 95 % quantile"
    )
    if any(row.privacy == "concentrated" for row in rows):
        out.print("[bold]zCDP[/]         calibrated for (epsilon, delta) by way of concentrated privacy")
    if dim > 1:
        out.print(f"[bold]noise[/]        the same where one record moves {moved} by 1")
    out.print(
        "[bold]caution[/]      per unit of S at the listed β; S grows as β falls, so compare rows of equal β\n"
        f"[bold]recommended[/]  {best.name}: least 95 % noise over its β where cross ranges grow like 2k + 1\n"
        "             (from epsilon, delta, dimension and --moves alone, not from data)"
    )


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(rows, best, epsilon: float, delta: float, dim: int) -> RichTable:
    title = f"noise for epsilon = {epsilon:g}" + (f", delta = {delta:g}" if delta else "") + f", dimension {dim}"
    table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("family", overflow="fold")
    for name in ("privacy", "S in"):
        table.add_column(name, no_wrap=True)
    for name in ("β", "1/a", "typical (95 %)") + (("noise (95 %)",) if dim > 1 else ()):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        name = f"{row.name}, {row.shape}" if row.shape else row.name
        cells = [name, _UNITS[row.privacy], row.norm, f"{row.beta:.3g}", f"{1 / row.a:.3g}"]
        cells += [_noise(row, size) for size in ((1.0, row.size) if dim > 1 else (1.0,))]
        table.add_row(*cells, style="bold" if row is best else None)
    return table


def _noise(row, size: float) -> str:
    tail = "" if math.isnan(row.tail) else f" ({row.tail * size:.3g})"
    return f"{row.typical * size:.3g}{'' if row.mean else '*'}{tail}"
