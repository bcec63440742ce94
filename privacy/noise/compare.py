"""The families side by side, with the paper's constants, and a recommendation from public facts alone.

What is compared: noise of one coordinate, for `S = 1` in the family's own norm, and (times `size`) for a query of which
one record moves `moves` coordinates by 1 each, so that `S` is `moves`, its root, or 1 (l1, l2, linf). `S` itself
depends on beta (a smaller beta gives a larger `S`), so figures at different betas do not compare as they stand; the
recommendation takes the growth into account by a public model.
"""

import math
from dataclasses import dataclass

from certify.errors import PrivacyError
from privacy.noise import FAMILIES, NoiseFamily, admissible_pairs, make_family

PER_NORM = {"l1": 1.0, "l2": 0.5, "linf": 0.0}


@dataclass(frozen=True)
class Row:
    """One line of the comparison; public. `typical`, `tail`: of `|Z_i| / a`, for `S = 1` in `norm`.

    `mean`: `typical` is a mean (else a median). `size`: `S` when one record moves `moves` coordinates by 1. `merit`:
    what the recommendation minimises; infinite for the paper's constants and where the 95 % quantile is not known.
    """

    name: str
    shape: str
    privacy: str
    norm: str
    beta: float
    a: float
    typical: float
    mean: bool
    tail: float
    size: float
    merit: float


def compare(epsilon: float, delta: float, dim: int, moves: int | None = None) -> tuple[Row, ...]:
    """A row per family that exists for the budget and the dimension, then the paper's constants. All public.

    Pure families are listed with delta = 0 whatever `delta` is; concentrated ones reach (epsilon, delta) by way of
    zCDP. The row's beta is `reference_beta` where the scale there is at most twice the smallest of the family's pairs,
    else the largest of its list for which that holds. `moves`: 1 to `dim`, by default `dim`.
    """
    moves = dim if moves is None else moves
    if not 1 <= moves <= dim:
        raise PrivacyError(f"moves: {moves!r} is not between 1 and the dimension {dim}; give a number in that range")
    rows = []
    for name in FAMILIES:
        try:
            family = make_family(name, epsilon, delta, dim)
            budget = epsilon, 0.0 if family.privacy == "pure" else delta
            pairs = admissible_pairs(family, *budget, dim)
        except PrivacyError:
            continue
        rows.append(_row(family, *budget, dim, moves, pairs))
    return (*rows, *paper(epsilon, delta, dim, moves))


def recommend(rows: tuple[Row, ...]) -> Row:
    """The row with the least `merit`: `min over pairs of S * tail * growth(beta) / a`, a public figure.

    `tail`: the 95 % quantile of `|Z_i|`. `growth(beta) = max_k (2k + 1) e^{-beta k}`: the smooth bound of a query whose
    cross ranges grow like those of interval bounds of one step. A rule of thumb: nothing is proved from it.
    """
    best = min(rows, key=lambda row: row.merit, default=None)
    if best is None or best.merit == math.inf:
        raise PrivacyError("epsilon: no family admits a positive beta at this budget; raise epsilon")
    return best


def reference_beta(epsilon: float, dim: int) -> float:
    """`epsilon / (4 p)`, a little less for rounding: half of what the paper takes."""
    return epsilon / (4 * dim) * (1.0 - 2.0**-19)


def growth(beta: float) -> float:
    """`max_k (2k + 1) e^{-beta k}` over whole `k >= 0`; infinite at 0."""
    if beta <= 0.0:
        return math.inf
    top = math.floor(max(0.0, 1.0 / beta - 0.5))
    return max((2 * k + 1) * math.exp(-beta * k) for k in (0, top, top + 1))


def paper(epsilon: float, delta: float, dim: int, moves: int | None = None) -> tuple[Row, ...]:
    """The paper's constants, with the betas of its Corollary V.1 and Table II in several dimensions."""
    size = float(dim if moves is None else moves)

    def line(name, privacy, beta, a, mean, tail):
        return Row(name, "", privacy, "l1", beta, a, 1.0 / a, mean, tail / a, size, math.inf)

    far = math.tan(math.pi / 2 * 0.95)
    rows = [
        line("paper Cauchy 6S/ε", "pure", epsilon / (6 * dim), epsilon / 6, False, far),
        line("paper Cauchy 2S/ε", "pure", epsilon / (2 * dim), epsilon / 2, False, far),
    ]
    if delta > 0.0:
        logs = math.log(2 / delta) if dim == 1 else dim * (1 + 2 * math.log(2 * dim / delta))
        beta = epsilon / (2 * logs)
        rows.append(line("paper Laplace 2S/ε", "approximate", beta, epsilon / 2, True, math.log(20)))
    return tuple(rows)


def _row(family: NoiseFamily, epsilon, delta, dim, moves, pairs) -> Row:
    beta = reference_beta(epsilon, dim)
    a = family.largest_a(epsilon, delta, beta, dim)
    most = max(pair.a for pair in pairs)
    if a < most / 2:
        pair = max((pair for pair in pairs if pair.a >= most / 2), key=lambda pair: pair.beta)
        a, beta = pair.a, pair.beta
    size = float(moves) ** PER_NORM["linf" if dim == 1 else family.norm]
    tail = family.tail(dim)
    merit = math.inf if math.isnan(tail) else min(size * tail * growth(pair.beta) / pair.a for pair in pairs)
    mean = family.mean_is_finite(dim)
    typical, norm = family.typical(dim) / a, "any" if dim == 1 else family.norm
    return Row(family.name, _shape(family, dim), family.privacy, norm, beta, a, typical, mean, tail / a, size, merit)


def _shape(family: NoiseFamily, dim: int) -> str:
    fields = vars(family)
    if "q" in fields:
        return f"q = {family.exponent(dim)}"
    return ", ".join(f"{key} = {value:.4g}" for key, value in fields.items())
