"""Pure families: closed forms against a search of the worst case, planted mistakes, exact laws of the samplers.

A statistical test fails with probability below 1e-6 when the sampler is right; a wrong law is at least 6 standard
deviations of the test statistic away.
"""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from noise_oracle import cauchy_coordinate, cauchy_joint_loss, power_loss, scalar_loss, separate_loss, student
from scipy import stats

from certify.errors import PrivacyError
from privacy.noise import admissible_pairs, make_family, noise_scale
from privacy.noise.base import beta_with_slack, spare_budget
from privacy.noise.cauchy import CauchyNoise, shift_of
from privacy.noise.power import BoxPower, L1Power, SeparateBoxPower, _below
from privacy.noise.student import Student, _root
from privacy.sampling import SecureBits, grid_index

ERROR_RATE = 1e-6
EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
DIMS = (2, 9, 18, 45)
SLACK = 1 + 1e-9


# Cauchy


def test_the_coordinate_oracle_agrees_with_a_grid():
    y = np.concatenate([np.linspace(-30, 30, 400001), np.geomspace(30, 1e7, 3000), -np.geomspace(30, 1e7, 3000)])
    for shift, lam in [(0.0, 0.3), (0.5, 0.0), (0.4, 0.2), (3.0, 1.5)]:
        ratio = -np.log1p(y**2) + np.log1p(((y - shift) * np.exp(-lam)) ** 2) + lam
        assert abs(np.abs(ratio).max() - cauchy_coordinate(np.array([shift]), lam)[0]) < 1e-6


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_cauchy_pairs_are_exactly_epsilon_dp_in_one_dimension(epsilon):
    for pair in admissible_pairs("cauchy", epsilon, betas=[0.02 * epsilon, epsilon / 6, epsilon / 2, 0.9 * epsilon]):
        assert 0.999 * epsilon < cauchy_joint_loss(pair.a, pair.beta, 1, cells=1) <= epsilon * SLACK
        assert cauchy_joint_loss(1.5 * pair.a, pair.beta, 1, cells=1) > 1.01 * epsilon


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("dim", DIMS)
def test_cauchy_pairs_are_epsilon_dp_in_p_dimensions(epsilon, dim):
    for pair in admissible_pairs("cauchy", epsilon, dim=dim):
        assert 0.93 * epsilon < cauchy_joint_loss(pair.a, pair.beta, dim) <= epsilon * SLACK
    # beta small enough that the shift matters: a scale that is 1.5 times too small is caught.
    pair = admissible_pairs("cauchy", epsilon, dim=dim, betas=[epsilon / (8 * dim)])[0]
    assert cauchy_joint_loss(1.5 * pair.a, pair.beta, dim) > 1.05 * epsilon


@pytest.mark.parametrize("dim", DIMS)
def test_cauchy_is_never_worse_than_the_simple_rule_and_close_to_the_worst_case(dim):
    for epsilon in EPSILONS:
        for pair in admissible_pairs("cauchy", epsilon, dim=dim):
            assert pair.a >= (epsilon - dim * pair.beta) * (1 - 1e-6)
            # A scale 7 % smaller already violates the claim.
            assert cauchy_joint_loss(pair.a * 1.07, pair.beta, dim) > epsilon


@pytest.mark.parametrize("name", ["cauchy", "l1-power", "box-power"])
def test_one_dimensional_constants_in_p_dimensions_are_caught(name):
    # The paper states its one-dimensional pair for vectors.
    for pair in admissible_pairs(name, 1.0, dim=1)[-2:]:
        if name == "cauchy":
            assert cauchy_joint_loss(pair.a, pair.beta, 9) > 2.0
        else:
            assert power_loss(make_family(name, 1.0).norm, 9, 36, pair.a, pair.beta) > 2.0


def test_the_steepest_share_is_where_the_quotient_is_least():
    # The hull of T against a fine grid: no chord from 0 is lower than the one used.
    for epsilon, dim, beta in [(1.0, 9, 0.02), (5.0, 45, 0.05), (10.0, 2, 1.0), (0.1, 300, 1e-4), (100.0, 45, 0.5)]:
        b = beta_with_slack(beta)
        spare = spare_budget(epsilon, dim, b)
        w = np.geomspace(spare / dim, spare, 20001)
        quotient = min(shift_of(float(x), b) / x for x in w)
        a = CauchyNoise().largest_a(epsilon, 0.0, beta, dim)
        slide = 2 * dim * math.sinh(epsilon / (2 * dim))
        assert a <= min(slide, spare * quotient) and a > min(slide, spare * quotient) * (1 - 1e-6)


# Power laws

CASES = [("l1-power", L1Power, "l1"), ("box-power", BoxPower, "linf")]


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize(("name", "family", "norm"), CASES)
def test_power_pairs_are_exactly_epsilon_dp(name, family, norm, epsilon):
    for dim in (1, 2, 9, 45):
        for q in (dim + 1, 2 * dim, 4 * dim):
            law = family(max(q, 2))
            for pair in admissible_pairs(law, epsilon, 0.0, dim)[1::2]:
                loss = power_loss(norm, dim, law.q, pair.a, pair.beta, steps=5)
                assert 0.99 * epsilon < loss <= epsilon * SLACK
                assert power_loss(norm, dim, law.q, 1.5 * pair.a, pair.beta, steps=3) > 1.005 * epsilon


@pytest.mark.parametrize(("name", "family", "norm"), CASES)
def test_every_condition_of_the_power_law_is_needed(name, family, norm):
    # Each of the three terms, violated alone, is caught.
    epsilon, dim, q = 1.0, 9, 36
    c, beta = dim + q, epsilon / 36
    assert power_loss(norm, dim, q, math.exp(beta) * math.expm1((epsilon - dim * beta) / c) * 1.1, beta) > 1.01
    assert power_loss(norm, dim, q, math.expm1(epsilon / c) * 1.1, 0.001) > 1.01
    assert power_loss(norm, dim, q, 1e-6, 1.1 * beta) > 1.05
    assert family(q).largest_a(epsilon, 0.0, 1.001 * beta, dim) == 0.0
    assert family(q).largest_a(epsilon, 0.0, beta * (1 - 1e-9), dim) > 0.0


@pytest.mark.parametrize("dim", [2, 3, 4])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_separate_box_pairs_are_exactly_epsilon_dp(dim, epsilon):
    q = 4 * dim
    for beta in (epsilon / (4 * q), *SeparateBoxPower(q).default_betas(epsilon, 0.0, dim)):
        (pair,) = admissible_pairs(SeparateBoxPower(q), epsilon, 0.0, dim, [beta])
        assert 0.97 * epsilon < separate_loss(dim, q, pair.a, pair.beta) <= epsilon * SLACK
        assert separate_loss(dim, q, 1.5 * pair.a, pair.beta) > 1.03 * epsilon
    # The dilations alone: c + p - 2 of them, not q.
    beta = 1.05 * epsilon / (q + 2 * dim - 2)
    assert separate_loss(dim, q, 1e-6 * epsilon, beta) > 1.04 * epsilon
    assert SeparateBoxPower(q).largest_a(epsilon, 0.0, beta, dim) == 0.0


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_common_scale_constants_are_wrong_for_separate_scales(dim):
    # The same law and beta with the constants of one common scale.
    (pair,) = admissible_pairs(BoxPower(4 * dim), 1.0, 0.0, dim, [0.99 / (4 * dim)])
    assert separate_loss(dim, 4 * dim, pair.a, pair.beta) > 1.2
    assert power_loss("linf", dim, 4 * dim, pair.a, pair.beta) <= SLACK


def test_separate_scales_take_one_beta():
    with pytest.raises(PrivacyError, match="give one"):
        admissible_pairs(SeparateBoxPower(8), 1.0, 0.0, 2, [0.01, 0.02])
    assert len(admissible_pairs(SeparateBoxPower(8), 1.0, 0.0, 2)) == 1


def test_free_choice_of_beta_is_not_covered_for_separate_scales():
    # Coordinate 1 takes its scale from a pair with large a, coordinate 2 from one with large beta. Nothing forbids a
    # neighbour that shifts 1 by a and dilates 2 by beta: at the first centre the log ratio exceeds the claim.
    epsilon, dim, q = 1.0, 2, 2
    first, second = (admissible_pairs(SeparateBoxPower(q), epsilon, 0.0, dim, [b])[0] for b in (0.001, 0.2499))
    log_p = 0.0
    log_q = -second.beta - (dim + q) * math.log1p(first.a)
    assert log_p - log_q > 1.2 * epsilon


# Student


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("nu", [2, 3, 5])
def test_student_pairs_are_exactly_epsilon_dp(epsilon, nu):
    for pair in admissible_pairs(Student(nu), epsilon)[1::2]:
        loss = scalar_loss(student(nu), pair.a, pair.beta, steps=5)
        assert 0.999 * epsilon < loss <= epsilon * SLACK
        assert scalar_loss(student(nu), 1.5 * pair.a, pair.beta, steps=3) > 1.03 * epsilon
    assert Student(nu).largest_a(epsilon, 0.0, epsilon / nu, 1) == 0.0


def test_known_figures():
    # PRIVACY_FACTS 1.1: t_3 mean at epsilon = 1 and beta = 1/6, 1/10, 1/20; 1.3: box power at p = 18, 45, 300.
    for beta, mean in ((1 / 6, 1.52), (1 / 10, 1.37), (1 / 20, 1.30)):
        (pair,) = admissible_pairs(Student(3), 1.0, betas=[beta])
        assert abs(Student(3).typical(1) / pair.a - mean) < 6e-3
    for dim, mean in ((9, 8.27), (18, 15.8), (45, 38.3), (300, 251.0)):
        pair = admissible_pairs("box-power", 1.0, dim=dim)[-1]
        assert abs(BoxPower(4 * dim).typical(dim) / pair.a / mean - 1) < 6e-3
        assert abs(pair.beta * 4 * dim - 1) < 1e-5
    for dim, median in ((9, 11.1), (18, 23.0), (45, 58.6), (300, 398.0)):
        (pair,) = admissible_pairs("cauchy", 1.0, dim=dim, betas=[1 / (4 * dim)])
        assert abs(dim / pair.a / median - 1) < 6e-3


def test_targets():
    # One dimension: at most 0.96 S (median) at epsilon = 1. p = 45: half of the paper's Cauchy median, pure.
    assert 1 / admissible_pairs("cauchy", 1.0)[0].a < 0.96
    pair = admissible_pairs("box-power", 1.0, dim=45)[-1]
    assert BoxPower(180).typical(45) / pair.a < 0.5 * 45 * 2.0


# Rounding, arguments


def test_pairs_are_rounded_down():
    mpmath.mp.prec = 300
    slack = 2 * mpmath.log1p(mpmath.mpf(2) ** -40)
    for epsilon in (1e-4, 0.3, 1.0, 7.0, 50.0):
        e = mpmath.mpf(epsilon)
        for dim in (1, 2, 45, 1000):
            for family in (L1Power(4 * dim), BoxPower(2 * dim + 1)):
                c = dim + family.q
                for pair in admissible_pairs(family, epsilon, 0.0, dim):
                    b = mpmath.mpf(pair.beta) + slack
                    exact = min(mpmath.expm1(e / c), mpmath.exp(b) * mpmath.expm1((e - dim * b) / c))
                    assert exact * (1 - mpmath.mpf(2) ** -40) < pair.a <= exact and family.q * b <= e
            for pair in admissible_pairs("cauchy", epsilon, dim=dim):
                # Equal shares, and one coordinate alone, are splits of the true worst case.
                b, a = mpmath.mpf(pair.beta) + slack, mpmath.mpf(pair.a)

                def loss(t, lam, a=a):
                    return mpmath.acosh(mpmath.cosh(lam) + mpmath.exp(-lam) * (a * t) ** 2 / 2)

                for lam in (0, b):
                    assert dim * loss(mpmath.mpf(1) / dim, lam) <= e
                    assert loss(1, lam) + (dim - 1) * lam <= e
        for nu in (2, 3, 8):
            for pair in admissible_pairs(Student(nu), epsilon):
                b, a = mpmath.mpf(pair.beta) + slack, mpmath.mpf(pair.a)
                for lam in (0, b):
                    d = mpmath.acosh(mpmath.cosh(lam) + mpmath.exp(-lam) * a * a / (2 * nu))
                    assert (nu + 1) * d / 2 + (nu - 1) * lam / 2 <= e


@pytest.mark.parametrize("name", ["cauchy", "l1-power", "box-power"])
def test_pairs_exist_for_every_usable_budget(name):
    for epsilon in (1e-6, 1e-3, 0.1, 1.0, 10.0, 100.0):
        for dim in (1, 2, 45, 300, 5000):
            pairs = admissible_pairs(name, epsilon, dim=dim)
            assert all(0 < p.a < math.inf and 0 <= p.beta * dim < epsilon for p in pairs)


def test_one_law_serves_all_pairs():
    # The free choice of beta needs one law: shapes depend on the dimension, not on beta.
    for name in ("l1-power", "box-power", "student"):
        assert make_family(name, 0.1, 0.0, 1) == make_family(name, 10.0, 0.0, 1)


def test_free_choice_of_beta_is_private():
    # Random scales of neighbours for two pairs of one l1 law; the minimum of the two against the search.
    rng = np.random.default_rng(5)
    epsilon, dim, q = 1.0, 3, 6
    pairs = admissible_pairs(L1Power(q), epsilon, 0.0, dim, [0.01, 0.16])
    worst = 0.0
    for _ in range(300):
        s = np.exp(rng.uniform(-1, 1, 2))
        both = [np.array([v, v * math.exp(rng.choice([-1, 0, 1]) * p.beta)]) for v, p in zip(s, pairs, strict=True)]
        scale = noise_scale({p.beta: b for p, b in zip(pairs, both, strict=True)}, pairs)
        shift = min(b.min() for b in both)
        small, large = sorted(scale)
        worst = max(worst, power_loss("l1", dim, q, shift / small, math.log(large / small), steps=2))
    assert 0.9 < worst <= epsilon * (1 + 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gauss", 1.0), "family"),
        (("student", 1.0, 0.0, 2), "dim"),
        (("l1-power", 1.0, 1e-5, 2), "delta"),
        (("l1-power", 1.0, 0.0, 0), "dim"),
        (("l1-power", 1.0, 0.0, 1.5), "dim"),
        (("box-power", 0.0, 0.0, 2), "epsilon"),
        (("box-power", 1.0, 0.0, 9, []), "betas"),
        (("box-power", 1.0, 0.0, 9, [0.05]), "beta"),
        (("cauchy", 1.0, 0.0, 9, [0.2]), "beta"),
        (("cauchy", 1.0, 0.0, 9, [float("nan")]), "beta"),
    ],
)
def test_inadmissible_arguments_are_refused(arguments, message):
    with pytest.raises(PrivacyError, match=message):
        admissible_pairs(*arguments)


@pytest.mark.parametrize("build", [lambda: L1Power(1), lambda: BoxPower(2.5), lambda: Student(1), lambda: Student(2.5)])
def test_bad_shapes_are_refused(build):
    with pytest.raises(PrivacyError, match="whole number"):
        build()


# Samplers


def draws(family, dim, n, width=64, grid=Fraction(1, 2**40)):
    """(n, dim) values of the law, each rounded exactly to the grid."""
    from privacy.noise.power import BoxPowerVector, L1PowerVector
    from privacy.noise.student import StudentVariable

    bits = SecureBits()
    make = {
        "l1-power": lambda: L1PowerVector(dim, family.exponent(dim), bits, width),
        "box-power": lambda: BoxPowerVector(dim, family.exponent(dim), bits, width),
        "student": lambda: StudentVariable(family.degrees, bits, width),
        "cauchy": lambda: family.draw(dim, bits),
    }[family.name]
    out = np.empty((n, dim))
    for row in out:
        z = make()
        for i in range(dim):
            row[i] = grid_index(0, 1, Coordinate(z, i), grid) * float(grid)
    return out


class Coordinate:
    def __init__(self, vector, i):
        self.vector, self.i, self._spent = vector, i, False

    def interval(self):
        return self.vector.interval(self.i)

    def refine(self):
        self.vector.refine(self.i)


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize(("dim", "q"), [(1, 4), (3, 5)])
def test_l1_power_law_is_exact(dim, q, width):
    z = draws(L1Power(q), dim, 4000, width)
    r = np.abs(z).sum(1)
    law = stats.betaprime(dim, q)
    assert stats.kstest(r, law.cdf).pvalue > ERROR_RATE
    assert stats.kstest(2 * r, law.cdf).pvalue < ERROR_RATE
    for i in range(dim):
        # Marginal of |Z_i|: P(> t) = (1 + t)^-q; signs fair and independent of it.
        assert stats.kstest(np.abs(z[:, i]), lambda t: 1 - (1 + t) ** -q).pvalue > ERROR_RATE
        assert stats.binomtest(int((z[:, i] > 0).sum()), len(z)).pvalue > ERROR_RATE
        # Share of the radius: Beta(1, dim - 1), independent of the radius.
        if dim > 1:
            share = np.abs(z[:, i]) / r
            assert stats.kstest(share, stats.beta(1, dim - 1).cdf).pvalue > ERROR_RATE
            assert stats.spearmanr(share, r).pvalue > ERROR_RATE


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize(("dim", "q"), [(1, 4), (3, 5)])
def test_box_power_law_is_exact(dim, q, width):
    z = draws(BoxPower(q), dim, 4000, width)
    r = np.abs(z).max(1)
    law = stats.betaprime(dim, q)
    assert stats.kstest(r, law.cdf).pvalue > ERROR_RATE
    assert stats.kstest(2 * r, law.cdf).pvalue < ERROR_RATE
    if dim > 1:
        face = np.abs(z).argmax(1)
        assert stats.chisquare(np.bincount(face, minlength=dim)).pvalue > ERROR_RATE
        others = np.array([np.delete(row, f) for row, f in zip(z / r[:, None], face, strict=True)])
        for column in others.T:
            assert stats.kstest(column, stats.uniform(-1, 2).cdf).pvalue > ERROR_RATE
            assert stats.spearmanr(column, r).pvalue > ERROR_RATE
    assert stats.binomtest(int((z[:, 0] > 0).sum()), len(z)).pvalue > ERROR_RATE


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("nu", [2, 3, 5])
def test_student_law_is_exact(nu, width):
    z = draws(Student(nu), 1, 3000, width)[:, 0]
    assert stats.kstest(z, stats.t(nu).cdf).pvalue > ERROR_RATE
    assert stats.kstest(2 * z, stats.t(nu).cdf).pvalue < ERROR_RATE
    # Another number of degrees of freedom is told apart in the tail.
    tail = stats.t(nu).ppf(0.99)
    assert stats.binomtest(int((np.abs(z) > tail).sum()), len(z), 0.02).pvalue > ERROR_RATE


FAMILIES = [(L1Power(4), 1), (L1Power(6), 3), (BoxPower(6), 3), (Student(2), 1), (Student(3), 1), (CauchyNoise(), 2)]


@pytest.mark.parametrize(("family", "dim"), FAMILIES)
def test_intervals_nest_and_shrink(family, dim):
    bits = SecureBits()
    for _ in range(60):
        z = family.draw(dim, bits)
        for i in range(dim):
            p, q, p_high, q_high = z.interval(i)
            low, high = Fraction(p, q), Fraction(p_high, q_high)
            for _ in range(3):
                z.refine(i)
                p, q, p_high, q_high = z.interval(i)
                assert q > 0 and q_high > 0
                new_low, new_high = Fraction(p, q), Fraction(p_high, q_high)
                # Student: roots are rounded at a width that grows, so nested up to that rounding.
                room = Fraction(1, 2**60) * (1 + abs(low))
                assert low - room <= new_low <= new_high <= high + room
                low, high = new_low, new_high
            assert high - low <= Fraction(1, 2**200) * (1 + abs(low)) ** 3 * 2**40


def test_student_interval_holds_the_value():
    # With all bits known far out, high-precision arithmetic gives the variable that the first interval must contain.
    mpmath.mp.prec = 900
    bits = SecureBits()
    for nu in (2, 3, 7):
        for _ in range(100):
            z = Student(nu).draw(1, bits)
            p, q, p_high, q_high = z.interval()
            for _ in range(3):
                z.refine()
            x, y, v = (mpmath.mpf(u.n) / mpmath.mpf(2) ** u.k for u in (z._x, z._y, z._v))
            value = x / mpmath.sqrt(x * x + y * y) * mpmath.sqrt(nu * (v ** (-mpmath.mpf(2) / nu) - 1))
            value = -value if z._negative else value
            assert mpmath.mpf(p) / q <= value <= mpmath.mpf(p_high) / q_high


def test_integer_roots_are_floors():
    rng = np.random.default_rng(1)
    for degree in (2, 3, 5, 17):
        for bits in (1, 5, 60, 61, 64, 200, 1000):
            for _ in range(20):
                n = int.from_bytes(rng.bytes(bits // 8 + 1), "big") >> (-bits % 8)
                r = _root(n, degree)
                assert r**degree <= n < (r + 1) ** degree
                for exact in (r**degree, (r + 1) ** degree, (r + 1) ** degree - 1):
                    s = _root(exact, degree)
                    assert s**degree <= exact < (s + 1) ** degree


def test_uniform_integers_are_uniform():
    bits = SecureBits()
    for count in (1, 2, 3, 9, 45):
        counts = np.bincount([_below(count, bits) for _ in range(200 * count)], minlength=count)
        assert len(counts) == count and (count == 1 or stats.chisquare(counts).pvalue > ERROR_RATE)


FINE = 62


def low_bits(values):
    """Histogram of the bits 2^-59 .. 2^-62 of the releases (exact fractions) in (-1/2, 1/2)."""
    return np.bincount([math.floor(v * 2**FINE) % 16 for v in values if abs(v) < Fraction(1, 2)], minlength=16)


@pytest.mark.parametrize(("family", "dim"), [(L1Power(4), 1), (BoxPower(4), 2), (Student(2), 1), (Student(3), 1)])
def test_low_order_bits_do_not_tell_the_value(family, dim):
    bits, fine = SecureBits(), Fraction(1, 2**FINE)
    near, far = (
        low_bits([grid_index(f, 1.5, family.draw(dim, bits), fine) * fine for _ in range(4000)]) for f in (0.0, 1.0)
    )
    assert far.sum() > 200
    assert stats.chi2_contingency([near, far]).pvalue > ERROR_RATE
    assert stats.chisquare(near).pvalue > ERROR_RATE and stats.chisquare(far).pvalue > ERROR_RATE


def test_low_order_bits_of_a_naive_sampler_tell_the_value():
    # The l1 power law by inversion in float64, the same scale, bits and test: one release can give f away.
    rng = np.random.default_rng(0)

    def naive(value):
        z = np.expm1(-0.25 * np.log(rng.uniform(size=20000))) * rng.choice([-1.0, 1.0], size=20000)
        return [Fraction(y) for y in (value + 1.5 * z).tolist()]

    near, far = low_bits(naive(0.0)), low_bits(naive(1.0))
    assert far[0] == far.sum() > 200 and near[1:].sum() > 20
    assert stats.fisher_exact([[near[0], near[1:].sum()], [far[0], far[1:].sum()]]).pvalue < ERROR_RATE


def test_shared_radius_is_not_refined_for_every_coordinate():
    # Many coordinates on a fine grid: the known bits grow with the grid, not with the dimension.
    for law, attribute in ((BoxPower(60), "_radius"), (L1Power(60), "_uniforms")):
        z = law.draw(40, SecureBits())
        for i in range(40):
            grid_index(0, 1, Coordinate(z, i), Fraction(1, 2**200))
        shared = getattr(z, attribute)
        assert (shared if attribute == "_radius" else shared[-1]).k <= 1024


def test_reports_agree_with_the_laws():
    # `typical` and `tail` are means (medians) and quantiles of |Z_i|.
    for family, dim in [(L1Power(12), 3), (BoxPower(12), 3), (BoxPower(6), 1), (Student(5), 1), (CauchyNoise(), 2)]:
        z = np.abs(draws(family, dim, 6000)).ravel()
        if family.mean_is_finite(dim):
            assert abs(z.mean() / family.typical(dim) - 1) < 0.06
        else:
            assert abs(np.median(z) / family.typical(dim) - 1) < 0.06
        assert abs((z > family.tail(dim, 0.9)).mean() - 0.1) < 0.02
        assert abs((z > family.tail(dim, 0.5)).mean() - 0.5) < 0.03
