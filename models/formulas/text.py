"""Evaluation of expressions in plans, which are stored as text, without executing code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping

from moepass.models.errors import InputError, one_of

_MAX_DIGITS_OF_A_POWER = 4096
_SHOWN_LETTERS = 120


def _power(base: float, exponent: float) -> float:
    # Integer powers are exact, but one that would fill the memory cannot be a size.
    if isinstance(base, int) and abs(base) > 1 and exponent * math.log10(abs(base)) > _MAX_DIGITS_OF_A_POWER:
        raise OverflowError(f"{base}**{exponent} is too large")
    return float(base**exponent) if isinstance(base, float) else base**exponent


_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
# Names as SymPy and torch write them.
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "Min": min,
    "Max": max,
    "floor": math.floor,
    "ceiling": math.ceil,
    "sqrt": math.sqrt,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "CeilDiv": lambda value, divisor: -(-value // divisor),
}


def evaluate_text(text: str, sizes: Mapping[str, float]) -> float:
    """Return the number of an expression of sizes, an int if it is one. Raises InputError for any other text."""
    try:
        number = sum(sign * _value(ast.parse(term, mode="eval").body, sizes) for sign, term in _terms(text))
    except InputError as error:
        raise InputError(f"{_shortened(text)}: {error}", name=error.name, value=text) from error
    except (SyntaxError, ArithmeticError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{_shortened(text)} is not an expression of sizes: {error}", value=text) from error
    if isinstance(number, complex) or not math.isfinite(number):
        raise InputError(f"{_shortened(text)} is {number}, which is not a valid size", value=number)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _terms(text: str) -> Iterator[tuple[int, str]]:
    """Yield the terms of a sum with their signs, so that no sum is too long for the parser."""
    depth, begin, sign = 0, 0, 1
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and text[index : index + 3] in (" + ", " - "):
            yield sign, text[begin:index]
            begin, sign = index + 3, 1 if text[index + 1] == "+" else -1
    yield sign, text[begin:]


def _shortened(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_LETTERS else text[:_SHOWN_LETTERS] + "...")


def _value(node: ast.expr, sizes: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in sizes:
            text = f"{node.id} has no value; there are values for {one_of(sizes) or 'no names'}"
            raise InputError(text, name=node.id, expected=tuple(sizes))
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_value(argument, sizes) for argument in node.args))
    raise InputError(f"this is not an expression of sizes: {ast.unparse(node)} is not arithmetic")
