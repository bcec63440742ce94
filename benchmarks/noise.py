"""Noise of every family against the paper's constants, and the speed of the samplers.

    python benchmarks/noise.py [--write docs/noise.md] [--quick]

The tables are computed (no sampling): noise of one coordinate of a query of which one record moves every coordinate
by 1, so that S = p for l1, sqrt(p) for l2, 1 for the largest coordinate. Speed is CPU time of one thread, exact
rounding included.
"""

from __future__ import annotations

import argparse
import math
import platform
import re
import time
from fractions import Fraction
from pathlib import Path

EPSILONS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
DIMS = (1, 2, 9, 18, 45, 300)
DELTA = 1e-5
BEGIN, END = "<!-- benchmarks/noise.py -->\n", "<!-- end -->\n"


def noise_table(epsilon: float) -> str:
    """Markdown: families down, dimensions across; typical noise and, in brackets, the 95 % quantile."""
    from privacy.noise.compare import compare

    cells: dict[str, dict[int, str]] = {}
    for dim in DIMS:
        for row in compare(epsilon, DELTA, dim):
            label = f"{row.name} ({'median' if not row.mean else 'mean'})"
            tail = "" if math.isnan(row.tail) else f" ({row.tail * row.size:.3g})"
            least = epsilon / (4 * dim) * (1 - 2.0**-18)
            mark = "" if row.beta >= least else f" β={row.beta * dim / epsilon:.2g}ε/p"
            cells.setdefault(label, {})[dim] = f"{row.typical * row.size:.3g}{tail}{mark}"
    head = f"| ε = {epsilon:g} | " + " | ".join(f"p = {dim}" for dim in DIMS) + " |\n"
    head += "| --- |" + " ---: |" * len(DIMS) + "\n"
    return head + "".join(
        f"| {label} | " + " | ".join(row.get(dim, "–") for dim in DIMS) + " |\n" for label, row in cells.items()
    )


def speed_table(draws: int) -> str:
    """Markdown: releases per second, rounded to 2^-45 of the range and clipped to it, scale a hundredth of it."""
    from privacy.noise import make_family
    from privacy.sampling import SecureBits, grid_index

    class Coordinate:
        def __init__(self, z, i):
            self.z, self.i, self._spent = z, i, False

        def interval(self):
            return self.z.interval(self.i)

        def refine(self):
            self.z.refine(self.i)

    bits, grid, lines = SecureBits(), Fraction(1, 2**45), []
    for name in ("cauchy", "l1-power", "box-power", "student", "laplace", "gaussian", *BUN_STEINKE):
        rates = []
        for dim in (1, 45):
            family = make_family(name, 1.0, DELTA, dim)
            if family.largest_dim is not None and dim > family.largest_dim:
                rates.append("–")
                continue
            count = max(1, draws // dim)
            start = time.process_time()
            for _ in range(count):
                z = family.draw(dim, bits)
                for i in range(dim):
                    grid_index(0.3, 0.01, Coordinate(z, i), grid)
            rates.append(f"{count / (time.process_time() - start):,.0f}")
        lines.append(f"| {name} | {rates[0]} | {rates[1]} |\n")
    return "| releases per second | p = 1 | p = 45 (vectors) |\n| --- | ---: | ---: |\n" + "".join(lines)


BUN_STEINKE = ("laplace-log-normal", "uniform-log-normal", "arsinh-normal")


def bits_table(count: int) -> str:
    """Markdown: share of releases in (-1/2, 1/2) with a bit below 2^-60, for two values; ours and a naive sampler's."""
    import numpy as np

    from privacy.noise import make_family
    from privacy.sampling import SecureBits, grid_index

    fine, bits, rng, lines = Fraction(1, 2**64), SecureBits(), np.random.default_rng(0), []

    def share(values) -> str:
        kept = [v for v in values if abs(v) < Fraction(1, 2)]
        return f"{sum((v * 2**60).denominator > 1 for v in kept) / len(kept):.3f} of {len(kept)}"

    def naive(value):
        return map(Fraction, (value + 0.1 * rng.standard_cauchy(count)).tolist())

    lines.append(("naive Cauchy (float64)", share(naive(0.0)), share(naive(1.0))))
    for name in ("cauchy", "l1-power", "student", "laplace"):
        law = make_family(name, 1.0, DELTA, 1)
        ours = [[grid_index(f, 0.4, law.draw(1, bits), fine) * fine for _ in range(count)] for f in (0.0, 1.0)]
        lines.append((name, *map(share, ours)))
    head = "| bits below 2^-60 | f = 0 | f = 1 |\n| --- | ---: | ---: |\n"
    return head + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def report(quick: bool) -> str:
    parts = [noise_table(epsilon) for epsilon in ((1.0,) if quick else EPSILONS)]
    parts += [speed_table(400 if quick else 6000), bits_table(2000 if quick else 20000)]
    machine = f"Python {platform.python_version()}, {platform.machine()}, δ = {DELTA:g} for the (ε, δ) families.\n"
    return "\n".join(parts) + "\n" + machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page whose marked section is replaced")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    text = report(arguments.quick)
    if arguments.write:
        page = arguments.write.read_text()
        pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
        arguments.write.write_text(re.sub(pattern, lambda _: BEGIN + "\n" + text + "\n" + END, page, flags=re.S))
    else:
        print(text)


if __name__ == "__main__":
    main()
