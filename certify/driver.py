"""The driver: from a model, a recipe and a table to an envelope, window by window.

Which argument is what: the graph, the recipe, the radii, the backend and ``F`` are PUBLIC; features, targets, the
envelope, the checkpoint and the running time are PRIVATE.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from certify import schedule as schedules
from certify._siblings import require
from certify.checkpoint import Checkpoint, CheckpointFile
from certify.envelope import Capabilities, Envelope, Metadata
from certify.errors import CertdpError, DataError, RadiusError
from certify.recipe import Features, Recipe, Target
from certify.windows import Method, Span, Trail, spans

require("models", "solvers")

from models.errors import ModelError  # noqa: E402
from models.ir import Graph  # noqa: E402
from models.losses import Loss, TargetError, make_loss  # noqa: E402
from models.ops import Interval  # noqa: E402
from solvers import BACKENDS, Boxes, Options, Records, Step, Window, bound, make_records, public_reach  # noqa: E402
from solvers.coupled import radius_bytes  # noqa: E402
from solvers.errors import UnsupportedWindowError  # noqa: E402
from solvers.hidden import jacobians  # noqa: E402
from solvers.relational import MOST_CLASSES, certified, schedule_classes  # noqa: E402

#: Pairs of a parameter and a slot that a default window has at most.
_COMFORTABLE_PAIRS = 1 << 25
#: Memory that windows may use.
_MOST_BYTES = 16 << 30
#: A certificate is kept unasked where its Jacobians have no more entries a step than this, over all records and radii.
_CHEAP_ENTRIES = 1 << 25
#: Steps over which a relational backend multiplies matrices by default.
_RELATIONAL_STEPS = 32

#: Called after every window with (steps done, steps in all, boxes); boxes are private.
Progress = Callable[[int, int, Boxes], None]


def _prepared_range(section: Features | Target, prepare: Callable, columns: int) -> Interval | None:
    if section.lower is None or section.upper is None:
        return None
    ends = (np.broadcast_to(np.asarray(end, float), columns) for end in (section.lower, section.upper))
    return Interval(*(prepare(end[None]).reshape(-1, 1) for end in ends))


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything a window is cut from: the prepared graph, loss, public schedule and rates, and private records."""

    graph: Graph
    recipe: Recipe
    loss: Loss
    records: Records
    schedule: schedules.Schedule
    rates: np.ndarray

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @cached_property
    def feature_range(self) -> Interval | None:
        """Public ends ``(F, 1)`` of prepared features; None where the recipe states none."""
        return _prepared_range(self.recipe.features, self.recipe.prepare_features, self.graph.input_features)

    @cached_property
    def target_range(self) -> Interval | None:
        """Public ends ``(1, 1)`` of the prepared target; None where the recipe states none, or for several outputs."""
        outputs = self.graph.outputs
        return _prepared_range(self.recipe.target, self.recipe.prepare_targets, 1) if outputs == 1 else None

    @cached_property
    def classes(self) -> np.ndarray | None:
        """int64 ``(slots,)``, public: equal for slots that are in the same batches of the run; None: too many."""
        found = schedule_classes((self.schedule.batch(t) for t in range(self.steps)), self.schedule.slots)
        return found if found.max(initial=0) < MOST_CLASSES else None

    def step(self, t: int) -> Step:
        return Step(self.schedule.batch(t), float(self.rates[t]))

    def window(
        self, start: int, stop: int, known: Sequence[Boxes], radii: Sequence[int], relational: bool = False
    ) -> Window:
        """Steps ``start .. stop - 1`` from ``known[0]``; the rest of ``known`` is the boxes after the first steps.

        ``relational``: with what a relational certificate needs.
        """
        training = self.recipe.training
        return Window(
            graph=self.graph,
            loss=self.loss,
            records=self.records,
            steps=tuple(self.step(t) for t in range(start, stop)),
            known=tuple(known),
            radii=tuple(radii),
            clip=training.clip,
            contraction=training.contraction,
            normaliser=self.schedule.normaliser,
            adjacency=self.recipe.privacy.adjacency,
            feature_range=self.feature_range,
            target_range=self.target_range,
            classes=self.classes if relational else None,
        )

    def start(self, radii: Sequence[int]) -> Boxes:
        return Boxes.point(self.graph.initial(), len(radii))


def prepare_graph(graph: Graph, recipe: Recipe) -> Graph:
    """The graph with the recipe's choice of trainable parameters and interval products."""
    model = recipe.model
    if model.trainable is not None or model.frozen:
        graph = graph.with_trainable(model.trainable, model.frozen)
    elif not graph.trainable:
        raise ModelError("the model has no trainable parameter; choose some with the recipe's model.trainable")
    return graph.with_products(recipe.arithmetic.products)


def training_loss(recipe: Recipe) -> Loss:
    """The loss that the recipe names, with its public constants."""
    return make_loss(recipe.training.loss, recipe.training.huber_delta, recipe.training.hinge_width)


def prepare(graph: Graph, recipe: Recipe, features: np.ndarray, targets: np.ndarray) -> Problem:
    """Check and join all parts of a run.

    ``features`` ``(R, F)`` or ``(R, *shape)``, ``targets`` ``(R,)`` or ``(R, O)``, both private and in the units of the
    table; the recipe's public ranges and scalings are applied here.
    Raises DataError, RecipeError or ModelError.
    """
    graph = prepare_graph(graph, recipe)
    x = recipe.prepare_features(features)
    y = recipe.prepare_targets(targets)
    if len(x) != len(y):
        raise DataError(f"targets: found {len(y)} rows beside {len(x)} rows of features; every record needs both")
    schedule = schedules.make(recipe, len(x))
    loss = training_loss(recipe)
    width = int(np.prod(x.shape[1:]))
    if width != graph.input_features:
        raise DataError(
            f"features: the table has {width} values a record, the model takes {graph.input_features} "
            f"(shape {list(graph.input_shape)}); choose columns with the recipe's features.names"
        )
    try:
        records = make_records(graph, loss, x.reshape(len(x), *graph.input_shape), y, schedule.slots)
    except TargetError as error:
        raise DataError(f"targets: {error}") from error
    return Problem(graph, recipe, loss, records, schedule, recipe.learning_rates(schedule.slots))


def parse_radii(text: str) -> tuple[int, ...]:
    """``"0..28"``, ``"0,1,2"`` or a mixture as ascending radii; 0 is always included.  Raises RadiusError."""
    radii = {0}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", part)
        if not match:
            raise RadiusError(f"radii: found {text!r}; numbers and ranges like 0..28 or 0,1,2,4 are accepted")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise RadiusError(f"radii: found the range {part.strip()!r}, which runs backwards")
        if last > 10_000_000:
            raise RadiusError(f"radii: found {last}; a radius is a number of records, at most 10000000")
        radii.update(range(first, last + 1))
    return tuple(sorted(radii))


def check_radii(radii: Sequence[int], slots: int) -> tuple[int, ...]:
    """Ascending radii with 0 among them; raises RadiusError for one that is negative or above ``slots``."""
    wanted = tuple(sorted({0, *(int(k) for k in radii)}))
    if wanted[0] < 0 or wanted[-1] > slots:
        raise RadiusError(
            f"radii: found {wanted[0] if wanted[0] < 0 else wanted[-1]}; "
            f"a radius is a number of differing records, from 0 to the {slots} slots of the data set"
        )
    return wanted


def default_frequency(problem: Problem, backend: str) -> int:
    """An epoch of minibatches where it has no more than ``_COMFORTABLE_PAIRS``, else one step; radii and threads do not
    matter, since they must not change the result.  The relational backend takes whole epochs of 32 steps or more."""
    epoch = problem.schedule.batches_per_epoch
    if BACKENDS[backend].relational:
        epoch *= -(-_RELATIONAL_STEPS // epoch)
    epoch = min(problem.steps, epoch)
    if epoch == 1 or problem.recipe.privacy.adjacency != "replace-one":
        return epoch
    batch = problem.schedule.size
    pairs = problem.graph.initial().size * (min(problem.schedule.slots, epoch * batch) + 2 * batch)
    return epoch if pairs <= _COMFORTABLE_PAIRS else 1


def keeps_certificate(problem: Problem, radii: Sequence[int], method: Method) -> bool:
    """Whether a run keeps a relational certificate: a public rule.

    Raises UnsupportedWindowError where the method asks for one and there is none.
    """
    if BACKENDS[method.backend].relational or method.relational is False:
        return BACKENDS[method.backend].relational
    entries = problem.graph.initial().size ** 2 * problem.schedule.size * sum(k > 0 for k in radii)
    if method.relational is None and entries > _CHEAP_ENTRIES:
        return False
    try:
        jacobians(problem.window(0, 0, [problem.start(())], ()))
    except UnsupportedWindowError:
        if method.relational:
            raise
        return False
    return True


def check_memory(
    problem: Problem, windows: Sequence[Span], radii: Sequence[int], threads: int, start: int = 0
) -> None:
    """Raises CertdpError for windows from step ``start`` on that would need more than ``_MOST_BYTES``."""
    longest = max((span.stop - span.start for span in windows), default=1)
    if longest == 1 or problem.recipe.privacy.adjacency != "replace-one":
        return
    schedule = problem.schedule
    slots = min(schedule.slots, longest * schedule.size)
    whole = all(schedule.epoch(start + s.start) == schedule.epoch(start + s.stop - 1) for s in windows)
    one = radius_bytes(problem.graph.initial().size, 0 if whole else slots, min(max(radii), slots))
    need = one * min(threads, max(1, len(radii) - 1))
    if need > _MOST_BYTES:
        raise CertdpError(
            f"F: windows of {longest} steps need about {need / 2**30:.0f} GiB for radii up to {max(radii)} "
            f"on {threads} threads, more than {_MOST_BYTES >> 30} GiB; choose a smaller F or fewer threads"
        )


def sweep(
    problem: Problem,
    radii: Sequence[int],
    method: Method,
    *,
    start: int = 0,
    stop: int | None = None,
    theta: np.ndarray | None = None,
    threads: int = 1,
    file: CheckpointFile | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 20.0,
    progress: Progress | None = None,
) -> Checkpoint:
    """The boxes of all radii after steps ``start .. stop - 1`` from the point ``theta``, window by window; PRIVATE.

    Default: the whole run from the initial parameters.  ``file`` keeps the state every ``checkpoint_seconds``, on
    interruption and at the end; with ``resume`` the state it holds is where the run goes on.  Steps of the result are
    counted from ``start``.
    """
    stop = problem.steps if stop is None else stop
    F = default_frequency(problem, method.backend) if method.F is None else method.F
    relational = keeps_certificate(problem, radii, method)
    windows = list(spans(stop - start, F, method.stride))
    check_memory(problem, windows, radii, threads, start)
    keep = 1 if method.stride is None else max(span.stop - span.start for span in windows)
    trail = Trail(0, [problem.start(radii) if theta is None else Boxes.point(theta, len(radii))])
    widths, before = np.zeros((stop - start + 1, len(radii))), 0.0
    if resume:
        saved = file.load()
        trail, before = saved.trail, saved.seconds
        widths[: trail.step + 1] = saved.widths
    started = last_save = time.monotonic()

    def state() -> Checkpoint:
        return Checkpoint(trail, widths[: trail.step + 1], before + time.monotonic() - started)

    try:
        for span in windows:
            if span.stop <= trail.step:
                continue
            known = trail.since(span.start)
            window = problem.window(start + span.start, start + span.stop, known, radii, relational)
            inside = None if progress is None else _counted(progress, start + span.known, problem.steps)
            found = bound(method.backend, window, method.options(threads, inside))
            if relational and found[-1].difference is None:
                found = certified(window, found, threads)
            widths[span.known + 1 : span.stop + 1] = [boxes.width for boxes in found]
            trail = trail.then(found, keep)  # replaced as one value, so that an interruption cannot tear it
            if progress is not None:
                progress(start + trail.step, problem.steps, trail.last)
            if file is not None and time.monotonic() - last_save > checkpoint_seconds:
                file.save(state())
                last_save = time.monotonic()
    except BaseException:
        # Ctrl-C and failures alike: what has been computed is kept.
        if file is not None and trail.step:
            file.save(state())
        raise
    if file is not None:
        file.save(state())
    return state()


def _counted(progress: Progress, done: int, total: int) -> Callable[[Boxes], None]:
    """``progress`` for the steps inside a window, ``done`` of which were taken before it."""
    steps = itertools.count(done + 1)
    return lambda boxes: progress(next(steps), total, boxes)


def run(
    graph: Graph,
    recipe: Recipe,
    features: np.ndarray,
    targets: np.ndarray,
    radii: Sequence[int],
    *,
    threads: int | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 20.0,
    progress: Progress | None = None,
    model_sha256: str | None = None,
    data_key: bytes | None = None,
    **method,
) -> Envelope:
    """Bound training on every data set that differs from this one in up to ``k`` records, for all radii in one run.

    ``features``, ``targets``: as for `prepare`, private.  ``radii``: numbers of differing records, 0 is added.
    ``method``: how training is bounded, the fields of `certify.windows.Method`: ``backend``, ``F``, ``stride``, ....
    ``threads``: default all cores; they do not change the result.
    ``checkpoint``: file to save the state to every ``checkpoint_seconds`` and on interruption; with ``resume`` the run
    continues from it and gives the result of an uninterrupted run bit for bit.  ``data_key``: secret key for a
    digest of the data to be stored in the envelope.

    Guarantees (under the recipe's adjacency; THEORY sections 1 and 2):
      * the radius-0 envelope is the nominal run, bit for bit;
      * the envelope of radius k contains the parameters trained on every data set that differs in at most k slots;
      * the envelopes are monotone across neighbours, as computed;
      * a resumed run equals an uninterrupted one bit for bit.

    Raises DataError, RecipeError, RadiusError, CheckpointError, ModelError.
    """
    method = Method(**method)
    problem = prepare(graph, recipe, features, targets)
    radii = check_radii(radii, problem.schedule.slots)
    facts = {
        "recipe": recipe.to_dict(),
        "radii": list(radii),
        "method": method.facts(),
        "slots": problem.schedule.slots,
        "graph": problem.graph.digest,
        "model": model_sha256,
    }
    arrays = [problem.records.features, problem.records.targets]
    file = CheckpointFile(checkpoint, facts, arrays) if checkpoint is not None else None
    if resume and file is None:
        raise CertdpError("resume: no checkpoint file is given")
    end = sweep(
        problem,
        radii,
        method,
        threads=threads or os.cpu_count() or 1,
        file=file,
        resume=resume,
        checkpoint_seconds=checkpoint_seconds,
        progress=progress,
    )
    return make_envelope(problem, end, radii, method, model_sha256, data_key)


def train(graph: Graph, recipe: Recipe, features: np.ndarray, targets: np.ndarray, threads: int = 1) -> np.ndarray:
    """The nominal run alone: trained parameters ``(P,)``, private, equal to the radius-0 envelope bit for bit."""
    problem = prepare(graph, recipe, features, targets)
    return bound("ibp", problem.window(0, problem.steps, [problem.start(())], ()), Options(threads))[-1].nominal


def reach(graph: Graph, recipe: Recipe, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """The public box ``(P,)`` that holds the trained parameters whatever the data: clipping alone allows no more."""
    graph = prepare_graph(graph, recipe)
    nothing = Records(np.zeros((graph.input_features, 0)), np.zeros((graph.outputs, 0)), slots)
    loss = training_loss(recipe)
    schedule = schedules.make(recipe, slots)
    problem = Problem(graph, recipe, loss, nothing, schedule, recipe.learning_rates(slots))
    window = problem.window(0, 0, [problem.start(())], ())
    box = public_reach(window, [problem.step(t) for t in range(problem.steps)])
    return box.lower, box.upper


def make_envelope(
    problem: Problem, end: Checkpoint, radii: Sequence[int], method: Method, model_sha256=None, data_key=None
) -> Envelope:
    """The envelope of a finished run."""
    capabilities, boxes = BACKENDS[method.backend], end.trail.last
    F = default_frequency(problem, method.backend) if method.F is None else method.F
    monotone = capabilities.monotone and problem.loss.monotone and all(n.op.monotone for n in problem.graph.nodes)
    metadata = Metadata(
        adjacency=problem.recipe.privacy.adjacency,
        slots=problem.schedule.slots,
        radii=tuple(radii),
        parameters=tuple((p.name, p.shape) for p in problem.graph.trainable),
        backend=method.backend,
        capabilities=Capabilities(
            capabilities.sound,
            monotone,
            capabilities.rigour,
            _tolerance(problem, method) if capabilities.tau else 0.0,
            problem.recipe.arithmetic.products,
        ),
        concretisation=F,
        stride=method.stride,
        solver=method.solver if capabilities.solvers else None,
        steps=problem.steps,
        recipe=problem.recipe.to_dict(),
        model_sha256=model_sha256,
        data_hmac=_data_digest(problem.records, data_key) if data_key else None,
        versions=_versions(),
        wall_time_s=round(end.seconds, 3),
    )
    split = problem.graph.split
    return Envelope(
        metadata,
        nominal=split(boxes.nominal),
        lower={k: split(boxes.lower[j]) for j, k in enumerate(radii)},
        upper={k: split(boxes.upper[j]) for j, k in enumerate(radii)},
        difference=None if boxes.difference is None else _differences(problem, radii, boxes.difference) or None,
        history=end.widths,
    )


def _tolerance(problem: Problem, method: Method) -> float:
    """The largest tolerance of a program backend's windows, in parameter units; public."""
    from solvers.programs.backend import tolerance  # brings in the modelling layer

    whole = problem.window(0, problem.steps, [problem.start(())], ())
    return tolerance(whole, method.options(threads=1))


def _differences(problem: Problem, radii: Sequence[int], difference: np.ndarray) -> dict[int, dict[str, np.ndarray]]:
    """A certificate ``(K, C, P)`` by radius and parameter, arrays ``(C, *shape)``; radius 0 has none."""
    by_class = {k: [problem.graph.split(row) for row in rows] for k, rows in zip(radii, difference, strict=True) if k}
    names = [p.name for p in problem.graph.trainable]
    return {k: {name: np.stack([part[name] for part in parts]) for name in names} for k, parts in by_class.items()}


def _data_digest(records: Records, key: bytes) -> str:
    mac = hmac.new(key, str((records.features.shape, records.targets.shape)).encode(), hashlib.sha256)
    mac.update(records.features.astype("<f8").tobytes())
    mac.update(records.targets.astype("<f8").tobytes())
    return mac.hexdigest()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("certdp", "numpy", "numba", "onnx"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
