"""An independent evaluation of a window at a solver's point: does the point describe training at all?"""

from __future__ import annotations

import numpy as np

from models.ops.base import Interval
from solvers.programs.margin import Head, WindowProgram
from solvers.window import Window

#: Arguments are met up to this by a solver's point; a loss that jumps there may take either value.
_NEAR = 1e-6


def replay(window: Window, made: WindowProgram, x: np.ndarray) -> float:
    """How far the parameters in a point ``x`` ``(N,)`` of a mixed-integer program are from training, in record steps.

    Every step is done again from the parameters before it, with the loss's own gradients for the records that ``x``
    keeps and the gradients it gives to those it replaces; the largest difference in any parameter and step is
    returned, in units of what one record can do in that step.  Logistic: up to the height of the triangles.
    """
    head, columns = Head.of(window), made.program.columns
    theta = x[made.theta] * made.unit
    slots = np.unique(np.concatenate([s.batch for s in window.steps]))
    replaced = slots[x[columns["replaced"]] > 0.5]
    worst = 0.0
    for t, step in enumerate(window.steps):
        kept = window.records.filled(step.batch)
        kept = kept[~np.isin(kept, replaced)]
        z = head.inputs[:, kept].T @ theta[t] + head.offset
        targets = window.records.targets[:, kept]
        near = _NEAR * (1.0 + np.abs(z) + np.abs(targets[0]))
        phi = window.loss.gradient_interval(Interval((z - near)[None], (z + near)[None]), targets, 2.0)
        ends = [np.clip(end * head.inputs[:, kept], -window.clip, window.clip) for end in phi]
        attack = window.clip * (x[columns[f"attack {t}"]] - x[columns[f"count {t}"]])
        rate = step.learning_rate / window.normaliser
        rest = (window.contraction * theta[t] - theta[t + 1]) / rate - attack  # what the kept records must add up to
        least, most = np.minimum(*ends).sum(axis=1), np.maximum(*ends).sum(axis=1)
        worst = max(worst, float(np.maximum(least - rest, rest - most).max() / window.clip))
    return worst
