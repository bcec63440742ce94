"""Private labels: indicator bounds, the index of the first uncertified radius, exact losses in small worlds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ags import directed_cauchy, linear, power_loss, recipe
from test_privacy_agtr import envelope

import privacy.classification as classification
from certify.driver import run
from certify.errors import CapabilityError, PrivacyError, RadiusError
from models.ir import Graph, Node, ParameterInfo
from models.ops import Affine, Input, Parameter
from privacy import noise
from privacy.mechanism import Mechanism
from privacy.query import Query

SLACK = 1 + 1e-9
boxes = st.lists(st.tuples(*[st.integers(-3, 3)] * 4), min_size=2, max_size=4)


# -- indicator bounds ---------------------------------------------------------------------------------------------


def bounds_of(box):
    """Bounds (2, 1, O): radius 0 at the middle of the box, radius 1 the box; integers, so that ties occur."""
    low = np.array([min(a, b) for a, b, *_ in box], float)
    high = np.array([max(a, b) for a, b, *_ in box], float)
    middle = np.floor((low + high) / 2)
    return np.stack([middle, low])[:, None], np.stack([middle, high])[:, None]


@given(boxes)
def test_indicator_bounds_are_sound(box):
    lower, upper = bounds_of(box)
    surely, possibly = classification.indicator_bounds(lower, upper)
    ranges = [range(int(a), int(b) + 1) for a, b in zip(lower[1, 0], upper[1, 0], strict=True)]
    winners = {int(np.argmax(point)) for point in itertools.product(*ranges)}
    for c in range(len(box)):
        if c in winners:
            assert possibly[1, 0, c] == 1.0
        if surely[1, 0, c] == 1.0:
            assert winners == {c}
    nominal = int(np.argmax(lower[0, 0]))
    np.testing.assert_array_equal(surely[0], possibly[0])
    assert surely[0, 0, nominal] == 1.0 and surely[0].sum() == 1.0


@given(boxes, st.integers(0, 2), st.integers(0, 2))
def test_indicator_bounds_are_monotone(box, left, right):
    lower, upper = bounds_of(box)
    surely, possibly = classification.indicator_bounds(lower, upper)
    lower[1] -= left
    upper[1] += right
    wide_surely, wide_possibly = classification.indicator_bounds(lower, upper)
    assert np.all(wide_surely <= surely) and np.all(wide_possibly >= possibly)


@given(boxes)
def test_one_possible_class_is_a_sure_one(box):
    surely, possibly = classification.indicator_bounds(*bounds_of(box))
    alone = possibly[1].sum(axis=-1) == 1.0
    assert np.array_equal(alone, surely[1].sum(axis=-1) == 1.0)
    assert np.array_equal(~alone, classification.uncertified(surely, possibly)[1])
    assert np.all(possibly[1].sum(axis=-1) >= 1.0)


def test_a_threshold_cuts_one_output():
    lower = np.array([0.5, 0.2, -0.1, -9.0]).reshape(4, 1, 1)
    upper = np.array([0.5, 0.7, 0.8, 9.0]).reshape(4, 1, 1)
    surely, possibly = classification.indicator_bounds(lower, upper)
    assert surely.ravel().tolist() == [1, 1, 0, 0] and possibly.ravel().tolist() == [1, 1, 1, 1]
    surely, possibly = classification.indicator_bounds(lower, upper, 0.5)  # 1 means above
    assert surely.ravel().tolist() == [0, 0, 0, 0] and possibly.ravel().tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("first_uncertified", [1, 2, 3, 4])
@pytest.mark.parametrize("classes", [1, 3])
def test_the_first_uncertified_radius_sets_the_exponent(first_uncertified, classes):
    """First uncertified radius K + 1: S = size e^{-beta K}."""
    radii, beta = 6, 0.2
    surely = np.zeros((radii, 1, classes))
    possibly = np.ones((radii, 1, classes))
    surely[:first_uncertified, 0, 0] = 1.0
    possibly[:first_uncertified, 0, 1:] = 0.0
    for name, size in (("cauchy", min(2, classes)), ("box-power", 1)):
        made = Mechanism.make(name, 3.0, 0.0, classes, (beta,))
        bound = classification.indicator_smooth_bounds(surely, possibly, made)[beta]
        size = 1 if classes == 1 else size
        assert bound[0] == pytest.approx(size * math.exp(-beta * (first_uncertified - 1)), rel=1e-9)


def test_inputs_add_up_in_one_vector_and_classes_do_not():
    """Five classes, two inputs, all uncertified: the l1 norm of a change is 4, not 10."""
    surely, possibly = np.zeros((3, 2, 5)), np.ones((3, 2, 5))
    surely[0, :, 0] = 1.0
    possibly[0] = surely[0]
    for name, size in (("cauchy", 4.0), ("box-power", 1.0)):
        made = Mechanism.make(name, 1.0, 0.0, 10)
        bounds = classification.indicator_smooth_bounds(surely, possibly, made)
        assert all(s[0] == pytest.approx(size, rel=1e-9) for s in bounds.values())


# -- exhaustive small worlds --------------------------------------------------------------------------------------


def softmax_model(classes=3) -> Graph:
    weight = np.linspace(-0.2, 0.2, classes)[:, None]
    parameters = (ParameterInfo("w", weight, True),)
    nodes = (Node("x", Input(1)), Node("w", Parameter(classes, "w")), Node("y", Affine(classes, 1), (0, 1)))
    return Graph(nodes, 2, (1,), parameters)


BINARY = [(1.0, 1.0), (-1.0, 1.0), (1.0, 0.0)]
THREE = [(1.0, 0.0), (1.0, 2.0), (-1.0, 1.0)]


def world(graph, facts, universe, slots, rows, mechanism):
    """(indicators (W, Q, C), scales (W, Q), pairs) of every data set; one group for each input."""
    sets = [d for n in (slots - 1, slots) for d in itertools.product(range(len(universe)), repeat=n)]
    filled = [d + (None,) * (slots - len(d)) for d in sets]
    ones, scales, kept = [], [], []
    for d in sets:
        data = np.array([universe[r] for r in d])
        made = run(graph, facts, data[:, :1], data[:, 1], range(4), threads=1)
        query = Query.make(made, graph, (-np.inf, np.inf))
        surely, possibly = classification.indicator_bounds(*query.bounds(rows))
        bounds = classification.indicator_smooth_bounds(surely, possibly, mechanism)
        ones.append(surely[0])
        kept.append(bounds)
        scales.append(noise.noise_scale(bounds, mechanism.pairs))
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(len(sets)), 2)
        if sum(a != b for a, b in zip(filled[i], filled[j], strict=True)) == 1
    ]
    return np.array(ones), np.array(scales), kept, pairs


def loss(mechanism, f, s, g, t):
    if mechanism.family.name == "cauchy":
        ways = ((f, s, g, t), (g, t, f, s))
        return max(sum(directed_cauchy(a, x, b, y) for a, b in zip(p, q, strict=True)) for p, x, q, y in ways)
    return power_loss(f, s, g, t, mechanism.family)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_binary_labels_are_dp(epsilon):
    facts = recipe(3, rate=1.0, slots=4, loss="logistic")
    mechanism = Mechanism.make(None, epsilon, 0.0, 1)
    rows = np.array([[1.0], [-0.5]])
    ones, scales, kept, pairs = world(linear(0.05), facts, BINARY, 4, rows, mechanism)
    worst, flips = 0.0, 0
    for i, j in pairs:
        for q in range(2):
            moved = abs(ones[i, q, 0] - ones[j, q, 0])
            flips += int(moved)
            for beta in kept[i]:
                s, t = kept[i][beta][q], kept[j][beta][q]
                assert moved <= min(s, t) and abs(math.log(s / t)) <= beta + 1e-11
            worst = max(worst, loss(mechanism, ones[i, q], scales[i, q], ones[j, q], scales[j, q]))
    assert flips and worst <= epsilon * SLACK
    if epsilon == 0.5:  # some label flips at full sensitivity: the claim is attained, 1.5 times less noise breaks it
        i, j, q = next((i, j, q) for i, j in pairs for q in range(2) if ones[i, q, 0] != ones[j, q, 0])
        assert loss(mechanism, ones[i, q], scales[i, q] / 1.5, ones[j, q], scales[j, q] / 1.5) > epsilon


@pytest.mark.parametrize("family", ["cauchy", "l1-power", "box-power"])
def test_one_hot_labels_are_dp(family):
    facts = recipe(2, rate=1.0, slots=3, loss="cross-entropy")
    mechanism = Mechanism.make(family, 1.0, 0.0, 3)
    ones, scales, kept, pairs = world(softmax_model(), facts, THREE, 3, np.array([[1.0]]), mechanism)
    assert len({tuple(o[0]) for o in ones}) >= 2
    worst, seen = 0.0, set()
    for i, j in pairs:
        for beta in kept[i]:
            assert abs(math.log(kept[i][beta][0] / kept[j][beta][0])) <= beta + 1e-11
        case = (tuple(ones[i, 0]), scales[i, 0], tuple(ones[j, 0]), scales[j, 0])
        if case not in seen:  # most pairs have the same law
            seen.add(case)
            worst = max(worst, loss(mechanism, ones[i, 0], scales[i, 0], ones[j, 0], scales[j, 0]))
    assert worst <= 1.0 * SLACK


# -- the call -----------------------------------------------------------------------------------------------------


def constant_bounds(nominal, radii, step):
    def bounds(rows):
        f = np.broadcast_to(np.asarray(nominal, float), (len(rows), len(nominal)))
        k = np.array(radii, float)[:, None, None]
        return f - step * k, f + step * k

    return bounds


def labels(nominal, epsilon, step=0.001, radii=range(5), queries=1, made=None, **options):
    inputs = np.arange(float(queries))[:, None]
    made = envelope(tuple(radii)) if made is None else made
    return classification.labels_from_bounds(made, constant_bounds(nominal, radii, step), inputs, epsilon, **options)


def test_labels_are_the_argmax_when_noise_is_small():
    one = labels([0.1, 0.9, 0.3], 60.0, queries=3)
    assert one.labels.tolist() == [1, 1, 1] and one.scores.shape == (3, 3) and one.labels.dtype == np.int64
    assert labels([0.4], 30.0).labels.tolist() == [1] and labels([-0.4], 30.0).labels.tolist() == [0]
    assert labels([0.4], 30.0, threshold=0.5).labels.tolist() == [0]


@pytest.mark.parametrize(("joint", "releases", "dimension"), [(True, 1, 6), (False, 2, 3)])
def test_the_guarantee_counts_vectors(joint, releases, dimension):
    g = labels([0.1, 0.9, 0.3], 2.0, queries=2, joint=joint).guarantee
    assert (g.releases, g.dimension, g.epsilon, g.delta) == (releases, dimension, 2.0, 0.0)
    assert g.epsilon_per_release == 2.0 / releases
    g = labels([0.1, 0.9, 0.3], 2.0, queries=2, joint=joint, per_query=True).guarantee
    assert (g.releases, g.dimension, g.epsilon, g.epsilon_per_release) == (2, 3, 4.0, 2.0)


def test_flip_rate_matches_the_law():
    """Binary Cauchy with known scale: the label flips with the probability of the law (error rate 1e-6)."""
    queries = 4000
    one = labels([0.5], 1.0 * queries, queries=queries, joint=False, betas=(0.7,), step=0.2)
    # Certified at radii 0..2 (0.5 - 0.2 k > 0), first uncertified radius 3: S = e^{-1.4}.
    scale = math.exp(-1.4) / (2 * math.sinh(0.5))
    flips = 0.5 - math.atan(0.5 / scale) / math.pi
    found = np.mean(one.labels == 0)
    assert abs(found - flips) < 5 * math.sqrt(flips * (1 - flips) / queries)


def test_scores_are_not_clipped():
    one = labels([0.1, 0.9], 0.01, queries=50, joint=False)
    assert np.any(one.scores > 1.0) and np.any(one.scores < 0.0)


def test_unsuitable_envelopes_and_bounds_are_refused():
    with pytest.raises(CapabilityError):
        labels([0.5], 1.0, made=envelope(monotone=False))
    with pytest.raises(RadiusError, match="gaps"):
        labels([0.5], 1.0, radii=(0, 1, 4))
    with pytest.raises(PrivacyError, match="threshold"):
        labels([0.5], 1.0, threshold=math.nan)
    with pytest.raises(PrivacyError, match="nominal"):
        labels([math.nan], 1.0)
    auto = envelope(tuple(range(5)), auto={"beta": 0.2, "queries_sha256": ""})
    with pytest.raises(PrivacyError, match="on demand"):
        labels([0.5, 0.1], 3.0, made=auto)


def test_repeated_inputs_cost_nothing():
    made = envelope(tuple(range(5)))
    inputs = np.array([[1.0], [1.0], [2.0]])
    one = classification.labels_from_bounds(made, constant_bounds([0.4], range(5), 0.01), inputs, 2.0, joint=False)
    assert one.guarantee.releases == 2 and one.scores[0] == one.scores[1] != one.scores[2]


def test_the_command_releases_labels(tmp_path, monkeypatch, capsys):
    import json
    import sys
    from pathlib import Path

    import models
    from certify.cli import main
    from certify.envelope import write
    from certify.tables import write_predictions

    model = Path(__file__).resolve().parent.parent / "examples" / "california" / "model.onnx"
    x = np.random.default_rng(0).normal(size=(50, 8))
    facts = recipe(3, rate=0.1, slots=50, loss="logistic")
    write(tmp_path / "c.envelope.safetensors", run(models.read(model), facts, x, (x[:, 0] > 0) * 1.0, range(6)))
    write_predictions(tmp_path / "q.csv", {f"x{i}": x[:4, i] for i in range(8)})
    monkeypatch.chdir(tmp_path)
    words = ["certdp", "predict", "c.envelope.safetensors", "--model", str(model), "--data", "q.csv", "-o", "out.csv"]
    monkeypatch.setattr(sys, "argv", [*words, "--epsilon", "2", "--classify", "--separate"])
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, capsys.readouterr().err
    found = np.loadtxt("out.csv", delimiter=",", skiprows=1)
    assert (tmp_path / "out.csv").read_text().startswith("label,score\n") and found.shape == (4, 2)
    assert np.array_equal(found[:, 0], found[:, 1] > 0.5)
    assert json.loads((tmp_path / "out.guarantee.json").read_text())["releases"] == 4


def test_a_trained_classifier_from_end_to_end():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(300, 1))
    y = (x[:, 0] > 0).astype(float)
    graph = linear(0.0)
    facts = recipe(20, rate=1.0, slots=300, loss="logistic")
    made = run(graph, facts, x, y, range(31), threads=1)
    one = classification.classify(made, graph, np.array([[0.9], [-0.9]]), 8.0)
    assert one.labels.tolist() == [1, 0] and one.guarantee.epsilon == 8.0
