"""``certdp audit``: retrain and certify again on neighbouring data sets, and check what privacy rests on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from certify.cli.console import PRIVATE, err, out, seconds
from certify.envelope import read, write_atomically
from certify.errors import CertdpError, EnvelopeError


def command(
    envelope: Annotated[Path, typer.Argument(help="Envelope file (private).")],
    model: Annotated[Path, typer.Option(help="The ONNX file the envelope was made from.")],
    data: Annotated[Path, typer.Option(help="The table of records it was made from (private).")],
    queries: Annotated[Path, typer.Option(help="Public inputs, one row each.")],
    epsilon: Annotated[float, typer.Option(help="Budget of all queries together that is to be checked.")],
    delta: Annotated[float, typer.Option(help="Probability budget beside epsilon; 0 for pure noise.")] = 0.0,
    noise: Annotated[str | None, typer.Option(help="Noise family, as for `certdp predict`.")] = None,
    joint: Annotated[
        bool | None, typer.Option("--joint/--separate", help="As for `certdp predict`: default by a public rule.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe; must agree with the one in the envelope.")] = None,
    neighbours: Annotated[int, typer.Option(min=1, help="Inputs to attack, two directions each.")] = 4,
    radius: Annotated[int, typer.Option(min=1, help="Neighbours in a row: how far from the data pairs are taken.")] = 1,
    retrainings: Annotated[int, typer.Option(min=1, help="Training runs of each attack.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed of the attack.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads.")] = 1,
    json_output: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON (private).")] = None,
    output_name: Annotated[str | None, typer.Option(help="Which of the model's outputs to use.")] = None,
) -> None:
    """Attack the data, retrain and certify again, check every condition.  Private; exit code 2 on a violation."""
    from certify.driver import prepare
    from certify.recipe import from_dict, load
    from certify.tables import read_table
    from models import digest
    from models import read as read_model
    from privacy import audit
    from privacy.query import Query

    started = time.monotonic()
    certified = read(envelope)
    metadata = certified.metadata
    if metadata.model_sha256 is not None and digest(model) != metadata.model_sha256:
        raise EnvelopeError(
            f"{model}: is not the file that {envelope} was made from (their digests differ); give that ONNX file"
        )
    if metadata.recipe is None:
        raise EnvelopeError(f"{envelope}: holds no recipe, so training cannot be repeated; certify with this program")
    facts = from_dict(metadata.recipe, "envelope: recipe")
    if recipe is not None and (other := _difference(load(recipe).to_dict(), facts.to_dict())):
        raise EnvelopeError(f"{recipe}: {other} is not that of {envelope}; give the recipe it was made with")
    graph = read_model(model, output=output_name)
    query = Query.make(certified, graph)
    table = read_table(data, facts.target.names, facts.features.names)
    if table.targets is None:
        raise CertdpError(f"{data}: holds no target; give the table that {envelope} was made from")
    problem = prepare(graph, facts, table.features, table.targets)
    inputs = read_table(queries, None, query.feature_names).features
    options = {
        "backend": metadata.backend,
        "F": metadata.concretisation,
        "stride": metadata.stride,
        "solver": metadata.solver or "highs",
        "tau": metadata.capabilities.tau or None,
        "threads": threads,
    }
    again = audit.certify_problem(problem, (0, 1), **options)
    if any((again.nominal[name] != value).any() for name, value in certified.nominal.items()):
        raise EnvelopeError(f"{data}: training on it does not give the parameters of {envelope}; give its own table")
    err.print(f"retrained in {seconds(time.monotonic() - started)}; looking for neighbours", soft_wrap=True)
    pairs = audit.worst_neighbours(
        problem, inputs, radius=radius, retrainings=retrainings, most=neighbours, seed=seed
    )
    if not pairs:
        raise CertdpError(f"{data}: the attack found no neighbour that moves a prediction; add --retrainings")
    err.print(f"certifying {len(pairs)} pairs", soft_wrap=True)
    auto, stored = metadata.auto, set(certified.radii)
    # Radii picked on demand are not contiguous: audit the dense rule up to the first gap.
    radii = range(next(k for k in range(len(certified.radii) + 1) if k not in stored))
    rule = {"joint": joint} if auto is None else {"joint": False, "betas": np.atleast_1d(auto["beta"]).tolist()}
    report = audit.audit_pairs(pairs, inputs, epsilon, delta, noise, radii=radii, **rule, **options)
    if json_output is not None:
        write_atomically(json_output, report.to_json().encode())
    out.print(report.table())
    verdict = "[green]no violation found[/]" if report.passed else "[bold red]VIOLATION: do not release[/]"
    out.print(f"[bold]result[/]     {verdict} ({seconds(time.monotonic() - started)})")
    out.print("An audit refutes, it does not prove: it covers the pairs that were tried.", soft_wrap=True)
    if auto is not None:
        out.print(
            f"The envelope's radii were chosen on demand. Audited were the radii 0..{report.radii} of every data set, "
            "not the ones that would be chosen on it.",
            soft_wrap=True,
        )
    out.print(PRIVATE, soft_wrap=True)
    if not report.passed:
        raise typer.Exit(2)


def _difference(given: dict, wanted: dict) -> str | None:
    """The first section in which two recipes differ; column names may have been filled in by `certify`."""
    for section in wanted:
        one, two = (dict(x) if isinstance(x, dict) else x for x in (given.get(section), wanted[section]))
        if isinstance(one, dict) and isinstance(two, dict) and one.get("names") is None:
            one.pop("names", None)
            two.pop("names", None)
        if one != two:
            return section
    return None
