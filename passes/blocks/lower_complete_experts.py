"""Replace `moepass::complete_experts` operators of a model by gathers that can be prefetched.

Contract
    in    a captured graph with `moepass::complete_experts`, which returns the experts of all ranks
    out   the same graph, in which each such operator that a recognised block reads is a `gather` of a bank in shards on
          the ranks of a group; GEMMs are unchanged
          other such operators stay, and gather synchronously; each has a refusal

Pseudo-code
    in a first copy of the graph, replace each complete_experts without an obstacle by gather(parts)
    find the blocks of this copy, and the gathers that they read
    in a second copy, write only these gathers, and describe the bank of each
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from moepass.models.homes import ADOPTED
from moepass.passes.blocks.detect import find_blocks
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call, module_path
from moepass.passes.graph.source_lines import source_line
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, Plan, Refusal
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ir.shards import pack_layout
from moepass.passes.ir.slot_operations import gather
from moepass.passes.ops.walk import readers

# `layer` is a tensor with one number that identifies the layer for the kernel (in the runtime). It is not a constant,
# so that several layers share one compiled graph. `parts` are this rank's experts of each tensor, [local experts, ...];
# rank r has [expert_bounds[r], expert_bounds[r + 1]). The result is the same list with all experts. If `stay`, every
# part has the same memory in every run.
_library = torch.library.Library("moepass", "FRAGMENT")
_library.define(
    "complete_experts(Tensor layer, Tensor[] parts, int[] expert_bounds, str group_name, bool stay) -> Tensor[]"
)


def _fake_complete_experts(
    layer: torch.Tensor, parts: Sequence[torch.Tensor], expert_bounds: Sequence[int], group_name: str, stay: bool
) -> list[torch.Tensor]:
    return [shard.new_empty((expert_bounds[-1], *shard.shape[1:])) for shard in parts]


torch.library.register_fake("moepass::complete_experts", _fake_complete_experts, lib=_library)

COMPLETE_EXPERTS = torch.ops.moepass.complete_experts.default


def complete_bank(name: str, parts: Sequence[torch.Tensor], expert_bounds: Sequence[int], group_name: str) -> BankSpec:
    """Return the bank of which `parts`, each [local experts, ...], are this rank's shard.

    The names of its tensors are their indices, so that all ranks use the same names.
    """
    layout = pack_layout(
        (f"tensor_{index}", (expert_bounds[-1], *(int(size) for size in shard.shape[1:])), shard.dtype)
        for index, shard in enumerate(parts)
    )
    plain = BankFormat.plain(layout.nbytes)
    return BankSpec(0, name, ADOPTED.name, plain, layout.tensors, tuple(expert_bounds), group_name)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A `complete_experts` node and its arguments."""

    node: Node
    parts: tuple[Node, ...]
    bounds: tuple[int, ...]
    group_name: str
    stay: bool

    @staticmethod
    def of(node: Node) -> Completion:
        names = [argument.name for argument in COMPLETE_EXPERTS._schema.arguments]
        arguments: dict[str, object] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return Completion(
            node,
            tuple(arguments["parts"]),  # type: ignore[arg-type]
            tuple(arguments["expert_bounds"]),  # type: ignore[arg-type]
            str(arguments["group_name"]),
            bool(arguments["stay"]),
        )

    @property
    def where(self) -> str:
        return module_path(self.node) or self.node.name

    def bank(self, index: int) -> BankSpec:
        parts = [fake_value(shard) for shard in self.parts]
        return dataclasses.replace(complete_bank(self.where, parts, self.bounds, self.group_name), index=index)

    def write_gather(self, bank: int) -> None:
        """Change the node to a gather of `bank`; its users stay the same."""
        self.node.target, self.node.args, self.node.kwargs = gather, (list(self.parts),), {"bank": bank}
        self.node.meta["val"] = tuple(fake_value(self.node))
        self.node.meta["moepass_block"] = self.where
        self.node.meta["moepass_parallel"] = "asyncep"


@graph_pass(provides={"complete"}, conflicts={"blocks"})
def lower_complete_experts(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace every `complete_experts` that a block reads by a gather."""
    completions = _completions(module)
    if not completions:
        return PassResult(module, plan)
    reasons = {completion.node.name: _obstacle(completion, plan, completions) for completion in completions}
    candidates = {name: index for index, (name, reason) in enumerate(reasons.items(), len(plan.banks)) if not reason}
    trial, _ = _with_gathers(module, candidates)
    read = {match.record.bank for match in find_blocks(trial.graph).matches}
    reasons |= {name: "no recognised block reads it" for name, index in candidates.items() if index not in read}
    taken = [name for name, reason in reasons.items() if not reason]
    rewritten, banks = _with_gathers(module, {name: len(plan.banks) + index for index, name in enumerate(taken)})
    refusals = tuple(
        Refusal(
            completion.node.name,
            f"{reasons[completion.node.name]}: gathered synchronously",
            completion.where,
            source_line=source_line(completion.node),
        )
        for completion in completions
        if reasons[completion.node.name]
    )
    plan = dataclasses.replace(plan, banks=plan.banks + banks, refusals=plan.refusals + refusals)
    return PassResult(rewritten, plan, matches=tuple(bank.name for bank in banks), refusals=refusals)


def _completions(module: GraphModule) -> list[Completion]:
    return [Completion.of(node) for node in module.graph.nodes if is_call(node, COMPLETE_EXPERTS)]


def _obstacle(completion: Completion, plan: Plan, completions: Sequence[Completion]) -> str:
    """Return why `completion` cannot be a gather with any readers, or an empty string if it can."""
    if not completion.stay:
        return "this rank's experts lie elsewhere in every run, as under FSDP, and only the operator knows the layer"
    if any(shard.op != "placeholder" for shard in completion.parts):
        return "this rank's experts are computed in the graph"
    if any(reader.op == "output" for reader in readers(completion.node)):
        return "the graph returns the weights themselves, so no slot can be reused"
    group = plan.banks[0].group if plan.banks else completions[0].group_name
    if completion.group_name != group:
        return f"it spreads over group {completion.group_name!r}, other blocks over {group!r}"
    return ""


def _with_gathers(module: GraphModule, banks: Mapping[str, int]) -> tuple[GraphModule, tuple[BankSpec, ...]]:
    """Return a copy with gathers of `banks`, indices by node name, instead of these operators; and the banks."""
    rewritten = copy_graph_module(module)
    specs = []
    for completion in _completions(rewritten):
        index = banks.get(completion.node.name)
        if index is not None:
            specs.append(completion.bank(index))
            completion.write_gather(index)
    rewritten.graph.lint()
    rewritten.recompile()
    return rewritten, tuple(specs)
