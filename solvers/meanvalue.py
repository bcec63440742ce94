"""Mean-value bounds: interval bounds of a step at the middle of a box, and the Jacobian over the box for the rest.

For the box ``T`` of radius ``k`` with middle ``m`` and half-widths ``r``,

    step(theta) in step_k({m}) +- M r for theta in T,    M = largest |contraction I - (rate / normaliser) J| over T,

with ``J`` the Jacobian in which ``k`` records differ (`solvers.jacobian`).  Every step's bound is intersected with that
of `solvers.ibp` and feeds the next.  Where the gradients of many records pull the parameters together, as those of
convex losses do, ``M r`` is smaller than ``r``, and the boxes stay small where interval bounds explode.

Guarantees: those of `solvers.ibp`.  Proof of property (M), [docs/relational.md]: for neighbours ``D``, ``D'`` and ``T``
inside ``T'``, the end at ``m`` is attained by some run with ``k`` records replaced, which differs from ``D'`` in
``k + 1``; its step at ``m`` is at most its step at ``m'`` plus ``M' |m - m'|``, and ``|m - m'| <= r' - r``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from models.ops import Interval
from models.ops.base import ABSOLUTE, RELATIVE
from solvers.gradients import FixedPoint, Sums, add_dense
from solvers.hidden import Hidden, jacobians
from solvers.ibp import Plan, _Outer, _total, ibp, record_gradients, step, totals
from solvers.jacobian import Curvature, Head
from solvers.update import update_interval
from solvers.window import Boxes, Step, Window

#: From the number of a step, its boxes before and after, and its curvatures by row (None at radius 0): tighter boxes.
Further = Callable[[int, Boxes, Boxes, list[Curvature | None]], Boxes]


def meanvalue(window: Window, threads: int = 1) -> list[Boxes]:
    """Boxes after each of the window's fresh steps; raises UnsupportedWindowError where `jacobians` does."""
    return tightened(window, jacobians(window), threads, lambda t, before, after, curvatures: after)


def tightened(window: Window, head: Head | Hidden, threads: int, further: Further) -> list[Boxes]:
    """Interval bounds, intersected at every step with mean-value bounds, and with what ``further`` makes of them."""
    limits, boxes, found = ibp(window, threads), window.known[-1], []
    with workers(threads) as pool:
        for t, limit in zip(window.fresh, limits, strict=True):
            one = window.steps[t]
            if found:  # the first step of `limits` starts from these boxes already
                limit = intersection(limit, step(window, head.plan, boxes, one, pool, threads))
            curvatures = curvatures_of(window, head, one, boxes, pool)
            work = partial(_mean_value, window, head, one, boxes)
            ends = [*(map if pool is None else pool.map)(work, range(len(curvatures)), curvatures)]
            lower, upper = (np.array(side).reshape(limit.lower.shape) for side in zip(*ends, strict=True))
            boxes = further(t, boxes, intersection(limit, replace(limit, lower=lower, upper=upper)), curvatures)
            found.append(boxes)
    return found


def workers(threads: int):
    """A pool of threads as a context, or None where one thread is enough."""
    return nullcontext() if threads == 1 else ThreadPoolExecutor(threads)


def curvatures_of(window: Window, head: Head | Hidden, one: Step, boxes: Boxes, pool) -> list[Curvature | None]:
    """The Jacobians of a step over the box of each radius; None at radius 0 and where there is no bound."""

    def work(radius: int, lower: np.ndarray, upper: np.ndarray) -> Curvature | None:
        return head.curvature(window, one, Interval(lower, upper), radius) if radius > 0 else None

    return [*(map if pool is None else pool.map)(work, window.radii, boxes.lower, boxes.upper)]


def intersection(one: Boxes, other: Boxes) -> Boxes:
    """What lies in the boxes of both."""
    return replace(one, lower=np.maximum(one.lower, other.lower), upper=np.minimum(one.upper, other.upper))


def _mean_value(
    window: Window, head: Head | Hidden, one: Step, boxes: Boxes, row: int, found: Curvature | None
) -> Interval:
    """The mean-value bound of one step at one radius."""
    nothing = np.full(head.plan.size, np.inf)
    if found is None:
        return Interval(-nothing, nothing)
    radius, size = window.radii[row], len(one.batch)
    box = Interval(boxes.lower[row], boxes.upper[row])
    middle = 0.5 * box.lower + 0.5 * box.upper
    # The ladders: |middle - middle'| and every rounding error are paid for once more with every radius.
    half = np.maximum(box.upper - middle, middle - box.lower)
    half = half + (8.0 * (radius + 1) * RELATIVE * box.magnitude + ABSOLUTE)

    grid = FixedPoint.make(window.clip, max(1, size))
    keep = min(radius, size) if window.adjacency == "replace-one" else 0
    sums = _point_sums(window, head.plan, one, middle, grid, keep)
    total = Interval(*totals(window, sums, radius, size, len(window.records.filled(one.batch)), grid))
    centre = update_interval(
        window, Interval(middle, middle), total, one.learning_rate / window.normaliser / grid.scale
    )
    spread = found.transition(window, one, radius).magnitude @ half
    spread = spread * (1.0 + 4.0 * (radius + 1) * (len(half) + 8) * RELATIVE)
    spread = spread + (2 * radius + 1) * 2.0 * head.rounding(window, one, box)
    return Interval(centre.lower - spread, centre.upper + spread)


def _point_sums(window: Window, plan: Plan, one: Step, theta: np.ndarray, grid: FixedPoint, keep: int) -> Sums:
    """Sums of the known records' clipped gradients at a point, and the ``keep`` largest terms."""
    sums, shared, nothing = Sums.zeros(plan.size, keep), plan.shared(theta), np.zeros(0, np.int64)
    slots = window.records.filled(one.batch)
    for start in range(0, len(slots), plan.tile):
        x, y = window.records.tile(slots[start : start + plan.tile])
        found, bad = record_gradients(plan, window, x, y, shared, None, grid.scale)
        for name, parts in found.items():
            terms = np.array(_total([p.dense(None) if isinstance(p, _Outer) else p for p in parts], None))
            terms[:, bad] = 0.0
            add_dense(Interval(terms, terms), grid, nothing, plan.offsets[name] + np.arange(len(terms)), sums)
    return sums
