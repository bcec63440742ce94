"""Programs of ReLU networks: the figures of docs/programs.md (those of linear models: benchmarks/windows.py).

    python benchmarks/programs.py network [--steps 2] [--hidden 8] [--batch 20] [--backend lp]
    python benchmarks/programs.py objective [--steps 8] [--hidden 64] [--batch 50]

`network`: an 8-HIDDEN-1 ReLU network, squared loss, rate 0.1, clip 0.1, every record once, radius 1; mean width of the
boxes after the last step by windows of its last F steps, and CPU seconds an objective.  `objective`: size and time of
one objective of the program of the last step alone.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402

from models.ir import Graph, Node, ParameterInfo  # noqa: E402
from models.losses import make_loss  # noqa: E402
from models.ops import Affine, Input, Interval, Parameter, Relu  # noqa: E402
from solvers import Boxes, Options, Step, Window, bound, make_records  # noqa: E402
from solvers.programs.model import solver  # noqa: E402
from solvers.programs.relu import Network, formulate  # noqa: E402


def network(steps: int, hidden: int, batch: int) -> Window:
    """A window from a random network, its records drawn around another one's outputs."""
    rng = np.random.default_rng(0)
    nodes, parameters, at = [Node("x", Input(8))], [], 0
    for name, rows, cols in (("hidden", hidden, 8), ("output", 1, hidden)):
        for kind, shape in (("weight", (rows, cols)), ("bias", (rows,))):
            value = rng.uniform(-1.0, 1.0, size=shape) / np.sqrt(cols)
            parameters.append(ParameterInfo(f"{name}.{kind}", value, True))
            nodes.append(Node(f"{name}.{kind}", Parameter(value.size, f"{name}.{kind}")))
        nodes.append(Node(name, Affine(rows, cols), (at, len(nodes) - 2, len(nodes) - 1)))
        at = len(nodes) - 1
        if name == "hidden":
            nodes.append(Node("relu", Relu(), (at,)))
            at += 1
    graph, loss = Graph(tuple(nodes), at, (8,), tuple(parameters)), make_loss("squared")
    features = rng.normal(size=(steps * batch, 8))
    targets = np.maximum(features @ rng.normal(size=(8, 3)), 0.0).mean(axis=1, keepdims=True)
    parts = np.arange(steps * batch).reshape(steps, batch)
    start = Boxes.point(graph.initial(), 1)
    records = make_records(graph, loss, features, targets)
    return Window(graph, loss, records, tuple(Step(part, 0.1) for part in parts), (start,), (1,), 0.1, 1.0, batch)


def networks(backend: str, steps: int, hidden: int, batch: int) -> None:
    whole = network(steps, hidden, batch)
    plain = bound("ibp", whole)
    objectives = 2 * len(whole.boxes.nominal)
    print("| step | F | ibp | " + backend + " | gain | CPU seconds an objective |\n" + "| ---: " * 6 + "|")
    for F in range(1, steps + 1):
        known, step = (whole.boxes, *plain[: steps - 1]), steps
        window = replace(whole, steps=whole.steps[step - F :], known=known[step - F :])
        started = time.process_time()
        width = bound(backend, window, Options())[-1].width[0]
        seconds, wide = (time.process_time() - started) / objectives, bound("ibp", window)[-1].width[0]
        print(f"| {step} | {F} | {wide:.5f} | {width:.5f} | {1.0 - width / wide:.2%} | {seconds:.3f} |", flush=True)


def objective(steps: int, hidden: int, batch: int) -> None:
    """One objective of the program of the last of some steps, over interval boxes."""
    whole = network(steps, hidden, batch)
    known = bound("ibp", whole)[-2:]
    window = replace(whole, steps=whole.steps[-1:], known=known[:1])
    made = formulate(window, Network.of(window), 1, [Interval(b.lower[0], b.upper[0]) for b in known], "lp")
    kept, cost = solver("highs", made.program, 1e-4), np.zeros(made.program.shape[1])
    cost[made.theta[-1, 0]] = 1.0
    started = time.process_time()
    kept.minimise(cost)
    rows, columns = made.program.shape
    print(f"{rows} rows, {columns} columns: {time.process_time() - started:.1f} CPU seconds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("network", "objective"))
    parser.add_argument("--backend", default="lp")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--batch", type=int)
    given = parser.parse_args()
    if given.what == "network":
        networks(given.backend, given.steps or 2, given.hidden or 8, given.batch or 20)
    else:
        objective(given.steps or 8, given.hidden or 64, given.batch or 50)
