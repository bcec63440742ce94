"""Findings of the audit that concern training: rules printed in the papers that are not sound, shown to fail.

Sources: [AGT-R/AGS] equations (2)-(3); audit A6 (which radius the gradient bounds are taken over) and A10 (adjacency).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from builders import final, mlp, window

from certify.attack import Direction, EnvelopeViolation, attack_report, guided_attack
from certify.driver import prepare
from certify.recipe import from_dict
from models.losses import Loss
from models.ops.base import Interval, rounded
from solvers.ibp import Plan, step
from solvers.window import Boxes

STEPS = 12


@dataclass(frozen=True)
class Expansive(Loss):
    """``z p - p^2``, gradient ``z - 2 p``: clipped training on it moves apart, so that bounds must move with it."""

    name = "expansive"

    def value(self, predictions, targets):
        return (targets * predictions - predictions**2).sum(axis=0)

    def gradient(self, predictions, targets):
        return targets - 2.0 * predictions

    def gradient_interval(self, predictions, targets, ladder):
        return rounded(targets - 2.0 * predictions.upper, targets - 2.0 * predictions.lower, ladder)


def expansive(targets, radii):
    """Four records, one parameter that matters (the bias: the feature is 0), rate 0.3, clip 1."""
    return window(
        mlp((1, 1)), np.zeros((4, 1)), np.reshape(targets, (4, 1)), [range(4)] * STEPS, radii, Expansive(), 0.3, 1.0,
        theta=[0.0, 0.0],
    )  # fmt: skip


def literal(made) -> Boxes:
    """Radius 1 by the rule as printed, "with respect to T_{k-1}" read as a radius: gradients bounded over T_0.

    The engine's own step is taken from the point box T_0 of the step, and its movement is added to the box of radius 1.
    """
    plan = Plan(made.graph)
    lower, upper = made.boxes.lower.copy(), made.boxes.upper.copy()
    nominal = made.boxes.nominal
    for one in made.steps:
        moved = step(made, plan, Boxes.point(nominal, 1), one, None, 1)
        lower, upper = lower + (moved.lower - nominal), upper + (moved.upper - nominal)
        nominal = moved.nominal
    return Boxes(nominal, lower, upper)


def test_the_printed_rule_with_bounds_over_the_box_of_one_radius_less_is_unsound():
    """A6: the literal box of radius 1 is [-0.9, 0.9]; one replaced record trains to 2.97."""
    neighbour = final(expansive([-3.0, 0.0, 0.0, 0.0], (0,))).nominal[1]
    assert neighbour == pytest.approx(2.97008, abs=1e-5)
    printed = literal(expansive(np.zeros(4), (1,)))
    np.testing.assert_allclose([printed.lower[0, 1], printed.upper[0, 1]], [-0.9, 0.9], rtol=0.0, atol=1e-12)
    assert neighbour > printed.upper[0, 1] + 2.0

    ours = final(expansive(np.zeros(4), (0, 1)))
    assert ours.lower[1, 1] <= neighbour <= ours.upper[1, 1]
    np.testing.assert_allclose([ours.lower[1, 1], ours.upper[1, 1]], [-2.97008, 2.97008], atol=1e-5)


def test_the_attack_finds_the_neighbour_by_itself():
    """The same two boxes given to the falsifier: it refutes the printed rule and reaches all of ours."""
    recipe = from_dict(
        {
            "training": {
                "loss": "squared", "clip": 1.0, "steps": STEPS,
                "learning_rate": {"schedule": "constant", "value": 0.3},
            },
            "target": {"lower": -3.0, "upper": 3.0},
        }
    )  # fmt: skip
    graph = mlp((1, 1)).with_trainable(["b0"])
    graph = replace(graph, parameters=tuple(replace(p, value=np.zeros_like(p.value)) for p in graph.parameters))
    made = replace(prepare(graph, recipe, np.zeros((4, 1)), np.zeros(4)), loss=Expansive())
    for sign in (-1.0, 1.0):
        assert guided_attack(made, 1, Direction(np.array([sign]))).gain == pytest.approx(2.97008, abs=1e-5)
    whole = made.window(0, STEPS, [made.start((1,))], (1,))
    with pytest.raises(EnvelopeViolation):
        attack_report(made, (1,), literal(whole))
    assert attack_report(made, (1,), final(whole)).ratio[0, 0] > 1.0 - 1e-9


def test_without_the_expansive_loss_the_printed_rule_can_look_right():
    """For a loss whose steps contract, the literal box holds the same neighbours: easy cases prove nothing."""
    graph, theta = mlp((1, 1)), [0.0, 0.0]
    targets = np.zeros((4, 1))
    make = lambda y: window(graph, np.zeros((4, 1)), y, [range(4)] * STEPS, (1,), None, 0.3, 1.0, theta=theta)  # noqa: E731
    printed = literal(make(targets))
    for value in np.linspace(-3.0, 3.0, 25):
        other = targets.copy()
        other[0] = value
        assert printed.lower[0, 1] <= final(make(other)).nominal[1] <= printed.upper[0, 1]


def bias_only(targets, batches, radii):
    records = len(targets)
    return final(
        window(
            mlp((1, 1)), np.zeros((records, 1)), targets[:, None], batches, radii, rate=0.05, clip=1.0,
            theta=[0.0, 0.0], normaliser=100,
        )
    )  # fmt: skip


def test_removal_that_cuts_the_batches_anew_is_not_covered():
    """A10: 400 records, batches of 100 from a seeded permutation of *the rows there are*; one row is deleted.

    The permutation of 399 shares nothing with that of 400, so the trained parameter leaves the box of radius 1 for
    about half of the seeds (measured 106 of 200).  Emptying the slot in place, with slots and batches public
    as certdp has them, stays inside for all of them.  Hence the documentation claims no such adjacency.
    """
    targets = np.r_[np.full(200, 3.0), np.full(200, -3.0)]
    np.random.RandomState(9).shuffle(targets)
    escaped = 0
    seeds = range(60)
    for seed in seeds:
        cut = lambda p: [p[i : i + 100] for i in range(0, 300, 100)]  # noqa: E731
        batches = cut(np.random.RandomState(seed).permutation(400))
        box = bias_only(targets, batches, (1,))
        again = bias_only(targets[1:], cut(np.random.RandomState(seed).permutation(399)), ()).nominal[1]
        escaped += not box.lower[0, 1] <= again <= box.upper[0, 1]
        present = np.arange(400) != 0
        emptied = window(
            mlp((1, 1)), np.zeros((400, 1)), targets[:, None], batches, (), rate=0.05, clip=1.0, theta=[0.0, 0.0],
            present=present,
        )  # fmt: skip
        assert box.lower[0, 1] <= final(emptied).nominal[1] <= box.upper[0, 1]
    assert escaped > len(seeds) // 4


def test_addition_to_a_full_batch_is_not_covered_but_filling_a_slot_is():
    """A10: with a fixed normaliser one more record of gradient -clip moves past the replace-one bound.

    Under certdp's adjacencies the number of slots is public: a record comes only into an empty slot.
    """
    targets = np.full(4, 9.0)  # every clipped gradient is -1
    graph, theta = mlp((1, 1)), [0.0, 0.0]

    def run_of(y, slots, batches, radii, adjacency="replace-one"):
        made = window(
            graph, np.zeros((len(y), 1)), y[:, None], batches, radii, rate=1.0, clip=1.0, theta=theta, normaliser=4,
            slots=slots, adjacency=adjacency,
        )  # fmt: skip
        return final(made)

    added = run_of(np.append(targets, 9.0), 5, [range(5)], ()).nominal[1]
    assert added == 1.25
    assert run_of(targets, 4, [range(4)], (1,)).upper[0, 1] < 1.25
    for adjacency in ("replace-one", "zero-out"):
        box = run_of(targets, 5, [range(5)], (1,), adjacency)
        assert box.lower[0, 1] <= added <= box.upper[0, 1]


def test_the_custom_loss_of_these_tests_has_a_sound_and_monotone_interval_rule():
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(1, 50))
    low = rng.normal(size=(1, 50))
    high = low + rng.random((1, 50))
    bounds = Expansive().gradient_interval(Interval(low, high), targets, 2.0)
    for share in np.linspace(0.0, 1.0, 9):
        g = Expansive().gradient(low + share * (high - low), targets)
        assert (bounds.lower <= g).all() and (g <= bounds.upper).all()
    point = Expansive().gradient_interval(Interval(low, low), targets, 0.0)
    np.testing.assert_array_equal(point.lower, Expansive().gradient(low, targets))
