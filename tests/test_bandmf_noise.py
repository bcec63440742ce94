"""The noise stream: C^-1 Z to rounding, the law of its source, no row for two sums whatever is killed or restored."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from certify.errors import CheckpointError, PrivacyError
from privacy.bandmf.noise import Journal, NoiseStream, SecureNormals, SeededNormals, box_muller
from privacy.bandmf.optimize import optimal_toeplitz
from privacy.bandmf.strategy import Strategy
from tests.bandmf_run import POINTS, data, flat, new_stream
from tests.test_bandmf_strategy import banded, dense

REFERENCE = json.loads((Path(__file__).parent / "data" / "bandmf_strategy.json").read_text())
SHAPES = [(2, 3), (), (0,), (4,)]


class Given:
    """A source whose rows are given: ``rows[i]`` belongs to the only shard."""

    def __init__(self, rows):
        self._rows = rows

    def row(self, row, shard, count):
        return np.array(self._rows[row])


def zeros(stream):
    return [np.zeros(shape) for shape in stream.shapes]


def everything(stream, steps=None):
    return np.stack([flat(stream.release(zeros(stream))) for _ in range(steps or stream.strategy.steps)])


# --- the noise is C^-1 Z ---


@pytest.mark.parametrize("known", REFERENCE["noise"], ids=lambda k: f"n{k['n']}")
@pytest.mark.parametrize("normalised", [False, True])
def test_noise_of_the_reference(known, normalised):
    strategy = Strategy.toeplitz(known["coef"], known["n"])
    expected = known["Cinv_Z_column_normalised" if normalised else "Cinv_Z"]
    strategy = strategy.column_normalised() if normalised else strategy
    stream = NoiseStream(strategy, [(2,)], 1.0, source=Given(known["Z"]))
    np.testing.assert_allclose(everything(stream), expected, rtol=0, atol=1e-13)


@settings(deadline=None)
@given(banded(), st.floats(0.1, 10.0), st.integers(0, 2**32))
def test_the_noise_is_c_inverse_z(c, scale, seed):
    strategy = Strategy.from_matrix(c)
    stream = NoiseStream(strategy, SHAPES, scale, source=SeededNormals(seed))
    z = np.stack([flat([stream._source.row(i, k, np.prod(s, dtype=int)) for k, s in enumerate(SHAPES)])
                  for i in range(len(c))])  # fmt: skip
    w = everything(stream)
    size = np.abs(c) @ np.abs(w)
    np.testing.assert_array_less(np.abs(c @ w - scale * z), 1e-13 * size + 1e-300)


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.floats(0.0, 0.4), max_size=3))
def test_the_noise_of_a_banded_inverse_is_c_inverse_z(steps, tail):
    strategy = Strategy.banded_inverse([1.0, *(-x for x in tail)], steps)
    stream = NoiseStream(strategy, [(3,)], 2.0, source=SeededNormals(1))
    assert stream._rings[0].shape[0] == min(steps, 1 + len(tail))
    z = np.stack([SeededNormals(1).row(i, 0, 3) for i in range(steps)])
    np.testing.assert_allclose(dense(strategy) @ everything(stream), 2.0 * z, atol=1e-9)


def test_memory_is_one_row_for_every_band():
    stream = NoiseStream(optimal_toeplitz(500, 7), [(10,), (2, 3)], 1.0)
    everything(stream, 20)
    assert [ring.size for ring in stream._rings] == [70, 42]


def test_the_release_is_the_sum_plus_the_noise():
    sums = [np.full(shape, 3.5) for shape in SHAPES]
    streams = [NoiseStream(optimal_toeplitz(5, 3), SHAPES, 0.7, source=SeededNormals(4)) for _ in range(2)]
    for _ in range(5):
        noisy, noise = streams[0].release(sums), streams[1].release(zeros(streams[1]))
        assert [a.shape for a in noisy] == SHAPES
        np.testing.assert_array_equal(flat(noisy), flat(noise) + 3.5)


def test_cpu_tensors_are_taken_too():
    torch = pytest.importorskip("torch")
    stream = NoiseStream(Strategy.identity(2), [(2,)], 1e-9)
    np.testing.assert_allclose(stream.release([torch.tensor([1.0, 2.0])])[0], [1.0, 2.0], atol=1e-7)


# --- the law of the secure source; every test errs with probability below 1e-6 ---

SAMPLE = 400_000


@pytest.fixture(scope="module")
def normals():
    return SecureNormals(os.urandom(32)).row(0, 0, SAMPLE)


def test_secure_rows_are_standard_normal(normals):
    assert stats.kstest(normals, "norm").pvalue > 1e-7
    for power in (1, 2, 3, 4):
        moments = normals**power
        exact, variance = stats.norm.moment(power), stats.norm.moment(2 * power) - stats.norm.moment(power) ** 2
        assert abs(moments.mean() - exact) < 5.5 * np.sqrt(variance / SAMPLE)


def test_the_test_of_the_law_sees_two_per_cent_of_scale(normals):
    assert abs(((1.02 * normals) ** 2).mean() - 1.0) > 5.5 * np.sqrt(2.0 / SAMPLE)


def test_pairs_of_the_transform_are_independent(normals):
    half = SAMPLE // 2
    a, b = normals[:half], normals[half:]
    for f, g in itertools.product((np.tanh, np.square), repeat=2):
        assert abs(np.corrcoef(f(a), f(b) if f is g else g(b))[0, 1]) < 5.5 / np.sqrt(half)
    quadrants = np.histogram2d(a > 0, b > 0, bins=2)[0].ravel()
    assert stats.chisquare(quadrants).pvalue > 1e-7


def test_extreme_words_give_finite_normals():
    bits = np.array(list(itertools.product([0, 1, 2**63, 2**64 - 1], repeat=2)), dtype=np.uint64).T
    found = box_muller(bits)
    assert np.isfinite(found).all() and 9.4 < np.abs(found).max() < 9.5


def test_rows_shards_and_chunks_are_different_streams(monkeypatch):
    monkeypatch.setattr("privacy.bandmf.noise._CHUNK", 64)
    source = SecureNormals(b"k" * 32)
    rows = np.stack([source.row(i, k, 512).reshape(8, 64)[j] for i in range(4) for k in range(4) for j in range(8)])
    assert len(np.unique(rows)) == rows.size
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 6.5 / np.sqrt(64)
    np.testing.assert_array_equal(source.row(3, 2, 512), SecureNormals(b"k" * 32).row(3, 2, 512))
    assert not np.intersect1d(source.row(3, 2, 512), SecureNormals(b"l" * 32).row(3, 2, 512)).size


def test_the_covariance_of_the_stream_is_that_of_c_inverse():
    strategy, samples = optimal_toeplitz(6, 3), 100_000
    w = everything(NoiseStream(strategy, [(samples,)], 1.5))
    found = w @ w.T / samples
    inverse = np.linalg.inv(dense(strategy))
    exact = 2.25 * inverse @ inverse.T
    spread = np.sqrt((exact**2 + np.outer(exact.diagonal(), exact.diagonal())) / samples)
    assert (np.abs(found - exact) < 5.5 * spread).all()
    transposed = 2.25 * inverse.T @ inverse
    assert (np.abs(found - transposed) > 11.5 * spread).any()


def test_every_journal_has_a_key_of_its_own():
    assert len({Journal().key for _ in range(20)}) == 20 and len(Journal().key) == 32


# --- no row twice, no row lost ---


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=8))
def test_a_repeated_step_repeats_its_release(moves):
    """Any order of steps, saves and restores (into the same or a new stream) releases one value for every step."""
    journal, strategy = Journal(), optimal_toeplitz(12, 4)

    def fresh():
        return NoiseStream(strategy, [(3,), (2, 2)], 1.0, journal)

    straight = fresh()
    truth = [flat(straight.release(data(i))) for i in range(12)]
    stream, saved = fresh(), [fresh().state_dict()]
    for steps, back in moves:
        for _ in range(min(steps, 12 - stream.step)):
            step = stream.step
            np.testing.assert_array_equal(flat(stream.release(data(step))), truth[step])
        saved.append(stream.state_dict())
        if back:
            stream = fresh() if back % 2 else stream
            stream.load_state_dict(saved[max(0, len(saved) - 1 - back)])


def test_a_released_row_is_never_used_for_other_data(tmp_path):
    stream = new_stream(tmp_path)
    saved = stream.state_dict()
    for i in range(3):
        stream.release(data(i))
    later = stream.state_dict()
    for restored in (stream, new_stream(tmp_path)):
        restored.load_state_dict(saved)
        with pytest.raises(PrivacyError, match="step 0: its noise was already released with other gradients"):
            restored.release(data(0, version=1))
        restored.release(data(0))
        changed = data(1)
        changed[1][1, 1] = np.nextafter(changed[1][1, 1], 9.0)
        with pytest.raises(PrivacyError, match="step 1"):
            restored.release(changed)
    fresh = new_stream(tmp_path)  # the journal is known even to a run that starts anew
    with pytest.raises(PrivacyError, match="step 0"):
        fresh.release(data(0, version=1))
    stream.load_state_dict(later)
    stream.release(data(3, version=1))


def test_two_processes_with_one_journal_share_its_rows(tmp_path):
    first, second = new_stream(tmp_path), new_stream(tmp_path)
    np.testing.assert_array_equal(flat(first.release(data(0))), flat(second.release(data(0))))
    second.release(data(1))
    with pytest.raises(PrivacyError, match="step 1"):
        first.release(data(1, version=1))


def test_the_journal_is_written_before_the_noise_is_drawn(tmp_path):
    stream = new_stream(tmp_path)

    class Broken:
        def row(self, *_):
            raise KeyboardInterrupt

    source, stream._source = stream._source, Broken()
    with pytest.raises(KeyboardInterrupt):
        stream.release(data(0))
    assert Journal(tmp_path / "rows.journal").rows == 1
    stream._source = source
    with pytest.raises(PrivacyError, match="step 0"):
        stream.release(data(0, version=1))
    stream.release(data(0))


@pytest.mark.parametrize("shard", [0, 1])
def test_an_interrupt_between_shards_leaves_the_step_repeatable(shard):
    strategy, source = optimal_toeplitz(12, 4), SeededNormals(2)
    calm, struck = (NoiseStream(strategy, [(3,), (2, 2)], 1.0, source=source) for _ in range(2))
    truth = [flat(calm.release(data(i))) for i in range(12)]
    row = struck._row

    def interrupted(k):
        found = row(k)
        if k == shard:
            raise KeyboardInterrupt
        return found

    for i in range(12):
        struck._row = interrupted
        with pytest.raises(KeyboardInterrupt):
            struck.release(data(i))
        struck._row = row
        np.testing.assert_array_equal(flat(struck.release(data(i))), truth[i])


def run_child(folder, point, at):
    root = Path(__file__).parent.parent
    command = [sys.executable, root / "tests" / "bandmf_run.py", folder, point, str(at)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_killed_anywhere_a_run_releases_every_row_once(tmp_path):
    for at, point in zip((1, 4, 5, 7, 8), POINTS, strict=True):
        assert run_child(tmp_path, point, at).returncode == -signal.SIGKILL
    done = run_child(tmp_path, "nowhere", -1)
    assert done.returncode == 0, done.stderr
    seen = {}
    for line in (tmp_path / "seen.txt").read_text().splitlines():
        step, value = line.split()
        seen.setdefault(int(step), set()).add(value)
    repeated = sum(1 for _ in (tmp_path / "seen.txt").open()) - 12
    assert repeated >= 2 and sorted(seen) == list(range(12))
    straight = new_stream(tmp_path)
    for step in range(12):
        assert seen[step] == {flat(straight.release(data(step))).tobytes().hex()}


# --- what a journal and a state refuse ---


def test_one_key_serves_one_run_only(tmp_path):
    new_stream(tmp_path)
    for other in ({"scale": 2.0}, {"last": 0.2}, {"steps": 13}):
        with pytest.raises(PrivacyError, match="the same noise at two scales would cancel"):
            new_stream(tmp_path, **other)
    new_stream(tmp_path)


def test_a_state_of_another_journal_is_refused():
    one, other = (NoiseStream(Strategy.identity(3), [(1,)], 1.0) for _ in range(2))
    with pytest.raises(CheckpointError, match="belongs to another journal"):
        one.load_state_dict(other.state_dict())


def test_a_journal_that_is_older_than_the_state_is_refused(tmp_path):
    stream = new_stream(tmp_path)
    stream.release(data(0))
    (tmp_path / "old").write_bytes((tmp_path / "rows.journal").read_bytes())
    stream.release(data(1))
    state = stream.state_dict()
    os.replace(tmp_path / "old", tmp_path / "rows.journal")
    with pytest.raises(CheckpointError, match="knows 2 steps, the journal only 1"):
        new_stream(tmp_path).load_state_dict(state)


def test_the_journal_is_readable_by_its_owner_only(tmp_path):
    new_stream(tmp_path)
    assert stat.S_IMODE((tmp_path / "rows.journal").stat().st_mode) == 0o600


def test_the_journal_does_not_show_the_data(tmp_path):
    new_stream(tmp_path).release(data(0))
    with sqlite3.connect(tmp_path / "rows.journal") as db:
        (digest,) = db.execute("SELECT digest FROM releases").fetchone()
    plain = b"".join(array.tobytes() for array in data(0))
    assert digest != hashlib.blake2b(np.array([0], dtype="<u8").tobytes() + plain).digest() and len(digest) == 64


@pytest.mark.parametrize("content", [b"not a journal of noise rows" * 100, None])
def test_what_is_no_journal_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read or written as a journal"):
        Journal(path)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(PrivacyError, match="scale: found"):
        NoiseStream(Strategy.identity(3), [(1,)], scale)


def test_sums_that_do_not_fit_are_refused_before_the_journal_is_touched():
    journal = Journal()
    stream = NoiseStream(Strategy.identity(2), [(2,)], 1.0, journal)
    for sums, words in (([np.zeros(3)], "shapes"), ([], "shapes"), ([np.array([1.0, np.nan])], "not finite")):
        with pytest.raises(PrivacyError, match=words):
            stream.release(sums)
    assert journal.rows == 0
    everything(stream)
    with pytest.raises(PrivacyError, match="the strategy has 2 steps"):
        stream.release([np.zeros(2)])
    assert journal.rows == 2
