"""Decoding of a bank that rests as its checkpoint stores it, quantised, into the tensors of a slot.

It runs with the copies: on a CPU in the copy thread, on CUDA on the copy stream, where it may allocate memory but must
not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from moepass.models.errors import InputError
from moepass.models.layouts.layout import Role
from moepass.passes.ir.plan import BankSpec, DecodedPart
from moepass.runtime.kernels.cpu_decoder import can_decode, decode_on_cpu

# [Empirical] Operations of torch decode this many bytes of fp32 at once, so that temporary memory stays small.
_DECODED_AT_ONCE_BYTES = 64 << 20


def decode_bank(bank: BankSpec, encoded: torch.Tensor, slot: torch.Tensor) -> None:
    """Write the tensors of `bank` into `slot` from the bytes on the link, `encoded`; both flat uint8 on one device.

    Raises InputError if `bank` does not have the parts that its store knows, as in the plan of a graph.
    """
    if not bank.parts:
        raise InputError(
            f"bank {bank.name} rests as {bank.format.decoder!r}, and its plan does not say how to decode it"
        )
    with torch.no_grad():
        for part in bank.parts:
            tensor = part.tensor.view(slot).narrow(part.dim, part.start, part.stop - part.start)
            _decode(part, {role: bank.stored[index].view(encoded) for role, index in part.stored}, tensor)


def _decode(part: DecodedPart, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    """Write one part of a tensor, `target` [experts, ...], from its stored tensors [experts, ...]."""
    if part.formula is None:
        target.copy_(stored[Role.VALUES])
        return
    if can_decode(target):
        decode_on_cpu(part.formula, stored, target)
        return
    count = max(1, _DECODED_AT_ONCE_BYTES // (4 * math.prod(target.shape[1:]) or 1))
    for start in range(0, len(target), count):
        experts = {role: values[start : start + count] for role, values in stored.items()}
        target[start : start + count] = part.formula.decode(experts, target.dtype)
