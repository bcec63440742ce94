"""The tables of docs/baselines.md and docs/audit.md: DP-SGD's noise multipliers, what a black-box audit finds.

    python benchmarks/baselines.py

Nothing is timed. The multipliers are computed; the releases of the second table are drawn with a fixed seed.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from privacy.audit import black_box
from privacy.audit_laws import pure_loss
from privacy.baselines import analytic_gaussian, classical_gaussian, dp_sgd_noise
from privacy.noise import admissible_pairs


def gaussian() -> None:
    """Scales for sensitivity 1 at delta = 1e-5."""
    print("| epsilon | classical formula | analytic |")
    print("| --- | --- | --- |")
    for epsilon in (1.0, 10.0):
        scales = (f(1.0, epsilon, 1e-5) for f in (classical_gaussian, analytic_gaussian))
        print(f"| {epsilon:g} | {' | '.join(f'{s:.3f}' for s in scales)} |")


def dp_sgd(delta: float = 1e-5, rate: float = 0.02, steps: int = 200) -> None:
    """Noise multipliers of Poisson-sampled DP-SGD for both adjacencies."""
    print("\n| epsilon | zero-out | replace-one |")
    print("| --- | --- | --- |")
    for epsilon in (1.0, 4.0):
        found = (dp_sgd_noise(epsilon, delta, rate, steps, adjacency) for adjacency in ("zero-out", "replace-one"))
        print(f"| {epsilon:g} | {' | '.join(f'{m:.3f}' for m in found)} |")


def black_box_audit(epsilon: float = 0.1, beta: float = 0.05) -> None:
    """Clipped sums of (-1, -1) and (1, -1), with the distance from the nominal value for a bound (Algorithm 1).

    Within radius 1 and 2 the sum -2 moves by 2 and 4, the sum 0 by 2 and 2: scales that differ by `2 e^-beta`.
    """
    (pair,) = admissible_pairs("cauchy", epsilon, betas=[beta])
    scales = [max(2.0, 4.0 * math.exp(-beta)) / pair.a, 2.0 / pair.a]
    laws = [(-2.0, scales[0]), (0.0, scales[1])]
    exact = float(pure_loss("cauchy", *laws[0], *laws[1]))
    print(f"\nclaimed {epsilon:g}, true {exact:.3f}\n\n| releases a side | lower bound of epsilon |\n| --- | --- |")
    rng = np.random.default_rng(0)
    for count in (1_000, 10_000, 100_000, 1_000_000):
        samples = [centre + scale * rng.standard_cauchy(count) for centre, scale in laws]
        found = black_box(*samples, log_ratio=lambda y: np.subtract(*(stats.cauchy.logpdf(y, *law) for law in laws)))
        print(f"| {count:,} | {found.epsilon:.2f} |")


if __name__ == "__main__":
    gaussian()
    dp_sgd()
    black_box_audit()
