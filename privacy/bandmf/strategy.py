"""Strategies: the matrix ``C`` of the noise ``C^-1 Z``, banded, lower-triangular, non-negative."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from certify.errors import PrivacyError


@dataclass(frozen=True, eq=False)
class Strategy:
    """``C`` by columns: ``columns[i, d] = C[i + d, i]``, float64 ``(steps, bands)``, zero where ``i + d >= steps``.

    Public.  ``coefficients`` ``(bands,)``: the first column where ``C`` is Toeplitz (then column ``i`` is its start,
    cut off at the last row), else None.  Entries are non-negative and the diagonal positive.
    """

    columns: np.ndarray
    coefficients: np.ndarray | None = None

    def __post_init__(self):
        c = self.columns
        if c.ndim != 2 or not np.isfinite(c).all() or (c < 0.0).any() or not (c[:, 0] > 0.0).all():
            raise PrivacyError(
                "strategy: found entries that are negative or not finite, or a zero on the diagonal; C must be "
                "lower-triangular and non-negative with a positive diagonal"
            )
        i, d = np.ogrid[: c.shape[0], : c.shape[1]]
        if c[i + d >= len(c)].any():
            raise PrivacyError("strategy: found entries below the last row; columns[i, d] is zero for i + d >= steps")

    @classmethod
    def toeplitz(cls, coefficients, steps: int) -> Strategy:
        """Lower-triangular Toeplitz with this first column (cut to ``steps`` entries)."""
        c = np.asarray(coefficients, dtype=np.float64)[:steps]
        i, d = np.ogrid[:steps, : len(c)]
        return cls(np.where(i + d < steps, c[None, :], 0.0), c)

    @classmethod
    def identity(cls, steps: int) -> Strategy:
        """DP-SGD: independent noise."""
        return cls.toeplitz([1.0], steps)

    @property
    def steps(self) -> int:
        return self.columns.shape[0]

    @property
    def bands(self) -> int:
        return self.columns.shape[1]

    @cached_property
    def column_norms(self) -> np.ndarray:
        """l2 norm of every column, ``(steps,)``."""
        return np.sqrt((self.columns**2).sum(axis=1))
