"""Laws of the sampling schemes against enumeration of all participation patterns, reference values, and refusals."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from certify.errors import PrivacyError
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Poisson, rounds

GOLDEN = json.loads((Path(__file__).parent / "data" / "bandmf_samplers.json").read_text())


def with_probability(steps, separation, p, **more) -> BMinSep:
    """One million examples, the batch size chosen for this probability."""
    return BMinSep(steps, 10**6, 10**6 * p / (1 + (separation - 1) * p), separation, **more)


def patterns(steps, separation, p, first):
    """Yield (uses, probability) of all runs of one example that is free from step `first` on; by the definition."""
    for uses in itertools.product((0, 1), repeat=steps):
        weight = 1
        for i, used in enumerate(uses):
            free = i >= first and not any(uses[max(0, i - separation + 1) : i])
            weight *= (p if used else 1 - p) if free else (0 if used else 1)
        yield uses, weight


def inclusion_by_enumeration(steps, separation, p, warm):
    """Exact probability of use in every step."""
    total = 1 + (separation - 1) * p
    starts = {0: Fraction(1)} if not warm else {0: 1 / total} | {s: p / total for s in range(1, separation)}
    found = [Fraction(0)] * steps
    for first, mass in starts.items():
        for uses, weight in patterns(steps, separation, p, first):
            found = [f + mass * weight * used for f, used in zip(found, uses, strict=True)]
    return found


@pytest.mark.parametrize("case", GOLDEN["p_p0"], ids=str)
def test_probability_follows_from_the_expected_batch(case):
    scheme = BMinSep(10, 10**6, 10**6 * case["p0"], case["b"])
    assert scheme.probability == pytest.approx(case["p"], rel=1e-12)
    assert scheme.probability <= 1.0
    if case["b"] > 1:  # batch / examples is another number as soon as there is a separation
        assert scheme.probability > 1.03 * scheme.rate


@pytest.mark.parametrize("case", GOLDEN["marginals"], ids=lambda c: f"b{c['b']}p{c['p']}")
def test_inclusion_agrees_with_the_reference(case):
    for warm in (False, True):
        scheme = with_probability(case["n"], case["b"], case["p"], warm=warm)
        expected = case["warm_inclusion_prob" if warm else "cold_inclusion_prob"]
        np.testing.assert_allclose(scheme.inclusion, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("separation", [1, 2, 3, 9])
def test_inclusion_agrees_with_enumeration(separation, warm):
    p = Fraction(1, 4)
    exact = inclusion_by_enumeration(7, separation, p, warm)
    scheme = with_probability(7, separation, 0.25, warm=warm)
    np.testing.assert_allclose(scheme.inclusion, [float(x) for x in exact], rtol=1e-12)
    if warm:
        assert set(exact) == {p / (1 + (separation - 1) * p)}  # exactly the same in every step
    elif separation > 1:
        assert exact[0] > 1.1 * exact[1]


@pytest.mark.parametrize("separation, p", [(1, 0.3), (2, 0.5), (5, 0.1), (8, 1.0)])
def test_stationary_law_is_invariant(separation, p):
    scheme = with_probability(10, separation, p)
    step = np.zeros((separation, separation))
    step[0, 0] = 1 - p
    step[0, separation - 1] += p
    for waiting in range(1, separation):
        step[waiting, waiting - 1] = 1.0
    law = scheme.stationary
    np.testing.assert_allclose(law @ step, law, atol=1e-14)
    assert law.sum() == pytest.approx(1.0, abs=1e-14) and (law >= 0).all()
    if p < 1.0 and separation > 1:  # the uniform law is not
        assert abs((np.full(separation, 1 / separation) @ step)[0] - 1 / separation) > 1e-3


@given(st.integers(1, 60), st.integers(1, 10**9), st.floats(1e-9, 1.0))
def test_stationary_rate_is_the_rate(separation, examples, share):
    scheme = BMinSep(5, examples, share * examples / separation, separation)
    assert 0.0 < scheme.probability <= 1.0
    assert scheme.stationary[0] * scheme.probability == pytest.approx(scheme.rate, rel=1e-12)
    assert scheme.inclusion[0] * examples == pytest.approx(scheme.batch, rel=1e-12)


@pytest.mark.parametrize("separation", [3, 7, 49, 10**6 - 1])
def test_batch_of_one_part_in_separation_is_feasible(separation):
    assert BMinSep(9, 10**6, 10**6 / separation, separation).probability == pytest.approx(1.0, abs=1e-9)
    assert CyclicPoisson(9, 10**6, 10**6 / separation, separation).probability == pytest.approx(1.0, abs=1e-12)


def test_limits_agree():
    poisson = Poisson(9, 1000, 37.5)
    assert BMinSep(9, 1000, 37.5, 1).probability == poisson.probability == poisson.rate == 0.0375
    assert CyclicPoisson(9, 1000, 37.5, 1).probability == 0.0375
    assert CyclicPoisson(9, 1000, 37.5, 4).probability == 4 * 0.0375
    full, bins = BMinSep(9, 1000, 125.0, 8), BallsInBins(9, 1000, 8)
    assert full.probability == 1.0 and full.rate == bins.rate and full.batch == bins.batch
    np.testing.assert_allclose(full.stationary, 1 / 8)


@pytest.mark.parametrize("steps, separation, most", [(7200, 256, 29), (12, 3, 4), (2, 5, 1), (7, 1, 7), (13, 3, 5)])
def test_rounds_are_rounded_up(steps, separation, most):
    scheme = BallsInBins(steps, 10, separation)
    assert rounds(scheme) == most == len(range(0, steps, separation))
    if steps <= 13:
        assert most == max(sum(u) for u, w in patterns(steps, separation, Fraction(1, 2), 0) if w)


@pytest.mark.parametrize(
    "build, word",
    [
        (lambda: Poisson(0, 10, 1.0), "steps"),
        (lambda: Poisson(3.5, 10, 1.0), "steps"),
        (lambda: Poisson(True, 10, 1.0), "steps"),
        (lambda: Poisson(3, 0, 1.0), "examples"),
        (lambda: Poisson(3, 10, 0.0), "batch"),
        (lambda: Poisson(3, 10, math.nan), "batch"),
        (lambda: Poisson(3, 10, "4"), "batch"),
        (lambda: Poisson(3, 10, 10.1), "batch"),
        (lambda: Poisson(3, 10, 1.0, truncate=0), "truncate"),
        (lambda: CyclicPoisson(3, 10, 2.6, 4), "batch"),
        (lambda: CyclicPoisson(3, 10, 1.0, 0), "separation"),
        (lambda: BMinSep(3, 10, 2.6, 4), "batch"),
        (lambda: BMinSep(3, 10, 2.5 * (1 + 1e-9), 4), "batch"),
        (lambda: BMinSep(3, 10, math.inf, 4), "batch"),
        (lambda: BallsInBins(3, 10, -1), "separation"),
        (lambda: MultiAttribution(3, 0.0, 2, 1), "probability"),
        (lambda: MultiAttribution(3, 1.1, 2, 1), "probability"),
        (lambda: MultiAttribution(3, math.nan, 2, 1), "probability"),
        (lambda: MultiAttribution(3, 0.5, 2, 0), "per_user"),
    ],
)
def test_what_is_infeasible_is_refused(build, word):
    with pytest.raises(PrivacyError, match=f"^{word}: found "):
        build()
