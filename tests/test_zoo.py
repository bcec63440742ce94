"""Torch builders: what they build, that it is exported with readable names and read back with the same numbers."""

import sys

import numpy as np
import pytest

import models
from models.errors import ModelError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from models import zoo  # noqa: E402
from models.zoo import CNN, MLP, Linear  # noqa: E402

SPECS = {
    "linear": (Linear(3), ["output.weight", "output.bias"]),
    "linear without bias": (Linear(3, 2, bias=False), ["output.weight"]),
    "mlp": (
        MLP(4, (6, 5), 2, "tanh"),
        [f"{layer}.{kind}" for layer in ("layer1", "layer2", "output") for kind in ("weight", "bias")],
    ),
    "mlp without hidden layers": (MLP(4, ()), ["output.weight", "output.bias"]),
    "cnn": (
        CNN(2, 8, 6, (3, 2), activation="softplus"),
        [f"{layer}.{kind}" for layer in ("conv1", "conv2", "output") for kind in ("weight", "bias")],
    ),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_export_and_read(name, dtype, tmp_path):
    spec, names = SPECS[name]
    path = zoo.export(spec, tmp_path / "model.onnx", seed=3, dtype=dtype)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]
    graph = models.read(path)
    assert [p.name for p in graph.trainable] == names
    assert graph.input_shape == spec.input_shape
    module = spec.build(seed=3).double()
    x = np.random.default_rng(0).standard_normal((5, *spec.input_shape))
    with torch.no_grad():
        expected = module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(graph.evaluate(x), expected, atol=1e-6 if dtype == "float64" else 1e-5)


@pytest.mark.parametrize("activation", sorted(zoo.ACTIVATIONS))
def test_every_activation(activation, tmp_path):
    graph = models.read(zoo.export(MLP(2, (3,), 1, activation), tmp_path / "model.onnx"))
    assert len(graph.trainable) == 4


def test_a_seed_fixes_the_weights_and_leaves_the_global_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a, b, c = (MLP(3, (4,)).build(seed).state_dict() for seed in (1, 1, 2))
    assert (torch.rand(3) == expected).all()
    assert all((a[k] == b[k]).all() for k in a)
    assert any((a[k] != c[k]).any() for k in a)


def test_equal_and_zero_parameters_keep_their_names(tmp_path):
    """The exporter's optimiser would drop zero biases and merge equal ones."""
    module = MLP(3, (3, 3)).build(0)
    with torch.no_grad():
        module.layer1.bias.zero_()
        module.layer2.bias.zero_()
        module.layer2.weight.copy_(module.layer1.weight)
    graph = models.read(zoo.export(module, tmp_path / "model.onnx", input_shape=(3,)))
    assert len(graph.trainable) == 6


def test_export_leaves_the_module_as_it_was(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)).train()
    graph = models.read(zoo.export(module, tmp_path / "model.onnx", dtype="float64", input_shape=(3,)))
    assert module.training and module[0].weight.dtype == torch.float32
    assert [n.op.title for n in graph.nodes if n.op.title not in ("Parameter", "Input")] == ["Affine", "Affine"]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Linear(0), "inputs must be a positive integer, got 0"),
        (lambda: MLP(3, (4, -1)), "hidden must be a positive integer, got -1"),
        (lambda: MLP(3, activation="gelu"), "activation must be one of relu, .* got 'gelu'"),
        (lambda: CNN(1, 4, 4, kernel=2), "kernel must be odd"),
        (lambda: CNN(1, 4, 4, (2, 2, 2)), "3 pools of 2 need an image of at least 8 x 8, got 4 x 4"),
        (lambda: zoo.export(Linear(2), "x.onnx", dtype="float16"), "dtype must be float32 or float64"),
        (lambda: zoo.export(torch.nn.Linear(2, 1), "x.onnx"), "needs input_shape"),
    ],
)
def test_wrong_arguments(make, words):
    with pytest.raises(ModelError, match=words):
        make()


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelError, match=r"pip install 'certdp\[torch\]'"):
        Linear(2).build()
