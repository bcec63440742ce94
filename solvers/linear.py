"""Linear bounds of pre-activations behind ReLU layers, inside interval training: the backends `linear` and `crown`.

For a node ``y = V relu(z) + c`` with ``z = W g + b``, interval arithmetic forgets that all units ``z`` read the same
``g``.  Here, per output and record, every ``v relu(z_i)`` is replaced by a line in ``z_i`` that bounds it over the
box, and the sum of lines, an expression in ``W``, ``b`` and ``g``, is maximised *exactly* over their boxes.  The
result is intersected with the interval bound; everything else (backward pass, aggregation, windows) is that of `ibp`.
Behind the first hidden layer interval bounds are exact already (each unit has weights of its own and the record is
known), so the gain starts with the second hidden layer.

The lines, for the upper end (the lower end is minus the upper end of ``-V``), with ``v`` the upper end of the weight,
which is the worst one since ``relu >= 0``, and ``[l, u]`` the interval bounds of ``z_i`` given the box of ``g``:

* `linear`: ``v >= 0``: ``v`` times the chord of relu over ``[l, u]``; ``v < 0``: ``v z`` where ``l >= 0``, else 0;
* `crown`: the same, but ``v z`` for ``v < 0`` also where ``l < 0`` and ``u >= -l`` (adaptive lower slope), and lines
  are substituted layer by layer down to the record, the best bound on the way being kept ([Zhang et al. 2018]).

Property (M) of `linear`.  Let the boxes of ``D`` lie inside those of ``D'`` (primed).  On ``[l, u]``: the chord over
the larger interval is above that over the smaller, both are at least 0, and the lower line (``z`` or 0) over the
larger interval is below that over the smaller, and at least 0.  So if ``0 <= v <= v'``: ``v chord <= v' chord'``; if
``v < 0 <= v'``: ``v low <= 0 <= v' chord'``; if ``v <= v' < 0``: ``v low <= v low' <= v' low'``.  The sum of lines of
``D`` is thus at most that of ``D'`` wherever ``z`` can be for ``D``; there the maximum for ``D`` is taken, and ``z``
can be at all these places for ``D'``.  Both steps matter: the adaptive lower slope breaks the first (``v z`` with
``z < 0`` shrinks when ``v`` grows), and lines below lines break the second (they hold only where ``z`` can be).

Rounding.  The exact maximum is monotone; the computed one and the trainer's own value differ from it by less than
half of an error bound that grows with the boxes, and the result is widened by ``ladder = 2k`` times that bound.

Guarantees:
  * linear bounds contain every neighbouring run, and with natural products are never wider than interval bounds;
  * linear bounds nest: radius k on a data set lies inside radius k + 1 on each of its neighbours, as computed;
  * crown bounds contain every neighbouring run and do not nest: no private release may use them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from models.ir import Graph
from models.ops import Affine, Input, Interval, Relu
from models.ops.affine import affine_point
from models.ops.base import ABSOLUTE, UNIT_ROUNDOFF
from solvers.ibp import Plan, ibp
from solvers.window import Boxes, Window

#: Linear bounds are used where no intermediate result can pass this; a public rule that larger boxes break first.
_LARGEST = 2.0**900


def linear(window: Window, threads: int = 1) -> list[Boxes]:
    """Boxes after each of the window's fresh steps: `ibp` with linear bounds of the forward pass; (S) and (M)."""
    return ibp(window, threads, LinearPlan(window.graph))


def crown(window: Window, threads: int = 1) -> list[Boxes]:
    """Boxes after each of the window's fresh steps: `ibp` with adaptive CROWN in the forward pass; (S), not (M)."""
    return ibp(window, threads, LinearPlan(window.graph, adaptive=True))


@dataclass(frozen=True, eq=False)
class _Layer:
    """``z = weight g + bias`` before a ReLU: boxes of ``z`` ``(M, n)``, weight ``(M, K)``, bias ``(M,)``, ``g``."""

    z: Interval
    weight: Interval
    bias: Interval
    g: Interval


class LinearPlan(Plan):
    """A plan whose forward bounds are tightened; ``adaptive`` is CROWN, otherwise the monotone rule."""

    def __init__(self, graph: Graph, adaptive: bool = False):
        super().__init__(graph)
        self.adaptive = adaptive
        #: For every node that is tightened, the affine nodes it is expressed in, nearest first.
        self.chains = {i: chain for i in self.order if (chain := self._chain(i))}

    def _before(self, i: int) -> int | None:
        """The affine node under the ReLU that node ``i`` reads, if both are of that kind."""
        nodes = self.graph.nodes
        if not (isinstance(nodes[i].op, Affine) and nodes[i].op.positions == 1):
            return None
        relu = nodes[nodes[i].inputs[0]]
        if not isinstance(relu.op, Relu):
            return None
        z = relu.inputs[0]
        whole = isinstance(nodes[z].op, Affine) and nodes[z].op.positions == 1
        return z if whole and self.graph.per_record[z] else None

    def _chain(self, i: int) -> tuple[int, ...]:
        """Affine nodes under ``i``; empty where interval bounds are exact or the rule has nothing to say."""
        nodes, chain = self.graph.nodes, []
        while (z := self._before(i)) is not None and (self.adaptive or not chain):
            chain.append(z)
            i = z
        known = chain and isinstance(nodes[nodes[chain[0]].inputs[0]].op, Input)
        return () if known else tuple(chain)

    def _layer(self, z: int, values: dict[int, Interval], ladder: float) -> _Layer:
        """Boxes around node ``z``.

        The monotone rule needs bounds of ``z`` that contain everything the box of ``g`` allows: interval bounds.
        """
        node = self.graph.nodes[z]
        args = [values[j] for j in node.inputs]
        retake = z in self.chains and not self.adaptive
        bounds = node.op.forward_interval(args, ladder) if retake else values[z]
        return _Layer(bounds, *node.op.boxes(args), args[0])

    def tighten(self, i: int, natural: Interval, values: dict[int, Interval], ladder: float) -> Interval:
        if i not in self.chains:
            return natural
        op = self.graph.nodes[i].op
        weight, bias = op.boxes([values[j] for j in self.graph.nodes[i].inputs])
        layers = [self._layer(z, values, ladder) for z in self.chains[i]]
        error, usable = _error(weight, bias, layers)
        lower, upper = np.empty_like(natural.lower), np.empty_like(natural.upper)
        for m in range(op.rows):
            lower[m] = -_upper(-weight.lower[m], -bias.lower[m], layers, self.adaptive)
            upper[m] = _upper(weight.upper[m], bias.upper[m], layers, self.adaptive)
        return Interval(
            np.where(usable, np.maximum(natural.lower, lower - ladder * error), natural.lower),
            np.where(usable, np.minimum(natural.upper, upper + ladder * error), natural.upper),
        )


def _error(weight: Interval, bias: Interval, layers: list[_Layer]) -> tuple[np.ndarray, np.ndarray]:
    """Bound ``(M, n)`` of all rounding errors, twice over, and where nothing can overflow; both grow with the boxes.

    Every term of the lines, and of the trainer's sums, is at most a product of magnitudes; an operation errs by half
    an ulp of it, or by ``ABSOLUTE`` times what the result is still multiplied with.
    """
    factor, size = weight.magnitude, np.repeat(bias.magnitude[:, None], layers[0].z.lower.shape[1], axis=1)
    scale = 1.0 + max(_largest(factor), _largest(size))
    operations = 0
    for layer in layers:
        w, b, g = layer.weight.magnitude, layer.bias.magnitude, layer.g.magnitude
        z = np.maximum(affine_point(w, b, g, 1), layer.z.magnitude)
        size += affine_point(factor, np.zeros(len(factor)), z, 1)
        factor = affine_point(factor, np.zeros(len(factor)), w, 1)
        scale = scale * (1.0 + max(_largest(w), _largest(b))) * (1.0 + np.maximum(z.max(axis=0), g.max(axis=0)))
        operations += 8 * (w.shape[0] + w.shape[1] + 16)
    error = operations * UNIT_ROUNDOFF * size + operations**2 * ABSOLUTE * scale
    return error, (size <= _LARGEST) & (scale <= _LARGEST)


def _largest(values: np.ndarray) -> float:
    return float(values.max(initial=0.0))


def _upper(weight: np.ndarray, bias: float, layers: list[_Layer], adaptive: bool) -> np.ndarray:
    """Upper bound ``(n,)`` of ``weight . relu(z) + bias`` over the boxes of the layers, the least on the way down."""
    n = layers[0].z.lower.shape[1]
    total, best = np.full(n, bias), np.full(n, np.inf)
    weight = np.repeat(weight[:, None], n, axis=1)
    for layer in layers:
        slope = _lines(weight, *layer.z, adaptive, total)
        high, low = _substitute(slope, *layer.weight, *layer.bias, total)
        best = np.minimum(best, total + _greatest(high, low, *layer.g))
        weight = high  # the next layer is relu(...) >= 0, so the upper coefficient is the worst
    return best


@njit(nogil=True, cache=True)
def _lines(weight, zl, zu, adaptive, total):
    """Slopes of lines above ``weight relu(z)`` on ``[zl, zu]``, all ``(M, n)``; their constants go to ``total``."""
    slope = np.empty_like(weight)
    for m in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            w, l, u = weight[m, i], zl[m, i], zu[m, i]
            if u <= 0.0:
                slope[m, i] = 0.0
            elif l >= 0.0 or (adaptive and w < 0.0 and u >= -l):
                slope[m, i] = w
            elif w < 0.0:
                slope[m, i] = 0.0
            else:
                slope[m, i] = w * (u / (u - l))
                total[i] -= slope[m, i] * l
    return slope


@njit(nogil=True, cache=True)
def _substitute(slope, wl, wu, bl, bu, total):
    """Greatest and least coefficients ``(K, n)`` of ``g`` in ``sum_m slope_m (W g + b)_m``; the bias to ``total``."""
    rows, cols = wl.shape
    n = slope.shape[1]
    high, low = np.zeros((cols, n)), np.zeros((cols, n))
    for m in range(rows):
        s = slope[m]
        for i in range(n):
            total[i] += max(s[i] * bl[m], s[i] * bu[m])
        for k in range(cols):
            a, b = wl[m, k], wu[m, k]
            h, o = high[k], low[k]
            for i in range(n):
                p, q = s[i] * a, s[i] * b
                h[i] += p if p > q else q
                o[i] += q if p > q else p
    return high, low


@njit(nogil=True, cache=True)
def _greatest(high, low, gl, gu):
    """Greatest ``sum_k c_k g_k`` with ``c`` in ``[low, high]``, ``g`` in its box: convex in ``g_k``, so at an end."""
    cols, n = high.shape
    found = np.zeros(n)
    for k in range(cols):
        for i in range(n):
            a, b = gl[k, i], gu[k, i]
            p = (high[k, i] if a >= 0.0 else low[k, i]) * a
            q = (high[k, i] if b >= 0.0 else low[k, i]) * b
            found[i] += p if p > q else q
    return found
