"""Two-operand arithmetic: Add, Sub, Mul, Div.  Both operands have the same number of features.

Either operand may be shared between records (``(F, 1)``).  Sources: natural interval extensions, [Moore 1966].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.ops.base import Interval, Op, interval_product, rounded


@dataclass(frozen=True)
class _Binary(Op):
    can_overflow = True

    def features(self, inputs):
        if len(inputs) != 2 or inputs[0] != inputs[1]:
            raise ValueError(f"operands have {inputs} features")
        return inputs[0]


@dataclass(frozen=True)
class Add(_Binary):
    def forward(self, args):
        return args[0] + args[1]

    def forward_interval(self, args, ladder):
        return rounded(args[0].lower + args[1].lower, args[0].upper + args[1].upper, ladder)

    def backward(self, adjoint, args, out, needed):
        return adjoint, adjoint

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return adjoint, adjoint


@dataclass(frozen=True)
class Sub(_Binary):
    def forward(self, args):
        return args[0] - args[1]

    def forward_interval(self, args, ladder):
        return rounded(args[0].lower - args[1].upper, args[0].upper - args[1].lower, ladder)

    def backward(self, adjoint, args, out, needed):
        return adjoint, -adjoint if needed[1] else None

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return adjoint, Interval(-adjoint.upper, -adjoint.lower) if needed[1] else None


@dataclass(frozen=True)
class Mul(_Binary):
    def forward(self, args):
        return args[0] * args[1]

    def forward_interval(self, args, ladder):
        return interval_product(args[0], args[1], ladder)

    def backward(self, adjoint, args, out, needed):
        return (
            adjoint * args[1] if needed[0] else None,
            adjoint * args[0] if needed[1] else None,
        )

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return (
            interval_product(adjoint, args[1], ladder) if needed[0] else None,
            interval_product(adjoint, args[0], ladder) if needed[1] else None,
        )


def _quotient(a: Interval, b: Interval, ladder: float) -> Interval:
    """Natural interval quotient; a divisor that may be zero gives the whole line."""
    with np.errstate(all="ignore"):
        corners = (a.lower / b.lower, a.lower / b.upper, a.upper / b.lower, a.upper / b.upper)
        lower = np.minimum(np.minimum(corners[0], corners[1]), np.minimum(corners[2], corners[3]))
        upper = np.maximum(np.maximum(corners[0], corners[1]), np.maximum(corners[2], corners[3]))
        whole = (b.lower <= 0.0) & (b.upper >= 0.0)
        return rounded(np.where(whole, -np.inf, lower), np.where(whole, np.inf, upper), ladder)


@dataclass(frozen=True)
class Div(_Binary):
    def forward(self, args):
        with np.errstate(all="ignore"):
            return args[0] / args[1]

    def forward_interval(self, args, ladder):
        return _quotient(args[0], args[1], ladder)

    def backward(self, adjoint, args, out, needed):
        with np.errstate(all="ignore"):
            return (
                adjoint / args[1] if needed[0] else None,
                -((adjoint * out) / args[1]) if needed[1] else None,
            )

    def backward_interval(self, adjoint, args, out, needed, ladder):
        left = _quotient(adjoint, args[1], ladder) if needed[0] else None
        right = None
        if needed[1]:
            flipped = _quotient(interval_product(adjoint, out, ladder), args[1], ladder)
            right = Interval(-flipped.upper, -flipped.lower)
        return left, right
