"""Strategies: the matrix ``C`` of the noise ``C^-1 Z``, banded, lower-triangular, non-negative."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from certify.errors import PrivacyError

_ROUNDED_UP = 1.0 + 2.0**-40  # more than the rounding errors of the sums below


@dataclass(frozen=True, eq=False)
class Strategy:
    """``C`` by columns: ``columns[i, d] = C[i + d, i]``, float64 ``(steps, bands)``, zero where ``i + d >= steps``.

    Public.  ``coefficients`` ``(bands,)``: the first column where ``C`` is Toeplitz (then column ``i`` is its start,
    cut off at the last row), else None.  ``inverse``: the same for ``C^-1`` where that is banded Toeplitz (then ``C``
    has as many bands as steps), else None.  Entries of ``C`` are non-negative and its diagonal positive.
    """

    columns: np.ndarray
    coefficients: np.ndarray | None = None
    inverse: np.ndarray | None = None

    def __post_init__(self):
        c = self.columns
        if c.ndim != 2 or not np.isfinite(c).all() or (c < 0.0).any() or not (c[:, 0] > 0.0).all():
            raise PrivacyError(
                "strategy: found entries that are negative or not finite, or a zero on the diagonal; C must be "
                "lower-triangular and non-negative with a positive diagonal"
            )
        i, d = np.ogrid[: c.shape[0], : c.shape[1]]
        if (c * (i + d >= len(c))).any():
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

    @classmethod
    def from_matrix(cls, matrix) -> Strategy:
        """A ``C`` of one's own, ``(steps, steps)``; the number of bands is that of its lowest non-zero diagonal."""
        c = np.asarray(matrix, dtype=np.float64)
        if c.ndim != 2 or c.shape[0] != c.shape[1] or np.triu(c, 1).any():
            raise PrivacyError(
                f"strategy: found a matrix of shape {c.shape} that is not square and lower-triangular; C has one row "
                "and one column for every step and zeros above the diagonal"
            )
        rows, cols = np.nonzero(c)
        bands = int((rows - cols).max(initial=0)) + 1
        padded = np.vstack([c, np.zeros((bands - 1, len(c)))])
        i, d = np.ogrid[: len(c), :bands]
        return cls(padded[i + d, i])

    @classmethod
    def banded_inverse(cls, coefficients, steps: int) -> Strategy:
        """The ``C`` whose inverse is lower-triangular Toeplitz with these few ``coefficients`` (BandInvMF).

        The noise is a moving average of ``len(coefficients)`` rows.  ``C`` itself is dense: amplification by b-min-sep
        needs as few bands as the separation and refuses it; balls-in-bins takes any ``C``.
        """
        from scipy.signal import lfilter

        inverse = np.asarray(coefficients, dtype=np.float64)[:steps]
        if not (np.isfinite(inverse).all() and len(inverse) and inverse[0] > 0.0):
            raise PrivacyError(
                f"strategy: found coefficients of the inverse that start with {inverse[:1]} or are not finite; the "
                "first is positive"
            )
        dense = cls.toeplitz(lfilter([1.0], inverse, np.eye(1, steps)[0]), steps)
        return cls(dense.columns, dense.coefficients, inverse)

    def column_normalised(self) -> Strategy:
        """``C`` with every column divided by its norm: equal sensitivity in all steps, a slightly lower error."""
        return Strategy(self.columns / self.column_norms[:, None])

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

    def row(self, i: int) -> np.ndarray:
        """``C[i, i], C[i, i - 1], ...``, ``(bands,)``, zero before the first column."""
        d = np.arange(self.bands)
        return np.where(d <= i, self.columns[np.maximum(i - d, 0), d], 0.0)

    def sensitivity(self, separation: int, participations: int | None = None) -> float:
        """l2 norm of the largest change of ``C G`` by one example of gradient norm 1, rounded up.

        The example takes part at most ``participations`` times (None: as often as fits), at steps that lie at least
        ``separation`` apart.  ``C`` being non-negative, equal unit gradients are worst: the result
        is the largest ``||sum of columns||`` over admissible sets of steps.

        Guarantees:
        * sensitivity is exact for bands up to the separation: columns are orthogonal, and dynamic programming finds
          the heaviest admissible set;
        * sensitivity is exact for non-increasing Toeplitz coefficients: the set 1, 1 + b, 1 + 2b, ... is worst
          (Kalinin & Lampert 2024, Theorem 2);
        * sensitivity is an upper bound otherwise: each column is charged with its heaviest admissible partners
          (Choquette-Choo et al. 2023, multi-epoch).
        """
        if separation < 1 or (participations is not None and participations < 1):
            raise PrivacyError(
                f"separation, participations: found {separation} and {participations}; both are at least 1"
            )
        fits = math.ceil(self.steps / separation)
        count = fits if participations is None else min(participations, fits)
        c = self.coefficients
        if c is not None and (np.diff(c) <= 0.0).all():
            total = np.zeros(self.steps)
            for start in range(0, count * separation, separation):
                total[start : start + len(c)] += c[: self.steps - start]
            return float(np.linalg.norm(total)) * _ROUNDED_UP
        weights = self.column_norms**2
        if separation < self.bands and count > 1:
            later, earlier = self._partners(separation)
            weights = weights + _heaviest(later, separation, count - 1) + _heaviest(earlier, separation, count - 1)
        return math.sqrt(float(_heaviest(weights, separation, count))) * _ROUNDED_UP

    def _partners(self, separation: int) -> tuple[np.ndarray, np.ndarray]:
        """Products of column ``i`` with columns ``i + separation + j`` and ``i - separation - j``."""
        n, bands = self.columns.shape
        later, earlier = np.zeros((2, n, min(bands, n) - separation))
        for j in range(later.shape[1]):
            d = separation + j
            later[: n - d, j] = (self.columns[: n - d, d:] * self.columns[d:, : bands - d]).sum(axis=1)
            earlier[d:, j] = later[: n - d, j]
        return later, earlier

    def squared_errors(self) -> np.ndarray:
        """Variance of the noise in every prefix sum, ``(steps,)``, for noise multiplier and clip norm 1.

        The squared row norms of ``A C^-1``, ``A`` the lower-triangular matrix of ones; times ``noise_multiplier^2
        clip^2``.  The sum is ``||A C^-1||_F^2``.  ``O(steps * bands)`` for Toeplitz, else ``O(steps * bands^2)``.
        """
        if self.coefficients is None:
            return self._squared_errors_by_step()
        from scipy.signal import lfilter

        ones = np.ones(self.steps)
        if self.inverse is not None:
            return np.cumsum(lfilter(self.inverse, [1.0], ones) ** 2)
        return np.cumsum(lfilter([1.0], self.coefficients, ones) ** 2)

    def _squared_errors_by_step(self) -> np.ndarray:
        """Covariances of the prefix sum ``S`` and the last ``bands - 1`` rows ``w`` of the noise, step by step."""
        past = self.bands - 1
        w_w, s_w, s_s = np.zeros((past, past)), np.zeros(past), 0.0
        found = np.empty(self.steps)
        for i in range(self.steps):
            # w_i = z_i / C[i, i] - feedback @ (w_{i-1}, w_{i-2}, ...); rows before the first are zero
            feedback = self.row(i)[1:] / self.columns[i, 0]
            new_w = -w_w @ feedback
            new_new = self.columns[i, 0] ** -2 - new_w @ feedback
            new_s = -s_w @ feedback
            found[i] = s_s = s_s + 2.0 * new_s + new_new
            if past:
                s_w = np.append(new_s + new_new, (s_w + new_w)[:-1])
                w_w[1:, 1:] = w_w[:-1, :-1].copy()
                w_w[0, 0] = new_new
                w_w[0, 1:] = w_w[1:, 0] = new_w[:-1]
        return found


def _heaviest(weights: np.ndarray, separation: int, count: int) -> np.ndarray:
    """Largest sum of at most ``count`` non-negative weights that lie ``separation`` apart, over the last axis."""
    best = np.zeros_like(weights)
    shifted = np.zeros_like(weights)
    for _ in range(min(count, math.ceil(weights.shape[-1] / separation))):
        shifted[..., : max(0, weights.shape[-1] - separation)] = best[..., separation:]
        best = np.maximum.accumulate((weights + shifted)[..., ::-1], axis=-1)[..., ::-1]
    return best[..., 0] if weights.shape[-1] else best.sum(axis=-1)
