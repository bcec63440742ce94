"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable

from solvers.ibp import ibp
from solvers.options import Options
from solvers.window import Boxes, Window


def _ibp(window: Window, options: Options) -> list[Boxes]:
    return ibp(window, options.threads)


def _linear(window: Window, options: Options) -> list[Boxes]:
    from solvers.linear import linear

    return linear(window, options.threads)


def _crown(window: Window, options: Options) -> list[Boxes]:
    from solvers.linear import crown

    return crown(window, options.threads)


_BOUNDERS: dict[str, Callable[[Window, Options], list[Boxes]]] = {
    "ibp": _ibp,
    "linear": _linear,
    "crown": _crown,
}


def bound(backend: str, window: Window, options: Options | None = None) -> list[Boxes]:
    """Boxes after each of the window's fresh steps by this backend; raises KeyError for a name not in BACKENDS."""
    return _BOUNDERS[backend](window, options or Options())
