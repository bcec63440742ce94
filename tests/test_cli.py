"""The command as a user meets it: the whole way, resumption, and one sentence with exit code 2 for every mistake."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import onnx
import pytest

import certify
import models
import privacy
from certify.cli import main
from certify.tables import write_predictions

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "california" / "model.onnx"
RECIPE = """
[training]
loss = "squared"
steps = 12
clip = 0.2
learning_rate = { schedule = "constant", value = 0.05 }
[features]
lower = -3
upper = 3
[target]
names = "y"
[output]
lower = -2
upper = 2
"""
NAMES = [f"x{i}" for i in range(8)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a table, inputs, a recipe; the command runs there."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 8))
    y = np.tanh(x[:, 0]) - 0.3 * x[:, 1] + 0.1 * rng.normal(size=400)
    write_predictions(tmp_path / "train.csv", {**dict(zip(NAMES, x.T, strict=True)), "y": y})
    inputs = np.vstack([x[:3], x[:1]])  # the last row repeats the first
    write_predictions(tmp_path / "queries.csv", dict(zip(NAMES, inputs.T, strict=True)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def certdp(capsys, *words):
    """(exit code, stdout, stderr) of a command."""
    old, sys.argv = sys.argv, ["certdp", *map(str, words)]
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = old
    out, err = capsys.readouterr()
    return code, " ".join(out.split()), " ".join(err.split())


CERTIFY = ["certify", MODEL, "--data", "train.csv", "--recipe", "recipe.toml", "-o", "run.envelope.safetensors"]
PREDICT = ["predict", "run.envelope.safetensors", "--model", MODEL, "--data", "queries.csv", "-o", "released.csv"]


def test_the_whole_way(folder, capsys):
    code, out, _ = certdp(capsys, *CERTIFY, "--target", "y", "--radii", "0..6")
    assert code == 0
    for fact in ("9 parameters", "400 slots", "k = 0..6", "replace-one", "sound", "monotone", "rigorous", "PRIVATE"):
        assert fact in out
    assert (folder / "run.envelope.safetensors").stat().st_mode & 0o077 == 0
    assert not list(folder.glob("*checkpoint*"))

    code, out, _ = certdp(capsys, "envelope", "check", "run.envelope.safetensors")
    assert code == 0 and "FAILED" not in out
    code, out, _ = certdp(capsys, "inspect", "run.envelope.safetensors", "--model", MODEL, "--data", "queries.csv")
    assert code == 0 and "certificate" in out and "PRIVATE" in out
    assert (folder / "run.widths.png").stat().st_size > 5000
    assert (folder / "run.staircase.png").stat().st_size > 5000
    for picture in folder.glob("*.png"):  # computed from the records
        assert picture.stat().st_mode & 0o077 == 0

    code, out, _ = certdp(capsys, *PREDICT, "--epsilon", "1", "--separate")
    assert code == 0 and "epsilon = 1 in all" in out and "3 releases" in out
    released = np.loadtxt(folder / "released.csv", skiprows=1)
    assert released.shape == (4,) and released[3] == released[0] and (np.abs(released) <= 2).all()
    guarantee = json.loads((folder / "released.guarantee.json").read_text())
    assert guarantee["epsilon"] == 1.0 and guarantee["delta"] == 0.0 and guarantee["adjacency"] == "replace-one"
    assert guarantee["epsilon_per_release"] * 3 <= 1.0

    code, out, _ = certdp(capsys, *PREDICT, "--epsilon", "1", "--per-query", "--delta", "1e-6")
    assert code == 0 and "epsilon = 3, delta = 3e-06" in out and "laplace" in out


def test_the_command_and_python_give_the_same_envelope(folder, capsys):
    certdp(capsys, *CERTIFY, "--radii", "0..3", "--threads", "1")
    by_command = certify.read_envelope("run.envelope.safetensors")
    table = certify.read_table("train.csv", target="y")
    recipe = certify.load_recipe("recipe.toml")
    by_python = certify.run(models.read(MODEL), recipe, table.features, table.targets, radii=range(4))
    for side, other in zip(by_command.stacked(), by_python.stacked(), strict=True):
        np.testing.assert_array_equal(side, other)
    release = privacy.predict(by_python, models.read(MODEL), table.features[:2], epsilon=2.0, joint=False)
    assert release.values.shape == (2, 1) and release.guarantee.releases == 2


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_tables_in_other_formats_give_the_same_envelope(folder, capsys, suffix):
    certdp(capsys, *CERTIFY, "--radii", "0..2")
    wanted = certify.read_envelope("run.envelope.safetensors").stacked()
    table = certify.read_table("train.csv", target="y")
    if suffix == ".npz":
        np.savez("train.npz", X=table.features, y=table.targets)
    else:
        import pyarrow
        import pyarrow.parquet

        columns = {**dict(zip(NAMES, table.features.T, strict=True)), "y": table.targets[:, 0]}
        pyarrow.parquet.write_table(pyarrow.table(columns), "train.parquet")
    words = [w if w != "train.csv" else f"train{suffix}" for w in CERTIFY]
    code, _, err = certdp(capsys, *words, "--radii", "0..2")
    assert code == 0, err
    for side, other in zip(certify.read_envelope("run.envelope.safetensors").stacked(), wanted, strict=True):
        np.testing.assert_array_equal(side, other)


def test_interrupting_the_command_and_resuming_gives_the_same_bits(folder, capsys):
    (folder / "recipe.toml").write_text(RECIPE.replace("steps = 12", "steps = 4000"))
    words = [sys.executable, "-c", "from certify.cli import main; main()", *map(str, CERTIFY), "--radii", "0..3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr.readline().startswith("certifying: 1 of 4000 steps")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in err, err
    assert (folder / "run.checkpoint.safetensors").stat().st_mode & 0o077 == 0
    assert not (folder / "run.envelope.safetensors").exists()
    code, _, err = certdp(capsys, *CERTIFY, "--radii", "0..3", "--resume")
    assert code == 0, err
    resumed = certify.read_envelope("run.envelope.safetensors").stacked()
    code, _, err = certdp(capsys, *CERTIFY, "--radii", "0..3")
    assert code == 0, err
    for side, other in zip(certify.read_envelope("run.envelope.safetensors").stacked(), resumed, strict=True):
        np.testing.assert_array_equal(side, other)


def test_radii_on_demand_give_the_dense_smooth_bound(folder, capsys):
    code, _, err = certdp(capsys, *CERTIFY, "--radii", "auto", "--beta", "0.3", "--queries", "queries.csv")
    assert code == 0, err
    sparse = certify.read_envelope("run.envelope.safetensors")
    assert sparse.metadata.auto["beta"] == 0.3 and len(sparse.radii) < 60
    assert not list(folder.glob("*checkpoint*"))
    certdp(capsys, *CERTIFY, "--radii", "0..400")
    dense = certify.read_envelope("run.envelope.safetensors")
    graph = models.read(MODEL)
    from privacy.agtr import _on_demand
    from privacy.smooth import cross_ranges, smooth_bound

    inputs = certify.read_table("queries.csv").features
    bounds = {}
    for name, envelope in (("sparse", sparse), ("dense", dense)):
        query = privacy.Query.make(envelope, graph)
        rows = query.prepare(inputs)
        lower, upper = (np.clip(side, -2.0, 2.0) for side in query.bounds(rows))
        if name == "sparse":
            bounds[name] = _on_demand(envelope.radii, 400)(lower, upper, query.ceiling(rows), 0.3)
        else:
            bounds[name] = smooth_bound(cross_ranges(lower, upper), query.ceiling(rows), 0.3)
    np.testing.assert_array_equal(bounds["sparse"], bounds["dense"])


@pytest.mark.parametrize("after", [5, 30])
def test_radii_on_demand_resume_with_the_same_bits(after, folder):
    """Interrupted in the first batch of radii, or in a later one: no step is computed twice."""
    from privacy.on_demand import certify_on_demand

    table, inputs = certify.read_table("train.csv", target="y"), certify.read_table("queries.csv").features
    parts = (models.read(MODEL), certify.load_recipe("recipe.toml"), table.features, table.targets, 0.05, inputs)
    first, rest, straight = [], [], []

    def interrupt(done, total, note):
        first.append(note)
        if len(first) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify_on_demand(*parts, checkpoint="state.safetensors", progress=interrupt)
    options = {"checkpoint": "state.safetensors", "resume": True, "progress": lambda *step: rest.append(step)}
    resumed = certify_on_demand(*parts, **options)
    whole = certify_on_demand(*parts, progress=lambda *step: straight.append(step))
    assert len(first) + len(rest) == len(straight) > 40
    assert resumed.radii == whole.radii
    for side, other in zip(resumed.stacked(), whole.stacked(), strict=True):
        np.testing.assert_array_equal(side, other)
    np.testing.assert_array_equal(resumed.history, whole.history)


MISTAKES = {
    "no such model": (["certify", "none.onnx", *CERTIFY[2:]], "none.onnx"),
    "no such table": ([*CERTIFY[:3], "none.csv", *CERTIFY[4:]], "none.csv"),
    "no such recipe": ([*CERTIFY[:5], "none.toml", *CERTIFY[6:]], "none.toml"),
    "no such target": ([*CERTIFY, "--target", "z"], "'z'"),
    "radii above N": ([*CERTIFY, "--radii", "0..401"], "400 slots"),
    "radii malformed": ([*CERTIFY, "--radii", "0...3"], "radii"),
    "unknown backend": ([*CERTIFY, "--backend", "magic"], "ibp"),
    "F malformed": ([*CERTIFY, "--F", "x"], "F: found"),
    "wrong suffix": ([*CERTIFY[:7], "run.bin"], ".envelope.safetensors"),
    "no such folder": ([*CERTIFY[:7], "none/run.envelope.safetensors"], "does not exist"),
    "nothing to resume": ([*CERTIFY, "--resume"], "no checkpoint"),
    "auto without beta": ([*CERTIFY, "--radii", "auto"], "--beta"),
    "auto with beta 0": ([*CERTIFY, "--radii", "auto", "--beta", "0", "--queries", "queries.csv"], "beta: found 0"),
    "auto with a beta of NaN": ([*CERTIFY, "--radii", "auto", "--beta", "nan", "--queries", "queries.csv"], "beta"),
    "a folder in place of the output": ([*CERTIFY[:7], "taken.envelope.safetensors"], "a folder of this name"),
    "a picture in no folder": (["models", MODEL, "--picture", "none/graph.png"], "cannot write none/graph.png"),
    "no such envelope": (["inspect", "none.envelope.safetensors"], "none.envelope.safetensors"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(name, folder, capsys):
    words, expected = MISTAKES[name]
    (folder / "taken.envelope.safetensors").mkdir()
    code, _, err = certdp(capsys, *words)
    assert code == 2 and err.startswith("certdp: ") and expected in err and "Traceback" not in err
    assert not (folder / "run.envelope.safetensors").exists()


RECIPE_MISTAKES = {
    "clip = 0.2": ("clip = inf", "training.clip"),
    "steps = 12": ("step = 12", "'step"),
    'loss = "squared"': ('loss = "quadratic"', "training.loss"),
    "lower = -3": ("lower = nan", "features.lower"),
    "[output]": ("[outputs]", "outputs"),
}


@pytest.mark.parametrize("right", RECIPE_MISTAKES)
def test_a_mistake_in_the_recipe_names_the_field(right, folder, capsys):
    wrong, expected = RECIPE_MISTAKES[right]
    (folder / "recipe.toml").write_text(RECIPE.replace(right, wrong))
    code, _, err = certdp(capsys, *CERTIFY)
    assert code == 2 and "recipe.toml" in err and expected in err


def test_bad_tables_models_and_envelopes_are_refused(folder, capsys):
    text = (folder / "train.csv").read_text().splitlines()
    for cell in ("nan", "inf", "word", ""):
        rows = [*text[:5], ",".join([cell, *text[5].split(",")[1:]]), *text[6:]]
        (folder / "train.csv").write_text("\n".join(rows))
        code, _, err = certdp(capsys, *CERTIFY)
        assert code == 2 and "train.csv" in err and "x0" in err, (cell, err)
    (folder / "train.csv").write_text("\n".join(text))

    (folder / "bad.onnx").write_bytes(MODEL.read_bytes()[:200])
    code, _, err = certdp(capsys, "certify", "bad.onnx", *CERTIFY[2:])
    assert code == 2 and "bad.onnx" in err

    assert certdp(capsys, *CERTIFY, "--radii", "0..3")[0] == 0
    whole = (folder / "run.envelope.safetensors").read_bytes()
    other = onnx.load(MODEL)
    other.doc_string = "another file"
    words = [w if w != MODEL else "other.onnx" for w in PREDICT]
    for content in (other.SerializeToString(), MODEL.read_bytes()[:200]):
        (folder / "other.onnx").write_bytes(content)
        code, _, err = certdp(capsys, *words, "--epsilon", "1")
        assert code == 2 and "other.onnx" in err
    for broken in (whole[:-100], whole[:-3] + b"\xff" * 3):
        (folder / "run.envelope.safetensors").write_bytes(broken)
        code, _, err = certdp(capsys, *PREDICT, "--epsilon", "1")
        assert code == 2 and "run.envelope.safetensors" in err and not (folder / "released.csv").exists()
        assert certdp(capsys, "envelope", "check", "run.envelope.safetensors")[0] == 2


def test_pictures_that_cannot_be_written_are_one_sentence(folder, capsys):
    assert certdp(capsys, *CERTIFY, "--radii", "0..1")[0] == 0
    code, _, err = certdp(capsys, "inspect", "run.envelope.safetensors", "--plots", "train.csv")
    assert code == 2 and err.startswith("certdp: plots: train.csv is not a folder")
    (folder / "run.widths.png").mkdir()
    code, _, err = certdp(capsys, "inspect", "run.envelope.safetensors")
    assert code == 2 and err.startswith("certdp: run.widths.png: the picture cannot be written")


def test_threads_are_at_least_one(folder, capsys):
    for threads in ("0", "-1"):
        code, _, err = certdp(capsys, *CERTIFY, "--threads", threads)
        assert code == 2 and "--threads" in err and not (folder / "run.envelope.safetensors").exists()


def test_a_full_disk_is_one_sentence_and_loses_nothing(folder, capsys, monkeypatch):
    assert certdp(capsys, *CERTIFY, "--radii", "0..3")[0] == 0
    before = (folder / "run.envelope.safetensors").read_bytes()

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device", str(paths[1]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        code, _, err = certdp(capsys, *CERTIFY, "--radii", "0..4")
    assert code == 2 and err.endswith("No space left on device; make room, or give a path that can be read and written")
    assert err.count("certdp: ") == 1 and "Traceback" not in err
    assert (folder / "run.envelope.safetensors").read_bytes() == before and not list(folder.glob(".*"))


def test_impossible_budgets_are_refused(folder, capsys):
    assert certdp(capsys, *CERTIFY, "--radii", "0..3")[0] == 0
    for words in (["--epsilon", "0"], ["--epsilon", "-1"], ["--epsilon", "1", "--delta", "1"], ["--epsilon", "nan"]):
        code, _, err = certdp(capsys, *PREDICT, *words)
        assert code == 2 and err.startswith("certdp: ") and not (folder / "released.csv").exists(), words
    code, _, err = certdp(capsys, *PREDICT, "--epsilon", "1", "--noise", "gauss")
    assert code == 2 and "gauss" in err


def test_recipes_are_explained_and_checked(folder, capsys):
    code, out, _ = certdp(capsys, "recipe")
    assert code == 0 and "training.clip" in out
    code, out, _ = certdp(capsys, "recipe", "recipe.toml")
    assert code == 0 and json.loads(out)["training"]["clip"] == 0.2


def test_a_prediction_that_is_the_same_for_all_data_sets_is_released(folder, capsys):
    """The public range lies above everything that training can reach: clipping leaves a constant."""
    (folder / "recipe.toml").write_text(RECIPE.replace("lower = -2\nupper = 2", "lower = 50\nupper = 60"))
    assert certdp(capsys, *CERTIFY, "--radii", "0..2")[0] == 0
    code, _, err = certdp(capsys, *PREDICT, "--epsilon", "1")
    assert code == 0, err
    released = np.loadtxt(folder / "released.csv", skiprows=1)
    np.testing.assert_allclose(released, 50.0, atol=1e-3)


def test_a_request_that_can_only_drown_in_noise_is_met_with_a_public_hint(folder, capsys):
    """The hint is the same for tables that have nothing in common, and goes where a smaller request is made."""
    hints = []
    for scale in (1.0, 0.0):
        table = np.loadtxt("train.csv", delimiter=",", skiprows=1) * scale
        write_predictions(folder / "train.csv", dict(zip([*NAMES, "y"], table.T, strict=True)))
        assert certdp(capsys, *CERTIFY, "--radii", "0..2")[0] == 0
        code, _, err = certdp(capsys, *PREDICT, "--epsilon", "0.5")
        assert code == 0 and "hint" in err
        for remedy in ("more radii", "fewer questions", "raise epsilon", "certdp inspect"):
            assert remedy in err
        hints.append(err[err.index("certdp: hint") :])
        assert "hint" not in certdp(capsys, *PREDICT, "--epsilon", "40", "--per-query")[2]
    assert hints[0] == hints[1]
    assert certdp(capsys, *CERTIFY, "--radii", "0..60")[0] == 0
    assert "hint" not in certdp(capsys, *PREDICT, "--epsilon", "0.5", "--per-query")[2]


def test_predictions_are_paid_from_a_ledger(folder, capsys):
    assert certdp(capsys, *CERTIFY, "--radii", "0..6")[0] == 0
    assert certdp(capsys, "budget", "create", "l.ledger", "study", "--epsilon", "1")[0] == 0
    paid = [*PREDICT, "--epsilon", "0.3", "--per-query", "--ledger", "l.ledger", "--budget", "study"]
    code, out, err = certdp(capsys, *paid)
    assert code == 0 and "epsilon = 0.9" in out and "epsilon = 0.1 is left" in out, err
    first = (folder / "released.csv").read_text()
    code, out, _ = certdp(capsys, *paid)
    assert code == 0 and "0 new inputs" in out and (folder / "released.csv").read_text() == first
    code, _, err = certdp(capsys, *PREDICT, "--epsilon", "0.2", "--per-query", *paid[-4:])
    assert code == 2 and "only epsilon = 0.1" in err
    assert certdp(capsys, *paid[:-2])[0] == 2


def test_a_private_model_is_released_with_its_guarantee(folder, capsys):
    words = ["release", MODEL, "--data", "train.csv", "--recipe", "recipe.toml", "--radii", "0..4", "--epsilon", "5"]
    code, out, err = certdp(capsys, *words, "-o", "private.onnx")
    assert code == 0 and "epsilon = 5" in out, err
    stored = {p.key: p.value for p in onnx.load("private.onnx").metadata_props}
    assert any(key.startswith("certdp") and "5" in value for key, value in stored.items())
    before, after = models.read(MODEL), models.read("private.onnx")
    assert [p.shape for p in before.trainable] == [p.shape for p in after.trainable]
    assert (before.initial() != after.initial()).any() and np.isfinite(after.initial()).all()


def test_labels_and_models_are_paid_from_a_ledger(folder, capsys):
    assert certdp(capsys, *CERTIFY, "--radii", "0..6")[0] == 0
    assert certdp(capsys, "budget", "create", "l.ledger", "study", "--epsilon", "10")[0] == 0
    book, pays = privacy.Ledger("l.ledger"), ["--ledger", "l.ledger", "--budget", "study"]
    labels = [*PREDICT, "--classify", "--epsilon", "0.5", "--per-query", *pays]
    for _ in range(2):  # the second time for nothing
        code, _, err = certdp(capsys, *labels)
        assert code == 0, err
        assert book.remaining("study").epsilon == Decimal("8.5")
    first = (folder / "released.csv").read_text()
    assert certdp(capsys, *labels)[0] == 0 and (folder / "released.csv").read_text() == first

    model = ["release", MODEL, "--data", "train.csv", "--recipe", "recipe.toml", "--radii", "0..4"]
    model += ["-o", "private.onnx"]
    files = []
    for _ in range(2):
        code, out, err = certdp(capsys, *model, "--epsilon", "5", *pays)
        assert code == 0 and "epsilon = 5" in out, err
        files.append((folder / "private.onnx").read_bytes())
        assert book.remaining("study").epsilon == Decimal("3.5")
    assert files[0] == files[1]
    (folder / "private.onnx").unlink()
    code, _, err = certdp(capsys, *model, "--epsilon", "4", *pays)
    assert code == 2 and "only epsilon = 3.5" in err and not (folder / "private.onnx").exists()
    assert certdp(capsys, *model, "--epsilon", "1", *pays[:2])[0] == 2
