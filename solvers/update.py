"""The training step's update of the parameters, at a point and over boxes."""

from __future__ import annotations

import numpy as np

from models.ops.base import ABSOLUTE, RELATIVE, Interval
from solvers.gradients import FixedPoint, Sums
from solvers.window import Window


def update(window: Window, theta: np.ndarray, total: np.ndarray, factor: float) -> np.ndarray:
    """``contraction * theta - factor * total``; ``factor`` is rate / normaliser on the scale of ``total``."""
    return window.contraction * theta - factor * total


def update_interval(window: Window, box: Interval, total: Interval, factor: float) -> Interval:
    """Bounds of ``update`` over boxes, outward by more than its rounding errors."""
    slack = 4.0 * RELATIVE * (window.contraction * box.magnitude + factor * total.magnitude) + ABSOLUTE
    return Interval(
        update(window, box.lower, total.upper, factor) - slack,
        update(window, box.upper, total.lower, factor) + slack,
    )


def largest(heap: np.ndarray, empty: int, spent: int) -> np.ndarray:
    """The ``spent`` largest terms of each parameter, ``empty`` zeros included; float64 ``(P, spent)``."""
    if spent == 0:
        return np.zeros((heap.shape[0], 0))
    both = np.concatenate([heap, np.zeros((heap.shape[0], min(empty, spent)))], axis=1)
    return np.partition(both, both.shape[1] - spent, axis=1)[:, both.shape[1] - spent :]


def totals(window: Window, sums: Sums, radius: int, size: int, filled: int, grid: FixedPoint):
    """Integer bounds of the batch's gradient sum when ``radius`` records may differ, as float64 ``(P,)`` pairs."""
    most = size * grid.unit
    if window.adjacency == "replace-one":
        spent = min(radius, size)
        given, taken = (largest(heap, size - filled, spent) for heap in (sums.top_lower, sums.top_upper))
        lower = sums.lower - given.astype(np.int64).sum(axis=1) - spent * grid.unit
        upper = sums.upper + taken.astype(np.int64).sum(axis=1) + spent * grid.unit
    else:
        # Every unit of radius is spent even when it exceeds the batch, or (M) fails there; the batch as a whole
        # contributes no more than its clip allows.
        lower = np.maximum(sums.lower - radius * grid.unit, -most)
        upper = np.minimum(sums.upper + radius * grid.unit, most)
    # Rounding to the grid and the last product err by less than one unit a record: outward, by a public constant.
    return (lower - size).astype(np.float64), (upper + size).astype(np.float64)
