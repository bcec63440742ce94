"""Exact one-dimensional calibration of Cauchy and Laplace noise to a smooth bound (docs/privacy.md).

Release: `M(D) = f(D) + s(D) Z`. A pair `(a, beta)` is admissible for (epsilon, delta) when the privacy loss
stays within it over the whole region `|f - f'| <= a * s_small`, `s_large <= e^beta * s_small`. Everything
here is PUBLIC, except the argument and result of `noise_scale`: it depends on the family, the budget and the
list of betas, never on data.

Cauchy, pure: the laws are points of the hyperbolic half plane, the worst log ratio is `arcosh(1 + (Delta^2 +
(s - s')^2) / (2 s s'))`. With `s' = e^lam s`, `Delta = a s` this is at most epsilon iff `cosh lam + a^2
e^{-lam} / 2 <= cosh epsilon`; the left side is convex in `lam`, so `lam = 0` and `lam = beta` decide:
`a^2 <= 4 sinh^2(epsilon/2)` and `a^2 <= 2 e^beta (cosh epsilon - cosh beta)`.

Laplace, approximate. Narrow against wide: the worst log ratio is `lam + Delta e^{-lam} / s`, convex in `lam`,
so `a <= epsilon` and `beta + a e^{-beta} <= epsilon` make this direction pure. Wide against narrow, with
`Delta = a s` and `a <= epsilon + lam`, the ratio exceeds `e^epsilon` on two tails only, on which Q has mass
`e^{-epsilon-lam}` times that of P, and `delta = (1 - e^{-lam})/2 * [exp(-(epsilon+lam-a)/(e^lam-1)) +
exp(-(epsilon+lam+a)/(e^lam-1))]`. Each factor increases in `lam` (`(c+lam)/(e^lam-1)` decreases for `c >= 0`)
and the sum increases in `a`: the corner decides. The factor `1 - e^{-beta}` makes this tighter than
the sufficient condition without it.

Rounding: `beta` stands for `beta + 2 log1p(TAU)` (see `smooth`), `a` is rounded down.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from certify.errors import PrivacyError
from privacy.smooth import SMALLEST_BETA, TAU, check_beta

FAMILIES = ("cauchy", "laplace")
LARGEST_EPSILON = 100.0

_CAUCHY_FRACTIONS = (0.25, 0.5, 0.7, 0.85, 0.95)
_LAPLACE_FACTORS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)


@dataclass(frozen=True, slots=True)
class AdmissiblePair:
    """`Z * S_beta / a` is enough noise for the smooth bound `S_beta`. Public."""

    a: float
    beta: float


def admissible_pairs(
    family: str, epsilon: float, delta: float = 0.0, betas: Iterable[float] | None = None
) -> tuple[AdmissiblePair, ...]:
    """Admissible pairs of `family` ("cauchy", "laplace") for one scalar release at (epsilon, delta).

    `epsilon`: in (0, 100]. `delta`: exactly 0 for Cauchy, in (0, 1) for Laplace. `betas`: a public finite
    list fixed in advance; by default a list that depends on (epsilon, delta) alone. Returns one pair per
    beta, in the order of `betas`.

    Guarantees:
    * cauchy pairs are exactly epsilon dp: the worst log ratio over the pair's region is at most epsilon;
    * laplace pairs are exactly epsilon delta dp: the hockey stick over the region is at most delta, both
      directions;
    * pairs are tight: a 1.5 times smaller noise scale violates the claim.

    Errors: PrivacyError for a budget or a beta that is not admissible.
    """
    epsilon, delta = check_budget(family, epsilon, delta)
    largest_a = _cauchy_a if family == "cauchy" else _laplace_a
    if betas is None:
        grid = _cauchy_betas(epsilon) if family == "cauchy" else _laplace_betas(epsilon, delta)
        pairs = tuple(
            AdmissiblePair(a, beta) for beta in grid if (a := largest_a(epsilon, delta, beta)) > 0.0
        )
        if not pairs:
            raise PrivacyError(
                f"epsilon: {epsilon!r} with delta {delta!r} is too small for any beta; raise the budget"
            )
        return pairs
    betas = [check_beta(beta) for beta in betas]
    if not betas:
        raise PrivacyError("betas: the list is empty; give at least one beta or None for the default list")
    pairs = tuple(AdmissiblePair(largest_a(epsilon, delta, beta), beta) for beta in betas)
    for pair in pairs:
        if not pair.a > 0.0:
            raise PrivacyError(
                f"beta: {pair.beta!r} is too large for {family} noise at epsilon = {epsilon!r}, "
                f"delta = {delta!r}; choose a smaller beta"
            )
    return pairs


def check_budget(family: str, epsilon: float, delta: float) -> tuple[float, float]:
    """The budget of one scalar release as floats, or a PrivacyError."""
    if family not in FAMILIES:
        raise PrivacyError(f"family: {family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    epsilon, delta = float(epsilon), float(delta)
    if not 0.0 < epsilon <= LARGEST_EPSILON:
        raise PrivacyError(
            f"epsilon: {epsilon!r} per release is not in (0, {LARGEST_EPSILON:g}]; choose it in that range"
        )
    if family == "cauchy" and delta != 0.0:
        raise PrivacyError(
            f"delta: Cauchy noise is pure and takes delta = 0, not {delta!r}; set 0 or use laplace"
        )
    if family == "laplace" and not 0.0 < delta < 1.0:
        raise PrivacyError(
            f"delta: Laplace noise on a smooth bound needs 0 < delta < 1, not {delta!r}; "
            "set delta or use cauchy"
        )
    return epsilon, delta


def noise_scale(smooth_by_beta: Mapping[float, np.ndarray], pairs: Iterable[AdmissiblePair]) -> np.ndarray:
    """`min_j S_{beta_j} / a_j`, each quotient rounded up; PRIVATE. `smooth_by_beta`: `{beta: S_beta (*Q,)}`.

    Guarantees:
    * free choice of beta is private: at the dataset with the smaller scale take its minimiser `j`; then `|f -
      f'| <= S_j <= a_j s_small` and `s_large <= S'_j/a_j (1 + 2^-52) <= e^{beta_j} (1 + TAU)^2 s_small`.

    Errors: PrivacyError when a pair has no smooth bound.
    """
    pairs = tuple(pairs)
    missing = [pair.beta for pair in pairs if pair.beta not in smooth_by_beta]
    if missing or not pairs:
        raise PrivacyError(
            f"pairs: no smooth bound for beta {missing}; compute one for every beta of the public list"
        )
    scales = [
        np.nextafter(np.asarray(smooth_by_beta[pair.beta], np.float64) / pair.a, np.inf) for pair in pairs
    ]
    return np.minimum.reduce(scales)


def split_budget(total: float, parts: int) -> float:
    """Largest float64 `x` with `parts * x <= total` in exact arithmetic: composition never overspends."""
    share = float(total) / int(parts)
    while Fraction(share) * int(parts) > Fraction(float(total)):
        share = math.nextafter(share, 0.0)
    return share


def _beta_with_slack(beta: float) -> float:
    return math.nextafter(beta + 2.0 * math.log1p(TAU) * (1.0 + 2.0**-40), math.inf)


def _round_down(a: float) -> float:
    return a * (1.0 - 2.0**-46)


def _cauchy_a(epsilon: float, delta: float, beta: float) -> float:
    beta = _beta_with_slack(beta)
    if beta >= epsilon:
        return 0.0
    slide = 2.0 * math.sinh(epsilon / 2.0)
    # cosh e - cosh b = 2 sinh((e+b)/2) sinh((e-b)/2): no cancellation.
    corner = 2.0 * math.sqrt(
        math.exp(beta) * math.sinh((epsilon + beta) / 2.0) * math.sinh((epsilon - beta) / 2.0)
    )
    return _round_down(min(slide, corner))


def _laplace_a(epsilon: float, delta: float, beta: float) -> float:
    beta = _beta_with_slack(beta)
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
    return _round_down(min(corner, epsilon, (epsilon - beta) * math.exp(beta)))


def _cauchy_betas(epsilon: float) -> tuple[float, ...]:
    """`beta* = ln(2 cosh epsilon - 1)`, the largest that costs no noise, and larger ones that do."""
    # beta* < epsilon by about e^{-epsilon}; for large epsilon keep a distance that float64 can see.
    free = min(math.log1p(4.0 * math.sinh(epsilon / 2.0) ** 2), epsilon * (1.0 - 2.0**-20))
    larger = [c * epsilon for c in _CAUCHY_FRACTIONS if c * epsilon > free]
    return tuple(beta for beta in (free, *larger) if beta >= SMALLEST_BETA)


def _laplace_betas(epsilon: float, delta: float) -> tuple[float, ...]:
    """0 (global sensitivity), multiples of the textbook `epsilon / (2 ln(2/delta))`, shares of epsilon."""
    unit = epsilon / (2.0 * math.log(2.0 / delta))
    grid = {c * unit for c in _LAPLACE_FACTORS} | {c * epsilon for c in (0.25, 0.5, 0.7)}
    return tuple(beta for beta in sorted(grid) if beta == 0.0 or beta >= SMALLEST_BETA)
