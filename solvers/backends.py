"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable

from solvers.ibp import ibp
from solvers.window import Boxes, Window

_BOUNDERS: dict[str, Callable[[Window, int], Boxes]] = {"ibp": ibp}


def bound(backend: str, window: Window, threads: int = 1) -> Boxes:
    """Boxes after the window's steps by this backend; raises KeyError for a name not in BACKENDS."""
    return _BOUNDERS[backend](window, threads)
