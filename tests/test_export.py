"""Exports: what other libraries are told is never less than what was proven."""

import builtins
import math

import numpy as np
import pytest

from certify.errors import PrivacyError
from privacy.composition import Cost, numerical
from privacy.export import to_dp_accounting_pld, to_opendp_measurement, to_zcdp
from privacy.noise import admissible_pairs
from privacy.noise.bun_steinke import LaplaceLogNormal
from privacy.profiles import cauchy_curve, laplace_curve, loss_distribution


def test_zcdp_of_a_pure_cost_is_at_least_that_of_randomised_response():
    for epsilon in (0.01, 1.0, 5.0):
        rho = to_zcdp(Cost(epsilon)).rho
        assert rho >= epsilon**2 / 2 and rho <= epsilon**2 / 2 * (1 + 1e-15)
        high = 1 / (1 + math.exp(-epsilon))
        p, q = np.array([high, 1 - high]), np.array([1 - high, high])
        for alpha in (1.001, 1.5, 2, 5, 30):
            divergence = math.log((p**alpha * q ** (1 - alpha)).sum()) / (alpha - 1)
            assert divergence <= rho * alpha * (1 + 1e-9)
    assert to_zcdp(Cost(1.0, adjacency="zero-out")).adjacency == "zero-out"
    with pytest.raises(PrivacyError, match="delta"):
        to_zcdp(Cost(1.0, 1e-9))


def test_zcdp_of_a_concentrated_family():
    family = LaplaceLogNormal(0.8)
    (pair,) = admissible_pairs(family, 1.0, 1e-5, betas=[0.01])
    found = to_zcdp(family, pair, adjacency="zero-out")
    assert found.rho == family.rho(pair.a, pair.beta, 1) and found.adjacency == "zero-out"


def test_pld_dominates():
    pytest.importorskip("dp_accounting", reason="needs the optional extra 'accounting'")
    (pair,) = admissible_pairs("laplace", 0.5, 1e-7, betas=[0.02])
    for curve in (cauchy_curve(1.0), laplace_curve(pair)):
        ours = loss_distribution(curve, 2e-3)
        theirs = to_dp_accounting_pld(ours)
        for x in np.linspace(0, 1.2, 40):
            assert theirs.get_delta_for_epsilon(x) >= float(curve(np.array([x]))[0]) * (1 - 1e-9) - 1e-15
        # Ten compositions there and here.
        for e in (1.0, 2.0):
            delta = float(ours.repeated(10).delta(e)[0])
            assert abs(theirs.self_compose(10).get_delta_for_epsilon(e) - delta) <= 1e-6 * delta + 1e-10
    both = numerical([loss_distribution(laplace_curve(pair), 1e-3), Cost(0.5, 1e-7)], 1e-5, step=1e-3)
    assert both.parts == 2 and 0.5 < both.epsilon <= 1.0
    rr = to_dp_accounting_pld(Cost(1.0))
    assert abs(rr.get_delta_for_epsilon(0.0) - math.tanh(0.5)) < 1e-3
    assert rr.self_compose(3).get_delta_for_epsilon(2.9) > 0.01


def test_opendp_measurement_states_the_guarantee():
    dp = pytest.importorskip("opendp.prelude", reason="needs the optional extra 'opendp'")
    dp.enable_features("contrib", "honest-but-curious")
    pure = to_opendp_measurement(lambda records: sum(records), Cost(0.1))
    assert pure([1, 2, 3]) == 6
    assert pure.map(1) >= 0.1 and pure.map(1) <= 0.1 * (1 + 1e-15) and pure.map(0) == 0.0
    with pytest.raises(Exception, match="neighbours"):
        pure.map(2)
    approximate = to_opendp_measurement(lambda records: 0.0, Cost(1.0, 1e-6, "zero-out"))
    assert approximate.map(1) == (1.0, 1e-6)
    assert "zero-out" in str(approximate.input_metric) + str(approximate.input_domain)
    # OpenDP composes measurements of one adjacency and refuses to mix two.
    mix = dp.c.make_adaptive_composition(
        pure.input_domain, pure.input_metric, dp.max_divergence(), d_in=1, d_mids=[0.2, 0.2]
    )
    assert mix.map(1) >= 0.4
    queryable = mix([1, 2, 3])
    assert queryable(pure) == 6
    with pytest.raises(Exception, match="[Mm]etric|[Dd]omain"):
        queryable(to_opendp_measurement(lambda records: 0.0, Cost(0.1, adjacency="zero-out")))


@pytest.mark.parametrize("package", ["opendp", "dp_accounting"])
def test_a_missing_library_is_named(package, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PrivacyError, match="pip install"):
        to_opendp_measurement(None, Cost(1.0)) if package == "opendp" else to_dp_accounting_pld(Cost(1.0))
