"""The training step's update of the parameters, at a point and over boxes."""

from __future__ import annotations

import numpy as np

from models.ops.base import ABSOLUTE, RELATIVE, Interval
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
