"""Take expert parallelism out of a graph: every rank runs its own tokens through all experts, whose weights come to it.

Contract
    in    a captured graph; `context.groups` tells this rank's place in every process group that the graph talks to
    out   every block of expert parallelism that was found and proved is local: its collectives, its host syncs, its
          sizes that only a run would tell, and the assertions on them are gone; its complete bank is gathered
          a block that fits no form, or whose local form does not compute the same, stays as it came: a refusal says why

Pseudo-code
    for each block of expert parallelism:
        put a gather of the complete bank before the block's result, and the local form after that
        run both with mock peers, unless an equal block was; where they differ, take the local form out again and refuse
        let everything that read the block's result read the local one
        erase what nobody reads any more
    bring the described sizes behind the block up to date
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.block_text import block_text
from moepass.passes.collectives import collective_of, collectives_of
from moepass.passes.dispatch import TOKENS_KEY, routed_tokens
from moepass.passes.graph import copy_graph_module, fake_value, is_call, map_nodes, positions
from moepass.passes.ir import BankSpec, Plan, Refusal, gather
from moepass.passes.local_experts import LocalForm
from moepass.passes.mock_run import ContractBroken
from moepass.passes.parallel_match import NotThisForm, ParallelBlock, find_parallel_blocks
from moepass.passes.proof import check_local_form
from moepass.passes.protocol import PassContext, PassResult, graph_pass
from moepass.passes.shards import pack_layout

aten = torch.ops.aten


@graph_pass(provides={"local"}, conflicts={"blocks"}, reorders_collectives=True)
def localise(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace every block of expert parallelism by its local form."""
    if not any(True for _ in collectives_of(module.graph)):
        return PassResult(module, plan)
    local = copy_graph_module(module)
    blocks, refused = find_parallel_blocks(local.graph, context.groups)
    refusals = list(refused)
    banks: list[BankSpec] = list(plan.banks)
    taken: list[str] = []
    proved: set[str] = set()
    replaced: dict[Node, Node] = {}
    for found in blocks:
        # Where nothing lies between two blocks, one begins with what the other gave.
        sources = {role: replaced.get(node, node) for role, node in found.sources.items()}
        block = dataclasses.replace(found, sources=sources)
        try:
            if banks and banks[0].group != block.group_name:
                raise NotThisForm(f"it spreads over group {block.group_name!r}, other blocks over {banks[0].group!r}")
            bank, replaced[block.sink] = _replace(local.graph, block, len(banks), proved)
            banks.append(bank)
        except (NotThisForm, ContractBroken) as error:
            reason = f"{error}; its collectives stay"
            refusals.append(Refusal(block.down.node.name, reason, block.name, block.group_name))
        else:
            taken.append(f"{block.name} ({block.form})")
    local.graph.lint()
    local.recompile()
    plan = dataclasses.replace(plan, banks=tuple(banks), refusals=plan.refusals + tuple(refusals))
    return PassResult(local, plan, matches=tuple(taken), refusals=tuple(refusals))


def _replace(graph: Graph, block: ParallelBlock, index: int, proved: set[str]) -> tuple[BankSpec, Node]:
    """Put the local form in the place of the block; gives its bank and its result.

    `proved` are the texts of blocks for which that was proved right.

    Raises NotThisForm, ContractBroken; the graph is then as before.
    """
    doomed = _doomed(graph, block)
    bank = _complete_bank(block, index)
    before = set(graph.nodes)
    try:
        with graph.inserting_before(block.sink):
            complete = _gather(graph, block, bank)
            local = LocalForm(graph, block, complete)
            result = local.write()
        _same_value(block, result)
        text = block_text(block, local, result)
        if text not in proved:
            check_local_form(block, local, result)
            proved.add(text)
    except (NotThisForm, ContractBroken):
        for node in reversed(list(graph.nodes)):
            if node not in before:
                graph.erase_node(node)
        raise
    has_other_sizes = _sizes(fake_value(block.sink)) != _sizes(fake_value(result))
    block.sink.replace_all_uses_with(result)
    for node in sorted(doomed, reverse=True):
        graph.erase_node(node)
    for node in reversed(block.region):
        if not node.users:
            graph.erase_node(node)
    # A collective that something else still reads would have been found above; one that stays is a mistake here.
    assert not {exchange.node for exchange in block.exchanges}.intersection(graph.nodes)
    if has_other_sizes:
        _describe_again(graph, result)
    return bank, result


def _complete_bank(block: ParallelBlock, index: int) -> BankSpec:
    """The bank of all ranks' experts. Its tensors are called by their roles: ranks must agree on the names."""
    tensors = []
    weights = [product.weights for product in block.products]
    for number, node in enumerate(block.expert_tensors):
        value = fake_value(node)
        role = f"weight_{weights.index(node)}" if node in weights else f"bias_{number - len(set(weights))}"
        tensors.append((role, (block.experts, *(int(size) for size in value.shape[1:])), value.dtype))
    layout = pack_layout(tensors)
    return BankSpec(index, block.name, "peer", layout.nbytes, layout.tensors, block.bounds, block.group_name)


def _gather(graph: Graph, block: ParallelBlock, bank: BankSpec) -> dict[Node, Node]:
    """The complete tensor of each local expert tensor of the block."""
    shards = block.expert_tensors
    bank_node = graph.call_function(gather, (list(shards),), {"bank": bank.index})
    bank_node.meta["moepass_block"] = block.name
    bank_node.meta["moepass_parallel"] = block.form
    bank_node.meta[TOKENS_KEY] = routed_tokens(block)
    values = [fake_value(shard).new_empty(tensor.shape) for shard, tensor in zip(shards, bank.tensors, strict=True)]
    bank_node.meta["val"] = tuple(values)
    complete = {}
    for position, shard in enumerate(shards):
        element = graph.call_function(operator.getitem, (bank_node, position))
        element.meta["val"] = values[position]
        complete[shard] = element
    return complete


def _same_value(block: ParallelBlock, result: Node) -> None:
    old, new = fake_value(block.sink), fake_value(result)
    if old.dtype != new.dtype or old.dim() != new.dim() or str(old.shape[1:]) != str(new.shape[1:]):
        raise NotThisForm(f"its local form gives {new.dtype} {tuple(new.shape)}, not {old.dtype} {tuple(old.shape)}")


def _doomed(graph: Graph, block: ParallelBlock) -> set[Node]:
    """Assertions, and what leads to them, on sizes that the block's exchanges brought or need; they go with the block.

    Raises NotThisForm where something else reads what was exchanged: then the exchange cannot go.
    """
    region = set(block.region)
    place = positions(graph)
    exchanged = [exchange.node for exchange in block.exchanges if exchange.result is not block.sink]
    doomed = _readers_outside(block, [node for node in exchanged if node in region])
    asserted = _only_asserted(doomed)
    if asserted != doomed:
        stray = min(doomed - asserted, key=place.__getitem__)
        raise NotThisForm(f"what its ranks exchange is also read by {stray.name}")
    # How much this rank sends is its own affair, and may be read by others too.
    sizes = [node for node in block.region if is_call(node, aten._local_scalar_dense.default)]
    return asserted | _only_asserted(_readers_outside(block, sizes))


def _readers_outside(block: ParallelBlock, nodes: list[Node]) -> set[Node]:
    """What depends on `nodes` of the block's region, neither lies in that nor depends on its result."""
    region = set(block.region)
    found: set[Node] = set()
    pending, seen = list(nodes), set(nodes)
    while pending:
        node = pending.pop()
        if node is block.sink or collective_of(node) == block.exchanges[-1]:
            continue
        if node not in region:
            found.add(node)
        for user in node.users:
            if user not in seen and user is not block.sink:
                seen.add(user)
                pending.append(user)
    return found


def _only_asserted(nodes: set[Node]) -> set[Node]:
    """Those of `nodes` that end in assertions and nowhere else."""
    kept = set(nodes)
    while True:
        other = {
            node
            for node in kept
            if not is_call(node, aten._assert_scalar.default)
            and (not node.users or any(user not in kept for user in node.users))
        }
        if not other:
            return kept
        kept -= other


def _describe_again(graph: Graph, changed: Node) -> None:
    """Fake values of what depends on `changed`, as far as their sizes are other ones now."""
    fresh = {changed}
    with fake_value(changed).fake_mode:
        for node in graph.nodes:
            if node.op != "call_function" or not any(used in fresh for used in node.all_input_nodes):
                continue
            if node.target is gather:
                continue
            args, kwargs = map_nodes((node.args, node.kwargs), fake_value)
            value = node.target(*args, **kwargs)
            if _sizes(value) != _sizes(fake_value(node)):
                node.meta["val"] = value
                fresh.add(node)


def _sizes(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape)), str(value.stride())
    return [_sizes(item) for item in value] if isinstance(value, (tuple, list)) else str(value)
