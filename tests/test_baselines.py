"""The plain mechanisms: exact losses, sensitivities by enumeration, DP-SGD's accountant against the true laws."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from builders import mlp
from scipy import integrate, stats

from certify.driver import prepare, train
from certify.errors import PrivacyError
from certify.recipe import from_dict
from privacy import baselines


def exact_gaussian_delta(scale, sensitivity, epsilon):
    """80 digits."""
    with mpmath.workdps(80):
        s, d, e = map(mpmath.mpf, (scale, sensitivity, epsilon))
        return mpmath.ncdf(d / (2 * s) - e * s / d) - mpmath.exp(e) * mpmath.ncdf(-d / (2 * s) - e * s / d)


# --- mechanisms ---


def test_laplace_release_is_epsilon_dp():
    bits_free = baselines.laplace(np.zeros((2, 3)), 0.3, 0.7)
    g = bits_free.guarantee
    assert bits_free.values.shape == (2, 3)
    assert g.sensitivity / g.scale <= 0.7 < g.sensitivity / g.scale * (1 + 1e-12)
    assert (g.epsilon, g.delta, g.adjacency, g.norm) == (0.7, 0.0, "replace-one", "l1")
    values = baselines.laplace(np.full(4000, 5.0), 2.0, 4.0).values
    assert stats.kstest((values - 5.0) / 0.5, "laplace").pvalue > 1e-6
    clipped = baselines.laplace(np.zeros(50), 1.0, 0.1, output_range=(-1.0, 2.0)).values
    assert clipped.min() == -1.0 and clipped.max() == 2.0


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_gaussian_release_is_epsilon_delta_dp(epsilon, delta):
    scale = baselines.analytic_gaussian(3.0, epsilon, delta)
    assert exact_gaussian_delta(scale, 3.0, epsilon) <= delta
    assert exact_gaussian_delta(scale * 0.999, 3.0, epsilon) > delta * (1 - 1e-12)


def test_gaussian_noise_has_the_scale():
    pytest.importorskip("privacy.noise")
    made = baselines.gaussian(np.zeros(4000), 1.0, 1.0, 1e-5)
    assert stats.kstest(made.values / made.guarantee.scale, "norm").pvalue > 1e-6
    assert made.guarantee.norm == "l2"


def test_classical_formula_is_wrong_at_epsilon_ten():
    sigma = baselines.classical_gaussian(1.0, 10.0, 1e-5)
    assert float(exact_gaussian_delta(sigma, 1.0, 10.0)) == pytest.approx(2.3e-5, rel=0.05)
    assert baselines.analytic_gaussian(1.0, 10.0, 1e-5) > sigma
    # ... and wasteful where it is proved.
    assert baselines.analytic_gaussian(1.0, 1.0, 1e-5) < baselines.classical_gaussian(1.0, 1.0, 1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: baselines.laplace([0.0], 0.0, 1.0), "sensitivity"),
        (lambda: baselines.laplace([0.0], 1.0, 0.0), "epsilon"),
        (lambda: baselines.laplace([np.inf], 1.0, 1.0), "values"),
        (lambda: baselines.laplace([0.0], 1.0, 1.0, adjacency="add-one"), "adjacency"),
        (lambda: baselines.gaussian([0.0], 1.0, 1.0, 0.0), "delta"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(PrivacyError, match=message):
        call()


# --- output perturbation ---


def contractive(adjacency="replace-one", contraction=0.4, rate=0.1, steps=8, loss="huber"):
    return from_dict(
        {
            "training": {
                "loss": loss, "clip": 0.1, "steps": steps, "contraction": contraction,
                "learning_rate": {"schedule": "constant", "value": rate},
            },
            "batches": {"kind": "full", "slots": 3},
            "features": {"lower": -0.3, "upper": 0.3},
            "target": {"lower": -3.0, "upper": 3.0},
            "privacy": {"adjacency": adjacency},
        }
    )  # fmt: skip


ARGUMENTS = {"parameters": 2, "clip": 0.1, "rate": 0.1, "normaliser": 3, "contraction": 0.4}


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_contractive_training_stays_within_the_sensitivity(adjacency, norm):
    """All neighbours of all data sets over four records: distances of the parameters that the engine trains."""
    recipe = contractive(adjacency)
    graph = mlp((1, 1))
    ell = baselines.linear_lipschitz(0.3, 1, 1.0, norm)
    sizes = {**ARGUMENTS, "lipschitz": ell, "adjacency": adjacency, "norm": norm, "start": 2.0}
    bound = baselines.contractive_sensitivity(**sizes)
    records = [(-0.3, 3.0), (0.3, 3.0), (0.3, -3.0), (0.1, 0.0)]
    trained = {}
    empty = 4  # a table that is one row shorter leaves the last slot empty
    for which in itertools.product(range(5), repeat=3):
        if empty in which[:2]:
            continue
        rows = np.array([records[w] for w in which if w != empty])
        trained[which] = train(graph, recipe, rows[:, :1], rows[:, 1])
    worst = 0.0
    for which, other in itertools.combinations(trained, 2):
        differ = [i for i in range(3) if which[i] != other[i]]
        if len(differ) > 1 or (adjacency == "zero-out" and empty not in (which[differ[0]], other[differ[0]])):
            continue
        worst = max(worst, float(np.linalg.norm(trained[which] - trained[other], 1 if norm == "l1" else 2)))
    assert worst <= bound
    # Half of the bound would be a false promise.
    assert worst > 0.5 * bound


def test_a_step_that_need_not_contract_is_refused():
    for change in ({"lipschitz": 6.1}, {"contraction": 1.0, "lipschitz": 0.0}, {"rate": [0.1, 1.0], "lipschitz": 0.7}):
        with pytest.raises(PrivacyError, match="not below 1"):
            baselines.contractive_sensitivity(**{**ARGUMENTS, "lipschitz": 1.0, **change})
    with pytest.raises(PrivacyError, match="positive"):
        baselines.contractive_sensitivity(**{**ARGUMENTS, "lipschitz": math.nan})
    with pytest.raises(PrivacyError, match="norm"):
        baselines.contractive_sensitivity(**{**ARGUMENTS, "lipschitz": 0.1}, norm="linf")


def test_sensitivity_formula():
    """2 p clip rate / (b (1 - c - rate l)), plus less than a millionth; zero-out half of it."""
    value = baselines.contractive_sensitivity(**ARGUMENTS, lipschitz=0.5)
    plain = 2 * 2 * 0.1 * 0.1 / (3 * (1 - 0.4 - 0.1 * 0.5))
    assert plain < value < plain * (1 + 1e-6)
    half = baselines.contractive_sensitivity(**ARGUMENTS, lipschitz=0.5, adjacency="zero-out")
    assert half == pytest.approx(value / 2, rel=1e-6)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_linear_lipschitz_bounds_the_jacobian(norm):
    """Operator norms of random Jacobians with rows zeroed by the clip."""
    rng = np.random.default_rng(0)
    bound = baselines.linear_lipschitz(1.5, 3, 2.0, norm)
    worst = 0.0
    for _ in range(2000):
        v = np.append(rng.choice([-1.5, 1.5, rng.uniform(-1.5, 1.5)], 3), 1.0)
        jacobian = (rng.random(4) < 0.7)[:, None] * 2.0 * np.outer(v, v)
        worst = max(worst, np.linalg.norm(jacobian, 1 if norm == "l1" else 2))
    assert 0.9 * bound < worst <= bound


def test_output_perturbation_is_dp():
    recipe, graph = contractive(), mlp((1, 1))
    x, y = np.full((3, 1), 0.2), np.ones(3)
    for delta, norm in ((0.0, "l1"), (1e-5, "l2")):
        ell = baselines.linear_lipschitz(0.3, 1, 1.0, norm)
        made = baselines.output_perturbation(graph, recipe, x, y, 2.0, delta, lipschitz=ell)
        start = float(np.abs(prepare(graph, recipe, x, y).graph.initial()).max())
        bound = baselines.contractive_sensitivity(**ARGUMENTS, lipschitz=ell, start=start, norm=norm)
        g = made.guarantee
        assert (g.sensitivity, g.norm, g.epsilon, g.delta) == (bound, norm, 2.0, delta)
        assert made.values.shape == (2,)
    with pytest.raises(PrivacyError, match="not below 1"):
        baselines.output_perturbation(graph, contractive(contraction=1.0), x, y, 1.0, lipschitz=0.1)


# --- DP-SGD ---


def mixture(m, q, shift):
    return lambda x: (1 - q) * stats.norm.pdf(x, 0, m) + q * stats.norm.pdf(x, shift, m)


def true_delta(p, q, epsilon, m, steps):
    """Hockey stick of one or two steps by quadrature on a grid, from densities."""
    x = np.linspace(-9 * m - 2, 9 * m + 2, 3001)
    step = x[1] - x[0]
    px, qx = p(x) * step, q(x) * step
    if steps == 2:
        px, qx = np.outer(px, px), np.outer(qx, qx)
    return float(np.maximum(px - math.exp(epsilon) * qx, 0.0).sum())


@pytest.mark.parametrize(("m", "q", "epsilon"), [(1.0, 0.3, 0.5), (2.0, 0.1, 0.1), (0.8, 0.5, 1.5), (1.5, 1.0, 1.0)])
@pytest.mark.parametrize("steps", [1, 2])
def test_accountant_never_undercounts_the_true_laws(m, q, epsilon, steps):
    plain = mixture(m, 0.0, 0.0)
    pairs = {
        "zero-out": [(mixture(m, q, 1.0), plain), (plain, mixture(m, q, 1.0))],
        # The record's gradient may be replaced by its negative, by zero, by one of half the length.
        "replace-one": [
            (mixture(m, q, 1.0), mixture(m, q, -1.0)), (mixture(m, q, 1.0), plain), (plain, mixture(m, q, 1.0)),
            (mixture(m, q, 1.0), mixture(m, q, -0.5)),
        ],
    }  # fmt: skip
    for adjacency, cases in pairs.items():
        claimed = baselines.poisson_gaussian_delta(m, q, steps, epsilon, adjacency)
        worst = max(true_delta(*case, epsilon, m, steps) for case in cases)
        assert worst <= claimed
        assert claimed <= (1.1 * worst if adjacency == "zero-out" or q == 1.0 else 3.5 * worst) + 1e-6


def test_accountant_catches_the_clip_counted_once():
    """With replace-one the clip counts twice: the add/remove number is below the true delta."""
    m, q, epsilon = 1.0, 0.3, 0.5
    true = true_delta(mixture(m, q, 1.0), mixture(m, q, -1.0), epsilon, m, 2)
    assert baselines.poisson_gaussian_delta(m, q, 2, epsilon, "zero-out") < 0.7 * true
    assert true <= baselines.poisson_gaussian_delta(m, q, 2, epsilon, "replace-one")


@pytest.mark.parametrize(("adjacency", "shift"), [("zero-out", 1.0), ("replace-one", 2.0)])
def test_accountant_of_full_batches_is_the_gaussian_mechanism(adjacency, shift):
    for steps, m, epsilon in ((1, 2.0, 0.5), (10, 10.0, 1.0)):
        exact = float(exact_gaussian_delta(m / math.sqrt(steps), shift, epsilon))
        assert exact <= baselines.poisson_gaussian_delta(m, 1.0, steps, epsilon, adjacency) <= 1.05 * exact + 1e-7


def test_accountant_agrees_with_opacus():
    analysis = pytest.importorskip("opacus.accountants")
    for m, q, steps in ((0.9, 0.05, 20),):
        accountant = analysis.PRVAccountant()
        accountant.history = [(m, q, steps)]
        epsilon = accountant.get_epsilon(1e-4)
        # Opacus reports an upper end, about 0.01 above the truth.
        ours = [baselines.poisson_gaussian_delta(m, q, steps, e, "zero-out") for e in (epsilon, epsilon - 0.025)]
        assert ours[0] <= 1.02e-4 and ours[1] >= 1e-4


def test_noise_for_a_budget_is_the_smallest():
    m = baselines.dp_sgd_noise(2.0, 1e-4, 0.25, 5)
    assert baselines.poisson_gaussian_delta(m, 0.25, 5, 2.0) <= 1e-4
    assert baselines.poisson_gaussian_delta(0.99 * m, 0.25, 5, 2.0) > 1e-4
    assert m > 1.6 * baselines.dp_sgd_noise(2.0, 1e-4, 0.25, 5, "zero-out")


def test_accountant_refusals():
    for change in ({"noise_multiplier": 0.0}, {"sample_rate": 1.5}, {"steps": 0}, {"adjacency": "add"}):
        with pytest.raises(PrivacyError):
            baselines.poisson_gaussian_delta(
                **{"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 1, "epsilon": 1.0, **change}
            )


def test_opacus_noise_is_as_accounted():
    """Zero gradients: the parameters move by noise alone, multiplier * clip / batch a step."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("opacus")
    module = torch.nn.Linear(2000, 1, bias=False)
    before = module.weight.detach().clone()
    x, y = torch.zeros(8, 2000), torch.zeros(8, 1)
    _, g = baselines.dp_sgd(
        module, torch.nn.functional.mse_loss, x, y, 4.0, 1e-3, steps=2, batch=4, clip=0.7, learning_rate=1.0
    )
    moved = (module.weight.detach() - before).numpy().ravel()
    expected = g.scale / 4 * math.sqrt(2)
    assert np.std(moved) == pytest.approx(expected, rel=0.08)
    assert g.sensitivity == 1.4 and g.adjacency == "replace-one"


def test_opacus_trains_and_tunes_on_public_data():
    torch = pytest.importorskip("torch")
    pytest.importorskip("opacus")
    torch.manual_seed(0)
    x = torch.rand(400, 2) * 2 - 1
    y = x @ torch.tensor([[1.0], [-0.5]])
    loss = torch.nn.functional.mse_loss
    options = {"steps": 6, "batch": 100, "clip": 1.0}
    candidates = [{"learning_rate": 1e-3, **options}, {"learning_rate": 0.5, **options}]
    best, value = baselines.tune_dp_sgd(
        lambda: torch.nn.Linear(2, 1), loss, (x[:200], y[:200]), (x[200:], y[200:]), candidates, 50.0, 1e-3
    )
    assert best["learning_rate"] == 0.5 and value < 0.4


def test_missing_opacus_is_a_clear_error(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(PrivacyError, match="certdp\\[opacus\\]"):
        baselines.dp_sgd(None, None, None, None, 1.0, 1e-5, steps=1, batch=1, clip=1.0, learning_rate=1.0)


def test_quadrature_helper_agrees_with_scipy():
    p, q = mixture(1.0, 0.3, 1.0), mixture(1.0, 0.0, 0.0)
    value, _ = integrate.quad(lambda x: max(p(x) - math.exp(0.5) * q(x), 0.0), -12, 12, limit=400)
    assert true_delta(p, q, 0.5, 1.0, 1) == pytest.approx(value, rel=1e-4)
