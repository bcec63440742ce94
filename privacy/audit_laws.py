"""What two releases with known laws give away about which of them happened: exact losses and hockey sticks.

The laws are `centre + scale * Z`, coordinate by coordinate, with centres `f`, `g` and scales `s`, `t`. In several
dimensions the scales of the coordinates may have different ratios (which a correct release never has: that is for
finding wrong ones). All arguments that come from data are PRIVATE, and so is what is returned.

Joint laws, `p` coordinates:

* Cauchy: coordinates are independent, so the suprema of the log ratio add up.
* power laws of a norm, `(1 + ||z||)^-c`, `c = p + q`: `ln p/q = sum_i ln(t_i/s_i) + c ln R`, `R = (1 + ||(y - g)/t||)
  / (1 + ||(y - f)/s||)`, and `sup R = max(1 + ||(f - g)/t||, max_i s_i/t_i)`: by the triangle inequality `R` is at
  most `(1 + ||(f - g)/t|| + m N) / (1 + N)`, `N = ||(y - f)/s||`, `m = max s_i/t_i`, which is monotone in `N`; it is
  attained at `y = f` and far out along the coordinate of the maximum. The same for both norms (l1, largest).
* Laplace, Gaussian: products of pairs, one per coordinate (a Gaussian pair with one ratio of scales is turned so that
  one coordinate takes the whole shift). Every line is cut into cells, the loss is rounded down, and the sums are
  convolved: a LOWER bound of the hockey stick, so what it refutes is refuted; losses are `ACCURACY` low.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from certify.errors import PrivacyError

ACCURACY = 0.005
"""How much of epsilon the rounded losses of `joint_hockey_stick` may be too low, in all."""


def pure_loss(family, f, s, g, t) -> np.ndarray:
    """Exact sup of `|ln p/q|` of the laws centred at `f`, `g` with scales `s`, `t`; arrays that broadcast.

    `family`: "cauchy", or a NoiseFamily in one dimension with `name` cauchy, student, l1-power or box-power.
    """
    f, s, g, t = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (f, s, g, t)))
    name = getattr(family, "name", family)
    h = np.abs(g - f)
    if name == "cauchy":
        return np.arccosh(1.0 + (h * h + (s - t) ** 2) / (2.0 * s * t))
    if name == "student":
        return _student_loss(float(family.degrees), h, s, t)
    if name in ("l1-power", "box-power"):
        c = 1.0 + family.exponent(1)
        # ln p/q = (c-1) ln(s/t) + c ln((t + |y-g|) / (s + |y-f|)): extremes at y = f, y = g and far away.
        values = [(c - 1.0) * np.log(s / t) + c * np.log(r) for r in ((t + h) / s, t / (s + h), np.ones_like(h))]
        return np.abs(values).max(axis=0)
    raise PrivacyError(f"family: there is no closed form for {name!r}; audit cauchy, student, l1-power or laplace")


def _student_loss(nu: float, h, s, t) -> np.ndarray:
    """`ln p/q = nu ln(s/t) - (nu+1)/2 ln((nu s^2 + x^2)/(nu t^2 + (x-h)^2))`: critical points solve a quadratic."""
    a, b = nu * s * s, nu * t * t
    # d/dx: x (b + (x-h)^2) = (x-h) (a + x^2)  <=>  -h x^2 + (b - a + h^2) x + h a = 0
    p = b - a + h * h
    root = p + np.where(p < 0.0, -1.0, 1.0) * np.sqrt(p * p + 4.0 * h * h * a)
    with np.errstate(divide="ignore", invalid="ignore"):
        points = [root / (2.0 * h), -2.0 * h * a / root, np.zeros_like(h), h]
    worst = nu * np.abs(np.log(s / t))  # far away
    for x in points:
        x = np.where(np.isfinite(x), x, 0.0)
        ratio = nu * np.log(s / t) - 0.5 * (nu + 1.0) * np.log((a + x * x) / (b + (x - h) ** 2))
        worst = np.maximum(worst, np.abs(ratio))
    return worst


def hockey_stick(family, epsilon: float, f: float, s: float, g: float, t: float) -> float:
    """Exact `sup_E P(E) - e^epsilon Q(E)` of two one-dimensional laws: P at `f` with scale `s`, Q at `g` with `t`."""
    name = getattr(family, "name", family)
    if name == "laplace":
        return _laplace_stick(epsilon, f, s, g, t)
    if name == "gaussian":
        return _gaussian_stick(epsilon, f, s, g, t)
    raise PrivacyError(f"family: there is no hockey stick for {name!r}; audit laplace or gaussian")


def _laplace_stick(epsilon, f, s, g, t) -> float:
    """`ln p/q - epsilon` is linear between the kinks `f`, `g`: sum the masses of the pieces where it is positive."""
    kinks = sorted((f, g))
    cuts = [-math.inf, *kinks, math.inf]
    for a, b in itertools.pairwise([-math.inf, *kinks, math.inf]):
        middle = b - 1.0 if a == -math.inf else a + 1.0 if b == math.inf else 0.5 * (a + b)
        slope = math.copysign(1.0, g - middle) * -1.0 / t - math.copysign(1.0, f - middle) * -1.0 / s
        value = math.log(t / s) - abs(middle - f) / s + abs(middle - g) / t - epsilon
        if slope and a < (root := middle - value / slope) < b:
            cuts.append(root)
    total = 0.0
    for a, b in itertools.pairwise(sorted(cuts)):
        middle = b - 1.0 if a == -math.inf else a + 1.0 if b == math.inf else 0.5 * (a + b)
        if a < b and math.log(t / s) - abs(middle - f) / s + abs(middle - g) / t > epsilon:
            total += _laplace_mass(a, b, f, s) - math.exp(epsilon) * _laplace_mass(a, b, g, t)
    return max(0.0, total)


def _laplace_mass(a: float, b: float, centre: float, scale: float) -> float:
    low, high = (a - centre) / scale, (b - centre) / scale
    if high <= 0.0:
        return 0.5 * math.exp(high) * -math.expm1(low - high)
    if low >= 0.0:
        return 0.5 * math.exp(-low) * -math.expm1(low - high)
    return -0.5 * math.expm1(low) - 0.5 * math.expm1(-high)


def _gaussian_stick(epsilon, f, s, g, t) -> float:
    """The event is an interval, its complement or a half line: the roots of a quadratic in `y - f`."""
    from scipy.special import ndtr

    h = g - f
    a, b, c = 0.5 / t**2 - 0.5 / s**2, -h / t**2, 0.5 * h * h / t**2 + math.log(t / s) - epsilon
    if a == 0.0:
        if b == 0.0:
            return max(0.0, -math.expm1(epsilon))
        edge = -c / b
        sign = math.copysign(1.0, b)  # y beyond the edge on the side of `sign`
        return max(0.0, float(ndtr(-sign * edge / s) - math.exp(epsilon) * ndtr(-sign * (edge - h) / t)))
    square = b * b - 4.0 * a * c
    if square <= 0.0:
        return 0.0 if a < 0.0 else -math.expm1(epsilon) if epsilon < 0.0 else 0.0
    half = -0.5 * (b + math.copysign(math.sqrt(square), b))
    low, high = sorted((half / a, c / half))
    p = float(ndtr(high / s) - ndtr(low / s))
    q = float(ndtr((high - h) / t) - ndtr((low - h) / t))
    if a > 0.0:
        p, q = float(ndtr(low / s) + ndtr(-high / s)), float(ndtr((low - h) / t) + ndtr(-(high - h) / t))
    return max(0.0, p - math.exp(epsilon) * q)


# --- joint laws ---


def joint_loss(family, f, s, g, t) -> np.ndarray:
    """Exact sup of `|ln p/q|` of joint laws; arrays (..., p). `family`: cauchy, l1-power or box-power; any pure one
    for p = 1."""
    f, s, g, t = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (f, s, g, t)))
    if family.name == "cauchy" or f.shape[-1] == 1:
        return pure_loss(family, f, s, g, t).sum(axis=-1)
    if family.name not in ("l1-power", "box-power"):
        raise PrivacyError(f"family: there is no joint log ratio for {family.name!r}; audit cauchy or a power law")
    c = f.shape[-1] + family.exponent(f.shape[-1])
    order = 1 if family.norm == "l1" else np.inf
    losses = []
    for one, two in ((s, t), (t, s)):
        ratio = np.maximum(1.0 + np.linalg.norm((f - g) / two, order, axis=-1), (one / two).max(axis=-1))
        losses.append(np.log(two / one).sum(axis=-1) + c * np.log(ratio))
    return np.maximum(*losses)


def joint_hockey_stick(family, epsilon: float, f, s, g, t) -> float:
    """Lower bound of `sup_E P(E) - e^epsilon Q(E)` of joint Laplace or Gaussian laws, exact for p = 1; arrays (p,)."""
    f, s, g, t = (np.asarray(x, np.float64) for x in (f, s, g, t))
    if len(f) == 1:
        return hockey_stick(family, epsilon, *(float(x[0]) for x in (f, s, g, t)))
    name, ratio = family.name, t / s
    if name not in ("laplace", "gaussian"):
        raise PrivacyError(f"family: there is no joint hockey stick for {name!r}; audit laplace or gaussian")
    shift = (g - f) / s
    if name == "gaussian" and np.ptp(ratio) <= 1e-12 * ratio[0]:
        shift, ratio = np.append(np.linalg.norm(shift), np.zeros(len(f) - 1)), np.full(len(f), ratio[0])
    step = max(ACCURACY * epsilon / len(f), 2.0**-16 * epsilon)
    pairs, counts = np.unique(np.stack([np.abs(shift), ratio], axis=1), axis=0, return_counts=True)
    total = None
    for (h, r), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        part = _power(_losses(name, h, r, step), count)
        total = part if total is None else _sum(total, part)
    lowest, mass = total
    loss = (lowest + np.arange(len(mass))) * step
    above = loss > epsilon
    return max(0.0, float(mass[above] @ -np.expm1(epsilon - loss[above])) - 1e-13)


def _losses(name: str, h: float, r: float, step: float) -> tuple[int, np.ndarray]:
    """Loss of the law at 0 with scale 1 against that at `h` with scale `r`, under the first, rounded down to `step`."""
    if name == "laplace":
        reach, cdf = 40.0, lambda y: np.where(y < 0.0, 0.5 * np.exp(-np.abs(y)), 1.0 - 0.5 * np.exp(-np.abs(y)))
        kinks, loss = [0.0, h], lambda y: math.log(r) - np.abs(y) + np.abs(y - h) / r
    else:
        from scipy.special import ndtr as cdf

        reach, loss = 9.0, lambda y: math.log(r) - 0.5 * y * y + 0.5 * ((y - h) / r) ** 2
        kinks = [] if r == 1.0 else [h / (1.0 - r * r)]
    edges = np.unique(np.concatenate([np.linspace(-reach, reach, 801), [k for k in kinks if abs(k) < reach]]))
    # Monotone within a cell: cut it until the loss moves by about a step.
    pieces = np.clip(np.ceil(np.abs(np.diff(loss(edges))) / step), 1, 500).astype(int)
    edges = np.append(np.concatenate([np.linspace(a, b, n, endpoint=False) for a, b, n in
                                      zip(edges, edges[1:], pieces, strict=False)]), edges[-1])  # fmt: skip
    # By symmetry of the laws the masses of the upper half are those of mirrored cells: no cancellation.
    mass = np.where(edges[1:] <= 0.0, np.diff(cdf(edges)), -np.diff(cdf(-edges)))
    values = loss(edges)
    place = np.floor(np.minimum(values[1:], values[:-1]) / step).astype(np.int64)
    lowest = int(place.min())
    return lowest, np.bincount(place - lowest, weights=np.maximum(mass, 0.0))


def _power(one: tuple[int, np.ndarray], count: int) -> tuple[int, np.ndarray]:
    result = None
    while count:
        if count & 1:
            result = one if result is None else _sum(result, one)
        count >>= 1
        one = _sum(one, one) if count else one
    return result


def _sum(one: tuple[int, np.ndarray], two: tuple[int, np.ndarray]) -> tuple[int, np.ndarray]:
    """The law of the sum of two losses; negligible ends are dropped, which only lowers the bound."""
    from scipy.signal import fftconvolve

    lowest, mass = one[0] + two[0], np.maximum(fftconvolve(one[1], two[1]), 0.0)
    kept = np.flatnonzero(mass > 1e-17)
    return lowest + int(kept[0]), mass[kept[0] : kept[-1] + 1]
