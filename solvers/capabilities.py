"""What each backend promises.  Code asks this table, never a backend's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendCapabilities:
    """``sound``: property (S).  ``monotone``: property (M), for the numbers produced.  ``rigour``: how rounding is met.

    ``solvers``: those it can use (empty: it needs none).  ``tau`` is the public ladder step of property (M) where it
    rests on a solver's tolerance (0 where it does not).
    """

    name: str
    sound: bool
    monotone: bool
    rigour: str
    tau: float
    summary: str
    solvers: tuple[str, ...] = ()


BACKENDS: dict[str, BackendCapabilities] = {
    "ibp": BackendCapabilities(
        name="ibp",
        sound=True,
        monotone=True,
        rigour="rigorous",
        tau=0.0,
        summary="interval bound propagation; the same records differ in a window; exact sums, outward rounding",
    ),
    "linear": BackendCapabilities(
        name="linear",
        sound=True,
        monotone=True,
        rigour="rigorous",
        tau=0.0,
        summary="ibp with linear bounds behind ReLU layers; tighter from the second hidden layer on",
    ),
    "crown": BackendCapabilities(
        name="crown",
        sound=True,
        monotone=False,
        rigour="rigorous",
        tau=0.0,
        summary="ibp with adaptive CROWN behind ReLU layers; for analysis, no private release",
    ),
}
