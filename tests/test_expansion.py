"""Lengths of differences: the formula, the public bound, real steps, and records that are met once an epoch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from builders import mlp, window
from test_meanvalue import labels, ranged
from test_relational import retrained

from models.losses import Huber, Logistic, SmoothedHinge, Squared
from models.ops import Interval
from solvers.expansion import Expansion, _excess, lengthening
from solvers.ibp import step
from solvers.jacobian import Head
from solvers.relational import relational, schedule_classes
from solvers.window import Boxes

EVERY = [Squared(), Huber(0.5), Logistic(), SmoothedHinge(0.6)]


def test_lengthening_is_the_norm_of_a_step_of_one_record():
    rng = np.random.default_rng(0)
    for _ in range(300):
        a, kept, scale = rng.normal(size=6), rng.random(6) < rng.random(), 10.0 ** rng.uniform(-2, 1)
        norm = np.linalg.norm(np.eye(6) - scale * np.outer(kept * a, a), 2)
        x, y = scale * (a[kept] ** 2).sum(), scale * (a[~kept] ** 2).sum()
        np.testing.assert_allclose(1.0 + lengthening(x, y), norm, rtol=1e-12)


def random_step(seed, slots):
    """A step of a random head, and data sets: the window's own, and one with up to three other records."""
    rng = np.random.default_rng(seed)
    loss, k = EVERY[seed % 4], int(rng.integers(0, min(4, slots)))
    x, y = rng.uniform(-1, 1, (slots, 4)) * rng.choice([0.1, 1.0], (slots, 4)), rng.random((slots, 1))
    other_x, other_y = x.copy(), y.copy()
    other_x[:k], other_y[:k] = rng.choice([-1.0, -0.1, 0.1, 1.0], (k, 4)), rng.random((k, 1))
    options = {"loss": loss, "clip": float(rng.choice([0.05, 0.2, 9.0])), "rate": 0.8, "contraction": 0.9}
    pairs = (x, labels(loss, y)), (other_x, labels(loss, other_y))
    graph = mlp((4, 1), seed=seed)
    return rng, *(ranged(window(graph, *data, [range(slots)], (0,), **options), -1, 1) for data in pairs), k


def test_real_steps_lengthen_differences_by_no_more_than_the_factor():
    """For every data set within k and any two points of the ball in the box; and some come close."""
    closest, longest = 0.0, 0.0
    for seed in range(400):
        rng, made, other, k = random_step(seed, int(1 + 6 * (seed % 8 == 0)))
        head, one = Head.make(made), made.steps[0]
        half, length = float(rng.choice([0.003, 0.3, 3.0])), float(rng.choice([0.01, 0.2, 1.0]))
        centre = rng.normal(size=5) * 0.5
        box = Interval(centre - half, centre + half)
        growth = Expansion.make(made, head).growth(made, one, box, centre, length, max(k, 1))
        for _ in range(8):
            along = np.append(other.records.features[:, 0], 1.0)
            out, aside = rng.choice([-1.0, 1.0]) * along, rng.normal(size=5)
            out, aside = length * out / np.linalg.norm(out), length * aside / np.linalg.norm(aside)
            u, v = (centre + np.clip(end, -half, half) for end in (out, 0.9 * out + 0.1 * aside))
            after = [step(other, head.plan, Boxes.point(t, 1), one, None, 1).nominal for t in (u, v)]
            ratio = np.linalg.norm(after[0] - after[1]) / max(np.linalg.norm(u - v), 1e-6)
            assert ratio <= growth.factor(k) + 1e-9
            closest, longest = max(closest, ratio / growth.factor(k)), max(longest, ratio / made.contraction)
    assert closest > 0.99 and longest > 1.02


def test_the_public_excess_bounds_every_record_and_is_nearly_reached():
    rng = np.random.default_rng(1)
    for loss in EVERY:
        for clip in (0.05, 0.3):
            options = {"loss": loss, "clip": clip, "rate": 0.5}
            target = labels(loss, np.ones((1, 1)))
            made = ranged(window(mlp((5, 1)), np.zeros((1, 5)), target, [[0]], (1,), **options), -1, 1)
            found = Expansion.make(made, Head.make(made))
            a = rng.choice([1.0, 1.0, clip, 0.5, 0.1], (5, 20_000)) * rng.uniform(0.9, 1.0, (5, 20_000))
            a = np.concatenate([a, np.ones((1, 20_000))])
            y = labels(loss, rng.random(20_000))
            z = np.where(rng.random(20_000) < 0.5, 0.0, 3.0 * rng.normal(size=20_000))
            if not isinstance(loss, SmoothedHinge):
                z, y = (z, y) if isinstance(loss, Logistic) else (z, z - rng.uniform(0, 1, 20_000))
            else:
                z = y * (1.0 - loss.width * rng.random(20_000))
            excess = _excess(made, Interval(z, z), y, a, found.beta, 0.0)
            assert excess.max() <= found.public
            assert excess.max() > 0.6 * found.public


def minibatches(radii=(0, 1, 2, 3), epochs=3, slots=24, width=2, clip=0.3, rate=1.0):
    """Four disjoint batches an epoch, another order in every epoch, so that every slot has a class of its own."""
    rng = np.random.default_rng(0)
    sides = rng.choice([-1.0, 1.0], (slots, 1))
    x = np.clip(0.4 * sides + 0.2 * rng.normal(size=(slots, width)), -1, 1)
    batches = [b for _ in range(epochs) for b in rng.permutation(slots).reshape(4, slots // 4)]
    options = {"loss": Logistic(), "clip": clip, "rate": rate}
    made = window(mlp((width, 1), scale=0.1), x, 0.5 + 0.5 * sides, batches, radii, **options)
    return ranged(replace(made, classes=schedule_classes(batches, slots)), -1, 1)


def test_differing_records_are_met_once_while_batches_are_disjoint(monkeypatch):
    """Tighter than charging all of them to every step, and real neighbours stay within the bounds."""
    made = minibatches(clip=0.1, rate=0.5)
    found = relational(made)[-1]
    monkeypatch.setattr("solvers.relational._MOST_SHARES", 0)
    every = relational(made)[-1]
    np.testing.assert_array_equal(found.difference[1], every.difference[1])
    assert (found.difference[3] <= every.difference[3]).all()
    assert found.difference[3].sum() < 0.8 * every.difference[3].sum()
    rng = np.random.default_rng(2)
    for _ in range(20):
        slots, x = rng.permutation(24)[:3], np.sign(rng.normal(size=(4, 2)))
        y = rng.integers(2, size=4).astype(float)
        one, two = (retrained(made, slots, x[[0, 1, last]], y[[0, 1, last]]) for last in (2, 3))
        apart = np.abs(one - two)
        assert (apart <= found.difference[3, made.classes[slots[2]]]).all()
        assert np.linalg.norm(apart) <= found.length[3, made.classes[slots[2]]]


def test_lengths_stay_small_where_elementwise_bounds_grow(monkeypatch):
    made = minibatches((0, 1), 25, 80, 8, 0.1, 1.0)
    found = relational(made)[-1]
    monkeypatch.setattr(Expansion, "growth", lambda *_: None)
    without = relational(made)[-1]
    assert found.difference[1].max() < 0.2 * without.difference[1].max()
