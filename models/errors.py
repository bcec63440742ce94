"""Errors of the models package: each message names the file or node, what was found and what to do."""


class ModelError(Exception):
    """Base of everything that can be wrong with a model; the command turns it into exit code 2."""


class UnsupportedModelError(ModelError):
    """The file is a valid model that uses something this product does not certify."""


class InvalidModelError(ModelError):
    """The file is not a valid ONNX model."""


class DisagreementError(ModelError):
    """The graph that was read evaluates differently from onnxruntime."""
