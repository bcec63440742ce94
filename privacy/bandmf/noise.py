"""The noise ``C^-1 Z``, row by row, in memory for ``bands`` rows.

``w_i = (z_i - sum_d C[i, i - d] w_(i - d)) / C[i, i]``: only the last ``bands - 1`` rows are needed.  (Where ``C^-1``
is banded, ``w_i`` is a moving average of ``z``.)  Every parameter tensor is a shard with a ring of its own.

**No row twice, no row lost.**  A row of noise protects one sum of gradients.  If an interrupted run added the same row
to another sum, the difference of the two releases would be free of noise; if it drew a fresh row for a step whose
release was already seen, the accountant would have counted one release too few.  Hence

* a row is a function of a secret key, its number and the shard, never of what was drawn before: a restart makes the
  same row for the same step, and nothing has to be saved at the right moment;
* noise is handed out only together with the data it protects (`NoiseStream.release`), and only after the row number
  and a keyed digest of the data have reached the disk (`Journal`, write-ahead).  After a crash anywhere between there
  and the next checkpoint, the steps are repeated: with the same data the same release comes out; with other
  data the stream refuses;
* the key lives in the journal alone, so that a state (`NoiseStream.state_dict`) is of no use without the record of what
  was released under that key; a state that knows more rows than the journal is refused as well.

Journal and state are PRIVATE (the key undoes all noise).  A copy of the journal that is put back later, or used on two
machines, cannot be recognised: keep one.

**Random source.**  Rows come from SHAKE-128 under a 256-bit key of the operating system's generator (128-bit security;
counter-based, so nothing can repeat), through the Box-Muller transform in float64.  These are normal variables
up to float64 rounding, not exact samples: the accountant's guarantee is for real numbers, and which low-order bits
are possible may depend on the data (Mironov 2012).  `privacy.sampling` avoids that for single releases at microseconds
per number, too slow for millions of parameters.  What is done instead is the usual remedy: noise is added in float64
to sums on a fixed grid, and a model in float32 sees the result rounded to its 24 bits.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from certify.errors import CheckpointError, PrivacyError
from privacy.bandmf.strategy import Strategy

_CHUNK = 1 << 20  # numbers per call of the generator


class SecureNormals:
    """Standard normals from SHAKE-128 under a secret 32-byte key.  Equal arguments give equal numbers."""

    def __init__(self, key: bytes):
        self._key = key

    def row(self, row: int, shard: int, count: int) -> np.ndarray:
        """Row number ``row`` of shard number ``shard``: float64 ``(count,)``."""
        found = np.empty(count)
        for chunk, start in enumerate(range(0, count, _CHUNK)):
            part = found[start : start + _CHUNK]
            place = b"certdp bandmf noise" + np.array([row, shard, chunk], dtype="<u8").tobytes()
            pairs = (len(part) + 1) // 2
            bits = np.frombuffer(hashlib.shake_128(self._key + place).digest(16 * pairs), dtype="<u8").reshape(2, pairs)
            part[:] = box_muller(bits).ravel()[: len(part)]
        return found


def box_muller(bits: np.ndarray) -> np.ndarray:
    """Independent standard normals ``(2, n)`` from uniform 64-bit words ``(2, n)``; the largest possible is 9.5."""
    radius = np.sqrt(-2.0 * np.log((bits[0].astype(np.float64) + 0.5) * 2.0**-64))
    angle = bits[1].astype(np.float64) * (2.0 * np.pi * 2.0**-64)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)])


class SeededNormals:
    """Reproducible rows for tests and experiments.  NOT private: whoever knows or guesses the seed knows the noise."""

    def __init__(self, seed: int):
        self._seed = seed

    def row(self, row: int, shard: int, count: int) -> np.ndarray:
        return np.random.default_rng([self._seed, row, shard]).standard_normal(count)


class Journal:
    """Which rows were released, each with a keyed digest of its data, on disk before the release.  PRIVATE.

    A SQLite file that only its owner may read; None keeps it in memory, for runs that are not meant to be restarted.
    Several processes may open it: a row still goes to one digest only.
    """

    def __init__(self, path: str | Path | None = None):
        self._path = ":memory:" if path is None else os.fspath(path)
        with self._explained():
            if path is not None:
                os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=30.0)
            self._db.execute("PRAGMA synchronous = EXTRA")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL)")
            self._db.execute("CREATE TABLE IF NOT EXISTS releases (row INTEGER PRIMARY KEY, digest BLOB NOT NULL)")
            self.key: bytes = self._fact("key", secrets.token_bytes(32))
            self._db.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise CheckpointError(
                f"{self._path}: cannot be read or written as a journal of noise rows ({error}); give the journal of "
                "this run, or a new path for a new run"
            ) from error

    def _fact(self, name: str, value: bytes) -> bytes:
        """The stored fact; the first value given is stored."""
        self._db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, value))
        return self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()[0]

    def bind(self, facts: str) -> str:
        """Tie the key to one run's public facts; a name of the pair comes back.  PrivacyError for other facts."""
        name = hmac.new(self.key, facts.encode(), hashlib.sha256).hexdigest()
        with self._explained():
            bound = self._fact("run", name.encode())
        if bound != name.encode():
            raise PrivacyError(
                f"{self._path}: belongs to a run with another strategy, noise scale or shapes of parameters; the same "
                "noise at two scales would cancel: give a new path for a new run"
            )
        return name

    @property
    def rows(self) -> int:
        """Number of rows that were released."""
        return self._db.execute("SELECT count(*) FROM releases").fetchone()[0]

    def claim(self, row: int, data: Sequence[np.ndarray]) -> None:
        """Record that ``row`` protects ``data``, durably; PrivacyError when it already protects other data."""
        mac = hmac.new(self.key, np.array([row], dtype="<u8").tobytes(), hashlib.blake2b)
        for array in data:
            mac.update(np.ascontiguousarray(array, dtype="<f8"))
        digest = mac.digest()
        with self._explained():
            self._db.execute("INSERT OR IGNORE INTO releases VALUES (?, ?)", (row, digest))
            first = self._db.execute("SELECT digest FROM releases WHERE row = ?", (row,)).fetchone()[0]
        if not hmac.compare_digest(first, digest):
            raise PrivacyError(
                f"step {row}: its noise was already released with other gradients; the same noise must not protect two "
                "sums: restore model, batches and checkpoint exactly as they were, or start a new run with a new budget"
            )


class NoiseStream:
    """Adds the rows of ``C^-1 Z`` to sums of clipped gradients, one step after the other.

    ``shapes``: of the parameter tensors, each a shard.  ``scale``: standard deviation of ``Z``, the noise multiplier
    times the clip norm.  ``source``: `SecureNormals` of the journal's key by default; `SeededNormals` in tests.

    Guarantees:
    * the noise is C^-1 Z, with the truncated and the normalised columns of ``C`` taken as they are;
    * a released row is never used for other data, whatever is restored or killed, as long as the journal is kept;
    * a repeated step repeats its release, bit for bit, and no row is skipped.
    """

    def __init__(
        self,
        strategy: Strategy,
        shapes: Sequence[tuple[int, ...]],
        scale: float,
        journal: Journal | None = None,
        source: SecureNormals | SeededNormals | None = None,
    ):
        if not (np.isfinite(scale) and scale > 0.0):
            raise PrivacyError(f"scale: found {scale!r}; the standard deviation of the noise is positive and finite")
        self.strategy, self.shapes, self.scale = strategy, [tuple(shape) for shape in shapes], float(scale)
        self._journal = Journal() if journal is None else journal
        self._source = SecureNormals(self._journal.key) if source is None else source
        matrix = hashlib.sha256(np.ascontiguousarray(strategy.columns, dtype="<f8"))
        if strategy.inverse is not None:
            matrix.update(np.ascontiguousarray(strategy.inverse, dtype="<f8"))
        self._run = self._journal.bind(json.dumps([matrix.hexdigest(), self.shapes, self.scale.hex()]))
        self.step = 0
        # One slot more than rows are read: the row of an interrupted step is written over, never read.
        slots = strategy.bands if strategy.inverse is None else len(strategy.inverse)
        self._rings = [np.zeros((slots, int(np.prod(shape)))) for shape in self.shapes]

    def release(self, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        """This step's noisy sums: float64, one array per shard.  ``sums``: arrays or CPU tensors, PRIVATE.

        May be published, that is what the budget pays.  Raises PrivacyError after the last step of the strategy, and
        when this step was already released with other sums.
        """
        if self.step >= self.strategy.steps:
            raise PrivacyError(
                f"step {self.step}: the strategy has {self.strategy.steps} steps, and the privacy of more was not "
                "accounted; stop here"
            )
        sums = [np.asarray(array, dtype=np.float64) for array in sums]
        if [array.shape for array in sums] != self.shapes:
            raise PrivacyError(f"sums: found shapes {[s.shape for s in sums]}; expected {self.shapes}")
        if not all(np.isfinite(array).all() for array in sums):
            raise PrivacyError("sums: found entries that are not finite; clip gradients before they are summed")
        self._journal.claim(self.step, sums)
        noise = [self._row(shard) for shard in range(len(sums))]
        self.step += 1
        return [array + row.reshape(array.shape) for array, row in zip(sums, noise, strict=True)]

    def _row(self, shard: int) -> np.ndarray:
        """This step's noise of one shard, ``(size,)``; its ring is brought up to date."""
        ring, i = self._rings[shard], self.step
        z = self._source.row(i, shard, ring.shape[1]) * self.scale
        moving_average = self.strategy.inverse is not None
        taps = self.strategy.inverse if moving_average else self.strategy.row(i)
        weights = np.zeros(len(ring))
        weights[(i - np.arange(1, len(ring))) % len(ring)] = taps[1:]
        past = weights @ ring
        w = taps[0] * z + past if moving_average else (z - past) / taps[0]
        ring[i % len(ring)] = z if moving_average else w
        return w

    def state_dict(self) -> dict:
        """All that a restart needs beside the journal: arrays and plain values.  PRIVATE."""
        return {"run": self._run, "step": self.step, "rings": [ring.copy() for ring in self._rings]}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a saved state.  Steps released since then may be repeated with the same data only."""
        if state["run"] != self._run:
            raise CheckpointError(
                "noise state: belongs to another journal, strategy, noise scale or shapes of parameters; give the "
                "journal that the state was saved with"
            )
        if state["step"] > self._journal.rows:
            raise CheckpointError(
                f"noise state: knows {state['step']} steps, the journal only {self._journal.rows}; an old copy of "
                "the journal must not be used: restore the one that belongs to the state"
            )
        self.step = int(state["step"])
        self._rings = [np.array(ring, dtype=np.float64) for ring in state["rings"]]
