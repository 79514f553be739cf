"""Take expert parallelism out of a graph: every rank runs its own tokens through all experts, whose weights come to it.

Contract
    in    a captured graph; `context.groups` tells this rank's place in every process group that the graph talks to;
          `context.leave` are blocks that other ranks leave, by name, and why
    out   every block of expert parallelism that was found and proved is local: its collectives, its host syncs, its
          sizes that only a run would tell, and the assertions on them are gone; its complete bank is gathered
          a block that fits no form, or whose local form does not compute the same, stays as it came: a refusal says why
          `plan.local_blocks` is what the other ranks must say too before any of this may run (proposals.py)

Pseudo-code
    for each block of expert parallelism that other ranks do not leave:
        where its tokens must be the same on all ranks, find out what they are computed from
        put a gather of the complete bank before the block's result, and the local form after that
        run both with mock peers, unless an equal block was; where they differ, take the local form out again and refuse
        let everything that read the block's result read the local one
        erase what nobody reads any more
    bring the described sizes behind the block up to date
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
from moepass.passes.blocks.computed_weights import is_computed, parameters_behind, recipe_of
from moepass.passes.blocks.count_lengths import fix_count_lengths
from moepass.passes.blocks.expert_stack import is_expert_stack, parameters_of
from moepass.passes.graph.collectives import collective_of, communications_of
from moepass.passes.graph.graph_writer import described_sizes, erase_unread, refresh_fake_values
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call, is_float, positions
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
from moepass.passes.parallel.match.parallel_block import TOKENS_KEY, ParallelBlock, routed_tokens
from moepass.passes.parallel.mock.mock_run import ContractBroken
from moepass.passes.parallel.proof.prove import check_local_form
from moepass.passes.parallel.replicated import Origin, ReplicatedValues

aten = torch.ops.aten

# Written on the gather of a block: what its digests are made of, for people to compare.
EXPERTS_TEXT_KEY, SOURCES_KEY = "moepass_experts_text", "moepass_sources"


@graph_pass(provides={"local"}, conflicts={"blocks"}, reorders_collectives=True, is_agreed=True)
def eliminate_expert_parallelism(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace every block of expert parallelism by its local form."""
    if not any(True for _ in communications_of(module.graph)):
        return PassResult(module, plan)
    proved: set[str] = set()
    refusals: dict[str, Refusal] = {}
    leave: set[str] = set()
    while True:
        result, stay = _eliminate(module, plan, context, leave, proved)
        # What a block of masks is refused for is told of it as it was looked at, and it stays as it came.
        refusals = {**{refusal.where: refusal for refusal in result.refusals}, **refusals}
        if not stay:
            break
        leave |= stay
    if not leave:
        return result
    told = tuple(refusals[refusal.where] for refusal in result.refusals)
    return dataclasses.replace(
        result, refusals=told, plan=dataclasses.replace(result.plan, refusals=plan.refusals + told)
    )


def _eliminate(
    module: GraphModule, plan: Plan, context: PassContext, leave: Collection[str], proved: set[str]
) -> tuple[PassResult, set[str]]:
    """What the pass gives where the gathers of masks called `leave` stay, and those that would have to stay too.

    `proved` are the texts of blocks that were proved right; this adds those that it proves.
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
    for found in blocks:
        # Where nothing lies between two blocks, one begins with what the other gave.
        sources = {role: replaced.get(node, node) for role, node in found.sources.items()}
        block = dataclasses.replace(found, sources=sources)
        try:
            _check_group(block, banks)
            block, bank = _bank_for(block, banks, banks_of)
            if block.name in context.leave:
                raise NotThisForm(context.leave[block.name])
            origin = _origin_of_tokens(local.graph, block)
            gathered, replaced[block.sink] = _replace(local.graph, block, bank, proved)
            if bank not in banks:
                banks.append(bank)
                banks_of[block.expert_tensors] = bank
        except (NotThisForm, ContractBroken) as error:
            stays = block.exchanges[-1].node
            refusals.append(refusal_of(local.graph, str(error), stays, block.name, block.group_name))
        else:
            experts = hashlib.sha256("\n".join(gathered.meta[EXPERTS_TEXT_KEY]).encode()).hexdigest()
            weights = _describe_weights(block)
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


def _origin_of_tokens(graph: Graph, block: ParallelBlock) -> Origin:
    """What the tokens, ids and weights of the block are computed from, where all ranks must have the same.

    Raises NotThisForm where they cannot be the same.
    """
    sources = _replicated_sources(block)
    return ReplicatedValues(graph, block.group_name).origin(sources) if sources else Origin("", ())


def texts_of(module: GraphModule, block: LocalBlock) -> tuple[Sequence[str], Sequence[str]]:
    """The texts behind the digests `experts` and `tokens` of `block`, which this pass took in `module`."""
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
    """The bank of a block, and the block as it is called then.

    A layer that two micro-batches go through is two blocks with one bank. Other experts of the same module have
    another one, and another name.
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
    """Put the local form, which reads `bank`, in the place of the block; gives the gather of it, and its result.

    `proved` are the texts of blocks for which that was proved right.

    Raises NotThisForm, ContractBroken; the graph is then as before.
    """
    read_known_lengths(graph, block)
    doomed = _doomed(graph, block)
    before = set(graph.nodes)
    try:
        with graph.inserting_before(block.sink):
            gathered, complete = _gather(graph, block, bank)
            local = LocalForm(graph, block, complete)
            result = local.write()
        _same_value(block, result)
        text = block_text(block, local, result)
        if text not in proved:
            check_local_form(block, local, result)
            proved.add(text)
        gathered.meta[EXPERTS_TEXT_KEY] = experts_text(local)
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
    # A collective that something else still reads would have been found above; one that stays is a mistake here.
    assert not {exchange.node for exchange in block.exchanges}.intersection(graph.nodes)
    if has_other_sizes:
        refresh_fake_values(graph, result)
    return gathered, result


def _complete_bank(block: ParallelBlock, index: int) -> BankSpec:
    """The bank of all ranks' experts. Its tensors are called by their roles: ranks must agree on the names.

    Raises NotThisForm where a parameter stands in it twice.
    """
    direct = [parameter for node in block.expert_tensors if not is_computed(node) for parameter in parameters_of(node)]
    for parameter in direct:
        if direct.count(parameter) > 1:
            raise NotThisForm(f"{named(parameter)} is a weight of several experts, or two weights of one")
    tensors = []
    weights = [gemm.weights for gemm in block.gemms]
    for number, node in enumerate(block.expert_tensors):
        value = fake_value(node)
        role = f"weight_{weights.index(node)}" if node in weights else f"bias_{number - len(set(weights))}"
        tensors.append((role, (block.experts, *(int(size) for size in value.shape[1:])), value.dtype))
    layout = pack_layout(tensors)
    one_by_one = tuple(place for place, node in enumerate(block.expert_tensors) if is_expert_stack(node))
    places = {parameter: place for place, parameter in enumerate(_parameters(block))}
    recipes = tuple(
        recipe_of(node, place, places) for place, node in enumerate(block.expert_tensors) if is_computed(node)
    )
    size = BankFormat.plain(layout.nbytes)
    return BankSpec(
        index,
        block.name,
        ADOPTED.name,
        size,
        layout.tensors,
        block.bounds,
        block.group_name,
        one_by_one=one_by_one,
        recipes=recipes,
    )


def _parameters(block: ParallelBlock) -> tuple[Node, ...]:
    """The parameters that the bank of a block is made of: those that lie in it as they are come first."""
    direct = [parameter for node in block.expert_tensors if not is_computed(node) for parameter in parameters_of(node)]
    read = [parameter for node in filter(is_computed, block.expert_tensors) for parameter in parameters_behind(node)]
    return tuple(dict.fromkeys((*direct, *read)))


def _gather(graph: Graph, block: ParallelBlock, bank: BankSpec) -> tuple[Node, dict[Node, Node]]:
    """A gather of the bank, and the complete tensor of each local expert tensor of the block."""
    shards = block.expert_tensors
    bank_node = graph.call_function(gather, (list(_parameters(block)),), {"bank": bank.index})
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
    return bank_node, complete


def _same_value(block: ParallelBlock, result: Node) -> None:
    old, new = fake_value(block.sink), fake_value(result)
    if old.dtype != new.dtype or old.dim() != new.dim() or str(old.shape[1:]) != str(new.shape[1:]):
        raise NotThisForm(
            f"it gives {describe_shape(old)} at {named(block.sink)}, but all experts on this rank's own rows would "
            f"give {describe_shape(new)}"
        )


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
        raise NotThisForm(
            f"what its ranks exchange is also read by {named(stray)}, so the exchange cannot go; expected nothing but "
            "its experts to read it"
        )
    # How much this rank sends is its own affair, and may be read by others too.
    sizes = [node for node in block.region if is_call(node, aten._local_scalar_dense.default)]
    return asserted | _only_asserted(_readers_outside(block, sizes))


def _readers_outside(block: ParallelBlock, nodes: list[Node]) -> set[Node]:
    """Return the nodes outside of the block's region that depend on `nodes` of it and not on its result."""

    def is_result(node: Node) -> bool:
        return node is block.sink or collective_of(node) == block.exchanges[-1]

    return {node for node in descendants(*nodes, stop=is_result) if not is_result(node)} - set(block.region)


def _only_asserted(nodes: set[Node]) -> set[Node]:
    """The nodes among `nodes` that end in assertions and nowhere else."""
    kept = set(nodes)
    while True:
        other = {
            node
            for node in kept
            if not (is_call(node, aten._assert_scalar.default) or _asserts_integers(node, nodes))
            and (not node.users or any(user not in kept for user in node.users))
        }
        if not other:
            return kept
        kept -= other


def _asserts_integers(node: Node, nodes: set[Node]) -> bool:
    """True for an assertion on ids or counts, as far as it is computed by `nodes`: not on rows, which stay."""
    if not is_call(node, aten._assert_async.msg, aten._assert_async.default):
        return False
    steps = ancestors(node, follow=nodes.__contains__)
    return not any(is_float(used) for step in steps for used in step.all_input_nodes)


def _describe_weights(block: ParallelBlock) -> str:
    values = [fake_value(tensor) for tensor in block.expert_tensors]
    return ", ".join(f"{dtype_name(value.dtype)} {[block.experts, *value.shape[1:]]}" for value in values)
