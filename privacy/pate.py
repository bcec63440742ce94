"""Aggregation over public disjoint shards: PATE-R (global sensitivity) and PATE-AGT-R (smooth bounds).

The `N` slots are cut by index into `T` public shards, each trains a teacher, and the mean of the teachers' predictions
is released. A record lies in one shard, so it moves one teacher. Teacher outputs are clipped to the public range of
width `R` before they are averaged.

* PATE-R: the mean moves by at most `R / T`; Laplace noise of that sensitivity.
* PATE-AGT-R: if `S_i` is a beta-smooth bound for teacher `i`, with the same beta and the same ceiling `G` in all
  shards, then `max_i S_i / T` is one for the mean: the mean moves by at most `S_i / T` for the shard `i` that differs,
  and a maximum of beta-smooth functions is beta-smooth. (The mean of the `S_i` over `T` is smooth but no bound.)

Source: Ghitu & Wicker, section IV-C, with the corrections of docs/privacy.md. `T`, the shards, the range and the budget
are PUBLIC; teacher outputs, bounds and smooth bounds are PRIVATE. Shards are public: they amplify nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from certify.errors import PrivacyError
from privacy import sampling, smooth
from privacy.agtr import require_capabilities
from privacy.baselines import BaselineGuarantee, BaselineRelease
from privacy.noise import admissible_pairs, make_family, noise_scale, split_budget


def shard_slots(slots: int, shards: int) -> tuple[np.ndarray, ...]:
    """`shards` disjoint runs of slot indices, as equal as possible; depends on public numbers only."""
    if not 1 <= shards <= slots:
        raise PrivacyError(f"shards: found {shards} for {slots} slots; choose between 1 and the number of slots")
    return tuple(np.array_split(np.arange(slots), shards))


def exact_mean(outputs: np.ndarray) -> list[Fraction]:
    """Mean over the first axis (shards) of each entry, without rounding: a rounded sum has another sensitivity."""
    return [sum(map(Fraction, column)) / len(column) for column in outputs.reshape(len(outputs), -1).T.tolist()]


def pate_release(
    outputs: np.ndarray, output_range, epsilon: float, *, adjacency: str = "replace-one", bits=None
) -> BaselineRelease:
    """PATE-R: the mean of the teachers' clipped outputs, Laplace noise of sensitivity `R / T` in every entry.

    `outputs`: PRIVATE float (T, M, O). `output_range`: public (low, high), each a number or one per output. `epsilon`:
    of the whole call, in equal shares over the `M O` entries. Returns values (M, O).

    Guarantees:
    * one record moves one teacher: the released mean has sensitivity `R / T`;
    * pate release is epsilon dp.
    """
    outputs, low, high = _clipped(outputs, output_range)
    teachers, shape = len(outputs), outputs.shape[1:]
    share = Fraction(split_budget(epsilon, int(np.prod(shape))))
    if not share > 0:
        raise PrivacyError(f"epsilon: {epsilon!r} leaves no budget for a query; raise it")
    bits = sampling.SecureBits() if bits is None else bits
    values, scales = np.empty(shape), []
    for at, mean in zip(np.ndindex(shape), exact_mean(outputs), strict=True):
        j = at[-1]
        scale = (Fraction(high[j]) - Fraction(low[j])) / teachers / share
        scales.append(float(scale))
        grid = sampling.public_grid(low[j], high[j])
        values[at] = sampling.release(mean, scale, sampling.Laplace(bits), grid, (low[j], high[j]))
    width = float(max(high - low)) / teachers
    law = f"PATE-R: mean of {teachers} public shards, Laplace mechanism, basic composition"
    grid = max(sampling.public_grid(*ends) for ends in zip(low, high, strict=True))
    guarantee = BaselineGuarantee(float(epsilon), 0.0, adjacency, law, width, "l1", max(scales), grid)
    return BaselineRelease(values, guarantee)


def pate_smooth_bound(shard_bounds: Sequence[np.ndarray]) -> np.ndarray:
    """`max_i S_i / T`, rounded up: a smooth bound for the mean. One (M, O) per shard, all for the same beta and `G`.

    Guarantees (given those of `smooth.smooth_bound` for each shard):
    * shard maximum is at least local sensitivity of the mean;
    * shard maximum is smooth.
    """
    shard_bounds = np.asarray(shard_bounds, np.float64)
    if shard_bounds.ndim < 1 or not len(shard_bounds):
        raise PrivacyError("shard_bounds: found none; give one smooth bound per shard")
    return np.nextafter(shard_bounds.max(axis=0) / len(shard_bounds), np.inf)


def pate_agtr_scale(lower, upper, ceiling, pairs) -> tuple[dict[float, np.ndarray], np.ndarray]:
    """`({beta: max_i S_i / T}, noise scale)` of the mean, each (M, O), PRIVATE.

    `lower`, `upper`: float (T, K+1, M, O), clipped query bounds of every shard over radii 0..K. `ceiling`: public `G`,
    the same for all shards, broadcastable to (M, O). `pairs`: admissible pairs.
    """
    crosses = [smooth.cross_ranges(low, high) for low, high in zip(lower, upper, strict=True)]
    by_beta = {
        pair.beta: pate_smooth_bound([smooth.smooth_bound(cross, ceiling, pair.beta) for cross in crosses])
        for pair in pairs
    }
    return by_beta, noise_scale(by_beta, pairs)


def pate_agtr_release(
    nominal,
    lower,
    upper,
    ceiling,
    output_range,
    epsilon: float,
    delta: float = 0.0,
    *,
    family: str | None = None,
    adjacency: str = "replace-one",
    bits=None,
) -> BaselineRelease:
    """PATE-AGT-R: the mean of the teachers' clipped outputs with noise for `max_i S_i / T`.

    `nominal`: (T, M, O); `lower`, `upper`: (T, K+1, M, O), bounds over envelopes of the shards that are sound and
    monotone, equal to `nominal` at radius 0; radii 0..K, the same for all. `ceiling`: public, at least the global
    sensitivity of every teacher, or None for the width of the range. (`epsilon`, `delta`): of the whole call.

    Guarantees:
    * pate agtr release is dp. The guarantee's sensitivity and scale are NaN: they are private here.
    """
    nominal, low, high = _clipped(nominal, output_range)
    lower, upper = (np.clip(np.asarray(x, np.float64), low, high) for x in (lower, upper))
    if not (lower.shape == upper.shape and lower.ndim == 4 and lower[:, 0].shape == nominal.shape):
        raise PrivacyError(
            f"bounds: nominal {nominal.shape}, lower {lower.shape} and upper {upper.shape} do not fit; "
            "give (T, M, O) and (T, K+1, M, O)"
        )
    if not (np.array_equal(lower[:, 0], nominal) and np.array_equal(upper[:, 0], nominal)):
        raise PrivacyError("bounds: at radius 0 they differ from the nominal prediction; pass it as both bounds")
    shape = nominal.shape[1:]
    width = smooth.subtract_up(high, low)
    ceiling = np.minimum(smooth.check_ceiling(width if ceiling is None else ceiling, shape), width)
    family = family or ("laplace" if delta > 0.0 else "cauchy")
    share = [split_budget(x, int(np.prod(shape))) for x in (epsilon, delta)]
    law = make_family(family, *share)
    pairs = admissible_pairs(law, *share)
    _, scale = pate_agtr_scale(lower, upper, ceiling, pairs)
    bits = sampling.SecureBits() if bits is None else bits
    values = np.empty(shape)
    for at, mean in zip(np.ndindex(shape), exact_mean(nominal), strict=True):
        ends = (float(low[at[-1]]), float(high[at[-1]]))
        values[at] = sampling.release(mean, float(scale[at]), law.draw(1, bits), sampling.public_grid(*ends), ends)
    text = f"PATE-AGT-R: mean of {len(nominal)} public shards, one-dimensional {family} noise, basic composition"
    grid = max(sampling.public_grid(*ends) for ends in zip(low.tolist(), high.tolist(), strict=True))
    terms = float(epsilon), float(delta), adjacency, text, float("nan"), "l1", float("nan"), grid
    return BaselineRelease(values, BaselineGuarantee(*terms))


def predict_pate(
    envelopes, graph, features, epsilon: float, delta: float = 0.0, *, output_range=None, family=None
) -> BaselineRelease:
    """PATE-AGT-R from one envelope per shard (`certify.run` on the rows of `shard_slots`), for public inputs.

    `envelopes`: PRIVATE, all with the same recipe, adjacency and radii 0..K. `features`: public (M, F) in table units;
    equal rows are answered once. Values are in target units. Raises CapabilityError or PrivacyError.

    Guarantees: those of `pate_agtr_release`; shards that differ in a public fact are refused.
    """
    from privacy.query import Query

    queries = [Query.make(envelope, graph, output_range) for envelope in envelopes]
    for query in queries:
        require_capabilities(query.envelope.metadata.capabilities)
    facts = [(q.envelope.metadata.adjacency, tuple(q.envelope.radii), _plain(q.recipe)) for q in queries]
    if not facts or any(fact != facts[0] for fact in facts):
        raise PrivacyError(
            "envelopes: found none, or shards that differ in adjacency, radii or recipe; certify all shards alike"
        )
    smooth.require_contiguous(facts[0][1])
    rows, inverse = np.unique(queries[0].prepare(features) + 0.0, axis=0, return_inverse=True)
    bounds = [query.bounds(rows) for query in queries]
    lower, upper = (np.array([side[i] for side in bounds]) for i in (0, 1))
    ceiling = np.max([query.ceiling(rows) for query in queries], axis=0)  # public: shards may differ by one slot
    made = pate_agtr_release(
        lower[:, 0], lower, upper, ceiling, queries[0].output_range, epsilon, delta,
        family=family, adjacency=facts[0][0],
    )  # fmt: skip
    return BaselineRelease(queries[0].restore(made.values[inverse.reshape(-1)]), made.guarantee)


def _plain(recipe):
    """The recipe without its number of slots, which may differ by one between shards."""
    facts = None if recipe is None else recipe.to_dict()
    if facts is not None and isinstance(facts.get("batches"), dict):
        facts = {**facts, "batches": {k: v for k, v in facts["batches"].items() if k != "slots"}}
    return facts


def _clipped(outputs, output_range):
    """Teacher outputs (T, M, O) clipped to the public range, with its ends as float64 (O,)."""
    outputs = np.asarray(outputs, np.float64)
    if outputs.ndim != 3 or not outputs.size or not np.all(np.isfinite(outputs)):
        raise PrivacyError(f"outputs: shape {outputs.shape} or a value that is not finite; give finite (T, M, O)")
    low, high = (np.broadcast_to(np.asarray(end, np.float64), outputs.shape[-1:]) for end in output_range)
    if not np.all((low < high) & np.isfinite(low) & np.isfinite(high)):
        raise PrivacyError("output_range: not a finite interval of positive width; give the public range of outputs")
    return np.clip(outputs, low, high), low, high
