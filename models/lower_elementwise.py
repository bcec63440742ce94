"""Rules of elementwise ONNX operators: arithmetic, activations, comparisons, ai.onnx.ml Scaler, BatchNormalization."""

from __future__ import annotations

import numpy as np

from models.builder import Builder
from models.errors import InvalidModelError
from models.ops import (
    Abs,
    Add,
    Clip,
    Concat,
    Div,
    Elu,
    LeakyRelu,
    Mul,
    Neg,
    Relu,
    Select,
    Sigmoid,
    Softplus,
    Sub,
    Tanh,
)
from models.values import ML, Call, Condition, Known, Tensor, Value, kind_name, lowers, refuse

_UNARY = {"Relu": Relu, "Sigmoid": Sigmoid, "Tanh": Tanh, "Softplus": Softplus, "Abs": Abs, "Neg": Neg}
_BINARY = {"Sub": Sub, "Mul": Mul, "Div": Div}


def scalar(b: Builder, value: Value | None, what: str, default: float) -> float:
    """One number known when the file is read."""
    if value is None:
        return default
    array = b.numbers(value, what)
    if array.size != 1:
        raise refuse(f"{what} must be one number, found shape {array.shape}")
    return float(array.reshape(()))


@lowers(*_UNARY)
def unary(b: Builder, call: Call) -> Value:
    return b.elementwise(_UNARY[call.operator](), call.input(0))


@lowers(*_BINARY)
def binary(b: Builder, call: Call) -> Value:
    x, y = call.input(0), call.input(1)
    neutral = 0.0 if call.operator == "Sub" else 1.0
    plain = isinstance(x, Tensor) and isinstance(y, Known) and not y.counts
    if plain and y.array.size == 1 and y.array.ndim <= x.rank and y.array.item() == neutral:
        # Exporters write softplus(1.0 * x) / 1.0.
        return b.view(x, x.index, x.axis)
    return b.elementwise(_BINARY[call.operator](), x, y)


@lowers("LeakyRelu")
def leaky_relu(b: Builder, call: Call) -> Value:
    return rectified(b, call.input(0), call.attribute("alpha", 0.01))


def rectified(b: Builder, x: Value | None, slope: float) -> Value:
    """``x`` above 0 and ``slope x`` below, for any slope."""
    if 0.0 <= slope <= 1.0:
        return b.elementwise(LeakyRelu(slope), x)
    below = b.elementwise(Mul(), b.elementwise(Clip(high=0.0), x), b.number(slope))
    return b.elementwise(Add(), b.elementwise(Relu(), x), below)


@lowers("PRelu")
def prelu(b: Builder, call: Call) -> Value:
    x, slope = call.input(0), call.input(1)
    below = b.elementwise(Mul(), b.elementwise(Clip(high=0.0), x), slope)
    return b.elementwise(Add(), b.elementwise(Relu(), x), below)


def exponential(b: Builder, x: Value | None, alpha: float) -> Value:
    """Elu with any ``alpha``."""
    if 0.0 <= alpha <= 1.0:
        return b.elementwise(Elu(alpha), x)
    below = b.elementwise(Elu(1.0), b.elementwise(Clip(high=0.0), x))
    return b.elementwise(Add(), b.elementwise(Relu(), x), b.elementwise(Mul(), below, b.number(alpha)))


@lowers("Elu")
def elu(b: Builder, call: Call) -> Value:
    return exponential(b, call.input(0), call.attribute("alpha", 1.0))


@lowers("Selu")
def selu(b: Builder, call: Call) -> Value:
    alpha = call.attribute("alpha", 1.6732631921768188)
    gamma = call.attribute("gamma", 1.0507010221481323)
    return b.elementwise(Mul(), exponential(b, call.input(0), alpha), b.number(gamma))


@lowers("Celu")
def celu(b: Builder, call: Call) -> Value:
    if not call.attribute("alpha", 1.0) > 0.0:
        raise refuse(f"alpha must be above 0, found {call.attribute('alpha', 1.0):g}")
    alpha = b.number(call.attribute("alpha", 1.0))
    scaled = b.elementwise(Div(), call.input(0), alpha)
    below = b.elementwise(Mul(), b.elementwise(Elu(1.0), b.elementwise(Clip(high=0.0), scaled)), alpha)
    return b.elementwise(Add(), b.elementwise(Relu(), call.input(0)), below)


def hard_sigmoid(b: Builder, x: Value | None, alpha: float, beta: float) -> Value:
    line = b.elementwise(Add(), b.elementwise(Mul(), x, b.number(alpha)), b.number(beta))
    return b.elementwise(Clip(0.0, 1.0), line)


@lowers("HardSigmoid")
def hard_sigmoid_rule(b: Builder, call: Call) -> Value:
    return hard_sigmoid(b, call.input(0), call.attribute("alpha", 0.2), call.attribute("beta", 0.5))


@lowers("HardSwish")
def hard_swish(b: Builder, call: Call) -> Value:
    return b.elementwise(Mul(), call.input(0), hard_sigmoid(b, call.input(0), float(np.float32(1.0 / 6.0)), 0.5))


@lowers("Swish")
def swish(b: Builder, call: Call) -> Value:
    alpha = call.attribute("alpha", 1.0)
    inner = call.input(0) if alpha == 1.0 else b.elementwise(Mul(), call.input(0), b.number(alpha))
    return b.elementwise(Mul(), call.input(0), b.elementwise(Sigmoid(), inner))


@lowers("Mish")
def mish(b: Builder, call: Call) -> Value:
    gate = b.elementwise(Tanh(), b.elementwise(Softplus(), call.input(0)))
    return b.elementwise(Mul(), call.input(0), gate)


@lowers("Softsign")
def softsign(b: Builder, call: Call) -> Value:
    below = b.elementwise(Add(), b.elementwise(Abs(), call.input(0)), b.number(1.0))
    return b.elementwise(Div(), call.input(0), below)


@lowers("Reciprocal")
def reciprocal(b: Builder, call: Call) -> Value:
    return b.elementwise(Div(), b.number(1.0), call.input(0))


@lowers("Pow")
def power(b: Builder, call: Call) -> Value:
    exponent = scalar(b, call.input(1), "the exponent", 1.0)
    x = call.input(0)
    if exponent not in (1.0, 2.0, 3.0, 4.0):
        raise refuse(f"powers are supported for exponents 1, 2, 3 and 4, found {exponent:g}")
    if exponent == 1.0:
        return b.elementwise(Mul(), x, b.number(1.0))
    square = b.elementwise(Mul(), x, x)
    if exponent == 2.0:
        return square
    return b.elementwise(Mul(), square, x if exponent == 3.0 else square)


@lowers("Clip")
def clip(b: Builder, call: Call) -> Value:
    if call.opset < 11:
        low, high = call.attribute("min", -np.inf), call.attribute("max", np.inf)
    else:
        low = scalar(b, call.input(1), "the lower bound", -np.inf)
        high = scalar(b, call.input(2), "the upper bound", np.inf)
    return b.elementwise(Clip(low, high), call.input(0))


@lowers("Max", "Min")
def extremum(b: Builder, call: Call) -> Value:
    """Against one number a Clip, otherwise ``max(x, y) = y + relu(x - y)``."""
    larger = call.operator == "Max"
    result = call.input(0)
    for other in call.inputs[1:]:
        pair = [(result, other), (other, result)]
        single = [(x, y) for x, y in pair if _is_number(b, y) and not _is_number(b, x)]
        if single:
            x, y = single[0]
            bound = scalar(b, y, "a bound", 0.0)
            one = b.elementwise(Clip(low=bound) if larger else Clip(high=bound), x)
            result = _widened(b, one, y)
            continue
        gap = b.elementwise(Sub(), result, other) if larger else b.elementwise(Sub(), other, result)
        gain = b.elementwise(Relu(), gap)
        result = b.elementwise(Add() if larger else Sub(), other, gain)
    if len(call.inputs) == 1:
        return b.view(b.tensor(result), b.tensor(result).index, b.tensor(result).axis)
    return result


def _is_number(b: Builder, value: Value | None) -> bool:
    if isinstance(value, Known):
        return value.array.size == 1
    return b.is_leaf(value) and value.index.size == 1 and not b.leaves[value.node].affine


def _widened(b: Builder, x: Tensor, scalar_operand: Value) -> Tensor:
    """The rank of ``x`` broadcast with a one-element operand of possibly higher rank."""
    rank = np.ndim(b.numbers(scalar_operand, "a bound"))
    if rank <= x.rank:
        return x
    extra = rank - x.rank
    index = x.index.reshape((1,) * extra + x.index.shape)
    return b.view(x, index, None if x.axis is None else x.axis + extra)


@lowers("Sum", "Mean")
def total(b: Builder, call: Call) -> Value:
    result = b.tensor(call.input(0))
    result = b.view(result, result.index, result.axis)
    for other in call.inputs[1:]:
        result = b.elementwise(Add(), result, other)
    if call.operator == "Mean" and len(call.inputs) > 1:
        result = b.elementwise(Div(), result, b.number(len(call.inputs)))
    return result


@lowers("Cast", "CastLike")
def cast(b: Builder, call: Call) -> Value:
    """Between float32 and float64 nothing happens: the semantics are real arithmetic."""
    if call.operator == "CastLike":
        like = call.input(1)
        accepted = not isinstance(like, Known) or like.array.dtype in (np.float32, np.float64)
        target = f"the type of {call.proto.input[1]!r}"
    else:
        from onnx import TensorProto

        to = call.attribute("to")
        accepted = to in (TensorProto.FLOAT, TensorProto.DOUBLE)
        target = kind_name(to)
    if not accepted:
        raise refuse(f"casts a real number to {target}, which rounds it")
    x = call.input(0)
    if isinstance(x, Condition):
        one = b.elementwise(Select(x.threshold), x.value, b.number(1.0), b.number(0.0))
        return b.elementwise(Sub(), b.number(1.0), one) if x.negated else one
    x = b.tensor(x)
    return b.view(x, x.index, x.axis)


@lowers("Greater", "Less", "GreaterOrEqual", "LessOrEqual")
def compare(b: Builder, call: Call) -> Value:
    """Everything as ``v > t`` or its negation: ``x < t`` is ``-x > -t``, ``x <= t`` is ``not x > t``."""
    x, y = call.input(0), call.input(1)
    operator = call.operator
    if _is_number(b, x) and not _is_number(b, y):
        x, y = y, x
        operator = operator.replace("Greater", "?").replace("Less", "Greater").replace("?", "Less")
    x = b.tensor(x)
    if _is_number(b, y) and np.ndim(b.numbers(y, "a bound")) <= x.rank:
        threshold = scalar(b, y, "the threshold", 0.0)
    else:
        x, threshold = b.elementwise(Sub(), x, y), 0.0
    if operator in ("Less", "GreaterOrEqual"):
        x, threshold = b.elementwise(Neg(), x), -threshold
    return Condition(x, threshold, operator in ("LessOrEqual", "GreaterOrEqual"))


@lowers("Not")
def negate(b: Builder, call: Call) -> Value:
    condition = call.input(0)
    if not isinstance(condition, Condition):
        raise refuse("negates something that is not a comparison of real numbers")
    return Condition(condition.value, condition.threshold, not condition.negated)


@lowers("Where")
def where(b: Builder, call: Call) -> Value:
    condition, yes, no = call.inputs
    if isinstance(condition, Condition):
        if condition.negated:
            yes, no = no, yes
        return b.elementwise(Select(condition.threshold), condition.value, yes, no)
    mask = b.known(condition, "the condition")
    return _masked(b, mask.astype(bool), b.tensor(yes), b.tensor(no))


def _masked(b: Builder, mask: np.ndarray, yes: Tensor, no: Tensor) -> Tensor:
    """Elements of two tensors chosen by a fixed mask."""
    known = b.tensor(Known(f"{b.output}/mask", mask.astype(np.float64)))
    (chosen, first, second), shape, axis = b.aligned([known, yes, no])
    mask = mask.ravel()[chosen]
    inputs = [b.features(yes, first), b.features(no, second)]
    node = b.add(Concat((first.size, second.size)), inputs)
    order = np.arange(first.size).reshape(shape)
    index = np.where(mask, order, order + first.size)
    return Tensor("", node, index, axis, b.shared[node])


@lowers("Scaler", domain=ML)
def scaler(b: Builder, call: Call) -> Value:
    """``(x - offset) * scale``; both are public statistics."""
    x = b.tensor(call.input(0))
    for name, op, neutral in (("offset", Sub(), 0.0), ("scale", Mul(), 1.0)):
        values = np.array(call.attribute(name, [neutral]), dtype=np.float64)
        if values.size not in (1, x.index.shape[-1]):
            raise InvalidModelError(f"{name} has {values.size} values for {x.index.shape[-1]} features")
        x = b.elementwise(op, x, Known(f"{call.name}/{name}", values))
    return x


@lowers("BatchNormalization")
def batch_normalization(b: Builder, call: Call) -> Value:
    """Inference mode: subtract the mean, times ``1 / sqrt(var + eps)``, times scale, plus bias, along axis 1.

    The statistics are public constants even when the exporter stored them together with a trainable parameter.
    """
    if call.attribute("training_mode", 0) or sum(1 for o in call.proto.output if o) > 1:
        raise refuse("computes batch statistics; export the model in inference mode")
    x = b.tensor(call.input(0))
    b.not_records(x, [1], "normalises along")
    channels = x.index.shape[1]
    spread = (channels, *[1] * (x.rank - 2))
    scale, bias, mean, variance = (b.tensor(v) for v in call.inputs[1:5])
    mean, variance = (b.numbers(v, "the statistics").astype(np.float64) for v in (mean, variance))
    for value, what in ((mean, "mean"), (variance, "variance")):
        if value.shape != (channels,):
            raise InvalidModelError(f"the {what} has shape {value.shape} for {channels} channels")
    factor = 1.0 / np.sqrt(variance + call.attribute("epsilon", 1e-5))
    b.use_in_affine(scale)
    b.use_in_affine(bias)
    x = b.elementwise(Sub(), x, Known(f"{b.output}/mean", mean.reshape(spread)))
    x = b.elementwise(Mul(), x, Known(f"{b.output}/factor", factor.reshape(spread)))
    x = b.elementwise(Mul(), x, b.view(scale, scale.index.reshape(spread), None))
    return b.elementwise(Add(), x, b.view(bias, bias.index.reshape(spread), None))
