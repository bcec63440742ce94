"""Interval bounds for a window of several steps in which the *same* k records differ (replace-one).

A record of the data set occurs in several steps; charging the radius to every step separately lets an adversary
replace other records each time.  Here the radius counts records of the window: with ``l_is`` the lower end of record
``i``'s clipped gradient at step ``s`` over the box of radius ``k``, and ``w_s`` the weight of step ``s`` in the result,

    theta_t <= c^t (U_0 - sum_s w_s sum_i l_is + max over k slots of sum_{i chosen} C_i)
    C_i = sum over the steps s in which i occurs of w_s (clip + l_is)

(lower end symmetric), since a chosen record contributes at most ``w_s clip`` instead of ``-w_s l_is`` wherever it
occurs.  The bound of every step is intersected with the plain one and feeds the gradients of the next.

Property (M): for a neighbour that differs in slot ``j``, add ``j`` to the chosen slots.  A chosen record contributes
``w_s clip`` whatever its ``l_is``; those not chosen can only have smaller ``l_is``, because the boxes nest.  All
quantities are integers on a public grid, with ``C_i`` the exact sum of rounded ``w_s l_is`` and rounded ``w_s clip``,
so the cancellation is exact; what remains of rounding is widened by a public constant, or by a multiple of the boxes'
magnitudes, which grow with the boxes.

Dividing by ``c^s`` (weights ``w_s = rate_s / (normaliser c^s)``) keeps earlier terms unscaled, hence exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from models.ops.base import ABSOLUTE, RELATIVE, Interval
from solvers.gradients import FixedPoint
from solvers.update import update_interval
from solvers.window import Boxes, Step, Window

#: Ends of the clipped gradients of a batch: see `coupled`.
Ends = Callable[[Window, Step, Interval, float, FixedPoint], tuple[np.ndarray, np.ndarray]]

#: Sums over a window stay below 2^_BITS quanta.
_BITS = 60
#: Contraction over a window is limited, so that weights stay within a factor of 2^10.
_MOST_CONTRACTION = 2.0**-10


@dataclass(frozen=True, eq=False)
class _Grid:
    """The public grid of a window: ``quantum`` (parameter units a unit), per step the factor from gradient units."""

    quantum: float
    factors: np.ndarray
    grids: tuple[FixedPoint, ...]

    @classmethod
    def make(cls, window: Window) -> _Grid:
        grids = tuple(FixedPoint.make(window.clip, max(1, len(s.batch))) for s in window.steps)
        powers = window.contraction ** np.arange(1, len(window.steps) + 1)
        rates = np.array([s.learning_rate for s in window.steps])
        weights = rates / window.normaliser / powers / np.array([g.scale for g in grids])
        most = sum(w * len(s.batch) * g.unit for w, s, g in zip(weights, window.steps, grids, strict=True))
        quantum = math.ldexp(1.0, math.ceil(math.log2(most)) - _BITS)
        return cls(quantum, weights / quantum, grids)


def pieces(window: Window) -> list[tuple[int, int, int]]:
    """Ranges ``(start, known, stop)`` of steps that cover the window's fresh steps, ``start .. known - 1`` being known.

    One, unless the window's contraction would spread the weights too far; cut by a public rule.
    """
    known, stop = window.fresh.start, window.fresh.stop
    longest = stop
    if window.contraction < 1.0:
        longest = max(1, int(math.log(_MOST_CONTRACTION) / math.log(window.contraction)))
    history = min(known, max(known + longest - stop, longest // 2))
    starts = range(known, stop, longest - history)
    return [(s - history, s, min(stop, s + longest - history)) for s in starts]


def coupled(window: Window, size: int, nominal: list[np.ndarray], ends: Ends, threads: int) -> list[Boxes]:
    """Boxes of all radii after the window's fresh steps; ``size`` is ``P``, ``nominal`` the parameters after each.

    ``ends(window, step, box, ladder, grid)`` gives the ends of the batch's clipped gradients over a box, on the grid:
    two float64 arrays ``(P, len(batch))`` in the order of the batch, zero for empty slots.
    """
    grid = _Grid.make(window)
    slots = np.unique(np.concatenate([s.batch for s in window.steps]))
    places = [np.searchsorted(slots, s.batch) for s in window.steps]

    def one(j: int) -> list[Interval]:
        known = [Interval(boxes.lower[j], boxes.upper[j]) for boxes in window.known]
        return _radius(window, size, window.radii[j], known, grid, len(slots), places, ends)

    wide = [j for j, k in enumerate(window.radii) if k > 0]
    with ThreadPoolExecutor(max(1, min(threads, len(wide)))) as pool:
        found = dict(zip(wide, pool.map(one, wide), strict=True))
    result = []
    for t, point in enumerate(nominal):
        rows = [found[j][t] if j in found else Interval(point, point) for j in range(len(window.radii))]
        lower, upper = np.array([r.lower for r in rows]), np.array([r.upper for r in rows])
        result.append(Boxes(point, lower.reshape(len(rows), -1), upper.reshape(len(rows), -1)))
    return result


def _radius(
    window: Window, size: int, radius: int, known: list[Interval], grid: _Grid, slots: int, places: list, ends: Ends
) -> list[Interval]:
    """One radius through the window: the boxes after its fresh steps."""
    rising = np.zeros((size, slots), np.int64)  # what choosing a slot adds to the upper end
    falling = np.zeros((size, slots), np.int64)  # what it takes from the lower end
    sum_lower, sum_upper = np.zeros(size, np.int64), np.zeros(size, np.int64)
    chosen = min(radius, slots)
    start = box = known[0]
    reach, slack, power, found = 0, 1024, 1.0, []
    for t, (one, place) in enumerate(zip(window.steps, places, strict=True)):
        fixed, factor = grid.grids[t], grid.factors[t]
        lower, upper = ends(window, one, box, 2.0 * radius, fixed)

        clip = int(np.rint(factor * fixed.unit))
        low = np.rint(factor * lower).astype(np.int64)
        high = np.rint(factor * upper).astype(np.int64)
        sum_lower += low.sum(axis=1)
        sum_upper += high.sum(axis=1)
        rising[:, place] += clip + low
        falling[:, place] += clip - high
        reach += len(place) * clip
        # One unit a term for rounding to this grid, and one gradient unit a term for rounding to the other.
        slack += len(place) * (1 + math.ceil(factor))

        power *= window.contraction
        if t + 1 < len(known):
            box = known[t + 1]
            continue
        plain = _step(window, one, box, lower, upper, radius, fixed)
        up = (slack + _largest(rising, chosen) - sum_lower).astype(np.float64)
        down = (slack + _largest(falling, chosen) + sum_upper).astype(np.float64)
        error = (8 * t + 24) * RELATIVE * (start.magnitude + grid.quantum * (2.0 * reach + slack)) + ABSOLUTE
        coupled_lower = power * (start.lower - grid.quantum * down) - error
        coupled_upper = power * (start.upper + grid.quantum * up) + error
        box = Interval(np.maximum(plain.lower, coupled_lower), np.minimum(plain.upper, coupled_upper))
        found.append(box)
    return found


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Sum of the ``count`` largest entries of each row, int64."""
    if count == 0:
        return np.zeros(len(values), np.int64)
    split = values.shape[1] - count
    return np.partition(values, split, axis=1)[:, split:].sum(axis=1) if split else values.sum(axis=1)


def _step(window: Window, one: Step, box: Interval, lower, upper, radius: int, fixed: FixedPoint) -> Interval:
    """The plain bound of one step, from the same gradients."""
    size = len(one.batch)
    spent = min(radius, size)
    low, high = lower.astype(np.int64), upper.astype(np.int64)
    allowance = spent * fixed.unit + size
    least = low.sum(axis=1) - _largest(low, spent) - allowance
    most = high.sum(axis=1) + _largest(-high, spent) + allowance
    total = Interval(least.astype(np.float64), most.astype(np.float64))
    return update_interval(window, box, total, one.learning_rate / window.normaliser / fixed.scale)
