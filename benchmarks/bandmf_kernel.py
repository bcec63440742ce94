"""Privacy losses per second on one core, against jax-privacy's own evaluation: the table of docs/bandmf_kernel.md.

    python benchmarks/bandmf_kernel.py [--environment DIRECTORY] [--rounds 5]

jax-privacy is installed by pip into a virtual environment of its own (kept in DIRECTORY, by default build/jax-privacy).
Both sides draw outputs of b-min-sep BandMF with the example (warm start) and evaluate their losses, in turns on the
same core; the figure is the best of the rounds, in CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

SETTINGS = (  # steps, bands, examples per expected batch, noise multiplier
    (1024, 16, 128.0, 1.0),
    (1500, 64, 300.0, 0.6),
    (7200, 256, 8224.0, 0.47),
)
BATCH = 1024  # the size at which jax-privacy is fastest
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

THEIRS = """
import json, sys, time
import numpy as np
from jax_privacy import batch_selection
from jax_privacy.experimental.monte_carlo import sample_generation
steps, bands, noise_multiplier, probability, batch, seed = json.loads(sys.argv[1])
c = np.array(json.loads(sys.argv[2]))
scheme = batch_selection.BMinSepSampling(probability, steps, bands, warm_start=True)
draw = lambda count: sample_generation.get_privacy_loss_sample(scheme, noise_multiplier, c, seed, True, count)
draw(8)
begin = time.process_time()
draw(batch)
print(batch / (time.process_time() - begin))
"""


def coefficients(bands: int):
    """Start of the square root of the prefix-sum matrix, unit norm: what the entries are does not matter here."""
    import numpy as np

    k = np.arange(1, bands)
    c = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    return c / np.linalg.norm(c)


def ours(steps: int, bands: int, ratio: float, noise_multiplier: float, seed: int) -> float:
    from concurrent.futures import ThreadPoolExecutor

    from privacy.bandmf.monte_carlo import sample_losses
    from privacy.bandmf.schemes import BMinSep
    from privacy.bandmf.strategy import Strategy

    scheme = BMinSep(steps, 10**9, 10**9 / ratio, bands, warm=True)
    strategy = Strategy.toeplitz(coefficients(bands), steps)
    with ThreadPoolExecutor(1) as pool:
        sample_losses(scheme, strategy, noise_multiplier, "remove", 8, seed=seed, executor=pool)
        samples = 2**24 // steps * 2
        begin = time.process_time()
        sample_losses(scheme, strategy, noise_multiplier, "remove", samples, seed=seed, executor=pool)
        return samples / (time.process_time() - begin)


def theirs(python: Path, steps: int, bands: int, ratio: float, noise_multiplier: float, seed: int) -> float:
    probability = 1.0 / (ratio - (bands - 1))
    settings = json.dumps([steps, bands, noise_multiplier, probability, BATCH, seed])
    command = [str(python), "-c", THEIRS, settings, json.dumps(coefficients(bands).tolist())]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout)


def environment(directory: Path) -> Path:
    """The interpreter of an environment with jax-privacy, made if it is not there."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "jax-privacy"], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, default=Path("build/jax-privacy"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    python = environment(options.environment)
    show = [str(python), "-c", "from importlib.metadata import version as v; print(v('jax-privacy'), v('numpy'))"]
    versions = subprocess.run(show, check=True, capture_output=True, text=True).stdout.split()
    print(f"jax-privacy {versions[0]} (numpy {versions[1]}); best of {options.rounds} rounds, CPU time, one core\n")
    print("| steps | bands | jax-privacy, samples/s | certdp, samples/s | ratio |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    for setting in SETTINGS:
        rates = [(theirs(python, *setting, seed), ours(*setting, seed)) for seed in range(options.rounds)]
        reference, found = (max(column) for column in zip(*rates, strict=True))
        row = (*setting[:2], f"{reference:,.0f}", f"{found:,.0f}", f"{found / reference:.1f}")
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    if any(os.environ.get(name) != "1" for name in ONE_THREAD):  # read when numpy is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ONE_THREAD)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    main()
