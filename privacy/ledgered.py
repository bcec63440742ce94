"""Private predictions paid from a ledger: answered inputs are returned for nothing, new ones are paid for first.

Formal guarantees (tests of the same names):

* New inputs are paid for before any noise is drawn, and every value that is returned is in the ledger.
* Answered inputs cost nothing and keep their answers, whatever they are asked together with.
* The mechanism runs at floats that are not above the exact decimals that are paid.
* A mistake that public facts show (a wrong noise family, a range, an unsuitable envelope) costs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from certify.envelope import Envelope, content_digest
from certify.errors import PrivacyError
from privacy import amounts
from privacy.ledger import Amounts, Ledger, LedgerError
from privacy.query import Query, predict

__all__ = ["LedgeredGuarantee", "LedgeredRelease", "paid", "predict_with_ledger", "release_from"]


@dataclass(frozen=True)
class LedgeredGuarantee:
    """What the answers of one call cost; public facts only.

    (epsilon, delta): of all answers in this call together, those paid for earlier included, rounded up.
    (epsilon_per_release, delta_per_release, releases, grid, dimension, mechanism): as in `privacy.agtr.Guarantee`.
    new, repeated: distinct inputs paid for by this call, and answered before. *_spent: exact decimals, by this call;
    *_left: of the budget, after it.
    """

    epsilon: float
    delta: float
    adjacency: str
    mechanism: str
    epsilon_per_release: float
    delta_per_release: float
    releases: int
    grid: tuple[float, ...]
    dimension: int
    budget: str
    new: int
    repeated: int
    epsilon_spent: str
    delta_spent: str
    epsilon_left: str
    delta_left: str

    @property
    def note(self) -> str:
        """For people: what this call paid, and what is left."""
        paid = f"epsilon = {self.epsilon_spent}" + (f", delta = {self.delta_spent}" if self.delta_spent != "0" else "")
        left = f"epsilon = {self.epsilon_left}" + (f", delta = {self.delta_left}" if self.delta_left != "0" else "")
        return (
            f"{self.new} new inputs paid {paid} from budget {self.budget!r}, {self.repeated} were answered before; "
            f"{left} is left. The same inputs again cost nothing."
        )


@dataclass(frozen=True, eq=False)
class LedgeredRelease:
    """Private predictions, safe to publish: `values` float64 (rows, outputs) in target units."""

    values: np.ndarray
    guarantee: LedgeredGuarantee


def predict_with_ledger(
    ledger: Ledger,
    name: str,
    envelope: Envelope,
    model,
    features: np.ndarray,
    epsilon,
    delta=0,
    *,
    per_query: bool = True,
    output_range: tuple | None = None,
    **options,
) -> LedgeredRelease:
    """`privacy.query.predict` at public inputs `features` (M, F), paid from the budget `name`.

    model: the Graph or a Query. epsilon, delta: as exact decimals (a float is the decimal it is written as); the cost
    of each distinct new input, or, with `per_query=False`, of the whole set of distinct inputs, which is then answered
    and repeated only as a set. All new inputs are paid for together; if the budget does not cover them, none is.

    options: what else `predict` takes (family, betas, joint). An input is the same when envelope, model, range,
    prepared row, (epsilon, delta) and options are.
    Raises BudgetExhaustedError and the other LedgerErrors, and what `predict` raises. What `predict` refuses because
    of the records is found after paying, so it stays paid.
    """
    query = model if isinstance(model, Query) else Query.make(envelope, model, output_range)
    cost = Amounts(amounts.written(epsilon, "epsilon"), amounts.written(delta, "delta"))
    run = amounts.float_down(cost.epsilon), amounts.float_down(cost.delta)
    features = np.asarray(features)
    if not features.size:
        raise PrivacyError("queries: found no row; give a nonempty table")
    rows, first, inverse = _distinct(query.prepare(features))
    options = {key: value for key, value in options.items() if value is not None}
    _rehearse(envelope, query, features[first[:1] if per_query else first], run, per_query, options)

    groups = [[i] for i in range(len(rows))] if per_query else [list(range(len(rows)))]
    facts = {
        "kind": "agt-r prediction",
        "envelope": content_digest(envelope),
        "model": _fingerprint(query.graph, query.output_range),
        "cost": list(map(amounts.text, cost)),
        "options": _fingerprint(options),
    }
    keys = [ledger.key(**facts, rows=_fingerprint(rows[group])) for group in groups]
    members = dict(zip(keys, groups, strict=True))
    paid: list[str] = []

    def release(new: list[str]) -> list[dict]:
        paid.extend(new)
        asked = features[first[[i for key in new for i in members[key]]]]
        drawn = predict(envelope, query, asked, *run, per_query=per_query, **options)
        guarantee = drawn.guarantee
        if Fraction(guarantee.epsilon) > Fraction(cost.epsilon) * len(new) * Fraction(1 + 2.0**-50):
            raise LedgerError(
                f"release: it cost epsilon = {guarantee.epsilon!r}, but {len(new)} x {amounts.text(cost.epsilon)} was "
                "reserved; nothing is shown, report this"
            )
        about = {
            "mechanism": guarantee.mechanism,
            "epsilon_per_release": guarantee.epsilon_per_release,
            "delta_per_release": guarantee.delta_per_release,
            "releases": guarantee.releases // len(new),
            "grid": list(guarantee.grid),
            "dimension": guarantee.dimension,
        }
        parts = np.split(drawn.values, np.cumsum([len(members[key]) for key in new])[:-1])
        return [{"values": part.tolist(), **about} for part in parts]

    answers = ledger.spend_many(
        name, keys, cost.epsilon, cost.delta, release,
        adjacency=envelope.metadata.adjacency,
        description=f"prediction at {'one input' if per_query else f'{len(rows)} inputs'}, "
        f"{query.graph.outputs} outputs, noise {options.get('family', 'by public rule')}",
    )  # fmt: skip
    values = np.array([row for answer in answers for row in answer["values"]], np.float64)
    spent = Amounts(*(amounts.total([(part, len(paid))]) for part in cost))
    worth = Amounts(*(amounts.total([(part, len(groups))]) for part in cost))
    left = ledger.remaining(name)
    guarantee = LedgeredGuarantee(
        amounts.float_up(worth.epsilon),
        amounts.float_up(worth.delta),
        envelope.metadata.adjacency,
        "; ".join(sorted({answer["mechanism"] for answer in answers})),
        max(answer["epsilon_per_release"] for answer in answers),
        max(answer["delta_per_release"] for answer in answers),
        sum(answer["releases"] for answer in answers),
        tuple(answers[0]["grid"]),
        answers[0]["dimension"],
        name,
        sum(len(members[key]) for key in paid),
        len(rows) - sum(len(members[key]) for key in paid),
        *map(amounts.text, (*spent, *left)),
    )
    return LedgeredRelease(values[inverse], guarantee)


def release_from(
    ledger: str | Path | None, name: str | None, envelope: Envelope, model, features, epsilon, delta=0, **options
):
    """`predict_with_ledger` from the file `ledger`, or plain `predict` when neither ledger nor budget is named.

    For the command: both results have `values` and `guarantee`; a LedgeredGuarantee also has a `note`.
    """
    if ledger is None and name is None:
        return predict(envelope, model, features, float(epsilon), float(delta), **options)
    if ledger is None or name is None:
        raise LedgerError("ledger, budget: found one without the other; name the ledger file and the budget in it")
    return predict_with_ledger(Ledger(ledger), name, envelope, model, features, epsilon, delta, **options)


def paid(
    ledger: str | Path | None,
    name: str | None,
    facts: Mapping,
    epsilons: Iterable[float],
    deltas: Iterable[float],
    adjacency: str,
    description: str,
    release: Callable[[], Any],
) -> Any:
    """The answer of `release()`, paid from the file `ledger` before it is called; plain when neither is named.

    `facts`: public JSON values that decide the answer's law; asked again with the same ones, the stored answer is
    returned for nothing.  `epsilons`, `deltas`: float costs, added up exactly and never rounded down.  The answer is
    a JSON value.  If `release` fails or is killed, its cost stays spent.
    """
    if ledger is None and name is None:
        return release()
    if ledger is None or name is None:
        raise LedgerError("ledger, budget: found one without the other; name the ledger file and the budget in it")
    book = Ledger(ledger)
    total = [amounts.total((amounts.cost(x, "cost"), 1) for x in costs) for costs in (epsilons, deltas)]
    return book.spend(name, book.key(**facts), *total, release, adjacency=adjacency, description=description)


def _distinct(prepared: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distinct rows, a position of each, the distinct row of every position), as in `predict`."""
    prepared = np.asarray(prepared, np.float64) + 0.0  # -0.0 becomes 0.0: the same input
    if not np.all(np.isfinite(prepared)):
        raise PrivacyError("queries: found a value that is not finite; give a finite table")
    rows, first, inverse = np.unique(prepared, axis=0, return_index=True, return_inverse=True)
    return rows, first, inverse.reshape(-1)


def _rehearse(envelope: Envelope, query: Query, features: np.ndarray, run, per_query: bool, options: dict) -> None:
    """`predict` on boxes of zeros, which hold nothing of the records: what it refuses there costs nothing."""
    auto = envelope.metadata.auto
    if auto is not None and "betas" in options:
        raise PrivacyError("betas: the envelope's radii were chosen for its own betas; leave betas out")
    zeros = {name: np.zeros(shape) for name, shape in envelope.parameters}
    boxes = {0: zeros, 1: zeros}
    blank = Envelope(replace(envelope.metadata, radii=(0, 1), auto=None), zeros, boxes, boxes)
    if auto is not None:
        options = options | {"betas": tuple(np.atleast_1d(auto["beta"]).tolist())}
    predict(blank, replace(query, envelope=blank), features, *run, per_query=per_query, **options)


def _fingerprint(*parts) -> str:
    """SHA-256 of values made of dataclasses, arrays, containers, numbers and text."""
    digest = hashlib.sha256()

    def feed(value) -> None:
        if isinstance(value, np.ndarray):
            digest.update(json.dumps(["array", value.dtype.str, value.shape]).encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        elif is_dataclass(value):
            feed((type(value).__qualname__, *((f.name, getattr(value, f.name)) for f in fields(value))))
        elif isinstance(value, Mapping):
            feed(tuple((key, value[key]) for key in sorted(value, key=repr)))
        elif isinstance(value, (tuple, list)):
            digest.update(f"[{len(value)}".encode())
            for item in value:
                feed(item)
        elif value is None or isinstance(value, (str, bytes, bool, int, float, Decimal, np.generic)):
            digest.update(f"{type(value).__name__}:{value!r};".encode())
        else:
            raise LedgerError(f"model: found a {type(value).__name__} that has no digest; report this")

    feed(parts)
    return digest.hexdigest()
