"""The audit: it passes what is shipped on real and exhaustive neighbours, and finds every planted mistake.

The wrong rules live here and nowhere else.
"""

import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from builders import mlp
from scipy import stats
from test_privacy_oracle import cauchy_epsilon, laplace_delta
from typer.testing import CliRunner

from certify import driver
from certify.cli.audit import command
from certify.driver import prepare, run
from certify.errors import PrivacyError, RadiusError
from certify.recipe import from_dict
from privacy import audit, audit_laws, noise, smooth

RANGE = (np.array([-1.0]), np.array([1.0]))


def facts(adjacency="replace-one", slots=3, clip=0.5):
    return from_dict(
        {
            "training": {
                "loss": "squared", "clip": clip, "steps": 3, "learning_rate": {"schedule": "constant", "value": 0.2},
            },
            "batches": {"kind": "sequential", "size": 2, "slots": slots},
            "features": {"lower": -1.0, "upper": 1.0}, "target": {"lower": -1.0, "upper": 1.0},
            "output": {"lower": -1.0, "upper": 1.0}, "privacy": {"adjacency": adjacency},
        }
    )  # fmt: skip


def small(adjacency="replace-one", slots=3):
    graph = mlp((2, 2, 1))
    return prepare(graph, facts(adjacency, slots), np.zeros((slots, 2)), np.zeros(slots))


UNIVERSE = [((0.5, -1.0), 1.0), ((-1.0, 1.0), -1.0), ((1.0, 1.0), 0.3), None]
QUERIES = np.array([[0.3, -0.2], [1.0, 1.0]])


# --- the closed forms, against independent computations ---


def test_cauchy_and_laplace_losses_agree_with_the_oracle():
    rng = np.random.default_rng(0)
    for _ in range(300):
        f, g, s, t = rng.normal(), rng.normal() * rng.choice([0.0, 1.0]), *rng.uniform(0.2, 3.0, 2)
        assert audit_laws.pure_loss("cauchy", f, s, g, t) == pytest.approx(cauchy_epsilon(f, s, g, t), abs=1e-9)
        epsilon = rng.uniform(0.05, 3.0)
        mine = audit_laws.hockey_stick("laplace", epsilon, f, s, g, t)
        assert mine == pytest.approx(laplace_delta(epsilon, f, s, g, t), abs=1e-12)


def test_hockey_sticks_agree_with_quadrature():
    y = np.linspace(-50.0, 50.0, 400_001)
    laws = {"laplace": stats.laplace, "gaussian": stats.norm}
    cases = [(0.5, 0.0, 1.0, 0.8, 1.2), (0.1, 1.0, 2.0, 0.0, 1.0), (1.0, 0.3, 1.0, 0.3, 0.5), (0.2, 0.0, 1.0, 1.0, 1.0)]
    for (name, law), (e, f, s, g, t) in itertools.product(laws.items(), cases):
        p, q = law.pdf(y, f, s), law.pdf(y, g, t)
        exact = np.maximum(p - math.exp(e) * q, 0.0).sum() * (y[1] - y[0])
        assert audit_laws.hockey_stick(name, e, f, s, g, t) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("name", ["student", "l1-power", "box-power"])
def test_other_pure_losses_agree_with_a_grid(name):
    family = noise.make_family(name, 1.0, 0.0, 1)
    y = np.concatenate([np.linspace(-30, 30, 300_001), np.geomspace(30, 1e9, 2000), -np.geomspace(30, 1e9, 2000)])

    def log_density(centre, scale):
        z = (y - centre) / scale
        if name == "student":
            return stats.t.logpdf(z, family.degrees) - math.log(scale)
        c = 1.0 + family.exponent(1)
        return math.log((c - 1.0) / 2.0) - c * np.log1p(np.abs(z)) - math.log(scale)

    for f, s, g, t in [(0.0, 1.0, 0.7, 1.3), (0.0, 2.0, 1.0, 0.6), (0.0, 1.0, 0.0, 1.5), (0.0, 1.0, 2.0, 1.0)]:
        worst = np.max(np.abs(log_density(f, s) - log_density(g, t)))
        assert float(audit_laws.pure_loss(family, f, s, g, t)) == pytest.approx(worst, abs=1e-4)


# --- what is shipped passes ---


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (6.0, 0.0), (1.0, 1e-2)])
def test_shipped_rule_passes_the_exhaustive_world(adjacency, epsilon, delta):
    problem = small(adjacency)
    pairs = audit.exhaustive_world(problem, UNIVERSE)
    assert len(pairs) == (288 if adjacency == "replace-one" else 144)
    report = audit.audit_pairs(pairs, QUERIES, epsilon, delta, radii=range(4))
    assert report.passed and report.queries == 2 and report.adjacency == adjacency
    by_name = {check.name: check for check in report.checks}
    assert by_name["|f - f'| / min(S, S')"].worst > 0.1  # the pairs do move the predictions


def test_shipped_rule_passes_the_worst_neighbours_found():
    rng = np.random.default_rng(1)
    x, y = rng.uniform(-1, 1, (20, 2)), rng.uniform(-1, 1, 20)
    graph = mlp((2, 3, 1))
    problem = prepare(graph, facts(slots=20), x, y)
    pairs = audit.worst_neighbours(problem, QUERIES, radius=2, retrainings=3, candidates=32)
    assert len(pairs) >= 4
    report = audit.audit_pairs(pairs, QUERIES, 2.0, radii=range(6))
    assert report.passed
    # The report says that it is private, and everything in it survives the way to JSON.
    loaded = json.loads(report.to_json())
    assert loaded["private"] is True and loaded["passed"] is True and len(loaded["checks"]) == len(report.checks)
    assert report.table().row_count == len(report.checks)


def test_certify_problem_is_certify_run():
    rng = np.random.default_rng(2)
    x, y = rng.uniform(-1, 1, (7, 2)), rng.uniform(-1, 1, 7)
    recipe, graph = facts(slots=8), mlp((2, 2, 1))
    one = run(graph, recipe, x, y, range(3), threads=1)
    two = audit.certify_problem(prepare(graph, recipe, x, y), range(3))
    for a, b in zip(one.stacked(), two.stacked(), strict=True):
        assert np.array_equal(a, b)


# --- wrong rules are caught ---


def laws_of(bound, lower, upper, ceiling, output_range, epsilon, betas=None):
    """A rule from a (wrong) bound: exact calibration as shipped, scalar shares."""
    lower, upper = (np.clip(x, *output_range) for x in (lower, upper))
    share = noise.split_budget(epsilon, lower[0].size)
    pairs = noise.admissible_pairs("cauchy", share, betas=betas)
    by_beta = {pair.beta: bound(lower, upper, ceiling, pair.beta) for pair in pairs}
    return audit.Laws(lower[0], by_beta, noise.noise_scale(by_beta, pairs))


def rule(bound, betas=None):
    return lambda lower, upper, ceiling, ends, epsilon, delta, family: laws_of(
        bound, lower, upper, ceiling, ends, epsilon, betas
    )


def right(lower, upper, ceiling, beta):
    return smooth.smooth_bound(smooth.cross_ranges(lower, upper), ceiling, beta)


def half_range(lower, upper, ceiling, beta):
    """Distance from the nominal value (Algorithm 1)."""
    f, k = lower[0], np.arange(1, len(lower))[:, None, None]
    half = np.maximum(upper[1:] - f, f - lower[1:])
    return (np.exp(-beta * (k - 1)) * half).max(axis=0)


def from_one(lower, upper, ceiling, beta):
    """k starts at 1."""
    cross, k = smooth.cross_ranges(lower, upper), np.arange(len(lower) - 1)[:, None, None]
    return np.maximum((np.exp(-beta * k) * cross)[1:].max(axis=0), 1e-30)


def back_filled(lower, upper, ceiling, beta):
    """Cross ranges of the radii 0, 1, 2, 4, 8, 16 alone; a missing one is taken from the next larger that is there."""
    cross = smooth.cross_ranges(lower, upper)
    listed = [k for k in (0, 1, 2, 4, 8, 16) if k < len(cross)]
    filled = [cross[next((m for m in listed if m >= k), len(cross) - 1)] for k in range(len(cross))]
    return smooth.smooth_bound(np.array(filled), ceiling, beta)


def small_scale(lower, upper, ceiling, beta):
    return right(lower, upper, ceiling, beta) / 1.5


def steep(lower, upper, ceiling, beta):
    """Discounts twice as fast as it is calibrated for."""
    return right(lower, upper, ceiling, 2.0 * beta)


def sums(values, radii, replaced=1.0):
    """Exact bounds (K+1, 1, 1) of the clipped sum of `values` in [-1, 1], top-k replaced."""
    z, n = np.sort(np.clip(values, -1.0, 1.0)), len(values)
    low = [z[: n - min(k, n)].sum() - min(k, n) * replaced for k in radii]
    high = [z[min(k, n) :].sum() + min(k, n) * replaced for k in radii]
    return np.array(low)[:, None, None], np.array(high)[:, None, None]


def threshold(ones, n, at, radii):
    """Exact bounds of 1[ones >= at] within radius k."""
    low = [float(max(0, ones - k) >= at) for k in radii]
    high = [float(min(n, ones + k) >= at) for k in radii]
    return np.array(low)[:, None, None], np.array(high)[:, None, None]


def caught(bound, pairs, ceiling, width, epsilon, betas=None):
    """Names of violated checks of `bound`; the right rule must have none on the same pairs."""
    ends = (np.array([-width]), np.array([width]))
    failed = []
    for judged in (right, bound):
        checks = []
        for one, two in pairs:
            checks += audit.audit_bounds(one, two, ceiling, ends, epsilon, rule=rule(judged, betas))
        failed.append({check.name for check in audit.merge(checks) if not check.passed})
    assert failed[0] == set()
    return failed[1]


def test_half_range_is_caught():
    pair = sums([-1.0, -1.0], range(4)), sums([1.0, -1.0], range(4))
    failed = caught(half_range, [pair], 4.0, 4.0, 0.1, [0.05])
    assert {"|ln S/S'|", "worst log ratio, one release"} <= failed
    # On real envelopes too: exhaustive world of the trained network.
    pairs = audit.exhaustive_world(small(), UNIVERSE)
    report = audit.audit_pairs(pairs, QUERIES, 0.2, radii=range(4), rule=rule(half_range))
    assert not report.passed


def test_k_from_one_is_caught():
    n, radii = 40, range(40)
    pair = sums(np.ones(n), radii), sums(np.r_[np.ones(n - 1), -1.0], radii)
    failed = caught(from_one, [pair], 80.0, 100.0, 5.0, [2.5])
    assert "|f - f'| / min(S, S')" in failed and "worst log ratio, one release" in failed
    report = audit.audit_pairs(
        audit.exhaustive_world(small(), UNIVERSE), QUERIES, 12.0, radii=range(4), rule=rule(from_one)
    )
    assert "|f - f'| / min(S, S')" in {check.name for check in report.checks if not check.passed}


def test_sparse_back_filling_is_caught():
    n, at = 40, 20
    worlds = [threshold(ones, n, at, range(n + 2)) for ones in range(n + 1)]
    failed = caught(back_filled, list(itertools.pairwise(worlds)), 1.0, 2.0, 1.0, [0.5])
    assert {"|ln S/S'|", "worst log ratio, one release"} <= failed


@pytest.mark.parametrize("bound", [small_scale, steep])
def test_a_small_scale_and_a_steep_discount_are_caught(bound):
    n = 16
    worlds = [threshold(ones, n, 8, range(n + 2)) for ones in range(n + 1)]
    assert caught(bound, list(itertools.pairwise(worlds)), 1.0, 2.0, 1.0, [0.5])


def test_bounds_that_do_not_nest_are_caught():
    """Nominal radius: the box of radius k stands for that of radius k + 1; and an envelope tight by one per mille."""
    one, two = sums([-1.0, -0.5, 1.0], range(5)), sums([1.0, -0.5, 1.0], range(5))
    inwards = 0.001 * (np.arange(5) > 0)[:, None, None]
    shrunk = two[0] + inwards, two[1] - inwards
    nominal = (
        tuple(np.concatenate([end[:1], end[:-1]]) for end in one),
        tuple(np.concatenate([end[:1], end[:-1]]) for end in two),
    )
    for pair in ((one, shrunk), (shrunk, one), nominal):
        checks = audit.audit_bounds(*pair, 6.0, (np.array([-9.0]), np.array([9.0])), 1.0)
        assert not next(check for check in checks if check.name == "predictions nest").passed
    good = audit.audit_bounds(one, two, 6.0, (np.array([-9.0]), np.array([9.0])), 1.0)
    assert all(check.passed for check in good)


def test_every_check_looks_both_ways():
    """The verdict on a pair does not depend on which data set comes first, for a wide law beside a narrow one."""

    def fixed(scales):
        laws = iter([audit.Laws(np.zeros((1, 1)), {0.3: np.full((1, 1), s)}, np.full((1, 1), s)) for s in scales])
        return lambda *_: next(laws)

    worst = []
    for scales in ((1.0, 1.6), (1.6, 1.0)):
        side = threshold(3, 9, 5, range(4)), threshold(4, 9, 5, range(4))
        checks = audit.audit_bounds(*side, 1.0, RANGE, 1.0, 1e-2, rule=fixed(scales))
        worst.append([check.worst for check in checks if check.name != "predictions nest"])
        assert checks[-1].name == "hockey stick, one release" and not checks[-1].passed
    assert worst[0] == pytest.approx(worst[1], rel=1e-12)
    # Nesting: a box sticks out of the other's in one direction only.
    low, high = sums([-1.0, 0.5, 0.2, 0.3, 0.0], range(4))
    wide = low - 2.5 * (np.arange(4) >= 2)[:, None, None], high
    ends = (np.array([-9.0]), np.array([9.0]))
    for pair in (((low, high), wide), (wide, (low, high))):
        (check,) = (c for c in audit.audit_bounds(*pair, 9.0, ends, 1.0) if "nest" in c.name)
        assert not check.passed and check.worst == pytest.approx(low[3].item() - low[2].item() + 2.5)


def test_a_trainer_without_monotone_boxes_is_caught(monkeypatch):
    """A bounding engine whose boxes are widened by a private number: sound, not monotone."""
    original = driver.bound

    def loose(*args):
        *inner, boxes = original(*args)
        private = np.abs(boxes.nominal).sum() * 1e4 % 2.0 > 1.0
        wide = 0.05 * private * np.arange(len(boxes.lower))[:, None]
        return [*inner, type(boxes)(boxes.nominal, boxes.lower - wide, boxes.upper + wide)]

    pairs = audit.exhaustive_world(small(), UNIVERSE[:2])
    assert audit.audit_pairs(pairs, QUERIES, 1.0, radii=range(3)).passed
    monkeypatch.setattr(driver, "bound", loose)
    report = audit.audit_pairs(pairs, QUERIES, 1.0, radii=range(3))
    assert "boxes nest" in {check.name for check in report.checks if not check.passed}


# --- amplify before compose ---


def test_amplify_before_compose_is_caught():
    """Ten Cauchy releases on one secret subsample: each amplified and added up claims less than they spend together."""
    slots, size, releases = 6, 2, 10
    q, per_release = size / slots, 0.2
    base = math.log1p(math.expm1(per_release) / q)  # base budget of one release that amplifies to `per_release`
    scale = 1.0 / (2.0 * math.sinh(base / 2.0))
    samples = list(itertools.combinations(range(slots), size))
    data = np.zeros(slots), np.r_[1.0, np.zeros(slots - 1)]
    one, two = ([max(z[list(s)]) for s in samples] for z in data)
    weights = np.full(len(samples), 1.0 / len(samples))

    def density(centre, points):  # all releases land on the same point
        return releases * stats.cauchy.logpdf(points, centre, scale)

    spent = audit.mixture_loss(one, two, weights, np.linspace(-40.0, 40.0, 40_001), density)
    wrong = releases * per_release
    sound = math.log1p(q * math.expm1(releases * base))
    assert wrong < spent <= sound
    single = audit.mixture_loss(
        one, two, weights, np.linspace(-40.0, 40.0, 40_001), lambda c, y: stats.cauchy.logpdf(y, c, scale)
    )
    assert 0.9 * per_release < single <= per_release * (1 + 1e-9)


# --- neighbours ---


def test_pairs_that_are_not_neighbours_are_refused():
    problem = small()
    pairs = audit.exhaustive_world(problem, UNIVERSE[:2])
    far = (pairs[0][0], pairs[-1][1])
    with pytest.raises(PrivacyError, match="differ in"):
        audit.audit_pairs([far], QUERIES, 1.0, radii=range(3))
    zero = small("zero-out")
    one, two = (audit.replace(zero, records=p.records) for p in pairs[0])
    with pytest.raises(PrivacyError, match="zero-out"):
        audit.audit_pairs([(one, two)], QUERIES, 1.0, radii=range(3))
    with pytest.raises(PrivacyError, match="different recipes"):
        audit.audit_pairs([(pairs[0][0], one)], QUERIES, 1.0, radii=range(3))
    with pytest.raises(RadiusError):
        audit.audit_pairs(pairs[:1], QUERIES, 1.0, radii=(0, 2))
    with pytest.raises(PrivacyError, match="none"):
        audit.audit_pairs([], QUERIES, 1.0, radii=range(3))
    with pytest.raises(PrivacyError, match="too many"):
        audit.exhaustive_world(problem, UNIVERSE, slots=9)


# --- black box ---


def test_black_box_bound_is_a_lower_confidence_bound():
    """Randomised response of epsilon 0.5: at 95 % confidence the bound exceeds it in at most 5 % of the runs."""
    rng, epsilon, wrong, runs = np.random.default_rng(0), 0.5, 0, 400
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    for _ in range(runs):
        one, two = rng.random(600) < p, rng.random(600) < 1 - p
        found = audit.black_box(one.astype(float), two.astype(float), confidence=0.95)
        wrong += found.epsilon > epsilon
    # 5 % of 400 is 20; more than 38 happens with probability below 1e-4 if the level holds.
    assert wrong <= 38
    big = audit.black_box((rng.random(200_000) < p) * 1.0, (rng.random(200_000) < 1 - p) * 1.0)
    assert 0.9 * epsilon < big.epsilon <= epsilon


def test_black_box_with_delta():
    """A law that gives itself away with probability 0.01 and is equal otherwise spends no epsilon at delta = 0.01."""
    rng = np.random.default_rng(1)
    one = np.where(rng.random(100_000) < 0.01, 9.0, rng.normal(size=100_000))
    two = rng.normal(size=100_000)
    assert audit.black_box(one, two).epsilon > 1.0
    assert audit.black_box(one, two, delta=0.0105).epsilon < 0.05


def test_black_box_catches_the_half_range():
    """The A1 example at a claimed 0.1: true epsilon 0.69; 10^5 releases a side show 0.4 and more, ours stays below."""
    epsilon, rng, n = 0.1, np.random.default_rng(2), 100_000
    pair = sums([-1.0, -1.0], range(4)), sums([1.0, -1.0], range(4))
    ends = (np.array([-4.0]), np.array([4.0]))
    for bound, violates in ((half_range, True), (right, False)):
        laws = [laws_of(bound, *side, 4.0, ends, epsilon, [0.05]) for side in pair]
        points = [(float(law.nominal[0, 0]), float(law.scale[0, 0])) for law in laws]
        samples = [f + s * rng.standard_cauchy(n) for f, s in points]
        ratio = lambda y, a=points[0], b=points[1]: stats.cauchy.logpdf(y, *a) - stats.cauchy.logpdf(y, *b)  # noqa: E731
        found = audit.black_box(*samples, log_ratio=ratio)
        exact = float(audit_laws.pure_loss("cauchy", *points[0], *points[1]))
        assert found.epsilon <= exact
        assert (found.epsilon > 0.4 > epsilon) if violates else (found.epsilon <= epsilon)


def test_black_box_refuses_too_few_samples():
    with pytest.raises(PrivacyError, match="100"):
        audit.black_box(np.zeros(50), np.zeros(50))


# --- the command ---


@pytest.fixture
def certified(tmp_path, monkeypatch):
    """A model, a recipe, a table, queries and an envelope of the shipped example, in a folder."""
    from certify.cli import main
    from certify.tables import write_predictions

    model = Path(__file__).resolve().parent.parent / "examples" / "california" / "model.onnx"
    rng = np.random.default_rng(0)
    names = [f"x{i}" for i in range(8)]
    x = rng.normal(size=(60, 8))
    y = np.tanh(x[:, 0])
    monkeypatch.chdir(tmp_path)
    write_predictions(tmp_path / "train.csv", {**dict(zip(names, x.T, strict=True)), "y": y})
    write_predictions(tmp_path / "other.csv", {**dict(zip(names, x.T, strict=True)), "y": -y})
    write_predictions(tmp_path / "queries.csv", dict(zip(names, x[:3].T, strict=True)))
    (tmp_path / "recipe.toml").write_text(
        '[training]\nloss = "squared"\nsteps = 6\nclip = 0.2\n'
        'learning_rate = { schedule = "constant", value = 0.05 }\n'
        '[features]\nlower = -3\nupper = 3\n[target]\nnames = "y"\nlower = -1\nupper = 1\n'
        "[output]\nlower = -2\nupper = 2\n"
    )
    (tmp_path / "changed.toml").write_text((tmp_path / "recipe.toml").read_text().replace("0.05", "0.06"))
    words = ["certdp", "certify", str(model), "--data", "train.csv", "--recipe", "recipe.toml", "--radii", "0..4"]
    monkeypatch.setattr(sys, "argv", [*words, "-o", "run.envelope.safetensors"])
    try:
        main()
    except SystemExit as stop:
        assert not stop.code
    return model


def invoke(model, *words):
    app = typer.Typer()
    app.command()(command)
    base = ["run.envelope.safetensors", "--model", str(model), "--queries", "queries.csv", "--epsilon", "3"]
    return CliRunner().invoke(app, [*base, "--neighbours", "1", "--retrainings", "2", *words])


def test_command_passes_and_exits_2_on_a_violation(certified, monkeypatch):
    done = invoke(certified, "--data", "train.csv", "--recipe", "recipe.toml", "--json", "report.json")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "no violation found" in done.output and "PRIVATE" in done.output
    assert json.loads(Path("report.json").read_text())["passed"] is True
    # Another table, another recipe.
    done = invoke(certified, "--data", "other.csv")
    assert "own table" in str(done.exception)
    done = invoke(certified, "--data", "train.csv", "--recipe", "changed.toml")
    assert "training is not that of" in str(done.exception)
    # A release rule with half the noise it needs, wherever it is shipped from.
    shipped = audit.agtr.release_predictions

    def less_noise(*args, **options):
        released, private = shipped(*args, **options)
        smaller = {beta: s / 50.0 for beta, s in private.smooth.items()}
        return released, SimpleNamespace(nominal=private.nominal, smooth=smaller, scale=private.scale / 50.0)

    monkeypatch.setattr(audit.agtr, "release_predictions", less_noise)
    done = invoke(certified, "--data", "train.csv")
    assert done.exit_code == 2 and "VIOLATION" in done.output


def test_command_says_that_radii_on_demand_are_audited_up_to_the_first_gap(certified, monkeypatch):
    from certify.cli import main

    words = ["certdp", "certify", str(certified), "--data", "train.csv", "--recipe", "recipe.toml", "--radii", "auto"]
    words += ["--beta", "0.4", "--queries", "queries.csv", "-o", "auto.envelope.safetensors"]
    monkeypatch.setattr(sys, "argv", words)
    try:
        main()
    except SystemExit as stop:
        assert not stop.code
    app = typer.Typer()
    app.command()(command)
    words = ["auto.envelope.safetensors", "--model", str(certified), "--queries", "queries.csv", "--epsilon", "3"]
    words += ["--data", "train.csv", "--neighbours", "1", "--retrainings", "2", "--json", "auto.json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "chosen on demand" in done.output
    report = json.loads(Path("auto.json").read_text())
    assert all("beta" not in check["where"] or "beta 0.4" in check["where"] for check in report["checks"])
