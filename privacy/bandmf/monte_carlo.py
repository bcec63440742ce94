"""Privacy losses of BandMF, sampled: plain Monte Carlo for every scheme and both directions.

The normal variates come from a fast generator with statistical quality (`privacy.bandmf.lanes.add_normal`); sampling
here estimates what a public mechanism leaks, and nothing is released, so no cryptographic source is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from numba import njit

from certify.errors import PrivacyError
from privacy.bandmf.execute import UnitStore, run_units
from privacy.bandmf.likelihood import (
    SECRET,
    Spikes,
    check,
    dominating_group,
    joining,
    kept_shares,
    losses_at,
)
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, Scheme
from privacy.bandmf.strategy import Strategy

DIRECTIONS = ("remove", "add")
_UNIT_STEPS = 2**24  # steps of all samples of a unit: about a tenth of a second
_UNIT_STEPS_COUNTED = 2**20  # where the counts of other examples are kept, in several arrays
_LONGEST_UNIT = 2**16


def sample_losses(
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float,
    direction: str,
    samples: int,
    *,
    seed: int,
    group: int | None = None,
    executor: Executor | Callable[[], Executor] | None = None,
    results: Path | None = None,
    attempts: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Privacy losses; float64 (samples,), independent.  All arguments are public.

    ``direction`` "remove": ``ln (P/Q)(y)`` at ``y`` from P; "add": ``-ln (P/Q)(y)`` at ``y`` from Q.  Then
    ``delta(epsilon)`` of the direction is the mean of ``max(0, 1 - exp(epsilon - loss))``; a guarantee takes the larger
    direction, and the largest over `likelihood.attributions`.  ``group``: as in `likelihood.log_likelihood_ratio`.
    ``executor``, ``attempts``, ``progress``: see `execute.run_units`.  ``results``: a file that keeps finished units;
    the same call with the same file goes on where an earlier one ended.

    Guarantees:
    * losses follow the law of the privacy loss, within `likelihood.likelihood_error` and `likelihood.sampling_error`;
    * results do not depend on the number of workers: every unit has its own seed.

    Errors: PrivacyError for unknown directions and what `likelihood.check` refuses.
    """
    if direction not in DIRECTIONS:
        raise PrivacyError(f'direction: found {direction!r}; "remove" or "add" are possible')
    if samples < 1:
        raise PrivacyError(f"samples: found {samples!r}; at least 1 is required")
    check(scheme, strategy, noise_multiplier)
    if isinstance(scheme, CyclicPoisson) and group is None:
        group = dominating_group(scheme, strategy)
    steps = _UNIT_STEPS if getattr(scheme, "truncate", None) is None else _UNIT_STEPS_COUNTED
    length = max(8, min(_LONGEST_UNIT, steps // scheme.steps))
    work = _Work(scheme, _Packed.of(strategy), float(noise_multiplier), direction, group, seed, samples, length)
    store = None if results is None else UnitStore(results, work.description)
    units = range(-(-samples // length))
    parts = run_units(work, units, executor=executor, store=store, attempts=attempts, progress=progress)
    return np.concatenate(parts)


@dataclass(frozen=True)
class _Packed:
    """A strategy as bytes: small and comparable, so that a worker unpacks it once."""

    steps: int
    bands: int
    toeplitz: bool
    content: bytes

    @classmethod
    def of(cls, strategy: Strategy) -> _Packed:
        toeplitz = strategy.coefficients is not None
        kept = strategy.coefficients if toeplitz else strategy.columns
        return cls(strategy.steps, strategy.bands, toeplitz, np.asarray(kept, np.float64).tobytes())

    @lru_cache(maxsize=4)  # noqa: B019 (values are few, and equal ones are to share one strategy)
    def strategy(self) -> Strategy:
        content = np.frombuffer(self.content).copy()  # writable, as everywhere: numba would compile again
        if self.toeplitz:
            return Strategy.toeplitz(content, self.steps)
        return Strategy(content.reshape(self.steps, self.bands))


@dataclass(frozen=True)
class _Work:
    """A unit number to its losses; picklable."""

    scheme: Scheme
    strategy: _Packed
    noise_multiplier: float
    direction: str
    group: int | None
    seed: int
    samples: int
    length: int

    @property
    def description(self) -> str:
        parts = (self.scheme, sha256(self.strategy.content).hexdigest(), self.noise_multiplier, self.direction)
        return repr((*parts, self.group, self.seed, self.samples, self.length))

    def __call__(self, unit: int) -> np.ndarray:
        seed = np.random.SeedSequence(self.seed, spawn_key=(DIRECTIONS.index(self.direction), unit))
        count = min(self.length, self.samples - unit * self.length)
        strategy = self.strategy.strategy()
        draws, noise = seed.spawn(2)
        generator = np.random.default_rng(draws)
        counts = sample_counts(self.scheme, count, generator, group=self.group)
        spikes = sample_spikes(self.scheme, self.direction, count, generator, counts, group=self.group)
        losses = losses_at(self.scheme, strategy, self.noise_multiplier, spikes, noise, counts, group=self.group)
        return losses if self.direction == "remove" else -losses


# ----- who takes part ---------------------------------------------------------------------------------------------


def sample_spikes(
    scheme: Scheme,
    direction: str,
    samples: int,
    generator: np.random.Generator,
    counts: np.ndarray | None = None,
    *,
    group: int | None = 0,
) -> Spikes:
    """Participations of the example in ``samples`` independent runs: ``x`` of P ("remove") or Q ("add").

    ``counts`` (samples, steps) for truncated schemes: in a step whose batch is cut, an example that was drawn and kept
    counts 2 in P and -1 in Q [BMS, Appendix D].  ``group`` as in `likelihood.log_likelihood_ratio`, but not None for
    cyclic schemes.
    """
    kept = kept_shares(scheme, counts, (samples, scheme.steps))
    if direction == "add" and not kept.size:
        return Spikes(np.zeros(samples + 1, np.int64), np.empty(0, np.int64), np.empty(0))
    log_stay, log_weights = joining(scheme)
    weights = np.exp(log_weights - np.logaddexp.reduce(log_weights))
    b = scheme.separation
    cyclic = isinstance(scheme, BallsInBins | CyclicPoisson)
    secret = isinstance(scheme, BallsInBins) or (cyclic and group == SECRET)
    warm = scheme.probability if isinstance(scheme, BMinSep) and scheme.warm else 0.0
    start = group if cyclic and not secret else 0
    return Spikes(
        *_draw_spikes(
            generator,
            samples,
            scheme.steps,
            start,
            b if secret else 1,
            b if cyclic else 1,
            b,
            warm,
            log_stay,
            np.cumsum(weights),
            kept,
            direction == "remove",
        )
    )


@njit(nogil=True, cache=True)
def _draw_spikes(
    generator, samples, steps, start, starts_among, stride, lock, warm, log_stay, cumulated, kept, present
):
    """Runs of: wait a geometric number of strides, take part, be barred for ``lock`` steps."""
    first = np.zeros(samples + 1, np.int64)
    positions, sizes = np.empty(max(64, 4 * samples), np.int64), np.empty(max(64, 4 * samples))
    found = 0
    for sample in range(samples):
        at = start
        if starts_among > 1:
            at = int(generator.random() * starts_among)
        elif warm > 0.0 and generator.random() * (1.0 + (lock - 1) * warm) >= 1.0:
            at = 1 + int(generator.random() * (lock - 1))
        while True:
            gap = math.log(1.0 - generator.random()) / log_stay
            if gap >= steps:
                break
            at += stride * int(gap)
            if at >= steps:
                break
            size = 1.0
            if cumulated.size > 1:
                u = generator.random()
                while size < cumulated.size and cumulated[int(size) - 1] <= u:
                    size += 1.0
            if kept.size:
                share = kept[sample, at]
                size, survived = (1.0, 2.0) if present else (0.0, -1.0)
                if share > 0.0:
                    size = survived if generator.random() < share else 0.0
            if size != 0.0:
                if found == positions.size:
                    positions = np.append(positions, np.empty(found, np.int64))
                    sizes = np.append(sizes, np.empty(found))
                positions[found], sizes[found] = at, size
                found += 1
            at += lock
        first[sample + 1] = found
    return first, positions[:found], sizes[:found]


def sample_counts(
    scheme: Scheme, samples: int, generator: np.random.Generator, *, group: int | None = 0
) -> np.ndarray | None:
    """Numbers of other examples drawn per step before the cut; int64 (samples, steps), None without ``truncate``.

    They do not depend on whether the example itself takes part.  Cyclic schemes: the known groups have equal sizes
    (rounded up); secret groups are uniform and independent.
    """
    if getattr(scheme, "truncate", None) is None:
        return None
    p, others = scheme.probability, scheme.examples - 1
    if isinstance(scheme, CyclicPoisson):
        b = scheme.separation
        if group != SECRET:
            return generator.binomial(-(-scheme.examples // b) - 1, p, size=(samples, scheme.steps))
        sizes = generator.multinomial(others, np.full(b, 1.0 / b), size=samples)
        return generator.binomial(sizes[:, np.arange(scheme.steps) % b], p)
    b = scheme.separation
    returning = np.zeros((scheme.steps + b, samples), np.int64)
    available = np.full(samples, others)
    if b > 1 and scheme.warm:
        states = np.full(b, p)
        states[0] = 1.0
        drawn = generator.multinomial(others, states / (1.0 + (b - 1) * p), size=samples)
        available = drawn[:, 0].copy()
        returning[1:b] = drawn[:, 1:].T[: scheme.steps + b - 1]
    counts = np.empty((scheme.steps, samples), np.int64)
    for i in range(scheme.steps):
        available += returning[i]
        counts[i] = generator.binomial(available, p)
        available -= counts[i]
        returning[i + b] += counts[i]
    return np.ascontiguousarray(counts.T)
