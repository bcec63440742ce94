import copy
import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from certify import recipe as recipes
from certify.errors import DataError, RecipeError
from certify.recipe import CALIFORNIA, explain, from_dict, load, loads, markdown

ROOT = Path(__file__).resolve().parent.parent
HOUSING = ROOT / "examples" / "california" / "california_housing.parquet"
INF, NAN = math.inf, math.nan
MINIMAL = """
[training]
loss = "squared"
steps = 4
clip = 1
[training.learning_rate]
schedule = "constant"
value = 0.5
"""
BASE = tomllib.loads(MINIMAL)


def changed(path, value=...):
    """BASE with one field set, or removed if no value is given."""
    data = copy.deepcopy(BASE)
    *sections, key = path.split(".")
    section = data
    for name in sections:
        section = section.setdefault(name, {})
    if value is ...:
        del section[key]
    else:
        section[key] = value
    return data


def refusal(data):
    with pytest.raises(RecipeError) as info:
        from_dict(data, "recipe.toml")
    message = str(info.value)
    assert message.startswith("recipe.toml: ") and "\n" not in message
    return message.removeprefix("recipe.toml: ")


def rates(steps=4, **learning_rate):
    data = changed("training.learning_rate", learning_rate)
    data["training"]["steps"] = steps
    return from_dict(data).learning_rates()


# --- reading ---


def test_the_least_recipe_has_public_defaults():
    r = loads(MINIMAL)
    assert r.privacy.adjacency == "replace-one" and r.batches.kind == "full" and r.training.contraction == 1
    assert r.model.trainable is None and r.model.frozen == () and r.output is None
    assert r.arithmetic.products == "natural" and r.training.normaliser is None
    assert r.total_steps() == 4 and r.learning_rates().tolist() == [0.5] * 4


def test_a_recipe_is_frozen_and_has_a_hash():
    r = loads(CALIFORNIA)
    with pytest.raises(ValidationError, match="frozen"):
        r.training.clip = 2.0
    assert hash(r) == hash(loads(CALIFORNIA)) and len({r, loads(CALIFORNIA), loads(MINIMAL)}) == 2


def test_load_names_the_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(CALIFORNIA, encoding="utf-8")
    assert load(path) == loads(CALIFORNIA) == load(str(path))
    infinite = MINIMAL.replace("clip = 1", "clip = inf")
    for text, words in (("[training", "not TOML"), ("a = 1\na = 2", "not TOML"), ("x = " + "[" * 9999, "not TOML"),
                        (infinite, "training.clip: found inf; a finite number > 0")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(RecipeError) as info:
            load(path)
        assert str(info.value).startswith(f"{path}: ") and words in str(info.value) and "\n" not in str(info.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="no readable UTF-8 text"):
        load(path)
    with pytest.raises(RecipeError, match="no such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(RecipeError, match="no readable"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("training.clip", INF, "training.clip: found inf; a finite number > 0 is required"),
        ("training.clip", NAN, "training.clip: found nan; a finite number > 0 is required"),
        ("training.clip", 0, "training.clip: found 0;"),
        ("training.clip", -1.0, "training.clip: found -1.0;"),
        ("training.clip", True, "training.clip: found True;"),
        ("training.clip", "1", "training.clip: found '1';"),
        ("training.clip", [1.0], "training.clip: found [1.0];"),
        ("training.clip", 10**400, "training.clip: found 1000"),
        ("training.clip", ..., "training.clip: found nothing;"),
        ("training.cilp", 1.0, "training.cilp: found an unknown key; the nearest known key is 'clip'"),
        ("training.size", 1, "training.size: found an unknown key; 'size' belongs to [batches]"),
        ("trainning", {}, "trainning: found an unknown key; the nearest known key is 'training'"),
        ("training", ..., "training: found nothing; a table is required"),
        ("training", 3, "training: found 3; a table is required"),
        ("training.loss", "mse", "training.loss: found 'mse'; \"squared\", \"absolute\""),
        ("training.steps", 0, "training.steps: found 0;"),
        ("training.steps", 1.0, "training.steps: found 1.0;"),
        ("training.steps", True, "training.steps: found True;"),
        ("training.steps", 10**9, "training.steps: found 1000000000; an integer in 1 ... 10000000"),
        ("training.steps", ..., "training.steps: found neither of steps and epochs; exactly one"),
        ("training.epochs", 2, "training.steps: found both of steps and epochs; exactly one"),
        ("training.contraction", 0, "training.contraction: found 0; a number in (0, 1] is required"),
        ("training.contraction", 1.01, "training.contraction: found 1.01;"),
        ("training.normaliser", 0, "training.normaliser: found 0;"),
        ("training.huber_delta", 0.0, "training.huber_delta: found 0.0;"),
        ("training.hinge_width", 0.0, "training.hinge_width: found 0.0;"),
        ("training.learning_rate", ..., "training.learning_rate: found nothing; a table with schedule ="),
        ("training.learning_rate", 0.1, "training.learning_rate: found 0.1; a table with schedule ="),
        ("training.learning_rate.schedule", "linear", "training.learning_rate.schedule: found 'linear';"),
        ("training.learning_rate.schedule", ..., "training.learning_rate: found nothing;"),
        ("training.learning_rate.value", INF, "training.learning_rate.value: found inf; a finite number > 0"),
        ("training.learning_rate.vaule", 1, "training.learning_rate.vaule: found an unknown key; the nearest"),
        ("training.learning_rate.decay", 1, "training.learning_rate.decay: found an unknown key"),
        ("batches.kind", "random", "batches.kind: found 'random';"),
        ("batches.kind", "shuffled", 'batches.size: found nothing with kind = "shuffled"; an integer >= 1'),
        ("batches.size", 3, 'batches.size: found 3 with kind = "full"'),
        ("batches.seed", 3, 'batches.seed: found 3 with kind = "full"'),
        ("batches.drop_last", True, 'batches.drop_last: found true with kind = "full"'),
        ("batches.drop_last", 1, "batches.drop_last: found 1; true or false is required"),
        ("batches", {"kind": "sequential", "size": 5, "slots": 4}, "batches.size: found 5 with slots = 4;"),
        ("batches", {"kind": "sequential", "size": 5, "seed": 4}, "batches.seed: found 4 with kind"),
        ("batches", {"kind": "shuffled", "size": 5, "seed": -1}, "batches.seed: found -1;"),
        ("batches.slots", 0, "batches.slots: found 0;"),
        ("privacy.adjacency", "add-remove", "privacy.adjacency: found 'add-remove'; \"replace-one\" or"),
        ("privacy.epsilon", 1, "privacy.epsilon: found an unknown key; the nearest known key is 'adjacency'"),
        ("features.lower", [1, INF], "features.lower: found [1, inf];"),
        ("features.lower", NAN, "features.lower: found nan;"),
        ("features.lower", [], "features.lower: found [];"),
        ("features.lower", "0", "features.lower: found '0';"),
        ("features", {"lower": 1, "upper": 1}, "features.lower: found 1.0, which is not below upper = 1.0;"),
        ("features", {"lower": 1, "upper": [2, 0]}, "features.lower[1]: found 1.0, which is not below upper = 0.0"),
        ("features", {"lower": [1, 2], "scale": [1, 2, 3]}, "features.lower: found 2 entries beside 3 of scale;"),
        ("features", {"names": ["a"], "offset": [1, 2]}, "features.offset: found 2 entries beside 1 of names;"),
        ("features.scale", 0, "features.scale: found 0; a finite number > 0"),
        ("features.scale", [1, -1], "features.scale: found [1, -1];"),
        ("features.names", [], "features.names: found [];"),
        ("features.names", ["a", "a"], "features.names: found ['a', 'a']; a column name or a list of different"),
        ("features.names", ["a", 1], "features.names: found ['a', 1];"),
        ("features.shape", [2, 0], "features.shape[1]: found 0;"),
        ("features.shape", [], "features.shape: found [];"),
        ("features", {"shape": [2, 2], "names": ["a"]}, "features.shape: found [2, 2], which holds 4 values"),
        ("target.scale", -1, "target.scale: found -1;"),
        ("target.offset", INF, "target.offset: found inf;"),
        ("target", {"lower": 1, "upper": 0}, "target.lower: found 1.0, which is not below upper = 0.0;"),
        ("output.lower", 0, "output.upper: found nothing;"),
        ("output", {"lower": 1, "upper": 0}, "output.lower: found 1.0, which is not below"),
        ("output", {"lower": 0, "upper": INF}, "output.upper: found inf;"),
        ("model.trainable", "fc.*", "model.trainable: found 'fc.*'; a list of patterns is required"),
        ("model.frozen", ["a", 3], "model.frozen[1]: found 3;"),
        ("arithmetic.products", "exact", "arithmetic.products: found 'exact'; \"natural\" or \"midpoint-radius\""),
    ],
)
def test_bad_fields_are_named_with_what_was_found_and_what_is_accepted(path, value, message):
    assert refusal(changed(path, value)).startswith(message)


def test_output_and_target_agree_on_the_number_of_columns():
    data = changed("output", {"lower": [0, 0], "upper": [1, 1]}) | {"target": {"names": ["a", "b", "c"]}}
    assert refusal(data).startswith("output.lower: found 2 entries for 3 target columns;")


def test_a_misspelt_required_key_is_reported_as_misspelt():
    data = changed("training.clip")
    data["training"]["clipp"] = 1.0
    assert refusal(data) == (
        "training.clipp: found an unknown key; the nearest known key is 'clip', all are loss, clip, learning_rate, "
        "steps, epochs, contraction, normaliser, huber_delta, hinge_width (and 1 more)"
    )


def test_what_is_no_dictionary_is_refused():
    for data in (None, [], 3, "x"):
        assert "is required" in refusal(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.dates(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def numbers_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from numbers_of(entry)
    elif isinstance(value, int | float):
        yield value


FIELDS = sorted({row.field for row in explain()})


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FIELDS), json_values)
def test_every_number_of_a_recipe_is_finite(field, value):
    try:
        r = from_dict(changed(field, value))
    except RecipeError as error:
        assert "\n" not in str(error)
        return
    assert all(math.isfinite(number) for number in numbers_of(r.to_dict()))


@pytest.mark.parametrize("text", [MINIMAL, CALIFORNIA])
def test_a_recipe_survives_the_way_to_a_dictionary_and_back(text):
    r = loads(text)
    data = json.loads(json.dumps(r.to_dict(), allow_nan=False))
    assert data == r.to_dict() and from_dict(data) == r


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FIELDS), json_values)
def test_any_accepted_recipe_survives_the_way_to_a_dictionary_and_back(field, value):
    try:
        r = from_dict(changed(field, value))
    except RecipeError:
        return
    assert from_dict(json.loads(json.dumps(r.to_dict(), allow_nan=False))) == r


# --- steps and learning rates ---


def test_learning_rates_follow_their_formulas():
    t = np.arange(6)
    np.testing.assert_array_equal(rates(6, schedule="constant", value=0.3), np.full(6, 0.3))
    found = rates(6, schedule="exponential", value=0.8, decay=0.5, period=2, minimum=0.3)
    np.testing.assert_allclose(found, np.maximum(0.3, 0.8 * 0.5 ** (t / 2)))
    np.testing.assert_allclose(rates(6, schedule="inverse", value=1, decay=0.5), 1 / (1 + 0.5 * t))
    np.testing.assert_allclose(rates(6, schedule="step", value=1, decay=0.5, period=2), [1, 1, 0.5, 0.5, 0.25, 0.25])
    found = rates(6, schedule="cosine", value=1, minimum=0.2, period=4)
    np.testing.assert_allclose(found, 0.2 + 0.4 * (1 + np.cos(np.pi * np.minimum(t, 4) / 4)))
    np.testing.assert_allclose(rates(4, schedule="cosine", value=1)[[0, 2]], [1, 0.5])
    np.testing.assert_array_equal(rates(3, schedule="table", values=[3, 2, 0.5]), [3, 2, 0.5])


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["constant", "exponential", "inverse", "step", "cosine"]),
    st.floats(0, exclude_min=True, max_value=1e300),
    st.floats(0, exclude_min=True, max_value=1),
    st.floats(0, 1e300),
    st.integers(1, 50),
    st.integers(1, 2000),
)
def test_every_rate_is_finite_and_positive_or_the_recipe_is_refused(schedule, value, decay, minimum, period, steps):
    fields = {"constant": [], "exponential": ["decay", "minimum", "period"], "inverse": ["decay", "minimum"],
              "step": ["decay", "minimum", "period"], "cosine": ["minimum", "period"]}[schedule]  # fmt: skip
    given_values = {"decay": decay, "minimum": minimum, "period": period}
    try:
        found = rates(steps, schedule=schedule, value=value, **{name: given_values[name] for name in fields})
    except RecipeError as error:
        assert "training.learning_rate: found the rate" in str(error)
        return
    assert found.shape == (steps,) and found.dtype == np.float64
    assert np.isfinite(found).all() and (found > 0).all()


def test_rates_that_vanish_or_do_not_fit_are_refused():
    data = changed("training.learning_rate", {"schedule": "exponential", "value": 1, "decay": 1e-200})
    assert refusal(data).startswith("training.learning_rate: found the rate 0.0 at step 2;")
    data = changed("training.learning_rate", {"schedule": "cosine", "value": 1, "period": 2})
    assert refusal(data).startswith("training.learning_rate: found the rate 0.0 at step 2;")
    data = changed("training.learning_rate", {"schedule": "table", "values": [1, 2]})
    assert refusal(data).startswith("training.learning_rate.values: found 2 entries; one for each of the 4 steps")
    data = changed("training.learning_rate", {"schedule": "table", "values": [1, NAN, 1, 1]})
    assert refusal(data).startswith("training.learning_rate.values[1]: found nan;")
    data = changed("training.learning_rate", {"schedule": "table", "values": []})
    assert refusal(data).startswith("training.learning_rate.values: found [];")


def test_epochs_become_steps_through_the_slots():
    data = changed("training.steps")
    data["training"]["epochs"] = 3
    data["batches"] = {"kind": "sequential", "size": 5}
    r = from_dict(data)
    assert r.total_steps(12) == 9 and len(r.learning_rates(12)) == 9
    for call in (r.total_steps, r.learning_rates):
        with pytest.raises(RecipeError, match="batches.slots: found nothing"):
            call()
    data["batches"]["slots"] = 15
    assert from_dict(data).total_steps() == 9
    data["training"]["epochs"] = 9_000_000
    assert "makes 27000000 steps" in refusal(data)


# --- preprocessing ---


def features(**section):
    return from_dict(changed("features", section))


def targets(**section):
    return from_dict(changed("target", section))


ranges = st.floats(-100, 100)
values = st.lists(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2), min_size=1, max_size=5).map(np.array)


@given(values, ranges, st.floats(1e-3, 50), ranges, st.floats(1e-3, 50))
def test_features_and_targets_lie_in_the_public_range_before_they_are_scaled(x, lower, span, offset, scale):
    section = {"lower": lower, "upper": [lower + span, lower + 2 * span], "offset": offset, "scale": [scale, 2 * scale]}
    low, high = np.full(2, lower), np.array(section["upper"])
    expected = (np.clip(x, low, high) - offset) / section["scale"]
    np.testing.assert_array_equal(features(**section).prepare_features(x), expected)
    np.testing.assert_array_equal(targets(**section).prepare_targets(x), expected)
    ends = [(low - offset) / section["scale"], (high - offset) / section["scale"]]
    assert (ends[0] <= expected).all() and (expected <= ends[1]).all()


@given(values)
def test_preparing_a_record_looks_at_that_record_alone(x):
    r = features(lower=-5, upper=[5, 9], offset=[1, 2], scale=3)
    whole = r.prepare_features(x)
    for i in range(len(x)):
        np.testing.assert_array_equal(whole[i : i + 1], r.prepare_features(x[i : i + 1]))


@given(values)
def test_restored_predictions_are_in_the_units_of_the_target_column(y):
    r = targets(lower=-50, upper=[50, 90], offset=[1, 2], scale=[3, 0.5])
    np.testing.assert_allclose(r.restore_predictions(r.prepare_targets(y)), np.clip(y, -50, [50, 90]), atol=1e-12)
    single = targets(offset=2.5, scale=2.5)
    found = single.restore_predictions(single.prepare_targets(y[:, 0])[:, 0])
    np.testing.assert_allclose(found, y[:, 0], rtol=1e-12, atol=1e-9)


def test_preparing_leaves_the_table_as_it_is():
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    before = x.copy()
    for r in (loads(MINIMAL), features(lower=2, upper=3)):
        r.prepare_features(x)[:] = 7
        r.prepare_targets(x)[:] = 7
        np.testing.assert_array_equal(x, before)


def test_records_take_the_stated_shape():
    x = np.arange(24.0).reshape(2, 12)
    assert features(shape=[1, 3, 4]).prepare_features(x).shape == (2, 1, 3, 4)
    np.testing.assert_array_equal(features(shape=[3, 4]).prepare_features(x)[1], x[1].reshape(3, 4))
    assert features().prepare_features(x.reshape(2, 3, 4)).shape == (2, 3, 4)
    assert features(shape=[12]).prepare_features(x.reshape(2, 3, 4)).shape == (2, 12)
    assert loads(MINIMAL).prepare_targets(np.arange(3)).shape == (3, 1)


def test_tables_that_do_not_fit_are_refused():
    x = np.ones((3, 2))
    for r, table in ((features(lower=[0, 0, 0]), x), (features(shape=[3]), x), (features(names=["a"]), x),
                     (features(), np.ones(3)), (features(), np.ones((3, 0)))):  # fmt: skip
        with pytest.raises(DataError, match="features: found"):
            r.prepare_features(table)
    for r, table in ((targets(lower=[0, 0, 0]), x), (targets(names="a"), x), (targets(), np.ones((2, 2, 2)))):
        with pytest.raises(DataError, match="target: found an array of shape"):
            r.prepare_targets(table)
    for bad in (NAN, INF, -INF):
        broken = x.copy()
        broken[2, 1] = bad
        clipped = {"lower": 0, "upper": 1}  # an infinite value is no value, even where a range would hide it
        with pytest.raises(DataError, match=f"features: found {bad} in row 2, column 1"):
            features(**clipped).prepare_features(broken)
        with pytest.raises(DataError, match=f"target: found {bad} in row 2, column 1"):
            targets(**clipped).prepare_targets(broken)
    with pytest.raises(DataError, match="left the range of float64 when scaled, so change features.scale"):
        features(scale=1e-300).prepare_features(x * 1e10)


def test_the_output_range_is_in_model_units():
    data = changed("target", {"offset": 2.5, "scale": 0.5}) | {"output": {"lower": 0, "upper": [5, 6]}}
    lower, upper = from_dict(data).output_range(2)
    np.testing.assert_array_equal(lower, [-5, -5])
    np.testing.assert_array_equal(upper, [5, 7])
    assert lower.dtype == np.float64
    with pytest.raises(RecipeError, match="output: found lists of 2 entries, but 3 outputs"):
        from_dict(data).output_range(3)
    with pytest.raises(RecipeError, match="output: found nothing; private predictions need"):
        loads(MINIMAL).output_range()


# --- documentation ---


def test_the_documentation_is_generated_from_the_recipe():
    assert (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8") == markdown()
    assert CALIFORNIA.strip() in markdown()


def test_every_field_is_explained():
    rows = explain()
    assert all(row.field and row.type and row.default and row.description for row in rows)
    found = {row.field for row in rows}

    def leaves(section, prefix=""):
        for key, value in section.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield prefix + key

    assert set(leaves(loads(CALIFORNIA).to_dict())) <= found
    assert {"batches.slots", "training.learning_rate.values", "features.shape"} <= found


def test_the_worked_example_fits_the_table():
    from certify.schedule import make
    from certify.tables import read_table

    r = loads(CALIFORNIA)
    table = read_table(HOUSING, r.target.names, r.features.names)
    x, y = r.prepare_features(table.features), r.prepare_targets(table.targets)
    assert x.shape == (20640, 8) and y.shape == (20640, 1) and np.abs(x).max() <= 1 and np.abs(y).max() <= 1
    s = make(r, len(x))
    assert (s.slots, s.steps, s.normaliser) == (20640, 40, 2064)
    assert r.output_range()[0] == [-1] and len(r.learning_rates()) == 40


def test_the_sections_are_public_facts_only():
    words = {word for row in explain() for word in row.field.replace("_", ".").split(".")}
    assert not words & {"mean", "std", "data", "records", "private", "key", "secret"}
    assert set(recipes.Recipe.model_fields) == {
        "training", "batches", "privacy", "features", "target", "output", "model", "arithmetic"}  # fmt: skip
