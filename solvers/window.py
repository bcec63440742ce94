"""A training window as a value: what is to be bounded, and nothing about how.

Every backend is a function from a window to boxes.  None of them knows of files, progress bars or privacy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.ir import Graph
from models.losses import Loss
from models.ops import Interval

ADJACENCIES = ("replace-one", "zero-out")


@dataclass(frozen=True, eq=False)
class Step:
    """One step: the public slots of its batch (int64, no duplicates) and its public learning rate."""

    batch: np.ndarray
    learning_rate: float


@dataclass(frozen=True, eq=False)
class Records:
    """The private records: features ``(F, R)`` and prepared targets ``(O, R)``, float64, one column a slot.

    ``present`` ``(R,)`` bool says which of these slots are filled (None: all).  Slots ``R .. slots-1`` are empty.
    An empty slot's gradient is zero.
    """

    features: np.ndarray
    targets: np.ndarray
    slots: int
    present: np.ndarray | None = None

    def places(self, batch: np.ndarray) -> np.ndarray:
        """Where in ``batch`` the slots are that hold a record."""
        places = np.flatnonzero(batch < self.features.shape[1])
        return places if self.present is None else places[self.present[batch[places]]]

    def filled(self, batch: np.ndarray) -> np.ndarray:
        """The slots of ``batch`` that hold a record."""
        return batch[self.places(batch)]

    def tile(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features ``(F, n)`` and targets ``(O, n)`` of some filled slots, contiguous."""
        return np.ascontiguousarray(self.features[:, slots]), np.ascontiguousarray(self.targets[:, slots])


@dataclass(frozen=True, eq=False)
class Boxes:
    """The nominal parameters ``(P,)`` and one box a radius: ``lower`` and ``upper`` ``(K, P)``, float64.

    The box of radius 0 is the nominal point; it is not among the ``K`` rows unless 0 is among the radii.

    ``difference`` ``(K, C, P)`` (relational certificate, where one is kept): ``[j, c]`` bounds, in absolute value, the
    difference of two neighbouring runs within radius ``radii[j]`` of the data set whose differing slot has class ``c``.

    ``length`` ``(K, C)`` (relational certificate): bounds of the Euclidean length of that difference.
    """

    nominal: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    difference: np.ndarray | None = None
    length: np.ndarray | None = None

    @classmethod
    def point(cls, theta: np.ndarray, radii: int) -> Boxes:
        """Every radius at the same point: where training starts."""
        return cls(theta.copy(), np.tile(theta, (radii, 1)), np.tile(theta, (radii, 1)))

    @property
    def width(self) -> np.ndarray:
        """Mean width over the parameters, ``(K,)``."""
        return (self.upper - self.lower).mean(axis=1)


@dataclass(frozen=True, eq=False)
class Window:
    """``F`` steps of clipped gradient training, the first of which may be bounded already.

    ``known[t]`` holds the boxes before step ``t``: those before the first step always, and, where windows overlap,
    those after steps that an earlier window has bounded.  A backend returns the boxes after every other step.
    Step: ``theta' = contraction * theta - (rate / normaliser) * sum_{i in batch} clip(gradient of record i)``, the clip
    elementwise to ``[-clip, clip]``.  ``radii`` are numbers of records of the data set that may differ (ascending).
    ``feature_range``: public ends ``(F, 1)`` of the prepared features of any record, replaced ones included, or None;
    ``target_range`` ``(1, 1)``: of the prepared target, for models of one output.
    ``classes`` ``(slots,)``: equal for slots that occur in the same steps of the whole run.
    Public: everything but ``records`` and ``known``, which are private.
    """

    graph: Graph
    loss: Loss
    records: Records
    steps: tuple[Step, ...]
    known: tuple[Boxes, ...]
    radii: tuple[int, ...]
    clip: float
    contraction: float
    normaliser: int
    adjacency: str = "replace-one"
    feature_range: Interval | None = None
    target_range: Interval | None = None
    classes: np.ndarray | None = None

    @property
    def boxes(self) -> Boxes:
        """Where the window starts."""
        return self.known[0]

    @property
    def fresh(self) -> range:
        """Indices of the steps that are to be bounded."""
        return range(len(self.known) - 1, len(self.steps))

    def __post_init__(self):
        if self.adjacency not in ADJACENCIES:
            raise ValueError(f"adjacency must be one of {ADJACENCIES}, got {self.adjacency!r}")
        if not (np.isfinite(self.clip) and self.clip > 0.0):
            raise ValueError(f"clip must be finite and positive, got {self.clip}")
        if not 1 <= len(self.known) <= len(self.steps) + 1:
            raise ValueError(f"known must hold 1 to {len(self.steps) + 1} boxes, got {len(self.known)}")
        if list(self.radii) != sorted(set(self.radii)) or (self.radii and self.radii[0] < 0):
            raise ValueError(f"radii must ascend from 0 or more, got {self.radii}")
