"""A run of the noise stream that kills itself where it is told to: ``python bandmf_run.py FOLDER POINT STEP``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from privacy.bandmf.noise import Journal, NoiseStream
from privacy.bandmf.strategy import Strategy

STEPS = 12
POINTS = [
    "before the journal",
    "before the noise",
    "before the release is seen",
    "before the state is saved",
    "while the state is saved",
]


def new_stream(folder: Path, steps: int = STEPS, scale: float = 1.0, last: float = 0.25) -> NoiseStream:
    strategy = Strategy.toeplitz([1.0, 0.5, 0.375, last], steps)
    return NoiseStream(strategy, [(3,), (2, 2)], scale, Journal(folder / "rows.journal"))


def data(step: int, version: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng([step, version])
    return [rng.normal(size=3), rng.normal(size=(2, 2))]


def flat(arrays) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in arrays])


def main(folder: Path, point: str, at: int) -> None:
    def die(here: str, step: int) -> None:
        if (here, step) == (point, at):
            os.kill(os.getpid(), signal.SIGKILL)

    claim = Journal.claim

    def watched(self, row, sums):
        die("before the journal", row)
        claim(self, row, sums)
        die("before the noise", row)

    Journal.claim = watched
    stream = new_stream(folder)
    if (folder / "state.npz").exists():
        with np.load(folder / "state.npz") as file:
            rings = [file["a"], file["b"]]
            stream.load_state_dict({"run": str(file["run"]), "step": int(file["step"]), "rings": rings})
    while stream.step < STEPS:
        step = stream.step
        noisy = flat(stream.release(data(step)))
        die("before the release is seen", step)
        with open(folder / "seen.txt", "a") as file:
            print(step, noisy.tobytes().hex(), file=file)
        die("before the state is saved", step)
        if step % 3 == 2:
            state = stream.state_dict()
            with open(folder / "state.tmp", "wb") as file:
                np.savez(file, run=state["run"], step=state["step"], a=state["rings"][0], b=state["rings"][1])
                die("while the state is saved", step)
            os.replace(folder / "state.tmp", folder / "state.npz")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
