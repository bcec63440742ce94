"""Gaussian noise on an l2 smooth bound: exact hockey stick over the region, exact lazy sampling.

Release: `f + s Z`, `Z` standard normal in `R^p`. By scaling, the pairs of laws of two neighbours are `N(0, I)` and
`N(Delta, e^(2 lam) I)`, in either order, with `|Delta| <= a`, `0 <= lam <= beta` (the narrow law has scale 1).
`H(P, Q) = sup_E P(E) - e^epsilon Q(E)`.

Why the corner decides (proofs):
* shift: `H = 1 - int min(p, e^epsilon q) = 1 - int_0^inf vol(B_t meets B'_t) dt`, with `B_t`, `B'_t` the level sets,
  balls around the two centres. The volume of the intersection of two balls falls as the centres part, so `H` grows
  with `|Delta|`: only `|Delta| = a` counts. (True for every law whose level sets are balls.)
* dilation, wide law first: `P = N(0, e^(2 lam))`, `d/dlam p = -div(z p)`. `p <= e^epsilon q` is a ball `B`, so
  `dH/dlam = int_B div(z p)`, the flux of `z p` through the sphere, not negative when `B` holds the origin, that is
  when `a^2/2 - p lam <= epsilon`. `a <= sqrt(2 epsilon)` is imposed, so `lam = beta` is the worst case.
* dilation, narrow law first: not monotone. `[0, beta]` is covered by cells that are split until a bound for the whole
  cell is at most delta. For `l <= lam <= u`, `h = u - l`, the density of `N(Delta, e^(2 lam))` is at least `e^(-p h)`
  times that of `N(Delta, e^(2 l))`, so `H_epsilon(lam) <= H_(epsilon - p h)(l)`. Or, better for large `p`: between
  `N(0, 1)` and `N(0, e^(2 (lam - l)))` the loss is `p (lam - l) - (1 - e^(-2 (lam - l))) chi^2_p / 2`, above `e_1 = p
  h - (1 - e^(-2 h)) q / 2` with probability at most `d_1` (`q` the lower `d_1` quantile, at most `p`, so that this
  grows with `lam`); and from there to `N(Delta, e^(2 lam))` it is, after scaling, the pair at `l` with a shift of at
  most `a`. So `H_epsilon(lam) <= d_1 + e^(e_1) H_(epsilon - e_1)(l)`.

Each hockey stick is a difference of two noncentral chi-square probabilities, evaluated as Poisson mixtures of
positive terms with outward tails and a relative margin `MARGIN` that covers the rounding of scipy's incomplete gamma
function (tests: within 1e-11 of 60-digit arithmetic). Two very close laws (tiny beta) would need huge mixtures; there
the dilation is paid first, `P[loss of the dilation > epsilon_1] <= delta_1`, and the plain shift takes the rest.

Source: Balle & Wang 2018 (plain Gaussian), Karney 2016 (sampler).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from privacy.noise.base import Independent, NoiseFamily, beta_with_slack
from privacy.sampling import WORD, LazyUniform, less

MARGIN = 1e-9
_FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
_CLOSEST = 1500.0
_MOST_CELLS = 200


@dataclass(frozen=True)
class Gaussian(NoiseFamily):
    """Independent standard normal coordinates for an l2 smooth bound; (epsilon, delta), any dimension. Public.

    Guarantees:
    * gaussian pairs are epsilon delta dp: `H <= delta` over the whole region, both directions;
    * gaussian pairs are tight: a scale smaller by one part in a hundred violates the claim (unless `a` is capped by
      `sqrt(2 epsilon)`, which binds only for delta above about 0.02);
    * gaussian law is exact.
    """

    name: ClassVar[str] = "gaussian"
    norm: ClassVar[str] = "l2"
    privacy: ClassVar[str] = "approximate"

    def largest_a(self, epsilon: float, delta: float, beta: float, dim: int = 1) -> float:
        """Largest certified `a` for (epsilon, delta), rounded down; 0.0 when there is none. `beta` pays for TAU."""
        if not 0.0 < delta < 1.0 or not 0.0 < epsilon < math.inf or beta < 0.0:
            return 0.0
        beta = beta_with_slack(beta)
        plain = _plain_a(epsilon, delta)
        least = plain / _CLOSEST
        if beta >= least:
            return _corner_a(epsilon, delta, beta, dim, plain)
        return max(_dilation_first_a(epsilon, delta, beta, dim), _corner_a(epsilon, delta, least, dim, plain))

    def default_betas(self, epsilon: float, delta: float, dim: int = 1) -> tuple[float, ...]:
        """0 (global sensitivity) and fractions of the dilation that alone would spend the budget."""
        low, high = 0.0, epsilon
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _dilation_loss(middle, delta, dim) <= epsilon else (low, middle)
        return tuple(c * low for c in _FRACTIONS)

    def draw(self, dim: int, bits) -> Independent:
        """A fresh lazy vector of `dim` independent standard normals."""
        return Independent(Normal, dim, bits)

    def typical(self, dim: int = 1) -> float:
        """Mean of `|Z_i|`."""
        return math.sqrt(2.0 / math.pi)

    def tail(self, dim: int, level: float = 0.95) -> float:
        from scipy.special import ndtri

        return float(ndtri((1.0 + level) / 2.0))


def hockey_stick(epsilon: float, a: float, lam: float, dim: int, wide_first: bool) -> float:
    """Upper bound of `H_epsilon` for two spherical normals at distance `a` narrow scales, scales 1 and `e^lam`.

    `wide_first`: the first law of the pair is the wide one. `epsilon` may be negative. Exact up to `MARGIN` times the
    probability of the event.
    """
    if lam == 0.0:
        return _plain(epsilon, a)
    w, one_minus_w = math.exp(-2.0 * lam), -math.expm1(-2.0 * lam)
    shift = w * a * a / one_minus_w
    if wide_first:
        square = 2.0 / one_minus_w * (epsilon + dim * lam + shift / 2.0)
        if square <= 0.0:
            return -math.expm1(epsilon)
        first = _ncx2(square * w, dim, shift / one_minus_w, upper_tail=True)
        second = _ncx2(square, dim, shift * w / one_minus_w, upper_tail=True)
    else:
        square = 2.0 / one_minus_w * (dim * lam + shift / 2.0 - epsilon)
        if square <= 0.0:
            return 0.0
        first = _ncx2(square, dim, shift * w / one_minus_w, upper_tail=False)
        second = _ncx2(square * w, dim, shift / one_minus_w, upper_tail=False)
    return max(0.0, first[1] - math.exp(epsilon) * second[0])


def worst_hockey_stick(epsilon: float, delta: float, a: float, beta: float, dim: int) -> float:
    """An upper bound of `H_epsilon` over the region of `(a, beta)`; infinite if `a > sqrt(2 epsilon)` or when no
    bound of at most `delta` was found within the allowed number of cells."""
    if a > math.sqrt(2.0 * epsilon):
        return math.inf
    worst = hockey_stick(epsilon, a, beta, dim, True)
    cells, used = [(0.0, beta)], 0
    while cells and worst <= delta:
        low, high = cells.pop()
        bound = _narrow_first(epsilon, 1e-3 * delta, a, low, high, dim)
        used += 1
        if bound <= delta:
            worst = max(worst, bound)
        elif used > _MOST_CELLS:
            return math.inf
        else:
            middle = (low + high) / 2.0
            cells += [(middle, high), (low, middle)]
    return worst


def _narrow_first(epsilon: float, share: float, a: float, low: float, high: float, dim: int) -> float:
    """Bound of the narrow-first hockey stick for every `lam` in `[low, high]`; the better of the two ways, `share` is
    the delta spent on the typical set."""
    from scipy.special import gammaincinv

    step = high - low
    quantile = min(2.0 * gammaincinv(dim / 2.0, share * (1.0 - MARGIN)), dim)
    typical = (dim * step + math.expm1(-2.0 * step) / 2.0 * quantile) + 1e-9 * dim * step
    if typical < dim * step:
        return share + math.exp(typical) * hockey_stick(epsilon - typical, a, low, dim, False)
    return hockey_stick(epsilon - dim * step * (1.0 + 2.0**-50), a, low, dim, False)


def _corner_a(epsilon: float, delta: float, beta: float, dim: int, plain: float) -> float:
    cap = min(math.sqrt(2.0 * epsilon) * (1.0 - 2.0**-50), plain)
    a = _largest(lambda a: hockey_stick(epsilon, a, beta, dim, True), delta, cap)
    for shrink in range(24):
        if a <= 0.0 or worst_hockey_stick(epsilon, delta, a, beta, dim) <= delta:
            return a
        a *= 1.0 - 2.0 ** min(shrink - 12, -4)
    return 0.0


def _plain_a(epsilon: float, delta: float) -> float:
    """Plain Gaussian mechanism: largest `a` (sensitivity over scale)."""
    high = 1.0
    while _plain(epsilon, high) <= delta and high < 1e6:
        high *= 2.0
    return _largest(lambda a: _plain(epsilon, a), delta, high)


def _dilation_first_a(epsilon: float, delta: float, beta: float, dim: int) -> float:
    share = 1e-4 * delta
    spent = max(_dilation_loss(beta, share, dim), dim * beta)
    if spent >= epsilon:
        return 0.0
    return _plain_a(epsilon - spent, (delta - share) * math.exp(-spent) * (1.0 - 2.0**-50))


def _dilation_loss(beta: float, delta: float, dim: int) -> float:
    """Loss of the pure dilation wide against narrow, exceeded with probability at most delta; at least that of narrow
    against wide, `dim * beta`, only when the caller takes the maximum."""
    from scipy.special import gammainccinv

    quantile = max(2.0 * gammainccinv(dim / 2.0, delta * (1.0 - MARGIN)), dim)
    return (math.expm1(2.0 * beta) / 2.0 * quantile - dim * beta) * (1.0 + 1e-9)


def _largest(value, target: float, high: float) -> float:
    """A number in `[0, high]`, to about one part in 2^25 the largest, at which the increasing `value` is at most
    `target`."""
    from scipy.optimize import brentq

    if value(high) <= target:
        return high
    low = high / 2.0
    while low > 1e-150 and value(low) > target:
        high, low = low, low / 8.0
    if low <= 1e-150:
        return 0.0
    excess = lambda x: math.log(max(value(x), 1e-300) / target)  # noqa: E731
    root = brentq(excess, low, high, xtol=1e-300, rtol=2.0**-25)
    for _ in range(30):
        if value(root) <= target:
            return root
        root *= 1.0 - 2.0**-26
    return low


def _plain(epsilon: float, a: float) -> float:
    """Hockey stick of two unit normals at distance `a`, with the outward margin."""
    from scipy.special import log_ndtr

    if a == 0.0:
        return max(0.0, -math.expm1(epsilon))
    first = math.exp(log_ndtr(a / 2.0 - epsilon / a)) * (1.0 + MARGIN)
    second = math.exp(epsilon + log_ndtr(-a / 2.0 - epsilon / a)) * (1.0 - MARGIN)
    return max(0.0, first - second)


def _ncx2(x: float, dim: int, noncentrality: float, upper_tail: bool) -> tuple[float, float]:
    """(lower, upper) bound of the probability that a noncentral chi-square lies above (below) `x`.

    Poisson mixture over `j` of central chi-squares with `dim + 2 j` degrees of freedom: weights by ratios from the
    mode, where they are 1; the terms left out have total weight at most `tail`. The central tails come from one
    incomplete gamma function and `Q(s + 1, y) = Q(s, y) + y^s e^(-y) / Gamma(s + 1)`. All sums are of positive terms.
    """
    import numpy as np
    from scipy.special import gammainc, gammaincc

    mu, y = noncentrality / 2.0, x / 2.0
    mode = int(mu)
    reach = int(14.0 * math.sqrt(mu) + 90.0)
    first = max(mode - reach, 0)
    j = np.arange(first, mode + reach + 1, dtype=np.float64)
    weights = _ratios(mu / j[1:], mode - first)
    ratio = mu / (j[-1] + 1.0)
    tail = weights[-1] * ratio / (1.0 - ratio)
    if first > 0:
        ratio = first / mu
        tail += weights[0] * ratio / (1.0 - ratio)
    s = dim / 2.0 + j
    anchor = int(min(max(y - s[0], 0.0), len(s) - 2))
    steps = _ratios(y / s[1:-1], anchor) * _gamma_term(s[anchor], y)
    if upper_tail:
        terms = gammaincc(s[0], y) + np.concatenate([[0.0], np.cumsum(steps)])
    else:
        terms = gammainc(s[-1], y) + np.concatenate([np.cumsum(steps[::-1])[::-1], [0.0]])
    value, total = float(weights @ terms), float(weights.sum())
    low = value / (total + tail) * (1.0 - MARGIN)
    return low, min(1.0, (value + tail) / total * (1.0 + MARGIN))


def _ratios(ratios, anchor: int):
    """Positive numbers `v` with `v[i + 1] = v[i] * ratios[i]` and `v[anchor] = 1`, one more than `ratios`."""
    import numpy as np

    below = np.cumprod(1.0 / ratios[:anchor][::-1])[::-1]
    return np.concatenate([below, [1.0], np.cumprod(ratios[anchor:])])


def _gamma_term(s: float, y: float) -> float:
    """`y^s e^(-y) / Gamma(s + 1)` to about 1e-12, through Stirling's series for large `s`."""
    if s < 100.0:
        return math.exp(s * math.log(y) - y - math.lgamma(s + 1.0))
    excess = (y - s) / s
    series = 1.0 / (12.0 * s) - 1.0 / (360.0 * s**3) + 1.0 / (1260.0 * s**5)
    return math.exp(-s * (excess - math.log1p(excess)) - series) / math.sqrt(2.0 * math.pi * s)


class Normal:
    """One standard normal variable, held as `+-(k + U)`: integer, lazy uniform and sign. Comparisons only.

    Karney 2016, Algorithm N: `k` with probability proportional to `e^(-k/2)`, kept with probability `e^(-k(k-1)/2)`;
    `U` uniform, kept with probability `e^(-U(2k+U)/2)`. The product is `e^(-(k+U)^2/2)`.

    Guarantees:
    * normal law is exact: every decision is a comparison of lazy uniforms that is refined until it is certain.
    """

    __slots__ = ("_fraction", "_negative", "_spent", "_whole")

    def __init__(self, bits, width: int = WORD):
        self._spent = False
        while True:
            k = 0
            while _accept_half(bits, width):
                k += 1
            if not all(_accept_half(bits, width) for _ in range(k * (k - 1))):
                continue
            u = LazyUniform(bits, width)
            if all(_accept_step(u, k, bits, width) for _ in range(k + 1)):
                self._whole, self._fraction, self._negative = k, u, bits.bits(1)
                return

    def interval(self) -> tuple[int, int, int, int]:
        """`(p, q, P, Q)`, positive denominators, with `p/q <= Z <= P/Q`."""
        u = self._fraction
        one = 1 << u.k
        low = self._whole * one + u.n
        return (-low - 1, one, -low, one) if self._negative else (low, one, low + 1, one)

    def refine(self) -> None:
        self._fraction.refine()


def _accept_half(bits, width: int) -> bool:
    """True with probability `e^(-1/2)`: the run `1/2 > U_1 > U_2 > ...` has even length with that probability."""
    first = LazyUniform(bits, width)
    if first.n >> (first.k - 1):
        return True
    accept, last = False, first
    while less(following := LazyUniform(bits, width), last):
        accept, last = not accept, following
    return accept


def _accept_step(u: LazyUniform, k: int, bits, width: int) -> bool:
    """True with probability `exp(-t)`, `t = u (2k + u) / (2k + 2)` in [0, 1].

    Forsythe / von Neumann: continue for the `n`-th time with probability `t / n`; the number of continuations is even
    with probability `1 - t + t^2/2 - ... = e^(-t)`.
    """
    n = 1
    while _below(LazyUniform(bits, width), u, k, n):
        n += 1
    return n % 2 == 1


def _below(v: LazyUniform, u: LazyUniform, k: int, n: int) -> bool:
    """Decide `n v (2k + 2) < u (2k + u)`, refining both while it is open."""
    while True:
        left, right = n * (2 * k + 2), u.n * ((2 * k << u.k) + u.n)
        right_high = (u.n + 1) * ((2 * k << u.k) + u.n + 1)
        # v = v.n / 2^v.k, u (2k + u) = right / 2^(2 u.k)
        if (left * (v.n + 1)) << (2 * u.k) <= right << v.k:
            return True
        if (left * v.n) << (2 * u.k) >= right_high << v.k:
            return False
        u.refine()
        v.refine()

