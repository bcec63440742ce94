"""The options that say how training is bounded, shared by the commands that certify."""

from __future__ import annotations

from typing import Annotated

import typer

from certify.errors import CertdpError

Backend = Annotated[str, typer.Option(help="Bounding backend; `certdp solvers` lists them.")]
Frequency = Annotated[
    str | None,
    typer.Option(
        "--F",
        help="Concretisation frequency: steps a window, or lengths with commas.  The same k records differ in all "
        "steps of a window.  Default: an epoch of minibatches, or one full-batch step.",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(help="New steps a window bounds; windows of F steps then overlap.  Tighter, and costs more."),
]
Solver = Annotated[str, typer.Option(help="Solver of the lp, milp and miqcp backends.")]
Tau = Annotated[
    float | None, typer.Option(help="Public tolerance of bounds from a solver, in units of the parameters.")
]
Force = Annotated[bool, typer.Option("--force", help="Go on with programs that are estimated to be hopeless.")]
Relational = Annotated[
    bool | None,
    typer.Option(
        "--relational/--no-relational",
        help="Keep a certificate of the difference of neighbouring runs.  Default: where it exists and is cheap.",
    ),
]


def method(frequency: str | None, **fields):
    """The fields of `certify.windows.Method`."""
    return {"F": None if frequency is None else lengths(frequency), **fields}


def lengths(text: str) -> int | list[int]:
    """`--F`: a number of steps, or numbers with commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise CertdpError(f"F: found {text!r}; a number of steps, or numbers with commas, is accepted") from None
    return found[0] if len(found) == 1 else found
