"""Operations on unread tensors give the same results as on read ones, completely and row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.core_model_loading import Chunk, Concatenate, ConversionOps, Interleave, MergeModulelist, Transpose

from moepass import InputError
from moepass.models.checkpoint import weight_recipes
from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.checkpoint.unread_tensors import UnreadTensor, unread
from moepass.models.checkpoint.weight_recipes import UnfollowedError

EXPERTS = 5
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Tensors, Tensors]:
    """Save one tensor per expert and projection, and a stacked one; return them read and unread."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    numbers = {f"{kind}.{expert}": draw(6, 4) for kind in ("gate", "up") for expert in range(EXPERTS)}
    numbers |= {"stacked": draw(EXPERTS, 8, 6), "scale": torch.tensor(2.0)}
    save_file(numbers, tmp_path / "weights.safetensors")
    return numbers, unread(CheckpointFiles([tmp_path / "weights.safetensors"]))


def _of(kind: str, tensors: Tensors) -> list[torch.Tensor]:
    return [tensors[f"{kind}.{expert}"] for expert in range(EXPERTS)]


def _converted(operations: list[ConversionOps], sources: dict[str, Any], target: list[str]) -> list[torch.Tensor]:
    """Run the operations of a conversion one after the other, as transformers does."""
    for operation in operations:
        sources = operation.convert(dict(sources), source_patterns=["gate", "up"], target_patterns=target)
    return list(sources.values())


def _merged(tensors: Tensors) -> torch.Tensor:
    sources = {kind: _of(kind, tensors) for kind in ("gate", "up")}
    return _converted([MergeModulelist(dim=0), Concatenate(dim=1)], sources, ["bank"])[0]


MADE: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "stacked": lambda tensors: tensors["stacked"],
    "merged": _merged,
    "interleaved": lambda tensors: _converted([Interleave(dim=1)], {"up": [tensors["stacked"]]}, ["bank"])[0],
    "transposed": lambda tensors: _converted([Transpose(1, 2)], {"up": [tensors["stacked"]]}, ["bank"])[0],
    "chunked": lambda tensors: _converted([Chunk(dim=1)], {"up": [tensors["stacked"]]}, ["a", "b"])[1],
    "experts transposed": lambda tensors: torch.stack([tensor.T for tensor in _of("up", tensors)]),
    "permuted": lambda tensors: tensors["stacked"].permute(0, 2, 1).reshape(EXPERTS, 12, 4),
    "merged and converted": lambda tensors: _merged(tensors).to(torch.bfloat16),
    "converted and merged": lambda tensors: _merged({key: value.bfloat16() for key, value in tensors.items()}),
    "converted twice": lambda tensors: tensors["stacked"].to(torch.float16).to(torch.float32),
    "split by sizes": lambda tensors: tensors["stacked"].split([3, 5], dim=-2)[1],
}


@pytest.mark.parametrize("limit_bytes", [0, 1 << 20])
@pytest.mark.parametrize("how", MADE)
def test_rows_are_those_of_the_whole(
    stored: tuple[Tensors, Tensors], how: str, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_recipes, "_READ_AT_ONCE_BYTES", limit_bytes)
    numbers, not_read = stored
    expected, tensor = MADE[how](numbers), MADE[how](not_read)
    assert isinstance(tensor, UnreadTensor)
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(tensor.recipe.read(), expected)
    for start, stop in [(0, EXPERTS), (1, 3), (EXPERTS - 1, EXPERTS), (2, 2)]:
        target = torch.empty_like(expected[start:stop]).fill_(float("nan"))
        target.copy_(tensor.detach()[start:stop])
        assert torch.equal(target, expected[start:stop])


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (lambda tensors: tensors["stacked"].transpose(0, 1), "transpose"),
        (lambda tensors: torch.stack(_of("up", tensors), dim=1), "stack"),
        (lambda tensors: torch.cat(_of("up", tensors)).view(EXPERTS, 6, 4), "view"),
        (lambda tensors: tensors["stacked"] * tensors["scale"], "mul"),
        (lambda tensors: tensors["stacked"].flip(0), "flip"),
    ],
)
def test_mixed_experts_are_read_whole_or_refused(
    stored: tuple[Tensors, Tensors], make: Callable[[Tensors], torch.Tensor], operation: str
) -> None:
    numbers, not_read = stored
    tensor = make(not_read)
    assert isinstance(tensor, UnreadTensor)
    assert torch.equal(tensor.recipe.read(), make(numbers))
    with pytest.raises(UnfollowedError) as caught:
        tensor.recipe.rows(0, 1)
    assert caught.value.operation == operation


def test_what_needs_numbers_is_an_error(stored: tuple[Tensors, Tensors]) -> None:
    _, not_read = stored
    with pytest.raises(InputError, match=r"fill_\.Scalar changes a weight that is not read yet"):
        not_read["stacked"].fill_(0.0)
    with pytest.raises(InputError, match="needs the value of a weight that is not read yet"):
        not_read["scale"].item()


def test_shapes_that_do_not_fit_fail_as_ever(stored: tuple[Tensors, Tensors]) -> None:
    _, not_read = stored
    with pytest.raises(RuntimeError, match="size"):
        torch.stack([not_read["gate.0"], not_read["stacked"]])


def test_a_recipe_is_known_by_its_description(stored: tuple[Tensors, Tensors]) -> None:
    _, not_read = stored
    texts = {make(not_read).recipe.describe() for make in MADE.values()}  # type: ignore[attr-defined]
    assert len(texts) == len(MADE)
    assert _merged(not_read).recipe.describe() in texts  # type: ignore[attr-defined]
