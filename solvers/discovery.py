"""Which optimisation solvers there are, which of them are installed, and whether they work.

Nothing heavy is imported: a solver is found by its Python package's metadata or its executable.  Whether it really
solves what it should is found out by `try_solver`, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from solvers.errors import SolverMissingError

KINDS = ("lp", "milp", "miqcp")
_TRIAL_SECONDS = 120


@dataclass(frozen=True)
class Solver:
    """A solver that programs can be given to.

    ``kinds``: programs it can solve, out of KINDS (miqcp: with non-convex products).  ``duals``, ``bound``: dual values
    of an LP, a dual bound of a MILP can be read back through Pyomo; of solvers that run as executables it reports the
    value of the solution found in place of a bound.  ``interface``: its name in Pyomo, of the newer interface where
    ``direct``, else of the one through an executable.  ``package``: the Python package that brings it.
    ``executable``: program that brings it.  ``limit``: what its free licence allows.
    """

    name: str
    title: str
    kinds: tuple[str, ...]
    duals: bool
    bound: bool
    interface: str
    direct: bool
    install: str
    package: str | None = None
    executable: str | None = None
    limit: str = "none"


SOLVERS: dict[str, Solver] = {
    "highs": Solver(
        name="highs",
        title="HiGHS",
        kinds=("lp", "milp"),
        duals=True,
        bound=True,
        interface="highs",
        direct=True,
        install="pip install highspy",
        package="highspy",
    ),
    "scip": Solver(
        name="scip",
        title="SCIP",
        kinds=KINDS,
        duals=False,
        bound=True,
        interface="scip_direct",
        direct=True,
        install="pip install pyscipopt",
        package="pyscipopt",
    ),
    "cbc": Solver(
        name="cbc",
        title="CBC",
        kinds=("lp", "milp"),
        duals=True,
        bound=False,
        interface="cbc",
        direct=False,
        install="apt install coinor-cbc, or pip install cbcbox",
        package="cbcbox",
        executable="cbc",
    ),
    "glpk": Solver(
        name="glpk",
        title="GLPK",
        kinds=("lp", "milp"),
        duals=True,
        bound=False,
        interface="glpk",
        direct=False,
        install="apt install glpk-utils",
        executable="glpsol",
    ),
    "gurobi": Solver(
        name="gurobi",
        title="Gurobi",
        kinds=KINDS,
        duals=True,
        bound=True,
        interface="gurobi_persistent",
        direct=True,
        install="pip install gurobipy",
        package="gurobipy",
        limit="2000 variables and 2000 rows without a licence",
    ),
}


@dataclass(frozen=True)
class Found:
    """An installed solver: its version, where it comes from, and its executable if it runs as one."""

    version: str
    source: str
    path: str | None = None


@dataclass(frozen=True)
class Trial:
    """What a solver did with tiny programs whose answers are known.

    ``lp``, ``milp``, ``miqcp``: "ok", or what went wrong.  ``duals``: those of the LP were right.  ``bound``: a correct
    dual bound of the MILP came back.
    """

    lp: str
    milp: str
    miqcp: str
    duals: bool
    bound: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if getattr(self, kind) == "ok")


def find(name: str) -> Found | None:
    """Where a solver of SOLVERS is installed; an executable on the path goes before a Python package."""
    solver = SOLVERS[name]
    if solver.executable and (path := shutil.which(solver.executable)):
        return Found(_executable_version(path), f"executable {path}", path)
    if solver.package and find_spec(solver.package):
        version = metadata.version(solver.package)
        path = None if solver.direct else _packaged_executable(solver.package)
        return Found(version, f"Python package {solver.package}", path)
    return None


def _packaged_executable(package: str) -> str:
    """The executable inside a Python package (cbcbox)."""
    from importlib import import_module

    return str(import_module(package).cbc_bin_path())


def _executable_version(path: str) -> str:
    """What the program says of its own version; "unknown" when it says nothing that looks like one."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    number = re.search(r"\d+\.\d+(\.\d+)*", said.stdout + said.stderr)
    return number[0] if number else "unknown"


def require_solver(name: str, kind: str) -> Found:
    """The installed solver, if it can solve programs of this kind; raises SolverMissingError, saying what to do."""
    if name not in SOLVERS:
        raise SolverMissingError(f"solver: found {name!r}; there are: {', '.join(SOLVERS)}")
    solver = SOLVERS[name]
    if kind not in solver.kinds:
        able = [s.name for s in SOLVERS.values() if kind in s.kinds]
        raise SolverMissingError(f"solver: {solver.title} cannot solve a {kind.upper()}; use one of: {', '.join(able)}")
    found = find(name)
    if found is None:
        raise SolverMissingError(f"solver: {solver.title} is not installed; get it with: {solver.install}")
    return found


def try_solver(name: str) -> Trial:
    """Give an installed solver tiny programs with known answers, through Pyomo, in a process of its own.

    A solver that crashes, hangs or keeps global state (HiGHS: its number of threads) cannot disturb this process.
    """
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    command = [sys.executable, "-P", "-m", "solvers.trial", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TRIAL_SECONDS, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return _failed(f"no answer in {_TRIAL_SECONDS} s")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return _failed(said[-1] if said else f"the process ended with code {done.returncode}")
    return Trial(**json.loads(done.stdout.strip().splitlines()[-1]))


def _failed(sentence: str) -> Trial:
    return Trial(sentence, sentence, sentence, duals=False, bound=False)
