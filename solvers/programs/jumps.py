"""Clipped gradients that are one constant below a kink and another above it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.losses import Absolute, Hinge, Loss


class Jumps(NamedTuple):
    """The argument ``kink`` (see `pieces`) between the gradients ``below`` and ``above``, ``(P, n)`` each."""

    kink: float
    below: np.ndarray
    above: np.ndarray


def jumps(loss: Loss, targets: np.ndarray, inputs: np.ndarray, clip: float) -> Jumps | None:
    """The two gradients of each record, ``inputs`` ``(P, n)``, within the clip; None for a loss that is continuous."""
    if isinstance(loss, Hinge):
        return Jumps(1.0, np.clip(-targets * inputs, -clip, clip), np.zeros_like(inputs))
    if isinstance(loss, Absolute):
        above = np.clip(inputs, -clip, clip)
        return Jumps(0.0, -above, above)
    return None
