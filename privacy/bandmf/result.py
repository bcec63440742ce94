"""What an accountant returns: never a bare number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaBound:
    """``delta`` at one ``epsilon``: the true value lies in ``[lower, upper]`` except with ``failure_probability``.

    ``estimate`` is a point estimate, no guarantee.  ``failure_probability`` 0 means a deterministic bound.
    ``direction`` is "remove" (data set with the example against without), "add", or "both" (the larger).  ``method``
    says how it was found ("exact", "renyi", "tilted monte carlo", "monte carlo"); ``samples``
    and ``seconds`` say what it took.
    """

    epsilon: float
    estimate: float
    lower: float
    upper: float
    failure_probability: float
    direction: str
    method: str
    samples: int = 0
    seconds: float = 0.0
