"""Gathered masks of chosen experts become gathered ids that select the same rows in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from moepass.models.reference.collectives import gather_rows
from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.nodes import copy_graph_module, fake_value
from moepass.passes.parallel.match.gathered_masks import replace_gathered_masks
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.readable_refusals import check_readable
from tests.helpers.graphs.simulated_ranks import (
    Captured,
    capture_module,
    hidden_rows,
    pretend_rank,
    run_ranks,
    with_tokens,
)
from tests.helpers.project_styles.gathered_style import GatheredOrder
from tests.helpers.project_styles.style_sizes import StyleSizes

RANKS, EXPERTS, TOP_K, WIDTH = 2, 6, 2, 8
Select = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
Choose = Callable[[torch.Tensor], torch.Tensor]


def whole(scores: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(scores).int().scatter(1, scores.topk(TOP_K, dim=1)[1], 1).bool()


def with_capacity(scores: torch.Tensor) -> torch.Tensor:
    mask = whole(scores)
    return mask & (mask.cumsum(0) <= 2)


class Selecting(nn.Module):
    """A layer that applies `select` to its columns of the gathered mask and probabilities [tokens, experts]."""

    def __init__(self, choose: Choose, select: Select, own: slice) -> None:
        super().__init__()
        self.choose, self.select, self.own = choose, select, own
        self.group_name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(WIDTH, EXPERTS, generator=generator), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = hidden @ self.weight
        mask = gather_rows(self.choose(scores), RANKS, self.group_name)
        probabilities = gather_rows(scores, RANKS, self.group_name)
        return tuple(self.select(mask[:, self.own], probabilities[:, self.own]))


def masked(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    by_expert = mask.T.contiguous()
    tokens = torch.arange(mask.shape[0]).unsqueeze(0).expand(mask.shape[1], -1).masked_select(by_expert)
    experts = torch.arange(mask.shape[1]).unsqueeze(1).expand(-1, mask.shape[0]).masked_select(by_expert)
    return tokens, experts, scores.T.contiguous().masked_select(by_expert), mask.sum(dim=0)


def indexed(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    return scores.double().t()[mask.t()] * 2, mask.t().reshape(-1).sum().reshape(1), mask.t().sum(dim=1)


def places(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    expert, token = mask.t().nonzero().unbind(dim=1)
    return expert + 1, token + 1, mask.int().sum(0)


def in_order(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = mask.t().reshape(-1)
    total = int(flat.sum().item())
    torch._check(total >= 0)
    torch._check(total <= flat.shape[0])
    order = flat.to(torch.int8).argsort(descending=True, stable=True)[:total]
    return order % mask.shape[0], order // mask.shape[0], scores.t().reshape(-1)[order]


SELECTIONS = {"masked_select": masked, "boolean index": indexed, "nonzero": places, "order": in_order}
MASKS = {"all that are chosen": whole, "up to a capacity": with_capacity}


def captured_ranks(choose: Choose, select: Select, own: Callable[[int], slice]) -> list[Captured]:
    captured = []
    for rank in range(RANKS):
        with pretend_rank(rank, RANKS):
            layer = Selecting(choose, select, own(rank))
            hidden = hidden_rows(WIDTH, 7, rank, torch.float32)
            captured.append(capture_module(layer, hidden, rank, RANKS, dynamic=True))
    return captured


def _columns(rank: int) -> slice:
    each = EXPERTS // RANKS
    return slice(rank * each, (rank + 1) * each)


def _is_mask(node: torch.fx.Node) -> bool:
    collective = collective_of(node)
    return collective is not None and fake_value(collective.input).dtype is torch.bool


def _looked_up(module: GraphModule) -> GraphModule:
    changed = copy_graph_module(module)
    lookups, reasons = replace_gathered_masks(changed.graph, ())
    assert reasons == {}
    assert [gather in changed.graph.nodes for gather in lookups] == [True]
    assert not any(map(_is_mask, changed.graph.nodes))
    changed.graph.lint()
    changed.recompile()
    return changed


@pytest.mark.sampled(every=4)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_selections_return_the_same(selection: str, mask: str) -> None:
    captured = captured_ranks(MASKS[mask], SELECTIONS[selection], _columns)
    changed = [_looked_up(captured_rank.module) for captured_rank in captured]
    for seed, tokens in enumerate((7, 1, 0, 30)):
        hidden = [hidden_rows(WIDTH, tokens, rank, torch.float32, seed) for rank in range(RANKS)]
        inputs = [with_tokens(captured_rank, rows) for captured_rank, rows in zip(captured, hidden, strict=True)]
        expected = run_ranks([captured_rank.module for captured_rank in captured], inputs)
        for outputs, wanted in zip(run_ranks(changed, inputs), expected, strict=True):
            for actual, reference in zip(outputs, wanted, strict=True):
                torch.testing.assert_close(actual, reference, rtol=0, atol=0)


def _by_token(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    return (scores.masked_select(mask),)


def _of_tokens(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    return (scores.t().masked_select(mask.t()), mask.sum(dim=1))


def _of_other_columns(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    return (scores[:, 1:].t().masked_select(mask[:, :-1].t()),)


def _of_some_tokens(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    return (scores[1:].t().masked_select(mask[1:].t()),)


def _unstable(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = mask.t().reshape(-1)
    total = int(flat.sum().item())
    torch._check(total >= 0)
    torch._check(total <= flat.shape[0])
    return (flat.to(torch.int8).argsort(descending=True)[:total] % mask.shape[0],)


def _of_fewer(mask: torch.Tensor, scores: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = mask.t().reshape(-1)
    total = int(mask[:, 1:].sum().item())
    torch._check(total >= 0)
    torch._check(total <= flat.shape[0])
    return (flat.to(torch.int8).argsort(descending=True, stable=True)[:total] % mask.shape[0],)


REFUSED: dict[str, tuple[Choose, Select, str]] = {
    "by token": (whole, _by_token, "masked_select"),
    "experts of a token counted": (whole, _of_tokens, "sum.dim_IntList"),
    "columns of other experts": (whole, _of_other_columns, "masked_select"),
    "some tokens": (whole, _of_some_tokens, "slice.Tensor"),
    "no stable order": (whole, _unstable, "sort"),
    "as many as other columns have": (whole, _of_fewer, "slice.Tensor"),
    "a threshold": (lambda scores: scores > 0, masked, "no more than k experts"),
    "the same expert twice": (
        lambda scores: torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, dim=1)[1].bool().long(), 1).bool(),
        masked,
        "no more than k experts",
    ),
    "more than the chosen": (lambda scores: whole(scores) | (scores > 1), masked, "no more than k experts"),
    "infinite times nothing": (lambda scores: (whole(scores) * scores.log()).bool(), masked, "no more than k experts"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_other_selections_are_unchanged(name: str) -> None:
    choose, select, said = REFUSED[name]
    module = captured_ranks(choose, select, _columns)[0].module
    changed = copy_graph_module(module)
    before = [(node.name, node.target) for node in changed.graph.nodes]
    lookups, reasons = replace_gathered_masks(changed.graph, ())
    ((node, reason),) = reasons.items()
    assert lookups == {}
    assert _is_mask(node)
    assert said in reason
    assert [(node.name, node.target) for node in changed.graph.nodes] == before


class _AlsoRead(Selecting):
    """A layer that also returns the gathered probabilities, or computes a value of them that is never read."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = hidden @ self.weight
        mask = gather_rows(self.choose(scores), RANKS, self.group_name)
        probabilities = gather_rows(scores, RANKS, self.group_name)
        return (*self.select(mask[:, self.own], probabilities[:, self.own]), probabilities * 2)


@pytest.mark.slow
@pytest.mark.parametrize("is_read", [True, False])
def test_gathers_are_removed_unless_masks_have_other_readers(is_read: bool) -> None:
    with pretend_rank(0, RANKS):
        layer = _AlsoRead(whole, masked, _columns(0))
        captured = capture_module(layer, hidden_rows(WIDTH, 7, 0, torch.float32), 0, RANKS)
    graph = copy_graph_module(captured.module).graph
    if not is_read:
        output = graph.output_node()
        output.args = (output.args[0][:-1],)  # type: ignore[index]
    lookups, reasons = replace_gathered_masks(graph, ())
    gathered = [
        fake_value(collective.input).shape[1]
        for collective in map(collective_of, graph.nodes)
        if collective is not None
    ]
    if is_read:
        assert lookups == {}
        (reason,) = reasons.values()
        assert "is also read by" in reason
        assert gathered == [EXPERTS, EXPERTS]
    else:
        assert reasons == {}
        assert gathered == [TOP_K, TOP_K]


class _Thresholds(GatheredOrder):
    """A router that chooses all experts whose score is above that of a uniform distribution."""

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(hidden)
        return scores, scores > 1 / self.sizes.experts


def _captured_layer(layer: type[nn.Module]) -> Captured:
    sizes = StyleSizes()
    with pretend_rank(1, RANKS):
        hidden = hidden_rows(sizes.hidden, 9, 1, sizes.dtype)
        return capture_module(layer(sizes, dist.group.WORLD), hidden, 1, RANKS, dynamic=True)  # type: ignore[call-arg]


@pytest.mark.slow
def test_a_block_that_another_rank_refuses_still_gathers_its_mask() -> None:
    captured = _captured_layer(GatheredOrder)
    taken = eliminate(captured)
    (block,) = taken.plan.local_blocks
    left = eliminate(captured, leave={block.name: "rank 0 has other experts"})
    assert left.plan.local_blocks == ()
    (refusal,) = left.plan.refusals
    assert "rank 0 has other experts" in refusal.reason
    targets = [[node.target for node in captured_rank.module.graph.nodes] for captured_rank in (captured, left)]
    assert targets[0] == targets[1]


@pytest.mark.slow
def test_a_mask_by_a_threshold_is_refused_with_its_line() -> None:
    captured = _captured_layer(_Thresholds)
    result = eliminate(captured)
    check_readable(result.refusals)
    assert result.plan.local_blocks == ()
    (refusal,) = result.refusals
    assert "no more than k experts" in refusal.reason
    assert "scores > 1 / self.sizes.experts" in refusal.source_line


@pytest.mark.slow
def test_masks_of_refused_blocks_are_unchanged() -> None:
    module = copy_graph_module(captured_ranks(whole, masked, _columns)[0].module)
    (mask,) = filter(_is_mask, module.graph.nodes)
    assert replace_gathered_masks(module.graph, {mask.name}) == ({}, {})
