"""Amplification by secret sampling without replacement: compose on the sample first, amplify the total once.

`m` of `N` slots are drawn once, uniformly, in RANDOM ORDER, by a secure generator, and stay secret. A mechanism that
is (epsilon_b, delta_b)-DP on lists of `m` records (replace-one) is then `(ln(1 + q (e^epsilon_b - 1)), q delta_b)`-DP
on the `N` slots, `q = m / N` [Balle, Barthe, Gaboardi 2018, Theorem 9]. What the proof needs, and what goes wrong
otherwise:

* one mechanism: everything that reads the sample is one mechanism. Ten queries at a claimed 0.1 each on one sample
  with `q = 1/64` cost 16.3, not 1.0, and randomised response attains it. `amplified` therefore takes the result of
  `compose`.
* random order: the proof swaps the differing record for another one AT THE SAME POSITION of the sample. Sorting the
  sample would move others between positions, that is between batches, which replace-one does not cover.
* replace-one: the swap is a replacement even when the neighbours differ by emptying a slot, so a zero-out guarantee
  of the base is not enough.
* secrecy: a public, contiguous or seeded-in-public shard amplifies nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from certify.errors import PrivacyError
from privacy.composition import Composed, Cost, down, up


@dataclass(frozen=True)
class Amplified(Cost):
    """The cost over all `slots`, after one amplification. `sample`: the secret sample it belongs to, if known."""

    slots: int = 1
    size: int = 1
    sample: object = field(default=None, repr=False, compare=False)

    @property
    def samples(self) -> tuple:
        return (self.sample,)


def amplified(total: Composed, slots: int, size: int) -> Amplified:
    """Cost over the `slots` of everything that read ONE secret sample of `size` slots; `total` comes from `compose`.

    Guarantees:
    * amplification follows composition: a cost that was not composed is refused, and so is a second amplification;
    * amplification is rounded up: epsilon and delta are at least the exact values;
    * replace one only.

    Errors: PrivacyError.
    """
    if not isinstance(total, Composed):
        raise PrivacyError(
            "total: not a composed cost; compose everything that reads the sample first, amplified(compose([...]), ...)"
        )
    if total.samples:
        raise PrivacyError("total: contains an amplified cost; a cost is amplified once, by the sample it belongs to")
    q = sampling_rate(slots, size)
    if total.adjacency != "replace-one":
        raise PrivacyError(
            f"adjacency: {total.adjacency!r} is not amplified by sampling; certify the base for replace-one"
        )
    epsilon, q_up = up(Fraction(total.epsilon)), up(q)
    if size == slots:
        value = epsilon
    elif epsilon > 600.0:
        # ln(1 + q (e^eps - 1)) = eps + ln(q + (1 - q) e^-eps), no overflow; each term rounded up.
        inner = q_up + up(1 - q) * math.exp(-epsilon) * (1.0 + 2.0**-50)
        value = epsilon + math.log(inner)
        value += 2.0**-50 * (epsilon + abs(math.log(inner)) + 1.0)
    else:
        value = math.log1p(q_up * math.expm1(epsilon)) * (1.0 + 2.0**-49)
    return Amplified(min(max(value, 0.0), epsilon), up(q * Fraction(total.delta)), "replace-one", slots, size)


def base_budget(epsilon: float, delta: float, slots: int, size: int) -> Cost:
    """The budget that everything on the sample may spend together for (epsilon, delta) over the `slots`, rounded down.

    `epsilon_b = ln(1 + (e^epsilon - 1)/q)`, `delta_b = delta / q`.

    Guarantees:
    * inverse never overspends: amplifying the composed base budget gives at most (epsilon, delta).
    """
    target = Cost(epsilon, delta)
    q = sampling_rate(slots, size)
    share = down(Fraction(delta) / q)
    if share >= 1.0:
        raise PrivacyError(f"delta: {delta!r} / q is not below 1; choose a smaller delta")
    epsilon = down(Fraction(target.epsilon))
    q_up = up(q)
    if epsilon > 1.0:
        # eps + ln((1 - (1 - q) e^-eps) / q)
        value = epsilon + math.log(-math.expm1(-epsilon) / q_up + math.exp(-epsilon))
    else:
        value = math.log1p(math.expm1(epsilon) / q_up)
    value = max(0.0, value - 2.0**-49 * (1.0 + value))
    while value > 0.0 and Fraction(amplified(Composed(value), slots, size).epsilon) > Fraction(target.epsilon):
        value = max(0.0, value * (1.0 - 2.0**-48) - 2.0**-1000)
    return Cost(value, share)


def sampling_rate(slots: int, size: int) -> Fraction:
    """`q = size / slots`, exact; PrivacyError unless `1 <= size <= slots`."""
    if not (int(slots) == slots and int(size) == size and 1 <= size <= slots):
        raise PrivacyError(f"size: {size!r} of {slots!r} slots; choose a whole number from 1 to the number of slots")
    return Fraction(int(size), int(slots))


class SecretSample:
    """A secret sample of the slots, and the only cost that may be claimed for it.

    `slots`, `size`: public. `indices`: PRIVATE, int64 (size,), in random order; position `i` of the training set is
    slot `indices[i]`, and must stay there (no sorting).

    Guarantees:
    * one sample is amplified once: a second call of `amplify` raises PrivacyError;
    * sample stays secret: it is not shown, copied or pickled.
    """

    __slots__ = ("_spent", "indices", "size", "slots")

    def __init__(self, slots: int, size: int, bits=None):
        self.slots, self.size, self._spent = slots, size, False
        self.indices = subsample(slots, size, bits)

    def amplify(self, total: Composed) -> Amplified:
        """Cost over all slots of everything that reads this sample, composed in `total`. Once."""
        if self._spent:
            raise PrivacyError(
                "sample: amplified before; compose all costs on this sample first and amplify the total once"
            )
        cost = amplified(total, self.slots, self.size)
        self._spent = True
        return Amplified(cost.epsilon, cost.delta, cost.adjacency, cost.slots, cost.size, self)

    def __repr__(self) -> str:
        return f"<SecretSample: {self.size} of {self.slots} slots, not shown>"

    def __reduce_ex__(self, protocol):
        raise TypeError("SecretSample cannot be copied or pickled; draw a new one")


def subsample(slots: int, size: int, bits=None) -> np.ndarray:
    """`size` distinct slots in random order, every ordered choice equally likely; PRIVATE, int64 (size,).

    `bits`: a privacy.sampling.SecureBits; None for a new one.

    Guarantees:
    * ordered samples are exactly uniform: swaps with uniform integers by rejection, no modulo bias.
    """
    sampling_rate(slots, size)
    if bits is None:
        from privacy.sampling import SecureBits

        bits = SecureBits()
    moved: dict[int, int] = {}
    chosen = np.empty(size, np.int64)
    for i in range(size):
        j = i + _below(slots - i, bits)
        chosen[i] = moved.get(j, j)
        moved[j] = moved.get(i, i)
    return chosen


def _below(bound: int, bits) -> int:
    """A uniform integer of 0..bound-1."""
    width = (bound - 1).bit_length()
    if width == 0:
        return 0
    while (value := bits.bits(width)) >= bound:
        pass
    return value
