"""The falsifier: data sets at a given distance that push the trained parameters as far as can be found.

A sound envelope of radius ``k`` holds the parameters trained on every data set that differs in ``k`` slots.  The attack
looks for such a data set outside it: a linearised account of the whole training run says what each record is worth to
an objective, the records that gain most are replaced, and the *nominal trainer* itself is run on the altered data, so
that every number reported here is reached by a real run.  The guide may be wrong (it costs strength, never truth).

Everything here is PRIVATE apart from the recipe and the graph: records found, values reached, ratios, running times,
and the message of an EnvelopeViolation.  Nothing in this module is a release.

Formal guarantees (a test of the same name checks each):

* Every value reported is reached: training on the reported records gives the reported parameters bit for bit.
* The altered data set lies within the radius asked for, under the recipe's adjacency.
* Altered records lie in the recipe's public ranges, and their targets are such as the loss takes.
* A box that some reached parameters leave is reported as a violation, by exact comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from certify.driver import Problem
from certify.errors import CertdpError, RadiusError
from models.ir import Graph
from solvers import Boxes, Records
from solvers.gradients import FixedPoint
from solvers.ibp import Plan, _backward, _Outer, record_gradients, step

__all__ = [
    "AttackReport",
    "AttackResult",
    "Direction",
    "EnvelopeViolation",
    "Objective",
    "Query",
    "attack_report",
    "clipped_gradients",
    "guided_attack",
    "random_attack",
    "trajectory",
]

#: Number of directions that stand for the clipping patterns of a chunk of records in the adjoint; exact up to it.
_RANK = 6
#: Of a larger batch the adjoint looks at a random sample of this many records.
_SAMPLE = 256
#: Numbers in a chunk's matrix of per-record gradients.
_NUMBERS = 1 << 21
#: Guided rounds without a gain after which the rest of the budget goes into nudges.
_PATIENCE = 3
#: Where no public range is stated any record is a neighbour: the data's bounding box is stretched by this factor.
_STRETCH = 3.0


class EnvelopeViolation(CertdpError):
    """Parameters reached by training on an admissible data set lie outside the envelope of that radius."""


class Objective(Protocol):
    """What an attack maximises: a function of the trained parameters."""

    def value(self, theta: np.ndarray) -> float:
        """The number to maximise at ``theta`` ``(P,)``."""

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        """Its gradient ``(P,)``."""


@dataclass(frozen=True, eq=False)
class Direction:
    """``vector . theta``, ``vector`` ``(P,)``; for a unit vector the value is the parameter itself, bit for bit."""

    vector: np.ndarray

    @classmethod
    def parameter(cls, size: int, index: int, sign: float = 1.0) -> Direction:
        vector = np.zeros(size)
        vector[index] = sign
        return cls(vector)

    def value(self, theta: np.ndarray) -> float:
        used = np.flatnonzero(self.vector)
        return float((self.vector[used] * theta[used]).sum())

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        return self.vector


@dataclass(frozen=True, eq=False)
class Query:
    """``sign`` times output ``output`` of the model at the public input ``x`` (of the model's input shape)."""

    graph: Graph
    x: np.ndarray
    output: int = 0
    sign: float = 1.0

    @cached_property
    def _plan(self) -> Plan:
        return Plan(self.graph)

    def value(self, theta: np.ndarray) -> float:
        return self.sign * float(self.graph.evaluate(np.asarray(self.x)[None], theta)[0, self.output])

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        plan = self._plan
        values = plan.forward(self.graph.flatten(np.asarray(self.x)[None]), plan.shared(theta))
        seed = np.zeros((self.graph.outputs, 1))
        seed[self.output] = self.sign
        found = _backward(plan, values, seed, None, np.zeros(1, dtype=bool))
        return _dense(plan, found, 1)[0]


@dataclass(frozen=True, eq=False)
class AttackResult:
    """The best data set found and what training on it gives; all private.

    ``objective`` is reached by ``theta`` ``(P,)``, ``baseline`` by the data as they are.  Slot ``slots[j]`` holds the
    record ``features[:, j]``, ``targets[:, j]`` (model units), or nothing where ``present[j]`` is false.
    ``history`` holds the objective of every retraining, ``trained`` their parameters ``(len(history), P)``.
    """

    objective: float
    baseline: float
    theta: np.ndarray
    slots: np.ndarray
    features: np.ndarray
    targets: np.ndarray
    present: np.ndarray
    history: tuple[float, ...]
    trained: np.ndarray

    @property
    def gain(self) -> float:
        return self.objective - self.baseline

    def apply(self, problem: Problem) -> Problem:
        """The same training on the altered data."""
        records = _spread(problem.records)
        return _alter(problem, records, self.slots, self.features, self.targets, self.present)


@dataclass(frozen=True, eq=False)
class AttackReport:
    """For each radius and parameter: the ends reached by real runs beside the ends of the box; all private.

    ``radii`` ``(K,)``, ``parameters`` ``(J,)`` positions in the vector; the other arrays are ``(K, J)``.
    ``retrainings`` counts the runs behind it.
    """

    radii: tuple[int, ...]
    parameters: np.ndarray
    reached_lower: np.ndarray
    reached_upper: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    retrainings: int

    @property
    def ratio(self) -> np.ndarray:
        """Reached width by box width, ``(K, J)``, 1 where both are 0: a floor for the tightness of the box."""
        box, reached = self.upper - self.lower, self.reached_upper - self.reached_lower
        return np.divide(reached, box, out=np.ones_like(box), where=box > 0.0)


def guided_attack(
    problem: Problem,
    radius: int,
    objective: np.ndarray | Objective,
    *,
    retrainings: int = 8,
    candidates: int = 256,
    seed: int = 0,
) -> AttackResult:
    """Raise ``objective`` (a direction ``(P,)`` or an Objective) by altering at most ``radius`` slots of the data.

    ``problem`` holds private records.  Each round ranks all records along the last trajectory, replaces the best and
    retrains; once that gains nothing more the best change is nudged at random.  ``retrainings`` is the number of runs
    in all, ``candidates`` bounds the records tried as replacements in a round.
    Raises RadiusError for a radius that is negative or above the number of slots.
    """
    return _Attack(problem, radius, objective, candidates, seed).guided(retrainings)


def random_attack(
    problem: Problem,
    radius: int,
    objective: np.ndarray | Objective,
    *,
    retrainings: int = 8,
    candidates: int = 256,
    seed: int = 0,
) -> AttackResult:
    """The baseline: random slots get random records of the kind the guided attack starts from; the best run is kept."""
    return _Attack(problem, radius, objective, candidates, seed).random(retrainings)


def attack_report(
    problem: Problem,
    radii: Sequence[int],
    boxes,
    parameters: Sequence[int] | None = None,
    *,
    retrainings: int = 8,
    candidates: int = 256,
    seed: int = 0,
) -> AttackReport:
    """Attack both ends of ``parameters`` (positions, default all) at each of ``radii`` and compare with the boxes.

    ``boxes`` has ``lower`` and ``upper``: arrays ``(K, P)`` in the order of ``radii``, or mappings from a radius to
    arrays by parameter name as in an envelope.  Every run made is compared with every box it must lie in.
    Raises EnvelopeViolation if one does not, RadiusError for a radius that cannot be.
    """
    radii = tuple(int(k) for k in radii)
    lower, upper = (_stack(problem, radii, ends) for ends in (boxes.lower, boxes.upper))
    size = lower.shape[1]
    chosen = np.arange(size) if parameters is None else np.asarray(parameters, dtype=np.int64)
    low, high, count = attacked_ends(
        problem, radii, chosen, retrainings=retrainings, candidates=candidates, seed=seed, boxes=(lower, upper)
    )
    picks = (low[:, chosen], high[:, chosen], lower[:, chosen], upper[:, chosen])
    return AttackReport(radii, chosen, *picks, count)


def attacked_ends(
    problem: Problem,
    radii: Sequence[int],
    parameters: Sequence[int],
    *,
    retrainings: int = 8,
    candidates: int = 256,
    seed: int = 0,
    boxes: tuple[np.ndarray, np.ndarray] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """The least and largest parameters that real runs reach within each radius, ``(K, P)`` each, and how many ran.

    Both ends of ``parameters`` are attacked; every run counts for all parameters.  ``boxes``: ends ``(K, P)`` that
    every run must lie in.  ``progress(attacks done, attacks in all)``.  PRIVATE.  Raises as `attack_report`.
    """
    nominal = trajectory(problem)[-1]
    low, high = np.tile(nominal, (len(radii), 1)), np.tile(nominal, (len(radii), 1))
    count, done = 1, 0
    if boxes is not None:
        _check(problem, nominal[None], 0, radii, *boxes)
    wide = sorted({k for k in radii if k > 0})
    for k in wide:
        for j in parameters:
            for sign in (-1.0, 1.0):
                aim = Direction.parameter(len(nominal), int(j), sign)
                found = guided_attack(problem, k, aim, retrainings=retrainings, candidates=candidates, seed=seed)
                count, done = count + len(found.history), done + 1
                if boxes is not None:
                    _check(problem, found.trained, k, radii, *boxes)
                for i, other in enumerate(radii):
                    if other >= k:
                        low[i] = np.minimum(low[i], found.trained.min(axis=0, initial=np.inf))
                        high[i] = np.maximum(high[i], found.trained.max(axis=0, initial=-np.inf))
                if progress is not None:
                    progress(done, 2 * len(wide) * len(parameters))
    return low, high, count


def trajectory(problem: Problem) -> np.ndarray:
    """The nominal run, ``(T + 1, P)``: row ``t`` after ``t`` steps, the last row equal to ``train`` bit for bit."""
    window, plan = problem.window(0, 0, [problem.start(())], ()), Plan(problem.graph)
    boxes, rows = window.boxes, [window.boxes.nominal]
    for t in range(problem.steps):
        boxes = step(window, plan, boxes, problem.step(t), None, 1)
        rows.append(boxes.nominal)
    return np.array(rows)


def clipped_gradients(
    problem: Problem, plan: Plan, theta: np.ndarray, x: np.ndarray, y: np.ndarray, batch_size: int = 1
) -> np.ndarray:
    """What each record adds to the sum of a step: ``(n, P)`` for ``x`` ``(F, n)`` and prepared targets ``(O, n)``.

    These are the engine's own numbers, rounded to the grid of a batch of ``batch_size``.
    """
    grid = FixedPoint.make(problem.recipe.training.clip, max(batch_size, 1))
    g = unclipped_gradients(problem, plan, theta, x, y, grid.scale)
    return np.rint(np.clip(g, -grid.limit, grid.limit)) / grid.scale


def unclipped_gradients(
    problem: Problem, plan: Plan, theta: np.ndarray, x: np.ndarray, y: np.ndarray, scale: float = 1.0
) -> np.ndarray:
    """Per-record gradients times ``scale`` before the clip, ``(n, P)``; zero for a record that overflows."""
    window = problem.window(0, 0, [Boxes.point(theta, 0)], ())
    shared, parts = plan.shared(theta), [np.zeros((0, plan.size))]
    for start in range(0, x.shape[1], plan.tile):
        one, two = (np.ascontiguousarray(a[:, start : start + plan.tile]) for a in (x, y))
        found, bad = record_gradients(plan, window, one, two, shared, None, scale)
        parts.append(_dense(plan, found, one.shape[1]))
        parts[-1][bad] = 0.0
    return np.concatenate(parts)


def _dense(plan: Plan, found: dict[str, list], records: int) -> np.ndarray:
    """Contributions by parameter as ``(n, P)``; a parameter without any does not matter to the output."""
    g = np.zeros((records, plan.size))
    for name, contributions in found.items():
        total = sum(c.dense(None) if isinstance(c, _Outer) else c for c in contributions)
        start = plan.offsets[name]
        g[:, start : start + total.shape[0]] = total.T
    return g


def _stack(problem: Problem, radii: Sequence[int], ends) -> np.ndarray:
    if isinstance(ends, Mapping):
        return np.array([problem.graph.join(ends[k]) for k in radii])
    return np.asarray(ends)


def _check(problem: Problem, thetas: np.ndarray, distance: int, radii, lower: np.ndarray, upper: np.ndarray) -> None:
    """Raise EnvelopeViolation unless all ``thetas`` ``(n, P)`` lie in every box of radius at least ``distance``."""
    for i, k in enumerate(radii):
        if k < distance:
            continue
        inside = (lower[i] <= thetas) & (thetas <= upper[i])  # NaN is outside
        if not inside.all():
            run, j = (int(v) for v in np.argwhere(~inside)[0])
            raise EnvelopeViolation(
                f"radius {k}: a data set differing in {distance} slots trains {_name(problem.graph, j)} to "
                f"{thetas[run, j]!r}, outside [{lower[i, j]!r}, {upper[i, j]!r}]; the envelope is not sound"
            )


def _name(graph: Graph, position: int) -> str:
    for p in graph.trainable:
        if position < p.value.size:
            return f"{p.name}[{', '.join(str(int(i)) for i in np.unravel_index(position, p.shape))}]"
        position -= p.value.size
    raise IndexError(position)


def _spread(records: Records) -> Records:
    """The same records with a column for each of the slots, so that an empty slot can be filled."""
    missing = records.slots - records.features.shape[1]
    present = np.ones(records.features.shape[1], bool) if records.present is None else records.present
    return Records(
        np.pad(records.features, ((0, 0), (0, missing))),
        np.pad(records.targets, ((0, 0), (0, missing))),
        records.slots,
        np.pad(present, (0, missing)),
    )


def _alter(problem: Problem, records: Records, slots, features, targets, present) -> Problem:
    """``problem`` on ``records`` with these slots overwritten."""
    x, y, filled = records.features.copy(), records.targets.copy(), records.present.copy()
    x[:, slots], y[:, slots], filled[slots] = features, targets, present
    return replace(problem, records=Records(x, y, records.slots, filled))


@dataclass(frozen=True, eq=False)
class _Ranges:
    """Where a replacing record may lie, in model units: ``(F, 1)`` and ``(O, 1)`` ends, and the form of targets."""

    low: np.ndarray
    high: np.ndarray
    target_low: np.ndarray
    target_high: np.ndarray
    kind: str

    @classmethod
    def of(cls, problem: Problem, records: Records) -> _Ranges:
        kind = problem.loss.name
        recipe, filled = problem.recipe, records.present
        ends = _ends(recipe.features, records.features[:, filled])
        if kind == "cross-entropy":
            return cls(*ends, np.zeros((len(records.targets), 1)), np.ones((len(records.targets), 1)), kind)
        low, high = _ends(recipe.target, records.targets[:, filled])
        if kind in ("logistic", "hinge", "smoothed-hinge"):
            least = 0.0 if kind == "logistic" else -1.0
            stated = recipe.target
            low = np.maximum(low, least) if stated.lower is not None else np.full_like(low, least)
            high = np.minimum(high, 1.0) if stated.upper is not None else np.ones_like(high)
        return cls(*ends, low, high, kind)

    def project(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The nearest admissible records."""
        x = np.clip(x, self.low, self.high)
        if self.kind == "cross-entropy":
            return x, (np.arange(y.shape[0])[:, None] == y.argmax(axis=0)[None, :]).astype(np.float64)
        if self.kind in ("hinge", "smoothed-hinge"):
            y = np.where(2.0 * y > self.target_low + self.target_high, 1.0, -1.0)
        return x, np.clip(y, self.target_low, self.target_high)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Random records: uniform in the ranges, corners of them, and mixtures of the two."""
        shape_x, shape_y = (len(self.low), count), (len(self.target_low), count)
        corner = rng.random(count) < 0.5
        u = np.where(corner | (rng.random(shape_x) < 0.25), rng.integers(0, 2, shape_x), rng.random(shape_x))
        v = np.where(rng.random(count) < 0.75, rng.integers(0, 2, shape_y), rng.random(shape_y))
        x, y = self.low + u * (self.high - self.low), self.target_low + v * (self.target_high - self.target_low)
        return self.project(x, y)

    def near(self, rng, x: np.ndarray, y: np.ndarray, spread: float) -> tuple[np.ndarray, np.ndarray]:
        """Random records near given ones: a part of the features moves by about ``spread`` of the ranges."""
        moves = rng.normal(size=x.shape) * (rng.random(x.shape) < 0.5)
        other = rng.normal(size=y.shape) * (rng.random(y.shape[1]) < 0.5)
        x = x + spread * moves * (self.high - self.low)
        return self.project(x, y + spread * other * (self.target_high - self.target_low))


def _ends(section, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the public range of ``section`` in model units, or of the stretched bounding box of ``values``."""
    columns = len(values)
    least = values.min(axis=1, initial=np.inf)[:, None]
    most = values.max(axis=1, initial=-np.inf)[:, None]
    if values.shape[1] == 0:
        least, most = np.full((columns, 1), -1.0), np.ones((columns, 1))
    half = np.where(most > least, 0.5 * (most - least), 1.0) * _STRETCH
    centre = 0.5 * least + 0.5 * most
    ends = []
    for stated, default in ((section.lower, centre - half), (section.upper, centre + half)):
        if stated is not None:
            default = (np.asarray(stated, float) - np.asarray(section.offset)) / np.asarray(section.scale)
        ends.append(np.broadcast_to(np.reshape(default, (-1, 1)), (columns, 1)))
    return np.minimum(*ends), np.maximum(*ends)


class _Attack:
    """One attack: the fixed facts of it, the random stream, and the runs made so far."""

    def __init__(self, problem: Problem, radius: int, objective, candidates: int, seed: int):
        self.records = _spread(problem.records)
        if not 0 <= radius <= self.records.slots:
            raise RadiusError(f"radius: found {radius}; it lies between 0 and the {self.records.slots} slots")
        self.problem = replace(problem, records=self.records)
        self.radius = radius
        self.objective = Direction(objective) if isinstance(objective, np.ndarray) else objective
        self.zero_out = problem.recipe.privacy.adjacency == "zero-out"
        self.candidates = max(8, candidates)
        self.rng = np.random.default_rng(seed)
        self.ranges = _Ranges.of(problem, self.records)
        self.plan = Plan(problem.graph)
        self.batches = [problem.step(t) for t in range(problem.steps)]
        contraction = problem.recipe.training.contraction
        self.contraction = contraction
        self.factors = np.array([one.learning_rate for one in self.batches]) / problem.schedule.normaliser
        member = np.zeros((self.records.slots, len(self.batches)), dtype=bool)
        for t, one in enumerate(self.batches):
            member[one.batch, t] = True
        # Slots that take part in the same steps are alike: (G, T) and the group of every slot.
        self.groups, inverse = np.unique(member, axis=0, return_inverse=True)
        self.group = inverse.reshape(-1)
        self.path = trajectory(self.problem)
        self.baseline = self.objective.value(self.path[-1])
        self.best = (self.baseline, self.path[-1], *self._nothing())
        self.history: list[float] = []
        self.trained: list[np.ndarray] = []

    def _nothing(self):
        none = np.zeros(0, dtype=np.int64)
        return none, self.records.features[:, none], self.records.targets[:, none], np.zeros(0, dtype=bool)

    def result(self) -> AttackResult:
        trained = np.array(self.trained).reshape(-1, self.plan.size)
        objective, theta, *change = self.best
        return AttackResult(objective, self.baseline, theta, *change, tuple(self.history), trained)

    def retrain(self, slots, x, y, present) -> np.ndarray:
        """Train on the altered data, keep it if it is the best; the trajectory ``(T + 1, P)``."""
        path = trajectory(_alter(self.problem, self.records, slots, x, y, present))
        value = self.objective.value(path[-1])
        self.history.append(value)
        self.trained.append(path[-1])
        if value > self.best[0]:
            self.best = (value, path[-1], slots, x, y, present)
        return path

    def random(self, retrainings: int) -> AttackResult:
        filled = self.records.present
        for _ in range(retrainings if self.radius else 0):
            chosen, left = {}, self.radius
            for slot in self.rng.permutation(self.records.slots):
                if left == 0:
                    break
                # Under zero-out a replacement is an emptying and a filling.
                empty = self.zero_out and filled[slot] and (left == 1 or self.rng.random() < 0.5)
                left -= 2 if self.zero_out and filled[slot] and not empty else 1
                chosen[int(slot)] = not empty
            x, y = self.ranges.draw(self.rng, len(chosen))
            self.retrain(np.array(list(chosen)), x, y, np.array(list(chosen.values())))
        return self.result()

    def guided(self, retrainings: int) -> AttackResult:
        if not self.radius:
            return self.result()
        path, idle = self.path, 0
        while len(self.history) < retrainings and idle < _PATIENCE:
            before = self.best[0]
            change = self.choose(path)
            if not len(change[0]):
                break
            path = self.retrain(*change)
            if self.history[-1] < before and len(change[0]) > 1 and len(self.history) < retrainings:
                # The linear account went too far: go on from half the change.
                half = self.rng.permutation(len(change[0]))[: len(change[0]) // 2]
                slots, x, y, present = change
                path = self.retrain(slots[half], x[:, half], y[:, half], present[half])
            idle = 0 if self.best[0] > before else idle + 1
        while len(self.history) < retrainings and len(self.best[2]):
            self.retrain(*self.nudge())
        return self.result()

    def nudge(self):
        """The best change so far with one of its records moved a little, or to another slot."""
        slots, x, y, present = (a.copy() for a in self.best[2:])
        j = self.rng.integers(len(slots))
        free = np.setdiff1d(np.flatnonzero(self.records.present == self.records.present[slots[j]]), slots)
        if len(free) and (self.rng.random() < 0.5 or not present[j]):
            slots[j] = self.rng.choice(free)
        else:
            moved = self.ranges.near(self.rng, x[:, [j]], y[:, [j]], self.rng.choice([1.0, 0.3, 0.1, 0.03]))
            x[:, [j]], y[:, [j]] = moved
        return slots, x, y, present

    def choose(self, path: np.ndarray):
        """The best change of the original data by a linear account around the run ``path``."""
        adjoints = self.adjoints(path)
        own = self.own(path, adjoints)
        x, y = self.pool()
        scores = self.scores(path, adjoints, x, y)
        for spread in (0.3, 0.1, 0.03):
            leaders = np.unique(scores.argmax(axis=1))[: self.candidates // 8]
            parents = np.resize(leaders, max(len(leaders), self.candidates // 4))
            fresh = self.ranges.near(self.rng, x[:, parents], y[:, parents], spread)
            x, y = np.concatenate([x, fresh[0]], axis=1), np.concatenate([y, fresh[1]], axis=1)
            scores = np.concatenate([scores, self.scores(path, adjoints, *fresh)], axis=1)
        best = scores.argmax(axis=1)
        value = scores[np.arange(len(scores)), best]
        return self.spend(own, value[self.group], best[self.group], x, y)

    def spend(self, own: np.ndarray, value: np.ndarray, which: np.ndarray, x: np.ndarray, y: np.ndarray):
        """Slots to alter within the radius, the largest gain per unit first, and what they then hold.

        ``own`` ``(N,)`` is what each slot contributes now, ``value`` what the best record ``which`` would.
        """
        filled = self.records.present
        options = []  # (gain a unit, cost, slots, hold a record?)
        if self.zero_out:
            options.append((-own, 1, filled, False))
            options.append((0.5 * (value - own), 2, filled, True))
            options.append((value, 1, ~filled, True))
        else:
            options.append((value - own, 1, np.ones_like(filled), True))
            options.append((-own, 1, filled, False))
        every = [
            (gain[slot], cost, slot, hold) for gain, cost, at, hold in options for slot in np.flatnonzero(at)
        ]
        every.sort(key=lambda option: -option[0])
        chosen, left = {}, self.radius
        for gain, cost, slot, hold in every:
            if not gain > 0.0 or left == 0:
                break
            if cost <= left and slot not in chosen:
                chosen[int(slot)] = hold
                left -= cost
        slots = np.array(list(chosen), dtype=np.int64)
        present = np.array([chosen[s] for s in slots], dtype=bool)
        return slots, x[:, which[slots]], y[:, which[slots]], present

    def pool(self) -> tuple[np.ndarray, np.ndarray]:
        """Records to try first: random ones, corners, and records of the data with moved targets or scaled features."""
        x, y = self.ranges.draw(self.rng, self.candidates // 2)
        filled = np.flatnonzero(self.records.present)
        if len(filled):
            picks = self.rng.choice(filled, self.candidates // 4)
            features = self.records.features[:, picks] * self.rng.choice([1.0, -1.0, 3.0, -3.0, 0.3], len(picks))
            near = self.ranges.project(features, self.ranges.draw(self.rng, len(picks))[1])
            x, y = np.concatenate([x, near[0]], axis=1), np.concatenate([y, near[1]], axis=1)
        return x, y

    def gradients(self, theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return clipped_gradients(self.problem, self.plan, theta, x, y)

    def adjoints(self, path: np.ndarray) -> np.ndarray:
        """``(T, P)``: row ``t`` is the gradient of the objective with respect to the parameters after step ``t``."""
        rows = np.empty((len(self.batches), self.plan.size))
        adjoint = np.asarray(self.objective.gradient(path[-1]), dtype=np.float64)
        for t in range(len(self.batches) - 1, -1, -1):
            rows[t] = adjoint
            if t:
                adjoint = self.contraction * adjoint - self.factors[t] * self.pull_back(path[t], t, adjoint)
        return rows

    def pull_back(self, theta: np.ndarray, t: int, adjoint: np.ndarray) -> np.ndarray:
        """The adjoint times the Jacobian of the step's sum of clipped gradients, by central differences.

        The Jacobian is the sum of ``D_i H_i``: a record's Hessian with the rows of clipped entries struck out.  Its
        transpose needs ``H_i (D_i adjoint)``, another direction for each record; the few leading singular vectors of
        these directions are differentiated for all records at once.
        """
        slots = self.records.filled(self.batches[t].batch)
        out = np.zeros_like(theta)
        weight = 1.0
        if len(slots) > _SAMPLE:
            weight = len(slots) / _SAMPLE
            slots = self.rng.choice(slots, _SAMPLE, replace=False)
        chunk = max(32, _NUMBERS // len(theta))
        step = 1e-6 * max(1.0, np.abs(theta).max())
        for start in range(0, len(slots), chunk):
            part = slots[start : start + chunk]
            x, y = self.records.features[:, part], self.records.targets[:, part]
            limit = self.problem.recipe.training.clip
            free = np.abs(unclipped_gradients(self.problem, self.plan, theta, x, y)) < limit
            u, sizes, v = np.linalg.svd(free * adjoint, full_matrices=False)
            keep = min(_RANK, int((sizes > 1e-9 * sizes[0]).sum())) if sizes[0] > 0.0 else 0
            for weights, size, direction in zip(u.T[:keep], sizes[:keep], v[:keep], strict=True):
                up, down = (
                    unclipped_gradients(self.problem, self.plan, theta + s * step * direction, x, y)
                    for s in (1.0, -1.0)
                )
                out += size / (2.0 * step) * (weights @ (up - down))
        return weight * out

    def own(self, path: np.ndarray, adjoints: np.ndarray) -> np.ndarray:
        """What each slot of the original data contributes to the objective along ``path``: ``(N,)``."""
        total = np.zeros(self.records.slots)
        for t, one in enumerate(self.batches):
            slots = self.records.filled(one.batch)
            g = self.gradients(path[t], self.records.features[:, slots], self.records.targets[:, slots])
            total[slots] -= self.factors[t] * (g @ adjoints[t])
        return total

    def scores(self, path: np.ndarray, adjoints: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """What each record would contribute in each group of slots: ``(G, Z)``."""
        rows = np.array(
            [-self.factors[t] * (self.gradients(path[t], x, y) @ adjoints[t]) for t in range(len(self.batches))]
        )
        return self.groups.astype(np.float64) @ rows
