"""AGT-R: private predictions at public inputs from an envelope (Ghitu & Wicker, section IV, corrected).

`M` distinct inputs with `O` outputs are `M O` numbers. They are released in groups of equal size: each number on its
own, the outputs of one input together, or everything together. A group of `g` numbers is one `g`-dimensional
release (`privacy.mechanism`), whose dilation is paid for `g` coordinates by the family's calibration; groups compose:
each pays the same share of (epsilon, delta), rounded down. `joint` chooses, or the public rule `_grouping`.
Clipping to the public range happens BEFORE the noise, on the nominal value and on all bounds; clipping afterwards
is cosmetic post-processing and bounds nothing.

Which argument is what: `queries`, `ceiling`, `output_range`, the budget, `family`, `betas`, `joint`, the radii and the
`Release` are PUBLIC. The envelope, nominal values, bounds and `PrivateDiagnostics` are PRIVATE, and so are
running times and refusals.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

from certify.errors import CapabilityError, PrivacyError
from privacy import dense, noise, sampling, smooth
from privacy.mechanism import Mechanism, expected_noise, release_vectors, smooth_bounds

_RIGOUR = ("rigorous", "tolerance")


@dataclass(frozen=True)
class Guarantee:
    """What a release costs and means; public facts only.

    (epsilon, delta): total of this call, under `adjacency`, for data sets of the same public number of slots.
    (epsilon_per_release, delta_per_release): share of each of the `releases`, which hold `dimension` numbers each.
    `grid`: public rounding grid of each output.
    """

    epsilon: float
    delta: float
    adjacency: str
    mechanism: str
    epsilon_per_release: float
    delta_per_release: float
    releases: int
    grid: tuple[float, ...]
    dimension: int = 1


@dataclass(frozen=True, eq=False)
class Release:
    """Private predictions, safe to publish: `values` float64, one row per query, inside the public range."""

    values: np.ndarray
    guarantee: Guarantee


@dataclass(frozen=True, eq=False, repr=False)
class PrivateDiagnostics:
    """PRIVATE, for the owner of the data only; nothing here is covered by the guarantee or written anywhere.

    `smooth`: `{beta: S_beta (M, O)}`, for numbers that are released together that of their weighted norm, repeated;
    `scale`: noise scales (M, O); `nominal`: clipped predictions (M, O).
    """

    smooth: dict[float, np.ndarray]
    scale: np.ndarray
    nominal: np.ndarray

    def __repr__(self) -> str:
        return "<PrivateDiagnostics: computed from the data, not shown>"


def release_predictions(
    nominal: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    ceiling,
    output_range,
    epsilon: float,
    delta: float = 0.0,
    family: str | None = None,
    bits=None,
    *,
    betas=None,
    adjacency: str = "replace-one",
    joint: bool | None = None,
    difference: np.ndarray | None = None,
) -> tuple[Release, PrivateDiagnostics]:
    """Release `M` distinct predictions from the query bounds of radii 0..K.

    `nominal`: float (M, O), equal to `lower[0]` and `upper[0]`. `lower`, `upper`: float (K+1, M, O), bounds
    over an envelope that is sound (S) and monotone across neighbours (M), for the contiguous radii 0..K, K
    public. `ceiling`: public bound of the global sensitivity, broadcastable to (M, O), or None for the width
    of the range. `output_range`: public (low, high), each a number or one per output. (`epsilon`, `delta`):
    total. `family`: a name in `noise.FAMILIES` or None for the public rule (`mechanism.default_family`). `joint`: True
    for one release of dimension `M O`, False for scalars, None for the public rule. `difference`: float (K+1, C, M, O),
    a relational certificate of the predictions: entry `k` bounds how far those of two neighbours within radius `k` are
    apart that differ in a slot of public class `c`; monotone across neighbours. `bits`: source of random bits, by
    default the operating system's generator.

    Guarantees:
    * release is dp: `Release.values` is (epsilon, delta)-DP under the envelope's adjacency;
    * shares never exceed the total, in exact arithmetic;
    * clipping comes before noise: the sensitivity is that of the clipped prediction;
    * release holds public facts only.

    Errors: PrivacyError, with the field, for bounds, ranges or budgets that are not admissible.
    """
    shape = np.shape(nominal)
    terms = _terms(epsilon, delta, shape, False, family, betas, adjacency, _sizes(joint, shape, False))
    rule = {"radii": range(len(lower)), "difference": difference}
    return _release(nominal, lower, upper, ceiling, output_range, terms, rule, bits)


def predict_from_bounds(
    envelope,
    bounds: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    queries: np.ndarray,
    epsilon: float,
    delta: float = 0.0,
    *,
    output_range,
    ceiling=None,
    per_query: bool = False,
    family: str | None = None,
    betas=None,
    joint: bool | None = None,
    bits=None,
    differences: Callable[[np.ndarray], np.ndarray | None] | None = None,
) -> Release:
    """Private predictions at the public `queries`; `query.predict` supplies the bounds of a model.

    `envelope`: a certify.envelope.Envelope (its radii and metadata are read). `bounds(rows)`: query bounds
    `(lower, upper)`, float (len(radii), M, O), of the distinct rows (M, F) over the boxes of
    `envelope.radii`, in that order, exact at radius 0. `queries`: float (Q, F). `ceiling`: None, a callable
    `rows -> (M, O)`, or an array broadcastable to (Q, O). `per_query`: (epsilon, delta) is the budget of each
    distinct query instead of all together. `joint`: True releases all numbers (with `per_query` those of one query)
    as one vector, False each on its own, None by a public rule. `differences(rows)`: the relational certificate of the
    predictions, float (len(radii), C, M, O) as for `release_predictions`, or None. Returns a Release with `values`
    (Q, O).

    With radii chosen by `--radii auto` the betas are exactly those recorded in `metadata.auto`, every
    value must be provably the dense one, and numbers are released on their own.

    Guarantees:
    * unsuitable envelopes are refused: not sound, not monotone, or of unknown rigour;
    * repeated inputs cost nothing: equal rows get one release and the same answer;
    * those of `release_predictions`.

    Errors: CapabilityError, RadiusError, PrivacyError.
    """
    rows, inverse, lower, upper, first = distinct_bounds(envelope, bounds, queries)
    outputs = lower.shape[2]
    if callable(ceiling):
        ceiling = ceiling(rows)
    elif ceiling is not None:
        ceiling = np.broadcast_to(np.asarray(ceiling, np.float64), (len(queries), outputs))[first]
    shape = (len(rows), outputs)
    terms, rule = envelope_terms(envelope, epsilon, delta, shape, per_query, family, betas, joint)
    if "bound" not in rule and differences is not None:
        rule["difference"] = differences(rows)
    released, _ = _release(lower[0], lower, upper, ceiling, output_range, terms, rule, bits)
    return Release(released.values[inverse], released.guarantee)


def least_noise(
    metadata,
    ceiling: np.ndarray,
    epsilon: float,
    delta: float = 0.0,
    *,
    output_range,
    per_query: bool = False,
    family: str | None = None,
    betas=None,
    joint: bool | None = None,
) -> np.ndarray:
    """PUBLIC (M, O): the typical noise that each number has at least, in widths of its public output range.

    No smooth bound is below its public tail, the `ceiling` (M, O) discounted by the largest radius; the noise of that
    (mean of its size, for Cauchy the median) is what the kindest records would get. Arguments as for
    `predict_from_bounds`, but for the envelope: only its public `metadata` are read.

    Guarantee:
    * least noise is public: it is a function of the request and the public facts of the run.

    Errors: PrivacyError.
    """
    envelope = SimpleNamespace(metadata=metadata, radii=metadata.radii)
    shape = ceiling.shape
    terms, rule = envelope_terms(envelope, epsilon, delta, shape, per_query, family, betas, joint)
    low, high = _check_range(output_range, shape[-1:])
    width = smooth.subtract_up(high, low)
    mechanism, weights = terms.mechanism, np.exp2(-np.round(np.log2(width)))
    groups = Groups(shape, mechanism.dim)
    # Radii that were chosen on the records are private; the tail is then that of all slots.
    last = metadata.radii[-1] if "radii" in rule else metadata.slots
    top = smooth.norm_outputs(groups.cut(np.minimum(ceiling, width)), mechanism.norm, groups.each(weights))
    tails = {pair.beta: smooth.discounted(top, smooth.weight(pair.beta, last)) for pair in mechanism.pairs}
    scale = _spread(noise.noise_scale(tails, mechanism.pairs), mechanism.dim, shape)
    return mechanism.family.typical(mechanism.dim) * scale / (1.0 if mechanism.dim == 1 else weights) / width


def distinct_bounds(envelope, bounds, queries):
    """Check the envelope and the queries; `(rows, inverse, lower, upper, first)` of the distinct rows.

    Errors: CapabilityError before any bound is asked for, PrivacyError.
    """
    require_capabilities(envelope.metadata.capabilities)
    queries = np.asarray(queries, np.float64) + 0.0  # -0.0 becomes 0.0: the same input
    if queries.ndim != 2 or not len(queries) or not np.all(np.isfinite(queries)):
        raise PrivacyError(
            f"queries: shape {queries.shape} or a value that is not finite; "
            "give a nonempty finite table, one input per row"
        )
    rows, first, inverse = np.unique(queries, axis=0, return_index=True, return_inverse=True)
    lower, upper = (np.asarray(side, np.float64) for side in bounds(rows))
    stored = len(envelope.radii)
    if lower.ndim != 3 or lower.shape[:2] != (stored, len(rows)):
        raise PrivacyError(
            f"bounds: found shape {lower.shape}, expected ({stored}, {len(rows)}, outputs); "
            "return one bound per stored radius and distinct input"
        )
    return rows, inverse.reshape(-1), lower, upper, first


def envelope_terms(envelope, epsilon, delta, shape, per_query, family, betas, joint, sizes=None, change=None):
    """Public terms of a release of `shape` (M, O) from this envelope, and how its radii become a smooth bound."""
    metadata, radii = envelope.metadata, tuple(int(k) for k in envelope.radii)
    recorded, betas = _recorded_betas(metadata, betas)
    if recorded is not None and joint:
        raise PrivacyError(
            "joint: the envelope's radii were chosen for numbers that are released on their own; "
            "leave joint out, or certify with contiguous radii"
        )
    sizes = _sizes(False if recorded is not None else joint, shape, per_query) if sizes is None else sizes
    terms = _terms(epsilon, delta, shape, per_query, family, betas, metadata.adjacency, sizes, change)
    if recorded is None:
        return terms, {"radii": radii}
    return terms, {"bound": _on_demand(radii, getattr(metadata, "slots", None))}


def require_capabilities(capabilities) -> None:
    """CapabilityError unless the envelope is sound, monotone across neighbours and of a known rigour."""
    if not capabilities.sound:
        raise CapabilityError(
            "capabilities.sound: false, the boxes need not hold all retrained parameters; "
            "certify again with a sound backend"
        )
    if not capabilities.monotone:
        raise CapabilityError(
            "capabilities.monotone: false, the smooth bound would not be smooth across neighbours; "
            "certify again with a backend that is monotone (for example ibp)"
        )
    if capabilities.rigour not in _RIGOUR:
        raise CapabilityError(
            f"capabilities.rigour: {capabilities.rigour!r} is not one of {', '.join(_RIGOUR)}; "
            "certify again with a backend that states one of them"
        )


def _recorded_betas(metadata, betas):
    """(recorded list or None, betas to use). Radii picked on demand tie the betas to the recorded ones."""
    auto = getattr(metadata, "auto", None)
    if auto is None:
        return None, betas
    recorded = tuple(float(b) for b in np.atleast_1d(auto["beta"]))
    if betas is not None and tuple(map(float, betas)) != recorded:
        raise PrivacyError(f"betas: the envelope's radii were chosen for beta = {list(recorded)}; leave betas out")
    return recorded, recorded


@dataclass(frozen=True)
class _Terms:
    """Public terms of one call: totals, the mechanism of each group, adjacency."""

    epsilon: float
    delta: float
    mechanism: Mechanism
    adjacency: str


def _sizes(joint: bool | None, shape: tuple[int, int], per_query: bool) -> tuple[int, ...]:
    """Numbers per group that may be chosen for (M, O) values; equal shares are only given to equal groups."""
    if len(shape) != 2 or 0 in shape:
        raise PrivacyError(f"nominal: found shape {shape}; give a nonempty (M, O) array")
    whole = shape[1] if per_query else shape[0] * shape[1]
    if joint is None:
        return tuple(sorted({1, shape[1], whole}))
    return (whole,) if joint else (1,)


def _terms(epsilon, delta, shape, per_query, family, betas, adjacency, sizes, change=None) -> _Terms:
    """Totals, and the PUBLIC rule for the grouping: the least `expected_noise` of a number.

    `change(g)`: how many of the `g` numbers of a group one record can move by a unit (default: all).
    The rule sees the budget, the shape and the family, never data.
    """
    epsilon, delta = float(epsilon), float(delta)
    parts = shape[1] if per_query else shape[0] * shape[1]
    copies = shape[0] if per_query else 1
    total = _times_up(epsilon, copies), _times_up(delta, copies)
    if not (0.0 < epsilon < np.inf and 0.0 <= delta < 1.0 and total[1] < 1.0 and parts > 0):
        raise PrivacyError(
            f"budget: epsilon = {epsilon!r}, delta = {delta!r} for {parts} releases is not admissible; "
            "choose epsilon > 0, 0 <= delta < 1 (in total) and at least one query"
        )
    best, refusal = None, None
    for size in sizes:
        share = noise.split_budget(epsilon, parts // size), noise.split_budget(delta, parts // size)
        try:
            mechanism = Mechanism.make(family, *share, size, betas)
        except PrivacyError as error:
            refusal = error
            continue
        cost = expected_noise(mechanism, size if change is None else change(size))
        if best is None or cost < best[0]:
            best = cost, mechanism
    if best is None:
        raise refusal
    mechanism = best[1]
    return _Terms(total[0], total[1] if mechanism.delta else 0.0, mechanism, adjacency)


def _release(nominal, lower, upper, ceiling, output_range, terms: _Terms, rule: dict, bits):
    """Clip, bound, calibrate, draw. `rule`: `{"bound": ...}`, or `{"radii": ...}` and perhaps `"difference"`."""
    low, high = _check_range(output_range, np.shape(nominal)[-1:])
    nominal, lower, upper = _clipped(nominal, lower, upper, low, high)
    width = smooth.subtract_up(high, low)
    ceiling = np.minimum(smooth.check_ceiling(width if ceiling is None else ceiling, nominal.shape), width)
    mechanism, shape = terms.mechanism, nominal.shape
    grid = tuple(map(sampling.public_grid, low, high))
    # Numbers that are released together get noise in proportion to their public ranges.
    weights = np.exp2(-np.round(np.log2(width)))
    groups = Groups(shape, mechanism.dim)
    if "bound" in rule:
        top = ceiling.ravel()
        bounds = [side.reshape(len(side), -1) for side in (lower, upper)]
        by_beta = {pair.beta: rule["bound"](*bounds, top, pair.beta) for pair in mechanism.pairs}
    else:
        sides = groups.cut(lower), groups.cut(upper), groups.cut(ceiling)
        difference = rule.get("difference")
        difference = None if difference is None else groups.cut(difference[1:])
        by_beta = smooth_bounds(*sides, mechanism, groups.each(weights), rule["radii"], difference)
    ends, steps = (groups.cut(low), groups.cut(high)), groups.cut(np.array(grid))
    noisy = release_vectors(
        groups.cut(nominal), by_beta, mechanism, steps, ends=ends, weights=groups.each(weights), bits=bits
    )
    values = noisy.values.reshape(shape)
    guarantee = guarantee_of(terms, nominal.size, grid)
    spread = {beta: _spread(s, mechanism.dim, shape) for beta, s in noisy.smooth.items()}
    scale = _spread(noisy.scale, mechanism.dim, shape) / (1.0 if mechanism.dim == 1 else weights)
    return Release(values, guarantee), PrivateDiagnostics(spread, scale, nominal)


@dataclass(frozen=True)
class Groups:
    """The (M, O) numbers of a call cut into groups of `size` numbers: single ones, or whole rows."""

    shape: tuple[int, int]
    size: int

    def cut(self, x: np.ndarray) -> np.ndarray:
        """(..., M, O), or (O,) for all rows alike, as (..., groups, size)."""
        x = np.broadcast_to(x, self.shape) if np.ndim(x) < 2 else np.asarray(x)
        return x.reshape(*x.shape[:-2], -1, self.size)

    def each(self, weights: np.ndarray) -> np.ndarray | None:
        """Weights (O,) of the numbers of one group; a single number needs none."""
        return None if self.size == 1 else np.tile(weights, self.size // self.shape[1])


def guarantee_of(terms: _Terms, numbers: int, grid: tuple[float, ...]) -> Guarantee:
    """The statement of a release of so many numbers; public."""
    mechanism = terms.mechanism
    return Guarantee(
        terms.epsilon,
        terms.delta,
        terms.adjacency,
        f"{mechanism.describe()}, basic composition",
        mechanism.epsilon,
        mechanism.delta,
        numbers // mechanism.dim,
        grid,
        mechanism.dim,
    )


def _spread(per_group: np.ndarray, size: int, shape: tuple[int, int]) -> np.ndarray:
    return np.repeat(per_group, size).reshape(shape)


def _on_demand(radii, slots):
    """Smooth bound for radii picked on the data: only a value that is proven to be that of all radii 0..N.

    Radius N (all `slots`) bounds every cross range by its width; the public tail at N is the ceiling, as in
    `smooth_bound` over 0..N.
    """

    def bound(lower, upper, ceiling, beta):
        cross = smooth.cross_ranges(lower, upper)
        steps = zip(radii, radii[1:], cross, strict=False)
        by_k = {k: row.ravel() for k, after, row in steps if after == k + 1}
        if radii[-1] == slots:
            by_k[slots] = smooth.subtract_up(upper[-1], lower[-1]).ravel()
        value = dense.dense_from_sparse(radii, by_k, ceiling.ravel(), beta, slots).reshape(ceiling.shape)
        tail = 0.0 if slots is None else smooth.discounted(ceiling, smooth.weight(beta, slots))
        return np.maximum(value, tail)

    return bound


def _check_range(output_range, outputs: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The public range as two float64 arrays (O,)."""
    low, high = (np.broadcast_to(np.asarray(end, np.float64), outputs) for end in output_range)
    with np.errstate(over="ignore", invalid="ignore"):
        fine = np.all((low < high) & np.isfinite(high - low))
    if not fine:
        raise PrivacyError(
            f"output_range: ({low.tolist()}, {high.tolist()}) is not a finite interval of positive width; "
            "give the public range that predictions are clipped to"
        )
    return low, high


def _clipped(nominal, lower, upper, low, high):
    """Nominal values and bounds, clipped to the public range; checks shapes, order, nesting and radius 0."""
    nominal, lower, upper = (np.asarray(x, np.float64) for x in (nominal, lower, upper))
    if nominal.ndim != 2 or not nominal.size or lower.shape != upper.shape or lower.shape[1:] != nominal.shape:
        raise PrivacyError(
            f"bounds: nominal {nominal.shape}, lower {lower.shape} and upper {upper.shape} do not fit; "
            "give (M, O), (K+1, M, O), (K+1, M, O)"
        )
    if not np.all(np.isfinite(nominal)):
        raise PrivacyError(
            "nominal: a prediction is not finite: training diverged or an input is far too large; "
            "certify again with a smaller learning_rate or clip, or give smaller inputs"
        )
    if not np.all(lower <= upper):
        raise PrivacyError("bounds: an end is NaN, or they are out of order; certify again with a sound backend")
    nominal, lower, upper = (np.clip(x, low, high) for x in (nominal, lower, upper))
    if not (np.array_equal(lower[0], nominal) and np.array_equal(upper[0], nominal)):
        raise PrivacyError(
            "bounds: at radius 0 they differ from the nominal prediction; "
            "radius 0 is the data set itself, so pass its prediction as both bounds"
        )
    if np.any(np.diff(lower, axis=0) > 0.0) or np.any(np.diff(upper, axis=0) < 0.0):
        raise PrivacyError("bounds: they are not nested in the radius; the envelope or its evaluation is broken")
    return nominal, lower, upper


def _times_up(share: float, count: int) -> float:
    total = float(share) * count
    if not math.isfinite(total):
        return total  # refused by _terms
    return float(np.nextafter(total, np.inf)) if Fraction(total) < Fraction(float(share)) * count else total
