"""Makes the Keras files of this folder; needs tensorflow-cpu 2.21, keras 3.15, tf2onnx 1.17 (not in the test extra).

Keras 3 models go through ``tf.function`` and ``tf2onnx.convert.from_function``: ``from_keras`` does not know Keras 3.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import tf2onnx
from keras import layers

HERE = Path(__file__).parent


def save(name: str, model: keras.Model, opset: int = 15) -> None:
    for weight in model.weights:
        generator = np.random.default_rng(len(weight.path))
        if "variance" in weight.path:
            weight.assign(0.5 + generator.random(weight.shape))
        else:
            weight.assign(0.4 * generator.standard_normal(weight.shape))
    signature = [tf.TensorSpec((None, *model.input_shape[1:]), tf.float32, name="features")]
    function = tf.function(lambda x: model(x, training=False), input_signature=signature)
    tf2onnx.convert.from_function(
        function, input_signature=signature, opset=opset, output_path=str(HERE / f"keras_{name}.onnx")
    )


save("mlp", keras.Sequential([layers.Input((4,)), layers.Dense(6, "relu"), layers.Dense(3, "tanh"), layers.Dense(1)]))
save(
    "batchnorm",
    keras.Sequential(
        [layers.Input((4,)), layers.Dense(5), layers.BatchNormalization(), layers.LeakyReLU(0.2), layers.Dense(2)]
    ),
)
save(
    "conv2d",
    keras.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.Conv2D(3, 3, padding="same", strides=2, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    ),
)
save(
    "separable",
    keras.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.DepthwiseConv2D(3, activation="softplus"),
            layers.Conv2D(3, 1, activation="elu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ]
    ),
)
inputs = layers.Input((8, 3))
hidden = layers.Dense(4, activation="sigmoid")(inputs)
hidden = layers.Conv1D(4, 3, padding="same")(hidden) + hidden
hidden = layers.Concatenate()([layers.GlobalAveragePooling1D()(hidden), layers.Flatten()(inputs)])
save("time_series", keras.Model(inputs, layers.Dense(1)(hidden)), opset=18)
