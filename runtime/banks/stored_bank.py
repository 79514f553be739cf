"""A bank of quantised experts as it rests: the tensors that the checkpoint stores, and how they are decoded."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import torch

from moepass.models.checkpoint.stored_parts import bank_parts
from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.checkpoint.weight_recipes import UnfollowedError
from moepass.passes.ir.plan import DecodedPart
from moepass.passes.ir.shards import ShardLayout, pack_layout


@dataclasses.dataclass(frozen=True)
class StoredBank:
    """The stored tensors of a bank, each [experts, ...], by name, and the parts that are decoded from them.

    `name` lists the layouts, for messages and reports.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    parts: tuple[DecodedPart, ...]


def packed(tensors: Mapping[str, torch.Tensor]) -> ShardLayout:
    """Return the layout of `tensors`, packed one after the other."""
    return pack_layout((key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items())


def stored_bank(tensors: Mapping[str, torch.Tensor]) -> StoredBank | None:
    """Return the bank of `tensors`, each [experts, ...], as it rests; None if it rests as it is in a slot.

    Quantised experts rest decoded if `why_decoded` has a reason.
    """
    try:
        parts_of_tensors = bank_parts(tensors)
    except UnfollowedError:
        return None
    if parts_of_tensors is None:
        return None
    stored: dict[str, torch.Tensor] = {}
    parts = []
    for tensor, parts_of_tensor in zip(packed(tensors).tensors, parts_of_tensors, strict=True):
        for number, part in enumerate(parts_of_tensor):
            positions = []
            for role, recipe in part.stored.items():
                positions.append((role, len(stored)))
                stored[f"{tensor.name}.{number}.{role}"] = UnreadTensor(recipe)
            parts.append(DecodedPart(tensor, part.dim, part.start, part.stop, tuple(positions), part.formula))
    layouts = dict.fromkeys(part.layout for part in itertools.chain(*parts_of_tensors) if part.layout)
    return StoredBank(", ".join(layouts), stored, tuple(parts))


def why_decoded(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the operation through which quantised `tensors` cannot be kept as they are stored; empty if they can."""
    try:
        bank_parts(tensors)
    except UnfollowedError as error:
        return error.operation
    return ""
