"""Partition sums of several replicas of a participation chain: integer Rényi moments, and draws from the tilted law.

Mathematics and proofs: docs/bandmf_tilt.md; compiled loops: `tilt_kernels`.
"""

from __future__ import annotations

import itertools
import math
import pickle
from functools import lru_cache

import numpy as np

from certify.errors import PrivacyError
from privacy.bandmf import tilt_kernels as kernels
from privacy.bandmf.tilt_chain import Chain

ROUND = 2.0**-53


class Replicas:
    """The joint states of `order` replicas of a chain, what one step does to them, and their partition sums.

    `log_moment`: ln Z with a relative error of Z of at most `rounding`. With a `dtype` the sums of all steps
    are kept and `draw` works: the density of its law is Q L^order / Z within a factor exp(`slack`), beside a
    total variation of at most `variation`. Without, a ring of `separation + 1` rows is used.

    Errors: PrivacyError when Z is beyond the largest float.
    """

    def __init__(self, chain: Chain, order: int, dtype: type | None = None):
        self.chain, self.order = chain, order
        stride, separation, steps = chain.per_user, chain.separation, chain.steps
        alphabet = (separation - 1) * stride + 1
        choose = np.array([[math.comb(t + r - 1, r) if r else 0 for t in range(alphabet)] for r in range(order)])
        actions = _actions(order, stride)
        self._multiplicity = actions @ np.arange(1, stride + 1)
        self._allowed = np.searchsorted(actions.sum(axis=1), np.arange(order + 1), side="right")
        self._states = kernels.list_states(alphabet, order - 1, states(chain, order))
        self._available = (self._states == 0).sum(axis=1) + 1
        self._following, self._waiting = kernels.list_successors(
            self._states, self._available, actions, actions.sum(axis=1), separation, choose
        )
        with np.errstate(over="ignore"):
            self._coupling = np.exp(_coupling(chain, alphabet))
        self._chance = _chances(chain, actions)
        self._starts = kernels.list_starts(
            chain.start, order, stride, choose, 1 if chain.start[0] == 1.0 else math.comb(separation + order - 1, order)
        )
        self._table = np.ones((separation + 1 if dtype is None else steps + separation, len(self._states)), dtype)
        kernels.backward(self._table, steps, *self._tables)
        number, when, probability = self._starts
        self._start_mass = np.cumsum(probability * self._table[when % len(self._table), number])
        self.log_moment = float(np.log(self._start_mass[-1]))
        if not math.isfinite(self.log_moment):
            raise PrivacyError(f"order: found {order}, whose moment is beyond the largest number; lower it")

    def __reduce__(self):
        """Pickled as what it is made from: the sums take less time to compute than to send."""
        return _rebuild, (pickle.dumps((self.chain, self.order, self._table.dtype)),)

    @property
    def _tables(self) -> tuple:
        return (
            self._states,
            self._available,
            self._following,
            self._waiting,
            self._coupling,
            self._chance,
            self._multiplicity,
            self._allowed,
        )

    @property
    def rounding(self) -> float:
        """Relative error of exp(log_moment) with sums in float64."""
        chain, order, k = self.chain, self.order, self.chain.per_user
        per_step = 2 * len(self._multiplicity) + 4 * order * k + 16
        exponents = order * (order - 1) * k**2 * chain.participations * float(chain.half_norms.max())
        relative = chain.steps * per_step + (chain.columns.shape[1] + 8) * exponents + len(self._start_mass)
        return 1.01 * ROUND * (relative + 8 * abs(self.log_moment))

    @property
    def slack(self) -> float:
        stored = 1.01 * self.chain.steps * 2.0**-24 if self._table.dtype == np.float32 else 0.0
        return self.rounding + stored

    @property
    def variation(self) -> float:
        return 2.0 * ROUND * (16 * self.chain.steps + len(self._start_mass))

    def draw(self, samples: int, generator: np.random.Generator) -> np.ndarray:
        """Spikes of the sum of all replicas: rows sample, step, multiplicity, int32 `(3, spikes)`, by sample."""
        at = np.searchsorted(self._start_mass, generator.random(samples) * self._start_mass[-1], side="right")
        at = np.minimum(at, len(self._start_mass) - 1)
        number, when, _ = self._starts
        spikes = kernels.draw(self._table, self.chain.steps, number[at], when[at], *self._tables, generator)
        return spikes[:, np.argsort(spikes[0], kind="stable")]


@lru_cache(maxsize=1)
def _rebuild(made_from: bytes) -> Replicas:
    return Replicas(*pickle.loads(made_from))


def states(chain: Chain, order: int) -> int:
    """Number of stored joint states of `order` replicas."""
    return math.comb((chain.separation - 1) * chain.per_user + order - 1, order - 1)


def _actions(order: int, per_user: int) -> np.ndarray:
    """How many replicas take part with multiplicity 1, ..., per_user: all cases, sorted by their number."""
    cases = [c for c in itertools.product(range(order + 1), repeat=per_user) if sum(c) <= order]
    return np.array(sorted(cases, key=sum), dtype=np.int64)


def _chances(chain: Chain, actions: np.ndarray) -> np.ndarray:
    """`chance` of `tilt_kernels.backward`, float64 `(steps, order + 1, actions)`."""
    order, multiplicities = int(actions.sum(axis=1).max()), np.arange(1, chain.per_user + 1)
    pairs = ((actions @ multiplicities) ** 2 - actions @ multiplicities**2) // 2
    base = np.zeros((order + 1, len(actions)))
    for r, a in itertools.product(range(order + 1), range(len(actions))):
        left = r - int(actions[a].sum())
        if left >= 0:
            ways = math.factorial(r) // math.prod(map(math.factorial, [left, *actions[a].tolist()]))
            base[r, a] = ways * chain.law[0] ** left * math.prod(chain.law[1:] ** actions[a])
    with np.errstate(over="ignore", invalid="ignore"):
        grown = base * np.exp(pairs * chain.inner[:, :1])[:, None, :]
    return np.where(base > 0.0, grown, 0.0)


def _coupling(chain: Chain, alphabet: int) -> np.ndarray:
    """Exponent by which a participation at step i meets a barred replica of each type, `(steps, alphabet)`."""
    found = np.zeros((chain.steps, alphabet))
    for d in range(1, min(chain.columns.shape[1], chain.separation)):
        for m in range(1, chain.per_user + 1):
            found[:, (chain.separation - d - 1) * chain.per_user + m] = m * chain.inner[:, d]
    return found


def largest_term(order: int, log_moment: float, epsilon: float) -> float:
    """The Rényi bound of delta: `Z e^(-(k-1) epsilon) (k-1)^(k-1) / k^k`, rounded up."""
    shape = (order - 1) * math.log(order - 1) - order * math.log(order) if order > 1 else 0.0
    exponent = log_moment - (order - 1) * epsilon + shape
    return math.exp(min(exponent + 1e-13 * (8.0 + abs(log_moment) + order * abs(epsilon)), 700.0))
