"""Small graphs for the tests, built without any ONNX file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from models.ir import Graph, Node, ParameterInfo
from models.losses import Loss, Squared
from models.ops import (
    Abs,
    Add,
    Affine,
    Clip,
    Concat,
    Elu,
    Gather,
    Input,
    LeakyRelu,
    Mul,
    Neg,
    Parameter,
    Relu,
    SegmentSum,
    Sigmoid,
    Softplus,
    Sub,
    Tanh,
)
from solvers.ibp import ibp, make_records
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
        (Boxes.point(graph.initial() if theta is None else np.asarray(theta, float), len(radii)),),
        tuple(radii),
        clip,
        contraction,
        normaliser or max(len(b) for b in batches),
        adjacency,
    )


def final(made: Window, threads: int = 1) -> Boxes:
    """IBP boxes after the window's last step."""
    return ibp(made, threads)[-1]


def stepwise(made: Window, threads: int = 1) -> Boxes:
    """The window's steps as windows of one step each: the radius is charged to every step."""
    boxes = made.boxes
    for step in made.steps:
        boxes = final(replace(made, steps=(step,), known=(boxes,)), threads)
    return boxes


def sliding(length: int, stride: int, backend=ibp):
    """The final boxes by windows of ``length`` steps that are moved on by ``stride``."""

    def bound(made: Window, threads: int = 1) -> Boxes:
        trail = list(made.known)
        while len(trail) <= len(made.steps):
            stop = min(len(made.steps), len(trail) - 1 + stride)
            start = max(0, stop - length)
            trail += backend(replace(made, steps=made.steps[start:stop], known=tuple(trail[start:])), threads)
        return trail[-1]

    return bound


def random_graph(rng, inputs=3, products="natural") -> Graph:
    """A random graph: skip connections, shared weights, transposed weights, positions, products of activations."""
    parameters: list[ParameterInfo] = []
    nodes = [Node("x", Input(inputs))]
    sizes = [inputs]
    wide: list[int] = [0]  # per-record nodes that may be read again

    def put(op, *at):
        nodes.append(Node(f"n{len(nodes)}", op, tuple(at)))
        sizes.append(op.features([sizes[i] for i in at]))
        return len(nodes) - 1

    def parameter(*shape, reuse=False):
        """A leaf that reads a parameter; sometimes one that is read elsewhere already."""
        same = [p for p in parameters if p.shape == shape]
        if same and (reuse or rng.random() < 0.3):
            name = same[rng.integers(len(same))].name
        else:
            name = f"p{len(parameters)}"
            trainable = not parameters or rng.random() < 0.8
            parameters.append(ParameterInfo(name, rng.normal(size=shape) * 0.7, trainable))
        return put(Parameter(int(np.prod(shape)), name))

    def affine(at, rows, positions=1):
        cols = sizes[at] // positions
        weight = parameter(rows, cols)
        if rng.random() < 0.3:  # a transposed weight: a permutation of the parameter
            weight = put(Gather(np.arange(rows * cols).reshape(cols, rows).T.ravel(), rows * cols), weight)
        bias = [parameter(rows)] if rng.random() < 0.7 else []
        return put(Affine(rows, cols, positions, products), at, weight, *bias)

    unary = [Relu(), LeakyRelu(0.1), Tanh(), Sigmoid(), Softplus(), Elu(), Abs(), Clip(-0.8, 0.9), Neg()]
    for _ in range(rng.integers(2, 7)):
        at = wide[rng.integers(len(wide))]
        size = sizes[at]
        kind = rng.integers(8)
        if kind <= 1:
            made = affine(at, int(rng.integers(1, 4)))
        elif kind == 2 and size % 2 == 0:
            made = affine(at, int(rng.integers(1, 3)), 2)
        elif kind == 3:
            made = put(unary[rng.integers(len(unary))], at)
        elif kind == 4:  # arithmetic with another node of this size, or with a parameter
            same = [i for i in wide if sizes[i] == size]
            other = same[rng.integers(len(same))] if rng.random() < 0.6 else parameter(size)
            made = put([Add(), Sub(), Mul()][rng.integers(3)], at, other)
        elif kind == 5:
            made = put(Gather(rng.integers(-1, size, size=rng.integers(1, 5)), size), at)
        elif kind == 6:
            other = wide[rng.integers(len(wide))]
            made = put(Concat((size, sizes[other])), at, other)
        else:
            made = put(SegmentSum(rng.integers(-1, size, size=(rng.integers(1, 4), 2)), size), at)
        wide.append(made)
    out = affine(wide[-1], int(rng.integers(1, 3)))
    if not any(p.trainable for p in parameters):
        parameters[-1] = ParameterInfo(parameters[-1].name, parameters[-1].value, True)
    graph = Graph(tuple(nodes), out, (inputs,), tuple(parameters))
    reads = {graph.nodes[i].op.name for i in graph.needed if isinstance(graph.nodes[i].op, Parameter)}
    kept = tuple(p for p in parameters if p.name in reads)
    if not any(p.trainable for p in kept):
        kept = tuple(ParameterInfo(p.name, p.value, True) for p in kept)
    live = [i for i in range(len(nodes)) if i in graph.needed]
    place = {i: j for j, i in enumerate(live)}
    nodes = tuple(Node(nodes[i].name, nodes[i].op, tuple(place[j] for j in nodes[i].inputs)) for i in live)
    return Graph(nodes, place[out], (inputs,), kept)
