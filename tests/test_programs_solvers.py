"""What is given to HiGHS as arrays is the program, and what comes back as arrays is in the program's order."""

import signal
import threading
import time

import numpy as np
import pytest
from pyomo.contrib.solver.common.factory import SolverFactory
from scipy import optimize, sparse

from solvers.errors import SolverFailureError
from solvers.programs import model
from solvers.programs.bounds import least
from solvers.programs.model import build, solver
from solvers.programs.program import Program


def program(seed: int, integers: int = 0, rows: int = 7, columns: int = 9) -> Program:
    """Rows with one end, two ends and equal ends around a point inside; the first column is in no row."""
    rng = np.random.default_rng(seed)
    entries = rng.normal(size=(rows, columns)) * (rng.random((rows, columns)) < 0.6)
    entries[:, 0] = 0.0
    entries[np.arange(rows), 1 + np.arange(rows) % (columns - 1)] = 1.5
    integer = np.arange(columns) >= columns - integers
    point = np.where(integer, rng.integers(-2, 3, columns), rng.uniform(-2.0, 2.0, columns))
    middle, kind = entries @ point, np.arange(rows) % 4
    lower = np.where(kind == 0, -np.inf, middle - np.where(kind == 1, 0.0, 0.3))
    upper = np.where(kind == 2, np.inf, middle + np.where(kind == 1, 0.0, 0.4))
    return Program(
        sparse.csr_array(entries), lower, upper, np.full(columns, -3.0), np.full(columns, 4.0), integer, {}
    )  # fmt: skip


def costs(seed: int, columns: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(6, columns))


@pytest.mark.parametrize("integers", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_highs_holds_the_program_in_its_own_order(seed, integers):
    made = program(seed, integers)
    lp = solver("highs", made, 0.0).highs.getLp()
    held = lp.a_matrix_
    layout = sparse.csr_array if held.format_.name == "kRowwise" else sparse.csc_array
    matrix = layout((held.value_, held.index_, held.start_), shape=made.shape)
    assert (matrix.toarray() == made.matrix.toarray()).all()
    assert (lp.col_lower_ == made.lower).all() and (lp.col_upper_ == made.upper).all()
    assert (lp.row_lower_ == made.row_lower).all() and (lp.row_upper_ == made.row_upper).all()
    kinds = [kind.name == "kInteger" for kind in lp.integrality_] or [False] * made.shape[1]
    assert (kinds == made.integer).all()


@pytest.mark.parametrize("regime", [(500, 5000), (0, 5000), (0, 0)])  # of simplex: always, after the first, never
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_another_reader_of_the_same_program(seed, regime, monkeypatch):
    """Optima of scipy, from the same arrays; points and multipliers that prove them, in the program's order."""
    monkeypatch.setattr(model, "_FIRST_SIMPLEX_ROWS", regime[0])
    monkeypatch.setattr(model, "_SIMPLEX_ROWS", regime[1])
    made = program(seed)
    kept, rows = solver("highs", made, 0.0), optimize.LinearConstraint(made.matrix, made.row_lower, made.row_upper)
    for cost in costs(seed):
        expected = optimize.milp(cost, constraints=rows, bounds=optimize.Bounds(made.lower, made.upper)).fun
        answer = kept.minimise(cost)
        assert cost @ answer.x == pytest.approx(expected, abs=1e-6)
        assert made.residual(answer.x) < 1e-7
        assert expected - 1e-6 < least(kept, cost, 1e-4) <= expected + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_bounds_with_integers_are_those_of_another_reader_of_the_same_program(seed):
    made = program(seed, 3)
    kept, rows = solver("highs", made, 1e-9), optimize.LinearConstraint(made.matrix, made.row_lower, made.row_upper)
    for cost in costs(seed):
        expected = optimize.milp(
            cost, constraints=rows, bounds=optimize.Bounds(made.lower, made.upper), integrality=made.integer
        ).fun
        answer = kept.minimise(cost)
        assert [answer.bound, cost @ answer.x] == pytest.approx([expected, expected], abs=1e-6)
        assert made.residual(answer.x) < 1e-6


@pytest.mark.parametrize("integers", [0, 3])
def test_the_model_that_is_written_and_given_to_other_solvers_is_the_same_program(integers):
    """Read by Pyomo's interface expression by expression."""
    made = program(4, integers)
    kept, other = solver("highs", made, 1e-9), SolverFactory("highs")
    other.config.load_solutions = False
    other.config.rel_gap = 0.0
    for cost in costs(4):
        answer = kept.minimise(cost)
        value = other.solve(kept.model).incumbent_objective
        assert value == pytest.approx(cost @ answer.x, abs=1e-6)
    assert all(row.active for row in kept.model.rows.values())
    assert len(build(made).rows) == made.shape[0]


def test_a_mixed_integer_program_that_presolving_solves_has_its_own_bound():
    fixed = Program(
        sparse.csr_array(np.array([[1.0, 1.0]])), np.array([2.0]), np.array([2.0]), np.ones(2), np.ones(2),
        np.array([True, False]), {},
    )  # fmt: skip
    answer = solver("highs", fixed, 0.0).minimise(np.array([-1.0, -2.0]))
    assert answer.bound == pytest.approx(-3.0) and (answer.x == 1.0).all()


def test_a_mixed_integer_program_is_searched_again_without_presolving():
    made, cost = program(1, 3), costs(1)[0]
    kept = solver("highs", made, 1e-9)
    expected = kept.minimise(cost).bound
    first, second = kept.attempts
    assert second["presolve"] == "off" != first["presolve"]
    kept.attempts = (first | {"time_limit": 0.0},)
    with pytest.raises(SolverFailureError, match="Time limit"):
        kept.minimise(cost)
    kept.attempts = first | {"time_limit": 0.0}, second | {"time_limit": np.inf}
    assert kept.minimise(cost).bound == pytest.approx(expected, abs=1e-6)


def test_an_interrupt_stops_a_search_and_is_passed_on():
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 100, size=(25, 60)).astype(float)
    hard = Program(
        sparse.csr_array(weights), np.full(25, -np.inf), weights.sum(axis=1) / 2.0, np.zeros(60), np.ones(60),
        np.ones(60, bool), {},
    )  # fmt: skip
    kept, done = solver("highs", hard, 0.0), threading.Event()
    kept.highs.setOptionValue("time_limit", 20.0)

    def interrupt():
        if not done.wait(0.3):
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            kept.minimise(-rng.integers(50, 100, size=60).astype(float))
    finally:
        done.set()
        thread.join()
    assert time.monotonic() - started < 10.0


def test_nothing_is_printed(capfd):
    for integers in (0, 3):
        solver("highs", program(2, integers), 0.0).minimise(costs(2)[0])
    assert capfd.readouterr() == ("", "")
