"""Memory layouts of a bank: packed completely, cut into one shard per rank, and reassembled.

    complete bank      every tensor [experts, ...] at the next aligned offset, in the order of `BankSpec.tensors`
    shard of rank r    the same layout for this rank's experts: every tensor [b[r + 1] - b[r], ...]
    pieces of rank r   byte ranges to copy from its shard into a buffer with the layout of the complete bank
    slot               the complete bank, but tensors in `BankSpec.in_parts` lack the experts of the slot's own rank.
                       All ranks share one layout, so these tensors are as large as on the rank with the fewest experts.
                       Tensors in `BankSpec.fp8` are values in e4m3, and after all tensors of the bank come their scales

Experts are the first dimension, so a shard's part of a tensor is one contiguous range in both layouts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

import torch

from moepass.models.errors import InputError
from moepass.models.layouts.published import FP8_BLOCKS
from moepass.passes.ir.plan import BankSpec, TensorSpec, dtype_name

# Tensors in a bank start at multiples of this, the largest alignment of vector loads and grouped GEMM kernels.
ALIGNMENT_BYTES = 256
# Rows and columns of a matrix that share a scale in a slot of FP8 weights: the blocks of published checkpoints.
FP8_BLOCK = 128
FP8_REQUEST = "experts_compute is 'fp8'"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A copy of `nbytes` contiguous bytes, from an offset in their source to an offset in the slot."""

    source_offset_bytes: int
    slot_offset_bytes: int
    nbytes: int

    def part(self, start: int, stop: int) -> Piece:
        """Return bytes [start, stop) of this piece."""
        return Piece(self.source_offset_bytes + start, self.slot_offset_bytes + start, stop - start)


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """The tensors of a shard of `nbytes`, with the shapes that they have in the shard."""

    nbytes: int
    tensors: tuple[TensorSpec, ...]


def pack_layout(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> ShardLayout:
    """Return the layout of tensors (name, shape, dtype), packed one after the other."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, shape, dtype in tensors:
        specs.append(TensorSpec(name, shape, dtype_name(dtype), offset))
        offset += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return ShardLayout(offset, tuple(specs))


def expert_range(bank: BankSpec, rank: int) -> range:
    """Return the experts in the shard of `rank`; all of them if the bank has one shard.

    Raises InputError if there is no such rank, or if the bounds do not fit the bank's experts.
    """
    experts = bank.tensors[0].shape[0] if bank.tensors else 0
    bounds = bank.expert_bounds or (0, experts)
    if bounds[0] != 0 or bounds[-1] != experts or any(stop < start for start, stop in itertools.pairwise(bounds)):
        raise InputError(
            f"bank {bank.name} has {experts} experts; the bounds {list(bounds)} must rise from 0 to {experts}",
            name=bank.name,
            value=tuple(bounds),
            expected=(0, experts),
        )
    if not 0 <= rank < len(bounds) - 1:
        raise InputError(
            f"bank {bank.name} has no shard of rank {rank}; it has shards of ranks 0..{len(bounds) - 2}",
            name=bank.name,
            rank=rank,
            expected=range(len(bounds) - 1),
        )
    return range(bounds[rank], bounds[rank + 1])


def shard_layout(bank: BankSpec, rank: int) -> ShardLayout:
    """Return the layout of the shard of `rank` at rest. Raises InputError like `expert_range`.

    `bank` must list all of its tensors.
    """
    count = len(expert_range(bank, rank))
    tensors = bank.at_rest.tensors
    return pack_layout((tensor.name, (count, *tensor.shape[1:]), tensor.torch_dtype) for tensor in tensors)


def parameter_places(bank: BankSpec, rank: int) -> tuple[TensorSpec, ...]:
    """Return the position of each parameter in the shard of `rank`: a tensor's part, or a single expert's part.

    Parameters that only recipes read are not included. `bank` must list all of its tensors. Raises InputError like
    `expert_range`.
    """
    places: list[TensorSpec] = []
    computed = {recipe.position for recipe in bank.recipes}
    for position, tensor in enumerate(shard_layout(bank, rank).tensors):
        if position in computed:
            continue
        if position not in bank.one_by_one:
            places.append(tensor)
            continue
        count, *shape = tensor.shape
        expert_bytes = math.prod(shape) * tensor.torch_dtype.itemsize
        places += [
            TensorSpec(
                f"{tensor.name} {expert}", tuple(shape), tensor.dtype, tensor.offset_bytes + expert * expert_bytes
            )
            for expert in range(count)
        ]
    return tuple(places)


def shard_pieces(bank: BankSpec, rank: int) -> tuple[Piece, ...]:
    """Return the pieces that copy the shard of `rank` into a slot, or into the encoded buffer if `bank` is encoded.

    There is one per tensor at rest, and none for a rank without experts. `bank` must list all of its tensors. Raises
    InputError like `expert_range`.
    """
    first = expert_range(bank, rank).start
    pieces = []
    for shard, tensor in zip(shard_layout(bank, rank).tensors, bank.at_rest.tensors, strict=True):
        expert_bytes = math.prod(tensor.shape[1:]) * tensor.torch_dtype.itemsize
        if shard.nbytes:
            pieces.append(Piece(shard.offset_bytes, tensor.offset_bytes + first * expert_bytes, shard.nbytes))
    return tuple(pieces)


def slot_layout(bank: BankSpec) -> ShardLayout:
    """Return the layout of `bank` in a slot, with the shapes and dtypes that the tensors have there.

    The scales of FP8 tensors follow all tensors: fp32 [experts, blocks of rows, blocks of columns]. `bank` must list
    all of its tensors. Raises InputError like `expert_range`.
    """
    if bank.fp8:
        return pack_layout(itertools.chain(_values_in_fp8(bank), _scales_in_fp8(bank)))
    if not bank.in_parts:
        return ShardLayout(bank.format.slot_bytes, bank.tensors)
    fewest = min(len(expert_range(bank, rank)) for rank in range(max(1, len(bank.expert_bounds) - 1)))
    return pack_layout(
        (tensor.name, (tensor.shape[0] - fewest * (position in bank.in_parts), *tensor.shape[1:]), tensor.torch_dtype)
        for position, tensor in enumerate(bank.tensors)
    )


def in_fp8(bank: BankSpec) -> BankSpec:
    """Return `bank` with its matrices in FP8 in the slot. Raises InputError if it does not rest as blocks of FP8."""
    if bank.format.decoder != FP8_BLOCKS:
        rests = f"as {bank.format.decoder!r}" if bank.format.is_encoded else "unquantised"
        raise InputError(
            f"{FP8_REQUEST}, but the experts of {bank.name} rest {rests}; it needs a checkpoint whose experts are "
            f"stored as {FP8_BLOCKS!r}, such as Qwen3's and DeepSeek's FP8 checkpoints, loaded with load_pretrained",
            name=bank.name,
            expected=FP8_BLOCKS,
        )
    matrices = (position for position, tensor in enumerate(bank.tensors) if len(tensor.shape) == 3)
    bank = dataclasses.replace(bank, fp8=tuple(matrices))
    format = dataclasses.replace(bank.format, slot_bytes=slot_layout(bank).nbytes)
    return dataclasses.replace(bank, format=format)


def _values_in_fp8(bank: BankSpec) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for position, tensor in enumerate(bank.tensors):
        yield tensor.name, tensor.shape, torch.float8_e4m3fn if position in bank.fp8 else tensor.torch_dtype


def _scales_in_fp8(bank: BankSpec) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for position in bank.fp8:
        experts, *sizes = bank.tensors[position].shape
        blocks = (-(-size // FP8_BLOCK) for size in sizes)
        yield f"{bank.tensors[position].name} scales", (experts, *blocks), torch.float32


def pieces_in_slot(bank: BankSpec, own: range, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Move `pieces` of a complete bank to their offsets in the slot of the rank that holds the experts `own`."""
    if not bank.in_parts:
        return tuple(pieces)
    moved: list[Piece] = []
    pieces = tuple(pieces)
    for position, (tensor, in_slot) in enumerate(zip(bank.tensors, slot_layout(bank).tensors, strict=True)):
        begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.nbytes
        ranges = [(begin, end)]
        if position in bank.in_parts:
            expert_bytes = math.prod(tensor.shape[1:]) * tensor.torch_dtype.itemsize
            ranges = [(begin, begin + own.start * expert_bytes), (begin + own.stop * expert_bytes, end)]
        target = in_slot.offset_bytes
        for start, stop in ranges:
            for piece in clip_pieces(pieces, start, stop):
                moved.append(dataclasses.replace(piece, slot_offset_bytes=target + piece.slot_offset_bytes))
            target += stop - start
    return tuple(moved)


def clip_pieces(pieces: Iterable[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the parts of `pieces` in bytes [start, stop) of the slot, for a buffer that holds only these bytes."""
    clipped = []
    for piece in pieces:
        first = max(start, piece.slot_offset_bytes)
        nbytes = min(stop, piece.slot_offset_bytes + piece.nbytes) - first
        if nbytes > 0:
            offset = piece.source_offset_bytes + first - piece.slot_offset_bytes
            clipped.append(Piece(offset, first - start, nbytes))
    return tuple(clipped)
