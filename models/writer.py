"""Putting parameter values back into an ONNX model.

The result is the same program with other numbers: initializers, Constant nodes and the attributes of a LinearRegressor
are replaced by name, everything else stays (local functions are inlined, external data is brought inside).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from models.errors import ModelError, UnsupportedModelError
from models.ir import Graph
from models.lowering import _needed
from models.reader import Source, load, read
from models.values import ML, domain_of

_STATISTICS = slice(3, 5)  # inputs of BatchNormalization that are never parameters


def with_parameters(
    path: Source,
    values: Mapping[str, np.ndarray],
    *,
    output: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The model as the bytes of an ONNX file, with the parameters of ``values`` replaced.

    ``path``: as for `models.read`; ``output``: the output that was read.  ``values``: finite arrays by parameter name,
    in the parameter's shape; they are rounded to the element type of the file (float32 or float64).  Parameters that
    are not named keep their values.  ``metadata``: entries for the file's ``metadata_props``; they replace older ones.

    Guarantees:
      * the file that is written computes what the graph computes at the values, rounded to the file's element type;
      * parameters that are not named keep their bits.

    Raises ModelError (a name, shape or value that does not fit), UnsupportedModelError (a parameter that is stored in
    a way that cannot be replaced on its own), and what `models.read` raises.
    """
    before = read(path, output=output, check=False)
    model = load(path)
    shapes = {p.name: p.shape for p in before.parameters}
    wanted = output or model.graph.output[0].name
    for name, value in values.items():
        array = np.asarray(value, dtype=np.float64)
        if name not in shapes:
            raise ModelError(f"there is no parameter {name!r}; the model has {', '.join(shapes) or 'none'}")
        if array.shape != shapes[name] or not np.isfinite(array).all():
            raise ModelError(f"parameter {name!r} needs finite values of shape {shapes[name]}, found {array.shape}")
        _replace(model, name, array, wanted)
    kept = [p for p in model.metadata_props if p.key not in (metadata or {})]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, text in (metadata or {}).items():
        model.metadata_props.add(key=key, value=text)
    model.ir_version = max(model.ir_version, 4)  # before, every initializer had to be an input as well
    content = model.SerializeToString()
    _compare(before, read(content, output=output, check=False), values)
    return content


def _replace(model: onnx.ModelProto, name: str, array: np.ndarray, output: str) -> None:
    """Overwrites one stored array in place."""
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.name == name:
            _separate_statistics(graph, tensor)
            tensor.CopyFrom(_tensor(array, tensor, name))
            return
    for position, node in enumerate(_needed(graph, [output])):
        if node.op_type == "Constant" and not domain_of(node) and name in node.output:
            (attribute,) = node.attribute
            old = attribute.t if attribute.name == "value" else numpy_helper.from_array(np.zeros(0, np.float32))
            fresh = helper.make_attribute("value", _tensor(array, old, attribute.t.name))
            del node.attribute[:]
            node.attribute.append(fresh)
            return
        if node.op_type in ("Identity", "Dropout") and list(node.output[:1]) == [name]:
            # An array that the exporter stored once for several parameters becomes one of its own.
            old = next((i for i in graph.initializer if i.name == node.input[0]), None)
            if old is not None:
                graph.initializer.append(_tensor(array, old, name))
                graph.node.remove(node)
                return
        if node.op_type == "LinearRegressor" and domain_of(node) == ML:
            label = node.name or f"{node.op_type}_{position}"
            for attribute in node.attribute:
                if name == f"{label}/{attribute.name}":
                    fresh = helper.make_attribute(attribute.name, [float(v) for v in _rounded(array, np.float32, name)])
                    attribute.CopyFrom(fresh)
                    return
    raise UnsupportedModelError(
        f"parameter {name!r} is stored in a way that cannot be replaced; freeze it, or export the model with this "
        "parameter as an initializer of its own"
    )


def _separate_statistics(graph: onnx.GraphProto, tensor: onnx.TensorProto) -> None:
    """Statistics of a batch normalisation that an exporter stored together with a parameter get a copy of their own."""
    taken = {i.name for i in graph.initializer} | {o for node in graph.node for o in node.output}
    copy = f"{tensor.name}/statistic"
    while copy in taken:
        copy += "_"
    used = False
    for node in graph.node:
        if node.op_type == "BatchNormalization" and not domain_of(node):
            for i in range(*_STATISTICS.indices(len(node.input))):
                if node.input[i] == tensor.name:
                    node.input[i], used = copy, True
    if used:
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = copy


def _tensor(array: np.ndarray, old: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """``array`` in the element type of the tensor it replaces."""
    dtype = helper.tensor_dtype_to_np_dtype(old.data_type)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise UnsupportedModelError(
            f"parameter {name!r} is stored as {dtype}; only float32 and float64 can be written back: freeze it"
        )
    shape = array.shape
    return numpy_helper.from_array(_rounded(array, dtype, name).reshape(shape), name)


def _rounded(array: np.ndarray, dtype, name: str) -> np.ndarray:
    """The values in the file's element type, flat; raises ModelError where they do not fit in."""
    with np.errstate(over="ignore"):
        flat = array.astype(dtype).ravel()
    if not np.isfinite(flat).all():
        raise ModelError(f"parameter {name!r}: a value is too large for {np.dtype(dtype).name}; give smaller values")
    return flat


def _compare(before: Graph, after: Graph, values: Mapping[str, np.ndarray]) -> None:
    """The written model must be the old graph at the new values, and nothing else."""
    stored = {p.name: p.value for p in after.parameters}
    for p in before.parameters:
        target = np.asarray(values.get(p.name, p.value), dtype=np.float64)
        if p.name in stored and any(np.array_equal(stored[p.name], target.astype(t)) for t in (np.float32, np.float64)):
            continue
        raise UnsupportedModelError(
            f"parameter {p.name!r} could not be written back on its own; freeze it, or export the model with this "
            "parameter as an initializer of its own"
        )
    everything = [p.name for p in before.parameters]
    if not everything:
        return
    x = np.random.default_rng(0).normal(size=(3, *before.input_shape))
    theta = np.concatenate([stored[name].ravel() for name in everything])
    with np.errstate(all="ignore"):
        old = before.with_trainable(everything).evaluate(x, theta)
        new = after.evaluate(x)
    if not np.allclose(old, new, rtol=1e-9, atol=1e-12 * (1.0 + np.abs(old).max(initial=0.0)), equal_nan=True):
        raise UnsupportedModelError(
            "a stored array is used both as a parameter and as a constant, so its parameter cannot be replaced on its "
            "own; export the model with separate arrays, or freeze this parameter"
        )
