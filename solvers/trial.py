"""Tiny programs with known answers for one solver, through Pyomo: ``python -m solvers.trial NAME`` prints JSON.

Run in a process of its own by `solvers.discovery.try_solver`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pyomo.environ as pyo
from pyomo.contrib.solver.common.factory import SolverFactory

from solvers.discovery import SOLVERS, Trial, find

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class _Answer:
    """``value``: objective at the solution found.  ``bound``: the solver's dual bound.  ``duals``: by row name."""

    value: float
    bound: float | None
    duals: dict[str, float] | None


def linear_program() -> tuple[pyo.ConcreteModel, float]:
    """max 3x + 2y, x + y <= 4, x + 3y <= 8, 0 <= x <= 3, y >= 0: 11 at (3, 1); duals of the rows 2 and 0."""
    m = pyo.ConcreteModel()
    m.x, m.y = pyo.Var(bounds=(0, 3)), pyo.Var(bounds=(0, 100))
    m.first = pyo.Constraint(expr=m.x + m.y <= 4)
    m.second = pyo.Constraint(expr=m.x + 3 * m.y <= 8)
    m.goal = pyo.Objective(expr=3 * m.x + 2 * m.y, sense=pyo.maximize)
    return m, 11.0


def knapsack() -> tuple[pyo.ConcreteModel, float]:
    """min -8a - 11b - 6c - 4d, 5a + 7b + 4c + 3d <= 14, binary: -21 (its relaxation: -22)."""
    m = pyo.ConcreteModel()
    m.x = pyo.Var(range(4), domain=pyo.Binary)
    m.weight = pyo.Constraint(expr=sum(w * m.x[i] for i, w in enumerate((5, 7, 4, 3))) <= 14)
    m.goal = pyo.Objective(expr=sum(-v * m.x[i] for i, v in enumerate((8, 11, 6, 4))))
    return m, -21.0


def saddle() -> tuple[pyo.ConcreteModel, float]:
    """min w + b, w = x y, x + y = 1, x <= 2b - 1.5, b binary: -6 at x = -2, y = 3; McCormick gives less."""
    m = pyo.ConcreteModel()
    m.x, m.y, m.w = pyo.Var(bounds=(-2, 3)), pyo.Var(bounds=(-2, 3)), pyo.Var(bounds=(-9, 9))
    m.b = pyo.Var(domain=pyo.Binary)
    m.product = pyo.Constraint(expr=m.w == m.x * m.y)
    m.line = pyo.Constraint(expr=m.x + m.y == 1)
    m.switch = pyo.Constraint(expr=m.x <= 2 * m.b - 1.5)
    m.goal = pyo.Objective(expr=m.w + m.b)
    return m, -6.0


def _direct(name: str, model: pyo.ConcreteModel, duals: bool) -> _Answer:
    """Through Pyomo's newer interface."""
    found = SolverFactory(SOLVERS[name].interface).solve(model)
    values = found.solution_loader.get_duals() if duals else None
    named = None if values is None else {row.name: value for row, value in values.items()}
    return _Answer(pyo.value(model.goal), found.objective_bound, named)


def _through_executable(name: str, model: pyo.ConcreteModel, duals: bool) -> _Answer:
    """Through Pyomo's interface to solvers that are programs."""
    model.dual = pyo.Suffix(direction=pyo.Suffix.IMPORT)
    found = pyo.SolverFactory(SOLVERS[name].interface, executable=find(name).path).solve(model)
    if found.solver.termination_condition != pyo.TerminationCondition.optimal:
        raise RuntimeError(f"ended with {found.solver.termination_condition}")
    named = {row.name: model.dual[row] for row in model.dual} if duals else None
    # At an optimum Pyomo gives the solution's value out as the bound, whatever the solver has proven.
    return _Answer(pyo.value(model.goal), None, named)


def _attempt(name: str, make: Callable[[], tuple[pyo.ConcreteModel, float]], duals: bool = False):
    """(answer or None, "ok" or what went wrong)."""
    model, right = make()
    solve = _direct if SOLVERS[name].direct else _through_executable
    try:
        answer = solve(name, model, duals)
    except Exception as error:  # whatever a foreign solver raises is its answer
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if abs(answer.value - right) > _TOLERANCE:
        return answer, f"wrong answer: {answer.value:.9g} for {right:g}"
    return answer, "ok"


def trial(name: str) -> Trial:
    """All tiny programs; kinds the solver does not claim are tried as well."""
    _, lp = _attempt(name, linear_program)
    with_duals, said = _attempt(name, linear_program, duals=True)
    duals = said == "ok" and abs(with_duals.duals["first"] - 2) + abs(with_duals.duals["second"]) <= _TOLERANCE
    answer, milp = _attempt(name, knapsack)
    bound = milp == "ok" and answer.bound is not None and -21.5 <= answer.bound <= -21 + _TOLERANCE
    _, miqcp = _attempt(name, saddle)
    return Trial(lp, milp, miqcp, duals, bound)


if __name__ == "__main__":
    print(json.dumps(asdict(trial(sys.argv[1]))))
