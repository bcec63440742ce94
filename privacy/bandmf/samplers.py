"""Samplers: index batches for every scheme of `privacy.bandmf.schemes`, one array of example indices a step.

    coins = SecretCoins.create("run.key", identity(scheme))
    for step, batch in enumerate(sampler(scheme, coins)): ...

A sampler is a pure function of the public scheme and the secret coins.  To resume at step ``t`` call
``sampler(scheme, SecretCoins.load("run.key", identity(scheme)), start=t)``: it walks through the earlier steps again
(their coins are the same), so no waiting states are kept and none can be lost or be a step ahead of the model.

Batches are secret: publishing one, or the time a step takes, gives the amplification away.  Probabilities are the
float64 numbers that the accountants read, met exactly (`privacy.bandmf.sampler_coins`).

Padding is ``PADDING`` = -1, at the end of a batch: never index with it (-1 is the last example); see `is_example`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np

from certify.errors import PrivacyError
from privacy.bandmf.sampler_coins import Coins, SecretCoins, SeededCoins, choose, subset, uniform
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Poisson, Scheme
from privacy.bandmf.users import UserGraph

__all__ = ["PADDING", "Coins", "SecretCoins", "SeededCoins", "identity", "is_example", "sampler"]

PADDING = -1
# First part of the address of every coin.
_JOIN, _START, _WAIT, _CUT = range(4)


def sampler(
    scheme: Scheme, coins: Coins | None = None, *, graph: UserGraph | None = None, start: int = 0
) -> Iterator[np.ndarray]:
    """The batches of steps ``start ... steps - 1``: int64 arrays of distinct example indices, ascending, then padding.

    ``coins``: `SecretCoins` (None: fresh ones, which cannot be resumed).  ``graph``: who owns which example, for
    `MultiAttribution`, whose batches number the examples of the graph.

    Guarantees:
    * poisson: every example is in every batch with ``rate``, all independent;
    * cyclic: in the steps of its group an example joins with ``probability``, all independent; in others never;
    * balls in bins: an example is in every ``separation``-th batch, from a uniform first one on;
    * separation: two uses of an example are at least ``separation`` steps apart (b-min-sep also counts uses cut off);
    * waiting is geometric: a free example joins with ``probability``, whatever happened before;
    * warm start is stationary: every step uses an example with ``rate``; the expected batch size is ``batch``;
    * examples are independent of each other before the cut (but for multi-attribution);
    * truncation is uniform: every subset of ``truncate`` examples of a larger batch is as likely; all batches have
      exactly ``truncate`` entries;
    * multi-attribution excludes by sampled sets: an example is used if it is sampled and no example that shares an
      owner was sampled in the last ``separation - 1`` steps, used or not;
    * resuming repeats: with the same coins, ``start=t`` gives what an uninterrupted run gives from step ``t`` on.

    Raises PrivacyError for a graph that is missing, not needed or above ``per_user``, or a start without its coins.
    """
    if not 0 <= start <= scheme.steps:
        raise PrivacyError(f"start: found {start}; steps are numbered from 0 to {scheme.steps - 1}")
    if coins is None:
        if start:
            raise PrivacyError(f"start: found {start} without coins; pass those of the run, fresh ones would not fit")
        coins = SecretCoins()
    if isinstance(scheme, MultiAttribution):
        if graph is None:
            raise PrivacyError("graph: missing; multi-attribution sampling needs to know who owns which example")
        if graph.per_user > scheme.per_user:
            raise PrivacyError(
                f"graph: a user owns {graph.per_user} examples where per_user is {scheme.per_user}; restrict it with "
                "bound_contributions"
            )
        return _multi_attribution(scheme, graph, coins, start)
    if graph is not None:
        raise PrivacyError(f"graph: {type(scheme).__name__} reads none; only MultiAttribution does")
    batches = _BATCHES[type(scheme)](scheme, coins, start)
    truncate = getattr(scheme, "truncate", None)
    if truncate is None:
        return batches
    return (_fitted(batch, truncate, coins, step) for step, batch in enumerate(batches, start))


def is_example(batch: np.ndarray) -> np.ndarray:
    """Mask of a batch, bool of its shape: True for examples, False for padding (whose gradient counts as zero)."""
    return batch != PADDING


def identity(scheme: Scheme, graph: UserGraph | None = None) -> str:
    """The public facts that a key belongs to, for `SecretCoins.create` and ``load``."""
    if graph is None:
        return repr(scheme)
    digest = hashlib.sha256(repr(graph.starts.shape).encode())
    for array in (graph.starts, graph.owners):
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return f"{scheme!r} owners {digest.hexdigest()}"


def _poisson(scheme: Poisson, coins: Coins, start: int) -> Iterator[np.ndarray]:
    for step in range(start, scheme.steps):
        yield subset(coins, scheme.probability, scheme.examples, _JOIN, step)


def _cyclic(scheme: CyclicPoisson, coins: Coins, start: int) -> Iterator[np.ndarray]:
    for step in range(start, scheme.steps):
        group = step % scheme.separation
        size = len(range(group, scheme.examples, scheme.separation))
        yield group + scheme.separation * subset(coins, scheme.probability, size, _JOIN, step)


def _balls_in_bins(scheme: BallsInBins, coins: Coins, start: int) -> Iterator[np.ndarray]:
    bins = uniform(coins, scheme.separation, scheme.examples, _START)
    order = np.argsort(bins.astype(np.min_scalar_type(scheme.separation)), kind="stable")
    bins = np.split(order, np.cumsum(np.bincount(bins, minlength=scheme.separation))[:-1])
    for step in range(start, scheme.steps):
        yield bins[step % scheme.separation].copy()


def _b_min_sep(scheme: BMinSep, coins: Coins, start: int) -> Iterator[np.ndarray]:
    draws = (subset(coins, scheme.probability, scheme.examples, _JOIN, step) for step in range(scheme.steps))
    free = _stationary_start(scheme, coins) if scheme.warm else np.zeros(scheme.examples, dtype=np.int32)
    for step, batch in enumerate(_separated(draws, scheme.separation, free)):
        if step >= start:
            yield batch


def _stationary_start(scheme: BMinSep, coins: Coins) -> np.ndarray:
    """First step in which each example is free, in the exact stationary law; int32 ``(examples,)``.

    With ``p`` the float64 ``probability``: barred with ``(b - 1) p / (1 + (b - 1) p)``, then for a uniform time.
    """
    odds = (scheme.separation - 1) * Fraction(scheme.probability)
    barred = subset(coins, odds / (1 + odds), scheme.examples, _START)
    free = np.zeros(scheme.examples, dtype=np.int32)
    if barred.size:
        free[barred] = 1 + uniform(coins, scheme.separation - 1, len(barred), _WAIT)
    return free


def _separated(draws: Iterable[np.ndarray], separation: int, free: np.ndarray) -> Iterator[np.ndarray]:
    """[BMS, Alg. 1] The drawn examples that are free; ``free`` (first free step of each example) is updated in place.

    Every step draws from all examples; dropping those that are barred leaves each free one its own fresh coin.
    """
    for step, drawn in enumerate(draws):
        batch = drawn[free[drawn] <= step]
        free[batch] = step + separation
        yield batch


def _multi_attribution(scheme: MultiAttribution, graph: UserGraph, coins: Coins, start: int) -> Iterator[np.ndarray]:
    # The sets before step 0 make the start stationary; those before `start` are all that the batches after it see.
    past = scheme.separation - 1
    draws = (
        subset(coins, scheme.probability, graph.examples, _JOIN, turn) for turn in range(start, scheme.steps + past)
    )
    for turn, batch in enumerate(_unowned(draws, scheme.separation, graph)):
        if turn >= past:
            yield batch


def _unowned(draws: Iterable[np.ndarray], separation: int, graph: UserGraph) -> Iterator[np.ndarray]:
    """[BMS, Alg. 3] The drawn examples of which no owner had an example drawn in the last ``separation - 1`` steps."""
    free = np.zeros(graph.users, dtype=np.int64)
    for step, drawn in enumerate(draws):
        place, owner = graph.incident(drawn)
        barred = np.zeros(len(drawn), dtype=bool)
        barred[place[free[owner] > step]] = True
        free[owner] = step + separation
        yield drawn[~barred]


def _fitted(batch: np.ndarray, size: int, coins: Coins, step: int) -> np.ndarray:
    """[BMS, App. D] A uniform subset of ``size`` of a larger batch; a smaller one padded to ``size``."""
    if len(batch) > size:
        return choose(coins, batch, size, _CUT, step)
    return np.concatenate((batch, np.full(size - len(batch), PADDING, dtype=np.int64)))


_BATCHES = {Poisson: _poisson, CyclicPoisson: _cyclic, BallsInBins: _balls_in_bins, BMinSep: _b_min_sep}
