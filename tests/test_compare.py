"""Comparisons: cells, floors, cross-checks, limits, interruption and resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import mlp
from typer.testing import CliRunner

from certify.attack import EnvelopeViolation
from certify.compare import RESULTS, compare
from certify.driver import run
from certify.envelope import SUFFIX, read, write
from certify.errors import CertdpError
from certify.recipe import loads
from certify.windows import Method
from models.ops import Tanh

RECIPE = """
[training]
loss = "squared"
steps = {steps}
clip = 0.2
[training.learning_rate]
schedule = "constant"
value = 0.05
[batches]
kind = "shuffled"
size = 8
seed = 3
[features]
lower = -3
upper = 3
[target]
lower = -3
upper = 3
"""


def inputs(steps=6):
    rng = np.random.default_rng(2)
    return mlp((2, 1), seed=1), loads(RECIPE.format(steps=steps)), rng.normal(size=(32, 2)), rng.normal(size=32)


def same(one, two):
    for a, b in zip(one.stacked(), two.stacked(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_cell_is_the_envelope_of_its_method_and_attacks_are_the_floor(tmp_path):
    methods = [Method("ibp", 1), Method("ibp", 4), Method("ibp", 4, 1)]
    found = compare(*inputs(), range(3), methods, tmp_path, retrainings=3)
    assert [c.name for c in found.cells] == ["ibp-F1", "ibp-F4", "ibp-F4-stride1"]
    assert all(c.status == "done" and c.seconds > 0.0 and c.bytes > 2**20 for c in found.cells)
    for method, envelope in zip(methods, found.envelopes, strict=True):
        again = run(*inputs(), range(3), backend=method.backend, F=method.F, stride=method.stride)
        same(envelope, again)
        lower, upper = envelope.stacked()
        assert (lower <= found.reached_lower).all() and (found.reached_upper <= upper).all()
    assert (found.reached_upper[1] > found.reached_lower[1]).all() and found.retrainings > 10


def test_a_box_that_an_attack_leaves_is_named(tmp_path):
    compare(*inputs(), range(2), [Method("ibp", 1)], tmp_path, retrainings=0)
    file = tmp_path / f"ibp-F1{SUFFIX}"
    good = read(file)
    shrunk = {k: dict(v) for k, v in good.upper.items()}
    shrunk[1] = {name: good.nominal[name] for name in shrunk[1]}
    write(file, replace(good, upper=shrunk))
    with pytest.raises(EnvelopeViolation, match="ibp-F1: an attack leaves"):
        compare(*inputs(), range(2), [Method("ibp", 1)], tmp_path, retrainings=3, resume=True)


def test_sound_boxes_that_do_not_meet_are_named(tmp_path):
    from certify.compare import Cell, _meet

    envelope = run(*inputs(), range(2))
    moved = [
        {k: {n: v + 9.0 for n, v in one.items()} for k, one in side.items()}
        for side in (envelope.lower, envelope.upper)
    ]
    other = replace(envelope, lower=moved[0], upper=moved[1])
    cells = [Cell(Method("ibp", f), "done", 1.0, 1, 1) for f in (1, 2)]
    _meet(cells, [envelope, envelope])
    with pytest.raises(EnvelopeViolation, match="ibp-F2, ibp-F1"):
        _meet(cells, [envelope, other])


def test_a_resumed_comparison_keeps_finished_cells_and_refuses_another_run(tmp_path):
    compare(*inputs(), range(2), [Method("ibp", 1)], tmp_path, retrainings=0)
    before = (tmp_path / f"ibp-F1{SUFFIX}").stat().st_mtime_ns
    asked = []
    found = compare(
        *inputs(), range(2), [Method("ibp", 1), Method("ibp", 2)], tmp_path, retrainings=0, resume=True,
        progress=lambda name, *_: asked.append(name),
    )  # fmt: skip
    assert (tmp_path / f"ibp-F1{SUFFIX}").stat().st_mtime_ns == before
    assert set(asked) == {"ibp-F2"} and len(found.cells) == 2
    graph, recipe, features, targets = inputs()
    with pytest.raises(CertdpError, match="another comparison"):
        compare(graph, recipe, features, targets + 1.0, range(2), [Method("ibp", 1)], tmp_path, resume=True)
    (tmp_path / RESULTS).write_text("{")
    with pytest.raises(CertdpError, match="damaged"):
        compare(*inputs(), range(2), [Method("ibp", 1)], tmp_path, resume=True)


def test_a_cell_over_its_limit_is_stopped_and_one_that_cannot_be_is_refused(tmp_path):
    found = compare(*inputs(5000), range(2), [Method("ibp", 1)], tmp_path, retrainings=0, limit=4.0)
    (cell,) = found.cells
    assert cell.status == "stopped" and cell.steps < 5000 and found.envelopes == (None,)
    _, recipe, features, targets = inputs()
    deep = mlp((2, 2, 2, 2, 2, 1), Tanh)
    found = compare(deep, recipe, features, targets, range(2), [Method("lp", 2)], tmp_path / "two", retrainings=0)
    assert found.cells[0].status == "refused" and found.cells[0].note and found.envelopes == (None,)


CODE = """
import sys
sys.path.insert(0, {tests!r})
from test_compare import compare, inputs, Method
if __name__ == "__main__":
    compare(*inputs(400), range(2), [Method("ibp", 1), Method("ibp", 2)], "out", retrainings=0,
            progress=lambda name, done, total: print(name, done, flush=True))
"""


def test_an_interrupted_comparison_resumes_with_the_same_boxes(tmp_path):
    (tmp_path / "main.py").write_text(CODE.format(tests=os.path.dirname(__file__)))
    process = subprocess.Popen(
        [sys.executable, "main.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("ibp-F2") and int(line.split()[1]) > 20:
            os.killpg(process.pid, signal.SIGINT)
            break
    process.wait(30)
    assert process.returncode != 0
    time.sleep(0.2)
    kept = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert [row["method"]["F"] for row in kept["cells"]] == [1]
    methods = [Method("ibp", 1), Method("ibp", 2)]
    found = compare(*inputs(400), range(2), methods, tmp_path / "out", retrainings=0, resume=True)
    for method, envelope in zip(methods, found.envelopes, strict=True):
        same(envelope, run(*inputs(400), range(2), F=method.F))


def test_the_command_prints_writes_and_plots(tmp_path):
    from certify.cli.app import app

    model = Path(__file__).resolve().parent.parent / "examples" / "california" / "model.onnx"
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", X=rng.normal(size=(40, 8)), y=rng.normal(size=40))
    (tmp_path / "r.toml").write_text(RECIPE.format(steps=4))
    arguments = [
        "compare", str(model), "--data", str(tmp_path / "d.npz"), "--recipe", str(tmp_path / "r.toml"),
        "-o", str(tmp_path / "out"), "--F", "1,4", "--radii", "0..3", "--retrainings", "1",
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "bounding backends" in done.output and "PRIVATE" in done.output
    shown = json.loads(CliRunner().invoke(app, [*arguments, "--resume", "--json"]).stdout)
    assert [row["F"] for row in shown["cells"]] == [1, 4] and shown["private"] is True
    floor, cells = shown["attack"]["smooth_sensitivity"], shown["cells"]
    assert floor <= cells[1]["smooth_sensitivity"] <= cells[0]["smooth_sensitivity"]
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
    bad = CliRunner().invoke(app, [*arguments[:-4], "--radii", "0,2"])
    assert bad.exit_code != 0 and "without gaps" in str(bad.exception)
