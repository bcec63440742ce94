"""Hand-made ONNX models for the tests of the reader, and an evaluation that shares no code with it."""

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import models

KINDS = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}


def node(operator, inputs, outputs="y", name="", domain="", **attributes):
    """A node; inputs and outputs are separated by blanks, ``_`` is an absent input."""
    read = ["" if i == "_" else i for i in inputs.split()]
    return helper.make_node(operator, read, outputs.split(), name=name, domain=domain, **attributes)


def constant(name, value, as_attribute="value"):
    if as_attribute == "value":
        value = numpy_helper.from_array(np.asarray(value), name)
    return helper.make_node("Constant", [], [name], **{as_attribute: value})


def model(
    nodes,
    shape=("N", 3),
    stored=None,
    outputs="y",
    opset=17,
    dtype="float32",
    listed=False,
    ml=False,
    producer="",
    ir=None,
):
    """A ModelProto with input ``x`` of ``shape``; ``stored`` arrays of float64 take the model's ``dtype``."""
    kind = KINDS[dtype]
    arrays = {k: np.asarray(v) for k, v in (stored or {}).items()}
    arrays = {k: v.astype(dtype) if v.dtype == np.float64 else v for k, v in arrays.items()}
    initializers = [numpy_helper.from_array(v, k) for k, v in arrays.items()]
    inputs = [helper.make_tensor_value_info("x", kind, shape)]
    if listed:
        inputs += [helper.make_tensor_value_info(i.name, i.data_type, i.dims) for i in initializers]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name=o) for o in outputs.split()], initializers)
    for info in graph.output:
        info.CopyFrom(helper.make_tensor_value_info(info.name, kind, None))
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid("ai.onnx.ml", 3)] if ml else [])
    made = helper.make_model(graph, opset_imports=imports, producer_name=producer)
    made.ir_version = ir or {9: 4, 10: 5, 11: 6, 12: 7}.get(opset, min(made.ir_version, 10))
    return made


def run(proto, x, output=None):
    """The file on ``x`` by onnxruntime, or by onnx's reference where onnxruntime has no kernel."""
    feed = next(i.name for i in proto.graph.input)
    wanted = [output or proto.graph.output[0].name]
    try:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(wanted, {feed: x})[0]
    except Exception as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise
        return ReferenceEvaluator(proto).run(wanted, {feed: x})[0]


def features(proto, records, seed=7, scale=2.0):
    info = proto.graph.input[0].type.tensor_type
    dtype = np.float64 if info.elem_type == TensorProto.DOUBLE else np.float32
    shape = [d.dim_value for d in info.shape.dim[1:]]
    return (scale * np.random.default_rng(seed).standard_normal((records, *shape))).astype(dtype)


def agrees(proto, axis=0, output=None, **options):
    """Reads the model, compares it with another evaluation (record axis ``axis``), and returns the graph."""
    graph = models.read(proto, output=output, **options)
    fixed = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    for records in [fixed] if fixed else [1, 4]:
        x = features(proto, records)
        wanted = np.asarray(run(proto, x, output), dtype=np.float64)
        if not (fixed == 1 and wanted.ndim == 0):
            wanted = np.moveaxis(wanted, axis, 0)
        wanted = wanted.reshape(records, -1)
        scale = np.abs(wanted).max(initial=1e-6)
        precision = 1e-9 if x.dtype == np.float64 else 2e-5
        np.testing.assert_allclose(graph.evaluate(x), wanted, rtol=0, atol=precision * scale)
    return graph


def titles(graph):
    """Operators of the IR in order, leaves left out."""
    leaves = {"Input", "Parameter", "Constant"}
    return [n.op.title for n in graph.nodes if n.op.title not in leaves]


def trained(graph):
    return [p.name for p in graph.trainable]


def dense(rows, cols, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, cols))
