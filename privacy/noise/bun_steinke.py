"""Noises of Bun & Steinke for concentrated DP on a smooth bound; constants derived here, sharper than published.

A release is rho-zCDP when `D_alpha(P, Q) <= rho alpha` for every `alpha > 1` and both directions. Write `rho = e^2 /
2` and call `e` the rate. All laws below have independent, symmetric coordinates; the sensitivity norm is l2 in `R^p`.

One rule for all families. For neighbours with scales `s <= s' = e^lam s`, `lam <= beta`, `|Delta| <= a s`, go from
`(f, s)` to `(f', s')` through a third law, shifting at the LARGER scale and dilating at a common centre. Rates add:
with a step of rate `e_1` and one of rate `e_2`, the triangle inequality of Renyi divergence [Bun & Steinke 2016,
Prop. 27] `D_alpha(P, Q) <= k alpha/(k alpha - 1) D_((k alpha - 1)/(k - 1))(P, R) + D_(k alpha)(R, Q)` at `k = (e_1 +
e_2)/e_2` gives `alpha/2 (e_1 + e_2)^2`, in either order. With a shift of rate `L` per scale and a dilation of rate `c
sqrt(p)` per unit of `lam` the total is `L a e^-lam + c sqrt(p) lam`, convex in `lam`, so `lam = 0` and `lam = beta`
decide: `a = min(e, e^beta (e - c sqrt(p) beta)) / L`. ([BS19] has `(e - c beta) / L` for one coordinate.)

Shift. If the log density of a coordinate is `L`-Lipschitz, its shift by `d` changes the log density by at most `L d`:
pure `(L d)`-DP, which has rate `L d`; over independent coordinates the squares of the rates add, hence the l2 norm.

Dilation of `Z = X e^(sigma Y)`, `Y` standard normal: multiplying by `e^lam` moves `Y` by `lam / sigma`, rate `lam /
sigma`.

* Laplace log-normal, `X ~ Laplace(1)`: the density `E[e^(-sigma Y) e^(-|z| e^(-sigma Y))] / 2` is a mixture of
  exponentials, so its log is convex on the half line and steepest at 0: `L = E[e^(-2 sigma Y)] / E[e^(-sigma Y)] =
  e^(3 sigma^2 / 2)`.
* uniform log-normal, `X ~ U[-1, 1]`: at `|z| = e^(sigma y)` the slope is `e^(sigma^2) e^(-sigma v) h(v) / sigma`, `v
  = y + sigma`, `h` the normal hazard `phi / (1 - Phi)`. `h' = h (h - v)` and `0 < h' < 1`, so `ln h - sigma v` rises
  until `h(v) - v = sigma` and falls after: `L = e^(sigma^2 - sigma v) h(v) / sigma` there, for every `sigma > 0`
  ([BS19]: `sqrt(2/pi) e^(3 sigma^2/2) / sigma`, from sqrt 2 on).
* arsinh-normal, `Z = sinh(sigma Y) / sigma`: the slope is `(y + sigma tanh(sigma y)) / cosh(sigma y) <= K_0/sigma +
  sigma/2`, `K_0 = max u / cosh u = 0.66274...`. Its dilation uses a lemma. If `P` is the image of standard normals
  `y` under a map and the log ratio `X(y) = ln dQ/dP` is `c`-Lipschitz in `y`, then `P, Q` have rate `c` in both
  directions: with `Lam(u) = ln E_P e^(u X)` the log-Sobolev inequality for `e^(u X)` is `(Lam(u)/u)' <= c^2/2` for
  all real `u`, `Lam(1) = 0`, and `D_alpha(Q, P) = Lam(alpha)/(alpha - 1)`, `D_alpha(P, Q) = Lam(1 - alpha)/(alpha -
  1)`. For `Q` the law of `e^lam Z`, `lam > 0`: along `y' = -tanh(sigma y)/sigma` (which contracts) `dX/dlam = psi(y)
  - 1`, `psi = y tanh(sigma y)/sigma + tanh^2(sigma y)`, and `|psi'| <= (tanh u + u / cosh^2 u)/sigma + 2 sigma tanh u
  / cosh^2 u <= K_1/sigma + 4 sigma/(3 sqrt 3)`, `K_1 = 1.19967...` the root of `u tanh u = 1` (the maximum of the
  first bracket is `u` there, that of `tanh u / cosh^2 u` is `2/(3 sqrt 3)`); so `c = K_1/sigma + 4 sigma/(3 sqrt 3)`.
  [BS19] has rate `sqrt(lam (lam/sigma^2 + 1/sigma + 2))`, far worse for small `lam`.

(epsilon, delta) from rho: `delta = exp((alpha-1)(alpha rho - epsilon)) / (alpha-1) * (1 - 1/alpha)^alpha` for any
`alpha > 1` [Canonne, Kamath, Steinke 2020]. Plain Gaussian noise has no rate at all: its dilation has an infinite
divergence for large alpha.

Sources: [BS19] Bun & Steinke 2019; constants checked in the tests against Renyi divergences computed by quadrature.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from certify.errors import PrivacyError
from privacy.noise.base import Independent, NoiseFamily, beta_with_slack, round_down
from privacy.noise.gaussian import Normal
from privacy.sampling import WORD, Laplace, LazyUniform

_K0 = 0.662743419349182
_K1 = 1.199678640257734
_FRACTIONS = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.65, 0.8)
_SIGMAS = tuple(0.02 * 1.1**i for i in range(60))


@dataclass(frozen=True)
class _Concentrated(NoiseFamily):
    """What the three families share. `sigma`: public shape, a float taken exactly, in [1e-3, 8]."""

    sigma: float

    norm: ClassVar[str] = "l2"
    privacy: ClassVar[str] = "concentrated"

    def __post_init__(self):
        if not 1e-3 <= self.sigma <= 8.0:
            raise PrivacyError(f"sigma: {self.sigma!r} is not in [0.001, 8]; choose the shape in that range")

    @classmethod
    def choose(cls, epsilon: float, delta: float, dim: int) -> "NoiseFamily":
        """The sigma of a fixed list with the smallest root mean square of `Z / a` at `beta = rate / (8 sqrt(dim))`."""
        rate = rate_of_budget(epsilon, delta)
        members = [cls(sigma) for sigma in _SIGMAS]
        target = rate / (8.0 * math.sqrt(dim))
        spread = {m.sigma: m.largest_a_of_rate(rate, target, dim) / m.rms() for m in members}
        return cls(max(spread, key=spread.get))

    def shift_rate(self) -> float:
        """`L`, rounded up: rate of a shift by one scale."""
        raise NotImplementedError

    def dilation_rate(self) -> float:
        """`c`, rounded up: rate of a dilation of one coordinate by `e^lam` is at most `c lam`."""
        raise NotImplementedError

    def rms(self) -> float:
        """Root mean square of one coordinate."""
        raise NotImplementedError

    def largest_a_of_rate(self, rate: float, beta: float, dim: int) -> float:
        """Largest `a` for (rate^2 / 2)-zCDP, rounded down; 0.0 if there is none. `beta` pays for TAU."""
        beta = beta_with_slack(beta)
        left = rate - self.dilation_rate() * math.sqrt(dim) * beta * (1.0 + 2.0**-48) - 2.0**-50 * rate
        return round_down(max(0.0, min(rate, math.exp(beta) * left)) / self.shift_rate())

    def rho(self, a: float, beta: float, dim: int) -> float:
        """The rho of the region of `(a, beta)`, rounded up: the release is rho-zCDP."""
        beta = beta_with_slack(beta)
        dilated = self.shift_rate() * a * math.exp(-beta) + self.dilation_rate() * math.sqrt(dim) * beta
        return max(self.shift_rate() * a, dilated) ** 2 / 2.0 * (1.0 + 2.0**-45)

    def largest_a(self, epsilon: float, delta: float, beta: float, dim: int) -> float:
        """Largest `a` for (epsilon, delta) by way of zCDP, rounded down. `delta = 0` has no rate: 0.0."""
        if not 0.0 < delta < 1.0:
            return 0.0
        return self.largest_a_of_rate(rate_of_budget(epsilon, delta), beta, dim)

    def default_betas(self, epsilon: float, delta: float, dim: int) -> tuple[float, ...]:
        """0, and fractions of the beta whose dilation alone would spend the rate."""
        whole = rate_of_budget(epsilon, delta) / (self.dilation_rate() * math.sqrt(dim)) if 0.0 < delta < 1.0 else 0.0
        return tuple(c * whole for c in _FRACTIONS)

    def variable(self, bits, width: int = WORD):
        """One fresh lazy coordinate."""
        raise NotImplementedError

    def draw(self, dim: int, bits) -> Independent:
        return Independent(self.variable, dim, bits)


@dataclass(frozen=True)
class LaplaceLogNormal(_Concentrated):
    """`X e^(sigma Y)`, Laplace times log-normal, on an l2 smooth bound; zCDP, any dimension. Public.

    Guarantees:
    * laplace log normal pairs are concentrated dp: `D_alpha <= rho alpha` over the region, both directions;
    * laplace log normal law is exact.
    """

    name: ClassVar[str] = "laplace-log-normal"

    def shift_rate(self) -> float:
        return math.exp(1.5 * self.sigma**2) * (1.0 + 2.0**-44)

    def dilation_rate(self) -> float:
        return (1.0 + 2.0**-50) / self.sigma

    def rms(self) -> float:
        return math.sqrt(2.0) * math.exp(self.sigma**2)

    def typical(self, dim: int) -> float:
        return math.exp(self.sigma**2 / 2.0)

    def variable(self, bits, width: int = WORD) -> "LogNormalProduct":
        return LogNormalProduct(Laplace(bits, width), Normal(bits, width), self.sigma)


@dataclass(frozen=True)
class UniformLogNormal(_Concentrated):
    """`X e^(sigma Y)`, uniform on [-1, 1] times log-normal, on an l2 smooth bound; zCDP, any dimension. Public.

    Guarantees:
    * uniform log normal pairs are concentrated dp: `D_alpha <= rho alpha` over the region, both directions;
    * uniform log normal law is exact.
    """

    name: ClassVar[str] = "uniform-log-normal"

    def shift_rate(self) -> float:
        low, high = -60.0, 1.0 / self.sigma + 1.0
        for _ in range(200):
            middle = (low + high) / 2.0
            low, high = (middle, high) if _hazard(middle) - middle > self.sigma else (low, middle)
        # At a maximum an error of the place is of second order; the margin is far larger.
        slope = math.exp(self.sigma**2 - self.sigma * low) * _hazard(low) / self.sigma
        return slope * (1.0 + 1e-9)

    def dilation_rate(self) -> float:
        return (1.0 + 2.0**-50) / self.sigma

    def rms(self) -> float:
        return math.exp(self.sigma**2) / math.sqrt(3.0)

    def typical(self, dim: int) -> float:
        return math.exp(self.sigma**2 / 2.0) / 2.0

    def variable(self, bits, width: int = WORD) -> "LogNormalProduct":
        return LogNormalProduct(_SignedUniform(bits, width), Normal(bits, width), self.sigma)


@dataclass(frozen=True)
class ArsinhNormal(_Concentrated):
    """`sinh(sigma Y) / sigma` on an l2 smooth bound; zCDP, any dimension. Public.

    Guarantees:
    * arsinh normal pairs are concentrated dp: `D_alpha <= rho alpha` over the region, both directions;
    * arsinh normal law is exact.
    """

    name: ClassVar[str] = "arsinh-normal"

    def shift_rate(self) -> float:
        return (_K0 / self.sigma + self.sigma / 2.0) * (1.0 + 2.0**-44)

    def dilation_rate(self) -> float:
        return (_K1 / self.sigma + 4.0 * self.sigma / (3.0 * math.sqrt(3.0))) * (1.0 + 2.0**-44)

    def rms(self) -> float:
        return math.sqrt(math.expm1(2.0 * self.sigma**2) / 2.0) / self.sigma

    def typical(self, dim: int) -> float:
        """`E|sinh(sigma Y)| / sigma = e^(sigma^2 / 2) erf(sigma / sqrt 2) / sigma`."""
        return math.exp(self.sigma**2 / 2.0) * math.erf(self.sigma / math.sqrt(2.0)) / self.sigma

    def variable(self, bits, width: int = WORD) -> "SinhNormal":
        return SinhNormal(Normal(bits, width), self.sigma)


def epsilon_of_rho(rho: float, delta: float) -> float:
    """An epsilon, rounded up, for which rho-zCDP implies (epsilon, delta)-DP: the best alpha of a fine grid.

    Any alpha gives a valid bound, so the search needs no proof. `0 < delta < 1`, `rho >= 0`.
    """
    if not (0.0 < delta < 1.0 and 0.0 <= rho < math.inf):
        raise PrivacyError(f"rho, delta: {rho!r}, {delta!r}; give a finite rho >= 0 and 0 < delta < 1")
    if rho == 0.0:
        return 0.0
    log_delta = math.log(delta)

    def epsilon(log_order: float) -> float:
        less_one = math.exp(log_order)
        alpha = 1.0 + less_one
        # (1 - 1/alpha)^alpha = (1 + 1/(alpha - 1))^-alpha
        factor = -alpha * math.log1p(1.0 / less_one) / less_one
        terms = rho * alpha, -log_delta / less_one, -log_order / less_one, factor
        return max(0.0, sum(terms) + 2.0**-46 * sum(map(abs, terms)))

    low, high = -14.0, 40.0
    best = math.inf
    for _ in range(12):
        grid = [low + (high - low) * i / 24.0 for i in range(25)]
        values = [epsilon(x) for x in grid]
        i = min(range(25), key=values.__getitem__)
        best = min(best, values[i])
        low, high = grid[max(i - 1, 0)], grid[min(i + 1, 24)]
    return best


def rate_of_budget(epsilon: float, delta: float) -> float:
    """Largest rate `e` found, rounded down, such that (e^2/2)-zCDP implies (epsilon, delta)-DP."""
    low, high = 0.0, 2.0 * math.sqrt(epsilon) + epsilon
    for _ in range(60):
        middle = (low + high) / 2.0
        rho = middle**2 / 2.0 * (1.0 + 2.0**-50)
        low, high = (middle, high) if epsilon_of_rho(rho, delta) <= epsilon else (low, middle)
    return low


def _hazard(v: float) -> float:
    """`phi(v) / (1 - Phi(v))`."""
    from scipy.special import log_ndtr

    return math.exp(-v * v / 2.0 - math.log(2.0 * math.pi) / 2.0 - float(log_ndtr(-v)))


class _SignedUniform:
    """A lazy uniform of (-1, 1)."""

    __slots__ = ("_fraction", "_negative")

    def __init__(self, bits, width: int = WORD):
        self._fraction, self._negative = LazyUniform(bits, width), bits.bits(1)

    def interval(self) -> tuple[int, int, int, int]:
        low, one = self._fraction.n, 1 << self._fraction.k
        return (-low - 1, one, -low, one) if self._negative else (low, one, low + 1, one)

    def refine(self) -> None:
        self._fraction.refine()


class LogNormalProduct:
    """The lazy variable `X e^(sigma Y)`: interval arithmetic on the intervals of `X` and `Y`.

    Guarantees:
    * product intervals contain the value: the exponential is rounded outward (`exp_interval`).
    """

    __slots__ = ("_precision", "_shape", "_spent", "_x", "_y")

    def __init__(self, x, y, sigma: float):
        self._x, self._y, self._spent = x, y, False
        self._shape, self._precision = sigma.as_integer_ratio(), WORD + 16

    def interval(self) -> tuple[int, int, int, int]:
        """`(p, q, P, Q)`, positive denominators, with `p/q <= Z <= P/Q`."""
        low, high = _scaled_exp(self._y, self._shape, self._precision)
        p, q, P, Q = self._x.interval()
        one = 1 << self._precision
        return p * (low if p >= 0 else high), q * one, P * (high if P >= 0 else low), Q * one

    def refine(self) -> None:
        self._x.refine()
        self._y.refine()
        self._precision *= 2


class SinhNormal:
    """The lazy variable `sinh(sigma Y) / sigma`.

    Guarantees:
    * sinh intervals contain the value: `sinh` increases, both exponentials are rounded outward.
    """

    __slots__ = ("_precision", "_shape", "_spent", "_y")

    def __init__(self, y, sigma: float):
        self._y, self._spent = y, False
        self._shape, self._precision = sigma.as_integer_ratio(), WORD + 16

    def interval(self) -> tuple[int, int, int, int]:
        """`(p, q, P, Q)`, positive denominators, with `p/q <= Z <= P/Q`."""
        low, high = _scaled_exp(self._y, self._shape, self._precision)
        while not low:
            self._precision *= 2
            low, high = _scaled_exp(self._y, self._shape, self._precision)
        one, square = 1 << self._precision, 1 << (2 * self._precision)
        # sinh(t) = (x - 1/x)/2 with x = e^t; t sits in [ln(low/one), ln(high/one)].
        below, above = low - -(-square // low), high - square // high
        n, d = self._shape
        return below * d, 2 * n * one, above * d, 2 * n * one

    def refine(self) -> None:
        self._y.refine()
        self._precision *= 2


def _scaled_exp(y, shape: tuple[int, int], precision: int) -> tuple[int, int]:
    """Integers `low`, `high` with `low <= 2^precision e^(sigma Y) <= high` for every `Y` in its interval."""
    n, d = shape
    p, q, P, Q = y.interval()
    return exp_interval(p * n, q * d, precision)[0], exp_interval(P * n, Q * d, precision)[1]


def exp_interval(n: int, d: int, precision: int) -> tuple[int, int]:
    """Integers `low <= 2^precision exp(n/d) <= high`, `d > 0`; integer arithmetic, rounded outward at every step.

    `exp(x) = exp(x / 2^r)^(2^r)`, `|x| / 2^r <= 2^-8`: Taylor with its remainder, then `r` squarings. For negative
    `x` the reciprocal.
    """
    if n < 0:
        # Enough digits that the reciprocal is accurate: e^|x| has about 1.45 |x| bits.
        low, high = exp_interval(-n, d, precision)
        square = 1 << (2 * precision)
        return square // high, -(-square // low)
    halvings = max(0, n.bit_length() - d.bit_length() + 9)
    work = precision + halvings + 24
    x_low = (n << work) // (d << halvings)
    x_high = x_low + 1
    one = 1 << work
    low = high = term_low = term_high = one
    k = 0
    while term_high > 1:
        k += 1
        term_low = (term_low * x_low >> work) // k
        raised = (term_high * x_high >> work) + 1
        term_high = -(-raised // k)
        low, high = low + term_low, high + term_high
    high += 2  # the rest of the series is below its last term, which is at most 1
    for _ in range(halvings):
        low, high = low * low >> work, -(-high * high >> work)
    shift = work - precision
    return low >> shift, -(-high >> shift)
