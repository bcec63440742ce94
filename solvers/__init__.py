"""Bounds for a training window or a query; every backend is a function from a window to boxes."""

from importlib import import_module

_PUBLIC = {
    "BACKENDS": "solvers.capabilities",
    "BackendCapabilities": "solvers.capabilities",
    "Boxes": "solvers.window",
    "Options": "solvers.options",
    "Records": "solvers.window",
    "Step": "solvers.window",
    "Window": "solvers.window",
    "bound": "solvers.backends",
    "make_records": "solvers.ibp",
    "output_bounds": "solvers.ibp",
    "public_reach": "solvers.ibp",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'solvers' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__():
    return sorted(__all__)
