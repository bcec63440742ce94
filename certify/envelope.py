"""The envelope file: boxes around the trained parameters of every data set within each radius.

An envelope is PRIVATE DATA: nominal parameters, bounds and widths are all computed from the records.

One ``.envelope.safetensors`` file holds the float64 tensors ``nominal/<param>``, ``lower/<k>/<param>`` and
``upper/<k>/<param>`` (``k`` a radius, in records, as a decimal integer), optionally ``difference/<k>/<param>`` and
``history/mean_width``, and one JSON object under the safetensors metadata key ``certdp``: envelope.schema.json,
docs/envelope.md.
This module needs numpy and safetensors alone, so foreign training code can take it as it is.

Formal guarantees (a test of the same name checks each):

* A file that is read back is exactly the envelope that was written.
* A file with any one bit flipped is refused or holds exactly the same content.
* A file cut at any length is refused.
* The boxes of an envelope that was read contain the nominal parameters and are nested in the radius.
* The certificate of an envelope that was read is not negative and grows with the radius.
* A write that fails leaves the old file as it was.
* The schema and the reader accept and refuse the same metadata.

(S) and (M) of THEORY section 2 are statements of the writer (`Capabilities`), about the boxes and the certificate: no
reader can check them.
"""

import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import safetensors
import safetensors.numpy

from certify.errors import EnvelopeError, RadiusError

__all__ = [
    "FORMAT_VERSION", "METADATA_KEY", "SUFFIX", "Capabilities", "Check", "Envelope", "Metadata", "Parameter",
    "check", "content_digest", "metadata_from_json", "metadata_to_json", "read", "write", "write_atomically",
]  # fmt: skip

FORMAT_VERSION = 1
METADATA_KEY = "certdp"
SUFFIX = ".envelope.safetensors"
_HISTORY = "history/mean_width"
_DIGEST_HEADER = b"certdp envelope 1\n"
_MAX_FLOAT = sys.float_info.max
_REWRITE = "write the envelope again from the run that made it"


class Parameter(NamedTuple):
    """Name and shape of one trainable parameter, as in the ONNX file."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Capabilities:
    """What the backend that made the boxes promises (THEORY section 2).

    sound: (S) holds; monotone: (M) holds; rigour: "rigorous" (outward rounding, safe dual bounds) or
    "tolerance" (solver tolerance plus ladder); tau: the tolerance, in parameter units, 0 where there is none;
    products: the rule for interval products ("natural", "midpoint-radius"), or None where it does not apply.
    """

    sound: bool
    monotone: bool
    rigour: str
    tau: float = 0.0
    products: str | None = None


@dataclass(frozen=True)
class Metadata:
    """The JSON part of an envelope file; fields as in docs/envelope.md and envelope.schema.json.

    adjacency: "replace-one" or "zero-out"; slots: N; radii: increasing record counts, at most N;
    concretisation: F, steps per window, or the list of the windows' lengths; steps: T.
    stride: new steps per window where windows overlap, else None; solver: of a backend that uses one, else None.
    data_hmac: a digest of the data under a secret key, or None; a plain hash of a small data set is a leak.
    wall_time_s: seconds (private, as everything that the data influence).
    auto: for radii picked on demand from the dense family, {"beta": number or list, "queries_sha256": hex}.
    content_sha256: digest over metadata and tensors, filled in by `write`; it detects accidents, not forgery.
    Raises EnvelopeError where a field cannot be held at all; the full rules are those of `write` and `read`.
    """

    adjacency: str
    slots: int
    radii: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    backend: str
    capabilities: Capabilities
    concretisation: int | tuple[int, ...]
    steps: int
    recipe: dict | None = None
    model_sha256: str | None = None
    data_hmac: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    wall_time_s: float | None = None
    auto: dict | None = None
    stride: int | None = None
    solver: str | None = None
    content_sha256: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        if isinstance(self.parameters, Mapping):
            object.__setattr__(self, "parameters", tuple(self.parameters.items()))
        parameters = tuple(Parameter(name, tuple(shape)) for name, shape in self.parameters)
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "radii", tuple(self.radii))
        if isinstance(self.concretisation, list):
            object.__setattr__(self, "concretisation", tuple(self.concretisation))


@dataclass(frozen=True, eq=False)
class Envelope:
    """Metadata and boxes; every array is float64 of the parameter's ONNX shape. Private data.

    history: None or float64 (steps + 1, len(radii)): the width of the box, averaged over all parameters,
    after each step (row 0: before training), one column per radius in the order of `radii`.
    difference: None or the relational certificate, by radius k >= 1, arrays (C, *shape): entry c bounds, in absolute
    value, how far the parameters of two neighbouring data sets are apart that both lie within radius k of this one
    and differ in a slot of the c-th public class.
    """

    metadata: Metadata
    nominal: dict[str, np.ndarray]
    lower: dict[int, dict[str, np.ndarray]]
    upper: dict[int, dict[str, np.ndarray]]
    history: np.ndarray | None = None
    difference: dict[int, dict[str, np.ndarray]] | None = None

    @property
    def radii(self) -> tuple[int, ...]:
        return self.metadata.radii

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.metadata.parameters

    def width(self, k: int) -> dict[str, np.ndarray]:
        """Upper minus lower bound at radius `k`, per parameter, rounded to nearest: for reports, not proofs.

        Raises RadiusError if the envelope does not hold `k`.
        """
        if k not in self.lower:
            have = ", ".join(map(str, self.radii))
            raise RadiusError(f"radius: found {k}, which the envelope does not hold; its radii are {have}")
        return {name: self.upper[k][name] - self.lower[k][name] for name, _ in self.parameters}

    def stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """(lower, upper), each float64 (len(radii), P): parameters in order, each flattened row-major."""

        def stack(boxes: dict[int, dict[str, np.ndarray]]) -> np.ndarray:
            names = [name for name, _ in self.parameters]
            return np.stack([np.concatenate([boxes[k][name].ravel() for name in names]) for k in self.radii])

        return stack(self.lower), stack(self.upper)

    def stacked_difference(self) -> np.ndarray | None:
        """The certificate, float64 (len(radii), C, P), parameters as in `stacked`, 0 at radius 0; None without one."""
        if self.difference is None:
            return None
        names = [name for name, _ in self.parameters]

        def rows(k: int) -> np.ndarray:
            return np.concatenate([a.reshape(len(a), -1) for a in (self.difference[k][name] for name in names)], axis=1)

        known = {k: rows(k) for k in self.radii if k > 0}
        return np.stack([known[k] if k else np.zeros_like(next(iter(known.values()))) for k in self.radii])


class Check(NamedTuple):
    """One line of `check`: what was looked at, whether it holds, and the finding or a short remark."""

    name: str
    ok: bool
    detail: str


def write(path: str | Path, envelope: Envelope) -> str:
    """Writes `envelope` to `path` (mode 0600, all or nothing) and returns its content digest.

    Raises EnvelopeError if the name does not end in ``.envelope.safetensors``, if the envelope breaks a rule
    that `read` checks, or if the file cannot be written.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIX):
        raise EnvelopeError(
            f"{path}: found a file name without the suffix {SUFFIX}; add it, so that private files stand out"
        )
    try:
        obj, tensors = _to_file(envelope)
        metadata = metadata_from_json(obj)
        _check_radii(metadata)
        _check_parameters(metadata)
        for stage in (*_SHAPE_STAGES, *_VALUE_STAGES):
            stage.run(_Contents(obj, metadata, tensors))
        arrays = {name: np.array(tensor.array, order="C") for name, tensor in tensors.items()}
        blob = safetensors.numpy.save(arrays, metadata={METADATA_KEY: json.dumps(obj)})
    except EnvelopeError as error:
        raise EnvelopeError(f"{path}: {error}") from None
    try:
        write_atomically(path, blob)
    except OSError as error:
        raise EnvelopeError(
            f"{path}: found that the file cannot be written ({error.strerror or error}); "
            "give a path in an existing folder that you may write to and that has room"
        ) from error
    return obj["content_sha256"]


def read(path: str | Path) -> Envelope:
    """Reads and validates the file; the arrays are read-only float64.

    Raises EnvelopeError with the file, the field or tensor, the first offending index and the remedy.
    """
    contents = None
    for stage in _STAGES:
        try:
            contents = stage.run(path if contents is None else contents) or contents
        except EnvelopeError as error:
            raise EnvelopeError(f"{path}: {error}") from None
    metadata, arrays = contents.metadata, {name: tensor.array for name, tensor in contents.tensors.items()}
    for array in arrays.values():
        array.setflags(write=False)
    names = [name for name, _ in metadata.parameters]

    def boxes(side: str) -> dict[int, dict[str, np.ndarray]]:
        return {k: {name: arrays[f"{side}/{k}/{name}"] for name in names} for k in metadata.radii}

    nominal = {name: arrays[f"nominal/{name}"] for name in names}
    difference = None
    if _has_difference(contents):
        difference = {k: {name: arrays[f"difference/{k}/{name}"] for name in names} for k in metadata.radii if k}
    return Envelope(metadata, nominal, boxes("lower"), boxes("upper"), arrays.get(_HISTORY), difference)


def check(path: str | Path) -> list[Check]:
    """Runs and reports every check of `read`; one that an earlier failure prevents counts as failed."""
    report, contents, blocked = [], None, None
    for stage in _STAGES:
        if blocked:
            report.append(Check(stage.name, False, f"not run, because the check '{blocked}' failed"))
            continue
        try:
            contents = stage.run(path if contents is None else contents) or contents
            report.append(Check(stage.name, True, stage.remark(contents)))
        except EnvelopeError as error:
            report.append(Check(stage.name, False, str(error)))
            blocked = stage.name if stage.blocking else None
    return report


def content_digest(envelope: Envelope) -> str:
    """The SHA-256 (hex) that `write` stores: over metadata without `content_sha256`, then all tensors.

    Raises EnvelopeError if a tensor is not float64.
    """
    obj, tensors = _to_file(envelope)
    _check_dtypes(tensors)
    return obj["content_sha256"]


def write_atomically(path: str | Path, blob: bytes) -> None:
    """Writes `blob` beside `path` (mode 0600), flushes it and renames it over `path`. Raises OSError."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    with suppress(OSError):  # the rename is durable only once the folder is flushed; not every system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# --- metadata: JSON to value and back ---


def metadata_to_json(metadata: Metadata) -> dict:
    """The JSON object of the file, of plain dicts, lists, numbers and strings. Raises EnvelopeError."""
    obj = {item.name: getattr(metadata, item.name) for item in fields(metadata)}
    if isinstance(metadata.capabilities, Capabilities):
        obj["capabilities"] = dict(vars(metadata.capabilities))
    obj["parameters"] = [{"name": name, "shape": list(shape)} for name, shape in metadata.parameters]
    try:
        return json.loads(json.dumps(obj, allow_nan=False, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvelopeError(
            f"metadata: found a value that JSON cannot hold ({error}); use finite numbers, text, lists, dicts"
        ) from None


def metadata_from_json(obj: Any) -> Metadata:
    """Metadata from the parsed JSON object, by the rules of envelope.schema.json. Raises EnvelopeError.

    The rules that tie several fields together (order of radii, unique names) are checked when a file is read.
    """
    if not isinstance(obj, dict):
        raise EnvelopeError(f"metadata: found {_show(obj)}; a JSON object is required")
    _check_version(obj)
    return Metadata(**_object(obj, "metadata", _FIELDS, _OPTIONAL))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(value: Any, where: str, accepted: str) -> NoReturn:
    raise EnvelopeError(f"{where}: found {_show(value)}; {accepted} is required")


def _check_version(obj: dict) -> None:
    if "format_version" not in obj:
        raise EnvelopeError(f"metadata: 'format_version' is missing; {FORMAT_VERSION} is required")
    version = obj["format_version"]
    if isinstance(version, bool) or version != FORMAT_VERSION:
        raise EnvelopeError(
            f"metadata.format_version: found {_show(version)}, but this reader knows only {FORMAT_VERSION}; "
            "use the release of certdp that wrote the file"
        )


def _object(obj: Any, where: str, rules: dict[str, Callable], optional: dict[str, Any]) -> dict:
    if not isinstance(obj, dict):
        _refuse(obj, where, "a JSON object")
    for key in obj:
        if key not in rules:
            known = ", ".join(rules)
            raise EnvelopeError(f"{where}: found the unknown field {_show(key)}; known are {known}")
    for key in rules:
        if key not in obj and key not in optional:
            raise EnvelopeError(f"{where}: the field '{key}' is missing; {_REWRITE}")
    given = {key: rule(obj[key], f"{where}.{key}") for key, rule in rules.items() if key in obj}
    return {**optional, **given}


def _integer(minimum: int) -> Callable:
    def rule(value: Any, where: str) -> int:
        # JSON schema counts 1.0 among the integers
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < minimum:
            _refuse(value, where, f"an integer of at least {minimum}")
        return int(value)

    return rule


def _number(low: float, open_end: bool = False) -> Callable:
    def rule(value: Any, where: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= _MAX_FLOAT or (open_end and value == low):
            _refuse(value, where, f"a finite number {'above' if open_end else 'of at least'} {low:g}")
        return float(value)

    return rule


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        _refuse(value, where, "true or false")
    return value


def _one_of(*choices: str) -> Callable:
    def rule(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            _refuse(value, where, " or ".join(f'"{choice}"' for choice in choices))
        return value

    return rule


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        _refuse(value, where, "a string that is not empty")
    return value


def _hex64(value: Any, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        _refuse(value, where, "a digest of 64 lower-case hexadecimal digits")
    return value


def _dictionary(value: Any, where: str) -> dict:
    if not isinstance(value, dict):
        _refuse(value, where, "a JSON object")
    return value


def _versions(value: Any, where: str) -> dict[str, str]:
    for key, version in _dictionary(value, where).items():
        if not isinstance(version, str):
            _refuse(version, f"{where}.{key}", "a string")
    return value


def _list_of(rule: Callable, at_least: int) -> Callable:
    def parse(value: Any, where: str) -> tuple:
        if not isinstance(value, list) or len(value) < at_least:
            _refuse(value, where, f"a list of at least {at_least} entries")
        return tuple(rule(entry, f"{where}[{i}]") for i, entry in enumerate(value))

    return parse


def _one_or_list(rule: Callable) -> Callable:
    many = _list_of(rule, 1)

    def parse(value: Any, where: str) -> Any:
        return many(value, where) if isinstance(value, list) else rule(value, where)

    return parse


def _nullable(rule: Callable) -> Callable:
    def parse(value: Any, where: str) -> Any:
        return None if value is None else rule(value, where)

    return parse


def _radii(value: Any, where: str) -> tuple[int, ...]:
    radii = _list_of(_integer(0), 1)(value, where)
    if len(set(radii)) < len(radii):
        _refuse(value, where, "a list of different radii")
    return radii


def _parameter(value: Any, where: str) -> Parameter:
    return Parameter(**_object(value, where, {"name": _text, "shape": _list_of(_integer(1), 0)}, {}))


def _capabilities(value: Any, where: str) -> Capabilities:
    rules = {
        "sound": _boolean,
        "monotone": _boolean,
        "rigour": _one_of("rigorous", "tolerance"),
        "tau": _number(0),
        "products": _nullable(_text),
    }
    return Capabilities(**_object(value, where, rules, {"products": None}))


def _auto(value: Any, where: str) -> dict:
    rules = {"beta": _one_or_list(_number(0, open_end=True)), "queries_sha256": _hex64}
    found = _object(value, where, rules, {})
    beta = found["beta"]
    return {**found, "beta": list(beta) if isinstance(beta, tuple) else beta}


_FIELDS: dict[str, Callable] = {
    "format_version": _integer(1),
    "adjacency": _one_of("replace-one", "zero-out"),
    "slots": _integer(1),
    "radii": _radii,
    "parameters": _list_of(_parameter, 1),
    "backend": _text,
    "capabilities": _capabilities,
    "concretisation": _one_or_list(_integer(1)),
    "steps": _integer(0),
    "recipe": _nullable(_dictionary),
    "model_sha256": _nullable(_hex64),
    "data_hmac": _nullable(_hex64),
    "versions": _versions,
    "wall_time_s": _nullable(_number(0)),
    "auto": _nullable(_auto),
    "stride": _nullable(_integer(1)),
    "solver": _nullable(_text),
    "content_sha256": _nullable(_hex64),
}
_OPTIONAL = {"recipe": None, "model_sha256": None, "data_hmac": None, "versions": {}, "wall_time_s": None,
             "auto": None, "stride": None, "solver": None, "content_sha256": None}  # fmt: skip


# --- the file: tensors and their checks ---


class _Tensor(NamedTuple):
    dtype: str  # as in the safetensors header, "F64" for float64
    shape: tuple[int, ...]
    array: np.ndarray | None  # None where the dtype is not F64


@dataclass(frozen=True)
class _Contents:
    obj: Any  # the parsed JSON, as it stands in the file
    metadata: Metadata | None
    tensors: dict[str, _Tensor]


@dataclass(frozen=True)
class _Stage:
    name: str
    run: Callable[[Any], _Contents | None]
    blocking: bool
    remark: Callable[[_Contents], str]


def _to_file(envelope: Envelope) -> tuple[dict, dict[str, _Tensor]]:
    arrays = {f"nominal/{name}": array for name, array in envelope.nominal.items()}
    for side in ("lower", "upper", "difference"):
        boxes = getattr(envelope, side) or {}
        for k, box in boxes.items():
            arrays |= {f"{side}/{k}/{name}": array for name, array in box.items()}
    if envelope.history is not None:
        arrays[_HISTORY] = envelope.history
    tensors = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        is_f64 = array.dtype == np.float64
        tensors[name] = _Tensor("F64" if is_f64 else str(array.dtype), array.shape, array if is_f64 else None)
    obj = metadata_to_json(replace(envelope.metadata, content_sha256=None))
    if all(tensor.array is not None for tensor in tensors.values()):
        obj["content_sha256"] = _digest(obj, tensors)
    return obj, tensors


def _digest(obj: dict, tensors: dict[str, _Tensor]) -> str:
    rest = {key: value for key, value in obj.items() if key != "content_sha256"}
    sha = hashlib.sha256(_DIGEST_HEADER + _canonical(rest))
    for name in sorted(tensors):  # by code point, which is the order of the UTF-8 bytes
        tensor = tensors[name]
        sha.update(_canonical([name, tensor.dtype, list(tensor.shape)]))
        sha.update(tensor.array.astype("<f8").tobytes())
    return sha.hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def _open(path: str | Path) -> _Contents:
    if not Path(path).exists():
        raise EnvelopeError("found no such file; give the path of an envelope that was written before")
    tensors = {}
    try:
        with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
            for name in file.keys():  # noqa: SIM118 - not a dict
                entry = file.get_slice(name)
                dtype = entry.get_dtype()
                array = file.get_tensor(name) if dtype == "F64" else None
                tensors[name] = _Tensor(dtype, tuple(entry.get_shape()), array)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise EnvelopeError(f"found a truncated file or none of safetensors ({error}); {_REWRITE}") from None
    if text is None:
        raise EnvelopeError(
            f"found no metadata key '{METADATA_KEY}'; store the metadata there (docs/envelope.md)"
        )
    return _Contents(_parse_json(text), None, tensors)


def _parse_json(text: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict:
        if len(dict(items)) < len(items):
            raise ValueError("a key occurs twice in one object")
        return dict(items)

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"the number {number} is not finite")
        return float(number)

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise EnvelopeError(f"metadata: found text that is not JSON ({error}); {_REWRITE}") from None


def _parse_metadata(contents: _Contents) -> _Contents:
    return replace(contents, metadata=metadata_from_json(contents.obj))


def _check_version_stage(contents: _Contents) -> None:
    if isinstance(contents.obj, dict):
        _check_version(contents.obj)


def _check_radii(metadata: Metadata) -> None:
    for i, (low, high) in enumerate(zip(metadata.radii, metadata.radii[1:], strict=False), start=1):
        if low >= high:
            raise EnvelopeError(f"metadata.radii[{i}]: found {high} after {low}; radii must increase")
    if metadata.radii[-1] > metadata.slots:
        last = len(metadata.radii) - 1
        raise EnvelopeError(
            f"metadata.radii[{last}]: found {metadata.radii[-1]}, but there are {metadata.slots} slots; "
            "a radius is at most the number of slots"
        )


def _check_parameters(metadata: Metadata) -> None:
    seen = set()
    for i, (name, _) in enumerate(metadata.parameters):
        if name in seen:
            where = f"metadata.parameters[{i}].name"
            raise EnvelopeError(f"{where}: found {_show(name)} a second time; parameter names must differ")
        seen.add(name)


def _has_difference(contents: _Contents) -> bool:
    return any(name.startswith("difference/") for name in contents.tensors)


def _expected(contents: _Contents) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors there must be; a certificate has as many classes as its first tensor."""
    metadata, certified = contents.metadata, _has_difference(contents)
    first = next((name for name in sorted(contents.tensors) if name.startswith("difference/")), None)
    classes = max(1, *contents.tensors[first].shape[:1]) if certified and contents.tensors[first].shape else 1
    for name, shape in metadata.parameters:
        yield f"nominal/{name}", shape
        for k in metadata.radii:
            yield f"lower/{k}/{name}", shape
            yield f"upper/{k}/{name}", shape
            if certified and k > 0:
                yield f"difference/{k}/{name}", (classes, *shape)


def _check_names(contents: _Contents) -> None:
    expected = [name for name, _ in _expected(contents)]
    for name in expected:
        if name not in contents.tensors:
            raise EnvelopeError(f"tensor {name!r}: missing, though the metadata call for it; {_REWRITE}")
    for name in sorted(contents.tensors.keys() - {*expected, _HISTORY}):
        raise EnvelopeError(
            f"tensor {name!r}: found, though the metadata list no such radius and parameter; leave it out"
        )


def _check_dtypes(tensors: dict[str, _Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != "F64":
            raise EnvelopeError(
                f"tensor {name!r}: found dtype {tensor.dtype}; float64 is required, rounded outwards"
            )


def _check_shapes(contents: _Contents) -> None:
    metadata = contents.metadata
    expected = dict(_expected(contents)) | {_HISTORY: (metadata.steps + 1, len(metadata.radii))}
    for name, tensor in contents.tensors.items():
        if tensor.shape != expected[name]:
            raise EnvelopeError(
                f"tensor {name!r}: found shape {list(tensor.shape)}; {list(expected[name])} is required"
            )


def _require(holds: np.ndarray, name: str, found: np.ndarray, remedy: str) -> None:
    """Raises for the first entry, in row-major order, where `holds` is False."""
    if not holds.all():
        index = np.unravel_index(int(np.argmin(holds)), holds.shape)
        at, value = [int(i) for i in index], float(found[index])
        raise EnvelopeError(f"tensor {name!r} at {at}: found {value!r}; {remedy}")


def _check_finite(contents: _Contents) -> None:
    remedy = "every entry must be finite, so lower the learning rate, the number of steps or the radius"
    for name, tensor in contents.tensors.items():
        _require(np.isfinite(tensor.array), name, tensor.array, remedy)


def _check_below(contents: _Contents, low: str, high: str, rule: str) -> None:
    a, b = contents.tensors[low].array, contents.tensors[high].array
    _require(a <= b, low, a, f"it must be at most the entry of {high!r} there, because {rule}")


def _check_order(contents: _Contents) -> None:
    rule = "every box must contain the nominal parameters"
    for name, _ in contents.metadata.parameters:
        for k in contents.metadata.radii:
            _check_below(contents, f"lower/{k}/{name}", f"nominal/{name}", rule)
            _check_below(contents, f"nominal/{name}", f"upper/{k}/{name}", rule)


def _check_radius_zero(contents: _Contents) -> None:
    if 0 not in contents.metadata.radii:
        return
    for name, _ in contents.metadata.parameters:
        nominal = contents.tensors[f"nominal/{name}"].array
        for side in (f"lower/0/{name}", f"upper/0/{name}"):
            array = contents.tensors[side].array
            rule = f"it must equal the entry of 'nominal/{name}' there, since radius 0 allows no difference"
            _require(array == nominal, side, array, rule)


def _check_nesting(contents: _Contents) -> None:
    radii = contents.metadata.radii
    for name, _ in contents.metadata.parameters:
        for small, large in zip(radii, radii[1:], strict=False):
            rule = f"the box of radius {small} must lie within the box of radius {large}"
            _check_below(contents, f"lower/{large}/{name}", f"lower/{small}/{name}", rule)
            _check_below(contents, f"upper/{small}/{name}", f"upper/{large}/{name}", rule)


def _check_history(contents: _Contents) -> None:
    if _HISTORY in contents.tensors:
        history = contents.tensors[_HISTORY].array
        _require(history >= 0, _HISTORY, history, "a mean width must be at least 0")


def _check_difference(contents: _Contents) -> None:
    if not _has_difference(contents):
        return
    radii = [k for k in contents.metadata.radii if k > 0]
    for name, _ in contents.metadata.parameters:
        for k in radii:
            tensor = f"difference/{k}/{name}"
            array = contents.tensors[tensor].array
            _require(array >= 0, tensor, array, "the bound of a difference must be at least 0")
        for small, large in zip(radii, radii[1:], strict=False):
            rule = f"a bound for radius {small} holds for fewer data sets than one for radius {large}"
            _check_below(contents, f"difference/{small}/{name}", f"difference/{large}/{name}", rule)


def _check_digest(contents: _Contents) -> None:
    stated = contents.metadata.content_sha256
    if stated is not None and stated != (found := _digest(contents.obj, contents.tensors)):
        raise EnvelopeError(
            f"metadata.content_sha256: found {stated}, but the contents give {found}; the file was edited or "
            f"damaged, so {_REWRITE}"
        )


def _remark_digest(contents: _Contents) -> str:
    stated = contents.metadata.content_sha256
    return stated or "none stated, so edits cannot be detected"


def _remark_shapes(contents: _Contents) -> str:
    total = sum(math.prod(shape) for _, shape in contents.metadata.parameters)
    return f"{total} scalar parameters in a box"


def _remark_capabilities(contents: _Contents) -> str:
    stated, backend = contents.metadata.capabilities, contents.metadata.backend
    return f"backend {backend}: sound {stated.sound}, monotone {stated.monotone} (stated by the writer)"


def _remark_radii(contents: _Contents) -> str:
    radii = contents.metadata.radii
    return f"{len(radii)} radii from {radii[0]} to {radii[-1]}"


_SHAPE_STAGES = (
    _Stage("tensor names", _check_names, True, lambda c: f"{len(c.tensors)} tensors"),
    _Stage("dtype", lambda c: _check_dtypes(c.tensors), True, lambda c: "float64"),
    _Stage("shapes", _check_shapes, True, _remark_shapes),
)
_VALUE_STAGES = (
    _Stage("finite", _check_finite, False, lambda c: "no NaN, no infinity"),
    _Stage("order", _check_order, False, lambda c: "lower <= nominal <= upper"),
    _Stage("radius 0", _check_radius_zero, False,
           lambda c: "equal to nominal" if 0 in c.metadata.radii else "not held"),
    _Stage("nesting", _check_nesting, False, lambda c: "boxes grow with the radius"),
    _Stage("certificate", _check_difference, False, lambda c: "present" if _has_difference(c) else "none"),
    _Stage("history", _check_history, False, lambda c: "present" if _HISTORY in c.tensors else "none"),
)  # fmt: skip
_STAGES = (
    _Stage("file", _open, True, lambda c: "safetensors, complete"),
    _Stage("version", _check_version_stage, True, lambda c: f"{FORMAT_VERSION}"),
    _Stage("metadata", _parse_metadata, True, _remark_capabilities),
    _Stage("radii", lambda c: _check_radii(c.metadata), True, _remark_radii),
    _Stage("parameters", lambda c: _check_parameters(c.metadata), True,
           lambda c: f"{len(c.metadata.parameters)} with different names"),
    *_SHAPE_STAGES,
    *_VALUE_STAGES,
    _Stage("digest", _check_digest, False, _remark_digest),
)
