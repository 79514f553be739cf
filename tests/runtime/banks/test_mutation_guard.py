"""Detection of changed expert weights: by default those that torch counts, with `debug` all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.runtime.banks.mutation_guard import MutationGuard, any_is_written

SHAPES = ((3, 40, 24), (3, 24, 20), (3, 7))


def _parts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _watched() -> tuple[list[torch.Tensor], MutationGuard]:
    parts = _parts()
    return parts, MutationGuard(parts, [tensor.clone() for tensor in parts])


def _in_inference_mode(part: torch.Tensor) -> None:
    with torch.inference_mode():
        part.mul_(2)


COUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda part: part.mul_(2),
    "new memory": lambda part: part.set_((part * 2).contiguous()),
    "inference mode": _in_inference_mode,
    "one expert": lambda part: part[1].mul_(2),
}
NOT_COUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda part: part.data.mul_(2),
    "numpy": lambda part: part.numpy().__imul__(2),
    "data of one expert": lambda part: part.data[1].mul_(2),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("how", COUNTED)
@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_writes_that_torch_counts_are_noticed(how: str, place: int, debug: bool) -> None:
    parts, watch = _watched()
    assert watch.are_unchanged(parts, debug)
    COUNTED[how](parts[place])
    for _ in range(2):
        assert not watch.are_unchanged(parts, debug)


@pytest.mark.parametrize("how", NOT_COUNTED)
@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_other_writes_are_noticed_under_debug_alone(how: str, place: int) -> None:
    parts, watch = _watched()
    NOT_COUNTED[how](parts[place])
    for _ in range(2):
        assert watch.are_unchanged(parts)
        assert not watch.are_unchanged(parts, debug=True)


def test_writing_the_same_bits_is_no_change() -> None:
    parts, watch = _watched()
    parts[0].mul_(2)
    assert not watch.are_unchanged(parts)
    parts[0].div_(2)
    parts[1].copy_(parts[1].clone())
    parts[2].share_memory_()
    for debug in (False, True):
        assert watch.are_unchanged(parts, debug)
    for tensor, before in zip(parts, _parts(), strict=True):
        tensor.add_(1)
        assert not watch.are_unchanged(parts)
        tensor.copy_(before)
        assert watch.are_unchanged(parts)


def test_tensors_without_a_version_are_watched_under_debug() -> None:
    with torch.inference_mode():
        parts, watch = _watched()
        assert watch.are_unchanged(parts, debug=True)
        parts[1].mul_(2)
        assert not watch.are_unchanged(parts, debug=True)


def test_numbers_that_differ_from_themselves_are_no_change() -> None:
    parts = _parts()
    parts[0][0, 0, 0] = torch.nan
    watch = MutationGuard(parts, [tensor.clone() for tensor in parts])
    assert watch.are_unchanged(parts)
    parts[0].add_(0)
    assert watch.are_unchanged(parts)


def test_a_rank_without_experts_and_transposed_tensors_are_watched() -> None:
    parts = [torch.empty(0, 4, 5), torch.randn(2, 5, 4).transpose(1, 2), torch.randn(2, 9, 1, dtype=torch.bfloat16)]
    watch = MutationGuard(parts, [tensor.clone() for tensor in parts])
    assert watch.are_unchanged(parts)
    parts[1][1].neg_()
    assert not watch.are_unchanged(parts)


def test_parameters_that_are_the_shard_are_checked_by_versions_and_samples() -> None:
    parts = _parts()
    watch = MutationGuard(parts, [parts[0], parts[1].clone(), parts[2]], are_shard=[True, False, True])
    assert watch.are_unchanged(parts)
    assert not any_is_written([watch])
    parts[1].mul_(2)
    assert not watch.are_unchanged(parts)
    parts[1].div_(2)
    assert watch.are_unchanged(parts)
    assert not any_is_written([watch])
    parts[0].data[2].neg_()
    assert watch.are_unchanged(parts)
    for _ in range(2):
        assert any_is_written([watch])
    parts[2].add_(0)
    for _ in range(2):
        assert not watch.are_unchanged(parts)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(SHAPES) - 1), st.data())
def test_a_single_bit_is_noticed_under_debug(place: int, data: st.DataObject) -> None:
    parts, watch = _watched()
    numbers = parts[place].data.view(-1).view(torch.int32)
    numbers[data.draw(st.integers(0, len(numbers) - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert not watch.are_unchanged(parts, debug=True)
