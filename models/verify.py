"""The check at load time: the IR evaluated on random records against onnxruntime.

Both start from the same stored weights; onnxruntime computes in the file's precision, the IR in float64.  They must
agree up to the rounding of the file's precision.  When they do not, every intermediate tensor is compared, and the
first ONNX node that differs is named.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

from models.builder import Builder
from models.errors import DisagreementError, InvalidModelError
from models.lowering import Lowered
from models.ops import Affine, Constant, Input, Mul, Parameter, SegmentSum
from models.values import ML, Tensor, domain_of

#: Numbers of records tried for a file with a dynamic number, and scales of the random features.
BATCHES = (1, 2, 5)
SCALES = (1.0, 8.0)
#: Agreement relative to the largest entry of a tensor, and rounding units of the largest intermediate value.
RELATIVE = {np.float32: 1e-4, np.float64: 1e-9}
UNITS = 64.0

Runner = Callable[[np.ndarray], dict[str, np.ndarray]]


def runner(model: onnx.ModelProto, everything: bool = False) -> Runner:
    """Evaluates the file with onnxruntime on the CPU, or with onnx's reference where onnxruntime has no kernel.

    ``everything`` returns all intermediate tensors.  Raises InvalidModelError when the file cannot be run at all.
    """
    import onnxruntime as ort

    if everything:
        extended = onnx.ModelProto()
        extended.CopyFrom(model)
        there = {o.name for o in model.graph.output}
        names = [o for node in model.graph.node for o in node.output if o and o not in there]
        extended.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        model = extended
    stored = {i.name for i in model.graph.initializer}
    feed = next(i.name for i in model.graph.input if i.name not in stored)
    outputs = [o.name for o in model.graph.output]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise InvalidModelError(f"onnxruntime refuses the file: {_first_line(error)}") from error
        return _reference(model, feed, outputs)

    def run(x: np.ndarray) -> dict[str, np.ndarray]:
        try:
            return dict(zip(outputs, session.run(outputs, {feed: x}), strict=True))
        except Exception as error:
            # Some kernels refuse legal attributes only when they run (auto_pad with dilations).
            try:
                return _reference(model, feed, outputs)(x)
            except Exception:
                shape = "x".join(map(str, x.shape))
                raise InvalidModelError(
                    f"onnxruntime cannot run the file on {shape} features: {_first_line(error)}"
                ) from error

    return run


def _reference(model: onnx.ModelProto, feed: str, outputs: list[str]) -> Runner:
    from onnx.reference import ReferenceEvaluator

    try:
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
        evaluator = ReferenceEvaluator(model)
    except Exception as error:
        raise InvalidModelError(f"onnx refuses the file: {_first_line(error)}") from error

    def run(x: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            return dict(zip(outputs, evaluator.run(None, {feed: x}), strict=True))

    return run


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400] if lines else type(error).__name__


def precision(model: onnx.ModelProto) -> type:
    """float64 when no tensor of the file is float32, float32 otherwise."""
    graph = model.graph
    kinds = {v.type.tensor_type.elem_type for v in [*graph.input, *graph.output]}
    kinds |= {i.data_type for i in graph.initializer}
    for node in graph.node:
        if domain_of(node) == ML:
            return np.float32
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to":
                kinds.add(attribute.i)
            if node.op_type == "Constant" and attribute.name == "value":
                kinds.add(attribute.t.data_type)
    return np.float32 if TensorProto.FLOAT in kinds else np.float64


def compare(lowered: Lowered, model: onnx.ModelProto, seed: int = 0) -> float:
    """The largest difference found at the output, in units of what rounding explains (at most 1, usually 1e-3).

    Random standard normal records at several scales, in batches of several sizes when the file allows it.  An output
    that differs by more is followed node by node: each ONNX node is evaluated on onnxruntime's own operands, so that
    rounding that an unstable model amplifies is not mistaken for a defect.

    Raises DisagreementError naming the first ONNX node that differs.
    """
    run = runner(model)
    feed = next(i for i in model.graph.input if i.name not in {k.name for k in model.graph.initializer})
    dtype = np.float64 if feed.type.tensor_type.elem_type == TensorProto.DOUBLE else np.float32
    builder, graph, kind = lowered.builder, lowered.graph, precision(model)
    (name,) = lowered.outputs
    generator = np.random.default_rng(seed)
    worst = 0.0
    for records in BATCHES if builder.dynamic else (builder.records,):
        for scale in SCALES:
            x = (scale * generator.standard_normal((records, *lowered.input_shape))).astype(dtype)
            found = graph.evaluate(x)
            wanted = _by_record(builder.values[name], run(x)[name], records)
            excess = _excess(found, wanted, 0.0, kind)
            if excess > 1.0:
                _node_by_node(lowered, model, x, found)
            else:
                worst = max(worst, excess)
    return worst


def _excess(found: np.ndarray, wanted: np.ndarray, inside: float, kind: type) -> float:
    """Largest difference over the finite entries, divided by what rounding explains.

    ``inside`` is the size of the numbers that were added up.
    """
    if found.shape != wanted.shape:
        return np.inf
    finite = np.isfinite(wanted)
    if not np.isfinite(found[finite]).all():
        return np.inf
    difference = np.abs(found[finite] - wanted[finite]).max(initial=0.0)
    size = np.abs(wanted[finite]).max(initial=0.0)
    allowed = RELATIVE[kind] * size + UNITS * float(np.finfo(kind).eps) * inside + float(np.finfo(kind).tiny)
    return float(difference / allowed)


def _by_record(value: Tensor, array: np.ndarray, records: int) -> np.ndarray:
    """An ONNX tensor as ``(records, features)``, or ``(1, features)`` when shared."""
    array = np.asarray(array, dtype=np.float64)
    if value.shared or value.axis is None:
        return array.reshape(1, -1)
    shape = array.shape
    split = array.reshape(*shape[: value.axis], records, -1, *shape[value.axis + 1 :])
    return np.moveaxis(split, value.axis, 0).reshape(records, -1)


def _node_by_node(lowered: Lowered, model: onnx.ModelProto, x: np.ndarray, output: np.ndarray) -> None:
    """Compares every ONNX node on onnxruntime's operands; raises DisagreementError at the first that differs."""
    builder, kind = lowered.builder, precision(model)
    expected = runner(model, everything=True)(x)
    columns = np.ascontiguousarray(np.asarray(x, dtype=np.float64).reshape(len(x), -1).T)
    values: list[np.ndarray] = []
    _extend(builder, values, range(lowered.steps[0].nodes.start if lowered.steps else len(builder.nodes)), columns)
    for step in lowered.steps:
        inside = _extend(builder, values, step.nodes, columns)
        for name in step.outputs:
            value = builder.values.get(name)
            if not isinstance(value, Tensor) or name not in expected:
                continue
            held = values[value.node]
            found = np.concatenate([held, np.zeros((1, held.shape[1]))])[value.index.ravel()].T
            wanted = _by_record(value, expected[name], len(x))
            excess = _excess(found, wanted, inside, kind)
            if excess > 1.0:
                raise DisagreementError(
                    f'the graph as read differs from onnxruntime first at node "{step.name}" ({step.operator}), '
                    f"tensor {name!r}: by {np.abs(found - wanted).max() if found.shape == wanted.shape else np.inf:.3g}"
                    f", {excess:.3g} times what rounding explains. This is a defect of certdp; please report it "
                    "with the file."
                )
            _replace(values, value, wanted)
    if _excess(output, _output(lowered, columns), 0.0, np.float64) > 1.0:
        raise DisagreementError(
            "the graph differs from the nodes it was read from. This is a defect of certdp; please report it with "
            "the file."
        )


def _replace(values: list[np.ndarray], value: Tensor, wanted: np.ndarray) -> None:
    """Puts onnxruntime's numbers into the IR node they belong to."""
    index = value.index.ravel()
    if value.shared or not np.isfinite(wanted).all() or (index < 0).any():
        return
    updated = np.array(np.broadcast_to(values[value.node], (values[value.node].shape[0], len(wanted))))
    updated[index] = wanted.T
    values[value.node] = updated


def _output(lowered: Lowered, columns: np.ndarray) -> np.ndarray:
    """The output ``(n, O)`` from all nodes as they were read, needed or not."""
    values: list[np.ndarray] = []
    builder = lowered.builder
    _extend(builder, values, range(len(builder.nodes)), columns)
    value = builder.values[lowered.outputs[0]]
    held = values[value.node]
    found = np.concatenate([held, np.zeros((1, held.shape[1]))])[value.index.ravel()].T
    return np.broadcast_to(found, (columns.shape[1], found.shape[1]))


def _extend(builder: Builder, values: list[np.ndarray], positions: range, columns: np.ndarray) -> float:
    """Evaluates IR nodes at the initial parameters; returns the size of the numbers that are added up in them."""
    inside = 0.0
    for position in positions:
        node = builder.nodes[position]
        if isinstance(node.op, Input):
            values.append(columns)
        elif isinstance(node.op, Parameter):
            values.append(builder.leaves[position].values.reshape(-1, 1))
        elif isinstance(node.op, Constant):
            values.append(node.op.values[:, None])
        else:
            operands = [values[i] for i in node.inputs]
            values.append(node.op.forward(operands))
            sizes = [np.abs(v[np.isfinite(v)]).max(initial=0.0) for v in [*operands, values[-1]]]
            if isinstance(node.op, Affine):
                sizes.append(sizes[0] * np.abs(operands[1].reshape(node.op.rows, -1)).sum(axis=1).max())
            elif isinstance(node.op, Mul):
                sizes.append(sizes[0] * sizes[1])
            elif isinstance(node.op, SegmentSum):
                sizes.append(sizes[0] * node.op.index.shape[1])
            inside = max(inside, *sizes)
    return float(inside)
