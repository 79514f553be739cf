"""Pointwise operators as expressions of Triton.

Between operators, floating-point values are held in float32, and values of float64 in float64: the roundings between a
model's operators are not repeated, except for explicit casts. Compilers fuse in the same way.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

# Takes the operator's arguments in the order of its schema, as text, with constants as Python values.
Write = Callable[..., str]


class NoTileFunctionError(Exception):
    """The operator has no form for tiles; the text says which operator, and why."""


def held_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tile holds values of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def triton_type(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in Triton. Raises NoTileFunctionError for complex and quantised types."""
    if dtype not in _TYPES:
        raise NoTileFunctionError(f"values of type {dtype}")
    return f"tl.{_TYPES[dtype]}"


def cast(value: str, held: torch.dtype, wanted: torch.dtype) -> str:
    """Return the expression `value`, of type `held`, rounded to `wanted` and converted to `held_type(wanted)`."""
    if wanted == torch.bool:
        return f"({value} != 0)"
    if held == wanted:
        return value
    if held != torch.float32 and held_type(wanted) != wanted:
        value = f"{value}.to(tl.float32)"  # as torch does; the interpreter rounds to bfloat16 from there alone
    rounded = f"{value}.to({triton_type(wanted)})"
    return rounded if held_type(wanted) == wanted else f"{rounded}.to({triton_type(held_type(wanted))})"


def write_operator(operator: Any, arguments: Sequence[str | float | bool | None], held: torch.dtype) -> str:
    """Return the expression of `operator` on values held as `held`. A string argument names a value or a mode.

    Raises NoTileFunctionError for operators and arguments that are not supported.
    """
    write = _WRITERS_BY_KIND.get((operator, _kind(held))) or _WRITERS.get(operator)
    if write is None:
        raise NoTileFunctionError(f"{operator}")
    for argument in arguments:
        if type(argument) is not int or _kind(held) != "integer":
            continue
        if not torch.iinfo(held).min <= argument <= torch.iinfo(held).max:
            # Torch wraps the number around, and Triton does not compile it.
            raise NoTileFunctionError(f"{operator} with {argument}, which is out of range for {held}")
    return write(*arguments)


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "truth"
    return "number" if dtype.is_floating_point else "integer"


def literal(value: str | float | bool | None) -> str:
    """Return a constant as Triton reads it; text is the name of a value already."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _template(text: str) -> Write:
    count = len({name for _, name, _, _ in string.Formatter().parse(text) if name}) or text.count("{}")

    def write(*values: Any) -> str:
        if len(values) != count:
            raise TypeError(f"{text} takes {count} arguments, not {len(values)}")
        return text.format(*map(literal, values))

    return write


def _operator(symbol: str) -> Write:
    return _template(f"({{}} {symbol} {{}})")


def _scaled(symbol: str) -> Write:
    """Return a writer of `left` plus or minus `alpha` times `right`."""

    def write(left: Any, right: Any, alpha: Any = 1) -> str:
        scaled = literal(right) if alpha == 1 else f"{literal(alpha)} * {literal(right)}"
        return f"({literal(left)} {symbol} {scaled})"

    return write


_larger = _template("tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)")
_smaller = _template("tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)")


def _clamp(value: Any, least: Any = None, most: Any = None) -> str:
    if least is not None:
        value = _larger(value, least)
    return literal(value) if most is None else _smaller(value, most)


def _tanh(value: Any) -> str:
    # 1 - 2 / (e^2x + 1) loses digits of a small x; there the series is exact in float32.
    x = literal(value)
    series = f"{x} * (1 - {x} * {x} * (1 / 3 - {x} * {x} * (2 / 15 - {x} * {x} * (17 / 315))))"
    return f"tl.where(tl.abs({x}) < 0.125, {series}, 1 - 2 / (tl.exp(2 * {x}) + 1))"


def _gelu(value: Any, approximate: Any = "none") -> str:
    x = literal(value)
    if approximate == "tanh":
        # 1 + tanh(y) = 2 * sigmoid(2 * y)
        return f"({x} * tl.sigmoid({2 * math.sqrt(2 / math.pi)} * ({x} + 0.044715 * {x} * {x} * {x})))"
    return f"(0.5 * {x} * (1 + tl.erf({x} * {math.sqrt(0.5)})))"


def _log1p(value: Any) -> str:
    # 1 + x loses digits of a small x; the ratio of x to (1 + x) - 1 restores them.
    x = literal(value)
    ratio = f"tl.where(1 + {x} == 1, {x}, tl.log(1 + {x}) * ({x} / ((1 + {x}) - 1)))"
    return f"tl.where(tl.abs({x}) < 0.5, {ratio}, tl.log(1 + {x}))"


def _softplus(value: Any, beta: Any = 1, threshold: Any = 20) -> str:
    x, scaled = literal(value), f"({literal(value)} * {literal(beta)})"
    small = _log1p(f"tl.exp({scaled})")
    return f"tl.where({scaled} > {literal(threshold)}, {x}, {small} / {literal(beta)})"


def _power(value: Any, exponent: Any) -> str:
    x = literal(value)
    expressions = {
        1: x,
        2: f"({x} * {x})",
        3: f"({x} * {x} * {x})",
        0.5: f"tl.sqrt({x})",
        -0.5: f"tl.rsqrt({x})",
        -1: f"(1 / {x})",
    }
    if exponent not in expressions:
        raise NoTileFunctionError(f"aten.pow to {exponent}")
    return expressions[exponent]


def _leaky_relu(value: Any, slope: Any = 0.01) -> str:
    return f"tl.where({literal(value)} > 0, {literal(value)}, {literal(value)} * {literal(slope)})"


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_TYPES = {**{dtype: str(dtype).removeprefix("torch.") for dtype in (*_FLOATS, *_INTEGERS)}, torch.bool: "int1"}
# Comparisons, which compare in the type of their operands, not in the type of the result.
COMPARISONS: dict[Any, str] = {
    getattr(getattr(aten, name), overload): symbol
    for name, symbol in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
    for overload in ("Tensor", "Scalar")
}
# Selections by a condition, which is their first argument.
CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
_WRITERS: dict[Any, Write] = {
    **{operator: _operator(symbol) for operator, symbol in COMPARISONS.items()},
    # Functions of the same name in Triton.
    **{
        getattr(aten, name).default: _template(f"tl.{name}({{}})")
        for name in ("abs", "sqrt", "rsqrt", "exp", "exp2", "log", "erf", "sigmoid")
    },
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _scaled("+")),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _scaled("-")),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _operator("*")),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _operator("/")),
    **dict.fromkeys((aten.maximum.default, aten.clamp_min.default), _larger),
    **dict.fromkeys((aten.minimum.default, aten.clamp_max.default), _smaller),
    **dict.fromkeys((aten.clamp.default, aten.hardtanh.default), _clamp),
    **dict.fromkeys(CHOICES, _template("tl.where({}, {}, {})")),
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor), _operator("&")),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor), _operator("|")),
    aten.logical_not.default: _template("({} == 0)"),
    aten.neg.default: _template("(-{})"),
    aten.square.default: _template("({0} * {0})"),
    aten.reciprocal.default: _template("(1 / {})"),
    aten.log1p.default: _log1p,
    aten.tanh.default: _tanh,
    aten.silu.default: _template("({0} * tl.sigmoid({0}))"),
    aten.gelu.default: _gelu,
    aten.relu.default: _template("tl.where({0} < 0, 0, {0})"),
    aten.leaky_relu.default: _leaky_relu,
    aten.softplus.default: _softplus,
    aten.pow.Tensor_Scalar: _power,
    aten.clone.default: lambda value, memory_format=None: literal(value),
    aten.alias.default: literal,
}
# Operators that need another expression for one kind of values. Triton negates as 0 - x, which gives 0 and not -0 for
# 0, and its sum of two booleans is their exclusive or.
_WRITERS_BY_KIND: dict[tuple[Any, str], Write] = {
    (aten.neg.default, "number"): _template("({} * -1)"),
    (aten.add.Tensor, "truth"): lambda left, right, alpha=1: _operator("|")(left, right),
}
