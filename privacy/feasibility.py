"""When does noise for a smooth bound beat noise for the global sensitivity? Theorems IV.3 and IV.4, and sharper ones.

"Beats at confidence `1 - alpha`": the `1 - alpha` quantile of the absolute noise is smaller. Noise of scale
`S / a` times a standard law against noise of scale `GS / a'` times another: smooth noise wins exactly when
`S / GS < ratio = a q' / (a' q)`, with `q`, `q'` the quantiles of the two standard laws. All of it is PUBLIC arithmetic;
whether a *given* data set meets the condition is private (choosing by it costs budget, THEORY section 5).

* Theorem IV.3 (Ghitu & Wicker), pure: Cauchy `6 S / epsilon` (beta = epsilon/6) against Laplace `GS / epsilon`:
  `ratio = ln(1/alpha) / (6 tan(pi (1 - alpha) / 2))`, at most 0.1172 (at 1 - alpha = 0.377), free of epsilon.
* Theorem IV.4, approximate: Laplace `2 S / epsilon` (beta = epsilon / (2 ln(2/delta))) against the classical Gaussian
  `GS sqrt(2 ln(1.25/delta)) / epsilon`: `ratio = sqrt(2 ln(1.25/delta)) z_{1 - alpha/2} / (2 c ln(1/alpha))`, where
  `c >= 1` multiplies the smooth scale (a certified bound that is `c` times the smooth sensitivity).
* Ours: the exact constants on BOTH sides (exact calibration of the smooth law; Laplace or the analytic Gaussian for
  the global one). Pure: `2 sinh(epsilon/2) ln(1/alpha) / (epsilon tan(pi (1 - alpha) / 2))`, six times the paper's and
  more, for any beta up to `ln(2 cosh epsilon - 1)`. Approximate: in one dimension plain Laplace beats the Gaussian at
  every usual confidence, and smooth Laplace beats plain Laplace only where `S/GS < a / epsilon`, which is below 1: the
  ratios above 1 of Theorem IV.4 say that the classical Gaussian is a poor choice for one number.

`S` is the smooth bound for the stated beta: a larger beta gives a smaller `S`, so two ratios compare only together with
their betas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from certify.errors import PrivacyError


@dataclass(frozen=True)
class Condition:
    """Smooth noise beats global noise when `S_beta / GS < ratio`; public. `smooth`, `against`: the two mechanisms."""

    name: str
    smooth: str
    against: str
    beta: float
    ratio: float


def noise_quantile(law: str, confidence: float) -> float:
    """`confidence` quantile of `|Z|` for the standard "cauchy", "laplace" or "gaussian" law."""
    check_confidence(confidence)
    if law == "cauchy":
        return math.tan(0.5 * math.pi * confidence)
    if law == "laplace":
        return -math.log1p(-confidence)
    if law == "gaussian":
        from scipy.special import ndtri

        return float(-ndtri(0.5 * (1.0 - confidence)))
    raise PrivacyError(f"law: found {law!r}; choose cauchy, laplace or gaussian")


def theorem_iv3(confidence: float, constant: float = 6.0) -> float:
    """Largest `S/GS` at which Cauchy noise `constant * S / epsilon` beats Laplace `GS / epsilon`.

    `constant`: 6 in the theorem (Definition III.7); 2 for the noise of the paper's Table I.
    """
    return noise_quantile("laplace", confidence) / (constant * noise_quantile("cauchy", confidence))


def theorem_iv4(confidence: float, delta: float, looseness: float = 1.0) -> float:
    """Largest `S/GS` at which Laplace noise `2 c S / epsilon` beats the classical Gaussian; `looseness` is `c`."""
    check_delta(delta)
    gauss = math.sqrt(2.0 * math.log(1.25 / delta)) * noise_quantile("gaussian", confidence)
    return gauss / (2.0 * looseness * noise_quantile("laplace", confidence))


def global_noise(epsilon: float, delta: float, confidence: float, law: str | None = None) -> tuple[str, float]:
    """A global mechanism ("laplace", "analytic gaussian", None for the better one) and its quantile for GS = 1."""
    from privacy.baselines import analytic_gaussian

    found = [("laplace", noise_quantile("laplace", confidence) / epsilon)]
    if delta > 0.0:
        scale = analytic_gaussian(1.0, epsilon, delta)
        found.append(("analytic gaussian", scale * noise_quantile("gaussian", confidence)))
    found = [one for one in found if law in (None, one[0])]
    if not found:
        raise PrivacyError(f"law: found {law!r}, delta = {delta!r}; choose laplace or (with delta) analytic gaussian")
    return min(found, key=lambda one: one[1])


def sharper_pure(epsilon: float, confidence: float, beta: float | None = None) -> Condition:
    """Ours for delta = 0: exactly calibrated Cauchy against Laplace. `beta`: default the largest that costs no noise.

    Guarantees:
    * sharper condition has the exact quantiles: below the ratio smooth noise is smaller at this confidence, above
      it is larger.
    """
    return _sharper("cauchy", epsilon, 0.0, confidence, beta)


def sharper_approximate(
    epsilon: float, delta: float, confidence: float, beta: float | None = None, against: str | None = None
) -> Condition:
    """Ours for delta > 0: exactly calibrated Laplace against the better of Laplace and the analytic Gaussian.

    `beta`: default the paper's `epsilon / (2 ln(2/delta))`. `against`: one of the two only.
    """
    check_delta(delta)
    return _sharper("laplace", epsilon, delta, confidence, beta, against)


def conditions(epsilon: float, delta: float, confidence: float, betas: Sequence[float] = ()) -> tuple[Condition, ...]:
    """All conditions for one budget: the paper's beside ours; with `delta > 0` those of both noise laws."""
    check_epsilon(epsilon)
    if delta != 0.0:
        check_delta(delta)
    found = [
        Condition("Theorem IV.3", "cauchy 6 S/eps", "laplace", epsilon / 6.0, theorem_iv3(confidence)),
        Condition("Table I noise", "cauchy 2 S/eps", "laplace", epsilon / 2.0, theorem_iv3(confidence, 2.0)),
        sharper_pure(epsilon, confidence),
        *(sharper_pure(epsilon, confidence, beta) for beta in betas),
    ]
    if delta > 0.0:
        usual = textbook_beta(epsilon, delta)
        ratio = theorem_iv4(confidence, delta)
        found += [
            Condition("Theorem IV.4", "laplace 2 S/eps", "classical gaussian", usual, ratio),
            sharper_approximate(epsilon, delta, confidence, against="analytic gaussian"),
            sharper_approximate(epsilon, delta, confidence),
            *(sharper_approximate(epsilon, delta, confidence, beta) for beta in betas),
        ]
    return tuple(found)


def textbook_beta(epsilon: float, delta: float) -> float:
    """The beta of Definition III.8, `epsilon / (2 ln(2/delta))`."""
    return epsilon / (2.0 * math.log(2.0 / delta))


def peak(ratio=theorem_iv3) -> tuple[float, float]:
    """(confidence, value) of the maximum over the confidence; for Theorem IV.3 (0.377, 0.1172)."""
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(lambda c: -ratio(c), bounds=(0.01, 0.99), method="bounded", options={"xatol": 1e-10})
    return float(found.x), float(-found.fun)


def unity(delta: float) -> float:
    """The confidence past which the ratio of Theorem IV.4 is below 1: there smooth noise needs S < GS to win."""
    from scipy.optimize import brentq

    check_delta(delta)
    return 1.0 - 10.0 ** brentq(lambda e: theorem_iv4(1.0 - 10.0**e, delta) - 1.0, -13.0, -0.5)


def plot(epsilon: float, delta: float, path: str | Path) -> Path:
    """Figure 1 of the paper with our conditions beside it: (a) pure, (b) approximate. Public; writes a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    check_epsilon(epsilon)
    check_delta(delta)
    figure, axes = plt.subplots(1, 2, figsize=(12.0, 4.6), layout="constrained")
    grid = np.linspace(0.005, 0.995, 199)
    left, right = axes
    high = [sharper_pure(epsilon, c).ratio for c in grid]
    free = sharper_pure(epsilon, 0.5).beta
    left.plot(grid, high, color="tab:blue", lw=2.0, label=rf"ours, exact Cauchy, $\beta$ = {free:.3g}")
    left.plot(
        grid, [theorem_iv3(c, 2.0) for c in grid], color="tab:orange", lw=1.6,
        label=rf"paper's Table I noise, $\beta$ = {epsilon / 2:.3g}",
    )  # fmt: skip
    left.plot(
        grid, [theorem_iv3(c) for c in grid], color="firebrick", lw=1.6,
        label=rf"Theorem IV.3, $\beta$ = {epsilon / 6:.3g}",
    )  # fmt: skip
    at, most = peak()
    left.plot([at], [most], "o", color="firebrick", ms=5)
    left.annotate(f"{most:.4f} at {at:.3f}", (at, most), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    left.set_title(rf"(a) pure, $\varepsilon$ = {epsilon:g}: Cauchy beats Laplace below the line", fontsize=11)
    left.set_ylim(0.0, 1.32 * max(high))
    usual = textbook_beta(epsilon, delta)
    for other, style in ((1e-3, "--"), (delta, "-")):
        if style == "-" or other != delta:
            right.plot(
                grid, [theorem_iv4(c, other) for c in grid], style, color="firebrick", lw=1.6,
                label=rf"Theorem IV.4, against classical Gaussian, $\delta$ = {other:g}",
            )  # fmt: skip
    for against, colour in (("analytic gaussian", "tab:blue"), ("laplace", "tab:green")):
        exact = [sharper_approximate(epsilon, delta, c, against=against).ratio for c in grid]
        name = "analytic Gaussian" if "gauss" in against else "plain Laplace"
        right.plot(grid, exact, color=colour, lw=2.0, label=rf"ours, against {name}, $\delta$ = {delta:g}")
    right.axhline(1.0, color="grey", lw=1.0, ls=":")
    note = "above 1: wins even where S = GS"
    right.annotate(note, (0.02, 1.0), (0, 4), textcoords="offset points", fontsize=8.5, color="dimgrey")
    title = rf"(b) approximate, $\varepsilon$ = {epsilon:g}, $\beta$ = {usual:.3g}: Laplace wins below the line"
    right.set_title(title, fontsize=11)
    right.set_ylim(0.0, 4.2)
    for axis in axes:
        axis.set_xlabel(r"confidence $1-\alpha$")
        axis.set_ylabel(r"largest $S_\beta / GS$ at which smooth noise wins")
        axis.set_xlim(0.0, 1.0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=9, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return Path(path)


def check_epsilon(epsilon: float) -> None:
    if not 0.0 < epsilon <= 100.0:
        raise PrivacyError(f"epsilon: {epsilon!r} is not in (0, 100]; choose it in that range")


def check_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise PrivacyError(f"delta: {delta!r} is not in (0, 1); this condition is for approximate privacy, set delta")


def check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise PrivacyError(f"confidence: {confidence!r} is not in (0, 1); give 1 - alpha, for example 0.9")


def _sharper(
    law: str, epsilon: float, delta: float, confidence: float, beta: float | None, against: str | None = None
) -> Condition:
    from privacy.noise import admissible_pairs

    check_epsilon(epsilon)
    if beta is not None:
        betas = [beta]
    elif law == "laplace":
        betas = [textbook_beta(epsilon, delta)]
    else:  # ln(2 cosh epsilon - 1), kept below epsilon by a distance that float64 can see
        betas = [min(math.log1p(4.0 * math.sinh(epsilon / 2.0) ** 2), epsilon * (1.0 - 2.0**-20))]
    (pair,) = admissible_pairs(law, epsilon, delta, betas=betas)
    against, size = global_noise(epsilon, delta, confidence, against)
    ratio = pair.a * size / noise_quantile(law, confidence)
    return Condition("ours", f"{law} S/{pair.a:.4g}", against, pair.beta, ratio)
