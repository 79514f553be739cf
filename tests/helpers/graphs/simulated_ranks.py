"""Graphs of all ranks, captured and run in this one process.

Capturing uses torch's fake process group, which lets one process be any rank. Running is lockstep: each rank's graph is
interpreted on real numbers up to its next collective, and once all ranks stand at one, it is carried out among them.
Unlike the mock peers of `peer_equivalence.py` this knows nothing of experts or of any contract.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from moepass.passes.graph.collectives import WAIT, Collective, collective_of
from moepass.passes.graph.nodes import graph_inputs, map_nodes
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.protocol import Group, PassResult
from moepass.passes.ir.slot_operations import gather
from moepass.passes.parallel.proposals import Proposal, blocks_to_leave, exchanges_by_group
from moepass.runtime.lowering.lower_segments import decompositions
from tests.helpers.models.moe_stack import StackConfig, build_stack


@contextlib.contextmanager
def pretend_rank(rank: int, ranks: int) -> Iterator[str]:
    """This process is `rank` of `ranks`, with nobody to talk to; gives the name of the group."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Captured:
    """One rank's graph, and the real values of its inputs but the hidden states."""

    module: GraphModule
    inputs: tuple[Any, ...]
    groups: dict[str, Group]


def capture(
    config: StackConfig,
    form: str,
    rank: int,
    ranks: int,
    tokens: int,
    *,
    dynamic: bool = True,
    lower: str = "eager",
    moe_alone: bool = False,
) -> Captured:
    """The ATen graph of `build_stack(config, form)` on `rank`, with fake values, and its real inputs.

    `moe_alone` captures nothing but the first MoE layer, whose input is then one of the graph.
    """
    with pretend_rank(rank, ranks):
        stack = build_stack(config, form)
        model = stack.moe[0] if moe_alone else stack
        hidden = hidden_states(config, tokens, rank)
        return capture_module(model, hidden, rank, ranks, dynamic=dynamic, lower=lower)


def capture_module(
    model: nn.Module, hidden: torch.Tensor, rank: int, ranks: int, *, dynamic: bool = True, lower: str = "eager"
) -> Captured:
    """The ATen graph of `model`, called with `hidden`, on `rank`, which this process pretends to be."""
    found: list[Captured] = []
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def keep(module: GraphModule, inputs: Sequence[Any]) -> Any:
        def run(values: list[Any]) -> Any:
            for node, value in zip(graph_inputs(module.graph), values, strict=True):
                node.meta[ARGUMENT_KEY] = not isinstance(value, nn.Parameter)
            found.append(Captured(module, tuple(values), {name: Group(rank, ranks)}))
            # What the fake group answers is of no use to anybody.
            return [torch.empty(0)] * len(module.graph.output_node().args[0])  # type: ignore[arg-type]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(
        fw_compiler=keep,
        inference_compiler=keep,
        decompositions=decompositions(lower),
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch.no_grad(), torch._dynamo.config.patch(switches):
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(hidden)
    (captured,) = found
    return captured


def hidden_rows(width: int, tokens: int, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Hidden states [tokens, width], other ones for each rank and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(tokens, width, generator=generator).to(dtype)


def hidden_states(config: StackConfig, tokens: int, rank: int, seed: int = 0) -> torch.Tensor:
    return hidden_rows(config.hidden, tokens, rank, config.dtype, seed)


def with_tokens(captured: Captured, hidden: torch.Tensor) -> list[Any]:
    """The graph's inputs, with `hidden` [tokens, H] for the hidden states that it was captured with."""
    old = next(value for value in captured.inputs if isinstance(value, torch.Tensor) and _is_hidden(value, hidden))
    return [
        hidden if value is old else len(hidden) if isinstance(value, int) and value == len(old) else value
        for value in captured.inputs
    ]


def _is_hidden(value: torch.Tensor, hidden: torch.Tensor) -> bool:
    return value.dim() == 2 and value.shape[1] == hidden.shape[1] and not isinstance(value, torch.nn.Parameter)


def run_ranks(
    modules: Sequence[GraphModule], inputs: Sequence[Sequence[Any]], banks: Mapping[object, Any] | None = None
) -> list[Any]:
    """The outputs of every rank's graph. Raises whatever a rank raises, and AssertionError where ranks disagree.

    `banks` are the complete tensors of each bank, by its index, for graphs with gathers.
    """
    runs = [steps_of(module, values, banks) for module, values in zip(modules, inputs, strict=True)]
    outputs: list[Any] = [None] * len(runs)
    answers: list[Any] = [None] * len(runs)
    while True:
        asked: list[Any] = []
        for rank, run in enumerate(runs):
            try:
                asked.append(run.send(answers[rank]))
            except StopIteration as done:
                outputs[rank] = done.value
        if not asked:
            return outputs
        assert len(asked) == len(runs), "some ranks wait for others that are done"
        answers = carry_out(asked)


def first_outputs(
    modules: Sequence[GraphModule], inputs: Sequence[Sequence[Any]], banks: Mapping[object, Any] | None = None
) -> list[torch.Tensor]:
    """Return the first output of every rank's graph; arguments are as for `run_ranks`."""
    return [outputs[0] for outputs in run_ranks(modules, inputs, banks)]


def steps_of(module: GraphModule, inputs: Sequence[Any], banks: Mapping[object, Any] | None = None) -> Iterator[Any]:
    """Yields each collective with what it is given; `banks` answers gathers, by the index of the bank."""
    values: dict[Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(module, str(node.target))
        elif node.op == "output":
            return map_nodes(node.args[0], values.__getitem__)
        elif (collective := collective_of(node)) is not None:
            sizes = [
                [values[size] if isinstance(size, Node) else size for size in part]
                for part in (collective.send, collective.receive)
            ]
            values[node] = yield collective, values[collective.input], *sizes
        elif node.target is gather and banks is not None:
            values[node] = banks[node.kwargs["bank"]]
        elif node.target is WAIT:
            values[node] = values[node.args[0]]  # type: ignore[index]
        else:
            args, kwargs = map_nodes((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    raise AssertionError("a graph ends with its output")


def carry_out(asked: list[tuple[Collective, torch.Tensor, list[int], list[int]]]) -> list[torch.Tensor]:
    kinds = {collective.kind for collective, *_ in asked}
    assert len(kinds) == 1, f"ranks stand at different collectives: {kinds}"
    (kind,) = kinds
    sent = [value for _, value, *_ in asked]
    ranks = len(asked)
    if kind == "all_gather":
        assert len({value.shape for value in sent}) == 1
        return [torch.cat(sent)] * ranks
    if kind == "all_to_all":
        for _, value, send, _ in asked:
            assert sum(send) == len(value), f"{send} of {len(value)} rows"
        parts = [value.split(send) for _, value, send, _ in asked]
        for rank, (_, _, _, receive) in enumerate(asked):
            assert receive == [len(parts[source][rank]) for source in range(ranks)], "ranks disagree on sizes"
        return [torch.cat([parts[source][rank] for source in range(ranks)]) for rank in range(ranks)]
    stacked = torch.stack(sent)
    reduced = stacked.amax(0) if asked[0][0].reduction == "max" else stacked.sum(0)
    if kind == "all_reduce":
        return [reduced] * ranks
    return list(reduced.chunk(ranks))


def run_local(
    module: GraphModule, inputs: Sequence[Any], banks: Sequence[BankSpec], complete: dict[str, list[torch.Tensor]]
) -> Any:
    """The output of a graph without collectives, its gathers answered with the `complete` tensors of each bank."""
    return run_with_banks(module, inputs, {bank.index: complete[bank.name] for bank in banks})


def run_with_banks(module: GraphModule, inputs: Sequence[Any], banks: Mapping[Any, Any]) -> Any:
    """The output of a graph without collectives, its gathers answered with the tensors of `banks`, by index."""
    try:
        collective, *_ = next(steps_of(module, inputs, banks))
    except StopIteration as done:
        return done.value
    raise AssertionError(f"{collective.node.name} is a collective")


def decide(
    ranks: Sequence[Captured], eliminate: Callable[[Captured, Mapping[str, str]], PassResult]
) -> list[PassResult]:
    """What each rank runs in the end: as `decisions.py` has it, without the messages.

    `eliminate` is given what a rank captured and the blocks that it leaves, by name, and why.
    """
    leave: dict[str, str] = {}
    while True:
        results = [eliminate(one, leave) for one in ranks]
        exchanges = [exchanges_by_group(one.module.graph) for one in ranks]
        (group,) = {name for one in exchanges for name in one} or {""}
        proposals = [
            Proposal.of(result.plan, group, found.get(group, ()), "")
            for result, found in zip(results, exchanges, strict=True)
        ]
        found = blocks_to_leave(proposals)
        if not found.keys() - leave.keys():
            return results
        leave |= found
