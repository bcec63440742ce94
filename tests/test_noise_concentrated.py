"""Concentrated noises: rates against Renyi divergences by quadrature, exact intervals, laws.

Statistical tests fail with probability below 1e-6 each when the sampler is right.
"""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import interpolate, stats

from certify.errors import PrivacyError
from privacy.noise import admissible_pairs, make_family
from privacy.noise.bun_steinke import (
    ArsinhNormal,
    LaplaceLogNormal,
    LogNormalProduct,
    SinhNormal,
    UniformLogNormal,
    epsilon_of_rho,
    exp_interval,
    rate_of_budget,
)
from privacy.sampling import SecureBits, grid_index

ERROR_RATE = 1e-6
CLASSES = (LaplaceLogNormal, UniformLogNormal, ArsinhNormal)
ORDERS = (1.05, 2.0, 6.0, 25.0)


def log_density(family):
    """The log density of one coordinate as a function of |z|, from its definition, by quadrature over the normal."""
    sigma = family.sigma
    if isinstance(family, ArsinhNormal):

        def value(z):
            y = np.arcsinh(sigma * np.abs(z)) / sigma
            return -y * y / 2 - math.log(2 * math.pi) / 2 - np.log(np.cosh(np.minimum(sigma * y, 300)))

        return value
    if isinstance(family, UniformLogNormal):

        def value(z):
            with np.errstate(divide="ignore"):
                v = np.log(np.abs(z)) / sigma + sigma
            return sigma**2 / 2 + stats.norm.logsf(v) - math.log(2)

        return value
    y = np.linspace(-40, 40, 1201)
    u = np.linspace(-25, 40 * sigma + 5, 700)
    exponent = -(y**2) / 2 - sigma * y - np.exp(np.minimum(u[:, None] - sigma * y, 700))
    top = exponent.max(1, keepdims=True)
    logs = np.log(np.exp(exponent - top).sum(1) * (y[1] - y[0])) + top[:, 0] - math.log(2 * math.pi) / 2 - math.log(2)
    spline = interpolate.CubicSpline(u, logs)
    with np.errstate(divide="ignore"):
        return lambda z: spline(np.clip(np.log(np.maximum(np.abs(z), 1e-300)), u[0], u[-1]))


def nodes(shift, sigma):
    """Quadrature nodes and weights: `z = +-e^u` outside the two kinks (trapezoid in u), Gauss-Legendre between them."""
    u = np.linspace(-30, 38 * sigma + 3, 1000)
    ray, weight = np.exp(u), np.exp(u) * (u[1] - u[0])
    x, w = np.polynomial.legendre.leggauss(60)
    inner = shift * (x + 1) / 2
    return np.concatenate([-ray, inner, shift + ray]), np.concatenate([weight, w * shift / 2, weight])


def renyi(logf, order, shift, scale, sigma, swap):
    """D_order of the laws at (0, 1) and (shift, scale), or swapped."""
    z, weight = nodes(shift, sigma)
    p, q = logf(z), logf((z - shift) / scale) - math.log(scale)
    p, q = (q, p) if swap else (p, q)
    mass = np.exp(p) @ weight
    assert abs(mass - 1) < 1e-5
    exponent = order * p + (1 - order) * q
    top = exponent.max()
    return (top + math.log(np.exp(exponent - top) @ weight / mass)) / (order - 1)


def worst_rho(family, a, beta):
    """Largest D_alpha / alpha over corners and inner points of the region."""
    logf = log_density(family)
    worst = 0.0
    for lam in (0.0, beta / 2, beta):
        for shift in (0.0, a / 2, a) if lam == beta else (a,):
            for swap in (False, True):
                for order in ORDERS:
                    if lam or shift:
                        d = renyi(logf, order, shift, math.exp(lam), family.sigma, swap)
                        worst = max(worst, d / order)
    return worst


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(("rate", "sigma"), [(0.2, 0.4), (0.5, 1.0), (1.0, 0.7), (2.0, 1.5)])
def test_pairs_are_concentrated_dp(cls, rate, sigma):
    family = cls(sigma)
    whole = rate / family.dilation_rate()
    for share in (0.0, 0.4, 0.9):
        a = family.largest_a_of_rate(rate, share * whole, 1)
        assert a > 0
        assert worst_rho(family, a, share * whole) <= rate**2 / 2 * (1 + 2e-3) + 1e-6
        assert rate**2 / 2 * (1 - 1e-9) <= family.rho(a, share * whole, 1) <= rate**2 / 2 * (1 + 1e-12)


def test_the_check_catches_rates_that_are_too_small():
    # Shift of Laplace log-normal, and the dilation of each family, at two thirds of the proven constants.
    family = LaplaceLogNormal(0.1)
    a = family.largest_a_of_rate(0.2, 0.0, 1)
    assert worst_rho(family, 1.5 * a, 0.0) > 1.5 * 0.2**2 / 2
    for family in (LaplaceLogNormal(1.0), UniformLogNormal(1.0), ArsinhNormal(1.0)):
        beta = 1.5 / family.dilation_rate()
        logf = log_density(family)
        found = max(
            renyi(logf, order, 0.0, math.exp(beta), family.sigma, swap) / order
            for order in (1.05, 2, 10, 30, 60)
            for swap in (0, 1)
        )
        assert found > 1.05 * 0.5 / (1.0 if not isinstance(family, ArsinhNormal) else 1.8)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("cls", CLASSES)
def test_shift_rate_is_the_steepest_slope_of_the_log_density(cls, sigma):
    family = cls(sigma)
    logf = log_density(family)
    z = np.exp(np.linspace(-12, max(8 * sigma + 1, math.log(60 / sigma)), 20001))
    slope = np.abs(np.diff(logf(z)) / np.diff(z))[np.diff(z) > 1e-4]
    bound = family.shift_rate()
    assert slope.max() <= bound * (1 + 1e-3)
    # Sharp for the two products (their steepest place is out of reach of this grid for larger sigma).
    if sigma <= 0.3:
        assert slope.max() >= bound * (0.6 if cls is ArsinhNormal else 0.8)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 2.0])
def test_arsinh_dilation_is_lipschitz_in_the_normal(sigma):
    # The lemma's hypothesis, straight from the densities, for finite lam (not only its derivative at 0).
    family = ArsinhNormal(sigma)
    y = np.linspace(-1, 1, 200001) * max(12, 4 / sigma)
    z = np.sinh(sigma * y) / sigma
    logf = log_density(family)
    for lam in (0.01, 0.3, 1.0, 3.0):
        ratio = logf(z * math.exp(-lam)) - lam - logf(z)
        slope = np.abs(np.diff(ratio) / np.diff(y)).max()
        assert slope <= family.dilation_rate() * lam * (1 + 1e-6) + 1e-9
        assert slope >= 0.4 * family.dilation_rate() * lam


def test_constants_are_rounded_up():
    mpmath.mp.dps = 50
    for sigma in (0.01, 0.3, 1.0, 2.7, 8.0):
        s = mpmath.mpf(sigma)
        root = mpmath.findroot(lambda u: u * mpmath.tanh(u) - 1, 1.2)
        assert ArsinhNormal(sigma).shift_rate() >= 1 / mpmath.cosh(root) * root / s + s / 2
        assert ArsinhNormal(sigma).dilation_rate() >= root / s + 4 * s / (3 * mpmath.sqrt(3))
        assert LaplaceLogNormal(sigma).shift_rate() >= mpmath.exp(3 * s * s / 2)
        assert LaplaceLogNormal(sigma).dilation_rate() >= 1 / s
        slope = lambda v: mpmath.exp(s * s - s * v) * mpmath.npdf(v) / mpmath.ncdf(-v) / s  # noqa: E731, B023
        best = max(slope(mpmath.mpf(v)) for v in np.linspace(-12, 20, 401))
        assert UniformLogNormal(sigma).shift_rate() >= best
        if 1.5 < sigma < 5:
            published = mpmath.sqrt(2 / mpmath.pi) * mpmath.exp(3 * s * s / 2) / s
            assert UniformLogNormal(sigma).shift_rate() <= published


@pytest.mark.parametrize("cls", CLASSES)
def test_dimensions_add_in_squares(cls):
    # p equal coordinates: the divergence is p times that of one; the rule in p dimensions must cover it.
    family, rate, p = cls(0.8), 0.7, 16
    beta = 0.5 * rate / family.dilation_rate() / math.sqrt(p)
    a = family.largest_a_of_rate(rate, beta, p)
    assert p * worst_rho(family, a / math.sqrt(p), beta) <= rate**2 / 2 * (1 + 2e-3)
    assert worst_rho(family, a, 0.0) + (p - 1) * worst_rho(family, 0.0, beta) <= rate**2 / 2 * (1 + 2e-3)


def test_rho_converts_to_epsilon():
    for rho, delta in ((0.01, 1e-5), (0.5, 1e-6), (3.0, 1e-2), (1e-6, 1e-9), (50.0, 1e-12)):
        epsilon = epsilon_of_rho(rho, delta)
        assert 0 < epsilon <= rho + 2 * math.sqrt(rho * math.log(1 / delta))
        # The Gaussian mechanism with this rho shows that it cannot be much smaller.
        a = math.sqrt(2 * rho)
        exact = stats.norm.cdf(a / 2 - epsilon / a) - math.exp(epsilon + stats.norm.logcdf(-a / 2 - epsilon / a))
        assert exact <= delta
        smaller = 0.75 * epsilon
        exact = stats.norm.cdf(a / 2 - smaller / a) - math.exp(smaller + stats.norm.logcdf(-a / 2 - smaller / a))
        assert exact > delta
        rate = rate_of_budget(epsilon, delta)
        assert rate**2 / 2 <= rho * (1 + 1e-9) and rate**2 / 2 >= rho * 0.9999


def test_epsilon_of_rho_is_rounded_up():
    mpmath.mp.dps = 40
    for rho, delta in ((0.01, 1e-5), (0.5, 1e-6), (50.0, 1e-12)):
        e, r = mpmath.mpf(epsilon_of_rho(rho, delta)), mpmath.mpf(rho)

        def log_delta(alpha, e=e, r=r):
            return (alpha - 1) * (alpha * r - e) - mpmath.log(alpha - 1) + alpha * mpmath.log(1 - 1 / alpha)

        x = np.exp(np.linspace(-10, 12, 400001))
        rough = x * ((1 + x) * rho - float(e)) - np.log(x) - (1 + x) * np.log1p(1 / x)
        best = log_delta(1 + mpmath.mpf(float(x[rough.argmin()])))
        assert best <= mpmath.log(delta) * (1 - mpmath.mpf(10) ** -9)


@pytest.mark.parametrize("name", ["laplace-log-normal", "uniform-log-normal", "arsinh-normal"])
def test_families_give_pairs(name):
    for epsilon, delta, dim in ((1.0, 1e-5, 1), (0.1, 1e-6, 45), (10.0, 1e-3, 9)):
        family = make_family(name, epsilon, delta, dim)
        pairs = admissible_pairs(family, epsilon, delta, dim)
        assert len(pairs) == 8 and pairs[0].beta == 0.0
        for pair in pairs:
            assert epsilon_of_rho(family.rho(pair.a, pair.beta, dim), delta) <= epsilon * (1 + 1e-9)
        assert family.largest_a(epsilon, 0.0, 0.0, dim) == 0.0
    with pytest.raises(PrivacyError, match="sigma"):
        ArsinhNormal(0.0)


def test_exponentials_are_enclosed():
    mpmath.mp.prec = 600
    rng = np.random.default_rng(5)
    for _ in range(400):
        n, d = int(rng.integers(-(2**40), 2**40)), int(rng.integers(1, 2 ** int(rng.integers(30, 45))))
        if abs(n / d) > 200:
            continue
        for precision in (20, 80, 300):
            low, high = exp_interval(n, d, precision)
            exact = mpmath.exp(mpmath.mpf(n) / d) * mpmath.mpf(2) ** precision
            assert low <= exact <= high
            assert high - low <= 3 + exact * mpmath.mpf(2) ** (3 - precision)
    assert exp_interval(0, 3, 10)[0] <= 1024 <= exp_interval(0, 3, 10)[1] <= 1026


class Fixed:
    """A lazy variable with a known value, refined from a coarse interval."""

    def __init__(self, value: Fraction):
        self.value, self.k = value, 2

    def interval(self):
        n = math.floor(self.value * (1 << self.k))
        return n, 1 << self.k, n + 1, 1 << self.k

    def refine(self):
        self.k *= 2


def test_product_and_sinh_intervals_contain_the_value():
    mpmath.mp.prec = 3000
    rng = np.random.default_rng(6)
    for _ in range(60):
        x, y, sigma = (Fraction(float(v)) for v in (rng.normal() * 3, rng.normal() * 3, rng.uniform(0.01, 3)))
        t = mpmath.mpf(float(sigma)) * float(y)
        for lazy, exact in (
            (LogNormalProduct(Fixed(x), Fixed(y), float(sigma)), float(x) * mpmath.exp(t)),
            (SinhNormal(Fixed(y), float(sigma)), mpmath.sinh(t) / float(sigma)),
        ):
            for _ in range(6):
                p, q, P, Q = lazy.interval()
                assert q > 0 and Q > 0 and mpmath.mpf(p) / q <= exact <= mpmath.mpf(P) / Q
                lazy.refine()
            assert mpmath.mpf(P) / Q - mpmath.mpf(p) / q < abs(exact) * mpmath.mpf(2) ** -20 + mpmath.mpf(2) ** -20
    # A factor far below the first precision.
    deep = SinhNormal(Fixed(Fraction(-30)), 8.0)
    for _ in range(5):
        p, q, P, Q = deep.interval()
        assert mpmath.mpf(p) / q <= mpmath.sinh(-240) / 8 <= mpmath.mpf(P) / Q
        deep.refine()


def cumulative(family, x):
    sigma = family.sigma
    if isinstance(family, ArsinhNormal):
        return stats.norm.cdf(np.arcsinh(sigma * x) / sigma)
    y = np.linspace(-9, 9, 721)
    weights = np.exp(-(y**2) / 2)
    law = stats.laplace if isinstance(family, LaplaceLogNormal) else stats.uniform(-1, 2)
    return (law.cdf(x[:, None] * np.exp(-sigma * y)) @ weights) / weights.sum()


@pytest.mark.parametrize("width", [2, 64])
@pytest.mark.parametrize("cls", CLASSES)
def test_samples_follow_the_law(cls, width):
    family, bits = cls(0.75), SecureBits()
    n = 4000 if width == 64 else 400
    x = np.array([grid_index(0, 1, family.variable(bits, width), Fraction(1, 2**40)) * 2.0**-40 for _ in range(n)])
    assert stats.kstest(x, lambda v: cumulative(family, v)).pvalue > ERROR_RATE
    assert stats.kstest(8 * x, lambda v: cumulative(family, v)).pvalue < ERROR_RATE
    deviation = abs(np.abs(x).mean() - family.typical(1)) / (family.rms() / math.sqrt(n))
    assert deviation < 6.0


@pytest.mark.parametrize("sigma", [0.3, 0.75, 1.2])
def test_the_root_mean_square_is_that_of_the_law(sigma):
    """By formula, not by sampling: the fourth moments of these laws make sample variances useless."""
    scale = math.exp(2 * sigma**2)  # of exp(2 sigma y) for normal y
    expected = {
        "LaplaceLogNormal": 2 * scale,
        "UniformLogNormal": scale / 3,
        "ArsinhNormal": (scale - 1) / (2 * sigma**2),
    }
    for cls in CLASSES:
        assert cls(sigma).rms() == pytest.approx(math.sqrt(expected[cls.__name__]), rel=1e-9)


def test_vectors_have_independent_coordinates():
    noise = LaplaceLogNormal(0.5).draw(3, SecureBits())
    before = noise.interval(1)
    noise.refine(0)
    assert noise.dim == 3 and noise.interval(1) == before
    rows = [LaplaceLogNormal(0.5).draw(2, SecureBits()) for _ in range(1500)]
    value = np.array([[Fraction(*r.interval(i)[:2]) for i in range(2)] for r in rows], dtype=float)
    assert stats.spearmanr(value[:, 0], value[:, 1]).pvalue > ERROR_RATE
    assert stats.spearmanr(np.abs(value[:, 0]), np.abs(value[:, 1])).pvalue > ERROR_RATE
