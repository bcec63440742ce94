"""Smooth bounds: directed rounding, smoothness and domination, refusal of gaps."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify.errors import PrivacyError, RadiusError
from privacy import smooth

FLOATS = st.floats(-1e6, 1e6)


@given(FLOATS, FLOATS)
def test_subtraction_rounds_up(a, b):
    up = float(smooth.subtract_up(a, b))
    exact = Fraction(a) - Fraction(b)
    assert Fraction(up) >= exact
    assert Fraction(float(np.nextafter(up, -np.inf))) < exact


def paths(seed, length, count):
    """Random functions on a path of data sets (neighbours: adjacent), with their exact envelopes for radii
    0..length."""
    values = np.round(np.random.default_rng(seed).normal(size=(count, length)) * 8) / 8
    for f in values:
        lower = np.array([[f[max(0, i - k) : i + k + 1].min() for i in range(length)] for k in range(length + 1)])
        upper = np.array([[f[max(0, i - k) : i + k + 1].max() for i in range(length)] for k in range(length + 1)])
        yield f, lower, upper


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("stored", [1, 2, 3, 7])
def test_bound_is_smooth_and_at_least_local_sensitivity(beta, stored):
    for f, lower, upper in paths(1, 7, 40):
        ceiling = np.ptp(f) + 0.125
        s = smooth.smooth_bound(smooth.cross_ranges(lower[: stored + 1], upper[: stored + 1]), ceiling, beta)
        local = np.abs(np.diff(f))
        assert np.all(local <= np.minimum(s[1:], s[:-1]))
        assert np.all(np.abs(np.diff(np.log(s))) <= beta + math.log1p(smooth.TAU))


def test_radius_zero_counts():
    # One radius step only: S must contain A_0 undiscounted, whatever beta.
    cross = np.array([[1.0], [1.0], [1.0]])
    assert smooth.smooth_bound(cross, 1.0, 5.0)[0] == 1.0


def test_cross_ranges_are_monotone_across_neighbours():
    for _, lower, upper in paths(2, 6, 40):
        cross = smooth.cross_ranges(lower, upper)
        assert np.all(cross[:-1, 1:] <= cross[1:, :-1])
        assert np.all(cross[:-1, :-1] <= cross[1:, 1:])


def test_cross_range_is_not_the_half_range():
    lower, upper = np.array([[0.0], [-1.0], [-1.5]]), np.array([[0.0], [1.0], [3.0]])
    assert smooth.cross_ranges(lower, upper).tolist() == [[1.0], [4.0]]
    both = np.stack([lower, lower], axis=-1), np.stack([upper, upper], axis=-1)
    assert smooth.sum_outputs(smooth.cross_ranges(*both)).tolist() == [[2.0], [8.0]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=12),
    st.floats(0.01, 12.0),
    st.floats(1e-6, 200.0),
)
def test_bound_is_within_tau_of_the_exact_one(increments, ceiling, beta):
    import mpmath

    mpmath.mp.prec = 200
    cross = np.cumsum(increments)
    s = float(smooth.smooth_bound(cross[:, None], ceiling, beta)[0])

    def w(k):
        return mpmath.exp(-min(mpmath.mpf(beta) * k, 600))

    terms = [w(k) * min(mpmath.mpf(float(x)), mpmath.mpf(ceiling)) for k, x in enumerate(cross)]
    exact = max([*terms, w(len(cross)) * mpmath.mpf(ceiling)])
    assert exact <= s <= exact * (1 + mpmath.mpf(smooth.TAU))


def test_weights_are_nonincreasing_and_shrink_at_most_by_beta():
    for beta in (2.0**-40, 1e-9, 1e-3, 0.1, 7.0, 700.0):
        start = int(590 / beta)
        for first in (0, start):
            w = [smooth.weight(beta, k) for k in range(first, first + 2000)]
            assert all(b <= a for a, b in zip(w, w[1:], strict=False))
            assert all(math.log(a / b) <= beta + smooth.TAU for a, b in zip(w, w[1:], strict=False))


def test_noncontiguous_radii_are_refused():
    cross = np.ones((3, 1))
    with pytest.raises(RadiusError, match="without gaps"):
        smooth.smooth_bound(cross, 1.0, 0.5, radii=(0, 1, 2, 4))
    with pytest.raises(RadiusError, match="increase strictly"):
        smooth.smooth_bound_indexed(cross, 1.0, 0.5, radii=(1, 2, 3, 4))
    smooth.smooth_bound(cross, 1.0, 0.5, radii=(0, 1, 2, 3))


def test_indexed_bound_is_smooth_for_sparse_radii():
    radii = (0, 1, 3, 6)
    for f, lower, upper in paths(3, 8, 60):
        cross = smooth.cross_ranges(lower[list(radii)], upper[list(radii)])
        for beta in (0.05, 0.5):
            s = smooth.smooth_bound_indexed(cross, np.ptp(f) + 0.125, beta, radii)
            assert np.all(np.abs(np.diff(f)) <= np.minimum(s[1:], s[:-1]))
            assert np.all(np.abs(np.diff(np.log(s))) <= beta + math.log1p(smooth.TAU))


@pytest.mark.parametrize("ceiling", [0.0, -1.0, math.inf, math.nan])
def test_bad_ceilings_are_refused(ceiling):
    with pytest.raises(PrivacyError, match="ceiling"):
        smooth.smooth_bound(np.ones((2, 1)), ceiling, 0.5)


@pytest.mark.parametrize("beta", [-1.0, 1e-14, math.inf, math.nan])
def test_bad_betas_are_refused(beta):
    with pytest.raises(PrivacyError, match="beta"):
        smooth.smooth_bound(np.ones((2, 1)), 1.0, beta)


def test_broken_bounds_are_refused():
    for lower, upper in [([0.0, 1.0], [0.0, -1.0]), ([0.0, math.nan], [0.0, 1.0]), ([0.0], [0.0])]:
        with pytest.raises(PrivacyError):
            smooth.cross_ranges(lower, upper)
