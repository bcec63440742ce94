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

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from models.ops import Interval
from solvers.discovery import SOLVERS, require_solver
from solvers.gradients import FixedPoint
from solvers.ibp import ibp
from solvers.options import Options
from solvers.programs import margin, relu
from solvers.programs.bounds import extremes
from solvers.programs.margin import Blocks, Head, blocks, corners
from solvers.programs.model import solver
from solvers.programs.relu import Network, model_of
from solvers.programs.size import check_size
from solvers.programs.steps import WindowProgram, unit_of
from solvers.window import Boxes, Window

#: Default tolerance in units of what one record can do in one step: far above a solver's, far below a width.
_TAU = 2.0**-12


def tolerance(window: Window, options: Options) -> float:
    """The public tolerance of a window, in parameter units."""
    return _TAU * unit_of(window) if options.tau is None else options.tau


def _radius(window: Window, model: Head | Network, coupled: Boxes, kind: str, options: Options, j: int):
    """One radius after the window's last step, all earlier ones known: its box, and `_linear`'s ends or None."""
    radius, tau = window.radii[j], tolerance(window, options)
    boxes = [Interval(b.lower[j], b.upper[j]) for b in (*window.known, coupled)]
    if isinstance(model, Network):
        made, newest = relu.formulate(window, model, radius, boxes, kind), None
    else:
        made, newest = _linear(window, model, boxes, kind, options, j)
    costs = np.zeros((made.theta.shape[1], made.program.shape[1]))
    costs[np.arange(len(costs)), made.theta[-1]] = 1.0
    lower, upper = extremes(solver(options.solver, made.program, tau / made.unit / 4.0), costs, tau / made.unit)
    # The ladder of property (M): every bound is within tau of the optimum of a program that nests.
    return Interval(lower * made.unit - radius * tau, upper * made.unit + radius * tau), newest


def _linear(
    window: Window, head: Head, boxes: list[Interval], kind: str, options: Options, j: int
) -> tuple[WindowProgram, np.ndarray]:
    """The program of a linear model, and the ends of the arguments of its last step ``(2, slots)``."""
    radius = window.radii[j]
    margins = [None if b.margins is None else b.margins[j] for b in window.known[1:]]
    batches = [
        blocks(window, head, step.batch, box, 2.0 * radius, ends)
        for step, box, ends in zip(window.steps, boxes, [*margins, None], strict=False)
    ]
    if len(window.steps) > 1:
        batches[-1] = _tightened(window, head, radius, boxes[:-1], batches, tolerance(window, options), options)
    newest = np.full((2, window.records.slots), np.nan)
    newest[:, batches[-1].slots] = batches[-1].box
    return margin.formulate(window, head, radius, boxes, batches, kind != "lp"), newest


def _tightened(
    window: Window, head: Head, radius: int, boxes: list[Interval], batches: list[Blocks], tau: float, options: Options
) -> Blocks:
    """The last step's records over what the program of the steps before it allows, instead of over a box."""
    records = batches[-1]
    grid = FixedPoint.make(window.clip, len(window.steps[-1].batch))
    uncertain = np.flatnonzero(~records.wild)[~corners(window, head, records, grid)[1]]
    if not len(uncertain):
        return records
    before = replace(window, steps=window.steps[:-1], known=window.known[:-1])
    made = margin.formulate(before, head, radius, boxes, batches[:-1], False)
    sign = records.sign[uncertain]
    inputs = (sign * head.inputs[:, records.slots[uncertain]]).T
    scale = 2.0 ** np.ceil(np.log2(np.abs(inputs).sum(axis=1)))  # private, but the same on a neighbour
    costs = np.zeros((len(uncertain), made.program.shape[1]))
    costs[:, made.theta[-1]] = inputs / scale[:, None]
    name = options.solver if SOLVERS[options.solver].duals else "highs"  # a linear program, also where the last is not
    lower, upper = extremes(solver(name, made.program, tau / made.unit / 4.0), costs, tau / made.unit)
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
    for t in window.fresh:
        part = replace(window, steps=window.steps[: t + 1], known=tuple(known))
        coupled = ibp(part, options.threads)[-1]
        one = partial(_radius, part, model, coupled, kind, options)
        lower, upper = coupled.lower.copy(), coupled.upper.copy()
        margins = np.full((len(window.radii), 2, window.records.slots), np.nan)
        for j, (box, newest) in zip(wide, _map(one, wide, options.threads), strict=True):
            lower[j], upper[j] = np.maximum(lower[j], box.lower), np.minimum(upper[j], box.upper)
            if newest is not None:
                margins[j] = newest
        kept = margins if isinstance(model, Head) else None
        known.append(Boxes(coupled.nominal, lower, upper, margins=kept))
    return known[len(window.known) :]


def _map(function, items: list, threads: int) -> list:
    """In processes, as Pyomo holds the interpreter; the last item, the largest radius, takes longest and goes first."""
    if min(threads, len(items)) < 2:
        return [function(item) for item in items]
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with ProcessPoolExecutor(min(threads, len(items)), multiprocessing.get_context(start)) as pool:
        return list(pool.map(function, items[::-1]))[::-1]


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
