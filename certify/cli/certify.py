"""``certdp certify``: from a model, a recipe and a table to an envelope."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.panel import Panel
from rich.table import Table as RichTable

from certify.cli.console import PRIVATE, err, out, progress_bar, seconds
from certify.cli.inputs import read_inputs
from certify.cli.method import Backend, Force, Frequency, Relational, Solver, Stride, Tau, method
from certify.envelope import SUFFIX, Envelope, write
from certify.errors import CertdpError


def command(
    model: Annotated[Path, typer.Argument(help="ONNX file of the regressor; training starts at its weights.")],
    data: Annotated[Path, typer.Option(help="Table of records: .csv, .csv.gz, .parquet or .npz (private).")],
    recipe: Annotated[Path, typer.Option(help="Recipe in TOML: every public fact of the training run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help=f"Envelope to write, ending in {SUFFIX} (private).")],
    target: Annotated[
        str | None, typer.Option(help="Target column, or several with commas; overrides the recipe.")
    ] = None,
    radii: Annotated[
        str, typer.Option(help="Radii: 0..28, or 0,1,2; 'auto' evaluates on demand (needs --beta and --queries).")
    ] = "0..16",
    beta: Annotated[
        list[float] | None, typer.Option(help="Smoothing to certify for with --radii auto; may be repeated.")
    ] = None,
    queries: Annotated[
        Path | None, typer.Option(help="Public inputs the envelope is wanted for, with --radii auto.")
    ] = None,
    backend: Backend = "ibp",
    frequency: Frequency = None,
    stride: Stride = None,
    solver: Solver = "highs",
    tau: Tau = None,
    force: Force = False,
    relational: Relational = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; default all cores.  Results do not change.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint beside the output.")] = False,
    output_name: Annotated[str | None, typer.Option(help="Which of the model's outputs to use.")] = None,
    data_key: Annotated[
        Path | None, typer.Option(help="File with a secret key; stores a keyed digest of the data in the envelope.")
    ] = None,
) -> None:
    """Bound training on every neighbouring data set and write an envelope."""
    from certify.driver import parse_radii, run
    from certify.tables import read_table
    from models import digest

    if not output.name.endswith(SUFFIX):
        raise CertdpError(f"{output}: the name of an envelope ends in {SUFFIX}; add the suffix")
    if output.parent != Path() and not output.parent.is_dir():
        raise CertdpError(f"{output}: the folder {output.parent} does not exist; create it or give another path")
    if output.is_dir():
        raise CertdpError(f"{output}: found a folder of this name; give the path of a file")
    facts, table, graph = read_inputs(model, data, recipe, target, output_name)
    how = {"backend": backend, "stride": stride, "solver": solver, "tau": tau, "force": force, "relational": relational}
    options = {
        **method(frequency, **how),
        "threads": threads,
        "resume": resume,
        "model_sha256": digest(model),
        "data_key": data_key.read_bytes() if data_key else None,
    }
    checkpoint = output.with_name(output.name.removesuffix(SUFFIX) + ".checkpoint.safetensors")
    try:
        with progress_bar("certifying") as update:
            if radii.strip() == "auto":
                from privacy.on_demand import certify_on_demand

                if not beta or queries is None:
                    raise CertdpError("radii: auto needs --beta and --queries, the public inputs to certify for")
                inputs = read_table(queries, None, facts.features.names or table.feature_names).features
                envelope = certify_on_demand(
                    graph, facts, table.features, table.targets, beta, inputs,
                    checkpoint=checkpoint, progress=update, **options,
                )  # fmt: skip
            else:
                envelope = run(
                    graph, facts, table.features, table.targets, parse_radii(radii), checkpoint=checkpoint,
                    progress=lambda done, total, boxes: update(done, total, _note(boxes)), **options,
                )  # fmt: skip
    except KeyboardInterrupt:
        left = f"; {checkpoint} keeps the state, add --resume to go on" if checkpoint.exists() else ""
        err.print(f"certdp: interrupted{left}")
        raise typer.Exit(130) from None
    write(output, envelope)
    for leftover in checkpoint.parent.glob(checkpoint.name.removesuffix(".safetensors") + "*.safetensors"):
        leftover.unlink()
    out.print(summary(envelope, model, data, output))


def _note(boxes) -> str:
    return f"mean width {boxes.width[-1]:.3g}" if len(boxes.lower) else ""


def widths_table(envelope: Envelope, most: int = 12) -> RichTable:
    """Widths of the boxes by radius; long lists are thinned."""
    lower, upper = envelope.stacked()
    shown = range(len(envelope.radii))
    if len(shown) > most:
        shown = sorted({0, 1, *(int(i) for i in np.linspace(2, len(envelope.radii) - 1, most - 2))})
    table = RichTable(title="width of the parameter box", title_justify="left")
    for name in ("radius", "mean", "median", "largest", "sum"):
        table.add_column(name, justify="right")
    for j in shown:
        width = upper[j] - lower[j]
        numbers = (width.mean(), np.median(width), width.max(), width.sum())
        table.add_row(str(envelope.radii[j]), *(f"{x:.4g}" for x in numbers))
    return table


def radii_text(radii: tuple[int, ...]) -> str:
    """Contiguous radii as a range, others as a list."""
    if list(radii) == list(range(radii[0], radii[-1] + 1)) and len(radii) > 2:
        return f"{radii[0]}..{radii[-1]}"
    return ", ".join(map(str, radii))


def _lengths(metadata) -> str:
    f = metadata.concretisation
    if isinstance(f, int):
        moved = f", moved on by {metadata.stride}" if metadata.stride else ""
        return ("1 step" if f == 1 else f"{f} steps") + moved
    return f"{', '.join(map(str, f))} steps"


def statements(envelope: Envelope) -> list[tuple[str, str]]:
    """What the envelope says, for people."""
    m = envelope.metadata
    size = sum(int(np.prod(p.shape)) for p in m.parameters)
    same = {
        "replace-one": "one slot differs: any record, or none, on either side",
        "zero-out": "one slot is emptied or filled",
    }
    promises = [
        "sound" if m.capabilities.sound else "[red]not sound[/]",
        "monotone across neighbours" if m.capabilities.monotone else "[red]not monotone[/]: no private release",
        m.capabilities.rigour,
    ]
    return [
        ("certified", f"{size} parameters in {len(m.parameters)} tensors after {m.steps} steps"),
        ("for every data set", f"that differs in up to k of {m.slots} slots, k = {radii_text(m.radii)}"),
        ("adjacency", f"{m.adjacency} ({same[m.adjacency]}); slots and batches are public and fixed"),
        ("bounds", f"{m.backend}, {m.capabilities.products} products, windows of {_lengths(m)}; {', '.join(promises)}"),
    ]


def summary(envelope: Envelope, model: Path, data: Path, output: Path) -> Panel:
    """The closing statement: what was certified, under which adjacency, how wide, how long, and that it is private."""
    from rich.console import Group

    lines = RichTable.grid(padding=(0, 2))
    for key, value in [
        ("model", f"{model.name}, trained on {data.name}"),
        *statements(envelope),
        ("time", seconds(envelope.metadata.wall_time_s or 0.0)),
        ("written", f"{output}  {PRIVATE}"),
    ]:
        lines.add_row(f"[bold]{key}[/]", value)
    return Panel(Group(lines, "", widths_table(envelope)), title="certified", expand=False)
