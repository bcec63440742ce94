"""A linear, mixed-integer or bilinear program as a value: arrays only, no solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import sparse


class Products(NamedTuple):
    """Terms ``value x[first] x[second]`` of rows: three int64 arrays and a float64 one, ``(Q,)`` each."""

    row: np.ndarray
    first: np.ndarray
    second: np.ndarray
    value: np.ndarray

    @classmethod
    def none(cls) -> Products:
        return cls(*(np.zeros(0, np.int64) for _ in range(3)), np.zeros(0))


@dataclass(frozen=True, eq=False)
class Program:
    """The points ``x`` with ``row_lower <= matrix x + products <= row_upper``, ``lower <= x <= upper``, some integer.

    ``matrix`` ``(M, N)`` CSR float64; ends of rows may be infinite, ends of columns are finite: dual bounds need that.
    ``integer`` ``(N,)`` bool.  ``columns``: the names of the blocks of columns, each with its range of indices, for
    reports.  ``products``: bilinear terms of the rows.
    """

    matrix: sparse.csr_array
    row_lower: np.ndarray
    row_upper: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    integer: np.ndarray
    columns: dict[str, range]
    products: Products = Products.none()

    @property
    def kind(self) -> str:
        """What a solver has to be able to do: one of `solvers.discovery.KINDS`."""
        if len(self.products.row):
            return "miqcp"
        return "milp" if self.integer.any() else "lp"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrix.shape

    def violations(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By how much ``x`` ``(N,)`` lies outside each row ``(M,)`` and each column ``(N,)``; 0 for those it meets."""
        row, first, second, value = self.products
        rows = self.matrix @ x + np.bincount(row, value * x[first] * x[second], minlength=len(self.row_lower))
        outside = np.maximum(self.row_lower - rows, rows - self.row_upper)
        return np.maximum(outside, 0.0), np.maximum(np.maximum(self.lower - x, x - self.upper), 0.0)

    def residual(self, x: np.ndarray) -> float:
        """The largest violation of a row, a column or integrality by ``x`` ``(N,)``: 0 for a point of the program."""
        fraction = np.abs(x - np.round(x))[self.integer]
        return max(float(part.max(initial=0.0)) for part in (*self.violations(x), fraction))


class Assembly:
    """Collects blocks of columns, rows and entries, and makes a `Program` of them.

    Columns and rows may be left out ``where`` false: their index is -1, and entries in them are dropped.
    """

    def __init__(self):
        self._columns: dict[str, range] = {}
        self._lower, self._upper, self._integer = [], [], []
        self._row_lower, self._row_upper = [], []
        self._entries, self._products = [], []
        self._width = self._height = 0

    def columns(
        self, name: str, lower: np.ndarray, upper: np.ndarray, integer: bool = False, where: np.ndarray | bool = True
    ) -> np.ndarray:
        """A block of columns with these ends; their indices in the shape of ``lower``."""
        where = np.broadcast_to(where, lower.shape)
        places = np.full(lower.shape, -1)
        block = range(self._width, self._width + int(where.sum()))
        places[where] = block
        self._columns[name] = block
        self._lower.append(lower[where])
        self._upper.append(upper[where])
        self._integer.append(np.full(len(block), integer))
        self._width = block.stop
        return places

    def rows(
        self, lower: np.ndarray | float, upper: np.ndarray | float, where: np.ndarray | bool = True
    ) -> np.ndarray:
        """A block of rows with these ends; their indices in the common shape."""
        lower, upper, where = np.broadcast_arrays(lower, upper, where)
        places = np.full(lower.shape, -1)
        start, self._height = self._height, self._height + int(where.sum())
        places[where] = np.arange(start, self._height)
        self._row_lower.append(lower[where].astype(float))
        self._row_upper.append(upper[where].astype(float))
        return places

    def entries(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray | float) -> None:
        """Coefficients, broadcast against each other; no place may be given twice."""
        rows, columns, values = np.broadcast_arrays(rows, columns, values)
        used = (rows >= 0) & (columns >= 0) & (values != 0.0)
        self._entries.append((rows[used], columns[used], values[used]))

    def products(self, rows: np.ndarray, first: np.ndarray, second: np.ndarray, values: np.ndarray | float) -> None:
        """Bilinear terms, broadcast against each other."""
        rows, first, second, values = np.broadcast_arrays(rows, first, second, values)
        used = (rows >= 0) & (first >= 0) & (second >= 0)
        self._products.append((rows[used], first[used], second[used], values[used]))

    def program(self) -> Program:
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        shape = (self._height, self._width)
        matrix = sparse.csr_array((values, (rows, columns)), shape=shape)
        ends = (np.concatenate(part) for part in (self._row_lower, self._row_upper, self._lower, self._upper))
        products = Products(*(np.concatenate(parts) for parts in zip(Products.none(), *self._products, strict=True)))
        return Program(matrix, *ends, np.concatenate(self._integer), self._columns, products)
