"""Backends, windows and attacks on the same training runs: the tables of docs/windows.md.

    python benchmarks/windows.py EXPERIMENT ... [--limit 600] [--threads 2] [--store FILE] [--write docs/windows.md]

Without an experiment: only write.  Every row is one run of `certify.driver.sweep`; rows lie in FILE as they come, and
another call goes on where the last one stopped: rows that are done are kept, rows that were stopped by ``--limit``
(seconds of wall-clock time a row and call) are taken up from their checkpoint.  CPU seconds count this process and its
children.  Every final box must contain every attack's result, or the program ends with an error.

Smooth sensitivities are of all parameters in the l1 norm, from cross ranges (of a relational certificate: the smaller
of the two) under the public ceiling; those of attacks from the ends that real runs reach.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import highspy  # noqa: E402
import numpy as np  # noqa: E402
from ibp import network  # noqa: E402
from sklearn.datasets import make_blobs  # noqa: E402

import certify  # noqa: E402
from certify.attack import EnvelopeViolation, attacked_ends  # noqa: E402
from certify.checkpoint import CheckpointFile  # noqa: E402
from certify.driver import Problem, prepare, reach, sweep  # noqa: E402
from certify.envelope import write_atomically  # noqa: E402
from certify.errors import CertdpError  # noqa: E402
from certify.recipe import from_dict  # noqa: E402
from certify.windows import Method  # noqa: E402
from models.ir import Graph  # noqa: E402
from models.ops import Interval  # noqa: E402
from privacy.smooth import cross_ranges, smooth_bound  # noqa: E402
from solvers import Boxes, Window, bound  # noqa: E402
from solvers.errors import SolverError, SolverFailureError  # noqa: E402
from solvers.programs.margin import Head, blocks, formulate  # noqa: E402
from solvers.programs.model import Answer, _attempts, _tolerances, solver  # noqa: E402
from solvers.programs.program import Program  # noqa: E402
from solvers.programs.safe import safe_lower_bound  # noqa: E402
from solvers.programs.steps import WindowProgram  # noqa: E402

BETA = 0.5
CALIFORNIA = Path(__file__).resolve().parent.parent / "examples" / "california"


class OverLimit(Exception):
    """A row has run for as long as it may."""


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


@dataclass(frozen=True)
class Aim:
    """Which parameters' smooth sensitivity, at which beta."""

    parameters: tuple[int, ...]
    beta: float = BETA


@dataclass(frozen=True)
class Bench:
    """Where rows are kept, and what a call may take."""

    path: Path
    limit: float
    threads: int

    def rows(self) -> dict[str, dict]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def keep(self, key: str, row: dict) -> dict:
        write_atomically(self.path, json.dumps(self.rows() | {key: row}, indent=1).encode())
        print(key, {name: value for name, value in row.items() if name not in ("lower", "upper")}, flush=True)
        return row

    def attack(self, key: str, problem: Problem, radii: Sequence[int], aim: Aim, retrainings: int, at=None):
        """The ends that attacks on these parameters reach; ``at``: the radii that are attacked, default all."""
        rows, key = self.rows(), f"{key} attack"
        if key in rows:
            return rows[key]
        started = time.monotonic(), cpu_seconds()
        at = radii if at is None else at
        lower, upper, count = attacked_ends(problem, at, aim.parameters, retrainings=retrainings)
        latest = np.searchsorted(at, radii, side="right") - 1  # what smaller radii reach, larger ones reach as well
        lower, upper = lower[latest], upper[latest]
        row = {
            "radii": list(radii), "runs": count, "smooth": smooth(problem, radii, lower, upper, aim),
            "widths": (upper - lower)[:, list(aim.parameters)].mean(axis=1).tolist(),
            "lower": lower.tolist(), "upper": upper.tolist(),
            "wall": time.monotonic() - started[0], "cpu": cpu_seconds() - started[1],
        }  # fmt: skip
        return self.keep(key, row)

    def bounds(self, key: str, problem: Problem, radii: Sequence[int], method: Method, aim: Aim) -> dict:
        """A row: widths by step, the last boxes, time, and the smooth sensitivity of these parameters."""
        name = row_name(key, method, radii)
        row = self.rows().get(name, {"status": "new", "wall": 0.0, "cpu": 0.0})
        if row["status"] in ("done", "refused"):
            return row
        facts = {"key": name, "radii": list(radii), "recipe": problem.recipe.to_dict()}
        checkpoint = self.path.with_name(re.sub(r"[^\w=]+", "-", name) + ".checkpoint")
        file = CheckpointFile(checkpoint, facts, [problem.records.features, problem.records.targets])
        started, used = time.monotonic(), cpu_seconds()

        def check(done: int, total: int, boxes: Boxes) -> None:
            print(f"{name}: {done} of {total} steps, {boxes.width[-1]:.4g}", flush=True)
            if done < total and time.monotonic() - started > self.limit:
                raise OverLimit

        status, note = "done", ""
        try:
            sweep(problem, radii, method, threads=self.threads, file=file, resume=checkpoint.exists(), progress=check)
        except OverLimit:
            status = "stopped"
        except (CertdpError, SolverError) as error:
            status, note = "failed" if isinstance(error, SolverFailureError) else "refused", str(error)
        row = {"status": status, "note": note, "radii": list(radii), "total": problem.steps,
               "wall": row["wall"] + time.monotonic() - started, "cpu": row["cpu"] + cpu_seconds() - used}  # fmt: skip
        if checkpoint.exists():
            state = file.load()
            boxes = state.trail.last
            row |= {"steps": state.trail.step, "widths": state.widths.tolist()}
            if status == "done":
                row |= {"smooth": smooth(problem, radii, boxes.lower, boxes.upper, aim, boxes.difference),
                        "attacked widths": (boxes.upper - boxes.lower)[:, list(aim.parameters)].mean(axis=1).tolist(),
                        "lower": boxes.lower.tolist(), "upper": boxes.upper.tolist()}  # fmt: skip
                file.delete()
                contain(name, row, self.rows().get(f"{key} attack"))
        return self.keep(name, row)


def row_name(key: str, method: Method, radii: Sequence[int]) -> str:
    moved = f" stride={method.stride}" if method.stride else ""
    return f"{key} {method.backend} F={method.F}{moved}" + (f" k={radii[-1]}" if len(radii) == 2 else "")


def contain(name: str, row: dict, attack: dict | None) -> None:
    """Sound boxes contain what attacks reach, at the radii they share."""
    for j, radius in enumerate(attack["radii"] if attack else ()):
        if radius in row["radii"]:
            i = row["radii"].index(radius)
            inside = np.less_equal(row["lower"][i], attack["lower"][j]) & np.less_equal(
                attack["upper"][j], row["upper"][i]
            )
            if not inside.all():
                raise EnvelopeViolation(f"{name}: an attack leaves its box of radius {radius}; report this")


def smooth(problem: Problem, radii, lower, upper, aim: Aim, difference=None) -> float | None:
    """Smooth sensitivity of these parameters, l1; None for radii with gaps."""
    if list(radii) != list(range(len(radii))):
        return None
    ends = reach(problem.graph, problem.recipe, problem.schedule.slots)
    cross = cross_ranges(lower, upper)[:, None]
    if difference is not None:
        cross = np.minimum(cross, difference[1:])
    chosen = list(aim.parameters)
    l1 = cross[:, :, chosen].sum(axis=2).max(axis=1)
    return float(smooth_bound(l1[:, None], float(np.sum((ends[1] - ends[0])[chosen])), aim.beta)[0])


def linear_model(features: int, weight=0.0, bias=0.0) -> Graph:
    """One affine layer that starts at these parameters."""
    graph = network((features, 1))
    values = np.full((1, features), weight), np.full(1, bias)
    return replace(graph, parameters=tuple(replace(p, value=v) for p, v in zip(graph.parameters, values, strict=True)))


def recipe(loss: str, steps: int, rate: float, clip: float, batches: dict, reach: float, **training):
    """A recipe of a run with features in ``[-reach, reach]``."""
    rates = {"schedule": "constant", "value": rate}
    facts = {"loss": loss, "steps": steps, "clip": clip, "learning_rate": rates, **training}
    return from_dict({"training": facts, "batches": batches, "features": {"lower": -reach, "upper": reach}})


# The frequency ablation -------------------------------------------------------------------------------------------

#: Where training starts, and how far it may be from there to the optimum of the noise-free records.
STARTS = {"zero": 0.0, "optimum": 0.7}
ABLATION_RADII = tuple(range(17))
LENGTHS = (1, 2, 4, 8, 16)
#: By start; near the optimum all radii would take hours.
MILP_RADII = {"zero": ABLATION_RADII, "optimum": (0, 1)}


def regression(start: str) -> Problem:
    """80 records ``y = 0.7 x + noise``, ``x`` uniform in [-2, 2], each of them in one of 16 batches."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, size=(80, 1))
    y = 0.7 * x + 0.01 * rng.normal(size=(80, 1))
    facts = recipe("squared", 16, 0.1, 0.1, {"kind": "sequential", "size": 5}, 2.0)
    return prepare(linear_model(1, STARTS[start]), facts, x, y)


def ablation(bench: Bench) -> None:
    for start in STARTS:
        problem, key, both = regression(start), f"ablation {start}", Aim((0, 1))
        bench.attack(key, problem, ABLATION_RADII, both, 16)
        for backend in ("ibp", "lp"):
            for F in LENGTHS:
                bench.bounds(key, problem, ABLATION_RADII, Method(backend, F, relational=False), both)
        bench.bounds(key, problem, ABLATION_RADII, Method("relational"), both)
        for F in LENGTHS:
            bench.bounds(key, problem, MILP_RADII[start], Method("milp", F, relational=False, force=True), both)


def ablation_table(rows: dict) -> str:
    head = "| start | | backend | " + " | ".join(f"F = {F}" for F in LENGTHS) + " | CPU seconds, F = 1 to 16 |"
    out = [head, "| --- | --- | --- " + "| ---: " * 6 + "|"]
    for start in STARTS:
        key = f"ablation {start}"
        for what, value in (("S", smooth_of), ("width, k = 1", lambda row: row.get("widths") and row["widths"][-1][1])):
            for backend in ("ibp", "lp", "milp"):
                found = [ablation_row(rows, start, backend, F) for F in LENGTHS]
                cells = [row["status"] if row["status"] != "done" else f"{value(row) or 0.0:.4f}" for row in found]
                if any(value(row) for row in found):
                    times = f"{found[0]['cpu']:.1f} to {found[-1]['cpu']:.1f}"
                    out.append(f"| {start} | {what} | {backend} | {' | '.join(cells)} | {times} |")
            other = rows[f"{key} relational F=None"]
            out.append(f"| {start} | {what} | relational | | | | | {value(other):.4f} | {other['cpu']:.1f} |")
            attack = rows[f"{key} attack"]
            floor = attack["smooth"] if value is smooth_of else attack["widths"][1]
            out.append(f"| {start} | {what} | **attack** | | | | | **{floor:.4f}** | {attack['cpu']:.1f} |")
    return "\n".join(out)


def ablation_row(rows: dict, start: str, backend: str, F: int) -> dict:
    radii = MILP_RADII[start] if backend == "milp" else ABLATION_RADII
    return rows[row_name(f"ablation {start}", Method(backend, F), radii)]


def smooth_of(row: dict) -> float | None:
    return row.get("smooth") if row["radii"] == list(ABLATION_RADII) else None


# Blobs ------------------------------------------------------------------------------------------------------------

NINE = Aim(tuple(range(9)))
BLOB_RADII = (0, 1, 2, 4, 8)
#: Methods for all radii, and those that take long enough to have a run for one radius: (radius, method).
INTERVALS = (Method("ibp", 1), Method("ibp", 10))
BLOBS = {
    "hinge": (*INTERVALS, Method("lp", 1), Method("lp", 2)),
    "huber": (*INTERVALS, Method("relational")),
    "logistic": (*INTERVALS, Method("relational")),
    "smoothed hinge, h = 1": (*INTERVALS, Method("relational")),
    "smoothed hinge, h = 5": (*INTERVALS, Method("relational")),
}
SINGLE = {
    "hinge": (
        (1, Method("lp", (100, 40), 20)), (2, Method("lp", (110, 40), 20)), (4, Method("lp", (70, 30), 15)),
        (8, Method("lp", (60, 24), 12)), (1, Method("lp", 5)), (1, Method("lp", 10)),
    ),
    "huber": ((1, Method("lp", 10)),),
    "logistic": ((1, Method("lp", 10)),),
    **{loss: () for loss in BLOBS if loss.startswith("smoothed")},
}  # fmt: skip


def blobs(loss: str) -> Problem:
    """Two clouds of 100 points in 8 dimensions, largest feature 1; 200 steps of 20 records."""
    x, labels = make_blobs(200, 8, centers=2, random_state=0)
    x = x / np.abs(x).max(axis=0)
    y = labels.astype(float) if loss == "logistic" else 2.0 * labels - 1.0
    name, _, width = loss.partition(", h = ")
    options = {"hinge_width": float(width)} if width else {}
    batches = {"kind": "shuffled", "size": 20, "seed": 0}
    return prepare(
        linear_model(8), recipe(name.replace(" ", "-"), 200, 0.5, 0.05, batches, 1.0, **options), x, y
    )


def run_blobs(bench: Bench) -> None:
    for loss, methods in BLOBS.items():
        problem, key = blobs(loss), f"blobs {loss}"
        bench.attack(key, problem, BLOB_RADII, NINE, 8)
        for method in methods:
            if method.backend == "relational":  # its chains need every radius
                bench.bounds(key, problem, range(BLOB_RADII[-1] + 1), method, NINE)
            else:
                bench.bounds(key, problem, BLOB_RADII, replace(method, relational=False), NINE)


def single(bench: Bench) -> None:
    for loss, runs in SINGLE.items():
        for radius, method in runs:
            bench.bounds(f"blobs {loss}", blobs(loss), (0, radius), replace(method, relational=False), NINE)


def blobs_table(rows: dict) -> str:
    shown = BLOB_RADII[1:]
    head = f"| loss | method | {' | '.join(f'k = {k}' for k in shown)} | CPU seconds |"
    out = [head, "| --- | --- " + "| ---: " * 5 + "|"]
    for loss, methods in BLOBS.items():
        key, plain = f"blobs {loss}", rows[f"blobs {loss} ibp F=1"]
        runs = [*((shown, m) for m in methods), *(((k,), m) for k, m in SINGLE[loss])]
        for radii, method in sorted(runs, key=lambda run: (run[1].backend, length_of(run[1]), run[0])):
            row = rows.get(row_name(key, method, (0, *radii)))
            if row is not None:
                cells = " | ".join(width_cell(row, plain, k) if k in radii else "" for k in shown)
                out.append(f"| {loss} | {method_name(method)} | {cells} | {row['cpu']:.0f} |")
        attack = rows[f"{key} attack"]
        cells = (f"**{w:.3g}**" for w in attack["widths"][1:])
        out.append(f"| {loss} | **attack** | {' | '.join(cells)} | {attack['cpu']:.0f} |")
    return "\n".join(out)


def method_name(method: Method) -> str:
    F = ", ".join(map(str, method.F)) if isinstance(method.F, tuple) else method.F
    parts = [method.backend, f"F = {F}" if F else "", f"stride {method.stride}" if method.stride else ""]
    return ", ".join(part for part in parts if part)


def length_of(method: Method) -> int:
    """The first window's."""
    return method.F[0] if isinstance(method.F, tuple) else method.F or 0


def width_cell(row: dict, plain: dict, radius: int) -> str:
    """The last width, and how often it goes into that of single steps' interval bounds."""
    if "widths" not in row:
        return row["status"]
    width = row["widths"][-1][row["radii"].index(radius)]
    times = plain["widths"][row["steps"]][plain["radii"].index(radius)] / width
    after = "" if row["steps"] == row["total"] else f", after {row['steps']} steps"
    return f"{width:.3g} (/ {times:.1f}{after})"


#: After how many steps the hinge's widths at radius 1 are shown.
SHOWN_STEPS = (20, 50, 100, 150, 200)


def steps_table(rows: dict) -> str:
    """The hinge's widths at radius 1, by steps."""
    out = [
        f"| method | {' | '.join(f'{t} steps' for t in SHOWN_STEPS)} |",
        "| --- " + "| ---: " * len(SHOWN_STEPS) + "|",
    ]
    runs = [*((BLOB_RADII, m) for m in BLOBS["hinge"]), *(((0, k), m) for k, m in SINGLE["hinge"] if k == 1)]
    for radii, method in sorted(runs, key=lambda run: (run[1].backend, length_of(run[1]))):
        row = rows.get(row_name("blobs hinge", method, radii))
        if row is not None:
            widths = [row["widths"][t][1] if t < len(row["widths"]) else None for t in SHOWN_STEPS]
            cells = " | ".join("" if width is None else f"{width:.3g}" for width in widths)
            out.append(f"| {method_name(method)} | {cells} |")
    return "\n".join(out)


# A network --------------------------------------------------------------------------------------------------------

HOUSING_RADII, HOUSING_ATTACKED = tuple(range(7)), (0, 1, 6)
#: (Batch size, rate, clip), and the window lengths of the table.
HOUSING = {
    (16_512, 0.01, 0.01): (1, 5, 30), (1_652, 0.01, 0.01): (1, 2, 5, 10, 30), (1_652, 0.05, 0.3): (1, 2, 5, 10, 30)
}  # fmt: skip


def housing(size: int, rate: float, clip: float) -> Problem:
    """8-64-1 ReLU network on the 16,512 records of the example, 30 steps."""
    facts = certify.load_recipe(CALIFORNIA / "recipe.toml")
    table = certify.read_table(
        CALIFORNIA / "california_housing.parquet", target="MedHouseVal", features=facts.features.names
    )
    slots = facts.batches.slots
    training = {
        "loss": "squared", "steps": 30, "clip": clip, "learning_rate": {"schedule": "constant", "value": rate}
    }  # fmt: skip
    facts = from_dict(
        {**facts.to_dict(), "training": training, "batches": {"kind": "sequential", "size": size, "slots": slots}}
    )
    return prepare(network((8, 64, 1)), facts, table.features[:slots], table.targets[:slots])


def run_housing(bench: Bench) -> None:
    for setting, lengths in HOUSING.items():
        problem, key = housing(*setting), f"housing {setting}"
        chosen = Aim(tuple(range(0, problem.graph.initial().size, 320)), 2.0)
        bench.attack(key, problem, HOUSING_RADII, chosen, 2, HOUSING_ATTACKED)
        for F in lengths:
            bench.bounds(key, problem, HOUSING_RADII, Method("ibp", F), chosen)
        for backend in ("relational", "lp", "milp", "miqcp"):
            bench.bounds(key, problem, HOUSING_RADII, Method(backend, 1), chosen)


def housing_table(rows: dict) -> str:
    out = [
        "| batch, rate, clip | method | width, k = 1 | k = 6 | S | CPU seconds |",
        "| --- | --- " + "| ---: " * 4 + "|",
    ]
    notes = {}
    for setting, lengths in HOUSING.items():
        key, name = f"housing {setting}", ", ".join(f"{part:,}" for part in setting)
        attack = rows[f"{key} attack"]
        for F in lengths:
            row = rows[f"{key} ibp F={F}"]
            ends = " | ".join(f"{row['attacked widths'][k]:.3g}" for k in (1, 6))
            out.append(f"| {name} | ibp, F = {F} | {ends} | {row['smooth']:.3g} | {row['cpu']:.0f} |")
        ends = " | ".join(f"**{attack['widths'][k]:.3g}**" for k in (1, 6))
        out.append(f"| {name} | **attack** | {ends} | **{attack['smooth']:.3g}** | {attack['cpu']:.0f} |")
        for backend in ("relational", "lp", "milp", "miqcp"):
            notes[backend] = rows[f"{key} {backend} F=1"]["note"]
    return "\n".join([*out, "", *(f"* `{backend}`: {note}" for backend, note in notes.items())])


# Minibatches ------------------------------------------------------------------------------------------------------

EPOCH_RADII = (0, 1, 2, 4)
EPOCHS = (1, 10)
#: Loss, rate, clip, contraction.
EPOCH_SETTINGS = (
    ("logistic", 0.1, 0.05, 1.0),
    ("logistic", 0.5, 0.2, 0.98),
    ("huber", 0.5, 0.05, 1.0),
    ("hinge", 0.5, 0.05, 1.0),
)


def minibatches(loss: str, rate: float, clip: float, contraction: float) -> Problem:
    """1,000 records of 8 features in 10 batches, 10 epochs in the same order."""
    rng = np.random.default_rng(0)
    x = np.clip(0.35 * rng.normal(size=(1000, 8)), -1.0, 1.0)
    z = 6.0 * x @ rng.normal(size=(8, 1))
    y = rng.random(z.shape) < 1.0 / (1.0 + np.exp(-z))
    batches = {"kind": "sequential", "size": 100}
    facts = recipe(loss, 100, rate, clip, batches, 1.0, contraction=contraction)
    return prepare(linear_model(8), facts, x, y.astype(float) if loss == "logistic" else 2.0 * y - 1.0)


def charged_once(problem: Problem, radius: int) -> list[float]:
    """Mean widths after every step of interval bounds that spend the whole radius on an epoch's first batch.

    In real arithmetic and not a certificate: what no interval bound that charges the radius once an epoch can beat.
    """
    training, inputs = problem.recipe.training, np.vstack([problem.records.features, np.ones(problem.records.slots)])
    lower = upper = problem.graph.initial()
    widths = [0.0]
    for t in range(problem.steps):
        batch, x = problem.schedule.batch(t), inputs[:, problem.schedule.batch(t)]
        ends = np.maximum(x, 0.0), np.minimum(x, 0.0)
        z = Interval((lower @ ends[0] + upper @ ends[1])[None], (upper @ ends[0] + lower @ ends[1])[None])
        phi = problem.loss.gradient_interval(z, problem.records.targets[:, batch], 0.0)
        sides = np.clip([phi.lower * x, phi.upper * x], -training.clip, training.clip)
        low, high = np.sort(sides.min(axis=0), axis=1), np.sort(sides.max(axis=0), axis=1)
        k = radius if t % problem.schedule.batches_per_epoch == 0 else 0
        least = low[:, : len(batch) - k].sum(axis=1) - k * training.clip
        most = high[:, k:].sum(axis=1) + k * training.clip
        rate = problem.rates[t] / problem.schedule.normaliser
        lower, upper = training.contraction * lower - rate * most, training.contraction * upper - rate * least
        widths.append(float((upper - lower).mean()))
    return widths


def epochs(bench: Bench) -> None:
    for setting in EPOCH_SETTINGS:
        problem, key = minibatches(*setting), f"epochs {' '.join(map(str, setting))}"
        bench.attack(key, problem, EPOCH_RADII, NINE, 4)
        once = np.transpose([charged_once(problem, k) for k in EPOCH_RADII])
        bench.keep(f"{key} once", {"radii": EPOCH_RADII, "widths": once.tolist()})
        for F in (1, 10, 100):
            bench.bounds(key, problem, EPOCH_RADII, Method("ibp", F, relational=False), NINE)


def epochs_table(rows: dict) -> str:
    out = [
        "| loss, rate, clip, contraction | k | epochs | charged once | F = 10 | F = 1 | attack |",
        "| --- " + "| ---: " * 6 + "|",
    ]
    for setting in EPOCH_SETTINGS:
        key = f"epochs {' '.join(map(str, setting))}"
        for k in (EPOCH_RADII[1], EPOCH_RADII[-1]):
            for epoch in EPOCHS:
                at = EPOCH_RADII.index(k)
                once, per_set, per_batch = (
                    rows[f"{key} {name}"]["widths"][10 * epoch][at] for name in ("once", "ibp F=10", "ibp F=1")
                )
                end = f"{rows[f'{key} attack']['widths'][at]:.3g}" if epoch == EPOCHS[-1] else ""
                cells = (f"{width:.3g} (x {width / once:.1f})" for width in (per_set, per_batch))
                out.append(
                    f"| {', '.join(map(str, setting))} | {k} | {epoch} | {once:.3g} | {' | '.join(cells)} | {end} |"
                )
    return "\n".join(out)


# Cost -------------------------------------------------------------------------------------------------------------


def windows_of(problem: Problem, start: int, lengths: Sequence[int], radii: Sequence[int]) -> dict[int, Window]:
    """Windows of several lengths that start where interval bounds are after ``start`` steps."""
    before = problem.window(0, start, [problem.start(radii)], radii)
    boxes = bound("ibp", before)[-1]
    return {F: problem.window(start, start + F, [boxes], radii) for F in lengths}


def program_of(window: Window, radius: int) -> WindowProgram:
    """The linear program of a whole window."""
    j, ladder = window.radii.index(radius), 2.0 * radius
    boxes = [Interval(b.lower[j], b.upper[j]) for b in (*window.known, *bound("ibp", window))]
    head = Head.of(window)
    batches = [
        blocks(window, head, step.batch, box, ladder) for step, box in zip(window.steps, boxes, strict=False)
    ]
    return formulate(window, head, radius, boxes, batches, False)


class Highs:
    """A linear program given to highspy as arrays, with the options that Pyomo passes on."""

    def __init__(self, program: Program):
        self.highs, lp = highspy.Highs(), highspy.HighsLp()
        for name, value in {"output_flag": False, "threads": 1, **_tolerances("highs", program)}.items():
            self.highs.setOptionValue(name, value)
        lp.num_row_, lp.num_col_ = program.shape
        lp.col_cost_ = np.zeros(lp.num_col_)
        lp.col_lower_, lp.col_upper_ = program.lower, program.upper
        lp.row_lower_, lp.row_upper_ = program.row_lower, program.row_upper
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = program.matrix.indptr, program.matrix.indices
        lp.a_matrix_.value_ = program.matrix.data
        self.highs.passModel(lp)
        self.program, self.warm = program, False

    def minimise(self, cost: np.ndarray) -> Answer:
        for name, value in _attempts(self.program, self.warm)[0].items():
            self.highs.setOptionValue(name, value)
        self.warm = True
        self.highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
        self.highs.run()
        found = self.highs.getSolution()
        return Answer(np.array(found.col_value), dual=np.array(found.row_dual))


OVERHEAD_LENGTHS = (1, 2, 5, 10, 15, 20)
BUILDERS: dict[str, Callable[[Program], object]] = {
    "highspy": Highs, "pyomo": lambda program: solver("highs", program, 0.0)
}  # fmt: skip


def overhead(bench: Bench) -> None:
    """CPU seconds of all objectives of a window, best of three: through Pyomo, and by highspy alone; hinge blobs."""
    for F, window in windows_of(blobs("hinge"), 20, OVERHEAD_LENGTHS, (0, 1)).items():
        made = program_of(window, 1)
        costs = np.zeros((made.theta.shape[1], made.program.shape[1]))
        costs[np.arange(len(costs)), made.theta[-1]] = 1.0
        costs = np.vstack([costs, -costs])
        rows, columns = made.program.shape
        row, values = {"rows": rows, "columns": columns, "objectives": len(costs)}, []
        for name, build in BUILDERS.items():
            tries = [solved(build, made.program, costs) for _ in range(3)]
            row |= {f"{name} build": min(t[0] for t in tries), f"{name} solve": min(t[1] for t in tries)}
            values.append(tries[0][2])
        started = time.process_time()
        for cost in costs:
            safe_lower_bound(made.program, cost, np.zeros(rows))
        row |= {"safe": time.process_time() - started, "apart": float(np.abs(np.subtract(*values)).max())}
        bench.keep(f"overhead F={F}", row)


def solved(build: Callable, program: Program, costs: np.ndarray) -> tuple[float, float, list[float]]:
    """CPU seconds of building and of solving for all costs, and the optima."""
    started = time.process_time()
    kept = build(program)
    built = time.process_time()
    values = [float(cost @ kept.minimise(cost).x) for cost in costs]
    return built - started, time.process_time() - built, values


def overhead_table(rows: dict) -> str:
    out = [
        "| F | rows | columns | objectives | highspy | Pyomo | ratio | of it building | safe bounds |",
        "| ---: " * 9 + "|",
    ]
    for F in OVERHEAD_LENGTHS:
        row = rows[f"overhead F={F}"]
        direct, pyomo = (row[f"{name} build"] + row[f"{name} solve"] for name in ("highspy", "pyomo"))
        out.append(f"| {F} | {row['rows']:,} | {row['columns']:,} | {row['objectives']} | {direct:.3f} | {pyomo:.3f} "
                   f"| {pyomo / direct:.2f} | {row['pyomo build']:.3f} | {row['safe']:.3f} |")  # fmt: skip
    return "\n".join(out)


#: What grows: records in a batch, steps of a window, features, radii; the first of each is the common base.
GROWTH = {"records": (20, 40, 80, 160), "steps": (2, 4, 8, 16), "parameters": (9, 17, 33, 65), "radii": (1, 2, 4, 8)}
GROWN = ("ibp", "relational", "lp")


def growing(records: int, parameters: int) -> Problem:
    """Huber regression on targets of -1 and 1, ten batches of ``records``."""
    rng = np.random.default_rng(0)
    x = np.clip(0.35 * rng.normal(size=(10 * records, parameters - 1)), -1.0, 1.0)
    y = np.sign(x @ rng.normal(size=(parameters - 1, 1)))
    facts = recipe("huber", 60, 0.5, 0.05, {"kind": "sequential", "size": records}, 1.0)
    return prepare(linear_model(parameters - 1), facts, x, y)


def growth(bench: Bench) -> None:
    """CPU seconds of one window after 20 steps, by what grows; a backend stops growing where it passes the limit."""
    base = {axis: values[0] for axis, values in GROWTH.items()}
    for backend in GROWN:
        for axis, values in GROWTH.items():
            for value in values:
                size, key = base | {axis: value}, f"growth {backend} {axis} {value}"
                row = bench.rows().get(key)
                if row is None:
                    radii = tuple(range(size["radii"] + 1))
                    problem = growing(size["records"], size["parameters"])
                    window = windows_of(problem, 20, [size["steps"]], radii)[size["steps"]]
                    started = cpu_seconds()
                    try:
                        bound(backend, window)
                        row = {"cpu": cpu_seconds() - started}
                    except SolverError as error:
                        row = {"note": str(error)}
                    bench.keep(key, row)
                if "cpu" not in row or row["cpu"] > bench.limit / 20.0:
                    break


def growth_table(rows: dict) -> str:
    out = ["| grows | size | " + " | ".join(GROWN) + " |", "| --- " + "| ---: " * (1 + len(GROWN)) + "|"]
    for axis, values in GROWTH.items():
        for value in values:
            found = [rows.get(f"growth {backend} {axis} {value}", {}).get("cpu") for backend in GROWN]
            out.append(
                f"| {axis} | {value} | " + " | ".join("" if cpu is None else f"{cpu:.2g}" for cpu in found) + " |"
            )
    return "\n".join(out)


def growth_plot(rows: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 2.6), layout="constrained")
    panels = figure.subplots(1, len(GROWTH), sharey=True)
    for panel, (axis, values) in zip(panels, GROWTH.items(), strict=True):
        for backend in GROWN:
            points = [(v, rows.get(f"growth {backend} {axis} {v}", {}).get("cpu")) for v in values]
            panel.loglog(*zip(*[p for p in points if p[1]], strict=True), "o-", markersize=3, label=backend)
        panel.set_xticks(values, [str(v) for v in values])
        panel.set_xticks([], minor=True)
        panel.set_xlabel({"records": "records a batch", "steps": "steps a window"}.get(axis, axis))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("CPU seconds a window")
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=100)


EXPERIMENTS: dict[str, Callable[[Bench], None]] = {
    "ablation": ablation, "blobs": run_blobs, "single": single, "housing": run_housing, "epochs": epochs,
    "overhead": overhead, "growth": growth,
}  # fmt: skip
TABLES: dict[str, Callable[[dict], str]] = {
    "ablation": ablation_table, "blobs": blobs_table, "steps": steps_table, "housing": housing_table,
    "epochs": epochs_table, "overhead": overhead_table, "growth": growth_table,
}  # fmt: skip


def write_tables(path: Path, rows: dict) -> None:
    """Put the tables between ``<!-- NAME -->`` and ``<!-- end -->``, and the plot of growth beside the file."""
    text = path.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        try:
            found = table(rows)
        except KeyError as missing:
            print(f"{name}: row {missing} is not there yet; the table stays as it is")
            continue
        before, rest = text.split(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{found}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    path.write_text(text, encoding="utf-8")
    growth_plot(rows, path.with_name("windows_growth.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", choices=[*EXPERIMENTS, []], metavar="EXPERIMENT")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--store", type=Path, default=Path("out/windows/results.json"))
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    given.store.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.store, given.limit, given.threads)
    for name in given.experiments:
        EXPERIMENTS[name](bench)
    if given.write is not None:
        write_tables(given.write, bench.rows())


if __name__ == "__main__":
    main()
