"""The ledger: one SQLite file that holds what each data set's privacy budget was spent on, and the answers.

A release has two phases, each a transaction that is on disk before the next thing happens:

1. `reserve`: the cost is entered. Only then is noise drawn.
2. `record`: the answer is entered. Only then is it returned, and what is returned is what was entered.

Whatever happens in between (a kill, an error, a full disk), the cost stays spent and nothing was shown: a crash
loses budget, never privacy. An answer that was stored is returned again for nothing: post-processing.

Composition is basic: epsilons and deltas add up (a privacy filter, valid for costs and queries chosen from earlier
answers). The costs, never the answers, decide whether a release is refused, so refusals are public.

Stored are costs, descriptions, released answers, and keys: HMACs, under a secret of the file, of what was asked. No
smooth bound, noise scale, envelope or running time is stored. Keys may be computed from an envelope's digest, so the
file is kept where the records are (mode 0600). `export` leaves out secret, keys, tokens and processes; it does tell
which costs have no answer, and whether a release fails can depend on the records.

Durability: rollback journal (TRUNCATE) with synchronous = EXTRA. A commit has returned only after data and journal are
flushed, and the one file holds everything, so a copy of it misses nothing. Every operation opens its own connection:
none is shared by threads, or by processes across a fork. Clocks decide nothing; days are stored for people.

Formal guarantees (tests/test_ledger.py and tests/test_ledger_concurrency.py):

* Never overspent: the sum of all costs is at most the sum of all grants, exactly, whatever is killed when.
* Every answer that was shown is in the ledger, with the same value, beside its cost.
* A stored answer is returned for nothing, the same to everybody.
* A reservation is answered at most once, by the process that made it.
* A failed release stays spent.
* A ledger with any one bit flipped is refused or holds the same content; nothing is overwritten.

Not covered: restoring an old copy of the file restores its budget; storage that acknowledges a flush it did not do;
file systems without working locks (some network ones).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from certify.errors import PrivacyError
from privacy import amounts

__all__ = [
    "ADJACENCIES", "Amounts", "Budget", "BudgetExhaustedError", "Entry", "Grant", "Ledger", "LedgerBusyError",
    "LedgerError", "Reservation", "Stored",
]  # fmt: skip

ADJACENCIES = ("replace-one", "zero-out")
EXPORT_VERSION = 1
_VERSION = 1
_APPLICATION = 0x43445042  # "CDPB", SQLite's application_id
_SCHEMA = """
CREATE TABLE secret (id INTEGER PRIMARY KEY CHECK (id = 1), value TEXT NOT NULL);
CREATE TABLE budgets (name TEXT PRIMARY KEY NOT NULL, adjacency TEXT NOT NULL, seal TEXT NOT NULL);
CREATE TABLE grants (
    id INTEGER PRIMARY KEY AUTOINCREMENT, budget TEXT NOT NULL REFERENCES budgets (name),
    epsilon TEXT NOT NULL, delta TEXT NOT NULL, reason TEXT NOT NULL, day TEXT NOT NULL, seal TEXT NOT NULL);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, budget TEXT NOT NULL REFERENCES budgets (name), query_key TEXT NOT NULL,
    epsilon TEXT NOT NULL, delta TEXT NOT NULL, description TEXT NOT NULL, day TEXT NOT NULL, owner TEXT NOT NULL,
    token TEXT NOT NULL, state TEXT NOT NULL CHECK (state IN ('reserved', 'released', 'abandoned')),
    answer TEXT CHECK ((answer IS NOT NULL) = (state = 'released')), seal TEXT NOT NULL);
CREATE INDEX entries_by_key ON entries (budget, query_key, state);
CREATE INDEX entries_by_cost ON entries (budget, epsilon, delta);
CREATE UNIQUE INDEX one_answer ON entries (budget, query_key) WHERE state = 'released';
CREATE TRIGGER budgets_fixed BEFORE UPDATE ON budgets BEGIN SELECT RAISE(ABORT, 'budgets are fixed'); END;
CREATE TRIGGER budgets_kept BEFORE DELETE ON budgets BEGIN SELECT RAISE(ABORT, 'budgets are kept'); END;
CREATE TRIGGER grants_fixed BEFORE UPDATE ON grants BEGIN SELECT RAISE(ABORT, 'grants are fixed'); END;
CREATE TRIGGER grants_kept BEFORE DELETE ON grants BEGIN SELECT RAISE(ABORT, 'grants are kept'); END;
CREATE TRIGGER entries_kept BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are kept'); END;
CREATE TRIGGER entries_fixed BEFORE UPDATE ON entries
    WHEN OLD.state <> 'reserved' OR OLD.id <> NEW.id OR OLD.budget <> NEW.budget OR OLD.query_key <> NEW.query_key
        OR OLD.epsilon <> NEW.epsilon OR OLD.delta <> NEW.delta OR OLD.description <> NEW.description
        OR OLD.day <> NEW.day OR OLD.owner <> NEW.owner OR OLD.token <> NEW.token
    BEGIN SELECT RAISE(ABORT, 'entries are fixed once answered'); END;
"""
_COLUMNS = {
    "budgets": ("name", "adjacency"),
    "grants": ("id", "budget", "epsilon", "delta", "reason", "day"),
    "entries": (
        "id", "budget", "query_key", "epsilon", "delta", "description", "day", "owner", "token", "state", "answer",
    ),
}  # fmt: skip
_RESTORE = "nothing was changed; restore the newest backup and add what was spent since as an entry"


class LedgerError(PrivacyError):
    """The ledger cannot be read or written, or was asked for something that it does not allow."""


class LedgerBusyError(LedgerError):
    """Another process holds the file, or is answering the same query, for longer than the time allowed."""


class BudgetExhaustedError(LedgerError):
    """The budget does not cover what was asked; asked and left are `Amounts`."""

    def __init__(self, name: str, asked: Amounts, budget: Budget):
        self.name, self.asked, self.left = name, asked, budget.left
        super().__init__(
            f"budget {name!r}: asked for {asked}, but only {budget.left} is left of {budget.granted}; "
            "ask for at most that, repeat a query that was answered (it costs nothing), or decide on a larger budget "
            "with 'certdp budget add'"
        )


class Amounts(NamedTuple):
    """Exact decimals."""

    epsilon: Decimal
    delta: Decimal

    def __str__(self) -> str:
        return f"epsilon = {amounts.text(self.epsilon)}, delta = {amounts.text(self.delta)}"

    def covers(self, other: Amounts) -> bool:
        return other.epsilon <= self.epsilon and other.delta <= self.delta


@dataclass(frozen=True)
class Budget:
    """What a data set's records may still give away, for one adjacency. Public."""

    name: str
    adjacency: str
    granted: Amounts
    spent: Amounts

    @property
    def left(self) -> Amounts:
        return Amounts(*map(amounts.subtract, self.granted, self.spent))


@dataclass(frozen=True)
class Grant:
    """The budget as created, or an amount added later, with the reason given."""

    epsilon: Decimal
    delta: Decimal
    reason: str
    day: str


@dataclass(frozen=True)
class Entry:
    """One cost. state: "reserved" (no answer yet, or its process ended), "released", or "abandoned" (no answer)."""

    id: int
    query_key: str
    epsilon: Decimal
    delta: Decimal
    description: str
    state: str
    answer: Any
    day: str


@dataclass(frozen=True)
class Stored:
    """An answer that was released before."""

    answer: Any


@dataclass(frozen=True)
class Reservation:
    """A cost that is entered and not answered yet; valid in the process that made it."""

    id: int
    name: str
    query_key: str
    cost: Amounts
    token: str = field(repr=False)
    pid: int = field(default_factory=os.getpid, repr=False)


class _Claim(NamedTuple):
    stored: dict[str, Any]
    mine: dict[str, Reservation]
    waiting: dict[str, bool]  # key -> True when its process is known to be alive


class Ledger:
    """Budgets in the file `path`.

    timeout: seconds to wait for another process's transaction. patience: seconds to wait for another process that is
    answering the same query; a query whose process is known to have ended is not waited for.
    The file is made by the first `create_budget`; an existing one is checked in full here.

    Costs (epsilon, delta): text, Decimal and integers are exact; a binary float is rounded up (`amounts.cost`), so
    write "0.1" for a tenth. Budgets: a float means the decimal it is written as.
    Every method raises LedgerError, with the file, what was found and what to do.
    """

    def __init__(self, path: str | Path, *, timeout: float = 30.0, patience: float = 60.0):
        self.path, self.timeout, self.patience = Path(path).absolute(), float(timeout), float(patience)
        self._secret: bytes | None = None
        if os.path.lexists(self.path):
            self.verify()

    # --- budgets ---

    def create_budget(self, name: str, epsilon, delta=0, adjacency: str = "replace-one") -> Budget:
        """A new budget for the data set `name`; makes the file (mode 0600) when there is none."""
        grant = Amounts(amounts.written(epsilon, "epsilon"), amounts.written(delta, "delta"))
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise LedgerError(f"budget: found the name {name!r}; give a printable one")
        if adjacency not in ADJACENCIES:
            raise LedgerError(f"adjacency: found {adjacency!r}; the budget is for one of {', '.join(ADJACENCIES)}")
        self._require_grant(grant, grant)
        if not os.path.lexists(self.path):
            self._create_file()
        with self._transaction(write=True) as db:
            if db.execute("SELECT 1 FROM budgets WHERE name = ?", (name,)).fetchone():
                raise LedgerError(
                    f"budget {name!r}: {self.path} has it already; add to it with 'certdp budget add' or take another "
                    "name for another data set"
                )
            self._insert(db, "budgets", name=name, adjacency=adjacency)
            self._grant(db, name, grant, "created")
            return self._budget(db, name)

    def add(self, name: str, epsilon, delta=0, *, reason: str) -> Budget:
        """Enlarge a budget; the reason is kept beside the amounts. Nothing can be taken away again."""
        grant = Amounts(amounts.written(epsilon, "epsilon"), amounts.written(delta, "delta"))
        if not isinstance(reason, str) or not reason.strip():
            raise LedgerError("reason: found none; say why the records may give away more than was decided")
        with self._transaction(write=True) as db:
            before = self._budget(db, name).granted
            self._require_grant(
                grant, Amounts(*(amounts.total([(a, 1), (b, 1)]) for a, b in zip(before, grant, strict=True)))
            )
            self._grant(db, name, grant, reason)
            return self._budget(db, name)

    def budget(self, name: str) -> Budget:
        with self._transaction() as db:
            return self._budget(db, name)

    def remaining(self, name: str) -> Amounts:
        """What is left, exactly."""
        return self.budget(name).left

    def budgets(self) -> list[Budget]:
        with self._transaction() as db:
            names = db.execute("SELECT name FROM budgets ORDER BY rowid").fetchall()
            return [self._budget(db, name) for (name,) in names]

    def grants(self, name: str) -> list[Grant]:
        with self._transaction() as db:
            self._budget(db, name)
            rows = self._rows(db, "grants", "WHERE budget = ?", name)
            return [Grant(Decimal(r["epsilon"]), Decimal(r["delta"]), r["reason"], r["day"]) for r in rows]

    def entries(self, name: str) -> list[Entry]:
        """All costs, in the order in which they were reserved."""
        with self._transaction() as db:
            self._budget(db, name)
            return [
                Entry(
                    r["id"], r["query_key"], Decimal(r["epsilon"]), Decimal(r["delta"]), r["description"], r["state"],
                    None if r["answer"] is None else json.loads(r["answer"]), r["day"],
                )
                for r in self._rows(db, "entries", "WHERE budget = ?", name)
            ]  # fmt: skip

    def export(self) -> dict:
        """Budgets, costs and released answers as JSON values (docs/ledger.md); no secret, keys, tokens, processes."""
        with self._transaction() as db:
            found = [
                {
                    "name": budget.name,
                    "adjacency": budget.adjacency,
                    **{part: _json_amounts(getattr(budget, part)) for part in ("granted", "spent", "left")},
                    "grants": [
                        {key: r[key] for key in ("epsilon", "delta", "reason", "day")}
                        for r in self._rows(db, "grants", "WHERE budget = ?", budget.name)
                    ],
                    "entries": [
                        {key: r[key] for key in ("id", "epsilon", "delta", "description", "day", "state")}
                        | {"answer": None if r["answer"] is None else json.loads(r["answer"])}
                        for r in self._rows(db, "entries", "WHERE budget = ?", budget.name)
                    ],
                }
                for budget in (self._budget(db, n) for (n,) in db.execute("SELECT name FROM budgets ORDER BY rowid"))
            ]
        return {"certdp_ledger": EXPORT_VERSION, "composition": "basic", "budgets": found}

    # --- releases ---

    def key(self, **facts) -> str:
        """The key of a query: an HMAC, under the file's secret, of everything that decides the answer's law.

        facts: JSON values, digests of arrays among them. Two queries with the same key get the same answer.
        """
        try:
            text = json.dumps(facts, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise LedgerError(f"key: found a fact that JSON cannot hold ({error}); give text or numbers") from None
        with self._transaction() as db:
            return _hmac(self._read_secret(db), "key", text)

    def answer(self, name: str, query_key: str) -> Stored | None:
        """The stored answer, if there is one; costs nothing and writes nothing."""
        with self._transaction() as db:
            self._budget(db, name)
            found = self._stored(db, name, [query_key])
        return Stored(found[query_key]) if found else None

    def reserve(
        self, name: str, query_key: str, epsilon, delta, description: str, *, adjacency: str
    ) -> Reservation | Stored:
        """Phase 1: enter the cost, durably, before any noise is drawn; or return the stored answer for nothing.

        A query that another living process is answering is waited for. One that was reserved by a process that ended
        stays spent and is reserved anew. Answer a Reservation once, with `record`, or give it up with `abandon`.
        Raises BudgetExhaustedError, LedgerBusyError, LedgerError.
        """
        found: list[Reservation | Stored] = []
        for claim in self._claims(name, [query_key], epsilon, delta, description, adjacency):
            found += [*claim.mine.values(), *map(Stored, claim.stored.values())]
        return found[-1]

    def record(self, reservation: Reservation, answer) -> Any:
        """Phase 2: enter the answer, durably; returns what may now be shown.

        answer: finite numbers, text, lists and dicts (arrays become lists). What is returned is read back from what
        is stored; when somebody else's answer to the same query was stored first, it is that one.
        """
        return self._record([reservation], [answer])[0]

    def abandon(self, *reservations: Reservation) -> None:
        """Mark reservations as never to be answered. Their cost stays spent."""
        with self._transaction(write=True) as db:
            for reservation in reservations:
                self._settle(db, reservation, "abandoned", None)

    def spend(
        self,
        name: str,
        key: str,
        epsilon,
        delta,
        release: Callable[[], Any],
        *,
        adjacency: str,
        description: str = "",
    ) -> Any:
        """Both phases around `release()`, which draws the noise and returns the answer.

        It is not called when the answer is stored or the budget does not cover the cost. If it fails, or is killed,
        the cost stays spent and a later call pays again.
        """
        return self.spend_many(
            name, [key], epsilon, delta, lambda new: [release()], adjacency=adjacency, description=description
        )[0]

    def spend_many(
        self,
        name: str,
        keys: Sequence[str],
        epsilon,
        delta,
        release: Callable[[list[str]], Sequence],
        *,
        adjacency: str,
        description: str = "",
    ) -> list:
        """Answers to several queries, (epsilon, delta) for each distinct new one.

        All new ones are reserved in one transaction, or none when the budget does not cover them together.
        `release(new)` gets the keys to be answered and returns as many answers.
        """
        answers: dict[str, Any] = {}
        for claim in self._claims(name, list(dict.fromkeys(keys)), epsilon, delta, description, adjacency):
            answers |= claim.stored
            if claim.mine:
                answers |= self._release(claim.mine, release)
        return [answers[key] for key in keys]

    def _release(self, mine: dict[str, Reservation], release) -> dict[str, Any]:
        try:
            drawn = list(release(list(mine)))
            if len(drawn) != len(mine):
                raise LedgerError(f"release: found {len(drawn)} answers to {len(mine)} queries; return one for each")
            return dict(zip(mine, self._record(list(mine.values()), drawn), strict=True))
        except BaseException:
            with suppress(LedgerError):
                self.abandon(*(r for r in mine.values() if r.pid == os.getpid()))
            raise

    def _claims(self, name, keys, epsilon, delta, description, adjacency) -> Iterator[_Claim]:
        """Claims until no key is waited for; the caller answers what is its own before the next one."""
        cost = Amounts(amounts.cost(epsilon, "epsilon"), amounts.cost(delta, "delta"))
        if not any(cost):
            raise LedgerError("cost: found epsilon = 0 and delta = 0; a release from the records costs something")
        if cost.delta >= 1:
            raise LedgerError(f"delta: found {amounts.text(cost.delta)}; it must be below 1")
        if not all(isinstance(key, str) and key for key in keys) or not isinstance(description, str):
            raise LedgerError("query_key, description: found a value that is no text, or an empty key; give text")
        pending, insist, since, pause = keys, False, time.monotonic(), 0.005
        while pending:
            claim = self._claim(name, pending, cost, description, adjacency, insist)
            yield claim
            if claim.stored or claim.mine:
                since, pause = time.monotonic(), 0.005
            pending = list(claim.waiting)
            if pending and time.monotonic() - since > self.patience:
                if any(claim.waiting.values()):
                    raise LedgerBusyError(
                        f"budget {name!r}: a running process has not answered the same query for {self.patience:g} s; "
                        "nothing more was spent; wait for it, or end it and ask again"
                    )
                insist = True
            elif pending:
                time.sleep(pause)
                pause = min(2 * pause, 0.2)

    def _claim(self, name, keys, cost: Amounts, description, adjacency, insist: bool) -> _Claim:
        with self._transaction() as db:  # needs no lock for writing, so it works beside a full disk
            self._matching(db, name, adjacency)
            stored = self._stored(db, name, keys)
        if len(stored) == len(keys):
            return _Claim(stored, {}, {})
        with self._transaction(write=True) as db:
            budget = self._matching(db, name, adjacency)
            stored = self._stored(db, name, keys)
            waiting = {} if insist else self._waited_for(db, name, [key for key in keys if key not in stored])
            new = [key for key in keys if key not in stored and key not in waiting]
            asked = Amounts(*(amounts.total([(amount, len(new))]) for amount in cost))
            if not budget.left.covers(asked):
                raise BudgetExhaustedError(name, asked, budget)
            mine, owner = {}, _owner()
            for key in new:
                token = secrets.token_hex(16)
                values = {"budget": name, "query_key": key, **_json_amounts(cost), "description": description}
                number = self._insert(
                    db, "entries", **values, day=_day(), owner=owner, token=token, state="reserved", answer=None
                )
                mine[key] = Reservation(number, name, key, cost, token)
        return _Claim(stored, mine, waiting)

    def _record(self, reservations: list[Reservation], answers: list) -> list:
        texts = [_encode(answer) for answer in answers]
        with self._transaction(write=True) as db:
            shown = []
            for reservation, text in zip(reservations, texts, strict=True):
                first = self._stored(db, reservation.name, [reservation.query_key])
                if first:
                    text = json.dumps(first[reservation.query_key])
                changed = self._settle(db, reservation, *(("abandoned", None) if first else ("released", text)))
                if not changed:
                    raise LedgerError(
                        f"reservation {reservation.id} of budget {reservation.name!r}: {self.path} has it as answered, "
                        "abandoned, or not at all; a reservation is answered once, so ask again"
                    )
                shown.append(text)
        return [json.loads(text) for text in shown]

    def _settle(self, db, reservation: Reservation, state: str, answer: str | None) -> bool:
        """Move a reserved entry on; False when it is not there or is settled."""
        if reservation.pid != os.getpid():
            raise LedgerError(
                f"reservation {reservation.id}: it belongs to process {reservation.pid}, found process {os.getpid()}; "
                "let the process that reserved record the answer"
            )
        where = "WHERE id = ? AND budget = ? AND query_key = ? AND token = ? AND state = 'reserved'"
        who = (reservation.id, reservation.name, reservation.query_key, reservation.token)
        for row in self._rows(db, "entries", where, *who):
            sealed = {column: row[column] for column in _COLUMNS["entries"]} | {"state": state, "answer": answer}
            seal = self._seal(db, "entries", sealed)
            update = "UPDATE entries SET state = ?, answer = ?, seal = ? WHERE id = ?"
            db.execute(update, (state, answer, seal, row["id"]))
            return True
        return False

    # --- tables ---

    def _budget(self, db, name: str) -> Budget:
        row = db.execute("SELECT adjacency FROM budgets WHERE name = ?", (name,)).fetchone()
        if row is None:
            known = ", ".join(repr(n) for (n,) in db.execute("SELECT name FROM budgets ORDER BY rowid")) or "none"
            raise LedgerError(
                f"budget {name!r}: {self.path} has no such budget (it has {known}); "
                "give its name, or make it with 'certdp budget create'"
            )
        return Budget(name, row[0], self._sum(db, "grants", name), self._sum(db, "entries", name))

    def _matching(self, db, name: str, adjacency: str) -> Budget:
        budget = self._budget(db, name)
        if adjacency != budget.adjacency:
            raise LedgerError(
                f"adjacency: found a release for {adjacency!r}, but budget {name!r} counts {budget.adjacency!r}; costs "
                "under different adjacencies do not add up, so certify for the budget's adjacency"
            )
        return budget

    def _sum(self, db, table: str, name: str) -> Amounts:
        groups = f"SELECT epsilon, delta, COUNT(*) FROM {table} WHERE budget = ? GROUP BY epsilon, delta"
        rows = [(Decimal(e), Decimal(d), count) for e, d, count in db.execute(groups, (name,))]
        return Amounts(amounts.total((e, n) for e, _, n in rows), amounts.total((d, n) for _, d, n in rows))

    def _stored(self, db, name: str, keys: Sequence[str]) -> dict[str, Any]:
        query = "SELECT answer FROM entries WHERE budget = ? AND query_key = ? AND state = 'released'"
        rows = {key: db.execute(query, (name, key)).fetchone() for key in keys}
        return {key: json.loads(row[0]) for key, row in rows.items() if row}

    def _waited_for(self, db, name: str, keys: Sequence[str]) -> dict[str, bool]:
        query = "SELECT owner FROM entries WHERE budget = ? AND query_key = ? AND state = 'reserved'"
        waiting = {}
        for key in keys:
            alive = [_alive(owner) for (owner,) in db.execute(query, (name, key))]
            if any(state is not False for state in alive):
                waiting[key] = True in alive
        return waiting

    def _grant(self, db, name: str, grant: Amounts, reason: str) -> None:
        self._insert(db, "grants", budget=name, **_json_amounts(grant), reason=reason, day=_day())

    def _require_grant(self, grant: Amounts, granted: Amounts) -> None:
        if not any(grant):
            raise LedgerError("epsilon, delta: found 0 for both; a budget is an amount above 0")
        if granted.delta >= 1:
            raise LedgerError(f"delta: {amounts.text(granted.delta)} in all; a budget's delta must stay below 1")

    def _insert(self, db, table: str, **values) -> int:
        if "id" in _COLUMNS[table]:
            last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
            values = {"id": last[0] + 1 if last else 1, **values}
        values["seal"] = self._seal(db, table, values)
        marks = ", ".join("?" * len(values))
        return db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", (*values.values(),)).lastrowid

    def _rows(self, db, table: str, where: str = "", *values) -> list[dict]:
        columns = (*_COLUMNS[table], "seal")
        found = db.execute(f"SELECT {', '.join(columns)} FROM {table} {where} ORDER BY rowid", values)
        return [dict(zip(columns, row, strict=True)) for row in found]

    def _read_secret(self, db) -> bytes:
        return self._secret or bytes.fromhex(db.execute("SELECT value FROM secret").fetchone()[0])

    def _seal(self, db, table: str, values: dict) -> str:
        return _hmac(self._read_secret(db), f"seal {table}", json.dumps([values[c] for c in _COLUMNS[table]]))

    # --- the file ---

    def verify(self) -> None:
        """Check the whole file: structure, schema, seals, completeness, no budget overspent. Changes nothing."""
        with self._transaction() as db:
            finding = self._finding(db)
        if finding:
            raise LedgerError(f"{self.path}: the ledger is damaged ({finding}); {_RESTORE}")

    def _finding(self, db) -> str | None:
        """What is wrong, or None."""
        (sound,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if sound != "ok":
            return " ".join(sound.split())
        if db.execute("PRAGMA foreign_key_check").fetchone():
            return "an entry without its budget"
        if _schema_of(db) != _expected_schema():
            return "tables or triggers differ from this version's"
        try:
            self._secret = self._read_secret(db)
            for table in _COLUMNS:
                rows = self._rows(db, table)
                for row in rows:
                    if row["seal"] != self._seal(db, table, row):
                        return f"a row of {table} differs from its checksum"
                    if "epsilon" in row:
                        amounts.written(row["epsilon"], "epsilon"), amounts.written(row["delta"], "delta")
                last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
                if "id" in _COLUMNS[table] and [r["id"] for r in rows] != list(range(1, (last or (0,))[0] + 1)):
                    return f"rows of {table} are missing"
            for (name,) in db.execute("SELECT name FROM budgets").fetchall():
                if min(self._budget(db, name).left) < 0:
                    return f"budget {name!r} is overspent"
        except (TypeError, ValueError, ArithmeticError, PrivacyError):
            return "a value that cannot be read"
        return None

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            with closing(self._connect()) as db:
                db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    yield db
                    _commit(db)
                except BaseException:
                    with suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                    raise
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._explained(error) from error

    def _connect(self) -> sqlite3.Connection:
        if not self.path.is_file():
            raise LedgerError(f"{self.path}: found no such file; 'certdp budget create' makes a ledger")
        db = sqlite3.connect(f"{self.path.as_uri()}?mode=rw", uri=True, timeout=self.timeout, isolation_level=None)
        try:
            _set_up(db)
            found = [db.execute(f"PRAGMA {key}").fetchone()[0] for key in ("application_id", "user_version")]
            if found[0] != _APPLICATION:
                raise LedgerError(f"{self.path}: found a file that is no ledger; give the file that certdp made")
            if found[1] != _VERSION:
                raise LedgerError(
                    f"{self.path}: found a ledger of version {found[1]}, this certdp knows {_VERSION}; use the certdp "
                    "that wrote it"
                )
        except BaseException:
            db.close()
            raise
        return db

    def _create_file(self) -> None:
        """A complete empty ledger appears under the path at once, or not at all; an existing file is never touched."""
        try:
            prefix = f".{self.path.name[:100]}."
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=prefix, suffix=".tmp")
        except OSError as error:
            raise self._not_made(error) from error
        try:
            os.close(handle)
            with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode = MEMORY")
                db.execute(f"PRAGMA application_id = {_APPLICATION}")
                db.execute(f"PRAGMA user_version = {_VERSION}")
                db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
                db.execute("INSERT INTO secret VALUES (1, ?)", (secrets.token_hex(32),))
            _flush(temporary)
            with suppress(FileExistsError):  # another process was first
                os.link(temporary, self.path)
            _flush(self.path.parent)
        except sqlite3.Error as error:
            raise self._explained(error) from error
        except OSError as error:
            raise self._not_made(error) from error
        finally:
            with suppress(OSError):
                os.unlink(temporary)

    def _not_made(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"{self.path}: the ledger cannot be made ({error.strerror}); give a path in an existing folder that you "
            "may write to, on a local file system that has room"
        )

    def _explained(self, error: Exception) -> LedgerError:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LedgerBusyError(
                f"{self.path}: others have held the ledger for {self.timeout:g} s; nothing was shown; try again"
            )
        if code == sqlite3.SQLITE_FULL:
            found, remedy = "the disk is full", "nothing was shown; make room and ask again"
        elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN):
            found, remedy = "the file or its folder may not be written", "nothing was shown; allow writing both"
        elif code == sqlite3.SQLITE_IOERR:
            found, remedy = f"reading or writing failed: {error}", "nothing was shown; check the disk and ask again"
        elif code == sqlite3.SQLITE_CONSTRAINT:
            found, remedy = f"refused: {error}", "what is recorded stays as it is"
        elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or isinstance(error, UnicodeDecodeError):
            found, remedy = f"the file is damaged or no ledger: {error}", _RESTORE
        else:
            found, remedy = f"SQLite: {error}", "nothing was shown; check the file"
        return LedgerError(f"{self.path}: {found}; {remedy}")


def _commit(db: sqlite3.Connection) -> None:
    db.execute("COMMIT")


def _set_up(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = TRUNCATE")
    db.execute("PRAGMA synchronous = EXTRA")
    db.execute("PRAGMA foreign_keys = ON")


def _flush(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _schema_of(db) -> list:
    return db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name").fetchall()


def _expected_schema() -> list:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_SCHEMA)
        return _schema_of(db)


def _encode(answer) -> str:
    """JSON that gives every number back exactly."""

    def plain(value):
        if hasattr(value, "tolist"):  # numpy arrays and scalars
            return value.tolist()
        raise TypeError(f"{type(value).__name__} is no JSON value")

    try:
        return json.dumps(answer, allow_nan=False, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerError(
            f"answer: found a value that the ledger cannot hold ({error}), so it is not shown; "
            "return finite numbers, text, lists or dicts"
        ) from None


def _json_amounts(pair: Amounts) -> dict[str, str]:
    return {"epsilon": amounts.text(pair.epsilon), "delta": amounts.text(pair.delta)}


def _hmac(secret: bytes, purpose: str, message: str) -> str:
    return hmac.new(secret, f"{purpose}\n{message}".encode(), hashlib.sha256).hexdigest()


def _day() -> str:
    """Today (UTC). No finer: running times are private."""
    return time.strftime("%Y-%m-%d", time.gmtime())


# --- whose reservation is it? ---


def _owner() -> str:
    """This process: boot, process-id namespace, process id, start; empty parts where the system does not say."""
    return json.dumps([_text_of("/proc/sys/kernel/random/boot_id"), _namespace(), os.getpid(), _start(os.getpid())])


def _alive(owner: str) -> bool | None:
    """Whether the process `owner` runs; None when that cannot be known from here."""
    boot, namespace, pid, start = json.loads(owner)
    if not boot or not start:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None  # perhaps another machine's
        except OSError:
            pass
        return None if pid != os.getpid() else True
    if boot != _text_of("/proc/sys/kernel/random/boot_id"):
        return False
    if namespace != _namespace():
        return None
    return _start(pid) == start


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty when it does not run (or has ended unreaped)."""
    fields = _text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
