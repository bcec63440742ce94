"""What each backend promises.  Code asks this table, never a backend's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendCapabilities:
    """``sound``: property (S).  ``monotone``: property (M), for the numbers produced.  ``rigour``: how rounding is met.

    ``tau`` is the public ladder step of property (M) where it rests on a solver's tolerance (0 where it does not).
    """

    name: str
    sound: bool
    monotone: bool
    rigour: str
    tau: float
    summary: str


BACKENDS: dict[str, BackendCapabilities] = {
    "ibp": BackendCapabilities(
        name="ibp",
        sound=True,
        monotone=True,
        rigour="rigorous",
        tau=0.0,
        summary="interval bound propagation; the same records differ in a window; exact sums, outward rounding",
    ),
}
