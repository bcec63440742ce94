"""Windows of linear models as programs: the steps, the attack, and every record's clipped gradient.

Columns, for one radius ``k``: the parameters before and after every step, within their boxes; ``a_i`` in [0, 1] of each
slot (1: its record is another one), the same in all steps in which the slot occurs, with ``sum a <= k``; per step the
number ``A`` of replaced records in the batch and the sum of their gradients ``clip (q_j - A)``, ``0 <= q_j <= 2 A``
(one vector for all of them: each contributes anything within the clip); and per record whose clipped gradient is not
constant over the box weights ``mu`` of its vertices (`solvers.programs.pieces`).  Rows:

    sum mu = 1 - a,      -e + v_l a <= argument(theta) - sum v mu <= e + v_u a
    theta' = c theta - h (sum mu values + sum over constant records (1 - a) values + clip (q - A))      up to a band

The argument rows say that the weighted vertices lie at the argument where the record is not replaced, and anywhere in
its interval where it is.  ``e`` and the band cover what the trainer's arithmetic does to the real numbers above, and
the program's own coefficients; both are ``2k`` times a bound of the error that grows with the boxes.

Property (M): let a point of this program be given, and a neighbour that differs in slot ``j``.  The same parameters and
weights with ``a_j = 1`` and slot ``j``'s contribution moved into ``q`` are a point of the neighbour's program of radius
``k + 1``: whatever ``a_j`` was, the contribution is at most ``clip (1 - a_j)``, hulls and intervals nest, and
constant contributions satisfy the argument rows anyway.  With binaries the same holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from models.losses import Absolute, Hinge, Huber, Logistic, Squared
from models.ops import Affine, Parameter
from models.ops.base import ABSOLUTE, RELATIVE, Interval
from solvers.errors import UnsupportedWindowError
from solvers.gradients import FixedPoint
from solvers.ibp import Plan
from solvers.programs import pieces
from solvers.programs.program import Assembly, Program
from solvers.window import Window

_LOSSES = (Squared, Huber, Absolute, Hinge, Logistic)


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
        if not (linear and plain and type(loss) in _LOSSES) or plan.active[node.inputs[0]]:
            raise UnsupportedWindowError(
                "backend: programs take one affine layer with one output on the input and one of the losses "
                f"{', '.join(known.name for known in _LOSSES)}; this model ends in {node.op.title}, with the "
                f"{loss.name} loss; use the backend ibp"
            )
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
                raise UnsupportedWindowError("backend: programs need the affine layer's weight to be trainable")
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
    found = found._replace(values=np.rint(found.values * grid.scale))
    if not len(slots):
        return found, np.zeros(0, bool)
    start = np.flatnonzero(np.diff(found.record, prepend=-1))
    same = (found.values == found.values[:, start][:, found.record]).all(axis=0)
    return found, np.logical_and.reduceat(same, start)


@dataclass(frozen=True, eq=False)
class WindowProgram:
    """A program with its columns: ``theta`` ``(F + 1, P)`` indices, in units of ``unit`` (a power of two)."""

    program: Program
    theta: np.ndarray
    unit: float


def unit_of(window: Window) -> float:
    """The program's unit of length, public: a power of two near what one record can do in one step."""
    rate = max(step.learning_rate for step in window.steps) or 1.0
    return 2.0 ** math.floor(math.log2(rate / window.normaliser * window.clip))


def formulate(
    window: Window, head: Head, radius: int, boxes: list[Interval], batches: list[Blocks], integer: bool
) -> WindowProgram:
    """The program of the steps of ``window`` for one radius.

    ``boxes``: of the parameters before each step and after the last.  ``batches``: each step's records over its box.
    """
    unit, size, ladder = unit_of(window), head.plan.size, 2.0 * radius
    out = Assembly()
    lower, upper = (np.stack([box[end] for box in boxes]) / unit for end in (0, 1))
    theta = out.columns("theta", lower, upper)
    slots = np.unique(np.concatenate([s.batch for s in window.steps]))
    replaced = out.columns("replaced", np.zeros(len(slots)), np.ones(len(slots)), integer)
    out.entries(out.rows([-np.inf], [float(radius)]), replaced, 1.0)

    for t, (step, records) in enumerate(zip(window.steps, batches, strict=True)):
        batch = replaced[np.searchsorted(slots, step.batch)]
        grid = FixedPoint.make(window.clip, max(1, len(batch)))
        most = float(min(radius, len(batch)))
        wild = int(records.wild.sum())
        count = out.columns(f"count {t}", np.zeros(1), np.full(1, most))
        attack = out.columns(f"attack {t}", np.zeros(size), np.full(size, 2.0 * (most + wild)))
        row = out.rows([0.0], [0.0])
        out.entries(row, count, 1.0)
        out.entries(row, batch, -1.0)
        row = out.rows(np.full(size, -np.inf), np.full(size, 2.0 * wild))
        out.entries(row, attack, 1.0)
        out.entries(row, count, -2.0)

        # theta' - c theta + h (gradients) = 0, gradients in clips and theta in units.
        rate = step.learning_rate / window.normaliser
        step_size = rate / unit * window.clip
        magnitude = np.maximum(boxes[t].magnitude, boxes[t + 1].magnitude)
        band = len(batch) * (pieces.error(window.loss, grid) + 8.0 * RELATIVE) * step_size
        band = ladder * (band + (8.0 * RELATIVE * magnitude + ABSOLUTE) / unit)

        found, constant = corners(window, head, records, grid)
        tame = ~records.wild
        own = batch[np.flatnonzero(np.isin(step.batch, records.slots))][tame]
        inputs = head.inputs[:, records.slots[tame]]
        to_clips = 1.0 / (grid.scale * window.clip)
        first = found.values[:, np.flatnonzero(np.diff(found.record, prepend=-1))][:, constant]
        total = first.astype(np.int64).sum(axis=1).astype(float) * to_clips

        fixed = step_size * (wild - total)
        dynamics = out.rows(fixed - band, fixed + band)
        out.entries(dynamics, theta[t + 1], 1.0)
        out.entries(dynamics, theta[t], -window.contraction)
        out.entries(dynamics, attack, step_size)
        out.entries(dynamics, count, -step_size)
        out.entries(dynamics[:, None], own[constant], -step_size * to_clips * first)

        if constant.all():
            continue
        kept, number = ~constant[found.record], np.cumsum(~constant) - 1
        record, piece = number[found.record[kept]], np.unique(found.piece[kept], return_inverse=True)[1]
        argument, values = found.argument[kept], to_clips * found.values[:, kept]
        own, inputs = own[~constant], inputs[:, ~constant]
        varying = [part[tame][~constant] for part in (*records.box, records.sign, records.shift, records.error)]
        low, high, sign, shift, error = varying
        if not integer:  # neighbouring pieces share vertices
            columns = np.vstack([record, argument, values])
            same = np.append(False, (columns[:, 1:] == columns[:, :-1]).all(axis=0))
            record, argument, values = record[~same], argument[~same], values[:, ~same]
        weights = out.columns(f"weights {t}", np.zeros(len(record)), np.ones(len(record)))
        out.entries(dynamics[:, None], weights, step_size * values)
        if integer:
            chosen = out.columns(f"pieces {t}", np.zeros(piece[-1] + 1), np.ones(piece[-1] + 1), True)
            row = out.rows(np.zeros(len(chosen)), np.zeros(len(chosen)))
            out.entries(row[piece], weights, 1.0)
            out.entries(row, chosen, -1.0)
            owner = record[np.flatnonzero(np.diff(piece, prepend=-1))]
            row = out.rows(np.ones(len(own)), np.ones(len(own)))
            out.entries(row[owner], chosen, 1.0)
        else:
            row = out.rows(np.ones(len(own)), np.ones(len(own)))
            out.entries(row[record], weights, 1.0)
        out.entries(row, own, 1.0)
        # argument = sign (inputs' theta + offset) - shift
        constants = sign * head.offset - shift
        for end, ends in ((low, (np.full(len(own), -np.inf), (constants + error) / unit)),
                          (high, ((constants - error) / unit, np.full(len(own), np.inf)))):
            row = out.rows(*ends)
            out.entries(row[record], weights, argument / unit)
            out.entries(row[:, None], theta[t], -(sign * inputs).T)
            out.entries(row, own, end / unit)
    return WindowProgram(out.program(), theta, unit)
