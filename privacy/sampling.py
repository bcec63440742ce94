"""Secure sampling with exact rounding: the release is a fixed function of the ideal real number `f + s Z`.

A noise variable is held as uniform random bits that are drawn only when needed. Integers bound `f + s Z` from
both sides; bits are added until both ends round to the same point of a PUBLIC power-of-two grid. That point
is what rounding the ideal real number would have given, for ANY scale `s`, private or not. So the output is
post-processing of the ideal mechanism:
no floating-point leak, no sensitivity inflation, no scale-dependent grid. (Rounding `f` itself first would
need a grid's width more sensitivity; here only the noisy value is rounded.)

Termination: with probability 1. The interval shrinks to the point `f + s Z`, which has a density, so it meets
a rounding boundary with probability 0; likewise the quarter circle and the comparisons of two uniforms. Each
extra round is needed with probability about 2^-64 times the number of grid points per unit of scale.

Sources: von Neumann 1951 / Karney 2016 (exponential by comparisons), ratio of uniforms (Cauchy), Mironov 2012
and Haney et al. 2022 (why). Running time depends on the sample (Jin et al. 2022): do not expose the latency
of one release.
"""

import array
import os
import sys
from fractions import Fraction

from certify.errors import PrivacyError

WORD = 64
_REFILL_BYTES = 8 * 512


class SecureBits:
    """Uniform bits of the operating system's cryptographic generator, buffered. There is no seed.

    Guarantees:
    * fork does not repeat bits: a child process drops the inherited buffer before its first draw;
    * copies do not repeat bits: copying or pickling raises TypeError;
    * bits are used once: a word leaves the buffer when it is handed out (one atomic operation, also between
      threads).
    """

    __slots__ = ("_owner", "_words")

    def __init__(self):
        self._owner, self._words = None, []

    def bits(self, count: int) -> int:
        """A uniform integer of `count` bits (count >= 1)."""
        value = self._word()
        have = WORD
        while have < count:
            value, have = value << WORD | self._word(), have + WORD
        return value >> (have - count)

    def _word(self) -> int:
        owner = (os.getpid(), _forks)
        if owner != self._owner:
            self._words, self._owner = [], owner
        try:
            return self._words.pop()
        except IndexError:
            fresh = array.array("Q", os.urandom(_REFILL_BYTES)).tolist()
            last = fresh.pop()
            self._words = fresh
            return last

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "SecureBits cannot be copied or pickled, that would repeat random bits; create a new one"
        )


_forks = 0


def _after_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class LazyUniform:
    """A uniform real of (0, 1) of which the first `k` bits are known: it lies in `[n / 2^k, (n + 1) /
    2^k]`."""

    __slots__ = ("bits", "k", "n")

    def __init__(self, bits, width: int = WORD):
        self.bits, self.k, self.n = bits, width, bits.bits(width)

    def refine(self) -> None:
        """Double the number of known bits."""
        self.n = self.n << self.k | self.bits.bits(self.k)
        self.k *= 2

    def refine_to(self, k: int) -> None:
        while self.k < k:
            self.refine()


def less(u: LazyUniform, v: LazyUniform) -> bool:
    """Decide `u < v` (equal widths), refining both while their known bits agree. The bits not looked at stay
    uniform."""
    while True:
        u.refine_to(v.k)
        v.refine_to(u.k)
        if u.n != v.n:
            return u.n < v.n
        u.refine()
        v.refine()


def quarter_disc(bits, width: int = WORD) -> tuple[LazyUniform, LazyUniform]:
    """A uniform point of the quarter disc, by rejection: it is refined until a corner of its cell decides."""
    while True:
        x, y = LazyUniform(bits, width), LazyUniform(bits, width)
        while True:
            radius = 1 << (2 * x.k)
            if (x.n + 1) ** 2 + (y.n + 1) ** 2 <= radius:
                return x, y
            if x.n * x.n + y.n * y.n >= radius:
                break
            x.refine()
            y.refine()


class Cauchy:
    """One standard Cauchy variable: sign times `X / Y`, (X, Y) uniform in the quarter disc; rational
    arithmetic only.

    Guarantees:
    * cauchy law is exact: the angle of a uniform point of the quarter disc is uniform, and its tangent is
      |Cauchy|.
    """

    __slots__ = ("_negative", "_spent", "_x", "_y")

    def __init__(self, bits, width: int = WORD):
        self._spent = False
        self._x, self._y = quarter_disc(bits, width)
        self._negative = bits.bits(1)

    def interval(self) -> tuple[int, int, int, int]:
        """`(p, q, P, Q)`, positive denominators, with `p/q <= Z <= P/Q`."""
        x, y = self._x, self._y
        while y.n == 0:
            self.refine()
        if self._negative:
            return -(x.n + 1), y.n, -x.n, y.n + 1
        return x.n, y.n + 1, x.n + 1, y.n

    def refine(self) -> None:
        self._x.refine()
        self._y.refine()


class Laplace:
    """One standard Laplace variable: sign times Exp(1), from comparisons of uniforms only.

    von Neumann: draw `U_1 > U_2 > ... > U_n`, stopping at the first `U_{n+1} >= U_n`. Given `U_1 = u` the run
    has odd length with probability `e^{-u}`; then return `l + U_1`, otherwise count `l` up (probability 1/e)
    and start again.

    Guarantees:
    * laplace law is exact: fraction and integer part have density `e^{-u}/(1 - 1/e)` and law `(1 - 1/e)
      e^{-l}`.
    """

    __slots__ = ("_fraction", "_negative", "_spent", "_whole")

    def __init__(self, bits, width: int = WORD):
        self._spent, self._whole = False, 0
        while True:
            first = last = LazyUniform(bits, width)
            odd = True
            while less(following := LazyUniform(bits, width), last):
                last, odd = following, not odd
            if odd:
                self._fraction, self._negative = first, bits.bits(1)
                return
            self._whole += 1

    def interval(self) -> tuple[int, int, int, int]:
        """`(p, q, P, Q)`, positive denominators, with `p/q <= Z <= P/Q`."""
        u = self._fraction
        one = 1 << u.k
        low = self._whole * one + u.n
        return (-low - 1, one, -low, one) if self._negative else (low, one, low + 1, one)

    def refine(self) -> None:
        self._fraction.refine()


NOISE = {"cauchy": Cauchy, "laplace": Laplace}


def grid_index(value, scale, noise, grid) -> int:
    """The integer `n` for which `n * grid` is `value + scale * Z` rounded to the grid (half up).

    `value`, `scale`, `grid`: int, float or Fraction, taken exactly; `scale > 0`; `grid` a public power of
    two. `noise`: a fresh Cauchy or Laplace.

    Guarantees:
    * rounding is exact: for every tape of bits the result is the rounding of the ideal real number;
    * noise is used once: a second release of the same variable raises PrivacyError.
    """
    vn, vd = value.as_integer_ratio()
    sn, sd = scale.as_integer_ratio()
    gn, gd = grid.as_integer_ratio()
    if sn <= 0 or gn <= 0 or gn & (gn - 1) or gd & (gd - 1):
        raise PrivacyError(
            f"grid: needs a positive scale and a power of two, got grid {grid!r}; fix a public power of two"
        )
    if noise._spent:
        raise PrivacyError("noise: this noise variable was released before; draw a new one for every release")
    noise._spent = True
    # value/grid + 1/2 = a/b and scale/grid = c/d, over the common denominator b d.
    a, b, c, d = 2 * vn * gd + vd * gn, 2 * vd * gn, sn * gd, sd * gn
    ad, bc, bd = a * d, b * c, b * d
    while True:
        p, q, p_high, q_high = noise.interval()
        low = (ad * q + bc * p) // (bd * q)
        if low == (ad * q_high + bc * p_high) // (bd * q_high):
            return low
        noise.refine()


def release(value, scale, noise, grid, output_range: tuple[float, float] | None = None) -> float:
    """`value + scale * Z` rounded to the public `grid`, then clipped to the public `output_range`; float64.

    Post-processing of the ideal mechanism `value + scale * Z`, whose privacy the calibration proves.

    Guarantees:
    * huge noise does not overflow: the grid point is an exact integer and is clipped before it becomes a
      float.
    """
    point = grid_index(value, scale, noise, grid) * Fraction(grid)
    low, high = output_range or (-sys.float_info.max, sys.float_info.max)
    return float(low) if point <= low else float(high) if point >= high else float(point)


def public_grid(low: float, high: float) -> float:
    """Default grid of a public output range: 2^-45 times the power of two at or below its largest
    magnitude."""
    width = Fraction(max(abs(float(low)), abs(float(high))))
    if width == 0:
        raise PrivacyError("output_range: both ends are 0; give a range of positive width")
    exponent = width.numerator.bit_length() - width.denominator.bit_length()
    return float(Fraction(2) ** max(exponent - 45, -1000))
