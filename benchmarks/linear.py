"""Linear bounds against interval bounds: width and time, by depth of the network.

    python benchmarks/linear.py

Full-batch training of ReLU networks on the data of `benchmarks/ibp.py`, one step a window, one thread; prints the
table of docs/solvers.md.  Widths are means over the parameters, relative to those of `ibp`; time is CPU time.
"""

from __future__ import annotations

import time

import numpy as np
from ibp import data, network

from models.losses import Squared
from solvers import Boxes, Step, Window, bound, make_records

RECORDS, STEPS, RADII, CLIP, RATE = 500, 20, (0, 1, 4, 16), 0.1, 0.1
NETWORKS = ((8, 16, 1), (8, 16, 16, 1), (8, 32, 32, 1), (8, 16, 16, 16, 1))


def trained(backend: str, dims: tuple[int, ...]) -> tuple[Boxes, float]:
    """The boxes after all steps and the CPU seconds a step, compilation left out."""
    graph, (x, y) = network(dims), data(RECORDS, dims[0])
    records = make_records(graph, Squared(), x, y)
    step = Step(np.arange(RECORDS), RATE)
    boxes, started = Boxes.point(graph.initial(), len(RADII)), 0.0
    for t in range(STEPS + 1):
        if t == 1:  # the first step compiled everything and is done again
            boxes, started = Boxes.point(graph.initial(), len(RADII)), time.process_time()
        window = Window(graph, Squared(), records, (step,), (boxes,), RADII, CLIP, 1.0, RECORDS)
        boxes = bound(backend, window)[-1]
    return boxes, (time.process_time() - started) / STEPS


def main() -> None:
    widths = " | ".join(f"k = {k}" for k in RADII[1:])
    print(f"| network | backend | {widths} | ms a step |")
    print("| --- | --- | " + "---: | " * len(RADII))
    for dims in NETWORKS:
        name = "-".join(map(str, dims))
        plain, seconds = trained("ibp", dims)
        ends = " | ".join(f"{w:.3g}" for w in plain.width[1:])
        print(f"| {name} | ibp | {ends} | {1e3 * seconds:.0f} |", flush=True)
        for backend in ("linear", "crown"):
            boxes, seconds = trained(backend, dims)
            ratios = " | ".join(f"x {r:.3f}" for r in boxes.width[1:] / plain.width[1:])
            print(f"| {name} | {backend} | {ratios} | {1e3 * seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
