"""AGT-R: private predictions at public inputs from an envelope (Ghitu & Wicker, section IV, corrected).

`M` distinct inputs with `O` outputs are `M O` scalar releases `clip(f) + s Z`. Each pays the same share of
(epsilon, delta) (basic composition, shares rounded down). Clipping to the public range happens BEFORE the
noise, on the nominal value and on all bounds; clipping afterwards is cosmetic post-processing and bounds
nothing.

Which argument is what: `queries`, `ceiling`, `output_range`, the budget, `family`, `betas`, the radii and the
`Release` are PUBLIC. The envelope, nominal values, bounds and `PrivateDiagnostics` are PRIVATE, and so are
running times and refusals.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from certify.errors import CapabilityError, PrivacyError
from privacy import calibration, dense, sampling, smooth

_RIGOUR = ("rigorous", "tolerance")


@dataclass(frozen=True)
class Guarantee:
    """What a release costs and means; public facts only.

    (epsilon, delta): total of this call, under `adjacency`, for data sets of the same public number of slots.
    (epsilon_per_release, delta_per_release): share of each of the `releases` scalars. `grid`: public rounding
    grid of each output.
    """

    epsilon: float
    delta: float
    adjacency: str
    mechanism: str
    epsilon_per_release: float
    delta_per_release: float
    releases: int
    grid: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Release:
    """Private predictions, safe to publish: `values` float64, one row per query, inside the public range."""

    values: np.ndarray
    guarantee: Guarantee


@dataclass(frozen=True, eq=False, repr=False)
class PrivateDiagnostics:
    """PRIVATE, for the owner of the data only; nothing here is covered by the guarantee or written anywhere.

    `smooth`: `{beta: S_beta (M, O)}`; `scale`: noise scales (M, O); `nominal`: clipped predictions (M, O).
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
) -> tuple[Release, PrivateDiagnostics]:
    """Release `M` distinct predictions from the query bounds of radii 0..K.

    `nominal`: float (M, O), equal to `lower[0]` and `upper[0]`. `lower`, `upper`: float (K+1, M, O), bounds
    over an envelope that is sound (S) and monotone across neighbours (M), for the contiguous radii 0..K, K
    public. `ceiling`: public bound of the global sensitivity, broadcastable to (M, O), or None for the width
    of the range. `output_range`: public (low, high), each a number or one per output. (`epsilon`, `delta`):
    total. `family`: None is the public rule "laplace" when `delta > 0`, else "cauchy". `bits`: source of
    random bits, by default the operating system's generator.

    Guarantees:
    * release is dp: `Release.values` is (epsilon, delta)-DP under the envelope's adjacency;
    * shares never exceed the total, in exact arithmetic;
    * clipping comes before noise: the sensitivity is that of the clipped prediction;
    * release holds public facts only.

    Errors: PrivacyError, with the field, for bounds, ranges or budgets that are not admissible.
    """
    parts = np.asarray(nominal).size
    terms = _terms(epsilon, delta, parts, epsilon, delta, family, betas, adjacency)
    return _release(nominal, lower, upper, _contiguous(range(len(lower))), ceiling, output_range, terms, bits)


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
    bits=None,
) -> Release:
    """Private predictions at the public `queries`; `query.predict` supplies the bounds of a model.

    `envelope`: a certify.envelope.Envelope (its radii and metadata are read). `bounds(rows)`: query bounds
    `(lower, upper)`, float (len(radii), M, O), of the distinct rows (M, F) over the boxes of
    `envelope.radii`, in that order, exact at radius 0. `queries`: float (Q, F). `ceiling`: None, a callable
    `rows -> (M, O)`, or an array broadcastable to (Q, O). `per_query`: (epsilon, delta) is the budget of each
    distinct query instead of all together. Returns a Release with `values` (Q, O).

    With radii chosen by `--radii auto` the betas are exactly those recorded in `metadata.auto`, and every
    value must be provably the dense one.

    Guarantees:
    * unsuitable envelopes are refused: not sound, not monotone, or of unknown rigour;
    * repeated inputs cost nothing: equal rows get one release and the same answer;
    * those of `release_predictions`.

    Errors: CapabilityError, RadiusError, PrivacyError.
    """
    metadata = envelope.metadata
    require_capabilities(metadata.capabilities)
    queries = np.asarray(queries, np.float64) + 0.0  # -0.0 becomes 0.0: the same input
    if queries.ndim != 2 or not len(queries) or not np.all(np.isfinite(queries)):
        raise PrivacyError(
            f"queries: shape {queries.shape} or a value that is not finite; "
            "give a nonempty finite table, one input per row"
        )
    rows, first, inverse = np.unique(queries, axis=0, return_index=True, return_inverse=True)
    lower, upper = (np.asarray(side, np.float64) for side in bounds(rows))
    radii = tuple(int(k) for k in envelope.radii)
    if lower.ndim != 3 or lower.shape[:2] != (len(radii), len(rows)):
        raise PrivacyError(
            f"bounds: found shape {lower.shape}, expected ({len(radii)}, {len(rows)}, outputs); "
            "return one bound per stored radius and distinct input"
        )
    outputs = lower.shape[2]
    if callable(ceiling):
        ceiling = ceiling(rows)
    elif ceiling is not None:
        ceiling = np.broadcast_to(np.asarray(ceiling, np.float64), (len(queries), outputs))[first]
    recorded, betas = _recorded_betas(metadata, betas)
    bound = _contiguous(radii) if recorded is None else _on_demand(radii, getattr(metadata, "slots", None))
    parts = outputs if per_query else outputs * len(rows)
    copies = len(rows) if per_query else 1
    terms = _terms(
        epsilon,
        delta,
        parts,
        _times_up(epsilon, copies),
        _times_up(delta, copies),
        family,
        betas,
        metadata.adjacency,
    )
    released, _ = _release(lower[0], lower, upper, bound, ceiling, output_range, terms, bits)
    return Release(released.values[inverse.reshape(-1)], released.guarantee)


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
    """Public terms of one call: totals, shares per scalar release, noise family, list of betas, adjacency."""

    epsilon: float
    delta: float
    epsilon_per_release: float
    delta_per_release: float
    family: str
    betas: tuple[float, ...] | None
    adjacency: str


def _terms(epsilon, delta, parts, total_epsilon, total_delta, family, betas, adjacency) -> _Terms:
    """Equal shares of (epsilon, delta) over `parts`, and the public rule for the family."""
    epsilon, delta = float(epsilon), float(delta)
    if not (0.0 < epsilon < np.inf and 0.0 <= delta < 1.0 and total_delta < 1.0 and parts > 0):
        raise PrivacyError(
            f"budget: epsilon = {epsilon!r}, delta = {delta!r} for {parts} releases is not admissible; "
            "choose epsilon > 0, 0 <= delta < 1 (in total) and at least one query"
        )
    share = calibration.split_budget(epsilon, parts), calibration.split_budget(delta, parts)
    family = family or ("laplace" if delta > 0.0 else "cauchy")
    return _Terms(float(total_epsilon), float(total_delta), *share, family, betas and tuple(betas), adjacency)


def _release(nominal, lower, upper, bound, ceiling, output_range, terms: _Terms, bits):
    """Clip, bound, calibrate, draw. `bound(lower, upper, ceiling, beta)` returns the smooth bound (M, O)."""
    low, high = _check_range(output_range, np.shape(nominal)[-1:])
    nominal, lower, upper = _clipped(nominal, lower, upper, low, high)
    width = smooth.subtract_up(high, low)
    ceiling = np.minimum(smooth.check_ceiling(width if ceiling is None else ceiling, nominal.shape), width)
    share = terms.epsilon_per_release, terms.delta_per_release
    pairs = calibration.admissible_pairs(terms.family, *share, terms.betas)
    smooth_by_beta = {pair.beta: bound(lower, upper, ceiling, pair.beta) for pair in pairs}
    scale = calibration.noise_scale(smooth_by_beta, pairs)
    grid = tuple(map(sampling.public_grid, low, high))
    bits = sampling.SecureBits() if bits is None else bits
    draw = sampling.NOISE[terms.family]
    public = list(zip(grid, zip(low.tolist(), high.tolist(), strict=True), strict=True))
    values = [
        [sampling.release(f, s, draw(bits), step, ends) for f, s, (step, ends) in zip(*row, public, strict=True)]
        for row in zip(nominal.tolist(), scale.tolist(), strict=True)
    ]
    mechanism = f"smooth sensitivity, one-dimensional {terms.family} noise, basic composition"
    guarantee = Guarantee(terms.epsilon, terms.delta, terms.adjacency, mechanism, *share, nominal.size, grid)
    return Release(np.array(values), guarantee), PrivateDiagnostics(smooth_by_beta, scale, nominal)


def _contiguous(radii):
    """Smooth bound for public radii 0..K: the dense form with the public tail."""
    return lambda lower, upper, ceiling, beta: smooth.smooth_bound(
        smooth.cross_ranges(lower, upper), ceiling, beta, radii=radii
    )


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
    if not (np.all(np.isfinite(nominal)) and np.all(lower <= upper)):
        raise PrivacyError("bounds: a nominal value is not finite, or a bound is NaN or out of order; recompute them")
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
