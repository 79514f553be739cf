"""The layout of shards: concatenated shards are the bank that is packed as one."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.models.formulas.expert_placement import shard_bounds
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import (
    ALIGNMENT_BYTES,
    Piece,
    expert_range,
    pack_layout,
    pieces_in_slot,
    shard_layout,
    shard_pieces,
    slot_layout,
)
from moepass.runtime.banks.banks import describe_bank, write_parts
from moepass.runtime.transfer.sources import MemorySource, read_range, whole
from tests.helpers.graphs.error_fields import refused

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.uint8]
CPU = torch.device("cpu")


@st.composite
def tensors_and_bounds(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
    experts = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensors = {}
    for index in range(draw(st.integers(1, 4))):
        # Biases [E, d], matrices, and transposed matrices, whose memory is not contiguous.
        shape = (experts, *draw(st.lists(st.integers(1, 40), min_size=1, max_size=2)))
        dtype = draw(st.sampled_from(DTYPES))
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
        tensor = raw.view(dtype)
        tensors[f"tensor{index}"] = tensor.transpose(1, 2) if len(shape) == 3 and draw(st.booleans()) else tensor
    cuts = draw(st.lists(st.integers(0, experts), max_size=4))
    return tensors, (0, *sorted(cuts), experts)


def _packed(spec: BankSpec, rank: int, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    shard = torch.zeros(shard_layout(spec, rank).nbytes, dtype=torch.uint8)
    experts = expert_range(spec, rank)
    write_parts(spec, rank, [tensor[experts.start : experts.stop] for tensor in tensors.values()], shard)
    return shard


@settings(max_examples=150, deadline=None)
@given(tensors_and_bounds())
def test_all_shards_together_are_the_bank(drawn: tuple[dict[str, torch.Tensor], tuple[int, ...]]) -> None:
    tensors, bounds = drawn
    complete = describe_bank(0, "layer", tensors, home="host")
    expected = _packed(complete, 0, tensors)
    assert expected.numel() == complete.format.slot_bytes
    spec = describe_bank(0, "layer", tensors, home="peer", expert_bounds=bounds)
    assert (spec.tensors, spec.format.slot_bytes) == (complete.tensors, complete.format.slot_bytes)
    sources = [
        MemorySource(_packed(spec, rank, tensors), shard_pieces(spec, rank), over_link=False)
        for rank in range(len(bounds) - 1)
    ]
    slot = torch.zeros(spec.format.slot_bytes, dtype=torch.uint8)
    for source in sources:
        for piece in source.pieces:
            source_bytes = source.memory[piece.source_offset_bytes : piece.source_offset_bytes + piece.nbytes]
            assert source_bytes.numel() == piece.nbytes
            slot[piece.slot_offset_bytes : piece.slot_offset_bytes + piece.nbytes] = source_bytes
    assert torch.equal(slot, expected)
    # Every byte occurs once: the pieces have the size of the tensors.
    assert sum(source.nbytes for source in sources) == sum(tensor.nbytes for tensor in tensors.values())
    for index, tensor in enumerate(spec.tensors):
        memory = read_range(sources, tensor.offset_bytes, tensor.offset_bytes + tensor.nbytes, CPU)
        raw = tensors[tensor.name].clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(-1)
        assert torch.equal(memory, raw), index


@settings(max_examples=150, deadline=None)
@given(tensors_and_bounds(), st.data())
def test_a_slot_and_the_own_shard_are_the_bank(
    drawn: tuple[dict[str, torch.Tensor], tuple[int, ...]], data: st.DataObject
) -> None:
    tensors, bounds = drawn
    whole_bank = describe_bank(0, "layer", tensors, home="peer", expert_bounds=bounds)
    in_parts = tuple(index for index in range(len(tensors)) if data.draw(st.booleans()))
    spec = dataclasses.replace(whole_bank, in_parts=in_parts)
    layout = slot_layout(spec)
    fewest = min(stop - start for start, stop in itertools.pairwise(bounds))
    assert layout.nbytes <= whole_bank.format.slot_bytes
    for rank in range(len(bounds) - 1):
        owned = expert_range(spec, rank)
        slot = torch.zeros(layout.nbytes, dtype=torch.uint8)
        copied = 0
        for peer in range(len(bounds) - 1):
            shard = _packed(spec, peer, tensors)
            for piece in pieces_in_slot(spec, owned, shard_pieces(spec, peer)):
                copied += piece.nbytes
                shard_bytes = shard[piece.source_offset_bytes : piece.source_offset_bytes + piece.nbytes]
                slot[piece.slot_offset_bytes : piece.slot_offset_bytes + piece.nbytes] = shard_bytes
        lacking = 0
        for index, (room, tensor) in enumerate(zip(layout.tensors, tensors.values(), strict=True)):
            assert room.offset_bytes % ALIGNMENT_BYTES == 0
            there = room.view(slot)
            if index not in in_parts:
                assert _bytes(there) == _bytes(tensor)
                continue
            assert len(there) == len(tensor) - fewest
            assert _bytes(there[: owned.start]) == _bytes(tensor[: owned.start])
            assert _bytes(there[owned.start : len(tensor) - len(owned)]) == _bytes(tensor[owned.stop :])
            lacking += tensor[owned.start : owned.stop].nbytes
        assert copied == sum(tensor.nbytes for tensor in tensors.values()) - lacking


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@settings(max_examples=50, deadline=None)
@given(tensors_and_bounds())
def test_shards_are_aligned_and_as_large_as_their_experts(
    drawn: tuple[dict[str, torch.Tensor], tuple[int, ...]],
) -> None:
    tensors, bounds = drawn
    spec = describe_bank(0, "layer", tensors, home="peer", expert_bounds=bounds)
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
        assert expert_range(spec, rank) == range(start, stop)
        layout = shard_layout(spec, rank)
        assert all(tensor.offset_bytes % ALIGNMENT_BYTES == 0 for tensor in layout.tensors)
        assert all(tensor.shape[0] == stop - start for tensor in layout.tensors)
        assert layout.nbytes % ALIGNMENT_BYTES == 0
        if start == stop:
            assert (layout.nbytes, shard_pieces(spec, rank)) == (0, ())


def test_a_bank_without_bounds_is_one_shard() -> None:
    tensors = {"up": torch.randn(3, 4, 5), "bias": torch.randn(3, 7)}
    spec = describe_bank(2, "layer", tensors, home="host")
    assert shard_layout(spec, 0) == pack_layout((key, tuple(t.shape), t.dtype) for key, t in tensors.items())
    assert shard_pieces(spec, 0) == (Piece(0, 0, 240), Piece(256, 256, 84))
    (source,) = (whole(_packed(spec, 0, tensors)),)
    assert source.nbytes == spec.format.slot_bytes


def test_uneven_shards_by_hand() -> None:
    spec = describe_bank(0, "layer", {"up": torch.zeros(3, 1, 100), "bias": torch.zeros(3, 1)}, home="peer",
                         expert_bounds=shard_bounds(3, 2))  # fmt: skip
    assert spec.expert_bounds == (0, 1, 3)
    assert shard_pieces(spec, 0) == (Piece(0, 0, 400), Piece(512, 1280, 4))
    assert shard_pieces(spec, 1) == (Piece(0, 400, 800), Piece(1024, 1284, 8))


@pytest.mark.parametrize("bounds", [(0, 2), (1, 3), (0, 2, 1, 3), (0, 4), (3,)])
def test_bounds_that_do_not_fit_are_an_error(bounds: tuple[int, ...]) -> None:
    spec = describe_bank(0, "layers.0", {"up": torch.zeros(3, 4)}, home="peer", expert_bounds=bounds)
    with refused(InputError, name="layers.0", value=bounds, expected=(0, 3)):
        shard_pieces(spec, 0)


def test_a_rank_outside_the_group_is_an_error() -> None:
    spec = describe_bank(0, "layers.0", {"up": torch.zeros(3, 4)}, home="peer", expert_bounds=(0, 1, 3))
    for rank in (-1, 2):
        with refused(InputError, name="layers.0", rank=rank, expected=range(2)):
            shard_layout(spec, rank)
