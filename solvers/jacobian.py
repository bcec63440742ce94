"""Interval Jacobians of the summed clipped gradient, for models that are linear in their trainable parameters.

A head has outputs ``z_o = sum_p theta_p a_f(p)`` over public or frozen features ``a`` and one: linear and logistic
regression, and a trained last layer on a frozen body.  Record ``i`` adds ``h_p = clip(phi'(z_o) a_p)`` to the sum of a
step.  Over a box of parameters its Jacobian lies in

    J_pq = s_p phi''(z_o) a_p a_q,   p and q of one output,

where ``s_p`` is Clarke's derivative of the clip: 1 where the gradient stays within the clip, 0 where it stays beyond
it, [0, 1] where it may do either (Lebourg's mean value theorem: ``h(u) - h(v) = J (u - v)`` for some such ``J``).

Up to ``k`` records differ.  A differing record's Jacobian lies in a public interval, from the public feature range and
the loss (``phi'' <= 2, 1, 1/4, 1/h`` for squared, Huber, logistic, smoothed hinge), which contains zero.  With ``l_i``
the lower ends of the batch's known records, ``r`` of them replaced and possibly one more left out of the sum,

    lower = sum of l_i - (sum of the r largest l_i) + r (public lower end) - (the next largest l_i, if positive)

and the upper end alike.  For a neighbour that differs in one more slot, replace that slot too: its ``l_i`` is no less
than the public end.  So the interval for ``r`` on a data set lies within that for ``r + 1`` on each of its
neighbours, over any larger box.

Entries are divided by public bounds of their size and rounded to integers; sums are exact, and this holds for the
numbers.  Rounding is paid by a public constant of one quantum a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import numpy as np

from models.losses import Huber, Logistic, Loss, SmoothedHinge, Squared
from models.ops import Affine, Gather, Input, Interval, Parameter
from models.ops.activations import Sigmoid
from models.ops.base import ABSOLUTE, LIBRARY, RELATIVE, rounded
from solvers.errors import UnsupportedWindowError
from solvers.gradients import FixedPoint, Sums, add_outer
from solvers.ibp import Plan
from solvers.window import Step, Window

#: Outputs up to this size cannot change whether a record's gradient overflows (that takes a target near 2^970, beside
#: which they vanish): such a record contributes nothing, whatever the parameters.
LARGEST_OUTPUT = 2.0**500
#: Largest number of terms kept for all radii: the ``k`` largest of every entry, at both ends (4 GiB).
_MOST_TERMS = 1 << 28
#: At least the scale of any grid of gradients whose clip is not absurd.
LARGEST_SCALE = 2.0**200
_LARGEST_CURVATURE = 2.0**64


@singledispatch
def second_derivative(loss: Loss, z: Interval, targets: np.ndarray, ladder: float) -> Interval:
    """Bounds of ``phi''`` over a box of outputs, ``(O, n)``; raises UnsupportedWindowError."""
    raise UnsupportedWindowError(
        f"loss: the gradient of the {loss.name} loss has no Lipschitz derivative that is used here; "
        "choose squared, huber, logistic or smoothed-hinge, or the backend ibp"
    )


@second_derivative.register
def _(loss: Squared, z, targets, ladder):
    two = np.full_like(targets, 2.0)
    return Interval(two, two)


@second_derivative.register
def _(loss: Huber, z, targets, ladder):
    residual = rounded(z.lower - targets, z.upper - targets, ladder)
    return clarke(residual, loss.delta)


@second_derivative.register
def _(loss: Logistic, z, targets, ladder):
    sigmoid = Sigmoid()
    return sigmoid._slope_interval(z, sigmoid.forward_interval([z], ladder), ladder)


@second_derivative.register
def _(loss: SmoothedHinge, z, targets, ladder):
    if not 1.0 / loss.width <= _LARGEST_CURVATURE:
        raise UnsupportedWindowError(
            f"hinge_width: found {loss.width}, which is as good as a jump; widen it, or use the backend ibp"
        )
    ramp = loss.ramp_interval(z, targets, ladder)
    inside, outside = (ramp.lower >= 0.0) & (ramp.upper <= 1.0), (ramp.lower > 1.0) | (ramp.upper < 0.0)
    return Interval(inside / loss.width, (1.0 - outside) / loss.width)


def largest_derivative(loss: Loss) -> tuple[float, float]:
    """Largest second derivative of a loss, and absolute rounding error of its first."""
    if isinstance(loss, SmoothedHinge):
        return 1.0 / loss.width, 0.0
    return {"squared": (2.0, 0.0), "huber": (1.0, 0.0), "logistic": (0.25, 2.0 * LIBRARY)}[loss.name]


def curvature_within(loss: Loss, slopes: Interval, targets: np.ndarray, ladder: float) -> np.ndarray:
    """An upper bound of ``phi''`` where ``phi'`` lies in ``slopes``: for the logistic loss ``p (1 - p)``,
    ``p = phi' + y``."""
    if not isinstance(loss, Logistic):
        return np.full_like(slopes.lower, largest_derivative(loss)[0])
    low, high = np.clip(slopes.lower + targets, 0.0, 1.0), np.clip(slopes.upper + targets, 0.0, 1.0)
    top = np.where((low <= 0.5) & (high >= 0.5), 0.25, np.maximum(low * (1.0 - low), high * (1.0 - high)))
    return np.minimum(top + ladder * LIBRARY, 0.25)


def clarke(values: Interval, limit: float) -> Interval:
    """Derivative of the clip to ``[-limit, limit]`` over a box; wider boxes give wider results, exactly."""
    inside = (values.lower >= -limit) & (values.upper <= limit)
    outside = (values.lower > limit) | (values.upper < -limit)
    return Interval(inside.astype(np.float64), 1.0 - outside)


@dataclass(frozen=True, eq=False)
class _Block:
    """One output: its parameters' positions in theta ``(B,)`` and the features ``(B,)`` they multiply."""

    parameters: np.ndarray
    features: np.ndarray


@dataclass(frozen=True, eq=False)
class Head:
    """A window's model as a linear head; public.

    ``size`` ``(P,)``: largest absolute value of each parameter's feature; ``frozen`` ``(O,)``: largest absolute
    contribution of what is not trained; ``least``, ``greatest`` ``(P, P)``: a differing record's Jacobian divided by
    ``largest size_p size_q``, an interval that contains zero; ``separate`` ``(P, P)``: pairs of different outputs;
    ``largest``: bound of the loss's second derivative, ``error``: of the rounding error of its first.
    """

    plan: Plan
    source: int
    blocks: tuple[_Block, ...]
    size: np.ndarray
    frozen: np.ndarray
    least: np.ndarray
    greatest: np.ndarray
    separate: np.ndarray
    largest: float
    error: float

    @classmethod
    def make(cls, window: Window) -> Head:
        """Raises UnsupportedWindowError with the reason where the window's model or loss has no such form."""
        plan = Plan(window.graph)
        source, blocks = structure(plan)
        check_size(window, plan)
        second_derivative(window.loss, Interval(np.zeros((1, 0)), np.zeros((1, 0))), np.zeros((1, 0)), 0.0)
        low, high = feature_ends(window, plan, source)
        largest, error = largest_derivative(window.loss)
        size, (least, greatest) = np.ones(plan.size), np.zeros((2, plan.size, plan.size))
        separate = np.ones((plan.size, plan.size), bool)
        for block in blocks:
            reach = np.maximum(np.abs(low), np.abs(high))[block.features]
            reach = np.where(reach > 0.0, reach, 1.0)
            a, b = low[block.features] / reach, high[block.features] / reach
            corners = np.stack([np.multiply.outer(x, y) for x in (a, b) for y in (a, b)])
            corner = np.ix_(block.parameters, block.parameters)
            least[corner] = np.minimum(corners.min(axis=0), 0.0) * (1.0 - np.eye(len(a)))
            greatest[corner] = np.maximum(corners.max(axis=0), 0.0)
            size[block.parameters], separate[corner] = reach, False
        frozen = untrained(plan, np.maximum(np.abs(low), np.abs(high)))
        return cls(plan, source, blocks, size, frozen, least, greatest, separate, largest, error)

    def output_size(self, box: Interval) -> np.ndarray:
        """Largest absolute output ``(O,)`` of any record in the public range over a box; grows with it."""
        terms = self.size * box.magnitude
        return self.frozen + np.array([terms[block.parameters].sum() for block in self.blocks])

    def rounding(self, window: Window, one: Step, box: Interval) -> np.ndarray:
        """Bound ``(P,)`` of how far the trainer's computed step is from the exact one, anywhere in a box.

        Grows with the box; in the gradient it counts the errors of the outputs and of the loss's derivative.
        """
        output = 2.0 * (len(self.size) + 4) * RELATIVE * self.output_size(box)
        slope = np.zeros(len(self.size))
        for block, error in zip(self.blocks, output, strict=True):
            slope[block.parameters] = self.largest * error + self.error
        return step_rounding(window, one, box, self.size * slope)

    def curvature(self, window: Window, one: Step, box: Interval, radius: int) -> Curvature | None:
        """The Jacobians of a step's records over a box of this radius; None where outputs are out of all proportion."""
        size = len(one.batch)
        if not self.output_size(box).max() <= LARGEST_OUTPUT:
            return None
        grid = FixedPoint.make(1.0, max(1, size))
        sums = Sums.zeros(len(self.size) ** 2, min(radius, size))
        for top in (sums.top_lower, sums.top_upper):
            top[self.separate.ravel()] = 0.0
        ladder = 2.0 * radius
        slots, nothing = window.records.filled(one.batch), np.zeros(0, np.int64)
        with np.errstate(all="ignore"):
            shared = self.plan.shared_interval(box.lower, box.upper, ladder)
            for start in range(0, len(slots), self.plan.tile):
                x, y = window.records.tile(slots[start : start + self.plan.tile])
                z = self.plan.forward_interval(x, shared, ladder)[self.plan.graph.output]
                slope = window.loss.gradient_interval(z, y, ladder)
                bend = second_derivative(window.loss, z, y, ladder)
                a = source_features(self.plan, self.source, x)
                for o, block in enumerate(self.blocks):
                    size_here = self.size[block.parameters][:, None]
                    terms = a[block.features]
                    rows = _rows(
                        Interval(slope.lower[o], slope.upper[o]),
                        Interval(bend.lower[o] / self.largest, bend.upper[o] / self.largest),
                        terms,
                        terms / size_here * grid.scale,
                        window.clip,
                        ladder,
                    )
                    columns = np.ascontiguousarray(terms / size_here)
                    target = (block.parameters[:, None] * len(self.size) + block.parameters).ravel()
                    add_outer(rows, Interval(columns, columns), grid, nothing, target, sums)
        # Two quanta more than a known record of the same entries can have.
        public = Interval(np.floor(self.least * grid.unit) - 2.0, np.ceil(self.greatest * grid.unit) + 2.0)
        weight = self.largest / grid.scale * np.multiply.outer(self.size, self.size)
        return Curvature(sums, public, weight, size, len(slots))


def _rows(slope: Interval, bend: Interval, a: np.ndarray, scaled: np.ndarray, clip: float, ladder: float) -> Interval:
    """``s phi'' a`` for one output, ``(B, n)`` each; zero for records so large that the trainer leaves them out.

    ``slope``, ``bend`` ``(n,)``: the loss's first and second derivative; ``scaled``: ``a`` in the units wanted.
    """
    ends = slope.lower * a, slope.upper * a
    state = clarke(rounded(np.minimum(*ends), np.maximum(*ends), ladder), clip)
    low, high = state.lower * bend.lower, state.upper * bend.upper
    rows = Interval(np.where(scaled >= 0.0, low, high) * scaled, np.where(scaled >= 0.0, high, low) * scaled)
    left_out = ~np.isfinite(slope.lower * LARGEST_SCALE) | ~np.isfinite(slope.upper * LARGEST_SCALE)
    for end in rows:
        end[:, left_out] = 0.0
    return rows


@dataclass(frozen=True, eq=False)
class Curvature:
    """Sums of a step's Jacobian entries over one box, before it is decided how many records differ; private.

    ``public`` ``(P, P)``: integer ends of a differing record's entries; ``weight`` ``(P, P)``: what a unit stands for.
    """

    sums: Sums
    public: Interval
    weight: np.ndarray
    batch: int
    filled: int

    def __post_init__(self):
        for top in (self.sums.top_lower, self.sums.top_upper):
            top.sort(axis=1)

    def transition(self, window: Window, one: Step, replaced: int, left_out: int = 0) -> Interval:
        """Bounds ``(P, P)`` of ``contraction I - (rate / normaliser) J``.

        Of the batch at most ``replaced`` records are others, and at most ``left_out`` (0 or 1) do not count.
        """
        sums, shape, replaced = self.sums, self.weight.shape, min(replaced, self.batch)
        fall = _largest_gain(sums.top_lower, self.batch - self.filled, replaced, left_out)
        rise = _largest_gain(sums.top_upper, self.batch - self.filled, replaced, left_out)
        least, greatest = (end.ravel().astype(np.int64) for end in self.public)
        low = (sums.lower - fall + replaced * least - self.batch).astype(np.float64).reshape(shape)
        high = (sums.upper + rise + replaced * greatest + self.batch).astype(np.float64).reshape(shape)
        weight = one.learning_rate / window.normaliser * self.weight
        stay = window.contraction * np.eye(shape[0])
        slack = 16.0 * RELATIVE * (stay + weight * np.maximum(np.abs(low), np.abs(high))) + ABSOLUTE
        return Interval(stay - weight * high - slack, stay - weight * low + slack)


def step_rounding(window: Window, one: Step, box: Interval, gradient: np.ndarray) -> np.ndarray:
    """Bound ``(P,)`` of how far a computed step is from the exact one, given that of a record's gradient.

    Twice the sum of the errors: of the gradient, products, rounding to the grid of gradients, and the update.
    """
    scale = FixedPoint.make(window.clip, max(1, len(one.batch))).scale
    record = gradient + 8.0 * RELATIVE * window.clip + 1.0 / scale
    rate = one.learning_rate / window.normaliser
    update = window.contraction * box.magnitude + rate * len(one.batch) * window.clip
    return 2.0 * (rate * len(one.batch) * record + 4.0 * RELATIVE * update + ABSOLUTE)


def _largest_gain(top: np.ndarray, empty: int, replaced: int, left_out: int) -> np.ndarray:
    """The ``replaced`` largest terms of each row, and the next if it is positive, of ``left_out``; int64.

    ``top`` holds the largest terms of the filled slots, ascending; the ``empty`` others have none, that is 0.
    """
    count = replaced + left_out
    terms = np.hstack([top[:, max(0, top.shape[1] - count) :], np.zeros((len(top), min(empty, count)))])
    terms = np.sort(terms, axis=1)[:, ::-1][:, :count]
    terms[:, replaced:] = np.maximum(terms[:, replaced:], 0.0)
    return terms.astype(np.int64).sum(axis=1)


def check_size(window: Window, plan: Plan) -> None:
    """Raises UnsupportedWindowError for Jacobians that no machine would hold: a public rule."""
    if plan.size > 1024:
        raise UnsupportedWindowError(
            f"model: {plan.size} trained parameters; Jacobians are kept for at most 1024, use the backend ibp"
        )
    batch = max((len(one.batch) for one in window.steps), default=0)
    terms = plan.size**2 * sum(min(k, batch) for k in window.radii)
    if terms > _MOST_TERMS:
        raise UnsupportedWindowError(
            f"radii: {plan.size} parameters and radii up to {window.radii[-1]} need {terms:.2g} terms of "
            f"Jacobians, more than {_MOST_TERMS:.2g}; take fewer radii, train fewer parameters, or use ibp"
        )


def trains_last_layer_only(plan: Plan) -> bool:
    """Is nothing trained before the model's last node?"""
    return not any(plan.active[i] for i in plan.graph.nodes[plan.graph.output].inputs[:1])


def structure(plan: Plan) -> tuple[int, tuple[_Block, ...]]:
    """The head's source node and blocks; raises UnsupportedWindowError."""
    graph = plan.graph
    node = graph.nodes[graph.output]
    if not (isinstance(node.op, Affine) and node.op.positions == 1 and graph.per_record[node.inputs[0]]):
        raise _not_a_head(f"the model ends in {node.op.title}")
    if plan.active[node.inputs[0]]:
        raise _not_a_head("it trains more than its last affine layer")
    op, columns = node.op, [entries(plan, i) for i in node.inputs[1:]]
    weight = columns[0].reshape(op.rows, op.cols)
    bias = columns[1] if len(columns) == 2 else np.full(op.rows, -1)
    table = np.column_stack([weight, bias])  # positions in theta, -1 for what is not trained
    trained = table[table >= 0]
    if len(np.unique(trained)) < len(trained) or len(trained) < plan.size:
        raise _not_a_head("a parameter is used twice, or elsewhere than in the last affine layer")
    return node.inputs[0], tuple(_Block(row[row >= 0], np.flatnonzero(row >= 0)) for row in table)


def _not_a_head(found: str) -> UnsupportedWindowError:
    return UnsupportedWindowError(
        f"model: {found}; interval Jacobians need a model that is linear in what is trained (freeze the other layers "
        "with the recipe's model.trainable), or use the backend ibp"
    )


def entries(plan: Plan, position: int) -> np.ndarray:
    """Positions in theta of the entries of a weight or bias node, -1 where it is not trained."""
    node = plan.graph.nodes[position]
    if isinstance(node.op, Parameter) and node.op.name in plan.offsets:
        return plan.offsets[node.op.name] + np.arange(node.op.size)
    if not plan.active[position]:
        return np.full(plan.graph.sizes[position], -1)
    if isinstance(node.op, Gather) and node.op.is_permutation:
        return entries(plan, node.inputs[0])[node.op.index]
    raise _not_a_head("the last layer's weights are computed from its parameters")


def source_features(plan: Plan, source: int, x: np.ndarray) -> np.ndarray:
    """What the head multiplies ``(A, n)`` for records ``x`` ``(F, n)``; the last row is one."""
    if not isinstance(plan.graph.nodes[source].op, Input):
        x = plan.forward(x, plan.shared(plan.graph.initial()))[source]
    return np.concatenate([x, np.ones((1, x.shape[1]))])


def public_ends(section: str, stated: Interval | None, values: np.ndarray, window: Window) -> Interval:
    """Ends ``(F, 1)`` that the recipe's ``section`` states; every record's ``values`` ``(F, R)`` keep to them.

    Raises UnsupportedWindowError.
    """
    if stated is None:
        raise UnsupportedWindowError(
            f"{section}: the recipe states no public range, so that a differing record's Jacobian has no bound; "
            f"add lower and upper to [{section}], or use the backend ibp"
        )
    low, high = (np.reshape(end, (-1, 1)) for end in stated)
    low, high = np.minimum(low, high), np.maximum(low, high)
    known = values[:, window.records.filled(np.arange(values.shape[1]))]
    if not ((low <= known) & (known <= high)).all():
        raise UnsupportedWindowError(f"{section}: a record lies outside the public range; widen it, or clip the table")
    return Interval(low, high)


def feature_ends(window: Window, plan: Plan, source: int) -> tuple[np.ndarray, np.ndarray]:
    """Public ends ``(A,)`` of what the head multiplies, the last entry one."""
    low, high = public_ends("features", window.feature_range, window.records.features, window)
    values = {
        i: Interval(value, value) for i, value in plan.shared(plan.graph.initial()).items() if not plan.active[i]
    }
    for i in plan.order:
        node = plan.graph.nodes[i]
        if i > source or i in values or plan.active[i]:
            continue
        arguments = [values[j] for j in node.inputs]
        values[i] = node.op.forward_interval(arguments, 2.0) if arguments else Interval(low, high)
    ends = [np.append(np.broadcast_to(end, (plan.graph.sizes[source], 1)), 1.0) for end in values[source]]
    if not all(np.isfinite(end).all() for end in ends):
        raise UnsupportedWindowError("features: their public range is not finite; give finite ends, or use ibp")
    return ends[0], ends[1]


def untrained(plan: Plan, reach: np.ndarray) -> np.ndarray:
    """Largest absolute contribution ``(O,)`` or ``(O, n)`` of the last layer's untrained entries, for features ``(A,)``
    or ``(A, n)`` up to ``reach``."""
    node = plan.graph.nodes[plan.graph.output]
    shared = plan.shared(plan.graph.initial())
    total = np.zeros((node.op.rows, *reach.shape[1:]))
    for position, columns in zip(node.inputs[1:], (reach[:-1], reach[-1:]), strict=False):
        if not plan.active[position]:
            total += np.abs(shared[position].reshape(node.op.rows, -1)) @ columns
    return total
