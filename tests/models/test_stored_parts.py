"""Weights of quantised experts, in parts that decode from the tensors of the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.checkpoint.stored_parts import MatrixPart, bank_parts
from moepass.models.checkpoint.unread_tensors import unread
from moepass.models.checkpoint.weight_recipes import UnfollowedError
from moepass.models.layouts.layout import Role
from moepass.models.layouts.published import read_quantization
from tests.helpers.models.quantized_checkpoints import FORMS

EXPERTS, ROWS, COLUMNS = 3, 32, 64

Tensors = dict[str, torch.Tensor]


def _unread(form: str, folder: Path, **others: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Return the unread tensors of a checkpoint with matrices `0.a` to `2.b`, and the matrices that they decode to."""
    generator = torch.Generator().manual_seed(0)
    stored, expected = dict(others), {}
    for key in (f"{expert}.{name}.weight" for expert in range(EXPERTS) for name in "ab"):
        parts, matrix = FORMS[form].encode(torch.randn(ROWS, COLUMNS, generator=generator))
        expected[key] = matrix.bfloat16()
        for ending, tensor in parts.items():
            name = key.removesuffix("weight") + ending[1:] if ending.startswith("#") else key + ending
            stored[name] = tensor.contiguous()
    save_file(stored, folder / "model.safetensors")
    quantization = read_quantization(FORMS[form].config, "qwen3_moe", "")
    return unread(CheckpointFiles([folder / "model.safetensors"]), quantization), expected | others


def _decoded(parts: list[MatrixPart], shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    for part in parts:
        stored = {role: recipe.read() for role, recipe in part.stored.items()}
        values = stored[Role.VALUES] if part.formula is None else part.formula.decode(stored, torch.bfloat16)
        tensor.narrow(part.dim, part.start, part.stop - part.start).copy_(values)
    return tensor


def _stack(tensors: Tensors, name: str) -> torch.Tensor:
    return torch.stack([tensors[f"{expert}.{name}.weight"] for expert in range(EXPERTS)])


WRITINGS: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "stacked, then joined": lambda t: torch.cat([_stack(t, "a"), _stack(t, "b")], dim=1),
    "joined columns": lambda t: torch.cat([_stack(t, "a"), _stack(t, "b")], dim=2),
    "transposed": lambda t: torch.cat([_stack(t, "a"), _stack(t, "b")], dim=1).transpose(1, 2).contiguous(),
    "transposed, then joined": lambda t: torch.cat([_stack(t, "a").transpose(1, 2), _stack(t, "b").mT], dim=2),
    "joined three times": lambda t: torch.cat([_stack(t, "a"), torch.cat([_stack(t, "b"), _stack(t, "a")], 1)], 1),
    "some experts": lambda t: _stack(t, "b")[1:],
}


@pytest.mark.parametrize("form", ["fp8 blocks", "nvfp4", "int4 packed, zero points", "gptq, ordered by activations"])
@pytest.mark.parametrize("writing", WRITINGS)
def test_parts_decode_into_the_weight(form: str, writing: str, tmp_path: Path) -> None:
    tensors, matrices = _unread(form, tmp_path)
    weight, expected = WRITINGS[writing](tensors), WRITINGS[writing](matrices)
    parts = bank_parts({"weight": weight})
    assert parts is not None
    assert all(recipe.shape[0] == len(expected) for part in parts[0] for recipe in part.stored.values())
    assert torch.equal(_decoded(parts[0], tuple(expected.shape)), expected)


def test_biases_rest_beside_quantised_matrices(tmp_path: Path) -> None:
    biases = {f"{expert}.bias": torch.full((4,), float(expert)) for expert in range(EXPERTS)}
    tensors, _ = _unread("fp8 blocks", tmp_path, **biases)
    bias = torch.stack([tensors[name] for name in biases]).bfloat16()
    parts = bank_parts({"weight": _stack(tensors, "a"), "bias": bias})
    assert parts is not None
    assert parts[1][0].formula is None
    assert torch.equal(_decoded(parts[1], (EXPERTS, 4)), torch.stack(list(biases.values())).bfloat16())


def test_banks_without_quantised_weights_have_no_parts(tmp_path: Path) -> None:
    tensors, _ = _unread("fp8 blocks", tmp_path, **{"0.c.weight": torch.ones(3, 4)})
    assert bank_parts({"weight": torch.stack([tensors["0.c.weight"]])}) is None
    # A tensor in memory has no stored form.
    assert bank_parts({"weight": _stack(tensors, "a"), "other": torch.ones(EXPERTS, 4)}) is None


CHANGED: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a sum": (lambda t: _stack(t, "a") + 1, "add"),
    "a flip": (lambda t: _stack(t, "a").flip(1), "flip"),
    "rows joined": (lambda t: torch.stack([torch.cat([t["0.a.weight"], t["0.b.weight"]])]), "cat"),
    "rows of a matrix": (lambda t: torch.stack([t[f"{e}.a.weight"][:4] for e in range(EXPERTS)]), "slice"),
    "another dtype": (lambda t: _stack(t, "a").half(), "a conversion from torch.bfloat16 to torch.float16"),
    "two conversions": (
        lambda t: torch.cat([_stack(t, "a"), torch.stack([t["c.weight"]] * 3).half().bfloat16()], 1),
        "a conversion from torch.float16 to torch.bfloat16",
    ),
    "swapped experts": (lambda t: _stack(t, "a").transpose(0, 1), "transpose"),
    "a matrix in bf16": (
        lambda t: torch.stack([t["0.a.weight"], t["c.weight"].bfloat16()]),
        "stored in different ways",
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_weights_that_change_what_is_stored_have_no_parts(change: str, tmp_path: Path) -> None:
    tensors, _ = _unread("fp8 blocks", tmp_path, **{"c.weight": torch.ones(ROWS, COLUMNS)})
    write, operation = CHANGED[change]
    with pytest.raises(UnfollowedError, match=operation):
        bank_parts({"weight": write(tensors)})


def test_experts_with_other_formulas_have_no_parts(tmp_path: Path) -> None:
    tensors, _ = _unread("nvfp4", tmp_path)
    recipe: Any = tensors["0.a.weight"].recipe  # type: ignore[attr-defined]
    formula = msgspec.structs.replace(recipe.layout.formula, divides=True)
    changed = dataclasses.replace(recipe, layout=dataclasses.replace(recipe.layout, formula=formula))
    tensors["0.a.weight"] = type(tensors["0.a.weight"])(changed)  # type: ignore[call-arg]
    with pytest.raises(UnfollowedError, match="stored in different ways"):
        bank_parts({"weight": _stack(tensors, "a")})
