"""Exact accounting of Poisson and cyclic sampling: quadrature, enumeration of truncated batches, reference values."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from certify.errors import PrivacyError
from privacy.bandmf import exact
from privacy.bandmf.schemes import BMinSep, CyclicPoisson, Poisson
from privacy.bandmf.strategy import Strategy

REFERENCE = json.loads((Path(__file__).parent / "data" / "bandmf_account.json").read_text())
_SCHEMES = ("poisson", "b_min_sep", "cyclic_poisson_fixed_group")
MANY = 2**40  # examples, so that any probability is batch / examples


def poisson(steps: int, p: float, truncate: int | None = None) -> Poisson:
    return Poisson(steps, MANY, p * MANY, truncate)


def cyclic(steps: int, p: float, groups: int) -> CyclicPoisson:
    return CyclicPoisson(steps, MANY, p * MANY / groups, groups)


def one_step(p: float, sigma: float, shift: float, epsilon, direction: str):
    """Closed form of one step: the ratio grows with y, so the hockey stick is a difference of tails."""
    epsilon = np.asarray(epsilon, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.exp(epsilon if direction == "remove" else -epsilon)
        y = sigma**2 / shift * np.log((level - (1.0 - p)) / p) + shift / 2.0
        y = np.where(level <= 1.0 - p, -np.inf, y)
    if direction == "remove":
        mixed = (1.0 - p) * norm.sf(y / sigma) + p * norm.sf((y - shift) / sigma)
        return np.maximum(0.0, mixed - np.exp(epsilon) * norm.sf(y / sigma))
    mixed = (1.0 - p) * norm.cdf(y / sigma) + p * norm.cdf((y - shift) / sigma)
    return np.maximum(0.0, norm.cdf(y / sigma) - np.exp(epsilon) * mixed)


def two_steps(p: float, sigma: float, shifts, epsilon: float, direction: str) -> float:
    """Quadrature over the loss of the first step, the second in closed form (epsilon of either sign)."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    edges = np.linspace(-10.0 * sigma, shifts[0] + 10.0 * sigma, 121)
    half = np.diff(edges) / 2.0
    y = ((edges[:-1] + edges[1:]) / 2.0)[:, None] + half[:, None] * nodes
    w = half[:, None] * weights
    plain = norm.pdf(y, 0.0, sigma)
    mixed = (1.0 - p) * plain + p * norm.pdf(y, shifts[0], sigma)
    loss = np.log(mixed / plain)
    if direction == "remove":
        return float((w * mixed * stick(p, sigma, shifts[1], epsilon - loss, direction)).sum())
    return float((w * plain * stick(p, sigma, shifts[1], epsilon + loss, direction)).sum())


def stick(p, sigma, shift, epsilon, direction):
    return one_step(p, sigma, shift, epsilon, direction)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("sigma", [0.25, 1.0, 6.0])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_exact_bounds_hold_with_certainty(p, sigma, direction):
    """One step, closed form."""
    known = exact.accountant(poisson(1, p), Strategy.identity(1), sigma)
    for epsilon in (0.0, 0.01, 0.3, 1.0, 3.0, 6.0):
        true = float(one_step(p, sigma, 1.0, epsilon, direction))
        low, high = known.lower(epsilon, direction), known.upper(epsilon, direction)
        rounding = 1e-13 * p + 1e-15  # of the closed form
        assert low <= true + rounding and true - rounding <= high
        assert high - low <= (2e-2 if direction == "remove" else 0.1) * true + 5e-3 * p


@pytest.mark.parametrize("p, sigma, shifts", [(0.3, 0.8, (1.0, 1.0)), (0.05, 0.5, (1.0, 0.6)), (1.0, 1.5, (0.5, 1.0))])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_composition_of_different_steps_against_quadrature(p, sigma, shifts, direction):
    strategy = Strategy(np.array(shifts)[:, None])
    known = exact.accountant(poisson(2, p), strategy, sigma)
    for epsilon in (0.0, 0.5, 2.0, 4.0):
        true = two_steps(p, sigma, shifts, epsilon, direction)
        low, high = known.lower(epsilon, direction), known.upper(epsilon, direction)
        assert low <= true * (1.0 + 1e-9) + 1e-14 and true * (1.0 - 1e-9) - 1e-14 <= high
        assert high - low <= 2e-2 * true + 1e-4 * p


@given(
    st.integers(1, 20),
    st.floats(1e-2, 1.0),
    st.floats(0.5, 4.0),
    st.floats(0.0, 6.0),
    st.sampled_from(["remove", "add"]),
)
@settings(max_examples=8, deadline=None)
def test_bounds_are_ordered_and_monotone(steps, p, sigma, epsilon, direction):
    """Lower below upper; more steps, less noise, smaller epsilon cost more."""
    at = exact.accountant(poisson(steps, p), Strategy.identity(steps), sigma)
    more = exact.accountant(poisson(steps + 1, p), Strategy.identity(steps + 1), sigma)
    noisier = exact.accountant(poisson(steps, p), Strategy.identity(steps), 1.2 * sigma)
    low, high = at.lower(epsilon, direction), at.upper(epsilon, direction)
    assert 0.0 <= low <= high <= 1.0
    assert more.upper(epsilon, direction) >= low
    assert noisier.lower(epsilon, direction) <= high
    assert at.lower(epsilon + 0.1, direction) <= high


@pytest.mark.parametrize("entry", [e for e in REFERENCE["exact_delta"] if e["scheme"] in _SCHEMES])
def test_enumerated_reference_values_lie_inside(entry):
    n, sigma = entry["n"], entry["sigma"]
    strategy = Strategy.from_matrix(entry["C"])
    if entry["scheme"] == "poisson":
        scheme = poisson(n, entry["p"])
    elif entry["scheme"] == "b_min_sep":
        scheme = BMinSep(n, MANY, entry["p"] * MANY / (1.0 + (entry["b"] - 1) * entry["p"]), entry["b"])
    else:
        scheme = cyclic(n, entry["p"], entry["b"])
    if not exact.supports(scheme, strategy):
        with pytest.raises(PrivacyError, match="correlated"):
            exact.accountant(scheme, strategy, sigma)
        return
    known = exact.accountant(scheme, strategy, sigma)
    for direction in ("remove", "add"):
        for epsilon, true in zip(entry["eps"], entry[f"delta_{direction}"], strict=True):
            low, high = known.lower(epsilon, direction), known.upper(epsilon, direction)
            slack = entry["abs_err_bound_est"] + 1e-13
            assert low <= true + slack and true - slack <= high
            assert high - low <= 5e-3 * true + 1e-4 * entry["p"]


def scheme_of(entry) -> tuple:
    n, items = entry["n"], entry["items"]
    if entry["scheme"] == "poisson":
        return poisson(n, items[0]["p"]), Strategy.identity(n), items[0]["sigma"]
    name = entry.get("coef")
    strategy = Strategy.toeplitz(REFERENCE["coefficients"][name], n) if name else Strategy.identity(n)
    return cyclic(n, items[0]["p"], entry["b"]), strategy, entry["sigma"]


@pytest.mark.parametrize("entry", REFERENCE["pld"], ids=lambda e: e["name"])
def test_dp_accounting_reference_values(entry):
    """Its pessimistic values are not below ours (but for the rounding of its transforms), its optimistic not above."""
    known = exact.accountant(*scheme_of(entry))
    for i in (1, 3, 5):
        epsilon = entry["eps"][i]
        low, high = known.lower(epsilon), known.upper(epsilon)
        assert low <= entry["delta"][i] * (1.0 + 1e-6) + 1e-13
        assert entry["delta_optimistic"][i] <= high * (1.0 + 1e-6) + 1e-13
        assert known.lower(epsilon, "remove") <= max(entry["delta_remove"][i], 0.0) * (1.0 + 1e-6) + 1e-13
        assert known.lower(epsilon, "add") <= max(entry["delta_add"][i], 0.0) * (1.0 + 1e-6) + 1e-13
        assert high - low <= max(5e-3 * high, 1e-15)


def test_the_published_cyclic_baseline_is_not_reproducible():
    """0.5746, not 0.627, for n = 7200, 256 groups, and 29 = ceil(7200 / 256) rounds."""
    entry = REFERENCE["production"]
    scheme = CyclicPoisson(entry["n"], entry["dataset_size"], entry["expected_batch"], entry["b"])
    for point in entry["own_fft"]:
        known = exact.accountant(scheme, Strategy.identity(entry["n"]), point["sigma"])
        assert len(known.above[0]) == 29
        assert known.lower(10.0) <= point["dp_accounting_delta"] * 1.001 and point["delta_lo"] <= known.upper(10.0)
        assert known.upper(10.0) <= point["delta_hi"]
        assert known.upper(10.0) <= entry["delta"] and known.upper(10.0) < 1.002 * known.lower(10.0)


def test_truncation_far_above_the_batch_costs_next_to_nothing():
    entry = REFERENCE["production"]
    facts = entry["n"], entry["dataset_size"], entry["expected_batch"], entry["b"]
    known = [
        exact.accountant(CyclicPoisson(*facts, truncate), Strategy.identity(entry["n"]), 0.5746).upper(10.0)
        for truncate in (None, entry["B_max"])
    ]
    assert known[0] < known[1] < known[0] * (1.0 + 1e-5)


# --- which steps an example meets ---


def test_the_worst_group_has_the_rounded_up_number_of_rounds():
    for steps, groups in ((7, 3), (9, 3), (10, 4), (3, 5)):
        above = exact.accountant(cyclic(steps, 0.5, groups), Strategy.identity(steps), 1.0).above
        assert [len(h) for h in above] == [-(-steps // groups)]


@pytest.mark.parametrize(
    "n, groups, worst", [(4, 3, [1.1, 0.25]), (5, 3, [1.1, 0.61]), (5, 4, [1.1, 0.25]), (7, 3, [1.1, 1.1, 0.25])]
)
def test_column_norms_belong_to_their_own_columns(n, groups, worst):
    """Squared norms 1.1, ..., 1.1, 0.61, 0.25: the last bands - 1 columns are cut off, the last one most."""
    known = exact.accountant(cyclic(n, 0.5, groups), Strategy.toeplitz([0.5, 0.6, 0.7], n), 1.0)
    assert np.allclose(known.above, [np.sqrt(worst)])
    assert (np.array(known.above[0]) >= np.array(known.below[0])).all()


def test_general_columns_charge_the_worst_group():
    """Column norms in any order: the maximum over the groups, found one by one."""
    rng = np.random.default_rng(4)
    n, groups = 8, 2
    strategy = Strategy(np.column_stack([rng.uniform(0.3, 1.0, n), np.append(rng.uniform(0.0, 0.5, n - 1), 0.0)]))
    known = exact.accountant(cyclic(n, 0.4, groups), strategy, 0.9)
    ones = [Strategy(strategy.column_norms[g::groups][:, None]) for g in range(groups)]
    for epsilon in (0.2, 1.0, 3.0):
        single = [exact.accountant(poisson(4, 0.4), s, 0.9) for s in ones]
        assert known.upper(epsilon) == pytest.approx(max(s.upper(epsilon) for s in single), rel=1e-6)
        assert known.lower(epsilon) == pytest.approx(max(s.lower(epsilon) for s in single), rel=1e-6)


def test_column_normalised_noise_is_accounted_with_its_own_columns():
    """All norms 1: as much as DP-SGD with the same number of rounds, more than the cut columns."""
    n, groups = 9, 3
    strategy = Strategy.toeplitz([0.8, 0.5, 0.33], n)
    scheme = cyclic(n, 0.5, groups)
    normalised = exact.accountant(scheme, strategy.column_normalised(), 1.0)
    plain = exact.accountant(poisson(3, 0.5), Strategy.identity(3), 1.0)
    assert normalised.upper(1.0) == pytest.approx(plain.upper(1.0), rel=1e-5)
    unit = Strategy(strategy.columns / strategy.column_norms[0])
    assert exact.accountant(scheme, unit, 1.0).upper(1.0) <= normalised.upper(1.0) * (1.0 + 1e-6)


# --- truncated batches, by enumeration ---


def truncated_worlds(p: float, limit: int, others: tuple[float, ...], gradient: float):
    """Laws of (published r, sum) with and without the example's gradient: lists of (probability, r, centre)."""
    with_it, without = [], []
    size = len(others) + 1
    gradients = (*others, gradient)
    for sampled in product([False, True], repeat=size):
        chance = float(np.prod([p if s else 1.0 - p for s in sampled]))
        chosen = [i for i in range(size) if sampled[i]]
        r = sum(sampled[:-1])
        kept = list(combinations(chosen, limit)) if len(chosen) > limit else [tuple(chosen)]
        for subset in kept:
            total = sum(gradients[i] for i in subset)
            with_it.append((chance / len(kept), r, total))
            without.append((chance / len(kept), r, total - gradient * ((size - 1) in subset)))
    return with_it, without


def hockey_stick(first, second, sigma: float, epsilon: float, published: bool) -> float:
    y = np.linspace(-12.0, 12.0, 24_001)
    total = 0.0
    for r in {r for _, r, _ in first} if published else {None}:
        density = [
            sum(w * norm.pdf(y, centre, sigma) for w, q, centre in world if r is None or q == r)
            for world in (first, second)
        ]
        total += np.trapezoid(np.maximum(0.0, density[0] - np.exp(epsilon) * density[1]), y)
    return float(total)


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("p", [0.25, 0.7])
@pytest.mark.parametrize("others", [(0.0, 0.0), (1.0, 1.0), (-1.0, -1.0), (-1.0, 1.0)])
@pytest.mark.parametrize("sigma", [0.9, 0.3])
def test_truncated_bound_covers_every_world(limit, p, others, sigma):
    """Three examples, one step: all samples and subsets enumerated, batch sizes published or not."""
    known = exact.accountant(Poisson(1, 3, 3 * p, limit), Strategy.identity(1), sigma)
    worlds = truncated_worlds(p, limit, others, 1.0)
    for epsilon in (0.0, 0.4, 1.5):
        for direction, (first, second) in (("remove", worlds), ("add", worlds[::-1])):
            upper, lower = known.upper(epsilon, direction), known.lower(epsilon, direction)
            for published in (True, False):
                assert hockey_stick(first, second, sigma, epsilon, published) <= upper + 1e-7
            if others == (0.0, 0.0):
                assert lower <= hockey_stick(first, second, sigma, epsilon, False) + 1e-7


def test_leaving_truncation_out_would_be_caught():
    """Negative control of the test above: in the add direction the untruncated delta is 0 here, the true one is not."""
    plain = exact.accountant(Poisson(1, 3, 2.1), Strategy.identity(1), 0.3)
    with_it, without = truncated_worlds(0.7, 1, (-1.0, -1.0), 1.0)
    assert hockey_stick(without, with_it, 0.3, 1.5, True) > plain.upper(1.5, "add") + 0.1


# --- numerics ---


@pytest.mark.parametrize("tilt", [0.0, 3.0])
@pytest.mark.parametrize("count", [1, 5])
def test_transform_error_is_bounded(tilt, count):
    """Against direct convolution in long double: the l2 error stated holds, and mass outside the window is covered."""
    rng = np.random.default_rng(2)
    mass = rng.dirichlet(np.ones(300)) * np.exp(-np.arange(300) / 30.0)
    other = rng.dirichlet(np.ones(80))
    parts = [(exact._Losses(-40, mass, 0.0, 0.0), count), (exact._Losses(7, other, 0.0, 0.0), 2)]
    composed = exact._Composed(0.01, parts, True)
    window = composed._window(tilt)
    direct, lowest = np.ones(1, np.longdouble), 0
    for part, times in parts:
        weight = part.mass * np.exp(np.longdouble(tilt) * (part.lowest + np.arange(len(part.mass))) * 0.01)
        for _ in range(times):
            direct, lowest = np.convolve(direct, weight / weight.sum()), lowest + part.lowest
    padded = np.zeros(len(window.mass), np.longdouble)
    for i, value in enumerate(direct):
        padded[(lowest + i - window.first) % len(padded)] += value
    assert float(np.sqrt(((padded - window.mass) ** 2).sum())) <= window.error
    inside = np.arange(len(direct)) + lowest
    outside = (inside < window.first) | (inside >= window.first + len(window.mass))
    assert float(direct[outside].sum()) <= window.outside


def test_tiny_deltas_keep_their_relative_accuracy():
    """The tilt: without it the rounding of the transforms would be of the order of these deltas."""
    known = exact.accountant(poisson(50, 0.05), Strategy.identity(50), 0.8)
    low, high = known.lower(14.0), known.upper(14.0)
    assert 0.0 < low <= high <= 1.01 * low and high < 2e-17


# --- refusals ---


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: exact.accountant(poisson(4, 0.1), Strategy.toeplitz([1.0, 0.5], 4), 1.0), "correlated"),
        (lambda: exact.accountant(cyclic(4, 0.1, 2), Strategy.toeplitz([1.0, 0.5, 0.2], 4), 1.0), "correlated"),
        (lambda: exact.accountant(BMinSep(4, 9, 1.0, 2), Strategy.identity(4), 1.0), "correlated"),
        (lambda: exact.accountant(poisson(4, 0.1), Strategy.identity(5), 1.0), "steps"),
        (lambda: exact.accountant(poisson(4, 0.1), Strategy.identity(4), 0.0), "noise_multiplier"),
        (lambda: exact.accountant(poisson(4, 0.1), Strategy.identity(4), 1.0).upper(-1.0), "epsilon"),
        (lambda: exact.accountant(poisson(4, 0.1), Strategy.identity(4), 1.0).upper(1.0, "up"), "direction"),
        (lambda: exact.accountant(poisson(4, 0.1), Strategy.identity(4), 1e-3).upper(1.0), "too little|so little"),
    ],
)
def test_refusals(call, match):
    with pytest.raises(PrivacyError, match=match):
        call()


def test_agreement_with_dp_accounting():
    """Where it is installed: its truncated and plain distributions, both directions."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    for p, sigma, steps in ((0.02, 0.7, 30), (0.3, 1.3, 10)):
        theirs = [
            pld.from_gaussian_mechanism(
                sigma, sampling_prob=p, pessimistic_estimate=pessimistic, use_connect_dots=pessimistic
            ).self_compose(steps)
            for pessimistic in (True, False)
        ]
        known = exact.accountant(poisson(steps, p), Strategy.identity(steps), sigma)
        for epsilon in (0.1, 1.0, 3.0):
            above, below = (t.get_delta_for_epsilon(epsilon) for t in theirs)
            assert known.lower(epsilon) <= above + 1e-13 and below - 1e-13 <= known.upper(epsilon)
    truncated = pld.from_truncated_subsampled_gaussian_mechanism(
        1000, 0.1, 130, 1.0, neighboring_relation=pld.NeighborRel.REPLACE_SPECIAL
    ).self_compose(100)
    known = exact.accountant(Poisson(100, 1000, 100.0, 130), Strategy.identity(100), 1.0)
    assert known.lower(2.0) <= truncated.get_delta_for_epsilon(2.0) and known.upper(2.0) <= 1.1 * known.lower(2.0)
