"""Confidence bounds that hold for finitely many samples: means of bounded variables, counts, whole curves.

Betting (Waudby-Smith & Ramdas 2024, "Estimating means of bounded random variables by betting", section 4, here with a
fixed number of samples and constant bets). For independent `W_i` in `[0, B]` whose means average to at least `m`, and
`f` in `[0, 1]`,

    e_f(m) = prod_i (1 + f (m - W_i) / (B - m))

is non-negative and has expectation at most 1 (each factor has mean `1 + f (m - E W_i) / (B - m)`; the product is
largest for equal means). So has the average `e` over a fixed list of `f`, and by Markov `P(e(m) >= 1/gamma) <= gamma`
where `m` is the true mean. Every factor grows with `m`; hence all `m` beyond the smallest one with `e(m) >= 1/gamma`
are rejected, and that one is an upper confidence bound. The lower bound is the mirror image, with factors
`1 + f (W_i - m) / m`.

The list of `f` depends on the number of samples alone. `ln e_f` is concave in every `W_i`; so values may be spread to
the nodes around them, means kept: that lowers `e`, hence is safe, and makes the cost independent of N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from certify.errors import PrivacyError

_SLACK = 1e-6  # in ln(1/gamma): above the rounding of the sums for up to 10^9 samples
_NODES = 2.0 ** (-np.arange(1280, -1, -1) / 32.0)  # relative to the bound


def interval(values: np.ndarray, bound: float, failure_probability: float) -> tuple[float, float]:
    """Bounds of the mean of independent variables in `[0, bound]`, from one value of each.

    `values`: float64 `(N,)`, fixed number; they need not have the same law. Half of the failure probability goes to
    each side. PrivacyError for values outside `[0, bound]`.

    Guarantees:
    * interval covers the mean except with the failure probability: for every N and every law on [0, bound].
    """
    half = failure_probability / 2.0
    return lower_bound(values, bound, half), upper_bound(values, bound, half)


def upper_bound(values: np.ndarray, bound: float, failure_probability: float) -> float:
    """`U` with `P(mean > U) <= failure_probability`; see `interval`."""
    sample = _Sample.of(values, bound)
    target = _target(failure_probability)
    found = _edge(sample.mean, bound, lambda m: sample.log_wealth_above(m) >= target)
    return min(bound, found * (1.0 + 2.0**-50))


def lower_bound(values: np.ndarray, bound: float, failure_probability: float) -> float:
    """`L` with `P(mean < L) <= failure_probability`; see `interval`."""
    sample = _Sample.of(values, bound)
    target = _target(failure_probability)
    if sample.mean < 1e-30 * bound:
        return 0.0
    return _edge(sample.mean, 0.0, lambda m: sample.log_wealth_below(m) >= target) * (1.0 - 2.0**-50)


def empirical_bernstein(values: np.ndarray, bound: float, failure_probability: float) -> tuple[float, float]:
    """Interval of Maurer & Pontil 2009, theorem 4 (both sides); for identically distributed values in `[0, bound]`."""
    _Sample.of(values, bound)
    count = len(values)
    if count < 2:
        return 0.0, bound
    log = math.log(4.0 / _probability(failure_probability))
    width = math.sqrt(2.0 * float(np.var(values, ddof=1)) * log / count) + 7.0 * bound * log / (3.0 * (count - 1))
    mean = float(np.mean(values))
    return max(0.0, mean - width), min(bound, mean + width)


def clopper_pearson(hits: int, count: int, failure_probability: float) -> tuple[float, float]:
    """Exact interval of a probability from `hits` in `count` independent trials (Clopper & Pearson 1934)."""
    from scipy.special import betainccinv, betaincinv

    if not 0 <= hits <= count or count < 1:
        raise PrivacyError(f"hits: found {hits!r} in {count!r} trials; give 0 <= hits <= count and at least one trial")
    half = _probability(failure_probability) / 2.0
    lower = float(betaincinv(hits, count - hits + 1, half)) if hits else 0.0
    upper = float(betainccinv(hits + 1, count - hits, half)) if hits < count else 1.0
    return lower * (1.0 - 1e-9), min(1.0, upper * (1.0 + 1e-9))


def _probability(failure_probability: float) -> float:
    if not 0.0 < failure_probability < 1.0:
        raise PrivacyError(f"failure_probability: found {failure_probability!r}; it lies between 0 and 1")
    return failure_probability


def _target(failure_probability: float) -> float:
    return -math.log(_probability(failure_probability)) + _SLACK


@dataclass(frozen=True, eq=False)
class _Sample:
    """Values spread to nodes: `weights` add up to their number."""

    nodes: np.ndarray
    weights: np.ndarray
    bound: float
    mean: float

    @classmethod
    def of(cls, values: np.ndarray, bound: float) -> _Sample:
        values = np.asarray(values, np.float64)
        if values.ndim != 1 or not len(values) or not 0.0 < bound < math.inf:
            raise PrivacyError(f"values: found shape {values.shape}, bound {bound!r}; give samples and a finite bound")
        if not (values.min() >= 0.0 and values.max() <= bound):
            raise PrivacyError(f"values: found some outside [0, {bound:.6g}], where no bound of their mean would hold")
        nodes = np.append(0.0, bound * _NODES)
        before = np.minimum(np.searchsorted(nodes, values, side="right") - 1, len(nodes) - 2)
        share = (values - nodes[before]) / (nodes[before + 1] - nodes[before])
        weights = np.bincount(before, 1.0 - share, len(nodes)) + np.bincount(before + 1, share, len(nodes))
        kept = weights > 0.0
        return cls(nodes[kept], weights[kept], bound, float(values.mean()))

    @property
    def count(self) -> float:
        return float(self.weights.sum())

    def log_wealth_above(self, m: float) -> float:
        """Against a mean of at least `m`."""
        return self._log_wealth((m - self.nodes) / (self.bound - m), 2.0 / math.sqrt(self.count))

    def log_wealth_below(self, m: float) -> float:
        """Against a mean of at most `m`."""
        return self._log_wealth((self.nodes - m) / m, 1.0 / self.count)

    def _log_wealth(self, gains: np.ndarray, smallest_bet: float) -> float:
        """`ln` of the average over bets from `smallest_bet` (the largest spread asks for it) up to everything."""
        low = min(0.5, smallest_bet)
        bets = np.append(np.geomspace(low, 0.99, math.ceil(4.0 * math.log(1.0 / low))), 1.0)
        with np.errstate(divide="ignore"):
            # a gain is at least -1 but for rounding
            logs = np.log1p(np.maximum(bets[:, None] * gains, -1.0)) @ self.weights
        top = float(logs.max())
        return top + math.log(float(np.exp(logs - top).mean())) if top > -math.inf else top


def _edge(accepted: float, end: float, rejects) -> float:
    """The border between `accepted` and `end` of a monotone test, on the rejecting side; `end` if nothing is."""
    rejected = end
    for _ in range(100):
        middle = 0.5 * (accepted + rejected)
        if accepted > 0.0 and rejected > 0.0 and max(accepted, rejected) > 4.0 * min(accepted, rejected):
            middle = math.sqrt(accepted * rejected)
        if not min(accepted, rejected) < middle < max(accepted, rejected):
            break
        accepted, rejected = (accepted, middle) if rejects(middle) else (middle, rejected)
        if abs(rejected - accepted) <= 1e-6 * rejected:
            break
    return rejected
