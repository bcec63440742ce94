"""Student's t noise in one dimension: pure privacy, a finite mean from two degrees of freedom on.

Density `~ (1 + z^2 / nu)^(-(nu + 1) / 2)`, a power of a Cauchy density of scale `sqrt(nu)`. With `C` the log ratio
of those two Cauchy laws (`sup C = -inf C = d`, `cosh d = cosh lam + e^-lam a^2 / (2 nu)`, see `cauchy`), narrow
against wide is `(nu + 1)/2 C - (nu - 1)/2 lam` and wide against narrow its negative. So the worst loss is `(nu +
1)/2 d + (nu - 1)/2 lam` for `nu >= 1`, convex in `lam`, and decided by `lam = 0` and `lam = beta`:

`a <= 2 sqrt(nu) sinh(epsilon / (nu + 1))`, `a^2 <= 2 nu e^beta (cosh D - cosh beta)`, `D = (2 epsilon - (nu - 1)
beta) / (nu + 1)`, which needs `nu beta < epsilon`. Exact, for every real `nu >= 1`; integers are offered because
they are sampled exactly.

Sampling (Bailey 1994): for `R^2 = nu (V^(-2/nu) - 1)`, `V` uniform, and an independent angle, `R cos(angle)` is a
coordinate of the bivariate t law, whose radius has `P(R > r) = (1 + r^2/nu)^(-nu/2)`; so it is Student with `nu`
degrees of freedom. The angle is that of a uniform point of the quarter disc; roots are integer roots of lazy bits,
rounded to both sides.

Source of the family: Bun & Steinke 2019 (their constant: `2 sqrt(nu) (epsilon - beta (nu + 1)) / (nu + 1)`,
smaller).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from certify.errors import PrivacyError
from privacy.noise.base import Noise, NoiseFamily, beta_with_slack, round_down, spare_budget
from privacy.sampling import WORD, LazyUniform, quarter_disc

_FRACTIONS = (0.125, 0.25, 0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True)
class Student(NoiseFamily):
    """Student's t with a whole number of at least 2 degrees of freedom; pure, one dimension. Public.

    Guarantees:
    * student pairs are exactly epsilon dp: the worst log ratio over the region is epsilon;
    * student law is exact: rational arithmetic and integer roots of lazy bits.
    """

    degrees: int = 3

    name: ClassVar[str] = "student"
    norm: ClassVar[str] = "l1"
    privacy: ClassVar[str] = "pure"
    largest_dim: ClassVar[int | None] = 1

    def __post_init__(self):
        if self.degrees != int(self.degrees) or not 2 <= self.degrees <= 64:
            raise PrivacyError(f"degrees: {self.degrees!r} is not a whole number from 2 to 64; take 3")

    def largest_a(self, epsilon: float, delta: float, beta: float, dim: int) -> float:
        nu, beta = self.degrees, beta_with_slack(beta)
        # D - beta = 2 (epsilon - nu beta) / (nu + 1), D + beta = 2 (epsilon + beta) / (nu + 1).
        spare = spare_budget(epsilon, nu, beta)
        if dim != 1 or spare <= 0.0:
            return 0.0
        slide = 2.0 * math.sqrt(nu) * math.sinh(epsilon / (nu + 1))
        sines = math.sinh((epsilon + beta) / (nu + 1)) * math.sinh(spare / (nu + 1))
        corner = 2.0 * math.sqrt(nu * math.exp(beta) * sines)
        return round_down(min(slide, corner))

    def default_betas(self, epsilon: float, delta: float, dim: int) -> tuple[float, ...]:
        return tuple(c * epsilon / self.degrees for c in _FRACTIONS)

    def draw(self, dim: int, bits) -> Noise:
        return StudentVariable(self.degrees, bits)

    def typical(self, dim: int) -> float:
        nu = self.degrees
        gammas = math.exp(math.lgamma((nu + 1) / 2.0) - math.lgamma(nu / 2.0))
        return 2.0 * math.sqrt(nu / math.pi) * gammas / (nu - 1)

    def tail(self, dim: int, level: float = 0.95) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.degrees, (1.0 + level) / 2.0))


class StudentVariable(Noise):
    """One Student variable: `+-sqrt( x^2/(x^2+y^2) nu (V^(-2/nu) - 1) )` with lazy uniform `x`, `y`, `V`."""

    __slots__ = ("_degrees", "_negative", "_v", "_x", "_y")

    def __init__(self, degrees: int, bits, width: int = WORD):
        super().__init__(1)
        self._degrees = degrees
        self._x, self._y = quarter_disc(bits, width)
        self._v, self._negative = LazyUniform(bits, width), bits.bits(1)

    def interval(self, i: int = 0) -> tuple[int, int, int, int]:
        x, y, v = self._x, self._y, self._v
        while v.n == 0 or (x.n == 0 and y.n == 0):
            self.refine()
        # cos^2 grows with x and falls with y, the radius falls with V.
        m = v.k + 32
        low, high = self._end(x.n, y.n + 1, v.n + 1, m, False), self._end(x.n + 1, y.n, v.n, m, True)
        one = 1 << m
        return (-high, one, -low, one) if self._negative else (low, one, high, one)

    def _end(self, x: int, y: int, v: int, m: int, up: bool) -> int:
        """`2^m` times the variable for uniforms `x/2^k`, `y/2^k`, `v/2^k`, rounded down or up."""
        nu, k = self._degrees, self._v.k
        # 2^m (2^k / v)^(2/nu), as the integer nu-th root of 2^(m nu + 2 k) / v^2.
        power = _root((1 << (m * nu + 2 * k)) // (v * v), nu) + up - (1 << m)
        numerator, denominator = (x * x * nu * max(power, 0)) << m, x * x + y * y
        square = numerator // denominator  # 2^(2m) cos^2 R^2
        return math.isqrt(square) + up

    def refine(self, i: int = 0) -> None:
        for part in (self._x, self._y, self._v):
            part.refine()


def _root(n: int, degree: int) -> int:
    """Largest integer `r` with `r ** degree <= n`."""
    if degree == 2:
        return math.isqrt(n)
    if n == 0:
        return 0
    # Start above the root: Newton's steps then fall until they stop, at the floor of the root.
    shift = max(0, n.bit_length() - 60)
    shift += -shift % degree
    r = (int(((n >> shift) + 1) ** (1.0 / degree) * (1.0 + 2.0**-40)) + 1) << (shift // degree)
    while True:
        step = ((degree - 1) * r + n // r ** (degree - 1)) // degree
        if step >= r:
            return r
        r = step
