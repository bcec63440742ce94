"""Relational certificates: bounds of the difference of two neighbouring runs, and boxes made of chains of them.

Let two neighbouring data sets both lie within radius ``k`` of the data and differ in slot ``i``.  Their runs stay
inside the boxes ``T`` of radius ``k``, and the difference ``d`` of their parameters obeys

    d' = (contraction I - (rate / normaliser) J) d + e,    |e| <= 2 clip rate / normaliser if slot i is in the batch,

with ``J`` the Jacobian over ``T`` of the records that both have: all slots but ``i``, of which ``k - 1`` at most differ
from the data.  So ``|d'|`` is at most ``M |d| + |e|``, at most ``sum_s |Phi_s| |e_s|`` with interval matrix products
``Phi_s`` of the steps after ``s`` (which keep the signs that absolute values lose), and at most the width of ``T'``.

**Lengths.**  Elementwise bounds lose that a step of a convex loss pulls together in the Euclidean norm.  For heads the
length of ``d`` is followed too (`solvers.expansion`), over the points of the boxes that are near the nominal ones.

**The radius counts records of the data set.**  While batches are disjoint, the ``k - 1`` records that differ from the
data in both runs are divided over the steps: bounds are kept for every number of them that has been spent so far.

**Chained boxes.**  From the data to any data set at distance ``k`` there is a path of ``k`` neighbours, whose ``j``-th
edge lies within radius ``j``.  So its parameters are within ``D_1 + ... + D_k`` of the nominal ones, ``D_j`` the bound
above at radius ``j``.  The boxes feed the Jacobians of the next step.

Guarantees (proofs: docs/relational.md):
  * the bound of radius k holds for every two neighbouring data sets within radius k;
  * bounds are monotone: that of radius k on a data set is at most that of radius k + 1 on each neighbour, as computed;
  * the chained boxes have the properties of `solvers.ibp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from models.ir import Graph
from models.ops import Interval
from models.ops.affine import affine_interval
from models.ops.base import RELATIVE
from solvers.expansion import Expansion, Growth
from solvers.hidden import Hidden, jacobians, output_slopes
from solvers.ibp import Plan
from solvers.jacobian import Curvature, Head, source_features, structure, trains_last_layer_only, untrained
from solvers.meanvalue import curvatures_of, intersection, tightened, workers
from solvers.window import Boxes, Window

#: Slots of more classes than this are taken as one class, which occurs in every step.
MOST_CLASSES = 256
#: Multiplications per step and radius that the products of matrices may take; older steps are then forgotten.
_MOST_PRODUCTS = 1 << 23
#: Multiplications per step and radius up to which records that differ are divided over the steps.
_MOST_SHARES = 1 << 27


def relational(window: Window, threads: int = 1) -> list[Boxes]:
    """Boxes with their certificates (`Boxes.difference`) after each of the window's fresh steps.

    Raises UnsupportedWindowError where `solvers.hidden.jacobians` does.
    """
    head = jacobians(window)
    relation = Relation.after_known(window, head, threads)

    def chained(t: int, before: Boxes, after: Boxes, curvatures: list) -> Boxes:
        relation.step(t, before, curvatures)
        return relation.within(intersection(after, relation.chain(after)))

    return tightened(window, head, threads, chained)


def certified(window: Window, found: Sequence[Boxes], threads: int = 1) -> list[Boxes]:
    """The boxes of any sound and monotone backend after the window's fresh steps, with certificates."""
    head = jacobians(window)
    relation, before, result = Relation.after_known(window, head, threads), window.known[-1], []
    with workers(threads) as pool:
        for t, after in zip(window.fresh, found, strict=True):
            relation.step(t, before, curvatures_of(window, head, window.steps[t], before, pool))
            before = relation.within(after)
            result.append(before)
    return result


class Relation:
    """Differences of neighbouring runs through a window, step by step; private.

    ``bounds`` ``(K, C, P)``: ``[j, c]`` for slots of class ``c`` at ``radii[j]``, zero at radius 0; ``lengths``
    ``(K, C)``: of the difference's Euclidean length.  Slots of a class occur in the same steps: of the run where the
    window states `Window.classes`, else of the window alone, and then what it hands on is the largest over its classes.
    """

    def __init__(self, window: Window, head: Head | Hidden):
        self.window, self.head = window, head
        self._expansion = Expansion.make(window, head) if isinstance(head, Head) else None
        self._inside = _occurrences(window)
        shape = (len(window.radii), self._inside.shape[1], head.plan.size)
        self.bounds, self.lengths = np.full(shape, np.inf), np.full(shape[:2], np.inf)
        # By row: interval products of the steps after each source, side by side, and the sources (C, P).
        self._products: list[Interval] = [Interval(np.eye(0), np.eye(0))] * len(window.radii)
        self._sources: list[list[np.ndarray]] = [[] for _ in window.radii]
        # By row: bounds (S, C, P) and lengths (S, C) where so many differing records have been met since the batches
        # are disjoint.
        self._met: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(window.radii)
        self._anew = _starts_of_disjoint_batches(window)
        self.within(window.boxes)
        for j in range(len(window.radii)):
            self._restart(j)

    @classmethod
    def after_known(cls, window: Window, head: Head | Hidden, threads: int) -> Relation:
        """Before the window's first fresh step."""
        relation = cls(window, head)
        with workers(threads) as pool:
            for t, (before, after) in enumerate(zip(window.known, window.known[1:], strict=False)):
                relation.step(t, before, curvatures_of(window, head, window.steps[t], before, pool))
                relation.within(after)
        return relation

    def step(self, t: int, boxes: Boxes, curvatures: Sequence[Curvature | None]) -> None:
        """Through step ``t`` from ``boxes``; ``curvatures`` as of `tightened`."""
        near = chained(self.window.radii, self.lengths.max(axis=1))
        for j, (radius, found) in enumerate(zip(self.window.radii, curvatures, strict=True)):
            if radius == 0:
                continue
            if found is None:
                self.bounds[j], self.lengths[j], self._met[j] = np.inf, np.inf, None
                continue
            box = Interval(boxes.lower[j], boxes.upper[j])
            growth = None
            if self._expansion is not None:
                one = self.window.steps[t]
                growth = self._expansion.growth(self.window, one, box, boxes.nominal, float(near[j]), radius)
            self._row(t, j, box, found, growth)

    def within(self, boxes: Boxes) -> Boxes:
        """``boxes`` after the latest step with the bounds as their certificate, none larger than the boxes are wide."""
        wide = boxes.upper - boxes.lower
        np.minimum(self.bounds, (wide + RELATIVE * wide)[:, None], out=self.bounds)
        for kept, known in ((self.bounds, boxes.difference), (self.lengths, boxes.length)):
            if known is not None:
                np.fmin(kept, known, out=kept)  # NaN: that step had no certificate
        for j, radius in enumerate(self.window.radii):
            self.lengths[j] = np.minimum(self.lengths[j], _length(self.bounds[j], radius))
        bounds, lengths = self.bounds, self.lengths
        if self.window.classes is None:
            bounds, lengths = bounds.max(axis=1, keepdims=True), lengths.max(axis=1, keepdims=True)
        return replace(boxes, difference=bounds.copy(), length=lengths.copy())

    def chain(self, boxes: Boxes) -> Boxes:
        """The chained boxes around the nominal parameters."""
        reach = chained(self.window.radii, self.bounds.max(axis=1))
        return replace(boxes, lower=boxes.nominal - reach, upper=boxes.nominal + reach)

    def _restart(self, j: int) -> None:
        """Forget where a row's difference came from: the bound is its only source."""
        identity = np.eye(self.head.plan.size)
        self._products[j], self._sources[j] = Interval(identity, identity), [self.bounds[j].copy()]

    def _row(self, t: int, j: int, box: Interval, found: Curvature, growth: Growth | None) -> None:
        window, radius, one = self.window, self.window.radii[j], self.window.steps[t]
        size = self.head.plan.size
        if not np.isfinite(self._products[j].magnitude).all() or len(self._sources[j]) * size**3 > _MOST_PRODUCTS:
            self._restart(j)
        contributions = 2.0 if window.adjacency == "replace-one" else 1.0
        most = one.learning_rate / window.normaliser * contributions * window.clip * (1.0 + 8.0 * RELATIVE)
        source = most * self._inside[t][:, None] + 2.0 * self.head.rounding(window, one, box)

        matrix = found.transition(window, one, radius - 1, left_out=1)
        zero = Interval(np.zeros(size), np.zeros(size))
        products = affine_interval(matrix, zero, self._products[j], 1, "natural", 2.0 * radius)
        self._products[j] = Interval(*(np.hstack([end, np.eye(size)]) for end in products))
        self._sources[j].append(source)
        sources = np.concatenate(self._sources[j], axis=1)
        through = sources @ self._products[j].magnitude.T
        through = through * (1.0 + 4.0 * radius * (sources.shape[1] + size + 8) * RELATIVE)

        bounds, lengths = self._spread(t, j, found, growth, source)
        bounds[-1] = np.fmin(bounds[-1], through)
        self._met[j], self.bounds[j], self.lengths[j] = (bounds, lengths), bounds[-1], lengths[-1]

    def _spread(
        self, t: int, j: int, found: Curvature, growth: Growth | None, source: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bounds and lengths after a step, by how many differing records have been met."""
        window, radius, one = self.window, self.window.radii[j], self.window.steps[t]
        (classes, size), inside = self.bounds[j].shape, self._inside[t]
        divided = not self._anew.all() and classes * size**2 * radius**2 <= _MOST_SHARES
        counts = range(radius) if divided else (radius - 1,)
        bounds, lengths = self.bounds[j][None], self.lengths[j][None]
        if self._anew[t] or self._met[j] is None:
            bounds, lengths = (np.repeat(kept, len(counts), axis=0) for kept in (bounds, lengths))
        else:
            bounds, lengths = np.minimum(self._met[j][0], bounds), np.minimum(self._met[j][1], lengths)
        slack = 1.0 + 4.0 * radius * (size + 8) * RELATIVE
        after = np.zeros_like(bounds), np.zeros_like(lengths)
        for i, count in enumerate(counts):
            kept = slice(0, len(counts) - i)
            apart = np.empty_like(bounds[kept])
            for left_out in np.unique(inside):
                matrix = found.transition(window, one, count, int(left_out)).magnitude
                with np.errstate(invalid="ignore"):  # infinite bounds
                    apart[:, inside == left_out] = bounds[kept][:, inside == left_out] @ matrix.T
            apart = np.nan_to_num(apart + source, nan=np.inf, posinf=np.inf) * slack
            far = _length(apart, radius)
            if growth is not None:
                far = np.minimum(far, (lengths[kept] * growth.factor(count) + _length(source, radius)) * slack)
            np.maximum(after[0][i:], np.minimum(apart, far[..., None]), out=after[0][i:])
            np.maximum(after[1][i:], far, out=after[1][i:])
        return after


def chained(radii: Sequence[int], edges: np.ndarray) -> np.ndarray:
    """Bounds of the distance to the data's own parameters from ``edges`` ``(K, ...)``, those of the distance of
    neighbours: sums over radii 1, 2, ... as far as there is no gap, infinite from there on."""
    found, total, wanted = np.full_like(edges, np.inf), np.zeros_like(edges[0]) if len(edges) else 0.0, 1
    for j, radius in enumerate(radii):
        if radius == 0:
            found[j] = 0.0
        elif radius == wanted:
            total = total + edges[j]
            found[j], wanted = total * (1.0 + 2.0 * (radius + 1) ** 2 * RELATIVE), wanted + 1
    return found


def _length(vectors: np.ndarray, radius: int) -> np.ndarray:
    """Euclidean lengths of ``(..., P)``, outward by a rung for every radius."""
    return np.sqrt((vectors * vectors).sum(axis=-1)) * (1.0 + 2.0 * (radius + 1) * (vectors.shape[-1] + 8) * RELATIVE)


def _starts_of_disjoint_batches(window: Window) -> np.ndarray:
    """Bool ``(steps,)``: where a batch has a slot of one of the batches since the last such step."""
    found, met = np.ones(len(window.steps), bool), np.zeros(window.records.slots, bool)
    for t, one in enumerate(window.steps):
        found[t] = t == 0 or met[one.batch].any()
        if found[t]:
            met[:] = False
        met[one.batch] = True
    return found


def _occurrences(window: Window) -> np.ndarray:
    """Which classes of slots ``(C,)`` occur in which steps: bool ``(steps, C)``."""
    classes = window.classes
    if classes is None:
        classes = schedule_classes((one.batch for one in window.steps), window.records.slots)
        if classes.max(initial=0) >= MOST_CLASSES:
            classes = np.zeros_like(classes)
    inside = np.zeros((len(window.steps), classes.max(initial=0) + 1), bool)
    for row, one in zip(inside, window.steps, strict=True):
        row[classes[one.batch]] = True
    return inside


def schedule_classes(batches: Iterable[np.ndarray], slots: int) -> np.ndarray:
    """int64 ``(slots,)``: equal for slots that are in the same batches; public."""
    found = np.zeros(slots, np.int64)
    for batch in batches:
        inside = np.zeros(slots, np.int64)
        inside[batch] = 1
        found = np.unique(2 * found + inside, return_inverse=True)[1]
    return found


def output_differences(
    graph: Graph, lower: np.ndarray, upper: np.ndarray, difference: np.ndarray, features: np.ndarray, radii
) -> np.ndarray:
    """How far the outputs of neighbours' models are apart, from a certificate; float64 ``(K, C, M, O)``.

    ``lower``, ``upper`` ``(K, P)``: boxes of ``radii``; ``difference`` ``(K, C, P)``; ``features`` ``(M,
    *input_shape)``.  As computed by `Graph.evaluate`, and monotone like the certificate.  Raises
    UnsupportedWindowError for a model without interval Jacobians.
    """
    plan = Plan(graph)
    x = graph.flatten(features)
    slopes = _head_slopes if trains_last_layer_only(plan) else _hidden_slopes
    found = np.zeros((len(radii), difference.shape[1], x.shape[1], graph.outputs))
    for j, radius in enumerate(radii):
        if radius == 0:
            continue
        weight, rounding = slopes(plan, Interval(lower[j], upper[j]), x, radius)
        with np.errstate(invalid="ignore"):
            apart = difference[j] @ weight.reshape(plan.size, -1)
        apart = np.nan_to_num(apart.reshape(-1, *weight.shape[1:]), nan=np.inf, posinf=np.inf)
        found[j] = apart * (1.0 + 4.0 * radius * (plan.size + 5) * RELATIVE) + radius * rounding
    return found


def _head_slopes(plan: Plan, box: Interval, x: np.ndarray, radius: int) -> tuple[np.ndarray, np.ndarray]:
    """Largest derivatives ``(P, M, O)`` of the outputs over a box, and the rounding ``(M, O)`` of their differences."""
    source, blocks = structure(plan)
    terms = source_features(plan, source, x)
    fixed, size = untrained(plan, np.abs(terms)), box.magnitude
    weight = np.zeros((plan.size, terms.shape[1], len(blocks)))
    rounding = np.zeros((terms.shape[1], len(blocks)))
    for o, block in enumerate(blocks):
        weight[block.parameters, :, o] = np.abs(terms[block.features])
        rounding[:, o] = 2.0 * (len(terms) + 4) * RELATIVE * (size @ weight[:, :, o] + fixed[o])
    return weight, rounding


def _hidden_slopes(plan: Plan, box: Interval, x: np.ndarray, radius: int) -> tuple[np.ndarray, np.ndarray]:
    weight, rounding = output_slopes(plan, box, x, radius)
    return weight[:, :, None], rounding[:, None]
