"""Torch builders for common regressors and their ONNX export; torch is imported when a builder is called.

A specification is a frozen dataclass of public facts.  ``build(seed)`` makes the module, ``export`` writes the file.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from models.errors import ModelError

if TYPE_CHECKING:
    import torch

ACTIVATIONS = {
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
    "elu": "ELU",
    "softplus": "Softplus",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "identity": "Identity",
}
Dtype = Literal["float32", "float64"]


def _torch():
    try:
        import torch
    except ImportError as error:
        raise ModelError("models.zoo builds torch modules; install the extra: pip install 'certdp[torch]'") from error
    return torch


def _positive(**fields: int) -> None:
    for name, value in fields.items():
        if int(value) != value or value < 1:
            raise ModelError(f"{name} must be a positive integer, got {value!r}")


def _activation(name: str) -> torch.nn.Module:
    return getattr(_torch().nn, ACTIVATIONS[name])()


def _known_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ModelError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")


@dataclass(frozen=True)
class Linear:
    """``y = W x + b`` for records of ``inputs`` features."""

    inputs: int
    outputs: int = 1
    bias: bool = True

    def __post_init__(self):
        _positive(inputs=self.inputs, outputs=self.outputs)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.inputs,)

    def build(self, seed: int = 0) -> torch.nn.Module:
        """A module whose parameters are called ``output.weight`` and ``output.bias``."""
        nn = _torch().nn
        with _own_random_state():
            layers = OrderedDict(output=nn.Linear(self.inputs, self.outputs, bias=self.bias))
        return _initialised(nn.Sequential(layers), seed)


@dataclass(frozen=True)
class MLP:
    """A multilayer perceptron; ``hidden`` are the widths of the hidden layers, none gives a linear model."""

    inputs: int
    hidden: tuple[int, ...] = (16,)
    outputs: int = 1
    activation: str = "relu"

    def __post_init__(self):
        object.__setattr__(self, "hidden", tuple(self.hidden))
        _positive(inputs=self.inputs, outputs=self.outputs)
        for width in self.hidden:
            _positive(hidden=width)
        _known_activation(self.activation)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.inputs,)

    def build(self, seed: int = 0) -> torch.nn.Module:
        """A module with parameters ``layer1.weight``, ``layer1.bias``, ..., ``output.weight``, ``output.bias``."""
        nn = _torch().nn
        layers = OrderedDict()
        widths = (self.inputs, *self.hidden)
        with _own_random_state():
            for i, (a, b) in enumerate(pairwise(widths), 1):
                layers[f"layer{i}"] = nn.Linear(a, b)
                layers[f"activation{i}"] = _activation(self.activation)
            layers["output"] = nn.Linear(widths[-1], self.outputs)
        return _initialised(nn.Sequential(layers), seed)


@dataclass(frozen=True)
class CNN:
    """A small convolutional regressor for records of shape ``(channels, height, width)``.

    One ``kernel`` x ``kernel`` convolution (same size), activation and ``pool`` x ``pool`` average pool for each
    entry of ``filters``, then one affine layer.
    """

    channels: int
    height: int
    width: int
    filters: tuple[int, ...] = (4,)
    kernel: int = 3
    pool: int = 2
    outputs: int = 1
    activation: str = "relu"

    def __post_init__(self):
        object.__setattr__(self, "filters", tuple(self.filters))
        _positive(channels=self.channels, height=self.height, width=self.width, outputs=self.outputs)
        _positive(kernel=self.kernel, pool=self.pool)
        for width in self.filters:
            _positive(filters=width)
        _known_activation(self.activation)
        if self.kernel % 2 == 0:
            raise ModelError(f"kernel must be odd, so that a convolution keeps the size; got {self.kernel}")
        shrink = self.pool ** len(self.filters)
        if min(self.height, self.width) < shrink:
            raise ModelError(
                f"{len(self.filters)} pools of {self.pool} need an image of at least {shrink} x {shrink}, "
                f"got {self.height} x {self.width}"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.channels, self.height, self.width)

    def build(self, seed: int = 0) -> torch.nn.Module:
        """A module with parameters ``conv1.weight``, ``conv1.bias``, ..., ``output.weight``, ``output.bias``."""
        nn = _torch().nn
        layers = OrderedDict()
        height, width = self.height, self.width
        with _own_random_state():
            for i, (a, b) in enumerate(pairwise((self.channels, *self.filters)), 1):
                layers[f"conv{i}"] = nn.Conv2d(a, b, self.kernel, padding=self.kernel // 2)
                layers[f"activation{i}"] = _activation(self.activation)
                if self.pool > 1:
                    layers[f"pool{i}"] = nn.AvgPool2d(self.pool)
                height, width = height // self.pool, width // self.pool
            layers["flatten"] = nn.Flatten()
            last = self.filters[-1] if self.filters else self.channels
            layers["output"] = nn.Linear(last * height * width, self.outputs)
        return _initialised(nn.Sequential(layers), seed)


Specification = Linear | MLP | CNN


def _own_random_state():
    """The constructors of torch draw initial values from the global generator; this puts it back."""
    return _torch().random.fork_rng(devices=[])


def _initialised(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Fan-in uniform initial values from a generator of their own."""
    torch = _torch()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            weight = getattr(layer, "weight", None)
            if weight is None:
                continue
            bound = weight[0].numel() ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
            if layer.bias is not None:
                layer.bias.uniform_(-bound, bound, generator=generator)
    return module.eval()


def export(
    model: Specification | torch.nn.Module,
    path: str | os.PathLike,
    seed: int = 0,
    dtype: Dtype = "float32",
    input_shape: Sequence[int] | None = None,
) -> Path:
    """Writes an ONNX file with a dynamic number of records and returns its path.

    ``model`` is a specification, built with ``seed``, or any torch module (then ``input_shape`` is the shape of one
    record).  Parameters keep the names they have in torch; everything lies in the one file.
    Raises ModelError when torch is missing or the exporter refuses the module.
    """
    torch = _torch()
    if dtype not in ("float32", "float64"):
        raise ModelError(f"dtype must be float32 or float64, got {dtype!r}")
    if isinstance(model, (Linear, MLP, CNN)):
        module, input_shape = model.build(seed), model.input_shape
    elif input_shape is None:
        raise ModelError("exporting a torch module needs input_shape, the shape of one record")
    else:
        module = model
    was, training = next((p.dtype for p in module.parameters()), torch.float32), module.training
    target = getattr(torch, dtype)
    example = torch.zeros((2, *input_shape), dtype=target)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Without optimisation the exporter keeps every parameter under its own name, also zero and equal ones.
            program = torch.onnx.export(
                module.to(target).eval(),
                (example,),
                input_names=["features"],
                output_names=["prediction"],
                dynamic_shapes=({0: torch.export.Dim("records")},),
                dynamo=True,
                optimize=False,
                verbose=False,
            )
            program.save(str(path), external_data=False)
    except ImportError as error:
        hint = "install the extra: pip install 'certdp[torch]'"
        raise ModelError(f"the torch exporter needs {error.name}; {hint}") from error
    except Exception as error:
        raise ModelError(f"torch.onnx.export refuses this module: {str(error).splitlines()[0]}") from error
    finally:
        module.to(was).train(training)
    return Path(path)


__all__ = ["CNN", "MLP", "Linear", "export"]
