"""The curve of every noise family against independent hockey sticks over the region, both directions.

Cells of the line with their exact masses under both laws give a LOWER bound of a hockey stick (data processing), close
to it when the cells are narrow: where a curve is below, the curve is wrong, without any tolerance for quadrature.
"""

import math

import mpmath
import numpy as np
import pytest
from noise_oracle import laplace_joint_delta, laplace_plane_delta
from scipy import stats

from certify.errors import PrivacyError
from privacy import noise
from privacy.composition import Cost, optimal
from privacy.noise import admissible_pairs, gaussian, make_family
from privacy.noise.base import beta_with_slack
from privacy.noise.bun_steinke import epsilon_of_rho
from privacy.profile_curves import (
    concentrated_curve,
    dilation_curve,
    normal_curve,
    normal_hockey_stick,
    power_curve,
    power_hockey_stick,
    student_curve,
    student_hockey_stick,
)
from privacy.profiles import compose_distributions, worst_case

ROUNDING = 1e-13
EDGES = np.concatenate([-np.geomspace(1e7, 1e-4, 4000), [0.0], np.geomspace(1e-4, 1e7, 4000)])


class Power:
    """`(1 + |z|)^-(1 + q)`."""

    def __init__(self, q):
        self.q = q

    def cdf(self, z):
        return 0.5 * (1 + np.abs(np.minimum(z, 0))) ** -self.q

    def sf(self, z):
        return self.cdf(-z)


def both_tails(law):
    """Masses of the cells between sorted edges, without cancellation in either tail."""

    def masses(edges):
        low, high = law.cdf(edges), law.sf(edges)
        if isinstance(law, Power):
            low, high = np.where(edges <= 0, low, 1 - high), np.where(edges >= 0, high, 1 - low)
        inner = np.where(edges[1:] <= 0, np.diff(low), -np.diff(high))
        return np.concatenate([[low[0]], inner, [high[-1]]])

    return masses


def cells_stick(law, epsilon, a, lam, wide_first):
    """Lower bound, for an array of epsilon."""
    s, t = (math.exp(lam), 1.0) if wide_first else (1.0, math.exp(lam))
    edges = np.unique(np.concatenate([EDGES, EDGES + a, np.linspace(-a, 2 * a, 2001)]))
    masses = both_tails(law)
    p, q = masses(edges / s), masses((edges - a) / t)
    return np.array([np.maximum(p - math.exp(e) * q, 0.0).sum() for e in epsilon])


STICKS = [
    (Power(4), lambda e, a, lam, wide: power_hockey_stick(e, a, lam, wide, 4)),
    (Power(9), lambda e, a, lam, wide: power_hockey_stick(e, a, lam, wide, 9)),
    (stats.t(3), lambda e, a, lam, wide: student_hockey_stick(e, a, lam, wide, 3)),
    (stats.t(8), lambda e, a, lam, wide: student_hockey_stick(e, a, lam, wide, 8)),
    (stats.norm, normal_hockey_stick),
]


@pytest.mark.parametrize("wide_first", [True, False])
@pytest.mark.parametrize(("law", "stick"), STICKS)
def test_hockey_sticks_are_exact(law, stick, wide_first):
    e = np.array([-0.9, -0.3, 0.0, 0.05, 0.2, 0.5, 1.1])
    for a, lam in ((0.3, 0.0), (0.3, 0.05), (1.0, 0.3), (0.05, 0.4), (2.0, 1e-5)):
        found, least = stick(e, a, lam, wide_first), cells_stick(law, e, a, lam, wide_first)
        assert np.all(found >= least - ROUNDING)
        assert np.all(found <= least + 5e-5)


CURVES = [
    ("l1-power", 0.7, 0.0, lambda pair: power_curve(pair, 4), Power(4)),
    ("student", 1.0, 0.0, lambda pair: student_curve(pair, 3), stats.t(3)),
    ("gaussian", 1.0, 1e-5, normal_curve, stats.norm),
]


@pytest.mark.parametrize(("name", "epsilon", "delta", "curve", "law"), CURVES)
def test_profiles_dominate_the_region(name, epsilon, delta, curve, law):
    """Every shift, every dilation, both directions; and the curve is not far above."""
    x = np.linspace(0, 1.2 * epsilon, 25)
    for pair in admissible_pairs(name, epsilon, delta)[1:4:2]:
        bound, best = curve(pair)(x), np.zeros(25)
        for lam in beta_with_slack(pair.beta) * np.array([0.0, 0.3, 0.7, 1.0]):
            for share in (1.0, 0.8, 0.3):
                for wide_first in (True, False):
                    best = np.maximum(best, cells_stick(law, x, share * pair.a, float(lam), wide_first))
        assert np.all(best <= bound + ROUNDING)
        assert np.all(bound <= 1.03 * best + 1e-4)


def test_student_masses_agree_with_mpmath():
    """The margin of the Student curve covers scipy's distribution function."""
    from scipy.special import stdtr

    for nu in (2, 3, 8, 64):
        for z in (0.0, 0.3, -1.0, 2.5, -30.0, 1e4):
            x = mpmath.mpf(nu) / (nu + mpmath.mpf(z) ** 2)
            tail = mpmath.betainc(nu / mpmath.mpf(2), 0.5, 0, x, regularized=True) / 2
            assert abs(stdtr(nu, z) - float(tail if z < 0 else 1 - tail)) < 2e-14


def test_dilation_profile_dominates_every_smaller_dilation():
    x, edges = np.linspace(0, 1.5, 31), np.concatenate([[0.0], np.geomspace(1e-6, 400, 20000)])
    for shape, mu in ((1.0, 0.2), (8.0, 0.1), (22.0, 0.06), (0.5, 0.3), (150.0, 1e-3)):
        bound, worst = dilation_curve(shape, mu)(x), np.zeros(31)
        for lam in (0.0, 0.4 * mu, mu):
            near = np.append(stats.gamma(shape).cdf(edges), 1.0)
            far = np.append(stats.gamma(shape).cdf(edges * math.exp(-lam)), 1.0)
            near, far = np.diff(near), np.diff(far)
            for p, q in ((near, far), (far, near)):
                worst = np.maximum(worst, [np.maximum(p - math.exp(e) * q, 0).sum() for e in x])
        assert np.all(worst <= bound + ROUNDING)
        assert np.all(bound <= worst * 1.001 + 1e-4)


def test_narrow_first_dilation_is_exact(monkeypatch):
    """It was below the other direction wherever we looked, so it is tested alone: the wide tails are set to zero."""
    from scipy import special

    monkeypatch.setattr(special, "gammaincc", lambda shape, x: np.zeros(np.shape(x)))
    x, edges = np.linspace(0, 0.4, 9), np.concatenate([[0.0], np.geomspace(1e-6, 400, 20000)])
    near = np.diff(np.append(stats.gamma(8).cdf(edges), 1.0))
    far = np.diff(np.append(stats.gamma(8).cdf(edges * math.exp(-0.1)), 1.0))
    exact = np.array([np.maximum(near - math.exp(e) * far, 0).sum() for e in x])
    found = dilation_curve(8, 0.1)(x)
    assert np.all(exact <= found + ROUNDING) and np.all(found <= exact + 1e-4) and exact[0] > 0.05


def test_several_betas_are_the_maximum():
    """Beta is chosen on the data: the distribution lies above that of every pair alone."""
    for name in ("laplace", "gaussian"):
        pairs = admissible_pairs(name, 1.0, 1e-5, 4)
        betas = [pairs[1].beta, pairs[5].beta]
        both = worst_case(name, 1.0, 1e-5, 4, betas=betas, step=1e-2)
        x = np.linspace(0, 1.2, 25)
        alone = [worst_case(name, 1.0, 1e-5, 4, betas=[beta], step=1e-2).delta(x) for beta in betas]
        assert np.all(both.delta(x) >= np.maximum(*alone) * (1 - 1e-12) - 1e-15)
        assert alone[0][2] != alone[1][2]


@pytest.mark.parametrize("dim", [2, 5])
def test_laplace_vectors_are_dominated(dim):
    """Against the joint hockey stick by quadrature (shift along an axis), and in the plane for other directions."""
    (pair,) = admissible_pairs("laplace", 1.0, 1e-4, dim, betas=[0.04])
    worst = worst_case("laplace", 1.0, 1e-4, dim, betas=[0.04], step=4e-3)
    for e in (0.0, 0.3, 0.8):
        bound = worst.delta(e)[0]
        found = [laplace_joint_delta(e, pair.a, lam, dim, wide) for lam in (1e-9, 0.04) for wide in (True, False)]
        assert max(found) <= bound + 1e-8
        assert bound <= 1.4 * max(found) + 1e-3
        if dim == 2:
            for shift in ((0.5, 0.5), (0.9, 0.1)):
                shift = pair.a * np.array(shift)
                assert laplace_plane_delta(e, shift, 0.04, True, 300) <= bound + 1e-3


def test_gaussian_vectors_are_dominated_and_close_to_the_claim():
    """Against the calibrator's exact hockey stick (noncentral chi-square) over the whole region."""
    for dim, beta in ((9, 0.005), (45, 0.002), (3, 0.0)):
        (pair,) = admissible_pairs("gaussian", 1.0, 1e-5, dim, betas=[beta])
        worst = worst_case("gaussian", 1.0, 1e-5, dim, betas=[beta], step=4e-3)
        for e in (0.0, 0.1, 0.5, 1.0, 1.3):
            for lam in {0.0, beta / 3, beta}:
                for share in (1.0, 0.6):
                    for wide in (True, False):
                        found = gaussian.hockey_stick(e, share * pair.a, lam, dim, wide)
                        # The oracle is itself an upper bound, by 1e-9 of a probability.
                        assert found - 3e-9 <= worst.delta(e)[0]
        assert worst.delta(1.0)[0] <= 1.3e-5


def test_concentrated_profile_is_never_below_that_of_a_release_that_is_rho_zcdp():
    """The Gaussian mechanism with `a^2 / 2 = rho`, and the inverse function."""
    x = np.linspace(0, 3, 40)
    for rho in (1e-4, 0.02, 0.3):
        curve = concentrated_curve(rho)(x)
        assert np.all(curve >= normal_hockey_stick(x, math.sqrt(2 * rho), 0.0, True) * (1 - 1e-8))
        for e, value in zip(x, curve, strict=True):
            if 1e-14 < value < 0.5:
                assert epsilon_of_rho(rho, float(value)) <= e * (1 + 1e-9) + 1e-12
                assert concentrated_curve(rho)(np.array([epsilon_of_rho(rho, 1e-6)]))[0] <= 1.01e-6


def arsinh_law(sigma):
    class Law:
        cdf = staticmethod(lambda z: stats.norm.cdf(np.arcsinh(sigma * z) / sigma))
        sf = staticmethod(lambda z: stats.norm.sf(np.arcsinh(sigma * z) / sigma))

    return Law


LAWS = {
    "cauchy": lambda family: stats.cauchy,
    "l1-power": lambda family: Power(family.exponent(1)),
    "box-power": lambda family: Power(family.exponent(1)),
    "student": lambda family: stats.t(family.degrees),
    "laplace": lambda family: stats.laplace,
    "gaussian": lambda family: stats.norm,
    "arsinh-normal": lambda family: arsinh_law(family.sigma),
}


@pytest.mark.parametrize("name", LAWS)
def test_worst_case_dominates_every_neighbour_pair(name):
    """One function for all families; with the default list of betas, so that it is chosen on the data."""
    epsilon, delta = 0.6, 0.0 if noise.FAMILIES[name].load().privacy == "pure" else 1e-5
    family = make_family(name, epsilon, delta, 1)
    pairs = admissible_pairs(name, epsilon, delta)
    betas = [pairs[i].beta for i in (0, len(pairs) // 2)]
    worst = worst_case(name, epsilon, delta, betas=betas, step=4e-3)
    x = np.linspace(0, 0.7, 15)
    bound = worst.delta(x)
    for pair in admissible_pairs(name, epsilon, delta, betas=betas):
        for lam in (0.0, pair.beta):
            for wide in (True, False):
                found = cells_stick(LAWS[name](family), x, pair.a, lam, wide)
                assert np.all(found <= bound + ROUNDING)
    assert worst.delta(epsilon)[0] <= 1.05 * delta + 1e-4 * epsilon
    with pytest.raises(PrivacyError, match="step"):
        worst_case(name, epsilon, delta, betas=betas, step=1e-8)


@pytest.mark.parametrize(("name", "dim"), [("cauchy", 3), ("l1-power", 9), ("box-power", 4)])
def test_pure_vectors_are_dominated_by_randomised_response(name, dim):
    worst = worst_case(name, 0.5, dim=dim, step=0.01)
    assert worst.repeated(16).epsilon(1e-4) == pytest.approx(optimal([Cost(0.5)] * 16, 1e-4).epsilon, rel=1e-6)


def test_composition_of_worst_cases_beats_that_of_points():
    """And different families compose, as long as they share the grid."""
    for name, delta in (("l1-power", 0.0), ("student", 0.0), ("laplace", 1e-7), ("gaussian", 1e-7)):
        pairs = admissible_pairs(name, 0.5, delta)
        one = worst_case(name, 0.5, delta, betas=[pairs[1].beta], step=5e-3)
        assert one.repeated(32).epsilon(1e-4) < 0.9 * optimal([Cost(0.5, delta)] * 32, 1e-4).epsilon
    mixed = compose_distributions([one, worst_case("cauchy", 0.5, dim=3, step=5e-3)])
    assert one.epsilon(1e-4) < mixed.epsilon(1e-4) <= one.epsilon(1e-4) + 0.5
