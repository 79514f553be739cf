"""Division of a number of tokens into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [`first`, `first` + `tokens`) of each of the sequences [`sequence`, `sequence` + `sequences`).

    A chunk of more than one sequence has all of their tokens. In total there are `all_sequences` of `length` tokens.
    """

    sequence: int
    sequences: int
    first: int
    tokens: int
    all_sequences: int
    length: int

    @property
    def count(self) -> int:
        """Number of tokens in the chunk."""
        return self.sequences * self.tokens


def chunks_of(sequences: int, length: int, most: int) -> Iterator[Chunk]:
    """Yield chunks of at most `most` tokens and nearly equal sizes: parts of one sequence, or several complete ones."""
    if not sequences or not length:
        return
    if length > most:
        number = -(-length // most)
        for sequence in range(sequences):
            for index in range(number):
                first, end = index * length // number, (index + 1) * length // number
                yield Chunk(sequence, 1, first, end - first, sequences, length)
        return
    number = -(-sequences // (most // length))
    for index in range(number):
        first, end = index * sequences // number, (index + 1) * sequences // number
        yield Chunk(first, end - first, 0, length, sequences, length)


def largest_chunk(sequences: int, length: int, most: int) -> int:
    """Return the tokens of the largest chunk of `chunks_of`; 0 if there are no tokens."""
    if not sequences or not length:
        return 0
    if length > most:
        return -(-length // -(-length // most))
    return length * -(-sequences // -(-sequences // (most // length)))
