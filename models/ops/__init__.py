"""The operators of the graph IR, one file a family; a new ONNX operator is one new class and one test."""

from models.ops.activations import (
    Abs,
    Clip,
    Elu,
    LeakyRelu,
    Neg,
    Relu,
    Select,
    Sigmoid,
    Softplus,
    Tanh,
)
from models.ops.affine import PRODUCTS, Affine
from models.ops.base import Interval, Op
from models.ops.elementwise import Add, Div, Mul, Sub
from models.ops.layout import Concat, Gather, SegmentSum
from models.ops.sources import Constant, Input, Parameter

__all__ = [
    "PRODUCTS",
    "Abs",
    "Add",
    "Affine",
    "Clip",
    "Concat",
    "Constant",
    "Div",
    "Elu",
    "Gather",
    "Input",
    "Interval",
    "LeakyRelu",
    "Mul",
    "Neg",
    "Op",
    "Parameter",
    "Relu",
    "SegmentSum",
    "Select",
    "Sigmoid",
    "Softplus",
    "Sub",
    "Tanh",
]
