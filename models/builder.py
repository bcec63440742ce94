"""The IR under construction: nodes, views of their features, broadcasting, and the bookkeeping of stored arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from models.errors import InvalidModelError
from models.ir import Graph, Node, ParameterInfo
from models.ops import Constant, Gather, Input, Op, Parameter
from models.values import Known, Leaf, Tensor, Value, feature_shape, refuse

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(eq=False)
class Builder:
    """The IR under construction.  ``records`` is the number of records every shape is computed for."""

    records: int
    dynamic: bool
    opsets: dict[str, int]
    uses: Counter[str]
    unties: bool = False
    nodes: list[Node] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    shared: list[bool] = field(default_factory=list)
    leaves: dict[int, Leaf] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    #: What a user should know about a parameter: its name and a sentence.
    notes: list[tuple[str, str]] = field(default_factory=list)
    grouped: set[int] = field(default_factory=set)
    #: Name of the ONNX tensor and of the ONNX node being read.
    output: str = ""
    source: str = ""
    _names: set[str] = field(default_factory=set)
    _cache: dict[Any, int] = field(default_factory=dict)

    # -- nodes ---------------------------------------------------------------------------------------------

    def add(self, op: Op, inputs: Sequence[int] = (), shape: Sequence[int] = (), name: str = "") -> int:
        """Appends a node; its name gets a suffix when it is taken."""
        size = op.features([self.sizes[i] for i in inputs])
        name = self._unique(name or f"{self.output}/{op.title.lower()}")
        self.nodes.append(Node(name, op, tuple(inputs), tuple(shape) or (size,), self.source))
        self.sizes.append(size)
        shared = not isinstance(op, Input) and all(self.shared[i] for i in inputs)
        self.shared.append(shared)
        return len(self.nodes) - 1

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}:{count}"
        self._names.add(candidate)
        return candidate

    def rename(self, node: int, name: str) -> None:
        """Gives the node that holds exactly an ONNX tensor that tensor's name."""
        if name and name not in self._names:
            self._names.add(name)
            self.nodes[node] = replace(self.nodes[node], name=name)

    # -- values --------------------------------------------------------------------------------------------

    def result(self, node: int, shape: Sequence[int], axis: int | None) -> Tensor:
        """All features of ``node`` in row-major order of ``shape``."""
        index = np.arange(self.sizes[node], dtype=np.int64).reshape(tuple(shape))
        return Tensor("", node, index, axis, self.shared[node])

    def view(self, tensor: Tensor, index: np.ndarray, axis: int | None) -> Tensor:
        """Rearranged features of the same node."""
        sole = self.is_sole(tensor)
        return replace(tensor, name="", index=np.ascontiguousarray(index), axis=axis, sole=sole)

    def is_sole(self, tensor: Tensor) -> bool:
        """Nothing else reads this value."""
        return tensor.sole and self.uses[tensor.name] <= 1

    def features(self, tensor: Tensor, index: np.ndarray | None = None, shape: Sequence[int] = ()) -> int:
        """The node that holds these features of the tensor in row-major order (a Gather unless that is all of it)."""
        whole = index is None
        index = tensor.index if index is None else index
        flat = index.ravel()
        if flat.size == self.sizes[tensor.node] and np.array_equal(flat, np.arange(flat.size)):
            return tensor.node
        key = (tensor.node, flat.tobytes())
        if key not in self._cache:
            shape = shape or (tensor.feature_shape if whole else index.shape)
            name = tensor.name or self.output
            name = name if whole and tensor.name and name not in self._names else f"{name}/gather"
            op = Gather(flat, self.sizes[tensor.node])
            self._cache[key] = self.add(op, [tensor.node], shape, name)
        return self._cache[key]

    def leaf(self, name: str, array: np.ndarray, initializer: bool, derived: bool = False) -> Tensor:
        """A stored float array as a shared tensor."""
        if array.dtype.kind == "f" and array.dtype not in FLOATS:
            raise refuse(f"tensor {name!r} is {array.dtype}; float32 and float64 are read")
        if array.dtype.kind not in "fiub":
            raise refuse(f"tensor {name!r} holds {array.dtype}, not numbers")
        if array.size == 0:
            raise refuse(f"tensor {name!r} is empty")
        with np.errstate(invalid="ignore"):
            values = array.astype(np.float64)
        if not np.isfinite(values).all():
            raise InvalidModelError(f"tensor {name!r} holds values that are not finite")
        node = self.add(Constant(values), (), array.shape, name)
        self.leaves[node] = Leaf(self.nodes[node].name, values, array.dtype, initializer, derived)
        index = np.arange(array.size, dtype=np.int64).reshape(array.shape)
        return Tensor(name, node, index, None, True)

    def tensor(self, value: Value | None) -> Tensor:
        """An operand of arithmetic; a known number becomes a leaf."""
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, Known):
            raise refuse("an operand is missing or is a comparison, not a number")
        if value.counts:
            raise refuse("uses the number of records as a number")
        key = ("known", value.name)
        if key not in self._cache:
            self._cache[key] = self.leaf(value.name, value.array, False, value.derived).node
        node = self._cache[key]
        index = np.arange(self.sizes[node], dtype=np.int64).reshape(value.array.shape)
        return Tensor(value.name, node, index, None, True)

    def is_leaf(self, value: Value | None) -> bool:
        return isinstance(value, Tensor) and value.node in self.leaves

    def numbers(self, value: Value | None, what: str) -> np.ndarray:
        """The content of a stored or known value, in its own dtype; refuses anything computed from data."""
        if isinstance(value, Known):
            return value.array
        if self.is_leaf(value):
            leaf = self.leaves[value.node]
            padded = np.append(leaf.values.ravel(), 0.0)
            return padded[value.index].astype(leaf.dtype)
        raise refuse(f"{what} must be a constant of the file")

    def known(self, value: Value | None, what: str) -> np.ndarray:
        """Content of a value that steers a layout (axes, shapes, indices)."""
        if isinstance(value, Tensor) and not value.shared:
            raise refuse(f"{what} depends on the data")
        return self.numbers(value, what)

    def use_in_affine(self, tensor: Tensor) -> None:
        """Marks the stored arrays behind a weight or bias as such; public factors of them stay constants."""
        if tensor.node in self.leaves:
            self.leaves[tensor.node].affine = True
            return
        behind, todo = set(), [tensor.node]
        while todo:
            node = todo.pop()
            todo.extend(self.nodes[node].inputs)
            if node in self.leaves:
                behind.add(node)
        weights = [i for i in behind if self.leaves[i].values.size > 1]
        stored = [i for i in behind if self.leaves[i].initializer]
        for node in weights or (stored if len(stored) == 1 else []):
            self.leaves[node].affine = True

    # -- shapes --------------------------------------------------------------------------------------------

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Shape of the ONNX tensor, for ``records`` records."""
        shape = list(tensor.index.shape)
        if tensor.axis is not None:
            shape[tensor.axis] *= self.records
        return tuple(shape)

    def not_records(self, tensor: Tensor, axes: Iterable[int], doing: str) -> list[int]:
        """Normalised axes; refuses the record axis."""
        chosen = []
        for axis in axes:
            axis = int(axis)
            if not -tensor.rank <= axis < tensor.rank:
                raise InvalidModelError(f"axis {axis} does not fit a tensor of rank {tensor.rank}")
            axis %= tensor.rank
            if axis == tensor.axis:
                raise refuse(f"{doing} the record axis, so that records would influence each other")
            chosen.append(axis)
        return chosen

    def without_records(self, tensor: Tensor, axis: int, rows: int) -> Tensor:
        """A shared tensor with ``records * rows`` equal blocks along ``axis`` as one block of ``rows``."""
        length = tensor.index.shape[axis]
        if length == 1:
            return tensor
        if length == self.records * rows:
            moved = np.moveaxis(tensor.index, axis, 0).reshape(self.records, rows, -1)
            content = moved
            if tensor.node in self.leaves:
                content = np.append(self.leaves[tensor.node].values.ravel(), 0.0)[moved]
            if (content == content[:1]).all():
                return replace(tensor, index=np.take(tensor.index, np.arange(rows), axis))
        raise refuse(
            f"combines {self.output!r} with a constant that differs from record to record (axis of length {length})"
        )

    def aligned(self, tensors: Sequence[Tensor]) -> tuple[list[np.ndarray], tuple[int, ...], int | None]:
        """Index arrays broadcast to one shape, that shape, and its record axis."""
        rank = max(t.rank for t in tensors)
        from_end = {(t.rank - t.axis, t.index.shape[t.axis]) for t in tensors if t.axis is not None}
        axis = None
        if from_end:
            if len(from_end) > 1:
                raise refuse("combines tensors whose record axes do not match")
            back, rows = from_end.pop()
            axis = rank - back
            tensors = [
                self.without_records(t, t.rank - back, rows) if t.axis is None and t.rank >= back else t
                for t in tensors
            ]
        try:
            shape = np.broadcast_shapes(*(t.index.shape for t in tensors))
        except ValueError as error:
            shapes = ", ".join(str(self.full_shape(t)) for t in tensors)
            raise InvalidModelError(f"shapes {shapes} do not broadcast") from error
        return [np.broadcast_to(t.index, shape) for t in tensors], shape, axis

    def elementwise(self, op: Op, *operands: Value | None) -> Tensor:
        """An operator of the IR on operands broadcast to one shape."""
        tensors = [self.tensor(v) for v in operands]
        indices, shape, axis = self.aligned(tensors)
        display = feature_shape(shape, axis)
        inputs = [self.features(t, i, display) for t, i in zip(tensors, indices, strict=True)]
        return self.result(self.add(op, inputs, display), shape, axis)

    def number(self, value: float) -> Known:
        """A scalar constant of a rule."""
        return Known(f"{self.output}/{value!r}", np.array(value, dtype=np.float64))

    # -- the end -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Decides which leaves are parameters and folds Gathers of constants."""
        for position, leaf in self.leaves.items():
            if leaf.is_parameter:
                node = self.nodes[position]
                self.nodes[position] = replace(node, op=Parameter(leaf.values.size, leaf.name))
        for position, node in enumerate(self.nodes):
            if isinstance(node.op, Gather):
                source = self.nodes[node.inputs[0]].op
                if isinstance(source, Constant):
                    folded = Constant(np.append(source.values, 0.0)[node.op.index])
                    self.nodes[position] = replace(node, op=folded, inputs=())

    def _order(self, last: int) -> list[int]:
        """What ``last`` needs in depth-first order: topological, and every leaf near the first node that reads it."""
        placed: dict[int, None] = {}
        todo = [(last, False)]
        while todo:
            node, inputs_placed = todo.pop()
            if inputs_placed:
                placed[node] = None
            elif node not in placed:
                todo.append((node, True))
                todo.extend((i, False) for i in reversed(self.nodes[node].inputs) if i not in placed)
        return list(placed)

    def graph(self, output: Tensor, input_shape: tuple[int, ...]) -> Graph:
        """The finished graph of one output, without the nodes it does not need."""
        last = self.features(output)
        self.finish()
        order = self._order(last)
        position = {node: i for i, node in enumerate(order)}
        nodes = tuple(replace(self.nodes[i], inputs=tuple(position[j] for j in self.nodes[i].inputs)) for i in order)
        parameters = tuple(
            ParameterInfo(leaf.name, leaf.values, leaf.trains, leaf.trains)
            for leaf in (self.leaves[i] for i in order if i in self.leaves)
            if leaf.is_parameter
        )
        return Graph(nodes, position[last], input_shape, parameters, output.feature_shape)
