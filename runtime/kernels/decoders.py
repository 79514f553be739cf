"""Decoding of a bank that rests as its checkpoint stores it, quantised, into the tensors of a slot.

It runs beside the copies: on a CPU in a second thread, on CUDA on a second stream, where it may allocate memory but
must not wait for the device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from moepass.models.errors import CheckpointError, InputError
from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.models.layouts.packed_floats import PackedFormula
from moepass.models.layouts.weight_layout import Formula
from moepass.passes.ir.plan import BankSpec, DecodedPart
from moepass.runtime.kernels.cpu_decoder import (
    can_decode,
    check_floats_on_cpu,
    decode_floats_on_cpu,
    decode_on_cpu,
    library,
)
from moepass.runtime.kernels.fp8_rows import BlockScaledWeights
from moepass.runtime.kernels.slot_tensors import copy_fp8, slot_tensors
from moepass.runtime.kernels.stored_lines import DECODED_DTYPES

logger = logging.getLogger("moepass")

# Experts are decoded together up to this many bytes of temporary fp32 numbers: scales for the compiled decoders, and
# decoded elements for operations of torch.
_TEMPORARY_BYTES = 64 << 20


def decode_bank(bank: BankSpec, encoded: torch.Tensor, slot: torch.Tensor) -> None:
    """Write the tensors of `bank` into `slot` from the bytes on the link, `encoded`; both flat uint8 on one device.

    Raises InputError if `bank` does not have the parts that its store knows, as in the plan of a graph.
    """
    if not bank.parts:
        raise InputError(
            f"bank {bank.name} rests as {bank.format.decoder!r}, and its plan does not say how to decode it"
        )
    with torch.no_grad():
        tensors = dict(zip((tensor.name for tensor in bank.tensors), slot_tensors(bank, slot), strict=True))
        for part in bank.parts:
            target = tensors[part.tensor.name]
            stored = {role: bank.stored[index].view(encoded) for role, index in part.stored}
            if isinstance(target, BlockScaledWeights):
                copy_fp8(part, stored, target)
                continue
            tensor = target.narrow(part.dim, part.start, part.stop - part.start)
            if part.formula is None:
                tensor.copy_(stored[Role.VALUES])
            else:
                with naming_damage(bank, part):
                    decode_matrices(part.formula, stored, tensor)


@contextlib.contextmanager
def naming_damage(bank: BankSpec, part: DecodedPart) -> Iterator[None]:
    """Add the names of the bank and the tensor to a CheckpointError of a damaged matrix."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{bank.name}, {part.tensor.name}: {error}", name=bank.name) from None


def decode_matrices(formula: Formula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    """Decode the matrices of contiguous `stored` tensors, each [experts, ...], into `target` [experts, ...].

    Raises CheckpointError on a CPU if packed matrices do not have their checksums.
    """
    if isinstance(formula, MatrixFormula):
        _decode_scaled(formula, stored, target)
    elif target.dtype == formula.type.dtype and can_decode(target):
        decode_floats_on_cpu(formula, stored, target)
    elif target.dtype == formula.type.dtype and target.device.type == "cuda" and (decoder := _triton_decoder()):
        decoder.decode_floats_by_triton(formula, stored, target)
    else:
        for start in range(len(target)):
            matrix = {role: values[start : start + 1] for role, values in stored.items()}
            target[start : start + 1].copy_(formula.decode(matrix, target.dtype))


def check_matrices(formula: PackedFormula, stored: Mapping[Role, torch.Tensor]) -> None:
    """Raise CheckpointError if packed matrices of contiguous `stored` tensors do not have their checksums."""
    if stored[Role.VALUES].device.type == "cpu" and library() is not None:
        check_floats_on_cpu(stored)
    else:
        formula.check(stored)


def _decode_scaled(formula: MatrixFormula, stored: Mapping[Role, torch.Tensor], target: torch.Tensor) -> None:
    compiled = _compiled_decoder(target)
    temporary = stored[Role.SCALES] if compiled else target
    count = max(1, _TEMPORARY_BYTES * len(target) // (4 * temporary.numel() or 1))
    for start in range(0, len(target), count):
        experts = {role: values[start : start + count] for role, values in stored.items()}
        decoded = target[start : start + count]
        if compiled:
            compiled(formula, experts, decoded)
        else:
            decoded.copy_(formula.decode(experts, target.dtype))


def _compiled_decoder(target: torch.Tensor) -> Callable[..., None] | None:
    """Return the compiled decoder for `target`; None if torch decodes."""
    if can_decode(target):
        return decode_on_cpu
    if target.device.type != "cuda" or target.dtype not in DECODED_DTYPES:
        return None
    decoder = _triton_decoder()
    return None if decoder is None else decoder.decode_by_triton


@functools.cache
def _triton_decoder() -> Any:
    """Return the module that decodes by Triton; None if there is no Triton."""
    try:
        from moepass.runtime.kernels import triton_decoder
    except ImportError:
        logger.warning(
            "quantised experts are decoded by operations of torch, many times slower than by Triton: there is none"
        )
        return None
    return triton_decoder
