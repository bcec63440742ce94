"""The best banded Toeplitz strategy for prefix sums."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter

from certify.errors import PrivacyError
from privacy.bandmf.strategy import Strategy


def optimal_toeplitz(steps: int, bands: int) -> Strategy:
    """Banded Toeplitz ``C`` with columns of norm 1 whose noise disturbs the prefix sums least.

    Minimises ``||A C^-1||_F^2 sensitivity(C)^2`` with ``A`` the lower-triangular matrix of ones ([BMS] section 7).
    Participations that lie at least ``bands`` steps apart touch orthogonal columns, so ``k`` of them have sensitivity
    ``sqrt(k) ||c||``: the optimum depends neither on ``k`` nor on the separation, if that is at least ``bands``.

    L-BFGS in float64 with the analytic gradient, ``O(steps * bands)`` time and ``O(steps)`` memory per evaluation.
    Raises `PrivacyError` if ``bands`` does not lie in ``1..steps``.
    """
    if not 1 <= bands <= steps:
        raise PrivacyError(f"bands: found {bands} for {steps} steps; choose a number in 1..{steps}")
    if bands == 1:
        return Strategy.identity(steps)
    k = np.arange(1, bands)
    start = np.cumprod((2 * k - 1) / (2 * k))  # the square root of A, cut to the bands: [1, 1/2, 3/8, ...]
    found = minimize(
        lambda tail: _log_loss_and_gradient(tail, steps),
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, None)] * len(start),  # the first coefficient stays 1: the loss does not depend on the scale
        options={"maxcor": 30, "maxiter": 1000, "maxfun": 2000, "ftol": 1e-16, "gtol": 1e-10},
    )
    c = np.append(1.0, found.x)
    return Strategy.toeplitz(c / np.linalg.norm(c), steps)


def _log_loss_and_gradient(tail: np.ndarray, steps: int) -> tuple[float, np.ndarray]:
    """``log(||c||^2 sum_i (steps - i) B_i^2)`` for ``c = (1, tail)`` and its gradient in ``tail``.

    ``A C^-1`` is Toeplitz with first column ``B = C^-1 1``, which is a recursive filter; ``dB = -C^-1 dC B``.
    """
    c = np.append(1.0, tail)
    with np.errstate(over="ignore", invalid="ignore"):
        first = lfilter([1.0], c, np.ones(steps))
        weighted = np.arange(steps, 0, -1) * first
        error = weighted @ first
        if not np.isfinite(error):
            return np.inf, np.zeros_like(tail)
    adjoint = lfilter([1.0], c, weighted[::-1])[::-1]
    slope = np.array([adjoint[k:] @ first[: steps - k] for k in range(1, len(c))])
    return np.log(c @ c) + np.log(error), 2.0 * tail / (c @ c) - 2.0 * slope / error
