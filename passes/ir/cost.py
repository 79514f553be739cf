"""Sums of the costs of a graph's nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moepass.models.formulas.text import evaluate_text


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs, bytes of memory traffic, and bytes to and from other ranks, each an expression in the graph's sizes."""

    flops: str = "0"
    memory_bytes: str = "0"
    communication_bytes: str = "0"

    def at(self, sizes: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the three numbers for these sizes. Raises InputError if a size is missing."""
        flops, memory, moved = (
            evaluate_text(text, sizes) for text in (self.flops, self.memory_bytes, self.communication_bytes)
        )
        return flops, memory, moved
