"""From query bounds per radius to a beta-smooth upper bound of the local sensitivity.

Sources: Nissim, Raskhodnikova, Smith 2007 (smooth sensitivity, k from 0); Ghitu & Wicker, Theorem IV.2 (cross
range), with the corrections listed in docs/privacy.md. Adjacency: whatever relation the envelope covers;
radius `k` counts differing record slots.

The proof needs two properties of the envelope, soundness (S) and monotonicity across neighbours (M):
`T_k(D) is inside T_{k+1}(D')` for all neighbours. Then `A_k(D) <= A_{k+1}(D')`, and for any public weights
with `w_0 = 1` and `w_k <= e^beta w_{k+1}` the number `max_k w_k min(A_k, G)` is beta-smooth and at least the
local sensitivity. Here `w_k = exp(-min(beta k, 600))`: the cap keeps every weight a normal float64 and keeps
the inequality.

Rounding. Every operation rounds up and is monotone in its argument, so (M) survives it exactly. What is left
is the relative error of the weights and of one product: the returned `S` satisfies `S_exact <= S <= (1 + TAU)
S_exact`. So `S` is exactly `(beta + log1p(TAU))`-smooth; `calibration` calibrates for `beta + 2 log1p(TAU)`,
which also pays for the division in the noise scale.

Everything returned here is PRIVATE: it is computed from the data.
"""

import math

import numpy as np

from certify.errors import PrivacyError, RadiusError

TAU = 2.0**-40
"""Relative rounding slack of every smooth bound returned by this module and by `dense`."""

LARGEST_EXPONENT = 600.0
SMALLEST_BETA = 2.0**-40
SMALLEST_CEILING = 2.0**-100


def subtract_up(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a - b` in float64, rounded towards plus infinity (Knuth's error term decides); monotone."""
    a, b = np.asarray(a, np.float64), -np.asarray(b, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        s = a + b
        shadow = s - a
        error = (a - (s - shadow)) + (b - shadow)
        return np.where(error > 0.0, np.nextafter(s, np.inf), s)


def cross_ranges(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """One-dimensional cross ranges of consecutive radii.

    `lower`, `upper`: float (K+1, ...), bounds of the query over `T_0 .. T_K`, already clipped to the public
    range. Returns float64 (K, ...), rounded up: entry `k` is `max(upper[k+1] - lower[k], upper[k] - lower[k+1])`.

    Guarantees:
    * cross range bounds local sensitivity: entry 0 is at least `|f(D) - f(D')|` for every neighbour (by (S));
    * cross ranges are monotone across neighbours: entry `k` of `D` is at most entry `k+1` of `D'` (by (M)).

    Errors: PrivacyError for shapes that differ, fewer than two radii, NaN, or bounds out of order.
    """
    lower, upper = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
    if lower.shape != upper.shape or lower.ndim < 1 or lower.shape[0] < 2:
        raise PrivacyError(
            f"query bounds have shapes {lower.shape} and {upper.shape}; "
            "give two equal shapes with at least radii 0 and 1 on the first axis"
        )
    if not np.all(lower <= upper):
        raise PrivacyError(
            "query bounds: a lower bound is above its upper bound or is NaN; "
            "the envelope or its query evaluation is broken, recompute it"
        )
    if np.any(np.isposinf(lower)) or np.any(np.isneginf(upper)):
        raise PrivacyError(
            "query bounds: an interval lies at infinity; clip the bounds to the public output range"
        )
    return np.maximum(subtract_up(upper[1:], lower[:-1]), subtract_up(upper[:-1], lower[1:]))


def sum_outputs(cross: np.ndarray, axis: int = -1) -> np.ndarray:
    """Cross range of an l1 query: `cross` summed over its output `axis`, each addition rounded up."""
    columns = np.moveaxis(np.asarray(cross, np.float64), axis, 0)
    total = np.zeros(columns.shape[1:])
    for column in columns:
        total = subtract_up(total, -column)
    return total


NORMS = ("l1", "l2", "linf")


def norm_outputs(cross: np.ndarray, norm: str, weights=None, axis: int = -1) -> np.ndarray:
    """Norm of `weights * cross` over the output `axis`: the cross range of a vector query.

    `cross`: nonnegative, one-dimensional cross ranges (or ceilings) of each output; `norm`: "l1", "l2" or "linf";
    `weights`: PUBLIC positive numbers, one per output, or None for 1. Every operation rounds up and is monotone
    in every entry (its result is rounded to nearest first, which is monotone, then moved one float up).

    Guarantees:
    * norm of cross ranges bounds local sensitivity: if entry `i` bounds `|f_i(D) - f_i(D')|`, the result bounds
      the norm of `weights * (f(D) - f(D'))`;
    * norm of cross ranges is monotone: larger entries never give a smaller result, so (M) survives.
    """
    if norm not in NORMS:
        raise PrivacyError(f"norm: {norm!r} is unknown; choose one of {', '.join(NORMS)}")
    columns = np.moveaxis(np.asarray(cross, np.float64), axis, -1)
    if not np.all(columns >= 0.0):
        raise PrivacyError("cross: an entry is negative or NaN; take it from cross_ranges")
    if weights is not None:
        columns = _product_up(columns, np.broadcast_to(check_weights(weights), columns.shape[-1:]))
    if norm == "l1":
        return sum_outputs(columns)
    if norm == "linf":
        return columns.max(axis=-1, initial=0.0)
    total = sum_outputs(_product_up(columns, columns))
    with np.errstate(invalid="ignore"):
        return np.where(total > 0.0, np.nextafter(np.sqrt(total), np.inf), 0.0)


def check_weights(weights) -> np.ndarray:
    """Public weights as float64; they must lie in [2^-100, 2^100]."""
    weights = np.asarray(weights, np.float64)
    if not np.all((weights >= 2.0**-100) & (weights <= 2.0**100)):
        raise PrivacyError("weights: an entry is not in [2^-100, 2^100]; give public positive weights, one per output")
    return weights


def _product_up(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a * b` of nonnegative floats, rounded up; exactly 0 where a factor is 0, monotone in both."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where((a > 0.0) & (b > 0.0), np.nextafter(a * b, np.inf), 0.0)


def check_ceiling(ceiling, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcast the public ceiling `G` to the queries' `shape`; it must be finite and at least 2^-100."""
    ceiling = np.broadcast_to(np.asarray(ceiling, np.float64), shape)
    if not np.all((ceiling >= SMALLEST_CEILING) & np.isfinite(ceiling)):
        raise PrivacyError(
            "ceiling: an entry is not finite or below 2^-100; give the public width of the output range "
            "or the public per-query diameter, which is positive"
        )
    return ceiling


def check_difference(difference, shape: tuple[int, ...]) -> np.ndarray:
    """A certificate (K, C, G, g) for cross ranges (K, 1, G, g) of `shape`; its entries must not be negative or NaN."""
    difference = np.asarray(difference, np.float64)
    fits = difference.ndim == 4 and difference.shape[1] and difference.shape[:1] + difference.shape[2:] == (
        shape[0], *shape[2:],
    )  # fmt: skip
    if not fits or not np.all(difference >= 0.0):
        raise PrivacyError(
            f"difference: shape {difference.shape} or an entry that is negative or NaN; give a bound of the difference "
            f"of neighbours for each of {shape[0]} radii, each public class of slots and each output"
        )
    return difference


def check_beta(beta: float) -> float:
    """`beta` must be 0 (then S is the ceiling) or at least 2^-40, so that float64 weights decrease too."""
    beta = float(beta)
    if not (beta == 0.0 or SMALLEST_BETA <= beta < math.inf):
        raise PrivacyError(
            f"beta: {beta!r} is not 0 or a finite number of at least 2^-40; choose a larger beta"
        )
    return beta


def weight(beta: float, k: int) -> float:
    """Upper bound of `exp(-min(beta k, 600))`, at most 1, nonincreasing in `k`, relative error < 2^-41."""
    if k == 0 or beta == 0.0:
        return 1.0
    return min(1.0, math.exp(-min(beta * k, LARGEST_EXPONENT)) * (1.0 + 2.0**-42))


def discounted(values: np.ndarray, w: float) -> np.ndarray:
    """`w * values` rounded up, for finite nonnegative `values` and `0 < w <= 1`; monotone in both."""
    return values if w == 1.0 else np.nextafter(values * w, np.inf)


def require_contiguous(radii) -> None:
    """Raise RadiusError unless `radii` is 0, 1, ..., K: back-filling a gap is not smooth."""
    radii = [int(k) for k in radii]
    if radii != list(range(len(radii))):
        raise RadiusError(
            f"radii: {_short(radii)} is not 0, 1, ..., K without gaps, and filling gaps breaks smoothness; "
            "certify radii 0..K (certdp certify --radii 0..K), or use smooth_bound_indexed in Python"
        )


def smooth_bound(cross: np.ndarray, ceiling, beta: float, radii=None) -> np.ndarray:
    """The dense smooth bound `max(max_{k<K} e^{-beta k} min(A_k, G), e^{-beta K} G)`, per query.

    `cross`: (K, *Q) cross ranges `A_0 .. A_{K-1}`, from `cross_ranges` over contiguous radii 0..K (pass
    `radii` to have that checked). `ceiling`: public `G`, broadcastable to `*Q`, at least the global
    sensitivity of every query. `beta`: public, 0 or at least 2^-40. Returns float64 (*Q,), PRIVATE.

    Guarantees (given (S) and (M), over the adjacency of the envelope):
    * bound is at least local sensitivity: `|f(D) - f(D')| <= min(S(D), S(D'))`;
    * bound is smooth: `|ln S(D) - ln S(D')| <= beta + log1p(TAU)`;
    * radius zero counts: `k` starts at 0 (the paper's maximum over `k >= 1` can lose a factor `e^{-beta}`).
    """
    cross = np.asarray(cross, np.float64)
    if cross.ndim < 1 or cross.shape[0] < 1 or not np.all(cross >= 0.0):
        raise PrivacyError(
            "cross: needs at least one radius on the first axis and no negative or NaN entry; "
            "take it from cross_ranges"
        )
    if radii is not None:
        require_contiguous(radii)
        if len(radii) != cross.shape[0] + 1:
            raise RadiusError(
                f"radii: {len(radii)} radii do not belong to {cross.shape[0]} cross ranges; "
                "K cross ranges come from K+1 radii"
            )
    beta = check_beta(beta)
    ceiling = check_ceiling(ceiling, cross.shape[1:])
    best = discounted(ceiling, weight(beta, cross.shape[0]))
    for k, row in enumerate(cross):
        best = np.maximum(best, discounted(np.minimum(row, ceiling), weight(beta, k)))
    return best


def smooth_bound_indexed(cross: np.ndarray, ceiling, beta: float, radii) -> np.ndarray:
    """Smooth bound from a sparse list `0 = m_0 < m_1 < ... < m_r`, discounted per INDEX (not per radius).

    `cross`: (r, *Q), entry `i` the cross range of `T_{m_i}` and `T_{m_{i+1}}` (`cross_ranges` over the stored
    radii). `radii` must be public and fixed before the run. Looser than the dense bound, never unsound:
    `T_{m_i}(D)` lies in `T_{m_{i+1}}(D')`, so entry `i` of `D` is at most entry `i+1` of `D'`.

    Guarantees: those of `smooth_bound`.
    """
    radii = [int(k) for k in radii]
    if radii[:1] != [0] or any(b <= a for a, b in zip(radii, radii[1:], strict=False)):
        raise RadiusError(
            f"radii: {_short(radii)} does not start at 0 and increase strictly; sort and complete the list"
        )
    return smooth_bound(cross, ceiling, beta, radii=range(len(radii)))


def _short(radii: list[int]) -> str:
    return str(radii) if len(radii) <= 12 else f"[{', '.join(map(str, radii[:10]))}, ..., {radii[-1]}]"
