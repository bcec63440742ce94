"""What the programs of all models have in common: the parameters, the records that differ, and the steps.

Columns, for one radius ``k``: the parameters before and after every step, within their boxes; ``a_i`` in [0, 1] of each
slot (1: its record is another one), the same in all steps in which the slot occurs, with ``sum a <= k``; per step the
number ``A`` of replaced records in the batch and the sum of their gradients ``clip (q_j - A)``, ``0 <= q_j <= 2 A``
(one vector for all of them: each contributes anything within the clip).  Rows of a step:

    theta' = c theta - h (sum over records of what they contribute + clip (q - A))      up to a band

A record contributes the same everywhere, ``(1 - a_i) values``, or what its model adds to the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from models.ops.base import ABSOLUTE, RELATIVE, Interval
from solvers.errors import UnsupportedWindowError
from solvers.gradients import FixedPoint
from solvers.programs import pieces
from solvers.programs.program import Assembly, Program
from solvers.window import Window

LOSSES = pieces.LOSSES


def unsupported(window: Window, finding: str) -> UnsupportedWindowError:
    """The error for a model or loss without a formulation."""
    return UnsupportedWindowError(
        "backend: programs take one affine layer with one output on the input, or one or two hidden ReLU layers before "
        f"it, and one of the losses {', '.join(known.name for known in LOSSES)}; {finding}; use the backend ibp"
    )


def unit_of(window: Window) -> float:
    """The program's unit of length, public: a power of two near what one record can do in one step."""
    rate = max(step.learning_rate for step in window.steps) or 1.0
    return 2.0 ** math.floor(math.log2(rate / window.normaliser * window.clip))


@dataclass(frozen=True, eq=False)
class WindowProgram:
    """A program with its columns: ``theta`` ``(F + 1, P)`` indices, in units of ``unit`` (a power of two)."""

    program: Program
    theta: np.ndarray
    unit: float


@dataclass(frozen=True, eq=False)
class Advance:
    """One step's ``rows`` ``(P,)``, and what a gradient of one clip does to the parameters there, in units."""

    rows: np.ndarray
    size: float


class Steps:
    """A program under construction: ``out``, the columns ``theta`` ``(F + 1, P)``, and the window's public facts.

    ``boxes``: of the parameters before each step and after the last.  ``ladder``: twice the radius.
    """

    def __init__(self, window: Window, radius: int, boxes: list[Interval], integer: bool):
        self.window, self.radius, self.boxes, self.integer = window, radius, boxes, integer
        self.unit, self.ladder, self.out = unit_of(window), 2.0 * radius, Assembly()
        lower, upper = (np.stack([box[end] for box in boxes]) / self.unit for end in (0, 1))
        self.theta = self.out.columns("theta", lower, upper)
        self._slots = np.unique(np.concatenate([s.batch for s in window.steps]))
        ends = np.zeros(len(self._slots)), np.ones(len(self._slots))
        self._replaced = self.out.columns("replaced", *ends, integer)
        self.out.entries(self.out.rows([-np.inf], [float(radius)]), self._replaced, 1.0)

    def replaced(self, slots: np.ndarray) -> np.ndarray:
        """The columns ``a`` of these slots."""
        return self._replaced[np.searchsorted(self._slots, slots)]

    def advance(self, t: int, grid: FixedPoint, slots: np.ndarray, constant: np.ndarray, wild: int) -> Advance:
        """The rows of step ``t``, with what is the same everywhere in the box: ``constant`` ``(P, n)`` of ``slots``.

        ``constant``: gradients on the grid, 0 for what is added to the rows later.  ``wild``: how many more records
        contribute anything within the clip.
        """
        out, window, step = self.out, self.window, self.window.steps[t]
        size, most = self.theta.shape[1], float(min(self.radius, len(step.batch)))
        count = out.columns(f"count {t}", np.zeros(1), np.full(1, most))
        attack = out.columns(f"attack {t}", np.zeros(size), np.full(size, 2.0 * (most + wild)))
        row = out.rows([0.0], [0.0])
        out.entries(row, count, 1.0)
        out.entries(row, self.replaced(step.batch), -1.0)
        row = out.rows(np.full(size, -np.inf), np.full(size, 2.0 * wild))
        out.entries(row, attack, 1.0)
        out.entries(row, count, -2.0)

        # theta' - c theta + h (gradients) = 0, gradients in clips and theta in units.
        h = step.learning_rate / window.normaliser / self.unit * window.clip
        magnitude = np.maximum(self.boxes[t].magnitude, self.boxes[t + 1].magnitude)
        band = len(step.batch) * (pieces.error(window.loss, grid) + 16.0 * RELATIVE) * h
        band = self.ladder * (band + (8.0 * RELATIVE * magnitude + ABSOLUTE) / self.unit)
        to_clips = 1.0 / (grid.scale * window.clip)
        fixed = h * (wild - constant.astype(np.int64).sum(axis=1).astype(float) * to_clips)
        rows = out.rows(fixed - band, fixed + band)
        out.entries(rows, self.theta[t + 1], 1.0)
        out.entries(rows, self.theta[t], -window.contraction)
        out.entries(rows, attack, h)
        out.entries(rows, count, -h)
        out.entries(rows[:, None], self.replaced(slots), -h * to_clips * constant)
        return Advance(rows, h)

    def mixture(self, name: str, found: pieces.Vertices, replaced: np.ndarray | None) -> Mixture:
        """Weights of each record's vertices, which add up to ``1 - a`` (``replaced``: its columns), or to 1.

        In a mixed-integer program those of one piece only.
        """
        out, (record, piece, argument, values) = self.out, found
        count = int(record[-1]) + 1
        if not self.integer:  # neighbouring pieces share vertices
            columns = np.vstack([record, argument, values])
            new = np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0))
            record, argument, values = record[new], argument[new], values[:, new]
        weights = out.columns(name, np.zeros(len(record)), np.ones(len(record)))
        one = np.ones(count)
        if self.integer:
            piece = np.unique(piece, return_inverse=True)[1]
            chosen = out.columns(f"pieces of {name}", np.zeros(piece[-1] + 1), np.ones(piece[-1] + 1), True)
            row = out.rows(np.zeros(len(chosen)), np.zeros(len(chosen)))
            out.entries(row[piece], weights, 1.0)
            out.entries(row, chosen, -1.0)
            total = out.rows(one, one)
            out.entries(total[record[np.flatnonzero(np.diff(piece, prepend=-1))]], chosen, 1.0)
        else:
            total = out.rows(one, one)
            out.entries(total[record], weights, 1.0)
        if replaced is not None:
            out.entries(total, replaced, 1.0)
        return Mixture(weights, record, argument, values)

    def program(self) -> WindowProgram:
        return WindowProgram(self.out.program(), self.theta, self.unit)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Columns ``weights`` of vertices, their ``record`` and ``argument``, ``(V,)`` each, and ``values`` ``(C, V)``."""

    weights: np.ndarray
    record: np.ndarray
    argument: np.ndarray
    values: np.ndarray


def snapped(found: pieces.Vertices, grid: FixedPoint, count: int) -> tuple[pieces.Vertices, np.ndarray]:
    """Vertices of ``count`` records with values on the gradient grid, and which records have the same value at all.

    Up to two units of the grid, which are part of `pieces.error`: differences of rounding errors are no shape.
    """
    found = found._replace(values=np.rint(found.values * grid.scale))
    if not count:
        return found, np.zeros(0, bool)
    first = firsts(found)
    same = (np.abs(found.values - found.values[:, first][:, found.record]) <= 2.0).all(axis=0)
    return found, np.logical_and.reduceat(same, first)


def firsts(found: pieces.Vertices) -> np.ndarray:
    """The first vertex of each record."""
    return np.flatnonzero(np.diff(found.record, prepend=-1))


def without(found: pieces.Vertices, dropped: np.ndarray) -> pieces.Vertices:
    """The vertices of the records that are not ``dropped`` ``(n,)``, which are numbered anew."""
    kept = ~dropped[found.record]
    number = np.cumsum(~dropped) - 1
    return pieces.Vertices(number[found.record[kept]], found.piece[kept], found.argument[kept], found.values[:, kept])
