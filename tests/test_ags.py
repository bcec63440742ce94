"""AGS: exhaustive small worlds with exact privacy losses, adaptive composition, and runs that are killed."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import pytest
from scipy import stats
from test_privacy_oracle import cauchy_epsilon

import models
from certify.driver import prepare
from certify.errors import CapabilityError, CheckpointError, PrivacyError
from certify.recipe import from_dict, load
from certify.windows import Method
from models.ir import Graph, Node, ParameterInfo
from models.ops import Affine, Input, Parameter
from privacy import ags, mechanism, noise, smooth
from privacy.ags import AgsPlan, release_parameters

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "california" / "model.onnx"
SLACK = 1 + 1e-9


def linear(weight, bias=None) -> Graph:
    """`w x`, or `w x + b` with two trained parameters."""
    parameters = [ParameterInfo("w", np.array([[weight]]), True)]
    nodes = [Node("x", Input(1)), Node("w", Parameter(1, "w"))]
    if bias is not None:
        parameters.append(ParameterInfo("b", np.array([bias]), True))
        nodes.append(Node("b", Parameter(1, "b")))
    nodes.append(Node("y", Affine(1, 1), tuple(range(len(nodes)))))
    return Graph(tuple(nodes), len(nodes) - 1, (1,), tuple(parameters))


def recipe(steps=2, rate=0.5, clip=1.0, slots=4, size=None, adjacency="replace-one", loss="squared", contraction=1.0):
    batches = {"slots": slots} if size is None else {"slots": slots, "kind": "sequential", "size": size}
    return from_dict(
        {
            "training": {
                "loss": loss, "clip": clip, "steps": steps, "contraction": contraction,
                "learning_rate": {"schedule": "constant", "value": rate},
            },
            "batches": batches,
            "privacy": {"adjacency": adjacency},
        }
    )  # fmt: skip


UNIVERSE = [(1.0, 1.0), (-1.0, 0.5), (0.5, -1.0)]


def worlds(slots):
    """Every data set over the universe whose last slot may be empty, and all pairs of neighbours (replace-one)."""
    sets = [d for n in (slots - 1, slots) for d in itertools.product(range(len(UNIVERSE)), repeat=n)]
    filled = [d + (None,) * (slots - len(d)) for d in sets]
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(len(sets)), 2)
        if sum(a != b for a, b in zip(filled[i], filled[j], strict=True)) == 1
    ]
    return [np.array([UNIVERSE[r] for r in d]) for d in sets], pairs


class World:
    """One window on every data set: released mean, smooth bounds by beta, noise scale."""

    def __init__(self, graph, facts, plan, window, theta=None):
        self.mechanism = plan.mechanisms(graph.initial().size)[window]
        start, stop = (0, *plan.steps)[window], plan.steps[window]
        radii = range(plan.radius + 1)
        sets, self.pairs = worlds(facts.batches.slots)
        weights = None if plan.weights is None else np.asarray(plan.weights, float)
        self.weights = np.ones(graph.initial().size) if weights is None else weights
        self.theta, self.smooth = [], []
        for rows in sets:
            problem = prepare(graph, facts, rows[:, :1], rows[:, 1])
            point = problem.graph.initial() if theta is None else theta
            boxes = ags.sweep(problem, radii, Method(F=1), start=start, stop=stop, theta=point).trail.last
            box = ags._box(problem, plan)
            nominal, by_beta = ags._bounds(
                problem, start, stop, point, boxes, box, self.mechanism, weights, radii
            )
            self.theta.append(nominal[0])
            self.smooth.append({beta: float(s[0]) for beta, s in by_beta.items()})
        wide = {p.beta: np.array([s[p.beta] for s in self.smooth]) for p in self.mechanism.pairs}
        self.scale = noise.noise_scale(wide, self.mechanism.pairs)

    def check_smoothness(self):
        order = {"l1": 1, "l2": 2, "linf": np.inf}[self.mechanism.norm]
        for i, j in self.pairs:
            moved = np.linalg.norm(self.weights * (self.theta[i] - self.theta[j]), order)
            for beta in self.smooth[i]:
                s, t = self.smooth[i][beta], self.smooth[j][beta]
                assert moved <= min(s, t) * (1 + 1e-12)
                assert abs(math.log(s / t)) <= beta + math.log1p(smooth.TAU) + 1e-12

    def worst(self, shrink=1.0):
        """Exact worst privacy loss over all neighbours, with scales divided by `shrink`."""
        return max(self.loss(i, j, shrink) for i, j in self.pairs)

    def loss(self, i, j, shrink=1.0):
        f, g = self.weights * self.theta[i], self.weights * self.theta[j]
        s, t = self.scale[i] / shrink, self.scale[j] / shrink
        if self.mechanism.family.name == "cauchy":
            # Coordinates are independent, so the supremum of each direction is a sum of suprema.
            return max(
                sum(directed_cauchy(a, s, b, t) for a, b in zip(f, g, strict=True)),
                sum(directed_cauchy(b, t, a, s) for a, b in zip(f, g, strict=True)),
            )
        if self.mechanism.family.name in ("l1-power", "box-power"):
            return power_loss(f, s, g, t, self.mechanism.family)
        raise AssertionError(self.mechanism.family.name)


def directed_cauchy(f, s, g, t):
    """sup of log density ratio of Cauchy(f, s) over Cauchy(g, t): the critical points are roots of a quadratic."""
    h = g - f
    x = np.roots([-h, h * h + t * t - s * s, h * s * s]) if h else np.zeros(1)
    x = np.concatenate([x[np.isreal(x)].real, [0.0, h]])
    ratio = np.log(s / t) - np.log((s * s + x * x) / (t * t + (x - h) ** 2))
    return max(float(ratio.max()), math.log(s / t))


def power_loss(f, s, g, t, family):
    """Worst log ratio of two laws `f + s Z`, `Z` of density `(1 + |z|)^-c` in the norm: candidates and a grid."""
    p = len(f)
    c, order = p + family.exponent(p), {"l1": 1, "linf": np.inf}[family.norm]
    axes = [
        np.unique(np.concatenate([[a, b], np.linspace(min(a, b) - 9 * s, max(a, b) + 9 * s, 61)]))
        for a, b in zip(f, g, strict=True)
    ]
    y = np.stack(np.meshgrid(*axes), -1).reshape(-1, p)
    y = np.concatenate([y, 1e9 * max(s, t) * np.eye(p), -1e9 * max(s, t) * np.eye(p)])
    one, other = (np.log1p(np.linalg.norm(y - m, order, axis=1) / r) for m, r in ((f, s), (g, t)))
    return float(np.abs(p * np.log(t / s) + c * (other - one)).max())


def plan_of(steps, epsilons, radius=4, **options):
    return AgsPlan.make(steps, epsilons, 0.0, radius, **options)


# -- exhaustive small worlds --------------------------------------------------------------------------------------


CASES = {
    "one step": (linear(0.3), recipe(1), plan_of([1], 1.0)),
    "two steps": (linear(-0.2), recipe(2), plan_of([2], 0.5)),
    "batches": (linear(0.1), recipe(4, size=2), plan_of([4], 1.0)),
    "zero-out": (linear(0.1), recipe(2, adjacency="zero-out"), plan_of([2], 2.0)),
    "one radius": (linear(0.3), recipe(2), plan_of([2], 1.0, radius=1)),
    "box inside the reach": (linear(0.3), recipe(2), plan_of([2], 1.0, lower=-0.1, upper=0.35)),
    "contraction": (linear(0.3), recipe(3, contraction=0.5), plan_of([3], 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_release_is_dp_in_every_small_world(name):
    graph, facts, plan = CASES[name]
    world = World(graph, facts, plan, 0)
    if name == "zero-out":  # only filling or emptying a slot is covered
        sizes = [len(d) for d in worlds(4)[0]]
        world.pairs = [(i, j) for i, j in world.pairs if sizes[i] != sizes[j]]
    assert len(world.pairs) > 20
    world.check_smoothness()
    assert world.worst() <= plan.epsilons[0] * SLACK


@pytest.mark.parametrize("family", ["cauchy", "l1-power", "box-power"])
@pytest.mark.parametrize("weights", [None, (1.0, 0.25), (1.0, 4.0)])
def test_two_parameters_share_one_noise_vector(family, weights):
    plan = plan_of([2], 1.0, radius=3, family=family, weights=weights)
    world = World(linear(0.2, -0.1), recipe(2, slots=3), plan, 0)
    assert world.mechanism.dim == 2 and world.mechanism.family.name == family
    world.check_smoothness()
    assert 0.05 < world.worst() <= 1.0 * SLACK


def test_windows_compose_adaptively():
    """Two windows: for every released first point, the losses of both windows add up to at most the total."""
    graph, facts, plan = linear(0.3), recipe(3), plan_of([1, 3], [0.7, 0.4])
    first = World(graph, facts, plan, 0)
    first.check_smoothness()
    box = ags._box(prepare(graph, facts, np.ones((4, 1)), np.ones(4)), plan)
    points = np.linspace(float(box[0][0]), float(box[1][0]), 7)
    seconds = [World(graph, facts, plan, 1, np.array([r])) for r in points]
    for second in seconds:
        second.check_smoothness()
        assert second.worst() <= 0.4 * SLACK
    for i, j in first.pairs:
        for r, second in zip(points, seconds, strict=True):
            log = [stats.cauchy.logpdf(r, first.theta[k][0], first.scale[k]) for k in (i, j)]
            assert abs(log[0] - log[1]) + second.loss(i, j) <= (0.7 + 0.4) * SLACK


def test_three_windows_restart_from_the_released_point(monkeypatch):
    seen, kept = [], []
    original, draw = ags.sweep, ags.release_vectors

    def watch(*args, start, stop, theta, **rest):
        seen.append((start, stop, theta))
        return original(*args, start=start, stop=stop, theta=theta, **rest)

    def spy(*args, **options):
        noisy = draw(*args, **options)
        kept.append((args[0][0], noisy.values[0]))
        return noisy

    monkeypatch.setattr(ags, "sweep", watch)
    monkeypatch.setattr(ags, "release_vectors", spy)
    rows = np.array([*UNIVERSE, (1.0, 0.0)])
    graph = linear(0.3)
    private = release_parameters(graph, recipe(6), rows[:, :1], rows[:, 1], plan_of([2, 3, 6], [1.0, 1.0, 1.0]))
    monkeypatch.undo()
    assert [(a, b) for a, b, _ in seen] == [(0, 2), (2, 3), (3, 6)]
    starts = [theta for *_, theta in seen]
    assert starts[0] == graph.initial()
    for j in (1, 2):
        np.testing.assert_array_equal(starts[j], private.points[j - 1])
        assert starts[j] != kept[j - 1][0]  # not the trained point
    problem = prepare(graph, recipe(6), rows[:, :1], rows[:, 1])
    for (start, stop, theta), (nominal, _) in zip(seen, kept, strict=True):
        trained = ags.sweep(problem, (), Method(), start=start, stop=stop, theta=theta).trail.last.nominal
        np.testing.assert_array_equal(nominal, np.clip(trained, *ags._box(problem, plan_of([6], 1.0))))
    np.testing.assert_array_equal(private.points, [v for _, v in kept])
    np.testing.assert_array_equal(private.theta, private.points[-1])


@pytest.mark.parametrize(("window", "steps"), [(0, 3), (1, 2)])
def test_the_ceiling_is_what_clipping_alone_allows_in_the_window(window, steps):
    """G = 2 sum_t c^(T-t) eta gamma over the steps of this window; seen through the tail e^{-beta K} G."""
    rate, clip, c = 0.5, 1.0, 0.5
    facts = recipe(5, rate=rate, clip=clip, contraction=c)
    plan = plan_of([3, 5], 1.0, radius=1, lower=-50.0, upper=50.0, betas=(0.1,))
    world = World(linear(0.3), facts, plan, window, np.array([0.7]))
    ceiling = 2 * rate * clip * sum(c**t for t in range(steps))
    for (bound,) in (s.values() for s in world.smooth):
        assert math.exp(-0.1) * ceiling <= bound <= ceiling * (1 + 1e-9)


def test_the_harness_finds_planted_mistakes(monkeypatch):
    """Too little noise, radius 0 left out, the half range, back-filled radii: each exceeds the claim in some world."""
    graph, facts = linear(0.3), recipe(1, rate=1.0)
    plan = plan_of([1], 1.0, radius=4, betas=(0.7,))
    assert World(graph, facts, plan, 0).worst(shrink=2.0) > 1.0

    def from_one(cross, ceiling, beta, radii=None):
        terms = [np.minimum(row, ceiling) * math.exp(-beta * k) for k, row in enumerate(cross) if k > 0]
        return np.max([*terms, ceiling * math.exp(-beta * len(cross))], axis=0)

    monkeypatch.setattr(mechanism.smooth, "smooth_bound", from_one)
    tiny = plan_of([1], 1.0, radius=4, betas=(0.95,))
    with pytest.raises(AssertionError):
        World(graph, recipe(1, rate=1.0, slots=5), tiny, 0).check_smoothness()
    monkeypatch.undo()

    monkeypatch.setattr(mechanism.smooth, "cross_ranges", lambda lower, upper: (upper - lower)[1:] / 2)
    with pytest.raises(AssertionError):
        World(graph, facts, plan, 0).check_smoothness()


# -- the run ------------------------------------------------------------------------------------------------------


def small_run(**options):
    rows = np.array([*UNIVERSE, (0.2, 0.1)])
    plan = options.pop("plan", plan_of([2, 4], [1.0, 0.5], lower=-1.0, upper=1.0))
    return release_parameters(linear(0.3), recipe(4), rows[:, :1], rows[:, 1], plan, **options)


def test_released_points_lie_in_the_public_box_on_a_public_grid():
    for _ in range(20):
        private = small_run(plan=plan_of([2, 4], [0.01, 0.01], lower=-1.0, upper=1.0))
        assert private.points.shape == (2, 1) and np.all(np.abs(private.points) <= 1.0)
        grid = 2.0**-45
        assert np.all(private.points / grid == np.round(private.points / grid))


def test_the_guarantee_is_the_exact_sum_rounded_up():
    private = small_run(plan=plan_of([1, 2, 4], [0.1, 0.2, 0.3]))
    g = private.guarantee
    exact = Fraction(0.1) + Fraction(0.2) + Fraction(0.3)
    assert Fraction(g.epsilon) >= exact and g.epsilon - 0.6 < 1e-15
    assert g.delta == 0.0 and g.adjacency == "replace-one" and g.slots == 4 and g.lost == 0
    assert g.epsilons == (0.1, 0.2, 0.3) and g.steps == (1, 2, 4)
    total = AgsPlan.make([1, 2, 4], 1.0, 1e-5)
    assert sum(map(Fraction, total.epsilons)) <= 1 and sum(map(Fraction, total.deltas)) <= Fraction(1e-5)


def test_the_noise_has_the_private_scale_and_the_weights_divide_it():
    shape = (3000, 2)
    family = noise.make_family("cauchy", 1.0, 0.0, 2)
    made = mechanism.Mechanism.make(family, 1.0, 0.0, 2)
    by_beta = {p.beta: np.full(shape[0], 0.01) for p in made.pairs}
    weights = np.array([1.0, 0.25])
    noisy = mechanism.release_vectors(np.full(shape, 0.5), by_beta, made, np.array(2.0**-40), weights=weights)
    scale = 0.01 / max(p.a for p in made.pairs)
    assert np.allclose(noisy.scale, scale)
    for i in range(2):
        z = (noisy.values[:, i] - 0.5) * weights[i] / scale
        assert stats.kstest(z, "cauchy").pvalue > 1e-6  # error rate 2e-6


def test_two_runs_draw_different_noise():
    plan = plan_of([4], 1.0, lower=-1e6, upper=1e6)
    assert len({float(small_run(plan=plan).theta[0]) for _ in range(5)}) == 5


BAD = {
    "steps do not end with training": ({"steps": [2, 3], "epsilon": 1.0}, "end the list"),
    "steps repeat": ({"steps": [2, 2, 4], "epsilon": 1.0}, "ascend"),
    "no epsilon": ({"steps": [4], "epsilon": 0.0}, "epsilon"),
    "negative": ({"steps": [4], "epsilon": -1.0}, "negative"),
    "two budgets for one release": ({"steps": [4], "epsilon": [1.0, 1.0]}, "for 1 releases"),
    "unknown noise": ({"steps": [4], "epsilon": 1.0, "family": "magic"}, "magic"),
    "beta too large": ({"steps": [4], "epsilon": 1.0, "betas": (5.0,)}, "beta"),
    "empty box": ({"steps": [4], "epsilon": 1.0, "lower": 1.0, "upper": 1.0}, "box"),
    "half a box": ({"steps": [4], "epsilon": 1.0, "lower": 1.0}, "both"),
    "weights": ({"steps": [4], "epsilon": 1.0, "weights": [1.0, 2.0]}, "weights"),
    "negative weights": ({"steps": [4], "epsilon": 1.0, "weights": [-1.0]}, "weights"),
    "radius": ({"steps": [4], "epsilon": 1.0, "radius": 0}, "radius"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_plans_are_refused_before_anything_is_drawn(name, monkeypatch):
    options, message = BAD[name]
    monkeypatch.setattr(ags, "release_vectors", lambda *a, **k: pytest.fail("noise was drawn"))
    with pytest.raises(PrivacyError, match=message):
        small_run(plan=AgsPlan.make(**{"radius": 2, **options}))


def test_a_backend_without_monotonicity_is_refused(monkeypatch):
    from dataclasses import replace

    monkeypatch.setitem(ags.BACKENDS, "ibp", replace(ags.BACKENDS["ibp"], monotone=False))
    with pytest.raises(CapabilityError, match="monotone"):
        small_run()


# -- interruption -------------------------------------------------------------------------------------------------


def test_a_resumed_run_never_repeats_a_release(tmp_path, monkeypatch):
    state = tmp_path / "run.safetensors"
    original = ags.sweep

    def stop_in_second(*args, start, **rest):
        if start == 2:
            raise KeyboardInterrupt
        return original(*args, start=start, **rest)

    monkeypatch.setattr(ags, "sweep", stop_in_second)
    with pytest.raises(KeyboardInterrupt):
        small_run(state=state)
    monkeypatch.undo()
    assert state.stat().st_mode & 0o077 == 0
    from safetensors.numpy import load_file

    (first,) = load_file(state)["points"]
    with pytest.raises(CheckpointError, match="resume it"):
        small_run(state=state)
    private = small_run(state=state, resume=True)
    assert private.points[0] == first and private.guarantee.lost == 0 and private.guarantee.epsilon == 1.5
    again = small_run(state=state, resume=True)  # nothing is left to draw
    np.testing.assert_array_equal(again.points, private.points)
    with pytest.raises(CheckpointError, match="another run"):
        small_run(state=state, resume=True, plan=plan_of([2, 4], [1.0, 0.25], lower=-1.0, upper=1.0))


@pytest.mark.parametrize("when", ["before the draw", "after the draw"])
def test_a_lost_attempt_is_charged(when, tmp_path, monkeypatch):
    state, draw = tmp_path / "run.safetensors", ags.release_vectors

    def dies(*args, **options):
        if when == "after the draw":
            draw(*args, **options)
        raise OSError("killed")

    monkeypatch.setattr(ags, "release_vectors", dies)
    with pytest.raises(OSError, match="killed"):
        small_run(state=state)
    monkeypatch.undo()
    private = small_run(state=state, resume=True)
    assert private.guarantee.lost == 1 and private.guarantee.epsilon == 2.5


def test_a_damaged_file_is_refused(tmp_path):
    state = tmp_path / "run.safetensors"
    with pytest.raises(CheckpointError, match="no run to resume"):
        small_run(state=state, resume=True)
    state.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        small_run(state=state, resume=True)


# -- ONNX and the command -----------------------------------------------------------------------------------------

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
"""


def run_code(code, words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=environment
    )


def table(folder):
    from certify.tables import write_predictions

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 8))
    y = np.tanh(x[:, 0]) - 0.3 * x[:, 1]
    write_predictions(folder / "train.csv", {**{f"x{i}": x[:, i] for i in range(8)}, "y": y})
    (folder / "recipe.toml").write_text(RECIPE)
    return x, y


def test_the_private_model_carries_its_guarantee(tmp_path):
    x, y = table(tmp_path)
    graph = models.read(MODEL)
    plan = AgsPlan.make([6, 12], 2.0, 0.0, 3)
    private = release_parameters(graph, load(tmp_path / "recipe.toml"), x, y, plan, model=MODEL)
    written = models.read(private.onnx)
    stored = np.concatenate([p.value.ravel() for p in written.trainable])
    np.testing.assert_array_equal(stored, private.theta.astype(np.float32))
    props = {p.key: p.value for p in onnx.load_from_string(private.onnx).metadata_props}
    assert json.loads(props["certdp.epsilon"]) == private.guarantee.epsilon <= 2.0
    assert props["certdp.adjacency"] == "replace-one"
    stated = json.loads(props["certdp.guarantee"])
    assert stated["steps"] == [6, 12] and "AGS" in stated["mechanism"] and stated["slots"] == 60
    # Nothing of the records: scales, bounds and the like are not in the file.
    assert set(stated) == {
        "epsilon", "delta", "adjacency", "slots", "mechanism", "steps", "epsilons", "deltas", "lost", "version",
    }  # fmt: skip


def test_a_killed_command_resumes_with_the_released_point(tmp_path):
    table(tmp_path)
    words = ["release", MODEL, "--data", tmp_path / "train.csv", "--recipe", tmp_path / "recipe.toml"]
    words += ["--epsilons", "1,0.5", "--steps", "6,12", "--radii", "0..3", "-o", tmp_path / "private.onnx"]
    code = (
        "import sys, os, typer, privacy.ags as ags\nfrom certify.cli.release import command\n"
        "app = typer.Typer(); app.command('release')(command); app.command('other')(lambda: None)\n"
    )
    kill = "keep = ags._RunFile.keep\nags._RunFile.keep = lambda self, point: (keep(self, point), os._exit(9))\n"
    dies, runs = code + kill + "app()", code + "app()"
    assert run_code(dies, words).returncode == 9
    from safetensors.numpy import load_file

    state = tmp_path / "private.onnx.run.safetensors"
    first = load_file(state)["points"]
    assert first.shape == (1, 9) and not (tmp_path / "private.onnx").exists()
    done = run_code(runs, words)  # without --resume: refused, nothing is drawn
    assert done.returncode != 0 and not (tmp_path / "private.onnx").exists()
    done = run_code(runs, [*words, "--resume"])
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "epsilon = 1.5" in text and "2 release(s)" in text and "replace-one" in text
    assert not list(tmp_path.glob("*run*"))
    props = {p.key: p.value for p in onnx.load(tmp_path / "private.onnx").metadata_props}
    assert json.loads(props["certdp.guarantee"])["lost"] == 0
    models.read(tmp_path / "private.onnx")


def test_cauchy_oracle_agrees_with_the_directed_one():
    for f, s, g, t in [(0.0, 1.0, 0.4, 1.3), (1.0, 0.5, 0.0, 0.6), (0.0, 1.0, 0.0, 2.0)]:
        both = max(directed_cauchy(f, s, g, t), directed_cauchy(g, t, f, s))
        assert abs(both - cauchy_epsilon(f, s, g, t)) < 1e-12
