"""The driver: nominal run, checkpoints, interruption and resumption, windows, radii, bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from builders import mlp

import certify
from certify.driver import check_radii, parse_radii, prepare, reach, run, train
from certify.errors import CertdpError, CheckpointError, DataError, RadiusError, RecipeError
from certify.recipe import loads
from certify.windows import Method, spans
from models.errors import ModelError
from models.ir import Graph, Node, ParameterInfo
from models.ops import Constant, Gather, Input, Mul, Parameter, SegmentSum

RECIPE = """
[training]
loss = "squared"
steps = 9
clip = 0.2
contraction = 0.99
learning_rate = { schedule = "inverse", value = 0.2, decay = 0.1 }
[batches]
kind = "shuffled"
size = 11
seed = 3
slots = 40
[features]
lower = -2
upper = 2
[target]
scale = 2
[output]
lower = -1
upper = 1
"""


def problem_data(rows=37):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 3)), rng.normal(size=(rows, 1))


def same(a, b):
    """Two envelopes are equal bit for bit."""
    assert a.radii == b.radii
    for k in a.radii:
        for name in a.nominal:
            np.testing.assert_array_equal(a.lower[k][name], b.lower[k][name])
            np.testing.assert_array_equal(a.upper[k][name], b.upper[k][name])
    np.testing.assert_array_equal(a.history, b.history)


def test_the_radius_0_envelope_is_the_nominal_run_bit_for_bit():
    graph, recipe = mlp((3, 4, 1)), loads(RECIPE)
    envelope = run(graph, recipe, *problem_data(), radii=[0, 1, 5])
    theta = train(graph, recipe, *problem_data())
    lower, upper = envelope.stacked()
    np.testing.assert_array_equal(lower[0], theta)
    np.testing.assert_array_equal(upper[0], theta)
    np.testing.assert_array_equal(graph.join(envelope.nominal), theta)


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", [{"F": 1}, {"F": 4, "stride": 1}], ids=["F = 1", "overlapping"])
@pytest.mark.parametrize("stop_after", [1, 4, 8])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(stop_after, method, tmp_path):
    graph, recipe, file = mlp((3, 4, 1)), loads(RECIPE), tmp_path / "state.safetensors"
    whole = run(graph, recipe, *problem_data(), radii=range(4), **method)

    stopped = []

    def interrupt(done, total, boxes):
        if done >= stop_after:  # after the first window that reaches it
            stopped.append(done)
            raise Stop

    with pytest.raises(Stop):
        run(graph, recipe, *problem_data(), radii=range(4), checkpoint=file, progress=interrupt, **method)
    assert file.stat().st_mode & 0o077 == 0
    steps = []
    again = run(
        graph, recipe, *problem_data(), radii=range(4), checkpoint=file, resume=True,
        progress=lambda done, total, boxes: steps.append(done), **method,
    )  # fmt: skip
    assert steps[0] == stopped[0] + 1
    same(whole, again)


def test_a_killed_process_resumes_bit_for_bit(tmp_path):
    """SIGKILL in the middle of a run that saves after every window."""
    code = f"""
        import sys, time
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_driver import RECIPE, mlp, loads, problem_data, run
        run(mlp((3, 4, 1)), loads(RECIPE), *problem_data(), radii=range(4), F=1,
            checkpoint="state.safetensors", checkpoint_seconds=0.0,
            progress=lambda *a: (print(a[0], flush=True), time.sleep(0.2)))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) >= 4:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert process.returncode == -signal.SIGKILL
    graph, recipe = mlp((3, 4, 1)), loads(RECIPE)
    steps = []
    again = run(
        graph, recipe, *problem_data(), radii=range(4), F=1, checkpoint=tmp_path / "state.safetensors", resume=True,
        progress=lambda done, total, boxes: steps.append(done),
    )  # fmt: skip
    assert 3 < steps[0] < 9
    same(run(graph, recipe, *problem_data(), radii=range(4), F=1), again)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    graph, recipe, file = mlp((3, 4, 1)), loads(RECIPE), tmp_path / "state.safetensors"
    run(graph, recipe, *problem_data(), radii=range(4), checkpoint=file)
    features, targets = problem_data()
    other = features.copy()
    other[5, 1] += 1e-9
    resume = {"checkpoint": file, "resume": True}
    with pytest.raises(CheckpointError, match="another run"):
        run(graph, recipe, other, targets, radii=range(4), **resume)
    with pytest.raises(CheckpointError, match="another run"):
        run(graph, recipe, features, targets, radii=range(5), **resume)
    with pytest.raises(CheckpointError, match="another run"):
        run(mlp((3, 4, 1), seed=1), recipe, features, targets, radii=range(4), **resume)
    with pytest.raises(CheckpointError, match="another run"):
        run(graph, loads(RECIPE.replace("0.99", "0.98")), features, targets, radii=range(4), **resume)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="damaged"):
        run(graph, recipe, features, targets, radii=range(4), **resume)
    file.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        run(graph, recipe, features, targets, radii=range(4), **resume)


def test_a_difference_in_the_middle_of_a_long_frozen_constant_makes_another_run(tmp_path):
    """NumPy shortens arrays of more than 1,000 entries when it prints them."""
    scale, order = np.linspace(0.5, 1.5, 1200), np.arange(1200)

    def graph(constant, index):
        nodes = (
            Node("x", Input(3)),
            Node("w", Parameter(3, "w")),
            Node("product", Mul(), (0, 1)),
            Node("wide", Gather(np.tile(np.arange(3), 400), 3), (2,)),
            Node("constant", Constant(constant)),
            Node("scaled", Mul(), (3, 4)),
            Node("picked", Gather(index, 1200), (5,)),
            Node("sum", SegmentSum(np.arange(1200)[None], 1200), (6,)),
        )
        return Graph(nodes, 7, (3,), (ParameterInfo("w", np.ones(3), True),))

    one, file = graph(scale, order), tmp_path / "state.safetensors"
    other_scale, other_order = scale.copy(), order.copy()
    other_scale[600] += 1e-9
    other_order[600] = 0
    others = graph(other_scale, order), graph(scale, other_order)
    recipe, arguments = loads(RECIPE), {"radii": range(3), "F": 1, "checkpoint": file}
    run(one, recipe, *problem_data(), **arguments)
    for other in others:
        assert [repr(n) for n in other.nodes] == [repr(n) for n in one.nodes] and other.digest != one.digest
        with pytest.raises(CheckpointError, match="another run"):
            run(other, recipe, *problem_data(), resume=True, **arguments)
    run(graph(scale.copy(), order.copy()), recipe, *problem_data(), resume=True, **arguments)


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    graph, recipe, file = mlp((3, 4, 1)), loads(RECIPE), tmp_path / "state.safetensors"
    run(graph, recipe, *problem_data(), radii=range(2), checkpoint=file)
    before = file.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises((OSError, CertdpError)):
        run(graph, recipe, *problem_data(), radii=range(2), checkpoint=file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("frequency", [2, 4, 9, 100, [2, 3]])
def test_longer_windows_are_inside_single_steps_and_share_the_nominal_run(frequency):
    graph, recipe = mlp((3, 4, 1)), loads(RECIPE)
    one = run(graph, recipe, *problem_data(), radii=range(3), F=1)
    other = run(graph, recipe, *problem_data(), radii=range(3), F=frequency)
    (lower, upper), (low, high) = one.stacked(), other.stacked()
    np.testing.assert_array_equal(lower[0], low[0])
    assert (lower <= low).all() and (high <= upper).all()
    assert (high - low)[1].mean() < 0.9 * (upper - lower)[1].mean()


def test_the_default_window_is_an_epoch_of_minibatches_or_one_full_batch_step():
    graph, recipe = mlp((3, 4, 1)), loads(RECIPE)
    assert run(graph, recipe, *problem_data(), radii=[1]).metadata.concretisation == 4
    full = loads(RECIPE.replace('kind = "shuffled"\nsize = 11\nseed = 3\n', 'kind = "full"\n'))
    assert run(graph, full, *problem_data(), radii=[1]).metadata.concretisation == 1
    zero = loads(RECIPE + '[privacy]\nadjacency = "zero-out"\n')
    assert run(graph, zero, *problem_data(), radii=[1]).metadata.concretisation == 4


def test_windows_that_need_too_much_memory_are_refused(monkeypatch):
    monkeypatch.setattr("certify.driver._MOST_BYTES", 1000)
    with pytest.raises(CertdpError, match="GiB"):
        run(mlp((3, 4, 1)), loads(RECIPE), *problem_data(), radii=[1], F=9)
    run(mlp((3, 4, 1)), loads(RECIPE), *problem_data(), radii=[1], F=1)


def test_windows_follow_the_frequency_and_the_stride():
    assert list(spans(5, 2)) == [(0, 0, 2), (2, 2, 4), (4, 4, 5)]
    assert list(spans(6, [1, 3])) == [(0, 0, 1), (1, 1, 4), (4, 4, 6)]
    assert list(spans(6, 3, 1)) == [(0, 0, 3), (1, 3, 4), (2, 4, 5), (3, 5, 6)]
    assert list(spans(7, 4, 2)) == [(0, 0, 4), (2, 4, 6), (3, 6, 7)]
    assert list(spans(9, [4, 3], 2)) == [(0, 0, 4), (3, 4, 6), (5, 6, 8), (6, 8, 9)]
    assert list(spans(6, [2, 4], 3)) == [(0, 0, 2), (1, 2, 5), (2, 5, 6)]
    for bad in (0, [], [1, 0]):
        with pytest.raises(RecipeError, match="F:"):
            Method(F=bad)
    for bad in ({"F": 4, "stride": 5}, {"stride": 1}, {"F": [9, 2], "stride": 3}, {"F": 2, "stride": 0}):
        with pytest.raises(RecipeError, match="stride:"):
            Method(**bad)


@pytest.mark.parametrize("backend", ["ibp", "meanvalue", "relational", "lp", "milp"])
def test_radius_0_alone_is_the_nominal_run(backend):
    envelope = run(mlp((3, 1)), loads(RECIPE), *problem_data(), radii=[0], backend=backend)
    lower, upper = envelope.stacked()
    np.testing.assert_array_equal(lower[0], mlp((3, 1)).join(envelope.nominal))
    np.testing.assert_array_equal(upper[0], lower[0])


def test_programs_report_every_step_of_a_window():
    calls = []
    run(
        mlp((3, 1)), loads(RECIPE), *problem_data(), radii=[0, 1], backend="lp", F=[4, 3], stride=2,
        progress=lambda done, total, boxes: calls.append((done, total, boxes.width[0])),
    )  # fmt: skip
    assert [c[0] for c in calls] == list(range(1, 10)) and {c[1] for c in calls} == {9}
    assert all(width == 0.0 for *_, width in calls)


def test_radii_are_read_and_checked():
    assert parse_radii("0..3") == (0, 1, 2, 3)
    assert parse_radii("5, 2..3") == (0, 2, 3, 5)
    for bad in ("", "1..", "3..1", "a", "-1", "1.5", "0..99999999999"):
        with pytest.raises(RadiusError, match="radii"):
            parse_radii(bad)
    assert check_radii([2, 1], 2) == (0, 1, 2)
    with pytest.raises(RadiusError, match="40 slots"):
        run(mlp((3, 4, 1)), loads(RECIPE), *problem_data(), radii=range(42))


def test_the_public_reach_contains_every_run_and_every_envelope():
    graph, recipe = mlp((3, 4, 1)), loads(RECIPE)
    lower, upper = reach(graph, recipe, 40)
    low, high = run(graph, recipe, *problem_data(), radii=range(0, 41, 8)).stacked()
    assert (lower <= low).all() and (high <= upper).all()
    stepwise = run(graph, recipe, *problem_data(), radii=[40], F=1)
    np.testing.assert_array_equal(lower, stepwise.stacked()[0][-1])
    sizes = np.array([11, 11, 11, 7, 11, 11, 11, 7, 11])  # the normaliser stays 11 for an epoch's short batch
    widest = 0.2 * (sizes / 11 * recipe.learning_rates(40) * 0.99 ** np.arange(8, -1, -1)).sum()
    np.testing.assert_allclose(upper - graph.initial() * 0.99**9, widest, rtol=1e-9)


def test_the_normaliser_is_the_nominal_batch_size_and_empty_slots_train_nothing():
    graph = mlp((1, 1))
    text = '[training]\nloss="squared"\nsteps=1\nclip=1.0\nlearning_rate={schedule="constant",value=1.0}\n'
    recipe = loads(text + "[batches]\nslots=4\n")
    theta = train(graph, recipe, [[1.0]], [[1e6]])
    np.testing.assert_allclose(theta, graph.initial() + 0.25)


def test_bad_data_is_refused_with_one_sentence():
    graph, recipe = mlp((3, 4, 1)), loads(RECIPE)
    features, targets = problem_data()
    for bad in (np.nan, np.inf):
        broken = features.copy()
        broken[3, 1] = bad
        with pytest.raises(DataError):
            run(graph, recipe, broken, targets, radii=[1])
    with pytest.raises(DataError, match="rows"):
        run(graph, recipe, features, targets[:-1], radii=[1])
    with pytest.raises(DataError, match="model takes 3"):
        run(graph, recipe, features[:, :2], targets, radii=[1])
    with pytest.raises(DataError, match="outputs needs"):
        run(graph, recipe, features, np.hstack([targets, targets]), radii=[1])
    with pytest.raises(DataError, match="slots"):
        run(graph, recipe, *problem_data(41), radii=[1])
    with pytest.raises(CertdpError, match="backend"):
        run(graph, recipe, features, targets, radii=[1], backend="guess")
    with pytest.raises(ModelError, match="matches no parameter"):
        run(graph, loads(RECIPE + '[model]\ntrainable = ["nothing*"]\n'), features, targets, radii=[1])
    with pytest.raises(DataError, match="-1 and 1"):
        prepare(graph, loads(RECIPE.replace('"squared"', '"hinge"')), features, targets)


def test_frozen_parameters_stay_and_the_data_digest_needs_a_key():
    graph, recipe = mlp((3, 4, 1)), loads(RECIPE + '[model]\nfrozen = ["w0", "b0"]\n')
    envelope = run(graph, recipe, *problem_data(), radii=[1], data_key=b"secret")
    assert [p.name for p in envelope.parameters] == ["w1", "b1"]
    other = run(graph, recipe, *problem_data(), radii=[1], data_key=b"other")
    assert envelope.metadata.data_hmac != other.metadata.data_hmac
    assert run(graph, recipe, *problem_data(), radii=[1]).metadata.data_hmac is None


def test_envelopes_survive_the_file(tmp_path):
    envelope = run(mlp((3, 4, 1)), loads(RECIPE), *problem_data(), radii=range(3))
    path = tmp_path / "run.envelope.safetensors"
    certify.write_envelope(path, envelope)
    same(envelope, certify.read_envelope(path))
