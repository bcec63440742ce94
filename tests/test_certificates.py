"""Relational certificates on their way from a run through the file into private releases."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors
from builders import mlp
from safetensors.numpy import save_file

from certify import envelope as ev
from certify.driver import prepare, run
from certify.errors import EnvelopeError, PrivacyError
from certify.recipe import from_dict
from privacy import ags, agtr, audit, smooth
from privacy.ags import AgsPlan, release_parameters
from privacy.on_demand import certify_on_demand
from privacy.query import Query
from solvers.errors import UnsupportedWindowError


def facts(slots, adjacency="replace-one", steps=3, size=None, loss="squared", contraction=0.9, rate=0.4):
    batches = {"slots": slots} if size is None else {"slots": slots, "kind": "shuffled", "size": size, "seed": 1}
    return from_dict(
        {
            "training": {
                "loss": loss, "clip": 0.5, "steps": steps, "contraction": contraction,
                "learning_rate": {"schedule": "constant", "value": rate},
            },
            "batches": batches,
            "privacy": {"adjacency": adjacency},
            "features": {"lower": -1, "upper": 1},
            "output": {"lower": -2, "upper": 2},
        }
    )  # fmt: skip


def records(slots, seed=0):
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (slots, 2)), rng.uniform(-1, 1, slots)


def certified(radii=range(4), slots=40, **method):
    return run(mlp((2, 1)), facts(slots), *records(slots), radii, **method)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.envelope.safetensors"


# --- the run ---


@pytest.mark.parametrize("backend", ["ibp", "meanvalue", "relational"])
def test_linear_models_get_a_certificate_unasked_and_it_survives_the_file(backend, path):
    envelope = certified(backend=backend)
    found = envelope.stacked_difference()
    assert found.shape == (4, 1, 3) and (found[0] == 0).all() and (found[1:] > 0).all()
    lower, upper = envelope.stacked()
    assert (found.max(axis=1) <= (upper - lower) * (1 + 1e-15)).all()
    ev.write(path, envelope)
    np.testing.assert_array_equal(ev.read(path).stacked_difference(), found)
    assert [line for line in ev.check(path) if line.name == "certificate"][0].detail == "present"


def test_the_boxes_of_ibp_are_the_same_with_and_without_a_certificate():
    one, two = certified(), certified(relational=False)
    assert two.difference is None and two.stacked_difference() is None
    for a, b in zip(one.stacked(), two.stacked(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_network_gets_a_certificate_neither_unasked_nor_asked():
    assert run(mlp((2, 2, 1)), facts(8), *records(8), (0, 1)).difference is None
    with pytest.raises(UnsupportedWindowError, match="softplus"):
        run(mlp((2, 2, 1)), facts(8), *records(8), (0, 1), relational=True)


@pytest.mark.parametrize("method", [{}, {"F": 4, "stride": 1}], ids=["default", "overlapping"])
def test_a_resumed_run_has_the_same_certificate_bit_for_bit(method, tmp_path):
    recipe, data, file = facts(30, steps=6, size=10), records(30), tmp_path / "state.safetensors"
    method = {"backend": "relational", "F": 2, **method}
    whole = run(mlp((2, 1)), recipe, *data, range(3), **method)
    assert whole.stacked_difference().shape[1] > 1  # classes of slots

    class Stop(Exception):
        pass

    def interrupt(done, total, boxes):
        if done >= 2:
            raise Stop

    with pytest.raises(Stop):
        run(mlp((2, 1)), recipe, *data, range(3), checkpoint=file, progress=interrupt, **method)
    again = run(mlp((2, 1)), recipe, *data, range(3), checkpoint=file, resume=True, **method)
    np.testing.assert_array_equal(whole.stacked_difference(), again.stacked_difference())


# --- the file ---


@pytest.fixture
def raw(path):
    """A file with a certificate as (JSON object without digest, tensors), for writing it with mistakes."""
    ev.write(path, certified((0, 1, 2)))
    with safetensors.safe_open(str(path), framework="numpy") as file:
        obj = json.loads(file.metadata()["certdp"])
        del obj["content_sha256"]
        return obj, {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118


MISTAKES = {
    "negative": (lambda t: t["difference/1/w0"].__setitem__((0, 0, 1), -1e-9), "'difference/1/w0' at [0, 0, 1]"),
    "not finite": (lambda t: t["difference/2/b0"].__setitem__((0, 0), np.inf), "'difference/2/b0' at [0, 0]"),
    "shrinking": (lambda t: t["difference/2/w0"].fill(0.0), "'difference/1/w0' at [0, 0, 0]"),
    "missing": (lambda t: t.pop("difference/2/b0"), "'difference/2/b0': missing"),
    "at radius 0": (lambda t: t.update({"difference/0/b0": t["difference/1/b0"]}), "'difference/0/b0': found"),
    "no class": (lambda t: t.update({"difference/1/b0": t["difference/1/b0"][0]}), "[1]"),
    "classes differ": (lambda t: t.update({"difference/1/w0": np.tile(t["difference/1/w0"], (2, 1, 1))}), "[2, 1, 2]"),
    "no classes": (lambda t: t.update({k: v[:0] for k, v in t.items() if k[:4] == "diff"}), "[0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_certificate_of_an_envelope_that_was_read_is_not_negative_and_grows_with_the_radius(mistake, path, raw):
    obj, tensors = raw
    change, found = MISTAKES[mistake]
    change(tensors)
    save_file(tensors, str(path), metadata={"certdp": json.dumps(obj)})
    with pytest.raises(EnvelopeError) as info:
        ev.read(path)
    assert found in str(info.value)


# --- releases ---


UNIVERSE = [((0.5, -1.0), 1.0), ((-1.0, 1.0), -1.0), ((1.0, 1.0), 0.3), None]
QUERIES = np.array([[0.3, -0.2], [1.0, 1.0]])


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
@pytest.mark.parametrize("backend", ["ibp", "relational"])
def test_shipped_rule_passes_the_exhaustive_world_with_certificates(adjacency, backend):
    problem = prepare(mlp((2, 1)), facts(3, adjacency), np.zeros((3, 2)), np.zeros(3))
    pairs = audit.exhaustive_world(problem, UNIVERSE)
    report = audit.audit_pairs(pairs, QUERIES, 1.0, radii=range(4), backend=backend)
    assert report.passed
    checks = {check.name: check for check in report.checks}
    assert checks["certificates nest"].worst <= 0.0
    assert checks["|f - f'| / min(S, S')"].worst > 0.1


def test_audit_finds_a_certificate_that_is_too_small(monkeypatch):
    problem = prepare(mlp((2, 1)), facts(3), np.zeros((3, 2)), np.zeros(3))
    pairs = audit.exhaustive_world(problem, UNIVERSE)
    shipped = Query.differences
    monkeypatch.setattr(Query, "differences", lambda self, rows: 0.3 * shipped(self, rows))
    report = audit.audit_pairs(pairs[:60], QUERIES, 20.0, radii=range(4), backend="relational")
    assert not {check.name: check for check in report.checks}["|f - f'| / min(S, S')"].passed


def smooth_of(envelope, rows=QUERIES):
    query = Query.make(envelope, mlp((2, 1)))
    lower, upper = query.bounds(rows)
    _, private = agtr.release_predictions(
        lower[0], lower, upper, query.ceiling(rows), query.output_range, 4.0, betas=[0.15],
        difference=query.differences(rows),
    )  # fmt: skip
    return next(iter(private.smooth.values()))


def test_certificates_lower_the_noise_of_predictions_and_never_raise_it():
    envelope = certified(range(51), slots=400, backend="relational")
    without = replace(envelope, difference=None)
    assert (smooth_of(envelope) < 0.7 * smooth_of(without)).all()
    one, two = certified(), certified(relational=False)
    assert (smooth_of(one) <= smooth_of(two)).all()


def test_predictions_use_the_certificate_of_the_envelope(monkeypatch):
    envelope, seen = certified(range(9), backend="relational"), []
    shipped = agtr.smooth_bounds

    def spy(*arguments):
        seen.append(arguments)
        return shipped(*arguments)

    monkeypatch.setattr(agtr, "smooth_bounds", spy)
    from privacy.query import predict

    predict(envelope, mlp((2, 1)), QUERIES, 1.0)
    predict(replace(envelope, difference=None), mlp((2, 1)), QUERIES, 1.0)
    assert seen[0][-1].shape[0] == 8 and seen[1][-1] is None


def test_private_learning_uses_certificates(monkeypatch):
    """The smooth bound of a window with and without, and at least the distance of a real neighbour."""
    recipe, (x, y) = facts(400, steps=8, loss="huber"), records(400)
    plan, found = AgsPlan.make([8], 6.0, radius=50, betas=(0.15,)), []
    shipped = ags.smooth_bounds

    def spy(*arguments):
        found.append((shipped(*arguments), shipped(*arguments[:-1])))
        return found[-1][0]

    monkeypatch.setattr(ags, "smooth_bounds", spy)
    release_parameters(mlp((2, 1)), recipe, x, y, plan, threads=1, backend="relational")
    with_it, without = found[0]
    assert all(with_it[beta] < 0.8 * without[beta] for beta in with_it)
    other_x, other_y = x.copy(), y.copy()
    other_x[0], other_y[0] = (1.0, 1.0), 1e3
    envelopes = [run(mlp((2, 1)), recipe, *data, (0,)) for data in ((x, y), (other_x, other_y))]
    order = {"l1": 1, "l2": 2, "linf": np.inf}[plan.mechanisms(3)[0].norm]
    moved = np.linalg.norm(envelopes[0].stacked()[0][0] - envelopes[1].stacked()[0][0], order)
    assert 0.3 * min(float(s[0]) for s in with_it.values()) < moved <= min(float(s[0]) for s in with_it.values())


def test_radii_picked_by_the_data_need_boxes_that_do_not_depend_on_each_other():
    arguments = mlp((2, 1)), facts(40), *records(40), 0.5, QUERIES
    with pytest.raises(PrivacyError, match="depends on the others"):
        certify_on_demand(*arguments, backend="relational")
    assert certify_on_demand(*arguments, backend="meanvalue").difference is None


def test_certificates_of_the_wrong_shape_are_refused():
    wrong = [np.zeros((2, 1, 1, 1)), np.zeros((3, 0, 1, 1)), np.full((3, 1, 1, 1), np.nan), np.zeros((3, 1, 1))]
    for difference in wrong:
        with pytest.raises(PrivacyError, match="difference"):
            smooth.check_difference(difference, (3, 1, 1, 1))
