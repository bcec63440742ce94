"""Backends side by side on the same training run: width, time, memory, rigour, and the best attack as the floor.

Every cell of a comparison runs in a process of its own and leaves an envelope behind, so that its memory is its own,
an interrupted comparison goes on where it stopped, and a cell that fails or takes too long costs only itself.
A comparison is for looking at, not for releases: its limits of time depend on the machine.  Everything it writes is
PRIVATE.

Guarantee: every sound box contains every attack's result and meets every other sound box, or the comparison ends with
an error that names the two.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from certify._siblings import require
from certify.attack import EnvelopeViolation, attacked_ends
from certify.checkpoint import identity
from certify.driver import check_radii, prepare, run
from certify.envelope import SUFFIX, Envelope, read, write, write_atomically
from certify.errors import CertdpError
from certify.recipe import Recipe
from certify.windows import Method

require("models", "solvers")

from models.errors import ModelError  # noqa: E402
from models.ir import Graph  # noqa: E402
from solvers.errors import SolverError  # noqa: E402

RESULTS = "compare.json"
#: Called with (what, done, in all): steps of a cell by its name, or attacks.
Progress = Callable[[str, int, int], None]
#: At most so many parameters are attacked, spread over the vector.
_ATTACKED = 16
_ATTACK = "attack"
#: Seconds that the process of a cell may take to end once it has answered.
_FAREWELL = 10.0


@dataclass(frozen=True)
class Cell:
    """One backend with one ``F``: what it took and gave.  PRIVATE.

    ``status``: "done"; "refused" (the backend cannot or will not, ``note`` says why); "stopped" (over the limit of
    time, with ``steps`` done).  ``seconds`` and ``bytes`` (peak memory) of its process.
    """

    method: Method
    status: str
    seconds: float
    bytes: int
    steps: int
    note: str = ""

    @property
    def name(self) -> str:
        return name_of(self.method)


def name_of(method: Method) -> str:
    """A method as the stem of a file name."""
    parts = [method.backend]
    if method.F is not None:
        parts.append("F" + (str(method.F) if isinstance(method.F, int) else ".".join(map(str, method.F))))
    if method.stride is not None:
        parts.append(f"stride{method.stride}")
    return "-".join(parts)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Cells with their envelopes (None where there is none) and the ends ``(K, P)`` that attacks reached.  PRIVATE."""

    radii: tuple[int, ...]
    cells: tuple[Cell, ...]
    envelopes: tuple[Envelope | None, ...]
    reached_lower: np.ndarray
    reached_upper: np.ndarray
    retrainings: int


def compare(
    graph: Graph,
    recipe: Recipe,
    features: np.ndarray,
    targets: np.ndarray,
    radii: Sequence[int],
    methods: Sequence[Method],
    folder: str | Path,
    *,
    threads: int = 1,
    limit: float | None = None,
    retrainings: int = 8,
    resume: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Run every method and the attacks; results lie in ``folder`` (PRIVATE) as they come.

    ``features``, ``targets``: as for `certify.run`.  ``limit``: seconds a cell may take.  ``retrainings``: runs of the
    guided attack for each of up to 16 parameters, each direction and radius; 0 for none.  ``resume``: keep what
    ``folder`` holds.  Raises EnvelopeViolation where a sound box misses an attack or another sound box, CertdpError for
    a folder that holds another comparison.
    """
    problem = prepare(graph, recipe, features, targets)
    radii = check_radii(radii, problem.schedule.slots)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"recipe": recipe.to_dict(), "radii": list(radii), "graph": problem.graph.digest}
    arrays = [problem.records.features, problem.records.targets]
    results = _Results(folder / RESULTS, facts, arrays, resume)
    cells: list[Cell] = []
    for method in methods:
        cell = results.cells.get(name_of(method))
        if cell is None or (cell.status == "stopped" and (limit is None or limit > cell.seconds)):
            cell = _measure(method, (graph, recipe, features, targets, radii, threads), folder, limit, resume, progress)
        cells.append(cell)
        results.keep(cell)
    envelopes = tuple(read(folder / f"{c.name}{SUFFIX}") if c.status == "done" else None for c in cells)
    size = problem.graph.initial().size
    spread = np.unique(np.linspace(0, size - 1, min(size, _ATTACKED)).astype(int))
    lower, upper, count = attacked_ends(
        problem, radii, spread if retrainings else (), retrainings=max(1, retrainings),
        progress=None if progress is None else lambda done, total: progress(_ATTACK, done, total),
    )  # fmt: skip
    _contain(cells, envelopes, lower, upper)
    _meet(cells, envelopes)
    return Comparison(radii, tuple(cells), envelopes, lower, upper, count)


def _measure(method: Method, inputs: tuple, folder: Path, limit, resume: bool, progress: Progress | None) -> Cell:
    """One cell in its own process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    name = name_of(method)
    process = context.Process(target=_work, args=(theirs, method, inputs, folder / name, resume), daemon=True)
    process.start()
    theirs.close()
    started, steps, total = time.monotonic(), 0, 0
    try:
        while True:
            left = None if limit is None else limit - (time.monotonic() - started)
            if left is not None and left <= 0.0 or not ours.poll(left):
                note = f"over the limit of {limit:g} s after {steps} of {total} steps"
                return Cell(method, "stopped", time.monotonic() - started, 0, steps, note)
            try:
                kind, *found = ours.recv()
            except EOFError:
                process.join()
                raise CertdpError(
                    f"{name}: its process ended with code {process.exitcode}; if memory ran out, choose a smaller F"
                ) from None
            if kind == "step":
                steps, total = found
                if progress is not None:
                    progress(name, steps, total)
                continue
            process.join(_FAREWELL)
            if kind == "refused":
                return Cell(method, "refused", time.monotonic() - started, 0, steps, found[0])
            seconds, peak = found
            return Cell(method, "done", seconds, peak, steps)
    finally:
        process.terminate()
        process.join()


def _work(results: Connection, method: Method, inputs: tuple, base: Path, resume: bool) -> None:
    """The process of a cell."""
    graph, recipe, features, targets, radii, threads = inputs
    checkpoint = base.with_name(base.name + ".checkpoint.safetensors")
    try:
        envelope = run(
            graph, recipe, features, targets, radii, threads=threads,
            checkpoint=checkpoint, resume=resume and checkpoint.exists(),
            progress=lambda done, total, _: results.send(("step", done, total)),
            **{name: getattr(method, name) for name in method.__dataclass_fields__},
        )  # fmt: skip
    except (CertdpError, ModelError, SolverError) as error:
        results.send(("refused", str(error)))
        return
    write(base.with_name(base.name + SUFFIX), envelope)
    checkpoint.unlink(missing_ok=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux, bytes on macOS
    results.send(("done", envelope.metadata.wall_time_s, peak if sys.platform == "darwin" else 1024 * peak))


def _contain(cells: Sequence[Cell], envelopes: Sequence[Envelope | None], low: np.ndarray, high: np.ndarray) -> None:
    """Sound boxes contain what attacks reach."""
    for cell, envelope in zip(cells, envelopes, strict=True):
        if envelope is not None and envelope.metadata.capabilities.sound:
            lower, upper = envelope.stacked()
            if (low < lower).any() or (high > upper).any():
                raise EnvelopeViolation(f"{cell.name}: an attack leaves its box, which claims to be sound; report this")


def _meet(cells: Sequence[Cell], envelopes: Sequence[Envelope | None]) -> None:
    """Sound boxes of the same radius have the reachable set in common."""
    sound = [(c, e) for c, e in zip(cells, envelopes, strict=True) if e is not None and e.metadata.capabilities.sound]
    for i, (one, first) in enumerate(sound):
        for two, second in sound[:i]:
            (a, b), (c, d) = first.stacked(), second.stacked()
            if (a > d).any() or (c > b).any():
                raise EnvelopeViolation(f"{one.name}, {two.name}: both claim to be sound, but their boxes do not meet")


class _Results:
    """The file that keeps finished cells; tied to one comparison by a keyed digest."""

    def __init__(self, path: Path, facts: dict, arrays: Sequence[np.ndarray], resume: bool):
        self.path, self.cells = path, {}
        self._salt = os.urandom(16)
        if resume and path.exists():
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))
                self._salt, digest = bytes.fromhex(saved["salt"]), saved["identity"]
                found = [Cell(**{**row, "method": Method(**row["method"])}) for row in saved["cells"]]
            except (ValueError, KeyError, TypeError) as error:
                raise CertdpError(f"{path}: damaged results ({error}); delete it and run again") from error
            if digest != identity(self._salt, facts, arrays):
                raise CertdpError(f"{path}: results of another comparison (model, data, recipe or radii differ); "
                                  "give another folder, or run without --resume")  # fmt: skip
            self.cells = {c.name: c for c in found}
        self._identity = identity(self._salt, facts, arrays)

    def keep(self, cell: Cell) -> None:
        self.cells[cell.name] = cell
        rows = [{**asdict(c), "method": c.method.facts()} for c in self.cells.values()]
        saved = {"private": True, "salt": self._salt.hex(), "identity": self._identity, "cells": rows}
        write_atomically(self.path, json.dumps(saved, indent=1).encode())
