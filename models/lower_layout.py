"""Rules of ONNX operators that move features: they rearrange index arrays and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from models.builder import Builder
from models.errors import InvalidModelError
from models.ops import Concat
from models.values import ML, Call, Known, Tensor, Value, lowers, refuse


@lowers("Identity")
def identity(b: Builder, call: Call) -> Value:
    """An alias.  The TorchScript exporter stores parameters with equal values once and restores them by Identity;
    such a copy is a parameter of its own."""
    x = call.input(0)
    if not isinstance(x, Tensor):
        return x
    if b.unties and b.is_leaf(x):
        leaf = b.leaves[x.node]
        why = f"is stored together with {leaf.name!r} because they were equal at export; they are two parameters here"
        b.notes.append((b.output, f"parameter {b.output!r} {why}"))
        return b.leaf(b.output, leaf.values.reshape(-1)[x.index].astype(leaf.dtype), leaf.initializer)
    return b.view(x, x.index, x.axis)


@lowers("Dropout")
def dropout(b: Builder, call: Call) -> Value:
    if call.input(2) is not None and b.known(call.input(2), "training_mode").any():
        raise refuse("is in training mode; export the model in inference mode")
    return identity(b, call)


@lowers("Transpose")
def transpose(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    order = call.attribute("perm") or list(range(x.rank))[::-1]
    axis = None if x.axis is None else list(order).index(x.axis)
    return b.view(x, x.index.transpose(order), axis)


@lowers("Shape")
def shape(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    axes = range(x.rank)[slice(call.attribute("start", 0), call.attribute("end"))]
    full = b.full_shape(x)
    return Known(b.output, np.array([full[a] for a in axes], dtype=np.int64), b.dynamic and x.axis in axes)


@lowers("Size")
def size(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    return Known(b.output, np.array(prod(b.full_shape(x)), dtype=np.int64), b.dynamic and x.axis is not None)


def reshaped(b: Builder, x: Tensor, target: Sequence[int]) -> Tensor:
    """``x`` with the full shape ``target``; finds where the record axis went."""
    full = b.full_shape(x)
    if prod(target) != prod(full):
        raise refuse(f"reshapes {_shown(b, full)} to {_shown(b, target)}; is the number of records fixed inside?")
    if x.axis is None:
        return b.view(x, x.index.reshape(target), None)
    before, length = prod(full[: x.axis]), 1
    for axis, dimension in enumerate(target):
        if length == before and dimension % b.records == 0:
            rows = dimension // b.records
            if rows * prod(target[axis + 1 :]) == prod(x.index.shape[x.axis :]):
                new = (*target[:axis], rows, *target[axis + 1 :])
                return b.view(x, x.index.reshape(new), axis)
        length *= dimension
    raise refuse(f"reshapes {_shown(b, full)} to {_shown(b, target)}, which mixes records with features")


def _shown(b: Builder, dimensions: Sequence[int]) -> str:
    if not b.dynamic:
        return str(tuple(int(d) for d in dimensions))
    parts = []
    for d in dimensions:
        rows = int(d) // b.records
        parts.append(str(int(d)) if d % b.records else "N" if rows == 1 else f"{rows}N")
    return f"({', '.join(parts)})"


@lowers("Reshape")
def reshape(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    target = [int(d) for d in b.known(call.input(1), "the shape").ravel()]
    full = b.full_shape(x)
    if not call.attribute("allowzero", 0):
        if any(d == 0 and i >= len(full) for i, d in enumerate(target)):
            raise InvalidModelError(f"shape {target} copies an axis that is not there")
        target = [full[i] if d == 0 else d for i, d in enumerate(target)]
    if target.count(-1) > 1:
        raise InvalidModelError(f"shape {target} leaves two axes open")
    if -1 in target:
        rest = prod(d for d in target if d != -1)
        if not rest or prod(full) % rest:
            raise refuse(f"reshapes {_shown(b, full)} to {target}; is the number of records fixed inside?")
        target[target.index(-1)] = prod(full) // rest
    return reshaped(b, x, target)


@lowers("Flatten")
def flatten(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    axis = call.attribute("axis", 1)
    axis = axis + x.rank if axis < 0 else axis
    full = b.full_shape(x)
    return reshaped(b, x, (prod(full[:axis]), prod(full[axis:])))


def _axes(b: Builder, call: Call) -> list[int] | None:
    axes = call.attribute("axes")
    if axes is None and call.input(1) is not None:
        axes = b.known(call.input(1), "the axes").ravel()
    return None if axes is None else [int(a) for a in axes]


@lowers("Squeeze")
def squeeze(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    axes = _axes(b, call)
    if axes is None:
        axes = [a for a in range(x.rank) if x.index.shape[a] == 1 and a != x.axis]
    axes = b.not_records(x, axes, "removes")
    if any(x.index.shape[a] != 1 for a in axes):
        raise InvalidModelError(f"removes axes {axes} of shape {b.full_shape(x)}, which are not all of length 1")
    kept = [a for a in range(x.rank) if a not in axes]
    axis = None if x.axis is None else kept.index(x.axis)
    return b.view(x, x.index.reshape([x.index.shape[a] for a in kept]), axis)


@lowers("Unsqueeze")
def unsqueeze(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    axes = _axes(b, call) or []
    rank = x.rank + len(axes)
    added = {a % rank for a in axes}
    if len(added) != len(axes):
        raise InvalidModelError(f"adds an axis twice: {axes}")
    places = [a for a in range(rank) if a not in added]
    axis = None if x.axis is None else places[x.axis]
    return b.view(x, np.expand_dims(x.index, tuple(sorted(added))), axis)


@lowers("Concat")
def concat(b: Builder, call: Call) -> Value:
    tensors = [b.tensor(v) for v in call.inputs]
    if len({t.rank for t in tensors}) != 1:
        raise InvalidModelError("joins tensors of different rank")
    along = call.attribute("axis", 0)
    records = {(t.axis, t.index.shape[t.axis]) for t in tensors if t.axis is not None}
    if len(records) > 1:
        raise refuse("joins tensors whose record axes do not match")
    axis = None
    along %= tensors[0].rank
    if records:
        axis, rows = records.pop()
        b.not_records(next(t for t in tensors if t.axis is not None), [along], "joins along")
        tensors = [t if t.axis is not None else b.without_records(t, axis, rows) for t in tensors]
        # A constant that is the same for all records has length 1 there.
        tensors = [
            t if t.axis is not None or t.index.shape[axis] == rows else _repeated(b, t, axis, rows) for t in tensors
        ]
    if len({t.node for t in tensors}) == 1:
        first = tensors[0]
        return b.view(first, np.concatenate([t.index for t in tensors], along), axis)
    inputs = [b.features(t) for t in tensors]
    node = b.add(Concat(tuple(b.sizes[i] for i in inputs)), inputs)
    starts = np.cumsum([0, *(b.sizes[i] for i in inputs)])
    parts = [
        start + np.arange(t.index.size).reshape(t.index.shape) for start, t in zip(starts[:-1], tensors, strict=True)
    ]
    return Tensor("", node, np.concatenate(parts, along), axis, b.shared[node])


def _repeated(b: Builder, tensor: Tensor, axis: int, rows: int) -> Tensor:
    return b.view(tensor, np.repeat(tensor.index, rows, axis), None)


def taken(b: Builder, x: Tensor, indices: np.ndarray, axis: int) -> Tensor:
    """``numpy.take`` along a feature axis; the index array may have any rank."""
    (axis,) = b.not_records(x, [axis], "picks from")
    length = x.index.shape[axis]
    indices = indices.astype(np.int64)
    if indices.size == 0 or indices.min() < -length or indices.max() >= length:
        raise InvalidModelError(f"picks positions {indices.tolist()} from an axis of length {length}")
    records = x.axis
    if records is not None and records > axis:
        records += indices.ndim - 1
    return b.view(x, np.take(x.index, indices % length, axis), records)


@lowers("Gather")
def gather(b: Builder, call: Call) -> Value:
    indices = call.input(1)
    if isinstance(indices, Tensor) and not indices.shared:
        raise refuse("looks up rows by data; only fixed positions are supported")
    return taken(b, b.tensor(call.input(0)), b.known(indices, "the index"), call.attribute("axis", 0))


@lowers("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    indices = b.known(call.input(1), "the index").ravel()
    return taken(b, x, indices, -1)


def _slice_spec(b: Builder, call: Call, rank: int):
    if call.opset < 10:
        starts, ends = call.attribute("starts"), call.attribute("ends")
        axes, steps = call.attribute("axes"), None
    else:
        starts, ends, axes, steps = (
            None if call.input(i) is None else [int(v) for v in b.known(call.input(i), "a slice bound").ravel()]
            for i in range(1, 5)
        )
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    return [(a % rank, s, e, t) for a, s, e, t in zip(axes, starts, ends, steps, strict=True)]


@lowers("Slice")
def slice_(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    index, full = x.index, b.full_shape(x)
    for axis, start, end, step in _slice_spec(b, call, x.rank):
        length = full[axis]
        stop = None if step < 0 and end < -length else end
        positions = np.arange(length)[start if step > 0 or start < length else None : stop : step]
        if axis == x.axis:
            if positions.size != length or step != 1:
                raise refuse("takes some of the records only")
            continue
        if not positions.size:
            raise refuse("gives an empty tensor")
        index = np.take(index, positions, axis)
    return b.view(x, index, x.axis)


@lowers("Split")
def split(b: Builder, call: Call) -> Sequence[Value]:
    x = b.tensor(call.input(0))
    (axis,) = b.not_records(x, [call.attribute("axis", 0)], "splits")
    length, count = x.index.shape[axis], len(call.proto.output)
    sizes = call.attribute("split")
    if sizes is None and call.input(1) is not None:
        sizes = [int(s) for s in b.known(call.input(1), "the sizes").ravel()]
    if sizes is None:
        each = -(-length // count)
        sizes = [min(each, length - i * each) for i in range(count)]
    if sum(sizes) != length or min(sizes) < 1:
        raise InvalidModelError(f"sizes {sizes} do not fit an axis of length {length}")
    parts = np.split(x.index, np.cumsum(sizes)[:-1], axis)
    return [b.view(x, part, x.axis) for part in parts]


@lowers("Expand")
def expand(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    target = [int(d) for d in b.known(call.input(1), "the shape").ravel()]
    full = b.full_shape(x)
    shape = list(np.broadcast_shapes(full, target))
    extra = len(shape) - x.rank
    if x.axis is None:
        return b.view(x, np.broadcast_to(x.index, shape), None)
    axis = x.axis + extra
    if shape[axis] != full[x.axis]:
        raise refuse("repeats records")
    shape[axis] = x.index.shape[x.axis]
    return b.view(x, np.broadcast_to(x.index, shape), axis)


@lowers("Tile")
def tile(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    repeats = [int(r) for r in b.known(call.input(1), "the repeats").ravel()]
    if len(repeats) != x.rank or min(repeats) < 1:
        raise InvalidModelError(f"repeats {repeats} do not fit rank {x.rank}")
    if x.axis is not None and repeats[x.axis] != 1:
        raise refuse("repeats records")
    return b.view(x, np.tile(x.index, repeats), x.axis)


@lowers("Pad")
def pad(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    mode = call.attribute("mode", "constant")
    axes = list(range(x.rank))
    if call.opset < 11:
        pads, value = list(call.attribute("pads", [])), call.attribute("value", 0.0)
    else:
        pads = [int(p) for p in b.known(call.input(1), "the padding").ravel()]
        value = 0.0 if call.input(2) is None else float(b.known(call.input(2), "the padding value").reshape(()))
        if call.input(3) is not None:
            axes = [int(a) % x.rank for a in b.known(call.input(3), "the axes").ravel()]
    if len(pads) != 2 * len(axes):
        raise InvalidModelError(f"{len(pads)} pads for {len(axes)} axes")
    widths = {a: (pads[i], pads[i + len(axes)]) for i, a in enumerate(axes)}
    if x.axis is not None and widths.get(x.axis, (0, 0)) != (0, 0):
        raise refuse("adds records")
    if mode not in ("constant", "reflect", "edge", "wrap"):
        raise refuse(f"mode {mode!r} is not supported")
    if mode == "constant" and value != 0.0:
        raise refuse(f"pads with {value:g}; only zero padding is supported")
    index = x.index
    for a, (first, last) in widths.items():
        cut = slice(max(0, -first), index.shape[a] - max(0, -last))
        index = np.take(index, np.arange(index.shape[a])[cut], a)
    full = [tuple(max(0, w) for w in widths.get(a, (0, 0))) for a in range(x.rank)]
    padded = np.pad(index, full, constant_values=-1) if mode == "constant" else np.pad(index, full, mode=mode)
    return b.view(x, padded, x.axis)
