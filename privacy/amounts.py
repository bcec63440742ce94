"""Exact decimal amounts of epsilon and delta, and their passage to and from binary floats.

Two readings of a float, because they answer different questions:

* `written(0.1)` is 0.1, the decimal a person wrote: for budgets, and for costs whose mechanism is then run at
  `float_down` of the amount;
* `cost(0.1)` is 0.10000000000000000556, not below the binary number: for a mechanism that has used the float.

Formal guarantees (a test of the same name checks each):

* Sums and products of amounts are exact or an error.
* A cost is never below the number it was given as.
* float_down is the largest float not above the amount, float_up the smallest not below.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real

from certify.errors import PrivacyError

__all__ = ["QUANTUM", "LARGEST", "cost", "float_down", "float_up", "subtract", "text", "total", "written"]

#: Every amount is a multiple of this and below LARGEST.
QUANTUM = Decimal("1e-40")
LARGEST = Decimal("1e12")
_DIGITS_OF_A_COST = 20  # significant digits to which the cost of a float is rounded up; a float has 17
_EXACT = decimal.Context(
    prec=150, Emax=999, Emin=-999, traps=[decimal.Inexact, decimal.InvalidOperation, decimal.Overflow]
)


def written(value: Decimal | str | int | float, where: str) -> Decimal:
    """The decimal that `value` is written as; a float stands for its shortest decimal. `where` names the field.

    Raises PrivacyError for what is no number, negative, too large, or finer than 1e-40.
    """
    if isinstance(value, Real) and not isinstance(value, Rational):
        value = repr(float(value))
    return _decimal(value, where)


def cost(value: Decimal | str | int | float, where: str) -> Decimal:
    """A decimal not below `value`: the same for text, Decimal and integers, rounded up for binary floats.

    The cost of a float exceeds it by a factor below 1 + 1e-19 (or by less than 1e-40). Raises PrivacyError.
    """
    if not isinstance(value, Real) or isinstance(value, Rational):
        return _decimal(value, where)
    value = float(value)
    if not math.isfinite(value) or value < 0.0:
        return _decimal(repr(value), where)
    exact, short = Decimal(value), Decimal(repr(value))
    if short < exact or short.adjusted() - len(short.as_tuple().digits) < -40:
        step = max(exact.adjusted() - _DIGITS_OF_A_COST + 1, -40) if value else -40
        short = exact.quantize(Decimal((0, (1,), step)), decimal.ROUND_CEILING, decimal.Context(prec=1200, Emin=-1200))
    return _decimal(short, where)


def _decimal(value, where: str) -> Decimal:
    accepted = "give a decimal such as 0.1 or '1e-6', of at least 0, below 1e12 and a multiple of 1e-40"
    if isinstance(value, bool) or not isinstance(value, Decimal | str | Integral):
        raise PrivacyError(f"{where}: found {value!r} of type {type(value).__name__}; {accepted}")
    try:
        exact = Decimal(int(value) if isinstance(value, Integral) else value)
        fine = exact.is_finite() and exact >= 0 and (exact == 0 or exact.adjusted() < LARGEST.adjusted())
        # quantize traps Inexact: a finer amount is refused
        return _stripped(_EXACT.quantize(exact, QUANTUM)) if fine else _refuse(value, where, accepted)
    except (decimal.DecimalException, ValueError):
        _refuse(value, where, accepted)


def _refuse(value, where: str, accepted: str):
    raise PrivacyError(f"{where}: found {value!s:.60}; {accepted}") from None


def _stripped(amount: Decimal) -> Decimal:
    return _EXACT.normalize(amount) if amount else Decimal(0)


def total(amounts: Iterable[tuple[Decimal, int]]) -> Decimal:
    """Exact sum of amount times count."""
    result = Decimal(0)
    for amount, count in amounts:
        result = _EXACT.add(result, _EXACT.multiply(amount, Decimal(count)))
    return _stripped(result)


def subtract(a: Decimal, b: Decimal) -> Decimal:
    """Exact a - b."""
    return _stripped(_EXACT.subtract(a, b))


def text(amount: Decimal) -> str:
    """The shortest plain text of an amount; reading it back gives the amount."""
    amount = _stripped(amount)
    return format(amount, "f") if amount.adjusted() >= -6 else str(amount).replace("E", "e")


def float_down(amount: Decimal) -> float:
    """The largest float not above `amount`."""
    near = float(amount)
    return math.nextafter(near, -math.inf) if Fraction(near) > Fraction(amount) else near


def float_up(amount: Decimal) -> float:
    """The smallest float not below `amount`."""
    near = float(amount)
    return math.nextafter(near, math.inf) if Fraction(near) < Fraction(amount) else near
