"""What is being certified: ONNX files read into a small graph, and torch builders that export to ONNX.

``import models`` loads nothing heavy; names below load their module when they are first used.
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    "read": "models.reader",
    "inspect": "models.reader",
    "digest": "models.reader",
    "ModelReport": "models.reader",
    "supported_operators": "models.reader",
    "Graph": "models.ir",
    "Node": "models.ir",
    "ParameterInfo": "models.ir",
    "ModelError": "models.errors",
    "UnsupportedModelError": "models.errors",
    "InvalidModelError": "models.errors",
    "DisagreementError": "models.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOMES])
