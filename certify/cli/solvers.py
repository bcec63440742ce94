"""``certdp solvers``: what the bounding backends promise, which solvers are installed, and whether they work."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from certify.cli.console import out, progress_bar
from solvers.capabilities import BACKENDS
from solvers.discovery import KINDS, SOLVERS, Found, Solver, Trial, find, try_solver


def command(json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Show what each backend promises and try every installed solver on tiny programs with known answers."""
    found = {name: find(name) for name in SOLVERS}
    installed = [name for name in SOLVERS if found[name]]
    trials: dict[str, Trial] = {}
    with progress_bar("trying solvers") as progress:
        for done, name in enumerate(installed):
            progress(done, len(installed), SOLVERS[name].title)
            trials[name] = try_solver(name)
    if json_output:
        rows = [
            {
                **asdict(solver),
                "found": asdict(found[name]) if found[name] else None,
                "trial": asdict(trials[name]) if name in trials else None,
            }
            for name, solver in SOLVERS.items()
        ]
        typer.echo(json.dumps({"backends": [asdict(b) for b in BACKENDS.values()], "solvers": rows}, indent=2))
        return
    out.print(_backends())
    out.print(_solvers(found, trials))
    for name, trial in trials.items():
        for kind in SOLVERS[name].kinds:
            if (said := getattr(trial, kind)) != "ok":
                out.print(f"[bold red]{SOLVERS[name].title}[/] failed the tiny {kind.upper()}: {said}", soft_wrap=True)
    for name, solver in SOLVERS.items():
        if not found[name]:
            out.print(f"[bold]{solver.title}[/] is not installed; get it with: {solver.install}", soft_wrap=True)


def _yes(value: bool) -> str:
    return "yes" if value else "[red]no[/]"


def _backends() -> RichTable:
    table = RichTable(title="backends", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("backend", "sound", "(M)", "rigour", "what it does; solvers"):
        table.add_column(name, no_wrap=name == "backend")
    for b in BACKENDS.values():
        solvers = f"; {', '.join(b.solvers)}" if b.solvers else ""
        table.add_row(b.name, _yes(b.sound), _yes(b.monotone), b.rigour, b.summary + solvers)
    return table


def _solvers(found: dict[str, Found | None], trials: dict[str, Trial]) -> RichTable:
    title = "solvers (yes: tried here and right)"
    table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("solver", "version", *KINDS, "duals", "bound", "found as; limit"):
        table.add_column(name, no_wrap=name in ("solver", "version"))
    for name, solver in SOLVERS.items():
        here = found[name]
        version, source = (here.version, here.source) if here else ("-", "not installed")
        limit = "" if solver.limit == "none" else f"; {solver.limit}"
        table.add_row(name, version, *_abilities(solver, trials.get(name)), source + limit)
    return table


def _abilities(solver: Solver, trial: Trial | None) -> list[str]:
    """Kinds, duals and dual bound as cells: tried and right, tried and wrong, or claimed but not installed."""
    claims = [kind in solver.kinds for kind in KINDS] + [solver.duals, solver.bound]
    if trial is None:
        return ["(yes)" if claim else "no" for claim in claims]
    worked = [kind in trial.kinds for kind in KINDS] + [trial.duals, trial.bound]
    return [
        "yes" if works else ("[red]FAILED[/]" if claim else "no") for claim, works in zip(claims, worked, strict=True)
    ]
