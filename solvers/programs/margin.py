"""Windows of linear models as programs: the steps, the attack, and every record's clipped gradient.

Beside the columns of `solvers.programs.steps`: per record whose clipped gradient is not constant over the box weights
``mu`` of its vertices (`solvers.programs.pieces`).  Rows:

    sum mu = 1 - a,      -e + v_l a <= argument(theta) - sum v mu <= e + v_u a

and the record contributes ``sum mu values`` to the rows of the step.  The argument rows say that the weighted vertices
lie at the argument where the record is not replaced, and anywhere in its interval where it is.  ``e`` and the band of
the step cover what the trainer's arithmetic does to the real numbers above, and the program's own coefficients; both
are ``2k`` times a bound of the error that grows with the boxes.

A gradient that is one constant below a kink and another above it (hinge, absolute) has four vertices and two values.
Projected to the weight ``z`` of the value below, the same rows of a linear program are

    z + a <= 1,      argument + (v_u - kink) z <= v_u + e,      argument + (kink - v_l) (z + a) >= kink - e

and the record contributes ``(1 - a) above + z (below - above)``: a quarter of the columns.

Property (M): let a point of this program be given, and a neighbour that differs in slot ``j``.  The same parameters and
weights with ``a_j = 1`` and slot ``j``'s contribution moved into ``q`` are a point of the neighbour's program of radius
``k + 1``: whatever ``a_j`` was, the contribution is at most ``clip (1 - a_j)``, hulls and intervals nest, and
constant contributions satisfy the argument rows anyway.  With binaries the same holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from models.ops import Affine, Parameter
from models.ops.base import ABSOLUTE, RELATIVE, Interval
from solvers.gradients import FixedPoint
from solvers.ibp import Plan
from solvers.programs import pieces
from solvers.programs.jumps import jumps
from solvers.programs.steps import (
    LOSSES,
    Mixture,
    Steps,
    WindowProgram,
    firsts,
    snapped,
    unsupported,
    without,
)
from solvers.window import Window


@dataclass(frozen=True, eq=False)
class Head:
    """A linear model of the window's records: ``prediction = inputs' theta + offset``; ``inputs`` ``(P, R)``."""

    plan: Plan
    inputs: np.ndarray
    offset: float

    @classmethod
    def of(cls, window: Window) -> Head:
        """Raises UnsupportedWindowError for another model or loss."""
        graph, loss, plan = window.graph, window.loss, Plan(window.graph)
        node = graph.nodes[graph.output]
        leaves = [graph.nodes[i].op for i in node.inputs[1:]]
        plain = all(isinstance(op, Parameter) for op in leaves) and len({op.name for op in leaves}) == len(leaves)
        linear = isinstance(node.op, Affine) and node.op.rows == node.op.positions == 1
        if not (linear and plain and type(loss) in LOSSES) or plan.active[node.inputs[0]]:
            raise unsupported(window, f"this model ends in {node.op.title}, with the {loss.name} loss")
        start = graph.initial()
        with np.errstate(all="ignore"):
            features = plan.forward(window.records.features, plan.shared(start))[node.inputs[0]]
        features = np.broadcast_to(features, (node.op.cols, window.records.features.shape[1]))
        inputs, offset = np.zeros((plan.size, features.shape[1])), 0.0
        frozen = graph.values(start)
        for leaf, rows in zip(leaves, (features, np.ones((1, features.shape[1]))), strict=False):
            if leaf.name in plan.offsets:
                at = plan.offsets[leaf.name]
                inputs[at : at + len(rows)] = rows
            elif len(rows) == 1:
                offset = float(frozen[leaf.name][0, 0])
            else:
                raise unsupported(window, "the weight of this one is frozen")
        return cls(plan, inputs, offset)

    def predictions(self, window: Window, slots: np.ndarray, box: Interval, ladder: float) -> Interval:
        """Ends ``(n,)`` of the trainer's predictions over a box of parameters."""
        shared = self.plan.shared_interval(box.lower, box.upper, ladder)
        found = [
            self.plan.forward_interval(window.records.tile(part)[0], shared, ladder)[window.graph.output]
            for part in np.array_split(slots, max(1, math.ceil(len(slots) / self.plan.tile)))
        ]
        return Interval(*(np.concatenate([f[end][0] for f in found]) for end in (0, 1)))


@dataclass(frozen=True, eq=False)
class Blocks:
    """The filled slots ``(n,)`` of a batch over a box: ends, sign and shift of their arguments, and rounding ``error``.

    ``size``: of the batch, empty slots included.  ``wild`` marks records that the trainer might give up on: they
    contribute anything within the clip.
    """

    slots: np.ndarray
    size: int
    box: Interval
    sign: np.ndarray
    shift: np.ndarray
    error: np.ndarray
    wild: np.ndarray


def blocks(window: Window, head: Head, batch: np.ndarray, box: Interval, ladder: float) -> Blocks:
    """What a step's records can do over a box of the parameters before it."""
    slots = window.records.filled(batch)
    targets = window.records.targets[0, slots]
    inputs = np.abs(head.inputs[:, slots])
    with np.errstate(all="ignore"):
        prediction = head.predictions(window, slots, box, ladder)
        found = pieces.arguments(window.loss, prediction, targets, ladder)
        size = inputs.T @ box.magnitude + abs(head.offset) + np.abs(found.shift) + found.box.magnitude
        error = ladder * 2.0 * (head.plan.size + 8) * (RELATIVE * size + ABSOLUTE)
        # The trainer gives a record up when its loss gradient, on the grid's scale, is not finite.
        scale = FixedPoint.make(window.clip, len(batch)).scale
        wild = ~np.isfinite(16.0 * scale * (found.box.magnitude + size))
    wild |= ~pieces.describable(window.loss, inputs, window.clip)
    return Blocks(slots, len(batch), found.box, found.sign, found.shift, error, wild)


def corners(window: Window, head: Head, records: Blocks, grid: FixedPoint) -> tuple[pieces.Vertices, np.ndarray]:
    """Vertices of the records that are not wild, with values on the gradient grid, and which of those are constant.

    Records of the vertices are positions among those that are not wild.
    """
    tame = ~records.wild
    slots, box = records.slots[tame], Interval(records.box.lower[tame], records.box.upper[tame])
    found = pieces.vertices(window.loss, box, window.records.targets[0, slots], head.inputs[:, slots], window.clip)
    return snapped(found, grid, len(slots))


def formulate(
    window: Window, head: Head, radius: int, boxes: list[Interval], batches: list[Blocks], integer: bool
) -> WindowProgram:
    """The program of the steps of ``window`` for one radius.

    ``boxes``: of the parameters before each step and after the last.  ``batches``: each step's records over its box.
    """
    steps = Steps(window, radius, boxes, integer)
    for t, (step, records) in enumerate(zip(window.steps, batches, strict=True)):
        grid = FixedPoint.make(window.clip, max(1, len(step.batch)))
        found, constant = corners(window, head, records, grid)
        tame = ~records.wild
        slots = records.slots[tame]
        same = np.where(constant, found.values[:, firsts(found)], 0.0)
        targets, inputs = window.records.targets[0, slots], head.inputs[:, slots]
        jump = None if integer else jumps(window.loss, targets, inputs, window.clip)
        if jump is not None:
            jump = jump._replace(below=np.rint(jump.below * grid.scale), above=np.rint(jump.above * grid.scale))
            same = np.where(constant, same, jump.above)
        advance = steps.advance(t, grid, slots, same, int(records.wild.sum()))
        if constant.all():
            continue
        vary = Uncertain.of(steps, head, t, records, np.flatnonzero(tame)[~constant])
        size = advance.size / (grid.scale * window.clip)
        if jump is None:
            mix = steps.mixture(f"weights {t}", without(found, constant), vary.replaced)
            steps.out.entries(advance.rows[:, None], mix.weights, size * mix.values)
            vary.meet(mix)
        else:
            columns = vary.switch(jump.kink)
            steps.out.entries(advance.rows[:, None], columns, size * (jump.below - jump.above)[:, ~constant])
    return steps.program()


@dataclass(frozen=True, eq=False)
class Uncertain:
    """Records of step ``t`` whose gradient depends on their argument, which lies in ``box``; ``(n,)`` each.

    ``argument = slope' theta + offset`` up to ``error``, slope ``(P, n)``; ``replaced``: their columns ``a``.
    """

    steps: Steps
    t: int
    box: Interval
    slope: np.ndarray
    offset: np.ndarray
    error: np.ndarray
    replaced: np.ndarray

    @classmethod
    def of(cls, steps: Steps, head: Head, t: int, records: Blocks, which: np.ndarray) -> Uncertain:
        slots, sign = records.slots[which], records.sign[which]
        return cls(
            steps, t, Interval(records.box.lower[which], records.box.upper[which]), sign * head.inputs[:, slots],
            sign * head.offset - records.shift[which], records.error[which], steps.replaced(slots),
        )  # fmt: skip

    def _rows(self, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
        """Rows of the arguments, offset and rounding apart."""
        unit, ends = self.steps.unit, (lower - self.offset - self.error, upper - self.offset + self.error)
        row = self.steps.out.rows(*(end / unit for end in ends))
        self.steps.out.entries(row[:, None], self.steps.theta[self.t], self.slope.T)
        return row

    def meet(self, mix: Mixture) -> None:
        """The mean of a record's vertices lies at its argument, wherever that is where the record is replaced."""
        out, unit, zero, infinite = self.steps.out, self.steps.unit, 0.0 * self.error, np.full_like(self.error, np.inf)
        for end, ends in ((self.box.lower, (zero, infinite)), (self.box.upper, (-infinite, zero))):
            row = self._rows(*ends)
            out.entries(row[mix.record], mix.weights, -mix.argument / unit)
            out.entries(row, self.replaced, -end / unit)

    def switch(self, kink: float) -> np.ndarray:
        """Columns: the weight of the gradient below the kink."""
        out, unit, (low, high) = self.steps.out, self.steps.unit, self.box
        rounding = self.steps.ladder * 4.0 * RELATIVE * (abs(kink) + np.maximum(np.abs(low), np.abs(high)))
        wider = replace(self, error=self.error + rounding)  # differences of ends are coefficients here
        zero, one = np.zeros_like(low), np.ones_like(low)
        below = out.columns(f"below the kink {self.t}", zero, one)
        row = out.rows(zero, one)
        out.entries(row, below, 1.0)
        out.entries(row, self.replaced, 1.0)
        row = wider._rows(-np.inf * one, high)
        out.entries(row, below, (high - kink) / unit)
        row = wider._rows(kink * one, np.inf * one)
        out.entries(row, below, (kink - low) / unit)
        out.entries(row, self.replaced, (kink - low) / unit)
        return below
