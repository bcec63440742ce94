"""Small Keras models and their way to ONNX; run as a program it writes the files of this folder.

Needs the extra ``keras``; the files were written by tensorflow-cpu 2.21, keras 3.15 and tf2onnx 1.17.
Keras 3 models go through ``tf.function`` and ``tf2onnx.convert.from_function``: ``from_keras`` does not know Keras 3.
"""

from pathlib import Path

import keras
import numpy as np
import onnx
import tensorflow as tf
import tf2onnx
from keras import layers


def mlp() -> keras.Model:
    return keras.Sequential([layers.Input((4,)), layers.Dense(6, "relu"), layers.Dense(3, "tanh"), layers.Dense(1)])


def batchnorm() -> keras.Model:
    return keras.Sequential(
        [layers.Input((4,)), layers.Dense(5), layers.BatchNormalization(), layers.LeakyReLU(0.2), layers.Dense(2)]
    )


def conv2d() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.Conv2D(3, 3, padding="same", strides=2, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(1),
        ]
    )


def separable() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.DepthwiseConv2D(3, activation="softplus"),
            layers.Conv2D(3, 1, activation="elu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ]
    )


def time_series() -> keras.Model:
    inputs = layers.Input((8, 3))
    hidden = layers.Dense(4, activation="sigmoid")(inputs)
    hidden = layers.Conv1D(4, 3, padding="same")(hidden) + hidden
    hidden = layers.Concatenate()([layers.GlobalAveragePooling1D()(hidden), layers.Flatten()(inputs)])
    return keras.Model(inputs, layers.Dense(1)(hidden))


#: Model and the opset of its file.
MODELS = {"mlp": (mlp, 15), "batchnorm": (batchnorm, 15), "conv2d": (conv2d, 15), "separable": (separable, 15),
          "time_series": (time_series, 18)}  # fmt: skip


def initialised(model: keras.Model) -> keras.Model:
    """Weights, biases and statistics that are all different from 0."""
    for weight in model.weights:
        generator = np.random.default_rng(len(weight.path))
        if "variance" in weight.path:
            weight.assign(0.5 + generator.random(weight.shape))
        else:
            weight.assign(0.4 * generator.standard_normal(weight.shape))
    return model


def converted(model: keras.Model, opset: int) -> onnx.ModelProto:
    signature = [tf.TensorSpec((None, *model.input_shape[1:]), tf.float32, name="features")]
    function = tf.function(lambda x: model(x, training=False), input_signature=signature)
    return tf2onnx.convert.from_function(function, input_signature=signature, opset=opset)[0]


if __name__ == "__main__":
    for name, (build, opset) in MODELS.items():
        onnx.save(converted(initialised(build()), opset), Path(__file__).with_name(f"keras_{name}.onnx"))
