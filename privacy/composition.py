"""What several releases cost together: basic, advanced, optimal, numerical; the smallest valid bound is taken.

A `Cost` is a public (epsilon, delta) with its adjacency. All bounds hold for mechanisms chosen adaptively, as long as
their budgets are fixed in advance; the adjacency is carried along and never mixed.

* basic: `(sum epsilon_i, sum delta_i)`, in exact rational arithmetic, rounded up once.
* advanced: the loss of a pure epsilon-DP mechanism is dominated by randomised response (loss `+-epsilon`, mean
  `epsilon tanh(epsilon/2)`), so Hoeffding gives `sum epsilon_i tanh(epsilon_i/2) + sqrt(2 ln(1/d) sum epsilon_i^2)`
  with failure `d`. (The textbook form has `epsilon (e^epsilon - 1)` for the mean.)
* optimal [KOV15]: the hockey stick of the composed randomised responses; in closed form for equal epsilon, otherwise
  by a loss distribution whose epsilons are rounded up to a grid (the exact heterogeneous value is #P-hard).
* with deltas: `1 - (1 - d) prod (1 - delta_i)`, `d` the failure of the pure parts.
* numerical: dp-accounting (optional extra), for costs and worst-case profiles. It is fed loss distributions, never
  its own events: `SelfComposedDpEvent(RandomizedResponseDpEvent)` ignores the count in version 0.6.0.

Nothing is exponentiated that could overflow. Sources: Dwork, Rothblum, Vadhan 2010; Kairouz, Oh, Viswanath 2015.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

from certify.errors import PrivacyError

_CLOSED_FORM_LIMIT = 1_000_000
_GRID_POINTS = 20_000


@dataclass(frozen=True)
class Cost:
    """(epsilon, delta) of one release. Public. Numbers are taken exactly: float, int, Fraction or Decimal.

    Errors: PrivacyError unless `0 <= epsilon < inf` and `0 <= delta < 1`.
    """

    epsilon: float | Fraction | Decimal
    delta: float | Fraction | Decimal = 0.0
    adjacency: str = "replace-one"

    def __post_init__(self):
        if not (self.epsilon >= 0 and math.isfinite(self.epsilon) and 0 <= self.delta < 1):
            raise PrivacyError(
                f"cost: epsilon = {self.epsilon!r}, delta = {self.delta!r}; "
                "give a finite epsilon >= 0 and 0 <= delta < 1"
            )


@dataclass(frozen=True)
class Composed(Cost):
    """The total of `parts` releases, floats rounded up; `bound` names the bound that was smallest. `samples`: the
    secret samples whose amplified costs it contains (privacy.amplification)."""

    parts: int = 1
    bound: str = "basic"
    samples: tuple = field(default=(), repr=False, compare=False)


def compose(costs: Iterable[Cost], delta=None) -> Composed:
    """The smallest valid total of `costs` at the total `delta` (None: the sum of their deltas; 0 keeps pure privacy
    pure).

    Guarantees:
    * total is a valid bound: every candidate is one, and the minimum is over epsilon at the same delta;
    * total is never above basic where basic applies (`delta` at least the sum);
    * one adjacency: costs for different adjacencies, and two amplified costs of one sample, are refused.

    Errors: PrivacyError; also when `delta` is below what the mechanisms' own deltas need.
    """
    costs = _checked(costs)
    target = sum((Fraction(c.delta) for c in costs), Fraction(0)) if delta is None else Fraction(delta)
    candidates = []
    if sum((Fraction(c.delta) for c in costs), Fraction(0)) <= target < 1:
        candidates.append(_composed(basic(costs).epsilon, target, costs, "basic"))
    if _slack(costs, target) > 0.0:
        candidates += [advanced(costs, target), optimal(costs, target)]
    if not candidates:
        raise PrivacyError(
            f"delta: the total {float(target)!r} is below the sum of the mechanisms' own deltas, or not below 1; "
            "choose it between"
        )
    return min(candidates, key=lambda c: c.epsilon)


def basic(costs: Iterable[Cost]) -> Composed:
    """`(sum epsilon_i, sum delta_i)`: exact sums, rounded up.

    Guarantees:
    * basic sums are exact: ten times `Decimal("0.1")` is 1.0, ten times the float 0.1 is the float above 1.
    """
    costs = _checked(costs)
    total = sum((Fraction(c.delta) for c in costs), Fraction(0))
    return _composed(up(sum(Fraction(c.epsilon) for c in costs)), total, costs, "basic")


def advanced(costs: Iterable[Cost], delta) -> Composed:
    """Advanced composition at the total `delta`, which must exceed `1 - prod (1 - delta_i)`.

    Guarantees:
    * advanced dominates the exact composition of randomised responses.
    """
    costs = _checked(costs)
    slack = _need_slack(costs, delta)
    epsilons = [up(Fraction(c.epsilon)) for c in costs]
    mean = math.fsum(e * math.tanh(e / 2.0) for e in epsilons)
    spread = math.sqrt(2.0 * -math.log(slack) * math.fsum(e * e for e in epsilons))
    return _composed((mean + spread) * (1.0 + 2.0**-46), delta, costs, "advanced")


def optimal(costs: Iterable[Cost], delta) -> Composed:
    """Smallest epsilon for randomised responses at the total `delta` > `1 - prod (1 - delta_i)` [KOV15].

    Guarantees:
    * optimal is exact for equal epsilon: the composed randomised responses attain it, up to rounding;
    * optimal is an upper bound otherwise: each epsilon is rounded up to a grid first.
    """
    costs = _checked(costs)
    slack = _need_slack(costs, delta)
    epsilons = [up(Fraction(c.epsilon)) for c in costs]
    total = up(sum(Fraction(c.epsilon) for c in costs))
    if total == 0.0:
        return _composed(0.0, delta, costs, "optimal")
    if len(set(epsilons)) == 1 and len(epsilons) <= _CLOSED_FORM_LIMIT:
        curve = _binomial_curve(epsilons[0], len(epsilons))
        low, high = 0.0, total
        if curve(0.0) <= slack:
            high = 0.0
        for _ in range(60):
            middle = (low + high) / 2.0
            low, high = (low, middle) if curve(middle) <= slack else (middle, high)
        return _composed(min(high, total), delta, costs, "optimal")
    from privacy.profiles import compose_distributions, from_cost

    step = max(total / _GRID_POINTS, 2.0**-1000)
    step = max(step, min(min(e for e in epsilons if e > 0.0) / 50.0, total / 2000.0))
    whole = compose_distributions([from_cost(Cost(e), step) for e in epsilons if e > 0.0])
    return _composed(min(total, whole.epsilon(slack)), delta, costs, "optimal")


def concentrated(rhos: Sequence[float], delta: float, adjacency: str = "replace-one") -> Composed:
    """zCDP releases: rhos add, then one conversion to (epsilon, delta) [Canonne, Kamath, Steinke 2020]."""
    from privacy.noise.bun_steinke import epsilon_of_rho

    rho = up(sum((Fraction(r) for r in rhos), Fraction(0)))
    return Composed(epsilon_of_rho(rho, float(delta)), float(delta), adjacency, len(rhos), "concentrated")


def numerical(parts: Iterable, delta: float, step: float = 1e-4) -> Composed:
    """Numerical composition through dp-accounting of `Cost`s and `profiles.LossDistribution`s at the total `delta`.

    `step`: discretisation of the costs; distributions must have been made with the same step. The Fourier transforms
    inside round: a margin of 1e-11 is taken from `delta`, and the result is never above the basic total.

    Guarantees:
    * repeated randomised response is not underestimated: every part is passed as a loss distribution of its own;
    * numerical agrees with the closed form for randomised response.

    Errors: PrivacyError when the extra is missing or `delta` is too small for this method.
    """
    from privacy.export import to_dp_accounting_pld
    from privacy.profiles import LossDistribution, from_cost

    parts = list(parts)
    if not parts:
        raise PrivacyError("parts: the list is empty; give at least one cost or loss distribution")
    distributions = [p if isinstance(p, LossDistribution) else from_cost(p, step) for p in parts]
    _one_adjacency([d.adjacency for d in distributions])
    if len({d.step for d in distributions}) != 1:
        raise PrivacyError(f"step: the loss distributions have different steps; build them all with step = {step!r}")
    margin = 1e-11
    if not delta > 2.0 * margin:
        raise PrivacyError(f"delta: {delta!r} is too small for Fourier transforms; use compose, or profiles")
    total, counts = None, {}
    for d in distributions:
        key = id(d) if d.source is None else d.source
        counts.setdefault(key, [d, 0])[1] += 1
    for d, count in counts.values():
        pld = to_dp_accounting_pld(d).self_compose(count)
        total = pld if total is None else total.compose(pld)
    epsilon = float(total.get_epsilon_for_delta(float(delta) - margin))
    if not math.isfinite(epsilon):
        raise PrivacyError(f"delta: {delta!r} is below the mass of infinite loss of these parts; raise it")
    epsilon = max(0.0, epsilon * (1.0 + 1e-12))
    costs = [p for p in parts if isinstance(p, Cost)]
    if len(costs) == len(parts) and sum(Fraction(c.delta) for c in costs) <= Fraction(delta):
        epsilon = min(epsilon, basic(costs).epsilon)
    return Composed(epsilon, float(delta), distributions[0].adjacency, len(parts), "numerical")


def up(x) -> float:
    """The smallest float64 not below the exact number `x`."""
    exact = Fraction(x)
    value = float(exact)
    return value if Fraction(value) >= exact else math.nextafter(value, math.inf)


def down(x) -> float:
    """The largest float64 not above the exact number `x`."""
    return -up(-Fraction(x))


def _binomial_curve(epsilon: float, count: int):
    """`delta(target)` of `count` randomised responses, rounded up: positive terms, in logarithms."""
    import numpy as np
    from scipy.special import gammaln

    lost = np.arange(count // 2 + 1)
    loss = (count - 2 * lost) * epsilon
    weight = gammaln(count + 1.0) - gammaln(lost + 1.0) - gammaln(count - lost + 1.0)
    # C(k, l) e^((k-l) eps) / (1 + e^eps)^k = C(k, l) e^(-l eps) / (1 + e^-eps)^k
    log_mass = weight - lost * epsilon - count * math.log1p(math.exp(-epsilon))
    margin = 1.0 + 2.0**-48 * (10.0 + count * math.log(count + 1.0) + count * min(epsilon, 745.0))

    def curve(target: float) -> float:
        excess = np.maximum(loss * (1.0 + 2.0**-51) - target, 0.0)
        return float(np.sum(np.exp(log_mass) * -np.expm1(-excess))) * margin

    return curve


def _slack(costs: Sequence[Cost], delta) -> float:
    """`d` with `1 - (1 - d) prod (1 - delta_i) <= delta`, rounded down; at most 0 when there is none."""
    kept = Fraction(1)
    for c in costs:
        kept *= 1 - Fraction(c.delta)
        if kept.denominator.bit_length() > 4000:  # keep exact arithmetic cheap: round the product down
            kept = Fraction(math.floor(kept * 2**2000), 2**2000)
    return down(1 - (1 - Fraction(delta)) / kept)


def _need_slack(costs: Sequence[Cost], delta) -> float:
    slack = _slack(costs, delta)
    if not 0.0 < slack < 1.0:
        raise PrivacyError(
            f"delta: the total {float(delta)!r} leaves nothing beyond the mechanisms' own deltas; raise it or use basic"
        )
    return slack


def _composed(epsilon: float, delta, costs: Sequence[Cost], bound: str) -> Composed:
    samples = tuple(sample for c in costs for sample in getattr(c, "samples", ()))
    return Composed(epsilon, up(delta), costs[0].adjacency, len(costs), bound, samples)


def _checked(costs: Iterable[Cost]) -> list[Cost]:
    costs = list(costs)
    if not costs:
        raise PrivacyError("costs: the list is empty; give at least one cost")
    if not all(isinstance(c, Cost) for c in costs):
        raise PrivacyError("costs: an entry is not a Cost; wrap it as Cost(epsilon, delta, adjacency)")
    _one_adjacency([c.adjacency for c in costs])
    samples = [sample for c in costs for sample in getattr(c, "samples", ())]
    if len(costs) > 1 and (None in samples or len({id(s) for s in samples}) != len(samples)):
        raise PrivacyError(
            "costs: amplified costs without a sample of their own cannot be composed; "
            "compose everything that used one sample first and amplify the total once"
        )
    return costs


def _one_adjacency(names: Sequence[str]) -> None:
    if len(set(names)) > 1:
        raise PrivacyError(f"adjacency: {sorted(set(names))} cannot be composed; use one adjacency for all releases")
