"""Power laws in `p` dimensions: pure privacy with light tails, one calibration for every norm.

Density `~ (1 + ||z||)^-(p + q)`, `||.||` the norm of the smooth bound. Narrow law with scale 1, wide law with
`e^lam`, centres at most `a` apart, `c = p + q`, `r` and `r'` the distances from the two centres, `|r - r'| <= a`:

* narrow against wide, `p lam + c ln((1 + r' e^-lam) / (1 + r))`: with `r' <= r + a` a falling function of `r`, so
  `r = 0`: `p lam + c ln(1 + a e^-lam)`, convex in `lam`: `lam = 0` or `lam = beta`;
* wide against narrow, `-p lam + c ln((1 + r) / (1 + r' e^-lam))`: with `r <= r' + a` a monotone function of `r'`:
  `r' = 0`, at most `c ln(1 + a)`, or `r' -> infinity`, `q lam`.

So exactly `a <= e^(epsilon/c) - 1`, `a <= e^beta (e^((epsilon - p beta)/c) - 1)`, `q beta <= epsilon`.

The whole number `q` is fixed in advance, `4 p` by default: `beta` up to `epsilon / (4 p)`, tails `t^-q`. (`q =
epsilon / beta` is the largest a given beta allows; a law per beta would end the free choice of beta.)

Separate scales. With a smooth bound `S_j` and a noise scale of its own for every coordinate the dilations may
differ, even in sign, and the constants above are WRONG (true epsilon up to 1.9 for a claimed 1). For the box norm
the exact ones are `(q + 2 p - 2) beta <= epsilon`, `p beta + c ln(1 + a e^-beta) <= epsilon`, `(p - 1) beta + c
ln(1 + a) <= epsilon`: with `|lam_j| <= beta` and the largest coordinate of the second law in place `j`, the other
dilations add up to `(p - 1) beta`; for `lam_j >= 0` as above; for `lam_j = -mu < 0`, `-mu + (p - 1) beta + c ln((1
+ a + r e^mu) / (1 + r))` has its ends at `r = 0` and `r -> infinity`.

Sampling. `||Z||` is beta prime `(p, q)`: with the order statistics `U_1 < U_2 < ...` of `p + q - 1` uniforms, `U_p
/ (1 - U_p)`. Box: a uniform face, the other coordinates uniform. l1: the spacings are uniform on the simplex,
`|Z_i| = (U_i - U_{i-1}) / (1 - U_p)`. Comparisons and fractions of lazy bits only.

Sources: AUDIT A11 (l1, as Laplace over Gamma); Hladik & Tetek 2025, arXiv 2407.05067, for the one-dimensional law
(their constants were not available to us; these are derived above and tested).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from certify.errors import PrivacyError
from privacy.noise.base import Noise, NoiseFamily, beta_with_slack, round_down, spare_budget
from privacy.sampling import WORD, LazyUniform

_FRACTIONS = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class _Power(NoiseFamily):
    """The law `(1 + ||z||)^-(p + q)`; `q` None is the public rule `4 p`."""

    q: int | None = None

    privacy: ClassVar[str] = "pure"

    def __post_init__(self):
        if self.q is not None and (self.q != int(self.q) or self.q < 2):
            raise PrivacyError(f"q: {self.q!r} is not a whole number of at least 2; take 4 times the dimension")

    @classmethod
    def choose(cls, epsilon: float, delta: float, dim: int) -> "NoiseFamily":
        return cls(4 * dim)

    def exponent(self, dim: int) -> int:
        """`q`: the tail of `||Z||` falls like `t^-q`."""
        return 4 * dim if self.q is None else int(self.q)

    def largest_a(self, epsilon: float, delta: float, beta: float, dim: int) -> float:
        q, beta = self.exponent(dim), beta_with_slack(beta)
        spare = spare_budget(epsilon, dim, beta)
        if spare <= 0.0 or spare_budget(epsilon, q, beta) <= 0.0:
            return 0.0
        slide = math.expm1(epsilon / (dim + q))
        corner = math.exp(beta) * math.expm1(spare / (dim + q))
        return round_down(min(slide, corner))

    def default_betas(self, epsilon: float, delta: float, dim: int) -> tuple[float, ...]:
        """Fractions of the largest beta, which is `epsilon / max(p, q)` less a little for rounding (see TAU)."""
        top = _largest_beta(epsilon, max(dim, self.exponent(dim)))
        if self.exponent(dim) <= dim:
            top *= 0.9
        return tuple(c * top for c in _FRACTIONS)


@dataclass(frozen=True)
class L1Power(_Power):
    """Power law of the l1 norm, for an l1 smooth bound; pure, any dimension. Public.

    Guarantees:
    * power pairs are exactly epsilon dp: the joint worst log ratio over the region is epsilon;
    * l1 power law is exact.
    """

    name: ClassVar[str] = "l1-power"
    norm: ClassVar[str] = "l1"

    def draw(self, dim: int, bits) -> Noise:
        return L1PowerVector(dim, self.exponent(dim), bits)

    def typical(self, dim: int) -> float:
        return 1.0 / (self.exponent(dim) - 1)

    def tail(self, dim: int, level: float = 0.95) -> float:
        # |Z_i| is exponential over an independent Gamma(q): P(|Z_i| > t) = (1 + t)^-q.
        return math.expm1(-math.log1p(-level) / self.exponent(dim))


@dataclass(frozen=True)
class BoxPower(_Power):
    """Power law of the largest coordinate, for a smooth bound of the largest change; pure, any dimension. Public.

    One common scale for all coordinates (known weights of the coordinates are public factors of the values).

    Guarantees:
    * power pairs are exactly epsilon dp: the joint worst log ratio over the region is epsilon;
    * box power law is exact.
    """

    name: ClassVar[str] = "box-power"
    norm: ClassVar[str] = "linf"

    def draw(self, dim: int, bits) -> Noise:
        return BoxPowerVector(dim, self.exponent(dim), bits)

    def typical(self, dim: int) -> float:
        return (dim + 1) / (2.0 * (self.exponent(dim) - 1))

    def tail(self, dim: int, level: float = 0.95) -> float:
        from scipy.optimize import brentq
        from scipy.special import betainc

        p, q = dim, self.exponent(dim)

        def above(t: float) -> float:
            """`P(|Z_i| > t) = P(r > t) - (1 - 1/p) t E[1/r; r > t]`, the expectation by a shifted beta law."""
            x = t / (1.0 + t)
            outside = betainc(q, p, 1.0 - x)
            inverse = 0.0 if p == 1 else t * q / (p - 1) * betainc(q + 1, p - 1, 1.0 - x)
            return outside - (1.0 - 1.0 / p) * inverse

        return float(brentq(lambda t: above(t) - (1.0 - level), 0.0, 1e9, xtol=1e-14, rtol=1e-12))


@dataclass(frozen=True)
class SeparateBoxPower(BoxPower):
    """`BoxPower` with a smooth bound `S_j` and a scale `S_j / a` of its own for every coordinate; pure. Public.

    All `S_j` are for one and the same beta: the free choice of beta would pick differently per coordinate, which no
    pair covers. Not in the table of families; ask for it by class.

    Guarantees:
    * separate box pairs are exactly epsilon dp: over `|f_j - f_j'| <= a min(s_j, s_j')` and `|ln s_j/s_j'| <= beta` for
      all `j`;
    * box power law is exact.
    """

    name: ClassVar[str] = "separate-box-power"
    norm: ClassVar[str] = "coordinates"
    free_beta: ClassVar[bool] = False

    def largest_a(self, epsilon: float, delta: float, beta: float, dim: int) -> float:
        q, beta = self.exponent(dim), beta_with_slack(beta)
        spare = spare_budget(epsilon, dim, beta)
        if spare <= 0.0 or spare_budget(epsilon, q + 2 * dim - 2, beta) <= 0.0:
            return 0.0
        slide = math.expm1(spare_budget(epsilon, dim - 1, beta) / (dim + q))
        corner = math.exp(beta) * math.expm1(spare / (dim + q))
        return round_down(min(slide, corner))

    def default_betas(self, epsilon: float, delta: float, dim: int) -> tuple[float, ...]:
        return (_largest_beta(epsilon, self.exponent(dim) + 2 * dim - 2),)


def _largest_beta(epsilon: float, times: int) -> float:
    """A beta just below `epsilon / times`, so that `times * beta` with the slack for TAU stays within epsilon."""
    return epsilon / times * (1.0 - 2.0**-20) - 2.0**-38


class _Sorted:
    """`count` uniforms in ascending order, distinct in their known bits."""

    __slots__ = ("values",)

    def __init__(self, count: int, bits, width: int):
        values = [LazyUniform(bits, width) for _ in range(count)]
        while True:
            values.sort(key=_known)
            if all(u.n < v.n for u, v in zip(values, values[1:], strict=False)):
                self.values = values
                return
            for u in values:
                u.refine()


def _known(u: LazyUniform) -> int:
    return u.n


class L1PowerVector(Noise):
    """`|Z_i| = (U_i - U_{i-1}) / (1 - U_p)` with random signs."""

    __slots__ = ("_signs", "_uniforms")

    def __init__(self, dim: int, q: int, bits, width: int = WORD):
        super().__init__(dim)
        self._uniforms = _Sorted(dim + q - 1, bits, width).values[:dim]
        self._signs = bits.bits(dim)

    def interval(self, i: int = 0) -> tuple[int, int, int, int]:
        high, last, low = self._uniforms[i], self._uniforms[-1], self._uniforms[i - 1] if i else None
        while last.n + 1 >> last.k:
            last.refine()
        k = max(u.k for u in (high, last, low) if u)
        for u in (high, last, low):
            if u:
                u.refine_to(k)
        one = 1 << k
        # For the last coordinate numerator and denominator share a uniform; treating them apart only widens.
        narrow, wide = (high.n - low.n - 1, high.n - low.n + 1) if low else (high.n, high.n + 1)
        p, q, p_high, q_high = narrow, one - last.n, wide, one - last.n - 1
        return (-p_high, q_high, -p, q) if self._signs >> i & 1 else (p, q, p_high, q_high)

    def refine(self, i: int = 0) -> None:
        for u in {id(u): u for u in (self._uniforms[i], self._uniforms[-1], self._uniforms[max(i - 1, 0)])}.values():
            u.refine()


class BoxPowerVector(Noise):
    """Radius `U_p / (1 - U_p)`, a uniform face, the other coordinates uniform within the face; random signs."""

    __slots__ = ("_face", "_radius", "_signs", "_within")

    def __init__(self, dim: int, q: int, bits, width: int = WORD):
        super().__init__(dim)
        self._radius = _Sorted(dim + q - 1, bits, width).values[dim - 1]
        self._face = _below(dim, bits)
        self._signs = bits.bits(dim)
        self._within = [None if i == self._face else LazyUniform(bits, width) for i in range(dim)]

    def interval(self, i: int = 0) -> tuple[int, int, int, int]:
        radius, within = self._radius, self._within[i]
        while radius.n + 1 >> radius.k:
            radius.refine()
        one = 1 << radius.k
        p, q, p_high, q_high = radius.n, one - radius.n, radius.n + 1, one - radius.n - 1
        if within is not None:
            p, q, p_high, q_high = p * within.n, q << within.k, p_high * (within.n + 1), q_high << within.k
        return (-p_high, q_high, -p, q) if self._signs >> i & 1 else (p, q, p_high, q_high)

    def refine(self, i: int = 0) -> None:
        parts = [u for u in (self._radius, self._within[i]) if u is not None]
        # Only the coarser ones: all coordinates share the radius, which must not double for each of them.
        coarsest = min(u.k for u in parts)
        for u in parts:
            if u.k == coarsest:
                u.refine()


def _below(count: int, bits) -> int:
    """A uniform integer of `0 .. count - 1`, by rejection."""
    if count == 1:
        return 0
    width = (count - 1).bit_length()
    while (value := bits.bits(width)) >= count:
        pass
    return value
