"""The record of how much memory a run's activations take at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moepass.models.formulas.text import evaluate_text


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
    None: all of them.
    """

    peaks: tuple[ActivationPeak, ...]
    source: str
    chunk_tokens: int | None = None

    def largest(self, sizes: Mapping[str, float], chunk_tokens: int | None = None) -> tuple[float, str]:
        """The bytes for these sizes, and the operation that runs when they are held; 0 where nothing is.

        `chunk_tokens` are the tokens of the largest chunk. Raises InputError where a size is missing.
        """
        given = sizes if chunk_tokens is None else {**sizes, "chunk_tokens": chunk_tokens}
        found = [(float(evaluate_text(peak.nbytes, given)), peak.where) for peak in self.peaks]
        return max(found, default=(0.0, ""))
