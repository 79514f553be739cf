"""Packing of stacks of float matrices: each matrix in a thread, then all of them to sections of one length."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moepass.models.layouts.layout import Role
from moepass.models.layouts.packed_floats import CHECKSUM_BYTES, sealed
from moepass.models.layouts.weight_layout import PackedMatrixFormula
from moepass.runtime.kernels.cpu_encoder import can_encode, encode_floats_on_cpu, seal_on_cpu

# Matrices that wait for each thread, so that none waits for the reading of the next one.
_WAITING = 2


@dataclasses.dataclass(frozen=True)
class EncodedMatrices:
    """Packed matrices of one shape, whose sections still have different lengths.

    Attributes:
        values: [matrices, rows, bytes]
        sections: sections of each matrix, with the 8 bytes that pad them in place of their own checksum
    """

    values: torch.Tensor
    sections: Sequence[torch.Tensor]

    @property
    def section_bytes(self) -> int:
        """The least bytes of sections for every matrix."""
        return max(map(len, self.sections), default=0)

    def stored(self, section_bytes: int) -> dict[Role, torch.Tensor]:
        """Return the stored tensors with sections of `section_bytes`, a multiple of 8."""
        sections = torch.empty(len(self.sections), section_bytes, dtype=torch.uint8, device="cpu")
        for row, encoded in zip(sections, self.sections, strict=True):
            row[: len(encoded)] = encoded
            row[len(encoded) :].view(torch.int64)[:] = encoded[8:CHECKSUM_BYTES].view(torch.int64)
        if can_encode():
            seal_on_cpu(sections)
        else:
            for values, row in zip(self.values, sections, strict=True):
                row[:] = sealed(values, row[CHECKSUM_BYTES:])[Role.SECTIONS]
        return {Role.VALUES: self.values, Role.SECTIONS: sections}


def encode_matrices(
    formula: PackedMatrixFormula, matrices: Iterable[torch.Tensor], shape: tuple[int, int, int]
) -> EncodedMatrices:
    """Pack contiguous `matrices` in memory, of `shape` together, in as many threads as torch computes with.

    A matrix is taken from the iterable, in the calling thread, when a thread will soon pack it.
    """
    count, rows, columns = shape
    values = torch.empty(count, rows, columns * formula.type.value_bytes, dtype=torch.uint8, device="cpu")
    running: deque[Future[torch.Tensor]] = deque()
    sections = []
    threads = torch.get_num_threads()
    # Asked once, because it may compile the source.
    encode = encode_floats_on_cpu if can_encode() else _encode_by_torch
    with ThreadPoolExecutor(threads) as pool:
        for matrix, target in zip(matrices, values, strict=True):
            running.append(pool.submit(encode, formula, matrix, target))
            if len(running) > _WAITING * threads:
                sections.append(running.popleft().result())
        sections += [future.result() for future in running]
    return EncodedMatrices(values, sections)


def _encode_by_torch(formula: PackedMatrixFormula, matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write and return what `encode_floats_on_cpu` does, by operations of torch."""
    stored = formula.encode(matrix)
    values.copy_(stored[Role.VALUES])
    sections = stored[Role.SECTIONS]
    sections[8:CHECKSUM_BYTES] = formula.padding(stored, 8)
    return sections
