"""Interval bound propagation of clipped gradient training: the first backend.

For every step and radius ``k`` the per-record gradient is bounded over the box of the *same* radius at the previous
step, clipped, and the bounds are summed with ``k`` of them given away to an adversary ([AGT-R/AGS] equations (2)-(3)
with the correction that the box is that of radius ``k``; Theorem B of the audit for property (M)):

* replace-one: lower sum = (sum of the ``b - k`` smallest lower ends) - ``k clip``, upper symmetric;
* zero-out: lower sum = (sum of the lower ends) - ``k clip``, but no less than ``-b clip``; upper symmetric.

Guarantees:
  * the radius-0 box is the nominal run, bit for bit;
  * the box of radius k contains the parameters of the nominal trainer on every data set that differs in k slots;
  * boxes nest: radius k on a data set lies inside radius k + 1 on each of its neighbours, as computed;
  * results do not depend on the number of threads or on where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from models.ir import Graph
from models.losses import Loss
from models.ops import Affine, Constant, Gather, Input, Interval, Parameter
from models.ops.base import rounded
from solvers.coupled import coupled, pieces
from solvers.gradients import (
    TILE,
    Factors,
    FixedPoint,
    Sums,
    add_dense,
    add_dense_point,
    add_outer,
    add_outer_point,
    outer_interval,
    outer_point,
)
from solvers.update import totals, update, update_interval
from solvers.window import Boxes, Records, Step, Window

#: Working set aimed at by a tile, in float64 numbers: about half of a core's second-level cache.
_TILE_NUMBERS = 1 << 17


@dataclass(frozen=True, eq=False)
class _Outer:
    """A weight's gradient in factors: entry ``(m, k)`` is ``sum_r d[r, m] a[r, k]``; ``target`` maps entries."""

    d: Interval | np.ndarray
    a: Interval | np.ndarray
    positions: int
    products: str
    target: np.ndarray

    def dense(self, ladder: float | None) -> Interval | np.ndarray:
        """Entries in the order of the parameter (point when ``ladder`` is None)."""
        inverse = np.empty_like(self.target)
        inverse[self.target] = np.arange(len(self.target))
        if ladder is None:
            return outer_point(self.d, self.a, self.positions)[inverse]
        g = outer_interval(self.d, self.a, self.positions, self.products, ladder)
        return Interval(g.lower[inverse], g.upper[inverse])


class Plan:
    """A graph made ready for training: which nodes matter, where each parameter sits in the vector, tile size."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.offsets: dict[str, int] = {}
        start = 0
        for p in graph.trainable:
            self.offsets[p.name] = start
            start += p.value.size
        self.size = start
        active: list[bool] = []
        for node in graph.nodes:
            reads = isinstance(node.op, Parameter) and node.op.name in self.offsets
            active.append(reads or any(active[i] for i in node.inputs))
        self.active = tuple(a and i in graph.needed for i, a in enumerate(active))
        self.order = tuple(i for i in range(len(graph.nodes)) if i in graph.needed)
        largest = max(graph.sizes[i] for i in self.order if graph.per_record[i])
        tile = TILE
        while tile > 32 and largest * tile > _TILE_NUMBERS:
            tile //= 2
        self.tile = tile

    @cached_property
    def monotone(self) -> bool:
        """Do all operators of the graph have monotone rules?"""
        return all(self.graph.nodes[i].op.monotone for i in self.order)

    def shared(self, theta: np.ndarray) -> dict[int, np.ndarray]:
        """Values of the nodes that are the same for all records, ``(F, 1)`` each."""
        graph, parts, values = self.graph, self.graph.values(theta), {}
        for i in self.order:
            node = graph.nodes[i]
            if graph.per_record[i]:
                continue
            if isinstance(node.op, Constant):
                values[i] = node.op.values[:, None]
            elif isinstance(node.op, Parameter):
                values[i] = parts[node.op.name]
            else:
                values[i] = node.op.forward([values[j] for j in node.inputs])
        return values

    def shared_interval(self, lower: np.ndarray, upper: np.ndarray, ladder: float) -> dict[int, Interval]:
        """Bounds of ``shared`` over a box."""
        graph, values = self.graph, {}
        low, high = graph.values(lower), graph.values(upper)
        for i in self.order:
            node = graph.nodes[i]
            if graph.per_record[i]:
                continue
            if isinstance(node.op, Constant):
                column = node.op.values[:, None]
                values[i] = Interval(column, column)
            elif isinstance(node.op, Parameter):
                values[i] = Interval(low[node.op.name], high[node.op.name])
            else:
                values[i] = node.op.forward_interval([values[j] for j in node.inputs], ladder)
        return values

    def forward(self, x: np.ndarray, shared: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Values of all needed nodes for a tile ``(F, n)``."""
        values = dict(shared)
        for i in self.order:
            if i not in values:
                node = self.graph.nodes[i]
                is_input = isinstance(node.op, Input)
                values[i] = x if is_input else node.op.forward([values[j] for j in node.inputs])
        return values

    def forward_interval(
        self, x: np.ndarray, shared: dict[int, Interval], ladder: float
    ) -> dict[int, Interval]:
        """Bounds of ``forward``; the record's features are known exactly."""
        values = dict(shared)
        for i in self.order:
            if i not in values:
                node = self.graph.nodes[i]
                if isinstance(node.op, Input):
                    values[i] = Interval(x, x)
                else:
                    natural = node.op.forward_interval([values[j] for j in node.inputs], ladder)
                    values[i] = self.tighten(i, natural, values, ladder)
        return values

    def tighten(self, i: int, natural: Interval, values: dict[int, Interval], ladder: float) -> Interval:
        """Bounds of node ``i`` for a tile, given its natural ones and those of earlier nodes; here no better."""
        return natural


def _health(values: np.ndarray, flags: np.ndarray) -> None:
    """Mark in ``flags`` the records that have a value that is not finite."""
    if not np.isfinite(values.sum()):
        flags |= ~np.isfinite(values).all(axis=0)


def _backward(plan: Plan, values: dict, seed, ladder: float | None, flags: np.ndarray) -> dict[str, list]:
    """Per-record gradients of every trainable parameter as contributions (dense or factored).

    ``ladder`` is None for the nominal run; then values and adjoints are arrays, otherwise intervals.
    """
    graph, point = plan.graph, ladder is None
    dense: dict[int, list] = {graph.output: [seed]}
    factored: dict[int, list[_Outer]] = {}
    found: dict[str, list] = {}

    def add(i, contribution):
        if contribution is not None and plan.active[i]:
            dense.setdefault(i, []).append(contribution)

    for i in reversed(plan.order):
        if not plan.active[i] or (i not in dense and i not in factored):
            continue
        node = graph.nodes[i]
        outers = factored.get(i, [])
        if isinstance(node.op, Parameter):
            found.setdefault(node.op.name, []).extend([*dense.get(i, []), *outers])
            continue
        if isinstance(node.op, Gather) and node.op.is_permutation and i not in dense:
            for outer in outers:
                target = node.op.index[outer.target]
                factored.setdefault(node.inputs[0], []).append(
                    _Outer(outer.d, outer.a, outer.positions, outer.products, target)
                )
            continue
        adjoint = _total([*dense.get(i, []), *(o.dense(ladder) for o in outers)], ladder)
        if not graph.per_record[i] and not point:
            adjoint = Interval(*np.broadcast_arrays(*adjoint))
        args = [values[j] for j in node.inputs]
        needed = [plan.active[j] for j in node.inputs]
        if isinstance(node.op, Affine):
            if needed[1]:
                entries = np.arange(node.op.rows * node.op.cols)
                factored.setdefault(node.inputs[1], []).append(
                    _Outer(adjoint, args[0], node.op.positions, node.op.products, entries)
                )
            if len(args) == 3 and needed[2]:
                add(node.inputs[2], _over_positions(adjoint, node.op.positions, ladder))
        if point:
            back = node.op.backward(adjoint, args, values[i], needed)
            arrays = [b for b in back if b is not None]
        else:
            back = node.op.backward_interval(adjoint, args, values[i], needed, ladder)
            arrays = [end for b in back if b is not None for end in b]
        if node.op.can_overflow:
            for array in arrays:
                _health(array, flags)
        for j, contribution in zip(node.inputs, back, strict=True):
            add(j, contribution)
    return found


def _total(terms: list, ladder: float | None):
    """Sum of dense contributions in the order they came."""
    total = terms[0]
    for term in terms[1:]:
        total = (
            total + term
            if ladder is None
            else rounded(total.lower + term.lower, total.upper + term.upper, ladder)
        )
    return total


def _over_positions(adjoint, positions: int, ladder: float | None):
    """Sum over the positions at which a bias was added."""
    if positions == 1:
        return adjoint
    if ladder is None:
        return _total(list(adjoint.reshape(positions, -1, adjoint.shape[1])), None)
    parts = zip(
        adjoint.lower.reshape(positions, -1, adjoint.lower.shape[1]),
        adjoint.upper.reshape(positions, -1, adjoint.upper.shape[1]),
        strict=True,
    )
    return _total([Interval(lo, up) for lo, up in parts], ladder)


def record_gradients(
    plan: Plan, window: Window, x: np.ndarray, y: np.ndarray, shared, ladder: float | None, scale: float
) -> tuple[dict[str, list], np.ndarray]:
    """Contributions by parameter for a tile, times ``scale`` (a power of two), and the records to give up on.

    A record is given up on when anything computed for it is not finite: nominally it then contributes nothing, in
    interval training anything up to the clip.  The rule is monotone, since bounds only move outward.
    """
    flags = np.zeros(x.shape[1], dtype=bool)
    with np.errstate(all="ignore"):
        if ladder is None:
            values = plan.forward(x, shared)
            output = np.broadcast_to(values[plan.graph.output], y.shape)
            seed = window.loss.gradient(output, y) * scale
            ends = [seed]
            watched = [(i, (values[i],)) for i in plan.order if plan.graph.per_record[i]]
        else:
            values = plan.forward_interval(x, shared, ladder)
            output = Interval(*(np.broadcast_to(end, y.shape) for end in values[plan.graph.output]))
            seed = window.loss.gradient_interval(output, y, ladder)
            seed = Interval(seed.lower * scale, seed.upper * scale)
            ends = list(seed)
            watched = [(i, values[i]) for i in plan.order if plan.graph.per_record[i]]
        for i, arrays in watched:
            if plan.graph.nodes[i].op.can_overflow:
                for array in arrays:
                    _health(array, flags)
        for end in ends:
            _health(end, flags)
        found = _backward(plan, values, seed, ladder, flags)
    for p in plan.graph.trainable:
        if p.name not in found:  # the output does not depend on it
            nothing = np.zeros((p.value.size, x.shape[1]))
            found[p.name] = [nothing if ladder is None else Interval(nothing, nothing)]
    return found, np.flatnonzero(flags)


def _accumulate(plan: Plan, found: dict[str, list], bad, grid: FixedPoint, ladder: float | None, sums: Sums):
    """Clip, round and add a tile's contributions."""
    for name, contributions in found.items():
        start = plan.offsets[name]
        first = contributions[0]
        if len(contributions) == 1 and isinstance(first, _Outer) and first.positions == 1:
            target = first.target + start
            if ladder is None:
                add_outer_point(first.d, first.a, grid, bad, target, sums)
                continue
            if first.products == "natural" or first.a.lower is first.a.upper:
                add_outer(first.d, first.a, grid, bad, target, sums)
                continue
        terms = [c.dense(ladder) if isinstance(c, _Outer) else c for c in contributions]
        total = _total(terms, ladder)
        if ladder is None:
            target = np.arange(start, start + total.shape[0])
            add_dense_point(np.ascontiguousarray(total), grid, bad, target, sums)
        else:
            target = np.arange(start, start + total.lower.shape[0])
            dense = Interval(np.ascontiguousarray(total.lower), np.ascontiguousarray(total.upper))
            add_dense(dense, grid, bad, target, sums)
    sums.degenerate += len(bad)


def _work(plan, window, batch, tiles, shared_point, shared, ladders, keeps, grid) -> list[Sums]:
    """One worker: the nominal run and all radii over its tiles, reading each tile once."""
    nominal = Sums.zeros(plan.size, 0)
    results = [Sums.zeros(plan.size, keep) for keep in keeps]
    for start in tiles:
        slots = batch[start : start + plan.tile]
        x, y = window.records.tile(slots)
        found, bad = record_gradients(plan, window, x, y, shared_point, None, grid.scale)
        _accumulate(plan, found, bad, grid, None, nominal)
        for values, ladder, sums in zip(shared, ladders, results, strict=True):
            found, bad = record_gradients(plan, window, x, y, values, ladder, grid.scale)
            _accumulate(plan, found, bad, grid, ladder, sums)
    return [nominal, *results]


def step(window: Window, plan: Plan, boxes: Boxes, one: Step, pool: Executor | None, threads: int) -> Boxes:
    """All radii through one step."""
    batch = window.records.filled(one.batch)
    size, filled = len(one.batch), len(batch)
    grid = FixedPoint.make(window.clip, max(size, 1))
    wide = [j for j, radius in enumerate(window.radii) if radius > 0]
    ladders = [2.0 * window.radii[j] for j in wide]
    replace = window.adjacency == "replace-one"
    keeps = [min(window.radii[j], size) if replace else 0 for j in wide]
    shared_point = plan.shared(boxes.nominal)
    with np.errstate(all="ignore"):
        shared = [
            plan.shared_interval(boxes.lower[j], boxes.upper[j], ladder)
            for j, ladder in zip(wide, ladders, strict=True)
        ]
    starts = range(0, filled, plan.tile)
    arguments = (shared_point, shared, ladders, keeps, grid)
    if pool is None or threads == 1 or len(starts) < 2:
        parts = [_work(plan, window, batch, starts, *arguments)]
    else:
        futures = [pool.submit(_work, plan, window, batch, starts[w::threads], *arguments) for w in range(threads)]
        parts = [future.result() for future in futures]
    sums = parts[0]
    for part in parts[1:]:
        sums = [a.merge(b) for a, b in zip(sums, part, strict=True)]

    factor = one.learning_rate / window.normaliser / grid.scale
    nominal = update(window, boxes.nominal, sums[0].lower.astype(np.float64), factor)
    lower, upper = boxes.lower.copy(), boxes.upper.copy()
    for j, radius in enumerate(window.radii):
        if radius == 0:
            lower[j] = upper[j] = nominal
    for j, part in zip(wide, sums[1:], strict=True):
        total = Interval(*totals(window, part, window.radii[j], size, filled, grid))
        box = Interval(boxes.lower[j], boxes.upper[j])
        lower[j], upper[j] = update_interval(window, box, total, factor)
    return Boxes(nominal, lower, upper)


def _bounds(plan: Plan, found: dict[str, list], ladder: float) -> Iterator[tuple[Interval | Factors, np.ndarray]]:
    """A tile's gradients by parameter: bounds ``(F, n)``, and which entry of the vector each row is."""
    for name, contributions in found.items():
        start, first = plan.offsets[name], contributions[0]
        if len(contributions) == 1 and isinstance(first, _Outer):
            target = first.target + start
            if first.positions == 1 and first.products == "natural":
                yield Factors(first.d, first.a, ladder), target
                continue
            bounds = outer_interval(first.d, first.a, first.positions, first.products, ladder)
        else:
            bounds = _total([c.dense(ladder) if isinstance(c, _Outer) else c for c in contributions], ladder)
            target = np.arange(start, start + bounds.lower.shape[0])
        yield Interval(*map(np.ascontiguousarray, bounds)), target


def _visit(
    plan: Plan, window: Window, slots: np.ndarray, boxes: list[Interval], ladders: list[float], grid: FixedPoint
) -> Iterator[tuple[int, slice, Interval | Factors, np.ndarray, np.ndarray]]:
    """Gradients of filled ``slots`` over several boxes; each tile of records is read once and serves all of them.

    Yields the number of the box, the tile, bounds of some parameters' gradients on the grid's scale, the records
    that were given up on (positions in the tile), and which entry of the vector each row is.
    """
    with np.errstate(all="ignore"):
        shared = [plan.shared_interval(*box, ladder) for box, ladder in zip(boxes, ladders, strict=True)]
        for start in range(0, len(slots), plan.tile):
            tile = slice(start, start + plan.tile)
            x, y = window.records.tile(slots[tile])
            for number, (values, ladder) in enumerate(zip(shared, ladders, strict=True)):
                found, bad = record_gradients(plan, window, x, y, values, ladder, grid.scale)
                for bounds, target in _bounds(plan, found, ladder):
                    yield number, tile, bounds, bad, target


def gradient_ends(
    window: Window, plan: Plan, one: Step, box: Interval, ladder: float, grid: FixedPoint
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of each slot's clipped gradient over a box, rounded to the grid: float64 ``(P, len(batch))`` each.

    In the order of the batch; an empty slot's gradient is zero.
    """
    lower, upper = np.zeros((plan.size, len(one.batch))), np.zeros((plan.size, len(one.batch)))
    columns = window.records.places(one.batch)
    for _, tile, bounds, bad, target in _visit(plan, window, one.batch[columns], [box], [ladder], grid):
        at = columns[tile]
        bounds = bounds.dense() if isinstance(bounds, Factors) else bounds
        for ends, bound, worst in ((lower, bounds.lower, -grid.unit), (upper, bounds.upper, grid.unit)):
            clipped = np.rint(np.clip(bound, -grid.limit, grid.limit))
            clipped[:, bad] = worst
            ends[np.ix_(target, at)] = clipped
    return lower, upper


def nominal_run(window: Window, plan: Plan, threads: int = 1) -> list[np.ndarray]:
    """Nominal parameters ``(P,)`` after each of the window's fresh steps."""
    last = window.known[-1].nominal
    point = replace(window, radii=(), known=(Boxes.point(last, 0),), steps=window.steps[window.fresh.start :])
    boxes, found = point.boxes, []
    with ThreadPoolExecutor(threads) as pool:
        for one in point.steps:
            boxes = step(point, plan, boxes, one, pool, threads)
            found.append(boxes.nominal)
    return found


def ibp(window: Window, threads: int = 1, plan: Plan | None = None) -> list[Boxes]:
    """Boxes after each of the window's fresh steps, for all its radii.

    All radii share one pass over the records of each step.  In a window of several steps (replace-one) the radius
    counts records of the window: the same ``k`` records differ in all its steps (`solvers.coupled`), which is tighter;
    zero-out windows are taken step by step.  ``plan``: how one record is bounded; default `Plan`.
    """
    plan = plan or Plan(window.graph)
    if len(window.steps) == 1 or window.adjacency != "replace-one" or max(window.radii, default=0) == 0:
        boxes, found = window.known[-1], []
        with ThreadPoolExecutor(threads) as pool:
            for t in window.fresh:
                boxes = step(window, plan, boxes, window.steps[t], pool, threads)
                found.append(boxes)
        return found

    nominal = nominal_run(window, plan, threads)
    trail = list(window.known)
    for start, known, stop in pieces(window):
        part = replace(window, steps=window.steps[start:stop], known=tuple(trail[start : known + 1]))
        points = nominal[known - window.fresh.start : stop - window.fresh.start]
        trail += coupled(part, plan.size, points, partial(_visit, plan), threads)
    return trail[len(window.known) :]


def public_reach(window: Window, steps: Sequence[Step]) -> Interval:
    """A public box holding the parameters of every run of this recipe on *any* data: clipping alone allows no more.

    Depends on the initial point (the window's nominal), the steps, the clip and the contraction only.
    """
    box = Interval(window.boxes.nominal.copy(), window.boxes.nominal.copy())
    for one in steps:
        size = len(one.batch)
        grid = FixedPoint.make(window.clip, max(size, 1))
        most = np.full(len(box.lower), float(size * grid.unit + size))
        factor = one.learning_rate / window.normaliser / grid.scale
        box = Interval(*update_interval(window, box, Interval(-most, most), factor))
    return box


def output_bounds(
    graph: Graph, lower: np.ndarray, upper: np.ndarray, features: np.ndarray, radii: Sequence[int]
) -> Interval:
    """Bounds of the model's output over each box: ``(K, M, O)`` float64 for ``features`` ``(M, *input_shape)``.

    Radius 0 is evaluated at its point.  Bounds that are not finite are returned as infinite.
    """
    plan = Plan(graph)
    x = graph.flatten(features)
    shape = (len(radii), x.shape[1], graph.outputs)
    low, high = np.empty(shape), np.empty(shape)
    for j, radius in enumerate(radii):
        with np.errstate(all="ignore"):
            if radius == 0:
                shared_point = plan.shared(lower[j])
            else:
                shared = plan.shared_interval(lower[j], upper[j], 2.0 * radius)
            for start in range(0, x.shape[1], plan.tile):
                tile = np.ascontiguousarray(x[:, start : start + plan.tile])
                stop = start + tile.shape[1]
                if radius == 0:
                    value = plan.forward(tile, shared_point)[graph.output]
                    bounds = Interval(value, value)
                else:
                    values = plan.forward_interval(tile, shared, 2.0 * radius)
                    bounds = values[graph.output]
                    flags = np.zeros(tile.shape[1], dtype=bool)
                    for i in plan.order:
                        if graph.per_record[i] and graph.nodes[i].op.can_overflow:
                            _health(values[i].lower, flags)
                            _health(values[i].upper, flags)
                    if flags.any():
                        bounds = Interval(
                            np.where(flags, -np.inf, bounds.lower), np.where(flags, np.inf, bounds.upper)
                        )
                low[j, start:stop], high[j, start:stop] = bounds.lower.T, bounds.upper.T
    return Interval(low, high)


def make_records(
    graph: Graph,
    loss: Loss,
    features: np.ndarray,
    targets: np.ndarray,
    slots: int | None = None,
    present: np.ndarray | None = None,
) -> Records:
    """Records from arrays ``(R, *input_shape)`` and ``(R, O)``; raises the loss's TargetError."""
    x = graph.flatten(features)
    y = np.ascontiguousarray(np.asarray(targets, dtype=np.float64).reshape(len(features), -1).T)
    return Records(x, np.ascontiguousarray(loss.prepare(y, graph.outputs)), slots or x.shape[1], present)
