"""``certdp predict``: private predictions from an envelope."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import typer
from rich.table import Table as RichTable

from certify.cli.console import err, out
from certify.envelope import content_digest, read, write_atomically
from certify.errors import EnvelopeError

_ADD_UP = (
    "Every run of this command on the same data costs its budget again: add the costs up, or let a ledger do it "
    "(`certdp budget`, --ledger)."
)

#: Typical noise, in widths of the public output range, from which on a number tells nothing.
_DROWNED = 0.5
_HINT = (
    "certdp: hint: whatever the records, the typical noise of every number is at least {} times its public output "
    "range (epsilon, delta, the number of questions and of radii allow no less); certify more radii, ask fewer "
    "questions of one budget, or raise epsilon; `certdp inspect --model --data` shows what one record can move"
)


def command(
    envelope: Annotated[Path, typer.Argument(help="Envelope file (private).")],
    model: Annotated[Path, typer.Option(help="The ONNX file the envelope was made from.")],
    data: Annotated[Path, typer.Option(help="Public inputs to predict for, one row each.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget of the whole file (see --per-query).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="CSV to write; may be published.")],
    delta: Annotated[float, typer.Option(help="Probability budget beside epsilon; 0 for pure noise.")] = 0.0,
    per_query: Annotated[
        bool, typer.Option("--per-query", help="(epsilon, delta) is spent on every distinct row, not on all together.")
    ] = False,
    noise: Annotated[str | None, typer.Option(help="Noise family; default by a public rule.")] = None,
    joint: Annotated[
        bool | None,
        typer.Option("--joint/--separate", help="One release of all numbers, or each on its own; default by a rule."),
    ] = None,
    classify: Annotated[bool, typer.Option("--classify", help="Release labels: argmax of the outputs.")] = False,
    threshold: Annotated[
        float, typer.Option(help="With --classify and one output: label 1 above it, in model units (logit).")
    ] = 0.0,
    output_name: Annotated[str | None, typer.Option(help="Which of the model's outputs to use.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger that pays, see `certdp budget` (private).")] = None,
    budget: Annotated[str | None, typer.Option(help="Name of the budget in the ledger.")] = None,
) -> None:
    """Release private predictions; the CSV and the guarantee beside it are safe to publish."""
    from certify.tables import read_table, write_predictions
    from models import digest
    from models import read as read_model
    from privacy.ledgered import paid, release_from
    from privacy.query import Query, noise_floor

    certified = read(envelope)
    expected = certified.metadata.model_sha256
    if expected is not None and digest(model) != expected:
        raise EnvelopeError(
            f"{model}: is not the file that {envelope} was made from (their digests differ); give that ONNX file"
        )
    graph = read_model(model, output=output_name)
    options = {"per_query": per_query, "family": noise, "joint": joint}
    if classify:
        from privacy.classification import classify as release_labels

        query = Query.make(certified, graph, (-math.inf, math.inf))
        table = read_table(data, None, query.feature_names)
        rows = np.unique(query.prepare(table.features) + 0.0, axis=0)
        copies = len(rows) if per_query else 1

        def draw() -> dict:
            found = release_labels(certified, query, table.features, epsilon, delta, threshold=threshold, **options)
            labels, scores = found.labels.tolist(), found.scores.T.tolist()
            return {"labels": labels, "scores": scores, "guarantee": asdict(found.guarantee)}

        facts = {"what": "labels", "envelope": content_digest(certified), "cost": [epsilon, delta], "options": options,
                 "threshold": threshold, "inputs": hashlib.sha256(table.features.tobytes()).hexdigest()}  # fmt: skip
        answer = paid(
            ledger, budget, facts, [epsilon] * copies, [delta] * copies, certified.metadata.adjacency, "labels", draw
        )
        names = ["score"] if len(answer["scores"]) == 1 else [f"score_{c}" for c in range(len(answer["scores"]))]
        columns = {"label": np.array(answer["labels"])}
        columns |= {n: np.array(c) for n, c in zip(names, answer["scores"], strict=True)}
        guarantee = SimpleNamespace(**answer["guarantee"])
    else:
        query = Query.make(certified, graph)
        table = read_table(data, None, query.feature_names)
        least = float(noise_floor(query, table.features, epsilon, delta, **options).min())
        if least > _DROWNED:
            err.print(_HINT.format(f"{least:.2g}"), soft_wrap=True)
        release = release_from(ledger, budget, certified, query, table.features, epsilon, delta, **options)
        columns = dict(zip(query.target_names, release.values.T, strict=True))
        guarantee = release.guarantee
    write_predictions(output, columns)
    facts = vars(guarantee) if isinstance(guarantee, SimpleNamespace) else asdict(guarantee)
    beside = output.with_suffix(".guarantee.json")
    write_atomically(beside, (json.dumps({**facts, "inputs": data.name}, indent=2) + "\n").encode())
    _show(columns, guarantee, output, beside)


def _show(columns, g, output: Path, beside: Path) -> None:
    table = RichTable(title="private predictions (first rows)", title_justify="left")
    table.add_column("row", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    for i, row in enumerate(zip(*(column[:10] for column in columns.values()), strict=True)):
        table.add_row(str(i), *(f"{v:.5g}" for v in row))
    out.print(table)
    cost = f"epsilon = {g.epsilon:g}" + (f", delta = {g.delta:g}" if g.delta else "")
    each = "release" if g.releases == 1 else "releases"
    each += f" of {g.dimension} numbers" if g.dimension > 1 else ""
    out.print(
        f"[bold]cost[/]       {cost} in all ({g.releases} {each} at epsilon = {g.epsilon_per_release:.4g} each), "
        f"adjacency {g.adjacency}\n"
        f"[bold]mechanism[/]  {g.mechanism}\n"
        f"[bold]written[/]    {output} and {beside}; both may be published.\n"
        + getattr(g, "note", _ADD_UP)
    )
