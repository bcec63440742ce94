"""What is refused, and the sentence that says so."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from reader_tools import constant, dense, model, node

import models
from models.errors import InvalidModelError, UnsupportedModelError

DATA = Path(__file__).parent / "data" / "onnx"
INTS = np.int64


def ints(*values):
    return np.array(values, dtype=INTS)


def refused(proto, match, error=UnsupportedModelError, **options):
    with pytest.raises(error, match=match) as caught:
        models.read(proto, **options)
    assert type(caught.value) is error
    report = models.inspect(proto)
    assert not report.readable and report.problem
    return str(caught.value)


@pytest.mark.parametrize(
    "name, words",
    [
        ("omlt__continuous_model", r'node "LgbmRegressor" \(TreeEnsembleRegressor\): a tree ensemble'),
        ("surfaces__k_neighbors_classifier.validity", r"\(TreeEnsembleClassifier\): a tree ensemble .* classifier"),
        ("ort__logreg_iris", r"\(LinearClassifier\): a classifier; this product certifies regressors"),
        ("omlt__gemm", r"\(LogSoftmax\): turns scores into class probabilities"),
        ("omlt__maxpool_2d", r'node "node1" \(MaxPool\): max pooling is not supported; use AveragePool'),
        ("ort__mul_1", "uses ONNX opset 7; 9 to .* are read"),
    ],
)
def test_files_of_other_people(name, words):
    path = DATA / f"{name}.onnx"
    message = refused(path, words)
    assert message.startswith(str(path))


def test_an_invalid_pooling_file():
    """As ``maxpool_2d``, with an operator that is supported: three kernel lengths for two axes."""
    proto = model([node("AveragePool", "x", kernel_shape=[3, 2, 3])], (1, 3, 6, 7))
    refused(proto, "onnxruntime refuses the file: .*kernel_shape", InvalidModelError)
    refused(proto, "kernel, strides, dilations or pads do not fit 2 spatial axes", check=False)


@pytest.mark.parametrize(
    "operator, words",
    [
        ("Softmax", "class probabilities"),
        ("LayerNormalization", "statistics of the record"),
        ("Sin", "this operator is not supported"),
        ("NonZero", "the shape of its result depends on the data"),
        ("Exp", "this operator is not supported"),
        ("RandomNormalLike", "draws random numbers"),
    ],
)
def test_operators(operator, words):
    message = refused(model([node(operator, "x", name="it")]), words)
    assert message.startswith(f'node "it" ({operator}): ')
    assert "`certdp models FILE` lists what is supported" in message


def test_many_nodes_are_counted():
    nodes = [node("Sin", "x", "a"), *[node("Sin", p, q) for p, q in zip("abcd", "bcdy", strict=True)]]
    assert "and 2 more nodes" in refused(model(nodes), "Sin_0")


def test_custom_domain():
    proto = model([node("Magic", "x", domain="org.example")])
    proto.opset_import.append(helper.make_opsetid("org.example", 1))
    refused(proto, "an operator of the custom domain 'org.example'")


def test_control_flow():
    def branch(name):
        return helper.make_graph(
            [node("Relu", "x", name)], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
        )

    nodes = [
        node("ReduceSum", "x", "s", keepdims=0),
        node("Greater", "s zero", "c"),
        helper.make_node("If", ["c"], ["y"], name="branch", then_branch=branch("p"), else_branch=branch("q")),
    ]
    refused(model(nodes, (1, 3), {"zero": np.array(0.0)}), r'"branch" \(If\): control flow')
    nodes[:2] = [constant("c", np.array(True))]
    refused(model(nodes), r'"branch" \(If\): control flow')


def test_integer_quantised():
    nodes = [
        node("QuantizeLinear", "x s z", "q", name="quantise"),
        node("DequantizeLinear", "q s z", "d"),
        node("MatMul", "d w"),
    ]
    stored = {"s": np.array(0.1), "z": np.array(0, dtype=np.uint8), "w": dense(3, 1)}
    refused(model(nodes, stored=stored), r'"quantise" \(QuantizeLinear\): integer quantised arithmetic')
    nodes = [node("DequantizeLinear", "w s z", "v"), node("MatMul", "x v")]
    stored["w"] = np.ones((3, 1), dtype=np.uint8)
    refused(model(nodes, stored=stored), r"\(DequantizeLinear\): integer quantised arithmetic")


def test_casts_that_round():
    nodes = [node("Cast", "x", "i", to=TensorProto.INT64), node("Cast", "i", "y", to=1)]
    refused(model(nodes), "casts a real number to int64, which rounds it")
    refused(model([node("Cast", "x", "h", to=TensorProto.FLOAT16), node("Cast", "h", to=1)]), "float16, which rounds")


def test_half_precision():
    proto = model([node("Cast", "w", "v", to=1), node("MatMul", "x v")], stored={"w": np.ones((3, 1), np.float16)})
    models.read(proto)
    proto = model([node("Relu", "x")])
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    refused(proto, "input 'x' is float16; float .* and double .* are read")


def test_inputs_that_are_not_records():
    proto = model([node("Relu", "x")], ("N", "D"))
    refused(proto, "axis 1 of input 'x' has no fixed length")
    proto = model([node("Add", "x z")])
    proto.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ("N", 3)))
    refused(proto, "exactly one input, the features of a record; it has x, z")
    proto = model([node("Relu", "x")])
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    refused(proto, "has no shape")
    proto = model([node("Constant", "", "y", value_float=1.0)])
    del proto.graph.input[:]
    refused(proto, "it has none")
    proto = model([node("Cast", "x", to=1)])
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    refused(proto, "input 'x' is int64")


def test_opsets_outside_the_range():
    refused(model([node("Relu", "x")], opset=8), "opset 8; 9 to")
    proto = model([node("Relu", "x")])
    proto.opset_import[0].version = 999
    refused(proto, "opset 999; 9 to")


@pytest.mark.parametrize(
    "nodes, words",
    [
        ([node("ReduceMean", "x", axes=[0])], "averages over the record axis"),
        ([node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "t x")], "both depend on the record"),
        ([node("MatMul", "w x")], "sums over the record axis"),
        ([node("Concat", "x x", axis=0)], "joins along the record axis"),
        ([node("Transpose", "x", "t"), node("Add", "x t")], "record axes do not match|both depend"),
        ([node("Reshape", "x s6")], "is the number of records fixed inside"),
        ([node("Gather", "x i", axis=0)], "picks from the record axis"),
        ([node("Reshape", "x flat", "f"), node("Add", "f x")], "record axes do not match"),
        ([node("Size", "x", "s"), node("Cast", "s", "f", to=1), node("Mul", "x f")], "number of records as a number"),
        ([node("Tile", "x s2")], "repeats records"),
        ([node("Transpose", "x", "t"), node("Reshape", "t flat")], "mixes records with features"),
        ([node("Dropout", "x r on")], "training mode"),
        ([node("Greater", "x w2", "c"), node("Cast", "c", "k", to=7), node("Cast", "k", to=1)], "int64, which rounds"),
        ([node("Pow", "x half")], "powers are supported for exponents 1, 2, 3 and 4, found 0.5"),
        ([node("Pow", "half x")], "the exponent must be a constant of the file"),
        ([node("Pad", "x pads one")], "only zero padding"),
    ],
)  # fmt: skip
def test_nodes_that_mix_records_or_need_data(nodes, words):
    stored = {
        "w": dense(2, 4), "w2": np.array(0.2), "s6": ints(2, -1), "s2": ints(2, 1), "i": ints(0), "flat": ints(-1),
        "half": np.array(0.5), "one": np.array(1.0), "pads": ints(0, 1, 0, 0), "r": np.array(0.5),
        "on": np.array(True),
    }  # fmt: skip
    used = {i for n in nodes for i in n.input}
    rows = "N" if "w" not in used else 4
    refused(model(nodes, (rows, 3), {k: v for k, v in stored.items() if k in used}), words)


def test_numbers_that_an_operator_cannot_take():
    refused(model([node("Celu", "x", alpha=-1.0)]), r'"Celu_0" \(Celu\): alpha must be above 0, found -1')
    refused(model([node("LeakyRelu", "x", alpha=float("nan"))]), r"\(LeakyRelu\): .* not finite")
    stored = {"low": np.array(1.0), "high": np.array(-1.0)}
    refused(model([node("Clip", "x low high")], stored=stored), "malformed: Clip needs low <= high", InvalidModelError)


def test_bounds_that_depend_on_the_record():
    nodes = [node("ReduceSum", "x", "s", keepdims=0), node("Clip", "x s")]
    refused(model(nodes, (1, 3)), "the lower bound must be a constant")


def test_data_dependent_lookup_and_shapes():
    nodes = [node("Cast", "x", "i", to=7), node("Gather", "table i", axis=0)]
    refused(model(nodes, ("N", 1), {"table": dense(5, 2)}), "casts a real number to int64")
    nodes = [node("NonZero", "x", "n"), node("Cast", "n", "y", to=1)]
    refused(model(nodes), "depends on the data")


def test_constants_that_differ_from_record_to_record():
    refused(model([node("Mul", "x w")], (3, 2), {"w": dense(3, 2)}), "constant that differs from record to record")
    models.read(model([node("Mul", "x w")], (3, 2), {"w": np.tile([[1.0, 2.0]], (3, 1))}))


def test_outputs_that_are_no_regression():
    refused(model([node("Relu", "w")], stored={"w": np.ones(3)}), "does not depend on the record")
    proto = model([node("Greater", "x w")], stored={"w": np.array(0.0)})
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.BOOL
    refused(proto, "is not a real number computed from the record")


def test_training_mode_of_batch_normalization():
    stored = {k: np.ones(3) for k in "sbmv"}
    proto = model([node("BatchNormalization", "x s b m v", "y p q", training_mode=1)], stored=stored)
    refused(proto, "export the model in inference mode")


def test_post_transform_of_a_regressor():
    nodes = [
        node("LinearRegressor", "x", domain="ai.onnx.ml", coefficients=[1.0] * 3, post_transform="LOGISTIC"),
    ]
    refused(model(nodes, ml=True), "post_transform LOGISTIC")


def test_grouped_and_stacked_products():
    refused(model([node("MatMul", "x w")], ("N", 2, 3), {"w": np.ones((2, 3, 1))}), "a stack of matrices")


def test_sparse_weights():
    proto = model([node("MatMul", "x w")])
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [0])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 1]))
    with pytest.raises((UnsupportedModelError, InvalidModelError), match="sparse|w"):
        models.read(proto, check=False)


@pytest.mark.parametrize(
    "nodes, words",
    [
        ([node("Relu", "nothing")], "nothing"),
        ([node("Gemm", "x w")], "Gemm|dimension|widths"),
        ([node("Concat", "x v", axis=1)], "onnxruntime"),
        ([node("Reshape", "x s")], "reshapes|onnxruntime"),
        ([node("BatchNormalization", "x v v v v")], "onnxruntime|shape"),
    ],
)
def test_models_that_are_not_valid(nodes, words):
    stored = {"w": dense(4, 2), "v": np.ones(2), "s": ints(4, 5)}
    used = {i for n in nodes for i in n.input}
    proto = model(nodes, (2, 3), {k: v for k, v in stored.items() if k in used})
    for check in (True, False):
        with pytest.raises((InvalidModelError, UnsupportedModelError), match=words if check else None):
            models.read(proto, check=check)


def test_weights_that_are_not_finite():
    w = dense(3, 1)
    w[0] = np.nan
    refused(model([node("MatMul", "x w")], stored={"w": w}), "'w' holds values that are not finite")


def test_the_file_is_not_loaded_twice_for_one_output():
    proto = model([node("Sin", "x", "bad"), node("Relu", "x")], outputs="y bad")
    assert models.read(proto, output="y").outputs == 3
    refused(proto, "Sin")


def test_onnx_version_of_the_package_is_newer_than_the_oldest_opset():
    assert onnx.defs.onnx_opset_version() >= 21
