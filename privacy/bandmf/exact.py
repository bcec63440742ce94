"""Poisson and cyclic Poisson sampling through privacy-loss distributions: an interval that holds with certainty.

One example takes part in each of its steps with a known probability `p`, independently, and the columns of `C` for
these steps do not overlap. Then the mechanism is the composition of the pairs `P = (1 - p) N(0, sigma^2) + p N(s,
sigma^2)`, `Q = N(0, sigma^2)`, `s` the norm of the column [BMS; Choquette-Choo et al. 2023]. A constant gradient of
norm 1 attains it. Cyclic sampling takes the group as known; the largest one has `ceil(steps / separation)` steps.

From a pair to two laws of losses on a grid (cells of outputs have losses between `k h` and `(k + 1) h`):

* above: the masses `P_k`, `Q_k` of a cell are split between the ends so that both are kept ("connect the dots",
  Doroshenko et al. 2022). That spreads the likelihood ratio with its mean fixed, so every hockey stick grows.
* below: the outputs of a cell are merged (post-processing: hockey sticks shrink), and the loss `ln(P_k / Q_k)` is
  rounded down to a grid with a shift, chosen so that little is lost: these losses lie near the middle of the cells.

Composition by one Fourier transform of *tilted* masses, `mass(l) exp(t l) / M(t)`: the tilt `t` moves the bulk to
epsilon, so that rounding errors are relative to delta itself, not to 1. Charged are: the error of the transforms in the
l2 norm (Higham 2002, theorem 24.2, doubled; lengths are powers of two), of the powers (sqrt(5) u a product), of the
masses (from an assumed accuracy of 8 ulp of `ndtr`), and Chernoff bounds of what lies outside the window and would wrap
around.

Truncated batches (a batch above `B` is cut to a uniform subset; `N` examples; zero-out adjacency), above: let `r` be
the number of other examples that were sampled, and publish it. For `r < B` nothing is cut. For `r >= B` publish also
whether the example is among the chosen; if so, all other choices being equal in both worlds, the sums differ by its own
gradient: a plain Gaussian pair. So a step is a mixture of the pair above (`P[r < B]`), the Gaussian pair (`P[r >= B,
chosen] = (B / N) P[Bin(N, p) > B]`), and no loss. Publishing more never lowers delta. Below: where all other gradients
are zero, the step is the pair above with `p` replaced by the probability of being used.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from certify.errors import PrivacyError
from privacy.bandmf.result import DeltaBound
from privacy.bandmf.schemes import BMinSep, CyclicPoisson, Poisson, Scheme
from privacy.bandmf.strategy import Strategy

_REACH = 10.0  # standard deviations; the Gaussian mass beyond is below 8e-24
_CELLS = 1 << 20  # of one step, at most
_TILTS = np.concatenate([[0.0], 2.0 ** np.arange(-4.0, 8.0, 0.25)])
_NORMS = 2.0**-30  # norms of columns are rounded up (above) or down (below) to multiples of this, times the largest


def supports(scheme: Scheme, strategy: Strategy) -> bool:
    """Whether steps of one example are independent and their columns apart, so that this module applies."""
    if isinstance(scheme, CyclicPoisson):
        return strategy.bands <= scheme.separation
    independent = isinstance(scheme, Poisson) or isinstance(scheme, BMinSep) and scheme.separation == 1
    return independent and strategy.bands == 1


def delta(
    scheme: Scheme, strategy: Strategy, noise_multiplier: float, epsilon: float, *, direction: str = "both"
) -> DeltaBound:
    """`delta(epsilon)` within certain bounds; see the module for what is exact.

    Guarantees:
    * exact bounds hold with certainty: the true delta lies in [lower, upper], failure_probability is 0.
    """
    start = time.perf_counter()
    found = accountant(scheme, strategy, noise_multiplier)
    lower, upper = found.lower(epsilon, direction), found.upper(epsilon, direction)
    seconds = time.perf_counter() - start
    return DeltaBound(epsilon, 0.5 * (lower + upper), lower, upper, 0.0, direction, "exact", 0, seconds)


def accountant(scheme: Scheme, strategy: Strategy, noise_multiplier: float) -> Accountant:
    """The prepared loss distributions of a scheme, for many epsilons.

    Errors: PrivacyError where steps are correlated, or the noise is not positive.
    """
    if not supports(scheme, strategy):
        raise PrivacyError(
            f"scheme: {type(scheme).__name__} with separation {getattr(scheme, 'separation', 1)} and {strategy.bands} "
            "bands has correlated steps, for which there is no exact accountant; use Monte Carlo"
        )
    if not 0.0 < noise_multiplier < math.inf:
        raise PrivacyError(f"noise_multiplier: found {noise_multiplier!r}; it is a positive number")
    if scheme.steps != strategy.steps:
        raise PrivacyError(
            f"strategy: found {strategy.steps} columns for {scheme.steps} steps; build the strategy for the same steps"
        )
    above, below = (_histories(scheme, strategy, up) for up in (True, False))
    return Accountant(scheme, noise_multiplier, above, below)


@dataclass(frozen=True)
class Accountant:
    """Bounds of delta for one scheme, strategy and noise; `above`, `below`: per history the norms of its columns."""

    scheme: Scheme
    noise_multiplier: float
    above: tuple[tuple[float, ...], ...]
    below: tuple[tuple[float, ...], ...]

    def lower(self, epsilon: float, direction: str = "both") -> float:
        """At most delta at `epsilon` (0 or more) in the direction "remove" or "add", or of the larger of "both"."""
        return max(self._bound(n, d, False).delta(epsilon) for n in self.below for d in _directions(epsilon, direction))

    def upper(self, epsilon: float, direction: str = "both") -> float:
        """At least delta; see `lower`."""
        found = (self._bound(n, d, True).delta(epsilon) for n in self.above for d in _directions(epsilon, direction))
        return min(1.0, max(found))

    def _bound(self, norms: tuple[float, ...], direction: str, above: bool) -> _Composed:
        law = self.scheme.probability, direction, above, _truncation(self.scheme)
        return _composed(norms, self.noise_multiplier, *law)


def _directions(epsilon: float, direction: str) -> tuple[str, ...]:
    if not 0.0 <= epsilon < math.inf:
        raise PrivacyError(f"epsilon: found {epsilon!r}; give a finite number of at least 0")
    if direction not in ("both", "remove", "add"):
        raise PrivacyError(f'direction: found {direction!r}; give "remove", "add" or "both"')
    return ("remove", "add") if direction == "both" else (direction,)


def _histories(scheme: Scheme, strategy: Strategy, up: bool) -> tuple[tuple[float, ...], ...]:
    """The column norms that one example may meet, largest first, without those that another history dominates."""
    unit = float(strategy.column_norms.max()) * _NORMS
    norms = (np.ceil if up else np.floor)(strategy.column_norms / unit) * unit
    norms *= 1.0 + 2.0**-49 if up else 1.0 - 2.0**-49
    found = {tuple(sorted(norms[g :: scheme.separation].tolist(), reverse=True)) for g in range(scheme.separation)}
    kept: list[tuple[float, ...]] = []
    for history in sorted(found, key=lambda h: (len(h), h), reverse=True):
        if not any(all(a <= b for a, b in zip(history, other, strict=False)) for other in kept):
            kept.append(history)
    return tuple(h for h in kept if h)


def _truncation(scheme: Scheme) -> tuple[float, float] | None:
    """`(P[r >= B], P[r >= B, the example is chosen])` for the largest group; None if nothing is cut."""
    if scheme.truncate is None:
        return None
    from scipy.stats import binom

    size = math.ceil(scheme.examples / (scheme.separation if isinstance(scheme, CyclicPoisson) else 1))
    cut = float(binom.sf(scheme.truncate - 1, size - 1, scheme.probability))
    return cut, float(binom.sf(scheme.truncate, size, scheme.probability)) * scheme.truncate / size


# --- one kind of step ---


@dataclass(frozen=True, eq=False)
class _Losses:
    """Mass on the losses `(lowest + i) * step + shift`, and mass of infinite loss."""

    lowest: int
    mass: np.ndarray
    infinite: float
    shift: float


@lru_cache(maxsize=16)
def _composed(
    norms: tuple[float, ...],
    sigma: float,
    p: float,
    direction: str,
    above: bool,
    truncation: tuple[float, float] | None,
) -> _Composed:
    """The steps with these column norms, one after the other."""
    step = _grid([sigma / norm for norm in set(norms)], p, len(norms))
    parts = []
    for norm, count in Counter(norms).items():
        noise = sigma / norm
        if truncation is None:
            losses = _discretise(noise, p, step, direction, above)
        elif above:
            whole = _discretise(noise, 1.0, step, direction, above)
            losses = _truncated(_discretise(noise, p, step, direction, above), whole, *truncation)
        else:
            cut, chosen = truncation
            losses = _discretise(noise, (p * (1.0 - cut) + chosen) * (1.0 - 1e-6), step, direction, above)
        parts.append((losses, count))
    return _Composed(step, parts, above)


def _grid(noises: list[float], p: float, count: int) -> float:
    """Width of the grid: the bounds part like `count * step ** 2`, over the spread of one loss for the lower one."""
    least = max(noises)
    spread = min(1.0 / least, p * math.sqrt(math.expm1(min(1.0 / least**2, 50.0))))
    wanted = min(5e-3 / math.sqrt(count), math.sqrt(2e-3 * spread / count), 0.05 * spread * math.sqrt(count))
    widest = max(float(_loss(1.0 / s + _REACH, s, 1.0) - _loss(-_REACH, s, p)) for s in noises)
    if widest > 600.0:
        raise PrivacyError("noise_multiplier: so little noise makes losses beyond 600; raise it")
    return max(wanted, widest / _CELLS)


def _loss(z: np.ndarray | float, s: float, p: float) -> np.ndarray:
    """`ln(P/Q) = ln(1 - p + p exp(z / s - 1 / (2 s^2)))` at the output `s z`, for noise `s`; increasing in `z`."""
    rest = math.log1p(-p) if p < 1.0 else -math.inf
    return np.logaddexp(rest, math.log(p) + z / s - 0.5 / (s * s))


def _outputs(loss: np.ndarray, s: float, p: float) -> np.ndarray:
    """The inverse of `_loss`, nearly; -inf below its range."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        near = np.log1p(np.expm1(np.minimum(loss, 1.0)) / p)
        far = loss - math.log(p) + np.log1p((p - 1.0) * np.exp(-loss))
        z = s * np.where((loss < 1.0) & (p < 0.5), near, far) + 0.5 / s
    return np.maximum.accumulate(np.where(np.isnan(z), -np.inf, z))


def _discretise(s: float, p: float, step: float, direction: str, above: bool) -> _Losses:
    """Losses of `(1 - p) N(0, s^2) + p N(1, s^2)` against `N(0, s^2)` ("remove"), or of the reverse ("add").

    The cells of outputs lie between edges whose losses are neighbours on the grid.
    """
    bottom = math.log1p(-p) if p < 1.0 else float(_loss(-_REACH, s, p))
    grid = np.arange(math.floor(bottom / step), math.ceil(float(_loss(1.0 / s + _REACH, s, p)) / step) + 1)
    edges = _outputs(grid[1:] * step, s, p)
    # The edges are what rounding made of them; the distance of their losses from the grid is charged.
    size = 1.0 + abs(bottom) + grid[-1] * step + (_REACH + 1.0 / s) / s
    slip = float(np.abs(_loss(edges, s, p) - grid[1:] * step).max()) + 2.0**-49 * size
    edges = np.concatenate([[-np.inf], edges, [np.inf]])
    plain, plain_error = _cells(edges)
    moved, moved_error = _cells(edges - 1.0 / s)
    mixed = (1.0 - p) * plain + p * moved
    mixed_error = (1.0 - p) * plain_error + p * moved_error + 2.0**-51 * mixed
    masses = np.array([mixed, mixed_error, plain, plain_error])
    if p == 1.0:  # then losses have no lower end
        low, masses, grid = masses[:, 0], masses[:, 1:], grid[1:]
    else:
        low = np.zeros(4)
    masses, high = masses[:, :-1], masses[:, -1]
    if direction == "add":
        masses, low, high, grid = masses[[2, 3, 0, 1], ::-1], high[[2, 3, 0, 1]], low[[2, 3, 0, 1]], -grid[::-1]
    if not above:
        return _merged(masses, step)
    return _spread(masses, float(low[0] + low[1]), float(high[0] + high[1]), int(grid[0]), step, slip)


def _cells(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standard normal masses between `edges`, and bounds of their errors."""
    from scipy.special import ndtr

    tail = ndtr(-np.abs(edges))
    mass = np.abs(tail[1:] - tail[:-1])
    across = (edges[:-1] < 0.0) & (edges[1:] > 0.0)
    mass[across] = 1.0 - tail[:-1][across] - tail[1:][across]
    # ndtr is good to a few ulp; an edge that was rounded moves it by about z^2 ulp.
    error = tail * (8.0 + 2.0 * np.where(tail > 0.0, edges, 0.0) ** 2) * 2.0**-52
    return mass, error[:-1] + error[1:] + np.where(across, 2.0**-52, 0.0)


def _spread(masses: np.ndarray, low: float, infinite: float, lowest: int, step: float, slip: float) -> _Losses:
    """From above: every cell's masses `(P, error, Q, error)` moved to its ends, P rounded up, Q down.

    With masses `a`, `b` at the ends `l` and `l + step`: `a + b = P`, `a e^-l + b e^-(l + step) = Q`. `low`: mass of
    losses below the grid, moved up to its first point.
    """
    p, q = masses[0] + masses[1], np.maximum(masses[2] - masses[3], 0.0)
    q = q * np.exp((lowest + np.arange(len(q))) * step)
    up = (p - q + 2.0**-46 * (p + q)) / -math.expm1(-step)
    up = np.clip(up, 0.0, p)
    mass = np.zeros(len(p) + 1)
    mass[:-1] += p - up
    mass[1:] += up
    mass[0] += low
    return _Losses(lowest, mass * (1.0 + 2.0**-50), infinite * (1.0 + 2.0**-50), slip)


def _merged(masses: np.ndarray, step: float) -> _Losses:
    """From below: every cell becomes one output; its loss is rounded down to a shifted grid, P rounded down, Q up."""
    p, q = masses[0] - masses[1], masses[2] + masses[3]
    kept = (p > 0.0) & (q > 0.0)
    p, q = p[kept], q[kept]
    place = (np.log(p) - np.log(q)) / step - 2.0**-44 / step
    place -= 1e-12 * np.abs(place)
    order = np.argsort(place - np.floor(place))
    rest = (place - np.floor(place))[order]
    # A shift by `c` lowers by a whole step what lies less than `c` above the grid.
    gain = rest - (np.cumsum(p[order]) - p[order]) / p.sum()
    c = max(0.0, float(rest[int(np.argmax(gain))]) - 1e-9)
    index = np.floor(place - c).astype(np.int64)
    lowest = int(index.min())
    return _Losses(lowest, np.bincount(index - lowest, weights=p * (1.0 - 2.0**-40)), 0.0, c * step)


def _truncated(losses: _Losses, gaussian: _Losses, cut: float, chosen: float) -> _Losses:
    """From above, the step of a truncated batch: see the module. 1e-6 covers the error of the binomial tails."""
    keep, whole, none = 1.0 - cut * (1.0 - 1e-6), chosen * (1.0 + 1e-6), max(0.0, cut - chosen) + 1e-6 * cut
    lowest = min(losses.lowest, gaussian.lowest, 0)
    mass = np.zeros(max(losses.lowest + len(losses.mass), gaussian.lowest + len(gaussian.mass), 1) - lowest)
    mass[losses.lowest - lowest :][: len(losses.mass)] += keep * losses.mass
    mass[gaussian.lowest - lowest :][: len(gaussian.mass)] += whole * gaussian.mass
    mass[-lowest] += none
    infinite = keep * losses.infinite + whole * gaussian.infinite
    return _Losses(lowest, mass * (1.0 + 2.0**-50), infinite, max(losses.shift, gaussian.shift))


# --- their composition ---


class _Composed:
    """The composition of several `_Losses` with multiplicities; `delta` bounds its curve, from above or from below."""

    def __init__(self, step: float, parts: list[tuple[_Losses, int]], above: bool):
        self.step, self.parts, self.above = step, parts, above
        self.shift = sum(part.shift * count for part, count in parts)
        self.count = sum(count for _, count in parts)
        self.highest = sum((part.lowest + len(part.mass) - 1) * count for part, count in parts) * step
        self._moments: dict[float, tuple[float, float, float]] = {}
        self._windows: dict[float, _Window] = {}

    def delta(self, epsilon: float) -> float:
        """The bound at `epsilon`."""
        epsilon = epsilon - self.shift
        total = math.exp(sum(count * max(0.0, math.log(float(part.mass.sum()))) for part, count in self.parts))
        infinite = sum(part.infinite * count for part, count in self.parts) * total * (1.0 + 1e-9)
        if epsilon >= self.highest:
            return infinite
        tilt = self._best_tilt(epsilon)
        if tilt not in self._windows:
            self._windows[tilt] = self._window(tilt)
        window, log = self._windows[tilt], self._moment(tilt)[0]
        beyond = (window.first + np.arange(len(window.mass))) * self.step - epsilon
        loud = beyond > 0.0
        weight = np.exp(-tilt * beyond[loud]) * -np.expm1(-beyond[loud])
        value = float(window.mass[loud] @ weight)
        wobble = window.error * math.sqrt(float(weight @ weight)) + window.outside
        scale = math.exp(min(700.0, log - tilt * epsilon))
        slack = window.slack + 2.0**-50 * (1.0 + abs(log) + tilt * abs(epsilon))
        if not self.above:
            return float(max(0.0, value - wobble) * scale * (1.0 - slack))
        return float((value + wobble) * scale * (1.0 + slack) + infinite)

    def _best_tilt(self, epsilon: float) -> float:
        """Chernoff's: it moves the mean to epsilon. Any tilt gives a valid bound."""
        after = bisect_left(_TILTS, epsilon, key=lambda t: self._moment(t)[1])
        near = _TILTS[max(after - 1, 0) : after + 1].tolist()
        return min(near, key=lambda t: self._moment(t)[0] - t * epsilon)

    def _least(self, at: float, tilts: np.ndarray) -> float:
        """The smallest `ln E exp(t (S - at))` over `tilts`; it is convex in `t`, so they are tried until it grows."""
        best = math.inf
        for tilt in tilts.tolist():
            found = self._moment(tilt)[0] - tilt * at
            if found >= best:
                break
            best = found
        return best

    def _moment(self, tilt: float) -> tuple[float, float, float]:
        """Of the sum without its shift: `ln E exp(tilt S)`, and mean and variance of the tilted law."""
        if tilt not in self._moments:
            log = mean = variance = 0.0
            for part, count in self.parts:
                loss = (part.lowest + np.arange(len(part.mass))) * self.step
                weight, scale = _tilted(part.mass, tilt * loss)
                centre = float(weight @ loss)
                log += count * scale
                mean += count * centre
                loss -= centre
                variance += count * float((weight * loss) @ loss)
            self._moments[tilt] = log, mean, variance
        return self._moments[tilt]

    def _window(self, tilt: float) -> _Window:
        log, mean, variance = self._moment(tilt)
        reach = 8.0 * math.sqrt(variance) + 16.0 * self.step
        size = 1 << max(10, math.ceil(math.log2(2.0 * reach / self.step)))
        first = round(mean / self.step) - size // 2
        while (outside := self._beyond(tilt, first, size)) > 1e-12 and size < 8 * _CELLS:
            first, size = first - size // 2, 2 * size
        return self._transformed(tilt, first, size, outside)

    def _beyond(self, tilt: float, first: int, size: int) -> float:
        """Chernoff bounds of the tilted mass above and below the window."""
        log, _, variance = self._moment(tilt)
        more = 2.0 ** np.arange(-1.0, 5.0) / math.sqrt(variance + self.step**2)
        total = 0.0
        for end, tilts in ((first + size, tilt + more), (first - 1, tilt - more)):
            total += math.exp(min(0.0, self._least(end * self.step, tilts) - log + tilt * end * self.step))
        return total * (1.0 + 1e-6)

    def _transformed(self, tilt: float, first: int, size: int, outside: float) -> _Window:
        """Masses of the tilted sum: spectra of the parts, their powers and product, back."""
        from scipy import fft

        unit = 2.0**-53
        transform = 14.0 * math.log2(size) * unit  # relative l2 error of one transform
        product, base, error, growth, exponent = 1.0, 0, 0.0, 0.0, 0.0
        for part, count in self.parts:
            exponents = tilt * (part.lowest + np.arange(len(part.mass))) * self.step
            weight, _ = _tilted(part.mass, exponents)
            folded = np.pad(weight, (0, -len(weight) % size)).reshape(-1, size).sum(axis=0)
            # The spectrum has l2 norm `sqrt(size) |folded|` and entries of at most 1; `off` bounds the l2 error.
            off = transform * math.sqrt(size * float(folded @ folded))
            growth += count * math.log1p(off)
            error += count * off
            exponent = max(exponent, float(np.abs(exponents).max()))
            product = product * _power(fft.rfft(folded), count)
            base += count * part.lowest
        mass = fft.irfft(product, size)
        rounding = (2.24 * (self.count + len(self.parts)) * unit + transform) * 2.0 * math.sqrt(float(mass @ mass))
        error = math.exp(growth) * error / math.sqrt(size) + rounding
        slack = self.count * unit * (600.0 + 8.0 * exponent)
        return _Window(first, np.roll(mass, (base - first) % size), outside, error, slack)


@dataclass(frozen=True, eq=False)
class _Window:
    """Masses of a tilted sum at `(first + i) * step`: up to an l2 `error`, a factor `1 + slack`, and what wraps around
    from `outside`."""

    first: int
    mass: np.ndarray
    outside: float
    error: float
    slack: float


def _tilted(mass: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, float]:
    """`mass * exp(exponents)` normalised, and the logarithm of what it was divided by."""
    first, last = np.flatnonzero(mass)[[0, -1]]
    top = max(float(exponents[first]), float(exponents[last]))  # they are an arithmetic progression
    weight = np.exp(np.minimum(exponents - top, 0.0))
    weight *= mass
    total = float(weight.sum())
    weight /= total
    return weight, top + math.log(total)


def _power(spectrum: np.ndarray, count: int) -> np.ndarray:
    """`spectrum ** count` by squaring: the error of at most `count - 1` products enters."""
    result = 1.0
    while True:
        if count & 1:
            result = result * spectrum
        count >>= 1
        if not count:
            return result
        spectrum = spectrum * spectrum
