"""The integer Rényi tilt against enumeration of all participation patterns, quadrature and stored plain Monte Carlo.

Statistical tests: failure probability at most 1e-6 each; what they must tell apart lies at least 6 standard
deviations away (asserted in the tests).
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import logsumexp, ndtr
from scipy.stats import binom, chi2

from certify.errors import PrivacyError
from privacy.bandmf import tilt as module
from privacy.bandmf.confidence import interval, upper_bound
from privacy.bandmf.optimize import optimal_toeplitz
from privacy.bandmf.schemes import BallsInBins, BMinSep, MultiAttribution, Poisson
from privacy.bandmf.strategy import Strategy
from privacy.bandmf.tilt import (
    RemoveTilt,
    Sample,
    add_tilt,
    evaluate,
    evaluation_error,
    remove_tilt,
    renyi,
    renyi_delta,
    sample_outputs,
    tilted_terms,
)
from privacy.bandmf.tilt_chain import chain, log_absent, user_loads
from privacy.bandmf.tilt_replicas import Replicas, largest_term
from privacy.bandmf.tilt_truncation import binomial_tail, truncation_excess

REFERENCE = json.loads((Path(__file__).parent / "data" / "bandmf_tilt.json").read_text())


# --- second implementation: every participation pattern, written down ---


@cache
def patterns(scheme):
    """`(probabilities, x)` of all participation vectors of a scheme, from its definition."""
    p, b, n = scheme.probability, scheme.separation, scheme.steps
    owned = getattr(scheme, "per_user", 1)
    law = [math.comb(owned, m) * p**m * (1.0 - p) ** (owned - m) for m in range(owned + 1)]
    if getattr(scheme, "warm", False):
        waits = [(s, (1.0 if s == 0 else p) / (1.0 + (b - 1) * p)) for s in range(b)]
    else:
        waits = [(0, 1.0)]
    found: dict[tuple, float] = {}
    for x in itertools.product(range(owned + 1), repeat=n):
        for wait, weight in waits:
            for i in range(n):
                if wait > 0:
                    wait, factor = wait - 1, float(x[i] == 0)
                else:
                    wait, factor = (b - 1 if x[i] else 0), law[x[i]]
                weight *= factor
            if weight > 0.0:
                found[x] = found.get(x, 0.0) + weight
    return np.array(list(found.values())), np.array(list(found))


def dense(strategy):
    n, bands = strategy.columns.shape
    c = np.zeros((n + bands, n))
    for i in range(n):
        c[i : i + bands, i] = strategy.columns[i]
    return c[:n]


def log_ratio(scheme, strategy, sigma, y):
    """ln (P/Q) of outputs `(samples, steps)`."""
    weight, x = patterns(scheme)
    mean = x @ dense(strategy).T
    return logsumexp(y @ mean.T / sigma**2 - (mean**2).sum(axis=1) / (2 * sigma**2), b=weight, axis=1)


def moment(scheme, strategy, sigma, order):
    weight, x = patterns(scheme)
    mean = x @ dense(strategy).T / sigma
    gram = np.exp(mean @ mean.T)
    letters = "abcd"[:order]
    pairs = [p + q for p, q in itertools.combinations(letters, 2)]
    return np.einsum(",".join([*letters, *pairs]) + "->", *[weight] * order, *[gram] * len(pairs), optimize=True)


def some_strategy(steps, bands, seed=0):
    """Columns that differ from each other, so that no symmetry hides an error."""
    columns = np.random.default_rng(seed).uniform(0.1, 1.0, (steps, bands))
    i, d = np.ogrid[:steps, :bands]
    return Strategy(np.where(i + d < steps, columns, 0.0))


def normalised(coefficients, steps):
    columns = Strategy.toeplitz(coefficients, steps).columns
    return Strategy(columns / np.linalg.norm(columns, axis=1)[:, None])


def b_min_sep(steps, separation, p, warm, truncate=None):
    examples = 10**6
    return BMinSep(steps, examples, examples * p / (1.0 + (separation - 1) * p), separation, warm, truncate)


SMALL = [
    (b_min_sep(6, 3, 0.2, False), some_strategy(6, 3), 0.9),
    (b_min_sep(6, 3, 0.2, True), some_strategy(6, 3, 1), 0.9),
    (b_min_sep(8, 4, 0.15, False), Strategy.toeplitz([0.75, 0.46, 0.37, 0.3], 8), 0.5),
    (b_min_sep(7, 4, 0.3, True), some_strategy(7, 2, 2), 0.8),  # separation above the bands
    (b_min_sep(3, 5, 0.4, True), some_strategy(3, 3, 3), 0.7),  # fewer steps than the separation
    (b_min_sep(6, 3, 1.0, True), some_strategy(6, 3, 4), 0.8),  # balls in bins
    (b_min_sep(6, 3, 0.25, True), normalised([1.0, 0.6, 0.3], 6), 0.8),
    (Poisson(5, 10**6, 2e5), some_strategy(5, 1), 0.7),
    (MultiAttribution(5, 0.2, 2, 2), some_strategy(5, 2), 1.3),
    (MultiAttribution(4, 0.3, 3, 3), some_strategy(4, 3), 1.6),
]


# --- moments ---


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("case", range(len(SMALL)))
def test_moment_is_the_sum_over_all_replica_patterns(case, order):
    scheme, strategy, sigma = SMALL[case]
    exact = moment(scheme, strategy, sigma, order)
    replicas = Replicas(chain(scheme, strategy, sigma), order)
    assert math.exp(replicas.log_moment) == pytest.approx(exact, rel=1e-13)
    assert renyi(scheme, strategy, sigma, order) == pytest.approx(exact, rel=1e-11)
    assert renyi(scheme, strategy, sigma, order) >= exact * (1.0 - 1e-13)
    single = Replicas(chain(scheme, strategy, sigma), order, np.float32)
    assert abs(single.log_moment - math.log(exact)) <= single.slack


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.floats(0.01, 1.0), st.booleans(), st.floats(0.4, 3.0)
)
def test_moments_of_random_schemes(steps, separation, bands, p, warm, sigma):
    bands = min(bands, separation, steps)
    scheme, strategy = b_min_sep(steps, separation, p, warm), some_strategy(steps, bands, steps)
    for order in (2, 3):
        assert renyi(scheme, strategy, sigma, order) == pytest.approx(moment(scheme, strategy, sigma, order), rel=1e-11)


def test_moment_of_one_poisson_step_in_closed_form():
    p, sigma = 0.3, 0.8
    found = renyi(Poisson(1, 10, 3), Strategy.identity(1), sigma, 2)
    assert found == pytest.approx(1.0 - p**2 + p**2 * math.exp(1.0 / sigma**2), rel=1e-12)


# --- tilted draws ---


def tilted_law(scheme, strategy, sigma, order):
    """Law of the sum of the participations of all replicas under the tilt, by enumeration."""
    weight, x = patterns(scheme)
    mean = x @ dense(strategy).T / sigma
    found: dict[tuple, float] = {}
    for who in itertools.product(range(len(weight)), repeat=order):
        pull = sum(float(mean[r] @ mean[s]) for r, s in itertools.combinations(who, 2))
        total = tuple(x[list(who)].sum(axis=0))
        found[total] = found.get(total, 0.0) + math.prod(weight[list(who)]) * math.exp(pull)
    whole = sum(found.values())
    return {key: value / whole for key, value in found.items()}


def chi_square(counts, law, samples):
    """p-value of Pearson's statistic; cells with fewer than 20 expected are joined, and cells of no chance refused."""
    assert set(counts) <= set(law)
    expected = np.array([law[key] * samples for key in law])
    observed = np.array([counts.get(key, 0) for key in law], dtype=float)
    rare = expected < 20.0
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    kept = expected > 0.0
    return chi2.sf(((observed - expected) ** 2 / np.maximum(expected, 1e-9))[kept].sum(), kept.sum() - 1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("scheme", "strategy", "sigma", "order"),
    [
        (b_min_sep(4, 2, 0.3, False), some_strategy(4, 2), 0.8, 2),
        (b_min_sep(4, 3, 0.3, True), some_strategy(4, 3), 0.8, 3),
        (b_min_sep(4, 3, 1.0, True), some_strategy(4, 2), 0.8, 2),
        (Poisson(3, 10, 3), some_strategy(3, 1), 0.8, 3),
        (MultiAttribution(3, 0.3, 2, 2), some_strategy(3, 2), 1.5, 2),
    ],
)
def test_draws_follow_the_tilted_law(scheme, strategy, sigma, order, dtype):
    samples = 60_000
    spikes = Replicas(chain(scheme, strategy, sigma), order, dtype).draw(samples, np.random.default_rng(5))
    totals = np.zeros((samples, scheme.steps), int)
    np.add.at(totals, (spikes[0], spikes[1]), spikes[2])
    keys, number = np.unique(totals, axis=0, return_counts=True)
    counts = {tuple(key): int(n) for key, n in zip(keys.tolist(), number, strict=True)}
    law = tilted_law(scheme, strategy, sigma, order)
    assert chi_square(counts, law, samples) > 1e-6
    weaker = tilted_law(scheme, strategy, 1.1 * sigma, order)  # negative control
    assert chi_square(counts, weaker, samples) < 1e-15


# --- likelihood ratios ---


@pytest.mark.parametrize("case", range(len(SMALL)))
def test_evaluated_ratios_are_within_their_error_of_the_enumeration(case):
    scheme, strategy, sigma = SMALL[case]
    law = chain(scheme, strategy, sigma)
    samples = 70  # not a multiple of the lanes
    replicas = Replicas(law, 2, np.float64)
    spikes = replicas.draw(samples, np.random.default_rng(1))
    shift = np.linspace(0.0, 0.3, scheme.steps)
    seed = np.random.SeedSequence(7)
    ratios, weights = evaluate(law, spikes, shift, samples, seed)
    # the same normals: blocks of lanes, step by step
    generator, z = np.random.default_rng(seed), []
    for _ in range(-(-samples // 32)):
        z.append(generator.standard_normal((scheme.steps, 32)).T)
    z = np.concatenate(z)[:samples]
    x = np.zeros((samples, scheme.steps))
    np.add.at(x, (spikes[0], spikes[1]), spikes[2])
    y = sigma * (z - shift) + x @ dense(strategy).T
    error = evaluation_error(law, 2, shift)
    assert error < 1e-9
    assert np.abs(ratios - log_ratio(scheme, strategy, sigma, y)).max() <= error
    noise, shifted_noise = -((z - shift) ** 2).sum(axis=1) / 2.0, -(z**2).sum(axis=1) / 2.0  # ln of both densities
    assert np.abs(weights - (noise - shifted_noise)).max() <= error


def test_ratios_out_of_range_count_as_the_bound():
    scheme, strategy = b_min_sep(40, 2, 0.5, False), Strategy.toeplitz([1.0, 0.5], 40)
    law = chain(scheme, strategy, 0.03)
    spikes = np.array([[0] * 20, range(0, 40, 2), [1] * 20], dtype=np.int32)
    ratios, _ = evaluate(law, spikes, np.zeros(40), 2, np.random.SeedSequence(0))
    assert np.isnan(ratios[0])
    terms = RemoveTilt(Replicas(law, 1, np.float64)).terms(Sample(ratios, np.zeros(2), 1e-9), 1.0)
    assert terms.values[0] == terms.bound and terms.lower_values[0] == 0.0
    with pytest.raises(PrivacyError, match="lower it"):
        renyi(scheme, strategy, 0.03, 3)
    assert remove_tilt(law, 1.0).order == 1


def test_order_is_searched_within_limits(monkeypatch):
    law = chain(b_min_sep(64, 4, 0.02, True), optimal_toeplitz(64, 4), 2.0)
    every = [RemoveTilt(Replicas(law, order)).bound(0.5) for order in range(1, 26)]
    found = remove_tilt(law, 0.5, keep=False)
    assert 9 < 1 + int(np.argmin(every)) < 25
    assert min(every) <= found.bound(0.5) == every[found.order - 1] <= 1.02 * min(every)
    assert remove_tilt(chain(b_min_sep(64, 4, 0.02, True), optimal_toeplitz(64, 4), 20.0), 2.0, keep=False).order < 50
    monkeypatch.setattr(module, "_ACTIONS", 1e5)
    assert 1 < remove_tilt(law, 0.5, keep=False).order < 9


# --- terms ---


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 10.0])
def test_remove_terms_lie_between_zero_and_the_bound(order, epsilon):
    scheme, strategy, sigma = SMALL[1]
    tilt = RemoveTilt(Replicas(chain(scheme, strategy, sigma), order, np.float64))
    top = epsilon + math.log(order / (order - 1)) if order > 1 else 300.0
    t = np.concatenate([np.linspace(-50, 50, 2001), top + np.linspace(-1e-3, 1e-3, 2001), [-700, 690, np.nan, np.inf]])
    for rounding in (1e-12, 1e-3):
        terms = tilt.terms(Sample(t, np.zeros(len(t)), rounding), epsilon)
        assert (terms.values >= 0.0).all() and (terms.values <= terms.bound).all()
        assert (terms.lower_values >= 0.0).all() and (terms.lower_values <= terms.values).all()
        assert terms.values.max() >= terms.bound * (1.0 - 1e-6)  # attained: a smaller bound would be wrong
        z = math.exp(tilt.replicas.log_moment)
        finite = np.isfinite(t) & (np.abs(t) < 60.0)
        for shifted in (t[finite], t[finite] - rounding, t[finite] + rounding):
            exact = z * np.maximum(np.exp(shifted) - math.exp(epsilon), 0.0) * np.exp(-order * shifted)
            assert (terms.values[finite] >= exact * (1.0 - 1e-12)).all()
            assert (terms.lower_values[finite] <= exact * (1.0 + 1e-12) + 1e-300).all()


def test_largest_term_is_the_maximum_and_the_renyi_bound():
    for order, log_moment, epsilon in [(2, 0.3, 1.0), (3, 5.0, 10.0), (7, 20.0, 0.5)]:
        t = epsilon + np.geomspace(1e-4, 5.0, 200_001)
        found = (np.exp(t) - np.exp(epsilon)) * np.exp(log_moment - order * t)
        assert largest_term(order, log_moment, epsilon) == pytest.approx(found.max(), rel=1e-6)
        assert largest_term(order, log_moment, epsilon) >= found.max()


@pytest.mark.parametrize("case", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("epsilon", [0.1, 0.4, 0.8])
def test_add_terms_lie_between_zero_and_the_bound_under_attack(case, epsilon):
    scheme, strategy, sigma = SMALL[case]
    law = chain(scheme, strategy, sigma)
    tilt = add_tilt(law, epsilon)
    if tilt.bound(epsilon) == 0.0:
        pytest.skip("delta is 0 at this epsilon")

    def log_term(y):
        loss = epsilon + log_ratio(scheme, strategy, 1.0 * sigma, sigma * y[None, :])[0]
        if loss >= 0.0:
            return -50.0 - loss
        return math.log(-math.expm1(loss)) + float(tilt.shift @ y) + float(tilt.shift @ tilt.shift) / 2.0

    for start in (-tilt.mean, -3.0 * np.ones(scheme.steps), -np.arange(scheme.steps), -8.0 * np.ones(scheme.steps)):
        found = minimize(lambda y: -log_term(y), start, method="Nelder-Mead", options={"maxiter": 300})
        assert -found.fun <= math.log(tilt.bound(epsilon))


def test_half_space_is_below_the_ratio_everywhere():
    generator = np.random.default_rng(3)
    for scheme, strategy, sigma in SMALL:
        law = chain(scheme, strategy, sigma)
        y = generator.normal(size=(200, scheme.steps)) * generator.choice([0.1, 1.0, 4.0], size=(200, 1))
        for share in (0.2, 0.7, 1.0):
            mean, gap = module._half_space(law, share)
            assert (log_ratio(scheme, strategy, sigma, sigma * y) >= y @ mean - gap - 1e-9).all()
        weight, x = patterns(scheme)
        exact = weight @ (x @ dense(strategy).T) / sigma
        assert module._half_space(law, 1.0)[0] == pytest.approx(exact, rel=1e-9, abs=1e-12)


def test_add_bound_is_the_weight_on_the_edge_of_the_half_space():
    scheme, strategy, sigma = SMALL[0]
    for epsilon in (0.6, 0.9, 1.2):
        tilt = add_tilt(chain(scheme, strategy, sigma), epsilon)
        assert tilt.tilt > 0.0
        for other in (epsilon, epsilon - 0.2, epsilon + 0.1):
            edge = (tilt.gap - other) * tilt.mean / (tilt.mean @ tilt.mean)
            weight = math.exp(tilt.shift @ edge + tilt.shift @ tilt.shift / 2.0)
            assert weight <= tilt.bound(other) <= weight * 1.001


def test_shift_made_for_a_large_epsilon_bounds_small_ones():
    law = chain(MultiAttribution(40, 0.05, 3, 3), Strategy.toeplitz([1.0, 2.0, 3.0], 40), 8.0)
    tilt = add_tilt(law, 6.0)
    bounds = [tilt.bound(epsilon) for epsilon in (0.1, 3.0, 5.9, 6.0)]
    assert bounds[0] == math.inf and bounds == sorted(bounds, reverse=True) and 0.0 < bounds[-1] < 1.0
    values = tilt.terms(tilt.sample(64, 0), 0.1).values
    assert np.isfinite(values).all()


def test_absence_that_is_impossible_or_certain_from_some_start_gives_no_warning():
    waiting_beyond_the_end = chain(BMinSep(2, 40, 10, 4), Strategy.identity(2), 1.0)  # of bins, all are taken in turn
    always = chain(BMinSep(4, 40, 10, 4), Strategy.identity(4), 1.0)
    with np.errstate(invalid="raise"):
        assert log_absent(waiting_beyond_the_end) == pytest.approx(math.log(0.5))
        assert log_absent(always) == -math.inf


def test_loss_of_the_add_direction_is_capped_by_no_participation():
    for scheme, strategy, sigma in SMALL:
        weight, x = patterns(scheme)
        none = float(weight[(x == 0).all(axis=1)].sum())
        law = chain(scheme, strategy, sigma)
        assert math.exp(log_absent(law)) == pytest.approx(none, abs=1e-14)
        if none > 0.0:
            assert renyi_delta(scheme, strategy, sigma, -math.log(none) + 1e-6, "add") == 0.0
            assert renyi_delta(scheme, strategy, sigma, -math.log(none) - 1e-3, "add") > 0.0


# --- delta against quadrature ---


def reference_scheme(case):
    n = len(case["C"])
    c = np.array(case["C"])
    bands = max(i - j for i, j in zip(*np.nonzero(c), strict=True)) + 1
    columns = np.array([[c[i + d, i] if i + d < n else 0.0 for d in range(bands)] for i in range(n)])
    if case["scheme"] == "poisson":
        scheme = Poisson(n, 10**6, 10**6 * case["p"])
    elif case["scheme"] == "multi_attribution":
        scheme = MultiAttribution(n, case["p"], case["b"], case["k"])
    else:
        scheme = b_min_sep(n, case["b"], case["p"], case["warm_start"])
    return scheme, Strategy(columns), case["sigma"]


EXACT = [case for case in REFERENCE["exact"] if case["scheme"] != "b_min_sep_truncated"]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case["name"])
def test_mean_of_the_terms_is_delta(case):
    scheme, strategy, sigma = reference_scheme(case)
    samples = 20_000
    for direction in ("remove", "add"):
        for epsilon, delta in zip(case["eps"], case[f"delta_{direction}"], strict=True):
            if epsilon == 0.0 and direction == "remove":
                continue  # the same number as in the add direction
            terms = tilted_terms(scheme, strategy, sigma, epsilon, samples, seed=(11, 2), direction=direction)
            slack = case["abs_err_bound_est"] + 1e-15
            if terms.bound == 0.0:
                assert delta <= slack
                continue
            low, high = interval(terms.lower_values, terms.bound, 1e-7)[0], upper_bound(terms.values, terms.bound, 1e-7)
            assert low - slack <= delta <= high + slack
            if direction == "remove":  # power: an error of a third is excluded
                assert low > delta / 1.34 and high < delta * 1.34
            assert renyi_delta(scheme, strategy, sigma, epsilon, direction) >= delta - slack


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_every_order_has_the_same_mean(order):
    case = next(c for c in EXACT if c["name"] == "bminsep_warm_n3_b2_p0.3_s0.8")
    scheme, strategy, sigma = reference_scheme(case)
    for dtype in (np.float64, np.float32):
        tilt = RemoveTilt(Replicas(chain(scheme, strategy, sigma), order, dtype))
        sample = sample_outputs(tilt, 60_000, 9)
        for epsilon, delta in zip(case["eps"][:4], case["delta_remove"], strict=False):
            terms = tilt.terms(sample, epsilon)
            deviation = terms.values.std() / math.sqrt(len(terms.values))
            assert abs(terms.values.mean() - delta) <= 5.5 * deviation + 1e-7
            assert terms.values.mean() - terms.lower_values.mean() <= 1e-5 * delta


@pytest.mark.parametrize("case", [c for c in REFERENCE["mc"] if "Bmax" not in c], ids=lambda case: case["name"])
def test_terms_agree_with_plain_monte_carlo(case):
    strategy = Strategy.toeplitz(case["coef"], case["n"])
    if "k" in case:
        scheme = MultiAttribution(case["n"], case["p"], case["b"], case["k"])
    else:
        scheme = b_min_sep(case["n"], case["b"], case["p"], case["warm"])
    law = chain(scheme, strategy, case["sigma"])
    samples = 8_192
    for direction, make in (
        ("remove", lambda e: RemoveTilt(Replicas(law, 2 if e > 1.0 else 1, np.float64))),
        ("add", lambda e: add_tilt(law, e)),
    ):
        for epsilon, delta, error in zip(*(case[direction][k] for k in ("eps", "delta", "se")), strict=True):
            if epsilon not in (1.0, 2.0, 4.0) or delta < 1e-3:
                continue
            tilt = make(epsilon)
            values = tilt.terms(sample_outputs(tilt, samples, 4), epsilon).values
            assert abs(values.mean() - delta) <= 5.5 * math.hypot(values.std() / math.sqrt(samples), error)


def test_warm_start_with_probability_one_is_balls_in_bins():
    bins = BallsInBins(6, 30, 3)
    scheme = BMinSep(bins.steps, bins.examples, bins.batch, bins.separation)
    weight, x = patterns(scheme)
    assert scheme.probability == 1.0 and sorted(weight) == pytest.approx([1 / 3] * 3)
    assert sorted(x.tolist()) == sorted(np.tile(np.eye(3, dtype=int), 2).tolist())


# --- users ---


def test_users_with_fewer_examples_are_covered():
    case = REFERENCE["multi_fewer"]
    strategy = Strategy(np.diag(case["C"])[:, None].copy())
    scheme = MultiAttribution(2, case["p"], case["b"], 5)
    assert [load.per_user for load in user_loads(scheme)] == [1, 2, 3, 4, 5]
    for j, epsilon in enumerate(case["eps"]):
        worst = max(result["delta_remove"][j] for result in case["results"])
        assert case["results"][-1]["delta_remove"][j] < worst  # five examples are not the worst case
        assert renyi_delta(scheme, strategy, case["sigma"], epsilon) >= worst


# --- truncation ---


@pytest.mark.parametrize(
    ("count", "p", "least"), [(50, 0.3, 20), (50, 0.3, 40), (7, 0.5, 7), (200, 0.01, 9), (40, 0.2, 0), (9, 0.9, 2)]
)
def test_binomial_tail_is_an_upper_bound(count, p, least):
    exact = sum(
        math.comb(count, k) * Fraction(p) ** k * (1 - Fraction(p)) ** (count - k) for k in range(least, count + 1)
    )
    found = binomial_tail(count, p, least)
    assert found >= float(exact)
    assert found == 1.0 or found <= float(exact) * 1.01


def test_binomial_tail_of_a_production_batch():
    exact = binom.sf(2047, 14_745_599, 1793 / 14_745_600)
    assert exact * (1.0 - 1e-9) <= binomial_tail(14_745_599, 1793 / 14_745_600, 2048) <= exact * (1.0 + 1e-6)


def truncated_step(examples, p, limit, sigma, epsilon):
    """Both deltas of one truncated Poisson step (C = 1), by quadrature: P against Q given the others' number r."""
    y = np.linspace(-14.0 * sigma - 2.0, 14.0 * sigma + 3.0, 200_001)

    def normal(mean):
        return np.exp(-((y - mean) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))

    deltas = np.zeros(2)
    for r in range(examples):
        weight = math.comb(examples - 1, r) * p**r * (1 - p) ** (examples - 1 - r)
        with_it, without = (1 - p) * normal(0.0) + p * normal(1.0), normal(0.0)
        if r >= limit:
            kept = limit / (r + 1)
            with_it = (1 - p * kept) * normal(0.0) + p * kept * normal(2.0)
            without = (1 - p * kept) * normal(0.0) + p * kept * normal(-1.0)
        step = y[1] - y[0]
        deltas[0] += weight * np.maximum(with_it - math.exp(epsilon) * without, 0.0).sum() * step
        deltas[1] += weight * np.maximum(without - math.exp(epsilon) * with_it, 0.0).sum() * step
    return deltas


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(("examples", "p", "limit"), [(12, 0.2, 5), (12, 0.2, 3), (30, 0.1, 6)])
def test_truncation_excess_covers_the_truncated_step(examples, p, limit, epsilon):
    sigma = 0.7
    scheme = Poisson(1, examples, p * examples, limit)
    strategy = Strategy.identity(1)
    truncated = truncated_step(examples, p, limit, sigma, epsilon)

    # one Poisson step in closed form: L > e^epsilon above a threshold
    def plain(e):
        threshold = sigma**2 * math.log((math.exp(e) - 1 + p) / p) + 0.5
        upper = [ndtr(-(threshold - m) / sigma) for m in (0.0, 1.0)]
        return p * upper[1] + (1 - p - math.exp(e)) * upper[0]

    cut = p * binom.sf(limit - 1, examples - 1, p)
    remove = truncation_excess(scheme, strategy, sigma, epsilon)
    assert plain(epsilon) < truncated[0] <= plain(epsilon) + remove
    assert truncated[0] - plain(epsilon) > 0.02 * cut  # the test has something to find
    assert cut <= remove <= cut * (1.0 + 1.0 / p) * 1.001
    add = truncation_excess(scheme, strategy, sigma, epsilon, "add")
    untruncated = 0.0
    if epsilon < -math.log(1 - p):
        sample = np.exp(np.linspace(-12, 12, 400_001) ** 2 / -2.0)
        z = np.linspace(-12, 12, 400_001) * sigma
        loss = (1 - p) + p * np.exp((2 * z - 1) / (2 * sigma**2))
        untruncated = float((sample * np.maximum(1 - math.exp(epsilon) * loss, 0.0)).sum() / sample.sum())
    assert truncated[1] <= untruncated + add


def test_no_truncation_costs_nothing():
    assert truncation_excess(b_min_sep(6, 3, 0.2, True), some_strategy(6, 3), 1.0, 1.0) == 0.0
    assert truncation_excess(MultiAttribution(5, 0.2, 2, 2), some_strategy(5, 2), 1.0, 1.0) == 0.0


def test_cold_start_is_cut_more_often_than_warm():
    strategy = Strategy.toeplitz([1.0, 0.5], 50)
    excess = [truncation_excess(BMinSep(50, 10_000, 400, 10, warm, 480), strategy, 0.8, 4.0) for warm in (True, False)]
    assert 0.0 < excess[0] < excess[1]


# --- runs ---


def test_results_do_not_depend_on_the_executor():
    scheme, strategy, sigma = SMALL[1]
    tilt = remove_tilt(chain(scheme, strategy, sigma), 0.5)
    assert tilt.order > 1
    done = []
    first = sample_outputs(tilt, 5000, 3, progress=lambda *at: done.append(at))
    assert done == [(2048, 5000), (4096, 5000), (5000, 5000)]
    with ThreadPoolExecutor(3) as executor:
        assert np.array_equal(sample_outputs(tilt, 5000, 3, executor).log_ratios, first.log_ratios)
    copy = pickle.loads(pickle.dumps(tilt))  # what processes get
    assert np.array_equal(sample_outputs(copy, 5000, 3).log_ratios, first.log_ratios)
    assert not np.array_equal(sample_outputs(tilt, 5000, 4).log_ratios, first.log_ratios)


def test_refusals_name_what_was_found():
    scheme, strategy, sigma = SMALL[1]
    with pytest.raises(PrivacyError, match="BallsInBins"):
        renyi(BallsInBins(6, 30, 3), strategy, sigma, 2)
    with pytest.raises(PrivacyError, match="found 3 with 4 bands"):
        renyi(scheme, some_strategy(6, 4), sigma, 2)
    with pytest.raises(PrivacyError, match="found 5 steps"):
        renyi(scheme, some_strategy(5, 3), sigma, 2)
    with pytest.raises(PrivacyError, match="order"):
        renyi(scheme, strategy, sigma, 0)
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        renyi(scheme, strategy, 0.0, 2)
    with pytest.raises(PrivacyError, match="direction"):
        renyi_delta(scheme, strategy, sigma, 1.0, "both")


# --- production ---


@pytest.mark.slow
def test_production_is_certified_at_0_444():
    scheme = BMinSep(7200, 14_745_600, 1793, 256, True, 2048)
    strategy = optimal_toeplitz(7200, 256)
    gamma = 1e-10
    terms = tilted_terms(scheme, strategy, 0.444, 10.0, 262_144, seed=20260)
    excess = truncation_excess(scheme, strategy, 0.444, 10.0)
    assert upper_bound(terms.values, terms.bound, gamma) + gamma + excess <= 14_745_600**-1.1
    assert renyi_delta(scheme, strategy, 0.444, 10.0, "add") < 2e-9
