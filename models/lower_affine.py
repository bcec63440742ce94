"""Rules of affine ONNX operators and of sums over features.

Gemm, MatMul, Add (a bias right after MatMul or Conv), Conv, ai.onnx.ml LinearRegressor, AveragePool,
GlobalAveragePool, ReduceMean, ReduceSum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from models.builder import Builder
from models.errors import InvalidModelError
from models.ops import Add, Affine, Concat, Div, Mul, SegmentSum
from models.values import ML, Call, Known, Tensor, Value, feature_shape, lowers, refuse


def affine_layer(
    b: Builder, x: Tensor, rows: np.ndarray, weight: Tensor, columns: np.ndarray, bias: Tensor | None = None
) -> int:
    """An ``Affine`` node: ``rows`` is an index ``(R, K)`` into ``x``, ``columns`` ``(M, K)`` into ``weight``."""
    b.use_in_affine(weight)
    positions, width = rows.shape
    outputs = columns.shape[0]
    source = b.features(x, rows, x.feature_shape if rows.size == x.index.size else ())
    inputs = [source, b.features(weight, columns), *([] if bias is None else [b.features(bias)])]
    return b.add(Affine(outputs, width, positions), inputs, (positions, outputs) if positions > 1 else (outputs,))


def product(b: Builder, left: Value | None, right: Value | None) -> Tensor:
    """Matrix product of a per-record and a shared operand, in either order, as numpy's ``matmul``."""
    left, right = b.tensor(left), b.tensor(right)
    if left.shared and right.shared:
        raise refuse("multiplies two stored matrices; multiply them before export")
    if not left.shared and not right.shared:
        raise refuse("multiplies two values that both depend on the record")
    if not left.rank or not right.rank:
        raise InvalidModelError("a matrix product needs operands of rank 1 or more")
    if right.shared:
        return _times_weight(b, left, right)
    # W x = (x^T W^T)^T
    flipped = _times_weight(b, _transposed(b, right), _transposed(b, left))
    if left.rank == 1 or right.rank == 1:
        return flipped
    return _transposed(b, flipped)


def _transposed(b: Builder, tensor: Tensor) -> Tensor:
    if tensor.rank == 1:
        return tensor
    axis = tensor.axis
    if axis is not None and axis >= tensor.rank - 2:
        axis = 2 * tensor.rank - 3 - axis
    return b.view(tensor, np.swapaxes(tensor.index, -1, -2), axis)


def _times_weight(b: Builder, x: Tensor, weight: Tensor) -> Tensor:
    matrix = weight.index
    if matrix.ndim > 2:
        if prod(matrix.shape[:-2]) != 1:
            raise refuse("multiplies by a stack of matrices")
        if matrix.ndim > x.rank:
            raise refuse("multiplies by a stored matrix of higher rank than the record's tensor")
        matrix = matrix.reshape(matrix.shape[-2:])
    vector = matrix.ndim == 1
    columns = matrix[None, :] if vector else matrix.T
    if x.axis == x.rank - 1:
        raise refuse("sums over the record axis, so that records would influence each other")
    if x.index.shape[-1] != columns.shape[1]:
        raise InvalidModelError(f"matrix product of widths {x.index.shape[-1]} and {columns.shape[1]}")
    node = affine_layer(b, x, x.index.reshape(-1, x.index.shape[-1]), weight, columns)
    shape = x.index.shape[:-1] + (() if vector else (columns.shape[0],))
    return b.result(node, shape, x.axis)


def with_bias(b: Builder, y: Tensor, bias: Tensor) -> Tensor | None:
    """``y + bias`` inside the affine layer ``y`` comes from; None when it does not fit there."""
    node = b.nodes[y.node]
    fusable = isinstance(node.op, Affine) and len(node.inputs) == 2 and b.is_sole(y)
    if not (fusable or y.node in b.grouped) or not bias.shared:
        return None
    try:
        (index, spread), shape, axis = b.aligned([y, bias])
    except InvalidModelError:
        return None
    if shape != y.index.shape or index.size != b.sizes[y.node] or len(np.unique(index)) != index.size:
        return None
    if not fusable:
        # A grouped convolution: the bias is one of an affine layer, although it is added on its own.
        per_channel = np.moveaxis(spread, 1, -1).reshape(-1, shape[1])
        if (per_channel == per_channel[:1]).all():
            b.use_in_affine(bias)
        return None
    order = np.empty(index.size, dtype=np.int64)
    order[index.ravel()] = spread.ravel()
    order = order.reshape(node.op.positions, node.op.rows)
    if not (order == order[:1]).all():
        return None
    b.use_in_affine(bias)
    fused = b.add(node.op, [*node.inputs, b.features(bias, order[0])], node.shape)
    return Tensor("", fused, y.index, axis, b.shared[fused])


@lowers("MatMul")
def matmul(b: Builder, call: Call) -> Value:
    return product(b, call.input(0), call.input(1))


@lowers("Add")
def add(b: Builder, call: Call) -> Value:
    left, right = b.tensor(call.input(0)), b.tensor(call.input(1))
    fused = with_bias(b, left, right) or with_bias(b, right, left)
    return fused or b.elementwise(Add(), left, right)


@lowers("Gemm")
def gemm(b: Builder, call: Call) -> Value:
    """``alpha A' B' + beta C``: ``alpha`` scales the record's operand, ``beta`` the bias."""
    left, right = b.tensor(call.input(0)), b.tensor(call.input(1))
    if left.rank != 2 or right.rank != 2:
        raise InvalidModelError("Gemm needs matrices")
    left = _transposed(b, left) if call.attribute("transA", 0) else left
    right = _transposed(b, right) if call.attribute("transB", 0) else right
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if alpha != 1.0:
        scaled = b.elementwise(Mul(), left if right.shared else right, b.number(alpha))
        left, right = (scaled, right) if right.shared else (left, scaled)
    y = product(b, left, right)
    if call.input(2) is None:
        return y
    bias = b.tensor(call.input(2))
    if beta != 1.0:
        bias = b.elementwise(Mul(), bias, b.number(beta))
    return with_bias(b, y, bias) or b.elementwise(Add(), y, bias)


@lowers("LinearRegressor", domain=ML)
def linear_regressor(b: Builder, call: Call) -> Value:
    """Weights are attributes; the parameters are called ``<node>/coefficients`` and ``<node>/intercepts``."""
    transform = call.attribute("post_transform", "NONE")
    if transform != "NONE":
        raise refuse(f"post_transform {transform} is not supported")
    x = b.tensor(call.input(0))
    if x.rank == 1:
        raise refuse("a LinearRegressor needs a matrix of features")
    targets = call.attribute("targets", 1)
    coefficients = np.array(call.attribute("coefficients", []), dtype=np.float64)
    if coefficients.size != targets * x.index.shape[-1]:
        raise InvalidModelError(
            f"{coefficients.size} coefficients for {targets} targets of {x.index.shape[-1]} features"
        )
    weight = b.leaf(f"{call.name}/coefficients", coefficients.reshape(targets, -1), True)
    y = _times_weight(b, x, b.view(weight, weight.index.T, None))
    intercepts = np.array(call.attribute("intercepts", []), dtype=np.float64)
    if not intercepts.size:
        return y
    if intercepts.size != targets:
        raise InvalidModelError(f"{intercepts.size} intercepts for {targets} targets")
    bias = b.leaf(f"{call.name}/intercepts", intercepts, True)
    return with_bias(b, y, bias) or b.elementwise(Add(), y, bias)


# -- windows: convolutions and pools --------------------------------------------------------------------------


def _window_geometry(call: Call, lengths: Sequence[int], kernel: Sequence[int]):
    """Strides, dilations and (begin, end) pads of every spatial axis."""
    n = len(lengths)
    strides = call.attribute("strides") or [1] * n
    dilations = call.attribute("dilations") or [1] * n
    pads = call.attribute("pads") or [0] * (2 * n)
    if len(kernel) != n or len(strides) != n or len(dilations) != n or len(pads) != 2 * n:
        raise InvalidModelError(f"kernel, strides, dilations or pads do not fit {n} spatial axes")
    auto = call.attribute("auto_pad", "NOTSET")
    begin, end = list(pads[:n]), list(pads[n:])
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        for i in range(n):
            reach = dilations[i] * (kernel[i] - 1) + 1
            total = max(0, (-(-lengths[i] // strides[i]) - 1) * strides[i] + reach - lengths[i])
            small, large = total // 2, total - total // 2
            begin[i], end[i] = (small, large) if auto == "SAME_UPPER" else (large, small)
    elif auto == "VALID":
        begin, end = [0] * n, [0] * n
    elif auto != "NOTSET":
        raise InvalidModelError(f"auto_pad {auto!r} is unknown")
    return strides, dilations, begin, end


def windows(index: np.ndarray, call: Call, kernel: Sequence[int], outside: int, beyond: int) -> np.ndarray:
    """Index ``(B, C, *spatial)`` as windows ``(B, C, *outputs, *kernel)``.

    ``outside`` fills the padding, ``beyond`` what an incomplete last window of ``ceil_mode`` reads after it.
    """
    lengths = index.shape[2:]
    strides, dilations, begin, end = _window_geometry(call, lengths, kernel)
    if min(*begin, *end) < 0:
        raise refuse("negative padding is not supported")
    pads = [(0, 0), (0, 0), *zip(begin, end, strict=True)]
    index = np.pad(index, pads, constant_values=outside)
    n = len(lengths)
    for i in range(n):
        reach, padded = dilations[i] * (kernel[i] - 1) + 1, index.shape[2 + 2 * i]
        count = (padded - reach) // strides[i] + 1
        if count < 1:
            raise InvalidModelError(f"the window is longer than spatial axis {i}")
        if call.attribute("ceil_mode", 0):
            count = -(-(padded - reach) // strides[i]) + 1
            count -= (count - 1) * strides[i] >= lengths[i] + begin[i]
            extra = max(0, (count - 1) * strides[i] + reach - padded)
            widths = [(0, extra if axis == 2 + 2 * i else 0) for axis in range(index.ndim)]
            index = np.pad(index, widths, constant_values=beyond)
        at = np.arange(count)[:, None] * strides[i] + np.arange(kernel[i])[None, :] * dilations[i]
        index = np.take(index, at, axis=2 + 2 * i)
    order = [0, 1, *range(2, 2 + 2 * n, 2), *range(3, 2 + 2 * n, 2)]
    return index.transpose(order)


def _spatial(b: Builder, call: Call) -> Tensor:
    x = b.tensor(call.input(0))
    if x.shared:
        raise refuse("is applied to a stored tensor")
    if x.rank < 3 or x.axis not in (0, None):
        raise refuse("needs an input (records, channels, lengths ...) with the record axis first")
    return x


@lowers("Conv")
def conv(b: Builder, call: Call) -> Value:
    """Patches by a Gather, position-major; one Affine a group; then back to channel-major as a view."""
    x = _spatial(b, call)
    weight = b.tensor(call.input(1))
    if not weight.shared:
        raise refuse("its kernel depends on the record")
    if weight.rank != x.rank:
        raise InvalidModelError(f"kernel of rank {weight.rank} for an input of rank {x.rank}")
    groups = call.attribute("group", 1)
    outputs, channels, *kernel = weight.index.shape
    if outputs % groups or x.index.shape[1] != channels * groups:
        raise InvalidModelError(f"{x.index.shape[1]} channels do not fit {groups} groups of {channels}")
    if (call.attribute("kernel_shape") or kernel) != kernel:
        raise InvalidModelError(f"kernel_shape {call.attribute('kernel_shape')} contradicts the weight's {kernel}")
    patches = windows(x.index, call, kernel, -1, -1)
    n = len(kernel)
    batch, sizes = patches.shape[0], patches.shape[2 : 2 + n]
    positions = batch * prod(sizes)
    # (B, C, *O, *k) -> (B, *O, C, *k)
    patches = np.moveaxis(patches, 1, 1 + n).reshape(positions, groups, -1)
    each = outputs // groups
    columns = weight.index.reshape(groups, each, -1)
    bias = None if call.input(2) is None else b.tensor(call.input(2))
    if bias is not None:
        b.use_in_affine(bias)
    parts = []
    for g in range(groups):
        own = None if bias is None else replace(bias, index=bias.index[g * each : (g + 1) * each])
        parts.append(affine_layer(b, x, patches[:, g], weight, columns[g], own))
    if groups == 1:
        (node,) = parts
    else:
        node = b.add(Concat(tuple(b.sizes[p] for p in parts)), parts)
        if bias is None:
            b.grouped.add(node)
    index = np.arange(b.sizes[node]).reshape(groups, batch, *sizes, each)
    index = np.moveaxis(np.moveaxis(index, 0, -2), (-2, -1), (1, 2)).reshape(batch, outputs, *sizes)
    return Tensor("", node, index, x.axis, b.shared[node])


def summed(b: Builder, x: Tensor, index: np.ndarray, axis: int | None, divisor: np.ndarray | None) -> Tensor:
    """Sums over the last axis of ``index``, divided elementwise."""
    shape = index.shape[:-1]
    terms = index.reshape(-1, index.shape[-1])
    node = b.add(SegmentSum(terms, b.sizes[x.node]), [x.node], feature_shape(shape, axis))
    result = b.result(node, shape, axis)
    if divisor is None:
        return result
    divisor = np.broadcast_to(divisor, shape).astype(np.float64)
    if (divisor == divisor.ravel()[0]).all():
        divisor = divisor.ravel()[0].reshape(())
    return b.elementwise(Div(), result, Known(f"{b.output}/count", divisor))


@lowers("AveragePool")
def average_pool(b: Builder, call: Call) -> Value:
    x = _spatial(b, call)
    kernel = call.attribute("kernel_shape", [])
    index = windows(x.index, call, kernel, -1, -1)
    shape = (*index.shape[: x.rank], prod(kernel))
    counted = windows(np.ones_like(x.index), call, kernel, int(call.attribute("count_include_pad", 0) != 0), 0)
    count = counted.reshape(shape).sum(-1)
    if (count == 0).any():
        raise refuse("a window lies in the padding alone")
    return summed(b, x, index.reshape(shape), x.axis, count)


@lowers("GlobalAveragePool")
def global_average_pool(b: Builder, call: Call) -> Value:
    x = _spatial(b, call)
    index = x.index.reshape(*x.index.shape[:2], *[1] * (x.rank - 2), -1)
    return summed(b, x, index, x.axis, np.array(index.shape[-1]))


@lowers("ReduceMean", "ReduceSum")
def reduce(b: Builder, call: Call) -> Value:
    x = b.tensor(call.input(0))
    axes = call.attribute("axes")
    if axes is None and call.input(1) is not None:
        axes = [int(a) for a in b.known(call.input(1), "the axes").ravel()]
    if not axes:
        if call.attribute("noop_with_empty_axes", 0):
            return b.view(x, x.index, x.axis)
        axes = range(x.rank)
    doing = "averages over" if call.operator == "ReduceMean" else "sums over"
    axes = b.not_records(x, axes, doing)
    count = prod(x.index.shape[a] for a in axes)
    kept = [a for a in range(x.rank) if a not in axes]
    index = x.index.transpose([*kept, *axes]).reshape(*(x.index.shape[a] for a in kept), count)
    axis = kept.index(x.axis) if x.axis is not None else None
    divisor = np.array(count) if call.operator == "ReduceMean" and count > 1 else None
    result = summed(b, x, index, axis, divisor)
    if not call.attribute("keepdims", 1):
        return result
    shape = tuple(1 if a in axes else x.index.shape[a] for a in range(x.rank))
    return b.view(result, result.index.reshape(shape), x.axis)
