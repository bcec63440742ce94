"""Participation laws as chains, for the tilt: what one step does to one example (or user)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import logsumexp, xlogy

from certify.errors import PrivacyError
from privacy.bandmf.schemes import BMinSep, MultiAttribution, Poisson, Scheme
from privacy.bandmf.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Chain:
    """Participation law of one example (or user) and the strategy's columns over the noise multiplier.

    `law[m]`: probability of multiplicity m when available, float64 `(per_user + 1,)`; `start[h]`: probability that the
    first step at which it is available is h (from 0), float64 `(separation,)`; `columns` as in `Strategy`, in units of
    the noise (`sigma = 1`).
    """

    law: np.ndarray
    start: np.ndarray
    columns: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.columns)

    @property
    def separation(self) -> int:
        return len(self.start)

    @property
    def per_user(self) -> int:
        return len(self.law) - 1

    @property
    def participations(self) -> int:
        """Largest number of steps one chain takes part in."""
        return -(-self.steps // self.separation)

    @cached_property
    def inner(self) -> np.ndarray:
        """`inner[i, d] = <c_i, c_(i-d)>`, zero for `d > i`, float64 `(steps, bands)`."""
        columns = self.columns
        found = np.zeros(columns.shape)
        for d in range(min(columns.shape[1], len(columns))):
            width = columns.shape[1] - d
            found[d:, d] = np.einsum("ie,ie->i", columns[d:, :width], columns[: len(columns) - d, d:])
        return found

    @property
    def half_norms(self) -> np.ndarray:
        """|c_i|^2 / 2, `(steps,)`."""
        return self.inner[:, 0] / 2.0


def chain(scheme: Scheme, strategy: Strategy, noise_multiplier: float) -> Chain:
    """The scheme as a chain. Errors: PrivacyError for schemes without one, and for columns that overlap."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0.0):
        raise PrivacyError(f"noise_multiplier: found {noise_multiplier!r}; a positive number is required")
    if not isinstance(scheme, Poisson | BMinSep | MultiAttribution):
        raise PrivacyError(
            f"scheme: found {type(scheme).__name__}; the tilt covers Poisson, b-min-sep and multi-attribution"
        )
    if strategy.steps != scheme.steps:
        raise PrivacyError(f"strategy: found {strategy.steps} steps, the scheme has {scheme.steps}; make them equal")
    if strategy.bands > scheme.separation:
        raise PrivacyError(
            f"separation: found {scheme.separation} with {strategy.bands} bands; it must be at least the bands, "
            "so that participations of one example do not overlap"
        )
    p, separation = scheme.probability, scheme.separation
    law = np.array([1.0 - p, p])
    if isinstance(scheme, MultiAttribution):
        k = scheme.per_user
        law = np.array([math.comb(k, m) * p**m * (1.0 - p) ** (k - m) for m in range(k + 1)])
    start = scheme.stationary if isinstance(scheme, BMinSep) and scheme.warm else np.eye(1, separation)[0]
    return Chain(law, start, strategy.columns / noise_multiplier)


def user_loads(scheme: Scheme) -> tuple[Scheme, ...]:
    """The schemes whose delta must all be bounded: for multi-attribution every number of examples up to `per_user`.

    More examples of a user also bar her more often, so fewer can be worse for a general strategy.
    """
    if not isinstance(scheme, MultiAttribution):
        return (scheme,)
    return tuple(replace(scheme, per_user=k) for k in range(1, scheme.per_user + 1))


def log_absent(chain: Chain) -> float:
    """ln P[x = 0], the smallest ln L."""
    waits = np.maximum(chain.steps - np.arange(chain.separation), 0)
    with np.errstate(divide="ignore"):
        terms = np.log(chain.start) + xlogy(waits, chain.law[0])
    return float(logsumexp(terms))
