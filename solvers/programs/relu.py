"""Windows of ReLU networks with one output as programs: every record's forward and backward pass.

Beside the columns of `solvers.programs.steps`, for every record whose clipped gradient is not constant over the box,
all of them the trainer's own floating-point numbers in natural units: hidden values ``h``, states ``s`` of the units
(1: active), the loss gradient ``phi``, adjoints ``d`` of the hidden units, and the exact products ``W h`` (forward),
``W d`` (backward) and ``d h`` (gradients of the weights behind the first layer).  With ``[l, u]`` the interval of each
quantity over the box, by interval bounds, rows:

    h >= z - e,   h <= z - l (1 - s) + e,   h <= u s              z: what the layer adds up before the ReLU
    l s <= d <= u s,   l (1 - s) - e <= sum W d - d <= u (1 - s) + e
    w = x y in its convex hull over the box (McCormick); with exact products, ``w = x y`` as well
    phi: weights of the vertices of the loss's gradient at ``z``, which add up to 1
    sum mu = 1 - a,   l a <= g - sum v mu <= u a,   contribution sum mu clip(v inputs)     for every argument ``g``

The argument ``g`` is ``d`` for the first layer's weights (inputs: the features) and for all biases (inputs: 1), and the
product ``d h`` for the other weights.  ``e`` is ``2k`` times a bound of the trainer's rounding and the program's own.

(S): the trainer's numbers on a data set are a point; a replaced record has ``a = 1``, and its columns are what the
record it replaces would have had.

(M): let a point be given, and a neighbour that differs in slot ``j``.  Its program of radius ``k + 1`` has the point
with the same columns of all other records, ``a_j = 1``, slot ``j``'s contribution (at most ``clip (1 - a_j)``) moved
into ``q``, and for slot ``j`` what the neighbour's record really does at these parameters.  Every row above follows
from the same row over smaller intervals, because ``0 <= s <= 1`` and factors lie in their intervals.  What the smaller
program leaves out exists: a unit that is inactive all over the box has ``h = d = s = 0``, products without a column are
products, and a contribution that is the same everywhere equals ``(1 - a) clip(v inputs)`` at every ``v`` of the
interval.  With integer ``s``, pieces and ``a``, and with exact products, the same holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.losses import Huber, Logistic
from models.ops import Affine, Parameter, Relu
from models.ops.base import ABSOLUTE, LIBRARY, RELATIVE, Interval, interval_product
from solvers.gradients import FixedPoint
from solvers.ibp import Plan
from solvers.programs import pieces
from solvers.programs.margin import Head
from solvers.programs.steps import LOSSES, Advance, Steps, WindowProgram, firsts, snapped, unsupported
from solvers.window import Window

#: A record with larger intermediate numbers contributes anything within the clip.
_LARGEST = 2.0**40
#: ``clip(v inputs)`` has the pieces of a Huber loss that bends nowhere.
_IDENTITY = Huber(np.inf)


@dataclass(frozen=True)
class Layer:
    """An affine layer: its node, the places of its weight ``(rows, cols)`` and its bias (None: it has none)."""

    node: int
    rows: int
    cols: int
    weight: int
    bias: int | None

    @property
    def weights(self) -> np.ndarray:
        """Places of the weights in the parameter vector, ``(rows, cols)``."""
        return self.weight + np.arange(self.rows * self.cols).reshape(self.rows, self.cols)

    @property
    def biases(self) -> np.ndarray:
        """Places of the biases, ``(rows,)``; none without a bias."""
        return np.arange(0) if self.bias is None else self.bias + np.arange(self.rows)


class Bounds(NamedTuple):
    """Intervals of the filled slots ``slots`` ``(n,)`` of a batch over a box, by layer, each ``(rows, n)``.

    ``z``: before the ReLU; ``h``: its value; ``d``: the adjoint of ``z`` (of the last layer: the loss gradient);
    ``s``: the adjoint of ``h``.  The last layer has no ``h`` and no ``s``.  ``wild`` ``(n,)``: see `_LARGEST`.
    """

    slots: np.ndarray
    z: list[Interval]
    h: list[Interval]
    d: list[Interval]
    s: list[Interval]
    wild: np.ndarray

    def of(self, which: np.ndarray) -> Bounds:
        """Those of some of the records."""
        parts = ([Interval(i.lower[:, which], i.upper[:, which]) for i in part] for part in self[1:5])
        return Bounds(self.slots[which], *parts, self.wild[which])


@dataclass(frozen=True, eq=False)
class Network:
    """One or two hidden ReLU layers and one output; ``features`` ``(cols, R)``: what the first layer reads."""

    plan: Plan
    layers: tuple[Layer, ...]
    features: np.ndarray

    @classmethod
    def of(cls, window: Window) -> Network:
        """Raises UnsupportedWindowError for another model or loss."""
        graph, plan = window.graph, Plan(window.graph)
        layers, at = [], graph.output
        while True:
            node = graph.nodes[at]
            leaves = [graph.nodes[i].op for i in node.inputs[1:]]
            trained = all(isinstance(op, Parameter) and op.name in plan.offsets for op in leaves)
            if not (isinstance(node.op, Affine) and node.op.positions == 1 and trained):
                raise unsupported(window, f"this model has {node.op.title} in place of a layer that trains as a whole")
            places = [plan.offsets[op.name] for op in leaves] + [None]
            layers.insert(0, Layer(at, node.op.rows, node.op.cols, places[0], places[1]))
            source = node.inputs[0]
            if not plan.active[source]:
                break
            if not isinstance(graph.nodes[source].op, Relu):
                raise unsupported(window, f"this model has {graph.nodes[source].op.title} between its layers")
            at = graph.nodes[source].inputs[0]
        total = sum(layer.weights.size + layer.biases.size for layer in layers)
        if len(layers) > 3 or layers[-1].rows > 1 or total != plan.size or type(window.loss) not in LOSSES:
            hidden, outputs, more = len(layers) - 1, layers[-1].rows, plan.size - total
            raise unsupported(
                window,
                f"this model has {hidden} hidden layers, {outputs} outputs, {more} trainable parameters outside them, "
                f"and the {window.loss.name} loss",
            )
        with np.errstate(all="ignore"):
            features = plan.forward(window.records.features, plan.shared(graph.initial()))[source]
        shape = layers[0].cols, window.records.features.shape[1]
        return cls(plan, tuple(layers), np.broadcast_to(features, shape))

    def bounds(self, window: Window, batch: np.ndarray, box: Interval, ladder: float) -> Bounds:
        """What the records of a batch can do over a box of the parameters before it."""
        slots = window.records.filled(batch)
        shared = self.plan.shared_interval(box.lower, box.upper, ladder)
        parts = np.split(slots, range(self.plan.tile, len(slots), self.plan.tile))
        with np.errstate(all="ignore"):
            found = [self._tile(window, *window.records.tile(part), shared, ladder) for part in parts]
        joined = [[_joined(layer) for layer in zip(*kind, strict=True)] for kind in zip(*found, strict=True)]
        # The trainer gives a record up when its loss gradient, on the grid's scale, is not finite.
        most = min(_LARGEST, 2.0**1000 / FixedPoint.make(window.clip, max(1, len(batch))).scale)
        wild = np.zeros(len(slots), bool)
        for interval in (i for kind in joined for i in kind):
            wild |= ~(interval.magnitude <= most).all(axis=0)
        wild |= ~(np.abs(self.features[:, slots]) <= most).all(axis=0)
        return Bounds(slots, *joined, wild)

    def _tile(self, window: Window, x: np.ndarray, y: np.ndarray, shared: dict, ladder: float):
        nodes = window.graph.nodes
        values = self.plan.forward_interval(x, shared, ladder)
        adjoint = window.loss.gradient_interval(values[window.graph.output], y, ladder)
        d, s = [adjoint], []
        for layer in self.layers[:0:-1]:
            node = nodes[layer.node]
            relu = nodes[node.inputs[0]]
            args, needed = [values[i] for i in node.inputs], [True] + [False] * (len(node.inputs) - 1)
            adjoint = node.op.backward_interval(adjoint, args, values[layer.node], needed, ladder)[0]
            s.insert(0, adjoint)
            args = [values[relu.inputs[0]]]
            adjoint = relu.op.backward_interval(adjoint, args, values[node.inputs[0]], [True], ladder)[0]
            d.insert(0, adjoint)
        hidden = [nodes[layer.node].inputs[0] for layer in self.layers[1:]]
        return [values[layer.node] for layer in self.layers], [values[i] for i in hidden], d, s


def _joined(parts: tuple[Interval, ...]) -> Interval:
    """One interval from those of the tiles."""
    return Interval(*(np.concatenate(ends, axis=1) for ends in zip(*parts, strict=True)))


class Group(NamedTuple):
    """Clipped gradients ``clip(v inputs)`` of one kind of argument ``v``: ``B`` of them, each of one record.

    ``box`` ``(B,)``; ``inputs`` and places ``target`` in the parameter vector ``(C, B)``; ``record`` ``(B,)``.
    """

    box: Interval
    inputs: np.ndarray
    target: np.ndarray
    record: np.ndarray

    def some(self, which: np.ndarray) -> Group:
        box = Interval(self.box.lower[which], self.box.upper[which])
        return Group(box, self.inputs[:, which], self.target[:, which], self.record[which])

    def vertices(self, clip: float) -> pieces.Vertices:
        return pieces.vertices(_IDENTITY, self.box, np.zeros(len(self.record)), self.inputs, clip)


def groups(network: Network, bounds: Bounds, ladder: float) -> list[Group]:
    """By adjoint of the first layer; then for each further layer by product of adjoint and input, and by adjoint.

    Arguments are in the order of ``(rows, n)`` and ``(rows, cols, n)``.
    """
    count, made = len(bounds.slots), []

    def group(box: Interval, inputs: np.ndarray, target: np.ndarray):
        """``inputs`` ``(C, n)``, ``target`` ``(C, arguments a record)``."""
        own = np.broadcast_to(np.arange(count), box.lower.shape).ravel()
        flat = Interval(box.lower.ravel(), box.upper.ravel())
        made.append(Group(flat, np.tile(inputs, target.shape[1]), np.repeat(target, count, axis=1), own))

    one = np.ones((1, count))
    for number, layer in enumerate(network.layers):
        adjoint, biases = bounds.d[number], layer.biases[None, :]
        if number == 0:
            inputs = np.vstack([network.features[:, bounds.slots], *([one] if biases.size else [])])
            group(adjoint, inputs, np.vstack([layer.weights.T, *([biases] if biases.size else [])]))
            continue
        group(_outer(adjoint, bounds.h[number - 1], ladder), one, layer.weights.reshape(1, -1))
        if biases.size:
            group(adjoint, one, biases)
    return made


def _outer(rows: Interval, cols: Interval, ladder: float) -> Interval:
    """Products ``(rows, cols, n)`` of intervals ``(rows, n)`` and ``(cols, n)``."""
    return interval_product(Interval(*(e[:, None] for e in rows)), Interval(*(e[None] for e in cols)), ladder)


def formulate(window: Window, network: Network, radius: int, boxes: list[Interval], kind: str) -> WindowProgram:
    """The program of the steps of ``window`` for one radius, of a kind out of `solvers.discovery.KINDS`.

    ``boxes``: of the parameters before each step and after the last.
    """
    steps = Steps(window, radius, boxes, kind != "lp")
    for t, step in enumerate(window.steps):
        bounds = network.bounds(window, step.batch, boxes[t], steps.ladder)
        wild = int(bounds.wild.sum())
        bounds = bounds.of(~bounds.wild)
        grid = FixedPoint.make(window.clip, max(1, len(step.batch)))
        found = groups(network, bounds, steps.ladder)
        constant, same = np.zeros((network.plan.size, len(bounds.slots))), []
        for group in found:
            shape, same_here = snapped(group.vertices(window.clip), grid, len(group.record))
            first = shape.values[:, firsts(shape)]
            constant[group.target[:, same_here], group.record[same_here]] = first[:, same_here]
            same.append(same_here)
        advance = steps.advance(t, grid, bounds.slots, constant, wild)
        varying = np.zeros(len(bounds.slots), bool)
        for group, same_here in zip(found, same, strict=True):
            varying[group.record[~same_here]] = True
        if varying.any():
            varies = [~part.reshape(-1, len(varying))[:, varying].ravel() for part in same]
            _Records(steps, network, t, bounds.of(varying), varies, kind).describe(advance, grid)
    return steps.program()


class _Records:
    """The rows of one step's records whose clipped gradients vary; ``varies``: which arguments of each group do."""

    def __init__(self, steps: Steps, network: Network, t: int, bounds: Bounds, varies: list[np.ndarray], kind: str):
        self.steps, self.network, self.t, self.bounds, self.varies = steps, network, t, bounds, varies
        self.exact = kind == "miqcp"
        self.out, self.ladder, self.count = steps.out, steps.ladder, len(bounds.slots)
        self.features = network.features[:, bounds.slots]

    def describe(self, advance: Advance, grid: FixedPoint) -> None:
        self._forward()
        self._backward()
        self._contributions(advance, grid)

    def _columns(self, name: str, box: Interval, where: np.ndarray | bool = True, integer: bool = False) -> np.ndarray:
        return self.out.columns(f"{name} {self.t}", box.lower, box.upper, integer, where)

    def _parameters(self, layer: Layer) -> tuple[np.ndarray, Interval]:
        """Columns, in units, and intervals of a layer's weights, ``(rows, cols, 1)`` each."""
        box = self.steps.boxes[self.t]
        columns = self.steps.theta[self.t][layer.weights][:, :, None]
        return columns, Interval(*(end[layer.weights][:, :, None] for end in box))

    def _product(
        self, name: str, x: np.ndarray, x_box: Interval, y: np.ndarray, y_box: Interval, where=True, x_unit: float = 1.0
    ) -> np.ndarray:
        """Columns ``w = x_unit x y``; none where it is 0 all over the box.  Boxes in natural units."""
        out, box = self.out, interval_product(x_box, y_box, self.ladder)
        box = Interval(*np.broadcast_arrays(*box))
        zero = (x_box.magnitude == 0.0) | (y_box.magnitude == 0.0)
        w = self._columns(name, box, where & ~zero)
        x_box, y_box = (Interval(*(np.broadcast_to(e, w.shape) for e in b)) for b in (x_box, y_box))
        band = self.ladder * (4.0 * RELATIVE * x_box.magnitude * y_box.magnitude + ABSOLUTE)
        for a, b, side in (
            (x_box.lower, y_box.lower, 1), (x_box.upper, y_box.upper, 1),
            (x_box.lower, y_box.upper, -1), (x_box.upper, y_box.lower, -1),
        ):  # fmt: skip
            # w - a y - b x >= - a b if a and b are ends of one side, else <=
            ends = (-a * b - band, np.inf) if side > 0 else (-np.inf, -a * b + band)
            row = out.rows(*ends, w >= 0)
            out.entries(row, w, 1.0)
            out.entries(row, y, -a)
            out.entries(row, x, -x_unit * b)
        if self.exact:
            row = out.rows(np.zeros(w.shape), np.zeros(w.shape), w >= 0)
            out.entries(row, w, 1.0)
            out.products(row, x, y, -x_unit)
        return w

    def _add_layer(self, number: int, rows: np.ndarray, factor: np.ndarray | float) -> None:
        """``factor z`` of a layer in rows ``(rows, n)``."""
        layer, theta, unit = self.network.layers[number], self.steps.theta[self.t], self.steps.unit
        if number == 0:
            values = factor * unit * self.features[None]
            self.out.entries(rows[:, None], theta[layer.weights][:, :, None], values)
        else:
            self.out.entries(rows[:, None], self.products[number], factor)
        if layer.bias is not None:
            self.out.entries(rows, theta[layer.biases][:, None], factor * unit)

    def _layer_error(self, number: int) -> np.ndarray:
        """Twice the radius times a bound of the rounding of ``z``, ``(rows, n)``."""
        layer, box = self.network.layers[number], self.steps.boxes[self.t]
        source = np.abs(self.features) if number == 0 else self.bounds.h[number - 1].magnitude
        size = np.einsum("mk,kn->mn", box.magnitude[layer.weights], source)
        if layer.bias is not None:
            size = size + box.magnitude[layer.biases][:, None]
        return self.ladder * 2.0 * (layer.cols + 8) * (RELATIVE * size + ABSOLUTE)

    def _forward(self) -> None:
        out, bounds = self.out, self.bounds
        self.h, self.state, self.products = [], [], {}
        for number, layer in enumerate(self.network.layers):
            if number:
                columns, box = self._parameters(layer)
                inputs = Interval(*(end[None] for end in bounds.h[number - 1]))
                at = columns, box, self.h[-1][None], inputs
                self.products[number] = self._product(f"forward {number}", *at, x_unit=self.steps.unit)
            if number == len(self.network.layers) - 1:
                break
            z, h, error = bounds.z[number], bounds.h[number], self._layer_error(number)
            possible, certain = z.upper > 0.0, z.lower > 0.0
            self.h.append(self._columns(f"hidden {number}", h, possible))
            states = Interval(certain.astype(float), np.ones(z.lower.shape))
            self.state.append(self._columns(f"state {number}", states, possible, self.steps.integer))
            row = out.rows(-error, np.inf, possible)  # h >= z
            out.entries(row, self.h[-1], 1.0)
            self._add_layer(number, row, -1.0)
            row = out.rows(-np.inf, error - z.lower, possible)  # h <= z - l (1 - s)
            out.entries(row, self.h[-1], 1.0)
            out.entries(row, self.state[-1], -z.lower)
            self._add_layer(number, row, -1.0)
            row = out.rows(np.full(z.lower.shape, -np.inf), 0.0, possible & ~certain)  # h <= u s
            out.entries(row, self.h[-1], 1.0)
            out.entries(row, self.state[-1], -z.upper)

    def _backward(self) -> None:
        out, bounds = self.out, self.bounds
        self.d = [self._loss_gradient()]
        for number in range(len(self.network.layers) - 1, 0, -1):
            columns, box = self._parameters(self.network.layers[number])
            adjoint = Interval(*(end[:, None] for end in bounds.d[number]))
            possible, certain = bounds.z[number - 1].upper > 0.0, bounds.z[number - 1].lower > 0.0
            at = columns, box, self.d[0][:, None], adjoint
            terms = self._product(f"backward {number}", *at, where=possible[None], x_unit=self.steps.unit)
            state, s = self.state[number - 1], bounds.s[number - 1]
            d = self._columns(f"adjoint {number - 1}", bounds.d[number - 1], possible)
            size = (box.magnitude * adjoint.magnitude).sum(axis=0)
            error = self.ladder * 2.0 * (len(terms) + 8) * (RELATIVE * size + ABSOLUTE)
            for end, near, far in (
                (s.lower, (0.0, np.inf), (s.lower - error, np.inf)),
                (s.upper, (-np.inf, 0.0), (-np.inf, s.upper + error)),
            ):
                row = out.rows(*near, possible & ~certain)  # l s <= d <= u s
                out.entries(row, d, 1.0)
                out.entries(row, state, -end)
                row = out.rows(*far, possible)  # l (1 - s) <= sum W d - d <= u (1 - s)
                out.entries(row[None], terms, 1.0)
                out.entries(row, d, -1.0)
                out.entries(row, state, end)
            self.d.insert(0, d)

    def _loss_gradient(self) -> np.ndarray:
        """Columns ``(1, n)`` of the loss gradient, from the vertices of its pieces."""
        out, bounds, loss, last = self.out, self.bounds, self.steps.window.loss, len(self.network.layers) - 1
        targets = self.steps.window.records.targets[0, bounds.slots]
        argument = pieces.arguments(loss, Interval(*(end[0] for end in bounds.z[-1])), targets, self.ladder)
        shape = pieces.vertices(loss, argument.box, targets, np.ones((1, self.count)), np.inf)
        mix = self.steps.mixture(f"loss {self.t}", shape, None)
        size = np.abs(argument.shift) + argument.box.magnitude
        error = self._layer_error(last)[0] + self.ladder * 8.0 * (RELATIVE * size + ABSOLUTE)
        row = out.rows(-argument.shift - error, error - argument.shift)
        out.entries(row[mix.record], mix.weights, mix.argument)
        self._add_layer(last, row[None], -argument.sign)
        phi = self._columns("loss gradient", bounds.d[-1])
        library = 8.0 * LIBRARY if isinstance(loss, Logistic) else 0.0
        error = self.ladder * (8.0 * (RELATIVE * bounds.d[-1].magnitude[0] + ABSOLUTE) + library)
        row = out.rows(-error, error)
        out.entries(row, phi[0], 1.0)
        out.entries(row[mix.record], mix.weights, -mix.values[0])
        return phi

    def _contributions(self, advance: Advance, grid: FixedPoint) -> None:
        """Clipped gradients of all arguments that vary, added to the step's rows."""
        clip = self.steps.window.clip
        for number, (group, varies, columns) in enumerate(
            zip(groups(self.network, self.bounds, self.ladder), self.varies, self._arguments(), strict=True)
        ):
            if not varies.any():
                continue
            group, columns = group.some(varies), columns.ravel()[varies]
            own = self.steps.replaced(self.bounds.slots[group.record])
            shape = snapped(group.vertices(clip), grid, len(own))[0]
            mix = self.steps.mixture(f"weights {self.t} {number}", shape, own)
            target = group.target[:, mix.record]
            values = advance.size / (grid.scale * clip) * mix.values
            self.out.entries(advance.rows[target], mix.weights, values)
            for end, ends in ((group.box.lower, (-np.inf, 0.0)), (group.box.upper, (0.0, np.inf))):
                row = self.out.rows(*(np.full(len(own), e) for e in ends))
                self.out.entries(row[mix.record], mix.weights, mix.argument)
                self.out.entries(row, columns, -1.0)
                self.out.entries(row, own, end)

    def _arguments(self) -> list[np.ndarray]:
        """The columns of each group's arguments, in its order."""
        found, varies = [self.d[0]], iter(self.varies[1:])
        for number, layer in enumerate(self.network.layers[1:], start=1):
            adjoint, inputs = self.bounds.d[number], self.bounds.h[number - 1]
            found.append(
                self._product(
                    f"gradient {number}", self.d[number][:, None], Interval(*(e[:, None] for e in adjoint)),
                    self.h[number - 1][None], Interval(*(e[None] for e in inputs)),
                    next(varies).reshape(layer.rows, layer.cols, self.count),
                )
            )  # fmt: skip
            if layer.bias is not None:
                next(varies)
                found.append(self.d[number])
        return found


def model_of(window: Window) -> Head | Network:
    """The formulation for the window's model; raises UnsupportedWindowError if there is none."""
    node = window.graph.nodes[window.graph.output]
    behind = isinstance(node.op, Affine) and Plan(window.graph).active[node.inputs[0]]
    return Network.of(window) if behind else Head.of(window)
