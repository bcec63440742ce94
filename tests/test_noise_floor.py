"""The least noise of a request: a public fact, attained by the kindest records and never undercut."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from privacy.agtr import envelope_terms, least_noise, release_predictions

LOW, HIGH = np.array([-1.0, 0.0]), np.array([1.0, 5.0])
CASES = [(1.0, 0.0, None, True), (1.0, 0.0, None, False), (3.0, 1e-6, None, None), (2.0, 1e-5, "gaussian", True)]


def public(radii, auto=None):
    return SimpleNamespace(radii=radii, slots=50, adjacency="replace-one", auto=auto)


@pytest.mark.parametrize(("epsilon", "delta", "family", "joint"), CASES)
@pytest.mark.parametrize("last", [1, 6])
def test_least_noise_is_attained_where_no_record_matters_and_never_undercut(epsilon, delta, family, joint, last):
    rng = np.random.default_rng(last)
    nominal = LOW + (HIGH - LOW) * rng.random((3, 2))
    ceiling = (HIGH - LOW) * rng.uniform(0.1, 1.0, size=(3, 2))
    radii, options = tuple(range(last + 1)), {"family": family, "joint": joint}
    found = least_noise(public(radii), ceiling, epsilon, delta, output_range=(LOW, HIGH), **options)
    terms, _ = envelope_terms(
        SimpleNamespace(metadata=public(radii), radii=radii), epsilon, delta, (3, 2), False, family, None, joint
    )
    typical = terms.mechanism.family.typical(terms.mechanism.dim)

    def noise(half):
        k = np.arange(last + 1)[:, None, None]
        _, private = release_predictions(
            nominal, nominal - half * k, nominal + half * k, ceiling, (LOW, HIGH), epsilon, delta, **options
        )
        return typical * private.scale / (HIGH - LOW)

    np.testing.assert_allclose(found, noise(0.0), rtol=1e-9)
    for half in (1e-6, 1e-2, 1.0):
        assert (noise(half) >= found * (1 - 1e-9)).all()


def test_radii_that_were_chosen_on_the_records_do_not_show():
    """Only the number of slots matters, since the largest radius of such an envelope may depend on the records."""
    auto = {"beta": [0.5]}
    request = {"ceiling": np.full((3, 2), 1.0), "epsilon": 12.0, "output_range": (LOW, HIGH)}
    one, other = (least_noise(public(radii, auto), **request) for radii in ((0, 1, 2), (0, 1, 40, 50)))
    np.testing.assert_array_equal(one, other)
    assert (one < least_noise(public((0, 1, 2)), betas=(0.5,), joint=False, **request)).all()
