"""Capture the graphs of all ranks and run them in this process.

Capturing uses torch's fake process group, which lets one process act as any rank. Running is lockstep: each rank's
graph is interpreted on real tensors up to its next collective. Once all ranks have reached one, it is carried out among
them. Unlike the mock peers of `peer_equivalence.py`, this module knows nothing of experts or of any contract.
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
    """Let this process act as `rank` of `ranks` without peers, and yield the name of the group."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Captured:
    """The graph of one rank, the real values of its inputs, and its groups by name."""

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
    """Return the ATen graph of `build_stack(config, form)` on `rank`, with fake values, and its real inputs.

    `moe_alone` captures only the first MoE layer, whose input is then an input of the graph.
    """
    with pretend_rank(rank, ranks):
        stack = build_stack(config, form)
        model = stack.moe[0] if moe_alone else stack
        hidden = hidden_states(config, tokens, rank)
        return capture_module(model, hidden, rank, ranks, dynamic=dynamic, lower=lower)


def capture_module(
    model: nn.Module, hidden: torch.Tensor, rank: int, ranks: int, *, dynamic: bool = True, lower: str = "eager"
) -> Captured:
    """Return the ATen graph of `model(hidden)`, while this process acts as `rank`."""
    graphs: list[Captured] = []
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def keep(module: GraphModule, inputs: Sequence[Any]) -> Any:
        def run(values: list[Any]) -> Any:
            for node, value in zip(graph_inputs(module.graph), values, strict=True):
                node.meta[ARGUMENT_KEY] = not isinstance(value, nn.Parameter)
            graphs.append(Captured(module, tuple(values), {name: Group(rank, ranks)}))
            # The results of the fake group are meaningless.
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
    (captured,) = graphs
    return captured


def hidden_rows(width: int, tokens: int, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random hidden states [tokens, width], different for each rank and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(tokens, width, generator=generator).to(dtype)


def hidden_states(config: StackConfig, tokens: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Return random hidden states [tokens, H] for `config`, different for each rank and seed."""
    return hidden_rows(config.hidden, tokens, rank, config.dtype, seed)


def with_tokens(captured: Captured, hidden: torch.Tensor) -> list[Any]:
    """Return the graph's inputs with `hidden` [tokens, H] in place of the captured hidden states."""
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
    """Return the outputs of every rank's graph.

    `banks` maps the index of each bank to its complete tensors, for graphs with gathers. Raises AssertionError if ranks
    disagree about a collective; errors of a rank's graph are passed on.
    """
    runs = [_steps_of(module, values, banks) for module, values in zip(modules, inputs, strict=True)]
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
        answers = _carry_out(asked)


def first_outputs(
    modules: Sequence[GraphModule], inputs: Sequence[Sequence[Any]], banks: Mapping[object, Any] | None = None
) -> list[torch.Tensor]:
    """Return the first output of every rank's graph; arguments are those of `run_ranks`."""
    return [outputs[0] for outputs in run_ranks(modules, inputs, banks)]


def _steps_of(module: GraphModule, inputs: Sequence[Any], banks: Mapping[object, Any] | None = None) -> Iterator[Any]:
    """Yield each collective with its input and sizes, and receive its result. Gathers read `banks`, by index."""
    values: dict[Node, Any] = {}
    arguments = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "get_attr":
            values[node] = getattr(module, str(node.target))
        elif node.op == "output":
            return map_nodes(node.args[0], values.__getitem__)
        elif (collective := collective_of(node)) is not None:
            sizes = [
                [values[size] if isinstance(size, Node) else size for size in symbolic]
                for symbolic in (collective.send, collective.receive)
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


def _carry_out(asked: list[tuple[Collective, torch.Tensor, list[int], list[int]]]) -> list[torch.Tensor]:
    """Return the result of a collective by rank. Raises AssertionError if ranks disagree about it."""
    kinds = {collective.kind for collective, *_ in asked}
    assert len(kinds) == 1, f"ranks wait at different collectives: {kinds}"
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
    """Return the output of a graph without collectives. Gathers return `complete` tensors, by the bank's name."""
    return run_with_banks(module, inputs, {bank.index: complete[bank.name] for bank in banks})


def run_with_banks(module: GraphModule, inputs: Sequence[Any], banks: Mapping[Any, Any]) -> Any:
    """Return the output of a graph without collectives; gathers return the tensors of `banks`, by index."""
    try:
        collective, *_ = next(_steps_of(module, inputs, banks))
    except StopIteration as done:
        return done.value
    raise AssertionError(f"{collective.node.name} is a collective")


def decide(
    ranks: Sequence[Captured], eliminate: Callable[[Captured, Mapping[str, str]], PassResult]
) -> list[PassResult]:
    """Return the result that each rank runs in the end, decided as real ranks do, without messages.

    `eliminate(captured, leave)` returns the result of the passes; `leave` maps blocks that must stay to the reasons.
    """
    leave: dict[str, str] = {}
    while True:
        results = [eliminate(captured, leave) for captured in ranks]
        exchanges = [exchanges_by_group(captured.module.graph) for captured in ranks]
        (group,) = {name for of_rank in exchanges for name in of_rank} or {""}
        proposals = [
            Proposal.of(result.plan, group, of_rank.get(group, ()), "")
            for result, of_rank in zip(results, exchanges, strict=True)
        ]
        refused = blocks_to_leave(proposals)
        if not refused.keys() - leave.keys():
            return results
        leave |= refused
