"""Whatever changes this rank's part of a bank is noticed, however it writes; what changes nothing is no error."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.runtime.banks.mutation_guard import MutationGuard, any_is_written
from moepass.runtime.system import page_mapping
from moepass.runtime.system.page_mapping import has_written_pages
from moepass.runtime.system.shared_memory import PAGE_BYTES, create_segment

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="shards in shared memory need memfd_create")
SHAPES = ((3, 40, 24), (3, 24, 20), (3, 7))


def _parts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _watched() -> tuple[list[torch.Tensor], MutationGuard]:
    parts = _parts()
    return parts, MutationGuard(parts, [part.clone() for part in parts])


def _moved() -> tuple[list[torch.Tensor], MutationGuard]:
    """Each lies in a private mapping of a segment of its own."""
    moved, shards = [], []
    for part in _parts():
        segment = create_segment(-(-part.nbytes // PAGE_BYTES) * PAGE_BYTES, "test")
        shard = segment.map(0, part.nbytes).view(torch.float32).view(part.shape)
        shards.append(shard.copy_(part))
        mapping = segment.map_privately(0, part.nbytes)
        moved.append(torch.frombuffer(mapping, dtype=torch.float32).view(part.shape))
    return moved, MutationGuard(moved, shards, [True] * len(moved))


def _in_inference_mode(part: torch.Tensor) -> None:
    with torch.inference_mode():
        part.mul_(2)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda part: part.mul_(2),
    "data": lambda part: part.data.mul_(2),
    "data copied": lambda part: part.data.copy_(part * 2),
    "numpy": lambda part: part.numpy().__imul__(2),
    "inference mode": _in_inference_mode,
    "new memory": lambda part: part.set_((part * 2).contiguous()),
    "one expert": lambda part: part.data[1].mul_(2),
}


@pytest.fixture(params=["sampled", pytest.param("moved", marks=on_linux)])
def watched(request: pytest.FixtureRequest) -> tuple[list[torch.Tensor], MutationGuard]:
    return _moved() if request.param == "moved" else _watched()


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_every_way_to_write_is_noticed(watched: tuple[list[torch.Tensor], MutationGuard], how: str, place: int) -> None:
    parts, watch = watched
    assert watch.are_unchanged(parts)
    WRITES[how](parts[place])
    for _ in range(2):
        assert not watch.are_unchanged(parts)


def test_what_changes_nothing_is_no_change(watched: tuple[list[torch.Tensor], MutationGuard]) -> None:
    parts, watch = watched
    parts[0].mul_(2)
    assert not watch.are_unchanged(parts)
    parts[0].div_(2)
    parts[1].data.copy_(parts[1].clone())
    parts[2].share_memory_()
    for _ in range(2):
        assert watch.are_unchanged(parts)
    for part, before in zip(parts, _parts(), strict=True):
        part.data.add_(1)
        assert not watch.are_unchanged(parts)
        part.data.copy_(before)
        assert watch.are_unchanged(parts)


def test_tensors_without_a_version_are_watched() -> None:
    with torch.inference_mode():
        parts, watch = _watched()
        assert watch.are_unchanged(parts)
        parts[1].mul_(2)
        assert not watch.are_unchanged(parts)


def test_numbers_that_differ_from_themselves_are_no_change() -> None:
    parts = _parts()
    parts[0][0, 0, 0] = torch.nan
    watch = MutationGuard(parts, [part.clone() for part in parts])
    assert watch.are_unchanged(parts)
    parts[0].add_(0)
    assert watch.are_unchanged(parts)


def test_a_rank_without_experts_and_transposed_tensors_are_watched() -> None:
    parts = [torch.empty(0, 4, 5), torch.randn(2, 5, 4).transpose(1, 2), torch.randn(2, 9, 1, dtype=torch.bfloat16)]
    watch = MutationGuard(parts, [part.clone() for part in parts])
    assert watch.are_unchanged(parts)
    parts[1].data[1].neg_()
    assert not watch.are_unchanged(parts)


def test_parts_that_are_the_shard_are_told_by_versions_and_samples() -> None:
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


@on_linux
@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(SHAPES) - 1), st.data())
def test_a_single_bit_is_noticed_where_a_tensor_lies_in_its_shard(place: int, data: st.DataObject) -> None:
    parts, watch = _moved()
    assert watch.are_unchanged(parts)
    numbers = parts[place].data.view(-1).view(torch.int32)
    numbers[data.draw(st.integers(0, len(numbers) - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert not watch.are_unchanged(parts)


@on_linux
def test_where_the_system_tells_of_no_pages_a_sample_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_mapping, "_tells_written_pages", lambda: False)
    parts, watch = _moved()
    assert watch.are_unchanged(parts)
    parts[1].data.mul_(2)
    assert not watch.are_unchanged(parts)


@on_linux
def test_pages_say_whether_they_were_written() -> None:
    nbytes = 5 * PAGE_BYTES
    segment = create_segment(nbytes, "test")
    segment.map(0, nbytes).fill_(1)
    memory = torch.frombuffer(segment.map_privately(0, nbytes), dtype=torch.uint8)
    address = memory.data_ptr()
    if has_written_pages(address, nbytes) is None:
        pytest.skip("this system keeps /proc/self/pagemap to itself")
    assert has_written_pages(address, nbytes) is False
    assert int(memory.sum()) == nbytes
    assert has_written_pages(address, nbytes) is False
    memory[2 * PAGE_BYTES] = 1
    written = [has_written_pages(address + page * PAGE_BYTES, PAGE_BYTES) for page in range(5)]
    assert written == [False, False, True, False, False]
    assert has_written_pages(address + 2 * PAGE_BYTES - 1, 2) is True
    assert has_written_pages(address + PAGE_BYTES + 1, PAGE_BYTES - 1) is False
