"""Independent Cauchy coordinates on an l1 smooth bound: pure privacy, in one dimension the exact constants.

The Cauchy law with centre `m` and scale `s` is the point `(m, s)` of the hyperbolic half plane, and the worst log
ratio of two of them, in either direction, is their distance: `cosh d = 1 + ((m - m')^2 + (s - s')^2) / (2 s s')`.
With the smaller scale 1, the larger `e^lam` and a shift `t a`: `cosh d(t, lam) = cosh lam + e^-lam a^2 t^2 / 2`.
The joint loss of `p` coordinates is `sum_j d(t_j, lam)` with `t_j >= 0`, `sum t_j <= 1`, `0 <= lam <= beta`.

* `lam = 0` or `lam = beta` decides: for fixed `t`, `(t a, e^lam)` runs along a geodesic at unit speed, and the
  distance from a point to a moving point of a geodesic is convex (in one dimension: `cosh d` is convex in `lam`).
* `lam = 0`: `d = 2 asinh(a t / 2)` is concave in `t`, so equal shares are worst: `a <= 2 p sinh(epsilon / (2 p))`,
  exact.
* `lam = beta`: put `w_j = d_j - beta >= 0`. The shift that costs `w` is `T(w) = 2 sqrt(e^beta sinh(beta + w/2)
  sinh(w/2))`; the largest safe `a` is the minimum of `sum_j T(w_j)` over `sum w_j = E`, `E = epsilon - p beta`. `T`
  is first concave, then convex (`T'' >= 0` iff `coth(w/2) - coth(beta + w/2) <= 2`), `T(0) = 0`, and `T(w)/w` falls
  up to one point `w*` and rises after it (`w (ln T(w)/w)' = (x coth x + x coth(x + beta) - 2) / 2`, `x = w/2`,
  increases from -1/2). At the minimum `w*` of `T(w)/w` it is `T'' >= 0`. So the convex hull of `T` on `[0, E]` is
  the line to `w*`, then `T`, and by Jensen `a <= p hull(E / p)` suffices. It is the exact minimum when `E/p >= w*`,
  when `E/w*` is an integer of at most `p`, and when `E <= w*`; otherwise smaller than the exact one by a little
  (tests: at most 7 %).

Sources: AUDIT A11 of the paper (one dimension); the joint worst case is ours. In `p` dimensions the paper's `beta`
must be divided by `p`: dilations add up.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from privacy import sampling
from privacy.noise.base import Independent, NoiseFamily, beta_with_slack, round_down, spare_budget

_FRACTIONS = (0.25, 0.5, 0.7, 0.85, 0.95)
_JOINT_FRACTIONS = (0.0625, 0.125, 0.25, 0.5, 0.7, 0.85)


@dataclass(frozen=True)
class CauchyNoise(NoiseFamily):
    """Independent standard Cauchy coordinates for an l1 smooth bound; pure, any dimension. Public.

    Guarantees:
    * cauchy pairs are exactly epsilon dp in one dimension: the worst log ratio over the region is epsilon;
    * cauchy pairs are epsilon dp in p dimensions: the joint worst log ratio is at most epsilon;
    * cauchy law is exact (`sampling.Cauchy`).
    """

    name: ClassVar[str] = "cauchy"
    norm: ClassVar[str] = "l1"
    privacy: ClassVar[str] = "pure"

    def largest_a(self, epsilon: float, delta: float, beta: float, dim: int) -> float:
        beta = beta_with_slack(beta)
        spare = spare_budget(epsilon, dim, beta)
        if spare <= 0.0:
            return 0.0
        slide = 2.0 * dim * math.sinh(epsilon / (2.0 * dim))
        return round_down(min(slide, _dilated(spare, beta, dim)))

    def default_betas(self, epsilon: float, delta: float, dim: int) -> tuple[float, ...]:
        """In one dimension `ln(2 cosh epsilon - 1)`, the largest beta that costs no noise, and larger ones that do."""
        if dim > 1:
            return tuple(c * epsilon / dim for c in _JOINT_FRACTIONS)
        # The free beta is below epsilon by about e^{-epsilon}; for large epsilon keep a distance that float64 can see.
        free = min(math.log1p(4.0 * math.sinh(epsilon / 2.0) ** 2), epsilon * (1.0 - 2.0**-20))
        return (free, *(c * epsilon for c in _FRACTIONS if c * epsilon > free))

    def draw(self, dim: int, bits) -> Independent:
        return Independent(sampling.Cauchy, dim, bits)

    def typical(self, dim: int) -> float:
        """The median; the mean is infinite."""
        return 1.0

    def mean_is_finite(self, dim: int) -> bool:
        return False

    def tail(self, dim: int, level: float = 0.95) -> float:
        return math.tan(math.pi / 2.0 * level)


def shift_of(w: float, beta: float) -> float:
    """`T(w)`: how far (in smaller scales) one coordinate may move at dilation `beta` for a loss of `beta + w`."""
    # cosh(beta + w) - cosh(beta) as a product: no cancellation.
    return 2.0 * math.sqrt(math.exp(beta) * math.sinh(beta + w / 2.0) * math.sinh(w / 2.0))


def _dilated(spare: float, beta: float, dim: int) -> float:
    """`p hull(E / p)`: the bound at `lam = beta`."""
    if dim == 1 or _slope_sign(spare, beta) <= 0.0:
        return shift_of(spare, beta)
    if _slope_sign(spare / dim, beta) >= 0.0:
        return dim * shift_of(spare / dim, beta)
    low, high = spare / dim, spare
    for _ in range(200):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        low, high = (middle, high) if _slope_sign(middle, beta) < 0.0 else (low, middle)
    # The minimum is flat: at a relative distance of 2^-50 from w* the quotient is right to 2^-90.
    return spare * (shift_of(low, beta) / low)


def _slope_sign(w: float, beta: float) -> float:
    """Sign of the derivative of `T(w) / w`; increasing in `w`."""
    x = w / 2.0
    return x / math.tanh(x) + x / math.tanh(x + beta) - 2.0
