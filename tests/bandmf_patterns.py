"""All participation patterns of a scheme with their probabilities: the definition, step by step, without a recursion.

An independent oracle for the likelihood ratios and the samplers of participations; exponential in the number of steps.
"""

import itertools
import json
from collections import defaultdict
from math import comb
from pathlib import Path

import numpy as np

from privacy.bandmf.likelihood import SECRET
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Poisson
from privacy.bandmf.strategy import Strategy

GOLDEN = json.loads((Path(__file__).parent / "data" / "bandmf_kernel.json").read_text())
MANY = 10**6  # examples; only the rate matters where nothing is truncated


def dense(strategy):
    """``C`` as a square matrix."""
    n, bands = strategy.columns.shape
    c = np.zeros((n, n))
    for i in range(n):
        for d in range(min(bands, n - i)):
            c[i + d, i] = strategy.columns[i, d]
    return c


def from_dense(c):
    c = np.array(c, float)
    n = len(c)
    bands = max(i - j for i in range(n) for j in range(n) if c[i, j]) + 1
    return Strategy(np.array([[c[i + d, i] if i + d < n else 0.0 for d in range(bands)] for i in range(n)]))


def b_min_sep(steps, p, separation, warm, truncate=None, examples=MANY):
    """The scheme whose probability of joining is ``p``."""
    return BMinSep(steps, examples, p / (1 + (separation - 1) * p) * examples, separation, warm, truncate)


def waits(scheme):
    """``[(steps to wait at first, probability)]``."""
    b = scheme.separation
    if isinstance(scheme, BMinSep) and scheme.warm:
        p = scheme.probability
        return [(0, 1 / (1 + (b - 1) * p))] + [(s, p / (1 + (b - 1) * p)) for s in range(1, b)]
    return [(0, 1.0)]


def patterns(scheme, group=0, kept=None, direction="remove"):
    """``{x: probability}``, x a tuple over the steps; ``kept`` (steps,) for truncated batches."""
    n = scheme.steps
    found = defaultdict(float)
    if isinstance(scheme, BallsInBins | CyclicPoisson):
        secret = isinstance(scheme, BallsInBins) or group == SECRET
        groups = range(scheme.separation) if secret else [group]
        p = 1.0 if isinstance(scheme, BallsInBins) else scheme.probability
        for g in groups:
            members = range(g, n, scheme.separation)
            for joins in itertools.product((0, 1), repeat=len(members)):
                x = [0] * n
                for i, join in zip(members, joins, strict=True):
                    x[i] = join
                chance = np.prod([p if join else 1 - p for join in joins]) / len(groups)
                if chance:
                    found[tuple(x)] += chance
    else:
        k = scheme.per_user if isinstance(scheme, MultiAttribution) else 1
        p = scheme.probability
        law = [comb(k, j) * p**j * (1 - p) ** (k - j) for j in range(k + 1)]

        def walk(i, wait, x, chance):
            if chance == 0.0:
                return
            if i == n:
                found[tuple(x)] += chance
            elif wait:
                walk(i + 1, wait - 1, [*x, 0], chance)
            else:
                walk(i + 1, 0, [*x, 0], chance * law[0])
                for j in range(1, k + 1):
                    walk(i + 1, scheme.separation - 1, [*x, j], chance * law[j])

        for wait, chance in waits(scheme):
            walk(0, wait, [], chance)
    return dict(found) if kept is None else cut(found, kept, direction)


def cut(plain, kept, direction):
    """Patterns after truncation [BMS, Appendix D]: drawn and kept in a cut batch counts 2 with, -1 without."""
    found = defaultdict(float)
    for x, chance in plain.items():
        options = []
        for drawn, share in zip(x, kept, strict=True):
            if not drawn:
                options.append([(0, 1.0)])
            elif direction == "remove":
                options.append([(2, share), (0, 1 - share)] if share else [(1, 1.0)])
            else:
                options.append([(-1, share), (0, 1 - share)] if share else [(0, 1.0)])
        for choice in itertools.product(*options):
            found[tuple(c for c, _ in choice)] += chance * np.prod([w for _, w in choice])
    return dict(found)


def log_mixture(law, strategy, noise_multiplier, outputs):
    """``ln`` of the mixture of ``N(C x, sigma^2 I)`` over ``law``, against ``N(0, sigma^2 I)``."""
    c, x = dense(strategy), np.array(list(law), float)
    weights = np.log(np.array(list(law.values())))
    means = x @ c.T
    exponents = (2 * outputs @ means.T - (means**2).sum(1)) / (2 * noise_multiplier**2) + weights
    return np.logaddexp.reduce(exponents, axis=1)


def enumerated(scheme, strategy, noise_multiplier, outputs, counts=None, group=0):
    """``ln (P/Q)(y)`` by enumeration."""
    if counts is None:
        return log_mixture(patterns(scheme, group), strategy, noise_multiplier, outputs)
    kept = np.where(counts >= scheme.truncate, scheme.truncate / (counts + 1.0), 0.0)
    sides = [
        log_mixture(patterns(scheme, group, kept, direction), strategy, noise_multiplier, outputs)
        for direction in ("remove", "add")
    ]
    return sides[0] - sides[1]


def golden_case(case):
    """``scheme, strategy, group`` of a reference value."""
    n, p, name = case["n"], case.get("p"), case["scheme"]
    strategy = from_dense(case["C"]) if "C" in case else Strategy.toeplitz(case["coef"], n)
    examples = case.get("N", case.get("dataset_size", MANY))
    if name.startswith("b_min_sep"):
        limit = case.get("B_max", case.get("Bmax"))
        return b_min_sep(n, p, case["b"], case.get("warm_start", case.get("warm")), limit, examples), strategy, None
    if name == "poisson":
        return Poisson(n, MANY, p * MANY), strategy, None
    if name == "balls_in_bins":
        return BallsInBins(n, MANY, case["T"]), strategy, None
    if name == "multi_attribution":
        return MultiAttribution(n, p, case["b"], case["k"]), strategy, None
    scheme = CyclicPoisson(n, MANY, p * MANY / case["b"], case["b"])
    return scheme, strategy, case.get("group", SECRET)
