"""Every supported ONNX operator in single-operator models, over opsets and precisions, against onnxruntime."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from reader_tools import agrees, constant, dense, model, node, titles, trained

import models
from models.errors import ModelError, UnsupportedModelError
from models.lowering import load_rules
from models.values import RULES

PRECISIONS = ["float32", "float64"]
INTS = np.int64
NEWEST = onnx.defs.onnx_opset_version()


def ints(*values):
    return np.array(values, dtype=INTS)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("opset", [9, 13, NEWEST])
@pytest.mark.parametrize("operator", ["Relu", "Sigmoid", "Tanh", "Softplus", "Abs", "Neg", "Identity", "Softsign"])
def test_unary(operator, opset, dtype):
    agrees(model([node(operator, "x")], opset=opset, dtype=dtype))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(
    "operator, attributes",
    [
        ("LeakyRelu", {}),
        ("LeakyRelu", {"alpha": 0.3}),
        ("LeakyRelu", {"alpha": 1.7}),
        ("LeakyRelu", {"alpha": -0.2}),
        ("Elu", {}),
        ("Elu", {"alpha": 0.5}),
        ("Elu", {"alpha": 1.5}),
        ("Selu", {}),
        ("Celu", {"alpha": 2.0}),
        ("HardSigmoid", {}),
        ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
        ("HardSwish", {}),
        ("Mish", {}),
    ],
)
def test_unary_with_attributes(operator, attributes, dtype):
    if operator == "Celu" and dtype == "float64":
        pytest.skip("Celu is defined for float32 only")
    agrees(model([node(operator, "x", **attributes)], opset=18, dtype=dtype))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("opset", [9, 14])
@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("other", [2.5, [1.0, 2.0, -3.0], [[1.0, 2.0, -3.0]], [[4.0]]])
@pytest.mark.parametrize("swapped", [False, True])
def test_binary_with_a_constant(operator, opset, dtype, other, swapped):
    operands = "c x" if swapped else "x c"
    nodes = [node("Sigmoid", "x", "s"), node(operator, operands.replace("x", "s"))]
    agrees(model(nodes, stored={"c": np.array(other)}, opset=opset, dtype=dtype))


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div", "Max", "Min"])
def test_binary_of_two_record_values(operator):
    nodes = [node("Softplus", "x", "s"), node(operator, "x s")]
    agrees(model(nodes))


def test_broadcast_between_record_values():
    nodes = [
        node("ReduceMean", "x", "m", axes=[1], keepdims=1),
        node("Sub", "x m", "d"),
        node("Transpose", "d", "t", perm=[0, 2, 1]),
        node("Mul", "t c"),
    ]
    agrees(model(nodes, ("N", 4, 3), {"c": dense(3, 1)}))


@pytest.mark.parametrize("operator", ["Max", "Min"])
@pytest.mark.parametrize("bound", [0.5, [0.5], [[[0.5]]], [0.1, -0.2, 0.3]])
def test_extremum_with_a_constant(operator, bound):
    graph = agrees(model([node(operator, "x c")], stored={"c": np.array(bound)}))
    if np.size(bound) == 1:
        assert titles(graph) == ["Clip"]
    agrees(model([node("Sigmoid", "x", "s"), node(operator, "c x s")], stored={"c": np.array(bound)}))
    agrees(model([node(operator, "x")]))


@pytest.mark.parametrize("operator", ["Sum", "Mean"])
def test_variadic(operator):
    nodes = [node("Relu", "x", "a"), node("Tanh", "x", "b"), node(operator, "a b x c")]
    agrees(model(nodes, stored={"c": dense(1, 3)}))
    agrees(model([node(operator, "x")]))


@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0, 4.0])
def test_powers(exponent):
    agrees(model([node("Pow", "x e")], stored={"e": np.array(exponent)}))


def test_reciprocal():
    nodes = [node("Softplus", "x", "s"), node("Add", "s one", "t"), node("Reciprocal", "t")]
    agrees(model(nodes, stored={"one": np.array(1.0)}))


def test_prelu():
    agrees(model([node("PRelu", "x s")], stored={"s": np.array([0.1, 0.5, 2.0])}))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("bounds", ["_ _", "l _", "_ h", "l h"])
def test_clip_bounds(bounds, dtype):
    stored = {"l": np.array(-0.5), "h": np.array(1.0)}
    agrees(model([node("Clip", f"x {bounds}")], stored=stored, dtype=dtype))
    constants = [constant(k, v.astype(dtype)) for k, v in stored.items()]
    agrees(model([*constants, node("Clip", f"x {bounds}")], dtype=dtype))


def test_clip_attributes_of_old_opsets():
    for attributes in ({}, {"min": -0.5}, {"max": 1.0}, {"min": -0.5, "max": 1.0}):
        agrees(model([node("Clip", "x", **attributes)], opset=9))


def test_clip_with_infinite_bounds():
    agrees(model([node("Clip", "x l h")], stored={"l": np.array(0.0), "h": np.array(np.inf)}))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("scales", [{}, {"alpha": 0.5}, {"beta": 2.0}, {"alpha": -1.5, "beta": 0.25}])
@pytest.mark.parametrize("bias", [None, 0.7, [0.7], [1.0, 2.0], [[1.0, 2.0]]])
def test_gemm(trans_a, trans_b, scales, bias, dtype):
    w = dense(2, 3) if trans_b else dense(3, 2)
    stored = {"w": w} | ({} if bias is None else {"b": np.array(bias)})
    nodes = [node("Transpose", "x", "xt", perm=[1, 0])] if trans_a else []
    operands = f"{'xt' if trans_a else 'x'} w{'' if bias is None else ' b'}"
    nodes.append(node("Gemm", operands, transA=trans_a, transB=trans_b, **scales))
    graph = agrees(model(nodes, stored=stored, dtype=dtype))
    assert trained(graph) == list(stored)
    assert titles(graph).count("Add") == 0


def test_gemm_with_the_record_on_the_right():
    nodes = [node("Gemm", "w x b", transA=1, transB=1, alpha=2.0)]
    graph = agrees(model(nodes, stored={"w": dense(3, 2), "b": dense(2, 1)}), axis=1)
    assert trained(graph) == ["w", "b"]
    assert "Add" not in titles(graph)


def test_gemm_with_a_residual_as_its_third_operand():
    agrees(model([node("Gemm", "x w x", beta=0.5)], stored={"w": dense(3, 3)}))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", [("N", 3), ("N", 5, 3), ("N", 2, 5, 3)])
@pytest.mark.parametrize("weight", [(3, 2), (3,)])
def test_matmul(shape, weight, dtype):
    w = np.random.default_rng(1).standard_normal(weight)
    graph = agrees(model([node("MatMul", "x w")], shape, {"w": w}, dtype=dtype))
    assert trained(graph) == ["w"]


def test_matmul_with_a_stack_of_one_matrix():
    agrees(model([node("MatMul", "x w")], ("N", 5, 3), {"w": dense(3, 2)[None]}))


@pytest.mark.parametrize("weight", [(2, 5), (5,)])
def test_matmul_with_the_weight_on_the_left(weight):
    w = np.random.default_rng(1).standard_normal(weight)
    agrees(model([node("MatMul", "w x")], ("N", 5, 3), {"w": w}))
    nodes = [node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "w t", "p"), node("Add", "p b")]
    bias = np.array(0.5) if len(weight) == 1 else dense(2, 1)
    axis = len(weight) - 1
    graph = agrees(model(nodes, ("N", 5), {"w": w, "b": bias}), axis=axis)
    assert titles(graph)[-1] == "Affine"


@pytest.mark.parametrize("bias", [(2,), (1, 2), (1,), (), (1, 1, 2)])
@pytest.mark.parametrize("swapped", [False, True])
def test_bias_after_matmul_is_part_of_the_affine_layer(bias, swapped):
    shape = ("N", 4, 3) if len(bias) == 3 else ("N", 3)
    stored = {"w": dense(3, 2), "b": np.random.default_rng(2).standard_normal(bias)}
    graph = agrees(model([node("MatMul", "x w", "p"), node("Add", "b p" if swapped else "p b")], shape, stored))
    assert titles(graph)[-1] == "Affine"
    assert trained(graph) == ["w", "b"]


def test_bias_is_not_fused_when_the_product_is_read_twice():
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b", "q"), node("Mul", "p q")]
    graph = agrees(model(nodes, stored={"w": dense(3, 2), "b": dense(1, 2)}))
    assert titles(graph) == ["Gather", "Affine", "Add", "Mul"]


def test_bias_that_differs_by_position_is_added():
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b")]
    graph = agrees(model(nodes, ("N", 4, 3), {"w": dense(3, 2), "b": dense(4, 2)}))
    assert titles(graph)[-1] == "Add"


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"kernel_shape": [3, 2]},
        {"strides": [2, 1]},
        {"pads": [1, 0, 2, 1]},
        {"dilations": [2, 3]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER"},
        {"auto_pad": "VALID"},
        {"auto_pad": "NOTSET", "pads": [1, 1, 1, 1], "strides": [2, 2], "dilations": [1, 2]},
    ],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_conv_2d(attributes, groups, dtype):
    w = np.random.default_rng(3).standard_normal((4, 4 // groups, 3, 2))
    stored = {"w": w, "b": np.arange(4.0)}
    for operands in ("x w b", "x w"):
        proto = model([node("Conv", operands, group=groups, **attributes)], ("N", 4, 7, 6), stored, dtype=dtype)
        graph = agrees(proto)
        assert trained(graph) == operands.split()[1:] or set(trained(graph)) == set(operands.split()[1:])


@pytest.mark.parametrize("attributes", [{}, {"strides": [2], "pads": [1, 0]}, {"dilations": [2], "group": 3}])
def test_conv_1d(attributes):
    w = np.random.default_rng(3).standard_normal((3, 3 // attributes.get("group", 1), 2))
    agrees(model([node("Conv", "x w", **attributes)], ("N", 3, 8), {"w": w}))


def test_conv_in_depth_and_with_a_bias_of_its_own():
    w = np.random.default_rng(3).standard_normal((2, 1, 3, 3))
    nodes = [node("Conv", "x w", "c", group=2), node("Add", "c b")]
    graph = agrees(model(nodes, ("N", 2, 5, 5), {"w": w, "b": np.array([1.0, 2.0]).reshape(1, 2, 1, 1)}))
    assert set(trained(graph)) == {"w", "b"}
    w = np.random.default_rng(3).standard_normal((3, 2, 3, 3))
    nodes = [node("Conv", "x w", "c"), node("Add", "c b")]
    graph = agrees(model(nodes, ("N", 2, 5, 5), {"w": w, "b": np.arange(3.0).reshape(3, 1, 1)}))
    assert titles(graph).count("Add") == 0
    assert trained(graph) == ["w", "b"]


@pytest.mark.parametrize("count_pads", [0, 1])
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2, 3]},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [2, 2], "strides": [2, 3], "auto_pad": "SAME_UPPER"},
        {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"},
        {"kernel_shape": [2, 2], "dilations": [2, 1]},
    ],
)
def test_average_pool(attributes, count_pads, ceil):
    if "auto_pad" in attributes and ceil:
        attributes = attributes | {"auto_pad": "VALID"}
    extra = {"count_include_pad": count_pads, "ceil_mode": ceil}
    agrees(model([node("AveragePool", "x", **attributes, **extra)], ("N", 2, 6, 7), opset=19))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_average_pool_1d_and_old(dtype):
    agrees(model([node("AveragePool", "x", kernel_shape=[2], strides=[2])], ("N", 3, 8), opset=9, dtype=dtype))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", [("N", 2, 5), ("N", 2, 3, 4)])
def test_global_average_pool(shape, dtype):
    agrees(model([node("GlobalAveragePool", "x")], shape, dtype=dtype))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceSum"])
@pytest.mark.parametrize("axes", [[1], [2], [-1], [1, 2], [-2, 2]])
@pytest.mark.parametrize("keep", [0, 1])
def test_reductions(operator, axes, keep, dtype):
    shape = ("N", 3, 4)
    agrees(model([node(operator, "x", axes=axes, keepdims=keep)], shape, opset=11, dtype=dtype))
    nodes = [node(operator, "x a", keepdims=keep)]
    agrees(model(nodes, shape, {"a": ints(*axes)}, opset=18, dtype=dtype))


def test_reduction_over_no_axes():
    agrees(model([node("ReduceSum", "x", noop_with_empty_axes=1)]))
    with pytest.raises(UnsupportedModelError, match="record axis, so that records would influence"):
        models.read(model([node("ReduceSum", "x")]))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_flatten(axis):
    proto = model([node("Flatten", "x", axis=axis)], ("N", 2, 3), opset=13)
    agrees(proto, axis=1 if axis == 0 else 0)


@pytest.mark.parametrize(
    "target, options",
    [([-1, 6], {}), ([0, -1], {}), ([0, 3, 2], {}), ([-1, 1, 2, 3], {}), ([-1, 6], {"allowzero": 1})],
)
@pytest.mark.parametrize("as_constant", [False, True])
def test_reshape(target, options, as_constant):
    nodes = [constant("s", ints(*target))] if as_constant else []
    stored = {} if as_constant else {"s": ints(*target)}
    agrees(model([*nodes, node("Reshape", "x s", **options)], ("N", 2, 3), stored))


def test_reshape_merges_records_with_positions_and_takes_them_apart():
    nodes = [
        node("Reshape", "x merge", "flat"),
        node("MatMul", "flat w", "p"),
        node("Reshape", "p split", "q"),
        node("Add", "q b", "r"),
        node("Relu", "r"),
    ]
    stored = {"merge": ints(-1, 3), "split": ints(-1, 5, 2), "w": dense(3, 2), "b": dense(1, 2)[0]}
    graph = agrees(model(nodes, ("N", 5, 3), stored))
    assert titles(graph) == ["Gather", "Affine", "Relu"]


def test_reshape_from_a_shape_subgraph():
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Unsqueeze", "n axes", "n1"),
        node("Concat", "n1 rest", "t", axis=0),
        node("Reshape", "x t"),
    ]
    stored = {"zero": np.array(0, dtype=INTS), "axes": ints(0), "rest": ints(-1)}
    for shape in (("N", 2, 3), (1, 2, 3), (3, 2, 3)):
        agrees(model(nodes, shape, stored))


def test_reshape_from_a_cast_and_sliced_shape():
    nodes = [
        node("Shape", "x", "s"),
        node("Cast", "s", "f", to=onnx.TensorProto.INT32),
        node("Slice", "f zero one", "n"),
        node("Cast", "n", "n64", to=onnx.TensorProto.INT64),
        node("Concat", "n64 rest", "t", axis=0),
        node("Reshape", "x t"),
    ]
    stored = {"zero": ints(0), "one": ints(1), "rest": ints(6)}
    agrees(model(nodes, ("N", 2, 3), stored))


@pytest.mark.parametrize("perm, axis", [(None, 2), ([0, 2, 1], 0), ([1, 0, 2], 1), ([2, 1, 0], 2)])
def test_transpose(perm, axis):
    attributes = {} if perm is None else {"perm": perm}
    agrees(model([node("Transpose", "x", **attributes)], ("N", 2, 3)), axis=axis)


def test_squeeze_and_unsqueeze():
    shape = ("N", 1, 3, 1)
    for axes in ([1], [3], [1, -1]):
        agrees(model([node("Squeeze", "x", axes=axes)], shape, opset=11))
        agrees(model([node("Squeeze", "x a")], shape, {"a": ints(*axes)}, opset=13))
        agrees(model([node("Unsqueeze", "x", axes=[a % 4 for a in axes])], shape, opset=11))
        agrees(model([node("Unsqueeze", "x a")], shape, {"a": ints(*axes)}, opset=13))
    agrees(model([node("Squeeze", "x")], (3, 1, 3, 1)))
    agrees(model([node("Unsqueeze", "x a", "u"), node("Transpose", "u", perm=[1, 0, 2])], stored={"a": ints(0)}))


def test_concat():
    nodes = [node("Relu", "x", "a"), node("Concat", "x a c x", axis=1)]
    agrees(model(nodes, (3, 2), {"c": np.tile([[5.0, 6.0, 7.0]], (3, 1))}))
    agrees(model([node("Concat", "x x", axis=-1)], ("N", 2, 3)))


def test_concat_with_a_constant_expanded_to_the_records():
    nodes = [
        node("Shape", "x", "s"),
        node("Slice", "s zero one", "n"),
        node("Concat", "n width", "t", axis=0),
        node("Expand", "c t", "e"),
        node("Concat", "x e", axis=1),
    ]
    stored = {"zero": ints(0), "one": ints(1), "width": ints(2), "c": dense(1, 2)}
    agrees(model(nodes, stored=stored))


@pytest.mark.parametrize(
    "starts, ends, axes, steps",
    [([1], [3], [1], [1]), ([-3], [1000], [2], [2]), ([0, 1], [2, 4], [1, 2], [1, 2]), ([3], [-1000], [2], [-1])],
)
def test_slice(starts, ends, axes, steps):
    names = {"s": ints(*starts), "e": ints(*ends), "a": ints(*axes), "t": ints(*steps)}
    agrees(model([node("Slice", "x s e a t")], ("N", 3, 5), names))
    if steps == [1]:
        agrees(model([node("Slice", "x", starts=starts, ends=ends, axes=axes)], ("N", 3, 5), opset=9))


def test_slice_that_keeps_all_records():
    nodes = [node("Slice", "x s e")]
    agrees(model(nodes, ("N", 5), {"s": ints(0, 1), "e": ints(2**31, 3)}))
    with pytest.raises(UnsupportedModelError, match="takes some of the records"):
        models.read(model(nodes, ("N", 5), {"s": ints(1, 1), "e": ints(2**31, 3)}))


def test_gather_and_feature_extractor():
    agrees(model([node("Gather", "x i", axis=1)], ("N", 5), {"i": ints(3, 0, -1)}))
    agrees(model([node("Gather", "x i", axis=-1)], ("N", 2, 5), {"i": np.array([[1, 2], [0, 0]], dtype=INTS)}))
    agrees(model([node("Gather", "x i", axis=1)], ("N", 5), {"i": np.array(2, dtype=INTS)}))
    proto = model([node("ArrayFeatureExtractor", "x i", domain="ai.onnx.ml")], ("N", 5), {"i": ints(4, 1)}, ml=True)
    agrees(proto)


def test_split():
    nodes = [node("Split", "x", "a b c", axis=1), node("Mul", "a c", "d"), node("Add", "d b")]
    agrees(model(nodes, ("N", 6), opset=11))
    nodes[0] = node("Split", "x", "a b c", axis=-1, split=[2, 2, 2])
    agrees(model(nodes, ("N", 6), opset=11))
    nodes[0] = node("Split", "x sizes", "a b c", axis=1)
    agrees(model(nodes, ("N", 6), {"sizes": ints(2, 2, 2)}))
    nodes[0] = node("Split", "x", "a b c", axis=1, num_outputs=3)
    agrees(model(nodes, ("N", 6), opset=18))


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_pad(mode):
    pads = ints(0, 1, 2, 0, 0, 1)
    agrees(model([node("Pad", "x p", mode=mode)], ("N", 3, 4), {"p": pads}))
    agrees(model([node("Pad", "x", mode=mode, pads=pads.tolist())], ("N", 3, 4), opset=9))


def test_expand_and_tile():
    agrees(model([node("Expand", "x s")], ("N", 1, 3), {"s": ints(4, 1)}))
    agrees(model([node("Tile", "x r")], ("N", 2, 3), {"r": ints(1, 2, 2)}))


@pytest.mark.parametrize("operator", ["Greater", "Less", "GreaterOrEqual", "LessOrEqual"])
@pytest.mark.parametrize("operands", ["x t", "t x", "x v", "x r"])
@pytest.mark.parametrize("negated", [False, True])
def test_where_with_a_comparison(operator, operands, negated):
    nodes = [node("Tanh", "x", "r"), node(operator, operands, "c")]
    nodes += [node("Not", "c", "d")] if negated else []
    nodes += [node("Softplus", "x", "a"), node("Where", f"{'d' if negated else 'c'} a x")]
    agrees(model(nodes, stored={"t": np.array(0.25), "v": np.array([0.1, -0.3, 0.6])}))


def test_where_with_a_mask_and_a_comparison_as_a_number():
    nodes = [node("Relu", "x", "a"), node("Where", "m a c")]
    agrees(model(nodes, stored={"m": np.array([True, False, True]), "c": np.array(-2.0)}))
    for operator in ("Greater", "LessOrEqual"):
        nodes = [node(operator, "x t", "c"), node("Cast", "c", "f", to=1), node("Mul", "x f")]
        agrees(model(nodes, stored={"t": np.array(0.25)}, opset=16))


@pytest.mark.parametrize("opset", [9, 14, 15])
@pytest.mark.parametrize("shape", [("N", 3), ("N", 3, 4), ("N", 3, 2, 2)])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_batch_normalization(opset, shape, dtype):
    stored = {"s": np.array([1.0, 2.0, 0.5]), "b": np.arange(3.0), "m": np.array([0.1, -2.0, 3.0])}
    stored["v"] = np.array([1.0, 0.3, 4.0])
    nodes = [node("BatchNormalization", "x s b m v", epsilon=1e-3)]
    graph = agrees(model(nodes, shape, stored, opset=opset, dtype=dtype))
    assert trained(graph) == ["s", "b"]
    assert len(graph.parameters) == 2


def test_statistics_stored_with_a_parameter_stay_constant():
    stored = {"s": np.ones(3), "b": np.zeros(3)}
    graph = agrees(model([node("BatchNormalization", "x s b b s")], stored=stored))
    theta = graph.join({"s": np.full(3, 2.0), "b": np.full(3, 0.5)})
    x = np.array([[1.0, -1.0, 3.0]])
    np.testing.assert_allclose(graph.evaluate(x, theta), 2.0 * x / np.sqrt(1 + 1e-5) + 0.5)


@pytest.mark.parametrize("opset", [9, 12, 13])
def test_dropout(opset):
    agrees(model([node("Dropout", "x")], opset=opset))


@pytest.mark.parametrize("to", [onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE])
def test_cast_between_floats(to):
    nodes = [node("Relu", "x", "r"), node("Cast", "r", "y", to=to)]
    proto = model(nodes, dtype="float64")
    proto.graph.output[0].type.tensor_type.elem_type = to
    graph = models.read(proto)
    assert titles(graph) == ["Relu"]


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_regressor(targets, with_bias):
    attributes = {"coefficients": dense(targets, 3).ravel().tolist(), "targets": targets}
    if with_bias:
        attributes["intercepts"] = [0.5] * targets
    for name in ("Reg", ""):
        nodes = [node("LinearRegressor", "x", name=name, domain="ai.onnx.ml", **attributes)]
        graph = agrees(model(nodes, ml=True))
        stem = name or "LinearRegressor_0"
        expected = [f"{stem}/coefficients", f"{stem}/intercepts"][: 1 + with_bias]
        assert trained(graph) == expected


@pytest.mark.parametrize("size", [1, 3])
def test_scaler(size):
    attributes = {"offset": [0.5, -1.0, 2.0][:size], "scale": [2.0, 0.1, -3.0][:size]}
    graph = agrees(model([node("Scaler", "x", domain="ai.onnx.ml", **attributes)], ml=True))
    assert not graph.parameters


def test_every_operator_with_a_rule_has_a_test_here():
    load_rules()
    source = Path(__file__).read_text()
    assert not [name for _, name in RULES if f'"{name}"' not in source]


def test_swish():
    if onnx.defs.onnx_opset_version() < 24:
        pytest.skip("Swish came with opset 24")
    agrees(model([node("Swish", "x")], opset=24))
    agrees(model([node("Swish", "x", alpha=1.5)], opset=24))


def test_cast_like():
    agrees(model([constant("c", np.float32(2.0)), node("CastLike", "c x", "d"), node("Mul", "x d")], opset=15))
    agrees(model([node("CastLike", "x x", "d"), node("Relu", "d")], opset=15))


def test_size_of_a_record_is_a_number_in_a_fixed_file():
    nodes = [node("Size", "x", "n"), node("Cast", "n", "f", to=1), node("Div", "x f")]
    agrees(model(nodes, (2, 3)))
    with pytest.raises(UnsupportedModelError, match="uses the number of records as a number"):
        models.read(model(nodes, ("N", 3)))


def _node_tests():
    """The node tests of the onnx package that use operators with a rule, the first input being one record."""
    collect = pytest.importorskip("onnx.backend.test.case.node").collect_testcases
    load_rules()
    for case in collect(None):
        proto = case.model
        if proto is None or not all(((n.domain, n.op_type) in RULES) for n in proto.graph.node):
            continue
        inputs, outputs = case.data_sets[0]
        arrays = [v for v in [*inputs, outputs[0]] if isinstance(v, np.ndarray)]
        if not inputs or len(arrays) != len(inputs) + 1 or 0 in arrays[0].shape or 0 in arrays[-1].shape:
            continue
        if arrays[0].dtype in (np.float32, np.float64) and arrays[-1].dtype in (np.float32, np.float64):
            yield case.name, proto, arrays[:-1], arrays[-1]


@pytest.mark.filterwarnings("ignore")
def test_node_tests_of_the_onnx_package():
    """Each is read as a file for one record, ``(1, *shape)``, so that no axis is special."""
    passed, refused = 0, {}
    for name, proto, inputs, expected in _node_tests():
        proto = onnx.ModelProto.FromString(proto.SerializeToString())
        graph = proto.graph
        first, *others = [i.name for i in graph.input]
        kind = graph.input[0].type.tensor_type.elem_type
        del graph.input[:]
        shape = (1, *inputs[0].shape)
        graph.input.append(onnx.helper.make_tensor_value_info("record", kind, shape))
        for other, array in zip(others, inputs[1:], strict=True):
            graph.initializer.append(numpy_helper.from_array(array, other))
        graph.initializer.append(numpy_helper.from_array(np.array(inputs[0].shape, dtype=INTS), "shape_of_record"))
        graph.node.insert(0, onnx.helper.make_node("Reshape", ["record", "shape_of_record"], [first], name="unwrap"))
        try:
            read = models.read(proto, output=graph.output[0].name)
        except ModelError as error:
            refused[name] = str(error)
            continue
        found = read.evaluate(inputs[0][None]).reshape(expected.shape)
        tolerance = 1e-4 if "ceil_last_window" in name else 1e-5
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=tolerance, err_msg=name)
        passed += 1
    assert passed > 150
    excused = ("training_mode", "stack of matrices", "the exponent", "inference mode", "empty tensor", "not a real")
    assert not {k: v for k, v in refused.items() if not any(word in v for word in excused)}
