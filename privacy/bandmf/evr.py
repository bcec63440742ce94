"""Estimate, verify, release: the procedure that hands out a noise multiplier whose delta was only sampled.

A confidence bound says "delta is at most U, except with probability gamma"; a guarantee has no "except". It comes from
the *procedure*: draw the test, release the noise multiplier that passes. The test reads public facts alone, so the
whole is a mixture of mechanisms with data-independent weights, its hockey stick at most the average of theirs (joint
convexity), and where a bad one passes with probability at most gamma,

    delta_total <= (1 - gamma) (delta - gamma) + gamma <= delta.

Which procedures keep "a bad one is released with probability at most gamma":

* `descend`: a list fixed beforehand, from most noise to least; stop at the *first* failure, release the one before. Let
  `i` be the first bad one of the list. Whatever is released from `i` on, `i` itself passed its test. So no union bound
  over the list, and nothing is needed of the order or of independence between the tests.
* `ascend`: the first of a list that passes. Every bad one before it had its chance: the failure probability is shared
  among them. Cheaper when the list starts near the answer, as one test is enough.

Not covered, hence not offered: bisection or "the best that passed" without a share per test; more samples after a look
at the result; a number of samples that depends on outcomes.

`base_delta` is the plain form [BMS appendix; Wang et al. 2023]: the mean of `m` terms in [0, 1] whose mean is above
`tau d` is at most `d` with probability at most `exp(-m KL(d, tau d))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from certify.errors import PrivacyError
from privacy.bandmf.result import DeltaBound

Verify = Callable[[float, float], DeltaBound]


@dataclass(frozen=True)
class Selection:
    """What a procedure hands out. `noise_multiplier` gives `(epsilon, delta)` in all, `failure_probability` included.

    `bound`: of the noise multiplier released (the fallback's is its own). `tests`: how many were made. `fell_back`: the
    fallback was released, since nothing passed.
    """

    noise_multiplier: float
    delta: float
    failure_probability: float
    bound: DeltaBound
    tests: int
    fell_back: bool


def descend(
    candidates: Sequence[float], fallback: DeltaBound, fallback_noise: float, verify: Verify, delta: float, gamma: float
) -> Selection:
    """Tune and verify in one go: test in order, stop at the first failure, release the last that passed.

    `candidates`: noise multipliers, the one with most noise first, chosen without a look at the tests. `verify(noise,
    gamma)`: an upper bound of delta that fails with probability at most `gamma`; its number of samples is fixed.
    `fallback`: the certain bound of `fallback_noise`.

    Guarantees:
    * descend releases a bad noise with at most gamma: of all candidates together, no union bound.
    """
    _check(candidates, fallback, delta, gamma)
    found, noise, tests = fallback, fallback_noise, 0
    for candidate in candidates:
        bound, tests = verify(candidate, gamma), tests + 1
        if not _passes(bound, delta, gamma, gamma):
            break
        found, noise = bound, candidate
    return Selection(noise, delta, gamma, found, tests, found is fallback)


def ascend(
    candidates: Sequence[float], fallback: DeltaBound, fallback_noise: float, verify: Verify, delta: float, gamma: float
) -> Selection:
    """Release the first candidate that passes; every test may fail with `gamma / len(candidates)`. See `descend`.

    Guarantees:
    * ascend releases a bad noise with at most gamma: the tests share it.
    """
    _check(candidates, fallback, delta, gamma)
    share = gamma / len(candidates)
    for tests, candidate in enumerate(candidates, 1):
        bound = verify(candidate, share)
        if _passes(bound, delta, gamma, share):
            return Selection(candidate, delta, gamma, bound, tests, False)
    return Selection(fallback_noise, delta, gamma, fallback, len(candidates), True)


def _passes(bound: DeltaBound, delta: float, gamma: float, share: float) -> bool:
    if bound.failure_probability > share:
        raise PrivacyError(
            f"verify: found a bound with failure probability {bound.failure_probability:.3g} where {share:.3g} was "
            "asked for; give a verification that keeps its share"
        )
    return bound.upper <= delta - gamma


def _check(candidates: Sequence[float], fallback: DeltaBound, delta: float, gamma: float) -> None:
    if not candidates:
        raise PrivacyError("candidates: the list is empty; give at least one noise multiplier")
    if not 0.0 < gamma < delta < 1.0:
        raise PrivacyError(
            f"failure_probability: found {gamma!r} for delta = {delta!r}; it is part of delta, so it must be smaller"
        )
    if fallback.failure_probability > 0.0 or fallback.upper > delta - gamma:
        raise PrivacyError(
            f"fallback: found delta <= {fallback.upper:.3g} with failure probability "
            f"{fallback.failure_probability:.3g}; it needs a certain bound of at most {delta - gamma:.3g}"
        )


def chernoff(samples: int, base: float, tau: float) -> float:
    """Bound of the probability that the mean of `samples` terms in [0, 1] is at most `base`, their true mean being
    `tau * base` or more (`tau >= 1`): `exp(-samples KL(base, tau base))`."""
    if not 0.0 < base < 1.0 or not tau >= 1.0:
        raise PrivacyError(f"base, tau: found {base!r}, {tau!r}; give a probability below 1 and a factor of at least 1")
    true = tau * base
    if true >= 1.0:
        return 0.0
    divergence = (1.0 - base) * (math.log1p(-base) - math.log1p(-true)) - base * math.log(tau)
    return math.exp(-samples * max(0.0, divergence - 2.0**-50 * base))


def overall_delta(samples: int, base: float) -> float:
    """delta of the procedure that releases what has a mean of at most `base` over `samples` terms (any `tau` is valid).

    Guarantees:
    * overall delta covers a false pass: the best mix of what passes rightly and what passes by chance.
    """
    from scipy.optimize import minimize_scalar

    def total(log_tau: float) -> float:
        tau = math.exp(log_tau)
        miss = chernoff(samples, base, tau)
        return tau * base + miss * (1.0 - tau * base)

    top = -math.log(base) * (1.0 - 1e-12)
    # The total falls, then rises; the minimum lies a few standard deviations above tau = 1.
    scale = math.sqrt(1.0 / (samples * base))
    ends = [min(top, 60.0 * scale), top]
    found = [minimize_scalar(total, bounds=(0.0, end), method="bounded", options={"xatol": 1e-12}).fun for end in ends]
    return min(1.0, *(float(f) for f in found))


def base_delta(samples: int, delta: float) -> float:
    """The largest sample mean that may pass, for a total of `delta`; PrivacyError when 0 hits would not be enough."""
    if not 0.0 < delta < 1.0 or samples < 1:
        raise PrivacyError(f"delta, samples: found {delta!r}, {samples!r}; give 0 < delta < 1 and at least one sample")
    low, high = 0.0, delta
    for _ in range(100):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        low, high = (middle, high) if overall_delta(samples, middle) <= delta else (low, middle)
        if high - low <= 1e-9 * high:
            break
    if low < 1e-6 * delta:
        raise PrivacyError(
            f"samples: {samples} are too few to verify delta = {delta:.3g}; at least about "
            f"{math.log(1.0 / delta) / delta:.2g} are needed"
        )
    return low


def minimum_samples(base: float, delta: float) -> int:
    """The smallest number of samples with `overall_delta(samples, base) <= delta`."""
    if not 0.0 < base < delta < 1.0:
        raise PrivacyError(f"base: found {base!r} for delta = {delta!r}; it lies between 0 and delta")
    low, high = 0, 1
    while overall_delta(high, base) > delta:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overall_delta(middle, base) <= delta else (middle, high)
    return high
