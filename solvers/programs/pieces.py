"""The clipped gradient of one record of a linear model, as a function of one number, in pieces.

A linear model predicts ``z = inputs' theta + offset``; the gradient of parameter ``j`` is ``phi(z) inputs_j`` with
``phi`` the derivative of the loss.  The clipped gradient is linear on each piece between knots of the *argument*
``v = sign z - shift`` (signs public, shifts private):

* squared: ``clip(2 v inputs_j)``, ``v = z - y``, knots where a coordinate reaches the clip;
* huber: ``clip(clip(v, delta) inputs_j)``; absolute: ``clip(sign(v) inputs_j)``, in three pieces, one a point;
* hinge: ``clip(-y inputs_j)`` for ``v < 1``, else 0, with ``v = y z``;
* smoothed hinge: ``clip(-y clip(-v / h, 0, 1) inputs_j)``, ``v = y z - 1``, knots also at the ends of the ramp;
* logistic: ``clip(phi inputs_j)``, ``phi = sigmoid(v) - y``, ``v = z``: a curve, each piece of it inside a triangle.

A piece is given by its vertices: their convex hull contains the graph over the piece, up to `error` in every
coordinate.  Hulls over a smaller interval of ``v`` lie inside those over a larger one, up to `error`: knots depend on
the record alone, and the triangle of chord and end tangents of a part of a piece lies inside that of the piece.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.losses import Absolute, Hinge, Huber, Logistic, Loss, SmoothedHinge, Squared
from models.ops.activations import Sigmoid
from models.ops.base import Interval, rounded
from solvers.gradients import FixedPoint

#: Losses that are described here.
LOSSES = (Squared, Huber, Absolute, Hinge, SmoothedHinge, Logistic)
#: Knots of the sigmoid: with them no triangle is higher than `SIGMOID_GAP`.
_TAIL = np.array([7.0, 8.0, 10.0, 14.0, 20.0, 40.0])
_KNOTS = np.concatenate([-_TAIL[::-1], np.arange(-6.0, 6.25, 0.25), _TAIL])
SIGMOID_GAP = 2.0**-9
#: A record with larger inputs, in clips, is not described under the logistic loss: see `describable`.
_LARGEST_INPUT = 2.0**20


class Vertices(NamedTuple):
    """``record``, ``piece`` int64 ``(V,)``, ascending; ``argument`` ``(V,)``; gradients ``values`` ``(P, V)``."""

    record: np.ndarray
    piece: np.ndarray
    argument: np.ndarray
    values: np.ndarray


class Arguments(NamedTuple):
    """Ends ``box`` of the arguments ``(n,)``, which are ``sign * prediction - shift``."""

    box: Interval
    sign: np.ndarray
    shift: np.ndarray


def error(loss: Loss, grid: FixedPoint) -> float:
    """A bound, in clips, of twice the error of a record's contribution.

    The trainer's products and rounding to the grid, vertices and knots that are rounded, two units of the grid for what
    is taken for constant; the logistic loss adds the library's exponential, times the input.
    """
    return 8.0 / (grid.scale * grid.clip) + (2.0**-24 if isinstance(loss, Logistic) else 0.0)


def describable(loss: Loss, inputs: np.ndarray, clip: float) -> np.ndarray:
    """Which records ``(n,)`` keep to `error`: under the logistic loss not those with enormous inputs ``(P, n)``."""
    if not isinstance(loss, Logistic):
        return np.ones(inputs.shape[1], bool)
    return np.abs(inputs).max(axis=0, initial=0.0) <= _LARGEST_INPUT * clip


def arguments(loss: Loss, prediction: Interval, targets: np.ndarray, ladder: float) -> Arguments:
    """The arguments over a box of predictions ``(n,)``; the ends hold the trainer's own as well as the exact ones."""
    one, zero = np.ones_like(targets), np.zeros_like(targets)
    if isinstance(loss, Hinge | SmoothedHinge):
        ends = (targets * prediction.lower, targets * prediction.upper)
        margin = Interval(np.minimum(*ends), np.maximum(*ends))
        if isinstance(loss, Hinge):
            return Arguments(margin, targets, zero)
        return Arguments(rounded(margin.lower - 1.0, margin.upper - 1.0, ladder), targets, one)
    if isinstance(loss, Logistic):
        return Arguments(prediction, one, zero)
    return Arguments(rounded(prediction.lower - targets, prediction.upper - targets, ladder), one, targets)


def _between(knots: np.ndarray, box: Interval) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Records and ends of the pieces into which ``knots`` ``(n, Q)`` cut each box: a point where the box is one."""
    knots = np.clip(knots, box.lower[:, None], box.upper[:, None])
    knots = np.sort(np.concatenate([box.lower[:, None], knots, box.upper[:, None]], axis=1), axis=1)
    used = knots[:, :-1] < knots[:, 1:]
    used[:, 0] |= box.lower == box.upper
    record, place = np.nonzero(used)
    return record, knots[record, place], knots[record, place + 1]


def _gather(record: np.ndarray, argument: list, phi: list, inputs: np.ndarray, clip: float) -> Vertices:
    """Vertices from pieces: the record of each, and per vertex of a piece its argument and ``phi`` ``(M,)``."""
    count = len(argument)
    owner = np.repeat(record, count)
    values = np.clip(np.stack(phi, axis=1).ravel() * inputs[:, owner], -clip, clip)
    return Vertices(owner, np.repeat(np.arange(len(record)), count), np.stack(argument, axis=1).ravel(), values)


def _steps(parts: list, inputs: np.ndarray, clip: float) -> Vertices:
    """Vertices of a step function: parts ``(lower, upper, phi)`` ``(n,)`` each, absent where ``lower > upper``."""
    lower, upper, phi = (np.stack(part, axis=1) for part in zip(*parts, strict=True))
    record, place = np.nonzero(lower <= upper)
    level = phi[record, place]
    return _gather(record, [lower[record, place], upper[record, place]], [level, level], inputs, clip)


def _sigmoid(v: np.ndarray) -> np.ndarray:
    return Sigmoid().forward([v])


def _logistic(box: Interval, targets: np.ndarray, inputs: np.ndarray, reach: np.ndarray, clip: float) -> Vertices:
    """Triangles around the sigmoid, cut where a coordinate reaches the clip."""
    with np.errstate(divide="ignore", invalid="ignore"):
        at = np.concatenate([targets[:, None] - reach, targets[:, None] + reach], axis=1)
        kinks = np.where((at > 0.0) & (at < 1.0), np.log(at) - np.log1p(-at), np.inf)
    knots = np.concatenate([kinks, np.broadcast_to(_KNOTS, (len(targets), len(_KNOTS)))], axis=1)
    record, a, b = _between(knots, box)
    low, high = _sigmoid(a), _sigmoid(b)
    first, last = low * (1.0 - low), high * (1.0 - high)
    width = np.where(b > a, b - a, 1.0)
    bend = np.where(first != last, last - first, 1.0)
    # Where the tangents at the ends meet; anywhere between the ends when they are one line up to rounding.
    share = np.clip(np.where(first != last, (last - (high - low) / width) / bend, 0.5), 0.0, 1.0)
    middle = np.clip(a + share * (b - a), a, b)
    height = np.clip(low + first * (middle - a), low, high)
    shift = targets[record]
    return _gather(record, [a, middle, b], [low - shift, height - shift, high - shift], inputs, clip)


def vertices(loss: Loss, box: Interval, targets: np.ndarray, inputs: np.ndarray, clip: float) -> Vertices:
    """Vertices of the clipped gradients over arguments in ``box`` ``(n,)``; ``inputs`` ``(P, n)``."""
    with np.errstate(divide="ignore"):
        reach = clip / np.abs(inputs.T)  # the phi at which a coordinate reaches the clip
    if isinstance(loss, Squared):
        record, a, b = _between(np.concatenate([-reach, reach], axis=1) / 2.0, box)
        return _gather(record, [a, b], [2.0 * a, 2.0 * b], inputs, clip)
    if isinstance(loss, Huber):
        reach = np.minimum(reach, loss.delta)
        record, a, b = _between(np.concatenate([-reach, reach], axis=1), box)
        return _gather(record, [a, b], [np.clip(end, -loss.delta, loss.delta) for end in (a, b)], inputs, clip)
    if isinstance(loss, SmoothedHinge):
        knots = np.append(-loss.width * np.minimum(reach, 1.0), np.zeros((len(reach), 1)), axis=1)
        record, a, b = _between(knots, box)
        slopes = [-targets[record] * np.clip(-end / loss.width, 0.0, 1.0) for end in (a, b)]
        return _gather(record, [a, b], slopes, inputs, clip)
    if isinstance(loss, Logistic):
        return _logistic(box, targets, inputs, reach, clip)
    one, infinite = np.ones_like(targets), np.full_like(targets, np.inf)
    if isinstance(loss, Hinge):
        active = (box.lower, np.where(box.lower < 1.0, np.minimum(box.upper, 1.0), -infinite), -targets)
        return _steps([active, (np.maximum(box.lower, 1.0), box.upper, 0.0 * one)], inputs, clip)
    if isinstance(loss, Absolute):
        below = (box.lower, np.where(box.lower < 0.0, np.minimum(box.upper, 0.0), -infinite), -one)
        nothing = (np.maximum(box.lower, 0.0), np.minimum(box.upper, 0.0), 0.0 * one)
        above = (np.where(box.upper > 0.0, np.maximum(box.lower, 0.0), infinite), box.upper, one)
        return _steps([below, nothing, above], inputs, clip)
    raise TypeError(f"no pieces for the {loss.name} loss")
