"""A `Program` as a Pyomo model kept by a solver: built once, then asked for many objectives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyomo.environ as pyo
from pyomo.contrib.solver.common.factory import SolverFactory as DirectFactory
from pyomo.contrib.solver.common.results import TerminationCondition
from pyomo.core.expr.numeric_expr import LinearExpression

from solvers.discovery import SOLVERS, require_solver
from solvers.errors import SolverFailureError, SolverMissingError
from solvers.programs.program import Program

#: Simplex keeps its basis from one objective to the next; above this many rows interior point is faster all the same.
_SIMPLEX_ROWS = 2000
#: Violation of a row or column that a solver may leave, in the program's units.
_FEASIBILITY = 1e-8
#: Larger numbers have no digits left beside the unit of a program; from 1e20 on they are infinite to most solvers.
_LARGEST = 1e15
_DIRECT_OPTIONS = {"scip": {"numerics/feastol": _FEASIBILITY}, "gurobi": {"FeasibilityTol": 1e-9, "IntFeasTol": 1e-9}}
_EXECUTABLE_OPTIONS = {"cbc": {"primalT": 1e-9, "dualT": 1e-9}, "glpk": {}}


@dataclass(frozen=True, eq=False)
class Answer:
    """What a solver says about one objective, none of it proven.

    ``x`` ``(N,)``: its point.  ``bound``: its lower bound of a program that is not linear.  ``dual`` ``(M,)``: its
    multipliers of the rows of a linear one.
    """

    x: np.ndarray
    bound: float | None = None
    dual: np.ndarray | None = None


def build(program: Program) -> pyo.ConcreteModel:
    """The program as a Pyomo model: ``x[j]``, ``rows[i]`` and an ``objective`` of zero."""
    model = pyo.ConcreteModel()
    rows, columns = program.shape
    model.x = pyo.Var(range(columns))
    x = list(model.x.values())
    for var, lower, upper in zip(x, program.lower.tolist(), program.upper.tolist(), strict=True):
        var.setlb(lower)
        var.setub(upper)
    for j in np.flatnonzero(program.integer).tolist():
        x[j].domain = pyo.Integers
    matrix, start = program.matrix, program.matrix.indptr.tolist()
    places, values = matrix.indices.tolist(), matrix.data.tolist()
    ends = [
        [None if np.isinf(end) else end for end in side.tolist()] for side in (program.row_lower, program.row_upper)
    ]
    terms = {}
    for i, j, k, value in zip(*(part.tolist() for part in program.products), strict=True):
        terms[i] = terms.get(i, 0.0) + value * x[j] * x[k]
    model.rows = pyo.Constraint(pyo.Any)
    for i in range(rows):
        part = slice(start[i], start[i + 1])
        body = LinearExpression(linear_coefs=values[part], linear_vars=[x[j] for j in places[part]])
        body = body + terms[i] if i in terms else body
        low, high = ends[0][i], ends[1][i]
        model.rows[i] = (low, body, high) if low != high else body == low
    model.objective = pyo.Objective(expr=0.0)
    return model


def _linear(model: pyo.ConcreteModel, cost: np.ndarray) -> LinearExpression:
    places = np.flatnonzero(cost).tolist()
    return LinearExpression(linear_coefs=cost[places].tolist(), linear_vars=[model.x[j] for j in places])


class Solver:
    """A solver that keeps one program's Pyomo model: ``name``, ``program``, ``model``, and `minimise`."""

    def __init__(self, name: str, program: Program):
        self.name, self.program, self.model = name, program, build(program)

    def minimise(self, cost: np.ndarray) -> Answer:
        """The solver's answer for ``cost @ x``; raises SolverFailureError saying how it ended."""
        self.model.objective.set_value(_linear(self.model, cost))
        return self._minimise()

    def _minimise(self) -> Answer:
        raise NotImplementedError

    def _point(self, values) -> np.ndarray:
        """``x`` from pairs of a variable and its value; columns without an entry are not among them."""
        x = np.clip(0.0, self.program.lower, self.program.upper)
        for variable, value in values:
            x[variable.index()] = value
        return x


class _Direct(Solver):
    """Through Pyomo's newer interface, which keeps HiGHS and Gurobi warm from one objective to the next."""

    def __init__(self, name: str, program: Program, gap: float):
        super().__init__(name, program)
        self.solver = DirectFactory(SOLVERS[name].interface)
        config = self.solver.config
        config.threads = 1
        config.load_solutions = False
        config.raise_exception_on_nonoptimal_result = False
        config.rel_gap, config.abs_gap = 0.0, gap
        config.solver_options.update(_tolerances(name, program))
        self.attempts: tuple[dict[str, str], ...] = ({},)
        if name == "highs" and program.kind == "lp":
            # The other algorithm where one does not finish: the bound is held to the same tolerance.
            simplex, interior = {"solver": "simplex"}, {"solver": "ipm", "run_crossover": "off"}
            self.attempts = (interior, simplex) if program.shape[0] > _SIMPLEX_ROWS else (simplex, interior)
        self.told = name == "highs"  # of a new objective, instead of looking for all that may have changed
        if self.told:
            for check in config.auto_updates:
                config.auto_updates[check] = False
            self.solver.set_instance(self.model)

    def _minimise(self) -> Answer:
        if self.told:
            self.solver.set_objective(self.model.objective)
        for attempt in self.attempts:
            self.solver.config.solver_options.update(attempt)
            results = self.solver.solve(self.model)
            if results.termination_condition == TerminationCondition.convergenceCriteriaSatisfied:
                break
        else:
            raise SolverFailureError(f"it ended with {results.termination_condition.name}")
        loader = results.solution_loader
        x = self._point(loader.get_vars().items())
        if self.program.kind != "lp":
            return Answer(x, bound=results.objective_bound)
        duals = loader.get_duals()
        return Answer(x, dual=np.array([duals[row] for row in self.model.rows.values()]))


def _tolerances(name: str, program: Program) -> dict[str, object]:
    """The solver's options for this program."""
    if name != "highs":
        return _DIRECT_OPTIONS[name]
    options: dict[str, object] = {f"{side}_feasibility_tolerance": _FEASIBILITY for side in ("primal", "dual")}
    if program.integer.any():
        return options | {"mip_feasibility_tolerance": _FEASIBILITY}
    return options | {"simplex_strategy": 4}


class _Executable(Solver):
    """Through files and a program, which starts afresh for every objective; linear programs only."""

    def __init__(self, name: str, program: Program, path: str):
        super().__init__(name, program)
        self.solver = pyo.SolverFactory(SOLVERS[name].interface, executable=path)
        self.solver.options.update(_EXECUTABLE_OPTIONS[name])
        self.model.dual = pyo.Suffix(direction=pyo.Suffix.IMPORT)

    def _minimise(self) -> Answer:
        results = self.solver.solve(self.model)
        if results.solver.termination_condition != pyo.TerminationCondition.optimal:
            raise SolverFailureError(f"it ended with {results.solver.termination_condition}")
        x = self._point((v, v.value) for v in self.model.x.values() if v.value is not None)
        return Answer(x, dual=np.array([self.model.dual.get(row, 0.0) for row in self.model.rows.values()]))


def solver(name: str, program: Program, gap: float) -> Solver:
    """The solver of this name, holding the program; all but linear ones are solved to the absolute ``gap``.

    Raises SolverMissingError for a solver that is not installed or cannot give a bound of such a program.
    """
    kind = program.kind
    found = require_solver(name, kind)
    if not (SOLVERS[name].duals if kind == "lp" else SOLVERS[name].bound):
        able = [s.name for s in SOLVERS.values() if kind in s.kinds and (s.duals if kind == "lp" else s.bound)]
        wanted = "dual values" if kind == "lp" else "dual bound"
        raise SolverMissingError(f"solver: {name} gives no {wanted} of a {kind.upper()}; use one of: {', '.join(able)}")
    ends = np.concatenate([program.row_lower, program.row_upper, program.lower, program.upper])
    largest = np.abs(ends[np.isfinite(ends)]).max(initial=0.0)
    if largest > _LARGEST:
        raise SolverFailureError(
            f"solver: the program holds numbers up to {largest:.0e}: parameters or targets are too large beside what "
            "one record can do in one step (rate, clip); scale the data, or use the backend ibp"
        )
    if SOLVERS[name].direct:
        return _Direct(name, program, gap)
    return _Executable(name, program, found.path)
