"""Interval Jacobians and mean-value bounds: enumeration, random neighbours, differences of real steps.

(S) and (M) are compared exactly, without any tolerance.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from builders import mlp, sliding, window
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ibp import SCHEDULES, distance

from models.losses import CrossEntropy, Hinge, Huber, Logistic, SmoothedHinge, Squared
from models.ops import Interval
from solvers.backends import bound
from solvers.errors import UnsupportedWindowError
from solvers.ibp import ibp, step
from solvers.jacobian import Head
from solvers.meanvalue import meanvalue
from solvers.relational import relational
from solvers.window import Boxes

RADII = (0, 1, 2, 3, 4)
LOSSES = {"squared": Squared(), "huber": Huber(0.75), "logistic": Logistic(), "smoothed-hinge": SmoothedHinge(0.8)}
#: An empty slot and two or three records (x, y); x in [-1, 2].
REAL = [None, (-1.0, 1.0), (2.0, 0.25), (0.5, -2.0)]
UNIVERSES = {
    "squared": REAL,
    "huber": REAL,
    "logistic": [None, (-1.0, 1.0), (2.0, 1.0), (0.5, 0.0)],
    "smoothed-hinge": [None, (-1.0, 1.0), (2.0, 1.0), (0.5, -1.0)],
}


def ranged(made, low, high):
    """The window with a public range of the features."""
    width = len(made.records.features)
    return replace(made, feature_range=Interval(np.full((width, 1), float(low)), np.full((width, 1), float(high))))


class Worlds:
    """All data sets of four slots over the first ``size`` records of the loss's universe, and their boxes."""

    def __init__(self, bounds, loss, schedule, adjacency, size):
        self.names = list(itertools.product(range(size), repeat=4))
        contents = [[UNIVERSES[loss][i] for i in name] for name in self.names]
        self.far = np.array([[distance(a, b, adjacency) for b in contents] for a in contents])
        self.boxes = [bounds(self.window(c, loss, SCHEDULES[schedule], adjacency)) for c in contents]
        self.theta = np.array([b.nominal for b in self.boxes])

    @staticmethod
    def window(contents, loss, batches, adjacency):
        present = np.array([r is not None for r in contents])
        x, y = (np.array([[r[i] if r else 1.0] for r in contents]) for i in (0, 1))
        made = window(
            mlp((1, 1), seed=1), x, y, batches, RADII, present=present, adjacency=adjacency, loss=LOSSES[loss],
            rate=0.4, clip=0.8, contraction=0.95,
        )  # fmt: skip
        return ranged(made, -1, 2)

    def neighbours(self, i):
        return np.flatnonzero(self.far[i] == 1)

    def check_boxes(self):
        for i, found in enumerate(self.boxes):
            assert (found.lower[0] == found.nominal).all() and (found.upper[0] == found.nominal).all()
            for j, k in enumerate(RADII):
                near = self.theta[self.far[i] <= k]
                assert (found.lower[j] <= near).all() and (near <= found.upper[j]).all()
            for v in self.neighbours(i):
                assert (self.boxes[v].lower[1:] <= found.lower[:-1]).all()
                assert (found.upper[:-1] <= self.boxes[v].upper[1:]).all()


WAYS = {
    "window": ("replace-one", sliding(9, 9, meanvalue)),
    "overlapping": ("replace-one", sliding(3, 1, meanvalue)),
    "zero-out": ("zero-out", sliding(9, 9, meanvalue)),
}


PICKS = [
    ("window", "squared", "full batch"),
    ("overlapping", "huber", "minibatches"),
    ("zero-out", "logistic", "overlapping, one of a single slot"),
    ("window", "smoothed-hinge", "minibatches"),
]


@pytest.mark.parametrize(("way", "loss", "schedule"), PICKS)
def test_every_small_world_is_sound_and_monotone(way, loss, schedule):
    """All 81 data sets over two records and the empty slot, all pairs, all radii."""
    Worlds(WAYS[way][1], loss, schedule, WAYS[way][0], 3).check_boxes()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_larger_world_is_sound_and_monotone(way, loss, schedule):
    """The same with three records and the empty slot: 256 data sets."""
    Worlds(WAYS[way][1], loss, schedule, WAYS[way][0], 4).check_boxes()


def labels(loss, y):
    """Targets in [0, 1] as the loss takes them."""
    return np.where(y < 0.5, -1.0, 1.0) if isinstance(loss, SmoothedHinge) else y


def random_training(rng, loss, slots, steps):
    """Options of a window, and its batches."""
    options = {
        "rate": list(rng.choice([0.05, 0.3, 1.0], size=steps)),
        "clip": float(rng.choice([0.05, 0.3, 5.0])),
        "contraction": float(rng.choice([1.0, 0.9, 0.5])),
        "adjacency": str(rng.choice(["replace-one", "zero-out"])),
        "loss": loss,
        "normaliser": slots,
    }
    batches = [rng.permutation(slots)[: rng.integers(1, slots + 1)] for _ in range(steps)]
    if rng.random() < 0.5:
        batches = [np.arange(slots)] * steps
    return options, batches


def random_windows(seed, bounds, radii=(0, 1, 2, 3, 4, 8, 9)):
    """Boxes of two neighbours, for heads with or without a frozen body, one or two outputs, ties, gaps in the radii."""
    rng = np.random.default_rng(seed)
    outputs = int(rng.integers(1, 3))
    graph = mlp((2, 3, outputs) if rng.random() < 0.4 else (2, outputs), seed=seed, scale=0.7)
    frozen = ["w0", "b0"] if len(graph.parameters) == 4 else []
    if rng.random() < 0.2:
        frozen.append(graph.parameters[-1].name)
    graph = graph.with_trainable(None, frozen)
    loss = [Squared(), Huber(0.5), Logistic(), SmoothedHinge(0.4)][rng.integers(4)]
    slots, steps = 9, 5
    draw_x = lambda n: np.round(rng.uniform(-2, 2, size=(n, 2)), 1)  # noqa: E731
    draw_y = lambda n: labels(loss, np.round(rng.random((n, outputs)), rng.integers(2)))  # noqa: E731
    x, y = draw_x(slots), draw_y(slots)
    options, batches = random_training(rng, loss, slots, steps)
    slot, present, other_x, other_y = rng.integers(slots), np.ones(slots, bool), x.copy(), y.copy()
    if options["adjacency"] == "zero-out" or rng.random() < 0.3:
        present[slot] = False
    else:
        other_x[slot] = rng.choice([-2.0, 2.0], size=2)
        other_y[slot] = labels(loss, 1.0 * rng.integers(2, size=outputs))
    one = ranged(window(graph, x, y, batches, radii, **options), -2, 2)
    two = ranged(window(graph, other_x, other_y, batches, radii, present=present, **options), -2, 2)
    return radii, bounds(one), bounds(two)


def check_pair(radii, one, two):
    for a, b in ((one, two), (two, one)):
        assert (a.lower[1] <= b.nominal).all() and (b.nominal <= a.upper[1]).all()
        for j in range(len(radii) - 1):
            low, high = a.lower[j + 1], a.upper[j + 1]
            assert (low <= a.lower[j]).all() and (a.upper[j] <= high).all()
            if radii[j + 1] == radii[j] + 1:
                assert (low <= b.lower[j]).all() and (b.upper[j] <= high).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_neighbours_nest_exactly_and_stay_inside(seed):
    bounds = [sliding(9, 9, meanvalue), sliding(1, 1, meanvalue), sliding(3, 2, meanvalue)][seed % 3]
    check_pair(*random_windows(seed, bounds))


def random_step(seed):
    """A step of a random head, its box, and two data sets: the window's own, and one with ``k`` other records."""
    rng = np.random.default_rng(seed)
    loss = [Squared(), Huber(0.5), Logistic(), SmoothedHinge(0.6)][seed % 4]
    slots, k = 7, int(rng.integers(0, 4))
    graph = mlp((2, 1), seed=seed)
    x, y = rng.uniform(-1, 1, (slots, 2)), rng.random((slots, 1))
    x2, y2 = x.copy(), y.copy()
    x2[:k], y2[:k] = rng.choice([-1.0, 1.0], (k, 2)), rng.random((k, 1))
    pairs = (x, labels(loss, y)), (x2, labels(loss, y2))
    options = {"loss": loss, "clip": float(rng.choice([0.2, 0.5, 9.0])), "rate": 0.8}
    made, other = (ranged(window(graph, *data, [range(slots)], (0,), **options), -1, 1) for data in pairs)
    centre, half = rng.normal(size=3) * 0.5, rng.choice([0.01, 0.2]) * rng.random(3)
    return rng, made, other, k, Interval(centre - half, centre + half)


def test_differences_of_real_steps_lie_in_the_interval_jacobian():
    """For every data set within k and any two points of the box; and some come close to the ends."""
    closest = 0.0
    for seed in range(150):
        rng, made, other, k, box = random_step(seed)
        head, one = Head.make(made), made.steps[0]
        matrix = head.curvature(made, one, box, max(k, 1)).transition(made, one, k)
        for _ in range(8):
            u, v = (box.lower + rng.random(3) * (box.upper - box.lower) for _ in range(2))
            after = [step(other, head.plan, Boxes.point(t, 1), one, None, 1).nominal for t in (u, v)]
            products = np.stack([matrix.lower * (u - v), matrix.upper * (u - v)])
            slack = 1e-12
            moved = after[0] - after[1]
            assert (products.min(axis=0).sum(axis=1) - slack <= moved).all()
            assert (moved <= products.max(axis=0).sum(axis=1) + slack).all()
            middle = products.mean(axis=0).sum(axis=1)
            reach = np.ptp(products, axis=0).sum(axis=1) / 2
            closest = max(closest, (np.abs(moved - middle) / np.maximum(reach, 1e-9)).max())
    assert 0.7 < closest <= 1.0 + 1e-9


def test_a_differing_record_reaches_the_public_interval():
    """The public interval of a differing record's Jacobian is attained, so that no part of it may be left out."""
    made = ranged(window(mlp((1, 1)), np.zeros((1, 1)), np.zeros((1, 1)), [[0]], (1,), loss=Squared(), clip=9.0), -1, 1)
    matrix = Head.make(made).curvature(made, made.steps[0], Interval(*np.zeros((2, 2))), 1).transition(
        made, made.steps[0], 1
    )
    for record in (-1.0, 1.0):
        other = ranged(
            window(mlp((1, 1)), np.full((1, 1), record), np.zeros((1, 1)), [[0]], (1,), loss=Squared(), clip=9.0), -1, 1
        )
        points = np.array([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5]])
        after = [step(other, Head.make(other).plan, Boxes.point(p, 1), made.steps[0], None, 1).nominal for p in points]
        real = np.array([(a - after[0]) / 0.5 for a in after[1:]]).T
        assert (matrix.lower <= real + 1e-12).all() and (real - 1e-12 <= matrix.upper).all()
        end = matrix.lower if record > 0 else matrix.upper
        np.testing.assert_allclose(real[0, 1], end[0, 1], atol=1e-9)  # rate / 1 * 2 x
    np.testing.assert_allclose(matrix.lower[0, 0], 1 - 0.2, atol=1e-9)
    np.testing.assert_allclose(matrix.upper[0, 0], 1.0, atol=1e-9)  # squares are not negative


def contracting(radii=(0, 1, 2), loss=None, **options):
    """Logistic regression whose data pull the parameters together."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (300, 3))
    y = (x[:, :1] + 0.3 * rng.normal(size=(300, 1)) > 0) * 1.0
    y = 2 * y - 1 if isinstance(loss, Hinge) else y
    options = {"rate": 1.0, "clip": 1.0, "loss": loss or Logistic(), **options}
    return ranged(window(mlp((3, 1), scale=0.1), x, y, [range(300)] * 60, radii, **options), -1, 1)


def test_mean_value_boxes_stay_small_where_interval_boxes_explode():
    made = contracting()
    one, two = ibp(made)[-1], meanvalue(made)[-1]
    assert (one.lower <= two.lower).all() and (two.upper <= one.upper).all()
    assert two.width[1] < 0.2 * one.width[1]
    np.testing.assert_array_equal(one.nominal, two.nominal)


@pytest.mark.parametrize("backend", ["meanvalue", "relational"])
def test_results_do_not_depend_on_threads(backend):
    made = contracting()
    made = replace(made, steps=made.steps[:5])
    one, two = bound(backend, made)[-1], {"meanvalue": meanvalue, "relational": relational}[backend](made, 3)[-1]
    np.testing.assert_array_equal(one.lower, two.lower)
    np.testing.assert_array_equal(one.upper, two.upper)


REFUSED = {
    "size": (
        lambda: ranged(window(mlp((600, 1)), np.zeros((900, 600)), np.zeros(900), [range(900)], (0, 800)), -1, 1),
        "fewer radii",
    ),
    "loss": (lambda: contracting(loss=Hinge()), "loss"),
    "range": (lambda: replace(contracting(), feature_range=None), "public range"),
    "outside": (lambda: ranged(contracting(), -0.5, 0.5), "outside"),
    "network": (
        lambda: ranged(window(mlp((2, 2, 1)), np.zeros((3, 2)), np.zeros((3, 1)), [range(3)], (0, 1)), -1, 1),
        "softplus",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_windows_without_interval_jacobians_are_refused_with_the_reason(case):
    make, word = REFUSED[case]
    for backend in (meanvalue, relational):
        with pytest.raises(UnsupportedWindowError, match=word):
            backend(make())


def test_records_too_large_for_float64_contribute_nothing_and_are_bounded():
    rng = np.random.default_rng(3)
    x, y = rng.uniform(-1, 1, (6, 1)), rng.normal(size=(6, 1))
    y[2] = 1.7e308
    made = ranged(window(mlp((1, 1)), x, y, [range(6)] * 4, (0, 1, 2), rate=0.5, clip=0.5), -1, 1)
    present = np.arange(6) != 2
    without = ranged(window(mlp((1, 1)), x, y, [range(6)] * 4, (0, 1, 2), rate=0.5, clip=0.5, present=present), -1, 1)
    for backend in (meanvalue, relational):
        found, other = backend(made)[-1], backend(without)[-1]
        np.testing.assert_array_equal(found.nominal, other.nominal)
        assert np.isfinite(found.lower).all() and np.isfinite(found.upper).all()
        check_pair((0, 1, 2), found, other)


def test_cross_entropy_is_refused():
    made = window(mlp((2, 3)), np.zeros((4, 2)), np.zeros((4, 1)), [range(4)], (0, 1), loss=CrossEntropy())
    with pytest.raises(UnsupportedWindowError, match="cross-entropy"):
        meanvalue(ranged(made, -1, 1))
