"""Facade and estimate-verify-release: coverage of known deltas, limiting cases, procedures enumerated, the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import typer
from scipy.stats import binom
from typer.testing import CliRunner

from certify.cli.account import app
from certify.errors import CertdpError, CheckpointError, PrivacyError
from privacy.bandmf import account, evr, exact
from privacy.bandmf.result import DeltaBound
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Poisson
from privacy.bandmf.strategy import Strategy

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = json.loads((Path(__file__).parent / "data" / "bandmf_account.json").read_text())
MANY = 2**40


def scheme_of(entry):
    n, p = entry["n"], entry.get("p")
    if entry["scheme"] == "balls_in_bins":
        return BallsInBins(n, 3 * entry["T"], entry["T"])
    if entry["scheme"] == "multi_attribution":
        return MultiAttribution(n, p, entry["b"], entry["k"])
    examples = entry.get("dataset_size", MANY)
    batch = p * examples / (1.0 + (entry["b"] - 1) * p)
    return BMinSep(n, examples, batch, entry["b"], entry["warm_start"], entry.get("B_max"))


SAMPLED = [e for e in REFERENCE["exact_delta"] if e["scheme"] in ("b_min_sep", "balls_in_bins") and e["n"] == 3]


@pytest.mark.parametrize("entry", SAMPLED, ids=lambda e: e["name"])
def test_delta_interval_covers_the_true_value_except_with_the_failure_probability(entry):
    """Enumerated deltas; failure probability 1e-8 in each of 12 intervals."""
    scheme, strategy = scheme_of(entry), Strategy.from_matrix(entry["C"])
    for direction in ("remove", "add"):
        for epsilon, true in zip(entry["eps"], entry[f"delta_{direction}"], strict=True):
            if epsilon not in (0.5, 2.0):
                continue
            found = account.delta(
                scheme, strategy, entry["sigma"], epsilon, direction=direction, failure_probability=1e-8, seed=1
            )
            slack = entry["abs_err_bound_est"] + 1e-12
            assert found.lower - slack <= true <= found.upper + slack
            assert found.upper - found.lower <= 0.5 * max(true, 1e-6)
            assert "monte carlo" in found.method and found.failure_probability == 1e-8


def test_intervals_miss_as_rarely_as_they_say():
    """60 intervals at failure probability 0.2, pilot included; the count is beyond its binomial limit with 1e-7."""
    entry = next(e for e in SAMPLED if e["name"] == "bminsep_warm_n3_b2_p0.3_s0.8")
    scheme, strategy = scheme_of(entry), Strategy.from_matrix(entry["C"])
    true = entry["delta_remove"][entry["eps"].index(2.0)]
    misses = 0
    for seed in range(60):
        options = {"failure_probability": 0.2, "samples": 500, "seed": seed}
        found = account.delta(scheme, strategy, entry["sigma"], 2.0, **options)
        misses += not found.lower <= true <= found.upper
    assert misses <= binom.isf(1e-7, 60, 0.2)


def test_separation_one_is_poisson():
    """The sampled path at b = 1 against the exact one."""
    n, sigma = 30, 0.8
    scheme, strategy = Poisson(n, 1000, 50.0), Strategy.identity(n)
    known = exact.accountant(scheme, strategy, sigma)
    question, run = account._Question(scheme, strategy, "both"), account._Run(1e-8, 0.1, 30_000, 5, None, None, None)
    for epsilon in (1.0, 2.0):
        for noise_scheme in (scheme, BMinSep(n, 1000, 50.0, 1, warm=False)):
            question = account._Question(noise_scheme, strategy, "both")
            drawn = account._draw(account._parts(question, sigma, epsilon), [30_000] * 2, run, "")
            found = account._bound(question, sigma, drawn, epsilon, 1e-8)
            assert found.lower <= known.upper(epsilon) and known.lower(epsilon) <= found.upper
            assert found.upper <= 1.3 * found.lower


def test_probability_one_warm_is_balls_in_bins():
    """Tilted b-min-sep with p = 1 against plain losses of balls-in-bins."""
    n, bins, sigma, epsilon = 12, 4, 1.1, 1.0
    scheme, strategy = BallsInBins(n, 40, bins), Strategy.toeplitz([0.8, 0.5, 0.3], n)
    tilted = account.delta(scheme, strategy, sigma, epsilon, failure_probability=1e-8, seed=2)
    question, run = account._Question(scheme, strategy, "both"), account._Run(1e-8, 0.1, None, 3, None, None, None)
    parts = [account._Plain(scheme, strategy, sigma, d) for d in ("remove", "add")]
    plain = account._bound(question, sigma, account._draw(parts, [100_000] * 2, run, ""), epsilon, 1e-8)
    assert tilted.method == "tilted monte carlo" and plain.method == "monte carlo"
    assert max(tilted.lower, plain.lower) <= min(tilted.upper, plain.upper)
    assert plain.upper - plain.lower <= 0.3 * plain.upper


def test_more_bands_than_bins_use_plain_losses():
    """Enumerated balls-in-bins, columns of one example overlapping."""
    scheme, strategy = BallsInBins(2, 10, 1), Strategy.from_matrix([[1.0, 0.0], [0.5, 1.0]])
    found = account.delta(scheme, strategy, 2.0, 1.0, failure_probability=1e-8, seed=4)
    from privacy.baselines import gaussian_delta

    true = gaussian_delta(2.0, math.hypot(1.0, 1.5), 1.0)  # every example takes part in both steps
    assert found.method == "monte carlo" and found.lower <= true <= found.upper


def test_users_with_fewer_examples_can_be_worse_and_are_covered():
    """For general C two examples of a user may hide her better than one: the largest over all numbers counts."""
    entry = REFERENCE["multi_fewer_examples_counterexample"]
    strategy = Strategy.from_matrix(entry["C"])
    one, two = (next(r for r in entry["results"] if r["k"] == k)["delta_remove"][0] for k in (1, 2))
    assert one > two
    scheme = MultiAttribution(2, entry["p"], entry["b"], 2)
    found = account.delta(scheme, strategy, entry["sigma"], 0.5, samples=100_000, failure_probability=1e-8, seed=3)
    assert two < found.lower <= one <= found.upper


@pytest.mark.parametrize("name", ["multi_n3_b2_p0.2_k3_s1.5", "trunc_cold_n2"])
def test_upper_bounds_cover_users_and_truncated_batches(name):
    entry = next(e for e in REFERENCE["exact_delta"] if e["name"] == name)
    scheme, strategy = scheme_of(entry), Strategy.from_matrix(entry["C"])
    for i in (1, 3):
        for direction in ("remove", "add"):
            options = {"direction": direction, "failure_probability": 1e-8, "samples": 20_000, "seed": 6}
            found = account.delta(scheme, strategy, entry["sigma"], entry["eps"][i], **options)
            assert entry[f"delta_{direction}"][i] <= found.upper + 1e-9
            assert name.startswith("trunc") or found.upper <= 1.2 * entry[f"delta_{direction}"][i] + 1e-3


def test_truncation_enters_the_bound():
    plain, cut = (
        account.delta(
            BMinSep(20, 400, 20.0, 4, truncate=truncate), Strategy.toeplitz([0.8, 0.6], 20), 0.7, 3.0, seed=1
        )
        for truncate in (None, 45)
    )
    assert cut.upper > plain.upper and cut.lower < plain.lower
    assert cut.upper - plain.upper < 0.1 * plain.upper


@pytest.mark.parametrize("call", ["delta", "curve", "epsilon", "calibrate"])
def test_failure_probabilities_add_up(call, monkeypatch):
    """Union bound: what all one-sided bounds of a call may fail with is at most what the call states."""
    spent = []
    for side in ("upper_bound", "lower_bound"):
        original = getattr(account.confidence, side)

        def recorded(values, most, share, original=original):
            spent.append(share)
            return original(values, most, share)

        monkeypatch.setattr(account.confidence, side, recorded)
    scheme, strategy, options = SMALL[0], SMALL[1], {"failure_probability": 1e-5, "seed": 1}
    if call == "delta":
        stated = account.delta(scheme, strategy, 0.7, 2.0, **options).failure_probability
    elif call == "curve":
        stated = sum(b.failure_probability for b in account.curve(scheme, strategy, 0.7, [1.0, 2.0], **options))
    elif call == "epsilon":
        stated = account.epsilon(scheme, strategy, 0.7, 1e-2, **options).failure_probability
    else:
        stated = account.calibrate(scheme, strategy, 3.0, 1e-2, **options).failure_probability
    assert 0.0 < sum(spent) <= stated * (1.0 + 1e-9) <= 1e-5 * (1.0 + 2e-9)


def test_certain_bounds_need_no_samples():
    for entry in SAMPLED:
        found = account.delta(
            scheme_of(entry), Strategy.from_matrix(entry["C"]), entry["sigma"], 2.0, failure_probability=0.0
        )
        assert found.method == "renyi" and found.samples == 0 and found.failure_probability == 0.0
        assert max(entry["delta_remove"][3], entry["delta_add"][3]) <= found.upper < 1.0


def test_curve_holds_at_all_epsilons_at_once():
    entry = SAMPLED[0]
    scheme, strategy = scheme_of(entry), Strategy.from_matrix(entry["C"])
    found = account.curve(scheme, strategy, entry["sigma"], [0.5, 1.0, 2.0], failure_probability=3e-8, seed=1)
    assert [b.epsilon for b in found] == [0.5, 1.0, 2.0]
    assert all(b.failure_probability == pytest.approx(1e-8) for b in found)
    for bound, true in zip(found, entry["delta_remove"][1:4], strict=True):
        assert bound.lower <= true <= bound.upper


@pytest.mark.parametrize("entry", SAMPLED, ids=lambda e: e["name"])
def test_epsilon_interval_covers_the_true_value_except_with_the_failure_probability(entry):
    true = max(entry["delta_remove"][3], entry["delta_add"][3])
    scheme, strategy = scheme_of(entry), Strategy.from_matrix(entry["C"])
    found = account.epsilon(scheme, strategy, entry["sigma"], true, failure_probability=1e-8, seed=1)
    assert found.lower <= 2.0 <= found.upper <= 1.08 * found.lower
    certain = account.epsilon(scheme, strategy, entry["sigma"], true, failure_probability=0.0)
    assert certain.upper >= 2.0 and certain.method == "renyi"


def test_exact_epsilon():
    scheme, strategy = CyclicPoisson(20, 1000, 50.0, 4), Strategy.toeplitz([0.8, 0.6], 20)
    delta = account.delta(scheme, strategy, 0.9, 1.5)
    assert delta.failure_probability == 0.0 and delta.method == "exact"
    found = account.epsilon(scheme, strategy, 0.9, delta.estimate)
    assert found.lower <= 1.5 <= found.upper <= found.lower * 1.005


# --- calibration ---


@pytest.mark.parametrize("entry", REFERENCE["pld_calibrated_sigma"][4:5], ids=lambda e: e["tag"])
def test_exact_calibration_against_dp_accounting(entry):
    """Its noise multiplier (coarse grid, pessimistic) within 0.1 %."""
    n = entry["rounds"]
    scheme = Poisson(n, MANY, entry["p"] * MANY)
    found = account.calibrate(scheme, Strategy.identity(n), entry["eps"], entry["delta"])
    assert found.noise_multiplier == pytest.approx(entry["sigma"], rel=1e-3)
    assert found.bound.upper <= entry["delta"] and found.failure_probability == 0.0
    less = exact.accountant(scheme, Strategy.identity(n), found.noise_multiplier * 0.997)
    assert less.lower(entry["eps"]) > entry["delta"]


@pytest.mark.parametrize("entry", SAMPLED, ids=lambda e: e["name"])
def test_calibrated_noise_gives_epsilon_and_delta_in_all(entry):
    """The true noise multiplier for the enumerated delta is known: never less, and not much more."""
    true = max(entry["delta_remove"][3], entry["delta_add"][3])
    scheme, strategy = scheme_of(entry), Strategy.from_matrix(entry["C"])
    found = account.calibrate(scheme, strategy, 2.0, true, failure_probability=1e-8, seed=1)
    assert entry["sigma"] <= found.noise_multiplier <= 1.1 * entry["sigma"]
    assert found.bound.upper + found.failure_probability <= found.delta == true and not found.fell_back
    certain = account.calibrate(scheme, strategy, 2.0, true, failure_probability=0.0)
    assert certain.noise_multiplier >= entry["sigma"] and certain.failure_probability == 0.0


def test_noise_without_amplification_is_enough():
    entry = SAMPLED[0]
    scheme, strategy = scheme_of(entry), Strategy.from_matrix(entry["C"])
    noise = account.unamplified_noise(scheme, strategy, 2.0, entry["delta_remove"][3])
    assert noise > entry["sigma"]
    users = MultiAttribution(4, 0.2, 2, 3)
    single = MultiAttribution(4, 0.2, 2, 1)
    ratio = [account.unamplified_noise(s, Strategy.identity(4), 1.0, 1e-5) for s in (users, single)]
    assert ratio[0] == pytest.approx(3.0 * ratio[1])


@pytest.mark.slow
@pytest.mark.parametrize("entry", REFERENCE["mc_calibrated_sigma"][:4], ids=lambda e: f"{e['min_sep']}-{e['eps']}")
def test_calibration_against_earlier_estimates(entry):
    from privacy.bandmf.optimize import optimal_toeplitz

    n = entry["n"]
    scheme = BMinSep(n, n * entry["D_over_B"], float(n), entry["min_sep"])
    found = account.calibrate(scheme, optimal_toeplitz(n, entry["bands"]), entry["eps"], entry["delta"], seed=1)
    error = 5.0 * entry["rel_se_sigma"]
    assert 1.0 - error <= found.noise_multiplier / entry["sigma"] <= 1.02 + error


# --- the procedures, enumerated ---


def bound(upper: float, gamma: float = 0.0) -> DeltaBound:
    return DeltaBound(1.0, upper, 0.0, upper, gamma, "both", "monte carlo")


FALLBACK = bound(0.01)
NOISE = [5.0, 4.0, 3.0, 2.0, 1.0]


def released_badly(procedure, gamma: float, bad: list[bool], good_rate: float) -> float:
    """Probability that a bad candidate is released: bad ones pass with the share that the procedure gives each test,
    good ones with `good_rate`, independently; every outcome enumerated."""
    shares = []
    procedure(NOISE, FALLBACK, 9.0, lambda noise, share: shares.append(share) or bound(1.0), 0.5, gamma)
    total = 0.0
    for outcome in product([True, False], repeat=len(bad)):
        weight = 1.0

        def verify(noise: float, share: float, outcome=outcome) -> DeltaBound:
            return bound(0.0 if outcome[NOISE.index(noise)] else 1.0, share)

        for is_bad, passes in zip(bad, outcome, strict=True):
            rate = shares[0] if is_bad else good_rate
            weight *= rate if passes else 1.0 - rate
        chosen = procedure(NOISE, FALLBACK, 9.0, verify, 0.5, gamma)
        total += weight * (not chosen.fell_back and bad[NOISE.index(chosen.noise_multiplier)])
    return total


@pytest.mark.parametrize("bad", [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
@pytest.mark.parametrize("good_rate", [1.0, 0.7])
def test_descend_releases_a_bad_noise_with_at_most_gamma(bad, good_rate):
    assert released_badly(evr.descend, 0.2, [bool(b) for b in bad], good_rate) <= 0.2 + 1e-12


@pytest.mark.parametrize("bad", [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
@pytest.mark.parametrize("good_rate", [1.0, 0.0])
def test_ascend_releases_a_bad_noise_with_at_most_gamma(bad, good_rate):
    assert released_badly(evr.ascend, 0.2, [bool(b) for b in bad], good_rate) <= 0.2 + 1e-12


def test_the_best_that_passed_would_break_the_promise():
    """Negative control: without stopping at the first failure, and with a full share for every test."""

    def best_of_all(candidates, fallback, noise, verify, delta, gamma):
        passing = [c for c in candidates if verify(c, gamma).upper <= delta - gamma]
        return evr.Selection(min(passing, default=noise), delta, gamma, fallback, 5, not passing)

    gamma = 0.2
    total = 0.0
    for outcome in product([True, False], repeat=4):
        weight = math.prod(gamma if passes else 1.0 - gamma for passes in outcome)
        script = dict(zip(NOISE, (True, *outcome), strict=True))
        chosen = best_of_all(NOISE, FALLBACK, 9.0, lambda c, g, s=script: bound(0.0 if s[c] else 1.0, g), 0.5, gamma)
        total += weight * (chosen.noise_multiplier < 5.0)
    assert total > 2.0 * gamma


def test_descend_stops_at_the_first_failure():
    tested = []

    def verify(noise: float, share: float) -> DeltaBound:
        tested.append(noise)
        return bound(0.3 if noise != 3.0 else 0.6, share)

    chosen = evr.descend(NOISE, FALLBACK, 9.0, verify, 0.5, 0.1)
    assert (chosen.noise_multiplier, chosen.tests, tested) == (4.0, 3, [5.0, 4.0, 3.0])


def test_the_failure_probability_is_part_of_delta():
    """A bound of delta - gamma passes, one above does not."""
    for upper, passes in ((0.4, True), (0.41, False)):
        chosen = evr.descend([1.0], FALLBACK, 9.0, lambda n, g, u=upper: bound(u, g), 0.5, 0.1)
        assert chosen.fell_back is not passes


def test_procedures_refuse_what_would_break_the_proof():
    keep = {"delta": 0.5, "gamma": 0.1}
    with pytest.raises(PrivacyError, match="share"):
        evr.ascend([1.0, 2.0], FALLBACK, 9.0, lambda n, g: bound(0.1, 2.0 * g), **keep)
    with pytest.raises(PrivacyError, match="fallback"):
        evr.descend([1.0], bound(0.01, 1e-6), 9.0, lambda n, g: bound(0.1, g), **keep)
    with pytest.raises(PrivacyError, match="fallback"):
        evr.descend([1.0], bound(0.45), 9.0, lambda n, g: bound(0.1, g), **keep)
    with pytest.raises(PrivacyError, match="candidates"):
        evr.ascend([], FALLBACK, 9.0, lambda n, g: bound(0.1, g), **keep)
    with pytest.raises(PrivacyError, match="part of delta"):
        evr.ascend([1.0], FALLBACK, 9.0, lambda n, g: bound(0.1, g), 0.1, 0.2)


def test_base_delta_reference_values():
    for e in REFERENCE["evr"]["get_base_delta"]:
        found = evr.base_delta(e["num_samples"], e["target_delta"])
        assert found == pytest.approx(e["base_delta"], rel=3e-4)
        assert evr.overall_delta(e["num_samples"], found) <= e["target_delta"]
    for e in REFERENCE["evr"]["minimum_samples"][:4]:
        assert evr.minimum_samples(e["base_delta"], e["target_delta"]) == e["min_samples"]
    for e in REFERENCE["evr"]["chernoff_kl_bound"]:
        assert evr.chernoff(e["m"], e["delta"], e["tau"]) == pytest.approx(e["bound"], rel=1e-9)
    with pytest.raises(PrivacyError, match="too few"):
        evr.base_delta(100, 1e-5)


@pytest.mark.parametrize("samples, base", [(20, 0.1), (200, 0.02), (1000, 0.01)])
def test_overall_delta_covers_a_false_pass(samples, base):
    """Worst case by enumeration of binomial hits: max over true means of min(mean, P[pass] + ...)."""
    stated = evr.overall_delta(samples, base)
    for mean in np.linspace(base, 1.0, 400):
        passes = binom.cdf(math.floor(samples * base), samples, mean)
        assert passes * min(mean, 1.0) <= stated + 1e-12
        assert passes <= evr.chernoff(samples, base, mean / base) * (1.0 + 1e-9)


# --- runs ---

SMALL = BMinSep(24, 600, 40.0, 4), Strategy.toeplitz([0.8, 0.6], 24), 0.7, 3.0


def values(found: DeltaBound) -> tuple[float, float, float]:
    return found.estimate, found.lower, found.upper


def test_seeds_are_fresh_by_default():
    one, two, three, four = (account.delta(*SMALL, samples=3000, seed=s) for s in (None, None, 7, 7))
    assert one.estimate != two.estimate and values(three) == values(four)


def test_executors_do_not_change_results():
    alone = account.delta(*SMALL, samples=6000, seed=7)
    with ThreadPoolExecutor(3) as pool:
        assert values(account.delta(*SMALL, samples=6000, seed=7, executor=pool)) == values(alone)


def test_results_folder_goes_on_where_it_was(tmp_path, monkeypatch):
    """The second call computes nothing, draws no new seed, and says the same; other questions are refused."""
    first = account.delta(*SMALL, samples=3000, results=tmp_path / "run")
    from privacy.bandmf import tilt

    monkeypatch.setattr(tilt, "evaluate", None)
    again = account.delta(*SMALL, samples=3000, results=tmp_path / "run")
    assert values(first) == values(again)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="other work"):
        account.delta(*SMALL[:2], 0.8, 3.0, samples=3000, results=tmp_path / "run")


def test_progress_reaches_the_end():
    seen = []
    account.delta(*SMALL, samples=3000, seed=1, progress=lambda done, total, note: seen.append((done, total, note)))
    assert {note for _, _, note in seen} == {"pilot, remove", "pilot, add", "samples, remove", "samples, add"}
    assert (3000, 3000, "samples, remove") in seen


def test_the_accountant_imports_without_torch():
    names = "privacy.bandmf.account, privacy.bandmf.tilt, privacy.bandmf.monte_carlo"
    code = f"import {names}, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    code = "import privacy.bandmf, sys; print(sorted({'numba', 'scipy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


T4 = Strategy.toeplitz([1.0, 0.5], 4)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: account.delta(Poisson(4, 10, 1.0), T4, 1.0, 1.0), "overlap"),
        (lambda: account.delta(CyclicPoisson(4, 10, 1.0, 1), T4, 1.0, 1.0), "overlap"),
        (lambda: account.delta(BMinSep(4, 10, 1.0, 1), T4, 1.0, 1.0), "overlap"),
        (lambda: account.delta(BMinSep(5, 10, 1.0, 2), T4, 1.0, 1.0), "steps"),
        (lambda: account.delta(BMinSep(4, 10, 1.0, 2), T4, 0.0, 1.0), "noise_multiplier"),
        (lambda: account.delta(BMinSep(4, 10, 1.0, 2), T4, 1.0, -1.0), "epsilon"),
        (lambda: account.delta(BMinSep(4, 10, 1.0, 2), T4, 1.0, 1.0, direction="up"), "direction"),
        (lambda: account.delta(BMinSep(4, 10, 1.0, 2), T4, 1.0, 1.0, failure_probability=1.0), "failure_probability"),
        (lambda: account.delta(BMinSep(4, 10, 1.0, 2), T4, 1.0, 1.0, precision=0.0), "precision"),
        (lambda: account.epsilon(BMinSep(4, 10, 1.0, 2), T4, 1.0, 1.0), "delta"),
        (lambda: account.calibrate(BMinSep(4, 10, 1.0, 2), T4, 0.0, 1e-3), "epsilon"),
        (lambda: account.calibrate(BMinSep(4, 10, 1.0, 2, truncate=1), T4, 1.0, 1e-3), "truncate"),
        (lambda: BMinSep(4, 10, 6.0, 2), "separation"),
    ],
)
def test_refusals(call, match):
    with pytest.raises(PrivacyError, match=match):
        call()


# --- the command ---

TRAINING = ["--steps", "24", "--examples", "600", "--batch", "40"]


def certdp(*arguments: str):
    root = typer.Typer()
    root.add_typer(app, name="account")
    return CliRunner().invoke(root, ["account", "bandmf", *TRAINING, *arguments])


def test_command_finds_the_third_of_three():
    found = {}
    for pair in (("noise-multiplier", "epsilon"), ("noise-multiplier", "delta"), ("epsilon", "delta")):
        given = {"noise-multiplier": "0.7", "epsilon": "3", "delta": "0.01"}
        done = certdp("--bands", "4", "--json", *(x for name in pair for x in (f"--{name}", given[name])))
        assert done.exit_code == 0, done.output
        found[pair] = json.loads(done.stdout)
    assert found["noise-multiplier", "epsilon"]["upper"] > 0.0
    assert found["noise-multiplier", "delta"]["delta"] == 0.01
    assert found["epsilon", "delta"]["noise_multiplier"] > 0.3
    assert found["epsilon", "delta"]["scheme"]["warm"] is True


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--sampler", "poisson"], "exact"),
        (["--sampler", "cyclic", "--bands", "4"], "exact"),
        (["--sampler", "balls-in-bins", "--bands", "15"], "monte carlo"),
        (["--bands", "4", "--cold", "--truncate", "80", "--workers", "2"], "monte carlo"),
        (["--bands", "4", "--failure-probability", "0"], "renyi"),
        (["--sampler", "multi-attribution", "--bands", "4", "--probability", "0.05", "--per-user", "2"], "one user"),
    ],
)
def test_command_accounts_every_sampler(arguments, words):
    done = certdp("--noise-multiplier", "0.9", "--epsilon", "3", *arguments)
    assert done.exit_code == 0, done.output
    assert words in done.output and "delta" in done.output and "zero-out" in done.output


def test_command_compares_samplers(tmp_path):
    picture = tmp_path / "compare.png"
    done = certdp("--bands", "4", "--epsilon", "3", "--delta", "0.01", "--compare", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in ("poisson", "cyclic", "b-min-sep", "balls-in-bins"))
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "arguments, match",
    [
        (["--noise-multiplier", "1", "--epsilon", "1"], "bands"),
        (["--bands", "4", "--noise-multiplier", "1"], "exactly two"),
        (["--bands", "4", "--epsilon", "1", "--delta", "0.1", "--noise-multiplier", "1"], "exactly two"),
        (["--bands", "4", "--sampler", "poisson", "--epsilon", "1", "--delta", "0.1"], "overlap"),
        (["--bands", "16", "--separation", "16", "--epsilon", "1", "--delta", "0.1"], "separation"),
        (["--bands", "4", "--per-user", "2", "--epsilon", "1", "--delta", "0.1"], "multi-attribution"),
        (["--bands", "4", "--sampler", "balls-in-bins", "--epsilon", "1", "--delta", "0.1"], "bins"),
        (["--bands", "4", "--epsilon", "1", "--delta", "0.1", "--scheduler", "tcp://x"], "Dask"),
        (["--bands", "4", "--epsilon", "1", "--delta", "0.1", "--plot", "x.png"], "compare"),
        (["--bands", "4", "--compare", "--noise-multiplier", "1"], "compare"),
        (["--bands", "4", "--epsilon", "1", "--delta", "0.1", "--workers", "0"], "workers"),
    ],
)
def test_command_refuses_with_a_sentence(arguments, match):
    done = certdp(*arguments)
    assert isinstance(done.exception, CertdpError)
    assert match in str(done.exception)
