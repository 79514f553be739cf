"""Compute this rank's part of bank tensors that recipes make of parameters."""

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
    """The part [own experts, ..] that `recipe` makes of `parameters`, all those of its bank.

    Raises InputError where a step is none of those that recipes may have.
    """
    values: list[Any] = [parameters[place].detach() for place in recipe.inputs]
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
    part = values[-1]
    assert isinstance(part, torch.Tensor)
    return part


def computed_parts(bank: BankSpec, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts that the recipes of `bank` make, in their order."""
    return [computed_part(recipe, parameters) for recipe in bank.recipes]


def _operator(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    library, base, variant = (*name.split("."), "", "")[:3]
    found = None
    if library in ("aten", "prims") and base in RECIPE_OPERATIONS:
        found = getattr(getattr(getattr(torch.ops, library), base), variant, None)
    if not isinstance(found, torch._ops.OpOverload) or found._schema.is_mutable:
        raise InputError(
            f"a recipe computes weights by {name!r}", name="operator", value=name, expected=sorted(RECIPE_OPERATIONS)
        )
    return found


def _read(argument: Any, values: Sequence[Any]) -> Any:
    if isinstance(argument, list):
        return [_read(part, values) for part in argument]
    if not isinstance(argument, dict):
        return argument
    ((kind, found),) = argument.items()
    return values[found] if kind == "value" else getattr(torch, found)


def _values_in(argument: Any) -> list[int]:
    if isinstance(argument, list):
        return [found for part in argument for found in _values_in(part)]
    return [argument["value"]] if isinstance(argument, dict) and "value" in argument else []
