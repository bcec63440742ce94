"""Windows of several steps: one pass over the records for all radii, against a second, plain implementation."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from builders import final, mlp, random_graph, sliding, stepwise, window

from models.ir import ParameterInfo
from models.ops import Interval, Tanh
from models.ops.base import ABSOLUTE, RELATIVE
from solvers.gradients import FixedPoint
from solvers.ibp import Plan, gradient_ends
from solvers.update import update_interval
from solvers.window import Boxes, Records

BATCHES = {
    "disjoint": [[0, 4, 7], [1, 2, 9], [3, 5, 6, 8]],
    "full": [range(10)] * 3,
    "some shared": [[0, 4, 7], [7, 8], [1, 2], [2, 9, 3], [5]],
    "single slots": [[3], [1], [4]],
    "slots never filled": [[0, 10, 11], [1, 2], [11, 3, 10]],
}


def plain(made):
    """The boxes of the module's formula, one radius at a time, from whole matrices and sorted Python integers."""
    steps, plan = made.steps, Plan(made.graph)
    grids = [FixedPoint.make(made.clip, len(s.batch)) for s in steps]
    weights = [
        s.learning_rate / made.normaliser / made.contraction ** (t + 1) / g.scale
        for t, (s, g) in enumerate(zip(steps, grids, strict=True))
    ]
    most = sum(w * len(s.batch) * g.unit for w, s, g in zip(weights, steps, grids, strict=True))
    quantum = 2.0 ** (math.ceil(math.log2(most)) - 60)
    slots = sorted({int(i) for s in steps for i in s.batch})
    rows = []
    for radius in made.radii:
        box = start = Interval(made.boxes.lower[0], made.boxes.upper[0])
        gains = {side: [dict.fromkeys(slots, 0) for _ in range(plan.size)] for side in "ul"}
        sums, reach, slack, power = {"u": [0] * plan.size, "l": [0] * plan.size}, 0, 1024, 1.0
        for t, one in enumerate(steps):
            factor, size, spent = weights[t] / quantum, len(one.batch), min(radius, len(one.batch))
            ends = gradient_ends(made, plan, one, box, 2.0 * radius, grids[t])
            clip, total = round(factor * grids[t].unit), []
            for side, sign, end in (("u", 1, ends[0]), ("l", -1, ends[1])):
                for p in range(plan.size):
                    for slot, value in zip(one.batch, end[p], strict=True):
                        term = sign * round(factor * float(value))
                        gains[side][p][int(slot)] += clip + term
                        sums[side][p] += term
                given = [sum(sorted(sign * int(v) for v in end[p])[size - spent :]) for p in range(plan.size)]
                kept = [sign * int(end[p].sum()) - given[p] for p in range(plan.size)]
                total.append([sign * float(s - spent * grids[t].unit - size) for s in kept])
            reach, slack, power = reach + size * clip, slack + size * (1 + math.ceil(factor)), power * made.contraction
            once = update_interval(
                made, box, Interval(*map(np.array, total)), one.learning_rate / made.normaliser / grids[t].scale
            )
            error = (8 * t + 24) * RELATIVE * (start.magnitude + quantum * (2.0 * reach + slack)) + ABSOLUTE
            out = [
                np.array([
                    float(slack + sum(sorted(gains[side][p].values())[len(slots) - min(radius, len(slots)) :])
                          - sums[side][p])
                    for p in range(plan.size)
                ])
                for side in "ul"
            ]  # fmt: skip
            box = Interval(
                np.maximum(once.lower, power * (start.lower - quantum * out[1]) - error),
                np.minimum(once.upper, power * (start.upper + quantum * out[0]) + error),
            )
        rows.append(box)
    return Interval(np.array([r.lower for r in rows]), np.array([r.upper for r in rows]))


def made(batches, radii=(1, 2, 5, 12), graph=None, seed=0, **options):
    rng = np.random.default_rng(seed)
    graph = graph or mlp((2, 3, 1), Tanh, seed)
    features, targets = rng.normal(size=(10, graph.input_features)), rng.normal(size=(10, graph.outputs))
    settings = {"rate": [0.3, 0.1, 0.7, 0.2, 0.4][: len(batches)], "clip": 0.4, "contraction": 0.95, "slots": 12}
    present = np.arange(10) != 2
    return window(graph, features, targets, batches, radii, present=present, **settings | options)


@pytest.mark.parametrize("products", ["natural", "midpoint-radius"])
@pytest.mark.parametrize("name", BATCHES)
def test_windows_equal_a_plain_implementation_bit_for_bit(name, products):
    """Slots that occur once or several times, empty ones, radii below and above the slots of the window."""
    for graph in (mlp((2, 3, 1), Tanh, products=products), random_graph(np.random.default_rng(7), 2, products)):
        one = made(BATCHES[name], graph=graph)
        boxes, expected = final(one), plain(one)
        np.testing.assert_array_equal(boxes.lower, expected.lower)
        np.testing.assert_array_equal(boxes.upper, expected.upper)
        assert (boxes.lower < boxes.upper).all()


@pytest.mark.parametrize("name", ["disjoint", "full", "some shared"])
@pytest.mark.parametrize("bound", [final, sliding(3, 1)], ids=["window", "overlapping"])
def test_radii_do_not_depend_on_each_other_on_threads_or_on_memory(name, bound, monkeypatch):
    together = bound(made(BATCHES[name]))
    monkeypatch.setattr("solvers.coupled._TOGETHER_BYTES", 1)
    apart = bound(made(BATCHES[name]), 3)
    for boxes in (together, apart):
        for j, radius in enumerate((1, 2, 5, 12)):
            alone = bound(made(BATCHES[name], (radius,)))
            np.testing.assert_array_equal(boxes.lower[j], alone.lower[0])
            np.testing.assert_array_equal(boxes.upper[j], alone.upper[0])


def test_all_radii_read_the_records_once(monkeypatch):
    """As many tiles are read for twelve radii as for one."""
    read, tile = [], Records.tile
    monkeypatch.setattr(Records, "tile", lambda self, slots: read.append(len(slots)) or tile(self, slots))
    counts = {}
    for name in ("disjoint", "full", "some shared"):
        for radii in ((1,), tuple(range(1, 13))):
            read.clear()
            final(made(BATCHES[name], radii))
            counts.setdefault(name, []).append(sum(read))
    assert all(one == twelve > 0 for one, twelve in counts.values())
    read.clear()
    monkeypatch.setattr("solvers.coupled._TOGETHER_BYTES", 1)  # no memory: a pass for each radius
    final(made(BATCHES["full"], tuple(range(1, 13))))
    assert sum(read) > 5 * counts["full"][0]


@pytest.mark.parametrize("bound", [stepwise, final, sliding(3, 1)], ids=["stepwise", "window", "overlapping"])
def test_a_parameter_that_the_output_does_not_depend_on_only_pays_for_replaced_records(bound):
    """Its gradient is zero, but a bound of the sum with k records replaced does not know that."""
    graph = mlp((2, 1))
    graph = replace(graph, parameters=(*graph.parameters, ParameterInfo("unused", np.ones(2), True)))
    one = made([[0, 4, 7], [1, 3, 9]], (0, 1), graph, contraction=1.0, rate=0.3)
    boxes: Boxes = bound(one)
    most = 0.3 * 0.4 / 3 * 2
    assert (boxes.nominal[-2:] == 1.0).all()
    assert (boxes.lower[1, -2:] >= 1.0 - 1.001 * most).all() and (boxes.lower[1, -2:] < 1.0).all()
    assert (boxes.upper[1, -2:] <= 1.0 + 1.001 * most).all() and (boxes.upper[1, -2:] > 1.0).all()


def test_sums_of_the_largest_terms_are_exact_beyond_double_precision():
    """Windows of single records have terms near 2^59 quanta, where float64 has gaps of 128."""
    from solvers.coupled import _merged
    from solvers.gradients import largest_sums

    rng = np.random.default_rng(3)
    values = rng.integers(2**58, 2**59, size=(4, 9))
    kept = np.sort(rng.integers(2**58, 2**59, size=(4, 3)), axis=1)
    for p, row in enumerate(largest_sums(kept, values)):
        assert Fraction(int(row)) == sum(sorted(map(int, [*kept[p], *values[p]]))[-3:])
    merged = _merged(kept, values[:, :2])
    for p in range(4):
        assert merged[p].tolist() == sorted(map(int, [*kept[p], *values[p, :2]]))[-3:]
