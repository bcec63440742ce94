"""``certdp predict``: private predictions from an envelope."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from certify.cli.console import out
from certify.envelope import read, write_atomically
from certify.errors import EnvelopeError


def command(
    envelope: Annotated[Path, typer.Argument(help="Envelope file (private).")],
    model: Annotated[Path, typer.Option(help="The ONNX file the envelope was made from.")],
    data: Annotated[Path, typer.Option(help="Public inputs to predict for, one row each.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget of the whole file (see --per-query).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="CSV to write; may be published.")],
    delta: Annotated[float, typer.Option(help="With delta > 0 Laplace noise is used, else Cauchy.")] = 0.0,
    per_query: Annotated[
        bool, typer.Option("--per-query", help="(epsilon, delta) is spent on every distinct row, not on all together.")
    ] = False,
    noise: Annotated[str | None, typer.Option(help="Noise family: cauchy or laplace; default by delta.")] = None,
    output_name: Annotated[str | None, typer.Option(help="Which of the model's outputs to use.")] = None,
) -> None:
    """Release private predictions; the CSV and the guarantee beside it are safe to publish."""
    from certify.tables import read_table, write_predictions
    from models import digest
    from models import read as read_model
    from privacy.query import Query, predict

    certified = read(envelope)
    expected = certified.metadata.model_sha256
    if expected is not None and digest(model) != expected:
        raise EnvelopeError(
            f"{model}: is not the file that {envelope} was made from (their digests differ); give that ONNX file"
        )
    query = Query.make(certified, read_model(model, output=output_name))
    table = read_table(data, None, query.feature_names)
    release = predict(certified, query, table.features, epsilon, delta, per_query=per_query, family=noise)
    names = query.target_names
    write_predictions(output, {name: release.values[:, j] for j, name in enumerate(names)})
    guarantee = {**asdict(release.guarantee), "inputs": data.name}
    beside = output.with_suffix(".guarantee.json")
    write_atomically(beside, (json.dumps(guarantee, indent=2) + "\n").encode())
    _show(release, names, output, beside)


def _show(release, names, output: Path, beside: Path) -> None:
    table = RichTable(title="private predictions (first rows)", title_justify="left")
    table.add_column("row", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for i, row in enumerate(release.values[:10]):
        table.add_row(str(i), *(f"{v:.5g}" for v in row))
    g = release.guarantee
    out.print(table)
    cost = f"epsilon = {g.epsilon:g}" + (f", delta = {g.delta:g}" if g.delta else "")
    out.print(
        f"[bold]cost[/]       {cost} in all ({g.releases} releases at epsilon = {g.epsilon_per_release:.4g} each), "
        f"adjacency {g.adjacency}\n"
        f"[bold]mechanism[/]  {g.mechanism}\n"
        f"[bold]written[/]    {output} and {beside}; both may be published.\n"
        "Every run of this command on the same data costs its budget again: add the costs up."
    )
