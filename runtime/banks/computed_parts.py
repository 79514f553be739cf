"""Computation of bank tensors from parameters, by recipes, for this rank's experts."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

import torch

from moepass.models.errors import InputError
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.weight_recipe import RECIPE_OPERATIONS, WeightRecipe


def computed_part(recipe: WeightRecipe, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor [own experts, ..] that `recipe` computes from `parameters`, all parameters of its bank.

    Raises InputError for an operator that recipes may not use.
    """
    values: list[Any] = [parameters[position].detach() for position in recipe.inputs]
    calls = [json.loads(step) for step in recipe.steps]
    first = len(values)
    last_reader: dict[int, int] = {}
    for number, call in enumerate(calls):
        last_reader.update((used, number) for used in _values_in([call["args"], *call["kwargs"].values()]))
    with torch.no_grad():
        for number, call in enumerate(calls):
            args = _read(call["args"], values)
            kwargs = {name: _read(value, values) for name, value in call["kwargs"].items()}
            values.append(_operator(call["operator"])(*args, **kwargs))
            del args, kwargs
            for used in [used for used, reader in last_reader.items() if reader == number and used < first + number]:
                values[used] = None  # converted weights of all experts may be large
    result = values[-1]
    assert isinstance(result, torch.Tensor)
    return result


def computed_parts(bank: BankSpec, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that the recipes of `bank` compute, in their order."""
    return [computed_part(recipe, parameters) for recipe in bank.recipes]


def _operator(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    library, base, variant = (*name.split("."), "", "")[:3]
    overload = None
    if library in ("aten", "prims") and base in RECIPE_OPERATIONS:
        overload = getattr(getattr(getattr(torch.ops, library), base), variant, None)
    if not isinstance(overload, torch._ops.OpOverload) or overload._schema.is_mutable:
        text = f"a recipe computes weights by {name!r}; recipes may use {', '.join(sorted(RECIPE_OPERATIONS))}"
        raise InputError(text, name="operator", value=name, expected=sorted(RECIPE_OPERATIONS))
    return overload


def _read(argument: Any, values: Sequence[Any]) -> Any:
    if isinstance(argument, list):
        return [_read(item, values) for item in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, value),) = argument.items()
    return values[value] if kind == "value" else getattr(torch, value)


def _values_in(argument: Any) -> list[int]:
    if isinstance(argument, list):
        return [index for item in argument for index in _values_in(item)]
    return [argument["value"]] if isinstance(argument, dict) and "value" in argument else []
