"""Guarantees in the terms of other libraries. Every export states the adjacency: slots, replace-one unless told
otherwise.

Nothing here computes from data. dp-accounting and OpenDP are optional; a missing one is named in the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from certify.errors import PrivacyError
from privacy.composition import Cost, up
from privacy.profiles import LossDistribution


@dataclass(frozen=True)
class ZCdp:
    """`D_alpha <= rho alpha` for all `alpha > 1`, both directions, under `adjacency`. Public."""

    rho: float
    adjacency: str


def to_zcdp(source, pair=None, dim: int = 1, adjacency: str = "replace-one") -> ZCdp:
    """zCDP of a pure cost (`rho = epsilon^2 / 2`, rounded up) or of a concentrated noise family with an admissible
    `pair`.

    `source`: a `Cost` (or an `agtr.Guarantee`) with delta 0, or a family of `privacy.noise.bun_steinke`.

    Guarantees:
    * zcdp of a pure cost is at least that of randomised response;
    * adjacency is that of the source.

    Errors: PrivacyError for `delta > 0`: (epsilon, delta)-DP implies no zCDP.
    """
    if pair is not None:
        return ZCdp(source.rho(pair.a, pair.beta, dim), adjacency)
    if source.delta != 0:
        raise PrivacyError(
            f"delta: {float(source.delta)!r} > 0 implies no zCDP; use a pure or concentrated release, or the PLD export"
        )
    return ZCdp(up(Fraction(source.epsilon) ** 2 / 2), source.adjacency)


def to_dp_accounting_pld(source, step: float = 1e-4):
    """A `dp_accounting.pld` PrivacyLossDistribution, pessimistic, of a `LossDistribution` or a `Cost`.

    One distribution for both directions (symmetric). dp-accounting does not carry adjacencies: the loss distribution
    is for that of `source` (replace-one: use it as NeighboringRelation.REPLACE_ONE), and must not be mixed with
    others. Compose it with `compose` and `self_compose`; do not go through dp-accounting's events.

    Guarantees:
    * pld dominates: its delta at every epsilon is at least that of the source.
    """
    try:
        from dp_accounting.pld import pld_pmf
        from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    except ImportError as error:
        raise PrivacyError("dp-accounting is not installed; pip install 'certdp[accounting]'") from error
    from privacy.profiles import from_cost

    if not isinstance(source, LossDistribution):
        source = from_cost(Cost(source.epsilon, source.delta, source.adjacency), step)
    pmf = pld_pmf.DensePLDPmf(source.step, source.lowest, source.mass.copy(), min(source.infinite, 1.0), True)
    return PrivacyLossDistribution(pmf)


def to_opendp_measurement(function: Callable[[Any], Any], guarantee):
    """An OpenDP measurement that runs `function(records)` and states the guarantee.

    `function`: the whole private release, from the list of record slots to the published values. `guarantee`:
    anything with `epsilon`, `delta`, `adjacency` (a Cost, an agtr.Guarantee). The input metric is a discrete distance
    on data sets of the same public number of slots: `d_in = 1` means neighbours under `adjacency`; larger distances
    are refused (the privacy map raises). The output measure is max divergence, or its approximate form when delta >
    0. OpenDP cannot check the claim: features "contrib" and "honest-but-curious" must be enabled.

    Guarantees:
    * map never claims less than the guarantee.

    Errors: PrivacyError when OpenDP is missing.
    """
    try:
        import opendp.prelude as dp
    except ImportError as error:
        raise PrivacyError("opendp is not installed; pip install 'certdp[opendp]'") from error
    epsilon, delta = up(Fraction(guarantee.epsilon)), up(Fraction(guarantee.delta))
    measure = dp.approximate(dp.max_divergence()) if delta > 0.0 else dp.max_divergence()

    def privacy_map(d_in):
        if d_in == 0:
            return (0.0, 0.0) if delta > 0.0 else 0.0
        if d_in != 1:
            raise ValueError(f"d_in: {d_in!r}; the guarantee is for neighbours, d_in = 1")
        return (epsilon, delta) if delta > 0.0 else epsilon

    name = f"certdp data sets, {guarantee.adjacency} neighbours"
    domain = dp.user_domain(name, lambda _: True)
    metric = dp.user_distance(name)
    return dp.m.make_user_measurement(domain, metric, measure, function, privacy_map, TO="ExtrinsicObject")

