"""`certdp noise`, the comparison behind it, and the package's import of families by name."""

import json
import math

import pytest
import typer
from scipy import stats
from typer.testing import CliRunner

from certify.cli.noise import command
from certify.errors import PrivacyError
from privacy.noise import FAMILIES, admissible_pairs, make_family
from privacy.noise.compare import compare, growth, paper, recommend, reference_beta

app = typer.Typer()
app.command()(command)
runner = CliRunner(env={"COLUMNS": "160"})


def run(*arguments):
    return runner.invoke(app, [str(a) for a in arguments])


def test_command_prints_families_beside_the_papers_constants():
    done = run("--epsilon", 1, "--dim", 18)
    assert done.exit_code == 0, done.output
    for word in ("cauchy", "l1-power", "box-power", "paper Cauchy 6S/ε", "recommended", "per unit of S"):
        assert word in done.output
    assert "laplace" not in done.output and "student" not in done.output
    done = run("--epsilon", 1, "--dim", 18, "--delta", 1e-5)
    for word in ("laplace", "gaussian", "paper Laplace 2S/ε"):
        assert word in done.output


def test_json_lists_the_same_and_every_pair():
    facts = json.loads(run("--epsilon", 1, "--dim", 9, "--delta", 1e-5, "--moves", 3, "--pairs", "--json").output)
    names = [row["name"] for row in facts["rows"]]
    assert facts["recommended"] in names and {"cauchy", "l1-power", "laplace", "gaussian"} <= set(names)
    for name in ("cauchy", "laplace"):
        pairs = admissible_pairs(name, 1.0, 0.0 if name == "cauchy" else 1e-5, 9)
        assert [(p["a"], p["beta"]) for p in facts["pairs"][name]] == [(p.a, p.beta) for p in pairs]


@pytest.mark.parametrize(
    "arguments", [("--epsilon", 0), ("--epsilon", 1, "--dim", 0), ("--epsilon", 1, "--dim", 3, "--moves", 4)]
)
def test_bad_arguments_are_one_sentence(arguments):
    done = run(*arguments)
    assert isinstance(done.exception, PrivacyError)


@pytest.mark.parametrize(("delta", "dim"), [(0.0, 1), (0.0, 2), (0.0, 300), (1e-5, 1), (1e-5, 18)])
def test_every_row_is_an_admissible_pair(delta, dim):
    epsilon = 2.0
    for row in compare(epsilon, delta, dim):
        if row.name not in FAMILIES:
            continue
        family = make_family(row.name, epsilon, delta, dim)
        budget = epsilon, 0.0 if row.privacy == "pure" else delta
        assert 0 < row.a <= family.largest_a(*budget, row.beta, dim) and row.beta > 0
        assert abs(row.typical * row.a / family.typical(dim) - 1) < 1e-12


def test_the_papers_rows_are_its_constants():
    six, two, laplace = paper(2.0, 1e-5, 9)
    assert (1 / six.a, six.beta, 1 / two.a, two.beta) == (3.0, 2 / 54, 1.0, 2 / 18)
    assert abs(laplace.beta - 2.0 / (2 * 9 * (1 + 2 * math.log(18 / 1e-5)))) < 1e-15
    assert abs(two.tail - stats.cauchy.ppf(0.975)) < 1e-9 and abs(laplace.tail - stats.expon.ppf(0.95)) < 1e-9


def test_recommendation_sees_public_facts_only():
    # The same budget, dimension and moves give the same family; it is the least merit, and never the paper's.
    for arguments in ((1.0, 0.0, 1), (1.0, 0.0, 18), (1.0, 1e-5, 9), (10.0, 0.0, 2)):
        rows = compare(*arguments)
        best = recommend(rows)
        assert best == recommend(compare(*arguments)) and best.name in FAMILIES
        assert all(best.merit <= row.merit for row in rows)
        if not arguments[1]:
            assert best.privacy == "pure"
    # Which families win where (docs/noise.md): a change of one value favours l1, of all values the box.
    assert recommend(compare(1.0, 0.0, 45)).name == "box-power"
    assert recommend(compare(1.0, 0.0, 45, moves=1)).name == "l1-power"
    assert recommend(compare(1.0, 1e-5, 300)).name == "gaussian"


def test_reference_beta_is_admissible_for_the_power_laws():
    for epsilon in (0.1, 1.0, 10.0):
        for dim in (1, 9, 300):
            family, beta = make_family("l1-power", epsilon, 0.0, dim), reference_beta(epsilon, dim)
            assert family.largest_a(epsilon, 0.0, beta, dim) > 0


def test_growth_is_the_maximum_over_all_radii():
    for beta in (1e-3, 0.02, 0.3, 0.7, 2.0):
        assert growth(beta) == max((2 * k + 1) * math.exp(-beta * k) for k in range(3000))
    assert growth(0.0) == math.inf


def test_unknown_families_are_refused():
    with pytest.raises(PrivacyError, match="family"):
        make_family("exponential", 1.0)
