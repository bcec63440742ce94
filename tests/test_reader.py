"""Reading whole models: legal variants of one net, batches, parameters, names, data files, the check, the report."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import external_data_helper, numpy_helper
from reader_tools import agrees, constant, dense, features, model, node, run, titles, trained

import models
from models import lower_elementwise, ops
from models.errors import DisagreementError, InvalidModelError, ModelError, UnsupportedModelError

DATA = Path(__file__).parent / "data" / "onnx"
W1, B1, W2, B2 = dense(3, 4, 1), dense(1, 4, 2)[0], dense(4, 1, 3), np.array([0.3])
NET = {"w1": W1, "b1": B1, "w2": W2, "b2": B2}


def net(first=None, last=None, between=(), **options):
    """x -> 3 x 4 -> Relu -> 4 x 1 with its first or last layer replaced."""
    nodes = first or [node("Gemm", "x w1 b1", "h")]
    nodes = [*nodes, node("Relu", "h", "r"), *between]
    nodes += last or [node("Gemm", "r w2 b2")]
    stored = options.pop("stored", NET)
    used = {i for n in nodes for i in n.input} - {o for n in nodes for o in n.output}
    return model(nodes, stored={k: v for k, v in stored.items() if k in used}, **options)


def same_as_the_net(proto, names=("w1", "b1", "w2", "b2")):
    """The model agrees with onnxruntime, with the net in numpy, and trains these parameters."""
    graph = agrees(proto)
    x = features(proto, proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value or 5)
    expected = np.maximum(x.astype(np.float64) @ W1 + B1, 0.0) @ W2 + B2
    np.testing.assert_allclose(graph.evaluate(x), expected, atol=1e-5)
    assert sorted(trained(graph)) == sorted(names)
    return graph


F32 = {k: v.astype(np.float32) for k, v in NET.items()}
VARIANTS = {
    "default attributes": net(),
    "named nodes": net([node("Gemm", "x w1 b1", "h", name="fc1")]),
    "all attributes": net([node("Gemm", "x w1 b1", "h", alpha=1.0, beta=1.0, transA=0, transB=0)]),
    "transB": net([node("Gemm", "x w1t b1", "h", transB=1)], stored=NET | {"w1t": W1.T}),
    "transA": net([node("Transpose", "x", "xt"), node("Gemm", "xt w1 b1", "h", transA=1)]),
    "MatMul and Add": net([node("MatMul", "x w1", "p"), node("Add", "p b1", "h")]),
    "bias first": net([node("MatMul", "x w1", "p"), node("Add", "b1 p", "h")]),
    "alpha": net([node("Gemm", "x wh b1", "h", alpha=0.5)], stored=NET | {"wh": 2 * W1}),
    "beta": net([node("Gemm", "x w1 bh", "h", beta=0.5)], stored=NET | {"bh": 2 * B1}),
    "bias as Constant node": net([constant("b1", F32["b1"]), node("Gemm", "x w1 b1", "h")]),
    "weight as Constant node": net([constant("w1", F32["w1"]), node("Gemm", "x w1 b1", "h")]),
    "bias as a row": net([node("Gemm", "x w1 br", "h")], stored=NET | {"br": B1[None]}),
    "scalar bias": net(last=[node("Gemm", "r w2 bs")], stored=NET | {"bs": np.array(0.3)}),
    "x on the right": net(
        [node("Transpose", "x", "xt"), node("Gemm", "w1 xt bc", "ht", transA=1), node("Transpose", "ht", "h")],
        stored=NET | {"bc": B1[:, None]},
    ),
    "two Adds": net(
        [node("MatMul", "x w1", "p"), node("Add", "p bh", "q"), node("Add", "q bh2", "h")],
        stored=NET | {"bh": B1 - 1.0, "bh2": np.ones(4)},
    ),
    "Relu twice": net(between=[node("Relu", "r", "r2")], last=[node("Gemm", "r2 w2 b2")]),
    "initializers listed as inputs": net(listed=True, opset=9, ir=3),
    "dead branch": net(between=[node("Sin", "h", "unused"), node("MaxPool", "x", "z", kernel_shape=[1])]),
    "Cast of an int bias": net(
        [
            node("Cast", "bi", "b1f", to=1),
            node("Gemm", "x w1 b1f", "h"),
        ],
        stored=NET | {"bi": np.array([1, -2, 3, 0], dtype=np.int32)},
    ),
    "Identity and Transpose of a weight": net(
        [node("Transpose", "w1t", "wt"), node("Identity", "wt", "wi"), node("Gemm", "x wi b1", "h")],
        stored=NET | {"w1t": W1.T},
    ),
    "Reshape of a weight": net(
        [node("Reshape", "flat s", "w"), node("Gemm", "x w b1", "h")],
        stored=NET | {"flat": W1.ravel(), "s": np.array([3, 4])},
    ),
    "scaled weight": net(
        [node("Mul", "wh half", "w"), node("Gemm", "x w b1", "h")], stored=NET | {"wh": 2 * W1, "half": np.array(0.5)}
    ),
    "float64": net(dtype="float64"),
    "batch of 1": net(shape=(1, 3)),
    "batch of 3": net(shape=(3, 3)),
    "unnamed batch": net(shape=(None, 3)),
}
NAMES = {
    "transB": {"w1": "w1t"},
    "alpha": {"w1": "wh"},
    "beta": {"b1": "bh"},
    "bias as a row": {"b1": "br"},
    "scalar bias": {"b2": "bs"},
    "x on the right": {"b1": "bc"},
    "two Adds": {"b1": "bh"},
    "Cast of an int bias": {"b1": "b1f"},
    "Identity and Transpose of a weight": {"w1": "w1t"},
    "Reshape of a weight": {"w1": "flat"},
    "scaled weight": {"w1": "wh"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_legal_variants_of_one_net(variant):
    proto = VARIANTS[variant]
    names = [NAMES.get(variant, {}).get(n, n) for n in NET]
    if variant == "dead branch":
        assert models.read(proto, check=False).needed
        del proto.graph.node[2:4]
    if variant == "Cast of an int bias":
        assert sorted(trained(agrees(proto))) == sorted(names)
        return
    same_as_the_net(proto, names)


@pytest.mark.parametrize("opset", range(9, onnx.defs.onnx_opset_version() + 1))
def test_every_opset(opset):
    same_as_the_net(net(opset=opset))


def test_constant_minus_x_and_relu_first_and_last():
    nodes = [
        node("Sub", "c x", "d"),
        node("Relu", "d", "e"),
        node("Gemm", "e w1 b1", "h"),
        node("Relu", "h"),
    ]
    graph = agrees(model(nodes, stored={"c": np.ones(3), "w1": W1, "b1": B1}))
    assert trained(graph) == ["w1", "b1"]
    assert [(p.name, p.affine) for p in graph.parameters] == [("c", False), ("w1", True), ("b1", True)]


def test_shared_preactivation_and_skip_connection():
    nodes = [
        node("Gemm", "x w b", "h"),
        node("Relu", "h", "r"),
        node("Tanh", "h", "t"),
        node("Add", "r t", "s"),
        node("Add", "s x"),
    ]
    agrees(model(nodes, stored={"w": dense(3, 3), "b": np.ones(3)}))


def test_shared_weights_are_one_parameter():
    nodes = [
        node("Gemm", "x w b", "h"),
        node("Relu", "h", "r"),
        node("Gemm", "r w b", "k", transB=1),
        node("MatMul", "k w"),
    ]
    graph = agrees(model(nodes, stored={"w": dense(3, 3), "b": np.ones(3)}))
    assert trained(graph) == ["w", "b"]
    assert sum(isinstance(n.op, ops.Parameter) for n in graph.nodes) == 2
    report = models.inspect(model(nodes, stored={"w": dense(3, 3), "b": np.ones(3)}))
    assert any("'w' is read by 3 nodes" in note for note in report.notes)


def test_identity_of_a_stored_array_is_an_alias_except_in_files_of_torch():
    nodes = [node("Identity", "b", "b2"), node("Gemm", "x w b", "h"), node("Gemm", "h w2 b2")]
    stored = {"w": dense(3, 3), "b": np.zeros(3), "w2": dense(3, 3, 1)}
    assert trained(agrees(model(nodes, stored=stored))) == ["w", "b", "w2"]
    torch_file = model(nodes, stored=stored, producer="pytorch")
    assert trained(agrees(torch_file)) == ["w", "b", "w2", "b2"]
    assert any("two parameters" in note for note in models.inspect(torch_file).notes)


def test_one_of_several_outputs():
    nodes = [node("Gemm", "x w1 b1", "h"), node("Relu", "h"), node("Gemm", "h w2 b2", "z")]
    proto = model(nodes, stored=NET, outputs="y z")
    assert models.read(proto, output="y").outputs == 4
    assert agrees(proto, output="z").outputs == 1
    with pytest.raises(UnsupportedModelError, match="outputs y, z; name the regression output"):
        models.read(proto)
    with pytest.raises(ModelError, match="no output 'q'; the model has y, z"):
        models.read(proto, output="q")


def test_output_without_a_feature_axis():
    nodes = [node("Gemm", "x w b", "h"), node("Squeeze", "h a", "y")]
    stored = {"w": W1[:, :1], "b": B2, "a": np.array([1])}
    graph = agrees(model(nodes, stored=stored))
    assert (graph.output_shape, graph.outputs) == ((), 1)
    nodes[1] = node("Squeeze", "h")
    agrees(model(nodes, (1, 3), {"w": W1[:, :1], "b": B2}))


# -- parameters -------------------------------------------------------------------------------------------------


def test_parameters_in_the_order_of_the_network_with_exact_values():
    graph = models.read(net(stored=dict(reversed(NET.items()))))
    assert trained(graph) == ["w1", "b1", "w2", "b2"]
    np.testing.assert_array_equal(graph.split(graph.initial())["w1"], F32["w1"].astype(np.float64))


def test_patterns_choose_parameters():
    proto = net([node("Mul", "x c", "m"), node("Gemm", "m w1 b1", "h")], stored=NET | {"c": np.ones(3)})
    assert trained(models.read(proto)) == ["w1", "b1", "w2", "b2"]
    assert trained(models.read(proto, trainable=["w?", "c"])) == ["c", "w1", "w2"]
    assert trained(models.read(proto, frozen=["*1"])) == ["w2", "b2"]
    with pytest.raises(ModelError, match="'v.' matches no parameter; there are: c, w1, b1, w2, b2"):
        models.read(proto, trainable=["v."])
    with pytest.raises(ModelError, match="no trainable parameter is left"):
        models.read(proto, frozen=["*"])


def test_weights_computed_from_a_trained_array_are_refused_or_frozen():
    proto = net([node("Exp", "w1", "e"), node("Gemm", "x e b1", "h")])
    assert trained(agrees(proto)) == ["b1", "w2", "b2"]
    with pytest.raises(UnsupportedModelError, match="multiplies two stored matrices"):
        models.read(net([node("MatMul", "w1 v", "w"), node("Gemm", "x w b1", "h")], stored=NET | {"v": dense(4, 4)}))


def test_nodes_have_the_names_of_their_tensors_and_say_where_they_come_from():
    graph = models.read(net([node("Gemm", "x w1 b1", "h", name="fc1")]))
    by_name = {n.name: n for n in graph.nodes}
    assert {"x", "h", "r", "y", "w1"} <= set(by_name)
    assert by_name["h"].source == 'node "fc1" (Gemm)'
    assert by_name["r"].source == 'node "Relu_1" (Relu)'
    x = np.ones((2, 3))
    np.testing.assert_allclose(graph.evaluate(x, keep=True)["h"], x @ W1 + B1, atol=1e-6)


# -- files ------------------------------------------------------------------------------------------------------


def test_path_bytes_and_proto_give_the_same_graph(tmp_path):
    proto = net()
    path = tmp_path / "net.onnx"
    onnx.save(proto, path)
    x = np.ones((2, 3))
    values = [models.read(source).evaluate(x) for source in (path, str(path), path.read_bytes(), proto)]
    assert all((v == values[0]).all() for v in values)
    assert proto == net()


def external(tmp_path):
    proto = net()
    external_data_helper.convert_model_to_external_data(proto, location="net.data", size_threshold=0)
    onnx.save(proto, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_external_data(tmp_path):
    path = external(tmp_path)
    assert (tmp_path / "net.data").is_file()
    same = models.read(path).evaluate(np.ones((1, 3)))
    np.testing.assert_array_equal(same, models.read(net()).evaluate(np.ones((1, 3))))


def test_external_data_that_is_missing_or_short(tmp_path):
    path = external(tmp_path)
    content = path.read_bytes()
    with pytest.raises(InvalidModelError, match="lies in the external file 'net.data'; read the model from its path"):
        models.read(content)
    data = tmp_path / "net.data"
    data.write_bytes(data.read_bytes()[:8])
    with pytest.raises(InvalidModelError, match="external data of initializer"):
        models.read(path)
    data.unlink()
    with pytest.raises(InvalidModelError, match="net.onnx: initializer 'w1' lies in the external data file 'net.data'"):
        models.read(path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x09", b"PK\x03\x04" + bytes(40)])
def test_files_that_are_no_model(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    for function in (models.read, models.inspect):
        with pytest.raises(InvalidModelError, match="model.onnx: this is not"):
            function(path)


def test_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="there is no file"):
        models.read(tmp_path / "nothing.onnx")


def test_truncated_at_any_byte(tmp_path):
    content = net().SerializeToString()
    for end in range(0, len(content), 7):
        try:
            models.read(content[:end])
        except ModelError:
            continue
        raise AssertionError(f"{end} of {len(content)} bytes were read as a model")


def test_flipped_bytes_never_escape_as_other_errors():
    content = bytearray(net().SerializeToString())
    generator = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(content)
        for position in generator.integers(0, len(content), 2):
            broken[position] ^= int(generator.integers(1, 256))
        try:
            models.read(bytes(broken))
        except ModelError as error:
            assert str(error)


def test_model_functions_are_inlined():
    body = onnx.helper.make_function(
        "local",
        "Layer",
        ["a", "w", "b"],
        ["c"],
        [node("MatMul", "a w", "p"), node("Add", "p b", "c")],
        [onnx.helper.make_opsetid("", 17)],
    )
    proto = net([node("Layer", "x w1 b1", "h", domain="local")])
    proto.functions.append(body)
    proto.opset_import.append(onnx.helper.make_opsetid("local", 1))
    same_as_the_net(proto)


READABLE = [
    "keras_mlp", "keras_batchnorm", "keras_conv2d", "keras_separable", "keras_time_series", "omlt__convx1_gemmx1",
    "omlt__gemm_transB", "omlt__gemm_not_transB", "omlt__keras_linear_131", "omlt__keras_linear_131_relu",
    "omlt__keras_linear_131_sigmoid", "ort__sigmoid", "surfaces__gradient_boosting_regressor",
]  # fmt: skip


@pytest.mark.parametrize("name", READABLE)
def test_files_of_other_people(name):
    path = DATA / f"{name}.onnx"
    graph = models.read(path)
    proto = onnx.load(path)
    records = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value or 4
    x = features(proto, records)
    np.testing.assert_allclose(graph.evaluate(x), run(proto, x).reshape(records, -1), rtol=1e-4, atol=1e-5)
    if name != "ort__sigmoid":
        assert graph.trainable


def test_a_classifier_without_its_last_layer_is_read():
    """The scores before LogSoftmax are real outputs, which the cross-entropy loss takes."""
    proto = onnx.load(DATA / "omlt__gemm.onnx")
    last = proto.graph.node.pop()
    assert last.op_type == "LogSoftmax"
    proto.graph.output[0].name = last.input[0]
    graph = agrees(proto)
    assert (graph.input_features, graph.outputs, len(graph.trainable)) == (784, 10, 6)


def test_keras_layers_are_affine_layers_with_trained_biases():
    graph = models.read(DATA / "keras_time_series.onnx")
    assert titles(graph).count("Affine") == 3
    assert [p.trainable for p in graph.parameters] == [True] * 6


# -- the check --------------------------------------------------------------------------------------------------


class _WrongTanh(ops.Tanh):
    def forward(self, args):
        return np.tanh(args[0]) + 1e-2


def test_a_planted_error_is_named(monkeypatch):
    nodes = [
        node("Gemm", "x w1 b1", "h", name="first"),
        node("Tanh", "h", "t", name="middle"),
        node("Gemm", "t w2 b2", name="last"),
    ]
    proto = model(nodes, stored=NET)
    models.read(proto)
    monkeypatch.setitem(lower_elementwise._UNARY, "Tanh", _WrongTanh)
    with pytest.raises(DisagreementError, match=r'first at node "middle" \(Tanh\), tensor \'t\'') as caught:
        models.read(proto)
    assert "please report it" in str(caught.value)
    assert models.inspect(proto).problem == str(caught.value)
    models.read(proto, check=False)


def test_a_planted_layout_error_is_named(monkeypatch):
    from models import values

    wrong = values.RULES["", "Transpose"]

    def flipped(b, call):
        right = wrong(b, call)
        return b.view(right, right.index[..., ::-1], right.axis)

    monkeypatch.setitem(values.RULES, ("", "Transpose"), flipped)
    nodes = [node("Relu", "x", "r"), node("Transpose", "r", "t", perm=[0, 2, 1], name="turn"), node("MatMul", "t w")]
    with pytest.raises(DisagreementError, match=r'node "turn" \(Transpose\)'):
        models.read(model(nodes, ("N", 2, 3), {"w": dense(2, 1)}))


def test_rounding_that_a_model_amplifies_is_no_error():
    nodes = [node("Sigmoid", "x", "s"), node("Reciprocal", "s", "q"), node("Mul", "q big")]
    models.read(model(nodes, stored={"big": np.array(1e6)}))
    nodes = [node("Add", "x big", "s"), node("Sub", "s big")]
    models.read(model(nodes, stored={"big": np.array(1e4)}))


def test_the_check_leaves_inputs_alone():
    proto = net()
    before = proto.SerializeToString()
    models.read(proto)
    models.inspect(proto)
    assert proto.SerializeToString() == before


# -- the report -------------------------------------------------------------------------------------------------


def test_report_of_a_readable_file():
    report = models.inspect(DATA / "keras_conv2d.onnx")
    assert report.readable and report.problem is None and not report.unsupported
    assert report.operators["Conv"] == 1 and report.operators["MatMul"] == 1
    assert report.inputs == (("features", "float (unk__0, 6, 6, 2)"),) or report.inputs[0][1].endswith("6, 6, 2)")
    assert report.producer.startswith("tf2onnx")
    assert report.graph.trainable


def test_report_lists_every_node_that_is_not_supported():
    nodes = [
        node("Sin", "x", "a", name="wave"),
        node("MatMul", "a w1", "b"),
        node("Erf", "b", "c"),
        node("Gemm", "x w1 b1", "d", transA=1, name="sum"),
        node("Softmax", "c", "e", name="soft"),
        node("Add", "e d"),
    ]
    report = models.inspect(model(nodes, stored=NET))
    assert not report.readable
    assert [(p.name, p.operator) for p in report.unsupported] == [
        ("wave", "Sin"), ("Erf_2", "Erf"), ("sum", "Gemm"), ("soft", "Softmax"),
    ]  # fmt: skip
    assert "record axis" in report.unsupported[2].reason
    assert "classifier" in report.unsupported[3].reason


def test_supported_operators():
    names = models.supported_operators()
    assert names == sorted(names, key=str.lower)
    assert {"Gemm", "ai.onnx.ml.Scaler", "Constant", "GlobalAveragePool"} <= set(names)


def test_pictures(tmp_path):
    from models.draw import draw

    graph = models.read(DATA / "keras_time_series.onnx", frozen=["*dense_7*"])
    for suffix in ("png", "svg"):
        path = draw(graph, tmp_path / f"graph.{suffix}")
        assert path.stat().st_size > 5000
    svg = path.read_text()
    assert "<svg" in svg
    with pytest.raises(ModelError, match="cannot write"):
        draw(graph, tmp_path / "graph.xyz")
    draw(models.read(model([node("Relu", "x")])), tmp_path / "small.png")


def test_command(tmp_path):
    import typer
    from typer.testing import CliRunner

    from certify.cli.models import command

    app = typer.Typer()
    app.command()(command)
    runner = CliRunner(env={"COLUMNS": "200"})
    picture = tmp_path / "graph.png"
    result = runner.invoke(app, [str(DATA / "keras_mlp.onnx"), "--frozen", "*dense_1_2*", "--picture", str(picture)])
    assert result.exit_code == 0 and picture.is_file()
    for word in ("MatMul", "Affine", "sequential_1/dense_1/BiasAdd:0", "4x6", "agrees with onnxruntime"):
        assert word in result.output
    result = runner.invoke(app, [str(DATA / "ort__logreg_iris.onnx")])
    assert result.exit_code == 2
    for word in ("LinearClassifier", "a classifier", "Supported operators: Abs, Add"):
        assert word in result.output
    result = runner.invoke(app, [str(tmp_path / "none.onnx")])
    assert isinstance(result.exception, ModelError)


def test_import_is_light():
    code = (
        "import sys, models; models.__dir__(); "
        "heavy = {'onnx', 'onnxruntime', 'torch', 'networkx', 'numba', 'matplotlib', 'scipy'} & set(sys.modules); "
        "assert not heavy, heavy; models.UnsupportedModelError; assert 'onnx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(models.__file__).parent.parent)


def test_stored_values_are_the_file_s_values_in_float64():
    """Semantics: real arithmetic over the stored weights; float32 numbers are converted exactly."""
    weight = np.array([[0.1], [1e-30], [3.3]], dtype=np.float32)
    proto = model([node("MatMul", "x w")])
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    graph = models.read(proto)
    assert (graph.initial() == weight.ravel().astype(np.float64)).all()
