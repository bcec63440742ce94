"""Cost of the samplers at production size, batch sizes of a cold start. Run: python benchmarks/bandmf_samplers.py

14,745,600 examples, expected batch 1793, separation 256, cut and padded to 2048. Each sampler runs in a process of its
own, which reports its CPU time and its largest memory.
"""

import multiprocessing
import resource
import time

import numpy as np

from privacy.bandmf.samplers import SecretCoins, sampler
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Poisson
from privacy.bandmf.users import UserGraph, bound_contributions, expected_batch, joining_probability

STEPS, EXAMPLES, BATCH, SEPARATION, SIZE = 7200, 14_745_600, 1793.0, 256, 2048
SCHEMES = [
    Poisson(STEPS, EXAMPLES, BATCH, SIZE),
    CyclicPoisson(STEPS, EXAMPLES, BATCH, SEPARATION, SIZE),
    BallsInBins(STEPS, EXAMPLES, SEPARATION),
    BMinSep(STEPS, EXAMPLES, BATCH, SEPARATION, True, SIZE),
]


def measure(scheme, send) -> None:
    started = time.process_time()
    batches = sampler(scheme, SecretCoins())
    next(batches)
    first = time.process_time()
    for _ in batches:
        pass
    step = (time.process_time() - first) / (scheme.steps - 1)
    send.send((first - started, step, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    print(
        "| sampler | first batch | further step | resume at the last step | memory |\n| --- | --- | --- | --- | --- |"
    )
    for scheme in SCHEMES:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(scheme, send))
        process.start()
        first, step, memory = receive.recv()
        process.join()
        resume = first + (step * (STEPS - 1) if isinstance(scheme, BMinSep) else step)
        print(
            f"| {type(scheme).__name__} | {first:.3f} s | {1000 * step:.2f} ms | {resume:.2f} s | {memory:.0f} MB |",
            flush=True,
        )

    cold = BMinSep(1000, 60_000, 1000.0, 50, warm=False)
    sizes = cold.inclusion * cold.examples
    print(f"\ncold start of {cold}:")
    print(", ".join(f"step {i + 1}: {sizes[i]:.0f}" for i in (0, 24, 49, 50, 99, 199, 999)))

    rng = np.random.default_rng(0)
    graph = UserGraph.from_owners(rng.integers(30_000, size=(60_000, 2)))
    started = time.process_time()
    kept = bound_contributions(graph, 3)
    graph = graph.take(kept)
    scheme = MultiAttribution(1000, joining_probability(graph, 20, 100.0), 20, 3)
    ready = time.process_time()
    sizes = [len(batch) for batch in sampler(scheme, SecretCoins(), graph=graph)]
    seconds = time.process_time() - ready
    print(
        f"\nmulti-attribution: 60,000 examples of 2 among 30,000 users, {len(kept)} kept with per_user 3, "
        f"probability {scheme.probability:.6f} (expected batch / examples: {100 / len(kept):.6f}); expected batch "
        f"{expected_batch(graph, 20, scheme.probability):.3f}, mean of {len(sizes)} steps {np.mean(sizes):.1f}; "
        f"{ready - started:.2f} s to prepare, {1000 * seconds / len(sizes):.2f} ms a step"
    )


if __name__ == "__main__":
    main()
