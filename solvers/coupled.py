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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from models.ops.base import ABSOLUTE, RELATIVE, Interval
from solvers.gradients import Factors, FixedPoint, Sums, Terms, add_terms, largest_sums
from solvers.update import largest, totals, update_interval
from solvers.window import Boxes, Window

#: Bounds of some slots' gradients over several boxes, tile by tile: `solvers.ibp._visit`.
Visit = Callable[
    [Window, np.ndarray, list[Interval], list[float], FixedPoint],
    Iterator[tuple[int, slice, Interval | Factors, np.ndarray, np.ndarray]],
]

#: Sums over a window stay below 2^_BITS quanta.
_BITS = 60
#: Contraction over a window is limited, so that weights stay within a factor of 2^10.
_MOST_CONTRACTION = 2.0**-10
#: Radii that pass over the records together hold no more than this, unless one alone does.
_TOGETHER_BYTES = 1 << 30


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
        most = sum(w * max(1, len(s.batch)) * g.unit for w, s, g in zip(weights, window.steps, grids, strict=True))
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


def radius_bytes(parameters: int, recurring: int, radius: int) -> int:
    """Memory of one radius in a window, where ``recurring`` slots are in steps that share slots with other steps."""
    return 16 * parameters * (recurring + 8 * radius + 8)


def coupled(window: Window, size: int, nominal: list[np.ndarray], visit: Visit, threads: int) -> list[Boxes]:
    """Boxes of all radii after the window's fresh steps; ``size`` is ``P``, ``nominal`` the parameters after each.

    In every step the records are read once for all radii, or for as many as fit into memory.
    """
    public = _Public.make(window)
    wide = [j for j, k in enumerate(window.radii) if k > 0]
    most = radius_bytes(size, public.recurring, min(max(window.radii), public.slots))
    together = max(1, _TOGETHER_BYTES // (threads * most))
    groups = max(min(threads, len(wide)), -(-len(wide) // together))

    def work(group: int) -> dict[int, list[Interval]]:
        rows = wide[group::groups]
        return dict(zip(rows, _run(window, size, rows, public, visit), strict=True))

    found = {}
    with ThreadPoolExecutor(threads) as pool:
        for part in pool.map(work, range(groups)):
            found |= part
    result = []
    for t, point in enumerate(nominal):
        rows = [found[j][t] if j in found else Interval(point, point) for j in range(len(window.radii))]
        lower, upper = np.array([r.lower for r in rows]), np.array([r.upper for r in rows])
        result.append(Boxes(point, lower.reshape(len(rows), -1), upper.reshape(len(rows), -1)))
    return result


@dataclass(frozen=True, eq=False)
class _Public:
    """Public facts of a window: its grid, how many slots it has, and how many of them need a column of their own.

    ``columns``: for every step the columns of its batch, in order; none where no slot of the step is in another step,
    since then only the largest of its terms matter.
    """

    grid: _Grid
    slots: int
    recurring: int
    columns: tuple[np.ndarray, ...]

    @classmethod
    def make(cls, window: Window) -> _Public:
        batches = [one.batch for one in window.steps]
        slots, counts = np.unique(np.concatenate(batches), return_counts=True)
        mixed = [batch for batch in batches if np.isin(batch, slots[counts > 1]).any()]
        kept = np.unique(np.concatenate([slots[:0], *mixed]))
        columns = (np.searchsorted(kept, b) if np.isin(b, kept).any() else slots[:0] for b in batches)
        return cls(_Grid.make(window), len(slots), len(kept), tuple(columns))


@dataclass(eq=False)
class _Radius:
    """One radius on its way through a window.

    ``rising`` ``(P, chosen)`` int64, ascending: of the slots that occur once, the largest of what choosing one adds to
    the upper end, zeros standing for none; ``falling``: what it takes from the lower end.  For the others: ``terms``.
    """

    radius: int
    start: Interval
    terms: Terms
    rising: np.ndarray
    falling: np.ndarray
    box: Interval = field(init=False)
    found: list[Interval] = field(default_factory=list)

    def __post_init__(self):
        self.box = self.start

    @classmethod
    def make(cls, radius: int, start: Interval, public: _Public) -> _Radius:
        size, chosen = len(start.lower), min(radius, public.slots)
        none = np.zeros((size, chosen), np.int64)
        return cls(radius, start, Terms.zeros(size, public.recurring), none, none)

    def choose(self, sums: Sums, empty: int, spent: int, factor: float, clip: int) -> None:
        """Take in the largest terms of a step whose slots occur once."""
        lower, upper = (largest(heap, empty, spent) for heap in (sums.top_lower, sums.top_upper))
        self.rising = _merged(self.rising, clip + np.rint(factor * lower).astype(np.int64))
        self.falling = _merged(self.falling, clip + np.rint(factor * upper).astype(np.int64))


def _merged(kept: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """The largest of both, as many as ``kept``, ascending."""
    return np.sort(np.concatenate([kept, terms], axis=1), axis=1)[:, terms.shape[1] :]


def _run(window: Window, size: int, rows: Sequence[int], public: _Public, visit: Visit) -> list[list[Interval]]:
    """Some radii through the window, side by side: the boxes after its fresh steps."""
    first, grid = window.boxes, public.grid
    states = [_Radius.make(window.radii[j], Interval(first.lower[j], first.upper[j]), public) for j in rows]
    reach, slack, power = 0, 1024, 1.0
    for t, one in enumerate(window.steps):
        fixed, factor, columns = grid.grids[t], grid.factors[t], public.columns[t]
        clip = int(np.rint(factor * fixed.unit))
        count, places = len(one.batch), window.records.places(one.batch)
        sums = [Sums.zeros(size, min(state.radius, count)) for state in states]
        boxes, ladders = [state.box for state in states], [2.0 * state.radius for state in states]
        for i, tile, bounds, bad, target in visit(window, one.batch[places], boxes, ladders, fixed):
            at = columns[places[tile]] if len(columns) else columns
            add_terms(bounds, fixed, bad, target, sums[i], states[i].terms, factor, clip, at)

        reach += count * clip
        # One unit a term for rounding to this grid, and one gradient unit a term for rounding to the other.
        slack += count * (1 + math.ceil(factor))
        power *= window.contraction
        relative = (8 * t + 24) * RELATIVE
        for state, found, j in zip(states, sums, rows, strict=True):
            if len(columns):
                empty = np.delete(columns, places)
                state.terms.rising[:, empty] += clip
                state.terms.falling[:, empty] += clip
            else:
                state.choose(found, count - len(places), min(state.radius, count), factor, clip)
            if t + 1 < len(window.known):
                state.box = Interval(window.known[t + 1].lower[j], window.known[t + 1].upper[j])
                continue
            total = Interval(*totals(window, found, state.radius, count, len(places), fixed))
            plain = update_interval(window, state.box, total, one.learning_rate / window.normaliser / fixed.scale)
            up = largest_sums(state.rising, state.terms.rising) - state.terms.lower + slack
            down = largest_sums(state.falling, state.terms.falling) + state.terms.upper + slack
            error = relative * (state.start.magnitude + grid.quantum * (2.0 * reach + slack)) + ABSOLUTE
            coupled_lower = power * (state.start.lower - grid.quantum * down.astype(np.float64)) - error
            coupled_upper = power * (state.start.upper + grid.quantum * up.astype(np.float64)) + error
            state.box = Interval(np.maximum(plain.lower, coupled_lower), np.minimum(plain.upper, coupled_upper))
            state.found.append(state.box)
    return [state.found for state in states]
