"""Independent work units over any `concurrent.futures.Executor`: retried when lost, stored when finished.

A unit is a number; what it computes depends on that number alone (seeds are derived from it), so results are the same
for every executor, number of workers, retry and interruption.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from hashlib import sha256
from pathlib import Path

import numpy as np

from certify.errors import CertdpError, CheckpointError, PrivacyError

IN_FLIGHT = 1024
_MAGIC = b"certdp units 1\n"
_RECORD = struct.Struct("<qqI")  # unit, number of float64 values, CRC-32 of both and of the values


class UnitStore:
    """Finished units in one append-only file, bound to what they compute.

    ``description``: any text that determines every unit's result; a file written for another one is refused.
    A record that was cut off by an interruption is dropped when the file is opened.

    Errors: CheckpointError for a file that is damaged or belongs to other work.
    """

    def __init__(self, path: Path, description: str):
        self.path = Path(path)
        self.finished: dict[int, np.ndarray] = {}
        header = _MAGIC + sha256(description.encode()).digest()
        if not self.path.exists():
            self.path.write_bytes(header)
            return
        content = self.path.read_bytes()
        if len(content) < len(header) and header.startswith(content):
            self.path.write_bytes(header)
            return
        if not content.startswith(header):
            raise CheckpointError(f"{self.path}: holds results of other work or is damaged; name another file")
        at = len(header)
        while at + _RECORD.size <= len(content):
            unit, count, check = _RECORD.unpack_from(content, at)
            end = at + _RECORD.size + 8 * count
            if count < 0 or end > len(content):
                break
            values = content[at + _RECORD.size : end]
            if zlib.crc32(struct.pack("<qq", unit, count) + values) != check:
                raise CheckpointError(f"{self.path}: the record at byte {at} is damaged; remove the file")
            self.finished[unit] = np.frombuffer(values, "<f8").astype(np.float64)
            at = end
        if at < len(content):
            os.truncate(self.path, at)

    def add(self, unit: int, values: np.ndarray) -> None:
        """Append a finished unit and flush it to the disk."""
        values = np.ascontiguousarray(values, "<f8").tobytes()
        count = len(values) // 8
        check = zlib.crc32(struct.pack("<qq", unit, count) + values)
        with open(self.path, "ab") as file:
            file.write(_RECORD.pack(unit, count, check) + values)
            file.flush()
            os.fsync(file.fileno())


def run_units(
    function: Callable[[int], np.ndarray],
    units: Sequence[int],
    *,
    executor: Executor | Callable[[], Executor] | None = None,
    store: UnitStore | None = None,
    attempts: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> list[np.ndarray]:
    """``[function(unit) for unit in units]``, computed by ``executor``.

    ``function`` must be deterministic (and picklable for processes and clusters) and return float64 (any length,).
    ``executor``: an executor, which stays open; a function that makes one (``ProcessPoolExecutor``, or a partial of
    it), called again when workers die; None: threads on all cores.  A unit that fails is tried ``attempts`` times in
    all, and an executor may break as often in a row without a unit finished; errors of certdp are not retried.
    ``store``: units found there are not computed, finished ones are added.  ``progress(done, total)`` is called after
    every unit.

    Guarantees:
    * results do not depend on the executor: order, workers, lost workers and interruptions change nothing.

    Errors: PrivacyError when a unit failed ``attempts`` times, or a given executor broke; finished units are stored.
    """
    done = {} if store is None else {unit: store.finished[unit] for unit in units if unit in store.finished}
    waiting = [unit for unit in reversed(units) if unit not in done]
    failures = dict.fromkeys(waiting, 0)
    breaks = 0
    make = _threads if executor is None else executor if callable(executor) else None
    pool = make() if make else executor
    running: dict[Future, int] = {}
    try:
        while waiting or running:
            broken = None
            while waiting and len(running) < IN_FLIGHT and broken is None:
                try:
                    running[pool.submit(function, waiting[-1])] = waiting[-1]
                    waiting.pop()
                except BrokenExecutor as error:
                    broken = error
            finished, _ = wait(running, return_when=FIRST_COMPLETED) if running else ((), ())
            for future in finished:
                unit = running.pop(future)
                error = future.exception()
                if error is None:
                    done[unit] = np.asarray(future.result(), np.float64)
                    breaks = 0
                    if store is not None:
                        store.add(unit, done[unit])
                    if progress is not None:
                        progress(len(done), len(units))
                elif isinstance(error, CertdpError):
                    raise error
                elif isinstance(error, BrokenExecutor):
                    broken = error
                    waiting.append(unit)
                else:
                    failures[unit] += 1
                    if failures[unit] >= attempts:
                        raise PrivacyError(
                            f"unit {unit}: failed {attempts} times, at last with {error!r}; mend that and run again"
                        ) from error
                    waiting.append(unit)
            if broken is not None:
                breaks += 1
                if make is None or breaks >= attempts:
                    raise PrivacyError(
                        f"executor: broke {breaks} times in a row ({broken!r}); "
                        + ("give workers more memory" if make else "pass a function that makes one")
                    ) from broken
                waiting.extend(running.values())
                running.clear()
                pool.shutdown(wait=False, cancel_futures=True)
                pool = make()
    finally:
        for future in running:
            future.cancel()
        if make:
            pool.shutdown(wait=True, cancel_futures=True)
    return [done[unit] for unit in units]


class KeptPool:
    """A maker of executors for `run_units` that hands out the same one again until it breaks; `close` it at the end."""

    def __init__(self, make: Callable[[], Executor]):
        self._make, self._pool = make, None

    def __call__(self) -> Executor:
        if self._pool is None:
            self._pool = self._make()
        return _Lent(self)

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class _Lent(Executor):
    """The pool of a `KeptPool`; a shutdown that waits gives it back, one that does not discards it."""

    def __init__(self, owner: KeptPool):
        self._owner = owner

    def submit(self, function, /, *args, **kwargs):
        return self._owner._pool.submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not wait:
            self._owner._pool.shutdown(wait=False, cancel_futures=cancel_futures)
            self._owner._pool = None


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count())
