"""Dense maximum on demand: equal to brute force, few evaluations, refusal when not proven."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify.errors import PrivacyError, RadiusError
from privacy import dense
from privacy.smooth import discounted, smooth_bound, weight


def brute(a, ceiling, beta):
    """Every index, then the public floor."""
    terms = [discounted(np.minimum(row, ceiling), weight(beta, k)) for k, row in enumerate(a)]
    return np.maximum(np.max(terms, axis=0), discounted(ceiling, weight(600.0, 1)))


class Counter:
    def __init__(self, a):
        self.a, self.asked = a, []

    def __call__(self, ks):
        self.asked += ks
        return {k: self.a[k] for k in ks}


SEQUENCES = st.integers(0, 60).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.5, 1.0, 7.0]), min_size=n + 1, max_size=n + 1),
        min_size=1,
        max_size=3,
    )
)


@settings(max_examples=300, deadline=None)
@given(SEQUENCES, st.sampled_from([0.0, 1e-6, 0.01, 0.1, 0.7, 30.0]), st.floats(0.01, 50.0))
def test_dense_maximum_equals_brute_force(increments, beta, ceiling):
    a = np.cumsum(increments, axis=1).T
    ceilings = ceiling * np.arange(1, a.shape[1] + 1)
    count = Counter(a)
    result = dense.dense_maximum(count, ceilings, beta, len(a) - 1)
    assert np.array_equal(result, brute(a, ceilings, beta))
    assert len(count.asked) == len(set(count.asked))


@pytest.mark.parametrize("beta", [0.003, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("shape", ["linear", "late", "steps", "saturating", "exponential"])
def test_few_evaluations(beta, shape):
    k = np.arange(5001)
    a = {
        "linear": 0.01 * (2 * k + 1),
        "late": 0.01 + 50.0 * (k > 700),
        "steps": 0.05 * 2.0 ** np.floor(np.log2(k + 1)),
        "saturating": 10 * (1 - np.exp(-(k + 1) / 50)),
        "exponential": 1e-3 * np.exp(np.minimum(0.04 * k, 50)),
    }[shape][:, None]
    count = Counter(a)
    result = dense.dense_maximum(count, np.array([100.0]), beta, 5000)
    assert np.array_equal(result, brute(a, np.array([100.0]), beta))
    assert len(count.asked) <= 20 + 8 / beta**0.5, len(count.asked)


def test_dense_maximum_is_smooth_when_the_last_range_is_common():
    rng = np.random.default_rng(5)
    for _ in range(30):
        f = rng.integers(0, 8, size=9) / 8.0
        lower = np.array([[f[max(0, i - k) : i + k + 1].min() for i in range(9)] for k in range(10)])
        upper = np.array([[f[max(0, i - k) : i + k + 1].max() for i in range(9)] for k in range(10)])
        upper[9], lower[9] = upper[8], lower[8]
        cross = np.maximum(upper[1:] - lower[:-1], upper[:-1] - lower[1:])
        for beta in (0.1, 1.0):
            s = np.concatenate(
                [dense.dense_maximum(Counter(cross[:, i : i + 1]), np.array([2.0]), beta, 8) for i in range(9)]
            )
            assert np.all(np.abs(np.diff(f)) <= np.minimum(s[1:], s[:-1]))
            if np.all(s > 1e-200):
                assert np.all(np.abs(np.diff(np.log(s))) <= beta + 1e-12)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.sampled_from([0.01, 0.1, 0.7, 5.0]), st.data())
def test_sparse_result_is_the_dense_one(increments, beta, data):
    a = np.cumsum(increments, axis=1).T
    ceiling = a[-1] + 0.01
    ks = data.draw(st.sets(st.integers(0, len(a) - 1)))
    radii = sorted({r for k in ks for r in (k, k + 1)})
    # Without a limit the sequence goes on; the worst continuation is G, which smooth_bound's tail stands for.
    try:
        result = dense.dense_from_sparse(radii, {k: a[k] for k in ks}, ceiling, beta)
    except PrivacyError as error:
        assert "compute radii" in str(error)
        return
    assert np.array_equal(result, smooth_bound(a, ceiling, beta))


def test_sparse_refusal_names_radii_that_settle_it():
    a = 0.01 * (2 * np.arange(2001)[:, None] + 1)
    ceiling, beta, known = np.array([5.0]), 0.05, {0: a[0]}
    for _ in range(15):
        radii = sorted({r for k in known for r in (k, k + 1)})
        try:
            result = dense.dense_from_sparse(radii, known, ceiling, beta)
            break
        except PrivacyError:
            needed = dense.needed_radii(known, ceiling, beta)
            assert set(needed) - set(radii)
            known |= {k: a[k] for k in needed if k + 1 in {*needed, *radii}}
    assert len(known) < 60
    assert np.array_equal(result, brute(a, ceiling, beta))
    assert dense.needed_radii(known, ceiling, beta) == ()


def test_backfilled_gap_is_refused():
    with pytest.raises(PrivacyError, match="compute radii"):
        dense.dense_from_sparse([0, 1, 2, 64], {0: [0.0], 1: [1e-9]}, [1.0], 0.5)
    with pytest.raises(RadiusError, match="index 1 needs radii"):
        dense.dense_from_sparse([0, 1, 64], {0: [0.0], 1: [1.0]}, [1.0], 0.5)


def test_decreasing_ranges_are_refused():
    with pytest.raises(PrivacyError, match="decreases"):
        dense.dense_from_sparse([0, 1, 2], {0: [0.5], 1: [0.25]}, [1.0], 0.5)
