"""Laplace noise: the hockey stick by quadrature in one and p dimensions, gamma tails, planted mistakes."""

import math

import mpmath
import numpy as np
import pytest
from noise_oracle import laplace_joint_delta, laplace_plane_delta
from scipy import integrate, special, stats
from test_privacy_oracle import laplace_delta, loss_over_region

from certify.errors import PrivacyError
from privacy.noise import admissible_pairs
from privacy.noise.base import beta_with_slack
from privacy.noise.laplace import (
    LaplaceNoise,
    dilation_costs,
    log_lower_tail,
    log_upper_tail,
    upper_quantile,
)
from privacy.sampling import SecureBits

ERROR_RATE = 1e-6
DELTA = 1e-5


def worst_delta(epsilon, a, beta, dim):
    """Both directions at the corners of the region, the shift along one axis."""
    corners = [(a, beta, True), (a, beta, False), (a, 0.3 * beta, False), (0.0, beta, True)]
    return max(laplace_joint_delta(epsilon, shift, lam, dim, first) for shift, lam, first in corners)


# The oracle


def test_the_joint_oracle_agrees_with_the_one_dimensional_one():
    for epsilon, a, lam in [(0.5, 0.3, 0.1), (1.0, 0.7, 0.05), (0.2, 0.4, 0.3)]:
        for wide_first in (True, False):
            one, two = (math.exp(lam), 1.0) if wide_first else (1.0, math.exp(lam))
            exact = laplace_delta(epsilon, 0.0, one, a, two)
            assert abs(laplace_joint_delta(epsilon, a, lam, 1, wide_first) - exact) < 1e-9


def test_the_joint_oracle_agrees_with_a_plane_grid():
    for epsilon, a, lam in [(0.5, 0.3, 0.1), (0.3, 0.3, 0.25), (0.2, 0.3, 0.2)]:
        for wide_first in (True, False):
            grid = laplace_plane_delta(epsilon, (a, 0.0), lam, wide_first)
            assert abs(laplace_joint_delta(epsilon, a, lam, 2, wide_first) - grid) < 0.01 * grid + 1e-9


def test_the_joint_oracle_agrees_with_a_sample():
    rng, epsilon, a, lam, dim, n = np.random.default_rng(0), 0.3, 0.3, 0.2, 5, 400_000
    for wide_first in (True, False):
        scale, other = (math.exp(lam), 1.0) if wide_first else (1.0, math.exp(lam))
        z = rng.laplace(size=(n, dim)) * scale
        shift = np.eye(dim)[0] * a
        loss = dim * math.log(other / scale) - np.abs(z).sum(1) / scale + np.abs(z - shift).sum(1) / other
        values = np.maximum(0.0, -np.expm1(epsilon - loss))
        exact = laplace_joint_delta(epsilon, a, lam, dim, wide_first)
        assert abs(values.mean() - exact) < 6 * values.std() / math.sqrt(n) + 1e-12


# One dimension (more in test_privacy_calibration.py)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 20.0])
def test_laplace_pairs_are_exactly_epsilon_delta_dp_in_one_dimension(epsilon):
    for delta in (1e-6, 1e-3):
        for pair in admissible_pairs("laplace", epsilon, delta)[::3]:
            assert loss_over_region(pair.a, pair.beta, "laplace", epsilon, steps=5) <= delta * (1 + 1e-6) + 1e-14
            assert loss_over_region(1.5 * pair.a, pair.beta, "laplace", epsilon, steps=3) > 1.05 * delta


# p dimensions


@pytest.mark.parametrize("dim", [2, 9, 45, 300])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_laplace_pairs_are_epsilon_delta_dp_in_p_dimensions(dim, epsilon, delta):
    for pair in admissible_pairs("laplace", epsilon, delta, dim)[1::3]:
        spent = worst_delta(epsilon, pair.a, pair.beta, dim)
        assert spent <= delta * (1 + 1e-6) + 1e-13
        # A scale that is 1.5 times too small is caught.
        assert worst_delta(epsilon, 1.5 * pair.a, pair.beta, dim) > 1.05 * delta


@pytest.mark.parametrize("split", [0.0, 0.25, 0.5])
def test_no_split_of_the_shift_is_worse(split):
    epsilon, delta = 1.0, 1e-3
    for pair in admissible_pairs("laplace", epsilon, delta, 2)[2::3]:
        for wide_first in (True, False):
            for lam in (pair.beta / 2, pair.beta):
                shift = (pair.a * (1 - split), pair.a * split)
                assert laplace_plane_delta(epsilon, shift, lam, wide_first) <= delta * 1.01


@pytest.mark.parametrize("dim", [9, 45])
def test_one_dimensional_constants_in_p_dimensions_are_caught(dim):
    # AUDIT A9: the pure dilation alone breaks the one-dimensional claim.
    beta = 1.0 / (2 * math.log(2 / DELTA))
    assert worst_delta(1.0, 0.5, beta, dim) > 2 * DELTA
    ours = admissible_pairs("laplace", 1.0, DELTA)[-1]
    assert worst_delta(1.0, ours.a, ours.beta, dim) > 10 * DELTA


def test_beta_zero_is_the_plain_mechanism():
    for dim in (1, 9, 300):
        pair = admissible_pairs("laplace", 1.0, DELTA, dim)[0]
        assert pair.beta == 0.0 and 1.0 - 1e-6 < pair.a <= 1.0
    assert LaplaceNoise().largest_a(1.0, DELTA, 0.5, 45) == 0.0


@pytest.mark.parametrize("dim", [2, 9, 45, 300])
def test_dilation_is_exact(dim):
    # The costs against the tails of scipy, and one part in a thousand less is not enough.
    for delta in (1e-3, 1e-6, 0.2):
        for beta in (0.3 / dim, 0.02 / dim, 0.5 / math.sqrt(dim)):

            def wide(w, beta=beta):
                u = (w + dim * beta) / math.expm1(beta)
                return special.gammaincc(dim, u) - math.exp(w) * special.gammaincc(dim, u * math.exp(beta))

            def narrow(n, beta=beta):
                u = max(0.0, (dim * beta - n) / -math.expm1(-beta))
                return special.gammainc(dim, u) - math.exp(n) * special.gammainc(dim, u * math.exp(-beta))

            for cost, spent in zip(dilation_costs(delta, beta, dim), (wide, narrow), strict=True):
                assert spent(cost) <= delta * (1 + 1e-9)
                assert cost == 0.0 or spent(0.999 * cost) > delta


def test_dilation_delta_grows_with_the_dilation():
    # The argument that the corner decides, both directions, for the pure dilation.
    for dim in (2, 9, 45):
        for wide_first in (True, False):
            lams = np.linspace(0.001, 0.6, 40)
            spent = [laplace_joint_delta(0.1, 0.0, lam, dim, wide_first) for lam in lams]
            assert np.all(np.diff(spent) >= -1e-10)


def test_the_dearer_direction_decides(monkeypatch):
    # Narrow against wide was never the dearer one where we looked; it is counted all the same.
    from privacy.noise import laplace

    monkeypatch.setattr(laplace, "dilation_costs", lambda delta, beta, dim: (0.1, 0.6))
    assert abs(LaplaceNoise().largest_a(1.0, DELTA, 0.1, 9) - 0.4) < 1e-9
    assert abs(LaplaceNoise().largest_a(1.0, DELTA, 0.01, 9) - 0.9) < 1e-9  # 9 beta + a e^-beta <= 1: pure
    monkeypatch.setattr(laplace, "dilation_costs", lambda delta, beta, dim: (0.3, 0.0))
    assert abs(LaplaceNoise().largest_a(1.0, DELTA, 0.1, 9) - 0.7) < 1e-9


def test_published_tail_rule_is_looser():
    # PRIVACY_FACTS 1.3: at scale 2/epsilon the centred beta is this many times the Gamma-tail one.
    for dim, factor in ((9, 1.93), (18, 2.25), (45, 2.91), (300, 5.9)):
        published = 1.0 / (2 * stats.gamma.isf(DELTA / 2, dim))
        low, high = published, 20 * published
        for _ in range(50):
            middle = (low + high) / 2
            inside = LaplaceNoise().largest_a(1.0, DELTA, middle, dim) >= 0.5
            low, high = (middle, high) if inside else (low, middle)
        assert abs(low / published / factor - 1) < 0.01


def test_known_figures():
    # PRIVACY_FACTS 1.3, table (all S_j = 1, beta = epsilon / 4p): 15.1, 24.0, 52.1, 314.
    for dim, mean in ((9, 15.1), (18, 24.0), (45, 52.1), (300, 314.0)):
        (pair,) = admissible_pairs("laplace", 1.0, DELTA, dim, [1 / (4 * dim)])
        assert abs(dim / pair.a / mean - 1) < 6e-3


# Tails of the gamma law


def test_gamma_tails_are_bounded_from_both_sides():
    mpmath.mp.prec = 200
    for dim in (1, 2, 9, 45, 300):
        for x in (0.05 * dim, 0.5 * dim, dim, 1.3 * dim + 1, 3 * dim + 20):
            low, high = log_upper_tail(x, dim)
            exact = mpmath.log(mpmath.gammainc(dim, mpmath.mpf(x), regularized=True))
            assert low <= exact <= high and high - low < 1e-8
            low, high = log_lower_tail(x, dim)
            exact = mpmath.log(mpmath.gammainc(dim, 0, mpmath.mpf(x), regularized=True))
            assert low <= exact <= high and high - low < 1e-8


def test_quantiles_are_rounded_outward():
    for dim in (1, 2, 9, 45, 300, 5000):
        for delta in (1e-12, 1e-5, 0.3, 0.9):
            high = upper_quantile(delta, dim)
            assert dim <= high and special.gammaincc(dim, high) <= delta * (1 + 1e-9)
            assert high == dim or special.gammaincc(dim, high * (1 - 1e-6)) >= delta * (1 - 1e-4)


def test_pairs_are_rounded_down_in_p_dimensions():
    mpmath.mp.prec = 200
    for epsilon in (0.1, 1.0, 20.0):
        for delta in (1e-9, 1e-3):
            for dim in (2, 45):
                for pair in admissible_pairs("laplace", epsilon, delta, dim)[1:]:
                    b, a = mpmath.mpf(beta_with_slack(pair.beta)), mpmath.mpf(pair.a)
                    w = epsilon - a
                    u = (w + dim * b) / mpmath.expm1(b)
                    first, second = (mpmath.gammainc(dim, x, regularized=True) for x in (u, u * mpmath.exp(b)))
                    assert first - mpmath.exp(w) * second <= delta
                    u = max(0, (dim * b - w) / -mpmath.expm1(-b))
                    first, second = (mpmath.gammainc(dim, 0, x, regularized=True) for x in (u, u * mpmath.exp(-b)))
                    assert first - mpmath.exp(w) * second <= delta or dim * b + a * mpmath.exp(-b) <= epsilon


@pytest.mark.parametrize(("delta", "dim"), [(0.0, 9), (1.0, 9), (-1e-5, 1), (DELTA, 0)])
def test_inadmissible_budgets_are_refused(delta, dim):
    with pytest.raises(PrivacyError, match="delta|dim"):
        admissible_pairs("laplace", 1.0, delta, dim)


def test_laplace_vector_has_independent_standard_coordinates():
    bits, n = SecureBits(), 3000
    z = np.empty((n, 3))
    for row in z:
        noise = LaplaceNoise().draw(3, bits)
        assert noise.dim == 3
        for i in range(3):
            p, q, _, _ = noise.interval(i)
            row[i] = p / q
    for column in z.T:
        assert stats.kstest(column, "laplace").pvalue > ERROR_RATE
    assert stats.kstest(np.abs(z).sum(1), stats.gamma(3).cdf).pvalue > ERROR_RATE
    mean, _ = integrate.quad(lambda x: 2 * x * 0.5 * math.exp(-x), 0, 60)
    assert abs(LaplaceNoise().typical(3) - mean) < 1e-9
    assert abs(math.exp(-LaplaceNoise().tail(3, 0.95)) - 0.05) < 1e-12
