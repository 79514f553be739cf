"""Bring every MoE block to its canonical form: one gather of the complete bank, and local experts that read it.

Contract
    in    a graph with detected blocks, and bank tensors where the model reads them
    out   one `gather` for each block with a bank, before its first bank tensor; GEMMs are unchanged, so results are
          bit-identical

Pseudo-code
    for each block with a bank:
        insert gather([shard], bank) before the first bank tensor of the block
        replace each bank tensor by its element of the gather
    other bank tensors stay synchronous gathers, each with a refusal in the plan
"""

from __future__ import annotations

import dataclasses
import operator

from torch.fx import GraphModule, Node

from moepass.passes.blocks.detect import bank_arguments, claimed_bank_tensors
from moepass.passes.graph.nodes import copy_graph_module, fake_value
from moepass.passes.graph.source_lines import source_line
from moepass.passes.ir.plan import MoEBlock, Plan, Refusal
from moepass.passes.ir.protocol import PassContext, PassResult, PlanError, graph_pass
from moepass.passes.ir.slot_operations import BANK_TENSOR, gather
from moepass.passes.ops.walk import readers


@graph_pass(requires={"blocks"}, provides={"canonical"}, conflicts={"scheduled"})
def rewrite(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace the bank tensors of each block by one gather of its bank."""
    rewritten = copy_graph_module(module)
    graph = rewritten.graph
    _refuse_two_stores(rewritten)
    refusals: list[Refusal] = []
    names: list[str] = []
    for block, bank_tensors in zip(plan.blocks, claimed_bank_tensors(graph, plan.blocks), strict=True):
        if not bank_tensors:
            continue
        escaping = _escaping(bank_tensors)
        if escaping is not None:
            reason = "the graph returns the weights themselves, so no slot can be reused"
            line = source_line(escaping)
            refusals.append(Refusal(escaping.name, reason, block.name, source_line=line))
            continue
        _gather_once(rewritten, block, bank_tensors, plan)
        names.append(block.name)
    rewritten.recompile()
    plan = dataclasses.replace(plan, refusals=plan.refusals + tuple(refusals))
    return PassResult(rewritten, plan, matches=tuple(names), refusals=tuple(refusals))


def _gather_once(module: GraphModule, block: MoEBlock, bank_tensors: list[Node], plan: Plan) -> None:
    graph = module.graph
    reads = [bank_arguments(node) for node in bank_tensors]
    bank = plan.bank(reads[0].bank)
    by_name = {read.tensor_name: fake_value(node) for node, read in zip(bank_tensors, reads, strict=True)}
    with graph.inserting_before(bank_tensors[0]):
        complete = graph.call_function(gather, ([reads[0].shard],), {"bank": bank.index})
        complete.meta["val"] = tuple(by_name.get(tensor.name) for tensor in bank.tensors)
        complete.meta["moepass_block"] = block.name
        elements: dict[str, Node] = {}
        for position, tensor in enumerate(bank.tensors):
            if tensor.name in by_name:
                element = graph.call_function(operator.getitem, (complete, position))
                element.meta["val"] = by_name[tensor.name]
                elements[tensor.name] = element
    for node, read in zip(bank_tensors, reads, strict=True):
        node.replace_all_uses_with(elements[read.tensor_name])
        graph.erase_node(node)


def _escaping(bank_tensors: list[Node]) -> Node | None:
    """Return a bank tensor whose memory the graph returns, or None: a slot must not be visible after its release."""
    for node in bank_tensors:
        if any(reader.op == "output" for reader in readers(node)):
            return node
    return None


def _refuse_two_stores(module: GraphModule) -> None:
    stores = {
        bank_arguments(node).store
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is BANK_TENSOR
    }
    if len(stores) > 1:
        raise PlanError(
            f"one graph reads the banks of {len(stores)} offload_experts calls; offload the whole model with one call",
            name="offload_experts",
            value=len(stores),
            expected=1,
        )
