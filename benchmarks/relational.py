"""Relational certificates of logistic regression beside what attacks reach: the table of docs/relational.md.

    python benchmarks/relational.py [--quick]

Full-batch training on 2,000 records of 8 features in [-1, 1], 300 steps, radii 0..17, the relational backend in
windows of 50 steps, one thread.  "certified" bounds the l1 distance of the parameters of two neighbouring data sets,
one of which lies within distance k of the data: the local sensitivity there.  "attacked" is such a distance that two
runs of the trainer reach, best of the pairs tried; "cross" is the cross range of the boxes of interval bounds, and of
the relational backend; "clipped" is the share of gradient entries that the clip cuts at the trained parameters.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402
from ibp import network  # noqa: E402

from models.losses import Logistic  # noqa: E402
from models.ops import Interval  # noqa: E402
from solvers import Boxes, Records, Step, Window, bound, make_records  # noqa: E402

RECORDS, FEATURES, STEPS, LENGTH = 2000, 8, 300, 50
RADII = tuple(range(18))
SHOWN = (0, 1, 2, 4, 8, 16)
TRIES = 4
#: Learning rate, clip, contraction.
SETTINGS = (
    (0.2, 0.05, 0.98), (0.5, 0.05, 0.98), (1.0, 0.05, 0.9), (0.1, 0.05, 1.0), (0.1, 0.5, 0.95), (0.5, 0.2, 0.98)
)  # fmt: skip


def problem(rate: float, clip: float, contraction: float, steps: int) -> Window:
    """All steps as one window; labels follow a logistic model of the features."""
    rng = np.random.default_rng(0)
    x = np.clip(0.35 * rng.normal(size=(RECORDS, FEATURES)), -1.0, 1.0)
    y = rng.random((RECORDS, 1)) < 1.0 / (1.0 + np.exp(-3.0 * x @ rng.normal(size=(FEATURES, 1)) * 2.0))
    graph = network((FEATURES, 1))
    graph = replace(graph, parameters=tuple(replace(p, value=0.0 * p.value) for p in graph.parameters))
    one = np.ones((FEATURES, 1))
    return Window(
        graph, Logistic(), make_records(graph, Logistic(), x, y), (Step(np.arange(RECORDS), rate),) * steps,
        (Boxes.point(graph.initial(), len(RADII)),), RADII, clip, contraction, RECORDS,
        feature_range=Interval(-one, one),
    )  # fmt: skip


def certified(window: Window, backend: str, length: int) -> tuple[Boxes, float]:
    """The boxes after all steps, and CPU seconds a step."""
    boxes, started = window.boxes, time.process_time()
    for start in range(0, len(window.steps), length):
        boxes = bound(backend, replace(window, steps=window.steps[start : start + length], known=(boxes,)))[-1]
    return boxes, (time.process_time() - started) / len(window.steps)


def cross(boxes: Boxes) -> np.ndarray:
    """Cross ranges of consecutive radii, summed over the parameters."""
    ends = boxes.upper[1:] - boxes.lower[:-1], boxes.upper[:-1] - boxes.lower[1:]
    return np.maximum(*ends).sum(axis=1)


def trained(window: Window, slots: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Parameters of the trainer with these slots replaced by records ``x`` ``(n, F)``, ``y`` ``(n,)``."""
    features, targets = window.records.features.copy(), window.records.targets.copy()
    features[:, slots], targets[0, slots] = x.T, y
    start = (Boxes.point(window.boxes.nominal, 0),)
    return bound("ibp", replace(window, records=Records(features, targets, RECORDS), radii=(), known=start))[-1].nominal


def attacked(window: Window, k: int, tries: int) -> float:
    """The largest l1 distance found between neighbours of which one differs from the data in ``k`` slots at most."""
    if not k:
        return turned(window, tries)
    rng, best = np.random.default_rng(k), 0.0
    slots = np.argsort(-np.abs(window.records.features).sum(axis=0))[:k]  # those that hold back most
    for attempt in range(tries):
        corner = rng.choice([-1.0, 1.0], FEATURES)
        rows = (np.tile(corner, (k, 1)), rng.choice([-1.0, 1.0], (k, FEATURES)))[attempt % 2]
        labels = rng.integers(2, size=k) if attempt % 2 else np.full(k, attempt // 2 % 2)
        one, two = (trained(window, slots, rows, np.append(labels[:-1], last)) for last in (0, 1))
        best = max(best, float(np.abs(one - two).sum()))
    return best


def turned(window: Window, tries: int) -> float:
    """The same from the data themselves: one of the records with the largest gradients pulls the other way."""
    nominal = trained(window, np.zeros(0, int), np.zeros((0, FEATURES)), np.zeros(0))
    sizes = np.minimum(np.abs(gradients(window, nominal)), window.clip).sum(axis=0)
    best = 0.0
    for slot in np.argsort(-sizes)[:tries]:
        corner, label = np.sign(window.records.features[:, slot]), 1.0 - window.records.targets[:, slot]
        best = max(best, float(np.abs(trained(window, np.array([slot]), corner[None], label) - nominal).sum()))
    return best


def gradients(window: Window, theta: np.ndarray) -> np.ndarray:
    """Of every record, before the clip: ``(P, N)``."""
    inputs = np.vstack([window.records.features, np.ones(RECORDS)])
    return inputs * window.loss.gradient((theta @ inputs)[None], window.records.targets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="30 steps, the first setting")
    quick = parser.parse_args().quick
    for backend in ("ibp", "relational"):
        certified(problem(*SETTINGS[0], 1), backend, 1)  # compile
    columns = "clipped", "k", "attacked", "certified", "ratio", "cross, relational", "cross, ibp", "ms a step"
    print(f"| rate, clip, contraction | {' | '.join(columns)} |")
    print("| --- " + "| ---: " * 8 + "|")
    for setting in SETTINGS[:1] if quick else SETTINGS:
        window = problem(*setting, 30 if quick else STEPS)
        boxes, seconds = certified(window, "relational", LENGTH)
        plain, _ = certified(window, "ibp", 1)
        bounds, chained, naive = boxes.difference[1:].max(axis=1).sum(axis=1), cross(boxes), cross(plain)
        part = (np.abs(gradients(window, boxes.nominal)) > window.clip).mean()
        for k in SHOWN:
            reached = attacked(window, k, TRIES)
            ratio = f"{bounds[k]:.4g} | {bounds[k] / reached:.2f} | {chained[k]:.3g} | {naive[k]:.3g}"
            name = f"{', '.join(map(str, setting))} | {part:.0%} | {k}"
            print(f"| {name} | {reached:.4g} | {ratio} | {1e3 * seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
