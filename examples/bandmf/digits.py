"""BandMF with b-min-sep sampling against DP-SGD on real images: the same budget, batch size and number of steps.

    python examples/bandmf/digits.py --output out/bandmf

needs torch and scikit-learn (``pip install certdp[torch,test]``).  It writes a table (results.md, results.json) and a
plot (digits.png).  ``--tune`` prints the accuracy over learning rates, from which the defaults below were chosen.

Random sources are seeded, so that the figures can be repeated; a model that is to be published uses secret ones
(docs/bandmf_training.md).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_digits
from torch import nn

from privacy.bandmf.account import calibrate
from privacy.bandmf.noise import SeededNormals
from privacy.bandmf.optimize import optimal_toeplitz
from privacy.bandmf.optimizer import PrivateOptimizer
from privacy.bandmf.samplers import SeededCoins, sampler
from privacy.bandmf.schemes import BMinSep, Poisson, Scheme
from privacy.bandmf.strategy import Strategy

EPSILON, DELTA, CLIP = 8.0, 1e-5, 0.1
EXAMPLES, BATCH, STEPS = 1437, 16, 1024
SEPARATION, BANDS = 32, 16
EVALUATE_EVERY = 64
RATES = (1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Method:
    """What is compared: how batches are drawn, how noise is correlated, and the learning rate that suits it."""

    scheme: Scheme
    strategy: Strategy
    rate: float


METHODS = {
    "DP-SGD, Poisson": Method(Poisson(STEPS, EXAMPLES, BATCH), Strategy.identity(STEPS), 2.0),
    "BandMF, b-min-sep": Method(BMinSep(STEPS, EXAMPLES, BATCH, SEPARATION), optimal_toeplitz(STEPS, BANDS), 4.0),
}


def images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The digits of scikit-learn, 1437 to train and 360 to test, scaled by their public range 0..16."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = torch.from_numpy(digits.data[order]).float() / 16.0
    y = torch.from_numpy(digits.target[order])
    return x[:EXAMPLES], y[:EXAMPLES], x[EXAMPLES:], y[EXAMPLES:]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def train(method: Method, noise_multiplier: float, seed: int, rate: float | None = None) -> list[float]:
    """Test accuracy after every `EVALUATE_EVERY` steps of one run."""
    x, y, test_x, test_y = images()
    torch.manual_seed(seed)
    model = network()
    optimizer = PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate or method.rate),
        model,
        nn.functional.cross_entropy,
        method.strategy,
        noise_multiplier=noise_multiplier,
        clip=CLIP,
        expected_batch=BATCH,
        source=SeededNormals(seed),
    )
    accuracy = []
    for step, batch in enumerate(sampler(method.scheme, SeededCoins(seed)), start=1):
        optimizer.step(x[batch], y[batch])
        if step % EVALUATE_EVERY == 0:
            with torch.no_grad():
                accuracy.append((model(test_x).argmax(dim=1) == test_y).double().mean().item())
    return accuracy


def noise_multipliers() -> dict[str, float]:
    """Calibrated for the same (EPSILON, DELTA), zero-out adjacency."""
    found = {}
    for name, method in METHODS.items():
        print(f"{name}: calibrating the noise", flush=True)
        found[name] = calibrate(method.scheme, method.strategy, EPSILON, DELTA, seed=0).noise_multiplier
        print(f"{name}: noise multiplier {found[name]:.4f}", flush=True)
    return found


def tune(seeds: int) -> None:
    """Mean final accuracy for every learning rate, with seeds that the comparison does not use."""
    for name, sigma in noise_multipliers().items():
        for rate in RATES:
            final = [train(METHODS[name], sigma, 1000 + seed, rate)[-1] for seed in range(seeds)]
            print(f"{name}, learning rate {rate}: {np.mean(final):.4f} +- {stats.sem(final):.4f}", flush=True)


def compare(seeds: int, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    sigma = noise_multipliers()
    curves: dict[str, np.ndarray] = {}
    for name, method in METHODS.items():
        runs = []
        for seed in range(seeds):
            runs.append(train(method, sigma[name], seed))
            print(f"{name}: run {seed + 1} of {seeds}, accuracy {runs[-1][-1]:.3f}", flush=True)
        curves[name] = np.array(runs)
    table = as_table(sigma, curves)
    print(table)
    (output / "results.md").write_text(table)
    results = {name: {"noise_multiplier": sigma[name], "accuracy": runs.tolist()} for name, runs in curves.items()}
    (output / "results.json").write_text(json.dumps(results, indent=1))
    plot(curves, output / "digits.png")


def as_table(sigma: dict[str, float], curves: dict[str, np.ndarray]) -> str:
    """Markdown: noise and final accuracy with 95 % intervals of the mean over seeds, and of the paired difference."""
    lines = [
        "| method | noise multiplier | error of a prefix sum (RMS) | test accuracy |",
        "| --- | --- | --- | --- |",
    ]
    for name, runs in curves.items():
        error = sigma[name] * np.sqrt(METHODS[name].strategy.squared_errors().mean())
        mean, half = interval(runs[:, -1])
        lines.append(f"| {name} | {sigma[name]:.3f} | {error:.2f} | {mean:.1%} ± {half:.1%} |")
    baseline, ours = curves.values()
    mean, half = interval(ours[:, -1] - baseline[:, -1])
    return "\n".join(lines) + f"\n\nDifference: {mean:+.1%} ± {half:.1%} ({len(ours)} seeds, 95 % t intervals).\n"


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half width of its 95 % t interval."""
    return float(values.mean()), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def plot(curves: dict[str, np.ndarray], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.0, 4.0), layout="constrained")
    for name, runs in curves.items():
        steps = EVALUATE_EVERY * np.arange(1, runs.shape[1] + 1)
        mean, half = np.array([interval(column) for column in runs.T]).T
        axes.plot(steps, mean, label=name)
        axes.fill_between(steps, mean - half, mean + half, alpha=0.25)
    axes.set(xlabel="step", ylabel="test accuracy", title=f"digits, ε = {EPSILON:g}, δ = {DELTA:g}")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--output", type=Path, default=Path("out/bandmf"))
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--tune", action="store_true", help="accuracy over learning rates instead of the comparison")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # the network is so small that threads would wait for each other
    if options.tune:
        tune(options.seeds)
    else:
        compare(options.seeds, options.output)
