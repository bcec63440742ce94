"""Windows of linear models as programs: the steps, the attack, and every record's clipped gradient.

Beside the columns of `solvers.programs.steps`: per record whose clipped gradient is not constant over the box weights
``mu`` of its vertices (`solvers.programs.pieces`).  Rows:

    sum mu = 1 - a,      -e + v_l a <= argument(theta) - sum v mu <= e + v_u a

and the record contributes ``sum mu values`` to the rows of the step.  The argument rows say that the weighted vertices
lie at the argument where the record is not replaced, and anywhere in its interval where it is.  ``e`` and the band of
the step cover what the trainer's arithmetic does to the real numbers above, and the program's own coefficients; both
are ``2k`` times a bound of the error that grows with the boxes.

Property (M): let a point of this program be given, and a neighbour that differs in slot ``j``.  The same parameters and
weights with ``a_j = 1`` and slot ``j``'s contribution moved into ``q`` are a point of the neighbour's program of radius
``k + 1``: whatever ``a_j`` was, the contribution is at most ``clip (1 - a_j)``, hulls and intervals nest, and
constant contributions satisfy the argument rows anyway.  With binaries the same holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from models.ops import Affine, Parameter
from models.ops.base import ABSOLUTE, RELATIVE, Interval
from solvers.gradients import FixedPoint
from solvers.ibp import Plan
from solvers.programs import pieces
from solvers.programs.steps import LOSSES, Steps, WindowProgram, firsts, snapped, unsupported, without
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

    ``wild`` marks records that the trainer might give up on: they contribute anything within the clip.
    """

    slots: np.ndarray
    box: Interval
    sign: np.ndarray
    shift: np.ndarray
    error: np.ndarray
    wild: np.ndarray


def blocks(
    window: Window, head: Head, batch: np.ndarray, box: Interval, ladder: float, margins: np.ndarray | None
) -> Blocks:
    """What a step's records can do over a box of the parameters before it; ``margins`` ``(2, slots)``: see `Boxes`."""
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
    ends = found.box
    if margins is not None:
        ends = Interval(np.fmax(ends.lower, margins[0, slots]), np.fmin(ends.upper, margins[1, slots]))
    return Blocks(slots, ends, found.sign, found.shift, error, wild)


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
        advance = steps.advance(t, grid, slots, same, int(records.wild.sum()))
        if constant.all():
            continue
        slots, own = slots[~constant], steps.replaced(slots[~constant])
        varying = [part[tame][~constant] for part in (*records.box, records.sign, records.shift, records.error)]
        low, high, sign, shift, error = varying
        mix = steps.mixture(f"weights {t}", without(found, constant), own)
        out = steps.out
        out.entries(advance.rows[:, None], mix.weights, advance.size / (grid.scale * window.clip) * mix.values)
        # argument = sign (inputs' theta + offset) - shift
        constants = sign * head.offset - shift
        for end, ends in ((low, (-np.inf, (constants + error) / steps.unit)),
                          (high, ((constants - error) / steps.unit, np.inf))):
            row = out.rows(*ends)
            out.entries(row[mix.record], mix.weights, mix.argument / steps.unit)
            out.entries(row[:, None], steps.theta[t], -(sign * head.inputs[:, slots]).T)
            out.entries(row, own, end / steps.unit)
    return steps.program()
