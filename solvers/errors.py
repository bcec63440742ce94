"""Errors of the solver layer: one clear sentence each (the CLI turns them into exit code 2)."""


class SolverError(ValueError):
    """A window cannot be bounded as asked; the message names what was found and what to do."""


class SolverMissingError(SolverError):
    """A solver that is not installed, or cannot do what was asked of it."""


class SolverFailureError(SolverError):
    """A solver ended without a usable bound: failure, time-out, or infeasibility of a program that has solutions."""


class ProgramSizeError(SolverError):
    """A program too large to be solved in sensible time; its estimated size is in the message."""


class UnsupportedWindowError(SolverError):
    """A model, loss or recipe that this backend has no formulation for."""
