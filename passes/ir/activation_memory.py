"""Record of the memory that the activations of a run take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moepass.models.errors import InputError
from moepass.models.formulas.text import evaluate_text
from moepass.passes.ir.token_chunks import largest_chunk

# Chunks that a plan may choose. [Empirical] GEMMs of fewer rows are slower on every measured device, and more rows make
# none faster.
LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 256, 8192


@dataclasses.dataclass(frozen=True)
class ActivationPeak:
    """Bytes of activations while the operation at `where` runs, as an expression in the graph's sizes.

    The expression may use `chunk_tokens`, the tokens of the largest chunk.
    """

    nbytes: str
    where: str


@dataclasses.dataclass(frozen=True)
class ActivationMemory:
    """The largest of `peaks`: the peak bytes of a run without its inputs, weights and slots.

    Attributes:
        source: how the peaks were determined
        chunk_tokens: the largest number of tokens that token-wise operations process at a time; None for all at once
        room_bytes: memory budget without weights and slots. A run chooses its chunks by its sizes to stay within it.
            With None, runs choose no chunks
    """

    peaks: tuple[ActivationPeak, ...]
    source: str
    chunk_tokens: int | None = None
    room_bytes: float | None = None

    def largest(
        self, sizes: Mapping[str, float], sequences: tuple[int, int] | None = None, chunk_tokens: int | None = None
    ) -> tuple[float, str]:
        """Return the peak bytes for these sizes and the operation that runs then; 0 if nothing is held.

        Args:
            sizes: Values of the graph's symbols.
            sequences: The number of sequences and the tokens of each; None if unknown, so that chunks count as full.
            chunk_tokens: Replaces the `chunk_tokens` of this record.

        Raises:
            InputError: A size is missing or negative.
        """
        for name, size in sizes.items():
            if isinstance(size, (int, float)) and size < 0:
                raise InputError(f"{name} is {size}; a size must be 0 or more", name=name, value=size, expected=0)
        most = self.chunk_tokens if chunk_tokens is None else chunk_tokens
        if most is not None:
            sizes = {**sizes, "chunk_tokens": most if sequences is None else largest_chunk(*sequences, most)}
        candidates = [(float(evaluate_text(peak.nbytes, sizes)), peak.where) for peak in self.peaks]
        return max(candidates, default=(0.0, ""))

    def chosen_chunk_tokens(self, sizes: Mapping[str, float], sequences: tuple[int, int] | None) -> tuple[int, float]:
        """Return the largest chunk that keeps the peak within `room_bytes`, and the peak.

        Returns the smallest chunk if none fits. Raises InputError if a size is missing.
        """
        assert self.room_bytes is not None
        chunk = MOST_CHUNK_TOKENS
        while True:
            nbytes, _ = self.largest(sizes, sequences, chunk)
            if nbytes <= self.room_bytes or chunk <= LEAST_CHUNK_TOKENS:
                return chunk, nbytes
            chunk //= 2
