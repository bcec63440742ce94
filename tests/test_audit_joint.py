"""Audits of vectors that are released together: the joint laws, what is shipped passes, wrong variants are caught."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from builders import mlp
from noise_oracle import laplace_joint_delta
from scipy import stats
from test_audit import UNIVERSE, facts, threshold

from certify.driver import prepare
from certify.errors import PrivacyError
from privacy import ags, audit, audit_laws, noise, smooth
from privacy.ags import AgsPlan
from privacy.mechanism import Mechanism, smooth_bounds
from privacy.noise import gaussian

# --- the joint laws, against independent computations ---


def log_ratio(name, c, y, f, s, g, t):
    """`ln p/q` at points `y` (n, p), without normalising constants that cancel."""
    one, two = np.abs(y - f) / s, np.abs(y - g) / t
    if name == "cauchy":
        return (np.log1p(two**2) - np.log1p(one**2)).sum(1) + np.log(t / s).sum()
    size = (lambda z: z.sum(1)) if name == "l1-power" else (lambda z: z.max(1))
    return c * (np.log1p(size(two)) - np.log1p(size(one))) + np.log(t / s).sum()


@pytest.mark.parametrize("name", ["cauchy", "l1-power", "box-power"])
def test_joint_losses_are_the_supremum(name):
    rng, far = np.random.default_rng(0), np.geomspace(12, 1e6, 500)
    for dim, equal in itertools.product((2, 3), (True, False)):
        family = noise.make_family(name, 1.0, 0.0, dim)
        c = 0 if name == "cauchy" else dim + family.exponent(dim)
        for _ in range(15):
            f, g = rng.normal(size=(2, dim)) * rng.choice([0.0, 1.0], dim)
            s = np.full(dim, 1.0) if equal else rng.uniform(0.5, 2, dim)
            t = s * rng.uniform(0.6, 1.6, 1 if equal else dim)
            claimed = float(audit_laws.joint_loss(family, f, s, g, t))
            corners = np.array(list(itertools.product(*zip(f, g, strict=True))))
            rays = [x + np.outer(np.geomspace(1, 1e8, 30), e) for x in (f, g) for e in (*np.eye(dim), *-np.eye(dim))]
            y = np.concatenate([rng.normal(size=(4000, dim)) * 2, *rays, corners])
            if name == "cauchy":  # coordinate by coordinate, on a grid around both centres
                line = np.concatenate([np.linspace(-12, 12, 60_001), far, -far])
                each = [log_ratio(name, c, line[:, None], *(v[[i]] for v in (f, s, g, t))) for i in range(dim)]
                found = max(sum(x.max() for x in each), -sum(x.min() for x in each))
            else:
                found = np.abs(log_ratio(name, c, y, f, s, g, t)).max()
            assert found <= claimed * (1 + 1e-9) + 1e-9
            assert claimed <= found * (1 + 1e-4) + 1e-5


def test_joint_hockey_sticks_are_lower_bounds_and_close():
    gauss, laplace = (noise.make_family(name, 1.0, 1e-5, 2) for name in ("gaussian", "laplace"))
    rng = np.random.default_rng(1)
    for dim, lam, wide in itertools.product((2, 9, 40), (0.0, 0.02), (True, False)):
        shift = rng.normal(size=dim)
        shift *= 0.6 / np.linalg.norm(shift)
        s, t = (math.exp(lam), 1.0) if wide else (1.0, math.exp(lam))
        found = audit_laws.joint_hockey_stick(gauss, 0.5, np.zeros(dim), np.full(dim, s), shift, np.full(dim, t))
        exact = gaussian.hockey_stick(0.5, 0.6, lam, dim, wide)
        assert 0.96 * exact <= found <= exact * (1 + 1e-6)
    for dim, lam, wide in itertools.product((2, 5), (1e-9, 0.05), (True, False)):
        shift = np.eye(dim)[0] * 0.6
        s, t = (math.exp(lam), 1.0) if wide else (1.0, math.exp(lam))
        found = audit_laws.joint_hockey_stick(laplace, 0.4, np.zeros(dim), np.full(dim, s), shift, np.full(dim, t))
        exact = laplace_joint_delta(0.4, 0.6, lam, dim, wide)
        assert 0.95 * exact <= found <= exact * (1 + 1e-6) + 1e-8
    # Scales with different ratios, in the plane.
    y = np.linspace(-25, 25, 2501)
    f, s, g, t = np.zeros(2), np.array([1.0, 1.3]), np.array([0.5, -0.4]), np.array([1.2, 1.1])
    for family, law in ((gauss, stats.norm), (laplace, stats.laplace)):
        p, q = (np.outer(*(law.pdf(y, a, b) for a, b in zip(*x, strict=True))) for x in ((f, s), (g, t)))
        exact = np.maximum(p - math.exp(0.3) * q, 0).sum() * (y[1] - y[0]) ** 2
        assert 0.95 * exact <= audit_laws.joint_hockey_stick(family, 0.3, f, s, g, t) <= exact * 1.001


def test_joint_laws_refuse_other_families():
    student = noise.make_family("student", 1.0, 0.0, 1)
    zeros, ones = np.zeros(2), np.ones(2)
    with pytest.raises(PrivacyError, match="student"):
        audit_laws.joint_loss(student, zeros, ones, zeros, ones)
    with pytest.raises(PrivacyError, match="student"):
        audit_laws.joint_hockey_stick(student, 1.0, zeros, ones, zeros, ones)


# --- what is shipped passes ---


def several_outputs(adjacency="replace-one"):
    graph = mlp((2, 2))
    recipe = facts(adjacency, 3)
    return prepare(graph, recipe, np.zeros((3, 2)), np.zeros((3, 2)))


PAIR_UNIVERSE = [((0.5, -1.0), (1.0, -1.0)), ((-1.0, 1.0), (-1.0, 0.5)), None]


@pytest.mark.parametrize(
    ("family", "epsilon", "delta"),
    [("cauchy", 4.0, 0.0), ("l1-power", 6.0, 0.0), ("box-power", 6.0, 0.0), ("laplace", 4.0, 1e-2),
     pytest.param("gaussian", 4.0, 1e-2, marks=pytest.mark.slow), (None, 4.0, 0.0)],
)  # fmt: skip
def test_audit_passes_joint_releases(family, epsilon, delta):
    pairs = audit.exhaustive_world(several_outputs(), PAIR_UNIVERSE)
    queries = np.array([[0.3, -0.2], [1.0, 1.0]])
    pairs = pairs[:: 27 if delta else 3]  # the approximate families calibrate slowly
    report = audit.audit_pairs(pairs, queries, epsilon, delta, family, radii=range(4), joint=family and True)
    assert report.passed, report.checks
    by_name = {check.name: check for check in report.checks}
    assert by_name["|f - f'| / min(S, S')"].worst > 0.05
    assert "4-dimensional" in report.family


PLANS = [(None, None), ("cauchy", None), pytest.param("gaussian", (0.0, 0.2), marks=pytest.mark.slow)]


@pytest.mark.parametrize(("family", "betas"), PLANS)
def test_audit_passes_released_parameters(family, betas, monkeypatch):
    graph = mlp((2, 1))
    problem = prepare(graph, facts(), np.zeros((3, 2)), np.zeros(3))
    pairs = audit.exhaustive_world(problem, UNIVERSE[:3])[::2]
    delta = 1e-2 if family == "gaussian" else 0.0
    plan = AgsPlan.make([1, 3], 6.0, delta, radius=3, family=family, weights=[1, 2, 0.5], betas=betas)
    seen, sweep = set(), audit.sweep
    monkeypatch.setattr(
        audit, "sweep", lambda *a, **how: seen.add((how["start"], how["stop"])) or sweep(*a, **how)
    )
    report = audit.audit_plan(pairs, plan)
    assert report.passed, report.checks
    assert seen == {(0, 1), (1, 3)}
    assert {check.name for check in report.checks} >= {"boxes nest", "|f - f'| / min(S, S')", "|ln S/S'|"}


# --- wrong variants are caught ---


def vectors(rule_pairs, family, *, separate=False, shrink=1.0):
    """A rule that releases all numbers together, calibrated with `rule_pairs`; `separate`: a scale for each number."""

    def rule(lower, upper, ceiling, ends, epsilon, delta, _family, difference=None):
        dim = lower[0].size
        mechanism = Mechanism(family, epsilon, delta, dim, tuple(rule_pairs(epsilon, delta, dim)))
        low, high = (side.reshape(len(side), 1, dim) for side in (lower, upper))
        top = np.full((1, dim), ceiling)
        if separate:
            cross = smooth.cross_ranges(low, high)
            by_beta = {p.beta: smooth.smooth_bound(cross, top, p.beta).reshape(dim, 1) for p in mechanism.pairs}
        else:
            by_beta = smooth_bounds(low, high, top, mechanism)
            by_beta = {beta: np.full((dim, 1), s[0]) for beta, s in by_beta.items()}
        scale = noise.noise_scale(by_beta, mechanism.pairs) / shrink
        return audit.Laws(lower[0], by_beta, scale, mechanism, np.ones((dim, 1)))

    return rule


def several_thresholds(places, n=20):
    """Neighbouring worlds: one query for each threshold in `places`."""
    worlds = []
    for ones in range(n + 1):
        sides = [threshold(ones, n, at, range(n + 2)) for at in places]
        worlds.append(tuple(np.concatenate([side[i] for side in sides], axis=1) for i in (0, 1)))
    return list(itertools.pairwise(worlds))


def verdict(rule, places, epsilon, delta=0.0):
    pairs, ends = several_thresholds(places), (np.array([-1.0]), np.array([2.0]))
    checks = [c for one, two in pairs for c in audit.audit_bounds(one, two, 1.0, ends, epsilon, delta, rule=rule)]
    return {c.name for c in audit.merge(checks) if not c.passed}


@pytest.mark.parametrize(("name", "delta"), [("cauchy", 0.0), ("l1-power", 0.0), ("laplace", 1e-3), ("gaussian", 1e-3)])
def test_joint_checks_look_both_ways(name, delta):
    """The verdict on a pair does not depend on which data set comes first, for a wide law beside a narrow one."""
    mechanism = Mechanism.make(name, 1.0, delta, 3)
    side, worst = several_thresholds([5] * 3)[4], []
    for scales in ((1.0, 1.5), (1.5, 1.0)):
        laws = iter(
            audit.Laws(np.zeros((3, 1)), {0.3: np.full((3, 1), s)}, np.full((3, 1), s), mechanism, np.ones((3, 1)))
            for s in scales
        )
        rule = lambda *_, laws=laws: next(laws)  # noqa: E731
        checks = audit.audit_bounds(*side, 1.0, (np.array([-1.0]), np.array([2.0])), 1.0, delta, rule=rule)
        worst.append(checks[-1])
    assert worst[0].worst == pytest.approx(worst[1].worst, rel=1e-12) and not worst[0].passed


CASES = [("cauchy", 0.0, [0.1]), ("l1-power", 0.0, [0.02]), ("box-power", 0.0, [0.02]), ("laplace", 1e-5, [0.01]),
         ("gaussian", 1e-5, [0.01])]  # fmt: skip


@pytest.mark.parametrize(("name", "delta", "betas"), CASES)
def test_right_vector_rules_pass_and_small_scales_are_caught(name, delta, betas):
    family = noise.make_family(name, 1.0, delta, 5)
    pairs = lambda e, d, dim: noise.admissible_pairs(family, e, d, dim, betas)  # noqa: E731
    assert verdict(vectors(pairs, family), [10] * 5, 1.0, delta) == set()
    assert verdict(vectors(pairs, family, shrink=2.5), [10] * 5, 1.0, delta)


WIDE = [("cauchy", 0.0, 0.5), ("laplace", 1e-5, 0.06), ("gaussian", 1e-5, 0.05)]


@pytest.mark.parametrize(("name", "delta", "beta"), WIDE)
def test_a_dilation_paid_for_one_number_is_caught(name, delta, beta):
    """The one-dimensional beta used for a vector (the paper's Definitions III.7 and III.8 in R^n)."""
    family = noise.make_family(name, 1.0, delta, 1)
    pairs = lambda e, d, dim: noise.admissible_pairs(family, e, d, 1, [beta])  # noqa: E731
    many = [10] * (40 if delta else 8)
    failed = verdict(vectors(pairs, family), many, 1.0, delta)
    assert failed == {"hockey stick, one release" if delta else "worst log ratio, one release"}
    # For a single number the same constants are right.
    assert verdict(vectors(pairs, family), [10], 1.0, delta) == set()


def test_a_scale_for_each_number_is_caught():
    """Constants for one common scale, used with a scale for each number: dilations of both signs."""
    family = noise.make_family("box-power", 1.0, 0.0, 2)
    (widest,) = (noise.admissible_pairs(family, 1.0, 0.0, 2)[-1].beta,)
    pairs = lambda e, d, dim: noise.admissible_pairs(family, e, d, dim, [widest])  # noqa: E731
    failed = verdict(vectors(pairs, family, separate=True), [2, 18], 1.0)
    assert "worst log ratio, one release" in failed
    assert verdict(vectors(pairs, family), [2, 18], 1.0) == set()


def test_wrong_parameter_releases_are_caught(monkeypatch):
    graph = mlp((2, 1))
    problem = prepare(graph, facts(), np.zeros((3, 2)), np.zeros(3))
    pairs = audit.exhaustive_world(problem, UNIVERSE[:2])[:6]
    plan = AgsPlan.make([3], 3.0, radius=3, family="l1-power")
    shipped, mechanisms = ags._bounds, AgsPlan.mechanisms

    def small(*args):
        nominal, by_beta = shipped(*args)
        return nominal, {beta: s / 30.0 for beta, s in by_beta.items()}

    assert audit.audit_plan(pairs, plan).passed
    monkeypatch.setattr(ags, "_bounds", small)
    failed = {check.name for check in audit.audit_plan(pairs, plan).checks if not check.passed}
    assert failed == {"|f - f'| / min(S, S')", "worst log ratio, one release"}
    monkeypatch.setattr(ags, "_bounds", shipped)
    monkeypatch.setattr(
        AgsPlan,
        "mechanisms",
        lambda plan, size: [
            replace(m, pairs=tuple(replace(p, a=30.0 * p.a) for p in m.pairs)) for m in mechanisms(plan, size)
        ],
    )
    failed = {check.name for check in audit.audit_plan(pairs, plan).checks if not check.passed}
    assert failed == {"worst log ratio, one release"}


def test_empty_queries_are_refused():
    pairs = audit.exhaustive_world(several_outputs(), PAIR_UNIVERSE[:2])[:1]
    for empty in (np.zeros((0, 2)), np.zeros((0, 0)), np.zeros((2, 0))):
        with pytest.raises(PrivacyError, match="queries: found an empty table"):
            audit.audit_pairs(pairs, empty, 1.0, radii=range(3))
