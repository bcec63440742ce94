"""Strategies: optimum, sensitivity and error against dense matrices, brute force and stored reference values."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from certify.errors import PrivacyError
from privacy.bandmf.optimize import _log_loss_and_gradient, optimal_toeplitz
from privacy.bandmf.strategy import Strategy

REFERENCE = json.loads((Path(__file__).parent / "data" / "bandmf_strategy.json").read_text())
entry = st.floats(0.0, 2.0, allow_subnormal=False).map(lambda x: round(x, 3))


def dense(strategy: Strategy) -> np.ndarray:
    n, bands = strategy.columns.shape
    c = np.zeros((n + bands, n))
    for i in range(n):
        c[i : i + bands, i] = strategy.columns[i]
    return c[:n]


def admissible(steps: int, separation: int, participations: int | None):
    for size in range(1, min(steps, participations or steps) + 1):
        for places in itertools.combinations(range(steps), size):
            if all(b - a >= separation for a, b in itertools.pairwise(places)):
                yield places


def brute_force(c: np.ndarray, separation: int, participations: int | None) -> float:
    return max(np.linalg.norm(c[:, s].sum(axis=1)) for s in admissible(len(c), separation, participations))


@st.composite
def banded(draw, largest=7):
    n = draw(st.integers(1, largest))
    bands = draw(st.integers(1, n))
    c = draw(arrays(np.float64, (n, n), elements=entry))
    c[np.arange(n), np.arange(n)] += 0.25
    i, j = np.ogrid[:n, :n]
    return np.where((i - j >= 0) & (i - j < bands), c, 0.0)


separations, counts = st.integers(1, 8), st.none() | st.integers(1, 4)


# --- the optimum ---


@pytest.mark.parametrize("key", REFERENCE["coefs"])
def test_the_optimum_is_the_reference_optimum(key):
    known = REFERENCE["coefs"][key]
    found = optimal_toeplitz(known["n"], known["bands"])
    np.testing.assert_allclose(found.coefficients, known["coef"], atol=5e-8)
    errors = found.squared_errors()
    assert errors.mean() == pytest.approx(known["mean_sq_error"], rel=1e-10)
    assert errors.max() == pytest.approx(known["max_sq_error"], rel=1e-6)
    assert errors.sum() == pytest.approx(known["sq_frobenius"], rel=1e-10)


@pytest.mark.parametrize("key", REFERENCE["large"])
def test_large_optima_have_the_reference_error(key):
    known = REFERENCE["large"][key]
    errors = optimal_toeplitz(known["n"], known["bands"]).squared_errors()
    assert errors.mean() == pytest.approx(known["mean_sq_error"], rel=1e-9)
    assert errors.max() == pytest.approx(known["max_sq_error"], rel=1e-5)


@pytest.mark.parametrize("known", REFERENCE["optimality_check"], ids=lambda k: k["key"])
def test_the_loss_is_that_of_a_second_optimiser(known):
    steps, bands = (int(part[1:]) for part in known["key"].split("_"))
    assert optimal_toeplitz(steps, bands).squared_errors().mean() == pytest.approx(known["scipy_loss"], rel=1e-10)


@settings(deadline=None)
@given(st.integers(2, 12), st.data())
def test_the_gradient_is_the_slope_of_the_loss(steps, data):
    tail = data.draw(arrays(np.float64, data.draw(st.integers(1, steps - 1)), elements=st.floats(0.0, 0.9)))
    loss, gradient = _log_loss_and_gradient(tail, steps)
    strategy = Strategy.toeplitz(np.append(1.0, tail), steps)
    norm = np.linalg.norm(strategy.coefficients)
    assert loss == pytest.approx(math.log(strategy.squared_errors().sum() * norm**2), abs=1e-9)
    h = 1e-6
    for k, direction in enumerate(np.eye(len(tail))):
        up, down = (_log_loss_and_gradient(tail + s * h * direction, steps)[0] for s in (1, -1))
        assert gradient[k] == pytest.approx((up - down) / (2 * h), abs=1e-5)


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_no_perturbation_improves_the_optimum(steps, data):
    bands = data.draw(st.integers(1, steps))
    best = optimal_toeplitz(steps, bands)
    assert np.linalg.norm(best.coefficients) == pytest.approx(1.0, abs=1e-12)
    change = data.draw(arrays(np.float64, bands, elements=st.floats(-0.2, 0.2)))
    c = np.maximum(best.coefficients + change, 0.0)
    assume(c[0] > 0.0)
    other = Strategy.toeplitz(c / np.linalg.norm(c), steps)
    assert best.squared_errors().sum() <= other.squared_errors().sum() * (1.0 + 1e-10)


def test_one_band_is_dp_sgd():
    assert optimal_toeplitz(9, 1).coefficients.tolist() == [1.0]
    assert Strategy.identity(1024).squared_errors().mean() == 1025 / 2


@pytest.mark.parametrize("bands", [0, -1, 11])
def test_impossible_numbers_of_bands_are_refused(bands):
    with pytest.raises(PrivacyError, match=f"bands: found {bands} for 10 steps"):
        optimal_toeplitz(10, bands)


@pytest.mark.slow
def test_ten_thousand_steps_are_optimised():
    assert optimal_toeplitz(10_000, 256).squared_errors().mean() < optimal_toeplitz(10_000, 64).squared_errors().mean()


# --- sensitivity ---


@pytest.mark.parametrize(
    "known, case",
    [(known, case) for known in REFERENCE["mse_sensitivity"] for case in known["sensitivity"]],
    ids=lambda x: f"n{x['n']}" if "n" in x else f"b{x['min_sep']}-k{x['max_participations']}",
)
def test_sensitivity_of_the_reference(known, case):
    strategy = Strategy.toeplitz(known["coef"], known["n"])
    found = strategy.sensitivity(case["min_sep"], case["max_participations"])
    assert found**2 == pytest.approx(case["sens_sq"], rel=1e-11)


@settings(deadline=None)
@given(banded(), separations, counts)
def test_sensitivity_is_exact_for_bands_up_to_the_separation(c, extra, participations):
    strategy = Strategy.from_matrix(c)
    separation = strategy.bands + extra - 1
    truth = brute_force(c, separation, participations)
    assert truth <= strategy.sensitivity(separation, participations) <= truth * (1.0 + 1e-11)


@settings(deadline=None)
@given(st.integers(1, 9), st.data(), separations, counts)
def test_sensitivity_is_exact_for_non_increasing_toeplitz_coefficients(steps, data, separation, participations):
    c = sorted(data.draw(st.lists(entry, min_size=1, max_size=steps)), reverse=True)
    assume(c[0] > 0.0)
    strategy = Strategy.toeplitz(c, steps)
    truth = brute_force(dense(strategy), separation, participations)
    assert truth <= strategy.sensitivity(separation, participations) <= truth * (1.0 + 1e-11)


@settings(deadline=None)
@given(banded(), separations, counts)
def test_sensitivity_is_an_upper_bound_otherwise(c, separation, participations):
    bound = Strategy.from_matrix(c).sensitivity(separation, participations)
    truth = brute_force(c, separation, participations)
    assert truth <= bound
    if participations == 1 or separation >= len(c):
        assert bound <= truth * (1.0 + 1e-11)


@settings(deadline=None)
@given(st.integers(2, 9), st.data(), separations, counts)
def test_sensitivity_of_toeplitz_coefficients_in_any_order(steps, data, separation, participations):
    c = data.draw(st.lists(entry, min_size=1, max_size=steps))
    assume(c[0] > 0.0)
    strategy = Strategy.toeplitz(c, steps)
    assert brute_force(dense(strategy), separation, participations) <= strategy.sensitivity(separation, participations)


@settings(deadline=None)
@given(banded(5), separations, counts, st.integers(0, 2**32))
def test_no_gradients_exceed_the_sensitivity(c, separation, participations, seed):
    rng = np.random.default_rng(seed)
    bound = Strategy.from_matrix(c).sensitivity(separation, participations)
    for places in admissible(len(c), separation, participations):
        g = np.zeros((len(c), 3))
        g[list(places)] = rng.normal(size=(len(places), 3))
        g /= np.maximum(1.0, np.linalg.norm(g, axis=1, keepdims=True))
        assert np.linalg.norm(c @ g) <= bound


def test_a_column_in_the_middle_can_be_the_worst():
    c = np.diag([1.0, 3.0, 1.0, 2.0])
    assert Strategy.from_matrix(c).sensitivity(2) == pytest.approx(math.sqrt(13.0))


@pytest.mark.parametrize("separation, participations", [(0, None), (1, 0)])
def test_impossible_participations_are_refused(separation, participations):
    with pytest.raises(PrivacyError, match="both are at least 1"):
        Strategy.identity(4).sensitivity(separation, participations)


# --- error ---


def errors_by_definition(c: np.ndarray) -> np.ndarray:
    return (np.linalg.solve(c.T, np.tri(len(c)).T).T ** 2).sum(axis=1)


@settings(deadline=None)
@given(banded())
def test_squared_errors_are_the_row_norms_of_a_times_the_inverse(c):
    np.testing.assert_allclose(Strategy.from_matrix(c).squared_errors(), errors_by_definition(c), rtol=1e-6)


@pytest.mark.parametrize("known", REFERENCE["mse_sensitivity"], ids=lambda k: f"n{k['n']}")
def test_errors_of_the_reference(known):
    strategy = Strategy.toeplitz(known["coef"], known["n"])
    np.testing.assert_allclose(strategy.squared_errors(), known["per_query_sq_error"], rtol=1e-12)
    normalised = strategy.column_normalised()
    np.testing.assert_allclose(normalised.column_norms, 1.0, rtol=1e-14)
    assert normalised.squared_errors().sum() == pytest.approx(known["col_normalised_frob_sq"], rel=1e-12)


# --- construction ---


@settings(deadline=None)
@given(banded())
def test_a_matrix_of_ones_own_is_kept(c):
    strategy = Strategy.from_matrix(c)
    np.testing.assert_array_equal(dense(strategy), c)
    for i in range(len(c)):
        np.testing.assert_array_equal(strategy.row(i)[: i + 1], c[i, ::-1][len(c) - 1 - i :][: strategy.bands])


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.floats(0.0, 0.3), max_size=4))
def test_the_inverse_of_a_banded_inverse_is_banded(steps, tail):
    inverse = np.append(1.0, -np.array(tail))
    strategy = Strategy.banded_inverse(inverse, steps)
    expected = dense(Strategy(np.abs(Strategy.toeplitz(np.abs(inverse), steps).columns)))
    expected = expected * np.where(np.eye(steps, dtype=bool), 1.0, -1.0)
    np.testing.assert_allclose(dense(strategy) @ expected, np.eye(steps), atol=1e-12)
    np.testing.assert_allclose(strategy.squared_errors(), errors_by_definition(dense(strategy)), rtol=1e-9)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: Strategy.from_matrix(np.ones((3, 3))), "zeros above the diagonal"),
        (lambda: Strategy.from_matrix(np.ones((3, 2))), "zeros above the diagonal"),
        (lambda: Strategy.from_matrix(np.diag([1.0, 0.0, 1.0])), "positive diagonal"),
        (lambda: Strategy.from_matrix(np.diag([1.0, math.nan])), "not finite"),
        (lambda: Strategy.toeplitz([1.0, -0.1], 3), "negative"),
        (lambda: Strategy(np.ones((3, 2))), "below the last row"),
        (lambda: Strategy.banded_inverse([1.0, 0.5], 3), "negative"),
        (lambda: Strategy.banded_inverse([0.0, -0.5], 3), "the first is positive"),
    ],
)
def test_what_is_no_strategy_is_refused(build, words):
    with pytest.raises(PrivacyError, match=words):
        build()
