"""Rows that a rank sends to experts in a mock run, sorted by expert, and what the experts give for them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from moepass.passes.parallel.mock.mock_run import MockRun, repeat_each


@dataclasses.dataclass(frozen=True)
class SentRows:
    """Rows for `experts`, sorted by expert, and `counts` [E] of them."""

    rows: torch.Tensor
    counts: torch.Tensor
    experts: range
    travelling: tuple[torch.Tensor, ...]
    # What the rank tells of its counts for the experts of all ranks, where it does.
    all_counts: torch.Tensor

    @staticmethod
    def draw(
        run: MockRun,
        draw: Callable[[torch.Generator, int, int], torch.Tensor],
        pairs: int,
        experts: range,
        capacity: int | None,
    ) -> SentRows:
        """`pairs` rows, or `capacity` of each expert where every one has that many."""
        total = run.block.experts
        counts = torch.zeros(total, dtype=torch.int64)
        if capacity is not None:
            counts[experts.start : experts.stop] = capacity
        elif len(experts):
            counts = torch.bincount(experts.start + draw(run.generator, pairs, len(experts)), minlength=total)
        number = int(counts.sum())
        all_counts = torch.randint(0, 5, (total,), generator=run.generator)
        all_counts[experts.start : experts.stop] = counts[experts.start : experts.stop]
        rows = run.random_rows(number, run.mock.widths[0][0])
        return SentRows(rows, counts, experts, _beside(run, number), all_counts)

    def part_of(self, experts: range, bounds: Sequence[int], rank: int) -> SentRows:
        """What goes to the experts of one rank."""
        sizes = self.sizes_by_rank(bounds)
        counts = torch.zeros_like(self.counts)
        counts[experts.start : experts.stop] = self.counts[experts.start : experts.stop]
        rows, *travelling = (beside.split(sizes)[rank] for beside in (self.rows, *self.travelling))
        return SentRows(rows, counts, experts, tuple(travelling), self.counts)

    def sizes_by_rank(self, bounds: Sequence[int]) -> list[int]:
        before = [0, *self.counts.cumsum(0).tolist()]
        return [before[stop] - before[start] for start, stop in itertools.pairwise(bounds)]


def _beside(run: MockRun, rows: int) -> tuple[torch.Tensor, ...]:
    """What travels with so many rows."""
    return tuple(run.random_rows(rows, *run.mock.shape(node)[1:]) for node in run.block.travelling)


def expert_outputs(run: MockRun, parts: Sequence[SentRows]) -> torch.Tensor:
    """What the experts give for `parts`, one after the other: each row's output in its place."""
    experts = torch.arange(run.block.experts).repeat(len(parts))
    ids = repeat_each(experts, torch.cat([part.counts for part in parts]))
    travelling = [torch.cat(beside) for beside in zip(*(part.travelling for part in parts), strict=True)]
    return run.experts(torch.cat([part.rows for part in parts]), ids, travelling)
