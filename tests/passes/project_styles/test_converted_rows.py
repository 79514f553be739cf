"""Casts of rows and weights between exchanges are repeated or refused, and never dropped."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from moepass.models.reference.grouped_experts import grouped_gemm
from moepass.passes.ir.protocol import PassResult
from moepass.passes.parallel.eliminate_expert_parallelism import texts_of
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.graphs.simulated_ranks import (
    Captured,
)
from tests.helpers.project_styles.exact_style import ExactLayer
from tests.helpers.project_styles.style_layers import capture_layer, eliminate_readably
from tests.helpers.project_styles.style_sizes import BiasedExpert, StyleSizes, stacked

SIZES = StyleSizes()
Change = Callable[[torch.Tensor], torch.Tensor]
HALF, SHORT = torch.float16, torch.bfloat16


def same(values: torch.Tensor) -> torch.Tensor:
    return values


class CastLayer(ExactLayer):
    """Grouped GEMMs on rows that are changed after their exchange, for one GEMM, and before they are sent back.

    `arrived`, `again` and `sent` are these changes; `weight` changes the first weights.
    """

    def __init__(
        self,
        group: ProcessGroup,
        arrived: Change = same,
        sent: Change = same,
        weight: Change = same,
        again: Change = same,
        wire: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(SIZES, group)
        self.arrived, self.sent, self.weight, self.again, self.wire = arrived, sent, weight, again, wire
        experts = [BiasedExpert(SIZES, number) for number in self.owned]
        self.up, self.down = stacked([expert.up for expert in experts]), stacked([expert.down for expert in experts])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        ids, order = chosen.view(-1).sort(stable=True)
        counts = F.one_hot(ids, self.sizes.experts).sum(dim=0)
        arriving, send, receive = self.exchange_counts(counts)
        rows = hidden[order // self.sizes.top_k].to(self.wire)
        arrived = self.arrived(exchange_rows(rows, send, receive, self.group_name))
        owned = len(self.owned)
        expert_of = torch.arange(owned, device=hidden.device).repeat(self.ranks)
        by_expert = expert_of.repeat_interleave(arriving, output_size=arrived.shape[0]).argsort(stable=True)
        ends = arriving.view(self.ranks, owned).sum(dim=0).cumsum(0, dtype=torch.int32)
        placed = arrived[by_expert]
        up = self.weight(self.up).transpose(1, 2)
        inner = F.gelu(grouped_gemm(placed, up, ends)) * grouped_gemm(self.again(placed), up, ends)
        joined = grouped_gemm(inner, self.down.transpose(1, 2), ends)
        outputs = torch.empty_like(joined)
        outputs[by_expert] = joined
        returned = exchange_rows(self.sent(outputs), receive, send, self.group_name).float()
        weighed = returned * scores.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, order // self.sizes.top_k, weighed)


def _captured(rank: int, **changes: Change | torch.dtype) -> Captured:
    return capture_layer(functools.partial(CastLayer, **changes), rank, 2, sizes=SIZES)  # type: ignore[arg-type]


def _check_right(captured: list[Captured], results: list[PassResult]) -> None:
    assert [collective_kinds(result) for result in results] == [[], []]
    check_same_outputs(captured, results, [(30, 7)], hidden=SIZES.hidden, dtype=SIZES.dtype)


# Each case rounds so coarsely that a missing or reordered cast changes the result.
TAKEN: dict[str, dict[str, Change | torch.dtype]] = {
    "wire": {"wire": SHORT, "arrived": lambda rows: rows.float(), "sent": lambda rows: rows.to(SHORT)},
    "twice": {"arrived": lambda rows: rows.to(HALF).to(SHORT).float(), "sent": lambda rows: rows.to(HALF).float()},
    "joined with zeros of another type": {
        "wire": SHORT,
        "arrived": lambda rows: torch.cat([rows, rows.new_zeros(1, rows.shape[1], dtype=torch.float32)])[:-1],
    },
}


@pytest.mark.parametrize(
    "case", ["twice", *(pytest.param(name, marks=pytest.mark.slow) for name in TAKEN if name != "twice")]
)
def test_rows_are_cast_as_they_were(case: str) -> None:
    captured = [_captured(rank, **TAKEN[case]) for rank in range(2)]
    results = [eliminate_readably(captured_rank) for captured_rank in captured]
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all"], result.plan.refusals
    _check_right(captured, results)


REFUSED: dict[str, tuple[dict[str, Change | torch.dtype], str]] = {
    "computed with": (
        {"arrived": lambda rows: (rows.to(SHORT) * 3).float() / 3},
        "are computed with before its GEMMs",
    ),
    "by one of two GEMMs": ({"again": lambda rows: rows.to(SHORT).float()}, "cast in different ways"),
    "in places": (
        {"arrived": lambda rows: torch.where(rows > 0, rows, rows.to(SHORT).float())},
        "expected the same casts of all rows|decides",
    ),
    "bits": ({"arrived": lambda rows: rows.view(torch.int32).view(torch.float32)}, "its collectives stay"),
    "weights by their own": ({"weight": lambda weight: weight.sin()}, "expected casts, views, slices"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_changes_other_than_casts_are_refused(case: str) -> None:
    changes, reason = REFUSED[case]
    result = eliminate_readably(_captured(0, **changes))
    assert not result.plan.local_blocks
    reasons = " ".join(refusal.reason for refusal in result.refusals)
    assert re.search(reason, reasons), reasons


@pytest.mark.slow
def test_ranks_may_compute_their_weights_differently() -> None:
    """Each rank contributes the weights that its own experts use."""
    captured = [_captured(0, weight=lambda weight: weight * 2), _captured(1)]
    results = [eliminate_readably(captured_rank) for captured_rank in captured]
    signatures = {block.signature for result in results for block in result.plan.local_blocks}
    assert len(signatures) == 1
    _check_right(captured, results)


@pytest.mark.slow
def test_ranks_that_cast_rows_differently_have_other_signatures() -> None:
    uncast, cast_result = (
        eliminate_readably(_captured(0, arrived=change)) for change in (same, lambda rows: rows.to(SHORT).float())
    )
    (block,), (cast,) = uncast.plan.local_blocks, cast_result.plan.local_blocks
    assert block.signature != cast.signature
    (line,) = set(texts_of(cast_result.module, cast)[0]) - set(texts_of(uncast.module, block)[0])
    assert "torch.bfloat16" in line
