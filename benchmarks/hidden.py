"""Boxes and certificates of a network of one hidden layer beside what attacks reach: a table of docs/relational.md.

    python benchmarks/hidden.py [--quick]

Full-batch training of a 4-8-1 network with tanh and the logistic loss, features in [-1, 1], rate 0.5, radii 0, 1 and 2,
one window.  "width" is the mean width of the boxes of radius 1; "certified" bounds the l1 distance of the parameters of
two neighbours within radius 1 of the data, "cross" is the cross range of the boxes of `ibp` at distance 0, and
"attacked" the largest distance from the data's own parameters that retraining with one other record reached.
"""

from __future__ import annotations

import argparse
import os
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402
from relational import cross, trained  # noqa: E402

from models.ir import Graph, Node, ParameterInfo  # noqa: E402
from models.losses import Logistic  # noqa: E402
from models.ops import Affine, Input, Interval, Parameter, Tanh  # noqa: E402
from solvers import Boxes, Step, Window, bound, make_records  # noqa: E402

INPUTS, UNITS, RADII = 4, 8, (0, 1, 2)
#: Records, clip, contraction, steps.
SETTINGS = ((200, 0.02, 0.95, 50), (200, 0.05, 1.0, 50), (2000, 0.05, 1.0, 50), (2000, 0.05, 0.98, 100))


def network() -> Graph:
    """A 4-8-1 network from fixed random weights."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (UNITS, INPUTS), "b1": (UNITS,), "w2": (1, UNITS), "b2": (1,)}
    values = {name: 0.5 * rng.normal(size=shape) / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    leaves = [Node(name, Parameter(value.size, name)) for name, value in values.items()]
    layers = [
        Node("z", Affine(UNITS, INPUTS), (0, 1, 2)),
        Node("h", Tanh(), (5,)),
        Node("y", Affine(1, UNITS), (6, 3, 4)),
    ]
    parameters = tuple(ParameterInfo(name, value, True) for name, value in values.items())
    return Graph((Node("x", Input(INPUTS)), *leaves, *layers), 7, (INPUTS,), parameters)


def problem(records: int, clip: float, contraction: float, steps: int) -> Window:
    """All steps as one window; labels follow a logistic model of the features."""
    rng, graph, one = np.random.default_rng(0), network(), np.ones((INPUTS, 1))
    x = np.clip(0.35 * rng.normal(size=(records, INPUTS)), -1.0, 1.0)
    y = rng.random((records, 1)) < 1.0 / (1.0 + np.exp(-4.0 * x @ rng.normal(size=(INPUTS, 1))))
    return Window(
        graph, Logistic(), make_records(graph, Logistic(), x, y), (Step(np.arange(records), 0.5),) * steps,
        (Boxes.point(graph.initial(), len(RADII)),), RADII, clip, contraction, records,
        feature_range=Interval(-one, one),
    )  # fmt: skip


def attacked(window: Window, nominal: np.ndarray, tries: int) -> float:
    """The largest l1 distance from the data's parameters reached by replacing one record with an extreme one."""
    rng, best = np.random.default_rng(1), 0.0
    for _ in range(tries):
        corner, label = rng.choice([-1.0, 1.0], (1, INPUTS)), rng.integers(2, size=1).astype(float)
        other = trained(window, rng.integers(window.records.slots, size=1), corner, label)
        best = max(best, float(np.abs(other - nominal).sum()))
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="2 steps, the first setting")
    quick = parser.parse_args().quick
    for backend in ("ibp", "relational"):
        bound(backend, problem(20, 0.05, 1.0, 1))  # compile
    titles = "width, ibp", "meanvalue", "relational", "cross", "certified", "attacked", "s"
    print(f"| records, clip, contraction, steps | {' | '.join(titles)} |\n| --- |{' ---: |' * len(titles)}")
    for setting in ((*SETTINGS[0][:3], 2),) if quick else SETTINGS:
        window = problem(*setting)
        found = {backend: bound(backend, window)[-1] for backend in ("ibp", "meanvalue")}
        started = time.process_time()
        relational = bound("relational", window)[-1]
        seconds = time.process_time() - started
        widths = [boxes.width[1] for boxes in (*found.values(), relational)]
        reached = attacked(window, relational.nominal, 2 if quick else 24)
        values = *widths, cross(found["ibp"])[0], relational.difference[1].sum(axis=1).max(), reached
        cells = ', '.join(map(str, setting)), *(f"{value:.3g}" for value in values), f"{seconds:.1f}"
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
