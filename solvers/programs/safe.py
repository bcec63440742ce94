"""Lower bounds of linear programs that hold whatever the solver answered: weak duality, rounded outward.

For any ``y`` and every ``x`` with ``L <= A x <= U``, ``l <= x <= u``:

    c x  =  y (A x) + (c - A' y) x  >=  sum_i (L_i y_i+ - U_i y_i-) + sum_j min(r_j l_j, r_j u_j),    r = c - A' y

[Neumaier, Shcherbina 2004, "Safe bounds in linear and mixed-integer linear programming"].  Everything is computed from
the program's own arrays, so a wrong, sloppy or wrongly signed ``y`` costs width and never soundness.
"""

from __future__ import annotations

import math

import numpy as np

from models.ops.base import ABSOLUTE, RELATIVE
from solvers.programs.program import Program


def safe_lower_bound(program: Program, cost: np.ndarray, dual: np.ndarray) -> float:
    """A number not above ``cost @ x`` for every point ``x`` of the program's relaxation, in exact arithmetic.

    ``cost`` ``(N,)``, ``dual`` ``(M,)``: the multipliers of the rows, any numbers.
    """
    y = np.where(np.isfinite(dual), dual, 0.0)
    # A multiplier of an end that does not exist helps nothing.
    y = np.where((y > 0.0) & np.isinf(program.row_lower) | (y < 0.0) & np.isinf(program.row_upper), 0.0, y)
    ends = np.where(y > 0.0, program.row_lower, program.row_upper)
    rows = np.where(y == 0.0, 0.0, ends) * y

    transposed = program.matrix.T
    reduced = cost - transposed @ y
    terms = np.diff(program.matrix.tocsc().indptr) + 2
    error = terms * RELATIVE * (np.abs(cost) + abs(transposed) @ np.abs(y)) + ABSOLUTE
    low, high = reduced - error, reduced + error
    columns = np.minimum(
        np.minimum(low * program.lower, low * program.upper), np.minimum(high * program.lower, high * program.upper)
    )
    both = np.concatenate([rows, columns])
    # Each term is one correctly rounded product of numbers that are one rounding away from `low`, `high`.
    size = math.fsum(np.abs(both)) * (1.0 + RELATIVE)
    return (math.fsum(both) - 4.0 * RELATIVE * size) - len(both) * ABSOLUTE


__all__ = ["safe_lower_bound"]
