"""Aggregation over shards: sensitivity of the mean, smooth bounds of the mean, exhaustive small worlds."""

import itertools
import math

import numpy as np
import pytest
from builders import mlp
from scipy import stats
from test_privacy_audit import build_world, mean_gradient
from test_privacy_oracle import cauchy_epsilon, laplace_delta

import certify
import privacy
from certify.errors import PrivacyError
from certify.recipe import from_dict
from privacy import pate, smooth


def test_shards_are_disjoint_runs_of_slots():
    shards = pate.shard_slots(10, 3)
    assert np.array_equal(np.concatenate(shards), np.arange(10)) and [len(s) for s in shards] == [4, 3, 3]
    with pytest.raises(PrivacyError, match="shards"):
        pate.shard_slots(3, 4)


def test_one_record_moves_one_teacher():
    """The released mean moves by at most R/T, in exact arithmetic, and by that much."""
    rng = np.random.default_rng(0)
    outputs = rng.uniform(-9.0, 9.0, (7, 5, 2))
    clipped = np.clip(outputs, -0.3, 0.7)
    other = clipped.copy()
    other[3] = np.where(clipped[3] > 0.2, -0.3, 0.7)
    one, two = (np.array(pate.exact_mean(x)) for x in (clipped, other))
    limit = (pate.Fraction(0.7) - pate.Fraction(-0.3)) / 7
    assert max(abs(one - two)) <= limit
    clipped[3], other[3] = -0.3, 0.7
    assert max(abs(np.array(pate.exact_mean(clipped)) - np.array(pate.exact_mean(other)))) == limit


def test_pate_release_is_epsilon_dp():
    outputs = np.full((4, 3000, 1), 0.25)
    made = pate.pate_release(outputs, (-1.0, 1.0), 3000 * 40.0)
    # Each of 3000 entries has epsilon 40 and sensitivity 2/4: Laplace of scale 1/80.
    assert made.guarantee.scale == pytest.approx(1 / 80) and made.guarantee.sensitivity == 0.5
    assert stats.kstest((made.values.ravel() - 0.25) * 80, "laplace").pvalue > 1e-6
    assert "4 public shards" in made.guarantee.mechanism and made.guarantee.epsilon == 120000.0


def shard_world(k_max=3):
    """Two shards of two records each, all data sets: query bounds by shard content and radius."""
    lower, upper, pairs = build_world(mean_gradient, 2, 2, [[0, 1]])
    lower, upper = (np.clip(2 * x, -0.25, 1.0) for x in (lower, upper))
    # Radius 3 repeats radius 2: all records replaced.
    lower, upper = (np.concatenate([x, x[-1:]])[: k_max + 1] for x in (lower, upper))
    return lower, upper, {(i, j) for i, j in pairs} | {(j, i) for i, j in pairs}


def spend(rule, family, epsilon, delta):
    """Worst (sensitivity ratio, smoothness excess, loss over claim) over all neighbours of all pairs of shards."""
    lower, upper, neighbours = shard_world()
    states = range(lower.shape[1])
    pairs = privacy.admissible_pairs(family, epsilon, delta)
    laws = {}
    for i, j in itertools.product(states, states):
        low, high = (np.stack([x[:, i], x[:, j]])[:, :, None, None] for x in (lower, upper))
        by_beta, scale = rule(low, high, 1.25, pairs)
        laws[i, j] = (lower[0, i] + lower[0, j]) / 2, {b: s[0, 0] for b, s in by_beta.items()}, scale[0, 0]
    worst = [0.0, -1.0, 0.0]
    for (i, j), k in itertools.product(laws, states):
        if (j, k) not in neighbours:
            continue
        (f, s, scale), (f2, s2, scale2) = laws[i, j], laws[i, k]
        for beta in s:
            worst[0] = max(worst[0], abs(f - f2) / min(s[beta], s2[beta]))
            worst[1] = max(worst[1], abs(math.log(s[beta] / s2[beta])) - beta)
        if family == "cauchy":
            loss = cauchy_epsilon(f, scale, f2, scale2) / epsilon
        else:
            loss = laplace_delta(epsilon, f, scale, f2, scale2) / delta
        worst[2] = max(worst[2], loss)
    return worst


@pytest.mark.parametrize(
    ("family", "epsilon", "delta"), [("cauchy", 1.0, 0.0), ("cauchy", 5.0, 0.0), ("laplace", 1.0, 1e-2)]
)
def test_shard_maximum_is_a_smooth_bound_of_the_mean(family, epsilon, delta):
    ratio, excess, loss = spend(pate.pate_agtr_scale, family, epsilon, delta)
    assert ratio <= 1.0 and excess <= math.log1p(smooth.TAU) and loss <= 1 + 1e-9


def test_wrong_aggregations_are_caught():
    """The mean of the S_i over T is no bound, nor is their minimum, nor their maximum over T squared."""

    def aggregated(combine):
        def rule(lower, upper, ceiling, pairs):
            crosses = [smooth.cross_ranges(*sides) for sides in zip(lower, upper, strict=True)]
            by_beta = {p.beta: combine([smooth.smooth_bound(c, ceiling, p.beta) for c in crosses]) / 2 for p in pairs}
            return by_beta, privacy.noise_scale(by_beta, pairs)

        return rule

    for combine in (lambda s: np.mean(s, axis=0), lambda s: np.min(s, axis=0), lambda s: np.max(s, axis=0) / 2):
        ratio, _, loss = spend(aggregated(combine), "cauchy", 5.0, 0.0)
        assert ratio > 1.0 and loss > 1.0


def test_pate_agtr_release_is_dp():
    lower, upper, _ = shard_world()
    low, high = (np.stack([x[:, 0], x[:, 4]])[:, :, None, None] for x in (lower, upper))
    made = pate.pate_agtr_release(low[:, 0], low, high, None, (-0.25, 1.0), 1.0)
    assert made.values.shape == (1, 1) and -0.25 <= made.values[0, 0] <= 1.0
    assert math.isnan(made.guarantee.scale) and made.guarantee.delta == 0.0
    with pytest.raises(PrivacyError, match="radius 0"):
        pate.pate_agtr_release(low[:, 0] + 0.1, low, high, None, (-0.25, 1.0), 1.0)
    with pytest.raises(PrivacyError, match="do not fit"):
        pate.pate_agtr_release(low[:1, 0], low, high, None, (-0.25, 1.0), 1.0)
    with pytest.raises(PrivacyError, match="output_range"):
        pate.pate_release(np.zeros((2, 1, 1)), (1.0, 1.0), 1.0)


def test_predict_pate_end_to_end():
    recipe = from_dict(
        {
            "training": {
                "loss": "squared", "clip": 0.5, "steps": 3, "learning_rate": {"schedule": "constant", "value": 0.1},
            },
            "features": {"lower": -1.0, "upper": 1.0}, "target": {"lower": -1.0, "upper": 1.0},
            "output": {"lower": -1.0, "upper": 1.0},
        }
    )  # fmt: skip
    graph, rng = mlp((2, 1)), np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (21, 2)), rng.uniform(-1, 1, 21)
    envelopes = [certify.run(graph, recipe, x[s], y[s], range(4), threads=1) for s in pate.shard_slots(21, 2)]
    made = pate.predict_pate(envelopes, graph, np.array([[0.1, 0.2], [0.5, 0.5], [0.1, 0.2]]), 4.0)
    assert made.values.shape == (3, 1) and made.values[0] == made.values[2]
    other = certify.run(graph, recipe, x[:10], y[:10], range(3), threads=1)
    with pytest.raises(PrivacyError, match="differ"):
        pate.predict_pate([envelopes[0], other], graph, np.zeros((1, 2)), 1.0)
