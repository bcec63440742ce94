"""The backends ``lp``, ``milp`` and ``miqcp``: boxes from programs, intersected with budget-coupled interval bounds.

Guarantees:
  * the radius-0 box is the nominal run, bit for bit;
  * (S) the box of radius k contains the parameters of the nominal trainer on every data set that differs in k slots;
  * (M) boxes nest: radius k on a data set lies inside radius k + 1 on each of its neighbours;
  * results do not depend on the number of threads.

(S) of ``lp`` is proven from the dual solution alone; (S) of the others and (M) of all trust that the solver's answer is
within the tolerance ``tau`` of the optimum, which is checked against its own point (`solvers.programs.bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from models.ops import Interval
from solvers.discovery import SOLVERS, require_solver
from solvers.gradients import FixedPoint
from solvers.ibp import ibp
from solvers.options import Options
from solvers.programs import margin, relu
from solvers.programs.bounds import extremes, mapped
from solvers.programs.margin import Blocks, Head, blocks, corners
from solvers.programs.relu import Network, model_of
from solvers.programs.size import check_size
from solvers.programs.steps import unit_of
from solvers.window import Boxes, Window

#: Default tolerance in units of what one record can do in one step: far above a solver's, far below a width.
_TAU = 2.0**-12


def tolerance(window: Window, options: Options) -> float:
    """The public tolerance of a window, in parameter units."""
    return _TAU * unit_of(window) if options.tau is None else options.tau


def _radius(
    window: Window, model: Head | Network, coupled: Boxes, kind: str, options: Options, item: tuple[int, list[Blocks]]
) -> tuple[Interval, list[Blocks]]:
    """The box of radius ``j`` after the window's last step, all earlier ones known; ``item``: ``j``, see `_records`."""
    j, batches = item
    radius, tau = window.radii[j], tolerance(window, options)
    boxes = [Interval(b.lower[j], b.upper[j]) for b in (*window.known, coupled)]
    if isinstance(model, Network):
        made = relu.formulate(window, model, radius, boxes, kind)
    else:
        batches = _records(window, model, options, j, batches)
        made = margin.formulate(window, model, radius, boxes, batches, kind != "lp")
    costs = np.zeros((made.theta.shape[1], made.program.shape[1]))
    costs[np.arange(len(costs)), made.theta[-1]] = 1.0
    lower, upper = extremes(options.solver, made.program, costs, tau / made.unit, options.threads)
    # The ladder of property (M): every bound is within tau of the optimum of a program that nests.
    return Interval(lower * made.unit - radius * tau, upper * made.unit + radius * tau), batches


def _records(window: Window, head: Head, options: Options, j: int, batches: Sequence[Blocks] = ()) -> list[Blocks]:
    """The records of every step before which the box is known, for one radius; ``batches``: those of the first steps.

    Each step's arguments are tightened by the program of the steps before it *in this window*.  What an earlier window
    found would be tighter, but break (M): this window's parameters need not keep to it.
    """
    batches = list(batches)
    for t in range(len(batches), min(len(window.known), len(window.steps))):
        known = window.known[: t + 1]
        boxes = [Interval(b.lower[j], b.upper[j]) for b in known]
        records = blocks(window, head, window.steps[t].batch, boxes[t], 2.0 * window.radii[j])
        before = replace(window, steps=window.steps[:t], known=known[:-1]) if t else None
        batches.append(records if before is None else _tightened(before, head, boxes, batches, records, options, j))
    return batches


def _tightened(
    before: Window, head: Head, boxes: list[Interval], batches: list[Blocks], records: Blocks, options: Options, j: int
) -> Blocks:
    """``records`` of the next step, over what the program of the window ``before`` allows instead of over a box."""
    radius, tau = before.radii[j], tolerance(before, options)
    grid = FixedPoint.make(before.clip, records.size)
    uncertain = np.flatnonzero(~records.wild)[~corners(before, head, records, grid)[1]]
    if not len(uncertain):
        return records
    made = margin.formulate(before, head, radius, boxes, batches, False)
    sign = records.sign[uncertain]
    inputs = (sign * head.inputs[:, records.slots[uncertain]]).T
    scale = 2.0 ** np.ceil(np.log2(np.abs(inputs).sum(axis=1)))  # private, but the same on a neighbour
    costs = np.zeros((len(uncertain), made.program.shape[1]))
    costs[:, made.theta[-1]] = inputs / scale[:, None]
    name = options.solver if SOLVERS[options.solver].duals else "highs"  # a linear program, also where the last is not
    lower, upper = extremes(name, made.program, costs, tau / made.unit, options.threads)
    constant, error = sign * head.offset - records.shift[uncertain], records.error[uncertain]
    box = Interval(records.box.lower.copy(), records.box.upper.copy())
    low = (lower * made.unit - radius * tau) * scale + constant - error
    high = (upper * made.unit + radius * tau) * scale + constant + error
    box.lower[uncertain] = np.maximum(box.lower[uncertain], low)
    box.upper[uncertain] = np.minimum(box.upper[uncertain], high)
    return replace(records, box=box)


def _bound(window: Window, options: Options, kind: str) -> list[Boxes]:
    model, known = model_of(window), list(window.known)
    if kind == "miqcp" and isinstance(model, Network):
        require_solver(options.solver, kind)
    check_size(window, kind != "lp", options.force)
    wide = [j for j, radius in enumerate(window.radii) if radius > 0]
    spare = replace(options, threads=max(1, options.threads // max(1, len(wide))), progress=None)  # for one radius
    batches = [[] for _ in wide]
    if isinstance(model, Head):  # earlier windows know the boxes of these steps
        early = replace(window, steps=window.steps[: len(known) - 1])
        batches = mapped(partial(_records, early, model, spare), wide, options.threads)
    for t in window.fresh:
        part = replace(window, steps=window.steps[: t + 1], known=tuple(known))
        coupled = ibp(part, options.threads)[-1]
        one = partial(_radius, part, model, coupled, kind, spare)
        lower, upper = coupled.lower.copy(), coupled.upper.copy()
        found = mapped(one, list(zip(wide, batches, strict=True)), options.threads)
        batches = [batch for _, batch in found]
        for j, (box, _) in zip(wide, found, strict=True):
            lower[j], upper[j] = np.maximum(lower[j], box.lower), np.minimum(upper[j], box.upper)
        known.append(Boxes(coupled.nominal, lower, upper))
        if options.progress is not None and t < len(window.steps) - 1:
            options.progress(known[-1])
    return known[len(window.known) :]


def lp(window: Window, options: Options) -> list[Boxes]:
    """Boxes after each of the window's fresh steps from linear programs.

    Raises UnsupportedWindowError, ProgramSizeError, SolverMissingError, SolverFailureError.
    """
    return _bound(window, options, "lp")


def milp(window: Window, options: Options) -> list[Boxes]:
    """Boxes after each of the window's fresh steps from mixed-integer programs; raises as `lp`."""
    return _bound(window, options, "milp")


def miqcp(window: Window, options: Options) -> list[Boxes]:
    """`milp` with the exact products of a ReLU network's parameters and values; the same for linear models."""
    return _bound(window, options, "miqcp")
