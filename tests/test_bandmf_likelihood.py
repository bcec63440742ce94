"""Likelihood ratios against enumeration, exact arithmetic, a plain recursion, and reference values."""

import math

import mpmath
import numpy as np
import pytest
from bandmf_patterns import GOLDEN, MANY, b_min_sep, dense, enumerated, golden_case
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from scipy import stats

from certify.errors import PrivacyError
from privacy.bandmf import lanes
from privacy.bandmf.likelihood import (
    SECRET,
    Spikes,
    attributions,
    dominating_group,
    likelihood_error,
    log_likelihood_ratio,
    losses_at,
)
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Poisson
from privacy.bandmf.strategy import Strategy

BANDED = GOLDEN["mc"][-1]["coef"]  # 64 coefficients, error-optimal


@st.composite
def cases(draw):
    """Scheme, strategy (Toeplitz, scaled or general), noise multiplier, outputs, counts, group."""
    n = draw(st.integers(1, 10))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["poisson", "cold", "warm", "multi", "cyclic", "bins", "truncated"]))
    bands = draw(st.integers(1, min(n, 4)))
    separation = draw(st.integers(bands, bands + 3))
    p = draw(st.sampled_from([0.02, 0.3, 0.8, 1.0]))
    counts, group = None, None
    if kind == "poisson":
        bands, scheme = 1, Poisson(n, MANY, p * MANY)
    elif kind in ("cold", "warm"):
        scheme = b_min_sep(n, p, separation, kind == "warm")
    elif kind == "multi":
        scheme = MultiAttribution(n, p, separation, draw(st.integers(1, 3)))
    elif kind == "cyclic":
        scheme = CyclicPoisson(n, MANY, p * MANY / separation, separation)
        group = draw(st.sampled_from([SECRET, *range(separation)]))
    elif kind == "bins":
        scheme = BallsInBins(n, MANY, draw(st.integers(1, 6)))
    else:
        limit = draw(st.integers(1, 3))
        p = min(p, 0.8)
        scheme = b_min_sep(n, p, separation, draw(st.booleans()), limit, examples=50)
        if draw(st.booleans()):
            scheme = CyclicPoisson(n, 50, p * 50 / separation, separation, limit)
            group = draw(st.sampled_from([SECRET, *range(separation)]))
        elif bands == 1 and draw(st.booleans()):
            scheme = Poisson(n, 50, p * 50, limit)
        counts = rng.integers(0, 2 * limit + 2, n)
    columns = rng.uniform(0.05, 1.0, (n, bands))
    if draw(st.booleans()):
        columns[:] = columns[0] * (rng.uniform(0.3, 1.0, (n, 1)) if draw(st.booleans()) else 1.0)
    i, d = np.ogrid[:n, :bands]
    strategy = Strategy(np.where(i + d < n, columns, 0.0))
    noise_multiplier = draw(st.sampled_from([0.3, 1.0, 4.0]))
    outputs = rng.normal(size=(9, n)) * draw(st.sampled_from([0.5, 3.0]))
    return scheme, strategy, noise_multiplier, outputs, counts, group


@settings(max_examples=150, deadline=None)
@given(cases())
def test_ratio_is_the_mixture_over_all_participation_patterns(case):
    scheme, strategy, noise_multiplier, outputs, counts, group = case
    found = log_likelihood_ratio(scheme, strategy, noise_multiplier, outputs, counts, group=group)
    expected = enumerated(scheme, strategy, noise_multiplier, outputs, counts, group)
    # The oracle's own rounding: exponents of some thousands lose that many units in the last place.
    tolerance = 1e-12 * (1 + np.abs(outputs).max() / noise_multiplier) ** 2
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=tolerance)


def test_twelve_steps_with_four_bands_by_enumeration():
    rng = np.random.default_rng(5)
    strategy = Strategy.toeplitz([0.8, 0.4, 0.3, 0.2], 12)
    for separation in (4, 6):
        for warm in (False, True):
            scheme = b_min_sep(12, 0.35, separation, warm)
            outputs = rng.normal(size=(20, 12))
            found = log_likelihood_ratio(scheme, strategy, 0.6, outputs)
            np.testing.assert_allclose(found, enumerated(scheme, strategy, 0.6, outputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", GOLDEN["llr"], ids=lambda case: case["name"])
def test_reference_ratios(case):
    scheme, strategy, group = golden_case(case)
    counts = None if case.get("r") is None else np.array(case["r"])
    found = log_likelihood_ratio(scheme, strategy, case["sigma"], np.array(case["y"]), counts, group=group)
    np.testing.assert_allclose(found, case["log_P_over_Q"], rtol=0, atol=1e-10)


# ----- limiting cases -------------------------------------------------------------------------------------------------


def test_separation_one_is_poisson():
    outputs = np.random.default_rng(0).normal(size=(10, 30))
    strategy = Strategy.identity(30)
    poisson = log_likelihood_ratio(Poisson(30, MANY, 0.2 * MANY), strategy, 0.8, outputs)
    for warm in (False, True):
        found = log_likelihood_ratio(b_min_sep(30, 0.2, 1, warm), strategy, 0.8, outputs)
        np.testing.assert_allclose(found, poisson, rtol=0, atol=1e-12)
    by_hand = np.log1p(0.2 * np.expm1((2 * outputs - 1) / (2 * 0.8**2))).sum(axis=1)
    np.testing.assert_allclose(poisson, by_hand, rtol=0, atol=1e-12)


def test_certain_joining_from_a_warm_start_is_balls_in_bins():
    outputs = np.random.default_rng(1).normal(size=(10, 50))
    strategy = Strategy.toeplitz([0.7, 0.5, 0.2], 50)
    chain = log_likelihood_ratio(BMinSep(50, MANY, MANY / 7, 7, warm=True), strategy, 0.9, outputs)
    bins = log_likelihood_ratio(BallsInBins(50, MANY, 7), strategy, 0.9, outputs)
    np.testing.assert_allclose(chain, bins, rtol=0, atol=1e-11)


def test_one_example_per_user_is_cold_b_min_sep():
    outputs = np.random.default_rng(2).normal(size=(10, 40))
    strategy = Strategy.toeplitz([0.7, 0.5, 0.2], 40)
    single = log_likelihood_ratio(b_min_sep(40, 0.1, 4, False), strategy, 0.9, outputs)
    found = log_likelihood_ratio(MultiAttribution(40, 0.1, 4, 1), strategy, 0.9, outputs)
    np.testing.assert_allclose(found, single, rtol=0, atol=1e-11)
    assert [s.per_user for s in attributions(MultiAttribution(40, 0.1, 4, 3))] == [1, 2, 3]
    assert attributions(BallsInBins(4, 8, 2)) == (BallsInBins(4, 8, 2),)


# ----- long runs ------------------------------------------------------------------------------------------------------


def plain_recursion(scheme, strategy, noise_multiplier, outputs):
    """b-min-sep in log space with dense columns, one scalar after the other."""
    n, b, p = scheme.steps, scheme.separation, scheme.probability
    inner = outputs @ dense(strategy)
    found = []
    for d in inner:
        l = np.zeros(n + b + 1)
        for i in reversed(range(n)):
            term = (2 * d[i] - (strategy.columns[i] ** 2).sum()) / (2 * noise_multiplier**2)
            stay = math.log1p(-p) + l[i + 1] if p < 1.0 else -math.inf
            l[i] = np.logaddexp(stay, math.log(p) + term + l[i + b])
        total = l[0]
        if scheme.warm:
            total = np.logaddexp.reduce([l[0], *(math.log(p) + l[1:b])]) - math.log1p((b - 1) * p)
        found.append(total)
    return np.array(found)


@pytest.mark.parametrize("bands", [1, 15, 16, 17, 64, 79, 80, 81, 130, 200])
@pytest.mark.parametrize("kind", ["toeplitz", "scaled", "general"])
def test_every_way_to_form_inner_products(bands, kind):
    """Plain, Toom-Cook and column-wise filters, at lengths that are and are not multiples of the blocks."""
    rng = np.random.default_rng(bands)
    n = 3 * bands + 7
    columns = np.tile(rng.uniform(0.01, 1.0, bands), (n, 1))
    if kind == "scaled":
        columns *= rng.uniform(0.5, 1.0, (n, 1))
    if kind == "general":
        columns *= rng.uniform(0.5, 1.0, (n, bands))
    i, d = np.ogrid[:n, :bands]
    strategy = Strategy(np.where(i + d < n, columns, 0.0))
    scheme = b_min_sep(n, 0.05, bands + 2, True)
    outputs = rng.normal(size=(11, n))
    found = log_likelihood_ratio(scheme, strategy, 1.3 * bands**0.5, outputs)
    np.testing.assert_allclose(
        found, plain_recursion(scheme, strategy, 1.3 * bands**0.5, outputs), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("p", [1e-4, 0.5, 1.0])
def test_linear_and_log_space_agree_and_nothing_overflows(p):
    """Outputs for which ``L`` leaves the range of doubles, in both ways, beside ordinary ones in one block."""
    n = 1200
    strategy = Strategy.toeplitz(BANDED[:16], n)
    scheme = b_min_sep(n, p, 20, True)
    outputs = np.random.default_rng(3).normal(size=(8, n))
    outputs[2] += 60.0
    outputs[5] -= 60.0
    found = log_likelihood_ratio(scheme, strategy, 0.4, outputs)
    expected = plain_recursion(scheme, strategy, 0.4, outputs)
    assert expected.max() > 1000.0
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-10)


def test_mean_ratio_without_the_example_is_one():
    """``E_Q[P/Q] = 1``: a wrong norm, weight or boundary shows.  16,384 samples, 5.5 standard errors (4e-8)."""
    cold, warm = b_min_sep(60, 0.1, 8, False), b_min_sep(60, 0.1, 8, True)
    for scheme in (cold, warm, MultiAttribution(60, 0.05, 8, 2), BallsInBins(60, MANY, 20)):
        strategy = Strategy.toeplitz(BANDED[:8], 60)
        nobody = Spikes.of(np.zeros((16384, 60)))
        ratio = np.exp(losses_at(scheme, strategy, 2.0, nobody, np.random.SeedSequence(1)))
        assert abs(ratio.mean() - 1.0) < 5.5 * ratio.std() / 128


# ----- rounding -------------------------------------------------------------------------------------------------------


def exact_recursion(scheme, strategy, noise_multiplier, output):
    """`plain_recursion` in 60 digits, from the doubles as given."""
    with mpmath.workdps(60):
        n, b, p = scheme.steps, scheme.separation, mpmath.mpf(scheme.probability)
        variance, f = mpmath.mpf(noise_multiplier) ** 2, [mpmath.mpf(1)] * (scheme.steps + scheme.separation + 1)
        y = [mpmath.mpf(float(v)) for v in output]
        for i in reversed(range(n)):
            column = [mpmath.mpf(float(c)) for c in strategy.columns[i][: n - i]]
            inner = mpmath.fsum(c * v for c, v in zip(column, y[i:], strict=False))
            norm = mpmath.fsum(c * c for c in column)
            f[i] = (1 - p) * f[i + 1] + p * mpmath.exp((2 * inner - norm) / (2 * variance)) * f[i + b]
        total = f[0]
        if scheme.warm:
            total = (f[0] + p * mpmath.fsum(f[1:b])) / (1 + (b - 1) * p)
        return mpmath.log(total)


@pytest.mark.parametrize("bands, n, p", [(4, 60, 0.1), (4, 60, 0.9999), (16, 120, 0.02), (96, 300, 0.01)])
def test_rounding_error_is_bounded_in_linear_and_in_log_space(bands, n, p):
    coefficients = [1.0 / (1 + k) for k in range(bands)]
    strategy = Strategy.toeplitz(coefficients, n)
    scheme = b_min_sep(n, p, bands, True)
    rng = np.random.default_rng(4)
    for scale in (0.5, 5.0, 60.0):
        outputs = rng.uniform(-scale, scale, size=(4, n))
        bound = likelihood_error(scheme, strategy, 0.7, float(np.abs(outputs).max()))
        found = log_likelihood_ratio(scheme, strategy, 0.7, outputs)
        for value, output in zip(found, outputs, strict=True):
            error = abs(mpmath.mpf(float(value)) - exact_recursion(scheme, strategy, 0.7, output))
            assert error <= bound
        assert bound < 1e-5  # useful: far below the privacy losses of interest


@njit
def _apply_exp(x, out):
    for row in range(x.size // 8):
        lanes.store(out, row, lanes.exp(lanes.load(x, row)))


@njit
def _apply_log(x, out):
    for row in range(x.size // 8):
        lanes.store(out, row, lanes.log(lanes.load(x, row)))


@njit
def _apply_log_add(x, y, out):
    for row in range(x.size // 8):
        lanes.store(out, row, lanes.log_add(lanes.load(x, row), lanes.load(y, row)))


def test_exponential_and_logarithm_keep_their_stated_errors():
    u = 2.0**-53
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.uniform(-708, 709, 2000), rng.uniform(-1, 1, 2000), [0.0, -708.0, 708.9, 1e-300] * 2])
    found = np.empty_like(x)
    _apply_exp(x, found)
    assert max(abs(mpmath.mpf(f) / mpmath.exp(mpmath.mpf(v)) - 1) for f, v in zip(found, x, strict=True)) <= 4 * u
    _apply_log(np.exp(x), found)
    exact = [mpmath.log(mpmath.mpf(float(v))) for v in np.exp(x)]
    assert all(abs(f - e) <= min(4 * u * (1 + abs(e)), 8 * u * abs(e)) for f, e in zip(found, exact, strict=True))
    a, b = rng.uniform(-50, 50, 800), rng.uniform(-50, 50, 800)
    out = np.empty(800)
    _apply_log_add(a, b, out)
    for f, v, w in zip(out, a, b, strict=True):
        e = mpmath.log(mpmath.exp(mpmath.mpf(v)) + mpmath.exp(mpmath.mpf(w)))
        assert abs(f - e) <= 2 * u * abs(e) + 16 * u


@njit
def _apply_sine_and_cosine(x, sine, cosine):
    for row in range(x.size // 8):
        angle = lanes.load(x, row)
        lanes.store(sine, row, angle * lanes._sin_series(angle * angle))
        lanes.store(cosine, row, lanes._cos_series(angle * angle))


def test_sine_and_cosine_are_accurate_up_to_an_eighth_turn():
    """A short series would not show in any statistical test of the normal variates."""
    x = np.linspace(-math.pi / 4, math.pi / 4, 800)
    sine, cosine = np.empty(800), np.empty(800)
    _apply_sine_and_cosine(x, sine, cosine)
    np.testing.assert_allclose(sine, np.sin(x), rtol=1e-15, atol=0)
    np.testing.assert_allclose(cosine, np.cos(x), rtol=1e-15, atol=0)


def test_exponential_and_log_sums_at_the_ends_of_the_range():
    x = np.array([710.0, 1e6, math.inf, math.nan, -800.0, -1e300, -math.inf, 709.0])
    found = np.empty(8)
    _apply_exp(x, found)
    assert np.isinf(found[[0, 1, 2, 3, 7]]).all()
    assert ((found[4:7] > 0.0) & (found[4:7] <= math.exp(-707.9))).all()
    nothing = np.full(8, lanes.NEGLIGIBLE)
    out = np.empty(8)
    _apply_log_add(nothing, np.array([1.0, -5.0, 700.0, 1e4, -1e4, 0.0, 2.0, 3.0]), out)
    np.testing.assert_array_equal(out, [1.0, -5.0, 700.0, 1e4, -1e4, 0.0, 2.0, 3.0])
    _apply_log_add(nothing, nothing, out)
    assert (out <= 0.99 * lanes.NEGLIGIBLE).all()


# ----- normal variates ------------------------------------------------------------------------------------------------


def normals(seed, rows):
    state = np.random.SeedSequence(seed).generate_state(lanes.STATE, np.uint64).view(np.int64)
    out = np.zeros(8 * rows)
    lanes.add_normal(state, out, rows, 1.0)
    return out.reshape(rows, 8)


def normality(z):
    """p-values: shape, moments, tails, dependence along a lane, within a Box-Muller pair, across lanes."""
    flat, size = z.ravel(), z.size
    found = {"shape": stats.kstest(flat, "norm").pvalue}
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        score = ((flat**power).mean() - mean) / math.sqrt(variance / size)
        found[f"moment {power}"] = 2 * stats.norm.sf(abs(score))
    for bound in (3.0, 4.0):
        found[f"tail {bound}"] = stats.binomtest(int((flat > bound).sum()), size, stats.norm.sf(bound)).pvalue
        found[f"tail -{bound}"] = stats.binomtest(int((flat < -bound).sum()), size, stats.norm.sf(bound)).pvalue
    pairs = {"lag 1": (z[:-1], z[1:]), "lag 2": (z[:-2], z[2:]), "pair": (z[::2], z[1::2])}
    pairs["lanes"] = (z[:, :-1], z[:, 1:])
    for name, (a, b) in pairs.items():
        for power in (1, 2):
            a_, b_ = (a**power).ravel(), (b**power).ravel()
            products = (a_ - a_.mean()) * (b_ - b_.mean())
            found[f"{name} power {power}"] = 2 * stats.norm.sf(
                abs(products.mean()) / (products.std() / math.sqrt(products.size))
            )
    return found


def test_normal_variates_are_normal_and_independent():
    """Each p-value is below 1e-7 by chance with that probability."""
    found = normality(normals(7, 250_000))
    assert min(found.values()) > 1e-7, found


@pytest.mark.parametrize("defect, seen", [("scale", "moment 2"), ("pair", "pair power 2"), ("lanes", "lanes power 1")])
def test_normality_tests_see_defects(defect, seen):
    z = normals(8, 250_000)
    if defect == "scale":
        z = z * 1.01
    elif defect == "pair":  # the radius shared by a pair, quadrant fixed: uncorrelated but dependent
        z[1::2] *= np.where(np.abs(z[::2]) > 1.0, 1.05, 1.0)
    else:
        z[:, 1:] = z[:, 1:] * 0.9999 + 0.01 * z[:, :-1]
    assert normality(z)[seen] < 1e-9


def test_an_odd_number_of_rows_leaves_the_rest_alone():
    state = np.random.SeedSequence(1).generate_state(lanes.STATE, np.uint64).view(np.int64)
    out = np.full(8 * 6, 5.0)
    lanes.add_normal(state, out, 5, 1e-3)
    assert (out[40:] == 5.0).all() and (np.abs(out[:40] - 5.0) < 0.01).all() and (out[:40] != 5.0).all()


# ----- sampled outputs and refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bands", [3, 100])
def test_losses_at_spikes_are_those_of_the_outputs_drawn(bands):
    rng = np.random.default_rng(9)
    n = 150
    strategy = Strategy.toeplitz(rng.uniform(0.1, 1.0, bands), n)
    scheme = b_min_sep(n, 0.02, bands + 1, True)
    x = rng.binomial(2, 0.03, size=(21, n)) * 1.5
    outputs = np.empty((21, n))
    spikes = Spikes.of(x)
    found = losses_at(scheme, strategy, 0.7, spikes, np.random.SeedSequence(3), outputs=outputs)
    assert spikes.samples == 21
    np.testing.assert_allclose(found, log_likelihood_ratio(scheme, strategy, 0.7, outputs), rtol=1e-12, atol=1e-12)
    noise = (outputs - x @ dense(strategy).T) / 0.7
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-7
    again = losses_at(scheme, strategy, 0.7, spikes, np.random.SeedSequence(3))
    np.testing.assert_array_equal(again, found)


def test_the_least_protected_group_of_a_cyclic_scheme():
    scheme = CyclicPoisson(7, MANY, 0.1 * MANY, 3)
    assert dominating_group(scheme, Strategy.toeplitz([1.0, 0.5], 7)) == 0
    columns = np.ones((7, 1))
    columns[4] = 9.0  # group 1 has the largest norm, group 0 the most steps: neither dominates
    with pytest.raises(PrivacyError, match="group"):
        log_likelihood_ratio(scheme, Strategy(columns), 1.0, np.zeros((1, 7)))
    columns[0] = 10.0
    columns[3] = 10.0
    assert dominating_group(scheme, Strategy(columns)) == 0


def test_what_does_not_fit_is_refused():
    scheme, strategy, y = b_min_sep(10, 0.1, 2, True), Strategy.toeplitz([1.0, 0.5], 10), np.zeros((2, 10))
    with pytest.raises(PrivacyError, match="bands"):
        log_likelihood_ratio(scheme, Strategy.toeplitz([1.0, 0.5, 0.2], 10), 1.0, y)
    with pytest.raises(PrivacyError, match="steps"):
        log_likelihood_ratio(scheme, Strategy.identity(9), 1.0, y)
    with pytest.raises(PrivacyError, match="noise_multiplier"):
        log_likelihood_ratio(scheme, strategy, 0.0, y)
    with pytest.raises(PrivacyError, match="outputs"):
        log_likelihood_ratio(scheme, strategy, 1.0, y[:, :9])
    with pytest.raises(PrivacyError, match="group"):
        log_likelihood_ratio(CyclicPoisson(10, 8, 1, 2), strategy, 1.0, y, group=2)
    with pytest.raises(PrivacyError, match="counts"):
        log_likelihood_ratio(scheme, strategy, 1.0, y, np.zeros(10))
    with pytest.raises(PrivacyError, match="counts"):
        log_likelihood_ratio(b_min_sep(10, 0.1, 2, True, 5), strategy, 1.0, y)
