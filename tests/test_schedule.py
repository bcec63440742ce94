import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify import recipe as recipes
from certify.errors import DataError, RecipeError
from certify.schedule import Schedule, make


def recipe(batches=None, **training):
    training = {"loss": "squared", "clip": 1.0, "learning_rate": {"schedule": "constant", "value": 0.1}} | training
    if "steps" not in training and "epochs" not in training:
        training["steps"] = 7
    return recipes.from_dict({"training": training, "batches": batches or {}})


@st.composite
def schedules(draw):
    slots = draw(st.integers(1, 60))
    kind = draw(st.sampled_from(["full", "sequential", "shuffled"]))
    batches = {"kind": kind, "slots": slots}
    if kind != "full":
        batches |= {"size": draw(st.integers(1, slots)), "drop_last": draw(st.booleans())}
    if kind == "shuffled":
        batches["seed"] = draw(st.integers(0, 2**63 - 1))
    rows = draw(st.integers(1, slots))
    return make(recipe(batches, epochs=draw(st.integers(1, 3))), rows)


@given(schedules())
def test_a_batch_holds_each_slot_at_most_once(s):
    for t in range(s.steps):
        batch = s.batch(t)
        assert batch.dtype == np.int64 and batch.ndim == 1 and 1 <= len(batch) <= s.size
        assert (np.diff(batch) > 0).all()
        assert batch.min() >= 0 and batch.max() < s.slots


@given(schedules())
def test_the_batches_of_an_epoch_are_disjoint(s):
    for start in range(0, s.steps, s.batches_per_epoch):
        epoch = np.concatenate([s.batch(t) for t in range(start, min(start + s.batches_per_epoch, s.steps))])
        assert len(np.unique(epoch)) == len(epoch)


@given(schedules())
def test_an_epoch_visits_every_slot_but_for_the_last_slots_that_drop_last_leaves_out(s):
    for start in range(0, s.steps, s.batches_per_epoch):
        assert s.epoch(start) == s.epoch(start + s.batches_per_epoch - 1) == start // s.batches_per_epoch
        epoch = np.concatenate([s.batch(t) for t in range(start, start + s.batches_per_epoch)])
        left_out = s.slots % s.size if s.drop_last else 0
        assert len(epoch) == s.slots - left_out
        if s.drop_last:
            assert all(len(s.batch(t)) == s.size for t in range(start, start + s.batches_per_epoch))


@given(schedules(), st.data())
def test_any_batch_can_be_asked_for_alone_in_any_order_with_the_same_answer(s, data):
    in_order = [s.batch(t) for t in range(s.steps)]
    for t in data.draw(st.permutations(range(s.steps))):
        np.testing.assert_array_equal(dataclasses.replace(s).batch(t), in_order[t])
        in_order[t].flags.writeable = True  # a caller may change its own copy
        kept = in_order[t].copy()
        in_order[t][:] = -1
        np.testing.assert_array_equal(s.batch(t), kept)


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["full", "sequential", "shuffled"]))
def test_the_schedule_depends_on_public_facts_only_never_on_a_record(rows, other, kind):
    batches = {"kind": kind, "slots": 40} | ({} if kind == "full" else {"size": 7})
    assert make(recipe(batches), rows) == make(recipe(batches), other)


@settings(max_examples=50)
@given(st.integers(1, 40))
def test_the_normaliser_is_the_nominal_batch_size_and_never_the_count_of_full_slots(rows):
    assert make(recipe({"slots": 40}), rows).normaliser == 40
    short = make(recipe({"kind": "sequential", "size": 16, "slots": 40}), rows)
    assert short.normaliser == 16 and len(short.batch(2)) == 8  # the short batch divides by 16 as well
    assert make(recipe({"kind": "shuffled", "size": 16, "slots": 40}, normaliser=5), rows).normaliser == 5


def test_without_stated_slots_the_rows_are_the_slots():
    s = make(recipe(), 12)
    assert s == Schedule(12, 7, 12, "full", 12)
    np.testing.assert_array_equal(s.batch(6), np.arange(12))


def test_the_steps_of_epochs_count_batches():
    assert make(recipe({"kind": "sequential", "size": 5}, epochs=3), 12).steps == 9
    assert make(recipe({"kind": "sequential", "size": 5, "drop_last": True}, epochs=3), 12).steps == 6
    assert make(recipe(epochs=3), 12).steps == 3


def test_the_permutations_stay_the_same_in_every_release():
    s = make(recipe({"kind": "shuffled", "size": 4, "seed": 2024}, epochs=2), 10)
    found = [s.batch(t).tolist() for t in range(6)]
    assert found == [[4, 6, 7, 8], [0, 1, 5, 9], [2, 3], [0, 1, 5, 7], [2, 3, 4, 9], [6, 8]]


def test_epochs_and_seeds_give_different_permutations():
    batches = {"kind": "shuffled", "size": 10, "slots": 100}
    s = make(recipe(batches | {"seed": 1}, epochs=2), 100)
    other = make(recipe(batches | {"seed": 2}, epochs=2), 100)
    assert s.batch(0).tolist() != s.batch(10).tolist() and s.batch(0).tolist() != other.batch(0).tolist()


def test_every_slot_is_as_likely_as_any_other_to_come_first():
    counts = np.zeros(10)
    s = make(recipe({"kind": "shuffled", "size": 1, "slots": 10}, epochs=4000), 10)
    for epoch in range(4000):
        counts[s.batch(10 * epoch)] += 1
    assert ((counts - 400) ** 2 / 400).sum() < 40  # chi squared with 9 degrees: p about 1e-5; the seed is fixed


def test_bad_input_is_refused_with_a_sentence():
    with pytest.raises(DataError, match="found 0; a table of at least one record"):
        make(recipe(), 0)
    with pytest.raises(DataError, match="found 13, but batches.slots is 12"):
        make(recipe({"slots": 12}), 13)
    with pytest.raises(RecipeError, match="batches.size: found 5, but there are 4 slots"):
        make(recipe({"kind": "sequential", "size": 5}), 4)
    s = make(recipe(), 3)
    for t in (-1, 7):
        with pytest.raises(IndexError, match="0 to 6"):
            s.batch(t)
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.seed = 3
