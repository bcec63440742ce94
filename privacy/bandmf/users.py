"""Who owns which example, for multi-attribution b-min-sep [BMS, Alg. 3].  The graph is public: so is all of this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from certify.errors import PrivacyError


@dataclass(frozen=True, eq=False)
class UserGraph:
    """``owners[starts[e] : starts[e + 1]]`` are the users who own example ``e``, each once.

    ``starts`` int64 ``(examples + 1,)``, ``owners`` int64, numbered from 0.  Every example has an owner: one without
    would never be barred.
    """

    starts: np.ndarray
    owners: np.ndarray

    def __post_init__(self):
        if len(self.starts) < 2 or self.starts[0] != 0 or self.starts[-1] != len(self.owners):
            raise PrivacyError("owners: found no example, or starts that do not span the owners; give both from 0")
        empty = np.flatnonzero(np.diff(self.starts) < 1)
        if empty.size:
            raise PrivacyError(f"owners: example {empty[0]} has none; give it one, if need be a user of its own")
        if self.owners.min() < 0:
            raise PrivacyError(f"owners: found user {self.owners.min()}; users are numbered from 0")

    @classmethod
    def from_owners(cls, owners: Iterable[Iterable]) -> UserGraph:
        """From the owners of every example, in order; users may be any sortable values, repeats count once."""
        each = [list(dict.fromkeys(one)) for one in owners]
        names = np.unique([name for one in each for name in one], return_inverse=True)[1].astype(np.int64)
        return cls(np.concatenate(([0], np.cumsum([len(one) for one in each], dtype=np.int64))), names.reshape(-1))

    @property
    def examples(self) -> int:
        return len(self.starts) - 1

    @property
    def users(self) -> int:
        return int(self.owners.max()) + 1

    @property
    def per_user(self) -> int:
        """The most examples that one user owns."""
        return int(np.bincount(self.owners).max())

    @cached_property
    def neighbours(self) -> np.ndarray:
        """How many examples, itself included, share an owner with each example, int64 ``(examples,)``."""
        from scipy.sparse import csr_array

        owned = csr_array((np.ones(len(self.owners), np.int64), self.owners, self.starts), (self.examples, self.users))
        return np.diff((owned @ owned.T).indptr).astype(np.int64)

    def incident(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All pairs of one of these examples and an owner: ``(place in examples, owner)``, int64."""
        counts = self.starts[examples + 1] - self.starts[examples]
        place = np.repeat(np.arange(len(examples)), counts)
        offset = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        return place, self.owners[self.starts[examples][place] + offset]

    def take(self, examples: np.ndarray) -> UserGraph:
        """The graph of these examples, renumbered in the given order."""
        place, owners = self.incident(examples)
        return UserGraph(np.searchsorted(place, np.arange(len(examples) + 1)), owners)


def bound_contributions(graph: UserGraph, per_user: int) -> np.ndarray:
    """Ascending int64 indices of the examples to keep, so that no user owns more than ``per_user`` of them.

    The rule: in the order of the examples, one is kept if each of its owners has fewer than ``per_user`` so far.  It
    reads the public graph only.  Use ``graph.take(kept)`` and the data set restricted to ``kept``.
    """
    if per_user < 1:
        raise PrivacyError(f"per_user: found {per_user}; a whole number of at least 1 is required")
    owned, kept = [0] * graph.users, []
    starts, owners = graph.starts.tolist(), graph.owners.tolist()
    for example in range(graph.examples):
        mine = owners[starts[example] : starts[example + 1]]
        if all(owned[user] < per_user for user in mine):
            kept.append(example)
            for user in mine:
                owned[user] += 1
    return np.array(kept, dtype=np.int64)


def expected_batch(graph: UserGraph, separation: int, probability: float) -> float:
    """Expected batch size of the stationary sampler: ``sum_e p (1 - p)^((separation - 1) neighbours_e)``, exact.

    Example ``e`` is in the batch if it is sampled now and none of its neighbours was in ``separation - 1`` steps.
    """
    sizes, counts = np.unique(graph.neighbours, return_counts=True)
    return float(counts @ (probability * (1.0 - probability) ** ((separation - 1.0) * sizes)))


def joining_probability(graph: UserGraph, separation: int, batch: float) -> float:
    """The ``probability`` with this expected batch size, by bisection to one part in 10^14; public.

    Of several the smallest that a grid finds: it samples, and bars, least.
    Raises PrivacyError when no probability reaches it: sampling more often also bars more.
    """
    if not batch > 0.0:
        raise PrivacyError(f"batch: found {batch!r}; the expected batch size lies above 0")
    # Every summand grows below the first of these and falls above the last; between, the sum is searched on a grid.
    turning = 1.0 / (1.0 + (separation - 1.0) * np.array([graph.neighbours.max(), graph.neighbours.min()]))
    grid = np.geomspace(turning[0], turning[1], 513)
    sizes = np.array([expected_batch(graph, separation, p) for p in grid])
    enough = np.flatnonzero(sizes >= batch)
    if not enough.size:
        best = sizes.argmax()
        raise PrivacyError(
            f"batch: found {batch!r}; with separation {separation} this graph of {graph.examples} examples reaches "
            f"{sizes[best]:.6g} at most: lower batch, separation or per_user"
        )
    low, high = 0.0 if enough[0] == 0 else grid[enough[0] - 1], grid[enough[0]]
    while high - low > 1e-14 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if expected_batch(graph, separation, middle) >= batch else (middle, high)
    return float(high)
