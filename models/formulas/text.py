"""Numbers from expressions that were written down as text: what a plan holds, read without evaluating code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

from moepass.models.errors import InputError, one_of

_MAX_DIGITS_OF_A_POWER = 4096


def _power(base: float, exponent: float) -> float:
    # Whole powers are exact; one that would fill the memory is no size of anything.
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
# As SymPy and torch write them.
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
    """The number that an expression of sizes by name stands for; an int where it is whole.

    Raises InputError where a size is missing, or `text` is anything but arithmetic.
    """
    try:
        number = _value(ast.parse(text, mode="eval").body, text, sizes)
    except InputError:
        raise
    except (SyntaxError, ArithmeticError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{text!r} is no expression of sizes: {error}") from error
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _value(node: ast.expr, text: str, sizes: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in sizes:
            raise InputError(f"no value was given for {node.id} of {text!r}; given are {one_of(sizes) or 'none'}")
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, text, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        # A sum of many terms nests on the left as deep as it has terms.
        nested = [node]
        while isinstance(nested[-1].left, ast.BinOp) and type(nested[-1].left.op) in _OPERATORS:
            nested.append(nested[-1].left)
        number = _value(nested[-1].left, text, sizes)
        for part in reversed(nested):
            number = _OPERATORS[type(part.op)](number, _value(part.right, text, sizes))
        return number
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_value(argument, text, sizes) for argument in node.args))
    raise InputError(f"{text!r} is no expression of sizes: {ast.unparse(node)} is not arithmetic")
