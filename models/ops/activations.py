"""One-operand functions: Relu, LeakyRelu, Elu, Softplus, Sigmoid, Tanh, Clip, Abs, Neg, and the switch Select.

At a kink the point rule takes the derivative stated in each class; the interval rule contains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.ops.base import (
    LIBRARY,
    Interval,
    Op,
    gated,
    gated_interval,
    interval_product,
    laddered,
    rounded,
    switched,
)


@dataclass(frozen=True)
class _Unary(Op):
    def features(self, inputs):
        if len(inputs) != 1:
            raise ValueError(f"{type(self).__name__} takes one input, got {len(inputs)}")
        return inputs[0]

    def _slope(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Derivative at ``x`` where ``y`` is the value."""
        raise NotImplementedError

    def _slope_interval(self, x: Interval, y: Interval, ladder: float) -> Interval:
        raise NotImplementedError

    def backward(self, adjoint, args, out, needed):
        return (adjoint * self._slope(args[0], out),)

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return (interval_product(adjoint, self._slope_interval(args[0], out, ladder), ladder),)


@dataclass(frozen=True)
class Relu(_Unary):
    """``max(x, 0)``; derivative 0 at 0.  No rounding at all."""

    def forward(self, args):
        return np.maximum(args[0], 0.0)

    def forward_interval(self, args, ladder):
        return Interval(np.maximum(args[0].lower, 0.0), np.maximum(args[0].upper, 0.0))

    def backward(self, adjoint, args, out, needed):
        return (gated(adjoint, args[0], 0.0, np.inf),)

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return (gated_interval(adjoint, args[0], 0.0, np.inf),)


@dataclass(frozen=True)
class LeakyRelu(_Unary):
    """``x`` for ``x > 0``, ``alpha x`` otherwise (derivative ``alpha`` at 0); ``0 <= alpha <= 1``."""

    alpha: float = 0.01

    def __post_init__(self):
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"LeakyRelu needs 0 <= alpha <= 1, got {self.alpha}")

    def forward(self, args):
        return np.maximum(args[0], self.alpha * args[0])

    def forward_interval(self, args, ladder):
        x = args[0]
        scaled = rounded(self.alpha * x.lower, self.alpha * x.upper, ladder)
        return Interval(np.maximum(x.lower, scaled.lower), np.maximum(x.upper, scaled.upper))

    def _slope(self, x, y):
        return np.where(x > 0.0, 1.0, self.alpha)

    def _slope_interval(self, x, y, ladder):
        return Interval(np.where(x.lower > 0.0, 1.0, self.alpha), np.where(x.upper > 0.0, 1.0, self.alpha))


@dataclass(frozen=True)
class Clip(_Unary):
    """``min(max(x, low), high)``; derivative 1 strictly inside, 0 elsewhere."""

    low: float = -np.inf
    high: float = np.inf

    def __post_init__(self):
        if not self.low <= self.high:
            raise ValueError(f"Clip needs low <= high, got {self.low} and {self.high}")

    def forward(self, args):
        return np.minimum(np.maximum(args[0], self.low), self.high)

    def forward_interval(self, args, ladder):
        return Interval(self.forward([args[0].lower]), self.forward([args[0].upper]))

    def backward(self, adjoint, args, out, needed):
        return (gated(adjoint, args[0], self.low, self.high),)

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return (gated_interval(adjoint, args[0], self.low, self.high),)


@dataclass(frozen=True)
class Neg(_Unary):
    def forward(self, args):
        return -args[0]

    def forward_interval(self, args, ladder):
        return Interval(-args[0].upper, -args[0].lower)

    def backward(self, adjoint, args, out, needed):
        return (-adjoint,)

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return (Interval(-adjoint.upper, -adjoint.lower),)


@dataclass(frozen=True)
class Abs(_Unary):
    """``|x|``; derivative ``sign(x)``, 0 at 0."""

    def forward(self, args):
        return np.abs(args[0])

    def forward_interval(self, args, ladder):
        x = args[0]
        straddles = (x.lower <= 0.0) & (x.upper >= 0.0)
        least = np.minimum(np.abs(x.lower), np.abs(x.upper))
        return Interval(np.where(straddles, 0.0, least), x.magnitude)

    def _slope(self, x, y):
        return np.sign(x)

    def _slope_interval(self, x, y, ladder):
        return Interval(np.sign(x.lower), np.sign(x.upper))


@dataclass(frozen=True)
class Sigmoid(_Unary):
    """``1 / (1 + exp(-x))``; derivative ``y (1 - y)`` computed from the value ``y``."""

    def forward(self, args):
        with np.errstate(over="ignore"):
            return 1.0 / (1.0 + np.exp(-args[0]))

    def forward_interval(self, args, ladder):
        y = laddered(self.forward([args[0].lower]), self.forward([args[0].upper]), LIBRARY, ladder)
        return Interval(np.maximum(y.lower, 0.0), np.minimum(y.upper, 1.0))

    def _slope(self, x, y):
        return y * (1.0 - y)

    def _slope_interval(self, x, y, ladder):
        ends = (y.lower * (1.0 - y.lower), y.upper * (1.0 - y.upper))
        top = np.where((y.lower <= 0.5) & (y.upper >= 0.5), 0.25, np.maximum(*ends))
        slope = laddered(np.minimum(*ends), top, LIBRARY, ladder)
        return Interval(np.maximum(slope.lower, 0.0), np.minimum(slope.upper, 0.25))


@dataclass(frozen=True)
class Tanh(_Unary):
    """Hyperbolic tangent; derivative ``1 - y^2`` computed from the value ``y``."""

    def forward(self, args):
        return np.tanh(args[0])

    def forward_interval(self, args, ladder):
        y = laddered(np.tanh(args[0].lower), np.tanh(args[0].upper), LIBRARY, ladder)
        return Interval(np.maximum(y.lower, -1.0), np.minimum(y.upper, 1.0))

    def _slope(self, x, y):
        return 1.0 - y * y

    def _slope_interval(self, x, y, ladder):
        magnitude = y.magnitude
        least = np.where(
            (y.lower <= 0.0) & (y.upper >= 0.0), 0.0, np.minimum(np.abs(y.lower), np.abs(y.upper))
        )
        slope = laddered(1.0 - magnitude * magnitude, 1.0 - least * least, LIBRARY, ladder)
        return Interval(np.maximum(slope.lower, 0.0), np.minimum(slope.upper, 1.0))


@dataclass(frozen=True)
class Elu(_Unary):
    """``x`` for ``x > 0``, ``alpha (exp(x) - 1)`` otherwise; ``0 <= alpha <= 1`` (a monotone derivative)."""

    alpha: float = 1.0

    def __post_init__(self):
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"Elu needs 0 <= alpha <= 1, got {self.alpha}")

    def _below(self, x):
        return self.alpha * np.expm1(np.minimum(x, 0.0))

    def forward(self, args):
        return np.maximum(args[0], 0.0) + self._below(args[0])

    def forward_interval(self, args, ladder):
        x = args[0]
        below = laddered(self._below(x.lower), self._below(x.upper), LIBRARY, ladder)
        return rounded(
            np.maximum(x.lower, 0.0) + below.lower, np.maximum(x.upper, 0.0) + below.upper, ladder
        )

    def _slope(self, x, y):
        return np.where(x > 0.0, 1.0, self.alpha * np.exp(np.minimum(x, 0.0)))

    def _slope_interval(self, x, y, ladder):
        slope = laddered(self._slope(x.lower, None), self._slope(x.upper, None), LIBRARY, ladder)
        return Interval(np.maximum(slope.lower, 0.0), np.minimum(slope.upper, 1.0))


@dataclass(frozen=True)
class Softplus(_Unary):
    """``log(1 + exp(x))`` as ``max(x, 0) + log1p(exp(-|x|))``; derivative the sigmoid."""

    def _rest(self, x):
        return np.log1p(np.exp(-np.abs(x)))

    def forward(self, args):
        return np.maximum(args[0], 0.0) + self._rest(args[0])

    def forward_interval(self, args, ladder):
        # The error of the second term is absolute and bounded; with it inside, the sum is monotone up to the ladder.
        x = args[0]
        rest = laddered(self._rest(x.lower), self._rest(x.upper), LIBRARY, ladder)
        y = rounded(np.maximum(x.lower, 0.0) + rest.lower, np.maximum(x.upper, 0.0) + rest.upper, ladder)
        return Interval(np.maximum(y.lower, 0.0), y.upper)

    def _slope(self, x, y):
        return Sigmoid().forward([x])

    def _slope_interval(self, x, y, ladder):
        return Sigmoid().forward_interval([x], ladder)


@dataclass(frozen=True)
class Select(Op):
    """``a`` where ``x > threshold``, else ``b``; inputs ``(x, a, b)``.  What exporters write for guarded functions."""

    threshold: float = 0.0

    def features(self, inputs):
        if len(inputs) != 3 or len(set(inputs)) != 1:
            raise ValueError(f"operands have {inputs} features")
        return inputs[0]

    def forward(self, args):
        return np.where(args[0] > self.threshold, args[1], args[2])

    def _cases(self, x: Interval):
        return x.lower > self.threshold, x.upper > self.threshold

    def forward_interval(self, args, ladder):
        x, a, b = args
        surely, possibly = self._cases(x)
        lower = np.where(surely, a.lower, np.where(possibly, np.minimum(a.lower, b.lower), b.lower))
        upper = np.where(surely, a.upper, np.where(possibly, np.maximum(a.upper, b.upper), b.upper))
        return Interval(lower, upper)

    def backward(self, adjoint, args, out, needed):
        above = args[0] > self.threshold
        return None, np.where(above, adjoint, 0.0), np.where(above, 0.0, adjoint)

    def backward_interval(self, adjoint, args, out, needed, ladder):
        surely, possibly = self._cases(args[0])
        return None, switched(adjoint, surely, possibly), switched(adjoint, ~possibly, ~surely)
