"""Private predictions: order of clipping, budget shares, refusals, repeated inputs, radii picked on
demand."""

import math
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from builders import mlp

import privacy
from certify.driver import run
from certify.errors import CapabilityError, PrivacyError, RadiusError
from certify.recipe import loads
from privacy import agtr, mechanism

RANGE = (-1.0, 1.0)


def world(m=3, outputs=2, radii=4, step=0.01):
    nominal = np.linspace(-0.4, 0.4, m * outputs).reshape(m, outputs)
    k = np.arange(radii + 1)[:, None, None]
    return nominal, nominal - step * k, nominal + step * k


def envelope(radii=(0, 1, 2, 3, 4), auto=None, sound=True, monotone=True, rigour="rigorous", adjacency="replace-one"):
    capabilities = SimpleNamespace(sound=sound, monotone=monotone, rigour=rigour)
    metadata = SimpleNamespace(adjacency=adjacency, capabilities=capabilities, recipe=None, auto=auto)
    return SimpleNamespace(radii=tuple(radii), metadata=metadata)


def linear_bounds(radii, step=0.01, outputs=1):
    def bounds(rows):
        f = rows[:, :1] * 0.1 + np.zeros((1, outputs))
        k = np.array(radii, float)[:, None, None]
        return f - step * k, f + step * k

    return bounds


def test_release_holds_public_facts_only():
    nominal, lower, upper = world()
    one, private = privacy.release_predictions(nominal, lower, upper, None, RANGE, 6.0, joint=False)
    g = one.guarantee
    assert (g.epsilon, g.delta, g.adjacency, g.releases) == (6.0, 0.0, "replace-one", 6)
    assert g.epsilon_per_release == 1.0 and g.delta_per_release == 0.0 and "cauchy" in g.mechanism
    assert set(vars(one)) == {"values", "guarantee"}
    # The guarantee is the same for other data with the same public facts.
    other, _ = privacy.release_predictions(nominal / 2, lower / 2, upper / 2, None, RANGE, 6.0, joint=False)
    assert other.guarantee == g
    assert "0." not in repr(private) and private.scale.shape == (3, 2)


RECIPE = """
[training]
loss = "squared"
steps = 40
clip = 0.2
learning_rate = { schedule = "constant", value = 1e200 }
[output]
lower = -1
upper = 1
"""


def test_a_prediction_that_is_not_finite_names_remedies_that_work():
    rng = np.random.default_rng(0)
    graph, x, y = mlp((3, 4, 1), scale=30.0), rng.normal(size=(30, 3)), rng.normal(size=(30, 1))

    def predict(recipe, inputs):
        return privacy.predict(run(graph, loads(recipe), x, y, radii=range(3)), graph, inputs, 5.0)

    fine = RECIPE.replace("1e200", "0.1")
    for recipe, inputs in ((RECIPE, x[:2]), (fine, x[:2] * 1e307)):
        with pytest.raises(PrivacyError, match="not finite: training diverged") as refusal:
            predict(recipe, inputs)
        for remedy in ("smaller learning_rate", "clip", "smaller inputs"):
            assert remedy in str(refusal.value)
    for recipe in (fine, RECIPE.replace("clip = 0.2", "clip = 1e-200")):
        assert np.isfinite(predict(recipe, x[:2]).values).all()


def test_values_are_on_the_grid_inside_the_range():
    nominal, lower, upper = world(200, 1)
    one, _ = privacy.release_predictions(nominal, lower, upper, None, RANGE, 200.0, 1e-3, joint=False)
    assert one.values.dtype == np.float64 and one.values.shape == (200, 1)
    assert np.all((one.values >= -1) & (one.values <= 1))
    assert np.all(one.values / one.guarantee.grid[0] == np.round(one.values / one.guarantee.grid[0]))
    assert "laplace" in one.guarantee.mechanism


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (0.3, 1e-5), (7.1, 1e-3)])
def test_shares_never_exceed_the_total(epsilon, delta):
    nominal, lower, upper = world(7, 3)
    g = privacy.release_predictions(nominal, lower, upper, None, RANGE, epsilon, delta, joint=False)[0].guarantee
    assert g.releases == 21
    assert Fraction(g.epsilon_per_release) * 21 <= Fraction(epsilon)
    assert Fraction(g.delta_per_release) * 21 <= Fraction(delta)
    assert g.epsilon_per_release > 0.999999 * epsilon / 21


def test_clipping_comes_before_noise():
    nominal = np.array([[5.0]])
    lower, upper = np.array([[[5.0]], [[-1e9]]]), np.array([[[5.0]], [[1e9]]])
    _, private = privacy.release_predictions(nominal, lower, upper, None, RANGE, 1.0)
    assert private.nominal.tolist() == [[1.0]]
    assert all(s.max() <= 2.0 for s in private.smooth.values())


def test_ceiling_is_the_smaller_of_range_and_argument():
    nominal, lower, upper = (x - 0.6 for x in world(1, 1, radii=1, step=10.0))
    for ceiling, top in ((None, 2.0), (5.0, 2.0), (0.125, 0.125)):
        _, private = privacy.release_predictions(nominal, lower, upper, ceiling, RANGE, 1.0)
        assert max(s.max() for s in private.smooth.values()) == top


def test_scale_is_the_calibrated_smooth_bound():
    # One query, A_k = 0.01 (2k + 1), K = 4: S = max(0.01, ..., e^{-4 beta} * 2), a = 2 sinh(1/2).
    nominal, lower, upper = world(1, 1)
    _, private = privacy.release_predictions(nominal, lower, upper, None, RANGE, 1.0, betas=[0.7])
    s = max([math.exp(-0.7 * k) * 0.01 * (2 * k + 1) for k in range(4)] + [math.exp(-2.8) * 2.0])
    assert abs(private.scale[0, 0] / (s / (2 * math.sinh(0.5))) - 1) < 1e-9


def test_noise_has_the_private_scale():
    nominal, lower, upper = world(4000, 1, radii=4, step=1e-4)
    nominal, lower, upper = (x * 1e-3 for x in (nominal, lower, upper))
    one, private = privacy.release_predictions(nominal, lower, upper, 1e-3, RANGE, 4000.0, betas=[0.7], joint=False)
    from scipy import stats

    z = (one.values - nominal) / private.scale
    assert stats.kstest(z.ravel(), "cauchy").pvalue > 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n, l, u: (n + 1e-9, l, u), "radius 0"),
        (lambda n, l, u: (n * np.nan, l, u), "finite"),
        (lambda n, l, u: (n, l[:, :1], u), "do not fit"),
        (lambda n, l, u: (n, l[::-1], u), "radius 0"),
        (lambda n, l, u: (n, l[[0, 1, 3, 2, 4]], u), "nested"),
        (lambda n, l, u: (n, l[:1], u[:1]), "radii 0 and 1"),
        (lambda n, l, u: (n, u + 1, l), "out of order"),
    ],
)
def test_broken_bounds_are_refused(change, message):
    with pytest.raises(PrivacyError, match=message):
        privacy.release_predictions(*change(*world()), None, RANGE, 1.0)


@pytest.mark.parametrize("budget", [(0.0, 0.0), (-1.0, 0.0), (math.inf, 0.0), (math.nan, 0.0), (1.0, 1.0), (1.0, -0.1)])
def test_bad_budgets_are_refused(budget):
    with pytest.raises(PrivacyError):
        privacy.release_predictions(*world(), None, RANGE, *budget)


@pytest.mark.parametrize("output_range", [(0.0, 0.0), (1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)])
def test_bad_ranges_are_refused(output_range):
    with pytest.raises(PrivacyError, match="output_range"):
        privacy.release_predictions(*world(), None, output_range, 1.0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"sound": False}, "sound"),
        ({"monotone": False}, "monotone"),
        ({"rigour": "unsound"}, "rigour"),
        ({"rigour": ""}, "rigour"),
    ],
)
def test_unsuitable_envelopes_are_refused(fault, message):
    def bounds(rows):
        raise AssertionError("the bounds must not be asked for")

    with pytest.raises(CapabilityError, match=message):
        privacy.predict_from_bounds(envelope(**fault), bounds, np.zeros((1, 1)), 1.0, output_range=RANGE)


def test_repeated_inputs_cost_nothing():
    queries = np.array([[1.0, 2.0], [0.0, 5.0], [1.0, 2.0], [-0.0, 5.0], [1.0, 2.0]])
    seen = []

    def bounds(rows):
        seen.append(rows)
        return linear_bounds(range(5))(rows)

    # epsilon = 20 each: the noise is far narrower than the range, so equal values are equal answers.
    one = privacy.predict_from_bounds(envelope(), bounds, queries, 40.0, output_range=RANGE, joint=False)
    assert len(seen) == 1 and seen[0].shape == (2, 2)
    assert one.guarantee.releases == 2 and one.guarantee.epsilon_per_release == 20.0
    v = one.values[:, 0]
    assert one.values.shape == (5, 1) and v[0] == v[2] == v[4] and v[1] == v[3] and v[0] != v[1]


def test_guarantee_carries_the_adjacency_of_the_envelope():
    for adjacency in ("replace-one", "zero-out"):
        one = privacy.predict_from_bounds(
            envelope(adjacency=adjacency), linear_bounds(range(5)), np.zeros((1, 1)), 1.0, output_range=RANGE
        )
        assert one.guarantee.adjacency == adjacency


def test_per_query_budget_is_reported_in_total():
    queries = np.arange(4.0)[:, None]
    one = privacy.predict_from_bounds(
        envelope(), linear_bounds(range(5), outputs=2), queries, 0.1, 1e-6,
        per_query=True, output_range=RANGE, joint=False,
    )  # fmt: skip
    g = one.guarantee
    assert g.releases == 8 and Fraction(g.epsilon) >= 4 * Fraction(0.1) and abs(g.epsilon - 0.4) < 1e-12
    assert Fraction(g.epsilon_per_release) * 2 <= Fraction(0.1) and Fraction(g.delta) >= 4 * Fraction(1e-6)


def test_ceiling_follows_the_distinct_rows():
    queries = np.array([[3.0], [1.0], [3.0]])
    caught = {}
    original = agtr._release

    def spy(nominal, lower, upper, ceiling, *rest):
        caught["ceiling"] = ceiling
        return original(nominal, lower, upper, ceiling, *rest)

    agtr._release = spy
    try:
        for ceiling in (np.array([[0.3], [0.1], [0.3]]), lambda rows: rows / 10):
            privacy.predict_from_bounds(
                envelope(), linear_bounds(range(5)), queries, 1.0, output_range=RANGE, ceiling=ceiling
            )
            assert np.allclose(caught["ceiling"], [[0.1], [0.3]])
    finally:
        agtr._release = original


def test_gaps_are_refused_without_a_recorded_beta():
    radii = (0, 1, 2, 4, 8)
    with pytest.raises(RadiusError, match="without gaps"):
        privacy.predict_from_bounds(envelope(radii), linear_bounds(radii), np.zeros((1, 1)), 1.0, output_range=RANGE)


def test_radii_on_demand_give_the_dense_bound():
    radii = (0, 1, 2, 3, 4, 5, 6, 12, 13, 14)
    auto = {"beta": 0.7, "queries_sha256": "0" * 64}
    sparse = envelope(radii, auto)
    caught = []
    original = mechanism.noise.noise_scale
    mechanism.noise.noise_scale = lambda s, p: caught.append(s) or original(s, p)
    try:
        privacy.predict_from_bounds(sparse, linear_bounds(radii), np.zeros((1, 1)), 1.0, output_range=RANGE)
        privacy.predict_from_bounds(
            envelope(range(60)), linear_bounds(range(60)), np.zeros((1, 1)), 1.0, output_range=RANGE, betas=[0.7]
        )
    finally:
        mechanism.noise.noise_scale = original
    assert list(caught[0]) == [0.7] and np.array_equal(caught[0][0.7], caught[1][0.7])


@pytest.mark.parametrize("beta", [0.05, 0.2, 0.7])
def test_radii_on_demand_give_the_bound_of_all_radii_up_to_the_slots(beta):
    """Few slots: the search reaches radius N itself. The value is that of the envelope with every radius."""
    from privacy.dense import dense_maximum

    for step, top in ((0.001, 0.3), (0.2, 0.3), (0.01, 2.0)):
        slots = 12
        k = np.arange(slots + 1.0)[:, None, None]
        lower, upper = -np.minimum(step * k, top), np.minimum(step * k**1.5, top)
        every = privacy.cross_ranges(lower, upper)[:, :, 0]
        cross, asked = np.vstack([every, (upper - lower)[-1]]), [0]

        def evaluate(ks, asked=asked, cross=cross, slots=slots):
            asked += [min(r, slots) for j in ks for r in (j, j + 1)]
            return {j: cross[j] for j in ks}

        dense_maximum(evaluate, [2.0], beta, slots)
        radii = tuple(sorted(set(asked)))
        bound = agtr._on_demand(radii, slots)
        found = bound(lower[list(radii)], upper[list(radii)], np.array([[2.0]]), beta)
        assert found[0, 0] == privacy.smooth_bound(every, 2.0, beta)[0]


def test_outputs_have_their_own_range():
    nominal, lower, upper = world(2, 2, step=100.0)
    ends = ([-1.0, -8.0], [1.0, 8.0])
    one, private = privacy.release_predictions(nominal, lower, upper, None, ends, 400.0, joint=False)
    assert np.all(np.abs(one.values) <= [1.0, 8.0]) and len(one.guarantee.grid) == 2
    assert one.guarantee.grid[1] == 8 * one.guarantee.grid[0]
    assert np.all(np.max(list(private.smooth.values()), axis=0) <= [2.0, 16.0])


def test_radii_on_demand_tie_the_beta():
    radii = (0, 1, 2, 3, 4, 5, 6, 12, 13, 14)
    auto = {"beta": [0.7], "queries_sha256": "0" * 64}
    with pytest.raises(PrivacyError, match="leave betas out"):
        privacy.predict_from_bounds(
            envelope(radii, auto), linear_bounds(radii), np.zeros((1, 1)), 1.0, output_range=RANGE, betas=[0.5]
        )
    # Contiguous by chance, but its length was picked on the data: still only a proven value.
    with pytest.raises(PrivacyError, match="do not prove"):
        privacy.predict_from_bounds(
            envelope((0, 1), auto), linear_bounds((0, 1)), np.zeros((1, 1)), 1.0, output_range=RANGE
        )
    # The recorded beta must be admissible for the share of each release.
    with pytest.raises(PrivacyError, match="too large"):
        privacy.predict_from_bounds(
            envelope(radii, auto), linear_bounds(radii), np.zeros((1, 1)), 0.5, output_range=RANGE
        )


@pytest.mark.parametrize("queries", [np.zeros(3), np.zeros((0, 2)), np.array([[np.nan]]), np.array([[np.inf]])])
def test_bad_queries_are_refused(queries):
    with pytest.raises(PrivacyError, match="queries"):
        privacy.predict_from_bounds(envelope(), linear_bounds(range(5)), queries, 1.0, output_range=RANGE)


def test_import_loads_nothing_heavy():
    code = (
        "import sys, privacy; light = set(sys.modules); privacy.release_predictions; heavy = "
        "{'torch', 'onnx', 'pyomo', 'numba', 'scipy', 'onnxruntime', 'pandas'}; "
        "print(sorted(heavy & set(sys.modules)), 'numpy' in light)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[] False"


def test_public_names_resolve():
    for name in privacy.__all__:
        assert getattr(privacy, name).__module__.startswith("privacy.")
    with pytest.raises(AttributeError):
        privacy.nothing  # noqa: B018
