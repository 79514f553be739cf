"""The record of how much memory a run's activations take at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moepass.models.errors import InputError
from moepass.models.formulas.text import evaluate_text
from moepass.passes.ir.token_chunks import largest_chunk

# Chunks that a plan may choose. [Empirical] GEMMs of fewer rows are slower on every device that was measured; more rows
# than the most make none faster.
LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 256, 8192


@dataclasses.dataclass(frozen=True)
class ActivationPeak:
    """Bytes that are held while the operation at `where` runs, an expression in the graph's sizes.

    It may name `chunk_tokens`, the tokens of the largest chunk.
    """

    nbytes: str
    where: str


@dataclasses.dataclass(frozen=True)
class ActivationMemory:
    """The most bytes that a run holds at once, beyond its inputs, weights and slots: the largest of `peaks`.

    `source` says how they were found. `chunk_tokens` are the most that run at a time in what treats every token alone;
    None: all of them. With `room_bytes` a run chooses chunks by its sizes, so that no more is held: the memory budget
    without weights and slots.
    """

    peaks: tuple[ActivationPeak, ...]
    source: str
    chunk_tokens: int | None = None
    room_bytes: float | None = None

    def largest(
        self, sizes: Mapping[str, float], sequences: tuple[int, int] | None = None, chunk_tokens: int | None = None
    ) -> tuple[float, str]:
        """The bytes for these sizes, and the operation that runs when they are held; 0 where nothing is.

        `sequences` are the number of sequences and the tokens of each; None: not known, so that chunks count as full
        ones. `chunk_tokens` stand in for those of this record. Raises InputError where a size is missing or below 0.
        """
        for name, size in sizes.items():
            if isinstance(size, (int, float)) and size < 0:
                raise InputError(f"{name} is {size}, and no size is below 0", name=name, value=size, expected=0)
        most = self.chunk_tokens if chunk_tokens is None else chunk_tokens
        if most is not None:
            sizes = {**sizes, "chunk_tokens": most if sequences is None else largest_chunk(*sequences, most)}
        found = [(float(evaluate_text(peak.nbytes, sizes)), peak.where) for peak in self.peaks]
        return max(found, default=(0.0, ""))

    def chosen_chunk_tokens(self, sizes: Mapping[str, float], sequences: tuple[int, int] | None) -> tuple[int, float]:
        """The largest chunk with which no more than `room_bytes` are held, and the bytes that are held then.

        Where none does, the least. Raises InputError where a size is missing.
        """
        assert self.room_bytes is not None
        chunk = MOST_CHUNK_TOKENS
        while True:
            nbytes, _ = self.largest(sizes, sequences, chunk)
            if nbytes <= self.room_bytes or chunk <= LEAST_CHUNK_TOKENS:
                return chunk, nbytes
            chunk //= 2
