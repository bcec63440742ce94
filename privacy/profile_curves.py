"""Upper bounds of worst-case privacy profiles, in closed form: the curves that `profiles.loss_distribution` takes.

The region of an admissible pair: narrow law of scale 1, wide law of scale `e^lam`, `0 <= lam <= beta`, centres at
most `a` apart in the family's norm, either one first. `H_epsilon(P, Q) = sup_E P(E) - e^epsilon Q(E)`.

Cells (any law with a density `g(||z||)`, `g` falling). Density of scale `e^lam`: `e^(-p lam) g(||z|| e^-lam)`. For
`l <= lam <= u`, `h = u - l` it is at most `e^(p h)` times that at `u` and at least `e^(-p h)` times that at `l`. So
`H_epsilon <= e^h H_(epsilon - h)(u)` (wide first) and `H_epsilon <= H_(epsilon - h)(l)` (narrow first), in one
dimension. The maximum over the cells that cover `[0, beta]` bounds the region without any monotonicity in `lam`; the
tests find no corner that is always the worst.

Shift. `H = 1 - int min(p, e^epsilon q)`, and the level sets in one dimension are intervals around the centres, which
overlap less as the centres part: the shift is `a`. In `p` dimensions for a log-concave density: `min(p(z), e^epsilon
q(z - v))` is log-concave in `(z, v)`, so its integral over `z` is log-concave in `v` [Prekopa 1973] and `H` is largest
at an extreme point of the ball of shifts: one coordinate takes the whole shift (l1; for l2 and a spherical law by
rotation).

Product. So for Laplace and Gaussian noise in `p` dimensions the worst pair at `lam` is a product: one coordinate with
shift `a` and dilation `lam`, and the pure dilation of `p - 1` coordinates. The curves of both factors, maximised over
`lam` and over the direction separately, give measures whose product dominates (`profiles.worst_case`).

Dilation of `k` coordinates. The loss depends on `rho ~ Gamma(shape)` alone (Laplace: `rho = ||z||_1`, shape `k`, `mu =
beta`; Gaussian: `rho = ||z||_2^2 / 2`, shape `k/2`, `mu = 2 beta`): wide first `(e^mu - 1) rho - shape mu`. `E` is the
outside (inside) of a ball; for every ball the difference grows with `mu`, so the largest dilation is the worst.

Sources: Balle & Wang 2018 (Gaussian without dilation); Canonne, Kamath, Steinke 2020, Corollary 13 (`concentrated`);
the region's curves are ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from certify.errors import PrivacyError
from privacy.noise.base import AdmissiblePair, beta_with_slack
from privacy.noise.gaussian import MARGIN

Curve = Callable[[np.ndarray], np.ndarray]
"""`delta(epsilon)`, vectorised, for epsilon >= 0."""

_CELLS = 256


def region_curve(stick: Callable, pairs: AdmissiblePair | Sequence[AdmissiblePair]) -> Curve:
    """An upper bound over the regions of `pairs` in one dimension. `stick(epsilon, a, lam, wide_first)`: an upper bound
    of the hockey stick of a symmetric law with falling density at shift `a` and dilation `lam`."""
    pairs = [pairs] if isinstance(pairs, AdmissiblePair) else list(pairs)
    if not pairs:
        raise PrivacyError("pairs: the list is empty; give the admissible pairs of the release")

    def curve(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        best = -np.expm1(np.minimum(x, 0.0))
        for pair in pairs:
            beta = beta_with_slack(pair.beta)
            edges = np.linspace(0.0, beta, _CELLS + 1 if pair.beta > 0.0 else 2)
            edges[-1] = beta
            h = float(np.diff(edges).max()) * (1.0 + 2.0**-40)
            for low, high in itertools.pairwise(edges.tolist()):
                best = np.maximum(best, math.exp(h) * stick(x - h, pair.a, high, True))
                best = np.maximum(best, stick(x - h, pair.a, low, False))
        return np.minimum(1.0, best * (1.0 + 1e-12))

    return curve


def cauchy_curve(epsilon: float) -> Curve:
    """Worst-case profile of one-dimensional Cauchy noise with pairs admissible for `epsilon`: exact, rounded up.

    The Cauchy laws are the points of the hyperbolic half plane and Moebius maps carry pairs to pairs, so the curve
    depends on the hyperbolic distance `d` alone, and `d <= epsilon` is what admissible pairs ensure. It grows with `d`:
    on the circle the pair is the uniform law against a Poisson kernel `K_r`, `r = tanh(d/2)`, and smaller `r` is the
    convolution with another kernel (data processing). `delta = 2/pi (atan c - e^x atan(e^-d c))`, `c^2 = (e^d - e^x) /
    (e^x - e^-d)`.

    Guarantees:
    * cauchy profile is the worst case over the region, and is attained.
    """
    d = float(epsilon)

    def curve(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        inside = np.abs(x) < d
        y = np.where(inside, x, 0.0)
        c = np.sqrt(-np.expm1(y - d) / -np.expm1(-d - y)) * np.exp((d - y) / 2.0)
        angle = np.arctan(c)
        value = 2.0 / np.pi * (angle - np.exp(y) * np.arctan(np.exp(-d) * c))
        value = np.maximum(value, 0.0) * (1.0 + 1e-12) + 1e-15 * angle
        return np.where(inside, value, -np.expm1(np.minimum(x, 0.0)))

    return curve


def laplace_curve(pairs: AdmissiblePair | Sequence[AdmissiblePair]) -> Curve:
    """Worst-case profile of one-dimensional Laplace noise over the regions of `pairs`: a proven upper bound.

    Guarantees:
    * laplace profile dominates the region: every shift, every dilation, both directions.
    """

    def stick(x, a, lam, wide_first):
        # Differences of numbers near 1 occur only up to here; beyond, the formula is one product.
        return laplace_hockey_stick(x, a, lam, wide_first) + 2e-15 * (x < a + lam)

    return region_curve(stick, pairs)


def power_curve(pairs: AdmissiblePair | Sequence[AdmissiblePair], q: int) -> Curve:
    """Worst-case profile of the one-dimensional power law `(1 + |z|)^-(1 + q)` over the regions of `pairs`.

    Guarantees:
    * power profile dominates the region: every shift, every dilation, both directions.
    """
    return region_curve(partial(power_hockey_stick, q=q), pairs)


def student_curve(pairs: AdmissiblePair | Sequence[AdmissiblePair], degrees: int) -> Curve:
    """Worst-case profile of Student noise with `degrees` degrees of freedom over the regions of `pairs`.

    Guarantees:
    * student profile dominates the region: every shift, every dilation, both directions.
    """
    return region_curve(partial(student_hockey_stick, degrees=degrees), pairs)


def normal_curve(pairs: AdmissiblePair | Sequence[AdmissiblePair]) -> Curve:
    """Worst-case profile of one-dimensional Gaussian noise over the regions of `pairs`.

    Guarantees:
    * gaussian profile dominates the region: every shift, every dilation, both directions.
    """
    return region_curve(normal_hockey_stick, pairs)


def dilation_curve(shape: float, mu: float) -> Curve:
    """Worst-case profile of a pure dilation by at most `mu`, where the loss is that of `Gamma(shape)` (see above).

    Guarantees:
    * dilation profile dominates every smaller dilation, both directions.
    """
    from scipy.special import gammainc, gammaincc

    growth, decay = math.expm1(mu), -math.expm1(-mu)

    def curve(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        e = np.exp(np.minimum(x, 700.0))
        outside, inside = (x + shape * mu) / growth, np.maximum(shape * mu - x, 0.0) / decay
        wide = _difference(gammaincc(shape, np.maximum(outside, 0.0)), e, gammaincc(shape, outside * math.exp(mu)))
        narrow = _difference(gammainc(shape, inside), e, gammainc(shape, inside * math.exp(-mu)))
        return np.minimum(1.0, np.maximum(wide, narrow))

    return curve


def concentrated_curve(rho: float) -> Curve:
    """What rho-zCDP says about the profile: `delta = min_alpha e^((alpha-1)(alpha rho - x)) / (alpha-1) (1 -
    1/alpha)^alpha`. Every alpha is valid; a fixed grid is used.

    Guarantees:
    * concentrated profile is never below that of a release that is rho zcdp.
    """
    less_one = np.exp(np.linspace(-7.0, 14.0, 1000))
    alpha = 1.0 + less_one
    fixed = less_one * alpha * rho - np.log(less_one) - alpha * np.log1p(1.0 / less_one)

    def curve(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float64)
        best = [float(np.min(fixed - less_one * value + 1e-12 * (1.0 + less_one * value))) for value in x.flat]
        return np.minimum(1.0, np.exp(np.minimum(best, 0.0)).reshape(x.shape) * (1.0 + 1e-12))

    return curve


# --- hockey sticks of one-dimensional pairs: centres `a` apart, scales 1 and `e^lam`, any real epsilon ---


def laplace_hockey_stick(epsilon: np.ndarray, a: float, lam: float, wide_first: bool) -> np.ndarray:
    """Laplace laws; closed form."""
    e = np.asarray(epsilon, np.float64)
    w, gap = math.exp(-lam), -math.expm1(-lam)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if wide_first:
            # The log ratio falls to its minimum at the narrow centre a, then rises: two tails (or everything).
            right = a + (e + lam + a * w) / gap if gap else np.full(e.shape, np.inf)
            outer = np.maximum(e - a + lam, 0.0) / gap if gap else np.where(e >= a, np.inf, 0.0)
            inner = np.maximum(a - lam - e, 0.0) / (1.0 + w)
            left = np.where(e < a - lam, 1.0 - 0.5 * np.exp(-inner * w) * (1.0 + w), 0.5 * np.exp(-outer * w) * gap)
            value = left + 0.5 * np.exp(-right * w) * gap
            return np.where(e <= -lam - a * w, -np.expm1(e), np.maximum(value, 0.0))
        # The log ratio has its peak at the narrow centre 0: one interval.
        room = np.maximum(lam + w * a - e, 0.0)
        left = np.exp(-room / gap) if gap else np.zeros(e.shape)
        near = 1.0 - 0.5 * np.exp(-room / (1.0 + w)) * (1.0 + 1.0 / w)
        beyond = np.exp(-a - np.maximum(lam - a - e, 0.0) / gap) if gap else np.zeros(e.shape)
        far = -np.expm1(e) + 0.5 * beyond * (1.0 / w - 1.0)
        value = 0.5 * left * (1.0 / w - 1.0) + np.where(e > lam - a, near, far)
        return np.where(e >= lam + w * a, 0.0, np.maximum(value, 0.0))


def power_hockey_stick(epsilon: np.ndarray, a: float, lam: float, wide_first: bool, q: int) -> np.ndarray:
    """Power laws `(1 + |z|)^-(1 + q)`, rounded up.

    `p > e^epsilon q` where `t + |y - a| > kappa (s + |y|)`, `kappa = e^(epsilon/c) (t/s)^(q/c)`, `c = 1 + q`: linear
    between the centres 0 and `a`, so on each of the three pieces it is one interval.
    """
    x = np.asarray(epsilon, np.float64)
    s, t = (math.exp(lam), 1.0) if wide_first else (1.0, math.exp(lam))
    c = 1.0 + q
    kappa = np.exp((np.minimum(x, 700.0) + q * (-lam if wide_first else lam)) / c)
    p_tail = lambda r: 0.5 * (1.0 + r / s) ** -q  # noqa: E731
    q_tail = lambda r: 0.5 * (1.0 + r / t) ** -q  # noqa: E731
    at_zero, at_a = t + a - kappa * s, t - kappa * (s + a)
    first = second = np.zeros(x.shape)
    for value, p_start, q_start in ((at_zero, 0.0, a), (at_a, a, 0.0)):
        # y = -r and y = a + r: positive where value + (1 - kappa) r > 0, from `start` to `stop`.
        with np.errstate(divide="ignore", invalid="ignore"):
            root = np.where(kappa == 1.0, np.inf, np.maximum(value / (kappa - 1.0), 0.0))
        start = np.where(value > 0.0, 0.0, np.where(kappa < 1.0, root, np.inf))
        stop = np.where((kappa < 1.0) | (value > 0.0) & (kappa == 1.0), np.inf, np.where(value > 0.0, root, np.inf))
        first = first + p_tail(p_start + start) - p_tail(p_start + stop)
        second = second + q_tail(q_start + start) - q_tail(q_start + stop)
    middle = np.clip(at_zero / (1.0 + kappa), 0.0, a)
    first = first + 0.5 - p_tail(middle)
    second = second + q_tail(a - middle) - q_tail(a)
    value = np.maximum(first - np.exp(np.minimum(x, 700.0)) * second, 0.0)
    return np.where(first > 0.0, value + 2e-15 * (10.0 + c), 0.0)


def student_hockey_stick(epsilon: np.ndarray, a: float, lam: float, wide_first: bool, degrees: int) -> np.ndarray:
    """Student laws, rounded up: `p > e^epsilon q` where `nu t^2 + (y - a)^2 > kappa (nu s^2 + y^2)`."""
    from scipy.special import stdtr

    x, nu = np.asarray(epsilon, np.float64), float(degrees)
    s, t = (math.exp(lam), 1.0) if wide_first else (1.0, math.exp(lam))
    log_kappa = 2.0 * (np.minimum(x, 300.0) + nu * (-lam if wide_first else lam)) / (nu + 1.0)
    constant = nu * t * t + a * a - np.exp(log_kappa) * nu * s * s
    first, second = _quadratic(-np.expm1(log_kappa), a, constant, partial(stdtr, nu), s, t)
    value = np.maximum(first - np.exp(np.minimum(x, 700.0)) * second, 0.0)
    return np.where(first > 0.0, value + 1e-13, 0.0)


def normal_hockey_stick(epsilon: np.ndarray, a: float, lam: float, wide_first: bool) -> np.ndarray:
    """Normal laws, rounded up."""
    from scipy.special import ndtr

    x = np.asarray(epsilon, np.float64)
    s, t = (math.exp(lam), 1.0) if wide_first else (1.0, math.exp(lam))
    square = np.full(x.shape, -math.expm1(-2.0 * lam if wide_first else 2.0 * lam))
    constant = a * a + 2.0 * t * t * ((-lam if wide_first else lam) - x)
    first, second = _quadratic(square, a, constant, ndtr, s, t)
    return _difference(first, np.exp(np.minimum(x, 700.0)), second)


def _quadratic(square, a: float, constant, cdf: Callable, s: float, t: float):
    """Masses of `square y^2 - 2 a y + constant > 0` under the laws `cdf(y / s)` and `cdf((y - a) / t)`, `a > 0`."""
    root = a * a - square * constant
    real = root > 0.0
    root = a + np.sqrt(np.maximum(root, 0.0))
    with np.errstate(divide="ignore"):
        one, two = constant / root, np.where(square == 0.0, np.inf, root / square)
    masses = []
    for centre, scale in ((0.0, s), (a, t)):
        below = cdf((one - centre) / scale)
        outside = np.where(real, below + cdf((centre - two) / scale), 1.0)
        between = np.where(real, below - cdf((two - centre) / scale), 0.0)
        masses.append(np.where(square >= 0.0, outside, np.maximum(between, 0.0)))
    return masses


def _difference(first, factor, second) -> np.ndarray:
    """`first - factor * second` of computed probabilities, outward by `MARGIN` of each."""
    return np.maximum(first * (1.0 + MARGIN) - factor * second * (1.0 - MARGIN), 0.0)
