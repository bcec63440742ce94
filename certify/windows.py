"""The windows of a run: which steps a backend sees at once, and the boxes it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from certify._siblings import require
from certify.errors import CertdpError, RecipeError

require("models", "solvers")

from solvers import BACKENDS, Boxes, Options  # noqa: E402


@dataclass(frozen=True)
class Method:
    """How training is bounded; public, fixed before the run.

    ``F``: concretisation frequency, the steps of a window, or a list of window lengths with the last repeated.  In all
    steps of a window the *same* ``k`` records differ, so longer windows are tighter and cost more.  Default: an epoch
    of minibatches where memory allows, else one step.  ``stride``: how many new steps every window but the first
    bounds; the others are the steps before them once more.  Default ``F``: windows do not overlap.  ``solver``,
    ``tau``, ``force``: see `solvers.Options`.  ``relational``: keep a certificate of the difference of neighbouring
    runs beside the boxes (`solvers.relational`); None: where the model, the loss and the recipe allow it and the public
    sizes make it cheap.
    """

    backend: str = "ibp"
    F: int | Sequence[int] | None = None
    stride: int | None = None
    solver: str = "highs"
    tau: float | None = None
    force: bool = False
    relational: bool | None = None

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise CertdpError(f"backend: found {self.backend!r}; there are: {', '.join(BACKENDS)}")
        if self.F is not None and not isinstance(self.F, int):
            object.__setattr__(self, "F", tuple(self.F))
        lengths = (self.F,) if isinstance(self.F, int) else self.F
        if lengths is not None and (not lengths or any(type(f) is not int or f < 1 for f in lengths)):
            raise RecipeError(f"F: found {self.F!r}; a window has at least one step")
        if self.stride is not None:
            if lengths is None:
                raise RecipeError("stride: overlapping windows need F, the steps of a window; give both")
            least = min(lengths[1:] or lengths)
            if type(self.stride) is not int or not 1 <= self.stride <= least:
                raise RecipeError(f"stride: found {self.stride!r}; a window bounds 1 to F = {least} new steps")

    def options(self, threads: int, progress: Callable[[Boxes], None] | None = None) -> Options:
        return Options(threads, self.solver, self.tau, self.force, progress)

    def facts(self) -> dict:
        """Everything that determines the result, as JSON."""
        F = list(self.F) if isinstance(self.F, tuple) else self.F
        kept = {"backend": self.backend, "F": F, "stride": self.stride, "solver": self.solver, "tau": self.tau}
        return {**kept, "relational": self.relational}


class Span(NamedTuple):
    """A window over steps ``start .. stop - 1``, of which those before ``known`` are bounded already."""

    start: int
    known: int
    stop: int


def spans(steps: int, F: int | Sequence[int], stride: int | None = None) -> Iterator[Span]:
    """The windows of a run: ``F`` steps each (or these lengths, the last repeated), all but the first moved on by
    ``stride``."""
    lengths = [F] if isinstance(F, int) else list(F)
    start = known = 0
    while known < steps:
        stop = min(steps, start + lengths[0])
        yield Span(start, known, stop)
        known, lengths = stop, lengths[1:] or lengths
        start = known if stride is None else max(0, min(steps, known + stride) - lengths[0])


class Trail:
    """The boxes after the latest steps, as many as windows to come may need; PRIVATE."""

    def __init__(self, step: int, boxes: Sequence[Boxes]):
        self.step = step
        self.boxes = tuple(boxes)

    @property
    def last(self) -> Boxes:
        return self.boxes[-1]

    def since(self, start: int) -> tuple[Boxes, ...]:
        """The boxes after steps ``start .. self.step``."""
        return self.boxes[start - self.step - 1 :]

    def then(self, found: Sequence[Boxes], keep: int) -> Trail:
        """The trail after the steps of ``found``, at least the last ``keep`` of them."""
        return Trail(self.step + len(found), (*self.boxes, *found)[-max(keep, len(found)) :])

    def arrays(self) -> dict[str, np.ndarray]:
        """All boxes, stacked, for a checkpoint; NaN where only later boxes have a certificate."""
        found = {}
        for name in (f.name for f in fields(Boxes)):
            latest = getattr(self.last, name)
            if latest is not None:
                rows = [getattr(b, name) for b in self.boxes]
                found[name] = np.stack([np.full_like(latest, np.nan) if row is None else row for row in rows])
        return found

    @classmethod
    def restore(cls, step: int, arrays: dict[str, np.ndarray]) -> Trail:
        rows = zip(*arrays.values(), strict=True)
        return cls(step, [Boxes(**dict(zip(arrays, row, strict=True))) for row in rows])
