"""How a number of tokens is cut into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [`first`, `first` + `tokens`) of each of the sequences [`sequence`, `sequence` + `sequences`).

    More than one sequence come whole. There are `all_sequences`, with `length` tokens each."""

    sequence: int
    sequences: int
    first: int
    tokens: int
    all_sequences: int
    length: int

    @property
    def count(self) -> int:
        return self.sequences * self.tokens


def chunks_of(sequences: int, length: int, most: int) -> Iterator[Chunk]:
    """Chunks of at most `most` tokens, of nearly equal sizes: of one sequence, or of several whole ones."""
    if not sequences or not length:
        return
    if length > most:
        number = -(-length // most)
        for sequence in range(sequences):
            for part in range(number):
                first, end = part * length // number, (part + 1) * length // number
                yield Chunk(sequence, 1, first, end - first, sequences, length)
        return
    number = -(-sequences // (most // length))
    for part in range(number):
        first, end = part * sequences // number, (part + 1) * sequences // number
        yield Chunk(first, end - first, 0, length, sequences, length)


def largest_chunk(sequences: int, length: int, most: int) -> int:
    """Tokens of the largest chunk of `chunks_of`; 0 where there are none."""
    if not sequences or not length:
        return 0
    if length > most:
        return -(-length // -(-length // most))
    return length * -(-sequences // -(-sequences // (most // length)))
