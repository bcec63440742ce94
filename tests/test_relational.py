"""Relational certificates and chained boxes: enumeration, random neighbours, attacks.

All comparisons are exact, without any tolerance.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from builders import mlp, sliding, window
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ibp import SCHEDULES
from test_meanvalue import LOSSES, RADII, Worlds, check_pair, contracting, random_windows, ranged

from models.losses import Huber, Logistic, Squared
from solvers.expansion import Expansion
from solvers.ibp import Plan, ibp, nominal_run, output_bounds
from solvers.meanvalue import meanvalue
from solvers.relational import certified, output_differences, relational, schedule_classes
from solvers.window import Boxes


def certified_ibp(made, threads=1):
    return certified(made, ibp(made, threads), threads)


def classified(bounds):
    """With the classes of the slots over all steps stated, as the driver does."""

    def bound(made):
        classes = schedule_classes((s.batch for s in made.steps), made.records.slots)
        return bounds(replace(made, classes=classes))

    return bound


WAYS = {
    "window": ("replace-one", sliding(9, 9, relational)),
    "short windows": ("replace-one", sliding(2, 2, relational)),
    "overlapping": ("replace-one", sliding(3, 1, relational)),
    "certified ibp": ("replace-one", sliding(2, 2, certified_ibp)),
    "classes": ("replace-one", classified(sliding(2, 1, relational))),
    "zero-out": ("zero-out", sliding(9, 9, relational)),
}


def check_differences(worlds, classes):
    """The bound of radius k holds for every two neighbours within k, and is monotone across neighbours."""
    names, far = np.array(worlds.names), worlds.far
    for i, boxes in enumerate(worlds.boxes):
        found = boxes.difference
        assert (found[0] == 0.0).all() and (found[1:] >= found[:-1]).all()
        for j, k in enumerate(RADII):
            near = np.flatnonzero(far[i] <= k)
            one, two = np.nonzero(far[np.ix_(near, near)] == 1)
            apart = np.abs(worlds.theta[near[one]] - worlds.theta[near[two]])
            slot = (names[near[one]] != names[near[two]]).argmax(axis=1)
            assert (apart <= found[j, classes[slot]]).all()
            assert ((apart**2).sum(axis=1) ** 0.5 <= boxes.length[j, classes[slot]]).all()
        for v in worlds.neighbours(i):
            assert (found[:-1] <= worlds.boxes[v].difference[1:]).all()
            assert (boxes.length[:-1] <= worlds.boxes[v].length[1:]).all()


def check_world(way, loss, schedule, size):
    adjacency, bounds = WAYS[way]
    worlds = Worlds(bounds, loss, schedule, adjacency, size)
    worlds.check_boxes()
    batches = [np.asarray(b) for b in SCHEDULES[schedule]]
    check_differences(worlds, schedule_classes(batches, 4) if way == "classes" else np.zeros(4, int))


PICKS = [
    ("window", "squared", "full batch"),
    ("window", "logistic", "overlapping, one of a single slot"),
    ("window", "smoothed-hinge", "minibatches"),
    ("short windows", "huber", "full batch"),
    ("overlapping", "squared", "minibatches"),
    ("certified ibp", "logistic", "full batch"),
    ("classes", "huber", "minibatches"),
    ("zero-out", "squared", "full batch"),
]


@pytest.mark.parametrize(("way", "loss", "schedule"), PICKS)
def test_every_small_world_is_sound_and_monotone(way, loss, schedule):
    """All 81 data sets over two records and the empty slot: boxes and certificates, all pairs, all radii."""
    check_world(way, loss, schedule, 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_larger_world_is_sound_and_monotone(way, loss, schedule):
    """The same with three records and the empty slot: 256 data sets."""
    check_world(way, loss, schedule, 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_neighbours_nest_exactly_and_stay_inside(seed):
    ways = [sliding(9, 9, relational), sliding(1, 1, relational), sliding(3, 2, relational), classified(relational_end)]
    radii, one, two = random_windows(seed, ways[seed % 4])
    check_pair(radii, one, two)
    check_certificates(radii, one, two)


@pytest.mark.parametrize("batches", [[range(8)] * 4, [range(4), range(4, 8)] * 2], ids=["full", "minibatches"])
def test_lengths_are_bounded_over_a_ball_that_holds_every_run_within_the_radius(batches, monkeypatch):
    """Before every step, for neighbours at distance 1 to 3 that pull one way; the ball is not far from the farthest."""
    rng, radii, balls = np.random.default_rng(0), (0, 1, 2, 3), {}
    x, y = rng.uniform(-1, 1, size=(8, 2)), rng.integers(2, size=(8, 1)).astype(float)
    options = {"loss": Logistic(), "rate": 0.4, "clip": 0.2, "theta": np.zeros(3)}
    made = ranged(window(mlp((2, 1)), x, y, batches, radii, **options), -1, 1)
    growth, plan = Expansion.growth, Plan(made.graph)

    def watched(self, window, one, box, nominal, length, radius):
        balls.setdefault(radius, []).append((nominal, length))
        return growth(self, window, one, box, nominal, length, radius)

    monkeypatch.setattr(Expansion, "growth", watched)
    relational(made)
    assert sorted(balls) == [1, 2, 3] and all(len(found) == 4 for found in balls.values())
    for radius, found in balls.items():
        farthest = np.zeros(4)
        for corner, label, slots in itertools.product(
            itertools.product([-1.0, 1.0], repeat=2), [0.0, 1.0], itertools.combinations(range(8), radius)
        ):
            other_x, other_y = x.copy(), y.copy()
            other_x[list(slots)], other_y[list(slots)] = corner, label
            other = window(mlp((2, 1)), other_x, other_y, batches, radii, **options)
            path = [made.boxes.nominal, *nominal_run(other, plan)]
            for t, (nominal, length) in enumerate(found):
                apart = ((path[t] - nominal) ** 2).sum() ** 0.5
                assert apart <= length
                farthest[t] = max(farthest[t], apart)
        assert farthest[-1] > 0.4 * found[-1][1]


def check_certificates(radii, one, two):
    """Those of two neighbours hold for the two, and grow from one to the other and with the radius."""
    apart = np.abs(one.nominal - two.nominal)
    for a, b in ((one, two), (two, one)):
        assert (apart <= a.difference[1].max(axis=0)).all()
        assert (apart**2).sum() ** 0.5 <= a.length[1].max()
        for j in range(len(radii) - 1):
            assert (a.difference[j] <= a.difference[j + 1]).all()
            if radii[j + 1] == radii[j] + 1:
                assert (b.difference[j] <= a.difference[j + 1]).all()
                assert (b.length[j] <= a.length[j + 1]).all()


def relational_end(made):
    return relational(made)[-1]


def sg(z):
    return 1.0 / (1.0 + np.exp(-z))


def regression(slots=600, steps=30, radii=tuple(range(12)), clip=0.2, rate=0.5, contraction=0.8):
    """Contracting logistic regression without a bias, four features in [-1, 1], from zero."""
    rng = np.random.default_rng(0)
    x = np.clip(0.35 * rng.normal(size=(slots, 4)), -1, 1)
    y = (rng.random(slots) < sg(3 * x @ (3 * rng.normal(size=4)))) * 1.0
    graph = mlp((4, 1), scale=0.0).with_trainable(None, ["b0"])
    made = window(
        graph, x, y[:, None], [range(slots)] * steps, radii, loss=Logistic(), rate=rate, clip=clip,
        contraction=contraction,
    )  # fmt: skip
    return ranged(made, -1, 1)


def retrained(made, slots, x, y):
    """Parameters of the nominal trainer with these slots replaced."""
    features, targets = made.records.features.copy(), made.records.targets.copy()
    features[:, slots], targets[:, slots] = x.T, y
    records = replace(made.records, features=features, targets=targets)
    start = Boxes.point(made.boxes.nominal, 0)
    return ibp(replace(made, records=records, radii=(), known=(start,)))[-1].nominal


def test_the_certificate_stays_flat_where_the_cross_range_grows():
    """The local sensitivity of contracting logistic regression is about 0.0065 at every distance."""
    made = regression()
    found = relational(made)[-1]
    certificate = found.difference[1:].max(axis=1).sum(axis=1)
    cross = np.maximum(found.upper[1:] - found.lower[:-1], found.upper[:-1] - found.lower[1:]).sum(axis=1)
    assert certificate[0] > 0.0065 and certificate[-1] < 0.007
    assert cross[0] < 0.0067 and cross[-1] > 20 * certificate[-1]

    rng, attacked = np.random.default_rng(1), 0.0
    for k in (0, 4, 10):
        slots = rng.choice(600, k + 1, replace=False)
        x, y = np.sign(rng.normal(size=(k + 1, 4))), rng.integers(2, size=k + 1).astype(float)
        corner = np.sign(made.boxes.nominal + rng.normal(size=4))
        one, two = ((np.vstack([x[:k], corner]), np.append(y[:k], label)) for label in (0.0, 1.0))
        theta = [retrained(made, slots, *data) for data in (one, two)]
        apart = np.abs(theta[0] - theta[1])
        assert (apart <= found.difference[k + 1].max(axis=0)).all()
        for point in theta:
            assert (found.lower[k + 1] <= point).all() and (point <= found.upper[k + 1]).all()
        attacked = max(attacked, apart.sum() / certificate[k])
    assert attacked > 0.95


def test_curvature_is_taken_over_the_box_of_the_same_radius():
    """Records that pull at the data's own parameters and let go right beside them: half of that pull is lost."""
    half, rest = 10, 2
    slots = 2 * half + rest
    x, y = np.ones((slots, 1)), np.zeros((slots, 1))
    y[:half], y[half : 2 * half] = 0.499, -0.499
    graph = mlp((1, 1), scale=0.0).with_trainable(None, ["b0"])
    options = {"loss": Huber(0.5), "clip": 0.5, "rate": 0.8}
    full = ranged(window(graph, x, y, [range(slots)] * 12, (0, 1, 2), **options), -1, 1)
    found = relational(replace(full, records=replace(full.records, present=np.arange(slots) < 2 * half)))[-1]
    labels = itertools.product((-9.0, 0.0, 9.0), repeat=rest)
    runs = {pair: retrained(full, np.arange(2 * half, slots), x[:rest], np.array(pair)) for pair in labels}
    for pair, point in runs.items():
        k = np.count_nonzero(pair)
        assert (found.lower[k] <= point).all() and (point <= found.upper[k]).all()
    assert np.abs(runs[9.0, 0.0] - runs[-9.0, 0.0]) <= found.difference[1, 0]
    assert np.abs(runs[9.0, 9.0] - runs[9.0, -9.0]) <= found.difference[2, 0]


def test_rounding_of_the_trainer_is_covered():
    """Outputs on the two sides of a rounding boundary: all records jump at once, though parameters hardly differ."""
    graph = mlp((1, 1)).with_trainable(None, ["w0"])
    values = {"w0": np.ones((1, 1)), "b0": np.array([2.0**-53 - 2e-20])}
    graph = replace(graph, parameters=tuple(replace(p, value=values[p.name]) for p in graph.parameters))
    options, x = {"rate": 1.0, "clip": 1e-18, "loss": Squared()}, np.ones((21, 1))
    full = ranged(window(graph, x, x, [range(21)] * 2, (0, 1), **options), -1, 1)
    made = replace(full, records=replace(full.records, present=np.arange(21) < 20))
    one, two = (retrained(full, [20], x[:1], np.array([label])) for label in (-9.0, 9.0))
    alone = 2 * 2 * 1e-18 / 21  # what the differing record moves by itself
    assert np.abs(one - two) > 3 * alone
    for bounds in (relational, certified_ibp):
        assert (np.abs(one - two) <= bounds(made)[-1].difference[1, 0]).all()


def test_chained_boxes_are_narrower_and_lie_in_the_mean_value_boxes():
    made = contracting(radii=(0, 1, 2, 3), clip=0.1)
    one, two = meanvalue(made)[-1], relational(made)[-1]
    assert (one.lower <= two.lower).all() and (two.upper <= one.upper).all()
    assert two.width[1] < 0.95 * one.width[1]


def test_radii_behind_a_gap_get_no_chain():
    """A chain needs every radius below it: with a gap it would not be monotone."""
    made = regression(steps=10, radii=(0, 2, 3))
    found, other = relational(made)[-1], meanvalue(made)[-1]
    np.testing.assert_array_equal(found.lower, other.lower)
    assert found.difference[1].max() > 0


def test_one_record_in_one_batch_moves_parameters_once():
    """Slots in disjoint batches: the certificate counts a record in its own batch only."""
    made = regression(slots=600, steps=6, radii=(0, 1), contraction=1.0, rate=0.05)
    batches = [np.arange(100 * t, 100 * t + 100) for t in range(6)]
    made = replace(made, steps=tuple(replace(s, batch=b) for s, b in zip(made.steps, batches, strict=True)))
    for bounds in (relational_end, classified(relational_end), classified(sliding(1, 1, relational))):
        found = bounds(made).difference[1]
        most = 2 * 0.05 * 0.2 / 600
        assert 0.9 * most < found.max() < 1.2 * most
    assert sliding(1, 1, relational)(made).difference[1].max() > 4 * most  # without classes every step may be its own


def test_output_differences_bound_the_predictions_of_neighbours():
    made = regression(radii=(0, 1, 2))
    found = relational(made)[-1]
    rng = np.random.default_rng(4)
    queries = rng.normal(size=(5, 4))
    differences = output_differences(made.graph, found.lower, found.upper, found.difference, queries, made.radii)
    assert differences.shape == (3, 1, 5, 1) and (differences[0] == 0).all()
    corner = np.ones((1, 4))
    one, two = (retrained(made, [7], corner, np.array([label])) for label in (0.0, 1.0))
    apart = np.abs(made.graph.evaluate(queries, one) - made.graph.evaluate(queries, two))
    assert (apart <= differences[1, 0]).all() and (apart > 0.3 * differences[1, 0]).any()
    low, high = output_bounds(made.graph, found.lower, found.upper, queries, made.radii)
    assert (differences[1, 0] <= high[1] - low[1] + 1e-12).all()
