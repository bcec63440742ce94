"""Checkpoints: everything needed to go on after an interruption, bit for bit.

A checkpoint is PRIVATE DATA like the envelope it leads to.  It is written to a temporary file and moved into place,
so a kill at any moment leaves the previous one or the new one, never half of one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from certify.envelope import write_atomically
from certify.errors import CheckpointError
from certify.windows import Trail

_KEY = "certdp-checkpoint"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """State after some steps: the trail of boxes, mean widths ``(steps so far + 1, K)``, seconds so far."""

    trail: Trail
    widths: np.ndarray
    seconds: float


def identity(salt: bytes, facts: dict, arrays: Sequence[np.ndarray]) -> str:
    """A keyed digest of everything that determines a run; without the salt it tells nothing of the arrays."""
    mac = hmac.new(salt, json.dumps(facts, sort_keys=True).encode(), hashlib.sha256)
    for array in arrays:
        mac.update(str(array.shape).encode())
        mac.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
    return mac.hexdigest()


class CheckpointFile:
    """One checkpoint on disk, tied to one run.

    ``facts`` are the run's public facts, ``arrays`` everything else that determines its result: the data.  They are
    compared through a digest under a random key kept in the checkpoint itself.
    """

    def __init__(self, path: str | Path, facts: dict, arrays: list[np.ndarray]):
        self.path = Path(path)
        self._facts = facts
        self._arrays = arrays
        self._salt = os.urandom(32)
        self._digest: str | None = None

    def save(self, state: Checkpoint) -> None:
        if self._digest is None:
            self._digest = identity(self._salt, self._facts, self._arrays)
        metadata = {
            "step": state.trail.step,
            "seconds": state.seconds,
            "salt": self._salt.hex(),
            "identity": self._digest,
        }
        tensors = {**state.trail.arrays(), "widths": state.widths}
        tensors = {name: np.ascontiguousarray(value, dtype=np.float64) for name, value in tensors.items()}
        write_atomically(self.path, safetensors.numpy.save(tensors, {_KEY: json.dumps(metadata)}))

    def load(self) -> Checkpoint:
        """The saved state; raises CheckpointError when it is missing, damaged or of another run."""
        if not self.path.exists():
            raise CheckpointError(f"{self.path}: there is no checkpoint to resume from; run without --resume")
        try:
            with safe_open(self.path, "numpy") as file:
                metadata = json.loads(file.metadata()[_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                widths = tensors.pop("widths")
                state = Checkpoint(Trail.restore(int(metadata["step"]), tensors), widths, float(metadata["seconds"]))
            salt, digest = bytes.fromhex(metadata["salt"]), metadata["identity"]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: damaged checkpoint ({error}); delete it and run again") from error
        if not hmac.compare_digest(digest, identity(salt, self._facts, self._arrays)):
            raise CheckpointError(
                f"{self.path}: checkpoint of another run (model, data, recipe or radii differ); "
                "restore them, or delete the checkpoint and run again"
            )
        self._salt, self._digest = salt, digest
        return state

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
