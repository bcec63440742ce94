"""How a backend is to work on a window; public."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from solvers.window import Boxes


@dataclass(frozen=True)
class Options:
    """``threads`` do not change a result, everything else may.

    ``solver``: of the program backends (lp, milp, miqcp).  ``tau``: the public tolerance, in parameter units, within
    which every bound from a solver must lie (see `solvers.capabilities`); None: the backend's default.
    ``force``: go on with programs whose estimated size makes them hopeless.  ``progress``: is called by backends that
    take long, with the boxes after every step but a window's last.
    """

    threads: int = 1
    solver: str = "highs"
    tau: float | None = None
    force: bool = False
    progress: Callable[[Boxes], None] | None = field(default=None, compare=False)
