"""The ledger under kills: at every point between the phases, and at random under eight processes.

A kill (SIGKILL) is not a power failure: what a flush is worth is up to the disk, so these tests use a memory disk
where there is one. That every commit flushes is checked by its settings in test_ledger.py.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

from privacy.ledger import Ledger

ROOT = Path(__file__).resolve().parent.parent
PROCESSES, RELEASES = 8, 200


@pytest.fixture
def folder():
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def start(code: str, *arguments) -> subprocess.Popen:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + code
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


# Kills itself at the given point: the number of commits that are done, and on which side of the next one.
SUICIDE = """
import os, signal
from privacy import ledger
path, before, after, drawing = sys.argv[1], *map(int, sys.argv[2:])
done, commit = 0, ledger._commit
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def counted(db):
    global done
    if not db.execute("SELECT 1 FROM entries").fetchone() or db.total_changes == 0:
        return commit(db)  # a transaction that only reads
    done += 1
    if done == before: die()
    commit(db)
    if done == after: die()
ledger._commit = counted
def release():
    if drawing: die()
    return 7.25
print(ledger.Ledger(path).spend("d", "k", "0.1", "1e-7", release, adjacency="replace-one"), flush=True)
"""


@pytest.mark.parametrize(
    ("point", "arguments", "entered", "answered"),
    [
        ("before the reservation's commit", (1, 0, 0), False, False),
        ("after the reservation's commit", (0, 1, 0), True, False),
        ("while noise is drawn", (0, 0, 1), True, False),
        ("before the record's commit", (2, 0, 0), True, False),
        ("after the record's commit", (0, 2, 0), True, True),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_kill_loses_budget_never_privacy(folder, point, arguments, entered, answered):
    path = folder / "ledger.db"
    Ledger(path).create_budget("d", "1", "1e-5")
    worker = start(SUICIDE, path, *arguments)
    shown, _ = worker.communicate(timeout=30)
    assert worker.returncode == -signal.SIGKILL and shown == ""
    book = Ledger(path)
    assert [e.state for e in book.entries("d")] == ([["reserved", "released"][answered]] if entered else [])
    assert book.remaining("d").epsilon == (Decimal("0.9") if entered else Decimal(1))
    # The dead process's reservation is not waited for, stays spent and is never answered: a new one is paid.
    began = time.monotonic()
    answer = book.spend("d", "k", "0.1", "1e-7", lambda: -1.0, adjacency="replace-one")
    assert time.monotonic() - began < 5.0
    assert answer == (7.25 if answered else -1.0)
    assert book.remaining("d") == (Decimal(1) - Decimal("0.1") * (1 + (entered and not answered)),
                                   Decimal("1e-5") - Decimal("1e-7") * (1 + (entered and not answered)))  # fmt: skip
    assert [e.state for e in book.entries("d")] == ["reserved"] * (entered and not answered) + ["released"]


SLOW = """
import time
from privacy.ledger import Ledger
def release():
    print("drawing", flush=True)
    time.sleep(float(sys.argv[2]))
    return 1.5
print(Ledger(sys.argv[1]).spend("d", "k", "0.1", 0, release, adjacency="replace-one"), flush=True)
"""


def test_a_query_that_another_process_answers_is_waited_for(folder):
    book = Ledger(folder / "ledger.db")
    book.create_budget("d", "1")
    worker = start(SLOW, book.path, 0.5)
    assert worker.stdout.readline() == "drawing\n"
    assert book.spend("d", "k", "0.1", 0, lambda: 1 / 0, adjacency="replace-one") == 1.5
    assert book.remaining("d").epsilon == Decimal("0.9")
    assert worker.communicate(timeout=10)[0] == "1.5\n"


def test_a_query_whose_process_is_killed_is_not_waited_for(folder):
    book = Ledger(folder / "ledger.db", patience=30.0)
    book.create_budget("d", "1")
    worker = start(SLOW, book.path, 60)
    assert worker.stdout.readline() == "drawing\n"
    worker.kill()  # and not reaped yet
    began = time.monotonic()
    assert book.spend("d", "k", "0.1", 0, lambda: 2.5, adjacency="replace-one") == 2.5
    assert time.monotonic() - began < 10.0
    assert book.remaining("d").epsilon == Decimal("0.8")
    worker.communicate()


# Asks for `releases` answers, a quarter of them shared with the others, and appends each to its file once shown.
WORKER = """
import json, os
from privacy.ledger import BudgetExhaustedError, Ledger
path, mine, number, releases = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
book = Ledger(path)
shown = open(mine, "ab+")
shown.seek(0)
done = shown.read()
if done and not done.endswith(b"\\n"):
    shown.write(b"\\n")  # a line that a kill cut
for j in range(done.count(b"\\n") + (not done.endswith(b"\\n") and done != b""), releases):
    key = f"shared {j // 4}" if j % 4 == 0 else f"{number} {j}"
    cost = ["0.1", "0.05", "0.25"][j % 3]
    release = lambda: int.from_bytes(os.urandom(6), "big") / 3**9
    try:
        line = [key, book.spend("d", key, cost, "1e-7", release, adjacency="zero-out", description="test")]
    except BudgetExhaustedError as error:
        line = [key, None, str(error.left.epsilon), str(error.asked.epsilon)]
    shown.write(json.dumps(line).encode() + b"\\n")
    shown.flush()
"""


def test_eight_processes_and_random_kills_never_overspend_and_lose_nothing(folder):
    path = folder / "ledger.db"
    book = Ledger(path)
    granted = Decimal("140.05")
    book.create_budget("d", granted, "1e-3", "zero-out")
    files = [folder / f"shown {i}" for i in range(PROCESSES)]
    rng = random.Random(20)

    def run(i):
        return start(WORKER, path, files[i], i, RELEASES)

    workers = {i: run(i) for i in range(PROCESSES)}
    kills, deadline, next_kill = 0, time.monotonic() + 100.0, time.monotonic() + 0.3
    while workers:
        assert time.monotonic() < deadline
        for i, worker in list(workers.items()):
            if worker.poll() is not None:
                worker.stdout.close()
                assert worker.returncode in (0, -signal.SIGKILL)
                if worker.returncode == 0:
                    del workers[i]
                else:
                    workers[i] = run(i)
        if workers and time.monotonic() > next_kill and kills < 60:
            workers[rng.choice(sorted(workers))].kill()
            kills += 1
            next_kill = time.monotonic() + rng.uniform(0.0, 0.12)
        assert book.remaining("d").epsilon >= 0
        time.sleep(0.01)
    assert kills >= 10

    lines = [line for file in files for line in file.read_bytes().split(b"\n") if line]
    parsed = []
    for line in lines:
        try:
            parsed.append(json.loads(line))
        except ValueError:
            continue  # cut by a kill
    book = Ledger(path)  # checks seals and completeness
    entries = book.entries("d")
    # never overspent, and the balance is exactly the entries
    assert sum((e.epsilon for e in entries), Decimal(0)) == book.budget("d").spent.epsilon <= granted
    assert sum((e.delta for e in entries), Decimal(0)) == book.budget("d").spent.delta
    # every shown release is recorded, with the same value; the same query has one answer, whoever asked
    stored = {e.query_key: e.answer for e in entries if e.state == "released"}
    shown = [line for line in parsed if line[1] is not None]
    assert all(stored[key] == value for key, value, *_ in shown)
    assert max(Counter(e.query_key for e in entries if e.state == "released").values()) == 1
    assert len(set(stored.values())) == len(stored)
    # nothing lost: a kill costs one unanswered entry at most, and nobody was refused who could have been paid
    assert len(entries) - len(stored) <= kills
    assert len(parsed) >= PROCESSES * RELEASES - kills
    refused = [line for line in parsed if line[1] is None]
    assert refused and all(Decimal(left) < Decimal(asked) for *_, left, asked in refused)
    assert granted - book.budget("d").spent.epsilon < Decimal("0.25")
    assert len(shown) + len(refused) == len(parsed) and len(shown) > 800
    with_repeats = Counter(key for key, *_ in shown if key.startswith("shared"))
    assert max(with_repeats.values()) >= PROCESSES - 2
