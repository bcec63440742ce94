"""Theorems IV.3 and IV.4 and the sharper conditions: the figures of the paper, and quantiles by other means."""

import json
import math

import pytest
import typer
from scipy import optimize, stats
from test_privacy_oracle import laplace_delta, loss_over_region
from typer.testing import CliRunner

from certify.cli.feasible import command
from certify.errors import PrivacyError
from privacy import feasibility


def numeric_quantile(law, confidence):
    """Quantile of |Z| from scipy's distribution function by bisection, not by a closed form."""
    return optimize.brentq(lambda t: law.cdf(t) - law.cdf(-t) - confidence, 0.0, 1e7, xtol=1e-13)


@pytest.mark.parametrize("confidence", [0.01, 0.377, 0.5, 0.9, 0.99])
def test_quantiles(confidence):
    for name, law in (("cauchy", stats.cauchy), ("laplace", stats.laplace), ("gaussian", stats.norm)):
        exact = numeric_quantile(law, confidence)
        assert feasibility.noise_quantile(name, confidence) == pytest.approx(exact, rel=1e-8)


def test_figure_1a():
    at, most = feasibility.peak()
    assert (round(at, 3), round(most, 4)) == (0.377, 0.1172)
    assert feasibility.theorem_iv3(1e-9) == pytest.approx(1 / (3 * math.pi), rel=1e-6)
    # Three times larger with the noise of Table I, six times with the exact one as epsilon goes to 0.
    assert feasibility.peak(lambda c: feasibility.theorem_iv3(c, 2.0))[1] == pytest.approx(0.3517, abs=1e-4)
    assert feasibility.peak(lambda c: feasibility.sharper_pure(1e-4, c).ratio)[1] == pytest.approx(0.7034, abs=1e-4)


def test_figure_1b():
    found = [feasibility.theorem_iv4(c, 1e-5, k) for c, k in ((0.8, 1), (0.98, 1), (0.8, 2), (0.8, 3))]
    assert [round(v, 2) for v in found] == [1.93, 1.44, 0.96, 0.64]
    assert round(feasibility.theorem_iv4(0.98, 1e-3), 2) == 1.12
    assert feasibility.unity(1e-3) == pytest.approx(0.995, abs=1e-4)
    assert feasibility.unity(1e-5) == pytest.approx(0.99994, abs=1e-5)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 10.0])
@pytest.mark.parametrize("confidence", [0.2, 0.9])
def test_sharper_condition_has_the_exact_quantiles(epsilon, confidence):
    """At the ratio the two quantiles agree, and the smooth scale in it is private: not 1 % less."""
    one = feasibility.sharper_pure(epsilon, confidence)
    a = 2 * math.sinh(epsilon / 2)
    smooth = one.ratio / a * numeric_quantile(stats.cauchy, confidence)
    assert smooth == pytest.approx(numeric_quantile(stats.laplace, confidence) / epsilon, rel=1e-6)
    assert loss_over_region(a, one.beta, "cauchy", epsilon, 9) <= epsilon * (1 + 1e-6)
    assert loss_over_region(1.01 * a, one.beta, "cauchy", epsilon, 9) > epsilon
    assert one.ratio >= 5.999 * feasibility.theorem_iv3(confidence)


def test_sharper_approximate_condition():
    epsilon, delta, confidence = 1.0, 1e-5, 0.8
    one = feasibility.sharper_approximate(epsilon, delta, confidence)
    a = float(one.smooth.split("/")[1])
    assert one.against == "laplace"  # in one dimension it beats the Gaussian
    assert one.ratio == pytest.approx(a / epsilon, rel=1e-3) and one.ratio < 1
    other = feasibility.sharper_approximate(epsilon, delta, confidence, against="analytic gaussian")
    # sigma of the analytic Gaussian, from its own condition
    sigma = optimize.brentq(
        lambda s: stats.norm.cdf(0.5 / s - s) - math.e * stats.norm.cdf(-0.5 / s - s) - delta, 1.0, 10.0
    )
    quantiles = numeric_quantile(stats.norm, confidence), numeric_quantile(stats.laplace, confidence)
    assert other.ratio == pytest.approx(a * sigma * quantiles[0] / quantiles[1], rel=1e-3)
    worst = max(laplace_delta(epsilon, a * x, math.exp(one.beta), 0.0, 1.0) for x in (0.0, 0.5, 1.0))
    assert worst == pytest.approx(delta, rel=0.01)


def test_conditions_list_and_refusals():
    names = [one.name for one in feasibility.conditions(1.0, 1e-5, 0.9, [0.1])]
    assert names == ["Theorem IV.3", "Table I noise", "ours", "ours", "Theorem IV.4", "ours", "ours", "ours"]
    assert len(feasibility.conditions(1.0, 0.0, 0.9)) == 3
    for call in (
        lambda: feasibility.conditions(0.0, 0.0, 0.9),
        lambda: feasibility.conditions(1.0, 2.0, 0.9),
        lambda: feasibility.conditions(1.0, 0.0, 1.0),
        lambda: feasibility.sharper_pure(1.0, 0.9, beta=2.0),
        lambda: feasibility.sharper_approximate(1.0, 0.0, 0.9),
        lambda: feasibility.noise_quantile("uniform", 0.5),
        lambda: feasibility.global_noise(1.0, 0.0, 0.5, "analytic gaussian"),
    ):
        with pytest.raises(PrivacyError):
            call()


def test_command(tmp_path):
    app = typer.Typer()
    app.command()(command)
    picture = tmp_path / "figure.png"
    words = ["--epsilon", "1", "--delta", "1e-5", "--confidence", "0.377", "--plot", str(picture)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "0.1172" in done.output and picture.stat().st_size > 20_000
    done = CliRunner().invoke(app, ["--epsilon", "1", "--json"])
    assert json.loads(done.output)["conditions"][0]["name"] == "Theorem IV.3"
