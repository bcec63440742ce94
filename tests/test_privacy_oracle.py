"""Privacy losses computed without certdp, for the other privacy tests; checked here against brute force.

`scale` is the noise scale (smooth bound over `a`), `centre` the value it is added to.
"""

import math

import numpy as np
from scipy import integrate, stats


def cauchy_epsilon(centre, scale, centre2, scale2):
    """sup of |log density ratio| of two Cauchy laws, by the critical points of the ratio (quadratic), not by
    arcosh."""
    # d/dy [ln(s^2 + (y-f)^2) - ln(t^2 + (y-g)^2)] = 0 is a quadratic in y, with x = y - f and h = g - f.
    h, s, t = centre2 - centre, scale, scale2
    roots = np.roots([-h, h * h + t * t - s * s, h * s * s]) if h else np.array([0.0])
    x = np.concatenate([roots[np.isreal(roots)].real, [0.0, h]])
    ratio = np.log(s / t) - np.log((s * s + x * x) / (t * t + (x - h) ** 2))
    return float(max(np.max(np.abs(ratio)), abs(np.log(s / t))))


def _laplace_mass(low, high, centre, scale):
    """P(low < Y < high) of Lap(centre, scale), accurate in both tails."""
    a, b = (low - centre) / scale, (high - centre) / scale
    if b <= 0:
        return 0.5 * math.exp(b) * -math.expm1(a - b)
    if a >= 0:
        return 0.5 * math.exp(-a) * -math.expm1(a - b)
    return 1.0 - 0.5 * math.exp(a) - 0.5 * math.exp(-b)


def laplace_delta(epsilon, centre, scale, centre2, scale2):
    """Hockey stick of Lap(centre, scale) over Lap(centre2, scale2): masses of the set where the ratio is
    above e^epsilon."""

    def excess(y):
        return math.log(scale2 / scale) - abs(y - centre) / scale + abs(y - centre2) / scale2 - epsilon

    kinks = sorted([centre, centre2])
    far = 1e4 * max(scale, scale2) + kinks[1] - kinks[0]
    edges = [kinks[0] - far, *kinks, kinks[1] + far]
    cuts = [-math.inf, *kinks, math.inf]
    for a, b in zip(edges, edges[1:], strict=False):
        va, vb = excess(a), excess(b)
        if va * vb < 0:
            cuts.append(a + (b - a) * va / (va - vb))
    cuts.sort()
    total = 0.0
    for a, b in zip(cuts, cuts[1:], strict=False):
        if b > a and excess((max(a, edges[0]) + min(b, edges[-1])) / 2) > 0:
            other = _laplace_mass(a, b, centre2, scale2)
            total += _laplace_mass(a, b, centre, scale) - math.exp(epsilon) * other
    return max(total, 0.0)


def loss_over_region(a, beta, family, epsilon, steps=41):
    """Worst epsilon (Cauchy) or delta at `epsilon` (Laplace), both directions, over `|f-f'| <= a`, `s' <=
    e^beta`."""
    worst = 0.0
    for ratio in np.exp(np.linspace(0.0, beta, steps)):
        for shift in a * np.linspace(0.0, 1.0, 9):
            if family == "cauchy":
                worst = max(worst, cauchy_epsilon(0.0, 1.0, shift, ratio))
            else:
                worst = max(worst, laplace_delta(epsilon, 0.0, 1.0, shift, ratio))
                worst = max(worst, laplace_delta(epsilon, 0.0, ratio, shift, 1.0))
    return worst


def test_cauchy_epsilon_agrees_with_a_grid():
    y = np.concatenate([np.linspace(-60, 60, 600001), np.geomspace(60, 1e9, 4000), -np.geomspace(60, 1e9, 4000)])
    for centre, scale in [(0.0, 1.0), (1.0, 2.0), (0.3, 0.2), (5.0, 1.5)]:
        ratio = stats.cauchy.logpdf(y) - stats.cauchy.logpdf(y, centre, scale)
        exact = cauchy_epsilon(0.0, 1.0, centre, scale)
        assert abs(exact - np.max(np.abs(ratio))) < 1e-5
        hyperbolic = np.arccosh(1 + (centre**2 + (1 - scale) ** 2) / (2 * scale))
        assert abs(exact - hyperbolic) < 1e-9


def test_laplace_delta_agrees_with_quadrature():
    for epsilon, shift, scale in [(0.5, 0.8, 1.2), (1.0, 0.5, 0.9), (0.2, 0.3, 1.0), (2.0, 1.5, 1.4)]:
        p, q = stats.laplace(0.0, 1.0), stats.laplace(shift, scale)

        def integrand(y, p=p, q=q, epsilon=epsilon):
            return max(p.pdf(y) - np.exp(epsilon) * q.pdf(y), 0.0)

        pieces = np.linspace(-40.0, 40.0, 401)
        total = sum(integrate.quad(integrand, a, b)[0] for a, b in zip(pieces, pieces[1:], strict=False))
        assert abs(total - laplace_delta(epsilon, 0.0, 1.0, shift, scale)) < 1e-6
