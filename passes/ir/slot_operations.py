"""The operations that stand in the graphs of the compiler.

A bank passes through three forms of graph:

    captured    moepass::bank_tensor   one tensor of a bank, where the model reads it (synchronous)
    canonical   gather                 the complete bank of a block, once per block (synchronous)
    scheduled   prefetch, decode, acquire, release   what the executor runs; each takes the event that it waits for

`bank_tensor` is a real operator, because Dynamo and AOT trace through it. Its `shard` is the complete bank, or, where
`expert_bounds` has more than one rank, this rank's part of it, which only the executor can complete. `format_bytes` and
`decoder` are the `BankFormat` of the bank where the shard does not tell it. Of a bank with home `disk` nothing is in
memory, and `shard` only identifies the bank.

`expert_stack` gives the tensor [experts, ..] of parameters that a model keeps one by one for its experts, all of the
same type and shape. As an operator it copies them. The executor moves them into one memory instead, once, and shows
that.

Nothing traces the other graphs again, so their operations are plain functions. The executor replaces them by methods of
its ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from moepass.models.errors import MoepassError
from moepass.models.homes import home_named

_library = torch.library.Library("moepass", "DEF")
_library.define(
    "bank_tensor(Tensor shard, int store, int bank, str bank_name, int index, str tensor_name, int offset_bytes, "
    "int[] shape, ScalarType dtype, Device device, str home='host', int[] expert_bounds=[], int[] format_bytes=[], "
    "str decoder='') -> Tensor"
)


def _read_bank_tensor(
    shard: torch.Tensor,
    store: int,
    bank: int,
    bank_name: str,
    index: int,
    tensor_name: str,
    offset_bytes: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    home: str = "host",
    expert_bounds: Sequence[int] = (),
    format_bytes: Sequence[int] = (),
    decoder: str = "",
) -> torch.Tensor:
    if home_named(home).is_in_files:
        raise MoepassError(
            f"bank {bank_name} rests in files, which this graph cannot read: compile with backend='asyncep', or call "
            "the model uncompiled",
            name=bank_name,
        )
    if len(expert_bounds) > 2:
        raise MoepassError(
            f"bank {bank_name} lies in shards on {len(expert_bounds) - 1} ranks, and this graph sees one of them: "
            "compile with backend='asyncep', or call the model uncompiled",
            name=bank_name,
        )
    if decoder:
        raise MoepassError(
            f"bank {bank_name} rests encoded, and decoder {decoder!r} is not in this graph: compile with "
            "backend='asyncep', or call the model uncompiled",
            name=bank_name,
        )
    nbytes = math.prod(shape) * dtype.itemsize
    return shard.narrow(0, offset_bytes, nbytes).to(device, copy=True).view(dtype).view(list(shape))


def _fake_bank_tensor(
    shard: torch.Tensor,
    store: int,
    bank: int,
    bank_name: str,
    index: int,
    tensor_name: str,
    offset_bytes: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    home: str = "host",
    expert_bounds: Sequence[int] = (),
    format_bytes: Sequence[int] = (),
    decoder: str = "",
) -> torch.Tensor:
    return shard.new_empty(list(shape), dtype=dtype, device=device)


_library.impl("bank_tensor", _read_bank_tensor, "CompositeExplicitAutograd")
torch.library.register_fake("moepass::bank_tensor", _fake_bank_tensor, lib=_library)

BANK_TENSOR = torch.ops.moepass.bank_tensor.default

_library.define("expert_stack(Tensor[] parts) -> Tensor")


def _copied_stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.detach() for part in parts])


def _fake_stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].new_empty((len(parts), *parts[0].shape))


_library.impl("expert_stack", _copied_stack, "CompositeExplicitAutograd")
torch.library.register_fake("moepass::expert_stack", _fake_stack, lib=_library)

EXPERT_STACK = torch.ops.moepass.expert_stack.default


def _not_executable(name: str) -> NoReturn:
    raise MoepassError(
        f"`{name}` stands in a graph that only the executor can run: bind the graph to a ring first", name=name
    )


def gather(shards: Sequence[torch.Tensor], *, bank: int) -> tuple[torch.Tensor, ...]:
    """The complete bank, as the tensors that its `BankSpec` lists. Canonical graphs only."""
    _not_executable("gather")


def prefetch(shards: Sequence[torch.Tensor], *, bank: int, slot: int, after: Any) -> Any:
    """Start to copy `bank` once the event `after` (a release, or None for a fresh slot) has happened: into `slot`, or,
    where its format has a decoder, into the encoded buffer.

    Gives the event "the copy is done".
    """
    _not_executable("prefetch")


def decode(copied: Any, *, bank: int, slot: int) -> Any:
    """Fill `slot` with what the matching prefetch brought into the encoded buffer, on the side of the copies.

    Stands right behind that prefetch: the encoded buffer belongs to one bank at a time. Gives the event "the slot is
    full".
    """
    _not_executable("decode")


def acquire(filled: Any, *, bank: int, slot: int) -> tuple[torch.Tensor, ...]:
    """Wait for the event `filled` of the matching decode, or prefetch where the format has no decoder.

    Gives the bank's tensors, views of the slot.
    """
    _not_executable("acquire")


def release(tensors: Any, *, bank: int, slot: int) -> Any:
    """The last reader of `tensors` (the acquire) stands before this; gives the event "all readers are done"."""
    _not_executable("release")


SLOT_OPS = (prefetch, decode, acquire, release)
