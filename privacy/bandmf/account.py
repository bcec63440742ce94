"""What training costs: delta at an epsilon, epsilon at a delta, curves, and the noise multiplier for a budget.

One call chooses the cheapest rigorous method and says which it was:

* "exact": Poisson (independent noise) and cyclic Poisson, through privacy-loss distributions (`exact`);
* "tilted monte carlo": b-min-sep, balls-in-bins and multi-attribution, bounded terms under the exact Rényi tilt
  (`tilt`); balls-in-bins is b-min-sep, warm, with probability 1;
* "monte carlo": plain samples of the loss (`monte_carlo`), for balls-in-bins with more bands than bins;
* "renyi": certain but looser, where `failure_probability` is 0.

Options of all calls: `direction` ("remove", "add", "both"); `failure_probability` (0: a certain bound); `precision`,
the relative half-width of the interval of delta that is aimed at; `samples` per direction, instead of what a pilot
finds; `executor`, a `concurrent.futures.Executor`, or a function that makes one, for the work units (default: threads);
`results`, a folder that keeps finished units and the seed: the same call with the same folder goes on where an earlier
one was interrupted; `progress(done, total, note)`.

Pilot runs choose the number of samples and where to look; their samples are not used again. Seeds come from the
operating system: whoever picks a seed can pick one that passes, and then nothing is guaranteed; `seed` is for tests.
Everything is public: nothing here reads data. Adjacency: zero-out.

Errors of all calls: PrivacyError for what cannot be accounted (columns of one example that overlap, a strategy for
other steps) and for numbers out of range.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from certify.errors import PrivacyError
from privacy.bandmf import confidence, evr, exact
from privacy.bandmf.result import DeltaBound
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Scheme
from privacy.bandmf.strategy import Strategy

if TYPE_CHECKING:
    from privacy.bandmf.tilt import AddTilt, RemoveTilt

Progress = Callable[[int, int, str], None]

_PILOT = 8192
_FEWEST, _MOST = 2048, 8_000_000  # samples of a run
_CANDIDATES = 8
_LEVELS = 16
_TRIES = 8  # of a pilot
_NOTHING = 1e-300
_LARGEST_NORMAL = 9.5  # of the generator of `monte_carlo`: sqrt(2 ln 2^65)
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class EpsilonBound:
    """The smallest epsilon for `delta` lies in `[lower, upper]` except with `failure_probability`; see `DeltaBound`."""

    delta: float
    estimate: float
    lower: float
    upper: float
    failure_probability: float
    direction: str
    method: str
    samples: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """A noise multiplier with which training is `(epsilon, delta)`-DP, all in all.

    `failure_probability`: of handing out too little noise; it is part of `delta`, not a reservation beside it. `bound`:
    what the last test found. `tests`: how many were made. `fell_back`: none passed, the noise is that without
    amplification.
    """

    noise_multiplier: float
    epsilon: float
    delta: float
    failure_probability: float
    bound: DeltaBound
    tests: int
    fell_back: bool
    seconds: float


def delta(
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float,
    epsilon: float,
    *,
    direction: str = "both",
    failure_probability: float = 1e-6,
    precision: float = 0.1,
    samples: int | None = None,
    seed: int | None = None,
    executor: Executor | None = None,
    results: Path | None = None,
    progress: Progress | None = None,
) -> DeltaBound:
    """An interval for delta at `epsilon >= 0`.

    Guarantees:
    * delta interval covers the true value except with the failure probability.
    """
    run = _Run(failure_probability, precision, samples, seed, executor, results, progress)
    return _delta(_Question(scheme, strategy, direction), noise_multiplier, epsilon, run, failure_probability)


def curve(
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float,
    epsilons: Sequence[float],
    *,
    direction: str = "both",
    failure_probability: float = 1e-6,
    precision: float = 0.1,
    samples: int | None = None,
    seed: int | None = None,
    executor: Executor | None = None,
    results: Path | None = None,
    progress: Progress | None = None,
) -> tuple[DeltaBound, ...]:
    """Intervals for delta at every one of `epsilons`.

    Guarantees:
    * curve holds at all epsilons at once: the failure probability is shared among them.
    """
    run = _Run(failure_probability, precision, samples, seed, executor, results, progress)
    question = _Question(scheme, strategy, direction)
    share = failure_probability / max(1, len(epsilons))
    return tuple(_delta(question, noise_multiplier, e, run, share) for e in epsilons)


def epsilon(
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float,
    delta: float,
    *,
    direction: str = "both",
    failure_probability: float = 1e-6,
    precision: float = 0.05,
    samples: int | None = None,
    seed: int | None = None,
    executor: Executor | None = None,
    results: Path | None = None,
    progress: Progress | None = None,
) -> EpsilonBound:
    """An interval for the smallest epsilon with `delta`.

    A pilot finds the neighbourhood; then one fresh sample is tested at a list of epsilons, the failure probability
    shared among them.

    Guarantees:
    * epsilon interval covers the true value except with the failure probability.
    """
    start = time.perf_counter()
    run = _Run(failure_probability, precision, samples, seed, executor, results, progress)
    question = _Question(scheme, strategy, direction)
    if not 0.0 < delta < 1.0:
        raise PrivacyError(f"delta: found {delta!r}; it lies between 0 and 1")
    most = _unamplified_epsilon(question, noise_multiplier, delta)
    if question.exact:
        known = exact.accountant(scheme, strategy, noise_multiplier)
        upper = _exact_epsilon(question, noise_multiplier, delta)
        lower = _smallest(lambda e: known.lower(e, direction), delta, 0.99 * upper, upper) * (1.0 - 2.0 * _TOLERANCE)
        found = EpsilonBound(delta, upper, lower, upper, 0.0, direction, "exact")
    elif failure_probability == 0.0:
        upper = _smallest(lambda e: _certain(question, noise_multiplier, e).upper, delta, 0.8 * most, most)
        found = EpsilonBound(delta, upper, 0.0, upper, 0.0, direction, "renyi")
    else:
        found = _sampled_epsilon(question, noise_multiplier, delta, most, run)
    return replace(found, seconds=time.perf_counter() - start)


def calibrate(
    scheme: Scheme,
    strategy: Strategy,
    epsilon: float,
    delta: float,
    *,
    failure_probability: float = 1e-6,
    precision: float = 0.1,
    samples: int | None = None,
    seed: int | None = None,
    executor: Executor | None = None,
    results: Path | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """The noise multiplier for `(epsilon, delta)`, by estimate-verify-release (`evr`) where delta is only sampled.

    `failure_probability` is cut to a hundredth of `delta`, of which it is part. Where the accountant is exact, no test
    is needed and the result is the smallest to about 1 in 10^4.

    Guarantees:
    * calibrated noise gives epsilon and delta in all: the failure probability of the procedure included.
    """
    start = time.perf_counter()
    run = _Run(failure_probability, precision, samples, seed, executor, results, progress)
    question = _Question(scheme, strategy, "both")
    if not (0.0 < delta < 1.0 and epsilon > 0.0):
        raise PrivacyError(f"epsilon, delta: found {epsilon!r}, {delta!r}; give epsilon > 0 and 0 < delta < 1")
    if question.exact or failure_probability == 0.0:
        fallback = unamplified_noise(scheme, strategy, epsilon, delta)
        if question.exact:
            noise = _exact_noise(question, epsilon, delta, fallback)
        else:
            noise = _smallest(lambda s: _certain(question, s, epsilon).upper, delta, 0.6 * fallback, fallback)
        chosen = evr.Selection(noise, delta, 0.0, _delta(question, noise, epsilon, run, 0.0), 0, False)
    else:
        gamma = min(failure_probability, delta / 100.0)
        fallback = unamplified_noise(scheme, strategy, epsilon, delta - gamma)
        known = DeltaBound(epsilon, delta - gamma, 0.0, delta - gamma, 0.0, "both", "without amplification")
        candidates = _candidates(question, epsilon, delta - gamma, fallback, run)

        def verify(noise: float, share: float) -> DeltaBound:
            return _delta(question, noise, epsilon, run, share)

        chosen = evr.ascend(candidates, known, fallback, verify, delta, gamma)
    return Calibration(
        chosen.noise_multiplier,
        epsilon,
        delta,
        chosen.failure_probability,
        chosen.bound,
        chosen.tests,
        chosen.fell_back,
        time.perf_counter() - start,
    )


def unamplified_noise(scheme: Scheme, strategy: Strategy, epsilon: float, delta: float) -> float:
    """A noise multiplier that is enough without any secret of the sampling: analytic Gaussian noise, certain.

    Whatever the sampling, one example changes `C G` by at most the sensitivity of the strategy; for a user, times
    the examples owned.
    """
    from privacy.baselines import analytic_gaussian

    return analytic_gaussian(_sensitivity(scheme, strategy), epsilon, delta)


# --- questions and runs ---


@dataclass(frozen=True, eq=False)
class _Question:
    """Scheme, strategy and direction, checked."""

    scheme: Scheme
    strategy: Strategy
    direction: str

    def __post_init__(self):
        if self.direction not in ("remove", "add", "both"):
            raise PrivacyError(f'direction: found {self.direction!r}; give "remove", "add" or "both"')
        if self.scheme.steps != self.strategy.steps:
            raise PrivacyError(
                f"strategy: found {self.strategy.steps} columns for a scheme with {self.scheme.steps} steps; build it "
                "for the same number"
            )
        if not self.exact and not isinstance(self.scheme, BallsInBins) and self.strategy.bands > self.scheme.separation:
            raise PrivacyError(
                f"strategy: found {self.strategy.bands} bands and separation {self.scheme.separation} "
                f"({type(self.scheme).__name__}); columns of one example would overlap, so use at most as many bands"
            )

    @property
    def exact(self) -> bool:
        return exact.supports(self.scheme, self.strategy)

    @property
    def directions(self) -> tuple[str, ...]:
        return ("remove", "add") if self.direction == "both" else (self.direction,)


@dataclass(eq=False)
class _Run:
    """Options of a call; hands out a new seed, and a file for its results, whenever something is sampled."""

    failure_probability: float
    precision: float
    samples: int | None
    seed: int | None
    executor: Executor | None
    results: Path | None
    progress: Progress | None
    drawn: int = 0

    def __post_init__(self):
        if not 0.0 <= self.failure_probability < 1.0:
            raise PrivacyError(f"failure_probability: found {self.failure_probability!r}; it is at least 0 and below 1")
        if not self.precision > 0.0:
            raise PrivacyError(f"precision: found {self.precision!r}; give a positive relative half-width")
        if self.seed is None:
            self.seed = secrets.randbits(128)
        if self.results is not None:
            self.results.mkdir(parents=True, exist_ok=True)
            kept = self.results / "seed"
            if not kept.exists():
                kept.write_text(f"{self.seed}\n")
            self.seed = int(kept.read_text())

    def fresh(self) -> tuple[int, Executor | None, Path | None]:
        """Seed, executor and file of the next sample."""
        number, self.drawn = self.drawn, self.drawn + 1
        seed = np.random.SeedSequence(self.seed, spawn_key=(number,)).generate_state(4, np.uint32)
        file = self.results and self.results / f"{number:04d}.units"
        return int.from_bytes(seed.tobytes(), "little"), self.executor, file

    def report(self, note: str) -> Callable[[int, int], None] | None:
        return self.progress and (lambda done, total: self.progress(done, total, note))


def _delta(question: _Question, noise: float, at: float, run: _Run, share: float) -> DeltaBound:
    """The interval of delta at epsilon `at`, which fails with at most `share`."""
    start = time.perf_counter()
    if not 0.0 <= at < math.inf:
        raise PrivacyError(f"epsilon: found {at!r}; give a finite number of at least 0")
    if not 0.0 < noise < math.inf:
        raise PrivacyError(f"noise_multiplier: found {noise!r}; it is a positive number")
    if question.exact:
        return exact.delta(question.scheme, question.strategy, noise, at, direction=question.direction)
    if share == 0.0:
        found = _certain(question, noise, at)
    else:
        parts = _parts(question, noise, at)
        drawn = _draw(parts, _plan(_pilot(parts, run), at, run, share), run, "samples")
        found = _bound(question, noise, drawn, at, share)
    return replace(found, seconds=time.perf_counter() - start)


def _certain(question: _Question, noise: float, at: float) -> DeltaBound:
    """The better of Rényi and no amplification."""
    from privacy.bandmf.tilt import renyi_delta
    from privacy.baselines import gaussian_delta

    upper = gaussian_delta(noise, _sensitivity(question.scheme, question.strategy), at)
    chain = _as_chain(question.scheme, question.strategy)
    if chain is not None:
        upper = min(upper, max(renyi_delta(chain, question.strategy, noise, at, d) for d in question.directions))
    return DeltaBound(at, upper, 0.0, upper, 0.0, question.direction, "renyi")


def _sensitivity(scheme: Scheme, strategy: Strategy) -> float:
    owned = scheme.per_user if isinstance(scheme, MultiAttribution) else 1
    return owned * strategy.sensitivity(scheme.separation)


def _as_chain(scheme: Scheme, strategy: Strategy) -> Scheme | None:
    """The scheme as the tilt knows it, None if it does not."""
    if isinstance(scheme, BallsInBins):
        if strategy.bands > scheme.separation:
            return None
        return BMinSep(scheme.steps, scheme.examples, scheme.batch, scheme.separation)
    return scheme


# --- what is sampled ---


@dataclass(frozen=True, eq=False)
class _Tilted:
    """One direction of one scheme under a tilt of `privacy.bandmf.tilt`."""

    tilt: RemoveTilt | AddTilt
    direction: str

    @property
    def method(self) -> str:
        return "monte carlo" if self.tilt.order == 1 else "tilted monte carlo"

    def sample(self, count: int, seed: int, executor, results: Path | None, progress):
        from privacy.bandmf.execute import UnitStore

        law = self.tilt.chain
        facts = sha256(law.columns.tobytes() + law.law.tobytes() + law.start.tobytes() + self.tilt.shift.tobytes())
        name = f"{self.direction} {self.tilt.order} {facts.hexdigest()} {count} {seed}"
        return self.tilt.sample(count, seed, executor, progress, results and UnitStore(results, name))

    def terms(self, sample, at: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Upper and lower terms in `[0, bound]`, and the bound."""
        found = self.tilt.terms(sample, at)
        return found.values, found.lower_values, found.bound


@dataclass(frozen=True, eq=False)
class _Plain:
    """One direction by plain losses."""

    scheme: Scheme
    strategy: Strategy
    noise: float
    direction: str

    method = "monte carlo"

    def sample(self, count: int, seed: int, executor, results: Path | None, progress):
        from privacy.bandmf.monte_carlo import sample_losses

        options = {"seed": seed, "executor": executor, "results": results, "progress": progress}
        return sample_losses(self.scheme, self.strategy, self.noise, self.direction, count, **options)

    def terms(self, sample, at: float) -> tuple[np.ndarray, np.ndarray, float]:
        from privacy.bandmf.likelihood import likelihood_error

        reach = max(float(self.strategy.row(i).sum()) for i in range(self.strategy.steps))
        error = likelihood_error(self.scheme, self.strategy, self.noise, _LARGEST_NORMAL * self.noise + reach)
        upper, lower = (-np.expm1(np.minimum(at - sample - shift, 0.0)) for shift in (error, -error))
        return upper, lower, 1.0


def _parts(question: _Question, noise: float, at: float) -> list[_Tilted | _Plain]:
    """Everything whose delta must be bounded: directions, and numbers of examples of a user."""
    scheme, strategy = question.scheme, question.strategy
    chain = _as_chain(scheme, strategy)
    if chain is None:
        return [_Plain(scheme, strategy, noise, d) for d in question.directions]
    from privacy.bandmf import tilt

    makers = {"remove": tilt.remove_tilt, "add": tilt.add_tilt}
    laws = [tilt.chain(load, strategy, noise) for load in tilt.user_loads(chain)]
    return [_Tilted(makers[d](law, at), d) for law in laws for d in question.directions]


Drawn = list[tuple[_Tilted | _Plain, object, int]]


def _draw(parts: list[_Tilted | _Plain], counts: list[int], run: _Run, note: str) -> Drawn:
    """Every part with a sample of it and the number of values in it."""
    drawn = []
    for part, count in zip(parts, counts, strict=True):
        progress = run.report(f"{note}, {part.direction}")
        drawn.append((part, part.sample(count, *run.fresh(), progress), count))
    return drawn


def _pilot(parts: list[_Tilted | _Plain], run: _Run) -> Drawn:
    return _draw(parts, [_PILOT] * len(parts), run, "pilot")


def _plan(pilot: Drawn, at: float, run: _Run, share: float) -> list[int]:
    """Numbers of samples for intervals of the precision that is asked for, relative to the largest delta."""
    log = math.log(4.0 * len(pilot) / share)
    facts = []
    for part, sample, _ in pilot:
        values, _, bound = part.terms(sample, at)
        facts.append((float(values.mean()), float((values**2).mean()), bound))
    width = run.precision * max(mean for mean, _, _ in facts)
    if run.samples is not None or width == 0.0:
        return [(run.samples or _MOST) if bound > 0.0 else 1 for _, _, bound in facts]
    wanted = (2.0 * log * square / width**2 + log * bound / width for _, square, bound in facts)
    return [int(min(max(count, _FEWEST), _MOST)) for count in wanted]


def _bound(question: _Question, noise: float, drawn: Drawn, at: float, share: float) -> DeltaBound:
    """The interval of the largest delta of all parts, truncation included; it fails with at most `share`."""
    half = share / (2.0 * len(drawn))
    estimate = lower = upper = 0.0
    for part, sample, _ in drawn:
        extra = _truncation(question, noise, at, part.direction)
        values, below, most = part.terms(sample, at)
        upper = max(upper, extra + (confidence.upper_bound(values, most, half) if most > 0.0 else 0.0))
        lower = max(lower, -extra + (confidence.lower_bound(below, most, half) if most > 0.0 else 0.0))
        estimate = max(estimate, float(values.mean()))
    count = sum(count for _, _, count in drawn)
    return DeltaBound(at, estimate, lower, min(1.0, upper), share, question.direction, drawn[0][0].method, count)


def _truncation(question: _Question, noise: float, at: float, direction: str) -> float:
    if getattr(question.scheme, "truncate", None) is None:
        return 0.0
    from privacy.bandmf.tilt import truncation_excess

    return truncation_excess(question.scheme, question.strategy, noise, at, direction)


def _estimate(drawn: Drawn, at: float) -> float:
    return max(float(part.terms(sample, at)[0].mean()) for part, sample, _ in drawn)


# --- searches ---


def _smallest(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The smallest argument with `function <= target`, to a relative tolerance, on the safe side; `function` falls.

    `low`, `high`: a guess of a bracket.
    """
    from scipy.optimize import brentq

    @cache
    def excess(log_x: float) -> float:
        return math.log(max(function(math.exp(log_x)), _NOTHING)) - math.log(target)

    low, high = math.log(low), math.log(high)
    while excess(high) > 0.0:
        low, high = high, high + 0.1
    while excess(low) <= 0.0:
        low, high = low - 0.3, low
        if low < -14.0:
            return math.exp(high)
    found = brentq(excess, low, high, xtol=0.5 * _TOLERANCE, rtol=1e-12)
    while excess(found) > 0.0:
        found += 0.5 * _TOLERANCE
    return math.exp(found)


def _sampled_epsilon(question: _Question, noise: float, target: float, most: float, run: _Run) -> EpsilonBound:
    guess = min(most, _cyclic_guess(question, lambda q: _exact_epsilon(q, noise, target), most))
    for _ in range(_TRIES):
        parts = _parts(question, noise, guess)
        pilot = _pilot(parts, run)
        last, guess = guess, _crossing(pilot, target, guess)
        if abs(guess - last) <= 0.05 * guess:
            break
    spread = math.exp(3.0 * run.precision)
    levels = np.linspace(_crossing(pilot, target * spread, guess), _crossing(pilot, target / spread, guess), _LEVELS)
    share = run.failure_probability / _LEVELS
    drawn = _draw(parts, _plan(pilot, float(levels[0]), run, share), run, "samples")
    bounds = [_bound(question, noise, drawn, float(e), share) for e in levels]
    upper = min((b.epsilon for b in bounds if b.upper <= target), default=most)
    lower = max((b.epsilon for b in bounds if b.lower > target), default=0.0)
    estimate = min(max(_crossing(drawn, target, guess), lower), upper)
    facts = run.failure_probability, question.direction, bounds[0].method, bounds[0].samples
    return EpsilonBound(target, estimate, lower, upper, *facts)


def _crossing(drawn: Drawn, target: float, guess: float) -> float:
    """Where the estimate falls to `target`; at most a factor of 2 from `guess`, for which the tilt was made."""
    low, high = 0.5 * guess, 2.0 * guess
    if _estimate(drawn, low) <= target:
        return low
    if _estimate(drawn, high) > target:
        return high
    return _smallest(lambda e: _estimate(drawn, e), target, low, high)


def _candidates(question: _Question, at: float, target: float, fallback: float, run: _Run) -> list[float]:
    """Noise multipliers to test, the least first: the estimate of delta leaves room for the width of the interval."""
    extra = max(_truncation(question, fallback, at, d) for d in question.directions)
    if extra >= 0.9 * target:
        raise PrivacyError(
            f"truncate: truncation alone costs delta = {extra:.3g} of {target:.3g}; raise truncate or lower the batch"
        )
    goal = math.log((target - extra) / (1.0 + 1.3 * run.precision))

    def pilot(noise: float) -> float:
        return math.log(max(_estimate(_pilot(_parts(question, noise, at), run), at), _NOTHING)) - goal

    noise = min(fallback, _cyclic_guess(question, lambda q: _exact_noise(q, at, target, fallback), 0.7 * fallback))
    slope, value = 10.0, pilot(noise)
    for _ in range(_TRIES):
        if abs(value) <= 0.2 * run.precision:
            break
        following = min(fallback, noise * math.exp(min(max(value / slope, -0.7), 0.7)))
        if following == noise:
            break
        found = pilot(following)
        if (value - found) * (following - noise) > 0.0:
            slope = min(max((value - found) / math.log(following / noise), 1.0), 200.0)
        noise, value = following, found
    steps = np.append(0.0, 0.5 * run.precision * 1.6 ** np.arange(_CANDIDATES - 1))
    return [min(fallback, noise * math.exp((value + step) / slope)) for step in steps.tolist()]


def _cyclic_guess(question: _Question, answer: Callable[[_Question], float], otherwise: float) -> float:
    """The answer for cyclic sampling at the same rate: near, and cheap. No bound."""
    scheme = question.scheme
    if isinstance(scheme, BallsInBins):
        return otherwise
    p, owned = scheme.probability, scheme.per_user if isinstance(scheme, MultiAttribution) else 1
    share = min(1.0, owned * scheme.separation * p / (1.0 + (scheme.separation - 1) * p))
    many = 2**40
    cyclic = CyclicPoisson(scheme.steps, many, share * many / scheme.separation, scheme.separation)
    return answer(_Question(cyclic, question.strategy, "remove"))


def _exact_noise(question: _Question, at: float, target: float, fallback: float) -> float:
    def upper(noise: float) -> float:
        return exact.accountant(question.scheme, question.strategy, noise).upper(at, question.direction)

    return _smallest(upper, target, 0.6 * fallback, fallback)


def _exact_epsilon(question: _Question, noise: float, target: float) -> float:
    known = exact.accountant(question.scheme, question.strategy, noise)
    most = _unamplified_epsilon(question, noise, target)
    return _smallest(lambda e: known.upper(e, question.direction), target, 0.8 * most, most)


def _unamplified_epsilon(question: _Question, noise: float, target: float) -> float:
    from privacy.baselines import gaussian_delta

    sensitivity = _sensitivity(question.scheme, question.strategy)
    return _smallest(lambda e: gaussian_delta(noise, sensitivity, e), target, 1.0, 2.0)
