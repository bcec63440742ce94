"""Training over random graphs: skip connections, shared and transposed weights, positions, products of activations."""

from __future__ import annotations

import numpy as np
from builders import final, random_graph, sliding, stepwise, window
from hypothesis import given, settings
from hypothesis import strategies as st

from models.losses import Huber, Squared
from solvers.ibp import Plan, output_bounds

seeds = given(st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@seeds
def test_a_small_step_is_minus_the_rate_times_the_gradient(seed):
    """The nominal trainer against finite differences of the loss, through every path a gradient can take."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    features, targets = rng.normal(size=(4, 3)), rng.normal(size=(4, graph.outputs))
    theta = graph.initial()
    made = window(graph, features, targets, [range(4)], (), rate=1.0, clip=1e6, normaliser=1)
    gradient = theta - final(made).nominal
    loss = Squared()

    def total(at):
        return loss.value(graph.evaluate(features, at).T, targets.T).sum()

    step = 1e-6
    for j in range(len(theta)):
        up, down = theta.copy(), theta.copy()
        up[j] += step
        down[j] -= step
        right, left, middle = total(up), total(down), total(theta)
        forward, backward = (right - middle) / step, (middle - left) / step
        if abs(forward - backward) > 1e-3 * (1 + abs(forward)):
            continue  # a kink within the step
        np.testing.assert_allclose(gradient[j], (right - left) / (2 * step), rtol=2e-3, atol=2e-3)


@settings(max_examples=80, deadline=None)
@seeds
def test_envelopes_of_random_graphs_are_sound_and_nest_across_neighbours(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, products=["natural", "midpoint-radius"][rng.integers(2)])
    slots, radii = 6, (0, 1, 2, 3, 6)
    features = np.round(rng.normal(size=(slots, 3)), 1)
    targets = np.round(rng.normal(size=(slots, graph.outputs)), 1)
    other_features, other_targets = features.copy(), targets.copy()
    slot = rng.integers(slots)
    other_features[slot] = rng.normal(size=3) * 10.0 ** rng.integers(-1, 3)
    other_targets[slot] = rng.normal(size=graph.outputs) * 3
    batches = [rng.permutation(slots)[: rng.integers(2, slots + 1)] for _ in range(3)]
    options = {"rate": 0.2, "clip": float(rng.choice([0.05, 1.0])), "loss": [Squared(), Huber(0.3)][rng.integers(2)]}
    bound = [final, stepwise, sliding(3, 2)][rng.integers(3)]
    one = bound(window(graph, features, targets, batches, radii, **options))
    two = bound(window(graph, other_features, other_targets, batches, radii, **options))
    np.testing.assert_array_equal(one.lower[0], one.nominal)
    np.testing.assert_array_equal(one.upper[0], one.nominal)
    queries = rng.normal(size=(3, 3))
    bounds = [output_bounds(graph, b.lower, b.upper, queries, radii) for b in (one, two)]
    for j in range(len(radii) - 1):
        assert (one.lower[j + 1] <= one.lower[j]).all() and (one.upper[j] <= one.upper[j + 1]).all()
        if radii[j + 1] == radii[j] + 1:
            assert (one.lower[j + 1] <= two.lower[j]).all() and (two.upper[j] <= one.upper[j + 1]).all()
            assert (bounds[0].lower[j + 1] <= bounds[1].lower[j]).all()
            assert (bounds[1].upper[j] <= bounds[0].upper[j + 1]).all()
    assert (one.lower[1] <= two.nominal).all() and (two.nominal <= one.upper[1]).all()


@settings(max_examples=40, deadline=None)
@seeds
def test_degenerate_boxes_give_the_nominal_gradients_bit_for_bit(seed):
    """Interval training without the ladder on a point equals nominal training: one arithmetic, not two."""
    from solvers import ibp as module

    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    features, targets = rng.normal(size=(5, 3)), rng.normal(size=(5, graph.outputs))
    made = window(graph, features, targets, [range(5)], (), clip=0.3)
    plan, theta, scale = Plan(graph), graph.initial(), 2.0**40
    x, y = made.records.features, made.records.targets
    point, bad = module.record_gradients(plan, made, x, y, plan.shared(theta), None, scale)
    box, bad_box = module.record_gradients(plan, made, x, y, plan.shared_interval(theta, theta, 0.0), 0.0, scale)
    assert list(bad) == list(bad_box) and set(point) == set(box)
    for name in point:
        dense = [
            module._total([c.dense(ladder) if hasattr(c, "dense") else c for c in found[name]], ladder)
            for found, ladder in ((point, None), (box, 0.0))
        ]
        np.testing.assert_array_equal(dense[0], dense[1].lower)
        np.testing.assert_array_equal(dense[0], dense[1].upper)
