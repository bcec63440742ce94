"""Likelihood ratios ``L = P/Q`` of BandMF outputs for every sampling scheme, eight outputs at a time.

An output is ``y = C x + sigma z`` (THEORY section 7): ``x`` counts how often one example (one user) takes part, ``P``
is the law of ``y`` with the example, ``Q`` the one without.  With ``LR_i = exp((<c_i, y> - |c_i|^2 / 2) / sigma^2)``:

* b-min-sep, cold [BMS, Theorem 5.1]: ``f_i = (1 - p) f_{i+1} + p LR_i f_{i+b}``, ``f_j = 1`` for every ``j > n``, and
  ``L = f_1``.  ``b`` is the *separation* of the scheme, which may exceed the bands of ``C``.  Warm: the average
  ``(f_1 + p (f_2 + ... + f_b)) / (1 + (b - 1) p)``.  Exact for any banded ``C`` with at most ``b`` bands.
* Multi-attribution: the binomial mixture over ``j = 0 .. per_user`` with shift ``j c_i`` [BMS, section 6].
* Truncated batches, given the numbers ``r`` of other examples drawn per step [BMS, Appendix D]: P and Q each against
  ``N(0, sigma^2)``, averaged over the start apart, then divided.
* Poisson and cyclic Poisson: products over the steps; balls in bins: the average over bins, for any ``C >= 0``.

The recursion runs in linear space where ``f`` cannot underflow (``f >= (1 - p)^n``), and is repeated in log space where
it overflowed; otherwise in log space at once.  ``<c_i, y>`` of Toeplitz (and column-scaled Toeplitz) matrices takes
fewer than ``bands`` operations per step: halving the problem leaves three, not four, of half the size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from certify.errors import PrivacyError
from privacy.bandmf import lanes
from privacy.bandmf.lanes import (
    NEGLIGIBLE,
    STATE,
    WIDTH,
    add_normal,
    exp,
    filter_block,
    fma,
    if_less,
    load,
    log,
    log_add,
    matrix_block,
    splat,
    store,
)
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Scheme
from privacy.bandmf.strategy import Strategy

UNIT_ROUNDOFF = 2.0**-53
SECRET = -1  # of CyclicPoisson: the group of an example is uniform and not known to the adversary
_LINEAR_FLOOR = -500.0  # log of the least f that may occur in linear space; doubles go down to -708

# ----- inner products of all columns with the output ------------------------------------------------------------

ROWS, TAPS = 16, 16
_filter_block = filter_block(ROWS, TAPS, per_row=False)
_filter_block_by_row = filter_block(ROWS, TAPS, per_row=True)

# Toom and Cook's short filters: four outputs of a filter h of four taps, sum_k h_k y_{i+k}, are E' (S E h * B y) with
# E the values of a cubic at 0, 1, -1, 1/2, -1/2, 2 and infinity and S = diag(_SCALES).  A filter of many taps becomes
# seven filters of a quarter of the length on every fourth row: 7/16 of the products.
_SPLIT, _PLANES = 4, 7
_VALUES = np.array(
    [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, -1.0, 1.0, -1.0],
        [1.0, 0.5, 0.25, 0.125],
        [1.0, -0.5, 0.25, -0.125],
        [1.0, 2.0, 4.0, 8.0],
        [0.0, 0.0, 0.0, 1.0],
    ]
)
_MIXES = np.array(
    [
        [2, -1, -10, 5, 8, -4, 0],
        [0, -2, -1, 9, 4, -4, 0],
        [0, 2, -3, -7, 12, -4, 0],
        [0, 2, 3, -4, -3, 2, 0],
        [0, -2, 5, 0, -5, 2, 0],
        [0, 1, 0, -5, 0, 4, 0],
        [0, -2, 1, 10, -5, -8, 4],
    ]
)
_SCALES = 1.0 / np.array([2.0, 6.0, 18.0, 9.0 / 8.0, 15.0 / 8.0, 90.0, 4.0])
_mix = matrix_block(_MIXES.tolist())
_unmix = matrix_block(_VALUES.T.tolist())
_SHORT = 80  # up to as many bands the plain filter is faster

_PLAIN, _SPLIT_UP, _BY_ROW = range(3)


class _Projection(NamedTuple):
    """How to form ``<c_i, y>``: ``gain_i`` times a filter, or column by column."""

    method: int
    rows: int  # of filter output, padded
    width: int  # taps of one filter, padded
    taps: np.ndarray  # one filter, seven side by side, or one for each row
    gain: np.ndarray  # (steps,)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@lru_cache(maxsize=8)
def _projection(strategy: Strategy) -> _Projection:
    columns = strategy.columns
    n, bands = columns.shape
    gain = columns[:, 0] / columns[0, 0]
    i, d = np.ogrid[:n, :bands]
    scaled = np.where(i + d < n, gain[:, None] * columns[0], 0.0)
    if (np.abs(scaled - columns) > 4.0 * UNIT_ROUNDOFF * columns).any():
        taps = np.zeros((_up(n, ROWS), _up(bands, TAPS)))
        taps[:n, :bands] = columns
        return _Projection(_BY_ROW, *taps.shape, taps.ravel(), np.ones(n))
    if bands <= _SHORT:
        taps = np.zeros(_up(bands, TAPS))
        taps[:bands] = columns[0]
        return _Projection(_PLAIN, _up(n, ROWS), len(taps), taps, gain)
    taps = np.zeros((_up(bands, _SPLIT * TAPS) // _SPLIT, _SPLIT))
    taps.ravel()[:bands] = columns[0]
    filters = _SCALES[:, None] * (_VALUES @ taps.T)
    return _Projection(_SPLIT_UP, _up(n, ROWS * _SPLIT) // _SPLIT, len(taps), filters.ravel(), gain)


@njit(nogil=True)
def _project(y, to, inner, work):
    """``inner[i] = sum_k taps_k y[i + k]``; rows of lanes, ``y`` padded with zeros."""
    zero = splat(0.0)
    if to.method == _SPLIT_UP:
        planes = to.rows + to.width
        sums = _PLANES * planes
        for t in range(planes):
            _mix(y, _SPLIT * t, 1, work, t, planes)
        for t in range(0, to.rows, ROWS):
            for r in range(_PLANES * ROWS):
                store(work, sums + r, zero)
            for q in range(_PLANES):
                for k in range(0, to.width, TAPS):
                    _filter_block(work, q * planes + t + k, to.taps, q * to.width + k, 0, work, sums + q * ROWS)
            for r in range(ROWS):
                _unmix(work, sums + r, ROWS, inner, _SPLIT * (t + r), 1)
        return
    for t in range(0, to.rows, ROWS):
        for r in range(ROWS):
            store(inner, t + r, zero)
        for k in range(0, to.width, TAPS):
            if to.method == _PLAIN:
                _filter_block(y, t + k, to.taps, k, 0, inner, t)
            else:
                _filter_block_by_row(y, t + k, to.taps, t * to.width + k, to.width, inner, t)


# ----- from inner products to ratios ------------------------------------------------------------------------------


class _Law(NamedTuple):
    """How one example takes part, and the norms of its columns, as numbers.

    ``chain``: recursion with ``separation``; otherwise products over the steps of a group (``separation`` groups,
    averaged unless ``group`` names one).
    """

    steps: int
    chain: bool
    separation: int
    group: int
    warm: float  # the probability of joining, 0 for a cold start
    log_stay: float  # ln P[no example of the user joins]
    weights: np.ndarray  # P[j of them join], j = 1 ..
    log_weights: np.ndarray
    half: np.ndarray  # |c_i|^2 / (2 sigma^2)
    over_variance: float  # 1 / sigma^2


_BOTH, _WITH, _WITHOUT = 0, 1, 2  # P/Q; with truncation P/R and Q/R


@njit(nogil=True)
def _log_terms(inner, cut, side, law, gain, out):
    """``out_i = ln`` of what a participation at step ``i`` multiplies the ratio by, its probability included."""
    for i in range(law.steps):
        a = load(inner, i) * (gain[i] * law.over_variance)
        half = law.half[i]
        if side == _BOTH:
            value = a + (law.log_weights[0] - half)
            for j in range(1, law.log_weights.size):
                m = j + 1.0
                value = log_add(value, fma(a, splat(m), splat(law.log_weights[j] - m * m * half)))
        else:
            kept = load(cut, i)
            zero = splat(0.0)
            if side == _WITH:
                whole, shifted = a - half, fma(a, splat(2.0), splat(-4.0 * half))
            else:
                whole, shifted = zero, zero - a - half
            inside = if_less(zero, kept, kept, splat(0.5))
            value = log_add(log(inside) + shifted, log(splat(1.0) - inside))
            value = if_less(zero, kept, value, whole) + law.log_weights[0]
        store(out, i, value)


@njit(nogil=True)
def _log_chain(terms, law):
    """The recursion in log space, in place."""
    n, b = law.steps, law.separation
    for i in range(n, n + b):
        store(terms, i, splat(0.0))
    f = splat(0.0)
    for i in range(n - 1, -1, -1):
        f = log_add(f + law.log_stay, load(terms, i) + load(terms, i + b))
        store(terms, i, f)
    if law.warm > 0.0:
        for i in range(1, b):
            f = log_add(f, load(terms, i) + math.log(law.warm))
        f = f - math.log1p((b - 1) * law.warm)
    return f


@njit(nogil=True)
def _log_product(terms, law):
    """Products over the steps of the groups, averaged."""
    f = splat(NEGLIGIBLE)
    groups = law.separation
    for j in range(groups):
        if law.group < 0 or law.group == j:
            product = splat(0.0)
            for i in range(j, law.steps, groups):
                product = product + log_add(splat(law.log_stay), load(terms, i))
            f = log_add(f, product)
    return f - math.log(groups) if law.group < 0 else f


@njit(nogil=True)
def _linear_chain(inner, law, gain):
    """The recursion in linear space, in place; not finite where it left the range of doubles."""
    n, b, stay = law.steps, law.separation, math.exp(law.log_stay)
    for i in range(n, n + b):
        store(inner, i, splat(1.0))
    f = splat(1.0)
    for i in range(n - 1, -1, -1):
        a = load(inner, i) * (gain[i] * law.over_variance)
        half = law.half[i]
        term = exp(a - half) * law.weights[0]
        for j in range(1, law.weights.size):
            m = j + 1.0
            term = fma(exp(fma(a, splat(m), splat(-m * m * half))), splat(law.weights[j]), term)
        f = fma(term, load(inner, i + b), f * stay)
        store(inner, i, f)
    if law.warm > 0.0:
        rest = splat(0.0)
        for i in range(1, b):
            rest = rest + load(inner, i)
        f = fma(rest, splat(law.warm), f) * (1.0 / (1.0 + (b - 1) * law.warm))
    return if_less(f, splat(math.inf), log(f), splat(math.inf))


@njit(nogil=True)
def _log_ratio(inner, cut, side, law, gain, terms):
    _log_terms(inner, cut, side, law, gain, terms)
    return _log_chain(terms, law) if law.chain else _log_product(terms, law)


@njit(nogil=True)
def _block(y, cut, law, to, inner, terms, work, out):
    """``ln L`` of eight outputs ``y`` (rows of lanes) into row 0 of ``out``."""
    _project(y, to, inner, work)
    if cut.size == 0 and law.chain and law.steps * law.log_stay > _LINEAR_FLOOR:
        store(out, 0, _linear_chain(inner, law, to.gain))
        if np.isfinite(out).all():
            return
        _project(y, to, inner, work)
    if cut.size == 0:
        store(out, 0, _log_ratio(inner, cut, _BOTH, law, to.gain, terms))
    else:
        with_example = _log_ratio(inner, cut, _WITH, law, to.gain, terms)
        store(out, 0, with_example - _log_ratio(inner, cut, _WITHOUT, law, to.gain, terms))


@njit(nogil=True)
def _buffers(law, to):
    """Rows of lanes: outputs (with the zeros beyond the last step), inner products, terms, work, one result."""
    split = _SPLIT if to.method == _SPLIT_UP else 1
    rows = max(split * to.rows, law.steps + law.separation)
    read = split * (to.rows + to.width) + _PLANES
    work = _PLANES * (to.rows + to.width + ROWS)
    return (
        np.zeros(WIDTH * read),
        np.empty(WIDTH * rows),
        np.empty(WIDTH * rows),
        np.empty(WIDTH * work if split > 1 else 0),
        np.empty(WIDTH),
    )


@njit(nogil=True)
def _ratios(outputs, draw, spikes, kept, columns, noise_multiplier, state, law, to, found):
    """``ln L`` of every sample into ``found``.

    ``draw``: at ``C x + noise_multiplier z`` with ``x`` from ``spikes`` and ``z`` from the generator ``state``, written
    to ``outputs`` where it has rows; otherwise at the rows of ``outputs``.
    """
    y, inner, terms, work, out = _buffers(law, to)
    starts, positions, sizes = spikes
    n, bands = columns.shape
    cut = np.zeros(WIDTH * kept.shape[1])
    for first in range(0, found.size, WIDTH):
        count = min(WIDTH, found.size - first)
        y[: WIDTH * n] = 0.0
        if draw:
            for lane in range(count):
                for s in range(starts[first + lane], starts[first + lane + 1]):
                    at = positions[s]
                    for d in range(min(bands, n - at)):
                        y[WIDTH * (at + d) + lane] += sizes[s] * columns[at, d]
            add_normal(state, y, n, noise_multiplier)
        else:
            for lane in range(count):
                for i in range(n):
                    y[WIDTH * i + lane] = outputs[first + lane, i]
        if cut.size:
            for lane in range(count):
                for i in range(n):
                    cut[WIDTH * i + lane] = kept[first + lane, i]
        _block(y, cut, law, to, inner, terms, work, out)
        for lane in range(count):
            found[first + lane] = out[lane]
        if draw and outputs.size:
            for lane in range(count):
                for i in range(n):
                    outputs[first + lane, i] = y[WIDTH * i + lane]


def _cached(source: bytes):
    """`_ratios`, compiled once per machine; numba compares this file and, as part of its key, ``source``."""

    @njit(nogil=True, cache=True)
    def run(outputs, draw, spikes, kept, columns, noise_multiplier, state, law, to, found):
        assert len(source) > 0
        _ratios(outputs, draw, spikes, kept, columns, noise_multiplier, state, law, to, found)

    return run


_run = _cached(sha256(Path(lanes.__file__).read_bytes()).digest())


# ----- the schemes as numbers ---------------------------------------------------------------------------------------


def joining(scheme: Scheme) -> tuple[float, np.ndarray]:
    """``ln P[0 of the user's examples join]`` and ``ln P[j join]`` for ``j = 1 ..``, at an available step."""
    if isinstance(scheme, BallsInBins):
        return NEGLIGIBLE, np.zeros(1)
    k = scheme.per_user if isinstance(scheme, MultiAttribution) else 1
    p = scheme.probability
    if p == 1.0:
        return NEGLIGIBLE, np.where(np.arange(1, k + 1) == k, 0.0, NEGLIGIBLE)
    logs = [math.log(math.comb(k, j)) + j * math.log(p) + (k - j) * math.log1p(-p) for j in range(k + 1)]
    return logs[0], np.array(logs[1:])


def _law(scheme: Scheme, strategy: Strategy, noise_multiplier: float, group: int | None) -> _Law:
    squares = strategy.column_norms**2
    chain = isinstance(scheme, BMinSep | MultiAttribution) and scheme.separation > 1
    if isinstance(scheme, BallsInBins):
        squares, group = _bin_squares(strategy, scheme.separation), SECRET
    elif isinstance(scheme, CyclicPoisson):
        group = dominating_group(scheme, strategy) if group is None else group
        if group != SECRET and not 0 <= group < scheme.separation:
            raise PrivacyError(f"group: found {group!r}; 0 to {scheme.separation - 1}, or SECRET, are possible")
    else:
        group = 0
    log_stay, log_weights = joining(scheme)
    return _Law(
        strategy.steps,
        chain,
        scheme.separation,
        group,
        scheme.probability if chain and isinstance(scheme, BMinSep) and scheme.warm else 0.0,
        log_stay,
        np.exp(log_weights),
        log_weights,
        squares / (2.0 * noise_multiplier**2),
        1.0 / noise_multiplier**2,
    )


@lru_cache(maxsize=8)
def _bin_squares(strategy: Strategy, bins: int) -> np.ndarray:
    """``|sum of the columns of a bin|^2``, booked at the first step of the bin; columns may overlap."""
    n, bands = strategy.columns.shape
    squares = np.zeros(n)
    for first in range(min(bins, n)):
        total = np.zeros(n + bands)
        for i in range(first, n, bins):
            total[i : i + bands] += strategy.columns[i]
        squares[first] = total @ total
    return squares


def dominating_group(scheme: CyclicPoisson, strategy: Strategy) -> int:
    """The group of a cyclic scheme whose members are protected least.

    It has, in decreasing order, at least the column norms of every other group.  PrivacyError when there is none.
    """
    norms = np.zeros((scheme.separation, -(-strategy.steps // scheme.separation)))
    for j in range(scheme.separation):
        own = np.sort(strategy.column_norms[j :: scheme.separation])[::-1]
        norms[j, : len(own)] = own
    worst = np.flatnonzero((norms >= norms.max(axis=0)).all(axis=1))
    if not len(worst):
        raise PrivacyError("group: found no group of the cyclic scheme that dominates; account every group by number")
    return int(worst[0])


def attributions(scheme: Scheme) -> tuple[Scheme, ...]:
    """The schemes over which a guarantee takes the maximum: users may own fewer examples than ``per_user``.

    More examples of a user can mean *more* privacy for general ``C``, since they also bar each other.
    """
    if not isinstance(scheme, MultiAttribution):
        return (scheme,)
    return tuple(replace(scheme, per_user=k) for k in range(1, scheme.per_user + 1))


# ----- what others call ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Spikes:
    """Participations of many samples: sample ``m`` has those numbered ``starts[m] <= s < starts[m + 1]``.

    ``starts`` int64 (samples + 1,), ``positions`` int64 (steps from 0), ``sizes`` float64 (what ``x`` is there; several
    participations at one step add up).
    """

    starts: np.ndarray
    positions: np.ndarray
    sizes: np.ndarray

    @property
    def samples(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, x) -> Spikes:
        """From participation vectors, (samples, steps)."""
        x = np.atleast_2d(np.asarray(x, np.float64))
        sample, position = np.nonzero(x)
        starts = np.searchsorted(sample, np.arange(len(x) + 1))
        return cls(starts.astype(np.int64), position.astype(np.int64), x[sample, position])


def log_likelihood_ratio(
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float,
    outputs: np.ndarray,
    counts: np.ndarray | None = None,
    *,
    group: int | None = None,
) -> np.ndarray:
    """``ln (P/Q)(y)`` of every row ``y`` of ``outputs``; float64 (samples,).

    ``outputs`` float (samples, steps).  ``counts`` int, the same shape or (steps,): the numbers of *other* examples
    drawn per step before the cut, for schemes with ``truncate`` only.  ``group``, for cyclic schemes: the known
    group of the example, `SECRET` for a uniform one that the adversary does not know; None: the known group that is
    protected least (`dominating_group`).  P counts ``per_user`` examples of a user; see `attributions` for fewer.

    Guarantees:
    * ratio is the mixture over all participation patterns, within `likelihood_error`.

    Errors: PrivacyError where scheme, strategy and arrays do not fit, or ``C`` has more bands than the separation.
    """
    outputs = np.ascontiguousarray(np.atleast_2d(outputs), np.float64)
    if outputs.shape[1] != strategy.steps:
        raise PrivacyError(f"outputs: found {outputs.shape[1]} columns; there are {strategy.steps} steps")
    return _evaluate(scheme, strategy, noise_multiplier, counts, group, outputs, None, None)


def losses_at(
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float,
    spikes: Spikes,
    seed: np.random.SeedSequence,
    counts: np.ndarray | None = None,
    *,
    group: int | None = None,
    outputs: np.ndarray | None = None,
) -> np.ndarray:
    """``ln (P/Q)(y)`` at ``y = C x + noise_multiplier z``, ``x`` given by ``spikes`` and ``z`` drawn from ``seed``.

    ``spikes`` need not follow the law of ``scheme``.  ``counts`` and ``group`` as in `log_likelihood_ratio`.
    ``outputs``: a float64 array (samples, steps) into which the ``y`` are written.  Runs on one core without
    holding the interpreter lock.
    """
    if outputs is None:
        outputs = np.empty((0, strategy.steps))
    return _evaluate(scheme, strategy, noise_multiplier, counts, group, outputs, spikes, seed)


def _evaluate(scheme, strategy, noise_multiplier, counts, group, outputs, spikes, seed) -> np.ndarray:
    check(scheme, strategy, noise_multiplier)
    draw = spikes is not None
    if draw:
        state = seed.generate_state(STATE, np.uint64).view(np.int64)
    else:
        spikes, state = Spikes.of(np.zeros((0, strategy.steps))), np.empty(0, np.int64)
    found = np.empty(spikes.samples if draw else len(outputs))
    _run(
        outputs,
        draw,
        (spikes.starts, spikes.positions, spikes.sizes),
        kept_shares(scheme, counts, (len(found), strategy.steps)),
        np.ascontiguousarray(strategy.columns),
        float(noise_multiplier),
        state,
        _law(scheme, strategy, noise_multiplier, group),
        _projection(strategy),
        found,
    )
    return found


def kept_shares(scheme: Scheme, counts: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """Probability that a drawn example survives the cut, ``truncate / (counts + 1)``; 0 where nothing is cut."""
    limit = getattr(scheme, "truncate", None)
    if (counts is None) != (limit is None):
        raise PrivacyError("counts: needed for schemes with truncate, and only for those")
    if limit is None:
        return np.empty((0, 0))
    counts = np.broadcast_to(np.asarray(counts), shape)
    return np.where(counts >= limit, limit / (counts + 1.0), 0.0)


def check(scheme: Scheme, strategy: Strategy, noise_multiplier: float) -> None:
    """PrivacyError unless the ratios of this module are exact for the three together."""
    if scheme.steps != strategy.steps:
        raise PrivacyError(f"strategy: found {strategy.steps} steps; the scheme has {scheme.steps}")
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0.0):
        raise PrivacyError(f"noise_multiplier: found {noise_multiplier!r}; a positive number is required")
    bands = int(np.flatnonzero(strategy.columns.any(axis=0))[-1]) + 1
    if bands > scheme.separation and not isinstance(scheme, BallsInBins):
        raise PrivacyError(
            f"strategy: found {bands} bands, the scheme separates participations by {scheme.separation}; use at most "
            "as many bands, so that the columns of one example do not overlap"
        )


# ----- errors -------------------------------------------------------------------------------------------------------


def likelihood_error(scheme: Scheme, strategy: Strategy, noise_multiplier: float, largest: float) -> float:
    """Bound on ``|computed - exact| `` of ``ln (P/Q)(y)`` for every ``y`` with ``|y_i| <= largest``.

    Worst-case rounding analysis (docs/bandmf_kernel.md); ``scheme.probability`` and the entries of ``C`` count as
    exact.

    Guarantees:
    * rounding error is bounded, in linear and in log space.
    """
    u, n, bands = UNIT_ROUNDOFF, strategy.steps, strategy.bands
    reach, times, multiplicity, half = _extremes(scheme, strategy, noise_multiplier)
    log_stay, log_weights = joining(scheme)
    heaviest = max(abs(w) for w in (*log_weights, log_stay) if w > NEGLIGIBLE) if log_stay > NEGLIGIBLE else 0.0
    x = multiplicity * reach * largest / noise_multiplier**2 + multiplicity**2 * half + heaviest
    inner = _inner_error(strategy) * largest
    exponent = multiplicity * inner / noise_multiplier**2 + (8.0 + 2.0 * n + bands) * u * x
    value = times * x + n * heaviest
    step = (len(log_weights) + 3) * (4.0 * value + 20.0) * u
    sides = 1.0
    if getattr(scheme, "truncate", None) is not None:
        exponent += 4.0 * u * (scheme.examples + 2.0)
        sides = 2.0
    return sides * (times * exponent + (n + scheme.separation + 2) * step) * 1.01


def sampling_error(scheme: Scheme, strategy: Strategy, noise_multiplier: float) -> tuple[float, float]:
    """``(shift, total_variation)``: how far sampled outputs are from ideal ones.

    The sampled ``y`` can be coupled with an ideal one such that, except with probability ``total_variation`` per
    sample, ``ln (P/Q)`` differs by at most ``shift`` between the two; the bits of the generators count as independent
    and uniform (docs/bandmf_kernel.md).
    """
    reach, times, multiplicity, _ = _extremes(scheme, strategy, noise_multiplier)
    normal = 2.0**-22
    shift = times * multiplicity * reach * normal / noise_multiplier
    return shift, strategy.steps * (2.0**-45 + (times + 1.0) * 2.0**-50)


def _extremes(scheme: Scheme, strategy: Strategy, noise_multiplier: float) -> tuple[float, int, int, float]:
    """Largest column sum, participations, multiplicity of one, and largest ``|c_i|^2 / (2 sigma^2)``."""
    multiplicity = getattr(scheme, "per_user", 1) if getattr(scheme, "truncate", None) is None else 2
    law = _law(scheme, strategy, noise_multiplier, SECRET)
    reach = float(strategy.columns.sum(axis=1).max())
    return reach, -(-strategy.steps // scheme.separation), multiplicity, float(law.half.max())


def _inner_error(strategy: Strategy) -> float:
    """Bound on the error of ``<c_i, y>`` for ``|y_i| <= 1``."""
    to = _projection(strategy)
    reach = float(strategy.columns.sum(axis=1).max())
    if to.method == _SPLIT_UP:
        size = np.abs(_SCALES)[:, None] * np.abs(_VALUES)
        taps = np.zeros((to.width, _SPLIT))
        taps.ravel()[: strategy.bands] = strategy.columns[0]
        filters = (size @ taps.T).sum(axis=1) * np.abs(_MIXES).sum(axis=1)
        reach = float((np.abs(_VALUES).T @ filters).max() * to.gain.max())
    return reach * (2.0 * to.width + 48.0) * UNIT_ROUNDOFF
