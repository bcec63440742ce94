"""Coins of the samplers: secret, addressed by step, and exact.

Coins are addressed, not streamed: ``words(count, step, ...)`` is a fixed function of a secret key and of the address.
A run that was killed draws the same batch again when it repeats a step, never a second one for a step whose output was
shown, and the only thing to keep is the key, written before the first batch.

Everything below draws from ideal uniform bits without rounding: an event whose probability is ``p`` happens for exactly
the share ``p`` of all bit tapes.  Floating point only makes guesses, which are confirmed within a stated error or
decided in integer arithmetic; so the result is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np

from certify.errors import CheckpointError

_LABEL = b"certdp bandmf sampler coins 1\0"


class SecretCoins:
    """Coins for production: SHAKE-256 of a 256-bit key from the operating system.  There is no seed.

    ``SecretCoins()`` lives in memory only.  ``create`` also writes the key to a file before any coin is drawn and
    ``load`` resumes from it.  The file is as secret as the data: who has it knows every batch, and nothing is
    amplified.  One file belongs to one run: a second run with the same key would reuse its coins, and a run that goes
    on with a new key would not keep its separation.

    Guarantees:
    * production cannot be seeded: the key comes from ``os.urandom`` or from a file of an earlier ``create``;
    * coins of different addresses differ: every part of an address has 8 bytes;
    * keys do not leak by accident: ``repr`` hides the key, pickling raises TypeError.
    """

    width = 64

    def __init__(self):
        self._key = os.urandom(32)

    @classmethod
    def create(cls, path: str | Path, identity: str) -> SecretCoins:
        """New coins, kept in a new file that only the owner may read.  ``identity``: public facts of the run.

        Raises CheckpointError when the file exists.
        """
        coins = cls()
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise CheckpointError(
                f"{path}: there is a key already; resume that run from it, or give the new run another file"
            ) from error
        text = json.dumps({"key": coins._key.hex(), "identity": identity, "digest": coins._digest(identity)})
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(Path(path).parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return coins

    @classmethod
    def load(cls, path: str | Path, identity: str) -> SecretCoins:
        """The coins of an earlier run.  Raises CheckpointError when missing, damaged or of other public facts."""
        try:
            kept = json.loads(Path(path).read_text())
            coins = cls.__new__(cls)
            coins._key = bytes.fromhex(kept["key"])
            whole = len(coins._key) == 32 and kept["digest"] == coins._digest(kept["identity"])
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: there is no key to resume from; create one for a new run") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: damaged key file; the run cannot be resumed") from error
        if not whole:
            raise CheckpointError(f"{path}: damaged key file; the run cannot be resumed")
        if kept["identity"] != identity:
            raise CheckpointError(
                f"{path}: key of another run ({kept['identity']}, not {identity}); restore its scheme and owners"
            )
        return coins

    def _digest(self, identity: str) -> str:
        return hashlib.sha256(_LABEL + self._key + identity.encode()).hexdigest()

    def words(self, count: int, *address: int) -> np.ndarray:
        """``count`` uniform words of ``width`` bits, uint64; the same ones for the same address."""
        place = b"".join(part.to_bytes(8, "little") for part in address)
        return np.frombuffer(hashlib.shake_256(_LABEL + self._key + place).digest(8 * count), dtype="<u8")

    def __repr__(self) -> str:
        return "SecretCoins(<secret>)"

    def __reduce_ex__(self, protocol):
        raise TypeError("SecretCoins hold a secret key and cannot be pickled; save them with SecretCoins.create")


class SeededCoins:
    """Reproducible coins for tests and simulations: whoever knows the seed knows the batches.  No privacy."""

    width = 64

    def __init__(self, seed: int):
        self.seed = seed

    def words(self, count: int, *address: int) -> np.ndarray:
        """``count`` pseudo-random words of ``width`` bits, uint64; the same ones for the same address."""
        generator = np.random.default_rng([self.seed, len(address), *address])
        return generator.integers(0, 2**64 - 1, size=count, dtype=np.uint64, endpoint=True)


Coins = SecretCoins | SeededCoins


def subset(coins: Coins, probability: float | Fraction, size: int, *address: int) -> np.ndarray:
    """Ascending int64 indices of ``range(size)``, each present independently with exactly ``probability``.

    Walks from one present index to the next by geometric gaps, so the work grows with the result, not with ``size``.
    """
    probability = Fraction(probability)
    if probability == 1:
        return np.arange(size, dtype=np.int64)
    if probability == 0 or size == 0:
        return np.empty(0, dtype=np.int64)
    mean = size * float(probability)
    found, last = [], -1
    while last < size:
        places = last + np.cumsum(
            1 + gaps(coins, probability, int(mean + 4.0 * math.sqrt(mean)) + 1, size, *address, len(found))
        )
        found.append(places)
        last = int(places[-1])
    places = np.concatenate(found)
    return places[places < size]


# Error of the guess: logarithms within 4 ulp, a word or a probability rounded to float64; 2^-46 leaves a factor of 8.
_GUESS = 2.0**-46


def gaps(coins: Coins, probability: Fraction, count: int, limit: int, *address: int) -> np.ndarray:
    """``min(G, limit)``, int64 ``(count,)``, for independent geometric ``G``: ``P[G >= g] = (1 - probability)^g``.

    By inversion: ``G`` is the largest ``g`` with ``U <= (1 - probability)^g``, for a uniform real ``U`` of which the
    first word is drawn and further ones on demand.
    """
    failure = 1 - probability
    log = math.log1p(-float(probability)) if 2 * probability <= 1 else math.log(failure)
    words = coins.words(count, *address)
    start = words.astype(np.float64)
    scale = 2.0**coins.width
    with np.errstate(divide="ignore", over="ignore"):
        low, high = (np.minimum(np.log(u / scale) / log, 2.0 * limit) for u in (start + 1.0, start))
        first, last = (
            np.floor(np.clip(x + sign * _GUESS * (x + abs(1.0 / log)), 0.0, limit)).astype(np.int64)
            for x, sign in ((low, -1.0), (high, 1.0))
        )
    for i in np.flatnonzero(first < last):
        first[i] = _exact_gap(int(words[i]), coins, failure, int(first[i]), int(last[i]), *address, int(i))
    return first


def _exact_gap(n: int, coins: Coins, failure: Fraction, first: int, last: int, *address: int) -> int:
    """The largest ``g`` of ``[first, last]`` with ``U <= failure^g``, ``U`` starting with the word ``n``."""
    known = coins.width

    def reached(g: int) -> bool:
        nonlocal n, known
        while True:
            guard = 64 + g.bit_length()
            low, high = _power(failure, g, known + guard)
            if n + 1 << guard <= low:
                return True
            if n << guard >= high:
                return False
            n = n << coins.width | int(coins.words(1, *address, known)[0])
            known += coins.width

    while first < last:
        middle = (first + last + 1) // 2
        if reached(middle):
            first = middle
        else:
            last = middle - 1
    return first


def _power(base: Fraction, exponent: int, bits: int) -> tuple[int, int]:
    """Integers ``(low, high)`` with ``low <= base^exponent * 2^bits <= high``, for ``base`` in [0, 1]."""
    low = high = 1 << bits
    square_low, rest = divmod(base.numerator << bits, base.denominator)
    square_high = square_low + (rest > 0)
    while exponent:
        if exponent & 1:
            low, high = low * square_low >> bits, -(-high * square_high >> bits)
        square_low, square_high = square_low * square_low >> bits, -(-square_high * square_high >> bits)
        exponent >>= 1
    return low, high


def uniform(coins: Coins, bound: int, size: int, *address: int) -> np.ndarray:
    """Independent uniform integers of ``range(bound)``, int64 ``(size,)``: words beyond a multiple are drawn again."""
    values = coins.words(size, *address, 0).copy()
    largest = np.uint64(2**coins.width - 2**coins.width % bound - 1)
    turn = 0
    while (bad := np.flatnonzero(values > largest)).size:
        turn += 1
        values[bad] = coins.words(len(bad), *address, turn)
    values %= np.uint64(bound)
    return values.view(np.int64)


def choose(coins: Coins, items: np.ndarray, size: int, *address: int) -> np.ndarray:
    """A uniform subset of ``size`` of the items, in their order: those with the smallest words, all words distinct."""
    turn = 0
    while True:
        keys = coins.words(len(items), *address, turn)
        if len(np.unique(keys)) == len(keys):
            return items[np.sort(np.argsort(keys)[:size])]
        turn += 1
