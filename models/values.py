"""The values of ONNX tensors while a graph is walked, and the registry of the rules that compute them.

Every tensor is one of

* ``Known`` - an array that is known when the file is read (shapes, integer tensors, scalar constants);
* ``Tensor`` - an index array over the features of one IR node.  Reshape, Transpose, Slice, Concat of views and so on
  only rearrange the index; a Gather appears when an operator needs the features in that order;
* ``Condition`` - a comparison, waiting for the Where that uses it.

The record axis of a per-record tensor is ``axis``; the index array has the shape of the ONNX tensor with that axis
divided by the number of records (it is 1, or ``T`` after ``(N, T, D)`` was reshaped to ``(N*T, D)``).  A file with a
dynamic number of records is walked with a prime stand-in; in a file for exactly one record no axis is special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper

from models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from models.builder import Builder

ML = "ai.onnx.ml"


def feature_shape(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """``shape`` without the record axis, or with it when a record has several rows there."""
    if axis is None or shape[axis] != 1:
        return shape
    return shape[:axis] + shape[axis + 1 :]


@dataclass(frozen=True, eq=False)
class Known:
    """A number or shape known when the file is read.

    ``counts`` marks values computed from the number of records, ``derived`` values computed from float initializers.
    """

    name: str
    array: np.ndarray
    counts: bool = False
    derived: bool = False


@dataclass(frozen=True, eq=False)
class Tensor:
    """Feature ``index[...]`` of IR node ``node``; ``-1`` is zero.  ``axis`` is the record axis, if there is one.

    ``sole`` is false when another consumer reads the value on its way here.  Inside a rule ``name`` is empty.
    """

    name: str
    node: int
    index: np.ndarray
    axis: int | None
    shared: bool
    sole: bool = True

    @property
    def rank(self) -> int:
        return self.index.ndim

    @property
    def feature_shape(self) -> tuple[int, ...]:
        return feature_shape(self.index.shape, self.axis)


@dataclass(frozen=True, eq=False)
class Condition:
    """``value > threshold`` elementwise, or its negation."""

    value: Tensor
    threshold: float
    negated: bool = False


@dataclass(frozen=True)
class Missing:
    """The result of a node that could not be read."""


Value = Known | Tensor | Condition | Missing


@dataclass(eq=False)
class Leaf:
    """A stored array that became an IR leaf; ``affine`` is set when an affine layer uses it."""

    name: str
    values: np.ndarray
    dtype: np.dtype
    initializer: bool
    derived: bool = False
    affine: bool = False

    @property
    def trains(self) -> bool:
        return self.affine and not self.derived

    @property
    def is_parameter(self) -> bool:
        return self.trains or (self.initializer and self.values.size > 1)


@dataclass(frozen=True)
class Problem:
    """An ONNX node this product does not certify, and why."""

    name: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f'node "{self.name}" ({self.operator}): {self.reason}'


@dataclass(frozen=True)
class Step:
    """An ONNX node that was walked; ``nodes`` are the positions of the IR nodes it added."""

    name: str
    operator: str
    outputs: tuple[str, ...]
    nodes: range


@dataclass(frozen=True, eq=False)
class Call:
    """One ONNX node with its operands: what a rule receives."""

    name: str
    proto: onnx.NodeProto
    inputs: tuple[Value | None, ...]
    opset: int

    @property
    def operator(self) -> str:
        return self.proto.op_type

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, strings decoded, or ``default``; real attributes are float32 numbers in ONNX."""
        for attribute in self.proto.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                return value.decode() if isinstance(value, bytes) else value
        return float(np.float32(default)) if isinstance(default, float) else default

    def input(self, position: int) -> Value | None:
        """An operand, or None when it is left out."""
        return self.inputs[position] if position < len(self.inputs) else None


Rule = Callable[["Builder", Call], Value | Sequence[Value]]
RULES: dict[tuple[str, str], Rule] = {}


def lowers(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Registers a rule for ONNX operators."""

    def register(rule: Rule) -> Rule:
        for operator in operators:
            RULES[domain, operator] = rule
        return rule

    return register


def refuse(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(reason)


def kind_name(kind: int) -> str:
    """Name of an ONNX element type."""
    names = {number: name for name, number in onnx.TensorProto.DataType.items()}
    return names.get(kind, f"of unknown type {kind}").lower()


def domain_of(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain
