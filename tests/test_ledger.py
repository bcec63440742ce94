"""The ledger in one process: exact amounts, the two phases, refusals, damage, export, the command, predictions."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from certify.errors import CapabilityError, CertdpError, DataError, PrivacyError
from privacy import amounts, ledger
from privacy.ledger import BudgetExhaustedError, Ledger, LedgerBusyError, LedgerError, Stored

ROOT = Path(__file__).resolve().parent.parent
TENTH = Decimal("0.1")


@pytest.fixture
def folder():
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def book(folder):
    made = Ledger(folder / "ledger.db", timeout=2.0, patience=0.3)
    made.create_budget("d", "1", "1e-5")
    return made


def spend(book, key="k", epsilon="0.1", delta=0, release=lambda: 0.5, name="d", adjacency="replace-one"):
    return book.spend(name, key, epsilon, delta, release, adjacency=adjacency, description="a test")


def never():
    raise AssertionError("the noise was drawn")


# --- amounts ---


def test_ten_times_a_tenth_is_one(book):
    for i in range(10):
        spend(book, f"{i}")
    assert book.remaining("d").epsilon == 0 and book.budget("d").spent.epsilon == 1
    with pytest.raises(BudgetExhaustedError):
        spend(book, "more", "1e-40", release=never)
    assert sum([0.1] * 10) != 1.0


finite = st.floats(min_value=0.0, max_value=9e11)


@given(finite)
def test_a_cost_is_never_below_the_number_it_was_given_as(value):
    cost = amounts.cost(value, "epsilon")
    assert Fraction(value) <= Fraction(cost) <= Fraction(value) * (1 + Fraction(1, 10**19)) + Fraction(1, 10**40) or (
        cost == Decimal(repr(value)) and Fraction(cost) >= Fraction(value)
    )
    assert amounts.written(amounts.text(cost), "epsilon") == cost


@given(st.decimals(min_value=0, max_value=10**11, places=30))
def test_float_down_is_the_largest_float_not_above_the_amount_float_up_the_smallest_not_below(amount):
    down, up = amounts.float_down(amount), amounts.float_up(amount)
    assert Fraction(down) <= Fraction(amount) <= Fraction(up)
    assert down == up or np.nextafter(down, np.inf) == up
    assert down < up or Fraction(down) == Fraction(amount)


@given(st.lists(st.tuples(st.decimals(min_value=0, max_value=10**11, places=40), st.integers(1, 10**9)), max_size=9))
def test_sums_and_products_of_amounts_are_exact(parts):
    assert Fraction(amounts.total(parts)) == sum((Fraction(a) * n for a, n in parts), Fraction(0))


def test_a_float_is_rounded_up_as_a_cost_and_read_as_written_as_a_budget():
    assert amounts.written(0.1, "epsilon") == TENTH == amounts.cost("0.1", "epsilon") == amounts.cost(TENTH, "epsilon")
    assert TENTH < amounts.cost(0.1, "epsilon") == Decimal("0.10000000000000000556")
    assert amounts.cost(0.3, "epsilon") == Decimal("0.3")  # the float is below the decimal
    assert amounts.cost(np.float64(0.5), "epsilon") == Decimal("0.5") == amounts.written(np.float32(0.5), "epsilon")
    assert amounts.text(Decimal("100")) == "100" and amounts.text(Decimal("1E-7")) == "1e-7"


@pytest.mark.parametrize(
    "value", ["x", "", "-1", -0.1, "nan", float("inf"), "1e13", "1e-41", True, None, "1e999999999", 1j]
)
def test_amounts_that_are_none_are_refused(value, book):
    for reading in (amounts.written, amounts.cost):
        with pytest.raises(PrivacyError, match="epsilon"):
            reading(value, "epsilon")
    with pytest.raises(PrivacyError, match="epsilon"):
        spend(book, epsilon=value, release=never)


# --- against a model ---

COSTS = ("0.1", "0.25", "1e-9", "0.7")
steps = st.lists(
    st.tuples(
        st.sampled_from(["spend"] * 6 + ["fail", "reserve", "unanswered", "add", "create", "reopen"]),
        st.sampled_from("ab"),
        st.integers(0, 5),
        st.sampled_from(COSTS),
        st.sampled_from(["0", "1e-6", "9e-6"]),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(steps)
def test_any_sequence_agrees_with_a_model_in_memory(sequence):
    """The model: a dict of balances in Fractions and a dict of answers."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        path = Path(place) / "ledger.db"
        book, left, answers, counts = Ledger(path), {}, {}, {}
        for number, (action, name, k, epsilon, delta) in enumerate(sequence):
            key, cost = f"q{k}", (Fraction(epsilon), Fraction(delta))
            if action == "reopen":
                book = Ledger(path)
            elif action == "create":
                if name in left:
                    with pytest.raises(LedgerError, match="already"):
                        book.create_budget(name, 1)
                else:
                    book.create_budget(name, epsilon, delta)
                    left[name], counts[name] = cost, 0
            elif name not in left:
                with pytest.raises(LedgerError, match="budget create"):
                    spend(book, key, epsilon, delta, never, name)
            elif action == "add":
                book.add(name, epsilon, "0", reason="more")
                left[name] = left[name][0] + cost[0], left[name][1]
            elif (name, key) in answers:
                assert spend(book, key, epsilon, delta, never, name) == answers[name, key]
            elif any(a > b for a, b in zip(cost, left[name], strict=True)):
                with pytest.raises(BudgetExhaustedError) as refusal:
                    spend(book, key, epsilon, delta, never, name)
                assert tuple(map(Fraction, refusal.value.left)) == left[name]
            else:
                left[name] = tuple(b - a for a, b in zip(cost, left[name], strict=True))
                counts[name] += 1
                if action == "fail":
                    with pytest.raises(ZeroDivisionError):
                        spend(book, key, epsilon, delta, lambda: 1 / 0, name)
                elif action == "unanswered":
                    book.abandon(book.reserve(name, key, epsilon, delta, "", adjacency="replace-one"))
                else:
                    answers[name, key] = [number, 1 / 3]
                    if action == "reserve":
                        reservation = book.reserve(name, key, epsilon, delta, "", adjacency="replace-one")
                        assert book.record(reservation, (number, 1 / 3)) == [number, 1 / 3]
                    else:
                        assert spend(book, key, epsilon, delta, lambda n=number: (n, 1 / 3), name) == [number, 1 / 3]
            for name, expected in left.items():
                assert tuple(map(Fraction, book.remaining(name))) == expected
        for name, count in counts.items():
            entries = book.entries(name)
            assert len(entries) == count
            found = {(name, e.query_key): e.answer for e in entries if e.state == "released"}
            assert found == {pair: answer for pair, answer in answers.items() if pair[0] == name}


# --- the two phases ---


def test_the_cost_is_on_disk_before_noise_is_drawn_and_the_answer_before_it_is_shown(book, monkeypatch):
    def states():
        with sqlite3.connect(f"{book.path.as_uri()}?mode=ro", uri=True) as db:
            return db.execute("SELECT state, answer, epsilon FROM entries").fetchall()

    def release():
        assert states() == [("reserved", None, "0.1")]
        return 0.25

    seen = []
    record = Ledger._record

    def watched(self, *arguments):
        result = record(self, *arguments)
        seen.append(states())
        return result

    monkeypatch.setattr(Ledger, "_record", watched)
    assert spend(book, release=release) == 0.25
    assert seen == [[("released", "0.25", "0.1")]] == [states()]


def test_every_commit_is_flushed(book):
    with book._transaction(write=True) as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert db.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
        assert db.execute("PRAGMA foreign_keys").fetchone() == (1,)


def test_a_stored_answer_is_returned_for_nothing(book):
    value = {"values": [[0.1, -0.0, 1e-320, 2.0**60]], "label": "é"}
    assert spend(book, release=lambda: value) == value
    before = book.remaining("d"), book.path.read_bytes()
    assert spend(book, release=never) == value == Ledger(book.path).answer("d", "k").answer
    assert book.reserve("d", "k", "0.1", 0, "", adjacency="replace-one") == Stored(value)
    assert book.answer("d", "other") is None
    assert spend(book, release=never, epsilon="1000") == value  # a repeat needs no budget
    assert (book.remaining("d"), book.path.read_bytes()) == before
    assert book.remaining("d").epsilon == Decimal("0.9")


def test_what_is_returned_is_what_is_stored(book):
    assert spend(book, release=lambda: np.array([[0.1, 2.0]])) == [[0.1, 2.0]] == book.entries("d")[0].answer
    assert spend(book, "two", release=lambda: (np.float64(1.5), np.int64(3))) == [1.5, 3]


@pytest.mark.parametrize("answer", [float("nan"), [float("inf")], object(), {1, 2}])
def test_an_answer_that_cannot_be_stored_is_not_shown_and_stays_paid(book, answer):
    with pytest.raises(LedgerError, match="not shown"):
        spend(book, release=lambda: answer)
    assert book.remaining("d").epsilon == Decimal("0.9")
    assert [e.state for e in book.entries("d")] == ["abandoned"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_release_stays_spent(book, error):
    def release():
        raise error

    with pytest.raises(error):
        spend(book, release=release)
    assert book.remaining("d").epsilon == Decimal("0.9")
    assert spend(book) == 0.5  # paid again, at once
    assert book.remaining("d").epsilon == Decimal("0.8")
    assert [e.state for e in book.entries("d")] == ["abandoned", "released"]


def test_a_reservation_is_answered_at_most_once(book):
    reservation = book.reserve("d", "k", "0.1", 0, "", adjacency="replace-one")
    assert book.record(reservation, 1.0) == 1.0
    for answer in (1.0, 2.0):
        with pytest.raises(LedgerError, match="answered once"):
            book.record(reservation, answer)
    book.abandon(reservation)
    assert [(e.state, e.answer) for e in book.entries("d")] == [("released", 1.0)]
    given_up = book.reserve("d", "j", "0.1", 0, "", adjacency="replace-one")
    book.abandon(given_up)
    with pytest.raises(LedgerError, match="answered once"):
        book.record(given_up, 1.0)
    assert "token" not in repr(reservation)


def test_a_reservation_is_answered_by_the_process_that_made_it(book):
    def release():
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            return "parent"
        return "child"

    pid = os.getpid()
    try:
        answer = spend(book, release=release)
    except LedgerError as error:
        os._exit(3 if os.getpid() != pid and "belongs to process" in str(error) else 4)
    if os.getpid() != pid:
        os._exit(5)
    assert answer == "parent" == book.entries("d")[0].answer


def test_two_paid_draws_of_one_query_show_the_one_that_was_stored_first(book, monkeypatch):
    monkeypatch.setattr(ledger, "_alive", lambda owner: False)  # wrongly taken for dead, as across machines
    first, second = (book.reserve("d", "k", "0.1", 0, "", adjacency="replace-one") for _ in "ab")
    assert book.record(second, 2.0) == 2.0 == book.record(first, 1.0)
    assert book.remaining("d").epsilon == Decimal("0.8")
    assert [e.state for e in book.entries("d")] == ["abandoned", "released"]
    assert spend(book, release=never) == 2.0


def test_a_query_that_is_being_answered_is_waited_for_and_not_paid_twice(book, monkeypatch):
    book.reserve("d", "k", "0.1", 0, "", adjacency="replace-one")
    with pytest.raises(LedgerBusyError, match="same query"):
        spend(book, release=never)
    assert book.remaining("d").epsilon == Decimal("0.9")
    monkeypatch.setattr(ledger, "_alive", lambda owner: None)  # nobody can say: after the patience, paid anew
    began = time.monotonic()
    assert spend(book) == 0.5 and time.monotonic() - began >= 0.3
    assert book.remaining("d").epsilon == Decimal("0.8")


def test_an_answer_that_arrives_between_looking_and_reserving_is_not_paid_twice(book, monkeypatch):
    other, transaction = Ledger(book.path), Ledger._transaction

    def overtaken(self, write=False):
        if write and self is book and not book.entries("d"):
            assert spend(other, release=lambda: 9.0) == 9.0
        return transaction(self, write)

    monkeypatch.setattr(Ledger, "_transaction", overtaken)
    assert spend(book, release=never) == 9.0
    assert book.remaining("d").epsilon == Decimal("0.9")


def test_whether_a_process_runs():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = json.loads(ledger._owner())
    theirs = json.dumps([*owner[:2], child.pid, ledger._start(child.pid)])
    assert ledger._alive(json.dumps(owner)) is True and ledger._alive(theirs) is True
    assert ledger._alive(json.dumps([*owner[:3], "17"])) is False  # the number was given out again
    assert ledger._alive(json.dumps(["another boot", *owner[1:]])) is False
    assert ledger._alive(json.dumps([owner[0], "another namespace", *owner[2:]])) is None
    assert ledger._alive(json.dumps(["", "", 2**22 + 1, ""])) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
    assert ledger._alive(theirs) is False
    child.wait()
    assert ledger._alive(theirs) is False


def test_the_clock_decides_nothing(book, monkeypatch):
    monkeypatch.setattr(ledger.time, "gmtime", lambda: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0)))
    monkeypatch.setattr(ledger.time, "time", lambda: -1e9)
    assert spend(book) == 0.5 and spend(book, release=never) == 0.5
    assert book.entries("d")[0].day == "1970-01-01"
    Ledger(book.path)


# --- refusals ---


def test_an_exhausted_budget_refuses_with_the_amount_that_is_left(book):
    spend(book, "a", "0.7", "1e-6")
    with pytest.raises(BudgetExhaustedError, match="epsilon = 0.3, delta = 0.000009 is left of epsilon = 1") as refusal:
        spend(book, "b", "0.30000000000000000000000000000000000001", release=never)
    assert refusal.value.left == (Decimal("0.3"), Decimal("9e-6"))
    assert refusal.value.asked.epsilon == Decimal("0.30000000000000000000000000000000000001")
    with pytest.raises(BudgetExhaustedError):
        spend(book, "b", "0.1", "1e-5", release=never)
    assert len(book.entries("d")) == 1
    assert spend(book, "b", "0.3", "9e-6") == 0.5 and book.remaining("d") == (0, 0)


def test_the_cost_of_a_float_is_not_below_it(book):
    for i in range(9):
        spend(book, f"{i}", 0.1)
    with pytest.raises(BudgetExhaustedError):
        spend(book, "9", 0.1, release=never)  # ten times the float 0.1 is above 1
    spend(book, "9", "0.099")


def test_several_queries_are_paid_together_or_not_at_all(book):
    keys = [f"{i}" for i in range(9)]
    assert spend(book, "3", release=lambda: -1) == -1
    asked = []

    def release(new):
        asked.append(new)
        return [int(key) for key in new]

    def many(keys, release=release):
        return book.spend_many("d", keys, "0.1", 0, release, adjacency="replace-one")

    with pytest.raises(BudgetExhaustedError):
        many([*keys, "x", "y"])
    assert book.remaining("d").epsilon == Decimal("0.9") and not asked
    assert many([*keys, "3", "0"]) == [0, 1, 2, -1, 4, 5, 6, 7, 8, -1, 0]
    assert asked == [["0", "1", "2", "4", "5", "6", "7", "8"]] and book.remaining("d").epsilon == TENTH
    with pytest.raises(LedgerError, match="one for each"):
        many(["z"], lambda new: [])
    assert book.remaining("d").epsilon == 0 and many([]) == []


def test_adjacencies_are_not_mixed(book):
    with pytest.raises(LedgerError, match="'zero-out', but budget 'd' counts 'replace-one'"):
        spend(book, adjacency="zero-out", release=never)
    spend(book)
    with pytest.raises(LedgerError, match="adjacency"):
        spend(book, adjacency="zero-out", release=never)  # not even for a stored answer
    with pytest.raises(LedgerError, match="adjacency"):
        book.create_budget("e", 1, adjacency="add-remove")


@pytest.mark.parametrize(
    ("call", "finding"),
    [
        (lambda b: b.create_budget("d", 1), "already|has it"),
        (lambda b: b.create_budget("", 1), "name"),
        (lambda b: b.create_budget("e\n", 1), "name"),
        (lambda b: b.create_budget("e", 0), "above 0"),
        (lambda b: b.create_budget("e", 1, 1), "below 1"),
        (lambda b: b.add("d", 1, reason=" "), "reason"),
        (lambda b: b.add("d", 0, reason="x"), "above 0"),
        (lambda b: b.add("d", 0, "0.99999", reason="x"), "below 1"),
        (lambda b: b.add("e", 1, reason="x"), "no such budget"),
        (lambda b: b.remaining("e"), "it has 'd'"),
        (lambda b: b.entries("e"), "no such budget"),
        (lambda b: spend(b, epsilon="0", release=never), "costs something"),
        (lambda b: spend(b, delta="1", release=never), "below 1"),
        (lambda b: spend(b, "", release=never), "empty key"),
        (lambda b: b.key(a=Decimal(1)), "JSON"),
    ],
)
def test_mistakes_are_named(book, call, finding):
    with pytest.raises(LedgerError, match=finding):
        call(book)
    assert book.remaining("d") == (1, Decimal("1e-5")) and len(book.budgets()) == 1


def test_a_larger_budget_is_recorded_with_its_reason(book):
    assert book.add("d", 0.5, reason="second study").granted == (Decimal("1.5"), Decimal("1e-5"))
    assert [(g.epsilon, g.reason) for g in book.grants("d")] == [(1, "created"), (Decimal("0.5"), "second study")]


# --- the file ---


def test_the_file_is_private_and_made_by_create_alone(folder):
    path = folder / "new ledger?.db"
    book = Ledger(path)
    for call in (lambda: book.budgets(), lambda: spend(book), lambda: book.add("d", 1, reason="x")):
        with pytest.raises(LedgerError, match="no such file"):
            call()
    assert not list(folder.iterdir())
    old = os.umask(0)
    try:
        book.create_budget("d", 1)
        spend(book)
    finally:
        os.umask(old)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
    assert {file.name for file in folder.iterdir()} <= {path.name, path.name + "-journal"}
    with pytest.raises(LedgerError, match="existing folder"):
        Ledger(folder / "none" / "x.db").create_budget("d", 1)


def test_recorded_rows_cannot_be_changed_or_removed(book):
    spend(book)
    book.reserve("d", "j", "0.1", 0, "", adjacency="replace-one")
    for statement in (
        "DELETE FROM entries", "DELETE FROM grants", "DELETE FROM budgets", "UPDATE grants SET epsilon = '9'",
        "UPDATE budgets SET adjacency = 'zero-out'", "UPDATE entries SET epsilon = '0' WHERE state = 'reserved'",
        "UPDATE entries SET answer = '1' WHERE state = 'released'",
    ):  # fmt: skip
        with pytest.raises(LedgerError, match="kept|fixed"), book._transaction(write=True) as db:
            db.execute(statement)
    Ledger(book.path)


@pytest.mark.parametrize("phase", ["reserve", "record"])
def test_a_full_disk_shows_nothing_and_keeps_the_balance(book, monkeypatch, phase):
    set_up, large = ledger._set_up, "x" * 50_000
    spend(book, "before")

    def no_room(db):
        set_up(db)
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")

    def fill():
        monkeypatch.setattr(ledger, "_set_up", no_room)
        return large

    with pytest.raises(LedgerError, match="disk is full"):
        if phase == "reserve":
            fill()
            book.spend("d", "k", "0.1", 0, never, adjacency="replace-one", description=large)
        else:
            spend(book, release=fill)
    assert spend(book, "before", release=never) == 0.5
    monkeypatch.setattr(ledger, "_set_up", set_up)
    reopened = Ledger(book.path)
    assert reopened.remaining("d").epsilon == Decimal("0.9") - (phase == "record") * TENTH
    assert reopened.answer("d", "k") is None
    assert spend(reopened, release=lambda: 3.5) == 3.5


LIMITED = """
import os, resource
from privacy.ledger import Ledger, LedgerError
path = sys.argv[1]
book, size = Ledger(path), os.path.getsize(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + int(sys.argv[2]), resource.RLIM_INFINITY))
shown = 0
try:
    for i in range(200):
        book.spend("d", f"k{i}", "0.001", 0, lambda: "y" * 3000, adjacency="replace-one", description="z" * 3000)
        shown += 1
except LedgerError as error:
    print(shown, str(error))
"""


@pytest.mark.parametrize("room", [-4000, 0, 4096, 30_000, 50_000])
def test_no_room_at_any_write_of_the_file_or_its_journal(book, room):
    """A limit on file sizes hits the journal and the file in the middle of a transaction."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + LIMITED
    command = [sys.executable, "-c", code, book.path, str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    shown, _, sentence = done.stdout.partition(" ")
    assert "nothing was shown" in sentence, done.stderr
    entries = Ledger(book.path).entries("d")
    assert len([e for e in entries if e.state == "released"]) == int(shown) <= len(entries) <= int(shown) + 1
    assert book.budget("d").spent.epsilon == Decimal("0.001") * len(entries)


def test_a_read_only_file_still_answers_and_refuses_to_spend(book, monkeypatch):
    spend(book)
    connect = sqlite3.connect
    monkeypatch.setattr(ledger.sqlite3, "connect", lambda path, **kw: connect(path.replace("mode=rw", "mode=ro"), **kw))
    assert spend(book, release=never) == 0.5 and book.remaining("d").epsilon == Decimal("0.9")
    with pytest.raises(LedgerError, match="may not be written"):
        spend(book, "new", release=never)


def test_a_busy_ledger_is_an_error_after_the_timeout(folder):
    book = Ledger(folder / "ledger.db", timeout=0.1)
    book.create_budget("d", 1)
    other = sqlite3.connect(book.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusyError, match="0.1 s"):
        spend(book, release=never)
    other.execute("COMMIT")

    def release():
        other.execute("BEGIN EXCLUSIVE")
        return 1.0

    with pytest.raises(LedgerBusyError, match="nothing was shown"):
        spend(book, release=release)
    other.close()
    assert book.remaining("d").epsilon == Decimal("0.9") and book.answer("d", "k") is None


def contents(book):
    return json.dumps([book.export(), [e.query_key for b in book.budgets() for e in book.entries(b.name)]])


def refused_or_same(path, original):
    before = path.read_bytes()
    try:
        book = Ledger(path)
        same = contents(book) == original
        spend(book, "repeat", release=never)
    except CertdpError as error:
        assert str(path) in str(error)
        assert path.read_bytes() == before  # nothing is overwritten
        return True
    assert path.read_bytes() == before
    return same


def test_a_ledger_with_any_one_bit_flipped_is_refused_or_holds_the_same_content(book):
    spend(book, "repeat", "0.1", "1e-6", lambda: [0.1, 0.25])
    spend(book, "other", "0.25")
    book.reserve("d", "left", "0.1", 0, "a reservation", adjacency="replace-one")
    book.add("d", 1, reason="more")
    whole, original = book.path.read_bytes(), contents(book)
    copy = book.path.with_name("flipped.db")
    rng = random.Random(1)
    used = [i for i, byte in enumerate(whole) if byte]  # most bytes are free space
    places = [rng.choice(used) for _ in range(500)] + [rng.randrange(len(whole)) for _ in range(100)] + list(range(100))
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        copy.write_bytes(damaged)
        assert refused_or_same(copy, original), place


def test_a_ledger_that_is_cut_or_something_else_is_refused(book, folder):
    spend(book, "repeat")
    whole = book.path.read_bytes()
    copy = folder / "cut.db"
    for length in [*range(0, len(whole), 997), len(whole) - 1]:
        copy.write_bytes(whole[:length])
        with pytest.raises(LedgerError):
            Ledger(copy)
        assert copy.read_bytes() == whole[:length]
    copy.write_text("name,value\n" * 1000)
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(copy).create_budget("d", 1)
    copy.unlink()
    with sqlite3.connect(copy) as db:
        db.execute("CREATE TABLE mine (a)")
    before = copy.read_bytes()
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(copy).create_budget("d", 1)
    assert copy.read_bytes() == before
    with pytest.raises(LedgerError):
        Ledger(folder)


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TRIGGER entries_kept; DELETE FROM entries WHERE id = 1",
        "DROP TRIGGER entries_kept; DELETE FROM entries WHERE id = 2",
        "DROP TRIGGER grants_kept; DELETE FROM grants",
        "DROP TRIGGER grants_fixed; UPDATE grants SET epsilon = '100'",
        "DROP TRIGGER entries_fixed; UPDATE entries SET epsilon = '0'",
        "DROP INDEX one_answer",
    ],
)
def test_rows_that_were_lost_or_edited_are_noticed(book, statement):
    spend(book, "a")
    spend(book, "b")
    triggers = sqlite3.connect(book.path).execute("SELECT sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    with sqlite3.connect(book.path) as db:
        db.executescript(statement)
        kept = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_schema WHERE type = 'trigger'")}
        for (sql,) in triggers:
            if sql not in kept:
                db.execute(sql)
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(book.path)


def test_another_version_is_refused(book):
    with sqlite3.connect(book.path) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(LedgerError, match="version 7"):
        Ledger(book.path)


# --- export and the command ---


def test_export_holds_costs_and_answers_and_no_secrets(book):
    spend(book, book.key(query=1), "0.25", "1e-6", lambda: [0.5])
    book.reserve("d", "j", "0.1", 0, "left open", adjacency="replace-one")
    exported = book.export()
    assert exported["certdp_ledger"] == 1 and exported["composition"] == "basic"
    (budget,) = exported["budgets"]
    day = budget["grants"][0]["day"]
    assert budget == {
        "name": "d", "adjacency": "replace-one",
        "granted": {"epsilon": "1", "delta": "0.00001"},
        "spent": {"epsilon": "0.35", "delta": "0.000001"},
        "left": {"epsilon": "0.65", "delta": "0.000009"},
        "grants": [{"epsilon": "1", "delta": "0.00001", "reason": "created", "day": day}],
        "entries": [
            {"id": 1, "epsilon": "0.25", "delta": "0.000001", "description": "a test", "day": day, "state": "released",
             "answer": [0.5]},
            {"id": 2, "epsilon": "0.1", "delta": "0", "description": "left open", "day": day, "state": "reserved",
             "answer": None},
        ],
    }  # fmt: skip
    text = json.dumps(exported)
    with sqlite3.connect(book.path) as db:
        secrets = [db.execute("SELECT value FROM secret").fetchone()[0]]
        for row in db.execute("SELECT query_key, token, owner, seal FROM entries"):
            secrets += [value for value in row if value != "j"]
    assert not any(secret in text for secret in secrets)


def test_keys_are_secret_to_the_file(book, folder):
    other = Ledger(folder / "other.db")
    other.create_budget("d", 1)
    assert book.key(a=1, b=[2]) == book.key(b=[2], a=1) == Ledger(book.path).key(a=1, b=[2])
    assert len({book.key(a=1), book.key(a=2), other.key(a=1)}) == 3


def budget_command(*words):
    from certify.cli.budget import app

    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "140"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_command_creates_shows_adds_and_exports(folder):
    path = folder / "l.db"
    assert budget_command("create", path, "cal[i]fornia", "--epsilon", "1", "--delta", "1e-5")[0] == 0
    book = Ledger(path)
    for i in range(5):
        spend(book, f"{i}", name="cal[i]fornia")
    code, text = budget_command("show", path, "--entries")
    assert code == 0 and "cal[i]fornia" in text and "0.5" in text and "█" * 12 + "░" * 12 in text
    assert "replace-one" in text and "a test" in text and "released" in text
    budget_command("add", path, "cal[i]fornia", "--epsilon", "0.1", "--reason", "a second look")
    assert book.remaining("cal[i]fornia").epsilon == Decimal("0.6")
    assert json.loads(budget_command("export", path)[1]) == book.export()
    budget_command("export", path, "-o", folder / "e.json")
    assert json.loads((folder / "e.json").read_text()) == book.export()
    with pytest.raises(LedgerError, match="no such budget"):
        budget_command("show", path, "texas")
    with pytest.raises(PrivacyError, match="epsilon"):
        budget_command("create", path, "texas", "--epsilon", "lots")
    with pytest.raises(LedgerError, match="no such file"):
        budget_command("show", folder / "missing.db")
    assert not (folder / "missing.db").exists()


def test_the_bar_is_full_only_when_nothing_is_left():
    from certify.cli.budget import bar

    assert bar(Decimal(0), Decimal(1)) == "░" * 24 and bar(Decimal(1), Decimal(1)) == "█" * 24
    assert bar(Decimal("0.9999999"), Decimal(1)) == "█" * 23 + "░"
    assert bar(Decimal("1e-9"), Decimal(1)) == "█" + "░" * 23 and bar(Decimal(0), Decimal(0)) == "░" * 24


# --- predictions ---


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(envelope, graph, inputs): a real envelope of a small model."""
    import certify
    import models

    place = tmp_path_factory.mktemp("run")
    (place / "recipe.toml").write_text(
        "[training]\nloss = 'squared'\nsteps = 4\nclip = 0.2\nlearning_rate = {schedule = 'constant', value = 0.05}\n"
        "[features]\nlower = -3\nupper = 3\n[target]\nnames = 'y'\n[output]\nlower = -2\nupper = 2\n"
    )
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 8))
    graph = models.read(ROOT / "examples" / "california" / "model.onnx")
    envelope = certify.run(graph, certify.load_recipe(place / "recipe.toml"), x, np.tanh(x[:, 0]), range(6))
    return envelope, graph, rng.normal(size=(12, 8))


def predict(book, world, rows, epsilon=0.1, **options):
    from privacy.ledgered import predict_with_ledger

    envelope, graph, x = world
    return predict_with_ledger(book, "d", envelope, graph, x[rows], epsilon, family="cauchy", **options)


def test_answered_inputs_cost_nothing_and_keep_their_answers(book, world):
    first = predict(book, world, [0, 1, 0, 2])
    assert np.array_equal(first.values[0], first.values[2]) and book.remaining("d").epsilon == Decimal("0.7")
    assert (first.guarantee.new, first.guarantee.repeated, first.guarantee.epsilon_spent) == (3, 0, "0.3")
    second = predict(Ledger(book.path), world, [5, 2, 1, 0])
    assert np.array_equal(second.values[1:], first.values[[3, 1, 0]]) and book.remaining("d").epsilon == Decimal("0.6")
    g = second.guarantee
    assert (g.new, g.repeated, g.epsilon_spent, g.epsilon_left, g.epsilon, g.releases) == (1, 3, "0.1", "0.6", 0.4, 4)
    stored = [entry.answer["values"] for entry in book.entries("d")]
    returned = [*first.values[[0, 1, 3]], second.values[0]]
    assert sorted(map(str, stored)) == sorted(str([row.tolist()]) for row in returned)
    assert predict(book, world, [0, 1, 2]).guarantee.new == 0
    assert predict(book, world, [0], "0.2").guarantee.new == 1  # another budget is another query
    json.dumps(vars(g))
    assert g.note.startswith("1 new inputs paid epsilon = 0.1 from budget 'd', 3 were answered before; epsilon = 0.6")


def test_ten_predictions_at_a_tenth_are_a_budget_of_one(book, world):
    predict(book, world, range(10))
    assert book.remaining("d").epsilon == 0
    with pytest.raises(BudgetExhaustedError):
        predict(book, world, [0, 10])
    assert predict(book, world, [9, 3]).guarantee.new == 0


def test_a_whole_set_is_one_query(book, world):
    first = predict(book, world, [0, 1, 2, 0], per_query=False)
    assert book.remaining("d").epsilon == Decimal("0.9") and first.guarantee.epsilon == 0.1
    again = predict(book, world, [2, 1, 0], per_query=False)
    assert np.array_equal(again.values, first.values[[2, 1, 0]]) and again.guarantee.new == 0
    assert predict(book, world, [2, 1], per_query=False).guarantee.epsilon_left == "0.8"


def test_the_mechanism_runs_at_floats_that_are_not_above_what_is_paid(book, world, monkeypatch):
    from privacy import ledgered

    real, seen = ledgered.predict, []

    def watched(envelope, query, features, epsilon, delta, **options):
        seen.append((epsilon, delta))
        return real(envelope, query, features, epsilon, delta, **options)

    monkeypatch.setattr(ledgered, "predict", watched)
    predict(book, world, [0], 0.1)
    predict(book, world, [0], "0.3")
    paid = [entry.epsilon for entry in book.entries("d")]
    assert paid == [TENTH, Decimal("0.3")]
    for epsilon, amount in zip([e for e, _ in seen], [paid[0], paid[0], paid[1], paid[1]], strict=True):
        assert Fraction(epsilon) <= Fraction(amount) < Fraction(np.nextafter(epsilon, 1.0))


def test_new_inputs_are_paid_for_before_any_noise_is_drawn(book, world, monkeypatch):
    """And what `predict` refuses because of the records stays paid."""
    from privacy import ledgered

    real = ledgered.predict

    def failing(envelope, *arguments, **options):
        if envelope is world[0]:
            assert [e.state for e in book.entries("d")] == ["reserved", "reserved"]
            raise PrivacyError("refused")
        return real(envelope, *arguments, **options)

    monkeypatch.setattr(ledgered, "predict", failing)
    with pytest.raises(PrivacyError, match="refused"):
        predict(book, world, [0, 1])
    assert book.remaining("d").epsilon == Decimal("0.8")


def test_a_release_that_costs_more_than_was_paid_is_not_shown(book, world, monkeypatch):
    from privacy import ledgered

    real = ledgered.predict
    monkeypatch.setattr(
        ledgered, "predict", lambda e, q, x, epsilon, delta, **o: real(e, q, x, 2 * epsilon, delta, **o)
    )
    with pytest.raises(LedgerError, match="nothing is shown"):
        predict(book, world, [0])
    assert [e.state for e in book.entries("d")] == ["abandoned"]


def test_a_mistake_that_public_facts_show_costs_nothing(book, world):
    from dataclasses import replace

    from certify.envelope import Envelope
    from privacy.ledgered import predict_with_ledger

    envelope, graph, x = world

    def with_metadata(**changes):
        return Envelope(replace(envelope.metadata, **changes), envelope.nominal, envelope.lower, envelope.upper)

    unsound = with_metadata(capabilities=replace(envelope.metadata.capabilities, monotone=False))
    for call, error in (
        (lambda: predict_with_ledger(book, "d", envelope, graph, x, 0.1, family="gausian"), PrivacyError),
        (lambda: predict_with_ledger(book, "d", envelope, graph, x, 0.1, 2.0), PrivacyError),
        (lambda: predict_with_ledger(book, "d", envelope, graph, x, 0), PrivacyError),
        (lambda: predict_with_ledger(book, "d", envelope, graph, x[:, :3], 0.1), CertdpError),
        (lambda: predict_with_ledger(book, "d", envelope, graph, x * np.nan, 0.1), (PrivacyError, DataError)),
        (lambda: predict_with_ledger(book, "d", envelope, graph, x[:0], 0.1), CertdpError),
        (lambda: predict_with_ledger(book, "d", unsound, graph, x, 0.1), CapabilityError),
        (lambda: predict_with_ledger(book, "d", with_metadata(adjacency="zero-out"), graph, x, 0.1), LedgerError),
        (lambda: predict_with_ledger(book, "e", envelope, graph, x, 0.1), LedgerError),
    ):
        with pytest.raises(error):
            call()
    assert book.remaining("d").epsilon == 1 and not book.entries("d")


def test_another_envelope_or_model_is_another_query(book, world):
    from dataclasses import replace

    from certify.envelope import Envelope
    from privacy.ledgered import _fingerprint

    envelope, graph, x = world
    predict(book, world, [0])
    other = Envelope(replace(envelope.metadata, steps=5), envelope.nominal, envelope.lower, envelope.upper)
    assert predict(book, (other, graph, x), [0]).guarantee.new == 1
    assert _fingerprint(graph) == _fingerprint(graph) != _fingerprint(replace(graph, output=graph.output - 1))
    assert _fingerprint(np.zeros(2)) != _fingerprint(np.zeros((2, 1))) != _fingerprint(np.zeros((1, 2)))
    assert _fingerprint(["a", "b"]) != _fingerprint(["ab"]) and _fingerprint(1) != _fingerprint(1.0)


def test_a_copy_holds_everything(book, folder):
    spend(book)
    shutil.copy(book.path, folder / "copy.db")
    assert contents(Ledger(folder / "copy.db")) == contents(book)


def test_the_command_releases_with_or_without_a_ledger(book, world):
    from privacy.ledgered import release_from

    envelope, graph, x = world
    paid = release_from(book.path, "d", envelope, graph, x, 0.5, 0.0, per_query=False, family="cauchy")
    assert paid.guarantee.epsilon_left == "0.5"
    plain = release_from(None, None, envelope, graph, x, 0.5, 0.0, per_query=False, family="cauchy")
    assert plain.values.shape == paid.values.shape and not hasattr(plain.guarantee, "note")
    for pair in ((book.path, None), (None, "d")):
        with pytest.raises(LedgerError, match="without the other"):
            release_from(*pair, envelope, graph, x, 0.5, 0.0)
