"""The attack never leaves a sound envelope, leaves unsound ones, and finds far more than random search.

Envelopes are compared exactly, without any tolerance.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import mlp, stepwise

from certify import attack
from certify.attack import Direction, EnvelopeViolation, Query, attack_report, guided_attack, random_attack
from certify.driver import Problem, prepare, run
from certify.errors import RadiusError
from certify.recipe import from_dict
from models.ops import Tanh
from solvers import Boxes, bound, ibp, output_bounds
from solvers.ibp import Plan, step


def problem(
    dims, loss="squared", records=40, steps=12, kind="full", size=None, adjacency="replace-one", ranges=True,
    slots=None, contraction=1.0, activation=None, rate=0.3, seed=0,
) -> Problem:
    """Records in the unit cube with a noisy linear rule, and a small network."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, (records, dims[0]))
    signal = x @ rng.normal(size=dims[0]) + 0.2 * rng.normal(size=records)
    sides = np.where(signal > 0.0, 1.0, -1.0)
    y = {"logistic": (signal > 0.0) * 1.0, "hinge": sides, "smoothed-hinge": sides}.get(loss, np.clip(signal, -1, 1))
    if loss == "cross-entropy":
        y = (signal > 0.0) * 1.0
    batches = {"kind": kind, "size": size, "slots": slots, "seed": 3 if kind == "shuffled" else None}
    recipe = {
        "training": {
            "loss": loss, "clip": 0.3, "steps": steps, "contraction": contraction,
            "learning_rate": {"schedule": "constant", "value": rate},
        },
        "batches": {name: value for name, value in batches.items() if value is not None},
        "privacy": {"adjacency": adjacency},
    }  # fmt: skip
    if ranges:
        recipe["features"] = {"lower": -1.0, "upper": 1.0}
        if loss != "cross-entropy":
            recipe["target"] = {"lower": float(y.min()), "upper": float(y.max())}
    graph = mlp(dims, seed=1) if activation is None else mlp(dims, activation, seed=1)
    return prepare(graph, from_dict(recipe), x, y)


PROBLEMS = {
    "linear": {"dims": (3, 1)},
    "linear, minibatches": {"dims": (3, 1), "kind": "sequential", "size": 10},
    "linear, zero-out": {"dims": (3, 1), "adjacency": "zero-out"},
    "linear, empty slots": {"dims": (3, 1), "slots": 48, "contraction": 0.9},
    "logistic": {"dims": (3, 1), "loss": "logistic"},
    "logistic, shuffled": {"dims": (3, 1), "loss": "logistic", "kind": "shuffled", "size": 8},
    "logistic, zero-out with empty slots": {
        "dims": (3, 1), "loss": "logistic", "adjacency": "zero-out", "slots": 44, "kind": "shuffled", "size": 11,
    },
    "hinge, no ranges": {"dims": (2, 1), "loss": "hinge", "ranges": False},
    "smoothed hinge": {"dims": (2, 1), "loss": "smoothed-hinge"},
    "cross-entropy": {"dims": (2, 2), "loss": "cross-entropy", "records": 24},
    "logistic, many records": {"dims": (3, 1), "loss": "logistic", "records": 600, "steps": 5},
    "network": {"dims": (3, 4, 1), "steps": 8},
    "network, shuffled": {"dims": (3, 4, 1), "kind": "shuffled", "size": 8, "steps": 10},
}  # fmt: skip


def envelope(made: Problem, radii) -> Boxes:
    return bound("ibp", made.window(0, made.steps, [made.start(radii)], radii))[-1]


def sample(made: Problem) -> list[int]:
    """Three positions spread over the parameter vector."""
    return sorted({0, made.graph.initial().size // 2, made.graph.initial().size - 1})


@pytest.mark.parametrize("name", PROBLEMS)
def test_attacks_never_leave_an_envelope(name):
    made = problem(**PROBLEMS[name])
    radii = (0, 1, 4)
    boxes = envelope(made, radii)
    report = attack_report(made, radii, boxes, sample(made), retrainings=4, candidates=64)
    assert (report.lower <= report.reached_lower).all() and (report.reached_upper <= report.upper).all()
    assert (report.ratio[0] == 1.0).all() and (report.ratio <= 1.0).all() and (report.ratio[1:] > 0.02).all()
    assert (np.diff(report.reached_upper, axis=0) >= 0.0).all()
    size = made.graph.initial().size
    for j in sample(made):
        found = random_attack(made, 4, Direction.parameter(size, j), retrainings=10, seed=j)
        assert (boxes.lower[2] <= found.trained).all() and (found.trained <= boxes.upper[2]).all()


def differing(made: Problem, other: Problem) -> int:
    """Distance under the recipe's adjacency, counted afresh from the records."""
    total = 0
    zero_out = made.recipe.privacy.adjacency == "zero-out"
    slots = made.schedule.slots

    def record(p, i):
        there = i < p.records.features.shape[1] and (p.records.present is None or p.records.present[i])
        return (*p.records.features[:, i], *p.records.targets[:, i]) if there else None

    for i in range(slots):
        a, b = record(made, i), record(other, i)
        if a != b:
            total += 2 if zero_out and a is not None and b is not None else 1
    return total


@pytest.mark.parametrize("attacker", [guided_attack, random_attack])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_value_reported_is_reached_within_the_radius_and_the_ranges(name, attacker):
    made = problem(**PROBLEMS[name])
    aim = Direction.parameter(made.graph.initial().size, 0)
    for radius in (1, 5):
        found = attacker(made, radius, aim, retrainings=4, candidates=64)
        altered = found.apply(made)
        again = bound("ibp", altered.window(0, made.steps, [altered.start(())], ()))[-1]
        np.testing.assert_array_equal(again.nominal, found.theta)
        assert found.objective == found.theta[0] and found.gain >= 0.0
        assert len(found.history) == 4 and found.objective == max(found.baseline, *found.history)
        assert differing(made, altered) <= radius
        x, y = altered.records.features, altered.records.targets
        if PROBLEMS[name].get("ranges", True):
            assert np.abs(x).max() <= 1.0
        made.loss.prepare(y[:, altered.records.present], made.graph.outputs)
    assert attacker(made, 0, aim).history == ()


def test_a_radius_that_cannot_be_is_refused():
    made = problem((2, 1))
    for radius in (-1, 41):
        with pytest.raises(RadiusError):
            guided_attack(made, radius, np.ones(3))


def test_a_guided_attack_finds_far_more_than_random_search():
    """Gains summed over both ends of three parameters, as a share of the guided attack's, radius 4, fixed seeds.

    Measured: random search with as many retrainings 0.23 to 0.40, with ten times as many 0.45 to 0.71.
    """
    for name in ("linear", "linear, minibatches", "logistic", "logistic, shuffled", "network", "network, shuffled"):
        made = problem(**PROBLEMS[name])
        size = made.graph.initial().size
        guided = equal = tenfold = 0.0
        for j in sample(made):
            for sign in (-1.0, 1.0):
                aim = Direction.parameter(size, j, sign)
                guided += guided_attack(made, 4, aim).gain
                equal += random_attack(made, 4, aim).gain
                tenfold += random_attack(made, 4, aim, retrainings=80).gain
        assert equal < 0.5 * guided, (name, equal / guided)
        assert tenfold < 0.8 * guided, (name, tenfold / guided)


def test_a_box_that_lacks_the_replaced_records_is_a_violation(monkeypatch):
    """Aggregation without ``+- k clip``: what the replacing records add is forgotten (few steps, or slack hides it)."""
    radii = (1, 4)
    honest = ibp.totals

    def forgetful(window, sums, radius, size, filled, grid):
        lower, upper = honest(window, sums, radius, size, filled, grid)
        return lower + radius * grid.unit, upper - radius * grid.unit

    for name in ("linear", "logistic, shuffled", "network"):
        made = problem(**PROBLEMS[name] | {"steps": 4})
        attack_report(made, radii, envelope(made, radii), sample(made), retrainings=2)
        monkeypatch.setattr(ibp, "totals", forgetful)
        boxes = stepwise(made.window(0, made.steps, [made.start(radii)], radii))
        monkeypatch.setattr(ibp, "totals", honest)
        with pytest.raises(EnvelopeViolation, match="not sound"):
            attack_report(made, radii, boxes, sample(made), retrainings=2)


@pytest.mark.parametrize("name", ["linear", "logistic", "network"])
def test_a_box_of_one_radius_less_is_a_violation(name):
    """The box of radius 3 passed off as that of radius 4: a third more than it allows is what the attack must find."""
    made = problem(**PROBLEMS[name] | {"steps": 2})
    boxes = envelope(made, (3, 4))
    right, short = (Boxes(boxes.nominal, boxes.lower[[i]], boxes.upper[[i]]) for i in (1, 0))
    report = attack_report(made, (4,), right, sample(made), retrainings=4)
    assert report.ratio.max() > 0.8
    with pytest.raises(EnvelopeViolation, match="radius 4"):
        attack_report(made, (4,), short, sample(made), retrainings=4)


def test_a_violation_is_found_by_exact_comparison_and_names_the_parameter():
    made = problem((2, 1))
    boxes = envelope(made, (0, 1))
    found = guided_attack(made, 1, Direction.parameter(3, 2))
    exact = Boxes(boxes.nominal, boxes.lower, boxes.upper.copy())
    exact.upper[1, 2] = found.theta[2]
    attack_report(made, (0, 1), exact, [2])
    exact.upper[1, 2] = np.nextafter(found.theta[2], -np.inf)
    with pytest.raises(EnvelopeViolation, match=r"radius 1: .* b0\[0\]"):
        attack_report(made, (0, 1), exact, [2])
    exact.upper[1, 2] = np.nan
    with pytest.raises(EnvelopeViolation):
        attack_report(made, (0, 1), exact, [2])


def test_the_report_reads_an_envelope():
    made = problem((2, 1), ranges=False)
    x, y = made.records.features.T, made.records.targets.T
    found = run(made.graph, made.recipe, x, y, (0, 1, 2), F=made.steps)
    report = attack_report(made, (0, 1, 2), found, retrainings=3)
    boxes = envelope(made, (0, 1, 2))
    np.testing.assert_array_equal(report.lower, boxes.lower)
    np.testing.assert_array_equal(report.upper, boxes.upper)
    assert report.retrainings == 1 + 2 * 3 * 2 * 3


def test_attacks_on_a_prediction_stay_inside_its_bounds():
    made = problem((3, 4, 1), activation=Tanh, steps=8)
    radii, x = (1, 4), np.array([0.5, -0.25, 1.0])
    boxes = envelope(made, radii)
    low, high = output_bounds(made.graph, boxes.lower, boxes.upper, x[None], radii)
    for i, radius in enumerate(radii):
        for sign in (-1.0, 1.0):
            aim = Query(made.graph, x, 0, sign)
            found = guided_attack(made, radius, aim, retrainings=4)
            values = sign * np.array(found.history)
            assert (low[i, 0, 0] <= values).all() and (values <= high[i, 0, 0]).all()
            assert found.gain > random_attack(made, radius, aim, retrainings=4).gain > 0.0


def test_the_gradient_of_a_query_is_that_of_the_model():
    graph = mlp((3, 4, 2), Tanh)
    theta, x = graph.initial(), np.array([0.3, -1.0, 0.7])
    aim = Query(graph, x, 1, -1.0)
    steps = np.eye(len(theta)) * 1e-6
    slopes = [(aim.value(theta + h) - aim.value(theta - h)) / 2e-6 for h in steps]
    np.testing.assert_allclose(aim.gradient(theta), slopes, atol=1e-8)


@pytest.mark.parametrize("name", ["linear, minibatches", "logistic", "network"])
def test_the_adjoint_is_the_derivative_of_training(name, monkeypatch):
    """Against differences of the trained objective, for the parameters after the first steps; clipping included.

    With the six directions a step that the attack uses it is within a tenth, with all of them it is exact.
    """
    made = problem(**PROBLEMS[name] | ({"activation": Tanh} if "network" in name else {}))
    size = made.graph.initial().size
    aim = Direction(np.random.default_rng(1).normal(size=size))
    one = attack._Attack(made, 1, aim, 64, 0)
    rough = one.adjoints(one.path)
    monkeypatch.setattr(attack, "_RANK", 40)
    rows = one.adjoints(one.path)
    window, plan = made.window(0, 0, [made.start(())], ()), Plan(made.graph)

    def finish(theta, start):
        boxes = Boxes.point(theta, 0)
        for t in range(start, made.steps):
            boxes = step(window, plan, boxes, made.step(t), None, 1)
        return aim.value(boxes.nominal)

    for t in (0, made.steps // 2):
        slopes = [
            (finish(one.path[t + 1] + h, t + 1) - finish(one.path[t + 1] - h, t + 1)) / 2e-6
            for h in np.eye(size) * 1e-6
        ]
        np.testing.assert_allclose(rows[t], slopes, atol=1e-5 * np.abs(slopes).max())
        np.testing.assert_allclose(rough[t], slopes, atol=0.1 * np.abs(slopes).max())


def test_clipped_gradients_are_the_numbers_the_engine_sums():
    made = problem((3, 4, 1), steps=1)
    theta = made.graph.initial()
    g = attack.clipped_gradients(
        made, Plan(made.graph), theta, made.records.features, made.records.targets, made.schedule.slots
    )
    assert g.shape == (40, len(theta)) and np.abs(g).max() == pytest.approx(0.3, abs=1e-12)
    moved = theta - (0.3 / 40) * g.sum(axis=0)
    np.testing.assert_allclose(attack.trajectory(made)[-1], moved, rtol=0.0, atol=1e-15)
    absent = np.arange(40) % 2 == 0
    fewer = replace(made, records=replace(made.records, present=absent))
    np.testing.assert_allclose(
        attack.trajectory(fewer)[-1], theta - (0.3 / 40) * g[absent].sum(axis=0), rtol=0.0, atol=1e-15
    )
