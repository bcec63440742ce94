"""Affine maps ``y = W x + b`` applied at one or several positions: Gemm, MatMul, Conv, LinearRegressor.

The input is ``(R*K, n)`` (position-major), the weight ``(M, K)`` and the bias ``(M,)`` are shared, the output is
``(R*M, n)``.  A convolution is a Gather of its patches (``R`` positions) followed by one Affine.

The sum runs over ``k`` in order, starting from the bias, in the point and in the interval kernel alike.
Kernels are compiled by numba without fast-math flags, so no term is reordered or fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from models.ops.base import ABSOLUTE, UNIT_ROUNDOFF, Interval, Op

PRODUCTS = ("natural", "midpoint-radius")


@njit(nogil=True, cache=True)
def _point(w, b, x, positions, y):
    rows, cols = w.shape
    n = x.shape[1]
    for r in range(positions):
        for m in range(rows):
            out = y[r * rows + m]
            out[:] = b[m]
            k = 0
            while k + 3 < cols:
                w0, w1, w2, w3 = w[m, k], w[m, k + 1], w[m, k + 2], w[m, k + 3]
                base = r * cols + k
                x0, x1, x2, x3 = x[base], x[base + 1], x[base + 2], x[base + 3]
                for i in range(n):
                    out[i] = (((out[i] + w0 * x0[i]) + w1 * x1[i]) + w2 * x2[i]) + w3 * x3[i]
                k += 4
            while k < cols:
                wk = w[m, k]
                xk = x[r * cols + k]
                for i in range(n):
                    out[i] += wk * xk[i]
                k += 1


@njit(nogil=True, cache=True)
def _natural(wl, wu, bl, bu, xl, xu, positions, yl, yu):
    """Exact interval products: which ends of ``x`` can be extreme depends on the signs of the weight's ends only."""
    rows, cols = wl.shape
    n = xl.shape[1]
    for r in range(positions):
        for m in range(rows):
            lo = yl[r * rows + m]
            hi = yu[r * rows + m]
            lo[:] = bl[m]
            hi[:] = bu[m]
            for k in range(cols):
                a = wl[m, k]
                b = wu[m, k]
                below = xl[r * cols + k]
                above = xu[r * cols + k]
                if a >= 0.0:
                    p, q, s, t = below, below, above, above
                elif b <= 0.0:
                    p, q, s, t = above, above, below, below
                else:
                    p, q, s, t = above, below, below, above
                for i in range(n):
                    u = a * p[i]
                    v = b * q[i]
                    lo[i] += u if u < v else v
                    u = a * s[i]
                    v = b * t[i]
                    hi[i] += u if u > v else v


@njit(nogil=True, cache=True)
def _natural_known(wl, wu, bl, bu, x, positions, yl, yu):
    """``_natural`` where the input is known exactly, as in a first layer."""
    rows, cols = wl.shape
    n = x.shape[1]
    for r in range(positions):
        for m in range(rows):
            lo = yl[r * rows + m]
            hi = yu[r * rows + m]
            lo[:] = bl[m]
            hi[:] = bu[m]
            k = 0
            while k + 1 < cols:
                a0, b0 = wl[m, k], wu[m, k]
                a1, b1 = wl[m, k + 1], wu[m, k + 1]
                x0 = x[r * cols + k]
                x1 = x[r * cols + k + 1]
                for i in range(n):
                    u0 = a0 * x0[i]
                    v0 = b0 * x0[i]
                    u1 = a1 * x1[i]
                    v1 = b1 * x1[i]
                    lo[i] = (lo[i] + (u0 if u0 < v0 else v0)) + (u1 if u1 < v1 else v1)
                    hi[i] = (hi[i] + (u0 if u0 > v0 else v0)) + (u1 if u1 > v1 else v1)
                k += 2
            if k < cols:
                a0, b0 = wl[m, k], wu[m, k]
                x0 = x[r * cols + k]
                for i in range(n):
                    u0 = a0 * x0[i]
                    v0 = b0 * x0[i]
                    lo[i] += u0 if u0 < v0 else v0
                    hi[i] += u0 if u0 > v0 else v0


@njit(nogil=True, cache=True)
def _midpoint_radius(wl, wu, bl, bu, xl, xu, positions, yl, yu):
    """Rump's products: centre ``Wc xc``, radius ``|Wc| xr + Wr (|xc| + xr)``; cheaper, up to 1.5 times wider."""
    rows, cols = wl.shape
    n = xl.shape[1]
    xc = 0.5 * xl + 0.5 * xu
    xr = 0.5 * xu - 0.5 * xl
    size = np.abs(xc) + xr
    centre = np.empty(n)
    radius = np.empty(n)
    for r in range(positions):
        for m in range(rows):
            centre[:] = 0.5 * bl[m] + 0.5 * bu[m]
            radius[:] = 0.5 * bu[m] - 0.5 * bl[m]
            for k in range(cols):
                wc = 0.5 * wl[m, k] + 0.5 * wu[m, k]
                wr = 0.5 * wu[m, k] - 0.5 * wl[m, k]
                wa = abs(wc)
                j = r * cols + k
                c, d, e = xc[j], xr[j], size[j]
                for i in range(n):
                    centre[i] += wc * c[i]
                    radius[i] += wa * d[i] + wr * e[i]
            lo = yl[r * rows + m]
            hi = yu[r * rows + m]
            for i in range(n):
                lo[i] = centre[i] - radius[i]
                hi[i] = centre[i] + radius[i]


@njit(nogil=True, cache=True)
def _widen(wl, wu, bl, bu, xl, xu, positions, factor, floor, yl, yu):
    """Outward by ``factor`` times a bound of the sum of absolute terms, which grows with the inputs' boxes."""
    rows, cols = wl.shape
    n = xl.shape[1]
    weight = np.zeros(rows)
    for m in range(rows):
        for k in range(cols):
            weight[m] += max(abs(wl[m, k]), abs(wu[m, k]))
    size = np.empty(n)
    for r in range(positions):
        size[:] = 0.0
        for k in range(cols):
            below = xl[r * cols + k]
            above = xu[r * cols + k]
            for i in range(n):
                u = abs(below[i])
                v = abs(above[i])
                u = u if u > v else v
                size[i] = size[i] if size[i] > u else u
        for m in range(rows):
            lo = yl[r * rows + m]
            hi = yu[r * rows + m]
            w = factor * weight[m]
            c = factor * max(abs(bl[m]), abs(bu[m])) + floor
            for i in range(n):
                e = w * size[i] + c
                lo[i] -= e
                hi[i] += e


def affine_point(weight: np.ndarray, bias: np.ndarray, x: np.ndarray, positions: int) -> np.ndarray:
    """``y[r] = W x[r] + b``; weight ``(M, K)``, bias ``(M,)``, x ``(R*K, n)`` -> ``(R*M, n)``."""
    y = np.empty((positions * weight.shape[0], x.shape[1]))
    _point(weight, bias, x, positions, y)
    return y


def affine_interval(
    weight: Interval, bias: Interval, x: Interval, positions: int, products: str, ladder: float
) -> Interval:
    """Bounds of ``affine_point`` over boxes of weight, bias and input."""
    rows, cols = weight.lower.shape
    y = Interval(
        np.empty((positions * rows, x.lower.shape[1])), np.empty((positions * rows, x.lower.shape[1]))
    )
    if products == "natural" and x.lower is x.upper:
        _natural_known(*weight, *bias, x.lower, positions, *y)
    else:
        kernel = _natural if products == "natural" else _midpoint_radius
        kernel(*weight, *bias, *x, positions, *y)
    if ladder > 0.0:
        # natural: cols products and cols additions; midpoint-radius: at most four more rounded operations a term.
        terms = cols + 2 if products == "natural" else 4 * cols + 12
        factor = ladder * terms * UNIT_ROUNDOFF
        _widen(*weight, *bias, *x, positions, factor, ladder * terms * ABSOLUTE, *y)
    return y


@dataclass(frozen=True)
class Affine(Op):
    """Inputs ``(x, weight)`` or ``(x, weight, bias)``; weight and bias are shared between records."""

    can_overflow = True
    rows: int
    cols: int
    positions: int = 1
    products: str = "natural"

    def __post_init__(self):
        if self.products not in PRODUCTS:
            raise ValueError(f"products must be one of {PRODUCTS}, got {self.products!r}")

    def features(self, inputs):
        wanted = (self.positions * self.cols, self.rows * self.cols, self.rows)
        if tuple(inputs) != wanted[: len(inputs)] or len(inputs) not in (2, 3):
            raise ValueError(f"affine map of {self.rows} x {self.cols} at {self.positions} got {inputs}")
        return self.positions * self.rows

    def _weight(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values).reshape(self.rows, self.cols)

    def _weight_interval(self, weight: Interval) -> Interval:
        return Interval(self._weight(weight.lower), self._weight(weight.upper))

    def _bias(self, args, position: int = 2) -> np.ndarray:
        return args[position].reshape(self.rows) if len(args) > position else np.zeros(self.rows)

    def forward(self, args):
        return affine_point(self._weight(args[1]), self._bias(args), args[0], self.positions)

    def boxes(self, args: Sequence[Interval]) -> tuple[Interval, Interval]:
        """Boxes of the weight ``(M, K)`` and of the bias ``(M,)``, zero where there is none."""
        bias = args[2] if len(args) == 3 else Interval(np.zeros(self.rows), np.zeros(self.rows))
        return self._weight_interval(args[1]), Interval(*(end.reshape(self.rows) for end in bias))

    def forward_interval(self, args, ladder):
        return affine_interval(*self.boxes(args), args[0], self.positions, self.products, ladder)

    def backward(self, adjoint, args, out, needed):
        """The adjoint of ``x`` only: gradients of weight and bias stay factored (see ``solvers.gradients``)."""
        if not needed[0]:
            return (None,) * len(args)
        weight = np.ascontiguousarray(self._weight(args[1]).T)
        return (affine_point(weight, np.zeros(self.cols), adjoint, self.positions), *(None,) * (len(args) - 1))

    def backward_interval(self, adjoint, args, out, needed, ladder):
        if not needed[0]:
            return (None,) * len(args)
        weight = self._weight_interval(args[1])
        weight = Interval(np.ascontiguousarray(weight.lower.T), np.ascontiguousarray(weight.upper.T))
        zero = Interval(np.zeros(self.cols), np.zeros(self.cols))
        x = affine_interval(weight, zero, adjoint, self.positions, self.products, ladder)
        return (x, *(None,) * (len(args) - 1))
