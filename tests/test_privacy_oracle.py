"""Privacy losses computed without certdp, for the other privacy tests; checked here against brute force.

`scale` is the noise scale (smooth bound over `a`), `centre` the value it is added to.
"""

import numpy as np
from scipy import integrate, stats


def cauchy_epsilon(centre, scale, centre2, scale2):
    """sup of |log density ratio| of two Cauchy laws, by the critical points of the ratio (quadratic), not by arcosh."""
    # d/dy [ln(s^2 + (y-f)^2) - ln(t^2 + (y-g)^2)] = 0 is a quadratic in y, with x = y - f and h = g - f.
    h, s, t = centre2 - centre, scale, scale2
    roots = np.roots([-h, h * h + t * t - s * s, h * s * s]) if h else np.array([0.0])
    x = np.concatenate([roots[np.isreal(roots)].real, [0.0, h]])
    ratio = np.log(s / t) - np.log((s * s + x * x) / (t * t + (x - h) ** 2))
    return float(max(np.max(np.abs(ratio)), abs(np.log(s / t))))


def laplace_delta(epsilon, centre, scale, centre2, scale2):
    """Hockey stick of Lap(centre, scale) over Lap(centre2, scale2): exact masses where the ratio exceeds e^epsilon."""

    def excess(y):
        return (
            (np.log(scale2 / scale) - np.abs(y - centre) / scale) + np.abs(y - centre2) / scale2 - epsilon
        )

    kinks = sorted([centre, centre2])
    far = 1e4 * max(scale, scale2) + abs(centre - centre2)
    edges, total = [kinks[0] - far, *kinks, kinks[1] + far], 0.0
    cuts = [-np.inf, *kinks, np.inf]
    for a, b in zip(edges, edges[1:], strict=False):
        va, vb = excess(a), excess(b)
        if va * vb < 0:
            cuts.append(a + (b - a) * va / (va - vb))
    cuts = sorted(cuts)
    p, q = stats.laplace(centre, scale), stats.laplace(centre2, scale2)
    for a, b in zip(cuts, cuts[1:], strict=False):
        middle = np.clip((max(a, edges[0]) + min(b, edges[-1])) / 2, edges[0], edges[-1])
        if excess(middle) > 0:
            tail = middle > centre
            mass = (p.sf(a) - p.sf(b)) if tail else (p.cdf(b) - p.cdf(a))
            tail = middle > centre2
            other = (q.sf(a) - q.sf(b)) if tail else (q.cdf(b) - q.cdf(a))
            total += mass - np.exp(epsilon) * other
    return max(float(total), 0.0)


def loss_over_region(a, beta, family, epsilon, steps=41):
    """Worst epsilon (Cauchy) or delta at `epsilon` (Laplace), both directions, over `|f-f'| <= a`, `s' <= e^beta`."""
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
