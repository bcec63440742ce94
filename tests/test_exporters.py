"""Files written in the test by the exporters people use: torch (both), scikit-learn through skl2onnx."""

import warnings

import numpy as np
import onnx
import pytest
from reader_tools import titles

import models
from models.errors import InvalidModelError, UnsupportedModelError

torch = pytest.importorskip("torch")
nn = torch.nn
skl2onnx = pytest.importorskip("skl2onnx")
pytest.importorskip("onnxscript")


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        h = torch.relu(self.a(x))
        h = self.b(h) + x
        h = self.b(torch.tanh(h)) * 0.5
        return self.out(torch.cat([h, x], dim=1)).squeeze(1)


class Scaled(nn.Module):
    """Buffers, view with the batch size, clamp, slices, a product with the weight on the left."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, -1.0, 2.0, 0.1]))
        self.register_buffer("std", torch.tensor([1.5, 0.3, 2.0, 1.0]))
        self.w = nn.Parameter(torch.linspace(-1, 1, 6).reshape(3, 2))
        self.c = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x):
        z = ((x - self.mean) / self.std).clamp(-3.0, 3.0).view(x.shape[0], 2, 2)
        h = torch.matmul(self.w, z.transpose(1, 2)).mean(dim=2) + self.c
        return nn.functional.silu(h[:, :2]).sum(dim=1, keepdim=True) - h[:, 2:] ** 2


class TiedAndZero(nn.Module):
    """Tied weights, equal biases, batch normalisation whose scale equals its variance."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight
        nn.init.constant_(self.a.bias, 0.25)
        nn.init.constant_(self.b.bias, 0.25)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.c(self.norm(torch.relu(self.b(torch.relu(self.a(x))))))


def small(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers)


def statistics(module):
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            generator = torch.Generator().manual_seed(1)
            layer.running_mean.uniform_(-1, 1, generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    return module


MODULES = {
    "linear": (lambda: small(nn.Linear(4, 1)), (4,)),
    "mlp": (lambda: small(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)), (4,)),
    "smooth": (lambda: small(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 3), nn.Sigmoid(), nn.Linear(3, 1)), (4,)),
    "kinked": (
        lambda: small(nn.Linear(4, 5), nn.LeakyReLU(0.2), nn.Linear(5, 3), nn.ELU(), nn.Hardtanh(), nn.Linear(3, 1)),
        (4,),
    ),
    "without bias": (lambda: small(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False)), (4,)),
    "dropout": (lambda: small(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 1)), (4,)),
    "time series": (lambda: small(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(20, 1)), (5, 3)),
    "batch normalisation": (
        lambda: statistics(small(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))),
        (4,),
    ),
    "cnn": (
        lambda: statistics(
            small(
                nn.Conv2d(2, 4, 3, padding=1, stride=2),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Conv2d(4, 4, 3, groups=2),
                nn.AvgPool2d(2, ceil_mode=True),
                nn.Flatten(),
                nn.Linear(16, 1),
            )
        ),
        (2, 9, 9),
    ),  # fmt: skip
    "cnn 1d": (
        lambda: small(
            nn.Conv1d(2, 3, 3, dilation=2, padding="same"),
            nn.SELU(),
            nn.AvgPool1d(2),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(3, 1),
        ),
        (2, 8),
    ),  # fmt: skip
    "skip": (Skip, (4,)),
    "scaled": (Scaled, (4,)),
    "tied": (TiedAndZero, (4,)),
}


#: Parameters that an exporter renames (a transposed copy), fuses into another one, or that are no affine bias.
NOT_UNDER_THEIR_NAME = {
    False: {
        "time series": {"0.weight"},
        "without bias": {"0.weight", "2.weight"},
        "cnn": {"0.weight", "0.bias", "1.weight", "1.bias"},
        "scaled": {"c"},
    },
    True: {
        "time series": {"0.weight"},
        "scaled": {"c"},
        "batch normalisation": {"1.weight", "1.bias"},
        "cnn": {"1.weight", "1.bias"},
        "tied": {"a.weight", "b.bias"},
    },
}


def export(module, shape, path, dynamo, dtype=torch.float32, fixed=None):
    module = module.to(dtype).eval()
    example = torch.randn((fixed or 2, *shape), dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            dims = None if fixed else ({0: torch.export.Dim("batch")},)
            torch.onnx.export(
                module, (example,), path, dynamo=True, dynamic_shapes=dims, external_data=False, verbose=False
            )
        else:
            axes = None if fixed else {"x": {0: "batch"}, "y": {0: "batch"}}
            torch.onnx.export(
                module, (example,), path, dynamo=False, dynamic_axes=axes, input_names=["x"], output_names=["y"]
            )
    return module


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("name", MODULES)
def test_torch(name, dynamo, tmp_path):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = export(make(), shape, tmp_path / "m.onnx", dynamo)
    graph = models.read(tmp_path / "m.onnx")
    x = np.random.default_rng(1).standard_normal((6, *shape)).astype(np.float32)
    with torch.no_grad():
        expected = module.double()(torch.from_numpy(x).double()).numpy().reshape(6, -1)
    np.testing.assert_allclose(graph.evaluate(x), expected, rtol=0, atol=2e-6 * (1 + np.abs(expected).max()))
    missing = {n for n, p in module.named_parameters()} - {p.name for p in graph.trainable}
    assert missing == NOT_UNDER_THEIR_NAME[dynamo].get(name, set())


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("fixed", [1, 3])
def test_torch_with_a_fixed_number_of_records(dynamo, fixed, tmp_path):
    for name in ("skip", "cnn", "scaled"):
        make, shape = MODULES[name]
        module = export(make(), shape, tmp_path / "m.onnx", dynamo, fixed=fixed)
        graph = models.read(tmp_path / "m.onnx")
        x = np.random.default_rng(1).standard_normal((fixed, *shape)).astype(np.float32)
        with torch.no_grad():
            expected = module(torch.from_numpy(x)).numpy().reshape(fixed, -1)
        np.testing.assert_allclose(graph.evaluate(x), expected, atol=1e-4)


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_torch_in_double_precision(dynamo, tmp_path):
    for name in ("mlp", "cnn 1d"):
        make, shape = MODULES[name]
        module = export(make(), shape, tmp_path / "m.onnx", dynamo, torch.float64)
        x = np.random.default_rng(1).standard_normal((4, *shape))
        with torch.no_grad():
            expected = module(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(models.read(tmp_path / "m.onnx").evaluate(x), expected, atol=1e-9)


def test_torchscript_restores_parameters_it_merged(tmp_path):
    """Equal parameters are stored once and restored by Identity; tied ones are not."""
    export(TiedAndZero(), (4,), tmp_path / "m.onnx", False)
    graph = models.read(tmp_path / "m.onnx")
    names = {p.name for p in graph.trainable}
    assert {"a.weight", "a.bias", "b.bias", "b.weight", "norm.weight", "norm.bias", "c.bias"} == names
    report = models.inspect(tmp_path / "m.onnx")
    assert any("'b.bias' is stored together with 'a.bias'" in note for note in report.notes)
    assert any("'a.weight' is read by 2 nodes" in note for note in report.notes)
    assert not any("running" in note for note in report.notes)


def test_dynamo_external_data(tmp_path):
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            small(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), (torch.zeros(2, 64),), path, dynamo=True,
            external_data=True, verbose=False,
        )  # fmt: skip
    assert (tmp_path / "m.onnx.data").is_file()
    assert len(models.read(path).trainable) == 4
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(InvalidModelError, match="external data file 'm.onnx.data', which is missing"):
        models.read(path)


@pytest.mark.parametrize("layer", [nn.Softmax(1), nn.LayerNorm(4), nn.GELU(), nn.MaxPool1d(2)])
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_torch_layers_that_are_refused(layer, dynamo, tmp_path):
    shape = (3, 4) if isinstance(layer, nn.MaxPool1d) else (4,)
    export(small(nn.Linear(4, 4), layer), shape, tmp_path / "m", dynamo)
    with pytest.raises(UnsupportedModelError, match=r"m: node .* \((Softmax|LayerNorm|Gelu|Erf|MaxPool)"):
        models.read(tmp_path / "m")


# -- scikit-learn -----------------------------------------------------------------------------------------------

X = np.random.default_rng(0).standard_normal((60, 4)) * [1.0, 10.0, 0.1, 3.0] + [0.0, 5.0, 1.0, -2.0]
Y = X @ [0.5, -0.2, 3.0, 0.1] + 0.3 * np.sin(X[:, 0])
Y2 = np.stack([Y, -Y + X[:, 1]], axis=1)


def regressors():
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import ElasticNet, LinearRegression, Ridge, SGDRegressor
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
    from sklearn.svm import LinearSVR

    def mlp(activation):
        return MLPRegressor(hidden_layer_sizes=(6, 5), activation=activation, max_iter=30, random_state=0)

    return {
        "LinearRegression": (LinearRegression(), Y),
        "without intercept": (LinearRegression(fit_intercept=False), Y),
        "two targets": (LinearRegression(), Y2),
        "Ridge": (Ridge(), Y),
        "ElasticNet": (ElasticNet(0.01), Y),
        "SGDRegressor": (make_pipeline(StandardScaler(), SGDRegressor(random_state=0)), Y),
        "LinearSVR": (make_pipeline(StandardScaler(), LinearSVR(random_state=0)), Y),
        "relu": (make_pipeline(StandardScaler(), mlp("relu")), Y),
        "tanh": (make_pipeline(MinMaxScaler(), mlp("tanh")), Y),
        "logistic": (make_pipeline(RobustScaler(), mlp("logistic")), Y2),
        "identity": (make_pipeline(MaxAbsScaler(), mlp("identity")), Y),
        "bare MLP": (mlp("relu"), Y),
        "clipped": (make_pipeline(MinMaxScaler(clip=True), Ridge()), Y),
        "columns": (
            make_pipeline(
                ColumnTransformer(
                    [("a", StandardScaler(), [0, 2]), ("b", MinMaxScaler(), [1]), ("c", "passthrough", [3])]
                ),
                Ridge(),
            ),
            Y,
        ),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("name", regressors())
def test_scikit_learn(name, precision):
    from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType

    if (name, precision) == ("without intercept", "float64"):
        pytest.skip("skl2onnx 1.20 cannot convert it")
    regressor, target = regressors()[name]
    regressor.fit(X, target)
    kind = FloatTensorType if precision == "float32" else DoubleTensorType
    proto = skl2onnx.convert_sklearn(regressor, initial_types=[("x", kind([None, 4]))])
    graph = models.read(proto)
    expected = regressor.predict(X).reshape(len(X), -1)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(graph.evaluate(X), expected, atol=scale * (1e-5 if precision == "float32" else 1e-9))
    assert graph.trainable
    if name in ("relu", "tanh", "logistic", "bare MLP"):
        assert titles(graph).count("Affine") == 3
        assert len(graph.trainable) == 6


@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_models_that_are_refused():
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsRegressor

    for estimator, words in (
        (RandomForestRegressor(3, random_state=0), "a tree ensemble is piecewise constant"),
        (LogisticRegression(), "a classifier; this product certifies regressors"),
        (KNeighborsRegressor(), "is not supported|depend on the record"),
    ):
        estimator.fit(X, Y > 0 if "Logistic" in type(estimator).__name__ else Y)
        proto = skl2onnx.convert_sklearn(estimator, initial_types=[("x", FloatTensorType([None, 4]))])
        with pytest.raises(UnsupportedModelError, match=words):
            models.read(proto)


def test_a_fixed_batch_of_skl2onnx_and_its_doubled_opset():
    from skl2onnx.common.data_types import FloatTensorType
    from sklearn.linear_model import Ridge

    proto = skl2onnx.convert_sklearn(Ridge().fit(X, Y), initial_types=[("x", FloatTensorType([3, 4]))])
    proto.opset_import.append(onnx.helper.make_opsetid("", proto.opset_import[0].version or 18))
    assert models.read(proto).outputs == 1


def test_the_digest_covers_external_data(tmp_path):
    import onnx

    import models

    weight = onnx.numpy_helper.from_array(np.ones((400, 3), np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["w", "x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [onnx.helper.make_tensor_value_info("y", 1, None)], [weight])
    path = tmp_path / "m.onnx"
    onnx.save_model(onnx.helper.make_model(graph), path, save_as_external_data=True, location="m.data")
    before = models.digest(path)
    assert before == models.digest(path)
    content = bytearray((tmp_path / "m.data").read_bytes())
    content[7] ^= 1
    (tmp_path / "m.data").write_bytes(content)
    assert models.digest(path) != before
    (tmp_path / "m.data").unlink()
    with pytest.raises(models.ModelError, match="m.data"):
        models.digest(path)
