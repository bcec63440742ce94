"""Batch schedules: which slots each training step reads. Public, and the same for every data set.

Formal guarantees (a test of the same name checks each):

* The schedule depends on public facts only, never on a record.
* A batch holds each slot at most once.
* The batches of an epoch are disjoint.
* An epoch visits every slot, but for the last slots that drop_last leaves out.
* The normaliser is the nominal batch size and never the count of full slots.
* Any batch can be asked for alone, in any order, with the same answer.

THEORY section 1: batches are lists of slot indices from a public seed; a slot may be empty.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from certify.errors import DataError, RecipeError
from certify.recipe import Recipe

__all__ = ["Schedule", "make"]


@dataclass(frozen=True)
class Schedule:
    """The batches of a run; every field is a public fact.

    slots: N; steps: T; normaliser: b, by which each step divides the sum of clipped gradients;
    kind: "full" (every slot at each step), "sequential" (slots in order) or "shuffled" (a permutation per epoch);
    size: the nominal batch size; seed: of the permutations, in [0, 2^64); drop_last: leave out the short batch.
    """

    slots: int
    steps: int
    normaliser: int
    kind: str
    size: int
    seed: int = 0
    drop_last: bool = False

    @property
    def batches_per_epoch(self) -> int:
        return self.slots // self.size if self.drop_last else -(-self.slots // self.size)

    def epoch(self, t: int) -> int:
        """The epoch (from 0) of step `t` (from 0)."""
        return t // self.batches_per_epoch

    def batch(self, t: int) -> np.ndarray:
        """The slots of step `t`, counted from 0: int64 (m,), increasing, m at most `size`.

        Raises IndexError if `t` is not in 0 ... steps - 1.
        """
        if not 0 <= t < self.steps:
            raise IndexError(f"step: found {t}; the schedule has the steps 0 to {self.steps - 1}")
        epoch, position = divmod(t, self.batches_per_epoch)
        start = position * self.size
        stop = min(start + self.size, self.slots)
        if self.kind == "shuffled":
            return np.sort(_permutation(self.slots, self.seed, epoch)[start:stop])
        return np.arange(start, stop, dtype=np.int64)


def make(recipe: Recipe, rows: int) -> Schedule:
    """The schedule of `recipe` for a table of `rows` records, which fill the first slots.

    Where the recipe states no number of slots, `rows` is taken for it and is thereby made public.
    Raises DataError if there are more rows than slots or none, RecipeError if a batch is larger than N.
    """
    if rows < 1:
        raise DataError(f"rows: found {rows}; a table of at least one record is required")
    batches = recipe.batches
    slots = rows if batches.slots is None else batches.slots
    if rows > slots:
        raise DataError(f"rows: found {rows}, but batches.slots is {slots}; raise it or leave rows out")
    size = slots if batches.size is None else batches.size
    if size > slots:
        raise RecipeError(f"batches.size: found {size}, but there are {slots} slots; a batch holds at most all slots")
    normaliser = size if recipe.training.normaliser is None else recipe.training.normaliser
    steps = recipe.total_steps(slots)
    return Schedule(slots, steps, normaliser, batches.kind, size, batches.seed or 0, batches.drop_last)


@lru_cache(maxsize=4)
def _permutation(slots: int, seed: int, epoch: int) -> np.ndarray:
    """int64 (slots,): the order that sorts the raw 64-bit stream of Philox keyed by (seed, epoch).

    Raw streams stay the same in every NumPy release, which Generator.permutation does not promise (NEP 19).
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(slots)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order
