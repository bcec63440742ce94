"""Confidence bounds: exact miss probabilities by enumeration, coverage on adversarial laws, second implementations."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from certify.errors import PrivacyError
from privacy.bandmf.confidence import clopper_pearson, empirical_bernstein, interval, lower_bound, upper_bound

# Miss counts are tested against a binomial tail of this probability; planted mistakes miss far more often.
ERROR_RATE = 1e-7


def miss_probabilities(size: int, low: float, high: float, p: float, gamma: float) -> tuple[float, float]:
    """Exact P[mean > U] and P[mean < L] for values `high` (probability p) or `low` in [0, 1]."""
    mean = p * high + (1.0 - p) * low
    above = below = 0.0
    for hits in range(size + 1):
        values = np.array([high] * hits + [low] * (size - hits))
        weight = binom.pmf(hits, size, p)
        above += weight * (upper_bound(values, 1.0, gamma) < mean)
        below += weight * (lower_bound(values, 1.0, gamma) > mean)
    return above, below


@pytest.mark.parametrize("size", [1, 4, 15])
@pytest.mark.parametrize("low, high", [(0.0, 1.0), (0.0, 0.3), (0.2, 1.0), (0.0, 0.01)])
@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
def test_interval_covers_the_mean_except_with_the_failure_probability(size, low, high, p):
    """Exhaustive: two-point laws, all outcomes."""
    above, below = miss_probabilities(size, low, high, p, gamma=0.1)
    assert above <= 0.1 and below <= 0.1


def test_means_may_differ_between_the_variables():
    """Exhaustive over all outcomes of four unequal coins."""
    chances, gamma = np.array([0.05, 0.2, 0.5, 0.9]), 0.2
    mean, above, below = float(chances.mean()), 0.0, 0.0
    for outcome in product([0.0, 1.0], repeat=4):
        values = np.array(outcome)
        weight = float(np.prod(np.where(values > 0.0, chances, 1.0 - chances)))
        above += weight * (upper_bound(values, 1.0, gamma) < mean)
        below += weight * (lower_bound(values, 1.0, gamma) > mean)
    assert above <= gamma and below <= gamma


LAWS = {
    "rare large values": lambda rng, n: np.where(rng.random(n) < 2.0 / n, 1.0, 0.0),
    "almost never": lambda rng, n: np.where(rng.random(n) < 0.1 / n, 1.0, 0.0),
    "heavy tail": lambda rng, n: np.minimum(1.0, 1e-3 / rng.random(n) ** 0.9),
    "near the bound": lambda rng, n: 1.0 - rng.random(n) ** 4 * 0.01,
    "uniform": lambda rng, n: rng.random(n),
}
MEANS = {
    "rare large values": lambda n: 2.0 / n,
    "almost never": lambda n: 0.1 / n,
    "heavy tail": lambda n: 1e-3 ** (1 / 0.9) + 1e-3 * (1.0 - 1e-3 ** (0.1 / 0.9)) / 0.1,
    "near the bound": lambda n: 1.0 - 0.01 / 5.0,
    "uniform": lambda n: 0.5,
}


@pytest.mark.parametrize("law", LAWS)
def test_coverage_over_repeated_runs(law):
    rng, runs, size, gamma = np.random.default_rng(7), 400, 200, 0.1
    mean = MEANS[law](size)
    sides = [interval(LAWS[law](rng, size), 1.0, gamma) for _ in range(runs)]
    misses = sum(not low <= mean <= high for low, high in sides)
    assert misses <= binom.isf(ERROR_RATE, runs, gamma)


def test_a_bound_that_is_too_narrow_is_caught():
    """Negative control: normal intervals on rare values (miss rate 0.37), and a quarter of the width (0.46)."""
    rng, runs, size, gamma = np.random.default_rng(8), 400, 200, 0.1
    limit = binom.isf(ERROR_RATE, runs, gamma)
    wald = shrunk = 0
    for _ in range(runs):
        values = np.where(rng.random(size) < 1.0 / size, 1.0, 0.0)
        wald += values.mean() + 1.96 * values.std() / math.sqrt(size) < 1.0 / size
        spread = rng.random(size)
        low, high = interval(spread, 1.0, gamma)
        shrunk += abs(spread.mean() - 0.5) > 0.125 * (high - low)
    assert min(wald, shrunk) > limit


def plain_log_wealth(values, m, sign, bets) -> float:
    """Second implementation: a product over the values themselves, no nodes."""
    stake = 1.0 / (1.0 - m) if sign > 0 else -1.0 / m
    return math.log(np.mean([np.prod(1.0 + f * stake * (m - values)) for f in bets]))


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=30), st.floats(0.001, 0.4))
@settings(max_examples=60, deadline=None)
def test_nodes_only_widen_the_interval(values, gamma):
    """At the bounds returned, a direct product of all factors rejects too: spreading to nodes lost evidence only."""
    values = np.array(values)
    low, high = lower_bound(values, 1.0, gamma), upper_bound(values, 1.0, gamma)
    assert 0.0 <= low <= values.mean() + 1e-12 and values.mean() - 1e-12 <= high <= 1.0
    count = len(values)
    for sign, m, smallest in ((1, high, 2.0 / math.sqrt(count)), (-1, low, 1.0 / count)):
        if 1e-12 < m < 1.0 - 1e-9:
            start = min(0.5, smallest)
            bets = [*np.geomspace(start, 0.99, math.ceil(4.0 * math.log(1.0 / start))), 1.0]
            assert plain_log_wealth(values, m, sign, bets) >= math.log(1.0 / gamma) * (1.0 - 1e-9)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20), st.floats(1e-6, 1e6))
@settings(max_examples=40, deadline=None)
def test_bounds_scale_with_the_values(values, scale):
    values = np.array(values)
    one, other = interval(values, 1.0, 0.05), interval(np.minimum(values * scale, scale), scale, 0.05)
    assert np.allclose(np.array(other), np.array(one) * scale, rtol=1e-4, atol=1e-12 * scale)


def test_smaller_values_have_a_smaller_bound():
    rng = np.random.default_rng(3)
    for _ in range(50):
        values = rng.random(40) ** 3
        smaller = values * rng.random(40)
        assert upper_bound(smaller, 1.0, 0.01) <= upper_bound(values, 1.0, 0.01) * (1.0 + 1e-5)
        assert lower_bound(smaller, 1.0, 0.01) <= lower_bound(values, 1.0, 0.01) * (1.0 + 1e-5)


@pytest.mark.parametrize("hits, count", [(0, 500), (3, 500), (250, 500), (500, 500), (40, 10**6)])
def test_betting_on_counts_is_never_narrower_than_clopper_pearson(hits, count):
    """Clopper-Pearson is the narrowest central interval for counts; betting pays for all other laws."""
    values = np.zeros(count)
    values[:hits] = 1.0
    low, high = interval(values, 1.0, 1e-6)
    exact_low, exact_high = clopper_pearson(hits, count, 1e-6)
    assert low <= exact_low <= hits / count <= exact_high <= high
    assert high <= hits / count + 2.0 * (exact_high - hits / count)


@pytest.mark.parametrize("count", [1, 7, 30])
@pytest.mark.parametrize("gamma", [1e-6, 0.1])
def test_clopper_pearson_is_exact(count, gamma):
    """The bounds are where the binomial tails reach half the failure probability, but for a slack of 1e-9 in them."""
    for hits in range(count + 1):
        low, high = clopper_pearson(hits, count, gamma)
        if hits < count:
            assert 0.9 * gamma / 2.0 <= binom.cdf(hits, count, high) <= gamma / 2.0
        if hits:
            assert 0.9 * gamma / 2.0 <= binom.sf(hits - 1, count, low) <= gamma / 2.0


def test_betting_beats_empirical_bernstein():
    """An independent bound: wider, and overlapping."""
    rng = np.random.default_rng(5)
    for size in (100, 10_000):
        values = np.where(rng.random(size) < 0.05, rng.random(size), 0.0)
        low, high = interval(values, 1.0, 1e-9)
        wide_low, wide_high = empirical_bernstein(values, 1.0, 1e-9)
        assert wide_low <= low <= values.mean() <= high <= wide_high


def test_width_is_as_planned():
    """190,000 values with E W^2 / E[W]^2 = 20, the budget of facts about the tilt: within 8 % at 1e-9."""
    rng = np.random.default_rng(6)
    values = np.where(rng.random(190_000) < 0.05, 1.0, 0.0)
    assert upper_bound(values, 1.0, 1e-9) <= 1.08 * values.mean()


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: upper_bound(np.array([1.2]), 1.0, 0.1), "outside"),
        (lambda: upper_bound(np.array([-0.1]), 1.0, 0.1), "outside"),
        (lambda: upper_bound(np.array([np.nan]), 1.0, 0.1), "outside"),
        (lambda: upper_bound(np.array([]), 1.0, 0.1), "shape"),
        (lambda: upper_bound(np.array([0.5]), math.inf, 0.1), "bound"),
        (lambda: interval(np.array([0.5]), 1.0, 0.0), "failure_probability"),
        (lambda: clopper_pearson(3, 2, 0.1), "hits"),
    ],
)
def test_refusals(call, match):
    with pytest.raises(PrivacyError, match=match):
        call()
