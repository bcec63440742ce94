"""Windows as programs against enumeration, exact arithmetic, random neighbours and attacks.

(S) soundness and (M) monotonicity across neighbours are compared exactly, without any tolerance.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from builders import final, mlp, stepwise, window
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from models.ir import Node
from models.losses import Absolute, CrossEntropy, Hinge, Huber, Logistic, SmoothedHinge, Squared
from models.ops import Interval, Tanh
from solvers.discovery import find
from solvers.errors import ProgramSizeError, SolverFailureError, SolverMissingError, UnsupportedWindowError
from solvers.ibp import Plan, ibp, nominal_run
from solvers.options import Options
from solvers.programs import backend as programs
from solvers.programs import margin, pieces
from solvers.programs.backend import lp, milp, tolerance
from solvers.programs.bounds import least
from solvers.programs.margin import Head, blocks, formulate
from solvers.programs.model import solver
from solvers.programs.program import Program
from solvers.programs.safe import safe_lower_bound
from solvers.programs.size import check_size
from solvers.programs.verify import replay


@pytest.fixture(autouse=True)
def no_capture(monkeypatch):
    """Pyomo redirects the file descriptors around every solve, which takes longer than these programs."""
    monkeypatch.setattr("pyomo.contrib.solver.solvers.highs.capture_output", lambda *_, **__: contextlib.nullcontext())


def slide(backend, made, F, stride, options=None):
    """Boxes after the last step of windows of ``F`` steps, moved on by ``stride``."""
    trail, known = list(made.known), 0
    while known < len(made.steps):
        stop = min(len(made.steps), known + stride)
        start = max(0, stop - F)
        part = replace(made, steps=made.steps[start:stop], known=tuple(trail[start : known + 1]))
        trail += backend(part, options or Options())
        known = stop
    return trail[-1]


# Losses, and records (x, y) for which clips and kinks matter at the parameters that are reached.
WORLDS = {
    "squared": (Squared(), [None, (-1.0, 1.0), (2.0, 0.3)], 0.8),
    "huber": (Huber(0.4), [None, (-1.0, 0.6), (2.0, 0.3)], 0.6),
    "absolute": (Absolute(), [None, (-1.0, 0.1), (0.5, 0.3)], 0.4),
    "hinge": (Hinge(), [None, (1.5, 1.0), (1.2, -1.0)], 0.9),
    "smoothed-hinge": (SmoothedHinge(0.8), [None, (1.5, 1.0), (1.2, -1.0)], 0.7),
    "logistic": (Logistic(), [None, (-1.0, 0.0), (2.5, 1.0)], 0.7),
}
SCHEDULES = {
    "full batch": ([range(3)] * 3, 3, 3),
    "overlapping windows": ([[0, 1], [1, 2], [0, 2], [0, 1]], 2, 1),
    "disjoint windows": ([[0, 1, 2], [2], [0, 1], [1, 2]], 2, 2),
}


def boxes_of(world, backend, schedule, loss, clip, radii, slots):
    batches, F, stride = SCHEDULES[schedule]
    batches = [[i for i in b if i < slots] for b in batches]
    present = np.array([r is not None for r in world])
    features = np.array([[r[0] if r else 0.0] for r in world])
    targets = np.array([[r[1] if r else 1.0] for r in world])
    made = window(
        mlp((1, 1)), features, targets, [b for b in batches if b], radii, loss, rate=0.9, clip=clip, contraction=0.95,
        theta=[0.55, -0.05], present=present, normaliser=2,
    )  # fmt: skip
    return slide(backend, made, F, stride)


def check_worlds(backend, schedule, name, slots):
    """All data sets over the records and the empty slot, all pairs, all radii; the number of boxes that are tight."""
    loss, universe, clip = WORLDS[name]
    radii = tuple(range(slots + 1))
    worlds = list(itertools.product(universe, repeat=slots))
    boxes = [boxes_of(w, backend, schedule, loss, clip, radii, slots) for w in worlds]
    theta = np.array([b.nominal for b in boxes])
    far = np.array([[sum(a != b for a, b in zip(w, v, strict=True)) for v in worlds] for w in worlds])
    for i, one in enumerate(boxes):
        assert (one.lower[0] == one.nominal).all() and (one.upper[0] == one.nominal).all()
        for j, k in enumerate(radii):
            near = theta[far[i] <= k]
            assert (one.lower[j] <= near).all() and (near <= one.upper[j]).all()
        for v in np.flatnonzero(far[i] == 1):
            assert (boxes[v].lower[1:] <= one.lower[:-1]).all() and (one.upper[:-1] <= boxes[v].upper[1:]).all()


@pytest.mark.parametrize("schedule", ["full batch", "overlapping windows"])
@pytest.mark.parametrize("name", WORLDS)
def test_every_tiny_world_is_sound_and_monotone(name, schedule):
    check_worlds(lp, schedule, name, 2)


def test_every_tiny_world_is_sound_and_monotone_with_binaries():
    check_worlds(milp, "full batch", "hinge", 2)


@pytest.mark.parametrize("name", ["squared", "hinge"])
def test_boxes_nest_with_any_bounds_within_tau_of_the_optimum(name, monkeypatch):
    """The ladder: solvers that are off by up to tau, another time by another amount."""
    rng, exact = np.random.default_rng(0), programs.extremes

    def sloppy(name, program, costs, tau, threads):
        lower, upper = exact(name, program, costs, tau, threads)
        return lower - 0.9 * tau * rng.random(len(lower)), upper + 0.9 * tau * rng.random(len(upper))

    monkeypatch.setattr(programs, "extremes", sloppy)
    check_worlds(lp, "overlapping windows", name, 2)


def test_boxes_are_widened_by_the_radius_times_tau():
    whole = blobs((1, 2), 6, Hinge(), 0.4)
    known = (whole.boxes, *(final(replace(whole, steps=whole.steps[:t])) for t in range(1, 6)))
    made = replace(whole, known=known)
    near, far = (lp(made, Options(tau=tau))[-1] for tau in (1e-5, 1e-3))
    for j, k in enumerate(made.radii):
        tight = near.lower[j] - final(made).lower[j] > 0.01  # elsewhere the interval bounds are what is left
        assert tight.any()
        # Tightened margins, widened as well, add to it.
        assert ((near.lower - far.lower)[j][tight] >= k * (1e-3 - 1e-5) - 1e-7).all()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("backend", [lp, milp])
def test_every_small_world_is_sound_and_monotone(backend, name, schedule):
    check_worlds(backend, schedule, name, 3)


def draw_targets(rng, name, count):
    if "hinge" in name:
        return rng.choice([-1.0, 1.0], size=(count, 1))
    return rng.random((count, 1)) if name == "logistic" else np.round(rng.normal(size=(count, 1)), 1)


@pytest.mark.parametrize("name", WORLDS)
def test_random_neighbours_nest_exactly_and_stay_inside(name):
    """Two parameters and more, ties, records that are emptied or enormous; overlapping and disjoint windows."""
    loss = WORLDS[name][0]
    for seed in range(2):
        rng = np.random.default_rng(seed)
        slots = 6
        features = np.round(rng.normal(size=(slots, 2)), 1)
        targets = draw_targets(rng, name, slots)
        batches = [np.sort(rng.permutation(slots)[: rng.integers(1, 4)]) for _ in range(3)]
        options = {"rate": list(rng.choice([0.3, 1.0], size=3)), "clip": float(rng.choice([0.1, 0.6])), "loss": loss}
        options |= {"contraction": float(rng.choice([1.0, 0.9])), "normaliser": 3, "theta": rng.normal(size=3)}
        slot, present = rng.integers(slots), np.ones(slots, bool)
        other, labels = features.copy(), targets.copy()
        if seed == 0:
            present[slot] = False
        else:
            other[slot], labels[slot] = rng.normal(size=2) * 10.0 ** rng.integers(-2, 3), draw_targets(rng, name, 1)
        radii, stride = (0, 1, 2, 3), int(rng.integers(1, 3))
        one = slide(lp, window(mlp((2, 1)), features, targets, batches, radii, **options), 2, stride)
        two = slide(lp, window(mlp((2, 1)), other, labels, batches, radii, present=present, **options), 2, stride)
        for a, b in ((one, two), (two, one)):
            assert (a.lower[1] <= b.nominal).all() and (b.nominal <= a.upper[1]).all()
            assert (a.lower[1:] <= b.lower[:-1]).all() and (b.upper[:-1] <= a.upper[1:]).all()
            assert (a.lower[1:] <= a.lower[:-1]).all() and (a.upper[:-1] <= a.upper[1:]).all()


def blobs(radii, steps, loss, clip=0.2):
    """Two overlapping clouds in three dimensions, minibatches of 5 of 15."""
    rng = np.random.default_rng(2)
    labels = rng.choice([-1.0, 1.0], size=15)
    features = rng.normal(size=(15, 3)) + 0.7 * labels[:, None]
    targets = {"logistic": (labels + 1.0) / 2.0}.get(loss.name, labels)
    batches = [np.arange(5 * (t % 3), 5 * (t % 3) + 5) for t in range(steps)]
    return window(mlp((3, 1)), features, targets[:, None], batches, radii, loss, 0.5, clip, theta=np.zeros(4))


def attacks(made, radius, tries):
    """Parameters trained on neighbours whose replaced records push one way all the time."""
    rng, plan = np.random.default_rng(0), Plan(made.graph)
    targets = {"hinge": [-1.0, 1.0], "smoothed-hinge": [-1.0, 1.0], "logistic": [0.0, 1.0]}
    targets = targets.get(made.loss.name, [-50.0, 50.0])
    for _ in range(tries):
        records = made.records
        features, labels = records.features.copy(), records.targets.copy()
        slots = rng.permutation(records.slots)[:radius]
        features[:, slots] = rng.choice([-50.0, 50.0], size=(len(features), 1))
        labels[:, slots] = rng.choice(targets)
        other = replace(made, records=replace(records, features=features, targets=labels))
        yield nominal_run(other, plan)[-1]


@pytest.mark.parametrize("name", WORLDS)
def test_attacks_stay_inside_and_boxes_are_tighter_than_interval_bounds(name):
    made = blobs((0, 1, 2), 9, WORLDS[name][0])
    boxes, plain = slide(lp, made, 6, 3), stepwise(made)
    for radius in (1, 2):
        for theta in attacks(made, radius, 60):
            assert (boxes.lower[radius] <= theta).all() and (theta <= boxes.upper[radius]).all()
    assert (plain.lower <= boxes.lower).all() and (boxes.upper <= plain.upper).all()
    assert boxes.width[1] < 0.5 * plain.width[1]
    np.testing.assert_array_equal(boxes.nominal, plain.nominal)
    np.testing.assert_array_equal(boxes.lower[0], boxes.nominal)


def test_certified_equals_attained_when_the_window_is_the_whole_run():
    """Linear regression, every record once, all clips active: replacing one record by its opposite is the worst."""
    rng = np.random.default_rng(0)
    features = rng.uniform(1.0, 2.0, size=(20, 1))
    batches, options = np.arange(20).reshape(4, 5), {"rate": 0.1, "clip": 0.1, "theta": [0.0, 0.0]}
    made = window(mlp((1, 1)), features, 5.0 * features, batches, (1,), **options)
    box = lp(made, Options())[-1]
    replaced = made.records.targets.copy()
    replaced[0, 0] = -5.0
    reached = nominal_run(replace(made, records=replace(made.records, targets=replaced)), Plan(made.graph))[-1]
    ladder = 2.0 * len(made.steps) * tolerance(made, Options())
    assert (box.lower[0] <= reached).all() and (reached <= box.lower[0] + ladder).all()
    assert ladder < 0.01 * (box.nominal - reached).min()


def test_milp_is_at_least_as_tight_as_lp_up_to_the_ladder():
    made = blobs((1, 2), 3, Hinge(), 0.4)
    relaxed, exact = lp(made, Options())[-1], milp(made, Options())[-1]
    ladder = 8.0 * tolerance(made, Options())
    assert (exact.lower >= relaxed.lower - ladder).all() and (exact.upper <= relaxed.upper + ladder).all()
    assert (exact.width < relaxed.width).all()


def test_boxes_do_not_depend_on_threads():
    made = blobs((0, 1, 2), 4, Hinge())
    one, two = (slide(lp, made, 3, 1, Options(threads=threads)) for threads in (1, 2))
    for name in ("nominal", "lower", "upper"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_arguments_tightened_inside_a_window_make_it_tighter_and_stay_sound(monkeypatch):
    made = blobs((1,), 9, Hinge(), 0.4)
    kept = slide(lp, made, 6, 3)
    monkeypatch.setattr(programs, "_tightened", lambda before, head, boxes, batches, records, options, j: records)
    assert kept.width[0] < 0.99 * slide(lp, made, 6, 3).width[0]
    for theta in attacks(made, 1, 60):
        assert (kept.lower[0] <= theta).all() and (theta <= kept.upper[0]).all()


@pytest.mark.parametrize("name", ["hinge", "absolute"])
def test_two_values_and_a_kink_are_the_projection_of_four_vertices(name, monkeypatch):
    """The same optima, replaced records and, for the hinge, intervals that end at the kink included."""
    made = blobs((0, 2), 3, WORLDS[name][0], 0.4)
    head, known = Head.of(made), [made.known[0], *lp(made, Options())]
    boxes = [Interval(b.lower[1], b.upper[1]) for b in known]
    batches = [blocks(made, head, s.batch, box, 4.0) for s, box in zip(made.steps, boxes, strict=False)]
    if name == "hinge":
        batches = [replace(b, box=Interval(np.minimum(b.box.lower, 1.0), b.box.upper)) for b in batches]
        batches = [replace(b, box=Interval(b.box.lower, np.maximum(b.box.upper, 1.0))) for b in batches]
    small = formulate(made, head, 2, boxes, batches, False)
    with monkeypatch.context() as patch:
        patch.setattr(margin, "jumps", lambda *_: None)
        large = formulate(made, head, 2, boxes, batches, False)
    assert small.program.shape[1] < large.program.shape[1] and small.program.shape[0] == large.program.shape[0]
    rng = np.random.default_rng(0)
    for _ in range(10):
        direction, ends = rng.normal(size=small.theta.shape), []
        for built in (small, large):
            cost = np.zeros(built.program.shape[1])
            cost[built.theta] = direction
            ends.append(least(solver("highs", built.program, 1e-9), cost, 1e-4))
        assert ends[0] == pytest.approx(ends[1], abs=1e-4)


def window_programs(made, F, row, kept=None):
    """The slots and the program of every window of ``F`` steps, moved on by one, at radius ``made.radii[row]``.

    ``kept``: a dictionary, to intersect arguments with what earlier windows found.
    """
    head, trail = Head.of(made), list(made.known)
    for t in range(len(made.steps)):
        start = max(0, t + 1 - F)
        part = replace(made, steps=made.steps[start : t + 1], known=tuple(trail[start:]))
        batches = programs._records(part, head, Options(), row)
        for i, found in enumerate(batches if kept is not None else ()):
            old = kept.setdefault(start + i, found.box)
            ends = np.maximum(old.lower, found.box.lower), np.minimum(old.upper, found.box.upper)
            batches[i] = replace(found, box=Interval(*ends))
        boxes = [Interval(b.lower[row], b.upper[row]) for b in (*part.known, ibp(part)[-1])]
        slots = np.unique(np.concatenate([step.batch for step in part.steps]))
        yield slots, formulate(part, head, made.radii[row], boxes, batches, False)
        trail += lp(part, Options())


def left_out(name, seed, kept):
    """How many of a window's extreme points are no points of the neighbour's program, of how many; see the proof of (M)
    in docs/programs.md: the same parameters, and the slot that differs is replaced."""
    rng, slots, missed, tried = np.random.default_rng(seed), 8, 0, 0
    features, targets = np.round(rng.normal(size=(slots, 3)), 1), draw_targets(rng, name, slots)
    batches = [np.sort(rng.permutation(slots)[:4]) for _ in range(6)]
    options = {"rate": 1.0, "clip": 0.3, "loss": WORLDS[name][0], "normaliser": 4, "theta": 0.5 * rng.normal(size=4)}
    other, labels, slot = features.copy(), targets.copy(), int(rng.integers(slots))
    other[slot], labels[slot] = rng.normal(size=3), draw_targets(rng, name, 1)
    both = [window(mlp((3, 1)), x, y, batches, (0, 1, 2), **options) for x, y in ((features, targets), (other, labels))]
    found = (window_programs(made, 3, row, {} if kept else None) for row, made in enumerate(both, 1))
    for (used, small), (_, large) in zip(*found, strict=True):
        whole = solver("highs", small.program, 0.0)
        for _ in range(4):
            cost = np.zeros(small.program.shape[1])
            cost[small.theta] = rng.normal(size=small.theta.shape)
            x = whole.minimise(cost).x
            columns = np.concatenate([large.theta.ravel(), list(large.program.columns["replaced"])])
            replaced = np.where(used == slot, 1.0, x[list(small.program.columns["replaced"])])
            values = np.concatenate([x[small.theta].ravel(), replaced])
            lower, upper = large.program.lower.copy(), large.program.upper.copy()
            tried, outside = tried + 1, (values < lower[columns] - 1e-6) | (values > upper[columns] + 1e-6)
            lower[columns], upper[columns] = values - 1e-6, values + 1e-6
            fixed = solver("highs", replace(large.program, lower=lower, upper=upper), 0.0)
            try:
                fixed.minimise(np.zeros(len(lower)))
                missed += int(outside.any())
            except SolverFailureError:  # no such point
                missed += 1
    return missed, tried


@pytest.mark.parametrize("name", WORLDS)
def test_points_of_an_overlapping_windows_program_are_points_of_a_neighbours(name):
    for seed in (2, 3):
        missed, tried = left_out(name, seed, kept=False)
        assert missed == 0 and tried == 24


def test_arguments_kept_from_earlier_windows_would_not_nest():
    assert left_out("logistic", 2, kept=True)[0] > 0


def test_zero_out_boxes_lie_inside_those_of_interval_training():
    made = replace(blobs((0, 1, 2), 4, Hinge()), adjacency="zero-out")
    boxes, plain = lp(made, Options())[-1], final(made)
    assert (plain.lower <= boxes.lower).all() and (boxes.upper <= plain.upper).all()
    present = np.ones(made.records.slots, bool)
    for slot in range(made.records.slots):
        present[:] = np.arange(made.records.slots) != slot
        reached = nominal_run(replace(made, records=replace(made.records, present=present)), Plan(made.graph))[-1]
        assert (boxes.lower[1] <= reached).all() and (reached <= boxes.upper[1]).all()


def test_records_that_overflow_contribute_anything_within_the_clip():
    features, targets = np.array([[1.0], [1e300], [2.0]]), np.array([[0.0], [0.0], [1.0]])
    options = {"theta": [1.0, 0.0], "rate": 1.0, "clip": 1.0}
    made = window(mlp((1, 1)), features, targets, [range(3)] * 2, (0, 1, 2), **options)
    boxes, plain = lp(made, Options())[-1], final(made)
    assert (plain.lower <= boxes.lower).all() and (boxes.upper <= plain.upper).all()
    for wild in (0.0, 2.0, -2.0):  # what the second record may turn into when it is described with fewer digits
        features[1, 0] = wild
        reached = final(window(mlp((1, 1)), features, targets, [range(3)] * 2, (0,), **options)).nominal
        assert (boxes.lower[1] <= reached).all() and (reached <= boxes.upper[1]).all()


def test_parameters_too_large_for_a_solver_end_the_run():
    made = window(mlp((1, 1)), [[1.0]], [[0.0]], [[0]], (1,), theta=[1e30, 0.0])
    with pytest.raises(SolverFailureError, match="too large beside what one record can do in one step"):
        lp(made, Options())


# Pieces


def graph_of(loss, v, target, inputs, clip):
    """The clipped gradient at an argument, computed from the loss itself."""
    prediction = {"hinge": v * target, "smoothed-hinge": (v + 1.0) * target, "logistic": v}.get(loss.name, v + target)
    return np.clip(loss.gradient(np.array([[prediction]]), np.array([[target]]))[0, 0] * inputs, -clip, clip)


def distance_to_hull(points, vertices):
    """Largest distance of ``points`` ``(n, D)`` from the hull of ``vertices``, in all coordinates but the first."""
    from scipy.optimize import linprog

    worst = 0.0
    count, size = vertices.shape
    for point in points:
        slack = np.vstack([np.zeros(1), -np.ones((size - 1, 1))])
        rows = np.block([[vertices.T, slack], [-vertices.T, slack]])
        rows = np.delete(rows, [0, size], axis=0)
        ends = np.concatenate([point[1:], -point[1:]])
        equal = np.vstack([np.append(np.ones(count), 0.0), np.append(vertices[:, 0], 0.0)])
        found = linprog(np.append(np.zeros(count), 1.0), rows, ends, equal, [1.0, point[0]], bounds=(0, None))
        worst = max(worst, found.fun)
    return worst


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(WORLDS)), st.integers(0, 2**32 - 1))
def test_hulls_contain_the_clipped_gradients_and_nest(name, seed):
    rng = np.random.default_rng(seed)
    loss, clip = WORLDS[name][0], float(rng.choice([0.1, 0.5, 3.0]))
    inputs = np.append(rng.normal(size=2), 1.0)
    label = rng.choice([-1.0, 1.0])
    target = {"hinge": label, "smoothed-hinge": label, "logistic": rng.random()}.get(name, 0.0)
    ends = np.sort(np.append(rng.normal(size=3) * 3.0, [0.0 if name == "absolute" else 1.0]))

    def hull(low, high):
        box = Interval(np.array([low]), np.array([high]))
        found = pieces.vertices(loss, box, np.array([target]), inputs[:, None], clip)
        assert (np.abs(found.values) <= clip).all() and found.argument.min() == low and found.argument.max() == high
        return found, np.vstack([found.argument, found.values]).T

    (outer, wide), (_, narrow) = hull(ends[0], ends[3]), hull(ends[1], ends[2])
    points = [np.append(v, graph_of(loss, v, target, inputs, clip)) for v in [*ends, rng.uniform(ends[0], ends[3])]]
    bound = 1e-7  # the linear programs' own tolerance
    assert distance_to_hull(points, wide) <= bound
    assert distance_to_hull(narrow, wide) <= bound
    for point in points:  # every point lies in the hull of one piece
        own = [wide[outer.piece == p] for p in np.unique(outer.piece)]
        own = [piece for piece in own if piece[0, 0] <= point[0] <= piece[-1, 0]]
        assert min(distance_to_hull([point], piece) for piece in own) <= bound


def test_triangles_around_the_sigmoid_are_no_higher_than_stated():
    box, one = Interval(np.array([-60.0]), np.array([60.0])), np.ones((1, 1))
    found = pieces.vertices(Logistic(), box, np.zeros(1), one, 10.0)
    corner = found.argument.reshape(-1, 3), found.values[0].reshape(-1, 3)
    (a, m, b), (fa, fm, fb) = corner[0].T, corner[1].T
    height = np.abs(fa + (fb - fa) * (m - a) / (b - a) - fm)
    assert 0.5 * pieces.SIGMOID_GAP < height.max() <= pieces.SIGMOID_GAP


# Safe bounds


def random_program(rng, rows=4, columns=5, integer=False):
    dense = np.round(rng.normal(size=(rows, columns)), 2) * (rng.random((rows, columns)) < 0.7)
    dense[:, 0] = 1.0
    matrix = sparse.csr_array(dense)
    lower = np.round(rng.normal(size=columns), 1)
    upper = lower + np.round(rng.random(columns) * 3.0, 1)
    point = lower + rng.random(columns) * (upper - lower)
    if integer:
        lower, upper = np.floor(lower), np.ceil(upper)
        point = np.round(point)
    middle = matrix @ point
    sides = rng.integers(3, size=rows)
    row_lower = np.where(sides == 0, -np.inf, middle - rng.random(rows))
    row_upper = np.where(sides == 1, np.inf, middle + rng.random(rows))
    return Program(matrix, row_lower, row_upper, lower, upper, np.full(columns, integer), {})


def exact_dual_bound(program, cost, dual):
    """The formula of weak duality in rational arithmetic; multipliers of missing ends are dropped."""
    total, reduced = Fraction(0), [Fraction(float(c)) for c in cost]
    dense = program.matrix.toarray()
    for i, y in enumerate(dual):
        end = program.row_lower[i] if y > 0 else program.row_upper[i]
        if y == 0 or np.isinf(end):
            continue
        total += Fraction(float(y)) * Fraction(float(end))
        for j in range(len(cost)):
            reduced[j] -= Fraction(float(y)) * Fraction(float(dense[i, j]))
    for r, low, high in zip(reduced, program.lower, program.upper, strict=True):
        total += min(r * Fraction(float(low)), r * Fraction(float(high)))
    return total


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-8, 8))
def test_safe_bounds_lie_below_exact_weak_duality_for_any_multipliers(seed, magnitude):
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    cost, dual = rng.normal(size=5), rng.normal(size=4) * 10.0**magnitude
    exact = exact_dual_bound(program, cost, dual)
    bound = Fraction(safe_lower_bound(program, cost, dual))
    assert exact - Fraction(1, 10**12) * Fraction(10.0 ** max(magnitude, 0.0)) <= bound <= exact


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_rounding_of_reduced_costs_that_cancel_is_covered(seed):
    rng = np.random.default_rng(seed)
    matrix = sparse.csr_array(rng.normal(size=(4, 5)))
    program = Program(matrix, np.zeros(4), np.full(4, np.inf), np.zeros(5), np.full(5, 1e3), np.zeros(5, bool), {})
    dual = rng.random(4)
    cost = matrix.T @ dual
    assert Fraction(safe_lower_bound(program, cost, dual)) <= exact_dual_bound(program, cost, dual)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_bounds_are_below_every_point_and_within_tau_whatever_the_multipliers(seed):
    rng = np.random.default_rng(seed)
    program, cost, tau = random_program(rng), rng.normal(size=5), 1e-4
    kept = solver("highs", program, tau)
    bound, answer = least(kept, cost, tau), kept.minimise(cost)
    assert bound <= cost @ answer.x + 1e-7 <= bound + tau
    for sloppy in (answer.dual * 1.01, answer.dual + 0.1 * rng.normal(size=4), -answer.dual, np.full(4, np.nan)):
        assert safe_lower_bound(program, cost, sloppy) <= bound + 1e-7


def test_coefficients_that_solvers_drop_are_kept_in_the_bound():
    """HiGHS ignores coefficients below 1e-9: for it the least of -y under y <= 5e-10 x is 0."""
    matrix = sparse.csr_array(np.array([[5e-10, -1.0]]))
    ends = (np.zeros(1), np.full(1, np.inf), np.zeros(2), np.array([1e6, 1.0]))
    program, cost = Program(matrix, *ends, np.zeros(2, bool), {}), np.array([0.0, -1.0])
    answer = solver("highs", program, 1e-9).minimise(cost)
    assert cost @ answer.x == 0.0  # wrong
    assert safe_lower_bound(program, cost, answer.dual) <= -5e-4
    with pytest.raises(SolverFailureError, match="above its bound"):
        least(solver("highs", program, 1e-9), cost, 1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_mixed_integer_bounds_are_below_every_integer_point_and_within_tau(seed):
    rng = np.random.default_rng(seed)
    program, cost, tau = random_program(rng, integer=True), rng.normal(size=5), 1e-3
    points = itertools.product(*(np.arange(lo, up + 1) for lo, up in zip(program.lower, program.upper, strict=True)))
    best = min(cost @ np.array(p) for p in points if program.residual(np.array(p)) <= 1e-9)
    assert best - tau <= least(solver("highs", program, tau / 4.0), cost, tau) <= best


# Failures


@pytest.mark.parametrize("bound", [5.0, -9.0])
def test_a_bound_far_from_the_value_at_the_solvers_own_point_is_refused(bound, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rng = np.random.default_rng(0)
    program, cost = random_program(rng, integer=True), rng.normal(size=5)
    kept = solver("highs", program, 1e-4)
    honest = kept.minimise(cost)
    assert least(kept, cost, 1e-3) == pytest.approx(honest.bound, abs=1e-3)
    wrong = replace(honest, bound=honest.bound + bound)
    monkeypatch.setattr(kept, "minimise", lambda _: wrong)
    assert least(kept, cost, 1e-3) == pytest.approx(honest.bound, abs=1e-3)  # asked once more
    monkeypatch.setattr(kept, "again", lambda _: wrong)
    with pytest.raises(SolverFailureError, match="above"):
        least(kept, cost, 1e-3)


@pytest.mark.parametrize("rows", [4, 600])
def test_a_linear_answer_that_is_off_is_asked_for_once_more(rows, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rng = np.random.default_rng(1)
    program, cost = random_program(rng), rng.normal(size=5)
    times = rows // 4
    program = replace(
        program, matrix=sparse.csr_array(sparse.vstack([program.matrix] * times)),
        row_lower=np.tile(program.row_lower, times), row_upper=np.tile(program.row_upper, times),
    )  # fmt: skip
    kept = solver("highs", program, 1e-4)
    best = least(kept, cost, 1e-3)
    honest = kept.minimise(cost)
    wrong = replace(honest, dual=0.5 * honest.dual + 0.1)
    monkeypatch.setattr(kept, "minimise", lambda _: wrong)
    assert least(kept, cost, 1e-3) == pytest.approx(best, abs=1e-3)
    monkeypatch.setattr(kept, "again", lambda _: wrong)
    with pytest.raises(SolverFailureError, match="above its bound"):
        least(kept, cost, 1e-3)


def test_a_program_without_points_ends_the_run_with_one_sentence_and_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rng = np.random.default_rng(0)
    program = replace(random_program(rng), row_lower=np.full(4, 90.0), row_upper=np.full(4, 99.0))
    with pytest.raises(SolverFailureError, match=r"solver highs: no usable bound .* 4 rows and 5 columns: it ended"):
        least(solver("highs", program, 1e-4), np.ones(5), 1e-4)
    (written,) = tmp_path.iterdir()
    assert "x" in written.read_text()


def test_a_tolerance_that_the_solver_cannot_reach_is_an_error():
    with pytest.raises(SolverFailureError, match="the tolerance tau allows"):
        lp(blobs((1,), 3, Squared()), Options(tau=1e-19))


def test_models_losses_and_solvers_without_a_formulation_are_refused():
    with pytest.raises(UnsupportedWindowError, match="one affine layer with one output"):
        lp(window(mlp((1, 2, 1), Tanh), [[1.0]], [[1.0]], [[0]], (1,)), Options())
    tied = mlp((1, 1))
    nodes = (replace(n, op=replace(n.op, name="w0")) if n.name == "b0" else n for n in tied.nodes)
    tied = replace(tied, nodes=tuple(nodes))
    with pytest.raises(UnsupportedWindowError, match="one affine layer"):
        lp(window(tied, [[1.0]], [[1.0]], [[0]], (1,)), Options())
    with pytest.raises(UnsupportedWindowError, match="cross-entropy"):
        lp(window(mlp((1, 2)), [[1.0]], [[1.0]], [[0]], (1,), CrossEntropy()), Options())
    made = blobs((1,), 1, Hinge())
    with pytest.raises(SolverMissingError, match="there are: highs"):
        lp(made, Options(solver="nonesuch"))
    with pytest.raises(SolverMissingError, match="no dual values"):
        lp(made, Options(solver="scip"))
    if find("cbc"):
        with pytest.raises(SolverMissingError, match="no dual bound of a MILP; use one of: highs, scip, gurobi"):
            milp(made, Options(solver="cbc"))


def test_programs_that_are_hopeless_are_refused_with_their_size_unless_forced():
    rng = np.random.default_rng(0)
    made = window(mlp((8, 1)), rng.normal(size=(2000, 8)), rng.normal(size=(2000, 1)), [range(2000)] * 4, (1,))
    with pytest.raises(ProgramSizeError, match=r"4 steps .* 24076 rows and 40076 columns; 4018 objectives"):
        lp(made, Options())
    check_size(replace(made, steps=made.steps[:1]), False, False)
    check_size(made, False, True)
    with pytest.raises(ProgramSizeError, match="hours"):
        check_size(blobs((1,), 20, Hinge()), True, False)


# Verification


@pytest.mark.parametrize("name", WORLDS)
def test_points_of_mixed_integer_programs_are_training_runs(name):
    """Replayed with the loss's own gradients; the relaxation's points are not training runs."""
    made = blobs((1,), 3, WORLDS[name][0], 0.4)
    head, known = Head.of(made), [made.known[0], *lp(made, Options())]
    boxes = [Interval(b.lower[0], b.upper[0]) for b in known]
    batches = [blocks(made, head, s.batch, box, 2.0) for s, box in zip(made.steps, boxes, strict=False)]
    far = {}
    for integer in (True, False):
        program = formulate(made, head, 1, boxes, batches, integer)
        kept = solver("highs", program.program, 1e-5)
        cost = np.zeros(program.program.shape[1])
        far[integer] = 0.0
        for column in program.theta[-1]:
            cost[:] = 0.0
            cost[column] = 1.0
            far[integer] = max(far[integer], replay(made, program, kept.minimise(cost).x))
    assert far[True] <= (2 * 5 * pieces.SIGMOID_GAP / 0.4 if name == "logistic" else 1e-4)
    assert name == "logistic" or far[False] > 0.01


def test_trainable_weights_alone_frozen_biases_and_prepared_inputs_are_described():
    """A frozen bias is an offset, a graph in front of the layer that does not train prepares the features."""
    rng = np.random.default_rng(1)
    features, targets = rng.normal(size=(6, 2)), rng.normal(size=(6, 1))
    graph = mlp((2, 1)).with_trainable(["w0"])
    nodes = list(graph.nodes)
    nodes = (nodes[0], Node("t", Tanh(), (0,)), *(replace(n, inputs=tuple(i + 1 for i in n.inputs)) for n in nodes[1:]))
    prepared = replace(graph, nodes=nodes, output=graph.output + 1)
    for made_graph, x in ((graph, features), (prepared, features)):
        made = window(made_graph, x, targets, [range(6)] * 3, (0, 1), rate=0.5, clip=0.3)
        boxes, plain = lp(made, Options())[-1], final(made)
        assert (plain.lower <= boxes.lower).all() and (boxes.upper <= plain.upper).all()
        for theta in attacks(made, 1, 40):
            assert (boxes.lower[1] <= theta).all() and (theta <= boxes.upper[1]).all()
    head = Head.of(made)
    assert head.offset == float(graph.parameters[1].value[0]) and head.inputs.shape == (2, 6)
    np.testing.assert_allclose(head.inputs, np.tanh(features).T, rtol=1e-15)
