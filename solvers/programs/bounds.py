"""Bounds of a program's columns that lie outside the exact optimum by at most a public tolerance."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from solvers.errors import SolverFailureError
from solvers.programs.model import Answer, Solver
from solvers.programs.program import Program
from solvers.programs.safe import safe_lower_bound

#: Violation of integrality, rows or columns, in the program's units, at which a mixed-integer answer is not believed.
_RESIDUAL = 1e-6


def extremes(kept: Solver, costs: np.ndarray, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of ``costs @ x``, ``costs`` ``(C, N)``, each within ``tau`` of the optimum."""
    lower = np.array([least(kept, cost, tau) for cost in costs])
    return lower, -np.array([least(kept, -cost, tau) for cost in costs])


def least(kept: Solver, cost: np.ndarray, tau: float) -> float:
    """A bound from below of ``cost @ x`` over the solver's program.

    Of a linear program it is proven whatever the solver did; of another it is the solver's own bound, less
    ``tau / 8``.  It is within ``tau`` of the optimum if the solver's point is what it should be: the value there may
    not exceed the bound by more than ``tau / 2``, the violations weighted with their multipliers included.
    Raises SolverFailureError, with the program in a file.
    """
    program = kept.program
    try:
        answer = kept.minimise(cost)
    except SolverFailureError as error:
        raise _failure(kept, str(error)) from error
    if program.kind != "lp":
        bound, slack = answer.bound - tau / 8.0, 0.0
        if program.residual(answer.x) > _RESIDUAL:
            raise _failure(kept, f"its point violates the program by {program.residual(answer.x):.1e}")
    else:
        bound, slack = safe_lower_bound(program, cost, answer.dual), _weighted_violation(program, cost, answer)
    gap = float(cost @ answer.x) + slack - bound
    if not gap <= tau / 2.0:
        raise _failure(kept, f"its point is {gap:.1e} above its bound, the tolerance tau allows {tau / 2.0:.1e}")
    return bound


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
