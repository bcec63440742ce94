"""The training recipe: every public fact of a run, read from TOML.

A recipe holds public facts only: no field may be set from the records (a mean, a scale, a range of the data).
Models are frozen; lists become tuples; unknown keys, NaN and infinity are refused.

Formal guarantees (a test of the same name checks each):

* Every number of a recipe is finite.
* Features and targets lie in the public range before they are scaled.
* Preparing a record looks at that record alone.
* Restored predictions are in the units of the target column.
* A recipe survives the way to a dictionary and back.

Units: gradients and `clip` are in units of the loss per parameter after scaling; ranges in [features], [target]
and [output] are in the units of the table.
"""

import difflib
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from certify.errors import DataError, RecipeError

__all__ = [
    "CALIFORNIA", "Arithmetic", "Batches", "Features", "Model", "Output", "Privacy", "Recipe", "Row", "Target",
    "Training", "explain", "from_dict", "load", "loads", "markdown",
]  # fmt: skip


# --- kinds of values ---


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _numbers(value: Any) -> float | tuple[float, ...]:
    if _is_number(value):
        return float(value)
    if isinstance(value, list | tuple) and value and all(map(_is_number, value)):
        return tuple(float(entry) for entry in value)
    raise ValueError("not a finite number or a list of them")


def _positive_numbers(value: Any) -> float | tuple[float, ...]:
    numbers = _numbers(value)
    if min(np.ravel(numbers)) <= 0:
        raise ValueError("not positive")
    return numbers


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else _as_tuple(value)
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("not a name or a list of names")
    if len(set(names)) < len(names):
        raise ValueError("a name occurs twice")
    return names


def _number(value: Any) -> float:
    if not _is_number(value):
        raise ValueError("not a finite number")
    return float(value)


_Number = Annotated[float, BeforeValidator(_number)]
_Numbers = Annotated[float | tuple[float, ...], PlainValidator(_numbers)]
_PositiveNumbers = Annotated[float | tuple[float, ...], PlainValidator(_positive_numbers)]
_NumberList = Annotated[tuple[_Number, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
_Names = Annotated[tuple[str, ...], PlainValidator(_names)]
_Patterns = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
_Count = Annotated[int, Field(ge=1, le=2**53)]


def _field(accepts: str, description: str, default: Any = ...) -> Any:
    """A field with the sentence's second half for its error message: '{accepts} is required'."""
    return Field(default, description=description, json_schema_extra={"accepts": accepts})


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# --- helpers of the sections ---


def _length(section: _Section) -> int | None:
    """Length of the section's lists, None where it has scalars alone. Raises ValueError if two lengths differ."""
    lists = {}
    for name in ("lower", "upper", "offset", "scale"):
        if isinstance(value := getattr(section, name, None), tuple):
            lists[name] = len(value)
    if getattr(section, "names", None) is not None and lists:
        lists["names"] = len(section.names)
    if len(set(lists.values())) > 1:
        first, *_, last = lists
        raise ValueError(f"{first}: found {lists[first]} entries beside {lists[last]} of {last}; make them agree")
    return next(iter(lists.values()), None)


def _columns(section: "Features | Target") -> int | None:
    """Number of columns that the section states, by names or by lists; None if it states none."""
    return _length(section) if section.names is None else len(section.names)


def _check_order(lower: Any, upper: Any) -> None:
    if lower is None or upper is None:
        return
    low, high = np.broadcast_arrays(np.atleast_1d(lower), np.atleast_1d(upper))
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        if a >= b:
            at = f"[{i}]" if low.size > 1 else ""
            raise ValueError(f"lower{at}: found {a}, which is not below upper = {b}; lower < upper is required")


def _forward(section: "Features | Target", values: np.ndarray, name: str) -> np.ndarray:
    """float64 (N, C) to float64 (N, C)."""
    _all_finite(values, name, "finite numbers are required, so fill or drop the value by a public rule")
    lower = -np.inf if section.lower is None else np.asarray(section.lower)
    upper = np.inf if section.upper is None else np.asarray(section.upper)
    with np.errstate(over="ignore"):
        scaled = (np.clip(values, lower, upper) - np.asarray(section.offset)) / np.asarray(section.scale)
    _all_finite(scaled, name, f"it left the range of float64 when scaled, so change {name}.scale")
    return scaled


def _all_finite(values: np.ndarray, name: str, remedy: str) -> None:
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = (int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
        raise DataError(f"{name}: found {values[row, column]} in row {row}, column {column}; {remedy}")


# --- [training] ---

_VALUE = ("a finite number > 0", "rate of the first step")
_MINIMUM = ("a finite number >= 0", "no step goes below it")
_DECAY = ("a number in (0, 1]", "factor by which the rate falls in every period")
_Positive = Annotated[_Number, Field(gt=0)]
_NotNegative = Annotated[_Number, Field(ge=0)]
_Factor = Annotated[_Number, Field(gt=0, le=1)]


class Constant(_Section):
    """eta_t = value."""

    schedule: Literal["constant"] = _field('"constant"', "eta_t = value")
    value: _Positive = _field(*_VALUE)

    def rates(self, steps: int) -> np.ndarray:
        return np.full(steps, self.value)


class Exponential(_Section):
    """eta_t = max(minimum, value * decay^(t / period)), t from 0."""

    schedule: Literal["exponential"] = _field('"exponential"', "eta_t = max(minimum, value * decay^(t / period))")
    value: _Positive = _field(*_VALUE)
    decay: _Factor = _field(*_DECAY)
    period: _Count = _field("an integer >= 1", "steps of a period", 1)
    minimum: _NotNegative = _field(*_MINIMUM, 0.0)

    def rates(self, steps: int) -> np.ndarray:
        return np.maximum(self.minimum, self.value * self.decay ** (np.arange(steps) / self.period))


class Inverse(_Section):
    """eta_t = max(minimum, value / (1 + decay * t)), t from 0."""

    schedule: Literal["inverse"] = _field('"inverse"', "eta_t = max(minimum, value / (1 + decay * t))")
    value: _Positive = _field(*_VALUE)
    decay: _NotNegative = _field("a finite number >= 0", "growth of the divisor at every step")
    minimum: _NotNegative = _field(*_MINIMUM, 0.0)

    def rates(self, steps: int) -> np.ndarray:
        return np.maximum(self.minimum, self.value / (1 + self.decay * np.arange(steps)))


class Step(_Section):
    """eta_t = max(minimum, value * decay^floor(t / period)), t from 0."""

    schedule: Literal["step"] = _field('"step"', "eta_t = max(minimum, value * decay^floor(t / period))")
    value: _Positive = _field(*_VALUE)
    decay: _Factor = _field(*_DECAY)
    period: _Count = _field("an integer >= 1", "steps of a period")
    minimum: _NotNegative = _field(*_MINIMUM, 0.0)

    def rates(self, steps: int) -> np.ndarray:
        return np.maximum(self.minimum, self.value * self.decay ** (np.arange(steps) // self.period))


class Cosine(_Section):
    """eta_t = minimum + (value - minimum) (1 + cos(pi * min(t, period) / period)) / 2, t from 0."""

    schedule: Literal["cosine"] = _field(
        '"cosine"', "eta_t = minimum + (value - minimum) * (1 + cos(pi * min(t, period) / period)) / 2"
    )
    value: _Positive = _field(*_VALUE)
    minimum: _NotNegative = _field("a finite number >= 0", "rate from the end of the period on", 0.0)
    period: _Count | None = _field("an integer >= 1", "steps from value to minimum; default: all steps", None)

    def rates(self, steps: int) -> np.ndarray:
        period = steps if self.period is None else self.period
        phase = np.minimum(np.arange(steps), period) / period
        return self.minimum + (self.value - self.minimum) * (1 + np.cos(np.pi * phase)) / 2


class RateTable(_Section):
    """eta_t = values[t]."""

    schedule: Literal["table"] = _field('"table"', "eta_t = values[t]")
    values: _NumberList = _field("a list of finite numbers > 0, one per step", "the rate of every step")

    def rates(self, steps: int) -> np.ndarray:
        if len(self.values) != steps:
            raise RecipeError(
                f"training.learning_rate.values: found {len(self.values)} entries; one for each of the {steps} steps "
                "is required"
            )
        return np.array(self.values)


LearningRate = Constant | Exponential | Inverse | Step | Cosine | RateTable
_MAX_STEPS = 10_000_000
_StepCount = Annotated[int, Field(ge=1, le=_MAX_STEPS)]


class Training(_Section):
    """One step: theta <- contraction * theta - (eta_t / normaliser) * sum of clipped gradients of the batch."""

    loss: Literal["squared", "absolute", "huber", "logistic", "hinge", "smoothed-hinge", "cross-entropy"] = _field(
        '"squared", "absolute", "huber", "logistic", "hinge", "smoothed-hinge" or "cross-entropy"', "loss of one record"
    )
    clip: _Positive = _field(
        "a finite number > 0", "gamma: every entry of a record's gradient is clipped to [-clip, clip]"
    )
    learning_rate: LearningRate = Field(
        discriminator="schedule",
        description="eta_t, the rate of each step",
        json_schema_extra={"accepts": 'a table with schedule = "constant", "exponential", "inverse", "step", '
                           '"cosine" or "table"'},
    )  # fmt: skip
    steps: _StepCount | None = _field(f"an integer in 1 ... {_MAX_STEPS}", "T; either steps or epochs", None)
    epochs: _StepCount | None = _field(
        f"an integer in 1 ... {_MAX_STEPS}", "passes over the slots; either steps or epochs", None
    )
    contraction: _Factor = _field("a number in (0, 1]", "c: weight decay outside the clip; 1 is plain SGD", 1.0)
    normaliser: _Count | None = _field(
        "an integer >= 1", "b: the public divisor of a batch's sum; default: the nominal batch size", None
    )
    huber_delta: _Positive = _field("a finite number > 0", 'where loss = "huber" turns linear, in model units', 1.0)
    hinge_width: _Positive = _field(
        "a finite number > 0",
        'where loss = "smoothed-hinge" is curved: at margins from 1 - hinge_width to 1; below it is a line',
        1.0,
    )

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> "Training":
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise ValueError(f"steps: found {found} of steps and epochs; exactly one of them is required")
        return self


# --- the other sections ---


class Batches(_Section):
    """Which slots each step reads; drawn from public facts, never from the data."""

    kind: Literal["full", "sequential", "shuffled"] = _field(
        '"full", "sequential" or "shuffled"',
        "all slots at each step; slots in order; a new permutation per epoch",
        "full",
    )
    size: _Count | None = _field("an integer >= 1", 'nominal batch size; needed unless kind = "full"', None)
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = _field(
        "an integer in 0 ... 2^63 - 1", 'public seed of the permutations (kind = "shuffled"; default 0)', None
    )
    drop_last: bool = _field("true or false", "leave out an epoch's last batch where it is short", False)
    slots: _Count | None = _field(
        "an integer >= 1",
        "N: public number of record slots; a shorter table leaves the last slots empty, a longer one is an error; "
        "default: the number of rows, which is thereby made public",
        None,
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Batches":
        if self.kind == "full" and self.size is not None:
            raise ValueError(f'size: found {self.size} with kind = "full", which takes all slots; leave it out')
        if self.kind != "full" and self.size is None:
            raise ValueError(f'size: found nothing with kind = "{self.kind}"; an integer >= 1 is required')
        if self.kind != "shuffled" and self.seed is not None:
            raise ValueError(f'seed: found {self.seed} with kind = "{self.kind}", which draws nothing; leave it out')
        if self.kind == "full" and self.drop_last:
            raise ValueError('drop_last: found true with kind = "full", which has no short batch; leave it out')
        if self.slots is not None and self.size is not None and self.size > self.slots:
            raise ValueError(f"size: found {self.size} with slots = {self.slots}; at most slots is required")
        return self

    def per_epoch(self, slots: int) -> int:
        """Number of batches in an epoch over `slots` slots."""
        size = slots if self.size is None else self.size
        return slots // size if self.drop_last else -(-slots // size)


class Privacy(_Section):
    """Which data sets are neighbours."""

    adjacency: Literal["replace-one", "zero-out"] = _field(
        '"replace-one" or "zero-out"',
        "one slot differs: any record or none on either side; or one slot is emptied or filled",
        "replace-one",
    )


class _Affine(_Section):
    """A section with a public range and perhaps a public affine map of columns; scalars hold for all of them."""

    @model_validator(mode="after")
    def _ordered(self) -> "_Affine":
        _length(self)
        _check_order(self.lower, self.upper)
        return self


_PER_COLUMN = "a finite number or a list with one per column"
_PER_COLUMN_POSITIVE = "a finite number > 0 or a list with one per column"


class Features(_Affine):
    """x' = (clip(x, lower, upper) - offset) / scale, column by column."""

    names: _Names | None = _field(
        "a column name or a list of different ones", "columns, in order; default: all but the target", None
    )
    lower: _Numbers | None = _field(_PER_COLUMN, "public lower end: smaller values are raised to it", None)
    upper: _Numbers | None = _field(_PER_COLUMN, "public upper end: larger values are lowered to it", None)
    offset: _Numbers = _field(_PER_COLUMN, "public constant, subtracted after the projection", 0.0)
    scale: _PositiveNumbers = _field(_PER_COLUMN_POSITIVE, "public constant, divided by after the offset", 1.0)
    shape: Annotated[tuple[_Count, ...], BeforeValidator(_as_tuple), Field(min_length=1)] | None = _field(
        "a list of integers >= 1", "shape of one record at the model's input, row-major; default: (columns,)", None
    )


class Target(_Affine):
    """y' = (clip(y, lower, upper) - offset) / scale, column by column."""

    names: _Names | None = _field(
        "a column name or a list of different ones", "target columns; --target overrides", None
    )
    lower: _Numbers | None = _field(_PER_COLUMN, "public lower end: smaller values are raised to it", None)
    upper: _Numbers | None = _field(_PER_COLUMN, "public upper end: larger values are lowered to it", None)
    offset: _Numbers = _field(_PER_COLUMN, "public constant, subtracted after the projection", 0.0)
    scale: _PositiveNumbers = _field(_PER_COLUMN_POSITIVE, "public constant, divided by after the offset", 1.0)


class Output(_Affine):
    """Public range of a prediction, in units of the target column; applied before noise is added."""

    lower: _Numbers = _field(_PER_COLUMN, "public lower end of a released prediction")
    upper: _Numbers = _field(_PER_COLUMN, "public upper end of a released prediction")


class Model(_Section):
    """Which parameters are trained; patterns as in the shell (fnmatch), matched against ONNX initializer names."""

    trainable: _Patterns | None = _field(
        "a list of patterns", "parameters to train; default: weights and biases of affine layers", None
    )
    frozen: _Patterns = _field("a list of patterns", "parameters to leave as they are; wins over trainable", ())


class Arithmetic(_Section):
    """How interval products are taken."""

    products: Literal["natural", "midpoint-radius"] = _field(
        '"natural" or "midpoint-radius"',
        "exact interval product; or the faster one from midpoints and radii",
        "natural",
    )


class Recipe(_Section):
    """All public facts of a training run. `load`, `loads` and `from_dict` make one and raise RecipeError."""

    training: Training = _field("a table", "the training step and its number")
    batches: Batches = _field("a table", "the batch schedule", Batches())
    privacy: Privacy = _field("a table", "the adjacency", Privacy())
    features: Features = _field("a table", "ranges and scaling of the features", Features())
    target: Target = _field("a table", "range and scaling of the target", Target())
    output: Output | None = _field("a table", "public range of predictions; private predictions need it", None)
    model: Model = _field("a table", "choice of trainable parameters", Model())
    arithmetic: Arithmetic = _field("a table", "rule for interval products", Arithmetic())

    def to_dict(self) -> dict:
        """Plain dicts, lists, numbers and strings, every default spelt out; `from_dict` takes it back."""
        return _as_lists(self.model_dump())

    def total_steps(self, slots: int | None = None) -> int:
        """T. `slots` (N) is needed where the recipe counts epochs and states no slots. Raises RecipeError."""
        if self.training.steps is not None:
            return self.training.steps
        slots = self.batches.slots if slots is None else slots
        if slots is None:
            raise RecipeError("batches.slots: found nothing, though training.epochs counts passes over the slots; "
                              "state the public number of slots or training.steps")  # fmt: skip
        steps = self.training.epochs * self.batches.per_epoch(slots)
        if not 1 <= steps <= _MAX_STEPS:
            raise RecipeError(f"training.epochs: found {self.training.epochs}, which makes {steps} steps; "
                              f"1 ... {_MAX_STEPS} steps are possible")  # fmt: skip
        return steps

    def learning_rates(self, slots: int | None = None) -> np.ndarray:
        """eta_t of every step: float64 (T,), finite and > 0. `slots` as in `total_steps`. Raises RecipeError."""
        rates = self.training.learning_rate.rates(self.total_steps(slots))
        bad = ~(np.isfinite(rates) & (rates > 0))
        if bad.any():
            t = int(np.argmax(bad))
            raise RecipeError(f"training.learning_rate: found the rate {rates[t]} at step {t}; every rate must be "
                              "finite and > 0, so raise minimum or decay")  # fmt: skip
        return rates

    def prepare_features(self, x: np.ndarray) -> np.ndarray:
        """Projects onto the public range, then shifts and scales: (N, F) or (N, *shape) to float64 of the same
        shape, or (N, *features.shape) where the recipe states one. `x` is private data.

        Raises DataError for a value that is not finite or a number of columns that does not fit the recipe.
        """
        x = np.asarray(x, dtype=np.float64)
        columns = math.prod(x.shape[1:])
        if x.ndim < 2 or columns < 1:
            raise DataError(f"features: found an array of shape {list(x.shape)}; (records, columns) is required")
        shape = x.shape[1:] if self.features.shape is None else self.features.shape
        stated = _columns(self.features)
        if stated not in (None, columns) or math.prod(shape) != columns:
            wanted = stated or math.prod(shape)
            raise DataError(f"features: found {columns} columns, but the recipe's [features] describe {wanted}; "
                            "make them agree")  # fmt: skip
        return _forward(self.features, x.reshape(len(x), columns), "features").reshape(len(x), *shape)

    def prepare_targets(self, y: np.ndarray) -> np.ndarray:
        """Projects onto the public range, then shifts and scales: (N,) or (N, O) to float64 (N, O). Private data.

        Raises DataError for a value that is not finite or a number of columns that does not fit the recipe.
        """
        y = np.asarray(y, dtype=np.float64)
        y = y[:, None] if y.ndim == 1 else y
        stated = _columns(self.target)
        if y.ndim != 2 or stated not in (None, y.shape[1]):
            wanted = stated or "outputs"
            raise DataError(f"target: found an array of shape {list(y.shape)}; (records, {wanted}) is required")
        return _forward(self.target, y, "target")

    def restore_predictions(self, p: np.ndarray) -> np.ndarray:
        """Model units to target units: float64 of the shape of `p`, (N,) or (..., O). No clipping."""
        return np.asarray(p, dtype=np.float64) * np.asarray(self.target.scale) + np.asarray(self.target.offset)

    def output_range(self, outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The public output range in model units: (lower, upper), float64 (outputs,) each.

        Raises RecipeError if the recipe has no [output] or states it for another number of outputs.
        """
        if self.output is None:
            raise RecipeError("output: found nothing; private predictions need the public lower and upper end of a "
                              "prediction, in units of the target")  # fmt: skip
        for section, name in ((self.output, "output"), (self.target, "target")):
            if _length(section) not in (None, outputs):
                found = _length(section)
                raise RecipeError(f"{name}: found lists of {found} entries, but {outputs} outputs; make them agree")
        offset, scale = np.asarray(self.target.offset), np.asarray(self.target.scale)
        ends = [(np.asarray(end) - offset) / scale for end in (self.output.lower, self.output.upper)]
        lower, upper = (np.broadcast_to(end, (outputs,)).copy() for end in ends)
        return lower, upper

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        features, outputs = _columns(self.features), _columns(self.target)
        shape = self.features.shape
        if shape is not None and features not in (None, math.prod(shape)):
            raise ValueError(f"features.shape: found {list(shape)}, which holds {math.prod(shape)} values beside "
                             f"{features} columns; make them agree")  # fmt: skip
        if self.output is not None and None not in (outputs, wanted := _length(self.output)) and outputs != wanted:
            raise ValueError(f"output.lower: found {wanted} entries for {outputs} target columns; make them agree")
        if self.training.steps is not None or self.batches.slots is not None:
            self.learning_rates()
        return self


# --- reading ---


def load(path: str | Path) -> Recipe:
    """Reads a recipe from a TOML file. Raises RecipeError: file, field, what was found, what is accepted."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: found no such file; give the path of a recipe in TOML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: found no readable UTF-8 text ({error}); give a TOML file") from None
    return loads(text, source=str(path))


def loads(text: str, source: str = "recipe") -> Recipe:
    """Reads a recipe from TOML text; `source` names it in errors. Raises RecipeError."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise RecipeError(f"{source}: found text that is not TOML ({error}); mend it there") from None
    return from_dict(data, source)


def from_dict(data: dict, source: str = "recipe") -> Recipe:
    """Makes a recipe from nested dictionaries, as `Recipe.to_dict` returns them. Raises RecipeError."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        # a misspelt key comes first, since it is why another one is missing
        problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RecipeError(f"{source}: {_sentence(problems[0])}{more}") from None
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def _sentence(problem: dict) -> str:
    section, path, info = Recipe, [], None
    for part in problem["loc"]:
        tagged = _rates().get(part) if path[-1:] == ["learning_rate"] else None
        if tagged is not None:
            section = tagged
        elif isinstance(part, int):
            path[-1] += f"[{part}]"
        elif section is not None and part in section.model_fields:
            info = section.model_fields[part]
            section = next((kind for kind in _kinds(info.annotation) if issubclass(kind, _Section)), None)
            path.append(part)
        elif problem["type"] == "extra_forbidden":
            path.append(part)
    field = ".".join(path)
    if problem["type"] == "extra_forbidden":
        return f"{field}: found an unknown key; {_nearest(path[-1], _enclosing(problem['loc']))}"
    if problem["type"] == "value_error" and ":" in str(problem["ctx"]["error"]):  # from a validator of a whole section
        return ".".join(filter(None, [field, str(problem["ctx"]["error"])]))
    accepts = (info.json_schema_extra or {})["accepts"] if info else "a table of sections"
    if problem["type"] in ("missing", "union_tag_not_found"):
        found = "nothing"
    elif problem["type"] == "union_tag_invalid":
        field, found = f"{field}.schedule", repr(problem["ctx"]["tag"])
    else:
        found = repr(problem["input"])
    found = found if len(found) <= 60 else found[:57] + "..."
    return f"{field or 'recipe'}: found {found}; {accepts} is required"


def _kinds(annotation: Any) -> tuple:
    kinds = getattr(annotation, "__args__", (annotation,))
    return tuple(kind for kind in kinds if isinstance(kind, type))


def _rates() -> dict[str, type[_Section]]:
    """Learning rate classes by the name of their schedule."""
    return {_tag(kind): kind for kind in LearningRate.__args__}


def _tag(kind: type[_Section]) -> str:
    return kind.model_fields["schedule"].annotation.__args__[0]


def _enclosing(loc: tuple) -> type[_Section]:
    section = Recipe
    for part in loc[:-1]:
        if part in section.model_fields:
            kinds = _kinds(section.model_fields[part].annotation)
            section = next(kind for kind in kinds if issubclass(kind, _Section))
        else:
            section = _rates()[part]
    return section


def _nearest(key: str, section: type[_Section]) -> str:
    known = list(section.model_fields)
    homes = [name for name, info in Recipe.model_fields.items() for kind in _kinds(info.annotation)
             if issubclass(kind, _Section) and key in kind.model_fields]  # fmt: skip
    if homes:
        return f"'{key}' belongs to [{homes[0]}]"
    best = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    return f"the nearest known key is '{best}', all are {', '.join(known)}"


# --- documentation ---


class Row(NamedTuple):
    """One field for the reader: full name, accepted values, default ("required" where there is none), meaning."""

    field: str
    type: str
    default: str
    description: str


def explain() -> list[Row]:
    """Every field of a recipe, in order."""
    return [row for name, info in Recipe.model_fields.items() for row in _explain(name, info)]


def _explain(prefix: str, info: Any) -> Iterator[Row]:
    sections = [kind for kind in _kinds(info.annotation) if issubclass(kind, _Section)]
    if not sections:
        default = "required" if info.is_required() else _default(info.default)
        yield Row(prefix, info.json_schema_extra["accepts"], default, info.description)
    for section in sections:
        for name, inner in section.model_fields.items():
            for row in _explain(f"{prefix}.{name}", inner):
                tagged = len(sections) > 1 and name != "schedule"
                tag = f"{_tag(section)}: " if tagged else ""
                yield row._replace(description=tag + row.description)


def _default(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def markdown() -> str:
    """docs/recipe.md; a test keeps the file equal to this text."""
    lines = [_INTRODUCTION, "## A full example: California Housing", "", "```toml", CALIFORNIA.strip(), "```"]
    for section, info in Recipe.model_fields.items():
        kind = next(kind for kind in _kinds(info.annotation) if issubclass(kind, _Section))
        lines += ["", f"## [{section}]", "", kind.__doc__.strip(), ""]
        lines += ["| field | accepted | default | meaning |", "| --- | --- | --- | --- |"]
        for row in _explain(section, info):
            cells = (f"`{row.field.removeprefix(section + '.')}`", *row[1:])
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


CALIFORNIA = """\
# The 1990 census of California: 20,640 districts, median house value in 100,000 dollars.
# Every number below was chosen without looking at the records: each is public.

[training]
loss = "squared"
epochs = 4
clip = 0.5               # every entry of a record's gradient lies in [-0.5, 0.5]
contraction = 0.999

[training.learning_rate]
schedule = "exponential"
value = 0.2
decay = 0.98
minimum = 0.01

[batches]
kind = "shuffled"
size = 2064              # also the normaliser
seed = 1990
slots = 20640

[privacy]
adjacency = "replace-one"

[features]               # x' = (clip(x, lower, upper) - offset) / scale
names = ["MedInc", "HouseAge", "AveRooms", "AveBedrms", "Population", "AveOccup", "Latitude", "Longitude"]
lower = [0, 0, 0, 0, 0, 0, 32, -125]
upper = [15, 55, 20, 5, 6000, 10, 42, -114]
offset = [7.5, 27.5, 10, 2.5, 3000, 5, 37, -119.5]
scale = [7.5, 27.5, 10, 2.5, 3000, 5, 5, 5.5]

[target]                 # y' = (clip(y, lower, upper) - offset) / scale
names = "MedHouseVal"
lower = 0
upper = 5
offset = 2.5
scale = 2.5

[output]                 # released predictions, in 100,000 dollars
lower = 0
upper = 5

[model]
frozen = []

[arithmetic]
products = "natural"
"""

_INTRODUCTION = """\
# The recipe

<!-- Generated by certify.recipe.markdown(); a test compares. Change certify/recipe.py, then write it again. -->

A recipe is a TOML file with every **public** fact of a training run. Nothing in it may be computed from the
records: a range, mean or scale that was measured on the data is itself a leak, and the certificate does not
cover it. Take ranges from what a column means (a share lies in [0, 1]) or from other public data.

Training is `theta <- c * theta - (eta_t / b) * sum over the batch of clip(gradient of the loss)`, where the clip
acts on every entry and `b` is the public normaliser, not the number of records that happen to be there.

Features and targets are projected onto their public range first and scaled afterwards. Predictions come back in
the units of the target column and are clipped to `[output]` before noise is added. Steps `t` count from 0. A
misspelt key, a missing one, NaN and infinity are errors that name the field.
"""
