"""Sums of clipped per-record gradients in fixed point, and the k largest terms of each.

The clipped gradient of a record is rounded to a multiple of a public quantum (a power of two times the clip scale), so
sums are sums of integers: exact, the same in any order, on any number of threads.  Integers are held in float64 while
a tile of at most ``TILE`` records is summed (below 2^53, hence exact), and in int64 across tiles.

Rounding to the quantum is monotone, which is why the sums of interval ends contain the sums of the nominal run, and
why ``(M)`` holds for the numbers themselves (the floating-point top-k sums of a naive implementation break it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numba import njit

from models.ops.base import UNIT_ROUNDOFF, Interval

#: Largest number of records in a tile: 2^9 terms of at most 2^44 stay below 2^53.
TILE = 512
_BITS = 44
#: ``(v + _MAGIC) - _MAGIC`` rounds ``|v| < 2^51`` to the nearest integer.
_MAGIC = 1.5 * 2.0**52
_NONE = -(2.0**62)
_BLOCK = 64


@dataclass(frozen=True)
class FixedPoint:
    """The public grid of clipped gradients: ``scale`` (a power of two) times a gradient is the number to round.

    ``limit`` is the clip on that scale, ``unit`` the same rounded to an integer: no record contributes more.
    """

    clip: float
    scale: float
    limit: float = field(init=False)
    unit: int = field(init=False)

    def __post_init__(self):
        limit = self.clip * self.scale
        object.__setattr__(self, "limit", limit)
        object.__setattr__(self, "unit", int((limit + _MAGIC) - _MAGIC))

    @classmethod
    def make(cls, clip: float, batch_size: int) -> FixedPoint:
        """The finest grid on which sums of ``batch_size`` clipped gradients fit int64 with room to spare."""
        bits = min(_BITS, 59 - max(0, math.ceil(math.log2(max(1, batch_size)))))
        return cls(clip, math.ldexp(1.0, bits - math.ceil(math.log2(clip))))


@dataclass
class Sums:
    """What one worker has summed for one radius: integer sums and the ``keep`` largest terms of each parameter.

    ``top_lower`` holds the largest lower ends, ``top_upper`` the largest negated upper ends, as heaps ``(P, keep)``
    with the smallest kept term first.  ``degenerate`` counts records whose bounds were not finite.
    """

    lower: np.ndarray
    upper: np.ndarray
    top_lower: np.ndarray
    top_upper: np.ndarray
    degenerate: int = 0

    @classmethod
    def zeros(cls, size: int, keep: int) -> Sums:
        return cls(
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.full((size, keep), _NONE),
            np.full((size, keep), _NONE),
        )

    def merge(self, other: Sums) -> Sums:
        """Sums over the union of the records; neither operand is changed."""
        keep = self.top_lower.shape[1]

        def largest(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            both = np.concatenate([a, b], axis=1)
            return np.partition(both, both.shape[1] - keep, axis=1)[:, both.shape[1] - keep :] if keep else a

        return Sums(
            self.lower + other.lower,
            self.upper + other.upper,
            largest(self.top_lower, other.top_lower),
            largest(self.top_upper, other.top_upper),
            self.degenerate + other.degenerate,
        )


class Factors(NamedTuple):
    """Bounds of a weight's gradients before they are multiplied out: row ``m K + k`` is ``d[m] a[k]``, widened."""

    d: Interval
    a: Interval
    ladder: float

    def dense(self) -> Interval:
        return outer_interval(self.d, self.a, 1, "natural", self.ladder)


@dataclass(frozen=True, eq=False)
class Terms:
    """What one radius adds up over the steps of a window on the window's grid: int64, see `solvers.coupled`.

    ``lower``, ``upper`` ``(P,)``: sums of the ends.  ``rising``, ``falling`` ``(P, R)``, a column for each of the ``R``
    slots that may occur again: sums of ``clip + lower end`` and of ``clip - upper end``.
    """

    lower: np.ndarray
    upper: np.ndarray
    rising: np.ndarray
    falling: np.ndarray

    @classmethod
    def zeros(cls, size: int, columns: int) -> Terms:
        shapes = ((size,), (size,), (size, columns), (size, columns))
        return cls(*(np.zeros(shape, np.int64) for shape in shapes))


@njit(nogil=True, cache=True)
def _on_grid(v, limit):
    """Clip, and round to the nearest integer."""
    v = v if v > -limit else -limit
    v = v if v < limit else limit
    return (v + _MAGIC) - _MAGIC


@njit(nogil=True, cache=True)
def _push(heap, value):
    """Replace the smallest element of the heap by a larger value."""
    size = heap.shape[0]
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = value


# Every term is an integer and no partial sum reaches 2^53, so reassociation changes nothing.
@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def _sum_and_count(values, n, threshold):
    total = 0.0
    count = 0
    for i in range(n):
        total += values[i]
        count += 1 if values[i] > threshold else 0
    return total, count


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def _sum_and_count_below(values, n, threshold):
    total = 0.0
    count = 0
    for i in range(n):
        total += values[i]
        count += 1 if values[i] < threshold else 0
    return total, count


@njit(nogil=True, cache=True)
def _keep_largest(values, n, sign, heap):
    """Push every ``sign * values[i]`` above the heap's smallest; blocks without any are skipped at vector speed."""
    for start in range(0, n, _BLOCK):
        stop = min(n, start + _BLOCK)
        smallest = heap[0]
        count = 0
        for i in range(start, stop):
            count += 1 if sign * values[i] > smallest else 0
        if count > 0:
            for i in range(start, stop):
                v = sign * values[i]
                if v > heap[0]:
                    _push(heap, v)


@njit(nogil=True, cache=True)
def _finish(lo, hi, n, bad, unit, p, lower, upper, top_lower, top_upper):
    """Add one parameter's rounded terms of a tile to its sums and heaps."""
    for i in bad:
        lo[i] = -unit
        hi[i] = unit
    keep = top_lower.shape[1]
    total, count = _sum_and_count(lo, n, top_lower[p, 0] if keep > 0 else np.inf)
    lower[p] += np.int64(total)
    if count > 0:
        _keep_largest(lo, n, 1.0, top_lower[p])
    total, count = _sum_and_count_below(hi, n, -top_upper[p, 0] if keep > 0 else -np.inf)
    upper[p] += np.int64(total)
    if count > 0:
        _keep_largest(hi, n, -1.0, top_upper[p])


@njit(nogil=True, cache=True)
def _outer_point(d, a, limit, bad, target, total):
    """One position: gradient of weight ``(m, k)`` is ``d[m] a[k]``; nominal sums."""
    rows, n = d.shape
    cols = a.shape[0]
    buffer = np.empty(n)
    for m in range(rows):
        dm = d[m]
        for k in range(cols):
            ak = a[k]
            for i in range(n):
                buffer[i] = _on_grid(dm[i] * ak[i], limit)
            for i in bad:
                buffer[i] = 0.0
            total[target[m * cols + k]] += np.int64(_sum_and_count(buffer, n, np.inf)[0])


@njit(nogil=True, cache=True)
def _outer_known(dl, du, a, limit, bad, unit, target, lower, upper, top_lower, top_upper):
    """One position, ``a`` known exactly (the record's own features)."""
    rows, n = dl.shape
    cols = a.shape[0]
    lo = np.empty(n)
    hi = np.empty(n)
    for m in range(rows):
        below = dl[m]
        above = du[m]
        for k in range(cols):
            ak = a[k]
            for i in range(n):
                s = below[i] * ak[i]
                t = above[i] * ak[i]
                lo[i] = _on_grid(s if s < t else t, limit)
                hi[i] = _on_grid(s if s > t else t, limit)
            _finish(lo, hi, n, bad, unit, target[m * cols + k], lower, upper, top_lower, top_upper)


@njit(nogil=True, cache=True)
def _outer_interval(dl, du, al, au, limit, bad, unit, target, lower, upper, top_lower, top_upper):
    """One position, natural product of two intervals."""
    rows, n = dl.shape
    cols = al.shape[0]
    lo = np.empty(n)
    hi = np.empty(n)
    for m in range(rows):
        below = dl[m]
        above = du[m]
        for k in range(cols):
            p = al[k]
            q = au[k]
            for i in range(n):
                c0 = below[i] * p[i]
                c1 = below[i] * q[i]
                c2 = above[i] * p[i]
                c3 = above[i] * q[i]
                u = c0 if c0 < c1 else c1
                w = c2 if c2 < c3 else c3
                lo[i] = _on_grid(u if u < w else w, limit)
                v = c0 if c0 > c1 else c1
                w = c2 if c2 > c3 else c3
                hi[i] = _on_grid(v if v > w else w, limit)
            _finish(lo, hi, n, bad, unit, target[m * cols + k], lower, upper, top_lower, top_upper)


@njit(nogil=True, cache=True)
def _dense_point(g, limit, bad, target, total):
    rows, n = g.shape
    buffer = np.empty(n)
    for m in range(rows):
        for i in range(n):
            buffer[i] = _on_grid(g[m, i], limit)
        for i in bad:
            buffer[i] = 0.0
        total[target[m]] += np.int64(_sum_and_count(buffer, n, np.inf)[0])


@njit(nogil=True, cache=True)
def _dense_interval(gl, gu, limit, bad, unit, target, lower, upper, top_lower, top_upper):
    rows, n = gl.shape
    lo = np.empty(n)
    hi = np.empty(n)
    for m in range(rows):
        for i in range(n):
            lo[i] = _on_grid(gl[m, i], limit)
            hi[i] = _on_grid(gu[m, i], limit)
        _finish(lo, hi, n, bad, unit, target[m], lower, upper, top_lower, top_upper)


@njit(nogil=True, cache=True)
def _add_terms(lo, hi, n, factor, clip, columns, p, lower, upper, rising, falling):
    """Add one parameter's rounded terms of a tile, rounded once more to the window's grid; they are overwritten."""
    below = 0
    above = 0
    for i in range(n):
        lo[i] = np.rint(factor * lo[i])
        hi[i] = np.rint(factor * hi[i])
        below += np.int64(lo[i])
        above += np.int64(hi[i])
    lower[p] += below
    upper[p] += above
    if columns.shape[0] > 0:
        for i in range(n):
            rising[p, columns[i]] += clip + np.int64(lo[i])
            falling[p, columns[i]] += clip - np.int64(hi[i])


@njit(nogil=True, cache=True)
def _dense_terms(gl, gu, limit, bad, unit, target, sums, factor, clip, columns, terms):
    rows, n = gl.shape
    lo = np.empty(n)
    hi = np.empty(n)
    for m in range(rows):
        for i in range(n):
            lo[i] = _on_grid(gl[m, i], limit)
            hi[i] = _on_grid(gu[m, i], limit)
        _finish(lo, hi, n, bad, unit, target[m], *sums)
        _add_terms(lo, hi, n, factor, clip, columns, target[m], *terms)


@njit(nogil=True, cache=True)
def _factors_terms(
    dl, du, al, au, widening, floor, limit, bad, unit, target, sums, factor, clip, columns, terms
):
    rows, n = dl.shape
    cols = al.shape[0]
    lo = np.empty(n)
    hi = np.empty(n)
    dm = np.maximum(np.abs(dl), np.abs(du))
    am = np.maximum(np.abs(al), np.abs(au))
    for m in range(rows):
        below = dl[m]
        above = du[m]
        for k in range(cols):
            p = al[k]
            q = au[k]
            for i in range(n):
                c0 = below[i] * p[i]
                c1 = below[i] * q[i]
                c2 = above[i] * p[i]
                c3 = above[i] * q[i]
                e = widening * (dm[m, i] * am[k, i]) + floor
                u = c0 if c0 < c1 else c1
                w = c2 if c2 < c3 else c3
                lo[i] = _on_grid((u if u < w else w) - e, limit)
                v = c0 if c0 > c1 else c1
                w = c2 if c2 > c3 else c3
                hi[i] = _on_grid((v if v > w else w) + e, limit)
            _finish(lo, hi, n, bad, unit, target[m * cols + k], *sums)
            _add_terms(lo, hi, n, factor, clip, columns, target[m * cols + k], *terms)


@njit(nogil=True, cache=True)
def _largest_sums(kept, values):
    """Per row, the sum of the ``k`` largest among ``kept`` ``(P, k)``, ascending, and ``values`` ``(P, R)``; int64."""
    rows, count = kept.shape
    total = np.zeros(rows, np.int64)
    if count > 0:
        for p in range(rows):
            heap = kept[p].copy()
            _keep_largest(values[p], values.shape[1], 1, heap)
            total[p] = heap.sum()
    return total


@njit(nogil=True, cache=True)
def _materialise_point(d, a, positions, g):
    rows = d.shape[0] // positions
    cols = a.shape[0] // positions
    n = d.shape[1]
    for m in range(rows):
        for k in range(cols):
            out = g[m * cols + k]
            out[:] = 0.0
            for r in range(positions):
                dr = d[r * rows + m]
                ar = a[r * cols + k]
                for i in range(n):
                    out[i] += dr[i] * ar[i]


@njit(nogil=True, cache=True)
def _materialise_natural(dl, du, al, au, positions, gl, gu):
    rows = dl.shape[0] // positions
    cols = al.shape[0] // positions
    n = dl.shape[1]
    for m in range(rows):
        for k in range(cols):
            lo = gl[m * cols + k]
            hi = gu[m * cols + k]
            lo[:] = 0.0
            hi[:] = 0.0
            for r in range(positions):
                below = dl[r * rows + m]
                above = du[r * rows + m]
                p = al[r * cols + k]
                q = au[r * cols + k]
                for i in range(n):
                    c0 = below[i] * p[i]
                    c1 = below[i] * q[i]
                    c2 = above[i] * p[i]
                    c3 = above[i] * q[i]
                    u = c0 if c0 < c1 else c1
                    w = c2 if c2 < c3 else c3
                    lo[i] += u if u < w else w
                    v = c0 if c0 > c1 else c1
                    w = c2 if c2 > c3 else c3
                    hi[i] += v if v > w else w


@njit(nogil=True, cache=True)
def _materialise_midpoint_radius(dl, du, al, au, positions, gl, gu):
    rows = dl.shape[0] // positions
    cols = al.shape[0] // positions
    n = dl.shape[1]
    dc = 0.5 * dl + 0.5 * du
    dr = 0.5 * du - 0.5 * dl
    ac = 0.5 * al + 0.5 * au
    ar = 0.5 * au - 0.5 * al
    size = np.abs(ac) + ar
    centre = np.empty(n)
    radius = np.empty(n)
    for m in range(rows):
        for k in range(cols):
            centre[:] = 0.0
            radius[:] = 0.0
            for r in range(positions):
                x, y = dc[r * rows + m], dr[r * rows + m]
                p, q, s = ac[r * cols + k], ar[r * cols + k], size[r * cols + k]
                for i in range(n):
                    centre[i] += x[i] * p[i]
                    radius[i] += abs(x[i]) * q[i] + y[i] * s[i]
            lo = gl[m * cols + k]
            hi = gu[m * cols + k]
            for i in range(n):
                lo[i] = centre[i] - radius[i]
                hi[i] = centre[i] + radius[i]


@njit(nogil=True, cache=True)
def _widen_outer(dl, du, al, au, positions, factor, floor, gl, gu):
    """Outward by ``factor`` times a bound of the sum of absolute products, which grows with the boxes."""
    rows = dl.shape[0] // positions
    cols = al.shape[0] // positions
    n = dl.shape[1]
    dm = np.zeros((rows, n))
    am = np.zeros((cols, n))
    for r in range(positions):
        for m in range(rows):
            for i in range(n):
                dm[m, i] = max(dm[m, i], max(abs(dl[r * rows + m, i]), abs(du[r * rows + m, i])))
        for k in range(cols):
            for i in range(n):
                am[k, i] = max(am[k, i], max(abs(al[r * cols + k, i]), abs(au[r * cols + k, i])))
    for m in range(rows):
        for k in range(cols):
            lo = gl[m * cols + k]
            hi = gu[m * cols + k]
            for i in range(n):
                e = factor * (dm[m, i] * am[k, i]) + floor
                lo[i] -= e
                hi[i] += e


def add_outer_point(
    d: np.ndarray, a: np.ndarray, grid: FixedPoint, bad: np.ndarray, target: np.ndarray, sums: Sums
) -> None:
    """Nominal sums of a weight seen at one position; ``d`` ``(M, n)`` on the grid's scale, ``a`` ``(K, n)``."""
    _outer_point(d, a, grid.limit, bad, target, sums.lower)


def add_outer(
    d: Interval, a: Interval, grid: FixedPoint, bad: np.ndarray, target: np.ndarray, sums: Sums
) -> None:
    """Natural interval products of a weight seen at one position."""
    tail = (grid.limit, bad, grid.unit, target, sums.lower, sums.upper, sums.top_lower, sums.top_upper)
    if a.lower is a.upper:
        _outer_known(d.lower, d.upper, a.lower, *tail)
    else:
        _outer_interval(d.lower, d.upper, a.lower, a.upper, *tail)


def add_dense_point(g: np.ndarray, grid: FixedPoint, bad: np.ndarray, target: np.ndarray, sums: Sums) -> None:
    """Nominal sums of per-record gradients ``(F, n)`` on the grid's scale."""
    _dense_point(g, grid.limit, bad, target, sums.lower)


def add_dense(g: Interval, grid: FixedPoint, bad: np.ndarray, target: np.ndarray, sums: Sums) -> None:
    """Interval sums of per-record gradients ``(F, n)`` on the grid's scale."""
    tail = (grid.limit, bad, grid.unit, target, sums.lower, sums.upper, sums.top_lower, sums.top_upper)
    _dense_interval(g.lower, g.upper, *tail)


def add_terms(
    g: Interval | Factors, grid: FixedPoint, bad: np.ndarray, target: np.ndarray, sums: Sums,
    terms: Terms, factor: float, clip: int, columns: np.ndarray,
) -> None:  # fmt: skip
    """`add_dense`, and the same terms times ``factor`` to ``terms``.

    ``clip``: that of the records, times ``factor``.  ``columns`` ``(n,)``: those of the records, or empty for none.
    """
    totals = (sums.lower, sums.upper, sums.top_lower, sums.top_upper)
    parts = (terms.lower, terms.upper, terms.rising, terms.falling)
    tail = (grid.limit, bad, grid.unit, target, totals, factor, clip, columns, parts)
    if isinstance(g, Factors):
        _factors_terms(*g.d, *g.a, *_widening(g.ladder, 1, "natural"), *tail)
    else:
        _dense_terms(*g, *tail)


def largest_sums(kept: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sum of the ``k`` largest entries of each row of ``kept`` ``(P, k)``, ascending, and ``values`` ``(P, R)``."""
    return _largest_sums(kept, values)


def outer_point(d: np.ndarray, a: np.ndarray, positions: int) -> np.ndarray:
    """Per-record gradients ``(M*K, n)`` of a weight seen at several positions."""
    g = np.empty((d.shape[0] // positions * (a.shape[0] // positions), d.shape[1]))
    _materialise_point(d, a, positions, g)
    return g


def outer_interval(d: Interval, a: Interval, positions: int, products: str, ladder: float) -> Interval:
    """Bounds of ``outer_point`` over boxes."""
    shape = (d.lower.shape[0] // positions * (a.lower.shape[0] // positions), d.lower.shape[1])
    g = Interval(np.empty(shape), np.empty(shape))
    kernel = _materialise_natural if products == "natural" else _materialise_midpoint_radius
    kernel(*d, *a, positions, *g)
    if ladder > 0.0:
        _widen_outer(*d, *a, positions, *_widening(ladder, positions, products), *g)
    return g


def _widening(ladder: float, positions: int, products: str) -> tuple[float, float]:
    """How far bounds of a weight's gradients go outward: as a factor of the products, and at least."""
    terms = positions + 2 if products == "natural" else 4 * positions + 12
    # Products on the grid's scale below 2^-1000 are far under half a quantum: the floor is a whole quantum's 2^-40.
    return ladder * terms * UNIT_ROUNDOFF * positions, ladder * 2.0**-40
