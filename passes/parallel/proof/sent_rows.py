"""Rows that a rank sends to experts in a mock run, sorted by expert, and what the experts give for them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from moepass.passes.parallel.mock.mock_run import MockRun, repeat_each


@dataclasses.dataclass(frozen=True)
class SentRows:
    """Rows sorted by expert and `counts` [E] of them; with a capacity, that many slots for each of `experts`."""

    rows: torch.Tensor
    counts: torch.Tensor
    experts: range
    capacity: int | None
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
        total = run.block.experts
        counts = torch.zeros(total, dtype=torch.int64)
        if len(experts):
            chosen = experts.start + draw(run.generator, pairs, len(experts))
            counts = torch.bincount(chosen, minlength=total)
        width = run.mock.widths[0][0]
        number = pairs if len(experts) else 0
        if capacity is not None:
            number, counts = len(experts) * capacity, counts.clamp(max=capacity)
            if run.block.form == "all_to_all_slots":
                counts[experts.start : experts.stop] = capacity
        all_counts = torch.randint(0, 5, (total,), generator=run.generator)
        all_counts[experts.start : experts.stop] = counts[experts.start : experts.stop]
        return SentRows(run.random_rows(number, width), counts, experts, capacity, _beside(run, number), all_counts)

    def part_of(self, experts: range, bounds: Sequence[int], rank: int) -> SentRows:
        """What goes to the experts of one rank."""
        sizes = self.sizes_by_rank(bounds)
        counts = torch.zeros_like(self.counts)
        counts[experts.start : experts.stop] = self.counts[experts.start : experts.stop]
        rows, *travelling = (beside.split(sizes)[rank] for beside in (self.rows, *self.travelling))
        return SentRows(rows, counts, experts, self.capacity, tuple(travelling), self.counts)

    def sizes_by_rank(self, bounds: Sequence[int]) -> list[int]:
        if self.capacity is not None:
            return [(stop - start) * self.capacity for start, stop in itertools.pairwise(bounds)]
        before = [0, *self.counts.cumsum(0).tolist()]
        return [before[stop] - before[start] for start, stop in itertools.pairwise(bounds)]

    def filled(self) -> torch.Tensor:
        """Which of the rows are rows, and not slots without one."""
        if self.capacity is None:
            return torch.ones(len(self.rows), dtype=torch.bool)
        counts = self.counts[self.experts.start : self.experts.stop]
        return (torch.arange(self.capacity) < counts.unsqueeze(-1)).view(-1)


def _beside(run: MockRun, rows: int) -> tuple[torch.Tensor, ...]:
    """What travels with so many rows."""
    return tuple(run.random_rows(rows, *run.mock.shape(node)[1:]) for node in run.block.travelling)


def expert_outputs(run: MockRun, parts: Sequence[SentRows]) -> torch.Tensor:
    """What the experts give for `parts`, one after the other: each row's output in its place, zeros for empty slots."""
    rows, filled = torch.cat([part.rows for part in parts]), torch.cat([part.filled() for part in parts])
    experts = torch.arange(run.block.experts).repeat(len(parts))
    ids = repeat_each(experts, torch.cat([part.counts for part in parts]))
    travelling = [torch.cat(beside)[filled] for beside in zip(*(part.travelling for part in parts), strict=True)]
    found = run.experts(rows[filled], ids, travelling)
    outputs = torch.zeros(len(rows), found.shape[1], dtype=torch.float64)
    outputs[filled] = found
    return outputs
