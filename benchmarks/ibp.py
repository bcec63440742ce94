"""Cost of interval training: CPU time per step and radius against nominal training, memory, and growth.

    python benchmarks/ibp.py [--quick] [--write docs/benchmarks.md] [--json FILE]

Every figure is CPU time of one thread (``time.process_time``), the median of several repetitions, each measurement in
a process of its own; memory is that process's peak resident set.  Nominal training is measured in the same run in two
ways: by this product (the radius-0 run) and by PyTorch (``torch.func.vmap`` of ``grad``, elementwise clip, sum;
float64, one thread) where torch is installed.  Data are standard normal with a fixed seed; nothing depends on their
values but the number of terms that enter the top-k selection.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402

RECORDS, DIMS, CLIP, RATE = 16_512, (8, 64, 1), 0.1, 0.1


def data(records: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(records, features))
    return x, 0.3 * x @ rng.normal(size=(features, 1)) + 0.1 * rng.normal(size=(records, 1))


def network(dims):
    """A ReLU network of these widths with seeded weights, as a graph."""
    from models.ir import Graph, Node, ParameterInfo
    from models.ops import Affine, Input, Parameter, Relu

    rng = np.random.default_rng(1)
    parameters, nodes, at = [], [Node("x", Input(dims[0]))], 0
    for layer, (cols, rows) in enumerate(zip(dims, dims[1:], strict=False)):
        parameters.append(ParameterInfo(f"w{layer}", rng.normal(size=(rows, cols)) / np.sqrt(cols), True))
        parameters.append(ParameterInfo(f"b{layer}", np.zeros(rows), True))
        nodes += [
            Node(f"w{layer}", Parameter(rows * cols, f"w{layer}")),
            Node(f"b{layer}", Parameter(rows, f"b{layer}")),
            Node(f"z{layer}", Affine(rows, cols), (at, len(nodes), len(nodes) + 1)),
        ]
        at = len(nodes) - 1
        if layer < len(dims) - 2:
            nodes.append(Node(f"a{layer}", Relu(), (at,)))
            at = len(nodes) - 1
    return Graph(tuple(nodes), at, (dims[0],), tuple(parameters))


def ours(records: int, dims, radii, steps: int, repetitions: int, products: str = "natural") -> dict:
    """CPU seconds a step for all radii (and the nominal run, always part of it)."""
    from models.losses import Squared
    from solvers import Boxes, Step, Window, bound, make_records

    graph = network(dims).with_products(products)
    x, y = data(records, dims[0])
    rows = make_records(graph, Squared(), x, y)
    batch = np.arange(records)

    def run(count):
        boxes = Boxes.point(graph.initial(), len(radii))
        for _ in range(count):  # windows of one step, the default for full batches
            one = (Step(batch, RATE),)
            boxes = bound("ibp", Window(graph, Squared(), rows, one, (boxes,), tuple(radii), CLIP, 1.0, records))[-1]

    run(2)  # compile
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        run(steps)
        times.append((time.process_time() - start) / steps)
    return {"seconds": statistics.median(times), "low": min(times), "high": max(times)}


def epoch(records: int, dims, radii, batches: int, length: int, repetitions: int) -> dict:
    """CPU seconds a step and radius over an epoch of ``batches`` minibatches in windows of ``length`` steps."""
    from models.losses import Squared
    from solvers import Boxes, Step, Window, bound, make_records

    graph = network(dims)
    x, y = data(records, dims[0])
    rows = make_records(graph, Squared(), x, y)
    order = np.random.default_rng(0).permutation(records)
    steps = [Step(np.sort(batch), RATE) for batch in np.array_split(order, batches)]

    def run():
        boxes = Boxes.point(graph.initial(), len(radii))
        for start in range(0, batches, length):
            part = tuple(steps[start : start + length])
            boxes = bound(
                "ibp", Window(graph, Squared(), rows, part, (boxes,), tuple(radii), CLIP, 1.0, len(part[0].batch))
            )[-1]

    run()  # compile
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        run()
        times.append((time.process_time() - start) / batches / sum(k > 0 for k in radii))
    return {"seconds": statistics.median(times), "low": min(times), "high": max(times)}


def california(steps: int, largest: int, threads: int) -> dict:
    """Wall seconds of a whole run on California Housing (8-64-1 network, radii 0..largest, full batch)."""
    import certify
    from certify.recipe import from_dict

    folder = Path(__file__).resolve().parent.parent / "examples" / "california"
    table = certify.read_table(folder / "california_housing.parquet", target="MedHouseVal")
    private = np.arange(len(table.features)) % 5 != 0
    recipe = certify.load_recipe(folder / "recipe.toml").to_dict()
    recipe["training"] |= {"steps": steps, "clip": 0.01, "learning_rate": {"schedule": "constant", "value": 0.01}}
    start = time.perf_counter()
    x, y = table.features[private], table.targets[private]
    envelope = certify.run(network(DIMS), from_dict(recipe), x, y, range(largest + 1), threads=threads)
    width = float(envelope.history[-1, -1])
    return {"seconds": time.perf_counter() - start, "cpu": time.process_time(), "width": width}


def by_torch(records: int, dims, steps: int, repetitions: int) -> dict:
    """CPU seconds a step of per-sample-clipped training in PyTorch, in chunks that suit its cache best of three."""
    import torch
    from torch.func import functional_call, grad, vmap

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    layers = []
    for cols, rows in zip(dims, dims[1:], strict=False):
        layers += [torch.nn.Linear(cols, rows), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    x, y = (torch.from_numpy(a) for a in data(records, dims[0]))

    def loss(p, xi, yi):
        return ((functional_call(model, p, (xi[None],))[0] - yi) ** 2).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def step(p, chunk):
        total = {k: torch.zeros_like(v) for k, v in p.items()}
        for xs, ys in zip(x.split(chunk), y.split(chunk), strict=True):
            for k, g in gradients(p, xs, ys).items():
                total[k] += g.clamp_(-CLIP, CLIP).sum(0)
        return {k: v - RATE / records * total[k] for k, v in p.items()}

    best = None
    for chunk in (256, 2048, records):
        step(parameters, chunk)
        times = []
        for _ in range(repetitions):
            start, p = time.process_time(), parameters
            for _ in range(steps):
                p = step(p, chunk)
            times.append((time.process_time() - start) / steps)
        found = {"seconds": statistics.median(times), "low": min(times), "high": max(times), "chunk": chunk}
        best = found if best is None or found["seconds"] < best["seconds"] else best
    return best


def child(request: dict) -> dict:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measurement failed: {request}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(request: dict) -> dict:
    import resource

    kinds = {"torch": by_torch, "ours": ours, "epoch": epoch, "california": california}
    result = kinds[request.pop("kind")](**request)
    result["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result


def ms(value: float) -> str:
    return f"{1e3 * value:.1f}"


def report(quick: bool) -> tuple[str, dict]:
    """All measurements as markdown and as data."""
    repeat = {"steps": 2 if quick else 5, "repetitions": 3 if quick else 7}
    base = {"kind": "ours", "records": RECORDS, "dims": DIMS, **repeat}
    nominal = child({**base, "radii": []})
    try:
        version("torch")
        peer = child({"kind": "torch", "records": RECORDS, "dims": DIMS, **repeat})
    except PackageNotFoundError:
        peer = None
    lines, results = [], {"nominal": nominal, "torch": peer}
    ratio = f"{nominal['seconds'] / peer['seconds']:.2f}" if peer else ""

    lines += [
        f"## {RECORDS:,} records, 8-64-1 network (641 parameters), full batch, one thread\n",
        "| what | CPU ms a step | per radius | of our nominal step | of PyTorch's | each after the first | peak MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        f"| nominal, this product | {ms(nominal['seconds'])} | | 1.00 | "
        f"{ratio} | | {nominal['memory_mib']:.0f} |",
    ]
    if peer:
        lines.append(
            f"| nominal, PyTorch vmap (chunk {peer['chunk']}) | {ms(peer['seconds'])} | | "
            f"{peer['seconds'] / nominal['seconds']:.2f} | 1.00 | | {peer['memory_mib']:.0f} |"
        )
    else:
        lines.append("| nominal, PyTorch | torch is not installed | | | | | |")
    first = None
    lists = [("1", [1]), ("28", [28]), ("1, 2, 4, 8", [1, 2, 4, 8]), ("1..28", list(range(1, 29)))]
    lists.append(("1..28, midpoint-radius", list(range(1, 29))))
    for label, radii in lists:
        products = "midpoint-radius" if "midpoint" in label else "natural"
        found = child({**base, "radii": radii, "products": products})
        first = first or found["seconds"]
        each = (found["seconds"] - nominal["seconds"]) / len(radii)
        further = ms((found["seconds"] - first) / (len(radii) - 1)) if len(radii) > 1 else ""
        against = f"{each / peer['seconds']:.2f}" if peer else ""
        lines.append(
            f"| radii 0 and {label} | {ms(found['seconds'])} | {ms(each)} | {each / nominal['seconds']:.2f} | "
            f"{against} | {further} | {found['memory_mib']:.0f} |"
        )
        results[f"radii {label}"] = found
    lines += [
        "",
        "Radius 0 is the nominal run and part of every list; 'per radius' is what each of the others adds to it.  The",
        f"first radius of a list needs the nominal run as well and costs {ms(first)} ms; further ones cost less.",
        "Large radii cost more than small ones, because more terms enter the selection.",
        "",
    ]

    more, found = minibatches(quick)
    lines += more
    results |= found

    threads = min(2, os.cpu_count() or 1)
    run = {"kind": "california", "steps": 33 if quick else 330, "largest": 28, "threads": threads}
    found = results["california"] = child(run)
    lines += [
        "## A whole run on California Housing\n",
        f"{RECORDS:,} records, 8-64-1 network, {run['steps']} steps, radii 0..28, full batch, clip 0.01, rate 0.01, "
        f"{threads} threads: {found['seconds']:.0f} s of wall time, {found['cpu']:.0f} s of CPU time, "
        f"peak {found['memory_mib']:.0f} MiB; mean width of the largest box {found['width']:.3g}.\n",
    ]

    def growth(title: str, requests: list[tuple[str, dict]]) -> None:
        heading = [f"## Growth with the number of {title}\n", f"| {title} | CPU ms a step | peak MiB |"]
        lines.extend([*heading, "| ---: | ---: | ---: |"])
        for label, request in requests:
            found = child({**base, "steps": 2, "repetitions": 3, **request})
            results[f"{title} {label}"] = found
            lines.append(f"| {label} | {ms(found['seconds'])} | {found['memory_mib']:.0f} |")
        lines.append("")

    growth(
        "records (8-64-1, radii 0..4)",
        [(f"{n:,}", {"records": n, "radii": [0, 1, 2, 3, 4]}) for n in (1_000, 4_000, 16_000, 64_000, 256_000)],
    )
    shapes = [(8, 1), (8, 16, 1), (8, 64, 1), (8, 64, 64, 1), (64, 128, 64, 1)]
    sizes = [sum((a + 1) * b for a, b in zip(d, d[1:], strict=False)) for d in shapes]
    growth(
        "parameters (4,000 records, radii 0..4)",
        [
            (f"{p:,} ({'-'.join(map(str, d))})", {"records": 4_000, "dims": d, "radii": [0, 1, 2, 3, 4]})
            for p, d in zip(sizes, shapes, strict=True)
        ],
    )
    growth(
        "radii (4,000 records, 8-64-1, radii 0..k)",
        [(str(k + 1), {"records": 4_000, "radii": list(range(k + 1))}) for k in (1, 4, 16, 64, 256)],
    )
    return "\n".join(lines), results


def minibatches(quick: bool) -> tuple[list[str], dict]:
    """Windows of an epoch of minibatches beside windows of one step, as markdown and as data."""
    lines, results = [], {}
    lines += [
        f"## An epoch of 10 minibatches ({RECORDS:,} records, 8-64-1)\n",
        "| radii | F | CPU ms a step and radius | peak MiB |",
        "| --- | ---: | ---: | ---: |",
    ]
    base = {"kind": "epoch", "records": RECORDS, "dims": DIMS, "batches": 10, "repetitions": 3 if quick else 5}
    for label, radii in (("0, 1", [0, 1]), ("0..28", list(range(29)))):
        for length in (1, 10):
            found = results[f"radii {label}, F = {length}"] = child({**base, "radii": radii, "length": length})
            lines.append(f"| {label} | {length} | {ms(found['seconds'])} | {found['memory_mib']:.0f} |")
    lines += [
        "",
        "The nominal run is counted to the radii.  The records of a step are read once for all radii, in windows of",
        "one step (F = 1) and of several.  In the latter a step costs one rounding more a term, and the nominal run",
        "reads the records on its own.  Slots that occur again in a window (full batches, several epochs) need 16",
        "bytes for each parameter, slot and radius; where that would be more than 1 GiB, the radii pass over the",
        "records in groups.",
        "",
    ]
    return lines, results


def environment() -> str:
    names = ("numpy", "numba", "torch")
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        rows = [r for r in Path("/proc/cpuinfo").read_text().splitlines() if r.startswith("model name")]
        cpu = rows[0].split(":")[1].strip() if rows else cpu
    return f"Python {platform.python_version()}, {', '.join(found)}; {cpu}; data seed 0, weight seed 1."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--write", type=Path, help="markdown file to write")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(json.loads(arguments.child))))
        return
    table, results = report(arguments.quick)
    text = (
        "# Cost of interval training\n\n<!-- Written by benchmarks/ibp.py; run it again rather than edit. -->\n\n"
        f"Measured by `python benchmarks/ibp.py`, medians of CPU time in one thread. {environment()}\n\n{table}"
    )
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
