"""Keras models written by tf2onnx in the test; needs the extra ``keras`` (``make test-keras``).

Without it, files that were made the same way are read in test_reader.py and certified in test_end_to_end.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from test_end_to_end import nests_across_neighbours

import models

pytest.importorskip("tensorflow", reason="the extra 'keras' is not installed")
pytest.importorskip("tf2onnx", reason="the extra 'keras' is not installed")

_PATH = Path(__file__).parent / "data" / "onnx" / "make_keras.py"
_SPEC = importlib.util.spec_from_file_location("make_keras", _PATH)
make_keras = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_keras)


@pytest.mark.parametrize("opset", [13, 15, 18])
@pytest.mark.parametrize("name", make_keras.MODELS)
def test_a_keras_model_is_read_and_certified(name, opset):
    made = make_keras.initialised(make_keras.MODELS[name][0]())
    graph = models.read(make_keras.converted(made, opset))
    rng = np.random.default_rng(0)
    features = rng.standard_normal((6, *graph.input_shape))
    expected = np.asarray(made(features.astype(np.float32), training=False))
    np.testing.assert_allclose(graph.evaluate(features.astype(np.float32)), expected, atol=1e-5)
    folded = make_keras.layers.BatchNormalization  # arrives as constants
    wanted = sum(layer.count_params() for layer in made.layers if not isinstance(layer, folded))
    assert graph.initial().size == wanted
    nests_across_neighbours(graph, features, rng.standard_normal((6, graph.outputs)))


def test_keras_layers_that_are_refused():
    layers = make_keras.layers
    for layer in (layers.Softmax(), layers.LayerNormalization(), layers.Activation("gelu")):
        made = make_keras.keras.Sequential([layers.Input((4,)), layers.Dense(3), layer])
        with pytest.raises(models.UnsupportedModelError, match=r"^node .*\((Softmax|Erf|ReduceSum|Sqrt|Rsqrt)"):
            models.read(make_keras.converted(make_keras.initialised(made), 15))
