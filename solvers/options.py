"""How a backend is to work on a window; public."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """``threads`` do not change a result, everything else may.

    ``solver``: of the program backends (lp, milp, miqcp).  ``tau``: the public tolerance, in parameter units, within
    which every bound from a solver must lie (see `solvers.capabilities`); None: the backend's default.
    ``force``: go on with programs whose estimated size makes them hopeless.
    """

    threads: int = 1
    solver: str = "highs"
    tau: float | None = None
    force: bool = False
