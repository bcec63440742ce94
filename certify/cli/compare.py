"""``certdp compare``: bounding backends on the same run, with the best attack as the floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from certify.cli.console import PRIVATE, err, out, progress_bar
from certify.cli.inputs import read_inputs
from certify.cli.inspect import sensitivities
from certify.cli.method import Force, Solver, Tau, lengths
from certify.errors import CertdpError


def command(
    model: Annotated[Path, typer.Argument(help="ONNX file of the regressor; training starts at its weights.")],
    data: Annotated[Path, typer.Option(help="Table of records: .csv, .csv.gz, .parquet or .npz (private).")],
    recipe: Annotated[Path, typer.Option(help="Recipe in TOML: every public fact of the training run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for envelopes, results, plot (private).")],
    backends: Annotated[str, typer.Option(help="Backends with commas; `certdp solvers` lists them.")] = "ibp",
    frequencies: Annotated[str, typer.Option("--F", help="Steps a window, several with commas.")] = "1",
    stride: Annotated[int | None, typer.Option(help="New steps a window bounds (overlapping windows).")] = None,
    radii: Annotated[str, typer.Option(help="Radii without gaps, like 0..16.")] = "0..16",
    beta: Annotated[float, typer.Option(help="Smoothing of the smooth sensitivity that is shown.")] = 0.5,
    target: Annotated[str | None, typer.Option(help="Target column(s); overrides the recipe.")] = None,
    limit: Annotated[float | None, typer.Option(help="Seconds a backend may take for one F.")] = None,
    retrainings: Annotated[int, typer.Option(help="Runs of each guided attack; 0 for no attack.")] = 8,
    solver: Solver = "highs",
    tau: Tau = None,
    force: Force = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a backend.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the folder holds and go on.")] = False,
    output_name: Annotated[str | None, typer.Option(help="Which of the model's outputs to use.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Compare backends and concretisation frequencies: width, smooth sensitivity, time, memory, rigour, attack."""
    from certify.compare import compare
    from certify.driver import parse_radii, reach
    from certify.envelope import write_atomically
    from certify.plots import plot_comparison
    from certify.windows import Method

    facts, table, graph = read_inputs(model, data, recipe, target, output_name)
    wanted = parse_radii(radii)
    if len(wanted) < 2 or list(wanted) != list(range(len(wanted))):
        raise CertdpError(f"radii: found {radii!r}; a comparison needs radii without gaps, like 0..16")
    each = lengths(frequencies)
    methods = [
        Method(name.strip(), F, stride if stride is None or stride <= F else F, solver, tau, force)
        for name in backends.split(",")
        for F in ([each] if isinstance(each, int) else each)
    ]
    try:
        with progress_bar("comparing") as update:
            found = compare(
                graph, facts, table.features, table.targets, wanted, methods, output, threads=threads, limit=limit,
                retrainings=retrainings, resume=resume, progress=lambda name, done, total: update(done, total, name),
            )  # fmt: skip
    except KeyboardInterrupt:
        err.print(f"certdp: interrupted; {output} keeps what is done, add --resume to go on")
        raise typer.Exit(130) from None
    slots = facts.batches.slots or len(table.features)
    public = np.sum(np.subtract(*reach(graph, facts, slots)[::-1]))
    rows = [_row(cell, envelope, public, beta) for cell, envelope in zip(found.cells, found.envelopes, strict=True)]
    floor = _floor(found, public, beta) if retrainings else None
    result = {
        "private": True, "radii": list(found.radii), "beta": beta, "public_bound": float(public), "cells": rows,
        "attack": floor, "retrainings": found.retrainings,
    }  # fmt: skip
    write_atomically(output / "summary.json", json.dumps(result, indent=1).encode())
    plot = plot_comparison(result, output / "comparison.png")
    if as_json:
        print(json.dumps(result, indent=1))
        return
    out.print(_table(result))
    for row in rows:
        if row["note"]:
            out.print(f"{row['name']}: {row['note']}")
    out.print(f"written: {plot}, {output / 'summary.json'} and one envelope per row  {PRIVATE}")


def _row(cell, envelope, public: float, beta: float) -> dict:
    row = {
        "name": cell.name, "backend": cell.method.backend, "F": cell.method.F, "stride": cell.method.stride,
        "status": cell.status, "note": cell.note, "seconds": round(cell.seconds, 3), "bytes": cell.bytes,
    }  # fmt: skip
    if envelope is None:
        return row
    lower, upper = envelope.stacked()
    promise = envelope.metadata.capabilities
    return row | {
        "widths": (upper - lower).mean(axis=1).tolist(),
        **_smooth(lower, upper, public, beta, envelope.stacked_difference()),
        "rigour": promise.rigour,
        "sound": promise.sound,
        "monotone": promise.monotone,
        "tau": promise.tau,
    }


def _smooth(lower: np.ndarray, upper: np.ndarray, public: float, beta: float, difference=None) -> dict:
    """Smooth bound of the l1 sensitivity of all parameters, with the certificate ``(K, C, P)`` where there is one.

    ``tail``: the public bound beyond the last radius decides it.
    """
    from privacy.smooth import smooth_bound

    cross = sensitivities(lower, upper, difference).sum(axis=2).max(axis=1, keepdims=True)
    bound = float(smooth_bound(cross, public, beta)[0])
    return {"smooth_sensitivity": bound, "tail": bool(bound <= public * np.exp(-beta * len(cross)) * (1.0 + 1e-6))}


def _floor(found, public: float, beta: float) -> dict:
    """What attacks reach: a floor for every box, not for a relational certificate."""
    lower, upper = found.reached_lower, found.reached_upper
    return {
        "widths": (upper - lower).mean(axis=1).tolist(),
        **_smooth(lower, upper, public, beta),
    }


def _table(result: dict) -> RichTable:
    first, last = result["radii"][1], result["radii"][-1]
    table = RichTable(title="bounding backends", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("backend", no_wrap=True)
    table.add_column("F", no_wrap=True, justify="right")
    for name in (f"width k={first}", f"k={last}", f"S(β={result['beta']:g})", "time", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rigour", no_wrap=True)
    for row in result["cells"]:
        moved = f" by {row['stride']}" if row["stride"] else ""
        head = (row["backend"], "default" if row["F"] is None else f"{row['F']}{moved}")
        time = f"{row['seconds']:.1f} s"
        if "widths" not in row:
            table.add_row(*head, "", "", "", time, "", f"[red]{row['status']}[/]")
            continue
        rigour = row["rigour"] if row["monotone"] else "[red]not (M)[/]"
        table.add_row(
            *head, f"{row['widths'][1]:.4g}", f"{row['widths'][-1]:.4g}", _number(row), time,
            f"{row['bytes'] / 2**20:.0f}", rigour,
        )  # fmt: skip
    if result["attack"]:
        widths = result["attack"]["widths"]
        found = _number(result["attack"])
        note = f"{result['retrainings']} runs"
        table.add_row("attack", "", f"{widths[1]:.4g}", f"{widths[-1]:.4g}", found, "", "", note)
    if any(row.get("tail") for row in result["cells"]):
        table.caption = "* the public bound beyond the last radius decides: certify more radii, or take a larger beta"
        table.caption_justify = "left"
    return table


def _number(row: dict) -> str:
    return f"{row['smooth_sensitivity']:.4g}" + ("*" if row["tail"] else " ")
