"""Linear bounds against exact arithmetic, enumeration and random neighbours; adaptive CROWN against its own claim.

(S) soundness and (M) monotonicity across neighbours are compared exactly, without any tolerance.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from builders import mlp, window
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ibp import SCHEDULES, SLOTS, UNIVERSE, distance, train_world

import certify
import privacy
from certify.errors import CapabilityError
from certify.recipe import Constant, Features, Output, Recipe, Training
from models.ir import ParameterInfo
from models.losses import Hinge, Huber, Squared
from models.ops import Interval, LeakyRelu, Tanh
from solvers.ibp import Plan, ibp
from solvers.linear import LinearPlan, crown, linear


def last(made, threads=1):
    return linear(made, threads)[-1]


def stepwise(made, threads=1):
    boxes = made.boxes
    for step in made.steps:
        boxes = last(replace(made, steps=(step,), known=(boxes,)), threads)
    return boxes


def bounds(plan, x, box, ladder):
    """Bounds of all per-record nodes over a box of parameters."""
    with np.errstate(all="ignore"):
        found = plan.forward_interval(x, plan.shared_interval(*box, ladder), ladder)
    return {i: found[i] for i in plan.order if plan.graph.per_record[i]}


def random_boxes(rng, graph, theta, least):
    """A box around ``theta`` and one around that box, each layer with a width of its own from ``10**least`` up.

    Some parameters keep their width from one box to the other, some have none.
    """
    width = np.concatenate([np.full(p.value.size, 10.0 ** rng.integers(least, 1)) for p in graph.trainable])

    def grown(by):
        return by * rng.random(len(theta)) * (rng.random(len(theta)) < 0.7)

    inner = Interval(theta - grown(width), theta + grown(width))
    more = width * 10.0 ** rng.integers(-8, 1)
    return inner, Interval(inner.lower - grown(more), inner.upper + grown(more))


def random_network(rng, seed):
    dims = [2, *rng.integers(1, 6, size=rng.integers(2, 4)), rng.integers(1, 3)]
    return mlp(dims, seed=seed, scale=float(rng.choice([1.0, 2.0])))


def nests(outer, inner):
    return all((outer[i].lower <= inner[i].lower).all() and (inner[i].upper <= outer[i].upper).all() for i in inner)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_bounds_nest_contain_every_point_and_are_never_wider_than_intervals(seed):
    """Every node of random networks, boxes from degenerate to enormous, the larger box one rung up."""
    rng = np.random.default_rng(seed)
    products = str(rng.choice(["natural", "midpoint-radius"]))
    graph = random_network(rng, seed).with_products(products)
    theta = graph.initial() * 10.0 ** rng.integers(-2, 3)
    inner, outer = random_boxes(rng, graph, theta, -14)
    x = rng.normal(size=(2, 6)) * 10.0 ** rng.integers(-2, 3)
    k = int(rng.integers(1, 40))
    plan = LinearPlan(graph)
    tight = bounds(plan, x, inner, 2.0 * k)
    assert nests(bounds(plan, x, outer, 2.0 * (k + 1)), tight)
    rung = k if products == "natural" else k + 1  # midpoint-radius products are monotone up to a rung
    assert nests(bounds(Plan(graph), x, inner, 2.0 * rung), tight)
    loosest = bounds(LinearPlan(graph, adaptive=True), x, inner, 2.0 * k)
    for _ in range(30):
        share = rng.choice([0.0, 1.0, rng.random()], size=len(theta))
        at = np.clip(inner.lower + share * (inner.upper - inner.lower), *inner)
        values = plan.forward(x, plan.shared(at))
        for i, bound in tight.items():
            assert (bound.lower <= values[i]).all() and (values[i] <= bound.upper).all()
            assert (loosest[i].lower <= values[i]).all() and (values[i] <= loosest[i].upper).all()


def test_fixed_slopes_nest_on_boxes_on_which_adaptive_ones_do_not():
    """Wide lower and narrow upper layers, boxes that differ little: where the choice of slopes matters."""
    failures = {False: 0, True: 0}
    for seed in range(600):
        rng = np.random.default_rng(seed)
        graph = random_network(rng, seed)
        inner, outer = random_boxes(rng, graph, graph.initial(), -4)
        x = 2.0 * rng.normal(size=(2, 40))
        for adaptive in failures:
            plan = LinearPlan(graph, adaptive)
            failures[adaptive] += not nests(bounds(plan, x, outer, 4.0), bounds(plan, x, inner, 2.0))
    assert failures[False] == 0 and failures[True] >= 5


def test_rounding_does_not_break_nesting():
    """Boxes that differ by single units in the last place: rounding moves the bounds more than the boxes do."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        graph = random_network(rng, seed)
        inner, _ = random_boxes(rng, graph, graph.initial(), -2)
        moved = rng.random((2, len(inner.lower))) < 0.3
        outer = Interval(
            np.where(moved[0], np.nextafter(inner.lower, -np.inf), inner.lower),
            np.where(moved[1], np.nextafter(inner.upper, np.inf), inner.upper),
        )
        x, plan = 2.0 * rng.normal(size=(2, 40)), LinearPlan(graph)
        assert nests(bounds(plan, x, outer, 4.0), bounds(plan, x, inner, 2.0))


def corners(box):
    """All corners of a box of arrays, in exact numbers."""
    shape = box.lower.shape
    ends = [sorted({Fraction(float(a)), Fraction(float(b))}) for a, b in zip(*(e.ravel() for e in box), strict=True)]
    for corner in itertools.product(*ends):
        yield np.array(corner, dtype=object).reshape(shape)


def line_above(v, l, u):
    """Slope and constant of the documented line above ``w relu(z)`` for ``w <= v`` and ``z`` in ``[l, u]``."""
    if u <= 0:
        return Fraction(0), Fraction(0)
    if l >= 0:
        return v, Fraction(0)
    if v < 0:
        return Fraction(0), Fraction(0)
    return v * u / (u - l), -v * u / (u - l) * l


def exact_upper(weight, bias, z, layer_weight, layer_bias, g):
    """Greatest value over the box of the sum of lines, by enumerating all corners in rational arithmetic."""
    exact = [[Fraction(float(end)) for end in ends] for ends in zip(*z, strict=True)]
    lines = [line_above(Fraction(float(v)), *ends) for v, ends in zip(weight, exact, strict=True)]
    best = None
    for w, b, h in itertools.product(*(list(corners(box)) for box in (layer_weight, layer_bias, g))):
        value = Fraction(float(bias)) + sum(s * t + c for (s, c), t in zip(lines, w @ h + b, strict=True))
        best = value if best is None else max(best, value)
    return best


@pytest.mark.parametrize("seed", [4, 10, 16, 19, 22, 25, 31, 39, 45, 57])
def test_bounds_equal_a_second_implementation_in_rational_arithmetic(seed):
    """The documented sum of lines, maximised over all corners: never below it, above it by rounding alone."""
    rng = np.random.default_rng(seed)
    graph = mlp((2, 2, 2, 1), seed=seed, scale=1.5)
    theta = graph.initial()
    width = np.concatenate([np.full(p.value.size, 10.0 ** rng.integers(-3, 1)) for p in graph.trainable])
    box = Interval(theta - width, theta + width)
    x = 3.0 * rng.normal(size=(2, 1))
    plan, nodes = LinearPlan(graph), graph.nodes
    shared = plan.shared_interval(*box, 2.0)
    found = plan.forward_interval(x, shared, 2.0)
    natural = Plan(graph).forward_interval(x, shared, 2.0)
    (y, (z,)), = plan.chains.items()
    boxes = [nodes[i].op.boxes([found[j] for j in nodes[i].inputs]) for i in (y, z)]
    one = Interval(*(end[:, 0] for end in found[nodes[z].inputs[0]]))
    units = Interval(*(end[:, 0] for end in natural[z]))
    (weight, bias), (layer_weight, layer_bias) = boxes
    inside = (units, layer_weight, layer_bias, one)
    upper = exact_upper(weight.upper[0], bias.upper[0], *inside)
    lower = -exact_upper(-weight.lower[0], -bias.lower[0], *inside)
    size = float(np.abs(natural[y]).max() + np.abs(units).max() + 1) * (1 + weight.magnitude.sum())
    assert upper < natural[y].upper[0, 0] or lower > natural[y].lower[0, 0]  # intervals alone would not do
    assert min(upper, Fraction(float(natural[y].upper[0, 0]))) <= Fraction(float(found[y].upper[0, 0]))
    assert max(lower, Fraction(float(natural[y].lower[0, 0]))) >= Fraction(float(found[y].lower[0, 0]))
    assert found[y].upper[0, 0] <= float(upper) + 1e-11 * size and found[y].lower[0, 0] >= float(lower) - 1e-11 * size


def test_rounding_of_the_trainer_is_covered_where_values_cancel():
    """Large terms that cancel: the trainer's rounding is far above an ulp of its result, over boxes of no width."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        graph = mlp((2, 6, 6, 1), seed=seed)
        theta = graph.initial() * 1e3
        theta[-1] = 0.0
        x = rng.normal(size=(2, 4)) * 1e3
        plan = LinearPlan(graph)
        exact = plan.forward(x, plan.shared(theta))
        theta[-1] = -exact[graph.output][0, 0]  # the first record's output is (nearly) zero
        values, found = plan.forward(x, plan.shared(theta)), bounds(plan, x, Interval(theta, theta), 2.0)
        for i, bound in found.items():
            assert (bound.lower <= values[i]).all() and (values[i] <= bound.upper).all()


@pytest.mark.parametrize("schedule", ["full batch", "minibatches"])
@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_every_small_world_is_sound_and_monotone(adjacency, schedule):
    """All 256 data sets over a universe of three records and the empty slot, two hidden layers, all pairs and radii."""
    graph, radii = mlp((1, 2, 2, 1), seed=56, scale=2.0), (0, 1, 2, 3, 4)
    options = {"adjacency": adjacency, "rate": 0.2, "clip": 0.8, "contraction": 0.95}
    worlds = list(itertools.product(UNIVERSE, repeat=SLOTS))
    boxes = {w: train_world(last, w, graph, SCHEDULES[schedule], radii, **options) for w in worlds}
    plain = train_world(lambda made: ibp(made)[-1], worlds[-1], graph, SCHEDULES[schedule], radii, **options)
    assert (boxes[worlds[-1]].width[1:3] < 0.999 * plain.width[1:3]).all()  # the linear bounds matter here
    theta = np.array([boxes[w].nominal for w in worlds])
    far = np.array([[distance(w, v, adjacency) for v in worlds] for w in worlds])
    for i, w in enumerate(worlds):
        for j, k in enumerate(radii):
            near = theta[far[i] <= k]
            assert (boxes[w].lower[j] <= near).all() and (near <= boxes[w].upper[j]).all()
        for v in np.flatnonzero(far[i] == 1):
            assert (boxes[worlds[v]].lower[1:] <= boxes[w].lower[:-1]).all()
            assert (boxes[w].upper[:-1] <= boxes[worlds[v]].upper[1:]).all()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_neighbours_nest_exactly_and_stay_inside(seed):
    """Random networks, losses and magnitudes; the neighbour differs in one slot, emptying included."""
    rng = np.random.default_rng(seed)
    graph = mlp([2, *rng.integers(1, 5, size=rng.integers(2, 4)), 1], seed=seed, scale=float(rng.choice([1.0, 2.0])))
    slots = 9
    features = np.round(rng.normal(size=(slots, 2)) * 10.0 ** rng.integers(-1, 2), 1)
    loss = [Squared(), Huber(0.5), Hinge()][rng.integers(3)]
    targets = rng.choice([-1.0, 1.0], size=(slots, 1))
    batches = [rng.permutation(slots)[: rng.integers(1, slots + 1)] for _ in range(4)]
    options = {
        "rate": list(rng.choice([0.05, 0.3, 1.0], size=4)),
        "clip": float(rng.choice([0.01, 0.3, 5.0])),
        "contraction": float(rng.choice([1.0, 0.9])),
        "adjacency": str(rng.choice(["replace-one", "zero-out"])),
        "loss": loss,
        "normaliser": 9,
    }
    radii, slot = (0, 1, 2, 3, 8, 9), rng.integers(slots)
    other_features, other_targets, present = features.copy(), targets.copy(), np.ones(slots, bool)
    if options["adjacency"] == "zero-out" or rng.random() < 0.3:
        present[slot] = False
    else:
        other_features[slot] = rng.normal(size=2) * 10.0 ** rng.integers(-2, 4)
        other_targets[slot] = -targets[slot]
    bound = [last, stepwise][rng.integers(2)]
    one = bound(window(graph, features, targets, batches, radii, **options))
    two = bound(window(graph, other_features, other_targets, batches, radii, present=present, **options))
    for a, b in ((one, two), (two, one)):
        assert (a.lower[1] <= b.nominal).all() and (b.nominal <= a.upper[1]).all()
        for j in range(len(radii) - 1):
            if radii[j + 1] == radii[j] + 1:
                assert (a.lower[j + 1] <= b.lower[j]).all() and (b.upper[j] <= a.upper[j + 1]).all()
            assert (a.lower[j + 1] <= a.lower[j]).all() and (a.upper[j] <= a.upper[j + 1]).all()


def regression(rng, records, inputs=4):
    features = rng.normal(size=(records, inputs))
    return features, np.tanh(features[:, :1])


def test_the_gain_starts_with_the_second_hidden_layer():
    features, targets = regression(np.random.default_rng(0), 60)
    widths = {}
    for dims in ((4, 8, 1), (4, 16, 16, 1), (4, 8, 8, 8, 1)):
        made = window(mlp(dims, seed=1), features, targets, [range(60)] * 5, (0, 1, 2), rate=0.2, clip=0.1)
        one, other = last(made), ibp(made)[-1]
        np.testing.assert_array_equal(one.nominal, other.nominal)
        assert (other.lower <= one.lower).all() and (one.upper <= other.upper).all()
        widths[len(dims) - 2] = one.width[1] / other.width[1]
    assert widths[1] == 1.0 and widths[2] < 0.97 and widths[3] < 0.95


@pytest.mark.parametrize("activation", [Tanh, LeakyRelu])
def test_networks_without_relu_get_interval_bounds(activation):
    features, targets = regression(np.random.default_rng(1), 20)
    made = window(mlp((4, 5, 5, 1), activation), features, targets, [range(20)] * 2, (0, 1))
    one, other = last(made), ibp(made)[-1]
    np.testing.assert_array_equal(one.lower, other.lower)
    np.testing.assert_array_equal(one.upper, other.upper)


def test_envelopes_do_not_depend_on_threads_or_tiles(monkeypatch):
    features, targets = regression(np.random.default_rng(0), 700)
    graph = mlp((4, 5, 5, 1))

    def make():
        return window(graph, features, targets, [range(700)] * 2, (0, 1, 7))

    for bound in (stepwise, last):
        monkeypatch.setattr("solvers.ibp.TILE", 512)
        one, two = bound(make(), threads=1), bound(make(), threads=3)
        monkeypatch.setattr("solvers.ibp.TILE", 64)
        for other in (two, bound(make(), threads=2)):
            np.testing.assert_array_equal(one.lower, other.lower)
            np.testing.assert_array_equal(one.upper, other.upper)


def test_where_numbers_may_overflow_interval_bounds_are_kept():
    graph, x = mlp((2, 5, 5, 1), seed=3), np.random.default_rng(0).normal(size=(2, 20))
    theta, last_layer = graph.initial(), np.arange(len(graph.initial())) >= len(graph.initial()) - 6

    def outputs(scale):
        """Bounds of the output by both plans when weights and bias of the last layer are multiplied."""
        box = Interval(*(np.where(last_layer, scale, 1.0) * end for end in (theta - 0.1, theta + 0.1)))
        return (bounds(plan, x, box, 2.0)[graph.output] for plan in (LinearPlan(graph), Plan(graph)))

    for scale, tighter in ((1.0, True), (2.0**800, True), (2.0**930, False)):
        tight, plain = outputs(scale)
        assert np.isfinite(plain).all() and np.isfinite(tight).all()
        assert (tight.upper < plain.upper).any() == (tight.lower > plain.lower).any() == tighter


def toggling_network():
    """``2 relu(h - 1) - relu(h - 1)``, ``h = relu(w x)``, where ``w`` alone is trained."""
    graph = mlp((1, 1, 2, 1))
    values = {"w0": [[1.0]], "b0": [0.0], "w1": [[1.0], [1.0]], "b1": [-1.0, -1.0], "w2": [[2.0, -1.0]], "b2": [0.0]}
    parameters = tuple(ParameterInfo(p.name, np.array(values[p.name]), p.name == "w0") for p in graph.parameters)
    return replace(graph, parameters=parameters)


def test_adaptive_crown_is_not_monotone_across_neighbours():
    """Six records, two full-batch steps: at radius 1 one data set's box sticks out of its neighbour's of radius 2."""
    x, y = np.ones((6, 1)), np.zeros((6, 1))
    neighbour = y.copy()
    neighbour[0] = -3.0

    def boxes(bound, targets):
        made = window(toggling_network(), x, targets, [range(6)] * 2, range(7), rate=0.3, clip=1.0)
        return bound(made)[-1]

    def excess(bound):
        """By how much the box of radius 1 of the neighbour leaves that of radius 2."""
        inner, outer = boxes(bound, neighbour), boxes(bound, y)
        return max((outer.lower[2] - inner.lower[1]).max(), (inner.upper[1] - outer.upper[2]).max())

    assert excess(linear) <= 0.0
    assert excess(crown) > 0.1 * boxes(crown, neighbour).width[1]


def certified(backend):
    features, targets = regression(np.random.default_rng(2), 30)
    recipe = Recipe(
        training=Training(loss="squared", steps=2, clip=0.1, learning_rate=Constant(schedule="constant", value=0.1)),
        features=Features(lower=-4.0, upper=4.0),
        output=Output(lower=-1.0, upper=1.0),
    )
    graph = mlp((4, 3, 3, 1), seed=1)
    return graph, recipe, features, targets, certify.run(graph, recipe, features, targets, range(4), backend=backend)


def test_private_predictions_refuse_adaptive_crown_and_take_linear():
    graph, _, features, _, envelope = certified("linear")
    assert privacy.predict(envelope, graph, features[:2], epsilon=2.0).values.shape == (2, 1)
    graph, _, features, _, envelope = certified("crown")
    with pytest.raises(CapabilityError, match="monotone"):
        privacy.predict(envelope, graph, features[:2], epsilon=2.0)


def test_private_models_refuse_adaptive_crown_before_anything_is_drawn(monkeypatch):
    graph, recipe, features, targets, _ = certified("linear")
    monkeypatch.setattr("privacy.ags.release_vectors", lambda *a, **k: pytest.fail("noise was drawn"))
    plan = privacy.AgsPlan.make(steps=[2], epsilon=1.0, radius=2)
    with pytest.raises(CapabilityError, match="monotone"):
        privacy.release_parameters(graph, recipe, features, targets, plan, backend="crown")
