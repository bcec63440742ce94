"""Auditing: retrain and certify again on real neighbouring data sets, and check what privacy rests on.

White box, without sampling error. For neighbours `D ~ D'` the laws of the two releases are known, so these are exact:

* nesting: `T_k(D)` lies in `T_{k+1}(D')`, as computed, for parameters and predictions, both directions, every `k`;
* sensitivity: `|f - f'| <= min(S, S')` for every beta of the public list;
* smoothness: `|ln S / S'| <= beta + log1p(TAU)`;
* release laws: the worst log ratio of the two laws is at most epsilon, or their hockey stick at epsilon at most delta,
  also for numbers that are released together (`audit_laws`; Laplace and Gaussian vectors from below).

An audit refutes, it does not prove: it speaks about the pairs that were tried. Pairs come from the guided attack
(`worst_neighbours`) or are all pairs of a small world (`exhaustive_world`). The black-box audit (`black_box`) knows
nothing but outputs: a lower confidence bound of epsilon; it needs about 10^5 releases where one pair is enough here.

Everything here is PRIVATE apart from graph, recipe, radii, queries and budget: reports hold distances between data
sets, real smooth bounds and running times. A report must not be published, and not be used to choose a mechanism.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from certify._siblings import require
from certify.driver import Problem, make_envelope, sweep
from certify.envelope import Envelope
from certify.errors import PrivacyError
from certify.windows import Method
from privacy import ags, agtr, noise, smooth
from privacy.audit_laws import joint_hockey_stick, joint_loss
from privacy.mechanism import Mechanism
from privacy.query import Query

require("models", "solvers")

from solvers import Records, make_records  # noqa: E402

SLACK = 1e-9
"""Relative rounding error allowed to the closed forms of the release laws (not to the other checks)."""


@dataclass(frozen=True)
class Check:
    """The worst case of one condition, and its limit. PRIVATE. `where`: pair, query and radius or beta."""

    name: str
    worst: float
    limit: float
    passed: bool
    where: str


@dataclass(frozen=True)
class AuditReport:
    """What was tried and what came out. PRIVATE."""

    checks: tuple[Check, ...]
    pairs: int
    queries: int
    epsilon: float
    delta: float
    family: str
    adjacency: str
    radii: int

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> str:
        return json.dumps({"private": True, "passed": self.passed, **asdict(self)}, indent=2) + "\n"

    def table(self):
        """A rich table."""
        from rich.table import Table

        cost = f"epsilon = {self.epsilon:g}" + (f", delta = {self.delta:g}" if self.delta else "")
        title = f"audit: {self.pairs} neighbouring pairs, {self.queries} queries, {cost}, {self.family}"
        table = Table(title=title, title_justify="left")
        table.add_column("check")
        for name in ("worst", "limit"):
            table.add_column(name, justify="right")
        table.add_column("where")
        table.add_column("")
        for check in self.checks:
            verdict = "[green]holds[/]" if check.passed else "[bold red]VIOLATED[/]"
            table.add_row(check.name, f"{check.worst:.6g}", f"{check.limit:.6g}", check.where, verdict)
        return table


@dataclass(frozen=True, eq=False)
class Laws:
    """One data set's release: clipped predictions (M, O), `{beta: S_beta (M, O)}`, noise scales (M, O). PRIVATE.

    `mechanism`: PUBLIC, one that releases `mechanism.dim` numbers together; `S_beta` is then the bound of the norm of a
    change of `weights * nominal`, repeated for the numbers of a group. None for numbers released on their own with the
    family's name alone.
    """

    nominal: np.ndarray
    smooth: dict[float, np.ndarray]
    scale: np.ndarray
    mechanism: Mechanism | None = None
    weights: np.ndarray | float = 1.0

    def cut(self, x: np.ndarray) -> np.ndarray:
        """(M, O) as (groups, numbers released together)."""
        return np.reshape(x, (-1, 1 if self.mechanism is None else self.mechanism.dim))


Rule = Callable[..., Laws]
"""`rule(lower, upper, ceiling, output_range, epsilon, delta, family, difference)`: how bounds become a release. Only
tests replace it, to see that a wrong rule is caught."""


def shipped_rule(
    lower, upper, ceiling, output_range, epsilon: float, delta: float, family: str | None, difference=None,
    joint: bool | None = False, betas=None,
) -> Laws:  # fmt: skip
    """What `agtr.release_predictions` really uses for `M O` numbers; (epsilon, delta) is their total. `joint`: as
    there, numbers on their own, all in one vector, or by the public rule."""
    release, private = agtr.release_predictions(
        np.clip(lower[0], *output_range), lower, upper, ceiling, output_range, epsilon, delta, family, joint=joint,
        difference=difference, betas=betas,
    )  # fmt: skip
    public = release.guarantee
    mechanism = Mechanism.make(family, public.epsilon_per_release, public.delta_per_release, public.dimension, betas)
    laws = Laws(private.nominal, private.smooth, private.scale, mechanism)
    if mechanism.dim == 1:
        return laws
    common = noise.noise_scale(private.smooth, mechanism.pairs)
    return replace(laws, weights=common / private.scale)


# --- the checks ---


def audit_bounds(
    one, two, ceiling, output_range, epsilon: float, delta: float = 0.0, family: str | None = None,
    rule: Rule = shipped_rule, label: str = "pair 0", known: dict | None = None,
) -> list[Check]:  # fmt: skip
    """The checks for one pair of neighbours, from query bounds alone.

    `one`, `two`: `(lower, upper)`, float (K+1, M, O), of the two data sets over radii 0..K, or `(lower, upper,
    difference)` with the certificate of `agtr.release_predictions`. `ceiling`, `output_range`:
    public, as in `agtr.release_predictions`. (`epsilon`, `delta`): of all `M O` releases together. `known`: laws by
    `id` of a pair of bounds, to save work when a data set occurs in many pairs.

    Guarantees:
    * audit finds the wrong rules: half range, `k` from 1, back-filled radii, a nominal radius;
    * audit passes the shipped rule on every pair of exhaustive worlds.
    """
    known = {} if known is None else known
    for side in (one, two):
        if id(side) not in known:
            known[id(side)] = rule(*side[:2], ceiling, output_range, epsilon, delta, family, *side[2:])
    laws, other = known[id(one)], known[id(two)]
    checks = [_nesting("predictions nest", one[:2], two[:2], label), _sensitivity(laws, other, label)]
    checks.append(_smoothness(laws, other, label))
    return [*checks, *_law_checks(laws, other, epsilon, delta, family, label)]


def _nesting(name: str, one, two, label: str) -> Check:
    """How far a box of radius `k` sticks out of the other data set's box of radius `k + 1`; the limit is exactly 0."""
    worst, where = -math.inf, ""
    for (low, high), (low2, high2), way in ((one, two, "first in second"), (two, one, "second in first")):
        out = np.maximum(low2[1:] - low[:-1], high[:-1] - high2[1:])
        out = np.where(np.isnan(out), math.inf, out).reshape(len(out), -1)
        k = int(out.max(axis=1).argmax())
        if out[k].max() > worst:
            worst, where = float(out[k].max()), f"{label}, {way}, radius {k}"
    return Check(name, worst, 0.0, worst <= 0.0, where)


def _sensitivity(laws: Laws, other: Laws, label: str) -> Check:
    moved = np.abs(laws.nominal - other.nominal)
    if laws.mechanism is not None and laws.mechanism.dim > 1:
        groups = laws.cut(moved), laws.cut(np.broadcast_to(laws.weights, moved.shape))
        norms = [smooth.norm_outputs(row, laws.mechanism.norm, weights) for row, weights in zip(*groups, strict=True)]
        # Rounded up by less than this: an equality must not look like a violation.
        norms = np.array(norms) * (1.0 - (laws.mechanism.dim + 4) * 2.0**-51)
        moved = np.repeat(norms, laws.mechanism.dim).reshape(moved.shape)
    found = []
    for beta in laws.smooth:
        least = np.minimum(laws.smooth[beta], other.smooth[beta])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(moved > 0.0, moved / least, 0.0)
        # Exact comparison decides; the quotient is for the reader.
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        found.append((float(ratio[at]), bool(np.all(moved <= least)), f"{label}, query {_at(at)}, beta {beta:.4g}"))
    worst = max(found, key=lambda entry: entry[0])
    return Check("|f - f'| / min(S, S')", worst[0], 1.0, all(entry[1] for entry in found), worst[2])


def _smoothness(laws: Laws, other: Laws, label: str) -> Check:
    found = []
    for beta in laws.smooth:
        with np.errstate(divide="ignore"):
            moved = np.abs(np.log(laws.smooth[beta]) - np.log(other.smooth[beta]))
        moved = np.where(laws.smooth[beta] == other.smooth[beta], 0.0, moved)
        at = np.unravel_index(int(moved.argmax()), moved.shape)
        limit = beta + math.log1p(smooth.TAU)
        found.append((float(moved[at]), limit, f"{label}, query {_at(at)}, beta {beta:.4g}"))
    worst = max(found, key=lambda entry: entry[0] / entry[1])
    # 4 ulp for the two logarithms; TAU leaves room for it.
    return Check("|ln S/S'|", worst[0], worst[1], worst[0] <= worst[1] + 1e-15 * max(1.0, worst[0]), worst[2])


def _law_checks(laws: Laws, other: Laws, epsilon: float, delta: float, family, label: str) -> list[Check]:
    law = laws.mechanism.family if laws.mechanism else family or ("laplace" if delta > 0.0 else "cauchy")
    f, s, g, t = (laws.cut(x) for x in (laws.nominal, laws.scale, other.nominal, other.scale))
    parts, dim = f.shape
    share = noise.split_budget(epsilon, parts), noise.split_budget(delta, parts)
    if isinstance(law, str):
        law = noise.make_family(law, *share, dim)
    if law.privacy == "pure":
        spent = joint_loss(law, f, s, g, t)
        name, limits = "worst log ratio", (share[0], epsilon)
    else:
        rows = list(zip(f, s, g, t, strict=True))
        ways = [[joint_hockey_stick(law, share[0], *x) for x in (row, row[2:] + row[:2])] for row in rows]
        spent = np.max(ways, axis=1)
        name, limits = "hockey stick", (share[1], delta)
    spent = np.where(np.isnan(spent), math.inf, spent)
    at = int(spent.argmax())
    place = f"{label}, query {_at(np.unravel_index(at * dim, laws.nominal.shape))}"
    worst = float(spent[at])
    checks = [Check(f"{name}, one release", worst, limits[0], worst <= limits[0] * (1.0 + SLACK), place)]
    if parts > 1:
        every = float(spent.sum())
        checks.append(Check(f"{name}, all releases", every, limits[1], every <= limits[1] * (1.0 + SLACK), label))
    return checks


def _at(index) -> str:
    return str(int(index[0])) if len(index) == 1 or index[1] == 0 else f"{int(index[0])}, output {int(index[1])}"


def merge(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The worst case of each condition; a violation counts before one that holds."""
    best: dict[str, Check] = {}
    for check in checks:
        old = best.get(check.name)
        key = (not check.passed, check.worst - check.limit)
        if old is None or key > (not old.passed, old.worst - old.limit):
            best[check.name] = check
    return tuple(best.values())


# --- retraining and certifying real data sets ---


def certify_problem(problem: Problem, radii: Sequence[int], *, threads: int = 1, **method) -> Envelope:
    """The envelope of `problem`, which may leave any slot empty; `method` as for `certify.run`."""
    radii, method = tuple(radii), Method(**method)
    return make_envelope(problem, sweep(problem, radii, method, threads=threads), radii, method)


def audit_pairs(
    pairs: Sequence[tuple[Problem, Problem]],
    features: np.ndarray,
    epsilon: float,
    delta: float = 0.0,
    family: str | None = None,
    *,
    radii: Sequence[int],
    output_range=None,
    joint: bool | None = False,
    betas: Sequence[float] | None = None,
    threads: int = 1,
    rule: Rule | None = None,
    **method,
) -> AuditReport:
    """Retrain and certify both sides of every pair and run all checks; PRIVATE.

    `pairs`: neighbouring data sets with the same public facts. `features`: public inputs (M, F) in table units,
    answered together at (epsilon, delta). `radii`: 0..K. A data set (object) in several pairs is certified once.
    `joint`, `betas`: as for `query.predict`, so that what is audited is what is released. `rule`: None for the shipped
    one.

    Guarantees:
    * audit passes joint releases and finds wrong ones: a dilation paid for one number, a scale for each number.
    Raises PrivacyError for pairs that are not neighbours under the recipe's adjacency, RadiusError for radii with gaps.
    """
    smooth.require_contiguous(radii)
    if not len(pairs):
        raise PrivacyError("pairs: found none; give at least one pair of neighbouring data sets")
    ready: dict[int, tuple] = {}
    known: dict[int, Laws] = {}
    checks = []
    rule = partial(shipped_rule, joint=joint, betas=betas) if rule is None else rule

    def prepared(problem: Problem):
        if id(problem) not in ready:
            envelope = certify_problem(problem, radii, threads=threads, **method)
            agtr.require_capabilities(envelope.metadata.capabilities)
            query = Query.make(envelope, problem.graph, output_range)
            rows = np.unique(query.prepare(features) + 0.0, axis=0)
            # The problem is kept: its id must not be given to another one.
            bounds, difference = query.bounds(rows), query.differences(rows)
            bounds = bounds if difference is None else (*bounds, difference)
            ready[id(problem)] = problem, envelope, bounds, query, query.ceiling(rows)
        return ready[id(problem)]

    for number, (one, two) in enumerate(pairs):
        require_neighbours(one, two)
        _, envelope, bounds, query, ceiling = prepared(one)
        _, envelope2, bounds2, query2, ceiling2 = prepared(two)
        if not (np.array_equal(ceiling, ceiling2) and np.array_equal(query.output_range, query2.output_range)):
            raise PrivacyError("pairs: the two data sets have different public ceilings or ranges; fix the recipe")
        label = f"pair {number}"
        checks.append(_nesting("boxes nest", envelope.stacked(), envelope2.stacked(), label))
        certificates = [e.stacked_difference() for e in (envelope, envelope2)]
        if certificates[0] is not None:
            checks.append(_nesting("certificates nest", *((-c, c) for c in certificates), label))
        checks += audit_bounds(
            bounds, bounds2, ceiling, query.output_range, epsilon, delta, family, rule, label, known
        )
        checks = list(merge(checks))
    noise_of = known[id(bounds)].mechanism
    family = noise_of.describe() if noise_of else family or ("laplace" if delta > 0.0 else "cauchy")
    adjacency = pairs[0][0].recipe.privacy.adjacency
    terms = float(epsilon), float(delta), family, adjacency, len(radii) - 1
    return AuditReport(merge(checks), len(pairs), bounds[0].shape[1], *terms)


def audit_plan(
    pairs: Sequence[tuple[Problem, Problem]], plan: ags.AgsPlan, *, threads: int = 1, **method
) -> AuditReport:
    """The same for the parameters that `ags.release_parameters` releases: every window of `plan`, started on both
    sides from the model's public initial values; PRIVATE.

    The report's budget is the largest of a release, since each window is held to its own: (epsilon_j, delta_j).

    Guarantees:
    * audit passes released parameters and finds wrong ones.
    """
    if not len(pairs):
        raise PrivacyError("pairs: found none; give at least one pair of neighbouring data sets")
    how, radii, checks = Method(**method), tuple(range(plan.radius + 1)), []
    theta = pairs[0][0].graph.initial()
    mechanisms = plan.mechanisms(theta.size)

    def window(problem: Problem, j: int) -> tuple:
        mechanism = mechanisms[j]
        start, stop = (0, *plan.steps)[j], plan.steps[j]
        boxes = sweep(problem, radii, how, start=start, stop=stop, theta=theta, threads=threads).trail.last
        weights = None if plan.weights is None else np.broadcast_to(plan.weights, theta.shape)
        nominal, by_beta = ags._bounds(
            problem, start, stop, theta, boxes, ags._box(problem, plan), mechanism, weights, radii
        )
        weights = np.ones((1, theta.size)) if weights is None else weights[None]
        spread = {beta: np.broadcast_to(s[:, None], nominal.shape) for beta, s in by_beta.items()}
        scale = noise.noise_scale(by_beta, mechanism.pairs)[:, None] / weights
        return boxes, Laws(nominal, spread, scale, mechanism, weights)

    for number, (one, two) in enumerate(pairs):
        require_neighbours(one, two)
        for j in range(len(plan.steps)):
            label = f"pair {number}, window {j}"
            (boxes, laws), (boxes2, other) = window(one, j), window(two, j)
            checks.append(_nesting("boxes nest", *((b.lower, b.upper) for b in (boxes, boxes2)), label))
            checks += [_sensitivity(laws, other, label), _smoothness(laws, other, label)]
            checks += _law_checks(laws, other, plan.epsilons[j], plan.deltas[j], plan.family, label)
        checks = list(merge(checks))
    budget = max(plan.epsilons), max(plan.deltas)
    return AuditReport(
        merge(checks), len(pairs), 1, *budget, laws.mechanism.describe(), one.recipe.privacy.adjacency, plan.radius
    )


def require_neighbours(one: Problem, two: Problem) -> None:
    """PrivacyError unless the data sets differ in at most one slot, and (zero-out) only by emptying it."""
    if one.schedule != two.schedule or one.recipe != two.recipe:
        raise PrivacyError("pairs: two data sets have different recipes or slots; neighbours share all public facts")
    (x, y, here), (x2, y2, there) = (_slots(p.records) for p in (one, two))
    same = (here == there) & (~here | (np.all(x == x2, axis=0) & np.all(y == y2, axis=0)))
    changed = np.flatnonzero(~same)
    if len(changed) > 1:
        raise PrivacyError(f"pairs: the data sets differ in {len(changed)} slots; neighbours differ in one")
    if one.recipe.privacy.adjacency == "zero-out" and np.any(here[changed] & there[changed]):
        raise PrivacyError("pairs: a record is replaced, but under zero-out neighbours empty or fill a slot")


def _slots(records: Records):
    missing = records.slots - records.features.shape[1]
    present = np.ones(records.features.shape[1], bool) if records.present is None else records.present
    pad = ((0, 0), (0, missing))
    return np.pad(records.features, pad), np.pad(records.targets, pad), np.pad(present, (0, missing))


def worst_neighbours(
    problem: Problem,
    features: np.ndarray,
    *,
    radius: int = 1,
    retrainings: int = 6,
    candidates: int = 128,
    most: int = 8,
    seed: int = 0,
) -> list[tuple[Problem, Problem]]:
    """Neighbouring pairs that move the predictions at `features` (M, F; table units) far; all PRIVATE.

    The guided attack raises and lowers the prediction at up to `most` inputs. With `radius` above 1 it goes on
    from the data set it has found, so that pairs away from `problem` are audited, too: smoothness is about them.
    """
    from certify import attack

    graph = problem.graph
    rows = problem.recipe.prepare_features(np.asarray(features, np.float64))
    rows = rows.reshape(len(rows), *graph.input_shape)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(rows))[:most]
    pairs = []
    for number, (i, sign) in enumerate(itertools.product(chosen, (1.0, -1.0))):
        here = problem
        for step in range(radius):
            aim = attack.Query(graph, rows[i], int(rng.integers(graph.outputs)), sign)
            options = {"retrainings": retrainings, "candidates": candidates, "seed": seed + 1000 * step + number}
            found = attack.guided_attack(here, 1, aim, **options)
            if not len(found.slots):
                break
            there = found.apply(here)
            pairs.append((here, there))
            here = there
    return pairs


def exhaustive_world(
    problem: Problem, universe: Sequence[tuple | None], slots: int | None = None
) -> list[tuple[Problem, Problem]]:
    """All neighbouring pairs of the data sets whose slots hold entries of `universe`: `(x, y)` in model units, or None.

    `problem` gives graph, recipe, schedule (of few slots). `len(universe) ** slots` data sets: keep it small.
    """
    slots = problem.schedule.slots if slots is None else slots
    if len(universe) ** slots > 20_000:
        raise PrivacyError(f"universe: {len(universe)} records in {slots} slots are too many data sets; take fewer")
    filler = next(entry for entry in universe if entry is not None)
    made: dict[tuple[int, ...], Problem] = {}
    for which in itertools.product(range(len(universe)), repeat=slots):
        rows = [universe[w] if universe[w] is not None else filler for w in which]
        present = np.array([universe[w] is not None for w in which])
        x = np.array([np.atleast_1d(row[0]) for row in rows], np.float64).reshape(slots, *problem.graph.input_shape)
        y = np.array([np.atleast_1d(row[1]) for row in rows], np.float64)
        records = make_records(problem.graph, problem.loss, x, y, slots, present)
        made[which] = replace(problem, records=records)
    zero_out = problem.recipe.privacy.adjacency == "zero-out"
    pairs = []
    for which, one in made.items():
        for slot, other in itertools.product(range(slots), range(len(universe))):
            if other <= which[slot]:
                continue
            if zero_out and universe[other] is not None and universe[which[slot]] is not None:
                continue
            pairs.append((one, made[which[:slot] + (other,) + which[slot + 1 :]]))
    return pairs


# --- black box ---


@dataclass(frozen=True)
class BlackBox:
    """`epsilon` is spent at least, at confidence `confidence`, by the event of `kind` found on half of the samples."""

    epsilon: float
    confidence: float
    samples: int
    kind: str


def black_box(
    one: np.ndarray,
    two: np.ndarray,
    delta: float = 0.0,
    *,
    log_ratio: Callable[[np.ndarray], np.ndarray] | None = None,
    confidence: float = 0.999,
) -> BlackBox:
    """Lower confidence bound of epsilon from releases of two neighbours: `one`, `two`, (n,) or (n, d) each.

    The event is `statistic >= t` (or <=): the statistic is `log_ratio` (log density ratio of the first law to the
    second), by default the released number itself; `t`, side and direction are chosen on the first half of the samples.
    On the second half both probabilities get Clopper-Pearson bounds of level `(1 - confidence) / 2`, so
    `epsilon >= ln((P - delta) / Q)` holds with the stated confidence whatever the first half said.

    Guarantees:
    * black box bound is a lower confidence bound: it exceeds the true epsilon with probability at most 0.1 %;
    * half range is caught by 10^5 releases.
    """
    from scipy.special import betaincinv

    one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
    if log_ratio is not None:
        one, two = log_ratio(one), log_ratio(two)
    if one.ndim != 1 or two.ndim != 1 or min(len(one), len(two)) < 100:
        raise PrivacyError("black_box: needs at least 100 numbers a side; give log_ratio for vectors")
    first, second = (x[: len(x) // 2] for x in (one, two)), (x[len(x) // 2 :] for x in (one, two))
    (a, b), (a2, b2) = first, second
    best = (-math.inf, 0.0, 1.0, False)
    for t in np.unique(np.quantile(np.concatenate([a, b]), np.linspace(0.001, 0.999, 200))):
        for side in (1.0, -1.0):
            p, q = (float(np.mean(side * x >= side * t)) for x in (a, b))
            for swap in (False, True):
                high, low = (q, p) if swap else (p, q)
                n, m = (len(b), len(a)) if swap else (len(a), len(b))
                low = max(low, 2.0 / m)
                spread = math.sqrt(max(1.0 - high, 0.0) / (max(high, 1.0 / n) * n) + 1.0 / (low * m))
                if high > delta and (score := math.log((high - delta) / low) - 2.0 * spread) > best[0]:
                    best = (score, float(t), side, swap)
    _, t, side, swap = best
    hits, other = (int(np.sum(side * x >= side * t)) for x in ((b2, a2) if swap else (a2, b2)))
    n, m = (len(b2), len(a2)) if swap else (len(a2), len(b2))
    level = 0.5 * (1.0 - confidence)
    low = float(betaincinv(hits, n - hits + 1, level)) if hits else 0.0
    high = float(betaincinv(other + 1, m - other, 1.0 - level)) if other < m else 1.0
    sign = ">=" if side > 0 else "<="
    kind = f"{'log ratio' if log_ratio else 'output'} {sign} {t:.6g}{', swapped' if swap else ''}"
    value = math.log((low - delta) / high) if low > delta else -math.inf
    return BlackBox(value, confidence, len(one) + len(two), kind)


def mixture_loss(one, two, weights, points, density: Callable) -> float:
    """Sup over `points` of `|ln sum_s w_s p_s(y) / sum_s w_s q_s(y)|`: releases on one secret subsample.

    `one`, `two`: parameters of the law given subsample `s`, one entry a subsample; `density(parameters, points)`:
    log density of ALL releases made on that subsample. A lower bound of epsilon (exact where the sup is among the
    points): what a claim that amplifies every release by itself has to stand up to.
    """
    from scipy.special import logsumexp

    weights = np.asarray(weights, np.float64)[:, None]
    p, q = (logsumexp(np.array([density(x, points) for x in side]), axis=0, b=weights) for side in (one, two))
    return float(np.max(np.abs(p - q)))
