"""Parameters written back into ONNX files: the file computes what the graph computes, for every kind of storage."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from reader_tools import constant, model, node, run

import models
from models.errors import ModelError, UnsupportedModelError
from models.writer import with_parameters

ROOT = Path(__file__).resolve().parent.parent
RNG = np.random.default_rng(3)
W, V, B = RNG.normal(size=(3, 2)), RNG.normal(size=(2, 2)), RNG.normal(size=2)


def gemm(dtype="float32", listed=False, ir=None):
    nodes = [node("Gemm", "x W b", "h"), node("Relu", "h", "r"), node("MatMul", "r V", "y")]
    return model(nodes, stored={"W": W, "b": B, "V": V}, dtype=dtype, listed=listed, ir=ir)


def constants():
    nodes = [constant("W", W.astype(np.float32)), node("MatMul", "x W", "h")]
    nodes += [constant("b", [0.5, 0.25], "value_floats"), node("Add", "h b", "y")]
    return model(nodes)


def regressor(name="lin"):
    attributes = {"targets": 2, "coefficients": W.ravel().tolist(), "intercepts": B.tolist()}
    return model([node("LinearRegressor", "x", "y", name=name, domain="ai.onnx.ml", **attributes)], ml=True)


def torch_copies():
    nodes = [node("Identity", "b", "b2"), node("Gemm", "x W b", "h"), node("Gemm", "h V b2", "y")]
    return model(nodes, stored={"W": W, "b": B, "V": V}, producer="pytorch")


def batch_norm(statistics="m s"):
    nodes = [node("MatMul", "x W", "h"), node("BatchNormalization", f"h g b {statistics}", "y")]
    return model(nodes, stored={"W": W, "g": np.ones(2), "b": B, "m": np.zeros(2), "s": np.ones(2)})


FILES = {
    "float32": gemm(), "float64": gemm("float64"), "initializers listed as inputs": gemm(listed=True, ir=3),
    "constants": constants(), "regressor": regressor(), "regressor without a name": regressor(""),
    "copies of torch": torch_copies(), "batch normalisation": batch_norm(),
    "statistics stored with the scale": batch_norm("b g"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_written_file_computes_what_the_graph_computes(name):
    proto = FILES[name]
    graph = models.read(proto)
    theta = np.random.default_rng(1).normal(size=graph.initial().size)
    content = with_parameters(proto, graph.split(theta), metadata={"note": "new"})
    written = onnx.load_from_string(content)
    assert {p.key: p.value for p in written.metadata_props} == {"note": "new"}
    dtype = np.float64 if name == "float64" else np.float32
    again = models.read(content)
    assert [p.name for p in again.trainable] == [p.name for p in graph.trainable]
    np.testing.assert_array_equal(again.initial(), theta.astype(dtype))
    x = np.random.default_rng(2).normal(size=(5, 3)).astype(dtype)
    rounded = theta.astype(dtype).astype(np.float64)
    np.testing.assert_allclose(run(written, x).reshape(5, -1), graph.evaluate(x, rounded), rtol=2e-5, atol=2e-6)
    # The file that was read stays as it is.
    np.testing.assert_array_equal(models.read(proto).initial(), graph.initial())


def test_parameters_that_are_not_named_keep_their_bits():
    graph = models.read(gemm())
    again = models.read(with_parameters(gemm(), {"b": np.array([7.0, 8.0])}))
    old, new = ({p.name: p.value for p in g.parameters} for g in (graph, again))
    assert new["b"].tolist() == [7.0, 8.0]
    np.testing.assert_array_equal(new["W"], old["W"])
    np.testing.assert_array_equal(new["V"], old["V"])


@pytest.mark.parametrize("name", ["keras_mlp", "keras_conv2d", "keras_batchnorm", "omlt__gemm_transB"])
def test_files_of_other_people(name):
    path = ROOT / "tests" / "data" / "onnx" / f"{name}.onnx"
    graph = models.read(path)
    theta = np.random.default_rng(1).normal(size=graph.initial().size) * 0.3
    again = models.read(with_parameters(path, graph.split(theta)))  # read compares with onnxruntime
    np.testing.assert_array_equal(again.initial(), theta.astype(np.float32))


def test_an_entry_of_the_metadata_is_replaced():
    first = with_parameters(gemm(), {}, metadata={"a": "1", "b": "2"})
    second = onnx.load_from_string(with_parameters(first, {}, metadata={"b": "3"}))
    assert {p.key: p.value for p in second.metadata_props} == {"a": "1", "b": "3"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nobody": np.zeros(2)}, "nobody"),
        ({"b": np.zeros(3)}, "shape"),
        ({"b": np.array([np.nan, 0.0])}, "finite"),
        ({"b": np.array([1e300, 0.0])}, "too large"),
    ],
)
def test_values_that_do_not_fit_are_refused(values, message):
    with pytest.raises(ModelError, match=message):
        with_parameters(gemm(), values)


def test_an_array_that_is_a_constant_elsewhere_is_refused():
    # exp(b) is folded into a constant of the file; b is a bias as well.
    nodes = [node("Gemm", "x W b", "h"), node("Exp", "b", "e"), node("Mul", "h e", "y")]
    proto = model(nodes, stored={"W": W, "b": B})
    with pytest.raises(UnsupportedModelError, match="its own"):
        with_parameters(proto, {"b": np.array([1.0, 2.0])})


def test_a_planted_mistake_is_found(monkeypatch):
    import models.writer as writer

    original = writer._replace
    monkeypatch.setattr(writer, "_replace", lambda m, name, a, o: original(m, name, a[::-1].copy(), o))
    with pytest.raises(UnsupportedModelError, match="'b'"):
        with_parameters(gemm(), {"b": np.array([1.0, 2.0])})
