"""Banks of fp32 weights that rest and travel in bf16, for tests of decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from moepass.models.errors import InputError
from moepass.models.layouts.layout import Role
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, DecodedPart, TensorSpec
from moepass.runtime.banks import banks
from moepass.runtime.banks.stored_bank import StoredBank, packed

NAME = "halved"


def halved_bank(tensors: Mapping[str, torch.Tensor]) -> StoredBank:
    """Return the bank of `tensors`, each [experts, ...] in fp32, at rest in bf16."""
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return StoredBank(NAME, halves, _parts(packed(tensors).tensors))


def halved(bank: BankSpec, memory: torch.Tensor) -> tuple[BankSpec, torch.Tensor]:
    """Return `bank`, which is complete in `memory`, flat uint8, at rest in bf16, and its bytes at rest."""
    halves = {tensor.name: tensor.view(memory).bfloat16() for tensor in bank.tensors}
    layout = packed(halves)
    rested = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for tensor in layout.tensors:
        tensor.view(rested).copy_(halves[tensor.name])
    sizes = BankFormat(layout.nbytes, layout.nbytes, memory.numel(), NAME)
    return dataclasses.replace(bank, format=sizes, stored=layout.tensors, parts=_parts(bank.tensors)), rested


def _parts(tensors: Sequence[TensorSpec]) -> tuple[DecodedPart, ...]:
    return tuple(
        DecodedPart(tensor, 0, 0, tensor.shape[0], ((Role.VALUES, index),)) for index, tensor in enumerate(tensors)
    )


@contextmanager
def resting_halved() -> Iterator[None]:
    """Let banks that are packed in this context rest in bf16."""
    with mock.patch.object(banks, "stored_bank", halved_bank):
        yield


def halve(module: torch.nn.Module) -> None:
    """Round the parameters of `module` to values that bf16 represents."""
    for parameter in module.parameters():
        if parameter.dtype != torch.float32:
            raise InputError(f"a parameter is {parameter.dtype}; the format holds float32")
        parameter.data = parameter.data.bfloat16().float()
