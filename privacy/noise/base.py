"""What a noise family is, and the arithmetic all families share.

A release is `value + (S / a) Z`: `S` a beta-smooth bound of the sensitivity in the family's norm, `Z` a vector of a
law fixed in advance, `(a, beta)` an admissible pair. For neighbours let `s <= s'` be the two scales `S / a`. Then
`s' <= e^beta s` and the values differ by at most `a s` in the norm: the region over which a family bounds the loss.

Everything here is PUBLIC: no argument or result depends on data. Privacy is that of the adjacency for which `S` is
a smooth bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from certify.errors import PrivacyError
from privacy.smooth import TAU

LARGEST_EPSILON = 100.0


@dataclass(frozen=True, slots=True)
class AdmissiblePair:
    """`Z * S_beta / a` is enough noise for the smooth bound `S_beta`. Public."""

    a: float
    beta: float


class Noise:
    """One vector of a noise law, held as random bits that are drawn only when needed. Released once."""

    __slots__ = ("_spent", "dim")

    def __init__(self, dim: int):
        self.dim, self._spent = dim, False

    def interval(self, i: int = 0) -> tuple[int, int, int, int]:
        """`(p, q, P, Q)`, positive denominators, with `p/q <= Z_i <= P/Q`."""
        raise NotImplementedError

    def refine(self, i: int = 0) -> None:
        """Draw more bits; repeated calls shrink the interval of `Z_i` to a point with probability 1."""
        raise NotImplementedError


class Independent(Noise):
    """A vector of independent copies of a one-dimensional lazy variable (`interval()`, `refine()`)."""

    __slots__ = ("_parts",)

    def __init__(self, draw: Callable, dim: int, bits):
        super().__init__(dim)
        self._parts = [draw(bits) for _ in range(dim)]

    def interval(self, i: int = 0) -> tuple[int, int, int, int]:
        return self._parts[i].interval()

    def refine(self, i: int = 0) -> None:
        self._parts[i].refine()


@dataclass(frozen=True)
class NoiseFamily:
    """A noise law with its calibration. Fields are shape parameters, fixed in advance from public facts.

    Class attributes: `name`; `norm` ("l1", "l2", "linf": of the sensitivity that `S` bounds, all the same in one
    dimension; "coordinates": a smooth bound `S_j` of its own for each coordinate); `privacy` ("pure", "approximate",
    "concentrated"); `largest_dim` (None: any); `free_beta`: beta may be chosen on the data from a public list.
    """

    name: ClassVar[str]
    norm: ClassVar[str]
    privacy: ClassVar[str]
    largest_dim: ClassVar[int | None] = None
    free_beta: ClassVar[bool] = True

    @classmethod
    def choose(cls, epsilon: float, delta: float, dim: int) -> "NoiseFamily":
        """The member of the family for this budget and dimension, by a public rule."""
        return cls()

    def largest_a(self, epsilon: float, delta: float, beta: float, dim: int) -> float:
        """Largest admissible `a`, rounded down, for a bound that is `beta`-smooth up to TAU; 0.0 if there is none."""
        raise NotImplementedError

    def default_betas(self, epsilon: float, delta: float, dim: int) -> tuple[float, ...]:
        """The public list of betas used when none is given."""
        raise NotImplementedError

    def draw(self, dim: int, bits) -> Noise:
        """A fresh `Z` in `dim` dimensions from the source `bits` (privacy.sampling.SecureBits)."""
        raise NotImplementedError

    def typical(self, dim: int) -> float:
        """Mean of `|Z_i|`, or its median where the mean is infinite (see `mean_is_finite`). A report, not a bound."""
        raise NotImplementedError

    def mean_is_finite(self, dim: int) -> bool:
        """Whether `typical` is a mean."""
        return True

    def tail(self, dim: int, level: float = 0.95) -> float:
        """The `level` quantile of `|Z_i|`; NaN if not known. A report, not a bound."""
        return math.nan


def beta_with_slack(beta: float) -> float:
    """At least `beta + 2 log1p(TAU)`: what a computed smooth bound and the division by `a` need."""
    return math.nextafter(beta + 2.0 * math.log1p(TAU) * (1.0 + 2.0**-40), math.inf)


def spare_budget(epsilon: float, times: int, beta: float) -> float:
    """`epsilon - times * beta` rounded down, or 0.0: what a dilation paid `times` times leaves. Exact until rounded."""
    exact = Fraction(epsilon) - times * Fraction(beta)
    if exact <= 0:
        return 0.0
    spare = float(exact)
    return math.nextafter(spare, 0.0) if Fraction(spare) > exact else spare


def round_down(a: float) -> float:
    """`a` minus more than the rounding errors of a closed form (a few dozen operations)."""
    return a * (1.0 - 2.0**-46)


def check_budget(family: NoiseFamily, epsilon: float, delta: float, dim: int) -> tuple[float, float, int]:
    """The budget of one release of `dim` numbers as (float, float, int), or a PrivacyError."""
    epsilon, delta = float(epsilon), float(delta)
    if not 0.0 < epsilon <= LARGEST_EPSILON:
        raise PrivacyError(
            f"epsilon: {epsilon!r} per release is not in (0, {LARGEST_EPSILON:g}]; choose it in that range"
        )
    if family.privacy == "pure" and delta != 0.0:
        raise PrivacyError(
            f"delta: {family.name} noise is pure and takes delta = 0, not {delta!r}; set 0 or use laplace"
        )
    if family.privacy == "approximate" and not 0.0 < delta < 1.0:
        raise PrivacyError(
            f"delta: {family.name} noise on a smooth bound needs 0 < delta < 1, not {delta!r}; set delta or use cauchy"
        )
    if not 0.0 <= delta < 1.0:
        raise PrivacyError(f"delta: {delta!r} is not in [0, 1); choose it in that range")
    return epsilon, delta, check_dim(family, dim)


def check_dim(family: NoiseFamily, dim: int) -> int:
    """`dim` as an int of at least 1 that the family supports, or a PrivacyError."""
    if dim != int(dim) or dim < 1:
        raise PrivacyError(f"dim: {dim!r} is not a whole number of at least 1; give the number of released values")
    if family.largest_dim is not None and dim > family.largest_dim:
        raise PrivacyError(
            f"dim: {family.name} noise is for at most {family.largest_dim} value(s), not {dim}; use l1-power"
        )
    return int(dim)
