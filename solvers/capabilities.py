"""What each backend promises.  Code asks this table, never a backend's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendCapabilities:
    """``sound``: property (S).  ``monotone``: property (M), for the numbers produced.  ``rigour``: how rounding is met.

    ``solvers``: those it can use (empty: it needs none).  ``tau`` is the public ladder step of property (M) where it
    rests on a solver's tolerance, in units of what one record can do in one step (0 where it does not).
    ``relational``: its boxes come with `Boxes.difference`.
    """

    name: str
    sound: bool
    monotone: bool
    rigour: str
    tau: float
    summary: str
    relational: bool = False
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
    "meanvalue": BackendCapabilities(
        name="meanvalue",
        sound=True,
        monotone=True,
        rigour="rigorous",
        tau=0.0,
        summary="ibp with interval Jacobians; linear heads and smooth networks of one hidden layer",
    ),
    "relational": BackendCapabilities(
        name="relational",
        sound=True,
        monotone=True,
        rigour="rigorous",
        tau=0.0,
        summary="meanvalue with bounds of the difference of neighbouring runs, and boxes chained from them",
        relational=True,
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
    "lp": BackendCapabilities(
        name="lp",
        sound=True,
        monotone=True,
        rigour="rigorous",
        tau=2.0**-12,
        summary="linear programs over windows of steps, linear models and ReLU networks; bounds proven from duals",
        solvers=("highs", "cbc", "glpk", "gurobi"),
    ),
    "milp": BackendCapabilities(
        name="milp",
        sound=True,
        monotone=True,
        rigour="tolerance",
        tau=2.0**-12,
        summary="lp with binaries for clips, ReLU states and replaced records; bounds are the solver's own",
        solvers=("highs", "scip", "gurobi"),
    ),
    "miqcp": BackendCapabilities(
        name="miqcp",
        sound=True,
        monotone=True,
        rigour="tolerance",
        tau=2.0**-12,
        summary="milp with the exact products of a network's parameters and values; tiny networks",
        solvers=("scip", "gurobi"),
    ),
}
