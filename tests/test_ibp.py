"""Interval training against enumeration, exact arithmetic and random neighbours.

(S) soundness and (M) monotonicity across neighbours are compared exactly, without any tolerance.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from builders import final, mlp, sliding, stepwise, window
from hypothesis import given, settings
from hypothesis import strategies as st

from models.losses import Absolute, Hinge, Huber, SmoothedHinge, Squared, make_loss
from models.ops import LeakyRelu, Relu, Sigmoid, Softplus, Tanh
from solvers import gradients
from solvers.gradients import FixedPoint
from solvers.ibp import output_bounds, public_reach

SLOTS = 4
UNIVERSE = [None, (-1.0, 1.0), (0.5, -2.0), (2.0, 0.25)]  # an empty slot and three records (x, y)
SCHEDULES = {
    "full batch": [range(4)] * 3,
    "minibatches": [[0, 1], [2, 3], [1, 2], [0, 3]],
    "overlapping, one of a single slot": [[0, 1, 2], [3], [1, 2, 3]],
}


def train_world(bound, world, graph, batches, radii, **options):
    present = np.array([r is not None for r in world])
    features = np.array([[r[0] if r else 0.0] for r in world])
    targets = np.array([[r[1] if r else 0.0] for r in world])
    return bound(window(graph, features, targets, batches, radii, present=present, **options))


def distance(a, b, adjacency):
    """Steps between two data sets: replacing a record is one step, or an emptying and a filling under zero-out."""
    total = 0
    for x, y in zip(a, b, strict=True):
        if x != y:
            total += 2 if adjacency == "zero-out" and x is not None and y is not None else 1
    return total


OVERLAPPING = sliding(3, 1)
#: The radius charged to every step, or to the window as a whole (zero-out is always charged to every step).
CASES = [("replace-one", stepwise), ("replace-one", final), ("replace-one", OVERLAPPING), ("zero-out", final)]


@pytest.mark.parametrize(("adjacency", "bound"), CASES, ids=["stepwise", "window", "overlapping", "zero-out"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dims", [(1, 1), (1, 2, 1)], ids=["linear", "relu network"])
def test_every_small_world_is_sound_and_monotone(dims, schedule, adjacency, bound):
    """All 256 data sets over a universe of three records and the empty slot, all pairs, all radii."""
    graph = mlp(dims, seed=1)
    radii = (0, 1, 2, 3, 4)
    options = {"adjacency": adjacency, "rate": 0.7, "clip": 0.8, "contraction": 0.95}
    worlds = list(itertools.product(UNIVERSE, repeat=SLOTS))
    boxes = {w: train_world(bound, w, graph, SCHEDULES[schedule], radii, **options) for w in worlds}
    theta = np.array([boxes[w].nominal for w in worlds])

    far = np.array([[distance(w, v, adjacency) for v in worlds] for w in worlds])
    for i, w in enumerate(worlds):
        assert (boxes[w].lower[0] == boxes[w].nominal).all() and (boxes[w].upper[0] == boxes[w].nominal).all()
        for j, k in enumerate(radii):
            near = theta[far[i] <= k]
            assert (boxes[w].lower[j] <= near).all() and (near <= boxes[w].upper[j]).all()
        for v in np.flatnonzero(far[i] == 1):
            for j in range(len(radii) - 1):
                assert (boxes[worlds[v]].lower[j + 1] <= boxes[w].lower[j]).all()
                assert (boxes[w].upper[j] <= boxes[worlds[v]].upper[j + 1]).all()


#: Loss, outputs of the network, and three targets it takes.
EVERY_LOSS = {
    "squared": (1, (1.0, -2.0, 0.25)),
    "absolute": (1, (1.0, -2.0, 0.25)),
    "huber": (1, (1.0, -2.0, 0.25)),
    "logistic": (1, (1.0, 0.0, 1.0)),
    "hinge": (1, (1.0, -1.0, -1.0)),
    "smoothed-hinge": (1, (1.0, -1.0, -1.0)),
    "cross-entropy": (3, (0.0, 2.0, 1.0)),
}


@pytest.mark.parametrize("products", ["natural", "midpoint-radius"])
@pytest.mark.parametrize("bound", [stepwise, final], ids=["stepwise", "window"])
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_every_small_world_is_sound_and_monotone_for_every_loss(name, bound, products):
    """All 64 data sets of three slots, a network with smooth activations (library functions, the ladder)."""
    outputs, targets = EVERY_LOSS[name]
    graph = mlp((1, 2, outputs), Tanh, seed=3, scale=1.5, products=products)
    universe = [None, *zip((-1.0, 0.5, 2.0), targets, strict=True)]
    radii, boxes = (0, 1, 2, 3), {}
    for world in itertools.product(range(4), repeat=3):
        rows = [universe[i] or (0.0, targets[0]) for i in world]
        x, y = (np.array(column)[:, None] for column in zip(*rows, strict=True))
        options = {"present": np.array(world) > 0, "rate": 0.9, "clip": 0.6, "loss": make_loss(name, 0.5, 0.6)}
        boxes[world] = bound(window(graph, x, y, [[0, 1], [2, 0], [0, 1, 2]], radii, **options))
    for (one, a), (two, b) in itertools.product(boxes.items(), repeat=2):
        far = sum(i != j for i, j in zip(one, two, strict=True))
        assert (a.lower[far:] <= b.nominal).all() and (b.nominal <= a.upper[far:]).all()
        if far == 1:
            assert (a.lower[1:] <= b.lower[:-1]).all() and (b.upper[:-1] <= a.upper[1:]).all()
    assert len({a.nominal.tobytes() for a in boxes.values()}) > 16


ACTIVATIONS = [Relu, LeakyRelu, Tanh, Sigmoid, Softplus]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_neighbours_nest_exactly_and_stay_inside(seed):
    """Random networks, losses, products, ties and magnitudes; the neighbour differs in one slot, emptying included."""
    rng = np.random.default_rng(seed)
    dims = [2, *rng.integers(1, 4, size=rng.integers(0, 3)), 1]
    graph = mlp(
        dims, ACTIVATIONS[rng.integers(5)], seed, products=["natural", "midpoint-radius"][rng.integers(2)]
    )
    slots = 9
    features = np.round(rng.normal(size=(slots, 2)) * 10.0 ** rng.integers(-1, 2), 1)
    loss = [Squared(), Huber(0.5), Hinge(), SmoothedHinge(0.3)][rng.integers(4)]
    draw = (lambda n: rng.choice([-1.0, 1.0], size=(n, 1))) if "hinge" in loss.name else (
        lambda n: np.round(rng.normal(size=(n, 1)), 1)
    )
    targets = draw(slots)
    batches = [rng.permutation(slots)[: rng.integers(1, slots + 1)] for _ in range(4)]
    options = {
        "rate": list(rng.choice([0.05, 0.3, 1.0], size=4)),
        "clip": float(rng.choice([0.01, 0.3, 5.0])),
        "contraction": float(rng.choice([1.0, 0.9])),
        "adjacency": str(rng.choice(["replace-one", "zero-out"])),
        "loss": loss,
        "normaliser": 9,
    }
    radii = (0, 1, 2, 3, 8, 9)
    slot = rng.integers(slots)
    other_features, other_targets = features.copy(), targets.copy()
    present = np.ones(slots, bool)
    if options["adjacency"] == "zero-out" or rng.random() < 0.3:
        present[slot] = False
    else:
        other_features[slot] = rng.normal(size=2) * 10.0 ** rng.integers(-2, 4)
        other_targets[slot] = draw(1)
    bound = [final, stepwise, OVERLAPPING][rng.integers(3)]
    one = bound(window(graph, features, targets, batches, radii, **options))
    two = bound(window(graph, other_features, other_targets, batches, radii, present=present, **options))
    for a, b in ((one, two), (two, one)):
        assert (a.lower[1] <= b.nominal).all() and (b.nominal <= a.upper[1]).all()
        for j in range(len(radii) - 1):
            low, high = a.lower[j + 1], a.upper[j + 1]
            if radii[j + 1] == radii[j] + 1:
                assert (low <= b.lower[j]).all() and (b.upper[j] <= high).all()
            assert (low <= a.lower[j]).all() and (a.upper[j] <= high).all()


def rational_run(features, targets, theta, batches, rate, clip, normaliser, contraction):
    """Clipped training of ``y = w x + b`` in exact rational arithmetic: a second implementation."""
    w, b = (Fraction(float(t)) for t in theta)
    clip, step, shrink = Fraction(clip), Fraction(rate) / normaliser, Fraction(contraction)
    for batch in batches:
        total = [Fraction(0), Fraction(0)]
        for i in batch:
            x, y = Fraction(float(features[i, 0])), Fraction(float(targets[i, 0]))
            residual = 2 * (w * x + b - y)
            for j, g in enumerate((residual * x, residual)):
                total[j] += max(-clip, min(clip, g))
        w, b = shrink * w - step * total[0], shrink * b - step * total[1]
    return w, b


RATIONAL = {
    "ordinary": {"theta": [0.3, -0.7], "shift": 0.0, "clip": 0.7, "rate": 0.3},
    # Residuals are small differences of large numbers: rounding inside the gradient is far above the sums' quantum.
    "cancellation": {"theta": [0.3, -0.7], "shift": 1e5, "clip": 0.5, "rate": 1e-12},
    # Parameters so large that a step is below their last place: rounding of the update itself.
    "large parameters": {"theta": [1e8 / 3, -1e8 / 7], "shift": 0.0, "clip": 1e-10, "rate": 0.3},
}


@pytest.mark.parametrize("bound", [stepwise, final, OVERLAPPING])
@pytest.mark.parametrize("case", RATIONAL)
def test_envelopes_contain_the_exact_rational_run(case, bound):
    """Outward rounding: from radius 1 on, the real-number trajectories are inside, those of neighbours too."""
    theta, shift, clip, rate = RATIONAL[case].values()
    rng = np.random.default_rng(5)
    slots, batches = 6, [range(6)] * 4
    features = rng.normal(size=(slots, 1)) + shift
    targets = features * theta[0] + theta[1] + 1e-7 * rng.normal(size=(slots, 1))
    options = {"rate": rate, "clip": clip, "contraction": 0.9 if case == "large parameters" else 1.0}
    boxes = bound(window(mlp((1, 1)), features, targets, batches, (0, 1), theta=theta, **options))

    def inside(x, y):
        exact = rational_run(x, y, theta, batches, rate, clip, slots, options["contraction"])
        return all(
            Fraction(float(boxes.lower[1, j])) <= exact[j] <= Fraction(float(boxes.upper[1, j])) for j in range(2)
        )

    assert inside(features, targets)
    for slot in range(slots):
        for record in [(3.0, -3.0), (-3.0, -3.0), (0.1, 9.0)]:
            x, y = features.copy(), targets.copy()
            x[slot], y[slot] = record
            assert inside(x, y)


def test_rounding_inside_the_gradients_is_covered():
    """Neighbours that attain a bound exactly but for rounding, where residuals are differences of large numbers."""
    theta, rate, clip, slots = [0.3, -0.7], 1e-3, 0.5, 6
    graph = mlp((1, 1))
    for seed in range(25):
        rng = np.random.default_rng(seed)
        features = 1e5 + rng.normal(size=(slots, 1))
        targets = features * theta[0] + theta[1] + 1e-6 * rng.normal(size=(slots, 1))
        boxes = final(window(graph, features, targets, [range(slots)], (0, 1), theta=theta, rate=rate, clip=clip))
        gradient = 2 * (features * theta[0] + theta[1] - targets)[:, 0]
        # Replacing the least gradient by the clip, or the greatest by its negative, attains the ends.
        for slot, record in ((gradient.argmin(), (9.0, -99.0)), (gradient.argmax(), (9.0, 99.0))):
            x, y = features.copy(), targets.copy()
            x[slot], y[slot] = record
            exact = rational_run(x, y, theta, [range(slots)], rate, clip, slots, 1.0)
            for j in range(2):
                assert Fraction(float(boxes.lower[1, j])) <= exact[j] <= Fraction(float(boxes.upper[1, j]))


@pytest.mark.parametrize("bound", [stepwise, final, OVERLAPPING])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_rounding_of_gradients_to_the_grid_is_covered(sign, bound):
    """Gradients that all round the same way, and a neighbour that attains the end exactly but for that rounding."""
    slots, clip, rate, unit = 8, 0.5, 0.25, 2.0**-45
    assert FixedPoint.make(clip, slots).scale == 1 / unit
    features = (np.arange(1, slots + 1)[:, None] * 2.0**38 + 0.49) * unit
    targets = np.full((slots, 1), 1e3 * sign)  # residuals keep their sign: the gradient of the weight is -sign * x
    batches = [range(slots)] * 3
    options = {"rate": rate, "clip": clip, "theta": [0.0, 0.0], "loss": Absolute()}
    boxes = bound(window(mlp((1, 1)), features, targets, batches, (0, 1), **options))
    kept = sum(Fraction(float(x)) for x in features[1:, 0])  # the least one is replaced by a clipped one
    exact = Fraction(rate) / slots * len(batches) * (kept + Fraction(clip))
    reached = boxes.upper[1, 0] if sign > 0 else -boxes.lower[1, 0]
    assert exact <= Fraction(float(reached)) <= exact * (1 + Fraction(1, 10**11))


def test_envelopes_do_not_depend_on_threads_or_tiles(monkeypatch):
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(1500, 3)), rng.normal(size=(1500, 1))
    graph = mlp((3, 5, 1))
    make = lambda: window(graph, features, targets, [range(1500)] * 3, (0, 1, 7))  # noqa: E731
    for bound in (stepwise, final, OVERLAPPING):
        monkeypatch.setattr("solvers.ibp.TILE", 512)
        one, two = bound(make(), threads=1), bound(make(), threads=3)
        monkeypatch.setattr("solvers.ibp.TILE", 128)
        three = bound(make(), threads=2)
        for other in (two, three):
            np.testing.assert_array_equal(one.nominal, other.nominal)
            np.testing.assert_array_equal(one.lower, other.lower)
            np.testing.assert_array_equal(one.upper, other.upper)


def test_sums_equal_a_naive_implementation_in_integers():
    """Top-k and sums of the compiled kernels against sorting Python integers, ties included."""
    rng = np.random.default_rng(4)
    grid = FixedPoint.make(0.37, 3000)
    g = np.round(rng.normal(size=(2, 512)), 1) * 0.2
    interval = gradients.Interval(g * grid.scale, (g + 0.05) * grid.scale)
    sums = gradients.Sums.zeros(2, 5)
    gradients.add_dense(interval, grid, np.array([3, 4]), np.arange(2), sums)
    for p in range(2):
        low = [round(max(-grid.limit, min(grid.limit, v))) for v in interval.lower[p]]
        high = [round(max(-grid.limit, min(grid.limit, v))) for v in interval.upper[p]]
        for i in (3, 4):
            low[i], high[i] = -grid.unit, grid.unit
        assert sums.lower[p] == sum(low) and sums.upper[p] == sum(high)
        assert sorted(sums.top_lower[p]) == sorted(low)[-5:]
        assert sorted(-sums.top_upper[p]) == sorted(high)[:5]


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-12, 1e12), st.integers(1, 10**7))
def test_no_record_contributes_more_than_the_clip_and_sums_fit(clip, batch):
    grid = FixedPoint.make(clip, batch)
    assert np.log2(grid.scale) == int(np.log2(grid.scale))
    assert abs(grid.unit - clip * grid.scale) <= 0.5
    assert batch * (2 * grid.unit + 1) < 2**63 and grid.unit * gradients.TILE <= 2**53
    assert grid.unit >= 2**30


def test_records_that_overflow_contribute_nothing_nominally_and_anything_in_bounds():
    features = np.array([[1.0], [1e200], [2.0]])
    targets = np.array([[0.0], [-1e200], [1.0]])
    graph = mlp((1, 1))
    graph_theta = [1e150, 0.0]
    boxes = final(window(graph, features, targets, [range(3)], (0, 1, 2), theta=graph_theta, rate=1.0, clip=1.0))
    assert np.isfinite(boxes.nominal).all() and np.isfinite(boxes.lower).all() and np.isfinite(boxes.upper).all()
    without = window(
        graph, features, targets, [range(3)], (0,), theta=graph_theta, rate=1.0, clip=1.0,
        present=np.array([True, False, True]), normaliser=3,
    )  # fmt: skip
    np.testing.assert_array_equal(final(without).nominal, boxes.nominal)
    assert (boxes.lower[1] <= boxes.nominal).all() and (boxes.nominal <= boxes.upper[1]).all()


def test_radii_at_or_beyond_the_batch_give_the_public_reach():
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(5, 2)), rng.normal(size=(5, 1))
    made = window(mlp((2, 3, 1)), features, targets, [[0, 1], [2, 3, 4], [1, 4]], (3, 4, 5), clip=0.2)
    boxes, reach = stepwise(made), public_reach(made, made.steps)
    other = window(mlp((2, 3, 1)), features[::-1], targets, [[0, 1], [2, 3, 4], [1, 4]], (3, 4, 5), clip=0.2)
    for j in range(3):
        np.testing.assert_array_equal(boxes.lower[j], reach.lower)
        np.testing.assert_array_equal(boxes.upper[j], reach.upper)
    whole = final(made)
    assert (reach.lower <= whole.lower).all() and (whole.upper <= reach.upper).all()
    np.testing.assert_array_equal(whole.lower[-1], final(other).lower[-1])  # all slots differ: the data do not matter


def test_charging_the_radius_to_the_window_is_never_wider_and_far_tighter_over_minibatches():
    rng = np.random.default_rng(3)
    features, targets = rng.normal(size=(200, 3)), rng.normal(size=(200, 1))
    batches = [np.arange(20 * t, 20 * t + 20) for t in range(10)]
    made = window(mlp((3, 1)), features, targets, batches, (0, 1, 2, 5), rate=0.02, clip=0.3)
    each, whole, overlapping = stepwise(made), final(made), OVERLAPPING(made)
    for one in (whole, overlapping):
        assert (each.lower <= one.lower).all() and (one.upper <= each.upper).all()
    assert whole.width[1] < 0.2 * each.width[1]
    np.testing.assert_array_equal(each.nominal, whole.nominal)


def test_output_bounds_contain_the_outputs_of_every_corner_and_inner_point():
    rng = np.random.default_rng(8)
    graph = mlp((2, 3, 2), Tanh)
    theta = graph.initial()
    radii = (0, 1, 2)
    lower = np.array([theta - 0.01 * k for k in radii])
    upper = np.array([theta + 0.02 * k for k in radii])
    x = rng.normal(size=(7, 2))
    low, high = output_bounds(graph, lower, upper, x, radii)
    assert low.shape == (3, 7, 2)
    np.testing.assert_array_equal(low[0], graph.evaluate(x))
    np.testing.assert_array_equal(high[0], graph.evaluate(x))
    for j, k in enumerate(radii):
        for _ in range(50):
            at = graph.evaluate(x, lower[j] + np.round(rng.random(len(theta))) * (upper[j] - lower[j]))
            assert (low[j] <= at).all() and (at <= high[j]).all(), k
