"""Sampled privacy losses: their law, and that workers, losses of workers and interruptions change nothing."""

import math
import os
import signal
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from bandmf_patterns import GOLDEN, MANY, b_min_sep, golden_case, patterns
from scipy import stats

from certify.errors import CheckpointError, PrivacyError
from privacy.bandmf import monte_carlo
from privacy.bandmf.execute import KeptPool, UnitStore, run_units
from privacy.bandmf.likelihood import SECRET, log_likelihood_ratio
from privacy.bandmf.monte_carlo import sample_counts, sample_losses, sample_spikes
from privacy.bandmf.schemes import BallsInBins, CyclicPoisson, MultiAttribution, Poisson
from privacy.bandmf.strategy import Strategy

# ----- the law of participations --------------------------------------------------------------------------------------

PARTICIPATIONS = {
    "poisson": (Poisson(5, MANY, 0.3 * MANY), 0),
    "cold": (b_min_sep(7, 0.35, 3, False), 0),
    "warm": (b_min_sep(7, 0.35, 3, True), 0),
    "warm, longer wait than steps": (b_min_sep(3, 0.5, 6, True), 0),
    "certain": (b_min_sep(7, 1.0, 3, True), 0),
    "cyclic, known group": (CyclicPoisson(8, MANY, 0.4 * MANY / 3, 3), 1),
    "cyclic, secret group": (CyclicPoisson(8, MANY, 0.4 * MANY / 3, 3), SECRET),
    "bins": (BallsInBins(7, MANY, 3), 0),
    "more bins than steps": (BallsInBins(3, MANY, 5), 0),
    "multi-attribution": (MultiAttribution(6, 0.2, 3, 3), 0),
}


def as_vectors(spikes, steps):
    x = np.zeros((spikes.samples, steps))
    np.add.at(x, (np.repeat(np.arange(spikes.samples), np.diff(spikes.starts)), spikes.positions), spikes.sizes)
    return x


def goodness_of_fit(x, law):
    """p-value of the patterns seen against ``law``; rare ones together; 0 when an impossible one occurs."""
    seen = {tuple(row): count for row, count in zip(*np.unique(x, axis=0, return_counts=True), strict=True)}
    if any(row not in law for row in seen):
        return 0.0
    expected = np.array([chance * len(x) for chance in law.values()])
    counts = np.array([seen.get(row, 0) for row in law])
    common = expected >= 10
    expected = np.append(expected[common], expected[~common].sum())
    counts = np.append(counts[common], counts[~common].sum())
    some = expected > 0
    if some.sum() == 1:
        return 1.0
    return stats.chisquare(counts[some], expected[some] * counts[some].sum() / expected[some].sum()).pvalue


@pytest.mark.parametrize("name", PARTICIPATIONS)
def test_participations_follow_the_law_of_the_scheme(name):
    """Wrong by chance with probability 1e-7."""
    scheme, group = PARTICIPATIONS[name]
    x = as_vectors(sample_spikes(scheme, "remove", 100_000, np.random.default_rng(1), group=group), scheme.steps)
    assert goodness_of_fit(x, patterns(scheme, group)) > 1e-7
    assert sample_spikes(scheme, "add", 3, np.random.default_rng(1), group=group).positions.size == 0


@pytest.mark.parametrize("name, other", [("cold", "warm"), ("warm", "cold"), ("cyclic, known group", "bins")])
def test_goodness_of_fit_sees_another_law(name, other):
    scheme, group = PARTICIPATIONS[name]
    x = as_vectors(sample_spikes(scheme, "remove", 100_000, np.random.default_rng(1), group=group), scheme.steps)
    wrong, group = PARTICIPATIONS[other]
    law = {row[: x.shape[1]] + (0,) * (x.shape[1] - len(row)): chance for row, chance in patterns(wrong, group).items()}
    assert goodness_of_fit(x, law) < 1e-9


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_participations_in_truncated_batches_follow_the_law(direction):
    scheme = b_min_sep(5, 0.4, 2, True, truncate=3, examples=30)
    counts = np.array([2, 3, 5, 1, 9])
    kept = np.where(counts >= 3, 3 / (counts + 1.0), 0.0)
    spikes = sample_spikes(scheme, direction, 100_000, np.random.default_rng(2), np.tile(counts, (100_000, 1)))
    assert goodness_of_fit(as_vectors(spikes, 5), patterns(scheme, 0, kept, direction)) > 1e-7


def test_counts_of_others_follow_the_law():
    scheme, _, _ = golden_case(next(case for case in GOLDEN["exact"] if case["name"] == "trunc_cold_n2"))
    counts = sample_counts(scheme, 200_000, np.random.default_rng(3))
    law = {tuple(map(float, row)): chance for row, chance in GOLDEN["counts"]}
    assert goodness_of_fit(counts.astype(float), law) > 1e-7


def test_counts_are_stationary_from_a_warm_start_and_respect_the_separation():
    """Means within 5.5 standard errors of the rate (4e-8 each); never more than all examples within a window."""
    scheme = b_min_sep(9, 0.3, 4, True, truncate=5, examples=21)
    counts = sample_counts(scheme, 100_000, np.random.default_rng(4))
    mean = 20 * scheme.rate
    assert (np.abs(counts.mean(axis=0) - mean) < 5.5 * counts.std(axis=0) / math.sqrt(100_000)).all()
    windows = np.lib.stride_tricks.sliding_window_view(counts, 4, axis=1).sum(axis=2)
    assert windows.max() <= 20
    cold = sample_counts(b_min_sep(9, 0.3, 4, False, 5, 21), 100_000, np.random.default_rng(4))
    assert abs(cold[:, 0].mean() - 6.0) < 0.05 and abs(mean - 6.0) > 1.0


def test_counts_of_cyclic_schemes():
    scheme = CyclicPoisson(7, 31, 31 * 0.5 / 3, 3, truncate=4)
    known = sample_counts(scheme, 50_000, np.random.default_rng(5), group=1)
    secret = sample_counts(scheme, 50_000, np.random.default_rng(5), group=SECRET)
    for counts, others, p in ((known, 10, 0.5), (secret, 30, 1 / 6)):
        law = {(float(k),): stats.binom.pmf(k, others, p) for k in range(others + 1)}
        assert goodness_of_fit(counts[:, :1].astype(float), law) > 1e-7


# ----- the law of losses ----------------------------------------------------------------------------------------------


def hockey_stick(losses, epsilon):
    terms = np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0)))
    return terms.mean(), terms.std() / math.sqrt(len(losses))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("case", GOLDEN["exact"], ids=lambda case: case["name"])
def test_exact_deltas(case, direction):
    """Within 5 standard errors plus 5 / samples (rare hits) of quadrature, fixed seed."""
    scheme, strategy, group = golden_case(case)
    losses = sample_losses(scheme, strategy, case["sigma"], direction, 60_000, seed=11, group=group)
    for epsilon, exact in zip(case["eps"], case[f"delta_{direction}"], strict=True):
        found, error = hockey_stick(losses, epsilon)
        assert abs(found - exact) <= 5.0 * error + 5.0 / len(losses), (epsilon, found, exact)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("case", GOLDEN["mc"], ids=lambda case: case["name"])
def test_reference_monte_carlo(case, direction):
    """Within 4 joint standard errors, fixed seed."""
    scheme, strategy, group = golden_case(case)
    samples = 6000 if getattr(scheme, "truncate", None) else 24_000
    losses = sample_losses(scheme, strategy, case["sigma"], direction, samples, seed=12, group=group)
    reference = case[direction]
    for epsilon, delta, se in zip(reference["eps"], reference["delta"], reference["se"], strict=True):
        found, error = hockey_stick(losses, epsilon)
        assert abs(found - delta) <= 4.0 * math.hypot(error, se) + 1.0 / samples


def test_both_directions_are_not_the_same():
    scheme, strategy = b_min_sep(50, 0.1, 4, True), Strategy.toeplitz([0.8, 0.5, 0.3], 50)
    remove = sample_losses(scheme, strategy, 0.8, "remove", 20_000, seed=1)
    add = sample_losses(scheme, strategy, 0.8, "add", 20_000, seed=1)
    assert hockey_stick(remove, 2.0)[0] > 2 * hockey_stick(add, 2.0)[0]
    # The loss of "add" cannot exceed -ln P[nobody takes part].
    assert add.max() <= -math.log(patterns_without(scheme)) + 1e-12


def patterns_without(scheme):
    """Probability that the example never takes part, from a warm start."""
    p, b, n = scheme.probability, scheme.separation, scheme.steps
    return ((1 - p) ** n + p * sum((1 - p) ** (n - s) for s in range(1, b))) / (1 + (b - 1) * p)


# ----- workers --------------------------------------------------------------------------------------------------------

SCHEME, STRATEGY = b_min_sep(40, 0.1, 4, True), Strategy.toeplitz([0.8, 0.5, 0.3], 40)


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(monte_carlo, "_LONGEST_UNIT", 256)


def losses(**options):
    return sample_losses(SCHEME, STRATEGY, 0.8, "remove", 2000, seed=3, **options)


def test_results_do_not_depend_on_the_number_of_workers(small_units):
    reference = losses()
    for workers in (1, 2, 3):
        with ThreadPoolExecutor(workers) as pool:
            np.testing.assert_array_equal(losses(executor=pool), reference)
    np.testing.assert_array_equal(losses(executor=partial(ProcessPoolExecutor, 2)), reference)
    assert len(np.unique(reference)) == 2000
    assert not np.array_equal(sample_losses(SCHEME, STRATEGY, 0.8, "remove", 2000, seed=4), reference)


def test_general_strategies_travel_to_processes(small_units):
    columns = STRATEGY.columns * np.random.default_rng(0).uniform(0.5, 1.0, STRATEGY.columns.shape)
    general = Strategy(columns)
    here = sample_losses(SCHEME, general, 0.8, "add", 600, seed=3)
    there = sample_losses(SCHEME, general, 0.8, "add", 600, seed=3, executor=partial(ProcessPoolExecutor, 2))
    np.testing.assert_array_equal(here, there)


def square(unit):
    return np.array([unit, unit**2], float)


def dies_once(folder, unit):
    """The first worker that gets unit 5 is killed."""
    mark = folder / "died"
    if unit == 5 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return square(unit)


def dies(unit):
    if unit == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(unit)


def test_lost_workers_are_replaced(tmp_path):
    found = run_units(partial(dies_once, tmp_path), range(12), executor=partial(ProcessPoolExecutor, 2))
    assert (tmp_path / "died").exists()
    np.testing.assert_array_equal(found, [square(u) for u in range(12)])


def test_a_unit_that_always_kills_its_worker_ends_the_run():
    with pytest.raises(PrivacyError, match="3 times in a row"):
        run_units(dies, range(4), executor=partial(ProcessPoolExecutor, 1))


def test_a_broken_executor_of_the_caller_is_named(tmp_path):
    with ProcessPoolExecutor(1) as pool, pytest.raises(PrivacyError, match="function that makes one"):
        run_units(partial(dies_once, tmp_path), range(6, -1, -1), executor=pool)


class Flaky(Executor):
    """Like a cluster: runs at once, but every third submission is lost with an error of its own kind."""

    def __init__(self):
        self.submitted = 0

    def submit(self, function, /, *arguments):
        self.submitted += 1
        future = Future()
        if self.submitted % 3 == 0:
            future.set_exception(ConnectionError("worker left"))
        else:
            future.set_result(function(*arguments))
        return future


def test_units_lost_by_any_executor_are_retried():
    pool, calls = Flaky(), []
    found = run_units(square, range(20), executor=pool, attempts=9, progress=lambda *counts: calls.append(counts))
    np.testing.assert_array_equal(found, [square(u) for u in range(20)])
    assert pool.submitted > 20 and calls == [(k, 20) for k in range(1, 21)]
    with pytest.raises(PrivacyError, match="worker left"):
        run_units(square, range(20), executor=Flaky(), attempts=1)


# ----- interruption ---------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def interrupt_after(count):
    def progress(done, total):
        if done == count:
            raise Stop

    return progress


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, small_units):
    file, computed = tmp_path / "losses", []
    with pytest.raises(Stop), ThreadPoolExecutor(1) as pool:
        losses(results=file, executor=pool, progress=interrupt_after(3))
    kept = UnitStore(file, description_of(file)).finished
    assert 3 <= len(kept) < 8
    found = losses(results=file, progress=lambda done, total: computed.append(done))
    np.testing.assert_array_equal(found, losses())
    assert len(computed) == 8 - len(kept)
    np.testing.assert_array_equal(losses(results=file, progress=interrupt_after(1)), found)  # nothing left to do


def description_of(file):
    work = monte_carlo._Work(SCHEME, monte_carlo._Packed.of(STRATEGY), 0.8, "remove", None, 3, 2000, 256)
    return work.description


def test_a_record_cut_off_by_an_interruption_is_computed_again(tmp_path, small_units):
    file = tmp_path / "losses"
    reference = losses(results=file)
    content = file.read_bytes()
    for length in (5, 47, 60, 2000, len(content) - 1):
        file.write_bytes(content[:length])
        np.testing.assert_array_equal(losses(results=file), reference)
        assert len(file.read_bytes()) == len(content)


def test_results_of_other_work_and_damaged_results_are_refused(tmp_path, small_units):
    file = tmp_path / "losses"
    losses(results=file)
    for change in ({"seed": 4}, {"noise_multiplier": 0.9}, {"direction": "add"}, {"samples": 1999}):
        arguments = {"noise_multiplier": 0.8, "direction": "remove", "samples": 2000, "seed": 3} | change
        with pytest.raises(CheckpointError, match="other work"):
            sample_losses(SCHEME, STRATEGY, **arguments, results=file)
    with pytest.raises(CheckpointError, match="other work"):
        sample_losses(b_min_sep(40, 0.1, 4, False), STRATEGY, 0.8, "remove", 2000, seed=3, results=file)
    content = bytearray(file.read_bytes())
    content[400] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        losses(results=file)


def test_what_cannot_be_sampled_is_refused():
    with pytest.raises(PrivacyError, match="direction"):
        sample_losses(SCHEME, STRATEGY, 0.8, "both", 10, seed=1)
    with pytest.raises(PrivacyError, match="samples"):
        sample_losses(SCHEME, STRATEGY, 0.8, "add", 0, seed=1)


def test_losses_are_ratios_of_outputs(small_units):
    """The sign of each direction, on outputs of one's own."""
    outputs = np.random.default_rng(0).normal(size=(4000, 40)) * 0.8
    ours = -log_likelihood_ratio(SCHEME, STRATEGY, 0.8, outputs)
    theirs = sample_losses(SCHEME, STRATEGY, 0.8, "add", 4000, seed=9)
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-7
    assert stats.ks_2samp(-ours, theirs).pvalue < 1e-12


def test_a_kept_pool_is_handed_out_again_until_it_breaks():
    made = []

    class Breaks(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            if len(made) == 1 and len(done) > 1:
                raise BrokenExecutor("planted")
            return super().submit(*args, **kwargs)

    def make():
        made.append(Breaks(1))
        return made[-1]

    done = []
    kept = KeptPool(make)
    for _ in range(3):
        done.append(run_units(lambda unit: np.full(1, float(unit)), range(3), executor=kept))
    assert [float(x[0]) for x in done[-1]] == [0.0, 1.0, 2.0]
    assert len(made) == 2  # the first served twice, then broke
    kept.close()
    with pytest.raises(RuntimeError):
        made[1].submit(int)
