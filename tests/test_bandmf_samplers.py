"""Samplers: exact laws by enumerating bit tapes and draws, statistics of every formal guarantee, resuming, torch.

A statistical test fails with probability below 1e-6 when the sampler is right (exact or normal tails, union bound over
what it looks at); each has a negative control that fails it by at least 6 standard deviations more.  They draw from
the production coins.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from certify.errors import CheckpointError, PrivacyError
from privacy.bandmf import sampler_coins as coins_module
from privacy.bandmf.sampler_coins import SecretCoins, SeededCoins, choose, gaps, subset, uniform
from privacy.bandmf.samplers import PADDING, _separated, _stationary_start, _unowned, identity, is_example, sampler
from privacy.bandmf.schemes import BallsInBins, BMinSep, CyclicPoisson, MultiAttribution, Poisson
from privacy.bandmf.users import UserGraph, bound_contributions, expected_batch, joining_probability

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = json.loads((Path(__file__).parent / "data" / "bandmf_samplers.json").read_text())
ERROR_RATE = 1e-6


# --- tools ------------------------------------------------------------------------------------------------------------


class Exhausted(Exception):
    """The tape ended; `args[0]` more bits are needed."""


class Tape:
    """Words of a fixed string of bits, handed out in the order in which addresses are first asked for."""

    def __init__(self, bits, width):
        self.tape, self.width, self.used, self.seen = bits, width, 0, {}

    def words(self, count, *address):
        if address not in self.seen:
            end = self.used + count * self.width
            if end > len(self.tape):
                raise Exhausted(end - len(self.tape))
            chunk = self.tape[self.used : end]
            self.used = end
            words = [int("".join(map(str, chunk[i : i + self.width])), 2) for i in range(0, len(chunk), self.width)]
            self.seen[address] = np.array(words, dtype=np.uint64)
        assert len(self.seen[address]) == count
        return self.seen[address]


def law_by_tapes(run, width, depth):
    """`({result: exact probability}, undecided)` over all bit tapes of at most `depth` bits; Fractions."""
    law, undecided, stack = {}, Fraction(0), [()]
    while stack:
        bits = stack.pop()
        tape = Tape(bits, width)
        try:
            result = run(tape)
        except Exhausted as error:
            if len(bits) + error.args[0] <= depth:
                stack += [bits + more for more in itertools.product((0, 1), repeat=error.args[0])]
            else:
                undecided += Fraction(1, 2 ** len(bits))
            continue
        assert tape.used == len(bits)
        law[result] = law.get(result, 0) + Fraction(1, 2 ** len(bits))
    return law, undecided


def brackets(law, undecided, exact):
    """Whether the exact probabilities lie between the decided mass and that plus all undecided mass."""
    assert undecided < Fraction(1, 4) and sum(exact.values()) == 1
    return set(law) <= set(exact) and all(law.get(x, 0) <= p <= law.get(x, 0) + undecided for x, p in exact.items())


def bernoulli_law(size, p):
    """Exact law of a Poisson sample of range(size), as ascending tuples."""
    return {
        tuple(i for i, one in enumerate(bits) if one): math.prod(p if one else 1 - p for one in bits)
        for bits in itertools.product((0, 1), repeat=size)
    }


def deviation(count, trials, p):
    """Standard deviations between a binomial count and its mean."""
    return (np.asarray(count) - trials * p) / np.sqrt(trials * p * (1 - p))


def threshold(looks=1):
    """Standard deviations that `looks` binomial counts exceed with probability below ERROR_RATE in all.

    Normal tails with a tenth of the error rate: all counts here have a variance of at least 100.
    """
    return stats.norm.isf(0.05 * ERROR_RATE / looks)


def chi_square(observed, expected):
    """p-value against these proportions; every expected count must be large."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    expected = expected * observed.sum() / expected.sum()
    assert expected.min() >= 25
    return stats.chisquare(observed, expected).pvalue


def indicators(batches, examples):
    """Batches as a 0/1 matrix (steps, examples)."""
    used = np.zeros((len(batches), examples), dtype=np.int8)
    for row, batch in zip(used, batches, strict=True):
        row[batch[is_example(batch)]] = 1
    return used


def draw(scheme, coins=None, **more):
    return list(sampler(scheme, coins or SecretCoins(), **more))


def with_probability(steps, examples, separation, p, **more) -> BMinSep:
    return BMinSep(steps, examples, examples * p / (1 + (separation - 1) * p), separation, **more)


# --- coins: exact laws ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("p", [Fraction(1, 2), Fraction(1, 3), Fraction(6, 7), Fraction(0.3)], ids=str)
def test_gaps_are_geometric_exactly(p, width):
    law, undecided = law_by_tapes(lambda tape: int(gaps(tape, p, 1, 3, 7)[0]), width, 15)
    exact = {g: (1 - p) ** g * p for g in range(3)} | {3: (1 - p) ** 3}
    assert undecided < Fraction(1, 1000)
    assert brackets(law, undecided, exact)
    # Counting trials instead of failures, or the wrong tail, is another law.
    assert not brackets(law, undecided, {g + 1: m for g, m in exact.items()})
    assert not brackets(law, undecided, {3 - g: m for g, m in exact.items()})


@pytest.mark.parametrize(
    "size, p, width", [(1, Fraction(1, 3), 2), (2, Fraction(1, 2), 1), (2, Fraction(1, 8), 2), (3, Fraction(1, 16), 3)]
)
def test_subsets_are_bernoulli_exactly(size, p, width):
    law, undecided = law_by_tapes(lambda tape: tuple(subset(tape, p, size, 5).tolist()), width, 13)
    assert brackets(law, undecided, bernoulli_law(size, p))
    assert not brackets(law, undecided, bernoulli_law(size, p * Fraction(3, 2)))


class Fixed(SeededCoins):
    """The same word everywhere."""

    def words(self, count, *address):
        return np.full(count, self.seed, dtype=np.uint64)


def test_subsets_go_on_after_their_first_words():
    # A word of ones is a gap of 0: all are present, though words for a few are drawn at a time.
    np.testing.assert_array_equal(subset(Fixed(2**64 - 1), 0.01, 500, 1), np.arange(500))
    # U = 0.99^3.5 is a gap of 3.
    word = int(2**64 * 0.99**3.5)
    np.testing.assert_array_equal(subset(Fixed(word), 0.01, 500, 1), np.arange(3, 500, 4))


def test_uniform_integers_are_exact():
    law, undecided = law_by_tapes(lambda tape: tuple(uniform(tape, 3, 2, 1).tolist()), 2, 14)
    assert undecided < Fraction(1, 30) and len(set(law.values())) == 1 and len(law) == 9
    assert brackets(law, undecided, {pair: Fraction(1, 9) for pair in itertools.product(range(3), repeat=2)})


@pytest.mark.parametrize("size", [1, 2])
def test_chosen_subsets_are_uniform_exactly(size):
    items = np.array([4, 7, 9])
    law, undecided = law_by_tapes(lambda tape: tuple(choose(tape, items, size, 1).tolist()), 2, 12)
    assert undecided < Fraction(1, 2) and set(law) == set(itertools.combinations((4, 7, 9), size))
    assert len(set(law.values())) == 1


@given(st.floats(1e-12, 1.0, exclude_max=True), st.integers(0, 2**64 - 1), st.integers(1, 10**7))
@settings(max_examples=200, deadline=None)
def test_guesses_agree_with_integer_arithmetic(p, word, limit):
    class Word(SeededCoins):
        def words(self, count, *address):
            return np.array([word], dtype=np.uint64) if address == (1,) else super().words(count, *address)

    found = int(gaps(Word(0), Fraction(p), 1, limit, 1)[0])
    exact = coins_module._exact_gap(word, Word(0), 1 - Fraction(p), 0, limit, 1, 0)
    assert found == exact


@pytest.mark.parametrize("p", [1e-10, 1.2548654e-4, 0.013, 0.4, 0.5, 0.51, 0.97])
def test_guesses_hold_next_to_the_boundaries(p):
    # The words around (1 - p)^g are those where a logarithm of float64 cannot know.
    import mpmath

    mpmath.mp.prec = 300
    failure = 1 - mpmath.mpf(p)
    for g in [1, 2, 3, 7, 100, 5000, 70000]:
        edge = int(mpmath.floor(failure**g * 2**64))
        if edge < 2:
            continue
        near = np.array([edge - 2, edge - 1, edge + 1, edge + 2], dtype=np.uint64)

        class Words(SeededCoins):
            def words(self, count, *address, near=near):
                return near if address == (1,) else super().words(count, *address)

        found = gaps(Words(0), Fraction(p), 4, 10**6, 1)
        for word, one in zip(near.tolist(), found.tolist(), strict=True):
            possible = [mpmath.floor(mpmath.log(mpmath.mpf(w) / 2**64) / mpmath.log(failure)) for w in (word + 1, word)]
            assert min(possible[0], 10**6) <= one <= min(possible[1], 10**6)


def test_coins_of_different_addresses_differ():
    coins = SecretCoins()
    addresses = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (256,), (0, 0, 0), (2**40,)]
    seen = {coins.words(4, *address).tobytes() for address in addresses}
    assert len(seen) == len(addresses)
    for address in addresses:
        np.testing.assert_array_equal(coins.words(4, *address), coins.words(4, *address))
    seeded = {SeededCoins(3).words(4, *address).tobytes() for address in addresses}
    assert len(seeded) == len(addresses)


@pytest.mark.parametrize("make", [SecretCoins, lambda: SeededCoins(1)], ids=["secret", "seeded"])
def test_words_are_uniform(make):
    coins = make()
    words = np.concatenate([coins.words(1000, 0, step) for step in range(100)])
    octets = np.bincount(words.view(np.uint8), minlength=256)
    assert chi_square(octets, np.ones(256)) > ERROR_RATE
    assert chi_square(np.bincount((words[1:] ^ words[:-1]).view(np.uint8), minlength=256), np.ones(256)) > ERROR_RATE
    assert chi_square(np.bincount((words & np.uint64(2**64 - 2)).view(np.uint8), minlength=256), np.ones(256)) < 1e-30


def test_production_cannot_be_seeded():
    with pytest.raises(TypeError):
        SecretCoins(1)
    assert not np.array_equal(SecretCoins().words(4, 0), SecretCoins().words(4, 0))
    np.testing.assert_array_equal(SeededCoins(5).words(4, 0), SeededCoins(5).words(4, 0))


def test_keys_do_not_leak_by_accident(tmp_path):
    coins = SecretCoins.create(tmp_path / "key", "run")
    key = json.loads((tmp_path / "key").read_text())["key"]
    assert key not in repr(coins) and key not in str(coins)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(coins)
    assert os.stat(tmp_path / "key").st_mode & 0o077 == 0


def test_key_files_belong_to_one_run(tmp_path):
    path = tmp_path / "key"
    scheme = BMinSep(9, 100, 5.0, 3)
    with pytest.raises(CheckpointError, match="no key"):
        SecretCoins.load(path, identity(scheme))
    coins = SecretCoins.create(path, identity(scheme))
    np.testing.assert_array_equal(
        SecretCoins.load(path, identity(scheme)).words(9, 1, 2),
        coins.words(9, 1, 2),
    )
    with pytest.raises(CheckpointError, match="key already"):
        SecretCoins.create(path, identity(scheme))
    with pytest.raises(CheckpointError, match="another run"):
        SecretCoins.load(path, identity(BMinSep(9, 100, 5.0, 4)))
    whole = path.read_text()
    kept = json.loads(whole)
    broken = [whole[:40], "", "[]", json.dumps(kept | {"key": "00" * 32}), json.dumps(kept | {"identity": "x"})]
    for text in broken:
        path.write_text(text)
        with pytest.raises(CheckpointError, match="damaged"):
            SecretCoins.load(path, identity(scheme))


def test_identity_names_the_owners():
    scheme = MultiAttribution(5, 0.1, 2, 3)
    graphs = [UserGraph.from_owners(o) for o in ([[0], [1], [1, 2]], [[0], [1], [2, 0]], [[0], [1, 0], [2]])]
    assert len({identity(scheme, graph) for graph in graphs} | {identity(scheme)}) == 4


# --- exact laws of the chains -----------------------------------------------------------------------------------------


def path_law(steps, separation, p, first):
    """Exact law of the steps that use one example, free from step `first` on, by the definition of b-min-sep."""
    law = {}
    for uses in itertools.product((0, 1), repeat=steps):
        weight = Fraction(1)
        for i, used in enumerate(uses):
            if i >= first and not any(uses[max(0, i - separation + 1) : i]):
                weight *= p if used else 1 - p
            elif used:
                weight = Fraction(0)
        if weight:
            law[uses] = weight
    return law


@pytest.mark.parametrize("separation", [1, 2, 3])
@pytest.mark.parametrize("first", [(0, 0), (1, 0), (2, 1)])
def test_b_min_sep_has_the_exact_law_of_independent_chains(separation, first):
    # All draws of two examples in four steps: the joint law is the product of the two chains.
    steps, p = 4, Fraction(1, 3)
    single = bernoulli_law(2, p)
    law = {}
    for draws in itertools.product(single, repeat=steps):
        free = np.array(first, dtype=np.int32)
        batches = list(_separated((np.array(d, dtype=np.int64) for d in draws), separation, free))
        uses = tuple(map(tuple, indicators(batches, 2).T.tolist()))
        law[uses] = law.get(uses, 0) + math.prod(single[d] for d in draws)
    chains = [path_law(steps, separation, p, start) for start in first]
    assert law == {(u, v): a * b for u, a in chains[0].items() for v, b in chains[1].items()}
    assert separation == 1 or law != {
        (u, v): a * b
        for u, a in path_law(steps, separation - 1, p, first[0]).items()
        for v, b in path_law(steps, separation - 1, p, first[1]).items()
    }


@pytest.mark.parametrize("steps", [2, 3])
def test_cold_b_min_sep_is_exact_for_every_tape(steps):
    scheme = BMinSep(steps, 1, 0.25, 3, warm=False)
    assert scheme.probability == 0.5
    law, undecided = law_by_tapes(lambda tape: tuple(len(b) for b in sampler(scheme, tape)), 1, 4 * steps)
    assert undecided == 0
    assert law == path_law(steps, 3, Fraction(1, 2), 0)


def test_warm_b_min_sep_is_exact_for_every_tape():
    scheme = BMinSep(2, 1, 0.25, 3)
    law, undecided = law_by_tapes(lambda tape: tuple(len(b) for b in sampler(scheme, tape)), 1, 13)
    assert undecided == 0
    starts = {0: Fraction(1, 2), 1: Fraction(1, 4), 2: Fraction(1, 4)}
    exact = {}
    for first, mass in starts.items():
        for uses, weight in path_law(2, 3, Fraction(1, 2), first).items():
            exact[uses] = exact.get(uses, 0) + mass * weight
    assert law == exact
    assert law[1, 0] == law[0, 1] == Fraction(1, 4)  # batch / examples from the first step on


def owned_law(steps, p, graph, separation, used_sets, past=0):
    """Exact law of the batches of a tiny graph over all sequences of sampled sets; `used_sets` makes the batches."""
    single = bernoulli_law(graph.examples, p)
    law = {}
    for draws in itertools.product(single, repeat=steps + past):
        batches = used_sets(draws, graph, separation)[past:]
        law[batches] = law.get(batches, 0) + math.prod(single[d] for d in draws)
    return law


def algorithm_3(draws, graph, separation):
    """By the definition, example by example: barred by what was sampled."""
    return by_definition(draws, graph, separation, lambda drawn, used: drawn)


def algorithm_4(draws, graph, separation):
    """The variant that is not offered: barred by what was used."""
    return by_definition(draws, graph, separation, lambda drawn, used: used)


def by_definition(draws, graph, separation, bars):
    owners = [set(graph.owners[a:b]) for a, b in itertools.pairwise(graph.starts)]
    batches, barring = [], []
    for drawn in draws:
        recent = {e for past in barring[max(0, len(barring) - separation + 1) :] for e in past}
        batches.append(tuple(e for e in drawn if not any(owners[e] & owners[other] for other in recent)))
        barring.append(bars(drawn, batches[-1]))
    return tuple(batches)


def ours(draws, graph, separation):
    arrays = (np.array(sorted(d), dtype=np.int64) for d in draws)
    return tuple(tuple(b.tolist()) for b in _unowned(arrays, separation, graph))


@pytest.mark.parametrize("separation", [1, 2, 3])
def test_multi_attribution_reproduces_the_worked_example(separation):
    case = GOLDEN["attribution"]
    graph = UserGraph.from_owners(case["owners_per_example"])
    draws = case["sampled_sets_S"]
    expected = [case["batches"][f"b{separation}_alg{a}"] for a in (3, 4)]
    assert [list(b) for b in ours(draws, graph, separation)] == expected[0]
    assert [list(b) for b in algorithm_4(draws, graph, separation)] == expected[1]
    assert separation == 1 or expected[0] != expected[1]


owner_lists = st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=7)


@given(owner_lists, st.integers(1, 5), st.data())
@settings(max_examples=150, deadline=None)
def test_multi_attribution_excludes_by_sampled_sets(owners, separation, data):
    graph = UserGraph.from_owners(owners)
    one_set = st.sets(st.integers(0, graph.examples - 1)).map(sorted).map(tuple)
    draws = data.draw(st.lists(one_set, min_size=1, max_size=8))
    batches = ours(draws, graph, separation)
    assert batches == algorithm_3(draws, graph, separation)
    # What the user-level account rests on: a user's steps are `separation` apart.
    names = [set(graph.owners[a:b]) for a, b in itertools.pairwise(graph.starts)]
    for user in range(graph.users):
        steps = [i for i, batch in enumerate(batches) if any(user in names[e] for e in batch)]
        assert all(later - earlier >= separation for earlier, later in itertools.pairwise(steps))


def test_the_past_of_multi_attribution_makes_it_stationary():
    # Exactly, by all sequences: with separation - 1 sets before the first step every step has the same law of batches.
    graph, p, separation = UserGraph.from_owners([["a"], ["a", "b"], ["c"]]), Fraction(1, 3), 2
    law = owned_law(2, p, graph, separation, algorithm_3, past=1)
    marginals = [{}, {}]
    for batches, mass in law.items():
        for marginal, batch in zip(marginals, batches, strict=True):
            marginal[batch] = marginal.get(batch, 0) + mass
    assert marginals[0] == marginals[1]
    size = sum(mass * len(batch) for batch, mass in marginals[0].items())
    assert float(size) == pytest.approx(expected_batch(graph, separation, 1 / 3), rel=1e-14)
    # Two sets of neighbours, {0, 1} twice and {2}: the closed form by hand.
    assert size == 2 * p * (1 - p) ** 2 + p * (1 - p)
    cold = owned_law(1, p, graph, separation, algorithm_3)
    assert sum(m * len(b) for (b,), m in cold.items()) == 3 * p != size


def test_cold_law_dominates_what_multi_attribution_does():
    # Element by element, with the same sampled sets: a user never takes part more than in the chain that is accounted.
    graph, separation = UserGraph.from_owners([[0], [0, 1], [0, 1], [1]]), 3
    rng = np.random.default_rng(0)
    for _ in range(300):
        draws = [tuple(np.flatnonzero(rng.random(4) < 0.25)) for _ in range(10)]
        for user in range(2):
            mine = {e for e in range(4) if user in graph.owners[graph.starts[e] : graph.starts[e + 1]]}
            used = [len(mine & set(b)) for b in ours(draws, graph, separation)][separation - 1 :]
            accounted = []
            for drawn in draws[separation - 1 :]:
                recent = accounted[max(0, len(accounted) - separation + 1) :]
                accounted.append(0 if any(recent) else len(mine & set(drawn)))
            assert all(a <= b for a, b in zip(used, accounted, strict=True))


def hockey_sticks(shifts, weights, a):
    """`E_Q[(L - a)_+]` and `E_Q[(1 - a L)_+]` for a mixture of unit Gaussians in the plane, summed over a fine grid."""
    axis = np.arange(-9.0, 13.0, 0.05)
    y = np.stack(np.meshgrid(axis, axis), axis=-1)
    density = np.exp(-0.5 * (y**2).sum(-1)) / (2 * np.pi) * 0.05**2
    ratio = sum(w * np.exp(y @ m - 0.5 * m @ m) for m, w in zip(shifts, weights, strict=True))
    return (density * np.maximum(ratio - a, 0)).sum(), (density * np.maximum(1 - a * ratio, 0)).sum()


@pytest.mark.parametrize("a", [1.2, 3.0])
def test_hockey_sticks_grow_with_every_shift(a):
    # Why taking part less is covered by the account: shifts that are element-wise smaller have smaller hockey sticks.
    rng = np.random.default_rng(4)
    weights = np.array([0.5, 0.3, 0.2])
    for _ in range(4):
        shifts = rng.uniform(0, 2, (3, 2)) * rng.integers(0, 2, (3, 2))
        more = shifts.copy()
        more[rng.integers(3), rng.integers(2)] += 0.5
        low, high = hockey_sticks(shifts, weights, a), hockey_sticks(more, weights, a)
        assert low[0] < high[0] and low[1] <= high[1]
    # With negative shifts (a negative entry of C) it fails.
    low, high = (hockey_sticks(np.array([[0.0, -1.5 + d]]), [1.0], a) for d in (0.0, 0.5))
    assert low[0] > high[0]


# --- the user graph ---------------------------------------------------------------------------------------------------


@given(owner_lists, st.integers(1, 4))
@settings(deadline=None)
def test_contributions_are_bounded(owners, per_user):
    graph = UserGraph.from_owners(owners)
    kept = bound_contributions(graph, per_user)
    owned = {}
    for e in kept:
        for user in owners[e]:
            owned[user] = owned.get(user, 0) + 1
    assert max(owned.values()) <= per_user
    assert graph.take(kept).per_user == max(owned.values())
    # Nothing is given away: what is left out has an owner with all that is allowed.
    for e in set(range(len(owners))) - set(kept.tolist()):
        assert max(owned.get(user, 0) for user in owners[e]) == per_user


@given(owner_lists)
@settings(deadline=None)
def test_neighbours_are_examples_with_a_common_owner(owners):
    graph = UserGraph.from_owners(owners)
    assert graph.examples == len(owners)
    assert graph.neighbours.tolist() == [sum(bool(a & b) for b in owners) for a in owners]
    assert graph.per_user == max(sum(u in o for o in owners) for u in range(5))
    some = np.arange(graph.examples)[::-2]
    assert [len(set(x)) for x in np.split(graph.take(some).owners, graph.take(some).starts[1:-1])] == [
        len(owners[e]) for e in some
    ]


def test_joining_probability_meets_the_expected_batch():
    rng = np.random.default_rng(1)
    graph = UserGraph.from_owners([rng.choice(60, size=rng.integers(1, 4), replace=False) for _ in range(100)])
    graph = graph.take(bound_contributions(graph, 3))
    assert joining_probability(graph, 1, 20.0) == pytest.approx(20.0 / graph.examples, rel=1e-12)
    single = UserGraph.from_owners([[i] for i in range(50)])
    assert single.neighbours.tolist() == [1] * 50
    for separation, batch in [(2, 3.0), (5, 1.0), (5, 1.5)]:
        p = joining_probability(graph, separation, batch)
        assert expected_batch(graph, separation, p) == pytest.approx(batch, rel=1e-12)
        assert p > batch / graph.examples
        assert expected_batch(graph, separation, p * 0.999) < batch  # on the rising side, so the smallest
    # Two humps, of one user's 1000 examples and of ten others: the first of three solutions is taken.
    humps = UserGraph.from_owners([["many"]] * 1000 + [[str(i)] for i in range(10)])
    p = joining_probability(humps, 5, 0.09)
    assert p < 1 / 4001 and expected_batch(humps, 5, p) == pytest.approx(0.09, rel=1e-12)
    assert expected_batch(humps, 5, 2e-3) < 0.09 < expected_batch(humps, 5, 0.05)
    with pytest.raises(PrivacyError, match="^batch: found 30.*at most"):
        joining_probability(graph, 5, 30.0)
    with pytest.raises(PrivacyError, match="^batch: found 0"):
        joining_probability(graph, 5, 0.0)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: UserGraph.from_owners([[0], []]), "example 1 has none"),
        (lambda: UserGraph.from_owners([]), "no example"),
        (lambda: UserGraph(np.array([0, 2]), np.array([0])), "span"),
        (lambda: UserGraph(np.array([0, 1]), np.array([-1])), "user -1"),
        (lambda: bound_contributions(UserGraph.from_owners([[0]]), 0), "per_user: found 0"),
    ],
)
def test_malformed_graphs_are_refused(build, words):
    with pytest.raises(PrivacyError, match=words):
        build()


# --- statistics of the formal guarantees ------------------------------------------------------------------------------


def worst_rate(batches, scheme):
    """Largest deviation of a step's batch size from Binomial(examples, rate), in standard deviations."""
    return np.abs(deviation([is_example(b).sum() for b in batches], scheme.examples, scheme.rate)).max()


def test_poisson_rate():
    scheme = Poisson(400, 20000, 500.3)
    batches = draw(scheme)
    assert worst_rate(batches, scheme) < threshold(400)
    used = indicators(batches, scheme.examples)
    per_part = used.reshape(400, 100, 200).sum(axis=(0, 2))
    assert np.abs(deviation(per_part, 400 * 200, scheme.rate)).max() < threshold(100)
    # Rate per step and example: half a per cent per million draws would be seen at 10 million.
    total = used.sum()
    assert abs(deviation(total, used.size, scheme.rate)) < threshold()
    assert deviation(total, used.size, 1.03 * scheme.rate) < -threshold() - 6


def test_poisson_batches_are_not_shuffled_fixed_ones():
    # Independent examples: the batch size is binomial.  Shuffling and cutting gives a constant.
    scheme = Poisson(4000, 1000, 50.0)
    sizes = np.array([len(b) for b in draw(scheme)])
    spread = lambda sizes: np.var(sizes) / (scheme.examples * scheme.rate * (1 - scheme.rate))  # noqa: E731
    # The variance of 4000 binomial sizes has relative standard deviation sqrt(2 / 4000).
    assert abs(spread(sizes) - 1) < threshold() * math.sqrt(2 / 4000) * 1.01
    assert 1 - spread(np.full(4000, 50)) > (threshold() + 6) * math.sqrt(2 / 4000)
    edges = np.arange(38, 64)
    cells = np.diff(stats.binom.cdf(edges, 1000, 0.05), prepend=0, append=1) * 4000
    assert chi_square(np.bincount(np.searchsorted(edges, sizes), minlength=len(edges) + 1), cells) > ERROR_RATE


def test_cyclic_rate():
    scheme = CyclicPoisson(300, 10001, 600.0, 7)
    used = indicators(draw(scheme), scheme.examples)
    step, example = np.nonzero(used)
    assert (step % 7 == example % 7).all()
    trials = sum(len(range(i % 7, 10001, 7)) for i in range(300))
    assert abs(deviation(used.sum(), trials, scheme.probability)) < threshold()
    assert abs(deviation(used.sum(), trials, 7 * scheme.probability / 6)) > threshold() + 6
    assert abs(used.sum() / 300 - 600.0) < 10
    # Joint uses of neighbours in a group are as rare as independence says.
    pairs = (used[:, :-7:14] * used[:, 7::14])[np.arange(300)[:, None] % 7 == np.arange(0, 10001 - 7, 14) % 7]
    assert abs(deviation(pairs.sum(), pairs.size, scheme.probability**2)) < threshold()


def test_balls_in_bins():
    scheme = BallsInBins(23, 60000, 10)
    used = indicators(draw(scheme), scheme.examples)
    assert (used[10:20] == used[:10]).all() and (used[20:] == used[:3]).all()
    bins = used[:10].argmax(axis=0)
    assert (used[:10].sum(axis=0) == 1).all()
    assert chi_square(np.bincount(bins, minlength=10), np.ones(10)) > ERROR_RATE
    joint = np.bincount(10 * bins[::2] + bins[1::2], minlength=100)
    assert chi_square(joint, np.ones(100)) > ERROR_RATE
    equal = np.random.default_rng(0).permutation(np.arange(60000) % 10)  # an equal split is too even
    assert stats.chi2.cdf((np.bincount(bins) - 6000.0).var() * 10 / 6000, 9) > ERROR_RATE
    assert stats.chi2.cdf((np.bincount(equal) - 6000.0).var() * 10 / 6000, 9) < 1e-30


@pytest.mark.parametrize("truncate", [None, 300])
@pytest.mark.parametrize("warm", [False, True])
def test_separation(warm, truncate):
    scheme = BMinSep(120, 4000, 280.0, 9, warm=warm, truncate=truncate)
    assert closest(draw(scheme), 4000) >= 9
    assert closest(draw(BMinSep(120, 4000, 280.0, 8, warm=warm)), 4000) == 8  # tight: the test sees one less


def closest(batches, examples):
    """The smallest distance between two uses of the same example."""
    last, least = np.full(examples, -(10**6)), 10**6
    for step, batch in enumerate(batches):
        batch = batch[is_example(batch)]
        least = min(least, int((step - last[batch]).min(initial=least)))
        last[batch] = step
    return least


def test_expected_batch_is_constant_from_the_first_step_when_warm():
    scheme = BMinSep(60, 200_000, 9000.0, 12)
    assert worst_rate(draw(scheme), scheme) < threshold(60)
    # Not so: a cold start, a start in the uniform law, and p = batch / examples.
    cold = BMinSep(60, 200_000, 9000.0, 12, warm=False)
    assert worst_rate(draw(cold)[:1], scheme) > threshold(60) + 6
    wrong_p = with_probability(60, 200_000, 12, scheme.rate)
    assert worst_rate(draw(wrong_p), scheme) > threshold(60) + 6
    free = np.random.default_rng(0).integers(0, 12, 200_000).astype(np.int32)
    rng = np.random.default_rng(1)
    draws = (np.flatnonzero(rng.random(200_000) < scheme.probability) for _ in range(60))
    assert worst_rate(list(_separated(draws, 12, free)), scheme) > threshold(60) + 6


def test_cold_batches_follow_their_law():
    scheme = BMinSep(40, 200_000, 9000.0, 12, warm=False)
    sizes = [len(b) for b in draw(scheme)]
    assert np.abs(deviation(sizes, 200_000, scheme.inclusion)).max() < threshold(40)
    assert np.abs(deviation(sizes, 200_000, scheme.rate)).max() > threshold(40) + 6


def test_stationary_start():
    scheme = BMinSep(5, 300_000, 20_000.0, 10)
    free = _stationary_start(scheme, SecretCoins())
    counts = np.bincount(free, minlength=10)
    assert chi_square(counts, scheme.stationary * 300_000) > ERROR_RATE
    uniform_start = np.random.default_rng(0).integers(0, 10, 300_000)
    assert chi_square(np.bincount(uniform_start), scheme.stationary * 300_000) < 1e-30
    # Reversed in time (barred for long states rarer) would be another law where it is not flat.
    joint = np.bincount(np.minimum(free[::2], 1) * 2 + np.minimum(free[1::2], 1), minlength=4)
    flat = np.array([scheme.stationary[0], 1 - scheme.stationary[0]])
    assert chi_square(joint, np.outer(flat, flat).ravel() * 150_000) > ERROR_RATE


def test_waiting_is_geometric():
    # Cold, so the wait for the first use and, among early first uses, the wait for the second after being free again.
    separation, p, examples, seen = 5, 0.07, 60_000, 30
    scheme = with_probability(2 * seen + separation, examples, separation, p, warm=False)
    used = indicators(draw(scheme), examples)
    first = used.argmax(axis=0)
    first[~used.any(axis=0)] = 10**6
    early = first < seen
    after = np.where(early, first, 0)[None, :] + separation + np.arange(seen)[:, None]
    again = np.take_along_axis(used[:, early], after[:, early], axis=0)
    second = np.where(again.any(axis=0), again.argmax(axis=0), seen)
    cells = np.append(p * (1 - p) ** np.arange(seen), (1 - p) ** seen)
    shifted = np.append(cells[1:], cells[0])
    for waits, number in [(np.minimum(first, seen), examples), (second, early.sum())]:
        counts = np.bincount(waits, minlength=seen + 1)
        assert chi_square(counts, cells * number) > ERROR_RATE
        assert chi_square(counts, shifted * number) < 1e-30
    # Both waits are independent of each other.
    table = stats.chi2_contingency(
        [
            [(np.isin(first[early], a) & np.isin(second, b)).sum() for b in (range(8), range(8, 31))]
            for a in (range(5), range(5, 30))
        ]
    )
    assert table.pvalue > ERROR_RATE


def test_stationary_pairs_of_steps():
    # P[used in i and j] depends on j - i alone: rate times the renewal mass, from the first step on.
    scheme = BMinSep(12, 250_000, 25_000.0, 4)
    p = scheme.probability
    used = indicators(draw(scheme), scheme.examples)
    for gap, renewal in [(3, 0.0), (4, p), (6, p * (1 - p) ** 2), (8, p * (1 - p) ** 4 + p * p)]:
        both = (used[:-gap] * used[gap:]).sum(axis=1)
        if gap < 4:
            assert not both.any()
            continue
        assert np.abs(deviation(both, scheme.examples, scheme.rate * renewal)).max() < threshold(20)
        if gap == 4:
            assert np.abs(deviation(both, scheme.examples, scheme.rate**2)).min() > threshold(20) + 6


@pytest.mark.parametrize("warm", [False, True])
def test_examples_are_independent(warm):
    # The size of one batch over many runs is binomial: not so for any negative or positive dependence.
    scheme = BMinSep(6, 100, 20.0, 3, warm=warm)
    sizes = np.array([[len(b) for b in sampler(scheme, SecretCoins())] for _ in range(3000)])
    for step in (0, 5):
        law = stats.binom(100, scheme.inclusion[step])
        edges = np.unique(law.ppf(np.linspace(0.05, 0.95, 15)).astype(int))
        cells = np.diff(law.cdf(edges), prepend=0, append=1) * 3000
        assert chi_square(np.bincount(np.searchsorted(edges, sizes[:, step]), minlength=len(cells)), cells) > ERROR_RATE
        balanced = np.full(3000, round(law.mean()))
        assert chi_square(np.bincount(np.searchsorted(edges, balanced), minlength=len(cells)), cells) < 1e-30


def test_full_probability_is_balls_in_bins():
    scheme = BMinSep(12, 50_000, 10_000.0, 5)
    assert scheme.probability == 1.0
    used = indicators(draw(scheme), 50_000)
    assert (used[5:] == used[:-5]).all() and (used[:5].sum(axis=0) == 1).all()
    assert chi_square(used[:5].sum(axis=1), np.ones(5)) > ERROR_RATE


@pytest.mark.parametrize("scheme", [Poisson(300, 900, 60.0, 60), BMinSep(300, 900, 60.0, 4, True, 60)], ids=repr)
def test_truncation_is_uniform(scheme):
    coins = SecretCoins()
    whole = draw(type(scheme)(**{**vars(scheme), "truncate": None}), coins)
    cut = draw(scheme, coins)
    assert all(len(b) == 60 for b in cut)
    ranks, weights, cuts = np.zeros(3), np.zeros(3), 0
    for before, after in zip(whole, cut, strict=True):
        kept = after[is_example(after)]
        assert len(kept) == min(len(before), 60) and (np.diff(kept) > 0).all()
        assert (after[len(kept) :] == PADDING).all()
        assert np.isin(kept, before).all()  # the chain goes on with the batch before the cut
        if len(before) > 60:
            cuts += 1
            lost = 3 * np.flatnonzero(~np.isin(before, kept)) // len(before)
            ranks += np.bincount(lost, minlength=3)
            weights += np.bincount(3 * np.arange(len(before)) // len(before), minlength=3) * (1 - 60 / len(before))
    assert cuts > 80
    assert chi_square(ranks, weights) > ERROR_RATE  # losses are a sample without replacement: less spread, not more
    assert chi_square([0, 0, ranks.sum()], weights) < 1e-30  # keeping the first ones


def test_multi_attribution_is_stationary():
    rng = np.random.default_rng(2)
    graph = UserGraph.from_owners([rng.integers(36_000, size=rng.integers(1, 3)) for _ in range(80_000)])
    graph = graph.take(bound_contributions(graph, 3))
    separation, batch = 6, 1000.0
    scheme = MultiAttribution(80, joining_probability(graph, separation, batch), separation, 3)
    sizes = np.array([len(b) for b in sampler(scheme, SecretCoins(), graph=graph)])
    # Batch sizes are sums with bounded dependence; their spread is taken from independent runs of this sampler.
    spread = np.std([len(next(sampler(scheme, SecretCoins(), graph=graph))) for _ in range(200)], ddof=1)
    limit = 1.35 * threshold(80)  # 200 runs understate a standard deviation by 26 % with probability below 1e-7
    assert np.abs(sizes - batch).max() < limit * spread
    cold = graph.examples * scheme.probability  # the size of a first batch without a past
    assert cold - batch > (limit + 6) * spread


# --- resuming, errors, lightness --------------------------------------------------------------------------------------

GRAPH = UserGraph.from_owners([[i % 60, i % 37] for i in range(120)])
SCHEMES = [
    Poisson(20, 120, 10.0, 12),
    CyclicPoisson(20, 120, 10.0, 5),
    BallsInBins(20, 120, 7),
    BMinSep(20, 120, 10.0, 6),
    BMinSep(20, 120, 10.0, 6, False, 12),
    MultiAttribution(20, 0.05, 4, GRAPH.per_user),
]


def graph_for(scheme):
    return GRAPH if isinstance(scheme, MultiAttribution) else None


def same(left, right):
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_resuming_repeats(scheme, tmp_path):
    graph = graph_for(scheme)
    facts = identity(scheme, graph)
    whole = draw(scheme, SecretCoins.create(tmp_path / "key", facts), graph=graph)
    assert len(whole) == 20 and all(b.dtype == np.int64 for b in whole)
    for start in (0, 1, 7, 19, 20):
        rest = draw(scheme, SecretCoins.load(tmp_path / "key", facts), graph=graph, start=start)
        assert same(rest, whole[start:])
    assert not same(draw(scheme, SecretCoins(), graph=graph), whole)
    assert same(draw(scheme, SeededCoins(4), graph=graph), draw(scheme, SeededCoins(4), graph=graph))
    assert any(not np.array_equal(a, b) for a, b in itertools.pairwise(whole))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_no_coin_is_used_twice(scheme):
    # The independence of steps, waiting states and cuts: each is decided by words of an address of its own.
    asked = []

    class Recorded(SeededCoins):
        def words(self, count, *address):
            asked.append(address)
            return super().words(count, *address)

    draw(scheme, Recorded(3), graph=graph_for(scheme))
    assert len(set(asked)) == len(asked) >= 1
    kinds = {address[0] for address in asked}
    cut = getattr(scheme, "truncate", None) is not None
    assert len(kinds) == 1 + cut + 2 * getattr(scheme, "warm", False)


RUN = """
import os, signal, sys
from privacy.bandmf.samplers import SecretCoins, identity, sampler
from privacy.bandmf.schemes import BMinSep
scheme, path, start, kill = BMinSep(30, 5000, 300.0, 8, True, 320), sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
coins = (SecretCoins.load if start else SecretCoins.create)(path, identity(scheme))
for step, batch in enumerate(sampler(scheme, coins, start=start), start):
    print(step, batch.tolist(), flush=True)
    if step == kill:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_runs_never_redraw_what_was_shown(tmp_path):
    def run(start, kill):
        command = [sys.executable, "-c", RUN, str(tmp_path / "key"), str(start), str(kill)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == (-signal.SIGKILL if kill < 30 else 0), done.stderr
        return dict(line.split(" ", 1) for line in done.stdout.splitlines())

    # The model's checkpoint was three steps behind when the first run died.
    first, second = run(0, 12), run(9, 99)
    assert sorted(map(int, first)) == list(range(13)) and sorted(map(int, second)) == list(range(9, 30))
    for step in map(str, range(9, 13)):
        assert first[step] == second[step]
    batches = [np.array(json.loads((first | second)[str(step)])) for step in range(30)]
    assert closest(batches, 5000) >= 8


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: sampler(SCHEMES[0], SeededCoins(1), start=21), "start: found 21"),
        (lambda: sampler(SCHEMES[0], SeededCoins(1), start=-1), "start: found -1"),
        (lambda: sampler(SCHEMES[0], start=3), "start: found 3 without coins"),
        (lambda: sampler(SCHEMES[0], graph=GRAPH), "graph: Poisson reads none"),
        (lambda: sampler(SCHEMES[5]), "graph: missing"),
        (lambda: sampler(MultiAttribution(20, 0.05, 4, GRAPH.per_user - 1), graph=GRAPH), "bound_contributions"),
    ],
)
def test_misuse_is_refused_at_once(call, words):
    with pytest.raises(PrivacyError, match=words):
        call()


def test_samplers_need_no_torch():
    code = "import sys, privacy.bandmf.samplers, privacy.bandmf.users; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not {"torch", "scipy", "numba"} & set(eval(done.stdout))


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_torch_loader_gives_the_batches(scheme):
    torch = pytest.importorskip("torch")
    from privacy.bandmf.torch_sampler import BandmfBatchSampler, PaddedDataset

    graph = graph_for(scheme)
    data = torch.arange(120.0)[:, None] * torch.ones(3)
    dataset = torch.utils.data.TensorDataset(data, torch.arange(120))
    padded = PaddedDataset(dataset, (torch.zeros(3), torch.tensor(0)))
    batches = BandmfBatchSampler(scheme, SeededCoins(9), graph=graph, steps_per_pass=8)
    loader = torch.utils.data.DataLoader(padded, batch_sampler=batches)
    expected = draw(scheme, SeededCoins(9), graph=graph)
    seen = []
    for length in (8, 8, 4):
        assert len(loader) == length
        for (features, labels), real in loader:
            assert real.dtype == torch.bool and len(real) >= 1
            assert (features[~real] == 0).all() and (features[real][:, 0] == labels[real]).all()
            seen.append(np.concatenate((labels[real].numpy(), np.full(int((~real).sum()), PADDING))))
    for batch, wanted in zip(seen, expected, strict=True):
        np.testing.assert_array_equal(batch, wanted if len(wanted) else [PADDING])
    assert batches.position == 20 and len(batches) == 0
    with pytest.raises(PrivacyError, match="all 20 steps"):
        next(iter(loader))


def test_torch_passes_do_not_repeat_and_broken_ones_are_noticed():
    torch = pytest.importorskip("torch")
    from privacy.bandmf.torch_sampler import BandmfBatchSampler, PaddedDataset

    scheme = SCHEMES[3]
    expected = draw(scheme, SeededCoins(2))
    batches = BandmfBatchSampler(scheme, SeededCoins(2), start=2)
    for _ in zip(range(3), batches, strict=False):
        pass
    with pytest.raises(PrivacyError, match="seek"):
        next(iter(batches))
    batches.seek(5)
    assert [b for b in batches if b != [120]] == [b.tolist() for b in expected[5:] if len(b)]
    with pytest.raises(PrivacyError, match="steps_per_pass: found 0"):
        BandmfBatchSampler(scheme, SeededCoins(2), steps_per_pass=0)
    with pytest.raises(PrivacyError, match="start: found 21"):
        BandmfBatchSampler(scheme, SeededCoins(2), start=21)

    dataset = torch.utils.data.TensorDataset(torch.arange(120))
    with pytest.raises(IndexError):  # a plain data set refuses the padding, so a forgotten mask is found
        dataset[120]
    padded = PaddedDataset(dataset, (torch.tensor(0),))
    assert len(padded) == 121 and padded[120] == ((torch.tensor(0),), False) and padded[119][1] is True
    for index in (PADDING, 121):
        with pytest.raises(IndexError, match="padding is 120"):
            padded[index]
