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


def _meanvalue(window: Window, options: Options) -> list[Boxes]:
    from solvers.meanvalue import meanvalue

    return meanvalue(window, options.threads)


def _relational(window: Window, options: Options) -> list[Boxes]:
    from solvers.relational import relational

    return relational(window, options.threads)


def _lp(window: Window, options: Options) -> list[Boxes]:
    from solvers.programs.backend import lp

    return lp(window, options)


def _milp(window: Window, options: Options) -> list[Boxes]:
    from solvers.programs.backend import milp

    return milp(window, options)


def _miqcp(window: Window, options: Options) -> list[Boxes]:
    from solvers.programs.backend import miqcp

    return miqcp(window, options)


_BOUNDERS: dict[str, Callable[[Window, Options], list[Boxes]]] = {
    "ibp": _ibp,
    "meanvalue": _meanvalue,
    "relational": _relational,
    "linear": _linear,
    "crown": _crown,
    "lp": _lp,
    "milp": _milp,
    "miqcp": _miqcp,
}


def bound(backend: str, window: Window, options: Options | None = None) -> list[Boxes]:
    """Boxes after each of the window's fresh steps by this backend; raises KeyError for a name not in BACKENDS."""
    return _BOUNDERS[backend](window, options or Options())
