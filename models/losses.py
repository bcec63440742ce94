"""Losses: the gradient with respect to the model's output, at a point and over a box.

All losses are convex in the output, so their gradients are monotone functions of it (the cross-entropy gradient is
increasing in its own logit and decreasing in the others) and the interval rules are exact.
Predictions and targets are ``(O, n)`` float64, record axis last.  No mean is taken over outputs or records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from models.ops.activations import Sigmoid
from models.ops.base import LIBRARY, Interval, laddered, rounded


class TargetError(ValueError):
    """Targets that the loss cannot take."""


@dataclass(frozen=True)
class Loss:
    """Base of all losses; ``monotone`` as for operators."""

    name: ClassVar[str] = ""
    monotone: ClassVar[bool] = True

    def prepare(self, targets: np.ndarray, outputs: int) -> np.ndarray:
        """Targets ``(O or 1, n)`` in the form the gradient wants, ``(O, n)``; raises TargetError."""
        if targets.shape[0] != outputs:
            raise TargetError(
                f"{self.name} loss on {outputs} outputs needs {outputs} targets, found {targets.shape[0]}"
            )
        return targets

    def value(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Loss of each record, ``(n,)``."""
        raise NotImplementedError

    def gradient(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Derivative of ``value`` with respect to the predictions, ``(O, n)``."""
        raise NotImplementedError

    def gradient_interval(self, predictions: Interval, targets: np.ndarray, ladder: float) -> Interval:
        """Bounds of ``gradient`` over a box of predictions."""
        raise NotImplementedError


@dataclass(frozen=True)
class Squared(Loss):
    """``sum (p - y)^2``; gradient ``2 (p - y)``."""

    name = "squared"

    def value(self, predictions, targets):
        return ((predictions - targets) ** 2).sum(axis=0)

    def gradient(self, predictions, targets):
        return 2.0 * (predictions - targets)

    def gradient_interval(self, predictions, targets, ladder):
        return rounded(
            2.0 * (predictions.lower - targets), 2.0 * (predictions.upper - targets), ladder
        )


@dataclass(frozen=True)
class Absolute(Loss):
    """``sum |p - y|``; gradient ``sign(p - y)``, 0 at 0.  The sign of a rounded difference is exact."""

    name = "absolute"

    def value(self, predictions, targets):
        return np.abs(predictions - targets).sum(axis=0)

    def gradient(self, predictions, targets):
        return np.sign(predictions - targets)

    def gradient_interval(self, predictions, targets, ladder):
        return Interval(np.sign(predictions.lower - targets), np.sign(predictions.upper - targets))


@dataclass(frozen=True)
class Huber(Loss):
    """``r^2 / 2`` for ``|r| <= delta``, ``delta (|r| - delta / 2)`` beyond; gradient ``clip(r, -delta, delta)``."""

    name = "huber"
    delta: float = 1.0

    def value(self, predictions, targets):
        size = np.abs(predictions - targets)
        inner = np.minimum(size, self.delta)
        return (0.5 * inner * inner + self.delta * (size - inner)).sum(axis=0)

    def gradient(self, predictions, targets):
        return np.clip(predictions - targets, -self.delta, self.delta)

    def gradient_interval(self, predictions, targets, ladder):
        r = rounded(predictions.lower - targets, predictions.upper - targets, ladder)
        return Interval(np.clip(r.lower, -self.delta, self.delta), np.clip(r.upper, -self.delta, self.delta))


@dataclass(frozen=True)
class Logistic(Loss):
    """``log(1 + exp(z)) - y z`` with ``y`` in [0, 1] (binary cross-entropy on logits); gradient ``sigmoid(z) - y``."""

    name = "logistic"

    def prepare(self, targets, outputs):
        targets = super().prepare(targets, outputs)
        if targets.size and (targets.min() < 0.0 or targets.max() > 1.0):
            raise TargetError("logistic loss needs targets in [0, 1]; map the labels to 0 and 1")
        return targets

    def value(self, predictions, targets):
        softplus = np.maximum(predictions, 0.0) + np.log1p(np.exp(-np.abs(predictions)))
        return (softplus - targets * predictions).sum(axis=0)

    def gradient(self, predictions, targets):
        return Sigmoid().forward([predictions]) - targets

    def gradient_interval(self, predictions, targets, ladder):
        p = Sigmoid().forward_interval([predictions], ladder)
        return rounded(p.lower - targets, p.upper - targets, ladder)


@dataclass(frozen=True)
class _MarginLoss(Loss):
    """A function of the margin ``m = y z`` with ``y`` in {-1, 1}, decreasing up to ``m = 1`` and 0 from there."""

    def prepare(self, targets, outputs):
        targets = super().prepare(targets, outputs)
        if not np.isin(targets, (-1.0, 1.0)).all():
            raise TargetError(f"{self.name} loss needs targets -1 and 1; map the labels, or use the logistic loss")
        return targets


@dataclass(frozen=True)
class Hinge(_MarginLoss):
    """``max(0, 1 - m)``, ``m = y z``, with ``y`` in {-1, 1}; gradient ``-y`` where ``m < 1``, else 0."""

    name = "hinge"

    def value(self, predictions, targets):
        return np.maximum(0.0, 1.0 - targets * predictions).sum(axis=0)

    def gradient(self, predictions, targets):
        return np.where(targets * predictions < 1.0, -targets, 0.0)

    def gradient_interval(self, predictions, targets, ladder):
        ends = (targets * predictions.lower, targets * predictions.upper)
        surely = np.maximum(*ends) < 1.0
        possibly = np.minimum(*ends) < 1.0
        lower = np.where(surely, -targets, np.where(possibly, np.minimum(-targets, 0.0), 0.0))
        upper = np.where(surely, -targets, np.where(possibly, np.maximum(-targets, 0.0), 0.0))
        return Interval(lower, upper)


@dataclass(frozen=True)
class SmoothedHinge(_MarginLoss):
    """The hinge rounded off below its kink (Huberised): with ``m = y z``, ``y`` in {-1, 1}, and a width ``h > 0``,

    0 for ``m >= 1``, ``(1 - m)^2 / (2 h)`` for ``1 - h < m < 1``, ``1 - m - h / 2`` for ``m <= 1 - h``; gradient
    ``-y clip((1 - m) / h, 0, 1)``.  The margin is exact, and every rounded operation after it is monotone.
    """

    name = "smoothed-hinge"
    width: float = 1.0

    def value(self, predictions, targets):
        short = np.maximum(0.0, 1.0 - targets * predictions)
        inner = np.minimum(short, self.width)
        return (inner * inner / (2.0 * self.width) + (short - inner)).sum(axis=0)

    def gradient(self, predictions, targets):
        return -targets * np.clip((1.0 - targets * predictions) / self.width, 0.0, 1.0)

    def ramp_interval(self, predictions: Interval, targets: np.ndarray, ladder: float) -> Interval:
        """Bounds of ``(1 - m) / h``, which is between 0 and 1 where the loss is curved."""
        ends = (targets * predictions.lower, targets * predictions.upper)
        short = rounded(1.0 - np.maximum(*ends), 1.0 - np.minimum(*ends), ladder)
        return rounded(short.lower / self.width, short.upper / self.width, ladder)

    def gradient_interval(self, predictions, targets, ladder):
        ramp = self.ramp_interval(predictions, targets, ladder)
        ends = (-targets * np.clip(ramp.lower, 0.0, 1.0), -targets * np.clip(ramp.upper, 0.0, 1.0))
        return Interval(np.minimum(*ends), np.maximum(*ends))


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """``-log softmax(z)[label]``; targets are class numbers ``(1, n)`` or one-hot rows; gradient ``softmax(z) - y``."""

    name = "cross-entropy"

    def prepare(self, targets, outputs):
        if outputs < 2:
            raise TargetError(f"cross-entropy loss needs at least 2 outputs, the model has {outputs}")
        if targets.shape[0] == 1:
            classes = targets[0]
            if classes.size and not (
                (classes == np.round(classes)).all() and classes.min() >= 0 and classes.max() < outputs
            ):
                raise TargetError(f"cross-entropy loss needs class numbers 0 to {outputs - 1} as targets")
            return (np.arange(outputs)[:, None] == classes[None, :]).astype(np.float64)
        targets = super().prepare(targets, outputs)
        if targets.size and (targets.min() < 0.0 or np.abs(targets.sum(axis=0) - 1.0).max() > 1e-9):
            raise TargetError("cross-entropy loss needs target rows that are probabilities")
        return targets

    def value(self, predictions, targets):
        top = predictions.max(axis=0)
        return top + np.log(np.exp(predictions - top).sum(axis=0)) - (targets * predictions).sum(axis=0)

    @staticmethod
    def _softmax(own: np.ndarray, others: np.ndarray) -> np.ndarray:
        """``1 / (1 + sum_{i != j} exp(others_i - own_j))``: increasing in ``own``, decreasing in ``others``."""
        total = np.ones_like(own)
        with np.errstate(over="ignore"):
            for i in range(own.shape[0]):
                term = np.exp(others[i] - own)
                term[i] = 0.0
                total = total + term
            return 1.0 / total

    def gradient(self, predictions, targets):
        return self._softmax(predictions, predictions) - targets

    def gradient_interval(self, predictions, targets, ladder):
        lower = self._softmax(predictions.lower, predictions.upper)
        upper = self._softmax(predictions.upper, predictions.lower)
        p = laddered(lower, upper, LIBRARY * predictions.lower.shape[0], ladder)
        p = Interval(np.maximum(p.lower, 0.0), np.minimum(p.upper, 1.0))
        return rounded(p.lower - targets, p.upper - targets, ladder)


LOSSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (Squared, Absolute, Huber, Logistic, Hinge, SmoothedHinge, CrossEntropy)
}


def make_loss(name: str, huber_delta: float = 1.0, hinge_width: float = 1.0) -> Loss:
    """The loss with this name; raises ValueError listing the names there are."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; there are: {', '.join(LOSSES)}")
    made = {"huber": lambda: Huber(huber_delta), "smoothed-hinge": lambda: SmoothedHinge(hinge_width)}
    return made.get(name, LOSSES[name])()
