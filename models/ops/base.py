"""What an operator is, and the arithmetic shared by all of them.

A node's value is a float64 array with the **record axis last**: shape ``(F, n)`` for a value that differs from
record to record, ``(F, 1)`` for one that is the same for all of them (a parameter, a constant, or something
computed from those alone).  ``F`` is the row-major flattening of the feature shape.

Every operator has two arithmetics, and they are one: the interval rule evaluates the point rule's expression
tree at the ends of the intervals, in the same order and in round-to-nearest.  Rounding is monotone, so

* a degenerate interval gives the point result bit for bit (``ladder = 0``);
* the interval result contains the *floating-point* point result of every point of the inputs;
* wider inputs give wider outputs, exactly as computed (inclusion monotonicity, hence property (M)).

``ladder`` is ``0`` for radius 0 and ``2k`` for radius ``k``.  With ``ladder > 0`` every rule also widens its result
outward by at least its own rounding error, so the exact real result is inside as well.  Rules that are not exactly
monotone in floating point (library transcendentals, midpoint-radius products) widen by ``ladder`` times a bound of
their error; because that bound never shrinks when the inputs widen, radius ``k`` on a data set stays inside
radius ``k + 1`` on its neighbour (the ladder of the theory, section 2, one rung a unit of radius).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numba import njit

#: Half an ulp of 1.0: the relative error of one rounded operation.
UNIT_ROUNDOFF = 2.0**-53
#: A power of two above twice the unit roundoff, so that ``x * RELATIVE`` is exact and ``x -+ |x| RELATIVE`` monotone.
RELATIVE = 2.0**-52
#: Covers the error of results in the subnormal range.
ABSOLUTE = 2.0**-1070
#: Error bound of a library transcendental (exp, tanh, log1p) whose result lies in [-1, 1]: 32 ulp, far above libm's.
LIBRARY = 2.0**-48


class Interval(NamedTuple):
    """Lower and upper ends, float64 arrays of one shape; not necessarily finite."""

    lower: np.ndarray
    upper: np.ndarray

    @property
    def magnitude(self) -> np.ndarray:
        """Largest absolute value in the interval, elementwise; grows when the interval does."""
        return np.maximum(np.abs(self.lower), np.abs(self.upper))


def rounded(lower: np.ndarray, upper: np.ndarray, ladder: float) -> Interval:
    """Results of one correctly rounded operation; widened by one ulp when ``ladder > 0``."""
    if ladder == 0.0:
        return Interval(lower, upper)
    return Interval(
        lower - (np.abs(lower) * RELATIVE + ABSOLUTE), upper + (np.abs(upper) * RELATIVE + ABSOLUTE)
    )


def laddered(lower: np.ndarray, upper: np.ndarray, error: float | np.ndarray, ladder: float) -> Interval:
    """Results with absolute error at most ``error``, widened by ``ladder * error``."""
    if ladder == 0.0:
        return Interval(lower, upper)
    return Interval(lower - ladder * error, upper + ladder * error)


def interval_product(a: Interval, b: Interval, ladder: float) -> Interval:
    """Natural interval product: the least and the greatest of the four corner products."""
    with np.errstate(all="ignore"):
        corners = (a.lower * b.lower, a.lower * b.upper, a.upper * b.lower, a.upper * b.upper)
        lower = np.minimum(np.minimum(corners[0], corners[1]), np.minimum(corners[2], corners[3]))
        upper = np.maximum(np.maximum(corners[0], corners[1]), np.maximum(corners[2], corners[3]))
        return rounded(lower, upper, ladder)


@njit(nogil=True, cache=True)
def _gate(adjoint, x, low, high, out):
    rows, n = adjoint.shape
    for f in range(rows):
        for i in range(n):
            out[f, i] = adjoint[f, i] if (x[f, i] > low) & (x[f, i] < high) else 0.0


@njit(nogil=True, cache=True)
def _gate_interval(dl, du, xl, xu, low, high, lower, upper):
    rows, n = dl.shape
    for f in range(rows):
        for i in range(n):
            surely = (xl[f, i] > low) & (xu[f, i] < high)
            possibly = (xu[f, i] > low) & (xl[f, i] < high)
            a = dl[f, i]
            b = du[f, i]
            c = a if a < 0.0 else 0.0
            d = b if b > 0.0 else 0.0
            c = c if possibly else 0.0
            d = d if possibly else 0.0
            lower[f, i] = a if surely else c
            upper[f, i] = b if surely else d


def gated(adjoint: np.ndarray, x: np.ndarray, low: float, high: float) -> np.ndarray:
    """``adjoint`` where ``low < x < high``, else 0; ``x`` may be shared between records."""
    out = np.empty_like(adjoint)
    _gate(adjoint, np.broadcast_to(x, adjoint.shape), low, high, out)
    return out


def gated_interval(adjoint: Interval, x: Interval, low: float, high: float) -> Interval:
    """Bounds of ``gated`` over boxes."""
    shape = adjoint.lower.shape
    out = Interval(np.empty(shape), np.empty(shape))
    _gate_interval(*adjoint, np.broadcast_to(x.lower, shape), np.broadcast_to(x.upper, shape), low, high, *out)
    return out


def switched(adjoint: Interval, surely: np.ndarray, possibly: np.ndarray) -> Interval:
    """``adjoint`` times an indicator known to be 1 (``surely``), 0 (not ``possibly``) or either."""
    lower = np.where(surely, adjoint.lower, np.where(possibly, np.minimum(adjoint.lower, 0.0), 0.0))
    upper = np.where(surely, adjoint.upper, np.where(possibly, np.maximum(adjoint.upper, 0.0), 0.0))
    return Interval(lower, upper)


@dataclass(frozen=True)
class Op:
    """Base of all operators.  An operator holds public facts only and keeps no state between calls.

    ``monotone`` states that both interval rules have the three properties of the module docstring; a backend
    may claim property (M) only if all its operators do.
    """

    monotone: ClassVar[bool] = True
    #: Can finite inputs give a result that is not finite?  Such results are watched for.
    can_overflow: ClassVar[bool] = False

    def features(self, inputs: Sequence[int]) -> int:
        """Number of output features given those of the inputs; raises ValueError when they do not fit."""
        raise NotImplementedError

    def forward(self, args: Sequence[np.ndarray]) -> np.ndarray:
        """Point evaluation."""
        raise NotImplementedError

    def forward_interval(self, args: Sequence[Interval], ladder: float) -> Interval:
        """Bounds of ``forward`` over boxes."""
        raise NotImplementedError

    def backward(
        self, adjoint: np.ndarray, args: Sequence[np.ndarray], out: np.ndarray, needed: Sequence[bool]
    ) -> tuple[np.ndarray | None, ...]:
        """Vector-Jacobian products for the inputs that are ``needed``; ``adjoint`` always has all records."""
        raise NotImplementedError

    def backward_interval(
        self,
        adjoint: Interval,
        args: Sequence[Interval],
        out: Interval,
        needed: Sequence[bool],
        ladder: float,
    ) -> tuple[Interval | None, ...]:
        """Bounds of ``backward`` over boxes: the natural interval extension of the point rule."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """Short name for tables and drawings."""
        return type(self).__name__
