"""Operations on banks in the graphs of the compiler.

A bank passes through three forms of graph:

    captured    moepass::bank_tensor   one tensor of a bank, where the model reads it (synchronous)
    canonical   gather                 the complete bank of a block, once per block (synchronous)
    scheduled   prefetch, decode, acquire, release   run by the executor; each takes the event that it waits for

`bank_tensor` is a registered operator, because Dynamo and AOT trace through it. Its `shard` is the complete bank, or
this rank's shard if `expert_bounds` covers several ranks; then only the executor can complete it. `format_bytes` and
`decoder` describe the bank's `BankFormat` if it differs from the shard's size. A bank with home `disk` is not in
memory, so its `shard` only identifies it.

`expert_stack` stacks parameters of one type and shape, which a model keeps separately for each expert, into a tensor
[experts, ...]. As an operator it copies them. The executor instead moves them into one buffer, once, and returns a view
of it.

The canonical and the scheduled graph are not traced, so their operations are plain functions. The executor replaces
them by methods of its ring.
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
            f"bank {bank_name} rests in files, which this graph cannot read; compile with backend='asyncep', or call "
            "the model uncompiled",
            name=bank_name,
        )
    if len(expert_bounds) > 2:
        raise MoepassError(
            f"bank {bank_name} is sharded over {len(expert_bounds) - 1} ranks, and this graph can read only one shard; "
            "compile with backend='asyncep', or call the model uncompiled",
            name=bank_name,
        )
    if decoder:
        raise MoepassError(
            f"bank {bank_name} rests encoded, and decoder {decoder!r} is not in this graph; compile with "
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
    return torch.stack([parameter.detach() for parameter in parts])


def _fake_stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].new_empty((len(parts), *parts[0].shape))


_library.impl("expert_stack", _copied_stack, "CompositeExplicitAutograd")
torch.library.register_fake("moepass::expert_stack", _fake_stack, lib=_library)

EXPERT_STACK = torch.ops.moepass.expert_stack.default


def _not_executable(name: str) -> NoReturn:
    raise MoepassError(
        f"`{name}` is part of a graph that only the executor can run; bind the graph to a ring first", name=name
    )


def gather(shards: Sequence[torch.Tensor], *, bank: int) -> tuple[torch.Tensor, ...]:
    """Return the complete bank, as the tensors that its `BankSpec` lists. Canonical graphs only."""
    _not_executable("gather")


def prefetch(shards: Sequence[torch.Tensor], *, bank: int, slot: int, after: Any) -> Any:
    """Start to copy `bank` after the event `after`, and return the event "the copy is done".

    `after` is a release, or None for a fresh slot. If the bank's format has a decoder, the target is not `slot` but the
    encoded buffer that has been free for longest, without `after`: the copy waits for the last decode from there.
    """
    _not_executable("prefetch")


def decode(copied: Any, *, bank: int, slot: int, after: Any) -> Any:
    """Decode `bank` into `slot` after the event `after`, and return the event "the slot is full".

    `copied` is the bank's prefetch, and `after` a release, or None for a fresh slot. Decodes have a stream or thread of
    their own, so that the next bank is copied at the same time.
    """
    _not_executable("decode")


def acquire(filled: Any, *, bank: int, slot: int) -> tuple[torch.Tensor, ...]:
    """Wait for the event `filled`, and return the bank's tensors, which are views of the slot.

    `filled` comes from the matching decode, or from the prefetch if the format has no decoder.
    """
    _not_executable("acquire")


def release(tensors: Any, *, bank: int, slot: int) -> Any:
    """Return the event "all readers are done". It follows the last reader of `tensors`, the result of the acquire."""
    _not_executable("release")


SLOT_OPS = (prefetch, decode, acquire, release)
