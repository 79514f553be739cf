"""Bytes of weights in checkpoint formats, and of a bank at rest, on the link and in a slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from moepass.models.formulas.layers import attention_matrices, expert_parameters, model_parameters
from moepass.models.formulas.memory import bank_bytes, element_bytes, resident_bytes
from moepass.models.sizes.architecture import Architecture, Experts, Layer
from moepass.models.sizes.weight_formats import ATTENTION, DENSE_MLP, EXPERTS, SHARED_EXPERTS, WeightFormat


@dataclasses.dataclass(frozen=True)
class BankSizes:
    """Bytes of one bank at rest, on a link, and in the slot that kernels read."""

    home_bytes: int
    link_bytes: int
    slot_bytes: int

    @property
    def is_encoded(self) -> bool:
        """True if the bank is decoded into its slot."""
        return self.link_bytes != self.slot_bytes

    @property
    def encoded_bytes(self) -> int:
        """Bytes of the buffer from which the bank is decoded; 0 if it travels as it is in its slot."""
        return self.link_bytes if self.is_encoded else 0


class DecodedBankSizes(BankSizes):
    """Bytes of a bank that is decoded into its slot even if it takes as many bytes there: into FP8 and its scales."""

    @property
    def is_encoded(self) -> bool:
        """True for every size."""
        return True


def bank_sizes(experts: Experts, hidden: int, dtype: str, stored: WeightFormat | None = None) -> BankSizes:
    """Return the sizes of a bank whose experts are computed in `dtype`.

    With `stored`, the bank rests and travels in the checkpoint's format. The slot holds the stored values and their
    scales in fp32 if kernels compute in this format, else the weights in `dtype`.
    """
    plain = bank_bytes(experts, hidden, dtype)
    if stored is None or EXPERTS not in stored.parts:
        return BankSizes(plain, plain, plain)
    # Biases are not quantised; they are in bf16 where matrices are in fp8.
    wide = "bf16" if dtype == "fp8" else dtype
    sizes = [(rows, columns) for _, rows, columns in _expert_matrices(experts, hidden)]
    biases = expert_parameters(experts, hidden) - sum(rows * columns for rows, columns in sizes)

    def nbytes(format: WeightFormat) -> int:
        matrices = sum(format.matrix_bytes(rows, columns) for rows, columns in sizes)
        return experts.count * (matrices + biases * element_bytes(wide))

    if stored.name == dtype:
        return DecodedBankSizes(nbytes(stored), nbytes(stored), nbytes(dataclasses.replace(stored, scale_bytes=4)))
    return BankSizes(nbytes(stored), nbytes(stored), plain)


def dense_bytes(architecture: Architecture, dtype: str, stored: WeightFormat | None = None) -> int:
    """Return the bytes of all weights except the banks, with `stored` in the checkpoint's format."""
    if stored is None:
        return resident_bytes(architecture, dtype)
    wide = element_bytes("bf16" if dtype == "fp8" else dtype)
    hidden, saved = architecture.hidden, 0
    routed = 0
    for layer, count in architecture.layer_counts.items():
        if layer.experts is not None:
            routed += count * layer.experts.count * expert_parameters(layer.experts, hidden)
        for _, rows, columns in layer_matrices(layer, hidden, set(stored.parts) - {EXPERTS}):
            saved += count * (rows * columns * wide - stored.matrix_bytes(rows, columns))
    return (model_parameters(architecture) - routed) * wide - saved


def layer_matrices(layer: Layer, hidden: int, parts: Collection[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (part, rows, columns) for each matrix of `parts` of a layer.

    Of the routed experts, only one is yielded. Raises InputError for attention other than softmax attention.
    """
    if ATTENTION in parts:  # the matrices of other attention cannot be counted
        for rows, columns in attention_matrices(layer.attention, hidden):
            yield ATTENTION, rows, columns
    matrices: list[tuple[str, int, int]] = []
    if layer.experts is None:
        assert layer.dense_width is not None
        matrices += _mlp_matrices(DENSE_MLP, hidden, layer.dense_width, True)
    else:
        matrices += _expert_matrices(layer.experts, hidden)
        if layer.experts.shared_width:
            matrices += _mlp_matrices(SHARED_EXPERTS, hidden, layer.experts.shared_width, layer.experts.gated)
    yield from (matrix for matrix in matrices if matrix[0] in parts)


def _expert_matrices(experts: Experts, hidden: int) -> Iterator[tuple[str, int, int]]:
    return _mlp_matrices(EXPERTS, hidden, experts.width, experts.gated)


def _mlp_matrices(part: str, hidden: int, width: int, gated: bool) -> Iterator[tuple[str, int, int]]:
    yield from [(part, width, hidden)] * (2 if gated else 1)
    yield part, hidden, width
