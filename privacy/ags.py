"""AGS: private learning (Ghitu & Wicker, section V, corrected). Parameters are released at public steps.

A run has windows of training that end at the public steps `i_1 < ... < i_m = T`. Each window starts from a public
point (the model's initial values, then the last released point), is certified for all radii `0..k_max` from that
point, and ends with the release of

    Pi_box(theta + (S/a) Z ./ w),   S a smooth bound of the weighted norm of a change of theta,

rounded exactly to a public grid. `S` is capped by `G`, the public diameter of what clipping alone allows within the
window. The next window reads the records and the released point, nothing else.

Why the costs add up. Condition on the point `r` that a window starts from. Then training in the window is a
deterministic function of the records, its envelope from `r` is sound (S) and monotone across neighbours (M), and the
release is (epsilon_j, delta_j)-DP. That is adaptive composition: `(sum epsilon_j, sum delta_j)`. (The paper's
Lemma V.1 argues with an envelope around the released point, which need not hold the neighbour's released point.)

Everything in `AgsPlan` is PUBLIC and fixed before the run. Nothing is chosen by the certified sensitivity: not the
steps, the budgets, the noise, nor whether to release. Such a choice has no finite epsilon (AUDIT A5). PRIVATE: the
records, the boxes, `S`, the scales, the running time, and the files that a run keeps for resumption.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from certify._siblings import require
from certify.checkpoint import CheckpointFile
from certify.driver import Problem, check_radii, prepare, sweep
from certify.envelope import write_atomically
from certify.errors import CheckpointError, PrivacyError
from certify.recipe import Recipe
from certify.windows import Method
from privacy import noise, sampling, smooth
from privacy.agtr import require_capabilities
from privacy.mechanism import Mechanism, release_vectors, smooth_bounds

require("models", "solvers")

from models.ir import Graph  # noqa: E402
from solvers import BACKENDS, Boxes, public_reach  # noqa: E402

Progress = Callable[[int, int, str], None]
_KEY = "certdp-ags"


@dataclass(frozen=True, eq=False)
class AgsPlan:
    """Every public choice of a run; nothing in it may be computed from the records.

    `steps`: release after so many steps, ascending, the last one the number of training steps. `epsilons`, `deltas`:
    the budget of each release. `radius`: `k_max`; all radii `0..k_max` are certified. `family`: name of the noise, None
    for the public rule; `betas`: public list, None for the family's. `lower`, `upper`: the public box of the released
    parameters, numbers or one per parameter; None for the box that clipping alone allows. `weights`: positive, one per
    parameter, None for 1: parameter `i` gets noise `S / (a w_i)`, `S` in the weighted norm.
    """

    steps: tuple[int, ...]
    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    radius: int
    family: str | None = None
    betas: tuple[float, ...] | None = None
    lower: np.ndarray | float | None = None
    upper: np.ndarray | float | None = None
    weights: np.ndarray | None = None

    @classmethod
    def make(
        cls,
        steps: Sequence[int],
        epsilon: float | Sequence[float],
        delta: float | Sequence[float] = 0.0,
        radius: int = 16,
        **options,
    ) -> AgsPlan:
        """A plan from totals, which are shared equally and rounded down, or from one budget per release.

        Raises PrivacyError for steps or budgets that are not admissible.
        """
        steps = tuple(int(t) for t in steps)
        if not steps or steps[0] < 1 or any(b <= a for a, b in zip(steps, steps[1:], strict=False)):
            raise PrivacyError(f"steps: {list(steps)} does not ascend from 1 or more; give the steps to release after")
        shares = []
        for name, value in (("epsilons", epsilon), ("deltas", delta)):
            listed = not np.isscalar(value)
            share = tuple(map(float, value)) if listed else (noise.split_budget(float(value), len(steps)),) * len(steps)
            if len(share) != len(steps):
                raise PrivacyError(f"{name}: found {len(share)} for {len(steps)} releases; give one for each step")
            if not all(math.isfinite(v) and v >= 0.0 for v in share):
                raise PrivacyError(f"{name}: {list(share)} has a value that is negative or not finite")
            shares.append(share)
        if int(radius) < 1:
            raise PrivacyError(f"radius: {radius!r} is less than 1; certify at least radius 1")
        return cls(steps, *shares, int(radius), **options)

    def mechanisms(self, parameters: int) -> tuple[Mechanism, ...]:
        """The noise of each release; a function of the plan and the number of parameters alone."""
        return tuple(
            Mechanism.make(self.family, epsilon, delta, parameters, self.betas)
            for epsilon, delta in zip(self.epsilons, self.deltas, strict=True)
        )

    def facts(self) -> dict:
        """The plan as plain JSON values."""
        plain = asdict(self)
        return {k: np.asarray(v).tolist() if isinstance(v, np.ndarray) else v for k, v in plain.items()}


@dataclass(frozen=True)
class ModelGuarantee:
    """What a private model cost and means; public facts only.

    (epsilon, delta): total, under `adjacency`, for data sets of `slots` slots: the sum over the releases at `steps`,
    each (`epsilons`, `deltas`), and over `lost` attempts (the process died between drawing noise and keeping it).
    """

    epsilon: float
    delta: float
    adjacency: str
    slots: int
    mechanism: str
    steps: tuple[int, ...]
    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    lost: int
    version: str

    def metadata(self) -> dict[str, str]:
        """Entries for an ONNX file's metadata_props."""
        plain = asdict(self)
        found = {f"certdp.{k}": json.dumps(v) if not isinstance(v, str) else v for k, v in plain.items()}
        return {**found, "certdp.guarantee": json.dumps(plain)}


@dataclass(frozen=True, eq=False)
class PrivateModel:
    """A private model, safe to publish.

    `theta`: float64 (P,), the last released point; `points`: float64 (m, P), all of them; `parameters`: `theta` by
    name; `onnx`: the input model with these values in its own element type, None when no model was given.
    """

    theta: np.ndarray
    points: np.ndarray
    parameters: dict[str, np.ndarray]
    guarantee: ModelGuarantee
    onnx: bytes | None


def release_parameters(
    graph: Graph,
    recipe: Recipe,
    features: np.ndarray,
    targets: np.ndarray,
    plan: AgsPlan,
    *,
    model=None,
    output: str | None = None,
    threads: int | None = None,
    state: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 20.0,
    progress: Progress | None = None,
    bits=None,
    **method,
) -> PrivateModel:
    """Train privately: certify each window from the released point and release at the plan's steps.

    `features`, `targets`: PRIVATE, as for `certify.run`. `graph`, `recipe`, `plan`, `method`: PUBLIC; `method` holds
    fields of `certify.windows.Method` (`backend`, `F`, `stride`, ...). `model`: the ONNX file, its bytes or proto, that
    `graph` was read from (with its `output`), to be written with the released values. `state`: file that keeps every
    released point before the run goes on; `resume` continues from it. `progress(steps done, steps in all, note)` tells
    nothing of the records but the time.

    Guarantees (under the recipe's adjacency):
    * private model is dp: all released points together are (epsilon, delta)-DP with the totals of `guarantee`;
    * windows compose adaptively: given the point a window starts from, its release has the window's budget;
    * each window restarts from the released point: nothing else of the records' past enters it;
    * released points lie in the public box, on a public grid;
    * a release is never repeated: a resumed run returns the points that were kept, and pays for lost attempts.

    Errors: PrivacyError, CapabilityError, RadiusError, DataError, RecipeError, CheckpointError, ModelError; all choices
    are checked before the first release.
    """
    method = Method(**method)
    problem = prepare(graph, recipe, features, targets)
    if plan.steps[-1] != problem.steps:
        raise PrivacyError(
            f"steps: the last release is after step {plan.steps[-1]}, but training has {problem.steps} steps; "
            "end the list with the number of steps"
        )
    radii = check_radii(range(plan.radius + 1), problem.schedule.slots)
    _require(problem, method.backend)
    initial = problem.graph.initial()
    mechanisms = plan.mechanisms(initial.size)
    box = _box(problem, plan)
    weights = None if plan.weights is None else _per_parameter(plan.weights, initial.size, "weights")
    if weights is not None:
        smooth.check_weights(weights)
    grid = np.array([sampling.public_grid(low, high) for low, high in zip(*box, strict=True)])
    windows = list(zip((0, *plan.steps), plan.steps, strict=False))
    facts = _facts(problem, plan, method)
    arrays = [initial, problem.records.features, problem.records.targets]
    kept = _RunFile(state, facts, arrays, len(windows))
    first = None if state is None else _saver(state, facts, [*arrays, initial], 0)
    kept.open(resume, first is not None and first.path.exists())
    threads = threads or os.cpu_count() or 1
    for j, (start, stop) in enumerate(windows):
        if j < len(kept.points):
            continue
        theta = kept.points[-1] if kept.points else initial
        saver = None if state is None else _saver(state, facts, [*arrays, theta], j)
        end = sweep(
            problem, radii, method, start=start, stop=stop, theta=theta, threads=threads, file=saver,
            resume=saver is not None and saver.path.exists(), checkpoint_seconds=checkpoint_seconds,
            progress=None if progress is None else partial(_report, progress, stop),
        )  # fmt: skip
        boxes = end.trail.last
        nominal, by_beta = _bounds(problem, start, stop, theta, boxes, box, mechanisms[j], weights, radii)
        kept.begin(j)
        ends = tuple(side[None] for side in box)
        noisy = release_vectors(nominal, by_beta, mechanisms[j], grid, ends=ends, weights=weights, bits=bits)
        kept.keep(noisy.values[0])
        if saver is not None:
            saver.delete()
    theta = kept.points[-1]
    guarantee = _guarantee(problem, plan, mechanisms, kept.attempts)
    content = None
    if model is not None:
        from models.writer import with_parameters

        content = with_parameters(model, problem.graph.split(theta), output=output, metadata=guarantee.metadata())
    return PrivateModel(theta, np.array(kept.points), problem.graph.split(theta), guarantee, content)


def _report(progress: Progress, stop: int, done: int, total: int, boxes: Boxes) -> None:
    progress(done, total, f"next release after step {stop}")


def _saver(state, facts: dict, arrays: list, j: int) -> CheckpointFile:
    path = Path(state)
    return CheckpointFile(path.with_name(f"{path.name}.window-{j}.safetensors"), {**facts, "window": j}, arrays)


def _bounds(problem, start, stop, theta, boxes, box, mechanism, weights, radii):
    """(nominal (1, P), {beta: S (1,)}), PRIVATE: the window's result and its smooth bound, clipped to the box."""
    nominal = np.clip(boxes.nominal, *box)[None]
    lower, upper = (np.clip(side, *box)[:, None, :] for side in (boxes.lower, boxes.upper))
    if not (np.all(np.isfinite(nominal)) and np.array_equal(lower[0], nominal) and np.array_equal(upper[0], nominal)):
        raise PrivacyError("window: the box of radius 0 is not the trained point; report this")
    window = problem.window(0, 0, [Boxes.point(theta, 0)], ())
    reach = public_reach(window, [problem.step(t) for t in range(start, stop)])
    low, high = np.clip(reach.lower, *box), np.clip(reach.upper, *box)
    ceiling = np.maximum(smooth.subtract_up(high, low), smooth.SMALLEST_CEILING)[None]
    difference = None if boxes.difference is None else boxes.difference[1:, :, None]
    return nominal, smooth_bounds(lower, upper, ceiling, mechanism, weights, radii, difference)


def _require(problem: Problem, backend: str) -> None:
    """CapabilityError unless this backend bounds this model soundly and monotonically."""
    promised = BACKENDS[backend]
    monotone = promised.monotone and problem.loss.monotone and all(n.op.monotone for n in problem.graph.nodes)
    require_capabilities(SimpleNamespace(sound=promised.sound, monotone=monotone, rigour=promised.rigour))


def _box(problem: Problem, plan: AgsPlan) -> tuple[np.ndarray, np.ndarray]:
    """The public box, (P,) twice."""
    size = problem.graph.initial().size
    if (plan.lower is None) != (plan.upper is None):
        raise PrivacyError("lower, upper: only one end of the public box is given; give both or neither")
    if plan.lower is None:
        window = problem.window(0, 0, [problem.start(())], ())
        reach = public_reach(window, [problem.step(t) for t in range(problem.steps)])
        return reach.lower, reach.upper
    low, high = (_per_parameter(end, size, "lower, upper") for end in (plan.lower, plan.upper))
    with np.errstate(over="ignore", invalid="ignore"):
        fine = np.all((low < high) & np.isfinite(high - low))
    if not fine:
        raise PrivacyError("lower, upper: the public box is empty or not finite; give finite ends with lower < upper")
    return low, high


def _per_parameter(value, size: int, name: str) -> np.ndarray:
    value = np.asarray(value, np.float64)
    if value.shape not in ((), (1,), (size,)):
        raise PrivacyError(f"{name}: found shape {value.shape}; give one number, or one for each of {size} parameters")
    return np.broadcast_to(value, (size,)).copy()


def _facts(problem: Problem, plan: AgsPlan, method: Method) -> dict:
    return {
        "recipe": problem.recipe.to_dict(),
        "plan": plan.facts(),
        "method": method.facts(),
        "slots": problem.schedule.slots,
        "graph": problem.graph.digest,
    }


def _guarantee(problem: Problem, plan: AgsPlan, mechanisms, attempts: Sequence[int]) -> ModelGuarantee:
    spent = [(m.epsilon, m.delta) for m in mechanisms]
    totals = (sum(n * Fraction(one[i]) for n, one in zip(attempts, spent, strict=True)) for i in (0, 1))
    described = dict.fromkeys(m.describe() for m in mechanisms)
    try:
        own = version("certdp")
    except PackageNotFoundError:
        own = "not installed"
    return ModelGuarantee(
        *map(_float_up, totals),
        problem.recipe.privacy.adjacency,
        problem.schedule.slots,
        f"AGS: {'; '.join(described)}; adaptive composition of {len(mechanisms)} release(s)",
        plan.steps,
        tuple(e for e, _ in spent),
        tuple(d for _, d in spent),
        sum(attempts) - len(spent),
        own,
    )


def _float_up(x: Fraction) -> float:
    value = float(x)
    return value if Fraction(value) >= x else math.nextafter(value, math.inf)


class _RunFile:
    """The released points of one run, kept on disk before the run goes on; without a path, in memory only.

    `begin` is written before noise is drawn and `keep` after: what lies between them is an attempt that may be lost,
    and lost attempts are charged. The file is tied to the run by a keyed digest of data and plan: keep it private.
    """

    def __init__(self, path: str | Path | None, facts: dict, arrays: list[np.ndarray], windows: int):
        self.path = None if path is None else Path(path)
        self.points: list[np.ndarray] = []
        self.attempts = [0] * windows
        self._facts, self._arrays, self._salt = json.dumps(facts, sort_keys=True), arrays, os.urandom(32)

    def open(self, resume: bool, begun: bool) -> None:
        """Load the file with `resume`; without, refuse to overwrite what was already released.

        `begun`: the first window's certification was interrupted, so that there is something to resume.
        """
        if resume:
            if self.path is None or not (self.path.exists() or begun):
                raise CheckpointError(f"{self.path}: there is no run to resume; run without resume")
            if self.path.exists():
                self._load()
        elif self.path is not None and self.path.exists():
            raise CheckpointError(
                f"{self.path}: a run has released from these records already; resume it, or delete the file and "
                "count its whole budget as spent"
            )

    def begin(self, window: int) -> None:
        self.attempts[window] += 1
        self._save()

    def keep(self, point: np.ndarray) -> None:
        self.points.append(point)
        self._save()

    def _save(self) -> None:
        if self.path is None:
            return
        points = np.array(self.points) if self.points else np.zeros((0, self._arrays[0].size))
        metadata = {"attempts": self.attempts, "salt": self._salt.hex(), "identity": self._identity()}
        write_atomically(self.path, safetensors.numpy.save({"points": points}, {_KEY: json.dumps(metadata)}))

    def _load(self) -> None:
        try:
            with safe_open(self.path, "numpy") as file:
                metadata, points = json.loads(file.metadata()[_KEY]), file.get_tensor("points")
            attempts, salt = [int(n) for n in metadata["attempts"]], bytes.fromhex(metadata["salt"])
            identity = metadata["identity"]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: damaged file of a run ({error}); its releases are lost, count its budget as spent"
            ) from error
        self._salt = salt
        if not hmac.compare_digest(identity, self._identity()) or len(attempts) != len(self.attempts):
            raise CheckpointError(
                f"{self.path}: belongs to another run (model, data, recipe or plan differ); restore them to resume"
            )
        self.attempts, self.points = attempts, list(points)

    def _identity(self) -> str:
        mac = hmac.new(self._salt, self._facts.encode(), hashlib.sha256)
        for array in self._arrays:
            mac.update(str(array.shape).encode())
            mac.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
        return mac.hexdigest()
