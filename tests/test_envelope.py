import json
import os
import runpy
import stat
import subprocess
import sys
from pathlib import Path

import hypothesis.extra.numpy as hnp
import jsonschema
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from certify import envelope as ev
from certify.envelope import Capabilities, Envelope, Metadata
from certify.errors import EnvelopeError, RadiusError

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((ROOT / "certify" / "envelope.schema.json").read_text())
HEX = "0123456789abcdef" * 4


def metadata(**changes):
    fields = dict(
        adjacency="replace-one",
        slots=10,
        radii=(0, 1, 3),
        parameters=[("fc/weight", (2, 3)), ("bias", ())],
        backend="ibp",
        capabilities=Capabilities(True, True, "rigorous", 0.0, "natural"),
        concretisation=[1, 2],
        steps=3,
        recipe={"training": {"clip": 0.1, "names": ["ä", "b"]}},
        model_sha256=HEX,
        data_hmac=HEX,
        versions={"numpy": np.__version__},
        wall_time_s=1.25,
        auto={"beta": [0.1, 0.5], "queries_sha256": HEX},
    )
    return Metadata(**(fields | changes))


def make(seed=0, history=True, **changes):
    rng, meta = np.random.default_rng(seed), metadata(**changes)
    nominal = {name: rng.normal(size=shape) for name, shape in meta.parameters}
    lower, upper = {}, {}
    for k in meta.radii:
        lower[k] = {name: value - k * 0.25 for name, value in nominal.items()}
        upper[k] = {name: value + k * 0.5 for name, value in nominal.items()}
    widths = rng.uniform(size=(meta.steps + 1, len(meta.radii))) if history else None
    return Envelope(meta, nominal, lower, upper, widths)


def same(a, b):
    """Equal to the last bit."""

    def arrays(e):
        yield from e.nominal.items()
        for side in (e.lower, e.upper):
            for k in side:
                yield from ((k, name, value) for name, value in side[k].items())
        yield "history", np.zeros(0) if e.history is None else e.history

    def key(e):
        return [(*head, np.asarray(v).shape, np.asarray(v).tobytes()) for *head, v in arrays(e)]

    digestless = [ev.metadata_to_json(e.metadata) | {"content_sha256": None} for e in (a, b)]
    return digestless[0] == digestless[1] and key(a) == key(b)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.envelope.safetensors"


@pytest.fixture
def raw(path):
    """The file of `make()` as (JSON object without digest, tensors), for writing it with mistakes."""
    ev.write(path, make())
    with safetensors.safe_open(str(path), framework="numpy") as file:
        obj = json.loads(file.metadata()["certdp"])
        del obj["content_sha256"]
        return obj, {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118


def put(path, obj, tensors):
    text = obj if isinstance(obj, str) else json.dumps(obj)
    save_file(tensors, str(path), metadata={"certdp": text})


def refused(path, *words):
    with pytest.raises(EnvelopeError) as info:
        ev.read(path)
    message = str(info.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    for word in words:
        assert word in message, message
    report = ev.check(path)
    failed = [line for line in report if not line.ok]
    assert failed and failed[0].detail in message
    return report


# --- what is written comes back ---


def test_a_file_that_is_read_back_is_exactly_the_envelope_that_was_written(path):
    for written in (make(), make(1, history=False), make(2, auto=None, recipe=None, wall_time_s=None, versions={})):
        digest = ev.write(path, written)
        found = ev.read(path)
        assert same(found, written)
        assert found.metadata.content_sha256 == digest == ev.content_digest(written) == ev.content_digest(found)
        assert all(line.ok for line in ev.check(path))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_envelope_comes_back_exactly(path, data):
    radii = sorted(data.draw(st.sets(st.integers(0, 40), min_size=1, max_size=4)))
    names = data.draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=3,
                               unique=True))  # fmt: skip
    parameters = [(name, data.draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))) for name in names]
    meta = metadata(slots=40, radii=radii, parameters=parameters, steps=data.draw(st.integers(0, 3)))
    nominal, lower, upper = {}, {k: {} for k in radii}, {k: {} for k in radii}
    for name, shape in parameters:
        draw = hnp.arrays(np.float64, (2 * len(radii) + 1, *shape), elements=st.floats(-1e300, 1e300))
        ordered = np.sort(data.draw(draw), axis=0)
        middle = len(radii)
        nominal[name] = ordered[middle]
        for i, k in enumerate(radii):
            step = 0 if k == 0 else i + 1
            lower[k][name], upper[k][name] = ordered[middle - step], ordered[middle + step]
    history = None
    if data.draw(st.booleans()):
        history = data.draw(hnp.arrays(np.float64, (meta.steps + 1, len(radii)), elements=st.floats(0, 1e300)))
    written = Envelope(meta, nominal, lower, upper, history)
    ev.write(path, written)
    assert same(ev.read(path), written)


def test_numpy_scalars_and_mappings_are_taken(path):
    meta = metadata(slots=np.int64(10), radii=np.array([0, 1, 3]), parameters={"fc/weight": (2, 3), "bias": ()},
                    wall_time_s=np.float32(1.25))  # fmt: skip
    base = make()
    ev.write(path, Envelope(meta, base.nominal, base.lower, base.upper, base.history))
    assert same(ev.read(path), base)


def test_width_and_stacked_follow_the_order_of_parameters():
    e = make()
    np.testing.assert_allclose(e.width(3)["fc/weight"], np.full((2, 3), 2.25))
    lower, upper = e.stacked()
    assert lower.shape == upper.shape == (3, 7) and lower.dtype == np.float64
    np.testing.assert_array_equal(upper[1], np.append(e.upper[1]["fc/weight"].ravel(), e.upper[1]["bias"]))
    with pytest.raises(RadiusError, match="found 2, .* 0, 1, 3"):
        e.width(2)


def test_arrays_that_were_read_cannot_be_changed(path):
    ev.write(path, make())
    with pytest.raises(ValueError, match="read-only"):
        ev.read(path).nominal["bias"][()] = 1.0


def test_metadata_may_be_given_in_python_but_must_be_json(path):
    for bad in ({"x": float("nan")}, {"x": object()}, {"x": {1, 2}}):
        with pytest.raises(EnvelopeError, match="JSON cannot hold"):
            ev.write(path, make(recipe=bad))
    assert not path.exists()


# --- damage ---


def small():
    return make(parameters=[("w", (2,))], radii=(0, 1), steps=1, concretisation=1, auto=None, model_sha256=None)


def test_a_file_with_any_one_bit_flipped_is_refused_or_holds_exactly_the_same_content(path):
    ev.write(path, small())
    blob, original = path.read_bytes(), ev.read(path)
    accepted = 0
    for position in range(len(blob)):
        for bit in range(8):
            path.write_bytes(blob[:position] + bytes([blob[position] ^ 1 << bit]) + blob[position + 1 :])
            try:
                found = ev.read(path)
            except EnvelopeError:
                continue
            accepted += 1
            assert same(found, original), (position, bit)
            assert found.metadata.content_sha256 == original.metadata.content_sha256
    assert accepted <= 8  # such as the digits of a number that rounds to the same double


def test_a_file_cut_at_any_length_is_refused(path):
    ev.write(path, small())
    blob = path.read_bytes()
    for length in range(len(blob)):
        path.write_bytes(blob[:length])
        with pytest.raises(EnvelopeError, match="envelope again"):
            ev.read(path)
    path.write_bytes(blob + b"\0")
    refused(path, "none of safetensors")


def test_every_tensor_and_every_metadata_field_is_under_the_digest(path, raw):
    obj, tensors = raw
    obj["content_sha256"] = ev.content_digest(make())
    put(path, obj, tensors)
    assert same(ev.read(path), make())
    for name, value in tensors.items():
        outward = -1.0 if name.startswith("lower") else 1.0
        if name.startswith("nominal") or "/0/" in name:
            continue
        changed = np.asarray(value + outward * 1e-12 * (3 if "/3/" in name else 1))
        put(path, obj, tensors | {name: changed})
        report = refused(path, "edited", "content_sha256")
        assert [line.name for line in report if not line.ok] == ["digest"]
    edits = {"adjacency": "zero-out", "slots": 11, "backend": "lp", "steps": 3.0, "recipe": None, "data_hmac": None,
             "wall_time_s": 2.0, "versions": {}, "concretisation": 1, "auto": None, "model_sha256": None}  # fmt: skip
    for key, value in edits.items():
        put(path, obj | {key: value}, tensors)
        refused(path, "edited")
    put(path, obj | {"capabilities": obj["capabilities"] | {"monotone": False}}, tensors)
    refused(path, "edited")


def test_files_that_are_no_envelope(path, tmp_path, raw):
    obj, tensors = raw
    refused(tmp_path / "absent", "no such file")
    refused(tmp_path, "safetensors")
    path.write_text("hello")
    refused(path, "safetensors")
    save_file(tensors, str(path))
    refused(path, "metadata key 'certdp'", "docs/envelope.md")
    for text in ("", "{", "[1", '{"slots": NaN}', '{"slots": 1e999}', '{"a": 1, "a": 1}', "[" * 100_000, "1" * 5000):
        put(path, text, tensors)
        refused(path, "not JSON")
    for text in ("3", "null", "[]", '"x"'):
        put(path, text, tensors)
        refused(path, "JSON object is required")


def test_unknown_versions_say_which_one_this_reader_knows(path, raw):
    obj, tensors = raw
    for version in (2, 0, "1", True, None, [1], 1.5):
        put(path, obj | {"format_version": version, "field_of_the_future": 1}, tensors)
        report = refused(path, "metadata.format_version", "knows only 1")
        assert [line.name for line in report if not line.ok][0] == "version"
    del obj["format_version"]
    put(path, obj, tensors)
    refused(path, "'format_version' is missing")


# --- tensors ---


def test_missing_and_extra_tensors_are_named(path, raw):
    obj, tensors = raw
    for name in tensors:
        rest = {key: value for key, value in tensors.items() if key != name}
        put(path, obj, rest)
        if name == "history/mean_width":
            assert ev.read(path).history is None
        else:
            refused(path, repr(name), "missing")
    for name in ("nominal/other", "lower/2/bias", "lower/01/bias", "extra", "history/other"):
        put(path, obj, tensors | {name: np.zeros(())})
        refused(path, repr(name), "no such radius and parameter")


def test_dtypes_and_shapes_are_named(path, raw):
    obj, tensors = raw
    for name, value in tensors.items():
        for dtype in (np.float32, np.int64, np.float16):
            put(path, obj, tensors | {name: value.astype(dtype)})
            refused(path, repr(name), "dtype", "float64 is required")
        put(path, obj, tensors | {name: np.zeros((7, 1))})
        refused(path, repr(name), "found shape [7, 1]")


def test_values_that_are_not_finite_are_named_with_their_index(path, raw):
    obj, tensors = raw
    for bad in (np.nan, np.inf, -np.inf):
        for name, value in tensors.items():
            changed = value.copy()
            changed.reshape(-1)[-1] = bad
            put(path, obj, tensors | {name: changed})
            index = [size - 1 for size in value.shape]
            refused(path, repr(name), f"at {index}", f"found {float(bad)}", "must be finite")


def move(tensors, name, index, by):
    changed = tensors[name].copy()
    changed[index] += by
    return tensors | {name: changed}


def failing(path):
    return [line.name for line in ev.check(path) if not line.ok]


def test_the_boxes_of_an_envelope_that_was_read_contain_the_nominal_parameters_and_are_nested(path, raw):
    obj, tensors = raw
    w = "fc/weight"
    put(path, obj, move(tensors, f"lower/1/{w}", (1, 0), 0.3))
    refused(path, f"'lower/1/{w}' at [1, 0]", "nominal")
    put(path, obj, move(tensors, f"upper/1/{w}", (0, 2), -0.6))
    refused(path, f"'nominal/{w}' at [0, 2]", f"'upper/1/{w}'")
    put(path, obj, move(tensors, f"upper/1/{w}", (0, 2), 1.1))
    refused(path, f"'upper/1/{w}' at [0, 2]", "radius 1 must lie within the box of radius 3")
    assert failing(path) == ["nesting"]
    put(path, obj, move(tensors, f"lower/3/{w}", (0, 1), 0.6))
    refused(path, f"'lower/3/{w}' at [0, 1]", "radius 1 must lie within")
    ulp = np.spacing(tensors["nominal/bias"])
    for side, sign in (("lower", -1), ("upper", 1)):
        put(path, obj, move(tensors, f"{side}/0/bias", (), sign * ulp))
        refused(path, f"'{side}/0/bias' at []", "radius 0")
        assert failing(path) == ["radius 0"]
    put(path, obj, move(tensors, "history/mean_width", (2, 1), -5.0))
    refused(path, "'history/mean_width' at [2, 1]", "at least 0")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["nominal", "lower/1", "upper/1", "lower/3", "upper/3"]),
       scale=st.sampled_from([1e-16, 0.1, 0.5, 1.0, 3.0]))  # fmt: skip
def test_a_random_edit_without_digest_is_accepted_only_if_every_invariant_holds(path, raw, seed, name, scale):
    obj, tensors = raw
    rng = np.random.default_rng(seed)
    key = f"{name}/fc/weight"
    edited = tensors | {key: tensors[key] + scale * rng.normal(size=(2, 3))}
    chain = [edited[f"{part}/fc/weight"] for part in ("lower/3", "lower/1", "lower/0", "nominal", "upper/0", "upper/1",
                                                      "upper/3")]  # fmt: skip
    holds = all((a <= b).all() for a, b in zip(chain, chain[1:], strict=False))
    holds &= (chain[2] == chain[3]).all() and (chain[4] == chain[3]).all()
    put(path, obj, edited)
    if holds:
        ev.read(path)
    else:
        refused(path, "tensor")


def test_radii_increase_and_stay_within_the_slots(path, raw):
    obj, tensors = raw
    put(path, obj | {"radii": [0, 3, 1]}, tensors)
    refused(path, "metadata.radii[2]", "found 1 after 3", "must increase")
    put(path, obj | {"radii": [1, 0, 3]}, tensors)
    refused(path, "metadata.radii[1]", "found 0 after 1", "must increase")
    put(path, obj | {"slots": 2}, tensors)
    refused(path, "metadata.radii[2]", "found 3", "2 slots")
    put(path, obj | {"parameters": obj["parameters"] * 2}, tensors)
    refused(path, "metadata.parameters[2].name", "'fc/weight'")


def test_a_sparse_list_without_radius_zero_is_read(path):
    ev.write(path, make(radii=(2, 5)))
    assert ev.read(path).radii == (2, 5)
    assert all(line.ok for line in ev.check(path))


# --- the check report ---


def test_check_reports_every_finding_and_not_the_first_alone(path, raw):
    obj, tensors = raw
    edited = move(move(tensors, "upper/1/fc/weight", (0, 0), -9.0), "lower/0/bias", (), -0.01)
    edited = move(edited, "history/mean_width", (0, 0), -5.0)
    put(path, obj | {"content_sha256": HEX}, edited)
    assert failing(path) == ["order", "radius 0", "nesting", "history", "digest"] or failing(path) == [
        "order", "radius 0", "history", "digest"]  # fmt: skip
    put(path, obj | {"steps": -1}, tensors)
    report = ev.check(path)
    assert [line.ok for line in report[:3]] == [True, True, False]
    assert all("not run, because the check 'metadata' failed" in line.detail for line in report[3:])


# --- schema and reader ---

NOT_TYPES = [None, True, 0, 1, -1, 1.5, 2.0, 1e300, "", "x", "replace-one", HEX, HEX + "\n", HEX.upper(), [], [0],
             [1, 1], [1, 2], [1, 1.0], [0, -1], [True], ["a"], {}, {"a": 1}, {"a": "b"}, 10**400, -0.0,
             5e-324, {"beta": 1, "queries_sha256": HEX}, {"beta": 0, "queries_sha256": HEX}, {"beta": 1},
             {"beta": [], "queries_sha256": HEX}, {"beta": [0.5, 1], "queries_sha256": HEX},
             {"beta": 1, "queries_sha256": None},
             {"name": "w", "shape": []}, [{"name": "w", "shape": []}], [{"name": "", "shape": []}],
             [{"name": "w", "shape": [0]}], [{"name": "w", "shape": [2.0]}], [{"name": "w", "shape": 2}],
             [{"name": "w"}], [{"name": "w", "shape": [], "x": 1}], [["w", []]],
             {"sound": True, "monotone": False, "rigour": "tolerance", "tau": 0},
             {"sound": 1, "monotone": False, "rigour": "tolerance", "tau": 0},
             {"sound": True, "monotone": True, "rigour": "unsound", "tau": 0}]  # fmt: skip


def mutations(obj):
    """JSON values one edit away from `obj`: any field removed, replaced by anything, or added, at any depth."""
    yield obj
    if isinstance(obj, dict):
        yield obj | {"unknown": 1}
        for key in obj:
            yield {other: value for other, value in obj.items() if other != key}
            for value in NOT_TYPES:
                yield obj | {key: value}
            for value in mutations(obj[key]):
                yield obj | {key: value}
    if isinstance(obj, list):
        yield [*obj, *obj]
        for i, entry in enumerate(obj):
            for value in (*NOT_TYPES, *mutations(entry)):
                yield [*obj[:i], value, *obj[i + 1 :]]


def reader_takes(obj):
    try:
        ev.metadata_from_json(obj)
    except EnvelopeError as error:
        assert "\n" not in str(error) and str(error).startswith("metadata")
        return False
    return True


def test_the_schema_and_the_reader_accept_and_refuse_the_same_metadata():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    obj = ev.metadata_to_json(make().metadata) | {"content_sha256": HEX}
    verdicts = {True: 0, False: 0}
    for mutated in mutations(obj):
        verdict = validator.is_valid(mutated)
        assert reader_takes(mutated) == verdict, mutated
        verdicts[verdict] += 1
    assert verdicts[True] > 100 and verdicts[False] > 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([HEX, "", "w"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "shape", "beta", "tau"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(field=st.sampled_from(sorted(SCHEMA["properties"])), value=json_values)
def test_schema_and_reader_agree_on_random_values(field, value):
    obj = ev.metadata_to_json(make().metadata) | {field: value}
    assert reader_takes(obj) == jsonschema.Draft202012Validator(SCHEMA).is_valid(obj)


def test_written_files_satisfy_the_schema(path):
    for written in (make(), make(auto=None, recipe=None), make(concretisation=4, wall_time_s=None)):
        ev.write(path, written)
        with safetensors.safe_open(str(path), framework="numpy") as file:
            assert list(file.metadata()) == ["certdp"]
            jsonschema.validate(json.loads(file.metadata()["certdp"]), SCHEMA)


def test_every_field_of_the_schema_is_a_field_of_metadata_and_documented():
    assert set(SCHEMA["properties"]) == set(Metadata.__dataclass_fields__)
    text = (ROOT / "docs" / "envelope.md").read_text()
    assert all(f"`{name}`" in text for name in SCHEMA["properties"])
    assert "private data" in text and "certify/envelope.schema.json" in text


# --- writing ---


def test_the_file_is_private_to_its_owner(path):
    path.write_text("old")
    path.chmod(0o644)
    ev.write(path, make())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_write_that_fails_leaves_the_old_file_as_it_was(path, monkeypatch):
    ev.write(path, make())
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(ev.os, name, fail)
            with pytest.raises(EnvelopeError, match="No space left on device"):
                ev.write(path, make(1))
        assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_an_envelope_that_a_reader_would_refuse_is_not_written(path, tmp_path):
    good = make()
    nan = {name: value * np.nan for name, value in good.nominal.items()}
    single = {name: np.asarray(value, np.float32) for name, value in good.nominal.items()}
    bad = [
        (Envelope(good.metadata, nan, good.lower, good.upper), "must be finite"),
        (Envelope(good.metadata, single, good.lower, good.upper), "float32"),
        (Envelope(good.metadata, good.nominal, good.upper, good.lower), "at most"),
        (Envelope(good.metadata, good.nominal, {0: good.lower[0]}, good.upper), "'lower/1/fc/weight'"),
        (Envelope(good.metadata, good.nominal, good.lower, good.upper, np.zeros((1, 3))), "found shape"),
        (make(radii=(0, 11)), "10 slots"),
        (make(adjacency="add-remove"), "metadata.adjacency"),
        (make(format_version=2), "format_version"),
        (make(data_hmac="abc"), "metadata.data_hmac"),
        (make(capabilities=Capabilities(True, True, "exact")), "metadata.capabilities.rigour"),
    ]
    for envelope, words in bad:
        with pytest.raises(EnvelopeError, match=words):
            ev.write(path, envelope)
    with pytest.raises(EnvelopeError, match="suffix .envelope.safetensors"):
        ev.write(tmp_path / "x.safetensors", good)
    with pytest.raises(EnvelopeError, match="No such file"):
        ev.write(tmp_path / "absent" / "x.envelope.safetensors", good)
    assert os.listdir(tmp_path) == []
    with pytest.raises(EnvelopeError, match="float32"):
        ev.content_digest(bad[1][0])


def test_the_digest_follows_its_documentation(path, raw):
    import hashlib

    obj, tensors = raw
    sha = hashlib.sha256(b"certdp envelope 1\n")
    sha.update(json.dumps(obj, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    for name in sorted(tensors):
        sha.update(json.dumps([name, "F64", list(tensors[name].shape)], separators=(",", ":")).encode() + b"\n")
        sha.update(tensors[name].astype("<f8").tobytes())
    assert ev.read(path).metadata.content_sha256 == sha.hexdigest()


# --- living beside other code ---


def test_the_module_needs_numpy_and_safetensors_alone_and_lives_beside_a_foreign_models_module(tmp_path):
    (tmp_path / "models.py").write_text("raise RuntimeError('a foreign module')")
    (tmp_path / "solvers").mkdir()
    (tmp_path / "solvers" / "__init__.py").write_text("raise RuntimeError('a foreign package')")
    code = ("import sys; before = set(sys.modules); import certify.envelope; "
            "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))")  # fmt: skip
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    loaded = set(eval(done.stdout)) - set(sys.stdlib_module_names)
    assert loaded <= {"certify", "numpy", "safetensors", "packaging"}


def test_the_external_writer_is_twenty_lines_without_certdp_and_its_file_is_read(tmp_path, monkeypatch):
    script = ROOT / "examples" / "external_writer.py"
    code = script.read_text()
    assert len(code.splitlines()) <= 20
    assert f"```python\n{code}```" in (ROOT / "docs" / "envelope.md").read_text()
    assert not {"certify", "models", "solvers", "privacy"} & {word for line in code.splitlines() if "import" in line
                                                              for word in line.split()}  # fmt: skip
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True)
    path = tmp_path / "linear.envelope.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = ev.read(path)
    assert found.radii == (0, 1, 2, 3) and found.width(3)["w"] > found.width(1)["w"] > 0
    with safetensors.safe_open(str(path), framework="numpy") as file:
        jsonschema.validate(json.loads(file.metadata()["certdp"]), SCHEMA)


def test_the_boxes_of_the_external_writer_hold_random_and_extreme_neighbours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = os.umask(0)
    try:
        run = runpy.run_path(str(ROOT / "examples" / "external_writer.py"))
    finally:
        os.umask(old)
    found, rng = ev.read("linear.envelope.safetensors"), np.random.default_rng(1)
    n, steps, clip, rate = run["N"], run["T"], run["clip"], run["rate"]
    for trial in range(60):
        for k in (1, 2, 3):
            x, y = run["x"].copy(), run["y"].copy()
            slots = rng.choice(n, k, replace=False)
            x[slots], y[slots] = (9.0, 99.0 * (-1) ** trial) if trial % 3 else rng.normal(size=(2, k))
            w = np.zeros(1)
            for _ in range(steps):
                w = w - rate / n * np.clip(x * (x * w - y), -clip, clip).sum()
            assert found.lower[k]["w"] <= w <= found.upper[k]["w"]
