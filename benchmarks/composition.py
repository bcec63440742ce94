"""The tables of docs/composition.md: totals of composed releases, amplification, and concentrated noise.

    python benchmarks/composition.py

Nothing is random and nothing is timed: every figure is a bound that the library computes.
"""

from __future__ import annotations

from privacy.amplification import amplified, base_budget
from privacy.composition import Cost, advanced, basic, compose, optimal
from privacy.noise import FAMILIES, admissible_pairs, make_family
from privacy.profiles import worst_case

GRID = 2e-3


def composition() -> None:
    """Releases at epsilon = 0.5 each; totals at delta = 1e-4 (Laplace: 1e-7 a release at beta = 0.02)."""
    laplace = worst_case("laplace", 0.5, 1e-7, betas=[0.02], step=GRID)
    cauchy = worst_case("cauchy", 0.5, step=GRID)
    print("| releases | basic | advanced | optimal | Laplace profile | Cauchy: optimal | Cauchy profile |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for count in (4, 16, 64, 256):
        costs, pure = [Cost(0.5, 1e-7)] * count, [Cost(0.5)] * count
        totals = (
            basic(costs).epsilon,
            advanced(costs, 1e-4).epsilon,
            optimal(costs, 1e-4).epsilon,
            laplace.repeated(count).epsilon(1e-4),
            optimal(pure, 1e-4).epsilon,
            cauchy.repeated(count).epsilon(1e-4),
        )
        print(f"| {count} | {' | '.join(f'{t:.2f}' for t in totals)} |")


def families() -> None:
    """The same for every family: one release at (0.5, 0) or (0.5, 1e-7), beta as said, total delta 1e-4."""
    print("\n| family, numbers | beta | 4 | 16 | 64 | 64: by its points |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = [("cauchy", 1), ("student", 1), ("l1-power", 1), ("l1-power", 9), ("laplace", 1), ("laplace", 9)]
    rows += [("gaussian", 1), ("gaussian", 9), ("gaussian", 45), ("arsinh-normal", 9)]
    for name, dim in rows:
        delta = 0.0 if FAMILIES[name].load().privacy == "pure" else 1e-7
        listed = admissible_pairs(name, 0.5, delta, dim)
        pair = listed[len(listed) // 2]
        one = worst_case(name, 0.5, delta, dim, [pair.beta], step=GRID)
        totals = [one.repeated(count).epsilon(1e-4) for count in (4, 16, 64)]
        totals.append(optimal([Cost(0.5, delta)] * 64, 1e-4).epsilon)
        print(f"| {name}, {dim} | {pair.beta:.3g} | {' | '.join(f'{t:.2f}' for t in totals)} |")


def amplification() -> None:
    """Releases that would cost 0.1 alone from one sample of 1 in 64, composed and then amplified once."""
    base = base_budget(0.1, 0.0, 64, 1)
    totals = (f"{amplified(compose([base] * n), 64, 1).epsilon:.2f} for {n}" for n in (1, 2, 5, 10))
    print(f"\nbase epsilon {float(base.epsilon):.3f}; together: {', '.join(totals)}")


def concentrated() -> None:
    """Root mean square of one coordinate's noise for S = 1 at epsilon = 1, delta = 1e-5."""
    print("\n| dimension, β | Laplace log-normal | uniform log-normal | arsinh-normal | Gaussian |")
    print("| --- | --- | --- | --- | --- |")
    for dim, beta in ((1, 0.0), (1, 0.01), (1, 0.03), (45, 0.005)):
        row = []
        for name in ("laplace-log-normal", "uniform-log-normal", "arsinh-normal", "gaussian"):
            family = make_family(name, 1.0, 1e-5, dim)
            a = family.largest_a(1.0, 1e-5, beta, dim)
            size = 1.0 if name == "gaussian" else family.rms()
            row.append(f"{size / a:.2f}" if a else "–")
        print(f"| {dim}, {beta:g} | {' | '.join(row)} |")


if __name__ == "__main__":
    composition()
    families()
    amplification()
    concentrated()
