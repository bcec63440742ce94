"""Side by side with the reference trajectories in data/agt: numbers of the public AGT implementation (see NOTICE).

Ours is equal to 1e-12 or outward by rounding only, in the same mode (midpoint-radius against ``rump``, natural against
``exact``); the exact-product mode is inside theirs.  Measured, relative to ``max(1, |value|)``:

==========================================  =======  =======
quantity                                    inward   outward
==========================================  =======  =======
nominal parameters                          8.9e-15  8.9e-15
ends of boxes, linear models (mse, bce)     0        7.4e-12
ends of boxes, networks (mse)               0        1.0e-12
logits over these boxes                     0        3.4e-11
per-record gradients (mse, bce, ce)         0        9.6e-14
the same without outward rounding           2.7e-16  2.2e-16
aggregates of a batch, radii 1, 3 and all   0        3.8e-13
==========================================  =======  =======

The reference rounds to nearest and keeps no account of rounding errors; ours rounds outward (the ladder, proportional
to the radius and accumulating over the steps) and holds sums of gradients on a grid of 2^-44 of the clip.  No other
difference was found: the mse gradient is ``2 (p - y)``, bce and cross-entropy take logits, and even the softmax bounds
are the same.  The reference charges the radius to every minibatch, as ours does in windows of one step.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from builders import final, mlp, stepwise, window

from models.losses import CrossEntropy, Logistic, Squared
from models.ops import Interval
from solvers.gradients import FixedPoint
from solvers.ibp import Plan, output_bounds, record_gradients, step
from solvers.window import Boxes

DATA = Path(__file__).parent / "data" / "agt"
MANIFEST = json.loads((DATA / "manifest.json").read_text())
CASES = {name: case for name, case in MANIFEST["cases"].items() if "steps" in case}
MODES = {"rump": "midpoint-radius", "exact": "natural"}
LOSSES = {"mse": (Squared(), 1), "binary_cross_entropy": (Logistic(), 1), "cross_entropy": (CrossEntropy(), 3)}
#: How far ours may be outside the reference: outward rounding only.  The reference is never outside ours.
OUTWARD = 2e-11


def size(values: np.ndarray) -> np.ndarray:
    return np.maximum(1.0, np.abs(values))


def assert_equal_or_outward(ours, lower, upper, inward=0.0, outward=OUTWARD):
    """``ours`` (lower, upper) contains the reference, by no more than rounding."""
    for ahead in ((ours[0] - lower) / size(lower), (upper - ours[1]) / size(upper)):
        assert ahead.max() <= inward
        assert ahead.min() >= -outward


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


def trained(name: str, data, products: str):
    """Our boxes at the steps of the case's rows, and the graph."""
    case = CASES[name]
    shapes = [s for s in case["shapes"] if len(s) == 2]
    graph = mlp([*(s[1] for s in shapes), shapes[-1][0]], products=products)
    per_epoch, b = case["batches_per_epoch"], case["batch"]
    batches = [range((t % per_epoch) * b, (t % per_epoch + 1) * b) for t in range(case["steps"])]
    config = case["config"]
    made = window(
        graph, data["X"], data["Y"].reshape(case["n"], -1), batches, tuple(case["ks"]), LOSSES[config["loss"]][0],
        config["learning_rate"], config["clip_gamma"], theta=data["init"],
    )  # fmt: skip
    plan, boxes, found = Plan(graph), made.boxes, {}
    for t, one in enumerate(made.steps):
        boxes = step(made, plan, boxes, one, None, 1)
        found[t + 1] = boxes
    whole = stepwise(made)
    np.testing.assert_array_equal(whole.lower, boxes.lower)
    return graph, [found[t] for t in case["rows"]]


@pytest.mark.parametrize(("name", "matmul"), [(name, mode) for name in CASES for mode in CASES[name]["matmuls"]
                                              if mode in MODES])  # fmt: skip
def test_trajectories_are_equal_or_outward_by_rounding_only(name, matmul):
    data = load(name)
    graph, rows = trained(name, data, MODES[matmul])
    for row, boxes in enumerate(rows):
        assert (np.abs(boxes.nominal - data["n"][row]) / size(data["n"][row])).max() < 1e-13
        for j, k in enumerate(CASES[name]["ks"]):
            lower, upper = (data[f"{end}_{matmul}_k{k}"][row] for end in "lu")
            assert_equal_or_outward((boxes.lower[j], boxes.upper[j]), lower, upper)
            assert (upper - lower).max() > 1e-5, "the reference's box is not trivial"
    last = rows[-1]
    radii = CASES[name]["ks"]
    low, high = output_bounds(graph, last.lower, last.upper, data["X_test"], radii)
    for j, k in enumerate(radii):
        assert_equal_or_outward(
            (low[j], high[j]), data[f"logit_l_{matmul}_k{k}"], data[f"logit_u_{matmul}_k{k}"], outward=5e-11
        )
    values = graph.evaluate(data["X_test"], last.nominal)
    np.testing.assert_allclose(values, data["logit_n"], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in CASES if "rump" in CASES[name]["matmuls"]])
def test_exact_products_are_inside_the_midpoint_radius_reference(name):
    """For linear models the two are equal (the features are known), so ours may be outside by its rounding."""
    data = load(name)
    for row, boxes in enumerate(trained(name, data, "natural")[1]):
        for j, k in enumerate(CASES[name]["ks"]):
            lower, upper = (data[f"{end}_rump_k{k}"][row] for end in "lu")
            slack = OUTWARD if len(CASES[name]["shapes"]) == 2 else 1e-12
            assert (boxes.lower[j] >= lower - slack * size(lower)).all()
            assert (boxes.upper[j] <= upper + slack * size(upper)).all()
    if name == "c_mlp_full":
        widths = boxes.width / [np.mean(data[f"u_rump_k{k}"][-1] - data[f"l_rump_k{k}"][-1]) for k in CASES[name]["ks"]]
        np.testing.assert_allclose(widths, [0.9934, 0.9862, 0.9681, 0.9245, 0.8296], atol=1e-4)


def unit(loss: str, matmul: str):
    data = load("unit_gradbounds")
    kind, outputs = LOSSES[loss]
    graph = mlp((4, 6, 5, outputs), products=MODES[matmul])
    theta, lower, upper = (data[f"{loss}_theta_{end}"] for end in "nlu")
    x, y = data[f"{loss}_X"], data[f"{loss}_Y"].reshape(12, -1)
    gamma = MANIFEST["cases"]["unit_gradbounds"]["gamma"]
    made = window(graph, x, y, [range(12)], (1, 3, 12), kind, rate=1.0, clip=gamma, theta=theta)
    made = type(made)(
        **{f: getattr(made, f) for f in made.__dataclass_fields__ if f != "known"},
        known=(Boxes(theta, np.tile(lower, (3, 1)), np.tile(upper, (3, 1))),),
    )
    return data, graph, made


def entries(plan: Plan, found: dict, ladder: float | None):
    """Contributions of a single term each as one array or pair of arrays ``(P, n)``."""
    parts = []
    for name, contributions in found.items():
        (one,) = contributions
        parts.append((plan.offsets[name], one.dense(ladder) if hasattr(one, "dense") else one))
    parts = [part for _, part in sorted(parts, key=lambda part: part[0])]
    if ladder is None:
        return np.concatenate(parts)
    return Interval(*(np.concatenate([part[end] for part in parts]) for end in (0, 1)))


@pytest.mark.parametrize("matmul", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_per_record_gradient_bounds(loss, matmul):
    """Unclipped; with the ladder of radius 1 outward of the reference, without it equal to the last digits."""
    data, graph, made = unit(loss, matmul)
    plan, scale = Plan(graph), FixedPoint.make(made.clip, 12).scale
    lower, upper = data[f"{loss}_{matmul}_gl"].T, data[f"{loss}_{matmul}_gu"].T
    box = Interval(made.boxes.lower[0], made.boxes.upper[0])
    for ladder, inward, outward in ((0.0, 1e-15, 1e-15), (2.0, 0.0, 1e-12)):
        shared = plan.shared_interval(*box, ladder)
        found, bad = record_gradients(plan, made, made.records.features, made.records.targets, shared, ladder, scale)
        g = entries(plan, found, ladder)
        assert not len(bad)
        assert_equal_or_outward((g.lower / scale, g.upper / scale), lower, upper, inward, outward)
    shared = plan.shared(made.boxes.nominal)
    found, _ = record_gradients(plan, made, made.records.features, made.records.targets, shared, None, scale)
    np.testing.assert_allclose(entries(plan, found, None) / scale, data[f"{loss}_gn"].T, rtol=0.0, atol=1e-15)


@pytest.mark.parametrize("matmul", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_and_aggregates_of_the_unit_networks(loss, matmul):
    """One step of rate 1 from the boxes is minus the reference's aggregate; radius 12 is the whole batch."""
    data, graph, made = unit(loss, matmul)
    low, high = output_bounds(graph, made.boxes.lower, made.boxes.upper, data[f"{loss}_X"], made.radii)
    after = final(made)
    for j, k in enumerate(made.radii):
        logits = (data[f"{loss}_{matmul}_logit_{end}"] for end in "lu")
        assert_equal_or_outward((low[j], high[j]), *logits, outward=1e-12)
        sums = (made.boxes.upper[j] - after.upper[j], made.boxes.lower[j] - after.lower[j])
        bounds = (data[f"{loss}_{matmul}_agg_{end}_k{k}"] for end in "lu")
        assert_equal_or_outward(sums, *bounds, outward=1e-12)
    moved = made.boxes.nominal - after.nominal
    np.testing.assert_allclose(moved, data[f"{loss}_agg_n"], rtol=0.0, atol=5e-15)  # half a grid unit
