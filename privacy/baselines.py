"""What one would use otherwise: plain mechanisms, with the adjacency and the accounting of this package.

* `laplace`, `gaussian`: noise for a global sensitivity (Dwork et al. 2006; Balle & Wang 2018);
* `output_perturbation`: one training run whose sensitivity is bounded by contraction (THEORY section 5);
* `dp_sgd`: noisy gradients through Opacus (optional extra), for comparisons.

Sensitivities, scales and grids here are PUBLIC, unlike those of a smooth bound. The values given to a mechanism
and the records are PRIVATE. A sensitivity is a promise about the numbers *as computed*: clip to a public range and take
its width, or add the rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from certify.errors import PrivacyError
from privacy import sampling

ADJACENCIES = ("replace-one", "zero-out")
LARGEST_EPSILON = 500.0


@dataclass(frozen=True)
class BaselineGuarantee:
    """Public facts of a release: its whole cost under `adjacency`, the global `sensitivity` in `norm`, the noise."""

    epsilon: float
    delta: float
    adjacency: str
    mechanism: str
    sensitivity: float
    norm: str
    scale: float
    grid: float


@dataclass(frozen=True, eq=False)
class BaselineRelease:
    """Noisy `values`, float64 in the shape of the input; may be published."""

    values: np.ndarray
    guarantee: BaselineGuarantee


def laplace(
    values,
    sensitivity: float,
    epsilon: float,
    *,
    adjacency: str = "replace-one",
    output_range: tuple[float, float] | None = None,
    grid: float | None = None,
    bits=None,
) -> BaselineRelease:
    """Release `values` (any shape) with Laplace noise of scale `sensitivity / epsilon` in every entry.

    `sensitivity`: public, at least the l1 distance of the computed values of any two neighbours. `grid`: public
    power of two; by default 2^-45 of the range, or 2^-40 of the scale, both public.

    Guarantees:
    * laplace release is epsilon dp: the worst log ratio, `sensitivity / scale`, is at most epsilon, exactly;
    * rounding is post-processing of the ideal real number (`sampling`).
    """
    _check(sensitivity, epsilon, 0.0, adjacency)
    scale = _up(Fraction(float(sensitivity)) / Fraction(float(epsilon)))
    law = "Laplace mechanism, global sensitivity"
    terms = float(epsilon), 0.0, adjacency, law, float(sensitivity), "l1", scale
    return _release(values, sampling.Laplace, terms, output_range, grid, bits)


def gaussian(
    values,
    sensitivity: float,
    epsilon: float,
    delta: float,
    *,
    adjacency: str = "replace-one",
    output_range: tuple[float, float] | None = None,
    grid: float | None = None,
    bits=None,
) -> BaselineRelease:
    """Release `values` with the analytic Gaussian mechanism; `sensitivity`: public, l2, as in `laplace`.

    Guarantees:
    * gaussian release is epsilon delta dp: `gaussian_delta` of the scale is at most `delta`.
    """
    from privacy.noise.gaussian import Normal

    _check(sensitivity, epsilon, delta, adjacency)
    scale = analytic_gaussian(sensitivity, epsilon, delta)
    law = "analytic Gaussian mechanism, global sensitivity"
    terms = float(epsilon), float(delta), adjacency, law, float(sensitivity), "l2", scale
    return _release(values, Normal, terms, output_range, grid, bits)


def gaussian_delta(scale: float, sensitivity: float, epsilon: float) -> float:
    """The exact delta of Gaussian noise (Balle & Wang 2018, Theorem 8), as an upper bound.

    `Phi(D/2s - e s/D) - exp(e) Phi(-D/2s - e s/D)`, plus a bound of its rounding error. Works for `epsilon >= 0`.
    """
    from scipy.special import log_ndtr

    half, tilt = sensitivity / (2.0 * scale), epsilon * scale / sensitivity
    first = math.exp(log_ndtr(half - tilt))
    second = math.exp(min(0.0, epsilon + log_ndtr(-half - tilt)))
    # log_ndtr is good to a few ulp; the exponent's error grows with its size.
    error = 2.0**-48 * (1.0 + epsilon + (half + tilt) ** 2) * first
    return max(0.0, first - second) + error


def analytic_gaussian(sensitivity: float, epsilon: float, delta: float) -> float:
    """The smallest scale (to 1e-9, rounded up) with `gaussian_delta <= delta`.

    The classical `sqrt(2 ln(1.25/delta)) / epsilon` is proved for epsilon <= 1 only and wrong at epsilon = 10.
    """
    _check(sensitivity, epsilon, delta, "replace-one")
    if not 0.0 < delta < 1.0:
        raise PrivacyError(f"delta: Gaussian noise needs 0 < delta < 1, found {delta!r}; set delta or use laplace")
    low, high = 0.0, 1.0
    while gaussian_delta(high, 1.0, epsilon) > delta:
        low, high = high, 2.0 * high
        if high > 1e15:
            raise PrivacyError(f"delta: {delta!r} is too small for float64 at epsilon = {epsilon!r}; raise it")
    while high - low > 1e-10 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if gaussian_delta(middle, 1.0, epsilon) <= delta else (middle, high)
    return _up(Fraction(high) * Fraction(float(sensitivity)))


def classical_gaussian(sensitivity: float, epsilon: float, delta: float) -> float:
    """The textbook scale, for comparisons: too small above epsilon = 1 (true delta 2.3e-5 for 1e-5 at 10)."""
    return sensitivity * math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


# --- output perturbation ---


def contractive_sensitivity(
    *,
    parameters: int,
    clip: float,
    rate: float | Sequence[float],
    normaliser: int,
    contraction: float,
    lipschitz: float,
    largest_batch: int | None = None,
    start: float = 0.0,
    adjacency: str = "replace-one",
    norm: str = "l1",
    gradient_error: float = 2.0**-30,
) -> float:
    """Global sensitivity of the trained parameters in `norm`, for any number of contracting steps.

    One step `theta <- c theta - (rate / b) sum clip(g_i(theta))` on neighbours moves their distance to at most
    `(c + rate l) dist + 2 rate v / b`, with `v = p clip` in l1 and `sqrt(p) clip` in l2 (zero-out: `v` once). So
    the distance never exceeds `2 rate v / (b (1 - c - rate l))`. Public arguments:

    `lipschitz`: `l`, a bound for EVERY admissible record of how fast its clipped gradient changes, as an operator
    in `norm` (for linear regression see `linear_lipschitz`); a step has at most `largest_batch` records (default `b`).
    `rate`: of every step, or their list (the largest counts). `start`: largest magnitude of an initial parameter.
    `gradient_error`: bound of the error of one computed gradient entry, relative to `clip`; with the rounding
    of the update it is paid for at every step.

    Guarantees:
    * contractive training stays within the sensitivity, for all neighbours;
    * a step that need not contract is refused: PrivacyError unless `c + rate l < 1`. "Gradient descent contracts" is
      no argument: with elementwise clipping even a convex loss can expand.
    """
    if adjacency not in ADJACENCIES or norm not in ("l1", "l2"):
        raise PrivacyError(
            f"adjacency, norm: found {adjacency!r}, {norm!r}; choose {' or '.join(ADJACENCIES)}, and l1 or l2"
        )
    eta = float(np.max(rate))
    sizes = (float(clip), eta, float(contraction), float(lipschitz), float(start), float(gradient_error))
    if not (all(math.isfinite(x) and x >= 0.0 for x in sizes) and min(parameters, normaliser, clip, eta) > 0):
        raise PrivacyError(
            "contractive_sensitivity: parameters, clip, rate and normaliser must be positive and all finite; "
            f"found {parameters}, {clip}, {eta}, {normaliser}, {contraction}, {lipschitz}"
        )
    exact = [Fraction(x) for x in sizes]
    clip_, eta_, c_, l_, start_, error_ = exact
    share = Fraction(normaliser if largest_batch is None else int(largest_batch), normaliser)
    factor = c_ + eta_ * l_ * share
    if factor >= 1:
        raise PrivacyError(
            f"lipschitz: contraction + rate * lipschitz = {float(factor):.6g} is not below 1, so nothing bounds how "
            "neighbours drift apart; lower the rate or the contraction, or certify an envelope instead"
        )
    jump = eta_ * clip_ * (2 if adjacency == "replace-one" else 1) / normaliser
    size = max(start_, eta_ * clip_ * share / (1 - c_))
    rounding = 2 * (eta_ * clip_ * share * error_ + Fraction(2.0**-48) * (size + eta_ * clip_ * share))
    entries = Fraction(parameters) if norm == "l1" else Fraction(math.nextafter(math.sqrt(parameters), math.inf))
    return _up(entries * (jump + rounding) / (1 - factor))


def linear_lipschitz(largest_feature: float, columns: int, curvature: float, norm: str = "l1") -> float:
    """Public Lipschitz constant of the clipped gradient of a linear model with bias, for features in `[-m, m]`.

    The gradient is `h(x.w + b) (x, 1)`, its Jacobian `h' v v^T` with `v = (x, 1)`, rows of it zeroed by the clip.
    `curvature` bounds `|h'|`: 2 for the squared loss, 1 for Huber, 1/4 for the logistic loss. In l1 the operator
    norm is at most `|v|_inf |v|_1`; in l2 at most `|v|_2^2` (the clip only zeroes rows).
    """
    if norm not in ("l1", "l2"):
        raise PrivacyError(f"norm: found {norm!r}; choose l1 or l2")
    m, c = Fraction(float(largest_feature)), Fraction(float(curvature))
    return _up(c * (max(m, Fraction(1)) * (columns * m + 1) if norm == "l1" else columns * m * m + 1))


def output_perturbation(
    graph,
    recipe,
    features,
    targets,
    epsilon: float,
    delta: float = 0.0,
    *,
    lipschitz: float,
    gradient_error: float = 2.0**-30,
    threads: int = 1,
    bits=None,
) -> BaselineRelease:
    """Train without noise and release the parameters `(P,)` with noise for `contractive_sensitivity`.

    `lipschitz`: public, see there; in l1 for `delta = 0` (Laplace), in l2 for `delta > 0` (Gaussian). `features`,
    `targets` and the noiseless parameters are PRIVATE. Raises PrivacyError where the recipe does not contract.

    Guarantees:
    * output perturbation is dp: (epsilon, delta), under the recipe's adjacency.
    """
    from certify.driver import prepare, train

    problem = prepare(graph, recipe, features, targets)
    training, norm = recipe.training, "l2" if delta > 0.0 else "l1"
    schedule = problem.schedule
    initial = problem.graph.initial()
    adjacency = recipe.privacy.adjacency
    bound = contractive_sensitivity(
        parameters=initial.size,
        clip=training.clip,
        rate=problem.rates,
        normaliser=schedule.normaliser,
        contraction=training.contraction,
        lipschitz=lipschitz,
        largest_batch=schedule.size,
        start=float(np.abs(initial).max(initial=0.0)),
        adjacency=adjacency,
        norm=norm,
        gradient_error=gradient_error,
    )
    theta = train(graph, recipe, features, targets, threads)
    if delta > 0.0:
        return gaussian(theta, bound, epsilon, delta, adjacency=adjacency, bits=bits)
    return laplace(theta, bound, epsilon, adjacency=adjacency, bits=bits)


# --- noisy gradients ---


def poisson_gaussian_delta(
    noise_multiplier: float, sample_rate: float, steps: int, epsilon: float, adjacency: str = "replace-one"
) -> float:
    """Upper bound of delta at `epsilon` of `steps` noisy sums over secret Poisson samples (DP-SGD).

    Each step adds `N(0, (m C)^2)` to the sum of gradients of norm at most `C` over a sample that holds each slot with
    probability `q`; `m` is the `noise_multiplier`. With `P_s = (1 - q) N(0, m^2) + q N(s, m^2)`, `Q = N(0, m^2)`:

    * zero-out: the pair `(P_1, Q)` dominates, in each direction;
    * replace-one: advanced joint convexity gives `delta(e) <= q delta_base(ln(1 + (exp(e) - 1)/q))` for `e >= 0` in
      both directions, base `N(2)` against `N(0)`: the hockey stick of `(P_2, Q)`. A pair for which both directions
      are that curve dominates (Dong, Roth, Su 2022: min(f, f^-1) convexified). So the clip counts twice, and
      add/remove accounting at `m / 2` misses only the mass below `e = 0`.

    Losses are rounded up to a grid and composed by one FFT; mass beyond the grid (Chernoff) and a bound of the FFT's
    rounding error are added.

    Guarantees:
    * the accountant never undercounts: one and two steps against integrals over the true laws, many against Opacus.
    """
    _check(1.0, max(epsilon, 1e-9), 0.5, adjacency)
    if not (noise_multiplier > 0.0 and 0.0 < sample_rate <= 1.0 and steps >= 1):
        raise PrivacyError(
            f"noise_multiplier, sample_rate, steps: found {noise_multiplier}, {sample_rate}, {steps}; "
            "choose a positive multiplier, a rate in (0, 1] and at least one step"
        )
    shift = 2.0 if adjacency == "replace-one" else 1.0
    kinds = ("both",) if adjacency == "replace-one" else ("remove", "add")
    terms = float(noise_multiplier), float(sample_rate), int(steps), float(epsilon), shift
    return max(_composed(kind, *terms) for kind in kinds)


def _composed(kind: str, m: float, q: float, steps: int, epsilon: float, shift: float) -> float:
    masses = _loss_tail(kind, m, q, shift)
    spread = _typical_loss(m, q, shift) * math.sqrt(steps)
    reach = epsilon + 8.0 * spread + 2.0 * spread * spread + 1.0
    step = max(2.0 * reach / 2**21, min(0.004 * max(epsilon, 0.05) / steps, reach / 2**12))
    half = int(math.ceil(reach / step))
    size = 1 << (2 * half + 1).bit_length()
    edges = np.arange(-half, half + 1) * step
    tail = masses(edges)  # P(loss > edge), nonincreasing
    tail = np.minimum.accumulate(np.clip(tail, 0.0, 1.0))
    mass = np.concatenate([[1.0 - tail[0]], tail[:-1] - tail[1:]])  # (edge[i-1], edge[i]] goes to edge[i]
    beyond = -math.expm1(steps * math.log1p(-min(float(tail[-1]), 0.5)))
    spectrum = np.fft.rfft(np.roll(np.pad(mass, (0, size - mass.size)), -half))
    total = np.fft.irfft(spectrum**steps, size)
    total = np.maximum(np.roll(total, size // 2), 0.0)
    at = (np.arange(size) - size // 2) * step
    wrapped = math.inf
    top = at[-1]
    for tilt in np.geomspace(0.05, 50.0, 60):  # Chernoff: mass beyond the top would come back from below
        log_mgf = math.log(float(mass @ np.exp(np.minimum(tilt * edges, 700.0))))
        wrapped = min(wrapped, math.exp(min(0.0, steps * log_mgf - tilt * top)))
    loud = at > epsilon
    value = float(total[loud] @ -np.expm1(epsilon - at[loud]))
    error = math.sqrt(size) * (steps + 2) * 4.0 * math.log2(size) * 2.0**-52
    return min(1.0, value + beyond + wrapped + error)


def _typical_loss(m: float, q: float, shift: float) -> float:
    """About the standard deviation of one step's loss; only sets the size of the grid."""
    ratio = shift / m
    return min(q * math.sqrt(math.expm1(min(ratio * ratio, 50.0))), ratio + ratio * ratio)


def _loss_tail(kind: str, m: float, q: float, shift: float) -> Callable[[np.ndarray], np.ndarray]:
    """`P(loss > y)` of one step for an array of `y`; see `poisson_gaussian_delta`."""
    from scipy.special import ndtr

    def threshold(y):
        """`x` where `ln(1 - q + q exp((2 x shift - shift^2) / (2 m^2)))` is `y`; -inf below its range."""
        inside = np.expm1(np.minimum(y, 700.0)) + q
        with np.errstate(divide="ignore", invalid="ignore"):
            x = (np.log(np.where(inside > 0.0, inside, np.nan)) - math.log(q)) * m * m / shift + 0.5 * shift
        return np.where(inside > 0.0, x, -np.inf)

    def mixture_above(x):
        return (1.0 - q) * ndtr(-x / m) + q * ndtr((shift - x) / m)

    def plain_above(x):
        return ndtr(-x / m)

    if kind == "remove":
        return lambda y: mixture_above(threshold(y))
    if kind == "add":  # loss is minus the log ratio, under the plain law: above y where the ratio is below -y
        return lambda y: ndtr(threshold(-y) / m)
    # Symmetric law: above 0 that of (P, Q); below, P(loss < -e) = Q(ratio > e); an atom at 0.
    return lambda y: np.where(y >= 0.0, mixture_above(threshold(np.abs(y))), 1.0 - plain_above(threshold(np.abs(y))))


@lru_cache(maxsize=64)
def dp_sgd_noise(epsilon: float, delta: float, sample_rate: float, steps: int, adjacency: str = "replace-one") -> float:
    """The smallest noise multiplier (to 0.2 %) with `poisson_gaussian_delta <= delta`."""
    _check(1.0, epsilon, delta, adjacency)
    if not 0.0 < delta < 1.0:
        raise PrivacyError(f"delta: DP-SGD needs 0 < delta < 1, found {delta!r}; set delta")
    low, high = 0.0, 1.0

    def enough(m):
        return poisson_gaussian_delta(m, sample_rate, steps, epsilon, adjacency) <= delta

    while not enough(high):
        low, high = high, 2.0 * high
        if high > 1e6:
            raise PrivacyError(
                f"delta: {delta!r} with {steps} steps is below what the accountant can resolve; raise delta"
            )
    while low == 0.0 or high - low > 0.002 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if enough(middle) else (middle, high)
        if high < 1e-3:
            break
    return high


def dp_sgd(
    module,
    loss,
    features,
    targets,
    epsilon: float,
    delta: float,
    *,
    steps: int,
    batch: int,
    clip: float,
    learning_rate: float,
    adjacency: str = "replace-one",
    seed: int = 0,
):
    """Train a torch `module` in place by DP-SGD through Opacus; returns `(module, BaselineGuarantee)`.

    `features`, `targets`: private tensors `(N, ...)`, N public. `loss(prediction, target)`: mean over the batch.
    `batch`: nominal; Opacus samples each record with probability `1 / ceil(N / batch)`, which is what is accounted for.
    `clip`: l2 norm of a record's gradient. The noise multiplier is `dp_sgd_noise`: ours, for either adjacency.

    For comparisons, not for releases: batches and noise come from torch's seeded generator, in floating point.

    Guarantees:
    * noise is as accounted: standard deviation `multiplier * clip` on the sum of clipped gradients.
    Raises PrivacyError when Opacus is not installed (the extra `opacus`).
    """
    try:
        import torch
        from opacus import PrivacyEngine
    except ImportError as error:
        raise PrivacyError(
            "dp_sgd: needs torch and opacus, which are not installed; pip install 'certdp[opacus]'"
        ) from error
    _check(1.0, epsilon, delta, adjacency)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    data = torch.utils.data.TensorDataset(features, targets)
    loader = torch.utils.data.DataLoader(data, batch_size=batch, generator=generator)
    rate = 1.0 / len(loader)
    multiplier = dp_sgd_noise(epsilon, delta, rate, steps, adjacency)
    module.train()
    made, optimiser, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=learning_rate),
        data_loader=loader,
        noise_multiplier=multiplier,
        max_grad_norm=clip,
        noise_generator=generator,
    )
    done = 0
    while done < steps:
        for x, y in loader:
            optimiser.zero_grad()
            loss(made(x), y).backward()
            optimiser.step()
            done += 1
            if done == steps:
                break
    law = f"DP-SGD, Opacus, {steps} steps, Poisson rate {rate:.6g}, noise multiplier {multiplier:.6g}"
    sensitivity = clip * (2.0 if adjacency == "replace-one" else 1.0)
    return module, BaselineGuarantee(
        float(epsilon), float(delta), adjacency, law, sensitivity, "l2", multiplier * clip, 0.0
    )


def tune_dp_sgd(make_module, loss, train, validation, candidates: Sequence[dict], epsilon: float, delta: float, **rest):
    """The best of `candidates` (keyword arguments of `dp_sgd`) by the loss on public validation data.

    `train`, `validation`: pairs `(features, targets)` of PUBLIC tensors: nothing is spent, and nothing here may see
    private records. `make_module()`: a fresh module. Returns (the candidate, its public validation loss).
    """
    import torch

    best = None
    for candidate in candidates:
        module, _ = dp_sgd(make_module(), loss, *train, epsilon, delta, **candidate, **rest)
        module.eval()
        with torch.no_grad():
            value = float(loss(module(validation[0]), validation[1]))
        if math.isfinite(value) and (best is None or value < best[1]):
            best = (candidate, value)
    if best is None:
        raise PrivacyError("candidates: none of them trained to a finite loss; lower the learning rates")
    return best


# --- helpers ---


def _check(sensitivity: float, epsilon: float, delta: float, adjacency: str) -> None:
    if not (math.isfinite(sensitivity) and sensitivity > 0.0):
        raise PrivacyError(f"sensitivity: found {sensitivity!r}; give a positive finite public bound")
    if not 0.0 < epsilon <= LARGEST_EPSILON:
        raise PrivacyError(f"epsilon: {epsilon!r} is not in (0, {LARGEST_EPSILON:g}]; choose it in that range")
    if not 0.0 <= delta < 1.0:
        raise PrivacyError(f"delta: {delta!r} is not in [0, 1); choose it in that range")
    if adjacency not in ADJACENCIES:
        raise PrivacyError(f"adjacency: found {adjacency!r}; choose {' or '.join(ADJACENCIES)}")


def _up(value: Fraction) -> float:
    """`value` as a float64 that is not smaller."""
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)


def _release(values, law, terms, output_range, grid, bits) -> BaselineRelease:
    values = np.asarray(values, np.float64)
    if not np.all(np.isfinite(values)):
        raise PrivacyError("values: an entry is not finite; clip to a public range first")
    scale = terms[-1]
    if grid is None:
        grid = sampling.public_grid(*output_range) if output_range else 2.0 ** (math.frexp(scale)[1] - 40)
    bits = sampling.SecureBits() if bits is None else bits
    noisy = [sampling.release(v, scale, law(bits), grid, output_range) for v in values.ravel().tolist()]
    return BaselineRelease(np.array(noisy).reshape(values.shape), BaselineGuarantee(*terms, float(grid)))
