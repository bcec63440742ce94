"""Sampling schemes as values: the law by which one example (or one user) takes part in training.

A scheme is public.  Accountants read its law; samplers (`privacy.bandmf.samplers`) draw batches from it.  Steps are
numbered from 1 in formulas and from 0 in code.  Adjacency: zero-out (one example, or all examples of one user, are
replaced by examples whose gradient is zero; the size of the data set is public).

The expected batch size is the input and the probability follows: for b-min-sep ``batch / examples`` would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from certify.errors import PrivacyError

# ``batch`` is often computed as examples / separation; the quotient may round up.
_ROUNDING = 1.0 + 1e-12


def _positive(name: str, value: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise PrivacyError(f"{name}: found {value!r}; a whole number of at least 1 is required")


def _check(scheme) -> None:
    """What all schemes with an expected batch size share; raises PrivacyError."""
    _positive("steps", scheme.steps)
    _positive("examples", scheme.examples)
    _positive("separation", scheme.separation)
    if scheme.truncate is not None:
        _positive("truncate", scheme.truncate)
    batch, most = scheme.batch, scheme.examples / scheme.separation
    if not (isinstance(batch, Real) and 0.0 < batch <= most * _ROUNDING):
        reason = f" / separation {scheme.separation}" if scheme.separation > 1 else ""
        remedy = "lower batch or separation" if scheme.separation > 1 else "lower batch"
        raise PrivacyError(
            f"batch: found {batch!r}; the expected batch size lies above 0 and at most at "
            f"{scheme.examples} examples{reason} = {most:g}: {remedy}"
        )


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
        return min(1.0, self.rate)

    @property
    def separation(self) -> int:
        return 1


@dataclass(frozen=True)
class CyclicPoisson:
    """Examples are split into ``separation`` groups; step ``i`` Poisson-samples group ``i mod separation``.

    Groups are public and as equal as can be: example ``e`` is in group ``e mod separation``.  So the account takes the
    group of an example as known.  Expected batch size ``batch`` (on average over the groups where their sizes differ
    by one), so the probability within the group is ``separation * batch / examples``.
    """

    steps: int
    examples: int
    batch: float
    separation: int
    truncate: int | None = None

    def __post_init__(self):
        _check(self)

    @property
    def rate(self) -> float:
        return self.batch / self.examples

    @property
    def probability(self) -> float:
        return min(1.0, self.separation * self.batch / self.examples)


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

    @property
    def rate(self) -> float:
        return self.batch / self.examples

    @property
    def probability(self) -> float:
        """``p`` of ``1 / rate = 1 / p + separation - 1``."""
        rate = self.rate
        return min(1.0, rate / (1.0 - (self.separation - 1) * rate)) if self.separation * rate < 1.0 else 1.0

    @property
    def stationary(self) -> np.ndarray:
        """Stationary law of the waiting state, float64 ``(separation,)``: entry ``s`` is P[barred for ``s`` steps]."""
        p = self.probability
        law = np.full(self.separation, p)
        law[0] = 1.0
        return law / (1.0 + (self.separation - 1) * p)

    @property
    def inclusion(self) -> np.ndarray:
        """Probability that an example is sampled (before any cut) in every step, float64 ``(steps,)``."""
        if self.warm:
            return np.full(self.steps, self.stationary[0] * self.probability)
        law, recent = np.zeros(self.steps), 0.0
        for i in range(self.steps):
            law[i] = self.probability * max(0.0, 1.0 - recent)
            oldest = i - (self.separation - 1)
            recent += law[i] - (law[oldest] if oldest >= 0 else 0.0)
        return law


@dataclass(frozen=True)
class MultiAttribution:
    """b-min-sep where every example belongs to users and every user owns at most ``per_user`` examples [BMS, Alg. 3].

    Every step samples all examples with ``probability`` (`privacy.bandmf.users.joining_probability` finds it from the
    expected batch size); an example is barred while one that shares an owner was *sampled* in the last
    ``separation - 1`` steps.  Accounted cold, at user level, the owners being public.

    Samplers draw ``separation - 1`` sampled sets before step 1, which makes the batches stationary from there on.  The
    cold account covers that for every ``C``: more past only bars more, so every user takes part element-wise less, and
    the hockey sticks of Gaussian mixtures with shifts ``C x >= 0`` grow with every entry of ``x``.
    """

    steps: int
    probability: float
    separation: int
    per_user: int

    def __post_init__(self):
        _positive("steps", self.steps)
        _positive("separation", self.separation)
        _positive("per_user", self.per_user)
        if not (isinstance(self.probability, Real) and 0.0 < self.probability <= 1.0):
            raise PrivacyError(f"probability: found {self.probability!r}; it lies above 0 and at most at 1")


Scheme = Poisson | CyclicPoisson | BallsInBins | BMinSep | MultiAttribution


def rounds(scheme: Scheme) -> int:
    """The most steps an example (a user) can take part in: ``ceil(steps / separation)``, not the quotient."""
    return -(-scheme.steps // scheme.separation)
