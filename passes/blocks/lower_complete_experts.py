"""Turn complete experts that a model asks for itself, by an operator, into gathers that can be prefetched.

Contract
    in    a captured graph, in which `moepass::complete_experts` makes the experts of all ranks from this rank's
    out   every such operator whose results a recognised block reads is a `gather` of a bank that lies in shards on the
          ranks of a group; the GEMMs stay as they came
          an operator that cannot be one stays: it gathers synchronously where it stands, and a refusal says why

Pseudo-code
    for each complete_experts that nothing stands against:
        in a first copy of the graph, write gather(parts) in its place: both give one tensor for each part
    find the blocks of that copy, and which gathers they read
    in a second copy, write these gathers only, and describe the bank of each
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

# `layer` is a tensor of one number, by which the kernel (in the runtime) knows the layer: no constant, so that a graph
# that serves several layers is compiled once. `parts` are this rank's experts of each tensor, [own experts, ...]; rank
# r has [expert_bounds[r], expert_bounds[r + 1]). The result is the same list with all experts. `stay` says that every
# part is the same memory in every run.
_library = torch.library.Library("moepass", "FRAGMENT")
_library.define(
    "complete_experts(Tensor layer, Tensor[] parts, int[] expert_bounds, str group_name, bool stay) -> Tensor[]"
)


def _fake_complete_experts(
    layer: torch.Tensor, parts: Sequence[torch.Tensor], expert_bounds: Sequence[int], group_name: str, stay: bool
) -> list[torch.Tensor]:
    return [part.new_empty((expert_bounds[-1], *part.shape[1:])) for part in parts]


torch.library.register_fake("moepass::complete_experts", _fake_complete_experts, lib=_library)

COMPLETE_EXPERTS = torch.ops.moepass.complete_experts.default


def complete_bank(name: str, parts: Sequence[torch.Tensor], expert_bounds: Sequence[int], group_name: str) -> BankSpec:
    """The bank that `parts`, each [own experts, ...], are this rank's part of, whether in a graph or not.

    Its tensors are called by their places: ranks must agree on the names.
    """
    layout = pack_layout(
        (f"tensor_{place}", (expert_bounds[-1], *(int(size) for size in part.shape[1:])), part.dtype)
        for place, part in enumerate(parts)
    )
    plain = BankFormat.plain(layout.nbytes)
    return BankSpec(0, name, ADOPTED.name, plain, layout.tensors, tuple(expert_bounds), group_name)


@dataclasses.dataclass(frozen=True)
class Completion:
    """The arguments of a `complete_experts` node by name, and the node."""

    node: Node
    parts: tuple[Node, ...]
    bounds: tuple[int, ...]
    group_name: str
    stay: bool

    @staticmethod
    def of(node: Node) -> Completion:
        names = [argument.name for argument in COMPLETE_EXPERTS._schema.arguments]
        given: dict[str, object] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return Completion(
            node,
            tuple(given["parts"]),  # type: ignore[arg-type]
            tuple(given["expert_bounds"]),  # type: ignore[arg-type]
            str(given["group_name"]),
            bool(given["stay"]),
        )

    @property
    def where(self) -> str:
        return module_path(self.node) or self.node.name

    def bank(self, index: int) -> BankSpec:
        parts = [fake_value(part) for part in self.parts]
        return dataclasses.replace(complete_bank(self.where, parts, self.bounds, self.group_name), index=index)

    def write_gather(self, bank: int) -> None:
        """Make the node a gather of `bank`; what reads its tensors goes on doing so."""
        self.node.target, self.node.args, self.node.kwargs = gather, (list(self.parts),), {"bank": bank}
        self.node.meta["val"] = tuple(fake_value(self.node))
        self.node.meta["moepass_block"] = self.where
        self.node.meta["moepass_parallel"] = "asyncep"


@graph_pass(provides={"complete"}, conflicts={"blocks"})
def lower_complete_experts(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace every `complete_experts` that a block reads by a gather."""
    found = _completions(module)
    if not found:
        return PassResult(module, plan)
    reasons = {completion.node.name: _obstacle(completion, plan, found) for completion in found}
    free = {name: place for place, (name, reason) in enumerate(reasons.items(), len(plan.banks)) if not reason}
    trial, _ = _with_gathers(module, free)
    read = {match.record.bank for match in find_blocks(trial.graph).matches}
    reasons |= {name: "no recognised block reads it" for name, index in free.items() if index not in read}
    taken = [name for name, reason in reasons.items() if not reason]
    rewritten, banks = _with_gathers(module, {name: len(plan.banks) + place for place, name in enumerate(taken)})
    refusals = tuple(
        Refusal(
            one.node.name,
            f"{reasons[one.node.name]}: gathered synchronously",
            one.where,
            source_line=source_line(one.node),
        )
        for one in found
        if reasons[one.node.name]
    )
    plan = dataclasses.replace(plan, banks=plan.banks + banks, refusals=plan.refusals + refusals)
    return PassResult(rewritten, plan, matches=tuple(bank.name for bank in banks), refusals=refusals)


def _completions(module: GraphModule) -> list[Completion]:
    return [Completion.of(node) for node in module.graph.nodes if is_call(node, COMPLETE_EXPERTS)]


def _obstacle(completion: Completion, plan: Plan, found: Sequence[Completion]) -> str:
    """Why it cannot be a gather, whatever reads it; empty where nothing stands against it."""
    if not completion.stay:
        return "this rank's experts lie elsewhere in every run, as under FSDP, and only the operator knows the layer"
    if any(part.op != "placeholder" for part in completion.parts):
        return "this rank's experts are computed in the graph"
    if any(reader.op == "output" for reader in readers(completion.node)):
        return "the graph returns the weights themselves, so no slot can be reused"
    group = plan.banks[0].group if plan.banks else found[0].group_name
    if completion.group_name != group:
        return f"it spreads over group {completion.group_name!r}, other blocks over {group!r}"
    return ""


def _with_gathers(module: GraphModule, banks: Mapping[str, int]) -> tuple[GraphModule, tuple[BankSpec, ...]]:
    """A copy in which the operators with these names are gathers of the banks with these indices, and the banks."""
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
