"""Worst-case privacy profiles of smooth mechanisms, and the loss distributions that dominate them.

The profile of a mechanism is `delta(epsilon) = sup over neighbours, both directions, of E_(e^epsilon)(P, Q)`. A
smooth mechanism has no single worst pair; what may be composed is any pair of measures whose curve lies above the
profile for every epsilon. Domination of a curve survives (adaptive) composition, also when the dominating measures
have total mass above 1, because the curve of a product is an integral of the curves of a factor. `LossDistribution`
is such a pair: mass of P on multiples of a step of loss, plus a mass of infinite loss. Its curve is `inf + sum_l p_l
(1 - e^(epsilon - l))^+`.

Profiles (one dimension, over the region of the admissible pairs; public):

* Cauchy, exact. The Cauchy laws are the points of the hyperbolic half plane and Moebius maps carry pairs to pairs, so
  the curve depends on the hyperbolic distance `d` alone, and `d <= epsilon_0` is what admissible pairs ensure. It
  grows with `d`: on the circle the pair is the uniform law against a Poisson kernel `K_r`, `r = tanh(d/2)`, and
  smaller `r` is the convolution with another kernel (data processing). In closed form `delta = 2/pi (atan c -
  e^epsilon atan(e^-d c))`, `c^2 = (e^d - e^epsilon)/(e^epsilon - e^-d)`. (Weaker and simpler: epsilon_0-DP alone
  gives randomised response, `from_cost`.)
* Laplace, an upper envelope. The curve grows with the shift (level sets are intervals around the centres), so the
  shift is `a`. For the dilation `lam` in a cell `[l, u]`, `h = u - l`, pointwise `p_lam <= e^h p_u` (wide law first)
  and `q_lam >= e^-h q_l` (narrow law first), so `H_epsilon <= e^h H_(epsilon - h)(u)` and `H_epsilon <= H_(epsilon -
  h)(l)`. The maximum over the cells that cover `[0, beta]` is a proven bound without any monotonicity in `lam`; with
  256 cells it is within 1 % of the corner.

Several admissible pairs (beta chosen on the data): the maximum of their curves.

From a curve to a distribution: the curve is convex in `e^epsilon`, so chords between grid points lie above it
("connect the dots"). Afterwards the curve of the result is evaluated at all grid points in positive arithmetic, and
what is missing by rounding is added to the infinite mass: domination is checked, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from certify.errors import PrivacyError
from privacy.composition import Cost, up
from privacy.noise.base import AdmissiblePair, beta_with_slack

_CELLS = 256
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


def cauchy_curve(epsilon: float) -> Callable[[np.ndarray], np.ndarray]:
    """Worst-case profile of one-dimensional Cauchy noise with pairs admissible for `epsilon`: exact, rounded up.

    Guarantees:
    * cauchy profile is the worst case over the region, and is attained.
    """
    d = float(epsilon)

    def curve(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        inside = np.abs(x) < d
        y = np.where(inside, x, 0.0)
        c = np.sqrt(-np.expm1(y - d) / -np.expm1(-d - y)) * np.exp((d - y) / 2.0)
        angle = np.arctan(c)
        value = 2.0 / np.pi * (angle - np.exp(y) * np.arctan(np.exp(-d) * c))
        value = np.maximum(value, 0.0) * (1.0 + 1e-12) + 1e-15 * angle
        return np.where(inside, value, np.maximum(0.0, -np.expm1(x)))

    return curve


def laplace_curve(pairs: AdmissiblePair | Sequence[AdmissiblePair]) -> Callable[[np.ndarray], np.ndarray]:
    """Worst-case profile of one-dimensional Laplace noise over the regions of `pairs`: a proven upper bound.

    Guarantees:
    * laplace profile dominates the region: every shift, every dilation, both directions.
    """
    pairs = [pairs] if isinstance(pairs, AdmissiblePair) else list(pairs)
    if not pairs:
        raise PrivacyError("pairs: the list is empty; give the admissible pairs of the release")

    def curve(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        best = np.maximum(0.0, -np.expm1(x))
        for pair in pairs:
            beta = beta_with_slack(pair.beta)
            edges = np.linspace(0.0, beta, _CELLS + 1 if pair.beta > 0.0 else 2)
            edges[-1] = beta
            h = float(np.diff(edges).max()) * (1.0 + 2.0**-40)
            for low, high in zip(edges, edges[1:], strict=False):
                wide = math.exp(h) * laplace_hockey_stick(x - h, pair.a, float(high), True)
                best = np.maximum(best, wide)
                best = np.maximum(best, laplace_hockey_stick(x - h, pair.a, float(low), False))
            # Differences of numbers near 1 occur only up to here; beyond, the formula is one product.
            best = best + 2e-15 * (x - h < pair.a + beta)
        return np.minimum(1.0, best * (1.0 + 1e-12))

    return curve


def laplace_hockey_stick(epsilon: np.ndarray, a: float, lam: float, wide_first: bool) -> np.ndarray:
    """Hockey stick of Laplace laws with centres `a` apart and scales 1 and `e^lam`, any real epsilon; closed form."""
    e = np.asarray(epsilon, np.float64)
    w, gap = math.exp(-lam), -math.expm1(-lam)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if wide_first:
            # The log ratio falls to its minimum at the narrow centre a, then rises: two tails (or everything).
            right = a + (e + lam + a * w) / gap if gap else np.full(e.shape, np.inf)
            outer = np.maximum(e - a + lam, 0.0) / gap if gap else np.where(e >= a, np.inf, 0.0)
            inner = np.maximum(a - lam - e, 0.0) / (1.0 + w)
            left = np.where(e < a - lam, 1.0 - 0.5 * np.exp(-inner * w) * (1.0 + w), 0.5 * np.exp(-outer * w) * gap)
            value = left + 0.5 * np.exp(-right * w) * gap
            return np.where(e <= -lam - a * w, -np.expm1(e), np.maximum(value, 0.0))
        # The log ratio has its peak at the narrow centre 0: one interval.
        room = np.maximum(lam + w * a - e, 0.0)
        left = np.exp(-room / gap) if gap else np.zeros(e.shape)
        near = 1.0 - 0.5 * np.exp(-room / (1.0 + w)) * (1.0 + 1.0 / w)
        beyond = np.exp(-a - np.maximum(lam - a - e, 0.0) / gap) if gap else np.zeros(e.shape)
        far = -np.expm1(e) + 0.5 * beyond * (1.0 / w - 1.0)
        value = 0.5 * left * (1.0 / w - 1.0) + np.where(e > lam - a, near, far)
        return np.where(e >= lam + w * a, 0.0, np.maximum(value, 0.0))


def loss_distribution(
    curve: Callable[[np.ndarray], np.ndarray],
    step: float,
    adjacency: str = "replace-one",
    tail: float = _TAIL,
) -> LossDistribution:
    """A distribution on the grid of `step` whose curve lies above `curve` everywhere.

    `curve`: an upper bound of a profile, vectorised, needed for epsilon >= 0 only: with both directions in the supremum
    `delta(-x) = 1 - e^-x (1 - delta(x))`. The grid ends where the curve is at most `tail` (that becomes infinite loss).

    Guarantees:
    * distribution dominates the curve: checked at every grid point, and chords do the rest.

    Errors: PrivacyError when the grid would be too long.
    """
    points = 1
    while float(curve(np.array([points * step]))[0]) > tail:
        points *= 2
        if points > _LONGEST:
            raise PrivacyError(f"step: {step!r} is too fine for this profile; choose a coarser one")
    low, high = points // 2, points
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if float(curve(np.array([middle * step]))[0]) > tail else (low, middle)
    above = np.arange(high + 1) * step
    upper = np.maximum.accumulate(np.asarray(curve(above), np.float64)[::-1])[::-1]
    below = -np.expm1(-above[1:]) + np.exp(-above[1:]) * upper[1:] * (1.0 + 2.0**-50)
    delta = np.concatenate([below[::-1], upper])
    epsilon = np.concatenate([-above[:0:-1], above])
    nodes, t = _hull(np.exp(epsilon), delta), np.exp(epsilon)
    t0, d0 = t[nodes], delta[nodes]
    slopes = np.concatenate([[(1.0 - d0[0]) / t0[0]], -np.diff(d0) / np.diff(t0), [0.0]])
    mass = np.zeros(len(epsilon))
    mass[nodes] = np.maximum(slopes[:-1] - slopes[1:], 0.0) * t0
    found = LossDistribution(step, -high, mass, float(delta[-1]), adjacency)
    # Certificate: the curve of the result, in positive arithmetic and rounded DOWN, against what it must cover.
    lower = _curve_at_nodes(epsilon, mass) * (1.0 - len(mass) * 2.0**-51)
    missing = max(float(np.max(delta - lower - found.infinite)), 0.0)
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
