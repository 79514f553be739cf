"""Lengths that a layer reads in its block, which must be known without an exchange, and memory that outlives a run."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.fx import Graph, Node

from moepass.passes.graph.collectives import collective_of
from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.graphs.simulated_ranks import (
    Captured,
)
from tests.helpers.project_styles.exact_style import SlicesOfModules
from tests.helpers.project_styles.gathered_style import GatheredMasks
from tests.helpers.project_styles.slots_style import EinsumSlots, EqualAllToAll, IndexedSlots
from tests.helpers.project_styles.style_layers import capture_layer, eliminate_readably
from tests.helpers.project_styles.style_sizes import StyleSizes

aten = torch.ops.aten

RANKS, GROUPS = 2, 4
Build = Callable[[ProcessGroup], nn.Module]


@dataclasses.dataclass(frozen=True)
class EvenSizes(StyleSizes):
    """Sizes with as many slots as uniform routing fills, computed from one of GROUPS equal parts of the tokens."""

    def capacity(self, tokens: int) -> int:
        return tokens * self.top_k // self.experts


class InParts(nn.Module):
    """Tokens have the shape [parts, ., H], as fairscale requires: one slot for each token of a part and each expert."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.moe = EinsumSlots(EvenSizes(), group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = hidden.view(GROUPS, -1, hidden.shape[1])
        result: torch.Tensor = self.moe(parts.reshape(-1, hidden.shape[1])).view(parts.shape).view(-1, hidden.shape[1])
        return result


class LengthInside(nn.Module):
    """Every token chooses one expert of each half. Slots are viewed by the length of a part of the tokens."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.moe = EinsumSlots(StyleSizes(), group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        moe, width = self.moe, hidden.shape[1]
        parts = hidden.view(GROUPS, -1, width)
        slots = parts.repeat(moe.sizes.experts // GROUPS, 1, 1).sin()
        arrived = EqualAllToAll.apply(moe.group, slots)  # type: ignore[no-untyped-call]
        arrived = self.seen(arrived.view(moe.ranks, len(moe.experts), parts.shape[1], width), hidden)
        outputs = torch.stack([expert(arrived[:, number]) for number, expert in enumerate(moe.experts)], dim=1)
        outputs = outputs.view(moe.sizes.experts, parts.shape[1], width)
        returned = EqualAllToAll.apply(moe.group, outputs)  # type: ignore[no-untyped-call]
        result: torch.Tensor = returned.view(-1, *parts.shape).sum(dim=0).view(-1, width)
        return result

    def seen(self, arrived: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return arrived


class OtherLength(LengthInside):
    """A layer whose slots beyond the length of half of the tokens are empty."""

    def seen(self, arrived: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        half = hidden.view(2, -1, hidden.shape[1]).shape[1]
        return arrived.masked_fill(torch.arange(arrived.shape[2]).unsqueeze(1) >= half, 0)


class AgreedSizes(StyleSizes):
    agreed = 0

    def capacity(self, tokens: int) -> int:
        return self.agreed


class AgreedSlots(nn.Module):
    """Ranks agree on the number of slots that the fullest expert needs, as DeepSpeed does without dropping."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.moe = IndexedSlots(AgreedSizes(), group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        sizes = self.moe.sizes
        chosen = self.moe.router(hidden).topk(sizes.top_k, dim=1)[1]
        most = torch.zeros(sizes.experts, dtype=torch.int64).scatter_add(
            0, chosen.view(-1), torch.ones_like(chosen.view(-1))
        )
        most = most.amax().reshape(1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.moe.group)
        capacity = int(most.item())
        torch._check(capacity >= 0)
        object.__setattr__(sizes, "agreed", capacity)
        result: torch.Tensor = self.moe(hidden)
        return result


@functools.cache
def captured_ranks(build: Build, *, lower: str = "eager", tokens: int = 12) -> list[Captured]:
    return [capture_layer(build, rank, RANKS, tokens=tokens, lower=lower) for rank in range(RANKS)]


def check_taken(captured: list[Captured], kinds: list[str]) -> None:
    """Check that the blocks are local, that only collectives of `kinds` remain, and that all ranks return the same."""
    results = [eliminate_readably(rank) for rank in captured]
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all_slots"], result.plan.refusals
        assert collective_kinds(result) == kinds
    check_same_outputs(captured, results, [[tokens] * RANKS for tokens in (12, 4, 32)])


@pytest.mark.slow
@pytest.mark.parametrize("build", [LengthInside, InParts])
def test_a_block_may_read_lengths_that_need_no_exchange(build: Build) -> None:
    check_taken(captured_ranks(build), [])


def _reading_parts(captured: Captured) -> Captured:
    """Return `captured` with quotients of the number of tokens replaced by lengths of parts of the tokens."""
    module = copy_graph_module(captured.module)
    (hidden,) = (node for node in module.graph.nodes if node.meta.get(ARGUMENT_KEY) and is_hidden(fake_value(node)))
    for node in list(module.graph.nodes):
        if is_call(node, operator.floordiv):
            writer = GraphWriter(module.graph, hidden)
            with module.graph.inserting_before(node):
                parts = writer.emit(aten.view.default, hidden, [node.args[1], -1, StyleSizes().hidden])
                node.replace_all_uses_with(writer.emit(aten.sym_size.int, parts, 1))
            module.graph.erase_node(node)
    module.recompile()
    return dataclasses.replace(captured, module=module)


def is_hidden(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not isinstance(value.shape[0], int)


@pytest.mark.slow
def test_a_length_that_only_the_tokens_have_is_known() -> None:
    check_taken([_reading_parts(captured_rank) for captured_rank in captured_ranks(LengthInside)], [])


@pytest.mark.slow
@pytest.mark.parametrize("is_length", [True, False])
def test_a_length_of_something_else_is_refused(is_length: bool) -> None:
    captured = captured_ranks(OtherLength)[0]
    result = eliminate_readably(_reading_parts(captured) if is_length else captured)
    assert not result.plan.local_blocks
    (refusal,) = result.refusals
    assert ("reads the length" if is_length else "computes with a size") in refusal.reason


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_memory_for_results_has_a_size_that_is_known_without_them(lower: str) -> None:
    check_taken(captured_ranks(AgreedSlots, lower=lower), ["all_reduce"])


def _reading_length(captured: Captured, of: Callable[[Graph], Node], *, compared: bool = False) -> Captured:
    """Return `captured` with one more output, ones of the length of the node of `of`, or a check of that length."""
    module = copy_graph_module(captured.module)
    graph, node = module.graph, of(module.graph)
    output = graph.output_node()
    writer = GraphWriter(graph, node)
    with graph.inserting_before(output):
        length = writer.emit(aten.sym_size.int, node, fake_value(node).dim() - 2)
        if compared:
            equal = writer.emit(operator.eq, length, writer.size(node, fake_value(node).dim() - 2))
            writer.described(aten._assert_scalar.default, (equal, "as many"), None)
        else:
            ones = writer.emit(aten.full.default, [length], 1.0)
            output.meta.pop("desc", None)
            output.args = ([*output.args[0], ones],)  # type: ignore[misc]
    module.recompile()
    return dataclasses.replace(captured, module=module)


def _arrived(graph: Graph) -> Node:
    """Return the result of the first AllToAll of rows."""
    exchanges = filter(None, map(collective_of, graph.nodes))
    return next(exchange.result for exchange in exchanges if exchange.kind == "all_to_all" and exchange.is_float)


def _sent(graph: Graph) -> Node:
    exchanges = filter(None, map(collective_of, graph.nodes))
    return next(exchange.input for exchange in exchanges if exchange.kind == "all_to_all" and exchange.is_float)


@pytest.mark.slow
def test_a_length_of_arrived_rows_is_read_from_another_tensor() -> None:
    captured = [_reading_length(captured_rank, _arrived) for captured_rank in captured_ranks(LengthInside)]
    check_taken(captured, [])


@pytest.mark.slow
def test_lengths_that_are_compared_stay_so() -> None:
    captured = _reading_length(captured_ranks(LengthInside)[0], _arrived, compared=True)
    result = eliminate_readably(captured)
    assert result.plan.local_blocks
    # The assertion concerned the eliminated exchange.
    assert not any(is_call(node, aten._assert_scalar.default) for node in result.module.graph.nodes)


@pytest.mark.slow
def test_a_length_that_only_the_exchange_tells_is_refused() -> None:
    captured = capture_layer(functools.partial(SlicesOfModules, StyleSizes()), 0, RANKS)
    assert eliminate_readably(captured).plan.local_blocks
    assert eliminate_readably(_reading_length(captured, _sent)).plan.local_blocks
    (refusal,) = eliminate_readably(_reading_length(captured, _arrived)).refusals
    assert "is also read by" in refusal.reason


class KeptMemory:
    """A replacement for an exchange: tokens are received in memory that outlives the run."""

    memory = torch.zeros(4096)

    @classmethod
    def apply(cls, group: ProcessGroup, sent: torch.Tensor) -> torch.Tensor:
        is_gather = sent.dim() == 2
        arrived = [sent.shape[0] * (group.size() if is_gather else 1), *sent.shape[1:]]
        if sent.shape[-1] != StyleSizes().hidden:
            memory = sent.new_empty(arrived)
        else:
            memory = cls.memory[: math.prod(arrived)].view(arrived)
        exchange = dist.all_gather_into_tensor if is_gather else dist.all_to_all_single
        exchange(memory, sent.contiguous(), group=group)
        return memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "exchange"), [(GatheredMasks, "gathered_style.GatherTokens"), (IndexedSlots, "slots_style.EqualAllToAll")]
)
def test_tokens_in_memory_that_outlives_the_run_are_refused(layer: type[nn.Module], exchange: str) -> None:
    with mock.patch(f"tests.helpers.project_styles.{exchange}", KeptMemory):
        captured = capture_layer(functools.partial(layer, StyleSizes()), 0, RANKS)
    result = eliminate_readably(captured)
    assert not result.plan.local_blocks
    (refusal,) = result.refusals
    assert "which holds it beyond the run" in refusal.reason
