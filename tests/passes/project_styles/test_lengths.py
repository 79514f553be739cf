"""Lengths that a layer reads in its block, and memory that outlives a run: what is known without an exchange."""

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

from moepass.passes.graph.collectives import collective_of, communications_of
from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.protocol import PassResult
from tests.helpers.graphs.simulated_ranks import (
    Captured,
    capture_module,
    hidden_rows,
    pretend_rank,
    run_ranks,
    with_tokens,
)
from tests.helpers.project_styles.exact_style import SlicesOfModules
from tests.helpers.project_styles.gathered_style import GatheredMasks
from tests.helpers.project_styles.slots_style import EinsumSlots, EqualAllToAll, IndexedSlots
from tests.helpers.project_styles.style_sizes import StyleSizes
from tests.passes.project_styles.test_project_styles import complete_banks, eliminated

aten = torch.ops.aten

RANKS, GROUPS = 2, 4
Build = Callable[[ProcessGroup], nn.Module]


@dataclasses.dataclass(frozen=True)
class EvenSizes(StyleSizes):
    """As many slots as uniform routing fills: of tokens in GROUPS equal parts, as many as are in a part."""

    def capacity(self, tokens: int) -> int:
        return tokens * self.top_k // self.experts


class InParts(nn.Module):
    """Tokens come as [parts, ., H], as fairscale wants them: a slot for each token of a part, and expert."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.moe = EinsumSlots(EvenSizes(), group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = hidden.view(GROUPS, -1, hidden.shape[1])
        result: torch.Tensor = self.moe(parts.reshape(-1, hidden.shape[1])).view(parts.shape).view(-1, hidden.shape[1])
        return result


class LengthInside(nn.Module):
    """Every token goes to an expert of each half. Slots are viewed by the length of a part of the tokens."""

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
    """Slots beyond the length of a half of the tokens are empty: there are none."""

    def seen(self, arrived: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        half = hidden.view(2, -1, hidden.shape[1]).shape[1]
        return arrived.masked_fill(torch.arange(arrived.shape[2]).unsqueeze(1) >= half, 0)


class AgreedSizes(StyleSizes):
    agreed = 0

    def capacity(self, tokens: int) -> int:
        return self.agreed


class AgreedSlots(nn.Module):
    """Ranks agree on as many slots as the fullest expert of all needs, as DeepSpeed does where no token is dropped."""

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
    captured = []
    for rank in range(RANKS):
        with pretend_rank(rank, RANKS):
            layer = build(dist.group.WORLD)  # type: ignore[arg-type]
            hidden = hidden_rows(StyleSizes().hidden, tokens, rank, torch.float32)
            captured.append(capture_module(layer, hidden, rank, RANKS, lower=lower))
    return captured


def check_taken(captured: list[Captured], kept: list[str]) -> list[PassResult]:
    """The blocks go, and with them all exchanges but those of the kinds `kept`; the ranks give what they gave."""
    results = [eliminated(one) for one in captured]
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all_slots"], result.plan.refusals
        assert [one.kind for one in communications_of(result.module.graph)] == kept
    banks = complete_banks(captured, results)
    for seed, tokens in enumerate((12, 4, 32)):
        rows = [hidden_rows(StyleSizes().hidden, tokens, rank, torch.float32, seed) for rank in range(RANKS)]
        inputs = [with_tokens(one, of_rank) for one, of_rank in zip(captured, rows, strict=True)]
        expected = run_ranks([one.module for one in captured], inputs)
        found = run_ranks([result.module for result in results], inputs, banks)
        for outputs, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(list(outputs), list(wanted), rtol=1e-5, atol=1e-5)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("build", [LengthInside, InParts])
def test_a_block_may_read_the_length_of_what_no_exchange_brought(build: Build) -> None:
    check_taken(captured_ranks(build), [])


def _reading_parts(captured: Captured) -> Captured:
    """`captured` where every quotient of the number of tokens is read as a length of the tokens in so many parts."""
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


def test_a_length_that_only_the_tokens_have_is_known() -> None:
    check_taken([_reading_parts(one) for one in captured_ranks(LengthInside)], [])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("is_length", [True, False])
def test_a_length_of_something_else_is_refused(is_length: bool) -> None:
    captured = captured_ranks(OtherLength)[0]
    result = eliminated(_reading_parts(captured) if is_length else captured)
    assert not result.plan.local_blocks
    (refusal,) = result.refusals
    assert ("reads the length" if is_length else "computes with a size") in refusal.reason


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("lower", ["inductor", "eager"])
def test_memory_for_results_has_a_size_that_is_known_without_them(lower: str) -> None:
    check_taken(captured_ranks(AgreedSlots, lower=lower), ["all_reduce"])


def _reading_length(captured: Captured, of: Callable[[Graph], Node], *, compared: bool = False) -> Captured:
    """`captured` that also gives ones, as many as the length of what `of` finds in its graph; or compares these."""
    module = copy_graph_module(captured.module)
    graph, found = module.graph, of(module.graph)
    output = graph.output_node()
    writer = GraphWriter(graph, found)
    with graph.inserting_before(output):
        length = writer.emit(aten.sym_size.int, found, fake_value(found).dim() - 2)
        if compared:
            equal = writer.emit(operator.eq, length, writer.size(found, fake_value(found).dim() - 2))
            writer.described(aten._assert_scalar.default, (equal, "as many"), None)
        else:
            ones = writer.emit(aten.full.default, [length], 1.0)
            output.meta.pop("desc", None)
            output.args = ([*output.args[0], ones],)  # type: ignore[misc]
    module.recompile()
    return dataclasses.replace(captured, module=module)


def _arrived(graph: Graph) -> Node:
    """The result of the first AllToAll of rows."""
    exchanges = filter(None, map(collective_of, graph.nodes))
    return next(one.result for one in exchanges if one.kind == "all_to_all" and one.is_float)


def _sent(graph: Graph) -> Node:
    exchanges = filter(None, map(collective_of, graph.nodes))
    return next(one.input for one in exchanges if one.kind == "all_to_all" and one.is_float)


def test_a_length_of_what_arrived_is_read_elsewhere() -> None:
    captured = [_reading_length(one, _arrived) for one in captured_ranks(LengthInside)]
    check_taken(captured, [])


@pytest.mark.slow
def test_lengths_that_are_compared_stay_so() -> None:
    captured = _reading_length(captured_ranks(LengthInside)[0], _arrived, compared=True)
    result = eliminated(captured)
    assert result.plan.local_blocks
    # It was asserted of what has gone.
    assert not any(is_call(node, aten._assert_scalar.default) for node in result.module.graph.nodes)


def test_a_length_that_only_the_exchange_tells_is_refused() -> None:
    with pretend_rank(0, RANKS):
        layer = SlicesOfModules(StyleSizes(), dist.group.WORLD)  # type: ignore[arg-type]
        captured = capture_module(layer, hidden_rows(StyleSizes().hidden, 9, 0, torch.float32), 0, RANKS)
    assert eliminated(captured).plan.local_blocks
    assert eliminated(_reading_length(captured, _sent)).plan.local_blocks
    (refusal,) = eliminated(_reading_length(captured, _arrived)).refusals
    assert "is also read by" in refusal.reason


class KeptMemory:
    """In the place of an exchange that brings tokens in memory of its own: they are written to one that stays."""

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


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("layer", "exchange"), [(GatheredMasks, "gathered_style.GatherTokens"), (IndexedSlots, "slots_style.EqualAllToAll")]
)
def test_tokens_in_memory_that_outlives_the_run_are_refused(layer: type[nn.Module], exchange: str) -> None:
    with (
        mock.patch(f"tests.helpers.project_styles.{exchange}", KeptMemory),
        pretend_rank(0, RANKS),
    ):
        model = layer(StyleSizes(), dist.group.WORLD)  # type: ignore[call-arg]
        captured = capture_module(model, hidden_rows(StyleSizes().hidden, 9, 0, torch.float32), 0, RANKS)
    result = eliminated(captured)
    assert not result.plan.local_blocks
    (refusal,) = result.refusals
    assert "which holds it beyond the run" in refusal.reason
