"""ReLU networks as programs against enumeration, random neighbours, attacks and replays.

(S) soundness and (M) monotonicity across neighbours are compared exactly, without any tolerance.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
from builders import final, mlp, sliding, window

from certify.driver import run
from certify.recipe import loads
from models.losses import Absolute, CrossEntropy, Hinge, Huber, Logistic, Squared
from models.ops import Interval, Tanh
from solvers.discovery import find
from solvers.errors import ProgramSizeError, SolverMissingError, UnsupportedWindowError
from solvers.ibp import Plan, nominal_run, record_gradients
from solvers.options import Options
from solvers.programs.backend import lp, milp, miqcp, tolerance
from solvers.programs.bounds import extremes
from solvers.programs.model import solver
from solvers.programs.relu import Network, formulate
from solvers.programs.size import check_size, estimate_size
from solvers.programs.verify import replay

needs_scip = pytest.mark.skipif(find("scip") is None, reason="needs pyscipopt")
SCIP = Options(solver="scip")


@pytest.fixture(autouse=True)
def no_capture(monkeypatch):
    """Pyomo redirects the file descriptors around every solve, which takes longer than these programs."""
    monkeypatch.setattr("pyomo.contrib.solver.solvers.highs.capture_output", lambda *_, **__: contextlib.nullcontext())


# Losses, and records (x, y) for which clips, kinks and the ReLU matter at the parameters that are reached.
WORLDS = {
    "squared": (Squared(), [None, (-1.0, 1.0), (1.5, 0.3)], 0.8),
    "huber": (Huber(0.4), [None, (-1.0, 0.6), (1.5, 0.1)], 0.3),
    "absolute": (Absolute(), [None, (0.6, 0.2), (1.5, 0.6)], 0.5),
    "hinge": (Hinge(), [None, (1.5, 1.0), (1.2, -1.0)], 0.6),
    "logistic": (Logistic(), [None, (-1.0, 0.0), (2.5, 1.0)], 0.4),
}
#: Units near their kink, an output near the losses' kinks; parameters in the order of the graphs of `mlp`.
STARTS = {(1, 1, 1): [0.5, 0.05, 0.9, 0.1], (1, 2, 1): [0.5, -0.3, 0.05, 0.1, 0.9, -0.6, 0.1]}
OVERLAPPING = ([[0, 1], [1], [0, 1]], 2)


def check_worlds(backend, dims, name, schedule, options=None, radii=(0, 1, 2)):
    """All data sets of two slots over the records and the empty slot, all pairs, all radii."""
    loss, universe, clip = WORLDS[name]
    batches, F = schedule

    def bound(world):
        present = np.array([r is not None for r in world])
        features = np.array([[r[0] if r else 0.0] for r in world])
        targets = np.array([[r[1] if r else 1.0] for r in world])
        made = window(
            mlp(dims), features, targets, batches, radii, loss, rate=0.9, clip=clip, contraction=0.95,
            theta=STARTS[dims], present=present, normaliser=2,
        )  # fmt: skip
        return sliding(F, 1, lambda part, _: backend(part, options or Options()))(made)

    worlds = list(itertools.product(universe, repeat=2))
    boxes = [bound(w) for w in worlds]
    theta = np.array([b.nominal for b in boxes])
    far = np.array([[sum(a != b for a, b in zip(w, v, strict=True)) for v in worlds] for w in worlds])
    for i, one in enumerate(boxes):
        assert (one.lower[0] == one.nominal).all() and (one.upper[0] == one.nominal).all()
        for j, k in enumerate(radii):
            near = theta[far[i] <= k]
            assert (one.lower[j] <= near).all() and (near <= one.upper[j]).all()
        for v in np.flatnonzero(far[i] == 1):
            assert (boxes[v].lower[1:] <= one.lower[:-1]).all() and (one.upper[:-1] <= boxes[v].upper[1:]).all()


@pytest.mark.parametrize("name", WORLDS)
def test_every_tiny_world_is_sound_and_monotone(name):
    check_worlds(lp, (1, 1, 1), name, OVERLAPPING)


@pytest.mark.parametrize("name", ["squared", "hinge"])
def test_every_tiny_world_with_binaries_is_sound_and_monotone(name):
    check_worlds(milp, (1, 1, 1), name, ([[0, 1]] * 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [OVERLAPPING, ([[0, 1]] * 3, 3)], ids=["overlapping", "whole"])
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("backend", [lp, milp])
def test_every_small_world_is_sound_and_monotone(backend, name, schedule):
    check_worlds(backend, (1, 2, 1), name, schedule)


@needs_scip
@pytest.mark.slow
def test_every_tiny_world_with_exact_products_is_sound_and_monotone():
    check_worlds(miqcp, (1, 1, 1), "squared", ([[0, 1]] * 2, 2), SCIP)


def draw_targets(rng, loss, count):
    if loss.name == "hinge":
        return rng.choice([-1.0, 1.0], size=(count, 1))
    return rng.random((count, 1)) if loss.name == "logistic" else np.round(rng.normal(size=(count, 1)), 1)


def without_bias(graph):
    """The graph without the first layer's bias, its node 2."""
    nodes = [replace(n, inputs=tuple(i - (i > 2) for i in n.inputs if i != 2)) for n in graph.nodes if n.name != "b0"]
    kept = tuple(p for p in graph.parameters if p.name != "b0")
    return replace(graph, nodes=tuple(nodes), output=graph.output - 1, parameters=kept)


@pytest.mark.parametrize("seed", range(6))
def test_random_neighbours_nest_exactly_and_stay_inside(seed):
    """One and two hidden layers, all losses; ties, records that are emptied or enormous, layers without a bias."""
    rng = np.random.default_rng(seed)
    loss = [Squared(), Huber(0.4), Absolute(), Hinge(), Logistic(), Squared()][seed]
    graph = mlp((2, 2, 2, 1) if seed % 2 else (2, 3, 1), seed=seed)
    if seed == 4:
        graph = without_bias(graph)
    slots = 4
    features = np.round(rng.normal(size=(slots, 2)), 1)
    targets = draw_targets(rng, loss, slots)
    batches = [np.sort(rng.permutation(slots)[: rng.integers(1, 3)]) for _ in range(2)]
    options = {"rate": [0.3, 1.0], "clip": float(rng.choice([0.1, 0.6])), "loss": loss, "normaliser": 2}
    options["contraction"] = float(rng.choice([1.0, 0.9]))
    slot, present = batches[0][0], np.ones(slots, bool)
    other, labels = features.copy(), targets.copy()
    if seed < 2:
        present[slot] = False
    else:
        other[slot], labels[slot] = rng.normal(size=2) * 10.0 ** rng.integers(-2, 2), draw_targets(rng, loss, 1)
    radii = (0, 1, 2, 3)
    one = lp(window(graph, features, targets, batches, radii, **options), Options())[-1]
    two = lp(window(graph, other, labels, batches, radii, present=present, **options), Options())[-1]
    for a, b in ((one, two), (two, one)):
        assert (a.lower[1] <= b.nominal).all() and (b.nominal <= a.upper[1]).all()
        assert (a.lower[1:] <= b.lower[:-1]).all() and (b.upper[:-1] <= a.upper[1:]).all()
        assert (a.lower[1:] <= a.lower[:-1]).all() and (a.upper[:-1] <= a.upper[1:]).all()


@pytest.mark.parametrize("seed", range(3))
def test_optima_grow_with_the_boxes_of_the_parameters(seed):
    """Boxes that grow little by little, the same records: a relaxation chosen by the box would jump inwards."""
    made = network((1,), 1, (2, 3, 1), [Squared(), Hinge(), Huber(0.4)][seed])
    model, theta = Network.of(made), made.boxes.nominal
    rng, last = np.random.default_rng(seed), None
    shift = rng.uniform(-1.0, 1.0, size=len(theta))
    for half in np.linspace(0.05, 0.8, 16):
        before = Interval(theta - half * (1.0 + shift), theta + half * (1.0 - shift))
        program = formulate(made, model, 1, [before, Interval(theta - 9.0, theta + 9.0)], "lp")
        costs = np.zeros((len(theta), program.program.shape[1]))
        costs[np.arange(len(theta)), program.theta[-1]] = 1.0
        costs[np.arange(len(theta)), program.theta[0]] = -1.0  # the step alone
        lower, upper = extremes("highs", program.program, costs, 1e-4, 1)
        if last is not None:
            assert (lower <= last[0] + 1e-6).all() and (last[1] - 1e-6 <= upper).all()
        last = lower, upper


def network(radii=(1,), steps=3, dims=(2, 3, 1), loss=None, clip=0.3, slots=6, batch=3):
    """Random records in minibatches that come round again."""
    rng = np.random.default_rng(3)
    batches = [(np.arange(batch) + batch * t) % slots for t in range(steps)]
    features, loss = rng.normal(size=(slots, dims[0])), loss or Squared()
    return window(mlp(dims), features, draw_targets(rng, loss, slots), batches, radii, loss, rate=0.3, clip=clip)


def attacks(made, radius, tries):
    """Parameters trained on neighbours whose replaced records are drawn large and small."""
    rng, plan = np.random.default_rng(0), Plan(made.graph)
    for _ in range(tries):
        records = made.records
        features, labels = records.features.copy(), records.targets.copy()
        slots = rng.permutation(records.slots)[:radius]
        features[:, slots] = rng.normal(size=(len(features), radius)) * rng.choice([1.0, 20.0])
        labels[:, slots] = draw_targets(rng, made.loss, radius).T * (20.0 if made.loss.name == "squared" else 1.0)
        other = replace(made, records=replace(records, features=features, targets=labels))
        yield nominal_run(other, plan)[-1]


@pytest.mark.parametrize("dims", [(2, 3, 1), (2, 2, 2, 1)])
def test_attacks_stay_inside_and_boxes_are_tighter_than_interval_bounds(dims):
    made = network((0, 1, 2), 3, dims)
    boxes, plain = lp(made, Options())[-1], final(made)
    for radius in (1, 2):
        for theta in attacks(made, radius, 100):
            assert (boxes.lower[radius] <= theta).all() and (theta <= boxes.upper[radius]).all()
    assert (plain.lower <= boxes.lower).all() and (boxes.upper <= plain.upper).all()
    assert boxes.width[1] < 0.97 * plain.width[1]
    np.testing.assert_array_equal(boxes.nominal, plain.nominal)


def with_run(made, program, replaced, data):
    """The program with its parameters fixed to the training run on ``data`` and ``replaced`` ``(slots,)`` given."""
    trail = [made.boxes.nominal, *nominal_run(data, Plan(made.graph))]
    lower, upper = program.program.lower.copy(), program.program.upper.copy()
    for columns, theta in zip(program.theta, trail, strict=True):
        lower[columns] = upper[columns] = theta / program.unit
    at = program.program.columns["replaced"]
    lower[at.start : at.stop] = upper[at.start : at.stop] = replaced
    return replace(program.program, lower=lower, upper=upper)


@pytest.mark.parametrize("loss", [Squared(), Huber(0.4), Absolute(), Hinge(), Logistic()], ids=lambda loss: loss.name)
@pytest.mark.parametrize("dims", [(2, 3, 1), (2, 2, 2, 1)])
def test_training_runs_are_points_of_the_mixed_integer_program(dims, loss):
    """With the parameters and the replaced records given, the rest can be completed: (S) for each row."""
    made = network((1,), 2, dims, loss)
    made.records.features[0] *= 30.0  # gradients of its weights are clipped all over the box, the others' are not
    boxes = [Interval(b.lower[0], b.upper[0]) for b in (made.boxes, *lp(made, Options()))]
    program = formulate(made, Network.of(made), 1, boxes, "milp")
    rng = np.random.default_rng(0)
    for slot in (0, 4):
        features, labels = made.records.features.copy(), made.records.targets.copy()
        features[:, slot], labels[:, slot] = rng.normal(size=2), draw_targets(rng, loss, 1)[0]
        data = replace(made, records=replace(made.records, features=features, targets=labels))
        fixed = with_run(made, program, np.arange(6) == slot, data)
        point = solver("highs", fixed, 1e-6).minimise(np.zeros(fixed.shape[1])).x
        assert program.program.residual(point) <= 1e-6


@pytest.mark.parametrize("loss", [Squared(), Hinge()], ids=lambda loss: loss.name)
def test_relaxations_widen_from_exact_products_to_binaries_to_none(loss):
    pytest.importorskip("pyscipopt")
    made = network((1,), 2, (1, 1, 1), loss, slots=4, batch=2)
    boxes = [lp(made, Options())[-1], milp(made, Options())[-1], miqcp(made, SCIP)[-1]]
    ladder = 8.0 * tolerance(made, Options())
    for wide, narrow in itertools.pairwise(boxes):
        assert (narrow.lower >= wide.lower - ladder).all() and (narrow.upper <= wide.upper + ladder).all()
    assert boxes[2].width[0] < boxes[0].width[0]
    for theta in attacks(made, 1, 100):
        assert (boxes[2].lower[0] <= theta).all() and (theta <= boxes[2].upper[0]).all()


@needs_scip
def test_points_with_exact_products_are_training_runs():
    made = network((1,), 2, (1, 2, 1), slots=4, batch=2)
    boxes = [Interval(b.lower[0], b.upper[0]) for b in (made.boxes, *lp(made, Options()))]
    far = {}
    for kind, name in (("miqcp", "scip"), ("lp", "highs")):
        program = formulate(made, Network.of(made), 1, boxes, kind)
        kept = solver(name, program.program, 1e-4)
        far[kind] = 0.0
        for column in program.theta[-1]:
            cost = np.zeros(program.program.shape[1])
            cost[column] = 1.0
            far[kind] = max(far[kind], replay(made, program, kept.minimise(cost).x))
    assert far["miqcp"] <= 1e-4 and far["lp"] > 0.01


def test_intervals_contain_the_trainers_own_numbers():
    """Adjoints and values over a box, at points of the box."""
    made = network((1,), 1, (2, 2, 2, 1), Logistic())
    model, theta = Network.of(made), made.boxes.nominal
    box = Interval(theta - 0.2, theta + 0.2)
    bounds = model.bounds(made, made.steps[0].batch, box, 2.0)
    x, y = made.records.tile(bounds.slots)
    rng = np.random.default_rng(0)
    for _ in range(50):
        point = rng.uniform(box.lower, box.upper)
        values = model.plan.forward(x, model.plan.shared(point))
        found, _ = record_gradients(model.plan, made, x, y, model.plan.shared(point), None, 1.0)
        adjoints = [found[f"b{number}"][0] for number in range(3)]
        for interval, value in zip(
            [*bounds.z, *bounds.d], [*(values[layer.node] for layer in model.layers), *adjoints], strict=True
        ):
            assert (interval.lower <= value).all() and (value <= interval.upper).all()


def test_linear_models_take_exact_products_as_binaries():
    rng = np.random.default_rng(0)
    made = window(mlp((1, 1)), rng.normal(size=(4, 1)), rng.normal(size=(4, 1)), [range(4)] * 2, (1,))
    np.testing.assert_array_equal(miqcp(made, Options())[-1].lower, milp(made, Options())[-1].lower)


def test_records_that_overflow_contribute_anything_within_the_clip():
    features, targets = np.array([[1.0], [1e300], [2.0]]), np.array([[0.0], [0.0], [1.0]])
    options = {"theta": STARTS[1, 1, 1], "rate": 1.0, "clip": 1.0}
    made = window(mlp((1, 1, 1)), features, targets, [range(3)] * 2, (0, 1, 2), **options)
    boxes, plain = lp(made, Options())[-1], final(made)
    assert (plain.lower <= boxes.lower).all() and (boxes.upper <= plain.upper).all()
    for wild in (0.0, 2.0, -2.0):
        features[1, 0] = wild
        reached = final(window(mlp((1, 1, 1)), features, targets, [range(3)] * 2, (0,), **options)).nominal
        assert (boxes.lower[1] <= reached).all() and (reached <= boxes.upper[1]).all()


def test_batches_without_records_only_contract():
    made = window(
        mlp((1, 1, 1)), [[1.0], [2.0]], [[1.0], [1.0]], [[0, 1], [0]], (1,), present=np.zeros(2, bool), contraction=0.9
    )
    boxes, plain = lp(made, Options())[-1], final(made)
    assert (plain.lower <= boxes.lower).all() and (boxes.upper <= plain.upper).all()


def test_envelopes_state_the_tolerance_in_parameter_units():
    """The table's is in units of what one record can do in one step; the rate is the largest of the run."""
    text = """
    [training]
    loss = "squared"
    steps = 2
    clip = 0.5
    learning_rate = { schedule = "inverse", value = 0.25, decay = 0.1 }
    [batches]
    kind = "sequential"
    size = 2
    """
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(4, 1)), rng.normal(size=(4, 1))
    for backend, options, tau in (("lp", {}, 2.0**-16), ("lp", {"tau": 1e-3}, 1e-3), ("ibp", {}, 0.0)):
        envelope = run(mlp((1, 2, 1)), loads(text), features, targets, radii=(0, 1), backend=backend, F=1, **options)
        assert envelope.metadata.capabilities.tau == tau


def test_networks_and_solvers_without_a_formulation_are_refused():
    def refuse(graph, finding, loss=None, outputs=1):
        made = window(graph, [[1.0]], np.zeros((1, outputs)), [[0]], (1,), loss)
        with pytest.raises(UnsupportedWindowError, match=finding):
            lp(made, Options())

    refuse(mlp((1, 2, 1), Tanh), "Tanh between its layers")
    refuse(mlp((1, 1, 1, 1, 1)), "3 hidden layers")
    refuse(mlp((1, 2, 2)), "2 outputs", outputs=2)
    refuse(mlp((1, 2, 2)), "cross-entropy loss", CrossEntropy())
    refuse(mlp((1, 2, 1)).with_trainable(["w0", "w1"]), "in place of a layer that trains as a whole")
    with pytest.raises(SolverMissingError, match="HiGHS cannot solve a MIQCP; use one of: scip, gurobi"):
        miqcp(network((1,), 1), Options())


def test_sizes_of_networks_are_near_those_of_their_programs():
    made = network((1,), 2, (4, 6, 1), slots=10, batch=5)
    boxes = [Interval(theta - 0.3, theta + 0.3) for theta in [made.boxes.nominal] * 3]
    rows, columns = formulate(made, Network.of(made), 1, boxes, "lp").program.shape
    size = estimate_size(made)
    assert 0.5 * rows <= size.rows <= 2.0 * rows and 0.5 * columns <= size.columns <= 2.0 * columns
    assert size.objectives == 2 * 37


def test_programs_of_larger_networks_are_refused_with_their_size_unless_forced():
    rng = np.random.default_rng(0)
    made = window(mlp((8, 64, 1)), rng.normal(size=(50, 8)), rng.normal(size=(50, 1)), [range(50)], (1,))
    with pytest.raises(ProgramSizeError, match=r"1 steps .* rows and \d+ columns; 1282 objectives of about \d+ s make"):
        lp(made, Options())
    check_size(made, False, True)
