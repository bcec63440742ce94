"""How much a step can lengthen the difference of two runs of a head, in the Euclidean norm.

Record ``i`` adds ``h_p = clip(phi'(z) a_p)`` to the sum of a step, ``z`` its output.  Between two points of a box,

    h(u) - h(v) = w (a . (u - v)),    w an average of phi''(z) (s * a),    s_p = 1 where |phi' a_p| <= clip, else 0.

A step of ``n`` records is the mean of ``n`` steps of one record each, so it multiplies lengths by at most

    contraction * mean of f_i,    f_i = largest |I - beta w a'| over the box,  beta = rate n / (normaliser contraction).

With ``x = beta phi'' |s * a|^2`` and ``y = beta phi'' |a - s * a|^2``, the square of that norm is 1 plus the largest
eigenvalue, if positive, of ``[[x^2 - 2x, (x - 1) sqrt(xy)], [(x - 1) sqrt(xy), xy]]``.  Nothing is lengthened where no
entry is clipped (``y = 0``, ``x <= 2``), whatever the parameters, and nothing where all are (``x = 0``): only a record
whose gradient is clipped in part can lengthen a difference.  The norm is convex in ``w`` and grows with ``phi''``, so
its largest value over the box is attained at one of the ``P + 1`` patterns of clipping, which are nested: the largest
``|a_p|`` are clipped first.

A record that differs has at most the factor of a public bound over all features, targets and outputs.  With ``r`` of
them the ``r`` smallest factors are replaced by it, which is monotone, since it is at least each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from models.losses import Loss
from models.ops import Interval
from models.ops.base import RELATIVE
from solvers.jacobian import (
    LARGEST_OUTPUT,
    LARGEST_SCALE,
    Head,
    curvature_within,
    largest_derivative,
    second_derivative,
    source_features,
)
from solvers.window import Step, Window

#: Patterns that are this close to possible count as possible: far above the rounding of thresholds.
_NEARLY = 2.0**-40
#: Cells of the loss's derivative, for the public bound.
_CELLS = 256


def lengthening(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """By how much more than 1 lengths are multiplied, for ``x`` and ``y`` as in the module; grows with ``y``."""
    return _norm(x * (x - 2.0), np.abs(1.0 - x) * np.sqrt(x * y), x * y)


def _norm(own: np.ndarray, cross: np.ndarray, other: np.ndarray) -> np.ndarray:
    """``sqrt(1 + largest eigenvalue, if positive) - 1`` of ``[[own, cross], [cross, other]]``; grows with all three."""
    top = 0.5 * (own + other) + np.hypot(0.5 * (own - other), cross)
    return np.sqrt(1.0 + np.maximum(top, 0.0)) - 1.0


@dataclass(frozen=True, eq=False)
class Growth:
    """Excess factors of a step's records over one box, ascending ``(n,)``, and the ``public`` one; private."""

    excess: np.ndarray
    public: float
    contraction: float
    rounding: float

    def factor(self, replaced: int) -> float:
        """What lengths are multiplied with where ``replaced`` records of the batch are others."""
        replaced, size = min(replaced, len(self.excess)), len(self.excess)
        mean = (self.excess[replaced:].sum() + replaced * self.public) / max(1, size)
        return self.contraction * (1.0 + mean) * (1.0 + self.rounding)


@dataclass(frozen=True, eq=False)
class Expansion:
    """How differences grow under a window's head; public.

    ``beta``: the largest of the window's steps; ``public``: a differing record's excess at it; ``error``: twice that
    of a computed excess.
    """

    head: Head
    beta: float
    public: float
    error: float

    @classmethod
    def make(cls, window: Window, head: Head) -> Expansion:
        beta = max((_beta(window, one) for one in window.steps), default=0.0)
        most = max(1.0, beta * head.largest * (head.size**2).sum())
        error = 2.0 * (len(head.size) + 64) * RELATIVE * (2.0 + most) ** 2
        sizes = [tuple(head.size[block.parameters]) for block in head.blocks]
        public = max(_public_excess(window.loss, window.clip, each, beta) for each in sizes)
        return cls(head, beta, public, error)

    def growth(
        self, window: Window, one: Step, box: Interval, nominal: np.ndarray, length: float, radius: int
    ) -> Growth | None:
        """The growth of a step over the points of a box that are at most ``length`` from ``nominal`` ``(P,)``; None
        where outputs are out of all proportion."""
        head, ladder, beta = self.head, 2.0 * radius, _beta(window, one)
        sizes = head.output_size(box)
        if not sizes.max() <= LARGEST_OUTPUT:
            return None
        slots, found = window.records.filled(one.batch), []
        with np.errstate(all="ignore"):
            shared, point = head.plan.shared_interval(box.lower, box.upper, ladder), head.plan.shared(nominal)
            for start in range(0, len(slots), head.plan.tile):
                x, y = window.records.tile(slots[start : start + head.plan.tile])
                z = head.plan.forward_interval(x, shared, ladder)[window.graph.output]
                middle = head.plan.forward(x, point)[window.graph.output]
                a = source_features(head.plan, head.source, x)
                error = ladder * 4.0 * (len(head.size) + 8) * RELATIVE * sizes
                excess = np.zeros(x.shape[1])
                for o, block in enumerate(head.blocks):
                    features = a[block.features]
                    reach = np.sqrt((features * features).sum(axis=0)) * length
                    reach = reach * (1.0 + ladder * (len(features) + 8) * RELATIVE) + error[o]
                    output = Interval(np.fmax(z.lower[o], middle[o] - reach), np.fmin(z.upper[o], middle[o] + reach))
                    excess = np.maximum(excess, _excess(window, output, y[o], features, beta, ladder))
                found.append(excess + ladder * self.error)
        empty = np.zeros(len(one.batch) - len(slots))
        # An excess is convex in beta and 0 at 0.
        public = self.public * (beta / self.beta if self.beta > 0.0 else 0.0) + (ladder + 2.0) * self.error
        rounding = 4.0 * (radius + 1) * (len(one.batch) + 16) * RELATIVE
        return Growth(np.sort(np.concatenate([empty, *found])), public, window.contraction, rounding)


def _beta(window: Window, one: Step) -> float:
    return one.learning_rate * len(one.batch) / (window.normaliser * window.contraction)


def _excess(
    window: Window, output: Interval, targets: np.ndarray, a: np.ndarray, beta: float, ladder: float
) -> np.ndarray:
    """By how much more than 1 a step of one record multiplies lengths, largest over its outputs ``(n,)``.

    ``a`` ``(B, n)``: what the parameters of the output multiply.
    """
    output, targets = Interval(*(end[None] for end in output)), targets[None]
    slope = window.loss.gradient_interval(output, targets, ladder)
    bend = second_derivative(window.loss, output, targets, ladder).upper
    size = -np.sort(-np.abs(a), axis=0)
    nothing, square = np.zeros((1, a.shape[1])), size * size
    # Row j: the j largest entries are clipped, where |phi'| lies between thresholds j and j + 1.
    thresholds = np.concatenate([nothing, window.clip / size, np.full_like(nothing, np.inf)])
    clipped = np.concatenate([nothing, np.cumsum(square, axis=0)])
    kept = np.concatenate([np.cumsum(square[::-1], axis=0)[::-1], nothing])
    found = np.zeros(a.shape[1])
    for sign, ends in ((1.0, slope), (-1.0, Interval(-slope.upper, -slope.lower))):
        low = np.maximum(thresholds[:-1] * (1.0 - _NEARLY), ends.lower)
        high = np.minimum(thresholds[1:] * (1.0 + _NEARLY), ends.upper)
        slopes = Interval(low, high) if sign > 0.0 else Interval(-high, -low)
        curvature = np.minimum(bend, curvature_within(window.loss, slopes, targets, ladder))
        excess = lengthening(beta * curvature * kept, beta * curvature * clipped)
        found = np.maximum(found, np.where(low <= high, excess, 0.0).max(axis=0))
    left_out = ~np.isfinite(slope.lower[0] * LARGEST_SCALE) | ~np.isfinite(slope.upper[0] * LARGEST_SCALE)
    return np.where(left_out, 0.0, found)


@lru_cache(maxsize=256)
def _public_excess(loss: Loss, clip: float, sizes: tuple[float, ...], beta: float) -> float:
    """The largest excess of any record whose features are at most ``sizes`` in absolute value.

    By cells ``(G, M, X)`` of ``|phi'|``, of the number of entries that are kept, and of ``x``, bounded by their ends.
    """
    size = -np.sort(-np.array(sizes))
    curvature = beta * largest_derivative(loss)[0]
    edges = clip / size[0] * np.geomspace(1.0 - _NEARLY, 2.0**20, _CELLS)
    limits = np.concatenate([[size[0]], clip / edges])  # entries that are kept where |phi'| is above an edge
    count = np.unique(np.linspace(0, len(size), min(len(size), 64) + 1).astype(int))
    squares = np.minimum(size, limits[:, None]) ** 2
    kept = np.cumsum(squares, axis=1)[:, count[1:] - 1]
    clipped = np.concatenate([[0.0], np.cumsum(size**2)])[len(size) - 1 - count[:-1]]
    y = curvature * np.where(np.arange(len(limits))[:, None] > 0, clipped, 0.0)[..., None]
    x = curvature * kept[..., None] * np.linspace(0.0, 1.0, 65)
    before, after = x[..., :-1], x[..., 1:]
    own = np.maximum(before * (before - 2.0), after * (after - 2.0))
    cross = np.maximum(np.abs(1.0 - before), np.abs(1.0 - after)) * np.sqrt(after * y)
    return float(_norm(own, cross, after * y).max(initial=0.0)) * (1.0 + 2.0**-30)
