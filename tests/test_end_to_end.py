"""From files as exporters write them to envelopes and releases.

Gradients are compared with torch's autograd and with differences of onnxruntime's outputs; boxes of neighbouring data
sets are compared exactly, without any tolerance.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
from builders import final, sliding, stepwise, window
from onnx import numpy_helper
from reader_tools import constant, dense, model, node, run
from test_reader import DATA

import models
import privacy
from certify.attack import Direction, attack_report, guided_attack
from certify.cli.app import app
from certify.driver import prepare
from certify.driver import run as certify
from certify.recipe import loads
from solvers import bound

RADII = (0, 1, 2, 3, 8)
WAYS = {"steps": stepwise, "window": final, "overlapping": sliding(2, 1)}


def nests_across_neighbours(graph, features, targets, seed=0, clip=0.3):
    """(S) and (M) for one replaced and one emptied slot, three minibatches, by each kind of window."""
    rng = np.random.default_rng(seed)
    slots = len(features)
    batches = [rng.permutation(slots)[: slots - 1 - t] for t in range(3)]
    other_features, other_targets = features.copy(), targets.copy()
    slot, emptied = rng.permutation(slots)[:2]
    other_features[slot] = 3.0 * rng.standard_normal(features.shape[1:])
    other_targets[slot] = -other_targets[slot] + 2.0
    present = np.arange(slots) != emptied
    for bounds in WAYS.values():
        options = {"rate": 0.2, "clip": clip}
        one = bounds(window(graph, features, targets, batches, RADII, **options))
        np.testing.assert_array_equal(one.lower[0], one.nominal)
        np.testing.assert_array_equal(one.upper[0], one.nominal)
        for neighbour in (
            window(graph, other_features, other_targets, batches, RADII, **options),
            window(graph, features, targets, batches, RADII, present=present, **options),
        ):
            two = bounds(neighbour)
            assert (two.nominal != one.nominal).any()
            for a, b in ((one, two), (two, one)):
                assert (a.lower[1] <= b.nominal).all() and (b.nominal <= a.upper[1]).all()
                for j in range(3):
                    assert (a.lower[j + 1] <= b.lower[j]).all() and (b.upper[j] <= a.upper[j + 1]).all()
        width = one.upper - one.lower
        assert (np.diff(width, axis=0) >= 0.0).all() and width[-1].max() > 0.0


# -- every operator of the list, one file each ------------------------------------------------------------------


def ints(*values):
    return np.array(values, dtype=np.int64)


CUBE = [node("Reshape", "h cube", "c")]  # (N, 2, 3)
IMAGE = [node("Reshape", "h image", "c")]  # (N, 1, 2, 3)
AXES = {"cube": ints(-1, 2, 3), "image": ints(-1, 1, 2, 3), "one": ints(1), "two": ints(2), "far": ints(3)}
FLAT = [node("Flatten", "z", "f")]
TENTHS = np.linspace(-0.8, 0.9, 6)
#: Nodes from ``h`` (N, 6) to ``f`` and what they store beside ``AXES``; "x" is the record itself.
OPERATORS = {
    "Gemm": ([node("Gemm", "h m k", "f", alpha=0.5, beta=2.0)], {"m": dense(6, 4, 5), "k": dense(1, 4, 6)[0]}),
    "MatMul": ([node("MatMul", "h m", "p"), node("Add", "p k", "f")], {"m": dense(6, 4, 5), "k": dense(1, 4, 6)[0]}),
    "Add": ([node("Add", "h x", "p"), node("Add", "p t", "f")], {"t": TENTHS}),
    "Sub": ([node("Sub", "t h", "p"), node("Sub", "p x", "f")], {"t": TENTHS}),
    "Mul": ([node("Mul", "h x", "p"), node("Mul", "p h", "f")], {}),
    "Div": (
        [node("Softplus", "h", "s"), node("Add", "s t", "d"), node("Div", "h d", "f")],
        {"t": np.full(6, 0.5)},
    ),
    "Neg": ([node("Neg", "h", "f")], {}),
    "Relu": ([node("Relu", "h", "f")], {}),
    "LeakyRelu": ([node("LeakyRelu", "h", "f", alpha=0.3)], {}),
    "steep LeakyRelu": ([node("LeakyRelu", "h", "f", alpha=1.5)], {}),
    "Elu": ([node("Elu", "h", "f")], {}),
    "steep Elu": ([node("Elu", "h", "f", alpha=1.5)], {}),
    "Softplus": ([node("Softplus", "h", "f")], {}),
    "Sigmoid": ([node("Sigmoid", "h", "f")], {}),
    "Tanh": ([node("Tanh", "h", "f")], {}),
    "Clip": ([node("Clip", "h low high", "f")], {"low": np.array(-0.7), "high": np.array(0.6)}),
    "Abs": ([node("Abs", "h", "f")], {}),
    "Flatten": ([*CUBE, node("Flatten", "c", "f")], {}),
    "Reshape": ([node("Reshape", "h long", "f")], {"long": ints(-1, 6)}),
    "Transpose": ([*CUBE, node("Transpose", "c", "z", perm=[0, 2, 1]), *FLAT], {}),
    "Squeeze and Unsqueeze": ([node("Unsqueeze", "h two", "u"), node("Tanh", "u", "q"), node("Squeeze", "q two", "f")],
                              {}),
    "Concat": ([node("Tanh", "h", "t"), node("Concat", "h x t", "f", axis=1)], {}),
    "Slice": ([node("Slice", "h from to one step", "f")], {"from": ints(5), "to": ints(0), "step": ints(-2)}),
    "Identity": ([node("Identity", "h", "f")], {}),
    "Constant": ([constant("t", TENTHS), node("Mul", "h t", "f")], {}),
    "Cast": ([node("Cast", "h", "f", to=onnx.TensorProto.DOUBLE)], {}),
    "Dropout": ([node("Dropout", "h", "f")], {}),
    "BatchNormalization": (
        [node("BatchNormalization", "h s t mean var", "f")],
        {"s": np.linspace(0.5, 1.5, 6), "t": TENTHS, "mean": TENTHS[::-1].copy(), "var": np.linspace(0.4, 2.0, 6)},
    ),
    "Conv, one axis": (
        [*CUBE, node("Conv", "c k a", "z", pads=[1, 0]), *FLAT],
        {"k": np.random.default_rng(8).standard_normal((3, 2, 2)), "a": np.array([0.1, -0.2, 0.3])},
    ),
    "Conv, two axes": (
        [*IMAGE, node("Conv", "c k a", "z", pads=[1, 1, 1, 1], strides=[1, 2]), *FLAT],
        {"k": np.random.default_rng(9).standard_normal((2, 1, 3, 3)), "a": np.array([0.1, -0.2])},
    ),
    "Conv in groups": (
        [*CUBE, node("Conv", "c k a", "z", group=2, dilations=[2]), *FLAT],
        {"k": np.random.default_rng(8).standard_normal((4, 1, 2)), "a": np.array([0.1, -0.2, 0.3, 0.4])},
    ),
    "AveragePool": ([*IMAGE, node("AveragePool", "c", "z", kernel_shape=[2, 2], pads=[0, 1, 0, 0]), *FLAT], {}),
    "GlobalAveragePool": ([*CUBE, node("GlobalAveragePool", "c", "z"), *FLAT], {}),
    "ReduceMean": ([*CUBE, node("ReduceMean", "c", "f", axes=[2], keepdims=0)], {}),
    "ReduceSum": ([*CUBE, node("ReduceSum", "c one", "f", keepdims=0)], {}),
    "shared weights": (
        [node("Gemm", "h w b", "p"), node("Tanh", "p", "q"), node("Gemm", "q w b", "r", transB=1),
         node("Add", "r h", "f")], {},
    ),
}  # fmt: skip


def one_operator(name):
    """``x -> Gemm -> the operator -> Gemm -> y`` in float64."""
    nodes, stored = OPERATORS[name]
    nodes = [node("Gemm", "x w b", "h"), *nodes]
    stored = {"w": 0.6 * dense(6, 6, 1), "b": 0.3 * dense(1, 6, 2)[0]} | AXES | stored
    used = {i for n in nodes for i in n.input}
    stored = {k: v for k, v in stored.items() if k in used}
    trial = model(nodes, ("N", 6), stored, outputs="f", dtype="float64")
    wide = run(trial, np.zeros((1, 6))).size
    return model([*nodes, node("Gemm", "f v o")], ("N", 6), stored | {"v": dense(wide, 1, 3), "o": np.array([0.2])},
                 dtype="float64")  # fmt: skip


def moved(proto, name, position, by):
    """The file with one stored number changed."""
    changed = copy.deepcopy(proto)
    for stored in changed.graph.initializer:
        if stored.name == name:
            values = numpy_helper.to_array(stored).copy()
            values.flat[position] += by
            stored.CopyFrom(numpy_helper.from_array(values, name))
            return changed
    for made in changed.graph.node:
        for attribute in made.attribute:
            if f"{made.name}/{attribute.name}" == name:
                attribute.floats[position] += by
                return changed
    raise AssertionError(name)


def total_loss(proto, features, targets):
    return ((run(proto, features).reshape(targets.shape).astype(np.float64) - targets) ** 2).sum()


def gradient_against_differences(proto, features, targets, step, tolerance):
    graph = models.read(proto)
    made = window(graph, features, targets, [range(len(features))], (), rate=1.0, clip=1e5, normaliser=1)
    gradients = graph.split(graph.initial() - final(made).nominal)
    scale = max(np.abs(g).max() for g in gradients.values())
    for p in graph.trainable:
        for position in range(p.value.size):
            ends = [total_loss(moved(proto, p.name, position, by), features, targets) for by in (step, -step)]
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs(gradients[p.name].flat[position] - slope) <= tolerance * scale, (p.name, position)
    return graph


@pytest.mark.parametrize("name", OPERATORS)
def test_the_gradient_through_every_operator_is_that_of_onnxruntime(name):
    rng = np.random.default_rng(4)
    graph = gradient_against_differences(
        one_operator(name), rng.standard_normal((3, 6)), rng.standard_normal((3, 1)), 1e-6, 1e-6
    )
    layers = {"w", "b", "v", "o"} | ({"m", "k"} if name in ("Gemm", "MatMul") else set())
    assert layers <= {p.name for p in graph.trainable}


@pytest.mark.parametrize("name", OPERATORS)
def test_envelopes_through_every_operator_nest_across_neighbours(name):
    rng = np.random.default_rng(5)
    graph = models.read(one_operator(name))
    for products in ("natural", "midpoint-radius"):
        nests_across_neighbours(graph.with_products(products), rng.standard_normal((8, 6)), rng.standard_normal((8, 1)))


def test_linear_regressor_and_scaler_of_ai_onnx_ml():
    """float32 operators; the loss is a parabola in every number, so differences over a long step are its slopes."""
    nodes = [
        node("Scaler", "x", "s", domain="ai.onnx.ml", offset=[0.5, -1.0, 0.0], scale=[2.0, 0.5, 1.5]),
        node("LinearRegressor", "s", "y", name="fit", domain="ai.onnx.ml", targets=2,
             coefficients=[0.3, -0.7, 0.2, 0.1, 0.5, -0.4], intercepts=[0.1, -0.2]),
    ]  # fmt: skip
    proto = model(nodes, ml=True)
    rng = np.random.default_rng(6)
    features = rng.standard_normal((5, 3)).astype(np.float32)
    graph = gradient_against_differences(proto, features, rng.standard_normal((5, 2)), 0.125, 1e-5)
    assert [p.name for p in graph.trainable] == ["fit/coefficients", "fit/intercepts"]
    nests_across_neighbours(graph, features.astype(float), rng.standard_normal((5, 2)))


# -- files of the exporters -------------------------------------------------------------------------------------

KERAS = ["keras_mlp", "keras_batchnorm", "keras_conv2d", "keras_separable", "keras_time_series"]


@pytest.mark.parametrize("name", [*KERAS, "omlt__keras_linear_131_sigmoid"])
def test_envelopes_of_files_of_other_people_nest_across_neighbours(name):
    graph = models.read(DATA / f"{name}.onnx")
    rng = np.random.default_rng(3)
    features = rng.standard_normal((6, *graph.input_shape))
    nests_across_neighbours(graph, features, rng.standard_normal((6, graph.outputs)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_scikit_learn_pipeline_is_certified(precision):
    skl2onnx = pytest.importorskip("skl2onnx")
    from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 3)) * [1.0, 10.0, 0.1] + [0.0, 5.0, 1.0]
    y = x @ [0.5, -0.1, 2.0]
    network = MLPRegressor(hidden_layer_sizes=(4,), max_iter=20, random_state=0)
    pipeline = make_pipeline(StandardScaler(), network).fit(x, y)
    kind = FloatTensorType if precision == "float32" else DoubleTensorType
    graph = models.read(skl2onnx.convert_sklearn(pipeline, initial_types=[("x", kind([None, 3]))]))
    assert len(graph.trainable) == 4
    nests_across_neighbours(graph, x[:8], y[:8, None])


# -- torch ------------------------------------------------------------------------------------------------------

CLIP, RATE = 0.05, 0.3
#: Slopes of activations are float32 numbers in ONNX, which torch's are not.
TOLERANCE = {"kinked": 1e-8, "cnn 1d": 1e-8}


def trained_by_torch(module, features, targets, batches):
    """Per-record gradients by autograd, clipped entry by entry, summed: the parameters after the batches."""
    import torch

    module = copy.deepcopy(module).double()
    parameters = dict(module.named_parameters())
    for batch in batches:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for i in batch:
            out = module(torch.from_numpy(features[i : i + 1]))
            loss = ((out.reshape(1, -1) - torch.from_numpy(targets[i : i + 1])) ** 2).sum()
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            for name, g in zip(parameters, gradients, strict=True):
                total[name] += g.clamp(-CLIP, CLIP)
        with torch.no_grad():
            for name, p in parameters.items():
                p -= RATE / len(batches[0]) * total[name]
    return {name: p.detach().numpy() for name, p in parameters.items()}


def torch_modules():
    """Modules whose parameters both exporters keep as they are, and one convolutional regressor of the zoo."""
    from test_exporters import MODULES

    from models import zoo

    names = ("mlp", "smooth", "kinked", "cnn 1d", "skip", "tied", "batch normalisation")
    image = zoo.CNN(2, 6, 4, (3, 2), activation="elu")
    return {name: MODULES[name] for name in names} | {"cnn 2d": (image.build, image.input_shape)}


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize(
    "name", ["mlp", "smooth", "kinked", "cnn 1d", "cnn 2d", "skip", "tied", "batch normalisation"]
)
def test_the_nominal_run_is_that_of_torch_and_its_envelopes_nest(name, dynamo, tmp_path):
    """Skip connections, tied weights and convolutions included, in float64."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from test_exporters import export

    if dynamo and name in ("tied", "batch normalisation"):
        pytest.skip("this exporter fuses the normalisation and merges parameters, see test_exporters.py")
    make, shape = torch_modules()[name]
    torch.manual_seed(0)
    module = export(make(), shape, tmp_path / "m.onnx", dynamo, torch.float64)
    graph = models.read(tmp_path / "m.onnx")
    rng = np.random.default_rng(1)
    features, targets = rng.standard_normal((8, *shape)), rng.standard_normal((8, graph.outputs))
    batches = [range(8), range(2, 8), range(6)]
    made = window(graph, features, targets, batches, (), rate=RATE, clip=CLIP, normaliser=8)
    found = graph.split(final(made).nominal)
    wanted = trained_by_torch(module, features, targets, batches)
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert np.abs(value - module.state_dict()[key].double().numpy()).max() > 1e-4
        np.testing.assert_allclose(found[key], value, rtol=0, atol=TOLERANCE.get(name, 1e-11))
    nests_across_neighbours(graph, features, targets)


IMAGES = """
[training]
loss = "squared"
steps = 4
clip = 0.05
learning_rate = { schedule = "constant", value = 0.1 }
[features]
shape = [1, 6, 6]
lower = -1
upper = 1
[target]
lower = -1
upper = 1
[output]
lower = -1
upper = 1
"""


@pytest.fixture
def images(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from models import zoo

    rng = np.random.default_rng(0)
    x = rng.uniform(-1.0, 1.0, (30, 1, 6, 6))
    y = np.clip(2.0 * x[:, 0, :3].mean(axis=(1, 2)) + 0.1 * rng.standard_normal(30), -1.0, 1.0)
    path = zoo.export(zoo.CNN(1, 6, 6, (2,), pool=3), tmp_path / "cnn.onnx", seed=1)
    return path, x, y


def test_a_small_convolutional_network_is_certified_attacked_and_released(images):
    path, x, y = images
    graph, recipe = models.read(path), loads(IMAGES)
    made = prepare(graph, recipe, x, y)
    boxes = bound("ibp", made.window(0, made.steps, [made.start(RADII)], RADII))[-1]
    size = len(boxes.nominal)
    report = attack_report(made, RADII, boxes, sorted({0, size // 2, size - 1}), retrainings=3, candidates=48)
    assert (report.lower <= report.reached_lower).all() and (report.reached_upper <= report.upper).all()
    assert (report.ratio[1:] > 0.05).all()
    aim = Direction(np.ones(size))
    found = guided_attack(made, 3, aim, retrainings=3, candidates=48)
    assert found.gain > 0.0 and (boxes.lower[3] <= found.theta).all() and (found.theta <= boxes.upper[3]).all()

    envelope = certify(graph, recipe, x, y, range(6), F=made.steps)
    for (name, low), high in zip(envelope.lower[3].items(), envelope.upper[3].values(), strict=True):
        np.testing.assert_array_equal(low, graph.split(boxes.lower[3])[name])
        np.testing.assert_array_equal(high, graph.split(boxes.upper[3])[name])
    release = privacy.predict(envelope, graph, x[:2], epsilon=1.0)
    assert release.values.shape == (2, 1) and (np.abs(release.values) <= 1.0).all()


def test_images_in_an_npz_file_go_through_the_commands(images, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    path, x, y = images
    monkeypatch.chdir(tmp_path)
    np.savez("train.npz", X=x, y=y)
    np.savez("queries.npz", X=x[:3])
    (tmp_path / "recipe.toml").write_text(IMAGES)
    runner = CliRunner()
    for words in (
        ["certify", path, "--data", "train.npz", "--recipe", "recipe.toml", "--radii", "0..3"]
        + ["-o", "cnn.envelope.safetensors"],
        ["inspect", "cnn.envelope.safetensors", "--model", path, "--data", "queries.npz"],
        ["predict", "cnn.envelope.safetensors", "--model", path, "--data", "queries.npz", "--epsilon", "1"]
        + ["-o", "released.csv"],
    ):
        done = runner.invoke(app, list(map(str, words)))
        assert done.exit_code == 0, (words, done.output, done.exception)
    released = np.loadtxt("released.csv", skiprows=1)
    assert released.shape == (3,) and (np.abs(released) <= 1.0).all()
