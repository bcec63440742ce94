"""Sampling schemes as values: the law by which one example (or one user) takes part in training.

A scheme is public.  Accountants read its law; samplers (`privacy.bandmf.samplers`) draw batches from it.  Steps are
numbered from 1 in formulas and from 0 in code.  Adjacency: zero-out (one example, or all examples of one user, are
replaced by examples whose gradient is zero; the size of the data set is public).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from certify.errors import PrivacyError


def _positive(name: str, value: int) -> None:
    if int(value) != value or value < 1:
        raise PrivacyError(f"{name}: found {value!r}; a whole number of at least 1 is required")


def _check(scheme) -> None:
    """What all schemes with examples and an expected batch size share."""
    _positive("steps", scheme.steps)
    _positive("examples", scheme.examples)
    if not (math.isfinite(scheme.batch) and 0.0 < scheme.batch <= scheme.examples):
        raise PrivacyError(
            f"batch: found {scheme.batch!r}; the expected batch size lies above 0 and at most at the "
            f"{scheme.examples} examples"
        )
    if scheme.truncate is not None:
        _positive("truncate", scheme.truncate)


@dataclass(frozen=True)
class Poisson:
    """Every example joins every batch independently with probability ``batch / examples``.

    ``truncate``: a batch that is larger is cut to a uniform subset of this size, a smaller one padded (None: neither).
    """

    steps: int
    examples: int
    batch: float
    truncate: int | None = None

    def __post_init__(self):
        _check(self)

    @property
    def rate(self) -> float:
        """Probability that a given example takes part in a given step."""
        return self.batch / self.examples

    @property
    def probability(self) -> float:
        """Probability of joining when available."""
        return self.rate

    @property
    def separation(self) -> int:
        return 1


@dataclass(frozen=True)
class CyclicPoisson:
    """Examples are split into ``separation`` groups; step ``i`` Poisson-samples group ``i mod separation``.

    Expected batch size ``batch``, so the probability within the group is ``separation * batch / examples``.
    """

    steps: int
    examples: int
    batch: float
    separation: int
    truncate: int | None = None

    def __post_init__(self):
        _check(self)
        _positive("separation", self.separation)
        if self.separation * self.batch > self.examples:
            raise PrivacyError(
                f"batch: found {self.batch} with {self.separation} groups of {self.examples} examples; a group holds "
                f"{self.examples / self.separation:g}: lower batch or separation"
            )

    @property
    def rate(self) -> float:
        return self.batch / self.examples

    @property
    def probability(self) -> float:
        return self.separation * self.batch / self.examples


@dataclass(frozen=True)
class BallsInBins:
    """Every example is put into one of ``separation`` bins uniformly; it takes part in the steps of its bin.

    Bin ``j`` has the steps ``i = j mod separation``.
    """

    steps: int
    examples: int
    separation: int

    def __post_init__(self):
        _positive("steps", self.steps)
        _positive("examples", self.examples)
        _positive("separation", self.separation)

    @property
    def rate(self) -> float:
        return 1.0 / self.separation

    @property
    def batch(self) -> float:
        return self.examples / self.separation


@dataclass(frozen=True)
class BMinSep:
    """b-min-sep [BMS]: an example that was not used in the last ``separation - 1`` steps joins with ``probability``.

    ``batch`` is the expected batch size of the stationary chain; ``probability`` follows from it.  ``warm``: every
    example starts in the stationary law of its waiting state, so that the expected batch size is ``batch`` from step 1
    on; cold: all are available at first.  ``truncate`` as in `Poisson`; exclusion follows the batch before the cut.
    """

    steps: int
    examples: int
    batch: float
    separation: int
    warm: bool = True
    truncate: int | None = None

    def __post_init__(self):
        _check(self)
        _positive("separation", self.separation)
        # one part in 10^12 of tolerance: batch is often computed as examples / separation
        if self.separation * self.batch > self.examples * (1.0 + 1e-12):
            raise PrivacyError(
                f"batch: found {self.batch} of {self.examples} examples with separation {self.separation}; the rate "
                f"batch / examples is at most 1 / separation: lower batch or separation"
            )

    @property
    def rate(self) -> float:
        return self.batch / self.examples

    @property
    def probability(self) -> float:
        rate = self.rate
        return min(1.0, rate / (1.0 - (self.separation - 1) * rate)) if self.separation * rate < 1.0 else 1.0


@dataclass(frozen=True)
class MultiAttribution:
    """b-min-sep where every example belongs to users and every user owns at most ``per_user`` examples [BMS, Alg. 3].

    Every step samples all examples with ``probability``; an example is barred while one that shares an owner was
    *sampled* in the last ``separation - 1`` steps.  Accounted cold, at user level, the owners being public.
    """

    steps: int
    probability: float
    separation: int
    per_user: int

    def __post_init__(self):
        _positive("steps", self.steps)
        _positive("separation", self.separation)
        _positive("per_user", self.per_user)
        if not 0.0 < self.probability <= 1.0:
            raise PrivacyError(f"probability: found {self.probability!r}; it lies above 0 and at most at 1")


Scheme = Poisson | CyclicPoisson | BallsInBins | BMinSep | MultiAttribution
