"""Interpreter of a parallel block and its local form on sample numbers, with mock peers.

Runs do not compute expert GEMMs: the results depend on the row, the expert and the GEMM, so a row with a wrong expert
shows. Other functions of a row replace the activation function (row_functions.py). Rows beyond the last offset and
uninitialised memory are NaN. Runs compute in float64 for all dtypes of the graph, so that results are equal within
1e-9, and drop a value after its last reader.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from moepass.passes.graph.collectives import WAIT, Collective, collective_of
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import constant_of, fake_value, is_call, map_nodes, symbolic_sizes
from moepass.passes.ops.arguments import named_arguments
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.parallel.mock.scenarios import Scenario
from moepass.passes.parallel.ranges.value_ranges import ValueRanges
from moepass.passes.parallel.rows.row_functions import RowFunctions, function_of_rows, masked_rows

# Sizes for the symbols of a graph. All differ, so that none is mistaken for another.
SYMBOL_SIZES = (6, 11, 17, 23, 29, 37, 41, 47)
# Limit on the rows of a loaded peer, unless this rank has more.
MOST_ROWS = 2048

# The other ranks: a function from a collective, its input, and the sizes it sends and receives, to its result.
Answer = Callable[[Collective, torch.Tensor, list[int], list[int]], torch.Tensor]


class ContractBroken(Exception):  # noqa: N818  becomes the reason of a refusal
    """The block breaks the contract of its form."""


def _no_collectives(collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
    raise ContractBroken(f"the local form contains {collective.kind}")


class Steps:
    """Nodes in the order in which they run, and the values to drop after each of them."""

    def __init__(self, nodes: Iterable[Node], wanted: Node) -> None:
        self.nodes = tuple(nodes)
        self.wanted = wanted
        last: dict[Node, int] = {}
        for index, node in enumerate(self.nodes):
            last[node] = index
            last.update((used, index) for used in node.all_input_nodes)
        self.drops: list[list[Node]] = [[] for _ in self.nodes]
        for node, index in last.items():
            if node is not wanted:
                self.drops[index].append(node)


class MockBlock:
    """A block and the local form that was written for it, ready to run."""

    def __init__(self, block: ParallelBlock, local: LocalForm, result: Node, functions: RowFunctions) -> None:
        self.block = block
        self.functions = functions
        self.local = local
        self.result = result
        self.region = Steps(block.region, block.sink)
        self.local_form = Steps(local.written, result)
        inputs = {local.rows, local.ends, local.row_ids, *local.travelling}
        needed = set(ancestors(local.outputs, follow=lambda used: used not in inputs)) - inputs
        self.experts = Steps((node for node in local.written if node in needed), local.outputs)
        # The numbers of all GEMMs among those of the block, and their experts.
        self.gemms = {gemm.node: (number, block.own_experts) for number, gemm in enumerate(block.gemms)}
        self.gemms |= {node: (number, range(block.experts)) for node, number in local.gemms.items()}
        self.sizes = symbol_sizes(block)
        # Widths of the rows into and out of each GEMM.
        self.widths = [(gemm.inner, gemm.outer) for gemm in block.gemms]

    def shape(self, node: Node) -> list[int]:
        """Return the shape of `node` in runs."""
        return [concrete(size, self.sizes) for size in fake_value(node).shape]


class MockRun:
    """One run: concrete sizes, concrete expert tensors, and an interpreter of nodes."""

    def __init__(
        self, mock: MockBlock, generator: torch.Generator, scenario: Scenario, ranges: ValueRanges | None
    ) -> None:
        self.mock = mock
        self.block = block = mock.block
        self.local = mock.local
        self.ranges = ranges
        self.generator = generator
        self.scenario = scenario
        experts = block.experts
        self.gemm_tables = [
            (torch.randn(inner, generator=generator, dtype=torch.float64),
             torch.randn(experts, outer, generator=generator, dtype=torch.float64))
            for inner, outer in mock.widths
        ]  # fmt: skip
        weights, owned = {gemm.weights for gemm in block.gemms}, block.own_experts
        self.biases: dict[Node, torch.Tensor] = {}
        for node in block.expert_tensors:
            if node not in weights:
                biases = torch.randn((experts, *mock.shape(node)[1:]), generator=generator, dtype=torch.float64)
                self.biases[mock.local.complete[node]] = biases
                self.biases[node] = biases[owned.start : owned.stop]

    def run_block(self, sources: Mapping[Node, Any], answer: Answer) -> Any:
        """Return the block's result for this rank's `sources`; `answer` plays the other ranks."""
        return self._evaluate(self.mock.region, sources, answer)

    def run_local_form(self, sources: Mapping[Node, Any]) -> Any:
        """Return the local form's result for this rank's `sources`."""
        return self._evaluate(self.mock.local_form, sources, _no_collectives)

    def experts(self, rows: torch.Tensor, ids: torch.Tensor, travelling: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return the outputs of the local form's experts: expert `ids[i]` on `rows[i]` and its `travelling` values."""
        sorted_ids, order = ids.sort(stable=True)
        local = self.local
        ends = torch.bincount(sorted_ids, minlength=self.block.experts).cumsum(0, dtype=torch.int32)
        values: dict[Node, Any] = {local.rows: rows[order], local.ends: ends}
        values.update((node, tensor[order]) for node, tensor in zip(local.travelling, travelling, strict=True))
        if local.row_ids is not None:
            values[local.row_ids] = sorted_ids
        outputs = torch.empty(len(rows), self.mock.widths[-1][1], dtype=torch.float64)
        outputs[order] = self._evaluate(self.mock.experts, values, _no_collectives)
        return outputs

    def peer_pairs(self, peer: int, own_pairs: int) -> int:
        """Return the number of pairs that the rank `peer` brings for this rank's experts."""
        experts = len(self.block.own_experts)
        if self.scenario.load and peer == 0:
            return min(max(self.scenario.load * own_pairs, 4), max(MOST_ROWS, own_pairs))
        return experts if self.scenario.full else self.scenario.peer_pairs

    def random_rows(self, *shape: int) -> torch.Tensor:
        """Return random numbers between -0.5 and 0.5."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).sub_(0.5)

    def _evaluate(self, steps: Steps, sources: Mapping[Node, Any], answer: Answer) -> Any:
        """Return the result of `steps` for the values of `sources`."""
        values: dict[Node, Any] = {}

        def value_of(node: Node) -> Any:
            if node not in values:
                self._record(node, values.setdefault(node, sources[node] if node in sources else self._leaf(node)))
            return values[node]

        for node in sources:
            value_of(node)
        for node, drops in zip(steps.nodes, steps.drops, strict=True):
            if node not in values:
                values[node] = self._run_node(node, value_of, answer)
                self._record(node, values[node])
            for dropped in drops:
                values.pop(dropped, None)
        return value_of(steps.wanted)

    def _record(self, node: Node, value: Any) -> None:
        if self.ranges is not None:
            self.ranges.observe(node, value)

    def _run_node(self, node: Node, value_of: Callable[[Node], Any], answer: Answer) -> Any:
        if node in self.mock.gemms:
            return self._gemm(node, value_of, *self.mock.gemms[node])
        functions = self.mock.functions
        if node in functions.calls:
            function, read = functions.calls[node]
            width = self.mock.widths[-1][node in functions.outputs]
            return function_of_rows(function, list(map(value_of, read)), width)
        if node in functions.masks:
            return masked_rows(node, functions.masks[node], value_of)
        if node in functions.counts:
            return len(value_of(functions.counts[node]))
        if node in functions.constants:
            return None  # only replaced functions of rows read constants
        return self._run_call(node, value_of, answer)

    def _run_call(self, node: Node, value_of: Callable[[Node], Any], answer: Answer) -> Any:
        return self._call(node, map_nodes((node.args, node.kwargs), value_of), answer)

    def _call(self, node: Node, arguments: Any, answer: Answer) -> Any:
        args, kwargs = arguments
        collective = collective_of(node)
        if collective is not None:
            inputs = named_arguments(node, args, kwargs)
            sizes = (inputs.get(name, ()) for name in ("input_split_sizes", "output_split_sizes"))
            return answer(collective, inputs["input"], *([int(size) for size in split] for split in sizes))
        if is_call(node, WAIT):
            return args[0]
        doubled = {name: _doubled(argument) for name, argument in kwargs.items()}
        value = node.target(*map(_doubled, args), **doubled)  # type: ignore[operator]
        if has_trait(node, Trait.EMPTY):
            _spoil(value)
        return value

    def _leaf(self, node: Node) -> Any:
        value = fake_value(node)
        if node.op == "get_attr":
            return _constant(node)
        if not isinstance(value, torch.Tensor):
            return concrete(value, self.mock.sizes)
        if node in self.biases:
            return self.biases[node]
        # Weights, which only GEMMs read, without computing. A view of one zero takes no memory.
        return torch.zeros((), dtype=torch.float64).expand(self.mock.shape(node))

    def _gemm(self, node: Node, value_of: Callable[[Node], Any], number: int, experts: range) -> torch.Tensor:
        row_factors, expert_factors = self.gemm_tables[number]
        arguments = named_arguments(node)
        rows, ends = value_of(next(iter(arguments.values()))), value_of(arguments["offs"])
        if len(ends) != len(experts):
            raise ContractBroken(f"a GEMM has {len(ends)} offsets for {len(experts)} experts")
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
        if len(counts) and (int(counts.min()) < 0 or int(ends[-1]) > len(rows)):
            raise ContractBroken(f"a GEMM of {len(rows)} rows has the offsets {ends.tolist()}")
        outputs = torch.empty(len(rows), expert_factors.shape[1], dtype=torch.float64)
        inside = int(counts.sum())
        ids = repeat_each(torch.arange(experts.start, experts.stop), counts)
        torch.index_select(expert_factors, 0, ids, out=outputs[:inside])
        # Between -1 and 1, so that no activation function saturates and hides a difference.
        outputs[:inside].mul_((rows[:inside] @ row_factors).unsqueeze(-1)).sin_()
        outputs[inside:] = math.nan
        return outputs


def _constant(node: Node) -> torch.Tensor:
    value = constant_of(node)
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        raise ContractBroken(f"it reads {node.target}, whose value is not known when the graph is compiled")
    return value.cpu().double() if value.is_floating_point() else value.cpu()


def _doubled(argument: Any) -> Any:
    """Return an argument of an operator, with float64 for a floating dtype, and the CPU for a device."""
    if isinstance(argument, torch.dtype) and argument.is_floating_point:
        return torch.float64
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _spoil(memory: torch.Tensor) -> None:
    """Fill uninitialised memory with NaN, indices out of range or random masks, so that it is never right by chance."""
    if memory.is_floating_point():
        memory.fill_(math.nan)
    elif memory.dtype is torch.bool:
        memory.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
    else:
        memory.fill_(torch.iinfo(memory.dtype).max)


def symbol_sizes(block: ParallelBlock) -> dict[Any, int]:
    """Return a size for each symbol of the block's shapes that is known before a run."""
    sources = block.sources.values()
    source_sizes = itertools.chain.from_iterable(fake_value(node).shape for node in sources)
    of_sources = {symbol for size in source_sizes for symbol in size_expression(size).free_symbols}
    unused = itertools.chain(SYMBOL_SIZES, itertools.count(SYMBOL_SIZES[-1] + 1))
    sizes: dict[Any, int] = {}
    for size in symbolic_sizes((*sources, *block.region)):
        for symbol in sorted(size.node.expr.free_symbols - sizes.keys(), key=str):
            # An unbacked size of a source is known before the block runs.
            if symbol in of_sources or not size.node.shape_env.is_unbacked_symint(symbol):
                sizes[symbol] = next(unused)
    return sizes


def concrete(size: Any, sizes: Mapping[Any, int]) -> int:
    """Return the number of a size, with `sizes` for symbols."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.expr.xreplace({symbol: sizes[symbol] for symbol in size.node.expr.free_symbols}))


def repeat_each(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return `values.repeat_interleave(counts)`, which would start all threads of the machine for a few numbers."""
    return torch.from_numpy(numpy.repeat(values.numpy(), counts.numpy()))
