"""Independent Laplace coordinates on an l1 smooth bound: (epsilon, delta), exact in one dimension.

One dimension. Narrow against wide: the worst log ratio is `lam + a e^-lam`, convex in `lam`, so `a <= epsilon` and
`beta + a e^-beta <= epsilon` make this direction pure. Wide against narrow, with `a <= epsilon + lam`, the ratio
exceeds `e^epsilon` on two tails only, on which the narrow law has mass `e^(-epsilon-lam)` times that of the wide
one, and `delta = (1 - e^-lam)/2 * [exp(-(epsilon+lam-a)/(e^lam-1)) + exp(-(epsilon+lam+a)/(e^lam-1))]`. Each factor
increases in `lam` (`(c+lam)/(e^lam-1)` decreases for `c >= 0`) and the sum increases in `a`: the corner decides.

`p` coordinates. The log ratio of two concentric laws depends on `rho = ||z||_1 / scale ~ Gamma(p)` alone, and one is
likelier than the other outside (inside) a ball.

* Wide against narrow: first the dilation at the same centre, `(w, delta)`, then the shift of the narrow law, pure:
  `P[M in E] <= e^w R[E] + delta <= e^(w + a) Q[E] + delta`. The delta step comes first, so no factor `e^a` meets it.
  The dilation is `(w, delta)` iff `P[rho > u] - e^w P[rho > u e^lam] <= delta`, `u = (w + p lam) / (e^lam - 1)`; the
  left side is the supremum over balls of a difference that grows with `lam`, so `lam = beta` decides. (Leaving out
  the second term gives the sufficient `w = (e^beta - 1) q_hi - p beta`, `q_hi` the upper delta quantile.)
* Narrow against wide, in the same way: `P[rho < u] - e^n P[rho < u e^-lam] <= delta`, `u = (p lam - n) / (1 - e^-lam)`,
  again decided by `lam = beta`; the shift of the wide law costs `a e^-lam`, here counted as `a`. Or all pure: `p lam +
  a e^-lam <= epsilon`, convex in `lam`: `a <= epsilon` and `p beta + a e^-beta <= epsilon`.

So `a <= epsilon - w(beta)` and `a <= max(epsilon - n(beta), e^beta (epsilon - p beta))` suffice. The published tail
`beta <= epsilon / (2 q_hi)` leaves out the centring `- p beta` and is 1.5 to 6 times smaller. Tails are sums of
positive terms with a margin for rounding; what is returned was checked with the upper bound of the hockey stick.

Sources: Nissim, Raskhodnikova, Smith 2007; THEORY section 4 (centred form), both directions worked out here.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from privacy import sampling
from privacy.noise.base import Independent, NoiseFamily, beta_with_slack, round_down, spare_budget

_FACTORS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
_JOINT_FRACTIONS = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.65, 0.8, 0.9)
_MARGIN = 2.0**-42
_DOWN, _UP = 1.0 - 2.0**-48, 1.0 + 2.0**-48


@dataclass(frozen=True)
class LaplaceNoise(NoiseFamily):
    """Independent standard Laplace coordinates for an l1 smooth bound; (epsilon, delta), any dimension. Public.

    Guarantees:
    * laplace pairs are exactly epsilon delta dp in one dimension: the hockey stick over the region is at most delta,
      both directions, and reaches it where the pure caps do not bind;
    * laplace pairs are epsilon delta dp in p dimensions: both directions, the whole region;
    * beta zero is the plain mechanism: scale `S / epsilon` for a global bound `S`;
    * laplace law is exact (`sampling.Laplace`).
    """

    name: ClassVar[str] = "laplace"
    norm: ClassVar[str] = "l1"
    privacy: ClassVar[str] = "approximate"

    def largest_a(self, epsilon: float, delta: float, beta: float, dim: int) -> float:
        beta = beta_with_slack(beta)
        return _scalar_a(epsilon, delta, beta) if dim == 1 else _joint_a(epsilon, delta, beta, dim)

    def default_betas(self, epsilon: float, delta: float, dim: int) -> tuple[float, ...]:
        """0 (global sensitivity), then shares of the textbook beta and of epsilon (one dimension), or shares of the
        beta whose dilation alone would spend epsilon."""
        if dim == 1:
            unit = epsilon / (2.0 * math.log(2.0 / delta))
            return tuple(sorted({c * unit for c in _FACTORS} | {c * epsilon for c in (0.25, 0.5, 0.7)}))
        low, high = 0.0, epsilon
        for _ in range(60):
            middle = (low + high) / 2.0
            low, high = (middle, high) if _plain_cost(delta, middle, dim) < epsilon else (low, middle)
        return tuple(c * low for c in _JOINT_FRACTIONS)

    def draw(self, dim: int, bits) -> Independent:
        return Independent(sampling.Laplace, dim, bits)

    def typical(self, dim: int) -> float:
        return 1.0

    def tail(self, dim: int, level: float = 0.95) -> float:
        return -math.log1p(-level)


def _scalar_a(epsilon: float, delta: float, beta: float) -> float:
    if beta >= epsilon:
        return 0.0
    k = math.expm1(beta)
    dilation = -math.expm1(-beta)
    # cosh(a / k) <= e^x, with x lowered by more than its rounding error.
    terms = math.log(delta), (epsilon + beta) / k, -math.log(dilation)
    x = sum(terms) - 2.0**-46 * (1.0 + sum(map(abs, terms)))
    if x <= 0.0:
        return 0.0
    corner = k * (x + math.log1p(math.sqrt(-math.expm1(-2.0 * x))))
    return round_down(min(corner, epsilon, (epsilon - beta) * math.exp(beta)))


def _joint_a(epsilon: float, delta: float, beta: float, dim: int) -> float:
    wide, narrow = dilation_costs(delta, beta, dim)
    pure = math.exp(beta) * spare_budget(epsilon, dim, beta)
    return max(0.0, round_down(min(epsilon - wide, max(epsilon - narrow, pure))) - 2.0**-48 * epsilon)


def dilation_costs(delta: float, beta: float, dim: int) -> tuple[float, float]:
    """`(w, n)`, not negative and close to the smallest: the dilation by `e^beta` is `(w, delta)` for the wide law
    against the narrow one and `(n, delta)` for the narrow one against the wide one."""

    def wide(w: float) -> bool:
        u = (w + dim * beta) / math.expm1(beta)
        # Moving u by more than its rounding, one way for each tail, raises the first and lowers the second.
        first = log_upper_tail(u * _DOWN, dim)[1]
        return _stick(first, w + log_upper_tail(u * math.exp(beta) * _UP, dim)[0]) <= delta

    def narrow(n: float) -> bool:
        left = dim * beta - n
        # A difference: its rounding error is that of its terms.
        u = (left + 2.0**-51 * dim * beta) / -math.expm1(-beta) * _UP
        below = (left - 2.0**-51 * dim * beta) / math.expm1(beta) * _DOWN
        first = log_lower_tail(u, dim)[1]
        return _stick(first, n + log_lower_tail(below, dim)[0]) <= delta

    return _bisect(wide, _plain_cost(delta, beta, dim), 0.0), _bisect(narrow, dim * beta * _UP, 0.0)


def _stick(log_first: float, log_second: float) -> float:
    """`e^first - e^second`, rounded up."""
    first = math.exp(min(log_first, 0.0))
    return (first - math.exp(min(log_second, log_first)) * _DOWN) * _UP + 2.0**-50 * first


def _plain_cost(delta: float, beta: float, dim: int) -> float:
    """`(e^beta - 1) q_hi - p beta`, raised by more than its rounding."""
    growth = math.expm1(beta) * upper_quantile(delta, dim)
    return max(0.0, growth - dim * beta) + 2.0**-44 * (growth + dim * beta)


def upper_quantile(delta: float, dim: int) -> float:
    """A `q_hi >= dim` with `P[Gamma(dim) > q_hi] <= delta`."""
    high = dim + 2.0
    while log_upper_tail(high, dim)[1] > math.log(delta):
        high *= 2.0
    return _bisect(lambda x: log_upper_tail(x, dim)[1] <= math.log(delta), good=high, bad=float(dim))


def _bisect(holds, good: float, bad: float) -> float:
    """A point where `holds` (as it does at `good`), close to the border with `bad`; `bad` itself, if it holds there."""
    if holds(bad):
        return bad
    for _ in range(50):
        middle = (good + bad) / 2.0
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def log_upper_tail(x: float, dim: int) -> tuple[float, float]:
    """(lower, upper) bound of `ln P[Gamma(p) > x]`: `e^-x x^(p-1)/(p-1)! (1 + (p-1)/x + (p-1)(p-2)/x^2 + ...)`."""
    total = term = 1.0
    rest = 0.0
    for j in range(1, dim):
        term *= (dim - j) / x
        total += term
        if term * dim < 2.0**-60 * total:  # past their peak the terms fall: those left out are at most `term` each
            rest = term * dim
            break
    low, margin = _log_product(x, dim - 1, dim, total)
    return low - margin, low + margin + rest / total


def log_lower_tail(x: float, dim: int) -> tuple[float, float]:
    """(lower, upper) bound of `ln P[Gamma(p) < x]`: `e^-x x^p/p! (1 + x/(p+1) + x^2/((p+1)(p+2)) + ...)`."""
    if x <= 0.0:
        return -math.inf, -math.inf
    total, term, j = 1.0, 1.0, 0
    while term > 2.0**-60 * total or 2.0 * x > dim + j:
        j += 1
        term *= x / (dim + j)
        total += term
    # From here on the ratio of successive terms is at most 1/2: the rest is at most `term`.
    low, margin = _log_product(x, dim, dim + 1, total)
    return low - margin, low + margin + term / total


def _log_product(x: float, power: int, factorial: int, total: float) -> tuple[float, float]:
    """`ln(e^-x x^power / Gamma(factorial) * total)` and a bound of its rounding error."""
    parts = -x, power * math.log(x), -math.lgamma(factorial), math.log(total)
    return math.fsum(parts), _MARGIN * (1.0 + sum(map(abs, parts)))
