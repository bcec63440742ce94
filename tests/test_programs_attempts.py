"""A linear program that one algorithm does not finish is given to the other one."""

import numpy as np
import pytest
from scipy import sparse

from solvers.errors import SolverFailureError
from solvers.programs import model
from solvers.programs.bounds import least
from solvers.programs.program import Program


def program(columns: int = 6, rows: int = 8) -> Program:
    """A bounded program that needs pivots."""
    rng = np.random.default_rng(0)
    matrix = sparse.csr_array(rng.uniform(0.1, 1.0, size=(rows, columns)))
    ends = np.full(rows, -np.inf), np.ones(rows)
    return Program(matrix, *ends, np.zeros(columns), np.full(columns, 10.0), np.zeros(columns, bool), {})


@pytest.mark.parametrize("most", [0, 2000])
def test_another_algorithm_answers_where_one_does_not_finish(monkeypatch, most):
    monkeypatch.setattr(model, "_SIMPLEX_ROWS", most)
    cost = -np.arange(1.0, 7.0)
    expected = least(model.solver("highs", program(), 0.0), cost, 1e-6)
    kept = model.solver("highs", program(), 0.0)
    first, second = kept.attempts
    assert {first["solver"], second["solver"]} == {"simplex", "ipm"}
    none = {"presolve": "off", "simplex_iteration_limit": 0, "ipm_iteration_limit": 0}
    again = {"simplex_iteration_limit": 2**31 - 1, "ipm_iteration_limit": 2**31 - 1}
    kept.attempts = (first | none, second | again)
    assert least(kept, cost, 1e-6) == pytest.approx(expected, abs=1e-6)
    kept.attempts = (first | none,)
    with pytest.raises(SolverFailureError, match="no usable bound"):
        least(kept, cost, 1e-6)
