"""Loss distributions that dominate the worst-case privacy profiles of smooth mechanisms, and their composition.

The profile of a mechanism is `delta(epsilon) = sup over neighbours, both directions, of E_(e^epsilon)(P, Q)`. A
smooth mechanism has no single worst pair; what may be composed is any pair of measures whose curve lies above the
profile for every epsilon. Domination of a curve survives (adaptive) composition, also when the dominating measures
have total mass above 1, because the curve of a product is an integral of the curves of a factor. `LossDistribution`
is such a pair: mass of P on multiples of a step of loss, plus a mass of infinite loss. Its curve is `inf + sum_l p_l
(1 - e^(epsilon - l))^+`.

`worst_case` gives one for every noise family; the curves and their proofs are in `profile_curves`. Several admissible
pairs (beta chosen on the data): the maximum of their curves.

From a curve to a distribution: the profile is convex in `e^epsilon` and below the curve at the grid points, hence below
their lower convex hull, which chords connect ("connect the dots"). Afterwards the curve of the result is evaluated at
all grid points in positive arithmetic, and what is missing by rounding is added to the infinite mass: domination is
checked, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from certify.errors import PrivacyError
from privacy.composition import Cost, up
from privacy.noise import NoiseFamily, admissible_pairs, make_family
from privacy.noise.base import AdmissiblePair, beta_with_slack
from privacy.profile_curves import (
    Curve,
    cauchy_curve,
    concentrated_curve,
    dilation_curve,
    laplace_curve,
    normal_curve,
    power_curve,
    student_curve,
)

_LONGEST = 200_000
_TAIL = 1e-16
_TINY = 1e-30  # products of such entries would be denormal numbers, which are slow


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """A dominating pair: `mass[i]` of P at loss `(lowest + i) * step`, `infinite` at infinite loss. Public.

    One distribution serves both directions (the profile is a supremum over both).

    Guarantees:
    * composition dominates: sums are of positive terms and rounded up; what is cut off moves to a higher loss.
    """

    step: float
    lowest: int
    mass: np.ndarray
    infinite: float
    adjacency: str = "replace-one"
    source: object = field(default=None, repr=False)

    def delta(self, epsilon) -> np.ndarray:
        """The curve at `epsilon` (any shape), rounded up."""
        epsilon = np.atleast_1d(np.asarray(epsilon, np.float64))
        loss = (self.lowest + np.arange(len(self.mass))) * self.step
        found = np.empty(epsilon.shape)
        for i, e in np.ndenumerate(epsilon):
            above = loss > e
            found[i] = self.mass[above] @ -np.expm1(e - loss[above])
        return np.minimum(1.0, (found + self.infinite) * (1.0 + len(self.mass) * 2.0**-52 + 1e-14))

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon >= 0 with `delta(epsilon) <= delta`, rounded up; PrivacyError below the infinite mass."""
        if self.delta(0.0)[0] <= delta:
            return 0.0
        low, high = 0.0, max((self.lowest + len(self.mass)) * self.step, self.step)
        if not self.delta(high)[0] <= delta:
            raise PrivacyError(f"delta: {delta!r} is below the mass of infinite loss {self.infinite:.3g}; raise it")
        for _ in range(60):
            middle = (low + high) / 2.0
            low, high = (low, middle) if self.delta(middle)[0] <= delta else (middle, high)
        return high

    def then(self, other: LossDistribution) -> LossDistribution:
        """The composition of two distributions with equal steps."""
        if other.step != self.step:
            raise PrivacyError(f"step: {self.step!r} and {other.step!r} differ; build both with the same step")
        if other.adjacency != self.adjacency:
            raise PrivacyError(f"adjacency: {self.adjacency!r} and {other.adjacency!r} cannot be composed; use one")
        grow = 1.0 + (min(len(self.mass), len(other.mass)) + 4.0) * 2.0**-52
        mass = _convolve(self.mass, other.mass) * grow
        ours, theirs = self.mass.sum() * grow, other.mass.sum() * grow
        infinite = (self.infinite * (theirs + other.infinite) + ours * other.infinite) * (1.0 + 2.0**-48)
        return _trimmed(self.step, self.lowest + other.lowest, mass, infinite, self.adjacency)

    def repeated(self, count: int) -> LossDistribution:
        """`count`-fold composition with itself, by squaring."""
        if count < 1:
            raise PrivacyError(f"count: {count!r}; give a whole number of at least 1")
        result, power = None, self
        while True:
            if count & 1:
                result = power if result is None else result.then(power)
            count >>= 1
            if not count:
                return result
            power = power.then(power)


def compose_distributions(distributions: Iterable[LossDistribution]) -> LossDistribution:
    """The composition of all; equal ones (the same object, or built from equal costs) are composed by squaring."""
    groups: dict = {}
    for d in distributions:
        groups.setdefault(id(d) if d.source is None else (d.source, d.step), [d, 0])[1] += 1
    if not groups:
        raise PrivacyError("distributions: the list is empty; give at least one")
    parts = sorted((d.repeated(count) for d, count in groups.values()), key=lambda d: len(d.mass))
    result = parts[0]
    for part in parts[1:]:
        result = result.then(part)
    return result


def worst_case(
    family: str | NoiseFamily,
    epsilon: float,
    delta: float = 0.0,
    dim: int = 1,
    betas: Iterable[float] | None = None,
    *,
    step: float,
    adjacency: str = "replace-one",
) -> LossDistribution:
    """A pair that dominates one release of `dim` numbers with `family` noise at (epsilon, delta); grid of `step`.

    `family`, `epsilon`, `delta`, `dim`, `betas`: as for `noise.admissible_pairs`, with the values the release is made
    with. One dimension: the curve of the region. More: Laplace and Gaussian by the product of one shifted coordinate
    and a dilation of the others; concentrated families by what their rho says; pure families by randomised response,
    which dominates everything that is (epsilon, 0)-DP.

    Guarantees:
    * worst case dominates every neighbour pair: its curve is above the hockey stick over the regions of all pairs,
      both directions.

    Errors: PrivacyError for a budget that does not fit the family, and for a step that is too fine.
    """
    pairs = admissible_pairs(family, epsilon, delta, dim, betas)
    family = make_family(family, epsilon, delta, dim) if isinstance(family, str) else family
    if family.privacy == "concentrated":
        rho = max(family.rho(pair.a, pair.beta, dim) for pair in pairs)
        return loss_distribution(concentrated_curve(rho), step, adjacency)
    if family.name == "laplace":
        return _with_dilation(laplace_curve, pairs, dim - 1.0, 1.0, step, adjacency)
    if family.name == "gaussian":
        return _with_dilation(normal_curve, pairs, (dim - 1.0) / 2.0, 2.0, step, adjacency)
    if dim == 1 and family.name in _PURE_CURVES:
        return loss_distribution(_PURE_CURVES[family.name](family, epsilon, pairs), step, adjacency)
    return from_cost(Cost(epsilon, 0.0, adjacency), step)


_PURE_CURVES = {
    "cauchy": lambda family, epsilon, pairs: cauchy_curve(epsilon),
    "l1-power": lambda family, epsilon, pairs: power_curve(pairs, family.exponent(1)),
    "box-power": lambda family, epsilon, pairs: power_curve(pairs, family.exponent(1)),
    "student": lambda family, epsilon, pairs: student_curve(pairs, family.degrees),
}


def _with_dilation(scalar, pairs, shape: float, factor: float, step: float, adjacency: str) -> LossDistribution:
    """`scalar` curve of one coordinate, times the dilation of the others (Gamma(`shape`), `factor * beta`)."""
    if shape == 0.0:
        return loss_distribution(scalar(pairs), step, adjacency)

    def joint(pair: AdmissiblePair) -> LossDistribution:
        others = dilation_curve(shape, factor * beta_with_slack(pair.beta))
        return loss_distribution(scalar(pair), step, adjacency).then(loss_distribution(others, step, adjacency))

    each = [joint(pair) for pair in pairs]
    if len(each) == 1:
        return each[0]
    tail = max(_TAIL, 2.0 * max(d.infinite for d in each))
    return loss_distribution(lambda x: np.maximum.reduce([d.delta(x) for d in each]), step, adjacency, tail)


def from_cost(cost: Cost, step: float) -> LossDistribution:
    """Randomised response with epsilon rounded up to the grid, and delta: dominates every (epsilon, delta)-DP
    mechanism."""
    points = math.ceil(Fraction(cost.epsilon) / Fraction(step))
    delta = up(cost.delta)
    if points > _LONGEST:
        raise PrivacyError(f"step: {step!r} is too fine for epsilon = {float(cost.epsilon)!r}; choose a coarser one")
    if points == 0:
        return LossDistribution(step, 0, np.array([1.0]), delta, cost.adjacency, cost)
    likely = 1.0 / (1.0 + math.exp(-points * step))
    mass = np.zeros(2 * points + 1)
    # 1 - delta times the two probabilities, rounded up; exp(-x) of the smaller one keeps it accurate.
    mass[-1] = (1.0 - delta) * likely * (1.0 + 2.0**-48)
    mass[0] = (1.0 - delta) * likely * math.exp(-points * step) * (1.0 + 2.0**-48)
    return LossDistribution(step, -points, mass, delta, cost.adjacency, cost)


def loss_distribution(
    curve: Curve,
    step: float,
    adjacency: str = "replace-one",
    tail: float = _TAIL,
) -> LossDistribution:
    """A distribution on the grid of `step` that dominates every profile below `curve`.

    `curve`: an upper bound of a profile, vectorised, needed for epsilon >= 0 only: with both directions in the supremum
    `delta(-x) = 1 - e^-x (1 - delta(x))`. The grid ends where the curve is at most `tail` (that becomes infinite loss).

    Guarantees:
    * distribution dominates the profile: it lies above the lower convex hull of the curve's values, checked at every
      grid point; where the curve is convex it lies above the curve itself.

    Errors: PrivacyError when the grid would be too long.
    """
    sizes = 2 ** np.arange(1, int(math.log2(_LONGEST)) + 1)
    enough = np.flatnonzero(curve(sizes * step) <= tail)
    if not len(enough):
        raise PrivacyError(f"step: {step!r} is too fine for this profile; choose a coarser one")
    above = np.arange(sizes[enough[0]] + 1) * step
    upper = np.maximum.accumulate(np.asarray(curve(above), np.float64)[::-1])[::-1]
    high = max(1, int(np.flatnonzero(upper <= tail)[0]))
    above, upper = above[: high + 1], upper[: high + 1]
    below = -np.expm1(-above[1:]) + np.exp(-above[1:]) * upper[1:] * (1.0 + 2.0**-50)
    delta = np.concatenate([below[::-1], upper])
    epsilon = np.concatenate([-above[:0:-1], above])
    nodes, t = _hull(np.exp(epsilon), delta), np.exp(epsilon)
    t0, d0 = t[nodes], delta[nodes]
    needed = np.interp(t, np.append(0.0, t0), np.append(1.0, d0)) * (1.0 + 2.0**-50)
    slopes = np.concatenate([[(1.0 - d0[0]) / t0[0]], -np.diff(d0) / np.diff(t0), [0.0]])
    mass = np.zeros(len(epsilon))
    mass[nodes] = np.maximum(slopes[:-1] - slopes[1:], 0.0) * t0
    found = LossDistribution(step, -high, mass, float(delta[-1]), adjacency)
    # Certificate: the curve of the result, in positive arithmetic and rounded DOWN, against the hull.
    lower = _curve_at_nodes(epsilon, mass) * (1.0 - len(mass) * 2.0**-51)
    missing = max(float(np.max(needed - lower - found.infinite)), 0.0)
    short = max(0.0, 1.0 - float(mass.sum()) * (1.0 - len(mass) * 2.0**-52) - found.infinite - missing)
    return _trimmed(step, -high, mass, (found.infinite + missing + short) * (1.0 + 2.0**-50), adjacency)


def _curve_at_nodes(epsilon: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """`sum_(l > i) mass_l (1 - e^(epsilon_i - epsilon_l))` for all nodes, by a recursion with positive terms:
    `D_i = sum_(j >= i) (e^(e_i) (e^(h) - 1)) sum_(l > j) mass_l e^(-e_l)`."""
    shares = mass * np.exp(-epsilon)
    behind = np.concatenate([np.cumsum(shares[::-1])[::-1][1:], [0.0]])
    t = np.exp(epsilon)
    steps = np.concatenate([t[:-1] * np.expm1(np.diff(epsilon)) * behind[:-1], [0.0]])
    return np.cumsum(steps[::-1])[::-1]


def _hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the lower convex hull of the points, starting from the fixed point (0, 1), ending at the last one."""
    kept: list[int] = []

    def turn(i: int, j: int, k: int) -> bool:
        xi, yi = (x[i], y[i]) if i >= 0 else (0.0, 1.0)
        return (y[j] - yi) * (x[k] - x[j]) >= (y[k] - y[j]) * (x[j] - xi)

    for k in range(len(x)):
        while kept and turn(kept[-2] if len(kept) > 1 else -1, kept[-1], k):
            kept.pop()
        kept.append(k)
    return np.array(kept)


def _convolve(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Full convolution by sums of positive terms (no Fourier transform); shifts when one side has few entries."""
    one, two = sorted((one, two), key=np.count_nonzero)
    places = np.flatnonzero(one)
    if len(places) > 64:
        return np.convolve(one, two)
    result = np.zeros(len(one) + len(two) - 1)
    for i in places:
        result[i : i + len(two)] += one[i] * two
    return result


def _trimmed(step: float, lowest: int, mass: np.ndarray, infinite: float, adjacency: str) -> LossDistribution:
    """Move negligible mass upward: the top to infinity, the bottom to the lowest loss kept, tiny entries to
    infinity."""
    tiny = mass < _TINY
    infinite += float(mass[tiny].sum()) * (1.0 + 2.0**-40)
    mass = np.where(tiny, 0.0, mass)
    top = np.cumsum(mass[::-1])[::-1]
    last = int(np.searchsorted(-top, -1e-18))  # first index whose upper tail is at most 1e-18
    if last < len(mass):
        infinite += float(top[last]) * (1.0 + 2.0**-40)
        mass = mass[: max(last, 1)]
    bottom = np.cumsum(mass)
    first = int(np.searchsorted(bottom, 1e-18))
    if 0 < first < len(mass):
        kept = mass[first:].copy()
        kept[0] += bottom[first - 1] * (1.0 + 2.0**-40)
        mass, lowest = kept, lowest + first
    if len(mass) > _LONGEST:
        raise PrivacyError(f"step: {step!r} is too fine for this composition; choose a coarser one")
    return LossDistribution(step, lowest, mass, infinite, adjacency)
