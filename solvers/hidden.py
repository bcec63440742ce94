"""Interval Jacobians of the summed clipped gradient, for networks of one smooth hidden layer and one output.

``f = w . h + b``, ``h_j = act(z_j)``, ``z = W a``, where ``a`` are public or frozen features and one.  Any of the
parameters may be frozen.  With ``u_j = w_j act'(z_j)`` and ``v = (u, h, 1)``, the gradient of a record in parameter
``p`` is ``g_p = phi' v_G(p) a_p``: group ``G`` is one of the hidden units' rows, with ``a_p`` the feature a weight
multiplies, or an entry of ``(w, b)``, with ``a_p = 1``.  Its clip ``h_p`` has the Jacobian

    J_pq = s_p C_G(p)G(q) a_p a_q,    C = phi'' v v^T + phi' (derivative of v):
    C_u_j,u_j += phi' w_j act''(z_j),  C_u_j,h_j += phi' act'(z_j),

with ``s_p`` as in `solvers.jacobian`; the sums, the exchange of records that differ and the proof of monotonicity are
the same.  A differing record's interval is what the same formulas give for the public ranges of features and targets,
joined with zero.  It grows with the box, and it contains the interval of every record.  Entries are divided by public
bounds of their features and rounded to a public grid; where the public interval is beyond the grid's range there is no
bound at this radius, and then none for any neighbour at the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from numba import njit

from models.losses import Huber, Logistic, Loss, SmoothedHinge
from models.ops import Affine, Interval
from models.ops.activations import Sigmoid, Softplus, Tanh
from models.ops.base import LIBRARY, RELATIVE, Op, interval_product, laddered, rounded
from solvers.errors import UnsupportedWindowError
from solvers.gradients import FixedPoint, Sums, add_dense
from solvers.ibp import Plan
from solvers.jacobian import (
    LARGEST_OUTPUT,
    LARGEST_SCALE,
    Curvature,
    Head,
    check_size,
    clarke,
    entries,
    feature_ends,
    largest_derivative,
    public_ends,
    second_derivative,
    source_features,
    step_rounding,
    trains_last_layer_only,
)
from solvers.window import Step, Window

#: Range of the grid of Jacobian entries, in units of the features' public bounds.
_LARGEST_ENTRY = 2.0**16
#: Numbers of one tile's pairs of groups.
_TILE_NUMBERS = 1 << 18
#: Where act'' of the hyperbolic tangent and of the sigmoid is extreme, in terms of the value, and how large it is.
_TANH_PEAK, _TANH_MOST = 3.0**-0.5, 4.0 * 3.0**-1.5 + LIBRARY
_SIGMOID_PEAK, _SIGMOID_MOST = 0.5 - 12.0**-0.5, 108.0**-0.5 + LIBRARY


def jacobians(window: Window) -> Head | Hidden:
    """The interval Jacobians of a window's model; raises UnsupportedWindowError where there are none."""
    return (Head if trains_last_layer_only(Plan(window.graph)) else Hidden).make(window)


@singledispatch
def second_slope(op: Op, z: Interval, h: Interval, ladder: float) -> Interval:
    """Bounds of the second derivative over boxes of the argument ``z`` and of the value ``h``; inclusion monotone."""
    raise UnsupportedWindowError(
        f"model: the hidden layer's {op.title} has no Lipschitz derivative that is used here; choose tanh, sigmoid or "
        "softplus, or the backend ibp"
    )


@second_slope.register
def _(op: Tanh, z, h, ladder):
    ends = [-2.0 * end * (1.0 - end * end) for end in h]
    return _with_peaks(h, ends, {-_TANH_PEAK: _TANH_MOST, _TANH_PEAK: -_TANH_MOST}, ladder)


@second_slope.register
def _(op: Sigmoid, z, h, ladder):
    ends = [end * (1.0 - end) * (1.0 - 2.0 * end) for end in h]
    return _with_peaks(h, ends, {_SIGMOID_PEAK: _SIGMOID_MOST, 1.0 - _SIGMOID_PEAK: -_SIGMOID_MOST}, ladder)


@second_slope.register
def _(op: Softplus, z, h, ladder):
    sigmoid = Sigmoid()
    return sigmoid._slope_interval(z, sigmoid.forward_interval([z], ladder), ladder)


def _with_peaks(h: Interval, ends: list[np.ndarray], peaks: dict[float, float], ladder: float) -> Interval:
    """The range of a function with these extremes, given its values at the ends of ``h``."""
    low, high = laddered(np.minimum(*ends), np.maximum(*ends), LIBRARY, ladder)
    for at, value in peaks.items():
        inside = (h.lower <= at + LIBRARY) & (h.upper >= at - LIBRARY)
        low = np.where(inside, np.minimum(low, value), low)
        high = np.where(inside, np.maximum(high, value), high)
    return Interval(low, high)


@dataclass(frozen=True, eq=False)
class Structure:
    """Where a one-hidden-layer model's parts are; public.

    ``source``, ``hidden``, ``activation``: node of the features, of ``z``, and of ``act(z)``.  ``group``, ``feature``
    ``(P,)``: what a parameter's gradient is a product of (see the module).
    """

    plan: Plan
    source: int
    hidden: int
    activation: int
    group: np.ndarray
    feature: np.ndarray

    @classmethod
    def of(cls, plan: Plan) -> Structure:
        """Raises UnsupportedWindowError for any other model."""
        graph = plan.graph
        last = graph.nodes[graph.output]
        if not (isinstance(last.op, Affine) and last.op.positions == 1 and last.op.rows == 1):
            raise _not_one_layer("the model does not end in an affine layer of one output")
        activation = last.inputs[0]
        middle = graph.nodes[activation]
        hidden = middle.inputs[0] if len(middle.inputs) == 1 else activation
        first = graph.nodes[hidden]
        if not (isinstance(first.op, Affine) and first.op.positions == 1 and graph.per_record[first.inputs[0]]):
            raise _not_one_layer(f"what the last layer reads is {middle.op.title}, not a function of an affine layer")
        if plan.active[first.inputs[0]]:
            raise _not_one_layer("it trains more than two layers")
        nothing = Interval(np.zeros((1, 0)), np.zeros((1, 0)))
        second_slope(middle.op, nothing, nothing, 0.0)

        units, source = first.op.rows, first.inputs[0]
        one = graph.sizes[source]
        columns = [
            (first.inputs[1], np.repeat(np.arange(units), one), np.tile(np.arange(one), units)),
            (last.inputs[1], units + np.arange(units), np.full(units, one)),
            *((i, np.arange(units), np.full(units, one)) for i in first.inputs[2:]),
            *((i, np.array([2 * units]), np.array([one])) for i in last.inputs[2:]),
        ]
        table = np.concatenate([np.stack([entries(plan, i), group, at]) for i, group, at in columns], axis=1)
        table = table[:, table[0] >= 0]
        if len(np.unique(table[0])) < table.shape[1] or table.shape[1] < plan.size:
            raise _not_one_layer("a parameter is used twice, or elsewhere than in its last two affine layers")
        group, feature = np.empty((2, plan.size), np.int64)
        group[table[0]], feature[table[0]] = table[1:]
        return cls(plan, source, hidden, activation, group, feature)

    @property
    def units(self) -> int:
        return self.plan.graph.sizes[self.hidden]

    def forward(self, shared: dict[int, Interval], a: Interval, ladder: float) -> tuple[Interval, Interval, Interval]:
        """Bounds of ``z``, ``h`` ``(H, n)`` and the output ``(1, n)`` over boxes of parameters and features ``a``."""
        nodes, known = self.plan.graph.nodes, a.lower[:-1]
        inputs = Interval(known, known if a.lower is a.upper else a.upper[:-1])
        first, last = nodes[self.hidden], nodes[self.plan.graph.output]
        z = first.op.forward_interval([inputs, *(shared[i] for i in first.inputs[1:])], ladder)
        h = nodes[self.activation].op.forward_interval([z], ladder)
        return z, h, last.op.forward_interval([h, *(shared[i] for i in last.inputs[1:])], ladder)

    def factors(
        self, shared: dict[int, Interval], z: Interval, h: Interval, ladder: float
    ) -> tuple[Interval, Interval]:
        """Bounds of ``v`` ``(2H + 1, n)`` and of ``act'`` ``(H, n)``."""
        slope = self.plan.graph.nodes[self.activation].op._slope_interval(z, h, ladder)
        u = interval_product(self.last_weight(shared), slope, ladder)
        one = np.ones((1, z.lower.shape[1]))
        return Interval(*(np.concatenate([x, y, one]) for x, y in zip(u, h, strict=True))), slope

    def last_weight(self, shared: dict[int, Interval]) -> Interval:
        """The box of ``w``, ``(H, 1)``."""
        weight = shared[self.plan.graph.nodes[self.plan.graph.output].inputs[1]]
        return Interval(*(end.reshape(self.units, 1) for end in weight))

    def output_rounding(self, shared: dict[int, Interval], reach: np.ndarray) -> tuple[np.ndarray, ...]:
        """Sizes and rounding errors over a box for features ``(A, n)`` up to ``reach``; all grow with the box.

        ``h``, its error, the error of ``act'`` ``(H, n)``, the output and its error ``(n,)``.  ``act`` and its
        derivative change no faster than their arguments.
        """
        nodes = self.plan.graph.nodes
        first, last = nodes[self.hidden], nodes[self.plan.graph.output]
        weight, bias = (box.magnitude for box in first.op.boxes([None, *(shared[i] for i in first.inputs[1:])]))
        z = weight @ reach[:-1] + bias[:, None]
        error = 2.0 * (len(reach) + 4) * RELATIVE * z
        h = z + 1.0 if isinstance(nodes[self.activation].op, Softplus) else np.ones_like(z)
        h_error = error + 2.0 * LIBRARY + 2.0 * RELATIVE * h
        weight, bias = (box.magnitude for box in last.op.boxes([None, *(shared[i] for i in last.inputs[1:])]))
        output = weight[0] @ h + bias[0]
        output_error = weight[0] @ h_error + 2.0 * (len(h) + 4) * RELATIVE * output
        return h, h_error, 2.0 * h_error + LIBRARY, output, output_error


@dataclass(frozen=True, eq=False)
class Hidden:
    """A window's model as a network of one hidden layer; public.  Used like `solvers.jacobian.Head`.

    ``low``, ``high`` ``(A, 1)``: the features' range; ``target`` ``(1, 1)`` ends: that of the targets, where the loss
    needs it; ``size`` ``(P,)``: largest absolute feature of each parameter; ``bend``: largest second derivative of the
    loss, ``error``: of the rounding error of its first.
    """

    plan: Plan
    structure: Structure
    low: np.ndarray
    high: np.ndarray
    target: Interval
    size: np.ndarray
    bend: float
    error: float

    @classmethod
    def make(cls, window: Window) -> Hidden:
        """Raises UnsupportedWindowError with the reason where the window's model or loss has no such form."""
        plan = Plan(window.graph)
        structure = Structure.of(plan)
        check_size(window, plan)
        nothing = np.zeros((1, 0))
        second_derivative(window.loss, Interval(nothing, nothing), nothing, 0.0)
        low, high = (end[:, None] for end in feature_ends(window, plan, structure.source))
        reach = np.maximum(np.abs(low), np.abs(high))[structure.feature, 0]
        bend, error = largest_derivative(window.loss)
        target = target_ends(window.loss, window)
        return cls(plan, structure, low, high, target, np.where(reach > 0.0, reach, 1.0), bend, error)

    def rounding(self, window: Window, one: Step, box: Interval) -> np.ndarray:
        """Bound ``(P,)`` of how far the trainer's computed step is from the exact one, anywhere in a box.

        Grows with the box; in the gradient it counts the errors of ``phi'``, ``act`` and ``act'``.
        """
        structure = self.structure
        shared = self.plan.shared_interval(box.lower, box.upper, 2.0)
        reach = np.maximum(np.abs(self.low), np.abs(self.high))
        h, h_error, slope_error, output, output_error = structure.output_rounding(shared, reach)
        slope = self.largest_slope(window.loss, output)
        loss_error = self.bend * output_error + self.error
        weight = structure.last_weight(shared).magnitude
        by_group = np.concatenate(
            [weight * (loss_error + slope * slope_error), h * loss_error + slope * h_error, loss_error[:, None]]
        )
        return step_rounding(window, one, box, by_group[structure.group, 0] * self.size)

    def largest_slope(self, loss: Loss, output: np.ndarray) -> np.ndarray:
        """Largest ``|phi'|`` for outputs up to this size and any target in the public range."""
        ends = (loss.gradient_interval(Interval(-output[None], output[None]), end, 0.0) for end in self.target)
        return np.maximum(*(found.magnitude[0] for found in ends))

    def curvature(self, window: Window, one: Step, box: Interval, radius: int) -> Curvature | None:
        """The Jacobians of a step's records over a box of this radius; None where entries leave the grid's range."""
        batch, ladder = len(one.batch), 2.0 * radius
        grid = FixedPoint.make(_LARGEST_ENTRY, max(1, batch))
        with np.errstate(all="ignore"):
            # One rung more: it contains the records' intervals of this rung, whatever library functions do.
            public = self._public(window, box, ladder + 2.0)
        scale = FixedPoint.make(window.clip, max(1, batch)).scale
        if public is None or not scale <= LARGEST_SCALE:
            return None
        ends = [np.rint(end * grid.scale) for end in public]
        sums = Sums.zeros(self.plan.size**2, min(radius, batch))
        slots, target = window.records.filled(one.batch), np.arange(self.plan.size)
        tile = max(8, min(self.plan.tile, _TILE_NUMBERS // (2 * self.structure.units + 1) ** 2))
        nothing = np.zeros(0, np.int64)
        with np.errstate(all="ignore"):
            shared = self.plan.shared_interval(box.lower, box.upper, ladder)
            for start in range(0, len(slots), tile):
                x, y = window.records.tile(slots[start : start + tile])
                a = source_features(self.plan, self.structure.source, x)
                z, h, output = self.structure.forward(shared, Interval(a, a), ladder)
                first = window.loss.gradient_interval(output, y, ladder)
                bend = second_derivative(window.loss, output, y, ladder)
                pairs, slopes = self._pairs(shared, z, h, first, bend, ladder)
                a = a[self.structure.feature]
                scaled = a / self.size[:, None]
                rows = Interval(np.empty_like(a), np.empty_like(a))
                for p, group in enumerate(self.structure.group):
                    gradient = Interval(slopes.lower[group] * a[p], slopes.upper[group] * a[p])
                    state = clarke(_ordered(*gradient, ladder), window.clip)
                    _row(
                        pairs.lower[group], pairs.upper[group], *state, scaled[p], scaled, self.structure.group,
                        grid.scale, *rows,
                    )  # fmt: skip
                    add_dense(rows, grid, nothing, p * self.plan.size + target, sums)
        weight = np.multiply.outer(self.size, self.size) / grid.scale
        return Curvature(sums, Interval(*ends), weight, batch, len(slots))

    def _pairs(
        self, shared: dict[int, Interval], z: Interval, h: Interval, first: Interval, bend: Interval, ladder: float
    ) -> tuple[Interval, Interval]:
        """Bounds of ``C`` ``(2H + 1, 2H + 1, n)`` and of ``phi' v`` ``(2H + 1, n)``.

        ``first``, ``bend`` ``(1, n)``: bounds of the loss's first and second derivative.
        """
        structure = self.structure
        v, slope = structure.factors(shared, z, h, ladder)
        bent = interval_product(bend, v, ladder)
        pairs = interval_product(
            Interval(bent.lower[:, None], bent.upper[:, None]), Interval(v.lower[None], v.upper[None]), ladder
        )
        units, every = np.arange(structure.units), np.arange(len(v.lower))
        _set(pairs, every, every, interval_product(bend, _square(v, ladder), ladder))
        op = self.plan.graph.nodes[structure.activation].op
        curved = interval_product(structure.last_weight(shared), second_slope(op, z, h, ladder), ladder)
        _add(pairs, units, units, interval_product(first, curved, ladder), ladder)
        crossed = interval_product(first, slope, ladder)
        _add(pairs, units, structure.units + units, crossed, ladder)
        _add(pairs, structure.units + units, units, crossed, ladder)
        return pairs, interval_product(first, v, ladder)

    def _public(self, window: Window, box: Interval, ladder: float) -> Interval | None:
        """Bounds ``(P, P)`` of any record's Jacobian in units of the features, joined with 0; None where too large."""
        shared = self.plan.shared_interval(box.lower, box.upper, ladder)
        z, h, output = self.structure.forward(shared, Interval(self.low, self.high), ladder)
        first = Interval(  # it decreases in the target
            window.loss.gradient_interval(output, self.target.upper, ladder).lower,
            window.loss.gradient_interval(output, self.target.lower, ladder).upper,
        )
        bend = Interval(np.zeros((1, 1)), np.full((1, 1), self.bend))
        pairs, slopes = self._pairs(shared, z, h, first, bend, ladder)
        group, feature = self.structure.group, self.structure.feature
        a = Interval(*(end[feature, 0] / self.size for end in (self.low, self.high)))
        products = interval_product(
            Interval(a.lower[:, None], a.upper[:, None]), Interval(a.lower[None], a.upper[None]), 0.0
        )
        square, same = _square(a, 0.0), feature[:, None] == feature
        products = Interval(
            np.where(same, square.lower[:, None], products.lower), np.where(same, square.upper[:, None], products.upper)
        )
        found = interval_product(Interval(*(end[np.ix_(group, group)][..., 0] for end in pairs)), products, 0.0)
        others = max(z.magnitude.max(), output.magnitude.max(), slopes.magnitude.max() * self.size.max())
        if not (found.magnitude.max() <= _LARGEST_ENTRY and others <= LARGEST_OUTPUT):
            return None
        return Interval(np.minimum(found.lower, 0.0), np.maximum(found.upper, 0.0))


@njit(nogil=True, cache=True)
def _row(low, high, surely, possibly, a, others, group, scale, lower, upper):
    """One parameter's row ``s C a_p a_q`` ``(P, n)`` of every record; ``low``, ``high`` ``(G, n)``: ends of ``C``."""
    size, n = others.shape
    for q in range(size):
        below = low[group[q]]
        above = high[group[q]]
        for i in range(n):
            t = a[i] * others[q, i]
            s = below[i] * t * scale
            u = above[i] * t * scale
            least = s if s < u else u
            most = s if s > u else u
            lower[q, i] = (least if least < 0.0 or surely[i] > 0.0 else 0.0) * possibly[i]
            upper[q, i] = (most if most > 0.0 or surely[i] > 0.0 else 0.0) * possibly[i]


def target_ends(loss: Loss, window: Window) -> Interval:
    """Public ends ``(1, 1)`` between which the loss sees its targets; raises UnsupportedWindowError."""
    if isinstance(loss, Logistic | Huber | SmoothedHinge):  # targets are bounded, or the derivative is anyway
        ends = {"logistic": (0.0, 1.0), "smoothed-hinge": (-1.0, 1.0)}.get(loss.name, (-np.inf, np.inf))
        return Interval(*(np.full((1, 1), end) for end in ends))
    return public_ends("target", window.target_range, window.records.targets, window)


def _ordered(one: np.ndarray, two: np.ndarray, ladder: float) -> Interval:
    return rounded(np.minimum(one, two), np.maximum(one, two), ladder)


def _square(v: Interval, ladder: float) -> Interval:
    """Bounds of the square, which is not negative."""
    magnitude = v.magnitude
    least = np.where((v.lower <= 0.0) & (v.upper >= 0.0), 0.0, np.minimum(np.abs(v.lower), np.abs(v.upper)))
    low, high = rounded(least * least, magnitude * magnitude, ladder)
    return Interval(np.maximum(low, 0.0), high)


def _set(pairs: Interval, rows: np.ndarray, columns: np.ndarray, values: Interval) -> None:
    for end, value in zip(pairs, values, strict=True):
        end[rows, columns] = value


def _add(pairs: Interval, rows: np.ndarray, columns: np.ndarray, values: Interval, ladder: float) -> None:
    total = (end[rows, columns] + value for end, value in zip(pairs, values, strict=True))
    _set(pairs, rows, columns, rounded(*total, ladder))


def _not_one_layer(found: str) -> UnsupportedWindowError:
    return UnsupportedWindowError(
        f"model: {found}; interval Jacobians need a model that is linear in what is trained, or one hidden layer of "
        "tanh, sigmoid or softplus and one output (freeze other layers with the recipe's model.trainable); or use the "
        "backend ibp"
    )


def output_slopes(plan: Plan, box: Interval, x: np.ndarray, radius: int) -> tuple[np.ndarray, np.ndarray]:
    """Largest derivatives ``(P, n)`` of the output over a box at inputs ``x`` ``(F, n)``, and rounding errors ``(n,)``.

    The errors are those of the difference of two computed outputs.  Both grow with the box; infinite where there is no
    bound.  Raises UnsupportedWindowError for any other model.
    """
    structure, ladder = Structure.of(plan), 2.0 * radius
    a = source_features(plan, structure.source, x)
    with np.errstate(all="ignore"):
        shared = plan.shared_interval(box.lower, box.upper, ladder)
        z, h, _ = structure.forward(shared, Interval(a, a), ladder)
        v, _ = structure.factors(shared, z, h, ladder)
        slopes = v.magnitude[structure.group] * np.abs(a[structure.feature])
        *_, error = structure.output_rounding(shared, np.abs(a))
        return np.nan_to_num(slopes, nan=np.inf), np.nan_to_num(2.0 * error, nan=np.inf)
