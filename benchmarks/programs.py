"""Widths and cost of the program backends: the figures of docs/programs.md.

    python benchmarks/programs.py ablation [--backend lp|milp]
    python benchmarks/programs.py blobs [--steps 200] [--F 20] [--stride 1] [--radii 1] [--loss hinge] [--threads 2]
    python benchmarks/programs.py network [--steps 2] [--hidden 8] [--batch 20] [--backend lp]
    python benchmarks/programs.py objective [--steps 8] [--hidden 64] [--batch 50]

`ablation`: linear regression, 16 steps of 5 records, rate 0.1, clip 0.1; width of the weight's box at radius 1, by F.
`blobs`: two clouds of 100 points in 8 dimensions (largest feature 1), batches of 20, rate 0.5, clip 0.05; mean width
of the 9 parameters' boxes and wall-clock time after every tenth of the run, beside interval bounds of one step.
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
from sklearn.datasets import make_blobs  # noqa: E402

from certify.windows import Trail, spans  # noqa: E402
from models.ir import Graph, Node, ParameterInfo  # noqa: E402
from models.losses import make_loss  # noqa: E402
from models.ops import Affine, Input, Interval, Parameter, Relu  # noqa: E402
from solvers import Boxes, Options, Step, Window, bound, make_records  # noqa: E402
from solvers.programs.model import solver  # noqa: E402
from solvers.programs.relu import Network, formulate  # noqa: E402


def problem(features, targets, batches, radii, loss, rate, clip) -> Window:
    """The whole run of a linear model from zero, as one window."""
    size = features.shape[1]
    weights = [ParameterInfo("weight", np.zeros((1, size)), True), ParameterInfo("bias", np.zeros(1), True)]
    nodes = [Node("x", Input(size)), Node("weight", Parameter(size, "weight")), Node("bias", Parameter(1, "bias"))]
    graph = Graph((*nodes, Node("y", Affine(1, size), (0, 1, 2))), 3, (size,), tuple(weights))
    loss = make_loss(loss)
    records = make_records(graph, loss, features, targets)
    steps = tuple(Step(np.asarray(batch), rate) for batch in batches)
    start = Boxes.point(graph.initial(), len(radii))
    return Window(graph, loss, records, steps, (start,), tuple(radii), clip, 1.0, len(batches[0]))


def run(whole: Window, backend: str, F: int, stride: int | None, options: Options):
    """The boxes after every window of a run, with the number of steps done."""
    trail = Trail(0, whole.known)
    for span in spans(len(whole.steps), F, stride):
        part = replace(whole, steps=whole.steps[span.start : span.stop], known=trail.since(span.start))
        trail = trail.then(bound(backend, part, options), F if stride else 1)
        yield trail.step, trail.last


def ablation(backend: str) -> None:
    rng = np.random.default_rng(0)
    features = rng.uniform(-2.0, 2.0, size=(80, 1))
    targets = 0.7 * features + 0.1 * rng.normal(size=(80, 1))
    whole = problem(features, targets, np.arange(80).reshape(16, 5), (1,), "squared", 0.1, 0.1)
    print("| F | ibp | " + backend + " | seconds |\n| ---: | ---: | ---: | ---: |")
    for F in (1, 2, 4, 8, 16):
        plain = list(run(whole, "ibp", F, None, Options()))[-1][1]
        started = time.process_time()
        boxes = list(run(whole, backend, F, None, Options()))[-1][1]
        width, other = (b.upper[0, 0] - b.lower[0, 0] for b in (boxes, plain))
        print(f"| {F} | {other:.4f} | {width:.4f} | {time.process_time() - started:.1f} |", flush=True)


def blobs(steps: int, F: int, stride: int | None, radii: list[int], loss: str, backend: str, threads: int) -> None:
    features, labels = make_blobs(200, 8, centers=2, random_state=0)
    features = features / np.abs(features).max(axis=0)
    targets = (2.0 * labels - 1.0 if loss == "hinge" else labels)[:, None]
    rng = np.random.default_rng(0)
    epochs = [rng.permutation(200).reshape(10, 20) for _ in range(-(-steps // 10))]
    whole = problem(features, targets, np.concatenate(epochs)[:steps], radii, loss, 0.5, 0.05)
    plain = dict(run(whole, "ibp", 1, None, Options()))
    print("| step | k | ibp | " + backend + " | ratio | seconds |\n" + "| ---: " * 6 + "|")
    started = time.monotonic()
    for step, boxes in run(whole, backend, F, stride, Options(threads=threads)):
        if step % max(1, steps // 10) == 0 or step == steps:
            for j, k in enumerate(radii):
                wide, tight = plain[step].width[j], boxes.width[j]
                seconds = time.monotonic() - started
                print(f"| {step} | {k} | {wide:.3f} | {tight:.4f} | {wide / tight:.1f} | {seconds:.0f} |", flush=True)


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
    parser.add_argument("what", choices=("ablation", "blobs", "network", "objective"))
    parser.add_argument("--backend", default="lp")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--F", type=int, default=20)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--radii", type=lambda text: [int(k) for k in text.split(",")], default=[1])
    parser.add_argument("--loss", default="hinge")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--batch", type=int)
    given = parser.parse_args()
    if given.what == "ablation":
        ablation(given.backend)
    elif given.what == "network":
        networks(given.backend, given.steps or 2, given.hidden or 8, given.batch or 20)
    elif given.what == "objective":
        objective(given.steps or 8, given.hidden or 64, given.batch or 50)
    else:
        blobs(given.steps or 200, given.F, given.stride, given.radii, given.loss, given.backend, given.threads)
