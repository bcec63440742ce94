"""The walk over an ONNX graph that builds the IR, and the reasons for refusing operators.

The rules, one function an ONNX operator, are in ``models.lower_affine``, ``lower_elementwise``, ``lower_layout``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx
from onnx import helper, numpy_helper

from models.builder import FLOATS, Builder
from models.errors import InvalidModelError, ModelError
from models.ir import Graph
from models.ops import Input
from models.values import (
    ML,
    RULES,
    Call,
    Condition,
    Known,
    Missing,
    Problem,
    Step,
    Tensor,
    Value,
    domain_of,
    refuse,
)

#: Stands for a dynamic number of records: a prime, so that it is recognised inside products of dimensions.
STAND_IN = 7919

# Why some operators are outside this product, in words a user can act on.
_TREES = "a tree ensemble is piecewise constant and is not trained by gradients"
_CLASSIFIER = "a classifier; this product certifies regressors"
_QUANTISED = "integer quantised arithmetic; export the model in float32 or float64"
_CONTROL = "control flow; export the model without branches and loops (for example with a fixed input shape)"
_SHAPE = "the shape of its result depends on the data"
_RANDOM = "draws random numbers; export the model in inference mode"
_RECURRENT = "recurrent layers are not supported"
_REASONS = {
    **dict.fromkeys(["TreeEnsembleRegressor", "TreeEnsemble"], _TREES),
    "TreeEnsembleClassifier": f"{_TREES}, and {_CLASSIFIER}",
    **dict.fromkeys(["LinearClassifier", "SVMClassifier", "ZipMap", "ArgMax", "LabelEncoder"], _CLASSIFIER),
    **dict.fromkeys(["Softmax", "LogSoftmax"], f"turns scores into class probabilities: {_CLASSIFIER}"),
    **dict.fromkeys(["QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"], _QUANTISED),
    **dict.fromkeys(["QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger"], _QUANTISED),
    **dict.fromkeys(["QGemm", "QLinearAdd"], _QUANTISED),
    **dict.fromkeys(["If", "Loop", "Scan", "SequenceMap"], _CONTROL),
    **dict.fromkeys(["NonZero", "Compress", "Unique", "NonMaxSuppression"], _SHAPE),
    **dict.fromkeys(["RandomNormal", "RandomNormalLike", "Bernoulli", "Multinomial"], _RANDOM),
    **dict.fromkeys(["RandomUniform", "RandomUniformLike"], _RANDOM),
    **dict.fromkeys(["LSTM", "GRU", "RNN"], _RECURRENT),
    **dict.fromkeys(["MaxPool", "GlobalMaxPool"], "max pooling is not supported; use AveragePool"),
    "LayerNormalization": "normalises by statistics of the record, which is not supported",
    "InstanceNormalization": "normalises by statistics of the record, which is not supported",
}
_NEVER_FOLDED = (_CONTROL, _RANDOM, _QUANTISED)


def unsupported(node: onnx.NodeProto) -> str:
    """The reason for refusing an operator without a rule."""
    domain = domain_of(node)
    if node.op_type in _REASONS:
        return _REASONS[node.op_type]
    if domain not in ("", ML):
        return f"an operator of the custom domain {domain!r}"
    return "this operator is not supported"


def supported_operators() -> list[str]:
    """Names of the ONNX operators that are read, in alphabetical order; ai.onnx.ml is named."""
    load_rules()
    folded = {"Constant", "ConstantOfShape", "Range", "Size"}
    names = {f"{domain}.{name}" if domain else name for domain, name in RULES}
    return sorted(names | folded, key=str.lower)


def load_rules() -> None:
    """Imports the rule modules, which register themselves."""
    import models.lower_affine
    import models.lower_elementwise
    import models.lower_layout  # noqa: F401


@dataclass(frozen=True, eq=False)
class Lowered:
    """What the walk over an ONNX graph found."""

    builder: Builder
    problems: tuple[Problem, ...]
    steps: tuple[Step, ...]
    input_shape: tuple[int, ...]
    outputs: tuple[str, ...]

    @cached_property
    def graph(self) -> Graph:
        """The IR of the only output; raises UnsupportedModelError when it is not a regression output."""
        (name,) = self.outputs
        value = self.builder.values.get(name)
        if isinstance(value, Missing):
            raise refuse(f"output {name!r} could not be read")
        if not isinstance(value, Tensor):
            raise refuse(f"output {name!r} is not a real number computed from the record")
        if value.shared:
            raise refuse(f"output {name!r} does not depend on the record")
        return self.builder.graph(value, self.input_shape)


def walk(model: onnx.ModelProto, outputs: Sequence[str], records: int, dynamic: bool) -> Lowered:
    """Reads the nodes that ``outputs`` need, collecting the problems instead of stopping at the first.

    Raises InvalidModelError for a graph that is not well formed.
    """
    load_rules()
    graph = model.graph
    initializers = {i.name: i for i in graph.initializer}
    (feed,) = [i for i in graph.input if i.name not in initializers]
    needed = _needed(graph, outputs)
    uses = Counter(name for node in needed for name in node.input if name)
    uses.update(o.name for o in graph.output)
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    builder = Builder(records, dynamic, opsets, uses, unties=model.producer_name == "pytorch")
    dims = [d.dim_value for d in feed.type.tensor_type.shape.dim]
    input_shape = tuple(dims[1:])
    builder.output = feed.name
    node = builder.add(Input(int(np.prod(input_shape, dtype=int))), (), input_shape, feed.name)
    axis = None if records == 1 and not dynamic else 0
    builder.values[feed.name] = builder.result(node, (1, *input_shape), axis)
    read = {name for node in needed for name in node.input}
    for name, proto in initializers.items():
        if name in read:
            builder.values[name] = _stored(builder, name, _array(proto), True)
    problems: list[Problem] = []
    steps = []
    for position, node in enumerate(needed):
        name = node.name or f"{node.op_type}_{position}"
        first = len(builder.nodes)
        problem = _step(builder, node, name)
        outputs_here = tuple(o for o in node.output if o)
        steps.append(Step(name, node.op_type, outputs_here, range(first, len(builder.nodes))))
        if problem is not None:
            problems.append(problem)
            builder.values.update((o, Missing()) for o in node.output if o)
    return Lowered(builder, tuple(problems), tuple(steps), input_shape, tuple(outputs))


def _needed(graph: onnx.GraphProto, outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """Nodes that the outputs depend on, in file order; checks that each tensor is computed before it is read."""
    there = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    if graph.sparse_initializer:
        raise refuse(f"sparse initializer {graph.sparse_initializer[0].values.name!r} is not supported")
    for node in graph.node:
        for name in node.input:
            if name and name not in there:
                raise InvalidModelError(
                    f'node "{node.name}" ({node.op_type}) reads tensor {name!r}, which nothing before it computes'
                )
        there.update(node.output)
    for name in outputs:
        if name not in there:
            raise InvalidModelError(f"output {name!r} is computed by no node")
    wanted, kept = set(outputs), []
    for node in reversed(graph.node):
        if wanted.intersection(o for o in node.output if o):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


def _array(tensor: onnx.TensorProto) -> np.ndarray:
    try:
        return numpy_helper.to_array(tensor)
    except Exception as error:
        raise InvalidModelError(f"stored tensor {tensor.name!r} is malformed: {error}") from error


def _stored(builder: Builder, name: str, array: np.ndarray, initializer: bool) -> Value:
    """A float array as a leaf, anything else (and a scalar of a Constant node) as a known value."""
    if array.dtype not in FLOATS or array.size == 0 or (array.size == 1 and not initializer):
        return Known(name, array)
    try:
        return builder.leaf(name, array, initializer)
    except InvalidModelError:
        # Infinite bounds of Clip are legal; as a weight the array is refused where it is used.
        return Known(name, array)


def _step(builder: Builder, node: onnx.NodeProto, name: str) -> Problem | None:
    """Reads one node and stores the values of its outputs; returns what is wrong with it, if anything."""
    domain = domain_of(node)
    inputs = tuple(builder.values[i] if i else None for i in node.input)
    present = [v for v in inputs if v is not None]
    builder.output = next((o for o in node.output if o), "")
    builder.source = f'node "{name}" ({node.op_type})'
    rule = RULES.get((domain, node.op_type))
    reason = unsupported(node)
    constant = all(isinstance(v, Known) or builder.is_leaf(v) for v in present)
    if reason in _NEVER_FOLDED or (rule is None and not constant):
        return Problem(name, node.op_type, reason)
    if any(isinstance(v, Missing) for v in present):
        builder.values.update((o, Missing()) for o in node.output if o)
        return None
    call = Call(name, node, inputs, builder.opsets.get(domain, 1))
    first = len(builder.nodes)
    try:
        stored = any(builder.is_leaf(v) for v in present)
        results = rule(builder, call) if rule and (stored or not constant) else _fold(builder, call)
    except ModelError as error:
        return Problem(name, node.op_type, str(error))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        raise InvalidModelError(f'node "{name}" ({node.op_type}) is malformed: {error}') from error
    if isinstance(results, (Known, Tensor, Condition, Missing)):
        results = (results,)
    for output, value in zip(node.output, [*results, *[Missing()] * len(node.output)], strict=False):
        if not output:
            continue
        if isinstance(value, Tensor):
            value = replace(value, name=output)
            whole = value.index.size == builder.sizes[value.node] and np.array_equal(
                value.index.ravel(), np.arange(value.index.size)
            )
            if value.node >= first and whole and value.node not in builder.leaves:
                builder.rename(value.node, output)
        builder.values[output] = value
    return None


def _fold(builder: Builder, call: Call) -> Sequence[Value]:
    """Evaluates a node with constant operands."""
    node = call.proto
    if node.op_type == "Constant" and domain_of(node) == "":
        return (_stored(builder, node.output[0], _constant(call), False),)
    values = {name: v for name, v in zip(node.input, call.inputs, strict=True) if name}
    arrays = {name: builder.numbers(v, name) for name, v in values.items()}
    derived = any(builder.is_leaf(v) or getattr(v, "derived", False) for v in values.values())
    counted = {name for name, v in values.items() if getattr(v, "counts", False)}
    if node.op_type in ("ConstantOfShape", "Expand"):
        counted &= {node.input[0]} if node.op_type == "Expand" else set()
    results = _evaluate(node, arrays, builder.opsets)
    outputs = [o for o in node.output]
    return [Known(o, np.asarray(a), bool(counted), derived) for o, a in zip(outputs, results, strict=False)]


def _evaluate(node: onnx.NodeProto, arrays: dict[str, np.ndarray], opsets: dict[str, int]) -> list[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    graph = helper.make_graph(
        [node],
        "constant",
        [info(name, array) for name, array in arrays.items()],
        [onnx.ValueInfoProto(name=o) for o in node.output if o],
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        return ReferenceEvaluator(helper.make_model(graph, opset_imports=imports)).run(None, arrays)
    except Exception as error:
        raise refuse(f"its constant result could not be computed ({error})") from error


def _constant(call: Call) -> np.ndarray:
    """Content of a Constant node, whichever attribute holds it."""
    (attribute,) = call.proto.attribute
    value = helper.get_attribute_value(attribute)
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name == "value":
        return _array(value)
    if attribute.name in kinds:
        return np.array(value, dtype=kinds[attribute.name])
    raise refuse(f"a constant given as {attribute.name} is not supported")
