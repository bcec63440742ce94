"""``certdp feasible``: when noise for a smooth bound beats noise for the global sensitivity; public arithmetic."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from certify.cli.console import out
from certify.errors import CertdpError


def command(
    epsilon: Annotated[float, typer.Option(help="Budget of one scalar release.")],
    delta: Annotated[float, typer.Option(help="0 shows the pure conditions alone.")] = 0.0,
    confidence: Annotated[float, typer.Option(help="1 - alpha: compare the noise at this quantile.")] = 0.9,
    beta: Annotated[list[float] | None, typer.Option(help="Further betas to show; may be repeated.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write figure 1 (ratio against confidence) as a picture.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show below which ratio of smooth bound to global sensitivity smooth noise is the smaller one.  Reads no data."""
    from privacy import feasibility

    found = feasibility.conditions(epsilon, delta, confidence, beta or ())
    if plot is not None:
        if not plot.parent.is_dir():
            raise CertdpError(f"{plot}: the folder {plot.parent} does not exist; create it or give another path")
        feasibility.plot(epsilon, delta or 1e-5, plot)
    if json_output:
        facts = {"epsilon": epsilon, "delta": delta, "confidence": confidence}
        typer.echo(json.dumps({**facts, "conditions": [asdict(one) for one in found]}, indent=2))
        return
    cost = f"epsilon = {epsilon:g}" + (f", delta = {delta:g}" if delta else "")
    table = RichTable(title=f"smooth noise wins when S/GS < ratio ({cost}, confidence {confidence:g})",
                      title_justify="left")  # fmt: skip
    for name in ("condition", "smooth noise", "against"):
        table.add_column(name)
    for name in ("beta", "ratio"):
        table.add_column(name, justify="right")
    for one in found:
        style = "bold" if one.name == "ours" else None
        table.add_row(one.name, one.smooth, one.against, f"{one.beta:.4g}", f"{one.ratio:.4f}", style=style)
    out.print(table)
    out.print("S is the smooth bound for the beta of the same row: a larger beta gives a smaller S.", soft_wrap=True)
    out.print("These are public facts.  Whether your data meet a condition is private.", soft_wrap=True)
    if plot is not None:
        out.print(f"[bold]written[/]    {plot}")
