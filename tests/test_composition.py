"""Composition bounds against exhaustive randomised response, and against a second implementation."""

import itertools
import math
from decimal import Decimal
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify.errors import PrivacyError
from privacy.composition import Composed, Cost, advanced, basic, compose, concentrated, down, numerical, optimal, up


def exact_delta(epsilons, deltas, target):
    """Hockey stick of the composed worst cases [KOV15], by enumeration of all outcomes, 60 digits."""
    mpmath.mp.dps = 60
    kept = mpmath.mpf(1)
    for d in deltas:
        kept *= 1 - mpmath.mpf(d)
    total = mpmath.mpf(0)
    for signs in itertools.product((1, -1), repeat=len(epsilons)):
        p = q = mpmath.mpf(1)
        for e, s in zip(epsilons, signs, strict=True):
            high = 1 / (1 + mpmath.exp(-mpmath.mpf(e)))
            p *= high if s > 0 else 1 - high
            q *= high if s < 0 else 1 - high
        total += max(p - mpmath.exp(mpmath.mpf(target)) * q, 0)
    return 1 - kept * (1 - total)


@pytest.mark.parametrize("bound", [optimal, advanced, compose])
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 3), st.sampled_from([0.0, 1e-7, 1e-3])), min_size=1, max_size=7),
    st.sampled_from([1e-9, 1e-5, 1e-2, 0.3]),
)
def test_total_is_a_valid_bound(bound, parts, slack):
    costs = [Cost(e, d) for e, d in parts]
    delta = sum(d for _, d in parts) + slack
    total = bound(costs, delta)
    assert exact_delta(*zip(*parts, strict=True), total.epsilon) <= mpmath.mpf(delta)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-4, 0.2])
def test_optimal_is_exact_for_equal_epsilon(epsilon, delta):
    for count in (1, 2, 5, 9):
        total = optimal([Cost(epsilon)] * count, delta)
        assert exact_delta([epsilon] * count, [0] * count, total.epsilon) <= delta
        if total.epsilon > 0:
            shorter = total.epsilon - 1e-6 * count * epsilon
            assert exact_delta([epsilon] * count, [0] * count, shorter) > delta


def test_the_check_catches_a_bound_that_is_too_small():
    total = optimal([Cost(0.5)] * 6, 1e-4)
    assert exact_delta([0.5] * 6, [0] * 6, 0.95 * total.epsilon) > 1e-4
    # sqrt(k) scaling without the mean, a known mistake, is below the exact value.
    mistaken = 3.0 * math.sqrt(2 * 6 * math.log(10))
    assert exact_delta([3.0] * 6, [0] * 6, mistaken) > 0.1


def test_optimal_is_an_upper_bound_otherwise():
    epsilons = (0.3, 0.31, 0.8, 1.7, 0.05, 0.3)
    for delta in (1e-8, 1e-3):
        total = optimal([Cost(e) for e in epsilons], delta)
        assert exact_delta(epsilons, [0] * 6, total.epsilon) <= delta
        assert exact_delta(epsilons, [0] * 6, total.epsilon * 0.97 - 1e-9) > delta


def test_advanced_dominates_the_exact_composition():
    for epsilon, count, delta in ((0.1, 100, 1e-5), (0.01, 1000, 1e-6), (1.0, 30, 1e-3)):
        costs = [Cost(epsilon)] * count
        assert optimal(costs, delta).epsilon <= advanced(costs, delta).epsilon
        textbook = epsilon * math.sqrt(2 * count * math.log(1 / delta)) + count * epsilon * math.expm1(epsilon)
        assert advanced(costs, delta).epsilon <= textbook


def test_basic_sums_are_exact():
    assert basic([Cost(Decimal("0.1"))] * 10).epsilon == 1.0
    assert basic([Cost(0.1)] * 10).epsilon == math.nextafter(1.0, 2.0)
    total = basic([Cost(Fraction(1, 3), Fraction(1, 7))] * 3)
    assert total.epsilon == 1.0 and Fraction(total.delta) >= Fraction(3, 7) and total.parts == 3
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = [float(v) for v in rng.exponential(size=20)]
        total = basic([Cost(v) for v in values]).epsilon
        exact = sum(map(Fraction, values))
        assert Fraction(total) >= exact > Fraction(math.nextafter(total, 0.0))


def test_pure_privacy_stays_pure():
    total = compose([Cost(0.7), Cost(0.2)])
    assert total.delta == 0.0 and total.epsilon == up(Fraction(0.7) + Fraction(0.2)) and total.bound == "basic"
    assert compose([Cost(500.0)] * 20).epsilon == 10000.0


def test_total_is_never_above_basic():
    for count in (1, 3, 40, 500):
        total = compose([Cost(0.2, 1e-9)] * count, 1e-5)
        assert total.epsilon <= basic([Cost(0.2, 1e-9)] * count).epsilon and total.delta == 1e-5
    assert compose([Cost(0.2, 1e-9)] * 500, 1e-5).bound == "optimal"


def test_known_figures():
    # Four releases of (0.5, 1e-7) at 1e-5: 2.0; sixteen 7.98; sixty-four 23.4.
    for count, figure in ((4, 2.0), (16, 7.98), (64, 23.4)):
        total = compose([Cost(0.5, 1e-7)] * count, 1e-5)
        assert abs(total.epsilon - figure) < 0.05


def test_nothing_overflows():
    for epsilon in (1e-300, 1e-12, 40.0, 800.0, 1e6):
        for count in (1, 7, 2000):
            total = compose([Cost(epsilon)] * count, 1e-6)
            assert 0.0 <= total.epsilon <= basic([Cost(epsilon)] * count).epsilon
    mixed = compose([Cost(800.0), Cost(1e-3), Cost(3.0)], 1e-9)
    assert 800.0 <= mixed.epsilon <= 804.0
    assert compose([Cost(1.0, 0.01)] * 400, 0.999).epsilon > 0


def test_many_different_costs():
    costs = [Cost(0.05 + 0.001 * i) for i in range(60)]
    total = compose(costs, 1e-6)
    assert total.bound == "optimal"
    low, high = optimal([Cost(0.05)] * 60, 1e-6).epsilon, optimal([Cost(0.109)] * 60, 1e-6).epsilon
    assert low < total.epsilon < high


def test_concentrated_costs_add():
    single, double = concentrated([0.02], 1e-5), concentrated([0.01, 0.01], 1e-5)
    assert single.epsilon == double.epsilon and double.parts == 2
    # A pure 0.2-DP mechanism has rho = 0.02: at delta 0 it costs 0.2, by zCDP more.
    assert single.epsilon > 0.2


def test_rounding_helpers():
    for x in (Fraction(1, 3), Fraction(10**40, 7), Fraction(1, 3**700), Fraction(0), Fraction(5, 2)):
        assert Fraction(down(x)) <= x <= Fraction(up(x))
        assert up(x) == down(x) or math.nextafter(down(x), math.inf) == up(x)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: Cost(-1.0), "epsilon"),
        (lambda: Cost(math.nan), "epsilon"),
        (lambda: Cost(math.inf), "epsilon"),
        (lambda: Cost(1.0, 1.0), "delta"),
        (lambda: compose([]), "empty"),
        (lambda: compose([1.0]), "Cost"),
        (lambda: compose([Cost(1.0), Cost(1.0, adjacency="zero-out")]), "adjacency"),
        (lambda: compose([Cost(1.0, 1e-3)], 1e-4), "delta"),
        (lambda: optimal([Cost(1.0, 1e-3)], 1e-3), "delta"),
        (lambda: numerical([], 1e-5), "empty"),
    ],
)
def test_mistakes_are_refused(run, message):
    with pytest.raises(PrivacyError, match=message):
        run()


def test_a_missing_extra_is_named():
    try:
        import dp_accounting  # noqa: F401
    except ImportError:
        with pytest.raises(PrivacyError, match="dp-accounting"):
            numerical([Cost(1.0)], 1e-5)
    else:
        assert isinstance(numerical([Cost(1.0)], 1e-5), Composed)


def test_repeated_randomised_response_is_not_underestimated():
    # dp-accounting 0.6.0 charges SelfComposedDpEvent(RandomizedResponseDpEvent, c) as one event.
    accounting = pytest.importorskip("dp_accounting", reason="needs the optional extra 'accounting'")
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(accounting.NeighboringRelation.REPLACE_ONE)
    event = accounting.RandomizedResponseDpEvent(2 / (1 + math.e), 2)
    accountant.compose(accounting.SelfComposedDpEvent(event, 10))
    theirs = accountant.get_epsilon(1e-6)
    truth = exact_delta([1.0] * 10, [0] * 10, theirs)
    assert truth > 0.8  # they claim delta = 1e-6 at this epsilon
    total = numerical([Cost(1.0)] * 10, 1e-6)
    assert exact_delta([1.0] * 10, [0] * 10, total.epsilon) <= 1e-6
    assert total.epsilon > 9.0


def test_numerical_agrees_with_the_closed_form():
    pytest.importorskip("dp_accounting", reason="needs the optional extra 'accounting'")
    for epsilon, delta, count, target in ((0.5, 1e-7, 16, 1e-5), (0.1, 0.0, 200, 1e-6), (1.0, 1e-9, 3, 1e-3)):
        costs = [Cost(epsilon, delta)] * count
        theirs, ours = numerical(costs, target, step=1e-3), optimal(costs, target)
        assert ours.epsilon - 1e-9 <= theirs.epsilon <= ours.epsilon + 2e-3 * count
    mixed = [Cost(0.3), Cost(0.31), Cost(0.8), Cost(1.7)]
    total = numerical(mixed, 1e-4)
    assert exact_delta([0.3, 0.31, 0.8, 1.7], [0] * 4, total.epsilon) <= 1e-4
