"""Rows that a rank sends to experts in a mock run, and the outputs of the experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from moepass.passes.parallel.mock.mock_run import MockRun, repeat_each


@dataclasses.dataclass(frozen=True)
class SentRows:
    """Rows for `experts`, sorted by expert, and their `counts` [E]; `travelling` values have one entry per row."""

    rows: torch.Tensor
    counts: torch.Tensor
    experts: range
    travelling: tuple[torch.Tensor, ...]
    # Counts [E] for the experts of all ranks, for blocks in which ranks gather them.
    all_counts: torch.Tensor

    @staticmethod
    def draw(
        run: MockRun,
        choose: Callable[[torch.Generator, int, int], torch.Tensor],
        pairs: int,
        experts: range,
        capacity: int | None,
    ) -> SentRows:
        """Draw `pairs` rows for experts that `choose` draws, or `capacity` rows for each of `experts`."""
        total = run.block.experts
        counts = torch.zeros(total, dtype=torch.int64)
        if capacity is not None:
            counts[experts.start : experts.stop] = capacity
        elif len(experts):
            counts = torch.bincount(experts.start + choose(run.generator, pairs, len(experts)), minlength=total)
        number = int(counts.sum())
        all_counts = torch.randint(0, 5, (total,), generator=run.generator)
        all_counts[experts.start : experts.stop] = counts[experts.start : experts.stop]
        rows = run.random_rows(number, run.mock.widths[0][0])
        return SentRows(rows, counts, experts, _draw_travelling(run, number), all_counts)

    def sent_to(self, experts: range, bounds: Sequence[int], rank: int) -> SentRows:
        """Return the rows for the `experts` of `rank`."""
        sizes = self.sizes_by_rank(bounds)
        counts = torch.zeros_like(self.counts)
        counts[experts.start : experts.stop] = self.counts[experts.start : experts.stop]
        rows, *travelling = (values.split(sizes)[rank] for values in (self.rows, *self.travelling))
        return SentRows(rows, counts, experts, tuple(travelling), self.counts)

    def sizes_by_rank(self, bounds: Sequence[int]) -> list[int]:
        ends = [0, *self.counts.cumsum(0).tolist()]
        return [ends[stop] - ends[start] for start, stop in itertools.pairwise(bounds)]


def _draw_travelling(run: MockRun, rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(run.random_rows(rows, *run.mock.shape(node)[1:]) for node in run.block.travelling)


def expert_outputs(run: MockRun, senders: Sequence[SentRows]) -> torch.Tensor:
    """Return the output of its expert for each row of `senders`, one sender after the other."""
    experts = torch.arange(run.block.experts).repeat(len(senders))
    ids = repeat_each(experts, torch.cat([sender.counts for sender in senders]))
    travelling = [torch.cat(values) for values in zip(*(sender.travelling for sender in senders), strict=True)]
    return run.experts(torch.cat([sender.rows for sender in senders]), ids, travelling)
