"""One vector release `f(D) + (S(D)/a) Z ./ w`: which noise, which smooth bound, how it is drawn.

AGT-R, classification and AGS all end here. A `Mechanism` is PUBLIC and fixed before the data is looked at;
bounds, smooth bounds and scales are PRIVATE.

Proof that a release is (epsilon, delta)-DP. Put `phi = w * f` (elementwise, `w` public). `S` is a smooth upper
bound of the local sensitivity of `phi` in the family's norm (`smooth.norm_outputs`), and the pairs `(a, beta)` are
admissible for it, so `phi + (S/a) Z` is private by the family's guarantee, with `S/a` the minimum over the public
list of pairs (`noise.noise_scale`). Dividing by `w`, rounding to the public grid and clipping are post-processing.
All coordinates are drawn from one vector `Z`, whose coordinates may depend on each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from certify.errors import PrivacyError
from privacy import noise, sampling, smooth
from privacy.noise.compare import growth

EXPONENT = {"l1": 1.0, "l2": 0.5, "linf": 0.0}


@dataclass(frozen=True)
class Mechanism:
    """Noise of `dim` coordinates that is admissible at (epsilon, delta); public."""

    family: noise.NoiseFamily
    epsilon: float
    delta: float
    dim: int
    pairs: tuple

    @classmethod
    def make(cls, family, epsilon: float, delta: float, dim: int, betas=None) -> Mechanism:
        """`family`: a name, a NoiseFamily, or None for `default_family`. `betas`: public list, or None.

        Raises PrivacyError when the budget, the family and the betas do not fit.
        """
        if family is None:
            family = default_family(epsilon, delta, dim)
            delta = 0.0 if family.privacy == "pure" else delta
        elif isinstance(family, str):
            family = noise.make_family(family, epsilon, delta, dim)
        if family.privacy == "concentrated" or family.norm not in EXPONENT:
            raise PrivacyError(
                f"family: {family.name} noise is not for a smooth bound of one norm at (epsilon, delta); "
                "choose cauchy, l1-power, box-power, laplace or gaussian"
            )
        pairs = tuple(noise.admissible_pairs(family, epsilon, delta, dim, betas))
        return cls(family, float(epsilon), float(delta), int(dim), pairs)

    @property
    def norm(self) -> str:
        """Norm of the sensitivity; in one dimension all norms are the same and the cheapest is taken."""
        return self.family.norm if self.dim > 1 else "l1"

    @property
    def cost(self) -> float:
        """`expected_noise` of one coordinate for `dim` coordinates that change alike; public."""
        return expected_noise(self, self.dim)

    def describe(self) -> str:
        dimension = "one" if self.dim == 1 else str(self.dim)
        return f"smooth sensitivity ({self.norm}), {dimension}-dimensional {self.family.name} noise"


def expected_noise(mechanism: Mechanism, change: float) -> float:
    """PUBLIC figure of merit: 95 % quantile of a coordinate's noise where one record moves `change` coordinates by 1.

    The cross range at distance `k` is taken to be `(2k + 1)` times that at distance 0, as for interval bounds of one
    step. Only used to compare mechanisms by public facts (as `noise.compare` does); nothing is proved from it.
    """
    tail = mechanism.family.tail(mechanism.dim)
    tail = tail if tail == tail else 3.0 * mechanism.family.typical(mechanism.dim)
    size = change ** EXPONENT[mechanism.norm]
    return min((size * tail * growth(pair.beta) / pair.a for pair in mechanism.pairs), default=math.inf)


def default_family(epsilon: float, delta: float, dim: int) -> noise.NoiseFamily:
    """The PUBLIC rule for the noise: it sees the budget and the dimension, never data.

    One dimension: laplace when `delta > 0`, else cauchy. More: the family with the least `expected_noise`; pure
    families compete at delta = 0.
    """
    if dim == 1:
        return noise.make_family("laplace" if delta > 0.0 else "cauchy", epsilon, delta, 1)
    best, found, refusal = math.inf, None, None
    for name in noise.FAMILIES:
        try:
            family = noise.make_family(name, epsilon, 0.0, dim)
            if family.privacy != "pure":
                family = noise.make_family(name, epsilon, delta, dim)
            mechanism = Mechanism.make(family, epsilon, delta if family.privacy != "pure" else 0.0, dim)
        except PrivacyError as error:
            refusal = error
            continue
        cost = expected_noise(mechanism, dim)
        if found is None or cost < best:
            best, found = cost, mechanism.family
    if found is None:
        raise refusal or PrivacyError("family: no noise family is admissible; raise the budget")
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Noisy:
    """Released vectors (G, g), public, with their PRIVATE smooth bounds `{beta: (G,)}` and scales (G,)."""

    values: np.ndarray
    smooth: dict[float, np.ndarray]
    scale: np.ndarray

    def __repr__(self) -> str:
        return "<Noisy: holds private scales, not shown>"


def smooth_bounds(
    lower: np.ndarray,
    upper: np.ndarray,
    ceiling: np.ndarray,
    mechanism: Mechanism,
    weights=None,
    radii=None,
    difference: np.ndarray | None = None,
) -> dict[float, np.ndarray]:
    """PRIVATE `{beta: S_beta (G,)}` of `G` vectors, in the mechanism's norm, for each of its betas.

    `lower`, `upper` (K+1, G, g): bounds over radii 0..K, already clipped; `ceiling` (G, g): PUBLIC bound of how far
    each coordinate can move; `weights` (g,): PUBLIC; `radii`: refused unless they are 0..K without gaps.
    `difference` (K, C, G, g): entry `k` bounds how far the coordinates of two neighbours are apart that both lie within
    radius `k + 1` and differ in a slot of public class `c`; monotone across neighbours, like the bounds.

    Guarantee:
    * certificates lower the sensitivity, not the guarantee: coordinate by coordinate the smaller of cross range and
      certificate bounds the change of a record of class `c` and is monotone across neighbours, so the largest norm
      over the classes is as good as the cross range alone (docs/relational.md).
    """
    ceiling = smooth.check_ceiling(ceiling, np.shape(lower)[1:])
    cross = np.minimum(smooth.cross_ranges(lower, upper), ceiling)[:, None]
    if difference is not None:
        cross = np.minimum(cross, smooth.check_difference(difference, cross.shape))
    cross, top = (smooth.norm_outputs(x, mechanism.norm, weights) for x in (cross, ceiling))
    cross = cross.max(axis=1)
    return {pair.beta: smooth.smooth_bound(cross, top, pair.beta, radii=radii) for pair in mechanism.pairs}


def release_vectors(
    nominal: np.ndarray,
    smooth_by_beta: dict[float, np.ndarray],
    mechanism: Mechanism,
    grid: np.ndarray,
    *,
    ends: tuple[np.ndarray, np.ndarray] | None = None,
    weights: np.ndarray | None = None,
    bits=None,
) -> Noisy:
    """`G` independent releases of `g` coordinates each, every one at the mechanism's (epsilon, delta).

    `nominal` (G, g) and `smooth_by_beta` `{beta: (G,)}` are PRIVATE: `S_beta` bounds the norm of a change of `weights *
    nominal` and is beta-smooth. PUBLIC: `grid`, powers of two broadcastable to (G, g); `ends`, the range (G, g) that
    values are clipped to AFTER the noise; `weights` (g,): coordinate `i` gets noise `S / (a w_i)`.

    Guarantees:
    * vector release is dp: each of the `G` rows is (epsilon, delta)-DP, given (S) and (M);
    * weights change the noise, not the cost: the sensitivity is that of the weighted vector.
    """
    scale = noise.noise_scale(smooth_by_beta, mechanism.pairs)
    bits = sampling.SecureBits() if bits is None else bits
    grid = np.broadcast_to(np.asarray(grid, np.float64), nominal.shape)
    weight = [1] * nominal.shape[1] if weights is None else [Fraction(float(w)) for w in np.ravel(weights)]
    values = np.empty(nominal.shape)
    for row, (f, s) in enumerate(zip(nominal.tolist(), scale.tolist(), strict=True)):
        z, s = mechanism.family.draw(mechanism.dim, bits), Fraction(s)
        z._spent = True  # one vector, one release
        for i, value in enumerate(f):
            ends_i = None if ends is None else (float(ends[0][row, i]), float(ends[1][row, i]))
            values[row, i] = sampling.release(value, s / weight[i], _Coordinate(z, i), float(grid[row, i]), ends_i)
    return Noisy(values, smooth_by_beta, scale)


class _Coordinate:
    """One coordinate of a noise vector, in the form that `sampling.release` reads."""

    __slots__ = ("_index", "_spent", "_vector")

    def __init__(self, vector, index: int):
        self._vector, self._index, self._spent = vector, index, False

    def interval(self) -> tuple[int, int, int, int]:
        return self._vector.interval(self._index)

    def refine(self) -> None:
        self._vector.refine(self._index)
