"""An independent evaluation of a window at a solver's point: does the point describe training at all?"""

from __future__ import annotations

import numpy as np

from models.ops.base import Interval
from solvers.gradients import FixedPoint
from solvers.ibp import Plan, gradient_ends
from solvers.programs.steps import WindowProgram
from solvers.window import Window

#: Parameters are met up to this by a solver's point; a loss or unit that jumps there may take either value.
_NEAR = 1e-6


def replay(window: Window, made: WindowProgram, x: np.ndarray) -> float:
    """How far the parameters in a point ``x`` ``(N,)`` of a mixed-integer program are from training, in record steps.

    Every step is done again from the parameters before it, with the model's own gradients for the records that ``x``
    keeps and the gradients it gives to those it replaces; the largest difference in any parameter and step is
    returned, in units of what one record can do in that step.  Logistic: up to the height of the triangles; networks:
    up to their McCormick hulls, unless products are exact.
    """
    plan, columns = Plan(window.graph), made.program.columns
    theta = x[made.theta] * made.unit
    slots = np.unique(np.concatenate([s.batch for s in window.steps]))
    replaced = slots[x[columns["replaced"]] > 0.5]
    worst = 0.0
    for t, step in enumerate(window.steps):
        near = _NEAR * (1.0 + np.abs(theta[t]))
        grid = FixedPoint.make(window.clip, max(1, len(step.batch)))
        ends = gradient_ends(window, plan, step, Interval(theta[t] - near, theta[t] + near), 2.0, grid)
        least, most = (end[:, ~np.isin(step.batch, replaced)].sum(axis=1) / grid.scale for end in ends)
        attack = window.clip * (x[columns[f"attack {t}"]] - x[columns[f"count {t}"]])
        rate = step.learning_rate / window.normaliser
        rest = (window.contraction * theta[t] - theta[t + 1]) / rate - attack  # what the kept records must add up to
        worst = max(worst, float(np.maximum(least - rest, rest - most).max() / window.clip))
    return worst
