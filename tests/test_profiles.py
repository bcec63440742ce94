"""Profiles against independent maximisation over the region; distributions against their curves and against KOV."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from certify.errors import PrivacyError
from privacy import profile_curves
from privacy.composition import Cost, optimal
from privacy.noise import admissible_pairs
from privacy.noise.base import AdmissiblePair, beta_with_slack
from privacy.profile_curves import cauchy_curve, laplace_curve, laplace_hockey_stick
from privacy.profiles import LossDistribution, compose_distributions, from_cost, loss_distribution


def cauchy_stick(epsilon, m, s, m2, s2):
    """Hockey stick of two Cauchy laws: the event is bounded by the roots of a quadratic; masses by the arctangent."""
    # p > e^eps q: s ((z - m2)^2 + s2^2) > e^eps s2 ((z - m)^2 + s^2)
    e = math.exp(epsilon)
    a, b, c = s - e * s2, -2 * (s * m2 - e * s2 * m), s * (m2**2 + s2**2) - e * s2 * (m**2 + s**2)
    inside = a < 0
    if a == 0 or b * b - 4 * a * c <= 0:
        return max(0.0, 1 - e) if (a > 0 or (a == 0 and c > 0)) else 0.0
    root = sorted((-b + sign * math.sqrt(b * b - 4 * a * c)) / (2 * a) for sign in (1, -1))
    mass = [stats.cauchy.cdf((root[1] - x) / y) - stats.cauchy.cdf((root[0] - x) / y) for x, y in ((m, s), (m2, s2))]
    if not inside:
        mass = [1 - v for v in mass]
    return mass[0] - e * mass[1]


@pytest.mark.parametrize("epsilon0", [0.1, 1.0, 4.0])
def test_cauchy_profile_is_the_worst_case_over_the_region(epsilon0):
    curve, rng = cauchy_curve(epsilon0), np.random.default_rng(1)
    x = np.linspace(-0.5, 1.1, 40) * epsilon0
    bound, best = curve(x), np.zeros(40)
    for pair in admissible_pairs("cauchy", epsilon0):
        for lam, share in [(0, 1), (pair.beta, 1), *zip(rng.random(20) * pair.beta, rng.random(20), strict=True)]:
            for order in (1, -1):
                laws = [(0.0, 1.0), (share * pair.a, math.exp(lam))][::order]
                found = np.array([cauchy_stick(e, *laws[0], *laws[1]) for e in x])
                assert np.all(found <= bound + 1e-11)
                best = np.maximum(best, found)
    # Attained (the pairs reach the distance epsilon0 at a corner).
    assert np.all(best >= bound * (1 - 1e-3) - 1e-9)


def test_cauchy_profile_depends_on_the_distance_alone():
    rng = np.random.default_rng(2)
    for _ in range(200):
        m, m2, s, s2 = *rng.normal(size=2), *np.exp(rng.normal(size=2))
        d = math.acosh(1 + ((m - m2) ** 2 + (s - s2) ** 2) / (2 * s * s2))
        for e in d * rng.uniform(-1, 1, 4):
            assert abs(cauchy_stick(e, m, s, m2, s2) - cauchy_curve(d)(np.array([e]))[0]) < 1e-9


def laplace_numeric(epsilon, centre, scale, centre2, scale2):
    def excess(z):
        p = math.exp(-abs(z - centre) / scale) / (2 * scale)
        q = math.exp(-abs(z - centre2) / scale2) / (2 * scale2)
        return max(p - math.exp(epsilon) * q, 0.0)

    grid = np.linspace(-80, 80, 161)
    edges = sorted({*grid, centre, centre2})
    return sum(integrate.quad(excess, a, b, limit=60)[0] for a, b in zip(edges, edges[1:], strict=False))


@pytest.mark.parametrize("wide_first", [True, False])
def test_laplace_hockey_stick_is_the_integral(wide_first):
    for a, lam in ((0.5, 0.3), (1.0, 0.05), (0.2, 1.0), (2.0, 0.4)):
        for e in (-1.2, -0.4, 0.0, 0.3, 0.9, 1.5):
            wide, narrow = (0.0, math.exp(lam)), (a, 1.0)
            laws = (wide, narrow) if wide_first else (narrow, wide)
            exact = laplace_numeric(e, *laws[0], *laws[1])
            assert abs(laplace_hockey_stick(e, a, lam, wide_first) - exact) < 1e-7
    for e in (-0.7, -0.2, 0.0, 0.2, 0.7):  # no dilation
        plain = max(1 - math.exp((e - 0.5) / 2), 0.0) if e > -0.5 else 1 - math.exp(e)
        assert abs(laplace_hockey_stick(e, 0.5, 0.0, wide_first) - plain) < 1e-14


CASES = [(0.5, 1e-7, 0.02), (1.0, 1e-5, 0.041), (3.0, 1e-3, 0.3), (0.1, 1e-6, 0.0)]


@pytest.mark.parametrize(("epsilon", "delta", "beta"), CASES)
def test_laplace_profile_dominates_the_region(epsilon, delta, beta):
    (pair,) = admissible_pairs("laplace", epsilon, delta, betas=[beta])
    curve, x = laplace_curve(pair), np.linspace(0, 1.5 * epsilon, 61)
    bound, best = curve(x), np.zeros(61)
    for lam in beta_with_slack(beta) * np.linspace(0, 1, 41):
        for share in (1.0, 0.95, 0.7, 0.3, 0.0):
            for wide_first in (True, False):
                best = np.maximum(best, laplace_hockey_stick(x, share * pair.a, float(lam), wide_first))
    assert np.all(best <= bound)
    assert np.all(best >= bound * 0.98 - 1e-11)
    assert abs(curve(np.array([epsilon]))[0] / delta - 1) < 0.02 or beta == 0.0


def test_profile_asks_for_both_directions(monkeypatch):
    # Wide first was the larger one wherever we looked (epsilon >= 0), but that is not proven: both are taken.
    for direction in (True, False):
        one = lambda e, a, lam, wide, d=direction: 0.3 * (wide == d)  # noqa: E731
        monkeypatch.setattr(profile_curves, "laplace_hockey_stick", one)
        assert laplace_curve(AdmissiblePair(0.5, 0.1))(np.array([2.0]))[0] >= 0.3


def test_one_dilation_or_one_pair_is_not_enough():
    # No dilation is the worst case for small epsilon, the largest one in the tail; and with a free beta the curves of
    # two pairs cross.
    (pair,) = admissible_pairs("laplace", 1.0, 1e-5, betas=[0.041])
    wide = laplace_hockey_stick(np.array([0.0, 1.0]), pair.a, 0.041, True)
    plain = laplace_hockey_stick(np.array([0.0, 1.0]), pair.a, 0.0, True)
    assert plain[0] > wide[0] and wide[1] > plain[1]
    pairs = admissible_pairs("laplace", 1.0, 1e-5)
    curves = [laplace_curve(p)(np.array([0.2, 1.0])) for p in (pairs[1], pairs[6])]
    both = laplace_curve([pairs[1], pairs[6]])(np.array([0.2, 1.0]))
    assert curves[0][0] > curves[1][0] and curves[0][1] < curves[1][1]
    assert np.allclose(both, np.maximum(*curves), rtol=0, atol=1e-14)


CURVES = [
    (cauchy_curve(1.0), 2e-3),
    (cauchy_curve(0.05), 1e-4),
    (cauchy_curve(12.0), 1e-2),
    (laplace_curve(admissible_pairs("laplace", 0.5, 1e-7, betas=[0.02])), 2e-3),
    (laplace_curve(admissible_pairs("laplace", 3.0, 1e-3, betas=[0.0, 0.3])), 1e-2),
]


@pytest.mark.parametrize(("curve", "step"), CURVES)
def test_distribution_dominates_the_curve(curve, step):
    d = loss_distribution(curve, step)
    x = np.concatenate([np.linspace(0, len(d.mass) * step / 2, 300), np.geomspace(1e-5, 1, 50)])
    assert np.all(d.delta(x) >= curve(x))
    assert np.all(d.delta(x) <= curve(x) * 1.05 + 3 * step * np.exp(-x) + 1e-9)
    assert 1 <= d.mass.sum() + d.infinite <= 1 + 1e-8
    # Below zero by symmetry of the two directions.
    y = x[(x > 0) & (x < 5)]
    assert np.all(d.delta(-y) >= 1 - np.exp(-y) * (1 - curve(y)) - 1e-15)


def test_distribution_dominates_the_profile():
    """An upper bound that is not convex: every profile below it lies below its convex hull, found here by brute
    force."""
    rough = lambda x: np.where(np.asarray(x) < 0.305, 0.2, np.where(np.asarray(x) < 0.705, 0.05, 0.0))  # noqa: E731
    d = loss_distribution(rough, 1e-2)
    x = np.arange(1, 72) * 1e-2
    t, y = np.exp(np.r_[-x[::-1], 0.0, x]), np.r_[(1 - np.exp(-x) * (1 - rough(x)))[::-1], 0.2, rough(x)]
    t, y = np.r_[0.0, t], np.r_[1.0, y]
    hull = [
        min(
            y[i] + (y[k] - y[i]) * (t[j] - t[i]) / (t[k] - t[i]) if k > i else y[j]
            for i in range(j + 1)
            for k in range(j, len(t))
        )
        for j in range(1, len(t))
    ]
    assert np.all(d.delta(np.log(t[1:])) >= np.array(hull) - 1e-15)
    convex = lambda x: np.maximum(0.2 - 0.1 * np.expm1(np.asarray(x)), 0.0)  # noqa: E731
    d = loss_distribution(convex, 1e-2)
    assert np.all(d.delta(np.linspace(0, 2, 400)) >= convex(np.linspace(0, 2, 400)))


def test_composition_dominates():
    # Randomised response on the grid is exact: compare with the closed form.
    for epsilon, delta, count in ((0.5, 1e-7, 16), (0.1, 0.0, 200), (2.0, 1e-4, 3)):
        d = from_cost(Cost(epsilon, delta), epsilon / 16).repeated(count)
        exact = optimal([Cost(epsilon, delta)] * count, 1e-3).epsilon
        assert exact * (1 - 1e-9) <= d.epsilon(1e-3) <= exact * (1 + 1e-6)
    # Two-fold composition of the Laplace profile against the two-dimensional integral of one worst pair.
    (pair,) = admissible_pairs("laplace", 1.0, 1e-5, betas=[0.1])
    d = loss_distribution(laplace_curve(pair), 5e-3)
    twice = d.then(d)
    z = np.linspace(-40, 40, 2401)
    for lam in (0.0, 0.05, 0.1):
        s = math.exp(lam)
        for sign in (1, -1):
            p, q = np.exp(-np.abs(z) / s) / (2 * s), np.exp(-np.abs(z - pair.a)) / 2
            p, q = (p, q) if sign == 1 else (q, p)
            pp, qq = np.outer(p, p), np.outer(q, q)
            for e in (0.0, 0.5, 1.0, 1.5):
                found = np.maximum(pp - math.exp(e) * qq, 0).sum() * (z[1] - z[0]) ** 2
                assert found <= twice.delta(e)[0] * (1 + 2e-3) + 1e-7


def test_known_figures():
    # Laplace at (0.5, 1e-7), beta = 0.02, total 1e-5: 1.29, 4.33, 10.8 for 4, 16, 64 releases.
    (pair,) = admissible_pairs("laplace", 0.5, 1e-7, betas=[0.02])
    d = loss_distribution(laplace_curve(pair), 5e-3)
    for count, figure in ((4, 1.29), (16, 4.33), (64, 10.8)):
        assert abs(d.repeated(count).epsilon(1e-5) / figure - 1) < 0.02
    # Cauchy at epsilon 0.5: the exact profile is far below randomised response after 64 releases.
    d = loss_distribution(cauchy_curve(0.5), 5e-3)
    assert d.repeated(64).epsilon(1e-5) < 0.75 * optimal([Cost(0.5)] * 64, 1e-5).epsilon


def test_groups_and_mixtures_compose():
    costs = [Cost(0.1), Cost(0.3), Cost(0.1), Cost(0.3), Cost(0.1)]
    whole = compose_distributions([from_cost(c, 0.01) for c in costs])
    one = from_cost(costs[0], 0.01)
    for c in costs[1:]:
        one = one.then(from_cost(c, 0.01))
    x = np.linspace(0, 0.9, 30)
    assert np.allclose(whole.delta(x), one.delta(x), rtol=1e-9, atol=1e-14)


def test_cuts_move_mass_upward():
    mass = np.full(50, 1e-19)
    mass[20:30] = 3e-18
    mass[35] = 1e-31
    d = LossDistribution(0.1, -25, mass, 0.0).then(LossDistribution(0.1, 0, np.array([1.0]), 0.0))
    assert d.mass.sum() + d.infinite >= mass.sum() * (1 - 1e-15) and len(d.mass) < 50
    dust = LossDistribution(0.1, 0, np.full(9, 1e-33), 0.0).then(LossDistribution(0.1, 0, np.array([1.0]), 0.0))
    assert dust.mass.sum() + dust.infinite >= 9e-33 * (1 - 1e-15)
    full = LossDistribution(0.1, -25, mass, 0.0)
    x = np.linspace(-3, 3, 100)
    assert np.all(d.delta(x) >= full.delta(x) * (1 - 1e-13))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: laplace_curve([]), "pairs"),
        (lambda: from_cost(Cost(1.0), 1e-9), "step"),
        (lambda: loss_distribution(cauchy_curve(50.0), 1e-6), "step"),
        (lambda: compose_distributions([]), "empty"),
        (lambda: from_cost(Cost(1.0), 0.1).then(from_cost(Cost(1.0), 0.2)), "step"),
        (lambda: from_cost(Cost(1.0), 0.1).then(from_cost(Cost(1.0, adjacency="zero-out"), 0.1)), "adjacency"),
        (lambda: from_cost(Cost(1.0, 1e-3), 0.1).epsilon(1e-4), "delta"),
        (lambda: from_cost(Cost(1.0), 0.1).repeated(0), "count"),
    ],
)
def test_mistakes_are_refused(run, message):
    with pytest.raises(PrivacyError, match=message):
        run()


def test_pairs_may_be_a_single_pair():
    pair = AdmissiblePair(0.5, 0.01)
    x = np.linspace(0, 1, 5)
    assert np.array_equal(laplace_curve(pair)(x), laplace_curve([pair])(x))
