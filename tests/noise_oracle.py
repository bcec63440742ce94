"""Privacy losses of vector noise found by searching, without the formulas of `privacy.noise`.

Pairs of laws: the narrow one has scale 1 and centre 0, the wide one scale `e^lam` and centre at most `a` away in
the norm (separate scales: see `separate_loss`). A search gives a LOWER bound of the true worst case: it refutes, and
where it comes close to the claim, the claim is tight.
"""

import math

import numpy as np
from scipy import integrate, special

# One dimension: any density, by a grid of points that is refined around the best one.


def scalar_loss(log_density, a, beta, steps=21):
    """sup over the region, both directions, of the log ratio of a one-dimensional law given by its log density."""
    far = np.geomspace(1e-6, 1e9, 3001)
    best = 0.0
    for lam in np.linspace(0.0, beta, steps):
        for shift in (a * np.linspace(0.0, 1.0, 5)).tolist():

            def ratio(y, lam=lam, shift=shift):
                return np.abs(log_density(y) - log_density((y - shift) * np.exp(-lam)) + lam)

            y = np.concatenate([-far, far, far + shift, shift - far, np.linspace(-2 * a, 3 * a, 2001)])
            for _ in range(3):
                value = ratio(y)
                top = y[np.argmax(value)]
                y = top + np.linspace(-1.0, 1.0, 2001) * (1e-3 * abs(top) + 1e-3 * a)
            best = max(best, float(ratio(y).max()))
    return best


def student(nu):
    return lambda z: -(nu + 1) / 2 * np.log1p(z * z / nu)


def cauchy_coordinate(shift, lam):
    """Worst log ratio of two Cauchy laws at each `shift` (array), by the roots of the derivative of the ratio."""
    h, t = np.maximum(np.asarray(shift, float), 1e-12), math.exp(lam)
    # (1 + x^2) against (t^2 + (x - h)^2): h x^2 + (1 - t^2 - h^2) x - h = 0.
    middle = 1.0 - t * t - h * h
    root = (-middle + np.sqrt(middle * middle + 4 * h * h)) / (2 * h)
    ratio = [np.log1p(x * x) - np.log(t * t + (x - h) ** 2) + lam for x in (root, -1.0 / root)]
    return np.maximum(np.maximum(*map(np.abs, ratio)), lam)


def cauchy_joint_loss(a, beta, dim, cells=240, steps=5):
    """sup over dilations and splits of the shift among `dim` coordinates, exact over splits into multiples of 1/cells.

    Maximum of a sum over a simplex: max-plus convolution, by repeated squaring.
    """
    best = 0.0
    for lam in np.linspace(0.0, beta, steps):
        power = cauchy_coordinate(a * np.arange(cells + 1) / cells, lam)
        total, left = np.zeros(1), dim
        while left:
            if left & 1:
                total = _max_plus(total, power, cells)
            power, left = _max_plus(power, power, cells), left >> 1
        best = max(best, float(total.max()))
    return best


def _max_plus(f, g, cells):
    out = np.full(min(len(f) + len(g) - 1, cells + 1), -np.inf)
    for i, value in enumerate(f):
        width = min(len(g), len(out) - i)
        out[i : i + width] = np.maximum(out[i : i + width], value + g[:width])
    return out


# Power laws: vectors, norms and densities in p dimensions.

NORMS = {"l1": lambda z: np.abs(z).sum(-1), "linf": lambda z: np.abs(z).max(-1)}


def power_loss(norm, dim, q, a, beta, steps=9, seed=0):
    """sup of the log ratio of two power laws in `dim` dimensions, over points near, between and far from the
    centres."""
    size, rng, best = NORMS[norm], np.random.default_rng(seed), 0.0
    for direction in _directions(dim, rng):
        shift = a * direction / size(direction)
        points = [np.zeros((1, dim)), shift[None], np.outer(np.linspace(-2, 3, 101), shift)]
        for other in _directions(dim, rng):
            points.append(np.outer(np.geomspace(1e-3, 1e12, 61), other))
        y = np.concatenate(points)
        for lam in np.linspace(0.0, beta, steps):
            one = -(dim + q) * np.log1p(size(y))
            two = -dim * lam - (dim + q) * np.log1p(size(y - shift) * np.exp(-lam))
            best = max(best, float(np.abs(one - two).max()))
    return best


def _directions(dim, rng):
    yield np.eye(dim)[0]
    yield -np.ones(dim)
    for _ in range(3):
        yield rng.normal(size=dim)
    yield np.where(rng.random(dim) < 0.5, 1.0, 1e-6)


def separate_loss(dim, q, a, beta):
    """The box power law with a scale per coordinate: 1 and `e^lam_j`, `|lam_j| <= beta` of any sign, shifts up to `a`
    times the smaller of the two scales. Corners of the region, points at the centres and far out."""
    best, c = 0.0, dim + q
    signs = np.array(np.meshgrid(*[[-1.0, 0.0, 1.0]] * dim)).reshape(dim, -1).T
    far = np.concatenate([[0.0], np.geomspace(1e-3, 1e12, 31)])
    for sign in signs:
        lam = beta * sign
        shift = a * np.minimum(1.0, np.exp(lam))
        for where in range(dim):
            for y in (far, -far):
                points = np.zeros((len(far), dim))
                points[:, where] = y
                for at in (points, points + shift):
                    one = -c * np.log1p(np.abs(at).max(1))
                    two = -lam.sum() - c * np.log1p((np.abs(at - shift) * np.exp(-lam)).max(1))
                    best = max(best, float(np.abs(one - two).max()))
    return best


# Laplace vectors: the hockey stick by quadrature.


def laplace_joint_delta(epsilon, a, lam, dim, wide_first):
    """Hockey stick of two product Laplace laws, the shift `a` along the first axis; scales 1 and `e^lam`.

    The other coordinates enter through `rho ~ Gamma(dim - 1)` only, whose part is in closed form; the first coordinate
    is integrated numerically between the kinks.
    """
    t, rest = math.exp(lam), dim - 1
    scale, other, centre = (t, 1.0, a) if wide_first else (1.0, t, -a)
    sign = 1.0 if wide_first else -1.0

    def inner(z):
        """Contribution of the first coordinate at `z` (in units of the first law's scale, around its centre)."""
        x = z * scale
        loss = math.log(other / scale) - abs(z) + abs(x - centre) / other
        density = 0.5 * math.exp(-abs(z))
        # Loss of the rest: sign * (|e^lam - 1| or |1 - e^-lam|) rho - sign * rest lam.
        slope = scale / other - 1.0
        if rest == 0 or lam == 0.0:
            return density * max(0.0, -math.expm1(epsilon - loss - rest * math.log(other / scale)))
        border = (epsilon - loss + sign * rest * lam) / slope
        border = max(border, 0.0)
        tail = special.gammaincc if wide_first else special.gammainc
        first, second = tail(rest, border), tail(rest, border * scale / other)
        return density * max(0.0, first - math.exp(epsilon - loss) * second)

    kinks = sorted({0.0, centre / scale})
    pieces = [-60.0, *kinks, 60.0]
    total = 0.0
    for low, high in zip(pieces, pieces[1:], strict=False):
        for part in np.linspace(0.0, 1.0, 9)[:-1]:
            width = (high - low) / 8
            total += integrate.quad(inner, low + part * (high - low), low + part * (high - low) + width, limit=100)[0]
    return total


def laplace_plane_delta(epsilon, shift, lam, wide_first, cells=900):
    """The same for two coordinates and any split of the shift, by a midpoint grid."""
    scale, other = (math.exp(lam), 1.0) if wide_first else (1.0, math.exp(lam))
    edges = np.linspace(-22.0, 22.0, cells + 1)
    z = (edges[1:] + edges[:-1]) / 2
    log_p = [-np.abs(z) - math.log(2 * scale)] * 2
    log_q = [-np.abs(z * scale - s) / other - math.log(2 * other) for s in shift]
    p = log_p[0][:, None] + log_p[1][None]
    q = log_q[0][:, None] + log_q[1][None]
    return float(np.sum(np.maximum(np.exp(p) - np.exp(epsilon + q), 0.0)) * ((edges[1] - edges[0]) * scale) ** 2)
