"""Exact integer Rényi tilt with bounded terms: delta of BandMF from few samples, rigorously.

`P` is the law of `y = C x + sigma z`, `Q` that of `sigma z`, `L = P/Q`. For an integer order `k` the law `G_k` with
density `Q L^k / Z`, `Z = E_Q[L^k]`, is a mixture of Gaussians whose participations (`k` replicas of the chain
together) can be drawn exactly; `Z` is a sum of positive terms (`tilt_replicas`). With `y` from `G_k` the terms

    W = Z (L - e^epsilon)^+ / L^k        in [0, B],    B = Z e^(-(k-1) epsilon) (k-1)^(k-1) / k^k

have mean `delta_remove(epsilon)`. `B` is the Rényi bound of order k, so the order with the smallest `B` is taken: a
public choice without samples. Order 1 is plain Monte Carlo (`B = 1`). Add direction: noise shifted against the mean
participations, with a bound from Jensen's inequality. Proofs, also of rounding, warm starts and truncated batches:
docs/bandmf_tilt.md.

Schemes: Poisson, b-min-sep (cold, warm, any separation of at least the bands), multi-attribution (for users with
exactly `per_user` examples: see `user_loads`). Any banded non-negative strategy. Everything here is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.signal import lfilter

from certify.errors import PrivacyError
from privacy.bandmf import tilt_kernels as kernels
from privacy.bandmf.execute import UnitStore, run_units
from privacy.bandmf.schemes import Scheme
from privacy.bandmf.strategy import Strategy
from privacy.bandmf.tilt_chain import Chain, chain, log_absent, user_loads
from privacy.bandmf.tilt_replicas import ROUND, Replicas, largest_term, states
from privacy.bandmf.tilt_truncation import truncation_excess

Progress = Callable[[int, int], None]

_UNIT = 2048  # samples per work unit, a multiple of the lanes
_LARGEST_NORMAL = 40.0
_TABLE_NUMBERS = 2.5e8  # partition sums of the highest order tried: 1 GB in float32
_ACTIONS = 2.5e9  # of all orders tried: below a minute
_NEGLIGIBLE = 1e-30  # a bound of delta that no higher order needs to improve
_MARGIN = 1e-8  # relative, for the rounding of the means and of the gap of the add direction


def renyi(scheme: Scheme, strategy: Strategy, noise_multiplier: float, order: int) -> float:
    """`Z = E_Q[(P/Q)^order]`, rounded up, float64; for the scheme as it stands (see `user_loads`), without truncation.

    Cost: `order` actions on each of `C(separation + order - 2, order - 1)` joint states per step (one example per
    user). Errors: PrivacyError when the moment is beyond the largest float.
    """
    if int(order) != order or order < 1:
        raise PrivacyError(f"order: found {order!r}; a whole number of at least 1 is required")
    replicas = Replicas(chain(scheme, strategy, noise_multiplier), int(order))
    return math.exp(replicas.log_moment + replicas.rounding)


def renyi_delta(
    scheme: Scheme, strategy: Strategy, noise_multiplier: float, epsilon: float, direction: str = "remove"
) -> float:
    """A deterministic upper bound of delta at `epsilon`, truncation included, over all `user_loads`.

    Remove: the best integer Rényi order; add: the largest term of the shifted noise, or 0 where no loss is that large.
    """
    _check_direction(direction)
    worst = 0.0
    for load in user_loads(scheme):
        law = chain(load, strategy, noise_multiplier)
        tilt = add_tilt(law, epsilon) if direction == "add" else remove_tilt(law, epsilon, keep=False)
        worst = max(worst, tilt.bound(epsilon))
    return min(1.0, worst + truncation_excess(scheme, strategy, noise_multiplier, epsilon, direction))


@dataclass(frozen=True, eq=False)
class TiltedTerms:
    """Independent terms for the mean delta at `epsilon`, float64 `(samples,)`, one direction.

    Guarantees (pseudo-random numbers taken as ideal ones):
    * every term lies in [0, bound];
    * the mean of the values is at least delta, that of the lower values at most delta.
    `method` says in words what was sampled.
    """

    epsilon: float
    direction: str
    values: np.ndarray
    lower_values: np.ndarray
    bound: float
    method: str


@dataclass(frozen=True, eq=False)
class Sample:
    """Outputs of a tilt: ln L (NaN where out of range) and ln of the weight of the shift, float64 `(samples,)`.

    Both are within `rounding` of their exact values.
    """

    log_ratios: np.ndarray
    log_weights: np.ndarray
    rounding: float


@dataclass(frozen=True, eq=False)
class RemoveTilt:
    """`G_order` for the remove direction; holds the partition sums when it is to be sampled."""

    replicas: Replicas

    @property
    def chain(self) -> Chain:
        return self.replicas.chain

    @property
    def shift(self) -> np.ndarray:
        return np.zeros(self.chain.steps)

    @property
    def order(self) -> int:
        return self.replicas.order

    def spikes(self, samples: int, seed: np.random.SeedSequence) -> np.ndarray:
        """Participations of independent samples, as from `Replicas.draw`."""
        return self.replicas.draw(samples, np.random.default_rng(seed))

    def sample(self, samples: int, seed, executor=None, progress: Progress | None = None, store=None) -> Sample:
        """See `sample_outputs`."""
        return sample_outputs(self, samples, seed, executor, progress, store)

    def bound(self, epsilon: float) -> float:
        """Largest term, also an upper bound of delta."""
        r = self.replicas
        return largest_term(r.order, r.log_moment + r.slack, epsilon)

    def terms(self, sample: Sample, epsilon: float) -> TiltedTerms:
        """The terms at any `epsilon`."""
        order, log_moment = self.replicas.order, self.replicas.log_moment
        peak = largest_term(order, log_moment, epsilon)
        top = epsilon + math.log1p(1.0 / (order - 1)) if order > 1 else math.inf
        valid, eta = np.isfinite(sample.log_ratios), sample.rounding
        t = np.where(valid, sample.log_ratios, 0.0)

        def term(t: np.ndarray) -> np.ndarray:
            """W at ln L = t; it grows up to `top` and falls afterwards."""
            return -np.expm1(np.minimum(epsilon - t, 0.0)) * np.exp(log_moment - (order - 1) * np.maximum(t, epsilon))

        upper = np.where(valid, np.minimum(term(np.clip(top, t - eta, t + eta)) * (1.0 + 1e-11), peak), peak)
        lower = np.where(valid, np.minimum(term(t - eta), term(t + eta)) * (1.0 - 1e-11), 0.0)
        grown, drift = math.exp(self.replicas.slack), peak * self.replicas.variation
        return TiltedTerms(
            epsilon,
            "remove",
            grown * upper + drift,
            np.maximum(lower / grown - drift, 0.0),
            grown * peak + drift,
            f"tilt of order {order}" if order > 1 else "plain",
        )


@dataclass(frozen=True, eq=False)
class AddTilt:
    """Noise shifted by `-tilt * mean`, for the add direction: `ln L >= mean . y - gap` for every y."""

    chain: Chain
    mean: np.ndarray
    gap: float
    tilt: float

    @property
    def shift(self) -> np.ndarray:
        return self.tilt * self.mean

    @property
    def order(self) -> int:
        return 0

    def spikes(self, samples: int, seed: np.random.SeedSequence) -> np.ndarray:
        """None: the add direction samples the noise alone."""
        return np.zeros((3, 0), np.int32)

    sample = RemoveTilt.sample

    def bound(self, epsilon: float) -> float:
        """Largest term, also an upper bound of delta; 0 where no loss is as large as `epsilon`.

        Infinite where it is beyond the largest float, at an epsilon far below that for which the shift was made.
        """
        if epsilon >= -log_absent(self.chain) * (1.0 + 1e-12):
            return 0.0
        if self.tilt == 0.0:
            return 1.0
        drop = self.tilt * (epsilon - self.gap) - float(self.shift @ self.shift) / 2.0
        reach = abs(epsilon) + self.gap + (_LARGEST_NORMAL + self.shift.max()) * float(self.mean.sum())
        exponent = -drop + _MARGIN * (1.0 + self.tilt * reach)
        return math.exp(exponent) if exponent < 709.0 else math.inf

    def terms(self, sample: Sample, epsilon: float) -> TiltedTerms:
        """The terms at any `epsilon`."""
        peak, eta, valid = self.bound(epsilon), sample.rounding, np.isfinite(sample.log_ratios)
        t = np.where(valid, sample.log_ratios, 0.0)
        upper = -np.expm1(np.minimum(epsilon + t - eta, 0.0)) * np.exp(sample.log_weights + eta) * (1.0 + 1e-11)
        lower = -np.expm1(np.minimum(epsilon + t + eta, 0.0)) * np.exp(sample.log_weights - eta) * (1.0 - 1e-11)
        upper = np.where(valid, np.minimum(upper, peak), peak)
        lower = np.where(valid, np.minimum(lower, peak), 0.0)
        return TiltedTerms(epsilon, "add", upper, lower, peak, f"noise shifted by {self.tilt:.3g} mean participations")


def remove_tilt(law: Chain, epsilon: float, keep: bool = True) -> RemoveTilt:
    """The order with the smallest Rényi bound at `epsilon`, of 1 ... 8, 10, 12, ... as far as they can be afforded.

    `keep`: keep the partition sums of all steps, for sampling (else the bound alone works). The logarithm of the bound
    is convex in the order (so is ln Z), so the search ends where it grows.
    """
    best = RemoveTilt(Replicas(law, 1, np.float64 if keep else None))
    order, work = 2, 0.0
    while best.bound(epsilon) > _NEGLIGIBLE:
        numbers = states(law, order) * (law.steps + law.separation)
        work += numbers * math.comb(order + law.per_user, order)
        if numbers > _TABLE_NUMBERS or work > _ACTIONS:
            break
        dtype = (np.float64 if 2 * numbers <= _TABLE_NUMBERS else np.float32) if keep else None
        try:
            tried = RemoveTilt(Replicas(law, order, dtype))
        except PrivacyError:  # the moment is beyond the largest float, and so are those of higher orders
            break
        if tried.bound(epsilon) >= best.bound(epsilon):
            break
        best, order = tried, order + 1 + order // 8
    return best


def add_tilt(law: Chain, epsilon: float) -> AddTilt:
    """The shift with the smallest largest term, among thinned laws of the participations."""
    best = AddTilt(law, np.zeros(law.steps), 0.0, 0.0)
    for share in np.linspace(0.05, 1.0, 20):
        mean, gap = _half_space(law, share)
        tried = AddTilt(law, mean, gap, max(epsilon - gap, 0.0) / float(mean @ mean))
        best = min(best, tried, key=lambda tilt: tilt.bound(epsilon))
    return best


def _half_space(law: Chain, share: float) -> tuple[np.ndarray, float]:
    """`mean` and `gap` with `ln L >= mean . y - gap` for all y: Jensen with the law of the chain thinned by `share`."""
    multiplicities = np.arange(len(law.law))
    q = law.law * share**multiplicities
    q /= q.sum()
    divergence = float(np.sum(q[q > 0.0] * np.log(q[q > 0.0] / law.law[q > 0.0])))
    joins = 1.0 - q[0]
    begun = np.ones(law.steps)
    begun[: law.separation] = np.cumsum(law.start)[: law.steps]
    available = lfilter([joins], np.append(1.0, np.full(law.separation - 1, joins)), begun) / joins
    mean = np.zeros(law.steps + law.columns.shape[1])
    for d in range(law.columns.shape[1]):
        mean[d : d + law.steps] += law.columns[:, d] * available * float(q @ multiplicities)
    return mean[: law.steps], float(available @ (law.half_norms * float(q @ multiplicities**2) + divergence))


def sample_outputs(
    tilt: RemoveTilt | AddTilt,
    samples: int,
    seed,
    executor: Executor | Callable[[], Executor] | None = None,
    progress: Progress | None = None,
    store: UnitStore | None = None,
) -> Sample:
    """Likelihood ratios of independent outputs; one sample serves every epsilon (`tilt.terms`).

    `seed`: an int or a sequence of ints. Work units are seeded each, so the result depends neither on the executor nor
    on the number of workers; `executor` and `store` as in `run_units`, `progress(done, samples)`. Threads share the
    partition sums; every other process computes them for itself, once.
    """

    def report(done: int, total: int) -> None:
        progress(min(done * _UNIT, samples), samples)

    found = run_units(
        partial(_unit, tilt, seed, samples),
        range(-(-samples // _UNIT)),
        executor=executor,
        store=store,
        progress=report if progress else None,
    )
    log_ratios, log_weights = np.concatenate([values.reshape(2, -1) for values in found], axis=1)
    return Sample(log_ratios, log_weights, evaluation_error(tilt.chain, tilt.order, tilt.shift))


def _unit(tilt: RemoveTilt | AddTilt, seed, samples: int, unit: int) -> np.ndarray:
    """Both rows of `evaluate` for one unit, flat."""
    spikes_seed, noise_seed = np.random.SeedSequence(seed, spawn_key=(unit,)).spawn(2)
    size = min(_UNIT, samples - unit * _UNIT)
    return evaluate(tilt.chain, tilt.spikes(size, spikes_seed), tilt.shift, size, noise_seed).ravel()


def evaluate(
    chain: Chain, spikes: np.ndarray, shift: np.ndarray, samples: int, seed: np.random.SeedSequence
) -> np.ndarray:
    """ln L, and ln of the density of the noise over that of the shifted noise, at `C spikes - shift + z`.

    float64 `(2, samples)`. `spikes` as from `Replicas.draw`, `shift` `(steps,)`, both in units of the noise.
    """
    generator = np.random.default_rng(seed)
    lanes = kernels.LANES
    result = np.zeros((2, -(-samples // lanes) * lanes))
    own = np.searchsorted(spikes[0], np.arange(0, samples + lanes, lanes))
    y = np.zeros((chain.steps + chain.columns.shape[1], lanes))
    z, half_norms = y[: chain.steps], chain.half_norms
    for block, first in enumerate(range(0, samples, lanes)):
        generator.standard_normal(out=z)
        if max(z.max(), -z.min()) > _LARGEST_NORMAL:
            raise AssertionError("a normal number beyond the range for which rounding is bounded")
        if shift.any():
            result[1, first : first + lanes] = shift @ z - shift @ shift / 2.0
            z -= shift[:, None]
        kernels.add_spikes(y, chain.columns, spikes[:, own[block] : own[block + 1]], first)
        result[0, first : first + lanes] = kernels.log_ratios(y, chain.columns, half_norms, chain.law, chain.start)
    return result[:, :samples]


def evaluation_error(chain: Chain, order: int, shift: np.ndarray) -> float:
    """Bound of the errors of both numbers of `evaluate`, for every sequence of normals and spikes of `order`."""
    k, bands = chain.per_user, chain.columns.shape[1]
    largest = _LARGEST_NORMAL + order * k * float(chain.columns.max()) + float(np.abs(shift).max())
    exponent = k * (float(chain.columns.sum(axis=1).max()) * largest + k * float(chain.half_norms.max()))
    ratio = chain.participations * (bands + order + 16) * exponent + chain.steps * (2 * k + 8) + chain.separation + 4096
    weight = (chain.steps + 8) * (_LARGEST_NORMAL * float(np.abs(shift).sum()) + float(shift @ shift))
    return 1.01 * ROUND * (ratio + weight)


def tilted_terms(
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float,
    epsilon: float,
    samples: int,
    *,
    seed,
    direction: str = "remove",
    executor: Executor | Callable[[], Executor] | None = None,
    progress: Progress | None = None,
) -> TiltedTerms:
    """Terms in `[0, bound]` whose mean is delta at `epsilon` in one direction, WITHOUT truncation.

    Add `truncation_excess` for truncated batches; for multi-attribution bound every scheme of `user_loads`. `seed`,
    `executor`, `progress`: as in `sample_outputs`. A bound of 0 means that delta is 0; nothing is sampled then.
    """
    _check_direction(direction)
    law = chain(scheme, strategy, noise_multiplier)
    tilt = add_tilt(law, epsilon) if direction == "add" else remove_tilt(law, epsilon)
    if tilt.bound(epsilon) == 0.0:
        return TiltedTerms(epsilon, direction, np.zeros(samples), np.zeros(samples), 0.0, "no loss is that large")
    return tilt.terms(tilt.sample(samples, seed, executor, progress), epsilon)


def _check_direction(direction: str) -> None:
    if direction not in ("remove", "add"):
        raise PrivacyError(f'direction: found {direction!r}; choose "remove" or "add"')
