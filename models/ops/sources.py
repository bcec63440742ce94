"""The leaves of a graph: the record's features, a trainable or frozen parameter, a public constant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.ops.base import Op


@dataclass(frozen=True)
class _Leaf(Op):
    size: int

    def features(self, inputs):
        if inputs:
            raise ValueError("a leaf takes no inputs")
        return self.size


@dataclass(frozen=True)
class Input(_Leaf):
    """The features of a record, flattened row-major."""


@dataclass(frozen=True)
class Parameter(_Leaf):
    """Reads the parameter with this ``name``; the same parameter may be read by several nodes."""

    name: str = ""


@dataclass(frozen=True, eq=False)
class Constant(Op):
    """A public constant: frozen weights, scaler statistics.  ``values`` is ``(F,)`` float64."""

    values: np.ndarray

    def __post_init__(self):
        values = np.array(self.values, dtype=np.float64).reshape(-1)
        values.setflags(write=False)
        object.__setattr__(self, "values", values)

    def features(self, inputs):
        if inputs:
            raise ValueError("a leaf takes no inputs")
        return self.values.size
