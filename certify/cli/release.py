"""``certdp release``: private learning. From a model, a recipe and a table to a private ONNX model."""

from __future__ import annotations

import base64
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer
from rich.panel import Panel
from rich.table import Table as RichTable

from certify.cli.console import err, out, progress_bar
from certify.cli.inputs import read_inputs
from certify.cli.method import Backend, Force, Frequency, Relational, Solver, Stride, Tau, method
from certify.errors import CertdpError, RadiusError


def command(
    model: Annotated[Path, typer.Argument(help="ONNX file; training starts at its weights, which are public.")],
    data: Annotated[Path, typer.Option(help="Table of records: .csv, .csv.gz, .parquet or .npz (private).")],
    recipe: Annotated[Path, typer.Option(help="Recipe in TOML: every public fact of the training run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Private ONNX model to write; may be published.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Budget of the whole run, shared equally by its releases.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Delta of the whole run, shared equally.")] = 0.0,
    steps: Annotated[
        str | None, typer.Option(help="Release after these steps, with commas; the last is the end of training.")
    ] = None,
    epsilons: Annotated[str | None, typer.Option(help="One epsilon per release, instead of --epsilon.")] = None,
    deltas: Annotated[str | None, typer.Option(help="One delta per release, instead of --delta.")] = None,
    radii: Annotated[str, typer.Option(help="Radii 0..K to certify in each window, fixed in advance.")] = "0..16",
    noise: Annotated[str | None, typer.Option(help="Noise family; default by a public rule.")] = None,
    beta: Annotated[list[float] | None, typer.Option(help="Public smoothing; may be repeated.")] = None,
    box_lower: Annotated[float | None, typer.Option(help="Public lower end of every released parameter.")] = None,
    box_upper: Annotated[float | None, typer.Option(help="Public upper end of every released parameter.")] = None,
    target: Annotated[str | None, typer.Option(help="Target column(s); overrides the recipe.")] = None,
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
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run; nothing is drawn twice.")] = False,
    output_name: Annotated[str | None, typer.Option(help="Which of the model's outputs to use.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger that pays, see `certdp budget` (private).")] = None,
    budget: Annotated[str | None, typer.Option(help="Name of the budget in the ledger.")] = None,
) -> None:
    """Train privately: release the parameters at public steps, and write a private ONNX model."""
    from certify.driver import parse_radii
    from certify.envelope import write_atomically
    from models import digest
    from privacy.ags import AgsPlan, release_parameters
    from privacy.ledgered import paid

    if output.parent != Path() and not output.parent.is_dir():
        raise CertdpError(f"{output}: the folder {output.parent} does not exist; create it or give another path")
    if (epsilon is None) == (epsilons is None):
        raise CertdpError("epsilon: give either --epsilon for the whole run or --epsilons, one for each release")
    wanted = parse_radii(radii)
    if list(wanted) != list(range(len(wanted))):
        raise RadiusError(f"radii: found {radii!r}; a release needs radii without gaps, like 0..16")
    facts, table, graph = read_inputs(model, data, recipe, target, output_name)
    slots = facts.batches.slots or len(table.features)
    plan = AgsPlan.make(
        _numbers(steps, "steps", int) if steps else [facts.total_steps(slots)],
        _numbers(epsilons, "epsilons") if epsilons else epsilon,
        _numbers(deltas, "deltas") if deltas else delta,
        len(wanted) - 1,
        family=noise,
        betas=tuple(beta) if beta else None,
        lower=box_lower,
        upper=box_upper,
    )
    options = method(
        frequency, backend=backend, stride=stride, solver=solver, tau=tau, force=force, relational=relational
    )
    state = output.with_name(output.name + ".run.safetensors")

    def learn() -> dict:
        with progress_bar("learning privately") as update:
            private = release_parameters(
                graph, facts, table.features, table.targets, plan, model=model, output=output_name,
                threads=threads, state=state, resume=resume, progress=update, **options,
            )  # fmt: skip
        onnx = base64.b64encode(private.onnx).decode()
        return {"onnx": onnx, "size": int(private.theta.size), "guarantee": asdict(private.guarantee)}

    public = {"what": "parameters", "model": digest(model), "output": output_name, "recipe": facts.to_dict(),
              "plan": repr(plan), "method": options}  # fmt: skip
    try:
        answer = paid(
            ledger, budget, public, plan.epsilons, plan.deltas, facts.privacy.adjacency, "private model", learn
        )
    except KeyboardInterrupt:
        err.print(f"certdp: interrupted; {state.name} keeps what was released, add --resume to go on")
        raise typer.Exit(130) from None
    write_atomically(output, base64.b64decode(answer["onnx"]))
    for leftover in [state, *state.parent.glob(state.name + ".window-*")]:
        leftover.unlink(missing_ok=True)
    out.print(_summary(SimpleNamespace(**answer["guarantee"]), answer["size"], model, data, output))


def _numbers(text: str, name: str, kind=float) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise CertdpError(f"{name}: found {text!r}; numbers with commas are accepted") from None


def _summary(g, size: int, model: Path, data: Path, output: Path) -> Panel:
    """What was released, what it cost, what it means. Public facts only: neither scales nor widths."""
    lines = RichTable.grid(padding=(0, 2))
    cost = f"epsilon = {g.epsilon:g}" + (f", delta = {g.delta:g}" if g.delta else "")
    lost = f", {g.lost} of them lost when the run was interrupted" if g.lost else ""
    releases = len(g.steps) + g.lost
    same = f"{g.adjacency}; {g.slots} slots, batches and recipe are public and fixed"
    for key, value in [
        ("model", f"{model.name}, trained on {data.name}"),
        ("cost", f"{cost} in all, {releases} release(s){lost}"),
        ("released", f"{size} parameters after step(s) {', '.join(map(str, g.steps))}"),
        ("adjacency", same),
        ("mechanism", g.mechanism),
        ("written", f"{output}; may be published, the guarantee is in its metadata (certdp.*)"),
    ]:
        lines.add_row(f"[bold]{key}[/]", value)
    note = "Every further run on the same data costs its budget again: add the costs up."
    from rich.console import Group

    return Panel(Group(lines, "", note), title="private model", expand=False)
