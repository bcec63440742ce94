"""``--radii auto``: the dense smooth bound at given public inputs without computing every radius (THEORY section 3)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from certify._siblings import require
from certify.driver import run
from certify.envelope import Envelope
from certify.errors import PrivacyError
from certify.recipe import Recipe
from models.ir import Graph
from privacy.dense import dense_maximum
from privacy.query import Query
from privacy.smooth import check_beta, cross_ranges

require("solvers")

from solvers import BACKENDS  # noqa: E402


def certify_on_demand(
    graph: Graph,
    recipe: Recipe,
    features: np.ndarray,
    targets: np.ndarray,
    beta: float | Sequence[float],
    queries: np.ndarray,
    *,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    **options,
) -> Envelope:
    """An envelope with the radii that decide the smooth bound of the predictions at ``queries``, and no others.

    The dense family ``max_k exp(-beta k) min(A_k, G)`` over *all* radii is evaluated by branch and bound; what it
    skips provably cannot attain the maximum, so the value is the dense one and smooth.  ``beta``: one or several
    public smoothings; they are recorded, and predictions from this envelope use exactly these.
    ``queries``: public inputs ``(M, F)`` in table units.  ``options``: those of `certify.driver.run`.
    Which radii were computed depends on the data and is private, as is the running time.

    Guarantee: the smooth bound from this envelope equals that of the envelope with every radius.
    Raises PrivacyError for a beta that is not above 0, and for a backend whose box of one radius depends on which
    others are computed.
    """
    if BACKENDS[options.get("backend", "ibp")].relational:
        raise PrivacyError(
            "radii: auto picks radii by the data, but this backend's box of one radius depends on the others; "
            "certify radii 0..K, or choose the backend meanvalue or ibp"
        )
    options["relational"] = False  # the dense bound is one of cross ranges
    betas = tuple(check_beta(b) for b in np.atleast_1d(beta))
    if not all(betas):
        raise PrivacyError("beta: found 0, for which every bound is the public one; give a number above 0")
    parts: list[Envelope] = []
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # radius -> clipped bounds (M * O,)
    ceiling: np.ndarray | None = None

    def compute(radii: list[int]) -> None:
        nonlocal ceiling
        note = f"radii {', '.join(map(str, radii))} ({len(found)} known)"
        saved = None if checkpoint is None else _own(Path(checkpoint), radii)
        envelope = run(
            graph, recipe, features, targets, radii, checkpoint=saved,
            resume=resume and saved is not None and saved.exists(),
            progress=None if progress is None else lambda done, total, _: progress(done, total, note),
            **options,
        )  # fmt: skip
        parts.append(envelope)
        query = Query.make(envelope, graph)
        rows = query.prepare(queries)
        lower, upper = (np.clip(side, *query.output_range) for side in query.bounds(rows))
        for j, k in enumerate(envelope.radii):
            found[k] = lower[j].ravel(), upper[j].ravel()
        if ceiling is None:
            ceiling = query.ceiling(rows).ravel()

    slots = recipe.batches.slots or len(features)

    def evaluate(ks: list[int]) -> dict[int, np.ndarray]:
        # Beyond the number of slots nothing grows: radius N + 1 is radius N.
        pairs = {k: (min(k, slots), min(k + 1, slots)) for k in ks}
        missing = sorted({r for pair in pairs.values() for r in pair} - set(found))
        if missing:
            compute(missing)
        answer = {}
        for k, (a, b) in pairs.items():
            lower, upper = np.stack([found[a][0], found[b][0]]), np.stack([found[a][1], found[b][1]])
            answer[k] = cross_ranges(lower, upper)[0]
        return answer

    evaluate([0])
    for b in betas:
        dense_maximum(evaluate, ceiling, b, slots)
    digest = hashlib.sha256(np.ascontiguousarray(queries, dtype="<f8").tobytes()).hexdigest()
    return _merged(parts, {"beta": betas[0] if len(betas) == 1 else list(betas), "queries_sha256": digest})


def _own(checkpoint: Path, radii: list[int]) -> Path:
    """The checkpoint of one batch of radii; finished batches keep theirs until the whole is done."""
    label = hashlib.sha256(str(radii).encode()).hexdigest()[:12]
    return checkpoint.with_name(f"{checkpoint.name.removesuffix('.safetensors')}.{label}.safetensors")


def _merged(parts: list[Envelope], auto: dict) -> Envelope:
    """One envelope with the radii of all parts; their nominal runs agree."""
    first = parts[0]
    for part in parts[1:]:
        if any((part.nominal[name] != first.nominal[name]).any() for name in first.nominal):
            raise PrivacyError("radii: two runs of the same recipe gave different nominal parameters; report this")
    radii = sorted({k for part in parts for k in part.radii})
    home = {k: next(part for part in parts if k in part.radii) for k in radii}
    history = None
    if all(part.history is not None for part in parts):
        columns = [home[k].history[:, home[k].radii.index(k)] for k in radii]
        history = np.stack(columns, axis=1)
    seconds = sum(part.metadata.wall_time_s or 0.0 for part in parts)
    metadata = replace(
        first.metadata, radii=tuple(radii), auto=auto, wall_time_s=round(seconds, 3), content_sha256=None
    )
    return Envelope(
        metadata,
        first.nominal,
        {k: home[k].lower[k] for k in radii},
        {k: home[k].upper[k] for k in radii},
        history,
    )

