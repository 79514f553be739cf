"""Rows that a rank sends to experts in a mock run, and the outputs of the experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from moepass.passes.parallel.mock.mock_run import MockRun, repeat_each
from moepass.passes.parallel.mock.scenarios import Draw


@dataclasses.dataclass(frozen=True)
class SentRows:
    """The `values` that a rank sends, rows first, then those that travel with them: one entry per row, by expert.

    `counts` [E] are the numbers of rows. `all_counts` [E] also has those for experts of other ranks, which a rank sends
    if ranks gather counts.
    """

    values: tuple[torch.Tensor, ...]
    counts: torch.Tensor
    all_counts: torch.Tensor

    @staticmethod
    def draw(run: MockRun, choose: Draw, pairs: int, experts: range, capacity: int | None) -> SentRows:
        """Draw `pairs` rows for experts that `choose` draws, or `capacity` rows for each of `experts`."""
        total = run.block.experts
        counts = torch.zeros(total, dtype=torch.int64)
        if capacity is not None:
            counts[experts.start : experts.stop] = capacity
        elif len(experts):
            counts = torch.bincount(experts.start + choose(run.generator, pairs, len(experts)), minlength=total)
        all_counts = torch.randint(0, 5, (total,), generator=run.generator)
        all_counts[experts.start : experts.stop] = counts[experts.start : experts.stop]
        shapes = [[run.mock.widths[0][0]], *(run.mock.shape(node)[1:] for node in run.block.travelling)]
        values = tuple(run.random_rows(int(counts.sum()), *shape) for shape in shapes)
        return SentRows(values, counts, all_counts)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.values[0])

    def sent_to(self, experts: range, bounds: Sequence[int], rank: int) -> SentRows:
        """Return the rows for the `experts` of `rank`."""
        sizes = self.sizes_by_rank(bounds)
        counts = torch.zeros_like(self.counts)
        counts[experts.start : experts.stop] = self.counts[experts.start : experts.stop]
        return SentRows(tuple(values.split(sizes)[rank] for values in self.values), counts, self.counts)

    def sizes_by_rank(self, bounds: Sequence[int]) -> list[int]:
        ends = [0, *self.counts.cumsum(0).tolist()]
        return [ends[stop] - ends[start] for start, stop in itertools.pairwise(bounds)]


def expert_outputs(run: MockRun, senders: Sequence[SentRows]) -> torch.Tensor:
    """Return the output of its expert for each row of `senders`, one sender after the other."""
    experts = torch.arange(run.block.experts).repeat(len(senders))
    ids = repeat_each(experts, torch.cat([sender.counts for sender in senders]))
    rows, *travelling = (torch.cat(values) for values in zip(*(sender.values for sender in senders), strict=True))
    return run.experts(rows, ids, travelling)
