"""Interval Jacobians of one-hidden-layer networks: enumeration, derivatives of real steps, random neighbours, attacks.

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
from test_meanvalue import check_pair, random_training, ranged
from test_relational import check_certificates

from certify.driver import run
from certify.recipe import from_dict
from models.losses import Absolute, CrossEntropy, Huber, Logistic, SmoothedHinge, Squared
from models.ops import Interval, Relu, Sigmoid, Softplus, Tanh
from solvers.backends import bound
from solvers.errors import UnsupportedWindowError
from solvers.hidden import Hidden, second_slope
from solvers.ibp import ibp, step
from solvers.meanvalue import meanvalue
from solvers.relational import output_differences, relational, schedule_classes
from solvers.window import Boxes

RADII = (0, 1, 2, 3, 4)
LOSSES = {"squared": Squared(), "huber": Huber(0.75), "logistic": Logistic(), "smoothed-hinge": SmoothedHinge(0.8)}
ACTIVATIONS = {"tanh": Tanh, "sigmoid": Sigmoid, "softplus": Softplus}
#: An empty slot and two or three records (x, y); x in [-1, 2], y in [-2, 1].
REAL = [None, (-1.0, 1.0), (2.0, -2.0), (0.5, -0.5)]
UNIVERSES = {
    "squared": REAL,
    "huber": REAL,
    "logistic": [None, (-1.0, 1.0), (2.0, 1.0), (0.5, 0.0)],
    "smoothed-hinge": [None, (-1.0, 1.0), (2.0, 1.0), (0.5, -1.0)],
}


def stated(made, low, high, least, greatest):
    """The window with public ranges of the features and of the target."""
    return replace(
        ranged(made, low, high), target_range=Interval(np.array([[float(least)]]), np.array([[float(greatest)]]))
    )


class Worlds:
    """All data sets of four slots over the first ``size`` records of the loss's universe, and their boxes."""

    def __init__(self, bounds, activation, loss, schedule, adjacency, size, clip):
        self.names = list(itertools.product(range(size), repeat=4))
        contents = [[UNIVERSES[loss][i] for i in name] for name in self.names]
        self.far = np.array([[distance(a, b, adjacency) for b in contents] for a in contents])
        self.boxes = [bounds(self.window(c, activation, loss, schedule, adjacency, clip)) for c in contents]
        self.theta = np.array([b.nominal for b in self.boxes])

    @staticmethod
    def window(contents, activation, loss, schedule, adjacency, clip):
        present = np.array([r is not None for r in contents])
        x, y = (np.array([[r[i] if r else 1.0] for r in contents]) for i in (0, 1))
        made = window(
            mlp((1, 1, 1), ACTIVATIONS[activation], seed=1), x, y, SCHEDULES[schedule], RADII, present=present,
            adjacency=adjacency, loss=LOSSES[loss], rate=0.4, clip=clip, contraction=0.95,
        )  # fmt: skip
        return stated(made, -1, 2, -2, 1)

    def check(self, classes):
        """Boxes and certificates hold for all data sets and pairs within each radius, and are monotone."""
        names = np.array(self.names)
        for i, found in enumerate(self.boxes):
            assert (found.lower[0] == found.nominal).all() and (found.upper[0] == found.nominal).all()
            for j, k in enumerate(RADII):
                near = np.flatnonzero(self.far[i] <= k)
                assert (found.lower[j] <= self.theta[near]).all() and (self.theta[near] <= found.upper[j]).all()
                if found.difference is not None:
                    one, two = np.nonzero(self.far[np.ix_(near, near)] == 1)
                    slot = (names[near[one]] != names[near[two]]).argmax(axis=1)
                    apart = np.abs(self.theta[near[one]] - self.theta[near[two]])
                    assert (apart <= found.difference[j, classes[slot]]).all()
            for v in np.flatnonzero(self.far[i] == 1):
                other = self.boxes[v]
                assert (other.lower[1:] <= found.lower[:-1]).all() and (found.upper[:-1] <= other.upper[1:]).all()
                if found.difference is not None:
                    assert (found.difference[:-1] <= other.difference[1:]).all()


def classified(made):
    """With the classes of the slots over all steps stated, as the driver does."""
    classes = schedule_classes((s.batch for s in made.steps), made.records.slots)
    return sliding(2, 1, relational)(replace(made, classes=classes))


WAYS = {
    "meanvalue": ("replace-one", sliding(9, 9, meanvalue)),
    "window": ("replace-one", sliding(9, 9, relational)),
    "overlapping": ("replace-one", sliding(3, 1, relational)),
    "classes": ("replace-one", classified),
    "zero-out": ("zero-out", sliding(9, 9, relational)),
}
PICKS = [
    ("meanvalue", "tanh", "squared", "full batch", 0.8),
    ("window", "tanh", "logistic", "full batch", 0.2),
    ("window", "sigmoid", "squared", "overlapping, one of a single slot", 0.8),
    ("overlapping", "softplus", "huber", "minibatches", 0.3),
    ("classes", "tanh", "huber", "minibatches", 0.8),
    ("window", "tanh", "smoothed-hinge", "full batch", 0.2),
    ("zero-out", "softplus", "logistic", "full batch", 0.8),
]


def check_world(way, activation, loss, schedule, clip, size):
    adjacency, bounds = WAYS[way]
    worlds = Worlds(bounds, activation, loss, schedule, adjacency, size, clip)
    batches = [np.asarray(b) for b in SCHEDULES[schedule]]
    worlds.check(schedule_classes(batches, 4) if way == "classes" else np.zeros(4, int))


@pytest.mark.parametrize(("way", "activation", "loss", "schedule", "clip"), PICKS)
def test_every_small_world_is_sound_and_monotone(way, activation, loss, schedule, clip):
    """All 81 data sets over two records and the empty slot, a 1-1-1 network: all pairs, all radii."""
    check_world(way, activation, loss, schedule, clip, 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("activation", "clip"), [("tanh", 0.2), ("sigmoid", 0.8), ("softplus", 0.3)])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_every_larger_world_is_sound_and_monotone(way, activation, loss, clip):
    """The same with three records and the empty slot: 256 data sets."""
    check_world(way, activation, loss, "overlapping, one of a single slot", clip, 4)


def random_data(rng, loss, slots):
    """Records whose features lie in [-2, 2] and targets in the range of the loss."""
    y = rng.random((slots, 1)) if loss.name == "logistic" else rng.uniform(-2, 2, (slots, 1))
    y = np.where(y < 0.0, -1.0, 1.0) if loss.name == "smoothed-hinge" else np.round(y, rng.integers(2))
    return np.round(rng.uniform(-2, 2, (slots, 2)), 1), y


def drawn_target(rng, loss):
    """An extreme one."""
    return float(rng.choice({"logistic": [0.0, 1.0], "smoothed-hinge": [-1.0, 1.0]}.get(loss.name, [-2.0, 2.0])))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_neighbours_nest_exactly_and_stay_inside(seed):
    """Activations, losses, frozen parts, a frozen body, ties, gaps in the radii; the neighbour is extreme."""
    rng = np.random.default_rng(seed)
    radii, slots, steps = (0, 1, 2, 3, 4, 8, 9), 9, 4
    activation = [Tanh, Sigmoid, Softplus][rng.integers(3)]
    graph = mlp([(2, 3, 1), (2, 2, 2, 1)][int(rng.random() < 0.2)], activation, seed=seed, scale=1.5 * rng.random())
    frozen = ["w0", "b0"] if len(graph.parameters) == 6 else []
    frozen += [["w1"], ["b1"], ["b0"], [], []][rng.integers(5)]
    graph = graph.with_trainable(None, frozen)
    loss = [Squared(), Huber(0.5), Logistic(), SmoothedHinge(0.4)][rng.integers(4)]
    x, y = random_data(rng, loss, slots)
    options, batches = random_training(rng, loss, slots, steps)
    slot, present, other_x, other_y = rng.integers(slots), np.ones(slots, bool), x.copy(), y.copy()
    if options["adjacency"] == "zero-out" or rng.random() < 0.3:
        present[slot] = False
    else:
        other_x[slot] = rng.choice([-2.0, 2.0], size=2)
        other_y[slot] = drawn_target(rng, loss)
    ends = (-2, 2, -2, 2)
    bounds = [sliding(9, 9, relational), sliding(1, 1, relational), sliding(3, 2, relational), classified][seed % 4]
    one = bounds(stated(window(graph, x, y, batches, radii, **options), *ends))
    two = bounds(stated(window(graph, other_x, other_y, batches, radii, present=present, **options), *ends))
    check_pair(radii, one, two)
    check_certificates(radii, one, two)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_slopes_contain_derivatives_and_grow_with_the_box(activation):
    rng, op = np.random.default_rng(0), ACTIVATIONS[activation]()
    for _ in range(200):
        low, high = np.sort(rng.normal(size=(2, 1, 4)) * rng.choice([0.1, 1.0, 5.0]), axis=0)
        boxes = Interval(low, high), Interval(low - rng.random((1, 4)), high + rng.random((1, 4)))
        found = [second_slope(op, z, op.forward_interval([z], r), r) for r, z in zip((2.0, 4.0), boxes, strict=True)]
        assert (found[1].lower <= found[0].lower).all() and (found[0].upper <= found[1].upper).all()
        z = low + rng.random((20, 4)) * (high - low)
        steps = [op._slope(z + e, op.forward([z + e])) for e in (1e-4, -1e-4)]
        real = (steps[0] - steps[1]) / 2e-4
        assert (found[0].lower <= real + 1e-7).all() and (real - 1e-7 <= found[0].upper).all()
        at = np.array([[low[0, 0], low[0, 0], high[0, 0]]])
        point = Interval(at, at)
        tight = second_slope(op, point, op.forward_interval([point], 2.0), 2.0)
        assert (tight.upper - tight.lower <= 1e-12).all()


def random_step(seed):
    """A step of a random network, its box, and two data sets: the window's own, and one with ``k`` other records."""
    rng = np.random.default_rng(seed)
    loss = [Squared(), Huber(0.5), Logistic()][seed % 3]
    activation = [Tanh, Sigmoid, Softplus][seed // 3 % 3]
    slots, k = 6, int(rng.integers(0, 3))
    graph = mlp((2, 2, 1), activation, seed=seed, scale=1.5)
    x, y = random_data(rng, loss, slots)
    x2, y2 = x.copy(), y.copy()
    x2[:k] = rng.choice([-2.0, 2.0], (k, 2))
    y2[:k, 0] = [drawn_target(rng, loss) for _ in range(k)]
    options = {"loss": loss, "clip": float(rng.choice([0.1, 0.5, 90.0])), "rate": 0.8}
    made, other = (stated(window(graph, *d, [range(slots)], (0,), **options), -2, 2, -2, 2) for d in ((x, y), (x2, y2)))
    centre = graph.initial()
    half = rng.choice([1e-3, 0.05, 0.3]) * rng.random(len(centre))
    return rng, made, other, k, Interval(centre - half, centre + half)


def test_differences_of_real_steps_lie_in_the_interval_jacobian():
    """For every data set within k and any two points of the box; and some come close to the ends."""
    closest = 0.0
    for seed in range(90):
        rng, made, other, k, box = random_step(seed)
        head, one = Hidden.make(made), made.steps[0]
        matrix = head.curvature(made, one, box, max(k, 1)).transition(made, one, k)
        for attempt in range(12):
            u, v = (box.lower + rng.random(len(box.lower)) * (box.upper - box.lower) for _ in range(2))
            if attempt % 2:  # along one coordinate: a column of the Jacobian
                p = rng.integers(len(u))
                v = np.where(np.arange(len(u)) == p, v, u)
            after = [step(other, head.plan, Boxes.point(t, 1), one, None, 1).nominal for t in (u, v)]
            products = np.stack([matrix.lower * (u - v), matrix.upper * (u - v)])
            moved, slack = after[0] - after[1], 1e-12
            assert (products.min(axis=0).sum(axis=1) - slack <= moved).all()
            assert (moved <= products.max(axis=0).sum(axis=1) + slack).all()
            middle, reach = products.mean(axis=0).sum(axis=1), np.ptp(products, axis=0).sum(axis=1) / 2
            closest = max(closest, (np.abs(moved - middle) / np.maximum(reach, 1e-9)).max())
    assert 0.7 < closest <= 1.0 + 1e-6


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_jacobian_at_a_point_is_the_derivative(loss, activation):
    """Over a box of no width, without replaced records: entry by entry, against central differences."""
    rng = np.random.default_rng(5)
    graph = mlp((2, 3, 1), ACTIVATIONS[activation], seed=2, scale=1.5)
    x, y = random_data(rng, LOSSES[loss], 5)
    made = window(graph, x, y, [range(5)], (0,), loss=LOSSES[loss], clip=0.31, rate=0.8)
    made, theta = stated(made, -2, 2, -2, 2), graph.initial()
    head, one = Hidden.make(made), made.steps[0]
    matrix = head.curvature(made, one, Interval(theta, theta), 1).transition(made, one, 0)
    assert (matrix.upper - matrix.lower).max() < 1e-7
    for p in range(len(theta)):
        nudge = np.where(np.arange(len(theta)) == p, 1e-5, 0.0)
        after = [step(made, head.plan, Boxes.point(theta + e, 1), one, None, 1).nominal for e in (nudge, -nudge)]
        np.testing.assert_allclose((after[0] - after[1]) / 2e-5, matrix.lower[:, p], atol=2e-8)


@pytest.mark.parametrize(("least", "greatest"), [(-1.0, 1.0), (50.0, 60.0)])
def test_a_differing_record_lies_in_the_public_interval_and_reaches_it(least, greatest):
    """Replacing the only record by any other, or by none: its Jacobian, whatever it is."""
    rng = np.random.default_rng(1)
    graph = mlp((1, 1, 1), Tanh, seed=3, scale=0.3)
    theta = graph.initial()
    box = Interval(theta - 1e-3, theta + 1e-3)

    def single(x, y, present=True):
        options = {"loss": Squared(), "clip": 1e3, "rate": 1.0, "present": np.array([present])}
        made = window(graph, np.array([[x]]), np.array([[y]]), [[0]], (1,), **options)
        return stated(made, -1, 1, least, greatest)

    made = single(0.0, least)
    matrix = Hidden.make(made).curvature(made, made.steps[0], box, 1).transition(made, made.steps[0], 1)
    most = 0.0
    corners = itertools.product((-1.0, 1.0), (least, greatest))
    inside = zip(rng.uniform(-1, 1, 20), rng.uniform(least, greatest, 20), strict=True)
    for record in [*corners, *inside, (0.0, least, False)]:
        other = single(*record)
        exact = Hidden.make(other).curvature(other, other.steps[0], Interval(theta, theta), 1)
        exact = exact.transition(other, other.steps[0], 0)
        assert (matrix.lower <= exact.lower).all() and (exact.upper <= matrix.upper).all()
        most = max(most, ((np.eye(4) - exact.lower) / np.maximum(np.eye(4) - matrix.lower, 1e-9)).max())
    assert most > 0.9


def exact_step(made, activation, theta):
    """A step of a network in extended precision: an implementation of its own."""
    x, y = made.records.features.astype(np.longdouble), made.records.targets[0].astype(np.longdouble)
    units, width = made.graph.parameters[0].shape
    w, b, v, c = np.split(theta.astype(np.longdouble), np.cumsum([units * width, units, units]))
    z = w.reshape(units, width) @ x + b[:, None]
    sigmoid = 1 / (1 + np.exp(-z))
    h, slope = {
        "tanh": (np.tanh(z), 1 / np.cosh(z) ** 2),
        "sigmoid": (sigmoid, sigmoid * (1 - sigmoid)),
        "softplus": (np.log1p(np.exp(z)), sigmoid),
    }[activation]
    f = v @ h + c
    d = {
        "squared": 2 * (f - y),
        "huber": np.clip(f - y, -0.75, 0.75),
        "logistic": 1 / (1 + np.exp(-f)) - y,
        "smoothed-hinge": -y * np.clip((1 - y * f) / np.longdouble(0.8), 0, 1),
    }
    d = d[made.loss.name]
    u = d * v[:, None] * slope
    rows = np.concatenate([(u[:, None] * x).reshape(-1, len(y)), u, d * h, d[None]])
    total = np.clip(rows, -made.clip, made.clip).sum(axis=1)
    return made.contraction * theta - made.steps[0].learning_rate / made.normaliser * total


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rounding_of_the_trainer_is_covered(activation, loss):
    """Computed steps against extended precision, near the clip and beyond it: within the bound, and not far below."""
    closest = 0.0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        graph = mlp((2, 3, 1), ACTIVATIONS[activation], seed=seed, scale=float(10.0 ** rng.integers(-1, 3)))
        theta = graph.initial()
        data = random_data(rng, LOSSES[loss], 20)
        made = window(graph, *data, [range(20)], (0,), loss=LOSSES[loss], clip=10.0 ** rng.integers(-3, 9))
        made = stated(made, -2, 2, -2, 2)
        head, one = Hidden.make(made), made.steps[0]
        found = step(made, head.plan, Boxes.point(theta, 1), one, None, 1).nominal
        bound = head.rounding(made, one, Interval(theta, theta))
        wider = head.rounding(made, one, Interval(theta - 0.1, theta + 0.1))
        error = np.abs((found - exact_step(made, activation, theta)).astype(float))
        assert (error <= bound).all() and (bound <= wider).all()
        closest = max(closest, (error / bound).max())
    assert closest > 1e-3


@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
@pytest.mark.parametrize(
    ("size", "trained", "at", "clip"), [(1e-3, "b0", 2, 0.01), (1e-3, "w1", 3, 10.0), (1e3, "b1", 4, 4e3)]
)
def test_cancellation_in_the_hidden_layer_is_covered(activation, size, trained, at, clip):
    """Large hidden weights that cancel: the errors of ``act'``, of ``act`` and of the output dominate in turn."""
    x, y = np.random.default_rng(0).uniform(-1, 1, (10, 1)) + np.array([[0.0, 1e-6]]), np.full(10, -2.0)
    values = {"w0": np.array([[3e6, -3e6]]), "b0": np.array([2.5]), "w1": np.array([[size]]), "b1": np.array([0.7])}
    graph = mlp((2, 1, 1), ACTIVATIONS[activation])
    graph = replace(graph, parameters=tuple(replace(p, value=values[p.name]) for p in graph.parameters))
    part, data = graph.with_trainable([trained]), {"loss": Squared(), "clip": clip, "rate": 1.0}
    made, full = (stated(window(g, x, y, [range(10)], (0,), **data), -1.1, 1.1, -2, 2) for g in (part, graph))
    head, theta, one = Hidden.make(made), part.initial(), made.steps[0]
    found = step(made, head.plan, Boxes.point(theta, 1), one, None, 1).nominal
    error = np.abs((found - exact_step(full, activation, graph.initial())[at]).astype(float))
    bound = head.rounding(made, one, Interval(theta, theta))
    assert 3e-5 * bound < error <= bound


def test_output_slopes_are_the_derivatives_of_the_output():
    """A certificate that is zero but for one parameter: the output differs as its derivative says."""
    for activation in ACTIVATIONS.values():
        graph, rng = mlp((2, 3, 1), activation, seed=4, scale=1.5), np.random.default_rng(2)
        theta, queries, size = graph.initial(), rng.uniform(-2, 2, (5, 2)), 1e-6
        for p in range(len(theta)):
            nudge = np.where(np.arange(len(theta)) == p, size, 0.0)
            box = np.stack([theta, theta - nudge]), np.stack([theta, theta + nudge])
            found = output_differences(graph, *box, np.stack([0 * nudge, nudge])[:, None], queries, (0, 1))[1, 0]
            apart = np.abs(graph.evaluate(queries, theta + nudge) - graph.evaluate(queries, theta))
            assert (apart <= found).all()
            np.testing.assert_allclose(apart, found, rtol=1e-4, atol=1e-13)


def network(slots=200, steps=50, radii=(0, 1, 2, 3), dims=(4, 8, 1), **options):
    """Logistic loss, tanh, features in [-1, 1], full batch."""
    rng = np.random.default_rng(0)
    x = np.clip(0.35 * rng.normal(size=(slots, dims[0])), -1, 1)
    y = (rng.random((slots, 1)) < 1.0 / (1.0 + np.exp(-4 * x @ rng.normal(size=(dims[0], 1))))) * 1.0
    options = {"loss": Logistic(), "rate": 0.5, "clip": 0.02, "contraction": 0.95, **options}
    return stated(window(mlp(dims, Tanh, scale=0.5), x, y, [range(slots)] * steps, radii, **options), -1, 1, 0, 1)


def retrained(made, slots, x, y):
    """Parameters of the nominal trainer with these slots replaced."""
    features, targets = made.records.features.copy(), made.records.targets.copy()
    features[:, slots], targets[:, slots] = x.T, y
    records = replace(made.records, features=features, targets=targets)
    return ibp(replace(made, records=records, radii=(), known=(Boxes.point(made.boxes.nominal, 0),)))[-1].nominal


def test_certificates_of_a_network_hold_against_attacks_and_are_tighter_than_boxes():
    made = network(radii=(0, 1, 2))
    plain, mean, found = ibp(made)[-1], meanvalue(made)[-1], relational(made)[-1]
    assert (plain.lower <= mean.lower).all() and (mean.lower <= found.lower).all()
    assert (found.upper <= mean.upper).all() and (mean.upper <= plain.upper).all()
    np.testing.assert_array_equal(found.nominal, plain.nominal)
    cross = (np.maximum(plain.upper[1:] - plain.lower[:-1], plain.upper[:-1] - plain.lower[1:])).sum(axis=1)
    certificate = found.difference[1:].max(axis=1).sum(axis=1)
    assert (certificate < 0.15 * cross).all()

    rng = np.random.default_rng(1)
    queries = np.clip(rng.normal(size=(6, 4)), -1, 1)
    outputs = output_differences(made.graph, found.lower, found.upper, found.difference, queries, made.radii)
    assert outputs.shape == (3, 1, 6, 1) and (outputs[0] == 0).all()
    reached, told = 0.0, 0.0
    for k in (0, 1):
        for _ in range(4):
            slots = rng.choice(200, k + 1, replace=False)
            x, y = np.sign(rng.normal(size=(k + 1, 4))), rng.integers(2, size=k + 1).astype(float)
            theta = [retrained(made, slots, x, np.append(y[:k], label)) for label in (0.0, 1.0)]
            apart = np.abs(theta[0] - theta[1])
            assert (apart <= found.difference[k + 1].max(axis=0)).all()
            for point in theta:
                assert (found.lower[k + 1] <= point).all() and (point <= found.upper[k + 1]).all()
            moved = np.abs(made.graph.evaluate(queries, theta[0]) - made.graph.evaluate(queries, theta[1]))
            assert (moved <= outputs[k + 1, 0]).all()
            reached = max(reached, apart.sum() / certificate[k])
            told = max(told, (moved / outputs[k + 1, 0]).max())
    assert reached > 0.15 and told > 0.03


@pytest.mark.parametrize("backend", ["meanvalue", "relational"])
def test_results_do_not_depend_on_threads(backend):
    made = network(steps=4)
    one, two = bound(backend, made)[-1], {"meanvalue": meanvalue, "relational": relational}[backend](made, 3)[-1]
    np.testing.assert_array_equal(one.lower, two.lower)
    np.testing.assert_array_equal(one.upper, two.upper)


def plain(dims=(2, 2, 1), activation=Tanh, **options):
    data = np.zeros((3, 2)), np.zeros((3, 1))
    return stated(window(mlp(dims, activation), *data, [range(3)], (0, 1), **options), -1, 1, -1, 1)


REFUSED = {
    "relu": (lambda: plain(activation=Relu), "softplus"),
    "deep": (lambda: plain((2, 2, 2, 1)), "more than two layers"),
    "outputs": (lambda: plain((2, 2, 3), loss=CrossEntropy()), "one output"),
    "loss": (lambda: plain(loss=Absolute()), "absolute"),
    "target": (lambda: replace(plain(), target_range=None), "lower and upper to .target"),
    "outside": (lambda: stated(plain(), -1, 1, 0.5, 1), "outside"),
    "features": (lambda: replace(plain(), feature_range=None), "features"),
    "size": (lambda: plain((2, 400, 1)), "1024"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_windows_without_interval_jacobians_are_refused_with_the_reason(case):
    make, word = REFUSED[case]
    for backend in (meanvalue, relational):
        with pytest.raises(UnsupportedWindowError, match=word):
            backend(make())


def test_entries_beyond_the_grid_mean_no_bound_at_that_radius():
    """Parameters so large that a differing record's entries leave the grid: the boxes are those of ibp."""
    graph = mlp((2, 2, 1), Softplus, seed=1, scale=1e4)
    made = stated(window(graph, np.ones((4, 2)), np.zeros(4), [range(4)], (0, 1), loss=Squared()), -1, 1, -1, 1)
    found, other = relational(made)[-1], ibp(made)[-1]
    np.testing.assert_array_equal(found.lower, other.lower)
    assert np.isfinite(found.difference).all()


def test_a_run_takes_the_target_range_from_the_recipe():
    """From the recipe to the envelope: a certificate of a network with the squared loss needs both public ranges."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (12, 2)), rng.uniform(-1, 3, 12)
    facts = {
        "training": {
            "loss": "squared", "clip": 0.1, "steps": 3, "learning_rate": {"schedule": "constant", "value": 0.4}
        },
        "batches": {"slots": 12},
        "features": {"lower": -1, "upper": 1},
        "target": {"lower": -1, "upper": 3, "offset": 1, "scale": 2},
    }  # fmt: skip
    graph, radii = mlp((2, 3, 1), Tanh, seed=1), (0, 1, 2)
    envelope = run(graph, from_dict(facts), x, y, radii, relational=True)
    lower, upper = envelope.stacked()
    found = envelope.stacked_difference().max(axis=1)
    assert (found[1:] > 0).all() and (found <= (upper - lower) * (1 + 1e-15)).all()
    x[0], y[0] = -1.0, 3.0
    other = run(graph, from_dict(facts), x, y, radii).stacked()[0][0]
    assert (lower[1] <= other).all() and (other <= upper[1]).all() and (np.abs(other - lower[0]) <= found[1]).all()
    del facts["target"]
    assert run(graph, from_dict(facts), x, y, radii).difference is None
    with pytest.raises(UnsupportedWindowError, match="target"):
        run(graph, from_dict(facts), x, y, radii, relational=True)
