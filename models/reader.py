"""Reading ONNX files: ``read`` gives a Graph or one clear error, ``inspect`` a report on any file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto

from models.errors import InvalidModelError, ModelError, UnsupportedModelError
from models.ir import Graph
from models.lowering import STAND_IN, Lowered, load_rules, supported_operators, unsupported, walk
from models.values import RULES, Problem, domain_of, kind_name

OLDEST_OPSET = 9
Source = str | Path | bytes | onnx.ModelProto


@dataclass(frozen=True, eq=False)
class ModelReport:
    """What a file contains and whether it can be certified.

    ``operators`` counts the ONNX operators, ``unsupported`` lists every node that is refused, ``problem`` is the
    sentence ``read`` would raise (None when the file is read), ``graph`` the IR when there is one.
    """

    path: str
    producer: str
    opsets: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    operators: dict[str, int]
    unsupported: tuple[Problem, ...]
    notes: tuple[str, ...]
    problem: str | None
    graph: Graph | None

    @property
    def readable(self) -> bool:
        return self.graph is not None


def read(
    path: Source,
    trainable: Sequence[str] | None = None,
    frozen: Sequence[str] = (),
    output: str | None = None,
    check: bool = True,
) -> Graph:
    """Reads a regressor from an ONNX file, its bytes, or a ModelProto.

    ``trainable`` and ``frozen`` are shell patterns over parameter names (default: weights and biases of affine
    layers train).  ``output`` names the regression output when there are several.  With ``check`` the graph is
    compared with onnxruntime on random records.

    Raises InvalidModelError (not an ONNX model, data missing), UnsupportedModelError (uses something that is not
    certified; all such nodes are named), DisagreementError (a defect), ModelError (patterns, no such file).
    """
    with _naming(path):
        return _read(load(path), trainable, frozen, output, check)


@contextmanager
def _naming(path: Source) -> Iterator[None]:
    """Puts the file's name in front of messages."""
    label = _label(path)
    try:
        yield
    except UnicodeDecodeError as error:
        raise InvalidModelError(f"{label + ': ' if label else ''}this is not an ONNX file: {error}") from error
    except ModelError as error:
        if label and label not in str(error):
            raise type(error)(f"{label}: {error}") from error
        raise


def _label(path: Source) -> str:
    return str(path) if isinstance(path, (str, Path)) else ""


def _read(
    model: onnx.ModelProto,
    trainable: Sequence[str] | None,
    frozen: Sequence[str],
    output: str | None,
    check: bool,
) -> Graph:
    lowered = _lower(model, output, check)
    graph = lowered.graph
    if check:
        from models.verify import compare

        compare(lowered, model)
    if trainable is not None or frozen:
        graph = graph.with_trainable(trainable, frozen)
    return graph


def load(path: Source) -> onnx.ModelProto:
    """The model with external data loaded and local functions inlined; InvalidModelError or ModelError otherwise."""
    if isinstance(path, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(path)
        base = None
    elif isinstance(path, bytes):
        model, base = _parse(path), None
    else:
        file = Path(path)
        if not file.is_file():
            raise ModelError(f"there is no file {file}")
        model, base = _parse(file.read_bytes()), file.parent
    if not model.HasField("graph") or not model.graph.output:
        raise InvalidModelError("this is not a complete ONNX model: it has no graph with an output")
    _external_data(model, base)
    if model.functions:
        from onnx import inliner

        try:
            model = inliner.inline_local_functions(model)
        except Exception as error:
            raise InvalidModelError(f"the functions of the model cannot be inlined: {error}") from error
    _merge_opsets(model)
    return model


def digest(path: str | Path) -> str:
    """SHA-256 (hex) of an ONNX file, and of the external data files it names in their order; ModelError without."""
    file = Path(path)
    try:
        content = file.read_bytes()
        total = hashlib.sha256(content)
        with _naming(path):
            entries = [entry for tensor in _parse(content).graph.initializer for entry in tensor.external_data]
        for where in sorted({entry.value for entry in entries if entry.key == "location"}):
            total.update((file.parent / where).read_bytes())
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read ({error.strerror}); give the path of a model") from error
    return total.hexdigest()


def _parse(content: bytes) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
        _check_text(model)
    except Exception as error:
        raise InvalidModelError("this is not an ONNX file, or it is truncated") from error
    return model


def _check_text(model: onnx.ModelProto) -> None:
    """Raises for names that are not text: a damaged file, which protobuf lets pass."""
    graph = model.graph
    names = [model.producer_name, model.producer_version, model.domain, graph.name]
    names += [o.domain for o in model.opset_import]
    for info in [*graph.input, *graph.output, *graph.value_info]:
        names += [info.name, *(d.dim_param for d in info.type.tensor_type.shape.dim)]
    for tensor in graph.initializer:
        names += [tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value))]
    for node in graph.node:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
        names += [attribute.name for attribute in node.attribute]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a name is not text")


def _external_data(model: onnx.ModelProto, base: Path | None) -> None:
    from onnx import external_data_helper

    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        where = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
        if base is None:
            raise InvalidModelError(
                f"initializer {tensor.name!r} lies in the external file {where!r}; read the model from its path"
            )
        if not (base / where).is_file():
            raise InvalidModelError(
                f"initializer {tensor.name!r} lies in the external data file {where!r}, which is missing beside the "
                "model; copy it there, or export with the data inside (torch.onnx.export(..., external_data=False))"
            )
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(base))
        except Exception as error:
            raise InvalidModelError(f"external data of initializer {tensor.name!r}: {error}") from error
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _merge_opsets(model: onnx.ModelProto) -> None:
    """skl2onnx writes the default domain twice; the newer entry holds, as in onnxruntime."""
    versions: dict[str, int] = {}
    for entry in model.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        versions[domain] = max(versions.get(domain, 0), entry.version)
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in versions.items())


# -- from the model to the walk ---------------------------------------------------------------------------------


def _lower(model: onnx.ModelProto, output: str | None, check: bool) -> Lowered:
    """Walks the graph; raises the first thing that is wrong, the kinds of error in a fixed order."""
    load_rules()
    plain = _plainly_unsupported(model)
    outputs = [o.name for o in model.graph.output]
    if output is None and len(outputs) > 1:
        if plain:
            raise UnsupportedModelError(_sentence(plain))
        raise UnsupportedModelError(f"the model has outputs {', '.join(outputs)}; name the regression output")
    if output is not None and output not in outputs:
        raise ModelError(f"there is no output {output!r}; the model has {', '.join(outputs)}")
    chosen = [output or outputs[0]]
    _opset(model, plain)
    records, dynamic = _prepare_input(model)
    if check and not plain:
        from models.verify import runner

        runner(model)
    lowered = walk(model, chosen, records, dynamic)
    if lowered.problems:
        raise UnsupportedModelError(_sentence(lowered.problems))
    return lowered


def _plainly_unsupported(model: onnx.ModelProto) -> list[Problem]:
    """Nodes whose operator has no rule and that read the record, judged by names alone."""
    stored = {i.name for i in model.graph.initializer}
    live = {i.name for i in model.graph.input if i.name not in stored}
    found = []
    for position, node in enumerate(model.graph.node):
        if not live.intersection(node.input) and not any(a.HasField("g") for a in node.attribute):
            continue
        if node.op_type not in ("Shape", "Size"):
            live.update(node.output)
        if (domain_of(node), node.op_type) not in RULES and node.op_type not in ("Shape", "Size"):
            name = node.name or f"{node.op_type}_{position}"
            found.append(Problem(name, node.op_type, unsupported(node)))
    return found


def _sentence(problems: Sequence[Problem]) -> str:
    shown = "; ".join(str(p) for p in problems[:3])
    more = f"; and {len(problems) - 3} more nodes" if len(problems) > 3 else ""
    return f"{shown}{more} (`certdp models FILE` lists what is supported)"


def _opset(model: onnx.ModelProto, plain: Sequence[Problem]) -> None:
    version = {o.domain: o.version for o in model.opset_import}.get("")
    if version is None or all(domain_of(n) for n in model.graph.node):
        return
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= version <= newest:
        also = f"; {_sentence(plain)}" if plain else ""
        raise UnsupportedModelError(
            f"the file uses ONNX opset {version}; {OLDEST_OPSET} to {newest} are read: export it again{also}"
        )


def _prepare_input(model: onnx.ModelProto) -> tuple[int, bool]:
    """Number of records to walk with, and whether the file leaves it open; refuses inputs that are not records."""
    stored = {i.name for i in model.graph.initializer}
    feeds = [i for i in model.graph.input if i.name not in stored]
    if len(feeds) != 1:
        names = ", ".join(i.name for i in feeds) or "none"
        raise UnsupportedModelError(f"a model needs exactly one input, the features of a record; it has {names}")
    (feed,) = feeds
    if feed.type.WhichOneof("value") != "tensor_type":
        raise UnsupportedModelError(f"input {feed.name!r} is not a tensor")
    kind = feed.type.tensor_type.elem_type
    if kind not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        raise UnsupportedModelError(
            f"input {feed.name!r} is {kind_name(kind)}; float (float32) and double (float64) are read"
        )
    if not feed.type.tensor_type.HasField("shape") or not feed.type.tensor_type.shape.dim:
        raise UnsupportedModelError(
            f"input {feed.name!r} has no shape (records, features ...); export the model with one"
        )
    first, *rest = feed.type.tensor_type.shape.dim
    for axis, dimension in enumerate(rest, 1):
        if dimension.dim_value < 1:
            raise UnsupportedModelError(
                f"axis {axis} of input {feed.name!r} has no fixed length; only the first axis, the records, may be open"
            )
    if first.dim_value > 0:
        return first.dim_value, False
    return _stand_in(model), True


def _stand_in(model: onnx.ModelProto) -> int:
    """A prime that is no dimension of the file."""
    sizes = {d for i in model.graph.initializer for d in i.dims}
    candidate = STAND_IN
    while candidate in sizes or any(candidate % k == 0 for k in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate


# -- the report -------------------------------------------------------------------------------------------------


def inspect(
    path: Source,
    trainable: Sequence[str] | None = None,
    frozen: Sequence[str] = (),
    output: str | None = None,
) -> ModelReport:
    """A report on a file; raises InvalidModelError or ModelError only when it is no ONNX model at all."""
    with _naming(path):
        model = load(path)
        return _report(path, model, trainable, frozen, output)


def _report(
    path: Source,
    model: onnx.ModelProto,
    trainable: Sequence[str] | None,
    frozen: Sequence[str],
    output: str | None,
) -> ModelReport:
    graph, problem = None, None
    try:
        graph = _read(model, trainable, frozen, output, True)
    except ModelError as error:
        problem = str(error)
    problems, notes = _survey(model, output)
    if graph is not None:
        kept = {p.name for p in graph.parameters}
        notes = [text for name, text in notes if name in kept] + _notes(graph, model)
    else:
        notes = []
    stored = {i.name for i in model.graph.initializer}
    names = Counter(f"{domain_of(n)}.{n.op_type}" if domain_of(n) else n.op_type for n in model.graph.node)
    return ModelReport(
        path=_label(path) or "(model in memory)",
        producer=" ".join(filter(None, [model.producer_name, model.producer_version])),
        opsets=tuple(sorted((o.domain or "ai.onnx", o.version) for o in model.opset_import)),
        inputs=tuple((i.name, _type(i)) for i in model.graph.input if i.name not in stored),
        outputs=tuple((o.name, _type(o)) for o in model.graph.output),
        operators=dict(sorted(names.items())),
        unsupported=tuple(problems),
        notes=tuple(notes),
        problem=problem,
        graph=graph,
    )


def _survey(model: onnx.ModelProto, output: str | None) -> tuple[list[Problem], list[tuple[str, str]]]:
    """Every node that is refused, from a walk over all outputs."""
    load_rules()
    try:
        records, dynamic = _prepare_input(model)
        outputs = [output] if output else [o.name for o in model.graph.output]
        lowered = walk(model, outputs, records, dynamic)
    except ModelError:
        return _plainly_unsupported(model), []
    return list(lowered.problems), list(lowered.builder.notes)


def _notes(graph: Graph, model: onnx.ModelProto) -> list[str]:
    """Trained parameters that several nodes of the file read."""
    readers: Counter[str] = Counter()
    for node in model.graph.node:
        statistics = node.input[3:5] if node.op_type == "BatchNormalization" else []
        if node.op_type != "Identity":
            readers.update(set(node.input).difference(statistics))
    return [
        f"parameter {p.name!r} is read by {readers[p.name]} nodes: it is one shared parameter (an exporter may also "
        "have merged parameters that were equal when exported)"
        for p in graph.trainable
        if readers[p.name] > 1
    ]


def _type(info: onnx.ValueInfoProto) -> str:
    if info.type.WhichOneof("value") != "tensor_type":
        return str(info.type.WhichOneof("value") or "unknown")
    tensor = info.type.tensor_type
    dims = ", ".join(d.dim_param or (str(d.dim_value) if d.dim_value else "?") for d in tensor.shape.dim)
    return f"{kind_name(tensor.elem_type)} ({dims})"


__all__ = ["ModelReport", "inspect", "load", "read", "supported_operators"]
