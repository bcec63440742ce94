"""The graph IR: what is being certified.

A graph is a tuple of frozen nodes in topological order.  Everything is flattened: a node's value has ``F`` features
(row-major), the record axis is last and appears nowhere in the graph.  Reshapes therefore vanish, transposes and
broadcasts are Gathers, and a model is a short list of operators whose rules live in ``models.ops``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

import networkx as nx
import numpy as np

from models.errors import ModelError
from models.ops import Affine, Constant, Input, Op, Parameter


@dataclass(frozen=True)
class Node:
    """One operator applied to earlier nodes.

    ``name`` is unique: the ONNX tensor it computes, or that name with a suffix for helper nodes.
    ``inputs`` are positions of earlier nodes.  ``shape`` is the feature shape (record axis removed), for display.
    ``source`` says which ONNX node it came from, for messages.
    """

    name: str
    op: Op
    inputs: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True, eq=False)
class ParameterInfo:
    """A weight or bias of the model: name (ONNX initializer), shape, initial value (float64), and whether it trains.

    ``affine`` is true for weights and biases of affine layers, which train by default.
    """

    name: str
    value: np.ndarray
    trainable: bool
    affine: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


@dataclass(frozen=True, eq=False)
class Graph:
    """A model: nodes in topological order, the output node, the shape of one record, the parameters in order.

    Guarantees:
      * every input of a node stands before it, and its operator accepts their sizes;
      * ``evaluate`` of a graph that was read from a file agrees with onnxruntime (checked when it is read).
    """

    nodes: tuple[Node, ...]
    output: int
    input_shape: tuple[int, ...]
    parameters: tuple[ParameterInfo, ...]
    output_shape: tuple[int, ...] = ()
    #: Number of features of every node.
    sizes: tuple[int, ...] = field(init=False, repr=False, default=())

    def __post_init__(self):
        sizes: list[int] = []
        names = {p.name: p for p in self.parameters}
        if len({n.name for n in self.nodes}) != len(self.nodes) or len(names) != len(self.parameters):
            raise ModelError("two nodes or two parameters of the graph have the same name")
        for position, node in enumerate(self.nodes):
            if any(not 0 <= i < position for i in node.inputs):
                raise ModelError(f"node {node.name!r} reads a node that does not stand before it")
            if isinstance(node.op, Parameter) and (
                node.op.name not in names or names[node.op.name].value.size != node.op.size
            ):
                raise ModelError(f"node {node.name!r} reads parameter {node.op.name!r}, which does not fit")
            try:
                sizes.append(node.op.features([sizes[i] for i in node.inputs]))
            except ValueError as error:
                raise ModelError(f"node {node.name!r} ({node.op.title}): {error}") from error
        object.__setattr__(self, "sizes", tuple(sizes))

    @cached_property
    def per_record(self) -> tuple[bool, ...]:
        """Which nodes differ from record to record (the others are shared)."""
        flags: list[bool] = []
        for node in self.nodes:
            flags.append(isinstance(node.op, Input) or any(flags[i] for i in node.inputs))
        return tuple(flags)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all that the graph is, every value of its parameters, constants and indices included."""
        total = hashlib.sha256()
        for part in _parts((self.nodes, self.output, self.input_shape, self.parameters)):
            total.update(part)
        return total.hexdigest()

    @property
    def trainable(self) -> tuple[ParameterInfo, ...]:
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def outputs(self) -> int:
        """Number of output features of one record."""
        return self.sizes[self.output]

    @property
    def input_features(self) -> int:
        return int(np.prod(self.input_shape, dtype=int))

    def initial(self) -> np.ndarray:
        """Initial trainable parameters as one vector ``(P,)``, row-major in the order of ``trainable``."""
        return np.concatenate([p.value.ravel() for p in self.trainable] or [np.zeros(0)])

    def split(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of concatenation: a vector ``(P,)`` as arrays by parameter name."""
        parts, start = {}, 0
        for p in self.trainable:
            parts[p.name] = np.asarray(theta[start : start + p.value.size]).reshape(p.shape)
            start += p.value.size
        return parts

    def join(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Arrays by name as one vector ``(P,)``; every trainable parameter must be there with its shape."""
        for p in self.trainable:
            if p.name not in parts or np.shape(parts[p.name]) != p.shape:
                found = np.shape(parts[p.name]) if p.name in parts else "nothing"
                raise ModelError(f"parameter {p.name!r} needs shape {p.shape}, found {found}")
        return np.concatenate([np.asarray(parts[p.name], dtype=np.float64).ravel() for p in self.trainable])

    def with_trainable(
        self, patterns: Sequence[str] | None = None, frozen: Sequence[str] = ()
    ) -> Graph:
        """Choose trainable parameters by shell patterns (default: weights and biases of affine layers).

        Raises ModelError for a pattern that matches nothing, or when nothing is left to train.
        """
        names = [p.name for p in self.parameters]
        for pattern in [*(patterns or ()), *frozen]:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ModelError(f"pattern {pattern!r} matches no parameter; there are: {', '.join(names)}")

        def chosen(p: ParameterInfo) -> bool:
            wanted = p.affine if patterns is None else any(fnmatchcase(p.name, q) for q in patterns)
            return wanted and not any(fnmatchcase(p.name, q) for q in frozen)

        parameters = tuple(replace(p, trainable=chosen(p)) for p in self.parameters)
        if not any(p.trainable for p in parameters):
            raise ModelError(f"no trainable parameter is left; there are: {', '.join(names) or 'none'}")
        return replace(self, parameters=parameters)

    def with_products(self, products: str) -> Graph:
        """The same graph with natural or midpoint-radius interval products in its affine maps."""
        nodes = tuple(
            replace(n, op=replace(n.op, products=products)) if isinstance(n.op, Affine) else n
            for n in self.nodes
        )
        return replace(self, nodes=nodes)

    def networkx(self) -> nx.DiGraph:
        """Directed graph over node positions with the nodes as attributes, for order, reachability and drawing."""
        graph = nx.DiGraph()
        for position, node in enumerate(self.nodes):
            graph.add_node(position, node=node)
            graph.add_edges_from((i, position) for i in node.inputs)
        return graph

    @cached_property
    def needed(self) -> frozenset[int]:
        """Positions that the output depends on."""
        return frozenset(nx.ancestors(self.networkx(), self.output) | {self.output})

    def evaluate(
        self, features: np.ndarray, theta: np.ndarray | None = None, keep: bool = False
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Model output ``(n, O)`` float64 for ``features`` ``(n, *input_shape)`` at ``theta`` (default initial).

        With ``keep`` every computed node's value by name, each ``(n, F)`` or ``(1, F)`` when shared.
        """
        values = self.forward(self.flatten(features), self.initial() if theta is None else theta)
        if keep:
            return {self.nodes[i].name: v.T for i, v in values.items()}
        records = len(features)
        return np.array(np.broadcast_to(values[self.output], (self.outputs, records)).T)

    def flatten(self, features: np.ndarray) -> np.ndarray:
        """``(n, *input_shape)`` as ``(F, n)`` float64, the layout of the operators."""
        features = np.asarray(features, dtype=np.float64)
        if features.shape[1:] != self.input_shape and features[:1].size != self.input_features * len(features[:1]):
            raise ModelError(
                f"records have shape {features.shape[1:]}, the model wants {self.input_shape}"
            )
        return np.ascontiguousarray(features.reshape(len(features), -1).T)

    def forward(self, x: np.ndarray, theta: np.ndarray) -> dict[int, np.ndarray]:
        """Values of all needed nodes by position; ``x`` is ``(F, n)``."""
        parts = self.values(theta)
        values: dict[int, np.ndarray] = {}
        for position, node in enumerate(self.nodes):
            if position not in self.needed:
                continue
            if isinstance(node.op, Input):
                values[position] = x
            elif isinstance(node.op, Constant):
                values[position] = node.op.values[:, None]
            elif isinstance(node.op, Parameter):
                values[position] = parts[node.op.name]
            else:
                values[position] = node.op.forward([values[i] for i in node.inputs])
        return values

    def values(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """Every parameter, trained or frozen, as a column ``(F, 1)``."""
        trained = self.split(theta)
        return {p.name: trained.get(p.name, p.value).reshape(-1, 1) for p in self.parameters}

    def describe(self) -> list[tuple[str, str, str, str]]:
        """Rows (name, operator, feature shape, inputs) of the needed nodes, for tables."""
        return [
            (n.name, n.op.title, "x".join(map(str, n.shape)), ", ".join(self.nodes[i].name for i in n.inputs))
            for position, n in enumerate(self.nodes)
            if position in self.needed
        ]


def _parts(value) -> Iterator[bytes | memoryview]:
    """Bytes that tell values apart; arrays in full."""
    if isinstance(value, np.ndarray):
        yield f"array {value.dtype.str} {value.shape} ".encode()
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    elif is_dataclass(value):
        yield f"{type(value).__name__} ".encode()
        yield from _parts(tuple(getattr(value, f.name) for f in fields(value)))
    elif isinstance(value, tuple):
        yield f"{len(value)} of ".encode()
        for part in value:
            yield from _parts(part)
    elif isinstance(value, str | int | float | np.generic):
        yield f"{value!r} ".encode()
    else:
        raise TypeError(f"{type(value).__name__} has no digest")


__all__ = ["Graph", "Node", "ParameterInfo"]
