"""Bounds of a program's columns that lie outside the exact optimum by at most a public tolerance."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from solvers.errors import SolverFailureError
from solvers.programs.model import Answer, Solver, solver
from solvers.programs.program import Program
from solvers.programs.safe import safe_lower_bound

#: Violation of integrality, rows or columns, in the program's units, at which a mixed-integer answer is not believed.
_RESIDUAL = 1e-6
#: Programs with so many rows are worth several solvers, each with a part of the objectives.
_SHARED_ROWS, _PARTS = 500, 4


def extremes(name: str, program: Program, costs: np.ndarray, tau: float, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of ``costs @ x``, ``costs`` ``(C, N)``, each within ``tau`` of the optimum.

    ``name``: the solver.  Threads share the objectives of a large program; which ones a solver gets one after the
    other, warm from the last, does not depend on their number.
    """
    signed = np.concatenate([costs, -costs])
    parts = min(_PARTS if program.shape[0] >= _SHARED_ROWS else 1, len(signed))
    found = mapped(partial(_least_of, name, program, tau), np.array_split(signed, parts), threads)
    lower, upper = np.split(np.concatenate(found), 2)
    return lower, -upper


def _least_of(name: str, program: Program, tau: float, costs: np.ndarray) -> np.ndarray:
    kept = solver(name, program, tau / 4.0)
    return np.array([least(kept, cost, tau) for cost in costs])


def mapped(function: Callable, items: Sequence, threads: int) -> list:
    """In processes, as Pyomo holds the interpreter; the last item, the largest radius, takes longest and goes first."""
    if min(threads, len(items)) < 2:
        return [function(item) for item in items]
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    with ProcessPoolExecutor(min(threads, len(items)), multiprocessing.get_context(start)) as pool:
        return list(pool.map(function, items[::-1]))[::-1]


def least(kept: Solver, cost: np.ndarray, tau: float) -> float:
    """A bound from below of ``cost @ x`` over the solver's program.

    Of a linear program it is proven whatever the solver did; of another it is the solver's own bound, less
    ``tau / 8``.  It is within ``tau`` of the optimum if the solver's point is what it should be: the value there may
    not exceed the bound by more than ``tau / 2``, the violations weighted with their multipliers included.  An answer
    that fails this is asked for once more, by another way where there is one.
    Raises SolverFailureError, with the program in a file.
    """
    try:
        bound, finding = _checked(kept.program, cost, kept.minimise(cost), tau)
        if finding and (second := kept.again(cost)) is not None:
            bound, finding = _checked(kept.program, cost, second, tau)
    except SolverFailureError as error:
        raise _failure(kept, str(error)) from error
    if finding:
        raise _failure(kept, finding)
    return bound


def _checked(program: Program, cost: np.ndarray, answer: Answer, tau: float) -> tuple[float, str]:
    """The bound, and what is wrong with it."""
    if program.kind == "lp":
        bound, slack = safe_lower_bound(program, cost, answer.dual), _weighted_violation(program, cost, answer)
    else:
        bound, slack = answer.bound - tau / 8.0, 0.0
        if program.residual(answer.x) > _RESIDUAL:
            return bound, f"its point violates the program by {program.residual(answer.x):.1e}"
    gap = float(cost @ answer.x) + slack - bound
    if program.kind != "lp" and not gap >= -tau / 2.0:  # of a linear program the bound is proven
        return bound, f"its bound is {-gap:.1e} above the value at its own point"
    if not gap <= tau / 2.0:
        return bound, f"its point is {gap:.1e} above its bound, the tolerance tau allows {tau / 2.0:.1e}"
    return bound, ""


def _weighted_violation(program: Program, cost: np.ndarray, answer: Answer) -> float:
    """What the violations of the solver's point are worth, to first order."""
    rows, columns = program.violations(answer.x)
    return float(np.abs(answer.dual) @ rows + np.abs(cost - program.matrix.T @ answer.dual) @ columns)


def _failure(kept: Solver, finding: str) -> SolverFailureError:
    with tempfile.NamedTemporaryFile(prefix="certdp-program-", suffix=".lp", delete=False) as file:
        path = Path(file.name)
    kept.model.write(str(path))
    rows, columns = kept.program.shape
    return SolverFailureError(
        f"solver {kept.name}: no usable bound of a program with {rows} rows and {columns} columns: {finding}; it is in "
        f"{path} (private, made from the data); try another solver, a larger tau or shorter windows, and report it"
    )
