"""The dense smooth bound without every radius: branch and bound over `A_k`, which grows with `k`.

Back-filling a sparse list of radii is not smooth. The dense maximum is, and most radii provably cannot attain
it: for `a < k <= b` the term is at most `w_k min(A_b, G)`, and beyond the last known index at most `w_k G`.
Once no such bound exceeds the best known term, the best known term IS the dense maximum, to the last bit,
whichever radii were computed.

The set of radii that ends up being computed, and therefore the running time, depends on the data and is
PRIVATE, as are all return values.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from certify.errors import PrivacyError, RadiusError
from privacy.smooth import LARGEST_EXPONENT, check_beta, check_ceiling, discounted, weight

BATCH = 4
"""At most this many indices are requested from `evaluate` at once."""


def dense_maximum(
    evaluate: Callable[[list[int]], Mapping[int, np.ndarray]], ceiling, beta: float, limit: int
) -> np.ndarray:
    """`max_{0 <= k <= limit} e^{-beta k} min(A_k, G)` per query, evaluating few `k`.

    `evaluate(ks)` returns `{k: A_k}` with `A_k` float (Q,), nondecreasing in `k`; each `k` costs an envelope
    run at radii `k` and `k+1`. `ceiling`: public `G`, (Q,). `limit`: number of record slots `N`; beyond it
    `A_k = A_limit`. Returns float64 (Q,), never below the public floor `e^{-600} G`.

    Guarantees:
    * dense maximum equals brute force: the same bits as evaluating every `k`;
    * smooth and at least the local sensitivity, as `smooth.smooth_bound`, provided `A_N` is the same number
      for all `D`. That holds when the backend caps the radius at `N` and is exactly monotone, since then
      `T_N(D)` lies in `T_{N+1}(D') = T_N(D')`. A backend with a solver tolerance must return `G` itself at `k
      = limit`.

    Errors: PrivacyError when `A_k` decreases or `evaluate` leaves out an index.
    """
    beta, limit = check_beta(beta), int(limit)
    ceiling = check_ceiling(np.atleast_1d(ceiling), np.atleast_1d(ceiling).shape)
    known: dict[int, np.ndarray] = {}
    batch = [0]
    while batch:
        answer = evaluate(batch)
        missing = [k for k in batch if k not in answer]
        if missing:
            raise PrivacyError(f"evaluate: no cross range returned for k = {missing}; return one per requested index")
        known.update({k: np.asarray(answer[k], np.float64) for k in batch})
        batch = _next_batch(known, ceiling, beta, limit)
    return _best(_capped(known, ceiling), ceiling, beta)


def needed_radii(
    cross_by_k: Mapping[int, np.ndarray], ceiling, beta: float, limit: int | None = None
) -> tuple[int, ...]:
    """Radii that would settle the largest unproven gaps; empty when the known maximum is the dense one.

    Returns radii (`k` and `k+1` for a few `k`), not every radius: ask again after computing them.
    """
    ceiling = check_ceiling(np.atleast_1d(ceiling), np.atleast_1d(ceiling).shape)
    known = {int(k): np.asarray(a, np.float64) for k, a in cross_by_k.items()}
    ks = _next_batch(known, ceiling, check_beta(beta), limit) if known else [0]
    return tuple(sorted({r for k in ks for r in (k, _next_radius(k, limit))}))


def dense_from_sparse(
    radii, cross_by_k: Mapping[int, np.ndarray], ceiling, beta: float, limit: int | None = None
) -> np.ndarray:
    """The dense maximum from the cross ranges already known, or a PrivacyError that names missing radii.

    `radii`: the radii computed. `cross_by_k`: `{k: A_k}`, (Q,) each, for `k` with `k` and `k+1` among `radii`
    (at `k = limit` only `k`: its width). `limit`: number of slots, None for no limit. Returns float64 (Q,).

    Guarantees:
    * sparse result is the dense one: when it returns, every other index is pruned, so the value equals the
      dense maximum bit for bit and is smooth; it never back-fills.

    The refusal depends on the data: compute the missing radii and repeat; do not publish it.
    """
    have = {int(r) for r in radii}
    stray = sorted(int(k) for k in cross_by_k if not {int(k), _next_radius(k, limit)} <= have)
    if stray:
        raise RadiusError(
            f"cross_by_k: index {stray[0]} needs radii {stray[0]} and {stray[0] + 1}, which are not in the "
            "list of computed radii; leave that index out"
        )
    missing = needed_radii(cross_by_k, ceiling, beta, limit)
    if missing:
        missing = tuple(r for r in missing if r not in have) or missing
        raise PrivacyError(
            f"radii: the computed radii do not prove the dense maximum at beta = {beta:g}; "
            f"compute radii {', '.join(map(str, missing))} as well and ask again"
        )
    ceiling = check_ceiling(np.atleast_1d(ceiling), np.atleast_1d(ceiling).shape)
    known = {int(k): np.asarray(a, np.float64) for k, a in cross_by_k.items()}
    return _best(_capped(known, ceiling), ceiling, check_beta(beta))


def _next_radius(k: int, limit: int | None) -> int:
    return int(k) + 1 if limit is None else min(int(k) + 1, limit)


def _capped(known: Mapping[int, np.ndarray], ceiling: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Known terms before discounting, `(k, min(A_k, G))` in increasing `k`; refuses a decreasing sequence."""
    rows, last = [], np.zeros_like(ceiling)
    for k in sorted(known):
        row = np.minimum(known[k], ceiling)
        if row.shape != ceiling.shape or not np.all(row >= last):
            raise PrivacyError(
                f"cross ranges: A_k at k = {k} has shape {row.shape} (ceiling {ceiling.shape}), is NaN, "
                "negative or decreases in k; the envelope is not nested, recompute it"
            )
        rows.append((k, row))
        last = row
    return rows


def _best(rows: list[tuple[int, np.ndarray]], ceiling: np.ndarray, beta: float) -> np.ndarray:
    best = discounted(ceiling, weight(LARGEST_EXPONENT, 1))
    for k, row in rows:
        best = np.maximum(best, discounted(row, weight(beta, k)))
    return best


def _next_batch(known: Mapping[int, np.ndarray], ceiling: np.ndarray, beta: float, limit: int | None) -> list[int]:
    """Up to BATCH indices to evaluate next, from the gaps with unproven indices; empty when all is pruned."""
    rows = _capped(known, ceiling)
    best = _best(rows, ceiling, beta)
    if 0 not in known:
        return [0]
    picks = []  # (excess of the gap's bound over the best term, index to evaluate)
    for (a, _), (b, row) in zip(rows, rows[1:], strict=False):
        last = _last_open(a, b - 1, row, best, beta)
        if last > a:
            picks.append((_excess(a, row, best, beta), (a + last + 1) // 2))
    a = rows[-1][0]
    last = _last_open(a, limit, ceiling, best, beta)
    if last > a:
        picks.extend((np.inf, k) for k in (last, a + math.isqrt(last - a)))
    return [k for _, k in sorted(set(picks), reverse=True)[:BATCH]]


def _excess(a: int, row: np.ndarray, best: np.ndarray, beta: float) -> float:
    return float(np.max(discounted(row, weight(beta, a + 1)) / best))


def _last_open(a: int, end: int | None, row: np.ndarray, best: np.ndarray, beta: float) -> int:
    """Largest `k` in `(a, end]` with `w_k row > best` for some query, else `a`; `w_k` is nonincreasing."""

    def is_open(k: int) -> bool:
        return bool(np.any(discounted(row, weight(beta, k)) > best))

    if end is None:
        # Beyond exponent 600 every weight is the floor, which `best` already contains.
        end = a + 1 if beta == 0.0 else max(a + 1, int(LARGEST_EXPONENT / beta) + 1)
    if end <= a or not is_open(a + 1):
        return a
    low, high = a + 1, end
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_open(middle) else (low, middle - 1)
    return low
