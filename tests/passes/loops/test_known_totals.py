"""Loops over slices by counts: the host reads no counts if their sum is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from moepass.passes.graph.nodes import is_call
from moepass.passes.loops.known_totals import known_total
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.runtime.lowering.lower_segments import decompositions
from tests.helpers.graphs.rewritten_loops import rewrite_loop
from tests.helpers.project_styles.local_loops import EXPERTS, HIDDEN, TOP_K
from tests.helpers.project_styles.slice_loops import SlicesByCounts, SlicesWithBiases, read_counts

aten = torch.ops.aten
Tensor = torch.Tensor


class Counted(SlicesByCounts):
    """A loop over slices of sorted rows; `count` returns the number of rows of each expert."""

    def count(self, chosen: Tensor) -> Tensor:
        return chosen.new_zeros(EXPERTS).scatter_add(0, chosen.view(-1), torch.ones_like(chosen.view(-1)))

    def forward(self, hidden: Tensor) -> Tensor:
        _, chosen = (hidden @ self.router.T).topk(TOP_K, dim=-1)
        order = chosen.view(-1).argsort(stable=True)
        rows = self.run(hidden[order // TOP_K], self.count(chosen), hidden)
        return hidden.new_zeros(order.shape[0], HIDDEN).index_copy(0, order[: rows.shape[0]], rows)


class ByMask(Counted):
    """A model that counts as DeepSeek does."""

    def count(self, chosen: Tensor) -> Tensor:
        return chosen.new_zeros((chosen.shape[0], EXPERTS)).scatter_(1, chosen, 1).sum(0)


class ByHistogram(Counted):
    def count(self, chosen: Tensor) -> Tensor:
        return torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).long()


class OfSortedIds(Counted):
    def count(self, chosen: Tensor) -> Tensor:
        return F.one_hot(chosen.view(-1).sort()[0], EXPERTS).sum(0)


class OfSomeTokens(Counted):
    """Only the rows of the first tokens are computed, fewer than there are."""

    def count(self, chosen: Tensor) -> Tensor:
        return F.one_hot(chosen[:3].reshape(-1), EXPERTS).sum(0)


class OfOtherIds(Counted):
    """The ids come from no top-k, and some are beyond the counted experts."""

    def count(self, chosen: Tensor) -> Tensor:
        return torch.histc((chosen * 2).float(), bins=EXPERTS, min=0, max=EXPERTS - 1).long()


class CountsReturned(SlicesByCounts):
    """The graph returns a number that the host read."""

    def run(self, rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        sizes = read_counts(counts)
        outputs, start = [], 0
        for expert, size in zip(self.experts, sizes, strict=True):
            torch._check(start + size <= rows.shape[0])
            outputs.append(expert(rows[start : start + size]))
            start = start + size
        return torch.cat(outputs) + sizes[0]


def count_host_reads(model: nn.Module) -> int:
    """Return how many numbers the host reads in the graph of `model` after the pass."""
    module, _ = rewrite_loop(model, passes=(write_grouped_gemms,), counts=(11, 29, 4))
    return sum(is_call(node, aten._local_scalar_dense.default) for node in module.graph.nodes)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    "model",
    [SlicesByCounts, SlicesWithBiases, Counted, ByMask, ByHistogram, OfSortedIds],
    ids=lambda model: model.__name__,
)
def test_counts_with_a_known_total_are_not_read(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert count_host_reads(model()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", [OfSomeTokens, OfOtherIds, CountsReturned], ids=lambda model: model.__name__)
def test_counts_without_a_known_total_are_read(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert count_host_reads(model()) == EXPERTS


@pytest.mark.parametrize(
    ("dtype", "experts", "is_known"),
    [(torch.int8, 128, True), (torch.int8, 129, False), (torch.bfloat16, 256, True), (torch.bfloat16, 300, False)],
)
def test_ids_in_a_type_that_does_not_hold_them_may_be_of_no_expert(
    dtype: torch.dtype, experts: int, is_known: bool
) -> None:
    def count(scores: Tensor) -> Tensor:
        return torch.histc(scores.topk(2)[1].to(dtype).float(), experts, 0, experts - 1).long()

    module = make_fx(count, decompositions("eager"), tracing_mode="fake")(torch.zeros(5, experts))
    (counts,) = module.graph.output_node().all_input_nodes
    total = known_total(counts, experts)
    assert total == (10 if is_known else None)
