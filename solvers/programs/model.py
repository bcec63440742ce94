"""A `Program` as a Pyomo model kept by a solver: built once, then asked for many objectives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyomo.environ as pyo
from pyomo.common.gc_manager import PauseGC
from pyomo.contrib.solver.common.factory import SolverFactory as DirectFactory
from pyomo.contrib.solver.common.results import TerminationCondition
from pyomo.core.expr.numeric_expr import LinearExpression, MonomialTermExpression

from solvers.discovery import SOLVERS, require_solver
from solvers.errors import SolverFailureError, SolverMissingError
from solvers.programs.program import Program

#: Rows up to which simplex finds a first basis sooner than interior point with crossover; and up to which it is faster
#: from one objective to the next, as it keeps its basis.
_FIRST_SIMPLEX_ROWS, _SIMPLEX_ROWS = 500, 5000
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
    entries = list(
        map(MonomialTermExpression, zip(matrix.data.tolist(), map(x.__getitem__, matrix.indices.tolist()), strict=True))
    )
    ends = [np.where(np.isinf(side), None, side).tolist() for side in (program.row_lower, program.row_upper)]
    products = {}
    for i, j, k, value in zip(*(part.tolist() for part in program.products), strict=True):
        products[i] = products.get(i, 0.0) + value * x[j] * x[k]

    def row(_, i):
        body = LinearExpression(entries[start[i] : start[i + 1]])
        body = body + products[i] if i in products else body
        low, high = ends[0][i], ends[1][i]
        return (low, body, high) if low != high else body == low

    model.rows = pyo.Constraint(range(rows), rule=row)
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
        return self._minimise(cost)

    def again(self, cost: np.ndarray) -> Answer | None:
        """Another answer for the objective that was minimised last, where the solver has another way to it."""
        return None

    def _minimise(self, cost: np.ndarray) -> Answer:
        raise NotImplementedError

    def _point(self, values) -> np.ndarray:
        """``x`` from pairs of a variable and its value; columns without an entry are not among them."""
        x = np.clip(0.0, self.program.lower, self.program.upper)
        for variable, value in values:
            x[variable.index()] = value
        return x


class _Highs(Solver):
    """HiGHS as Pyomo's persistent interface builds and keeps it, warm from one objective to the next.

    What the interface does for every row (walks through its expression) and every objective (copies and checks its
    configuration, redirects the output, looks up values variable by variable) takes longer than HiGHS does for programs
    of a few hundred rows.  So rows, objectives and answers go to and from its HiGHS as arrays, in the program's order.
    """

    def __init__(self, name: str, program: Program, gap: float):
        super().__init__(name, program)
        interface = DirectFactory(SOLVERS[name].interface)
        self.model.rows.deactivate()  # they are added below
        interface.set_instance(self.model)
        self.model.rows.activate()
        interface.add_variables(list(self.model.x.values()))
        self.highs = interface._solver_model
        options = {"output_flag": False, "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": gap}
        self._set(options | _tolerances(name, program))
        matrix, ends = program.matrix, (program.row_lower, program.row_upper)
        self.highs.addRows(len(ends[0]), *ends, matrix.nnz, matrix.indptr[:-1], matrix.indices, matrix.data)
        self.columns = np.arange(program.shape[1], dtype=np.int32)
        self.attempts = _attempts(program, warm=False)
        self.highs.HandleKeyboardInterrupt = program.kind != "lp"  # those can take minutes

    def _set(self, options: dict[str, object]) -> None:
        for option, value in options.items():
            self.highs.setOptionValue(option, value)

    def _minimise(self, cost: np.ndarray) -> Answer:
        found = self._first_of(self.attempts, cost)
        self.attempts = _attempts(self.program, warm=True)
        return found

    def again(self, cost: np.ndarray) -> Answer:
        """From scratch, the other algorithm first: a basis kept for long can be off by more than tolerances."""
        self.highs.clearSolver()
        return self._first_of(_attempts(self.program, warm=True)[::-1], cost)

    def _first_of(self, attempts: tuple[dict[str, object], ...], cost: np.ndarray) -> Answer:
        self.highs.changeColsCost(len(cost), self.columns, cost)
        for attempt in attempts:
            self._set(attempt)
            self.highs.solve()
            status = self.highs.getModelStatus()
            if status.name == "kInterrupt":
                raise KeyboardInterrupt
            if status.name == "kOptimal":
                break
        else:
            raise SolverFailureError(f"it ended with the status {self.highs.modelStatusToString(status)}")
        found = self.highs.getSolution()
        x = np.array(found.col_value)
        if self.program.kind != "lp":
            return Answer(x, bound=self.highs.getInfo().mip_dual_bound)
        return Answer(x, dual=np.array(found.row_dual))


def _attempts(program: Program, warm: bool) -> tuple[dict[str, object], ...]:
    """Options of HiGHS that are tried one after the other until it finishes, ``warm``: after the first objective."""
    if program.kind == "lp":
        rows, simplex = program.shape[0], {"solver": "simplex"}
        interior = {"solver": "ipm", "run_crossover": "on" if rows <= _SIMPLEX_ROWS else "off"}
        return (simplex, interior) if rows <= (_SIMPLEX_ROWS if warm else _FIRST_SIMPLEX_ROWS) else (interior, simplex)
    # A search that restarts after presolving may end at a point that is beyond its own tolerance by a rounding error.
    return {"presolve": "choose"}, {"presolve": "off"}


class _Direct(Solver):
    """Through Pyomo's newer interface."""

    def __init__(self, name: str, program: Program, gap: float):
        super().__init__(name, program)
        self.solver = DirectFactory(SOLVERS[name].interface)
        config = self.solver.config
        config.threads = 1
        config.load_solutions = False
        config.raise_exception_on_nonoptimal_result = False
        config.rel_gap, config.abs_gap = 0.0, gap
        config.solver_options.update(_tolerances(name, program))

    def _minimise(self, cost: np.ndarray) -> Answer:
        results = self.solver.solve(self.model)
        if results.termination_condition != TerminationCondition.convergenceCriteriaSatisfied:
            raise SolverFailureError(f"it ended with {results.termination_condition.name}")
        x = self._point(results.solution_loader.get_vars().items())
        if self.program.kind != "lp":
            return Answer(x, bound=results.objective_bound)
        duals = results.solution_loader.get_duals()
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

    def _minimise(self, cost: np.ndarray) -> Answer:
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
    with PauseGC():  # which would look through every expression, several times
        if name == "highs":
            return _Highs(name, program, gap)
        if SOLVERS[name].direct:
            return _Direct(name, program, gap)
        return _Executable(name, program, found.path)
