"""Finding solvers, trying them, and ``certdp solvers``."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyomo.environ as pyo
import pytest
from test_cli import certdp

from solvers import discovery, trial
from solvers.capabilities import BACKENDS
from solvers.discovery import KINDS, SOLVERS, Found, Trial, find, require_solver, try_solver
from solvers.errors import SolverMissingError

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = [name for name in SOLVERS if find(name)]


@pytest.fixture(scope="module")
def trials():
    """Every installed solver, really tried."""
    return {name: try_solver(name) for name in INSTALLED}


def executable(folder, name, script):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_tiny_programs_have_the_answers_they_claim():
    """By enumeration; and leaving out integrality or the product gives another answer, so it would be noticed."""
    model, best = trial.linear_program()
    points = [(x, y) for x in np.linspace(0, 3, 301) for y in np.linspace(0, 4, 401) if x + y <= 4 and x + 3 * y <= 8]
    assert max(3 * x + 2 * y for x, y in points) == best
    model, best = trial.knapsack()
    choices = itertools.product((0, 1), repeat=4)
    assert min(-np.dot((8, 11, 6, 4), c) for c in choices if np.dot((5, 7, 4, 3), c) <= 14) == best
    assert -np.dot((8, 11, 6, 4), (1, 1, 0.5, 0)) < best - 0.5 and np.dot((5, 7, 4, 3), (1, 1, 0.5, 0)) == 14
    model, best = trial.saddle()
    lines = [(x, b) for x in np.linspace(-2, 3, 501) for b in (0, 1) if x <= 2 * b - 1.5 and -2 <= 1 - x <= 3]
    assert min(x * (1 - x) + b for x, b in lines) == best
    model.b.set_value(0), model.x.set_value(-2), model.y.set_value(3), model.w.set_value(-9)
    assert pyo.value(model.goal) < best and pyo.value(model.line.body) == 1  # what ignoring the product would give


def test_highs_is_found_and_works(trials):
    assert find("highs") == Found(version("highspy"), "Python package highspy")
    assert require_solver("highs", "lp") == require_solver("highs", "milp") == find("highs")
    assert trials["highs"].kinds == ("lp", "milp") and trials["highs"].duals and trials["highs"].bound
    assert trials["highs"].miqcp != "ok"


@pytest.mark.parametrize("name", INSTALLED)
def test_solvers_do_what_the_table_claims(name, trials):
    claim, found = SOLVERS[name], trials[name]
    assert found.kinds == claim.kinds
    assert (found.duals, found.bound) == (claim.duals, claim.bound)


def test_executables_are_found_with_their_version(tmp_path, monkeypatch):
    path = executable(tmp_path, "glpsol", "echo 'GLPSOL--GLPK LP/MIP Solver 5.0'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find("glpk") == Found("5.0", f"executable {path}", path)
    executable(tmp_path, "glpsol", "echo hello")
    assert find("glpk").version == "unknown"


def test_solvers_that_are_missing_or_unable_are_named_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SolverMissingError, match=r"GLPK is not installed; get it with: apt install glpk-utils"):
        require_solver("glpk", "lp")
    with pytest.raises(SolverMissingError, match=r"HiGHS cannot solve a MIQCP; use one of: scip, gurobi"):
        require_solver("highs", "miqcp")
    with pytest.raises(SolverMissingError, match=r"found 'cplex'; there are: highs"):
        require_solver("cplex", "lp")


def test_a_broken_solver_is_reported_and_breaks_nothing(tmp_path, monkeypatch):
    executable(tmp_path, "glpsol", "echo 5.0; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = try_solver("glpk")
    assert found.kinds == () and not found.duals and not found.bound
    assert found.lp and found.lp != "ok"
    monkeypatch.setattr(discovery, "_TRIAL_SECONDS", 0.01)
    assert try_solver("highs").lp == "no answer in 0.01 s"
    monkeypatch.setattr(discovery, "_TRIAL_SECONDS", 60)
    monkeypatch.setattr(discovery.sys, "executable", executable(tmp_path, "python", "exit 3"))
    assert try_solver("highs").miqcp == "the process ended with code 3"


def test_wrong_answers_are_reported(monkeypatch):
    def sloppy(name, model, duals):
        return trial._Answer(22.0, 20.0, {"first": 2.0, "second": 1.0})

    monkeypatch.setattr(trial, "_direct", sloppy)
    found = trial.trial("highs")
    assert found.lp == "wrong answer: 22 for 11" and found.milp == "wrong answer: 22 for -21"
    assert found.kinds == () and not found.duals and not found.bound


@pytest.mark.parametrize(
    ("value", "bound", "right"), [(-21.0, -21.0, True), (-21.0, -20.0, False), (-21.0, None, False)]
)
def test_a_dual_bound_on_the_wrong_side_is_noticed(value, bound, right, monkeypatch):
    monkeypatch.setattr(trial, "_direct", lambda *_: trial._Answer(value, bound, None))
    assert trial.trial("scip").bound is right


def test_the_command_prints_what_was_tried(trials, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = certdp(capsys, "solvers", "--json")
    assert code == 0
    told = json.loads(out)
    assert [b["name"] for b in told["backends"]] == list(BACKENDS)
    assert {b["name"]: b["monotone"] for b in told["backends"]} == {n: b.monotone for n, b in BACKENDS.items()}
    assert [s["name"] for s in told["solvers"]] == list(SOLVERS)
    for row in told["solvers"]:
        assert (row["found"] is None) == (row["name"] not in INSTALLED) == (row["trial"] is None)
        if row["trial"]:
            assert Trial(**row["trial"]) == trials[row["name"]]


def test_the_tables_show_what_is_missing_and_what_failed(capsys, monkeypatch):
    broken = Trial("ok", "wrong answer: 22 for 21", "DegreeError: no", duals=True, bound=False)
    monkeypatch.setattr("certify.cli.solvers.find", lambda n: Found("1.0", "here") if n in ("highs", "scip") else None)
    monkeypatch.setattr("certify.cli.solvers.try_solver", lambda name: broken)
    monkeypatch.setattr("certify.cli.console.out._width", 220)
    code, out, _ = certdp(capsys, "solvers")
    assert code == 0
    assert "HiGHS failed the tiny MILP: wrong answer: 22 for 21" in out and "HiGHS failed the tiny MIQCP" not in out
    assert "SCIP failed the tiny MIQCP: DegreeError: no" in out and "FAILED" in out
    for name in ("cbc", "glpk", "gurobi"):
        assert f"{SOLVERS[name].title} is not installed; get it with: {SOLVERS[name].install}" in out
    for name, backend in BACKENDS.items():
        assert f" {name} " in out and backend.rigour in out


def test_solver_errors_become_one_sentence_and_exit_code_2(capsys, monkeypatch):
    def find(name):
        raise SolverMissingError("solver: found nothing;\n  install one")

    monkeypatch.setattr("certify.cli.solvers.find", find)
    code, _, err = certdp(capsys, "solvers")
    assert code == 2 and err == "certdp: solver: found nothing; install one"


def test_backends_name_solvers_that_can_be_found():
    for backend in BACKENDS.values():
        assert set(backend.solvers) <= set(SOLVERS)
    assert all(set(s.kinds) <= set(KINDS) and (s.package or s.executable) for s in SOLVERS.values())


def test_the_documentation_tells_what_the_tables_say():
    rows = [line.strip("|").split("|") for line in (ROOT / "docs" / "solvers.md").read_text().splitlines()]
    told = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if len(row) > 3}

    def words(*values):
        return ["yes" if value else "no" for value in values]

    for name, backend in BACKENDS.items():
        assert told[f"`{name}`"][:2] == words(backend.sound, backend.monotone)
        assert (told[f"`{name}`"][2] == "no") == (not backend.solvers)
    for name, solver in SOLVERS.items():
        row = told[f"{solver.title} (`{name}`)"]
        assert row[:4] == words(*(kind in solver.kinds for kind in KINDS), solver.duals)
        assert row[-1] == solver.limit


def test_finding_solvers_loads_none_of_them():
    code = "import sys, solvers.discovery as d; [d.find(n) for n in d.SOLVERS]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"pyomo", "highspy", "pyscipopt", "gurobipy", "numba", "scipy"}
