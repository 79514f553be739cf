"""Sizes in formulas: numbers or SymPy expressions."""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy

from moepass.models.errors import InputError, one_of

# An int, or a sympy.Expr (untyped here, so that arithmetic on both stays readable).
Size: TypeAlias = Any

# Sequences in a step, tokens of each sequence, their product, and the ranks that share a bank.
batch, sequence, tokens, ranks = sympy.symbols("batch sequence tokens ranks", integer=True, positive=True)


def smaller(left: Size, right: Size) -> Size:
    """Return the smaller of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right)
    return sympy.Min(left, right)


def divided(value: Size, divisor: Size) -> Size:
    """Return `value` over `divisor`, as an integer if both are and it divides evenly."""
    if isinstance(value, int) and isinstance(divisor, int):
        return value // divisor if value % divisor == 0 else value / divisor
    return value / divisor


def whole_parts(value: Size, part: Size) -> Size:
    """Return how many times `part` fits into `value`."""
    if isinstance(value, int) and isinstance(part, int):
        return value // part
    return sympy.floor(value / sympy.sympify(part))


def evaluate(expression: Size, **values: float) -> float:
    """Return the number of `expression` for `values` of its symbols by name, as an int if it is one.

    Raises InputError if a symbol has no value. Values for other symbols are ignored.
    """
    expression = sympy.sympify(expression)
    missing = {symbol.name for symbol in expression.free_symbols} - values.keys()
    if missing:
        raise InputError(f"no value was given for {one_of(missing)} of {expression}", value=sorted(missing))
    number = expression.subs({symbol: values[symbol.name] for symbol in expression.free_symbols})
    return int(number) if number.is_Integer else float(number)
