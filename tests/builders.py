"""Small graphs for the tests, built without any ONNX file."""

from __future__ import annotations

import numpy as np

from models.ir import Graph, Node, ParameterInfo
from models.losses import Loss, Squared
from models.ops import Affine, Input, Parameter, Relu
from solvers.ibp import make_records
from solvers.window import Boxes, Step, Window


def mlp(dims, activation=Relu, seed=0, scale=1.0, products="natural") -> Graph:
    """A multi-layer perceptron with these layer widths."""
    rng = np.random.default_rng(seed)
    parameters, nodes, at = [], [Node("x", Input(dims[0]), (), (dims[0],))], 0
    for layer, (cols, rows) in enumerate(zip(dims, dims[1:], strict=False)):
        weight = scale * rng.normal(size=(rows, cols)) / np.sqrt(cols)
        parameters += [
            ParameterInfo(f"w{layer}", weight, True),
            ParameterInfo(f"b{layer}", 0.1 * scale * rng.normal(size=rows), True),
        ]
        nodes.append(Node(f"w{layer}", Parameter(rows * cols, f"w{layer}")))
        nodes.append(Node(f"b{layer}", Parameter(rows, f"b{layer}")))
        op = Affine(rows, cols, 1, products)
        nodes.append(Node(f"z{layer}", op, (at, len(nodes) - 2, len(nodes) - 1), (rows,)))
        at = len(nodes) - 1
        if layer < len(dims) - 2:
            nodes.append(Node(f"a{layer}", activation(), (at,), (rows,)))
            at = len(nodes) - 1
    return Graph(tuple(nodes), at, (dims[0],), tuple(parameters))


def window(
    graph: Graph,
    features,
    targets,
    batches,
    radii,
    loss: Loss | None = None,
    rate=0.1,
    clip=0.5,
    contraction=1.0,
    normaliser=None,
    adjacency="replace-one",
    theta=None,
    slots=None,
    present=None,
) -> Window:
    """A window from the graph's initial point (or ``theta``)."""
    loss = loss or Squared()
    records = make_records(graph, loss, np.asarray(features), np.asarray(targets), slots, present)
    rates = [rate] * len(batches) if np.isscalar(rate) else rate
    steps = tuple(Step(np.asarray(b, dtype=np.int64), float(r)) for b, r in zip(batches, rates, strict=True))
    return Window(
        graph,
        loss,
        records,
        steps,
        Boxes.point(graph.initial() if theta is None else np.asarray(theta, float), len(radii)),
        tuple(radii),
        clip,
        contraction,
        normaliser or max(len(b) for b in batches),
        adjacency,
    )
