"""Every closed form against an independent maximisation of the privacy loss over its region."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_privacy_oracle import loss_over_region

from certify.errors import PrivacyError
from privacy.noise import AdmissiblePair, admissible_pairs, noise_scale, split_budget
from privacy.smooth import TAU

EPSILONS = (1e-3, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_cauchy_pairs_are_exactly_epsilon_dp(epsilon):
    betas = [0.01 * epsilon, epsilon / 6, epsilon / 2, 0.9 * epsilon]
    for pair in (*admissible_pairs("cauchy", epsilon), *admissible_pairs("cauchy", epsilon, betas=betas)):
        loss = loss_over_region(pair.a, pair.beta, "cauchy", epsilon)
        assert 0.999 * epsilon < loss <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_cauchy_check_catches_a_scale_that_is_too_small(epsilon):
    for pair in admissible_pairs("cauchy", epsilon):
        assert loss_over_region(1.5 * pair.a, pair.beta, "cauchy", epsilon) > 1.01 * epsilon


@pytest.mark.parametrize("epsilon", (1e-3, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0))
@pytest.mark.parametrize("delta", (1e-6, 1e-3, 0.2))
def test_laplace_pairs_are_exactly_epsilon_delta_dp(epsilon, delta):
    for pair in admissible_pairs("laplace", epsilon, delta):
        assert loss_over_region(pair.a, pair.beta, "laplace", epsilon, steps=9) <= delta * (1 + 1e-6) + 1e-14


@pytest.mark.parametrize("epsilon", (0.1, 1.0, 5.0, 20.0))
@pytest.mark.parametrize("delta", (1e-6, 1e-3))
def test_laplace_check_catches_a_scale_that_is_too_small(epsilon, delta):
    for pair in admissible_pairs("laplace", epsilon, delta):
        assert loss_over_region(1.5 * pair.a, pair.beta, "laplace", epsilon, steps=9) > 1.05 * delta


def test_laplace_pairs_spend_all_of_delta_at_the_corner():
    # The textbook beta at a = 1/1.383: known value 1.383. The pure caps do not bind there.
    delta = 1e-5
    (pair,) = admissible_pairs("laplace", 1.0, delta, betas=[1 / (2 * math.log(2 / delta))])
    assert abs(1 / pair.a - 1.383) < 1e-3
    spent = loss_over_region(pair.a, pair.beta, "laplace", 1.0)
    assert 0.999 * delta < spent <= delta * (1 + 1e-9)


def test_the_textbook_laplace_is_wrong_for_large_epsilon():
    delta = 1e-5
    beta = 20.0 / (2 * math.log(2 / delta))
    assert loss_over_region(10.0, beta, "laplace", 20.0, steps=9) > 5 * delta
    (pair,) = admissible_pairs("laplace", 20.0, delta, betas=[beta])
    assert pair.a < 10.0 and loss_over_region(pair.a, beta, "laplace", 20.0, steps=9) <= delta * (1 + 1e-6)


def test_pairs_are_rounded_down():
    mpmath.mp.prec = 300
    slack = 2 * mpmath.log1p(mpmath.mpf(TAU))
    for epsilon in (1e-6, 1e-3, 0.3, 1.0, 7.0, 50.0, 100.0):
        e = mpmath.mpf(epsilon)
        for pair in admissible_pairs("cauchy", epsilon):
            b = mpmath.mpf(pair.beta) + slack
            largest = 2 * (mpmath.cosh(e) - 1), 2 * mpmath.exp(b) * (mpmath.cosh(e) - mpmath.cosh(b))
            exact = mpmath.sqrt(min(largest))
            assert exact * (1 - mpmath.mpf(2) ** -40) < pair.a <= exact
        for delta in (1e-12, 1e-5, 0.3):
            for pair in admissible_pairs("laplace", epsilon, delta):
                a, b = mpmath.mpf(pair.a), mpmath.mpf(pair.beta) + slack
                k = mpmath.expm1(b)
                spent = -mpmath.expm1(-b) * mpmath.exp(-(e + b) / k) * mpmath.cosh(a / k)
                assert spent <= delta and a <= e and b + a * mpmath.exp(-b) <= e


def test_known_figures():
    for epsilon, g in ((0.1, 11.26), (1.0, 0.960), (5.0, 0.0826), (10.0, 0.0067)):
        (pair,) = admissible_pairs("cauchy", epsilon, betas=[epsilon / 2])
        assert abs(1 / pair.a / g - 1) < 6e-3
    free = admissible_pairs("cauchy", 1.0)[0]
    assert abs(free.beta - math.log(2 * math.cosh(1) - 1)) < 1e-15 and abs(free.beta - 0.735) < 5e-4
    assert abs(1 / free.a - 0.9595) < 1e-4
    for epsilon, share in ((0.1, 0.10), (0.5, 0.45), (1.0, 0.74), (2.0, 0.94)):
        assert abs(admissible_pairs("cauchy", epsilon)[0].beta / epsilon - share) < 6e-3


def test_pairs_exist_for_every_usable_epsilon():
    for epsilon in np.geomspace(1e-8, 100, 60):
        for family, delta in (("cauchy", 0.0), ("laplace", 1e-9), ("laplace", 0.5)):
            pairs = admissible_pairs(family, epsilon, delta)
            assert all(0 < p.a < math.inf and 0 <= p.beta < epsilon for p in pairs)
    # Laplace includes the plain mechanism: beta = 0, S = G, scale G / epsilon.
    plain = admissible_pairs("laplace", 1.0, 1e-6)[0]
    assert plain.beta == 0.0 and 0.999999 < plain.a <= 1.0


def test_free_choice_of_beta_is_private():
    # Random smooth tables, the minimum over the list, exact losses on all neighbours of a path.
    from test_privacy_oracle import cauchy_epsilon, laplace_delta

    from privacy.smooth import cross_ranges, smooth_bound

    rng = np.random.default_rng(9)
    for _ in range(40):
        f = np.cumsum(rng.choice([0.0, 0.0, 0.25, -2.0], size=8))
        lower = np.array([[f[max(0, i - k) : i + k + 1].min() for i in range(8)] for k in range(8)])
        upper = np.array([[f[max(0, i - k) : i + k + 1].max() for i in range(8)] for k in range(8)])
        cross, ceiling = cross_ranges(lower, upper), np.ptp(f) + 1
        for family, epsilon, delta in (("cauchy", 0.5, 0.0), ("cauchy", 3.0, 0.0), ("laplace", 1.0, 1e-2)):
            pairs = admissible_pairs(family, epsilon, delta)
            scale = noise_scale({p.beta: smooth_bound(cross, ceiling, p.beta) for p in pairs}, pairs)
            for i in range(7):
                one, two = (f[i], scale[i]), (f[i + 1], scale[i + 1])
                if family == "cauchy":
                    assert cauchy_epsilon(*one, *two) <= epsilon * (1 + 1e-9)
                else:
                    assert laplace_delta(epsilon, *one, *two) <= delta * (1 + 1e-9)
                    assert laplace_delta(epsilon, *two, *one) <= delta * (1 + 1e-9)


def test_noise_scale_is_the_rounded_up_minimum():
    pairs = (AdmissiblePair(0.3, 0.1), AdmissiblePair(0.7, 0.2))
    scale = noise_scale({0.1: np.array([1.0, 5.0]), 0.2: np.array([3.0, 2.0])}, pairs)
    exact = [Fraction(1.0) / Fraction(0.3), Fraction(2.0) / Fraction(0.7)]
    assert all(e <= Fraction(float(s)) <= e * (1 + Fraction(2) ** -51) for e, s in zip(exact, scale, strict=True))
    with pytest.raises(PrivacyError, match="every beta"):
        noise_scale({0.1: np.array([1.0])}, pairs)


@given(st.floats(1e-6, 100.0), st.integers(1, 100000))
def test_shares_never_exceed_the_total(total, parts):
    share = split_budget(total, parts)
    assert Fraction(share) * parts <= Fraction(total)
    assert Fraction(math.nextafter(share, math.inf)) * parts > Fraction(total)


@pytest.mark.parametrize(
    ("family", "epsilon", "delta", "betas", "message"),
    [
        ("gauss", 1.0, 0.0, None, "family"),
        ("cauchy", 1.0, 1e-5, None, "delta"),
        ("laplace", 1.0, 0.0, None, "delta"),
        ("laplace", 1.0, 1.0, None, "delta"),
        ("cauchy", 0.0, 0.0, None, "epsilon"),
        ("cauchy", math.nan, 0.0, None, "epsilon"),
        ("cauchy", 101.0, 0.0, None, "epsilon"),
        ("cauchy", 1.0, 0.0, [], "betas"),
        ("cauchy", 1.0, 0.0, [1.0], "beta"),
        ("laplace", 1.0, 1e-5, [0.5], "beta"),
    ],
)
def test_inadmissible_budgets_are_refused(family, epsilon, delta, betas, message):
    with pytest.raises(PrivacyError, match=message):
        admissible_pairs(family, epsilon, delta, betas=betas)
