"""Queries with several outputs and batches: joint or separate releases, their exact losses, and the public rule."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ags import directed_cauchy, power_loss
from test_privacy_agtr import RANGE, envelope, linear_bounds, world
from test_privacy_audit import build_world, mean_gradient

import privacy
from certify.errors import PrivacyError
from privacy import agtr, mechanism, noise, smooth
from privacy.mechanism import Mechanism, default_family, expected_noise

SLACK = 1 + 1e-9
INPUTS = np.array([1.0, -2.0, 0.5])


# -- norms --------------------------------------------------------------------------------------------------------

entries = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=3, max_size=3)


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@given(values=entries, more=entries)
def test_norm_of_cross_ranges_is_monotone_and_rounds_up(norm, values, more):
    small, large = np.array(values), np.maximum(values, more)
    weights = np.array([0.3, 1.0, 7.0])
    found = float(smooth.norm_outputs(small, norm, weights))
    assert found <= float(smooth.norm_outputs(large, norm, weights))
    exact = [Fraction(v) * Fraction(w) for v, w in zip(values, weights.tolist(), strict=True)]
    if norm == "l2":
        assert Fraction(found) ** 2 >= sum(e * e for e in exact)
    else:
        assert Fraction(found) >= (sum(exact) if norm == "l1" else max(exact))
    order = {"l1": 1, "l2": 2, "linf": np.inf}[norm]
    assert found <= float(np.linalg.norm(weights * small, order)) * (1 + 1e-14) + 1e-160


def test_bad_norms_and_weights_are_refused():
    with pytest.raises(PrivacyError, match="norm"):
        smooth.norm_outputs(np.ones(2), "l3")
    with pytest.raises(PrivacyError, match="negative"):
        smooth.norm_outputs(np.array([-1.0, 0.0]), "l1")
    for weights in ([0.0, 1.0], [np.nan, 1.0], [-1.0, 1.0], [np.inf, 1.0]):
        with pytest.raises(PrivacyError, match="weights"):
            smooth.norm_outputs(np.ones(2), "l1", np.array(weights))


# -- exact losses in small worlds ---------------------------------------------------------------------------------


def releases(family, epsilon, output_range, joint, outputs):
    """(nominal (W, n), noise scales (W, n), weights, pairs) of every data set of a world of three records."""
    lower, upper, pairs = build_world(mean_gradient, 3, 1, [[0, 1, 2]])
    inputs = INPUTS[:outputs, None, None]
    lo, up = np.minimum(inputs * lower, inputs * upper), np.maximum(inputs * lower, inputs * upper)
    nominal, scale = [], []
    for i in range(lower.shape[1]):
        low, high = lo[:, :, i].T[:, None], up[:, :, i].T[:, None]  # (K+1, 1, outputs)
        _, private = privacy.release_predictions(
            low[0], low, high, None, output_range, epsilon, family=family, joint=joint
        )
        nominal.append(private.nominal[0])
        scale.append(private.scale[0])
    return np.array(nominal), np.array(scale), pairs


def joint_loss(family, nominal, scale, i, j):
    """Exact loss of one vector: rescale by the scales of one data set, which differ by one factor between the two."""
    w = scale[i][0] / scale[i]
    f, g, s, t = w * nominal[i], w * nominal[j], scale[i][0], scale[j][0]
    assert np.allclose(w, scale[j][0] / scale[j])
    if family == "cauchy":
        ways = ((f, s, g, t), (g, t, f, s))
        return max(sum(directed_cauchy(a, x, b, y) for a, b in zip(p, q, strict=True)) for p, x, q, y in ways)
    return power_loss(f, s, g, t, noise.make_family(family, 1.0, 0.0, len(f)))


RANGES = {"one range": (-0.75, 0.5), "a range for each": ([-0.75, -1.5], [0.5, 1.0])}


@pytest.mark.parametrize("ends", RANGES)
@pytest.mark.parametrize("family", ["cauchy", "l1-power", "box-power"])
def test_a_joint_release_of_two_outputs_is_dp(family, ends):
    nominal, scale, pairs = releases(family, 1.0, RANGES[ends], True, 2)
    worst = max(joint_loss(family, nominal, scale, i, j) for i, j in pairs)
    assert 0.2 < worst <= 1.0 * SLACK
    assert np.all(scale[:, 1] == (2.0 if ends == "a range for each" else 1.0) * scale[:, 0])
    # The harness notices too little noise.
    assert max(joint_loss(family, nominal, scale / 6, i, j) for i, j in pairs) > 1.0


def test_separate_releases_of_two_outputs_compose():
    nominal, scale, pairs = releases("cauchy", 1.0, (-0.75, 0.5), False, 2)
    worst = 0.0
    for i, j in pairs:
        both = itertools.product([(i, j), (j, i)], range(2))
        loss = {way: 0.0 for way in ((i, j), (j, i))}
        for (a, b), q in both:
            loss[a, b] += directed_cauchy(nominal[a, q], scale[a, q], nominal[b, q], scale[b, q])
        worst = max(worst, *loss.values())
    assert 0.2 < worst <= 1.0 * SLACK


def test_a9_one_dimensional_beta_for_a_vector_is_refused_by_the_calibration():
    """Audit A9: n outputs cost n beta. A joint vector never accepts the beta of one dimension."""
    free = math.log(2 * math.cosh(1.0) - 1)
    for n in (2, 6, 50):
        with pytest.raises(PrivacyError, match="beta"):
            Mechanism.make("cauchy", 1.0, 0.0, n, (free,))
        for family in ("cauchy", "l1-power"):
            assert all(n * pair.beta < 1.0 for pair in Mechanism.make(family, 1.0, 0.0, n).pairs)


# -- groups and the public rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("joint", "per_query", "releases", "dimension"),
    [(True, False, 1, 6), (False, False, 6, 1), (True, True, 3, 2), (False, True, 6, 1)],
)
def test_groups_and_their_shares(joint, per_query, releases, dimension):
    made = linear_bounds(range(5), outputs=2)
    queries = np.arange(3.0)[:, None]
    one = privacy.predict_from_bounds(
        envelope(), made, queries, 0.6, output_range=RANGE, joint=joint, per_query=per_query
    )
    g = one.guarantee
    assert (g.releases, g.dimension) == (releases, dimension) and one.values.shape == (3, 2)
    total = Fraction(0.6) * (3 if per_query else 1)
    assert Fraction(g.epsilon_per_release) * releases <= total <= Fraction(g.epsilon)
    assert np.all(np.abs(one.values) <= 1.0)
    assert np.all(one.values / g.grid[0] == np.round(one.values / g.grid[0]))


def test_the_rule_sees_public_facts_only():
    nominal, lower, upper = world(4, 3)
    first = privacy.release_predictions(nominal, lower, upper, None, RANGE, 2.0)[0].guarantee
    for factor in (0.0, 0.01, 1.5):
        sides = [nominal + factor * (x - nominal) for x in (lower, upper)]
        assert privacy.release_predictions(nominal, *sides, None, RANGE, 2.0)[0].guarantee == first


def test_the_rule_takes_the_smaller_expected_noise():
    for epsilon, delta, shape in [(1.0, 0.0, (1, 2)), (0.5, 0.0, (1, 6)), (2.0, 1e-6, (1, 4)), (1.0, 1e-5, (8, 1))]:
        chosen = agtr._terms(epsilon, delta, shape, False, None, None, "x", agtr._sizes(None, shape, False)).mechanism
        costs = {}
        for size in agtr._sizes(None, shape, False):
            share = [noise.split_budget(v, shape[0] * shape[1] // size) for v in (epsilon, delta)]
            costs[size] = expected_noise(Mechanism.make(None, *share, size), size)
        assert costs[chosen.dim] == min(costs.values())


def test_expected_noise_is_the_noise_of_a_growing_cross_range():
    """The figure of merit equals the noise of the smooth bound of A_k = 2k + 1 in every coordinate."""
    for name, dim in (("cauchy", 1), ("cauchy", 3), ("l1-power", 4), ("box-power", 4)):
        made = Mechanism.make(name, 1.0, 0.0, dim)
        k = np.arange(2001.0)[:, None, None] * np.ones(dim)
        bounds = mechanism.smooth_bounds(-k, k, np.full((1, dim), 1e9), made)
        # U_{k+1} - L_k = 2k + 1
        scale = noise.noise_scale(bounds, made.pairs)[0]
        if all(s[0] < 1e5 for s in bounds.values()):
            assert scale * made.family.tail(dim) == pytest.approx(expected_noise(made, dim), rel=1e-6)


def test_default_family_is_pure_without_delta():
    for dim in (1, 2, 20):
        assert default_family(1.0, 0.0, dim).privacy == "pure"
    assert default_family(1.0, 1e-5, 1).name == "laplace"
    made = Mechanism.make(None, 1.0, 1e-5, 3)
    assert made.delta == (0.0 if made.family.privacy == "pure" else 1e-5)


def test_noise_that_is_not_for_one_norm_is_refused():
    for attribute, value in (("privacy", "concentrated"), ("norm", "coordinates")):
        kind = SimpleNamespace(**{"name": "x", "norm": "l1", "privacy": "pure", attribute: value})
        with pytest.raises(PrivacyError, match="choose cauchy"):
            Mechanism.make(kind, 1.0, 0.0, 2)


def test_radii_on_demand_are_released_on_their_own():
    radii = (0, 1, 2, 3, 4, 5, 6, 12, 13, 14)
    auto = envelope(radii, {"beta": 0.7, "queries_sha256": "0" * 64})
    queries = np.arange(2.0)[:, None]
    one = privacy.predict_from_bounds(auto, linear_bounds(radii), queries, 2.0, output_range=RANGE)
    assert one.guarantee.releases == 2 and one.guarantee.dimension == 1
    with pytest.raises(PrivacyError, match="joint"):
        privacy.predict_from_bounds(auto, linear_bounds(radii), queries, 2.0, output_range=RANGE, joint=True)


def test_repeated_inputs_share_an_answer_in_a_joint_release():
    queries = np.array([[1.0], [2.0], [1.0]])
    one = privacy.predict_from_bounds(
        envelope(), linear_bounds(range(5), outputs=2), queries, 40.0, output_range=RANGE, joint=True
    )
    assert one.guarantee.dimension == 4
    assert np.array_equal(one.values[0], one.values[2]) and not np.array_equal(one.values[0], one.values[1])


def test_one_noise_vector_serves_all_numbers_of_a_group(monkeypatch):
    drawn = []
    family = noise.make_family("l1-power", 1.0, 0.0, 6)
    original = type(family).draw
    monkeypatch.setattr(type(family), "draw", lambda self, dim, bits: drawn.append(dim) or original(self, dim, bits))
    nominal, lower, upper = world(3, 2)
    privacy.release_predictions(nominal, lower, upper, None, RANGE, 1.0, family="l1-power", joint=True)
    assert drawn == [6]
