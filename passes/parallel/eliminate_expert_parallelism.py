"""Replace expert parallelism in a graph: every rank runs its own tokens through all experts, and gathers their weights.

Contract
    in    a captured graph; `context.groups` has this rank's position in each process group of the graph;
          `context.leave` has reasons, by name, why other ranks leave blocks
    out   blocks of expert parallelism that were found and proved are local: they gather their complete banks, and have
          no collectives, host syncs, unknown sizes and assertions on these
          other blocks are unchanged and have a refusal
          `plan.local_blocks` must equal those of other ranks before the graph may run (proposals.py)

Pseudo-code
    for each block of expert parallelism that other ranks do not leave:
        if its tokens must be the same on all ranks: find their origin
        insert a gather of the complete bank and the local form before the block's result
        unless an equal block was proved: run block and local form with mock peers; if they differ, erase and refuse
        replace the block's result by that of the local form
        erase unread nodes
    update fake values of nodes after the block
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.models.homes import ADOPTED
from moepass.passes.blocks.computed_weights import is_computed, recipe_of, weight_parameters
from moepass.passes.blocks.count_lengths import fix_count_lengths
from moepass.passes.blocks.expert_stack import is_expert_stack, parameters_of
from moepass.passes.graph.collectives import collective_of, communications_of
from moepass.passes.graph.graph_writer import described_sizes, erase_unread, refresh_fake_values
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call, is_float
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.refusals import refusal_of
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, LocalBlock, Plan, Refusal, dtype_name
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ir.shards import pack_layout
from moepass.passes.ir.slot_operations import gather
from moepass.passes.ops.walk import ancestors, descendants
from moepass.passes.parallel.block_text import block_text
from moepass.passes.parallel.experts_text import experts_text
from moepass.passes.parallel.flatten_slots import flatten_exchanged_slots
from moepass.passes.parallel.known_lengths import read_known_lengths, read_whole_quotients
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.match.find_parallel import find_parallel_blocks
from moepass.passes.parallel.match.gathered_masks import replace_gathered_masks
from moepass.passes.parallel.match.parallel_block import ROUTED_TOKENS_KEY, ParallelBlock, routed_tokens
from moepass.passes.parallel.mock.mock_run import ContractBroken
from moepass.passes.parallel.proof.prove import check_local_form
from moepass.passes.parallel.replicated import Origin, ReplicatedValues
from moepass.passes.parallel.rows.row_flow import flow_in_local_form

aten = torch.ops.aten

# Metadata of a block's gather: the texts behind its digests, for people to compare.
EXPERTS_TEXT_KEY, SOURCES_KEY = "moepass_experts_text", "moepass_sources"


@graph_pass(provides={"local"}, conflicts={"blocks"}, reorders_collectives=True, is_agreed=True)
def eliminate_expert_parallelism(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace every block of expert parallelism by its local form."""
    if next(communications_of(module.graph), None) is None:
        return PassResult(module, plan)
    proved: set[str] = set()
    refusals: dict[str, Refusal] = {}
    leave: set[str] = set()
    while True:
        result, stay = _eliminate(module, plan, context, leave, proved)
        # The first refusal has the actual reason. Later runs see the block with gathered masks.
        refusals = {**{refusal.where: refusal for refusal in result.refusals}, **refusals}
        if not stay:
            break
        leave |= stay
    if not leave:
        return result
    first_refusals = tuple(refusals[refusal.where] for refusal in result.refusals)
    return dataclasses.replace(
        result, refusals=first_refusals, plan=dataclasses.replace(result.plan, refusals=plan.refusals + first_refusals)
    )


def _eliminate(
    module: GraphModule, plan: Plan, context: PassContext, leave: Collection[str], proved: set[str]
) -> tuple[PassResult, set[str]]:
    """Return the result of the pass if gathers of the masks in `leave` stay, and the names of further such masks.

    Adds the texts of the blocks that it proves to `proved`.
    """
    local = copy_graph_module(module)
    fix_count_lengths(local.graph)
    read_whole_quotients(local.graph)
    flatten_exchanged_slots(local.graph, max((group.ranks for group in context.groups.values()), default=1))
    masks, unread = replace_gathered_masks(local.graph, leave)
    blocks, refused = find_parallel_blocks(local.graph, context.groups, context.capture, unread)
    refusals = list(refused)
    banks: list[BankSpec] = list(plan.banks)
    local_blocks: list[LocalBlock] = []
    replicated: dict[str, None] = dict.fromkeys(plan.replicated)
    replaced: dict[Node, Node] = {}
    banks_of: dict[tuple[Node, ...], BankSpec] = {}
    for captured in blocks:
        # The source of a block may be the replaced result of an earlier block.
        sources = {role: replaced.get(node, node) for role, node in captured.sources.items()}
        block = dataclasses.replace(captured, sources=sources)
        try:
            _check_group(block, banks)
            block, bank = _bank_for(block, banks, banks_of)
            if block.name in context.leave:
                raise NotThisForm(context.leave[block.name])
            tokens = _replicated_sources(block)
            origin = ReplicatedValues(local.graph, block.group_name).origin(tokens) if tokens else Origin("", ())
            gathered, replaced[block.sink] = _replace(local.graph, block, bank, proved)
            if bank not in banks:
                banks.append(bank)
                banks_of[block.expert_tensors] = bank
        except (NotThisForm, ContractBroken) as error:
            refusals.append(refusal_of(local.graph, str(error), block.exchanges[-1].node, block.name, block.group_name))
        else:
            experts = hashlib.sha256("\n".join(gathered.meta[EXPERTS_TEXT_KEY]).encode()).hexdigest()
            values = [fake_value(tensor) for tensor in block.expert_tensors]
            weights = ", ".join(f"{dtype_name(value.dtype)} {[block.experts, *value.shape[1:]]}" for value in values)
            local_blocks.append(LocalBlock(block.name, block.form, block.group_name, experts, origin.digest, weights))
            replicated.update(dict.fromkeys(origin.inputs))
    stay = {mask for gather_of_ids, mask in masks.items() if gather_of_ids in local.graph.nodes}
    local.graph.lint()
    local.recompile()
    plan = dataclasses.replace(
        plan,
        banks=tuple(banks),
        local_blocks=tuple(local_blocks),
        replicated=tuple(replicated),
        refusals=plan.refusals + tuple(refusals),
    )
    taken = tuple(f"{block.name} ({block.form})" for block in local_blocks)
    return PassResult(local, plan, matches=taken, refusals=tuple(refusals)), stay


def _check_group(block: ParallelBlock, banks: Sequence[BankSpec]) -> None:
    """Raise NotThisForm if its experts are spread over another process group than those of `banks`."""
    if banks and banks[0].group != block.group_name:
        raise NotThisForm(
            f"it spreads over process group {block.group_name!r}, other blocks of the graph over "
            f"{banks[0].group!r}; expected one group for all experts of a graph"
        )


def _replicated_sources(block: ParallelBlock) -> list[Node]:
    """Return the sources that must be the same on all ranks."""
    return list(block.sources.values()) if block.form == "all_reduce" else []


def texts_of(module: GraphModule, block: LocalBlock) -> tuple[Sequence[str], Sequence[str]]:
    """Return the texts behind the digests `experts` and `tokens` of a `block` of `module`, which this pass rewrote."""
    for node in module.graph.find_nodes(op="call_function", target=gather):
        if node.meta.get("moepass_block") == block.name:
            if not block.tokens:
                return node.meta[EXPERTS_TEXT_KEY], ()
            nodes = {source.name: source for source in module.graph.nodes}
            sources = [nodes[name] for name in node.meta[SOURCES_KEY]]
            return node.meta[EXPERTS_TEXT_KEY], ReplicatedValues(module.graph, block.group).lines(sources)
    raise KeyError(block.name)


def _bank_for(
    block: ParallelBlock, banks: list[BankSpec], banks_of: dict[tuple[Node, ...], BankSpec]
) -> tuple[ParallelBlock, BankSpec]:
    """Return the block, with the name of its bank, and the bank.

    Two micro-batches through one layer share a bank. Other experts of the same module have another bank and name.
    """
    bank = banks_of.get(block.expert_tensors)
    if bank is not None and bank.expert_bounds == block.bounds:
        return dataclasses.replace(block, name=bank.name), bank
    names = {bank.name for bank in banks}
    if block.name in names:
        name = next(name for number in itertools.count(2) if (name := f"{block.name} #{number}") not in names)
        block = dataclasses.replace(block, name=name)
    return block, _complete_bank(block, len(banks))


def _replace(graph: Graph, block: ParallelBlock, bank: BankSpec, proved: set[str]) -> tuple[Node, Node]:
    """Replace the block by a local form that reads `bank`; return the gather of the bank, and the form's result.

    `proved` has the texts of proved blocks. Raises NotThisForm or ContractBroken, and leaves the graph as before.
    """
    read_known_lengths(graph, block)
    doomed = _doomed(block)
    before = set(graph.nodes)
    try:
        with graph.inserting_before(block.sink):
            gathered, complete = _gather(graph, block, bank)
            local = LocalForm(graph, block, complete)
            result = local.write()
        _same_value(block, result)
        text = block_text(block, local, result)
        flow = flow_in_local_form(local)
        if text not in proved:
            check_local_form(block, local, result, flow)
            proved.add(text)
        gathered.meta[EXPERTS_TEXT_KEY] = experts_text(local, flow)
        gathered.meta[SOURCES_KEY] = tuple(source.name for source in _replicated_sources(block))
    except (NotThisForm, ContractBroken):
        for node in reversed(list(graph.nodes)):
            if node not in before:
                graph.erase_node(node)
        raise
    has_other_sizes = described_sizes(fake_value(block.sink)) != described_sizes(fake_value(result))
    block.sink.replace_all_uses_with(result)
    for node in sorted(doomed, reverse=True):
        graph.erase_node(node)
    for node in reversed(block.region):
        if not node.users:
            graph.erase_node(node)
    for node in block.expert_tensors:
        erase_unread(graph, node)
    # `_doomed` raises if other nodes read the exchanges.
    assert not {exchange.node for exchange in block.exchanges}.intersection(graph.nodes)
    if has_other_sizes:
        refresh_fake_values(graph, result)
    return gathered, result


def _complete_bank(block: ParallelBlock, index: int) -> BankSpec:
    """Return the bank of all ranks' experts, with tensors named by role. Raises NotThisForm for repeated parameters."""
    numbers = {parameter: number for number, parameter in enumerate(_parameters(block))}
    tensors = []
    weights = [gemm.weights for gemm in block.gemms]
    for number, node in enumerate(block.expert_tensors):
        value = fake_value(node)
        role = f"weight_{weights.index(node)}" if node in weights else f"bias_{number - len(set(weights))}"
        tensors.append((role, (block.experts, *(int(size) for size in value.shape[1:])), value.dtype))
    layout = pack_layout(tensors)
    one_by_one = tuple(number for number, node in enumerate(block.expert_tensors) if is_expert_stack(node))
    recipes = tuple(recipe_of(node, n, numbers) for n, node in enumerate(block.expert_tensors) if is_computed(node))
    return BankSpec(
        index,
        block.name,
        ADOPTED.name,
        BankFormat.plain(layout.nbytes),
        layout.tensors,
        block.bounds,
        block.group_name,
        one_by_one=one_by_one,
        recipes=recipes,
    )


def _parameters(block: ParallelBlock) -> tuple[Node, ...]:
    """Return the parameters of a block's bank: those that it stores unchanged, then those of computed weights.

    Raises NotThisForm for repeated parameters.
    """
    direct = [parameter for node in block.expert_tensors if not is_computed(node) for parameter in parameters_of(node)]
    for parameter in direct:
        if direct.count(parameter) > 1:
            raise NotThisForm(f"{named(parameter)} is a weight of several experts, or two weights of one")
    read = [parameter for node in filter(is_computed, block.expert_tensors) for parameter in weight_parameters(node)]
    return tuple(dict.fromkeys((*direct, *read)))


def _gather(graph: Graph, block: ParallelBlock, bank: BankSpec) -> tuple[Node, dict[Node, Node]]:
    """Create a gather of the bank; return it, and the complete tensor of each local expert tensor of the block."""
    shards = block.expert_tensors
    bank_node = graph.call_function(gather, (list(_parameters(block)),), {"bank": bank.index})
    bank_node.meta["moepass_block"] = block.name
    bank_node.meta["moepass_parallel"] = block.form
    bank_node.meta[ROUTED_TOKENS_KEY] = routed_tokens(block)
    values = [fake_value(shard).new_empty(tensor.shape) for shard, tensor in zip(shards, bank.tensors, strict=True)]
    bank_node.meta["val"] = tuple(values)
    complete = {}
    for position, shard in enumerate(shards):
        element = graph.call_function(operator.getitem, (bank_node, position))
        element.meta["val"] = values[position]
        complete[shard] = element
    return bank_node, complete


def _same_value(block: ParallelBlock, result: Node) -> None:
    old, new = fake_value(block.sink), fake_value(result)
    if old.dtype != new.dtype or old.dim() != new.dim() or str(old.shape[1:]) != str(new.shape[1:]):
        raise NotThisForm(
            f"it returns {describe_shape(old)} at {named(block.sink)}, but all experts on this rank's own rows would "
            f"return {describe_shape(new)}"
        )


def _doomed(block: ParallelBlock) -> set[Node]:
    """Return assertions on exchanged sizes, and nodes that only they read. Raises NotThisForm for other readers."""
    exchanged = [exchange.node for exchange in block.exchanges if exchange.result is not block.sink]
    doomed = _readers_outside(block, [node for node in exchanged if node in block.region])
    asserted = _only_asserted(doomed)
    if asserted != doomed:
        raise NotThisForm(
            f"what its ranks exchange is also read by {named(min(doomed - asserted))}, so the exchange cannot go; "
            "expected nothing but its experts to read it"
        )
    # Other nodes may read the sizes that this rank sends.
    sizes = [node for node in block.region if is_call(node, aten._local_scalar_dense.default)]
    return asserted | _only_asserted(_readers_outside(block, sizes))


def _readers_outside(block: ParallelBlock, nodes: list[Node]) -> set[Node]:
    """Return the nodes outside of the block's region that depend on `nodes` of it and not on its result."""

    def is_result(node: Node) -> bool:
        return node is block.sink or collective_of(node) == block.exchanges[-1]

    return {node for node in descendants(*nodes, stop=is_result) if not is_result(node)} - set(block.region)


def _only_asserted(nodes: set[Node]) -> set[Node]:
    """Return the assertions among `nodes`, and the nodes that only these read."""
    asserted: set[Node] = set()
    for node in sorted(nodes, reverse=True):
        is_assertion = is_call(node, aten._assert_scalar.default) or _asserts_integers(node, nodes)
        if is_assertion or (node.users and asserted.issuperset(node.users)):
            asserted.add(node)
    return asserted


def _asserts_integers(node: Node, nodes: set[Node]) -> bool:
    """Return whether `node` is an assertion that `nodes` compute from ids or counts, and not from rows, which stay."""
    if not is_call(node, aten._assert_async.msg, aten._assert_async.default):
        return False
    steps = ancestors(node, follow=nodes.__contains__)
    return not any(is_float(used) for step in steps for used in step.all_input_nodes)
