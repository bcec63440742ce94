"""Deltas certified by the integer Rényi tilt: `python benchmarks/bandmf_tilt.py [--production]` prints docs' tables."""

from __future__ import annotations

import argparse
import time

from privacy.bandmf.confidence import upper_bound
from privacy.bandmf.optimize import optimal_toeplitz
from privacy.bandmf.schemes import BMinSep
from privacy.bandmf.strategy import Strategy
from privacy.bandmf.tilt import tilted_terms
from privacy.bandmf.tilt_truncation import truncation_excess

FAILURE = 1e-10
CASES = [(0.5, 2.374), (1.0, 1.439), (1.0, 2.002), (1.0, 2.3), (2.0, 1.242), (4.0, 0.8365), (8.0, 0.504), (8.0, 0.6085)]


def row(scheme: BMinSep, strategy: Strategy, noise: float, epsilon: float, samples: int) -> str:
    start = time.process_time()
    excess = truncation_excess(scheme, strategy, noise, epsilon)
    terms = tilted_terms(scheme, strategy, noise, epsilon, samples, seed=1)
    certified = upper_bound(terms.values, terms.bound, FAILURE) + FAILURE + excess
    seconds = time.process_time() - start
    mean = terms.values.mean()
    return (
        f"| {epsilon:g} | {noise:g} | {terms.method} | {samples:,} | {mean:.3g} | {terms.values.var() / mean**2:.2g} | "
        f"{terms.bound / mean:.2g} | {certified:.4g} | {terms.bound + excess:.3g} | {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--production", action="store_true", help="7200 steps, 256 bands, batches truncated at 2048")
    production = parser.parse_args().production
    print("| ε | σ | sampled | terms | estimate | variance / δ² | B / δ | certified δ | Rényi alone | CPU s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    if production:
        scheme, strategy = BMinSep(7200, 14_745_600, 1793, 256, True, 2048), optimal_toeplitz(7200, 256)
        for noise, samples in ((0.47, 49_152), (0.444, 262_144)):
            print(row(scheme, strategy, noise, 10.0, samples), flush=True)
    else:
        scheme, strategy = BMinSep(1024, 256, 1, 16, warm=False), optimal_toeplitz(1024, 16)
        for epsilon, noise in CASES:
            print(row(scheme, strategy, noise, epsilon, 65_536), flush=True)


if __name__ == "__main__":
    main()
