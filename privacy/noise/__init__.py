"""Noise for smooth bounds: one calibrator for all families (docs/noise.md).

`(epsilon, delta)`, family, dimension -> admissible `(a, beta)` pairs; then `value + (S / a) Z`. Everything is PUBLIC
except the argument and the result of `noise_scale`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module

import numpy as np

from certify.errors import PrivacyError
from privacy.noise.base import (
    LARGEST_EPSILON,
    AdmissiblePair,
    Noise,
    NoiseFamily,
    beta_with_slack,
    check_budget,
    check_dim,
    round_down,
)
from privacy.smooth import SMALLEST_BETA, check_beta

__all__ = [
    "FAMILIES",
    "LARGEST_EPSILON",
    "AdmissiblePair",
    "Noise",
    "NoiseFamily",
    "admissible_pairs",
    "beta_with_slack",
    "check_budget",
    "check_dim",
    "make_family",
    "noise_scale",
    "round_down",
    "split_budget",
]


@dataclass(frozen=True)
class _Lazy:
    """`factory(epsilon, delta, dim)` of a class that is imported when first used."""

    module: str
    cls: str

    def load(self) -> type[NoiseFamily]:
        return getattr(import_module(f"privacy.noise.{self.module}"), self.cls)

    def __call__(self, epsilon: float, delta: float, dim: int) -> NoiseFamily:
        return self.load().choose(epsilon, delta, dim)


FAMILIES: dict[str, Callable[[float, float, int], NoiseFamily]] = {
    "cauchy": _Lazy("cauchy", "CauchyNoise"),
    "l1-power": _Lazy("power", "L1Power"),
    "box-power": _Lazy("power", "BoxPower"),
    "student": _Lazy("student", "Student"),
    "laplace": _Lazy("laplace", "LaplaceNoise"),
    "gaussian": _Lazy("gaussian", "Gaussian"),
    "laplace-log-normal": _Lazy("bun_steinke", "LaplaceLogNormal"),
    "uniform-log-normal": _Lazy("bun_steinke", "UniformLogNormal"),
    "arsinh-normal": _Lazy("bun_steinke", "ArsinhNormal"),
}


def make_family(name: str, epsilon: float, delta: float = 0.0, dim: int = 1) -> NoiseFamily:
    """The family called `name`, its shape chosen from (epsilon, delta, dim) alone."""
    if name not in FAMILIES:
        raise PrivacyError(f"family: {name!r} is unknown; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name](epsilon, delta, dim)


def admissible_pairs(
    family: str | NoiseFamily,
    epsilon: float,
    delta: float = 0.0,
    dim: int = 1,
    betas: Iterable[float] | None = None,
) -> tuple[AdmissiblePair, ...]:
    """Admissible pairs of `family` for one release of `dim` numbers at (epsilon, delta).

    `family`: a name of FAMILIES or a NoiseFamily. `epsilon`: in (0, 100]. `delta`: exactly 0 for a pure family, in
    (0, 1) for an approximate one. `betas`: a public finite list fixed in advance; by default one that depends on
    (epsilon, delta, dim) alone. Returns one pair per beta, in the order of `betas`; all pairs are for the same law.

    Guarantees:
    * pairs are admissible: over the pair's region, both directions, the privacy loss is within (epsilon, delta);
    * one law serves all pairs, so that the free choice of beta (`noise_scale`) is private;
    * separate scales take one beta: a list of several is refused where the free choice is not covered.

    Errors: PrivacyError for an unknown family and for a budget, a dimension or a beta that is not admissible.
    """
    if isinstance(family, str):
        if family not in FAMILIES:
            raise PrivacyError(f"family: {family!r} is unknown; choose one of {', '.join(FAMILIES)}")
        epsilon, delta, dim = check_budget(FAMILIES[family].load(), epsilon, delta, dim)
        family = make_family(family, epsilon, delta, dim)
    else:
        epsilon, delta, dim = check_budget(family, epsilon, delta, dim)
    if betas is None:
        grid = (beta for beta in family.default_betas(epsilon, delta, dim) if beta == 0.0 or beta >= SMALLEST_BETA)
        pairs = tuple(
            AdmissiblePair(a, beta) for beta in grid if (a := family.largest_a(epsilon, delta, beta, dim)) > 0.0
        )
        if not pairs:
            raise PrivacyError(
                f"epsilon: {epsilon!r} with delta {delta!r} is too small for any beta in {dim} dimension(s); "
                "raise the budget"
            )
        return pairs
    betas = [check_beta(beta) for beta in betas]
    if not betas:
        raise PrivacyError("betas: the list is empty; give at least one beta or None for the default list")
    if len(betas) > 1 and not family.free_beta:
        raise PrivacyError(
            f"betas: {family.name} noise has a scale for each coordinate, so beta cannot be chosen on the data, "
            f"and {len(betas)} were given; give one"
        )
    pairs = tuple(AdmissiblePair(family.largest_a(epsilon, delta, beta, dim), beta) for beta in betas)
    for pair in pairs:
        if not pair.a > 0.0:
            raise PrivacyError(
                f"beta: {pair.beta!r} is too large for {family.name} noise at epsilon = {epsilon!r}, "
                f"delta = {delta!r}, dimension {dim}; choose a smaller beta"
            )
    return pairs


def noise_scale(smooth_by_beta: Mapping[float, np.ndarray], pairs: Iterable[AdmissiblePair]) -> np.ndarray:
    """`min_j S_{beta_j} / a_j`, each quotient rounded up; PRIVATE. `smooth_by_beta`: `{beta: S_beta (*Q,)}`.

    `pairs`: of ONE law (one call of `admissible_pairs`). In several dimensions an entry of `S_beta` is the bound in
    the family's norm of one whole vector, which gets one scale.

    Guarantees:
    * free choice of beta is private: at the dataset with the smaller scale take its minimiser `j`; then `|f -
      f'| <= S_j <= a_j s_small` and `s_large <= S'_j/a_j (1 + 2^-52) <= e^{beta_j} (1 + TAU)^2 s_small`.

    Errors: PrivacyError when a pair has no smooth bound.
    """
    pairs = tuple(pairs)
    missing = [pair.beta for pair in pairs if pair.beta not in smooth_by_beta]
    if missing or not pairs:
        raise PrivacyError(f"pairs: no smooth bound for beta {missing}; compute one for every beta of the public list")
    scales = [np.nextafter(np.asarray(smooth_by_beta[pair.beta], np.float64) / pair.a, np.inf) for pair in pairs]
    return np.minimum.reduce(scales)


def split_budget(total: float, parts: int) -> float:
    """Largest float64 `x` with `parts * x <= total` in exact arithmetic: composition never overspends."""
    share = float(total) / int(parts)
    while Fraction(share) * int(parts) > Fraction(float(total)):
        share = math.nextafter(share, 0.0)
    return share
