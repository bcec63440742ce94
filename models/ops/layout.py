"""Moving and adding up features: Gather (reshape, transpose, slice, broadcast, padding), Concat, SegmentSum."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from models.ops.base import UNIT_ROUNDOFF, Interval, Op, laddered


def _sum_rows(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``out[f] = sum_j values[index[f, j]]`` in the order of ``j``; ``-1`` contributes nothing."""
    padded = np.concatenate([values, np.zeros((1, values.shape[1]))])
    total = padded[index[:, 0]]
    for j in range(1, index.shape[1]):
        total = total + padded[index[:, j]]
    return total


def _sum_rows_interval(values: Interval, index: np.ndarray, ladder: float) -> Interval:
    lower, upper = _sum_rows(values.lower, index), _sum_rows(values.upper, index)
    terms = index.shape[1]
    if terms == 1 or ladder == 0.0:
        return Interval(lower, upper)
    error = (terms + 1) * UNIT_ROUNDOFF * _sum_rows(values.magnitude, index)
    return laddered(lower, upper, error, ladder)


def _transposed(index: np.ndarray, size: int) -> np.ndarray:
    """For every source feature the outputs that read it, padded with -1; shape ``(size, longest)``."""
    sources = index.ravel()
    targets = np.repeat(np.arange(index.shape[0]), index.shape[1])
    keep = sources >= 0
    sources, targets = sources[keep], targets[keep]
    order = np.argsort(sources, kind="stable")
    sources, targets = sources[order], targets[order]
    counts = np.bincount(sources, minlength=size)
    table = np.full((size, max(1, int(counts.max(initial=0)))), -1, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    table[sources, np.arange(len(sources)) - starts[sources]] = targets
    return table


@dataclass(frozen=True, eq=False)
class Gather(Op):
    """``out[f] = in[index[f]]``; an index of ``-1`` gives zero (padding).

    ``index`` has shape ``(F_out,)``, dtype int64; ``size`` is the number of input features.
    """

    index: np.ndarray
    size: int
    _back: np.ndarray = field(init=False, repr=False)

    def __post_init__(self):
        index = np.ascontiguousarray(self.index, dtype=np.int64)
        if index.ndim != 1 or index.size == 0 or index.min() < -1 or index.max() >= self.size:
            raise ValueError(f"gather index does not fit {self.size} features")
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "_back", _transposed(index[:, None], self.size))

    @property
    def is_permutation(self) -> bool:
        """Every input feature is read exactly once."""
        return self.index.size == self.size and bool((np.sort(self.index) == np.arange(self.size)).all())

    def features(self, inputs):
        if list(inputs) != [self.size]:
            raise ValueError(f"gather over {self.size} features got {inputs}")
        return len(self.index)

    def forward(self, args):
        return _sum_rows(args[0], self.index[:, None])

    def forward_interval(self, args, ladder):
        return Interval(self.forward([args[0].lower]), self.forward([args[0].upper]))

    def backward(self, adjoint, args, out, needed):
        return (_sum_rows(adjoint, self._back),)

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return (_sum_rows_interval(adjoint, self._back, ladder),)


@dataclass(frozen=True, eq=False)
class SegmentSum(Op):
    """``out[f] = sum_j in[index[f, j]]`` in the order of ``j`` (``-1`` is skipped): sums, means and average pools.

    ``index`` has shape ``(F_out, J)``, dtype int64; ``size`` is the number of input features.
    """

    can_overflow = True
    index: np.ndarray
    size: int
    _back: np.ndarray = field(init=False, repr=False)

    def __post_init__(self):
        index = np.ascontiguousarray(self.index, dtype=np.int64)
        if index.ndim != 2 or index.size == 0 or index.min() < -1 or index.max() >= self.size:
            raise ValueError(f"sum index does not fit {self.size} features")
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "_back", _transposed(index, self.size))

    def features(self, inputs):
        if list(inputs) != [self.size]:
            raise ValueError(f"sum over {self.size} features got {inputs}")
        return len(self.index)

    def forward(self, args):
        return _sum_rows(args[0], self.index)

    def forward_interval(self, args, ladder):
        return _sum_rows_interval(args[0], self.index, ladder)

    def backward(self, adjoint, args, out, needed):
        return (_sum_rows(adjoint, self._back),)

    def backward_interval(self, adjoint, args, out, needed, ladder):
        return (_sum_rows_interval(adjoint, self._back, ladder),)


@dataclass(frozen=True)
class Concat(Op):
    """Stacks the flattened features of its inputs in order; ``sizes`` are their numbers of features."""

    sizes: tuple[int, ...]

    def features(self, inputs):
        if tuple(inputs) != self.sizes:
            raise ValueError(f"concat of {self.sizes} features got {inputs}")
        return sum(self.sizes)

    def forward(self, args):
        records = max(a.shape[1] for a in args)
        return np.concatenate([np.broadcast_to(a, (a.shape[0], records)) for a in args])

    def forward_interval(self, args, ladder):
        return Interval(self.forward([a.lower for a in args]), self.forward([a.upper for a in args]))

    def backward(self, adjoint, args, out, needed):
        ends = np.cumsum(self.sizes)
        return tuple(adjoint[end - size : end] for end, size in zip(ends, self.sizes, strict=True))

    def backward_interval(self, adjoint, args, out, needed, ladder):
        lower = self.backward(adjoint.lower, args, out, needed)
        upper = self.backward(adjoint.upper, args, out, needed)
        return tuple(Interval(lo, up) for lo, up in zip(lower, upper, strict=True))
