"""What truncated batches add to delta, in closed form (docs/bandmf_tilt.md, after [BMS], appendix D)."""

from __future__ import annotations

import math

import numpy as np

from privacy.bandmf.schemes import BMinSep, Scheme
from privacy.bandmf.strategy import Strategy
from privacy.bandmf.tilt_chain import chain, log_absent
from privacy.bandmf.tilt_replicas import Replicas, largest_term


def truncation_excess(
    scheme: Scheme, strategy: Strategy, noise_multiplier: float, epsilon: float, direction: str = "remove"
) -> float:
    """What truncated batches add at most to the delta of the untruncated scheme; 0 without truncation."""
    limit = getattr(scheme, "truncate", None)
    if limit is None:
        return 0.0
    law = chain(scheme, strategy, noise_multiplier)
    inclusion = scheme.inclusion if isinstance(scheme, BMinSep) else np.full(scheme.steps, scheme.probability)
    tails = {u: binomial_tail(scheme.examples - 1, u, limit) for u in np.unique(inclusion).tolist()}
    cut = sum(u * tails[u] for u in inclusion.tolist()) * (1.0 + 1e-9)
    absent = log_absent(law)
    if direction == "add":
        return min(1.0, cut * (1.0 if epsilon >= -absent * (1.0 + 1e-12) else 1.0 + math.exp(min(epsilon, 700.0))))
    earlier = 1.0
    if math.isfinite(absent):
        replicas = Replicas(law, 2)
        earlier = min(1.0, largest_term(2, replicas.log_moment + replicas.rounding, epsilon + absent))
    return min(1.0, cut * (1.0 + earlier / -math.expm1(absent)))


def binomial_tail(count: int, probability: float, least: int) -> float:
    """An upper bound of P[Binomial(count, probability) >= least], tight to about 1e-3 relative above the mean.

    The first term by Stirling's bounds, the others by their ratios, the rest geometric.
    """
    if least <= 0 or probability >= 1.0:
        return 1.0
    if least > count:
        return 0.0
    odds = probability / (1.0 - probability)
    if (count - least) * odds >= least + 1.0:
        return 1.0
    rest = count - least
    if rest == 0:
        return math.exp(count * math.log(probability)) * (1.0 + 1e-9)
    mean = count * probability
    divergence = least * math.log(least / mean) + rest * math.log1p((mean - least) / (count - mean))
    log_term = 0.5 * math.log(count / (2.0 * math.pi * least * rest)) - divergence + 1.0 / (12.0 * count)
    log_term -= 1.0 / (12.0 * least + 1.0) + 1.0 / (12.0 * rest + 1.0)
    total, factor, at = 0.0, 1.0, least
    while at < count and factor > 1e-6 * total:
        total += factor
        factor *= (count - at) / (at + 1.0) * odds
        at += 1
    ratio = (count - at) / (at + 1.0) * odds
    total += factor / (1.0 - ratio)
    return min(1.0, math.exp(log_term) * total * (1.0 + 1e-9))
