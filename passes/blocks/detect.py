"""Find the MoE blocks of a captured graph.

Contract
    in    a functional ATen inference graph, `meta["val"]` on every node
    out   the same graph, unchanged; a plan with blocks, banks, and a refusal for everything that is almost a block
          later passes read the blocks from the plan (`blocks_in`), and do not search again

Pseudo-code
    for each GEMM (grouped_mm, its fallback, bmm) with expert weights [E, ., .] as an operand:
        follow the weights through views, and for batched_mm through the selection by expert, to their source
    group the GEMMs of the same tokens: the same offsets, the same expert ids, or a chain of dense GEMMs; low-rank pairs
    (`low_rank.py`) belong to the block of the GEMM whose result they change
    for each group:
        the last GEMM is the down projection, the others are up projections
        check that experts and widths match, and that all weights are in one bank, or none are
    for each bank tensor that no block reads:
        refuse it, with the place where it is read
    for each bank that a branch or loop of the graph reads (`torch.cond` has inner graphs):
        refuse it, because it is gathered synchronously there
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.models.errors import one_of
from moepass.models.homes import home_named
from moepass.passes.blocks.expert_gemms import ExpertGemm, expert_gemms, gather_of, refused, top_k
from moepass.passes.blocks.low_rank import low_rank_pairs
from moepass.passes.graph.nodes import fake_value, graphs_within, is_call, module_path, positions
from moepass.passes.graph.source_lines import place_of
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, MoEBlock, Plan, Refusal, TensorSpec, dtype_name
from moepass.passes.ir.protocol import PassContext, PassError, PassResult, PlanError, graph_pass
from moepass.passes.ir.slot_operations import BANK_TENSOR
from moepass.passes.ops.walk import ancestors

_ALONE = "an expert GEMM without a partner: a block has an up and a down, which share offsets or expert ids"
_ALONE_AND_DENSE = (
    "it multiplies every row by the weights of every expert, and no GEMM before it does so in the same form. If a "
    "router chooses some experts of each token, expected the weights of the others to be zero by construction, such as "
    "zeros.scatter(1, ids, weights)"
)


@dataclasses.dataclass(frozen=True)
class BlockMatch:
    """A block in the graph: its record and its nodes."""

    record: MoEBlock
    gemms: tuple[ExpertGemm, ...]
    # The `gemms` of low-rank pairs.
    low_rank: tuple[ExpertGemm, ...] = ()


@dataclasses.dataclass(frozen=True)
class Detection:
    matches: tuple[BlockMatch, ...]
    refusals: tuple[Refusal, ...]


@graph_pass(provides={"blocks"})
def detect(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Add the blocks of the graph, their banks, and refusals to the plan."""
    detection = find_blocks(module.graph)
    # The plan already has the banks of eliminate_expert_parallelism.
    banks = plan.banks + tuple(_bank_specs(list(graphs_within(module))))
    # The plan already has refusals of operators that communicate, from eliminate_expert_parallelism.
    refused_nodes = {refusal.node for refusal in plan.refusals if refusal.crosses_ranks}
    refusals = tuple(refusal for refusal in detection.refusals if refusal.node not in refused_nodes)
    plan = dataclasses.replace(
        plan,
        blocks=tuple(match.record for match in detection.matches),
        banks=banks,
        refusals=plan.refusals + refusals + tuple(_inner_reads(module)),
    )
    return PassResult(module, plan, matches=tuple(match.record.name for match in detection.matches))


def find_blocks(graph: Graph, *, may_compute: bool = False) -> Detection:
    """Return the MoE blocks of `graph` in host order, and refusals; `may_compute` is that of `expert_gemms`."""
    gemms, refused_gemms = expert_gemms(graph.nodes, may_compute=may_compute)
    detection = group_gemms(gemms)
    unclaimed = _unclaimed_bank_tensors(graph, [match.record for match in detection.matches])
    return Detection(detection.matches, (*refused_gemms, *detection.refusals, *unclaimed))


def group_gemms(gemms: list[ExpertGemm]) -> Detection:
    """Return the blocks that `gemms`, in host order, make up, and a refusal for each group that is no block."""
    matches: list[BlockMatch] = []
    refusals: list[Refusal] = []
    low_rank: dict[ExpertGemm, list[ExpertGemm]] = defaultdict(list)
    for pair in low_rank_pairs(gemms):
        low_rank[pair.main] += [pair.first, pair.second]
    low_rank_nodes = {gemm.node for pair in low_rank.values() for gemm in pair}
    for group in _groups([gemm for gemm in gemms if gemm.node not in low_rank_nodes]):
        outcome = _check_group(group, [gemm for main in group for gemm in low_rank[main]])
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
        else:
            matches.append(outcome)
    return Detection(tuple(matches), tuple(refusals))


def blocks_in(graph: Graph, blocks: Sequence[MoEBlock]) -> list[tuple[MoEBlock, list[Node]]]:
    """Return each of the plan's `blocks` with its GEMMs in `graph`, in host order.

    Raises PassError if a GEMM is missing: a pass that replaces GEMMs after `detect` must update their block.
    """
    nodes = {node.name: node for node in graph.nodes}
    for block in blocks:
        if missing := set(block.gemms) - nodes.keys():
            raise PassError(
                f"block {block.name} was detected with GEMM {one_of(missing)}, which a later pass removed without "
                "updating the block",
                name=block.name,
                expected=block.gemms,
            )
    return [(block, sorted(nodes[name] for name in block.gemms)) for block in blocks]


def _groups(gemms: list[ExpertGemm]) -> list[list[ExpertGemm]]:
    by_key: dict[tuple[str, Node], list[ExpertGemm]] = defaultdict(list)
    dense: list[ExpertGemm] = []
    for gemm in gemms:
        if gemm.form == "dense_bmm":
            dense.append(gemm)
        else:
            by_key[gemm.form, gemm.key].append(gemm)
    chains = [chain for sharing in by_key.values() for chain in _split_into_blocks(sharing)]
    return chains + _dense_chains(dense)


def _split_into_blocks(gemms: list[ExpertGemm]) -> list[list[ExpertGemm]]:
    """Split GEMMs of one key, in host order, into blocks: layers that share a routing decision share the key.

    A block ends with the first GEMM that depends on an earlier GEMM of the block.
    """
    chains: list[list[ExpertGemm]] = [[]]
    for gemm in gemms:
        ups = {up.node for up in chains[-1]}
        chains[-1].append(gemm)
        if ups and _depends_on(gemm.activations, ups):
            chains.append([])
    return [chain for chain in chains if chain]


def _depends_on(node: Node, sources: set[Node]) -> bool:
    earliest = min(sources)
    return not sources.isdisjoint(ancestors(node, follow=lambda used: used >= earliest))


def _dense_chains(gemms: list[ExpertGemm]) -> list[list[ExpertGemm]]:
    """Return chains of dense GEMMs, each of which depends on the ones before."""
    anchors = {gemm.node: gemm for gemm in gemms}
    chains: list[list[ExpertGemm]] = []
    fed: set[Node] = set()
    for gemm in reversed(gemms):
        if gemm.node in fed:
            continue
        ups = _feeding_gemms(gemm.activations, anchors, gemm.experts)
        fed.update(up.node for up in ups)
        chains.append([*ups, gemm])
    return list(reversed(chains))


def _feeding_gemms(start: Node, anchors: dict[Node, ExpertGemm], experts: int) -> list[ExpertGemm]:
    """Return the GEMMs on which `start` depends through nodes with the same leading expert dimension."""

    def is_end(node: Node) -> bool:
        value = fake_value(node)
        is_by_expert = not isinstance(value, torch.Tensor) or (value.dim() > 0 and value.shape[0] == experts)
        return node in anchors or not is_by_expert

    return [anchors[node] for node in sorted(ancestors(start, stop=is_end)) if node in anchors]


def _check_group(group: list[ExpertGemm], low_rank: list[ExpertGemm]) -> BlockMatch | Refusal:
    *ups, down = group
    where = module_path(down.node)
    if not ups:
        return refused(down.node, _ALONE_AND_DENSE if down.form == "dense_bmm" else _ALONE)
    counts = sorted({gemm.experts for gemm in group})
    if len(counts) > 1:
        return refused(down.node, f"the GEMMs disagree on the number of experts: {counts}")
    hidden, intermediate = ups[0].inner, down.inner
    total_outer = sum(up.outer for up in ups)
    if any(up.inner != hidden for up in ups) or total_outer not in (intermediate, 2 * intermediate):
        return refused(
            down.node,
            f"widths do not fit an MLP: up {[(up.inner, up.outer) for up in ups]}, down {(down.inner, down.outer)}, as "
            "(in, out); expected one or two up GEMMs whose outputs are as wide, together, as the down GEMM's "
            "input, or twice that",
        )
    gemms = sorted([*group, *low_rank], key=lambda gemm: gemm.node)
    banks = {_bank_of(gemm.weights) for gemm in gemms}
    if len(banks) > 1:
        reason = "its weights lie in different banks, or only some of them in a bank: offload them all with one call"
        return refused(down.node, reason)
    (bank,) = banks
    sources = {gemm.weights for gemm in gemms}
    record = MoEBlock(
        # The name of the bank identifies the layer even if a graph break separated it from the rest of the model.
        name=_bank_name(down.weights) or where or place_of(down.node),
        form=down.form,
        experts=counts[0],
        top_k=top_k(ups[0]),
        hidden=hidden,
        intermediate=intermediate,
        gated=total_outer == 2 * intermediate,
        dtype=dtype_name(fake_value(down.weights).dtype),
        weight_bytes=sum(fake_value(source).numel() * fake_value(source).element_size() for source in sources),
        gemms=tuple(gemm.node.name for gemm in gemms),
        bank=bank,
        parallel=_parallel_of(down.weights),
    )
    return BlockMatch(record, tuple(gemms), tuple(low_rank))


def _bank_of(source: Node) -> int | None:
    complete = gather_of(source)
    if complete is not None:
        return int(complete.kwargs["bank"])  # type: ignore[arg-type]
    return bank_arguments(source).bank if is_call(source, BANK_TENSOR) else None


def _bank_name(source: Node) -> str:
    complete = gather_of(source)
    if complete is not None:
        return str(complete.meta.get("moepass_block", ""))
    return bank_arguments(source).bank_name if is_call(source, BANK_TENSOR) else ""


def _parallel_of(source: Node) -> str:
    complete = gather_of(source)
    return "" if complete is None else str(complete.meta.get("moepass_parallel", ""))


def _unclaimed_bank_tensors(graph: Graph, blocks: Sequence[MoEBlock]) -> list[Refusal]:
    claimed = {node for tensors in claimed_bank_tensors(graph, blocks) for node in tensors}
    return [
        refused(
            node,
            f"`{bank_arguments(node).tensor_name}` is read outside a recognised MoE block: gathered synchronously",
            bank_arguments(node).bank_name,
        )
        for node in graph.nodes
        if is_call(node, BANK_TENSOR) and node not in claimed
    ]


def _inner_reads(module: GraphModule) -> list[Refusal]:
    """Return a refusal for each bank that an inner graph reads. Raises PlanError for a bank that is not complete."""
    _, *inner = graphs_within(module)
    reads = {bank_arguments(node).bank: node for graph in inner for node in graph.nodes if is_call(node, BANK_TENSOR)}
    refusals = []
    for _, node in sorted(reads.items()):
        read = bank_arguments(node)
        is_in_files = home_named(read.home).is_in_files
        if len(read.expert_bounds) > 2 or is_in_files or read.decoder:
            state = "rests in files" if is_in_files else f"lies in shards on {len(read.expert_bounds) - 1} ranks"
            remedy = ", or in the memory of one process"
            if read.decoder:
                state, remedy = f"rests encoded ({read.decoder})", ""
            raise PlanError(
                f"bank {read.bank_name} {state} and is read inside a "
                "branch or loop of the graph, where nothing can complete it: keep these experts out of torch.cond and "
                f"similar operators{remedy}",
                name=read.bank_name,
            )
        reason = "it is read inside a branch or loop of the graph, where no block is looked for: gathered synchronously"
        refusals.append(refused(node, reason, read.bank_name))
    return refusals


def claimed_bank_tensors(graph: Graph, blocks: Sequence[MoEBlock]) -> list[list[Node]]:
    """Return the bank tensors of each of `blocks`, in host order: its weights, and the biases of the same bank.

    If several blocks read one bank (a layer applied twice), a tensor belongs to the first block whose last GEMM comes
    after it.
    """
    position = positions(graph)
    ends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, (block, gemms) in enumerate(blocks_in(graph, blocks)):
        if block.bank is not None:
            ends[block.bank].append((position[gemms[-1]], index))
    claimed: list[list[Node]] = [[] for _ in blocks]
    for node in graph.nodes:
        if is_call(node, BANK_TENSOR) and (bank_ends := sorted(ends[bank_arguments(node).bank])):
            # A bias is added after the last GEMM, but gathered before or right after it.
            owner = next((index for end, index in bank_ends if position[node] <= end), bank_ends[-1][1])
            claimed[owner].append(node)
    return claimed


@dataclasses.dataclass(frozen=True)
class BankTensorArguments:
    """The arguments of a `moepass::bank_tensor` node by name."""

    shard: Node
    store: int
    bank: int
    bank_name: str
    index: int
    tensor_name: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    home: str = "host"
    expert_bounds: tuple[int, ...] = ()
    format_bytes: tuple[int, ...] = ()
    decoder: str = ""

    @property
    def is_complete(self) -> bool:
        """Return whether the shard is the complete bank in the format of a slot."""
        return not self.expert_bounds and not self.decoder

    @property
    def format(self) -> BankFormat:
        # Without sizes, the shard is the complete bank.
        if not self.format_bytes:
            return BankFormat.plain(int(fake_value(self.shard).numel()))
        home_bytes, link_bytes, slot_bytes = self.format_bytes
        return BankFormat(home_bytes, link_bytes, slot_bytes, self.decoder)


def bank_arguments(node: Node) -> BankTensorArguments:
    names = [field.name for field in dataclasses.fields(BankTensorArguments)]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    for name in ("shape", "expert_bounds", "format_bytes"):
        arguments[name] = tuple(arguments.get(name, ()))  # type: ignore[arg-type]
    return BankTensorArguments(**arguments)  # type: ignore[arg-type]


def _bank_specs(graphs: list[Graph]) -> list[BankSpec]:
    tensors: dict[int, dict[int, TensorSpec]] = defaultdict(dict)
    reads: dict[int, BankTensorArguments] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        if is_call(node, BANK_TENSOR):
            read = bank_arguments(node)
            tensors[read.bank][read.index] = TensorSpec(
                read.tensor_name, read.shape, dtype_name(read.dtype), read.offset_bytes
            )
            reads[read.bank] = read
    return [
        BankSpec(
            bank,
            reads[bank].bank_name,
            reads[bank].home,
            reads[bank].format,
            tuple(spec for _, spec in sorted(tensors[bank].items())),
            reads[bank].expert_bounds,
        )
        for bank in sorted(tensors)
    ]
