"""Sizes in formulas: numbers or SymPy expressions."""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy

# An int, or a sympy.Expr (untyped here, so that arithmetic on both stays readable).
Size: TypeAlias = Any


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
