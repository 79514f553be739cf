"""Find the MoE blocks of a captured graph.

Contract
    in    a functional ATen inference graph, `meta["val"]` on every node
    out   the same graph, untouched; `plan.blocks` and `plan.banks` filled, one refusal for everything that looked like
          a block and was not taken

Pseudo-code
    for each GEMM (grouped_mm, its fallback, bmm) with expert weights [E, ., .] as an operand:
        follow the weights through views, and through the selection by expert for batched_mm, to where they enter
    group the GEMMs that serve the same tokens: the same offsets, the same expert ids, or a chain of dense GEMMs; pairs
    of low rank (`low_rank.py`) belong to the block of the GEMM that they stand beside
    for each group:
        the GEMMs before the last are up projections, the last one is the down projection
        check that experts and widths fit, and that all weights lie in one bank, or all in none
    for each bank tensor that no block claims:
        refuse, and say where it is read
    for each bank that a branch or loop of the graph reads (`torch.cond` has graphs of its own):
        refuse: it is gathered synchronously there
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.models.homes import home_named
from moepass.passes.blocks.expert_gemms import ExpertGemm, expert_gemms, gather_of, refused, top_k
from moepass.passes.blocks.low_rank import low_rank_pairs
from moepass.passes.graph.nodes import fake_value, graphs_within, is_call, module_path, positions
from moepass.passes.graph.source_lines import place_of
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, MoEBlock, Plan, Refusal, TensorSpec, dtype_name
from moepass.passes.ir.protocol import PassContext, PassResult, PlanError, graph_pass
from moepass.passes.ir.slot_operations import BANK_TENSOR
from moepass.passes.ops.walk import ancestors

_ALONE = "an expert GEMM without a partner: a block has an up and a down, which share offsets or expert ids"
_ALONE_AND_DENSE = (
    "it multiplies every row by the weights of every expert, and the GEMM before it does so in another form, or there "
    "is none. Where a router chooses some experts of each token, expected the weights of the others to be zero by "
    "construction, such as zeros.scatter(1, ids, weights)"
)


@dataclasses.dataclass(frozen=True)
class BlockMatch:
    """A block in the graph: its record and the nodes behind it."""

    record: MoEBlock
    gemms: tuple[ExpertGemm, ...]
    # Those of `gemms` that stand beside others, as pairs of low rank.
    low_rank: tuple[ExpertGemm, ...] = ()


@dataclasses.dataclass(frozen=True)
class Detection:
    matches: tuple[BlockMatch, ...]
    refusals: tuple[Refusal, ...]


@graph_pass(provides={"blocks"})
def detect(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Fill `plan.blocks`, `plan.banks` and the refusals from what `find_blocks` finds."""
    found = find_blocks(module.graph)
    # Banks of blocks that pass eliminate_expert_parallelism took are in the plan already.
    banks = plan.banks + tuple(_bank_specs(list(graphs_within(module))))
    # Of an operator that other ranks wait at, pass eliminate_expert_parallelism has told.
    told = {refusal.node for refusal in plan.refusals if refusal.crosses_ranks}
    refusals = tuple(refusal for refusal in found.refusals if refusal.node not in told)
    plan = dataclasses.replace(
        plan,
        blocks=tuple(match.record for match in found.matches),
        banks=banks,
        refusals=plan.refusals + refusals + tuple(_inner_reads(module)),
    )
    return PassResult(module, plan, matches=tuple(match.record.name for match in found.matches))


def find_blocks(graph: Graph, *, may_compute: bool = False) -> Detection:
    """Every MoE block of `graph`, in host order, and a refusal for every near miss; `may_compute`: see expert_gemms."""
    gemms, refusals = expert_gemms(graph, may_compute=may_compute)
    matches: list[BlockMatch] = []
    beside: dict[ExpertGemm, list[ExpertGemm]] = defaultdict(list)
    for pair in low_rank_pairs(gemms):
        beside[pair.main] += [pair.first, pair.second]
    of_pairs = {gemm.node for pair in beside.values() for gemm in pair}
    for group in _groups([gemm for gemm in gemms if gemm.node not in of_pairs]):
        outcome = _check_group(group, [gemm for main in group for gemm in beside[main]])
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
        else:
            matches.append(outcome)
    refusals += _unclaimed_bank_tensors(graph, matches)
    return Detection(tuple(matches), tuple(refusals))


def _groups(gemms: list[ExpertGemm]) -> list[list[ExpertGemm]]:
    by_key: dict[tuple[str, Node], list[ExpertGemm]] = defaultdict(list)
    dense: list[ExpertGemm] = []
    for gemm in gemms:
        if gemm.form == "dense_bmm":
            dense.append(gemm)
        else:
            by_key[gemm.form, gemm.key].append(gemm)
    chains = [chain for sharing in by_key.values() for chain in _split_where_fed(sharing)]
    return chains + _dense_chains(dense)


def _split_where_fed(gemms: list[ExpertGemm]) -> list[list[ExpertGemm]]:
    """GEMMs of one key, in host order, as blocks: layers that share a routing decision share the key.

    The first GEMM that an earlier one of the same block feeds is that block's last.
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
    """Dense GEMMs that feed each other: a chain ends where a GEMM's output reaches no further one."""
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
    every = sorted([*group, *low_rank], key=lambda gemm: gemm.node)
    banks = {_bank_of(gemm.weights) for gemm in every}
    if len(banks) > 1:
        reason = "its weights lie in different banks, or only some of them in a bank: offload them all with one call"
        return refused(down.node, reason)
    (bank,) = banks
    sources = {gemm.weights for gemm in every}
    record = MoEBlock(
        # The bank's name says which layer it is even where a graph break left only a part of the model in sight.
        name=_bank_name(down.weights) or where or place_of(down.node),
        form=down.form,
        experts=counts[0],
        top_k=top_k(ups[0]),
        hidden=hidden,
        intermediate=intermediate,
        gated=total_outer == 2 * intermediate,
        dtype=dtype_name(fake_value(down.weights).dtype),
        weight_bytes=sum(fake_value(source).numel() * fake_value(source).element_size() for source in sources),
        gemms=tuple(gemm.node.name for gemm in every),
        bank=bank,
        parallel=_parallel_of(down.weights),
    )
    return BlockMatch(record, tuple(every), tuple(low_rank))


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


def _unclaimed_bank_tensors(graph: Graph, matches: list[BlockMatch]) -> list[Refusal]:
    claimed = {node for of_match in claimed_bank_tensors(graph, matches) for node in of_match}
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
    """One refusal for each bank that a graph inside `module` reads. Raises PlanError for one that lies in shards."""
    _, *inner = graphs_within(module)
    reads = {bank_arguments(node).bank: node for graph in inner for node in graph.nodes if is_call(node, BANK_TENSOR)}
    refusals = []
    for _, node in sorted(reads.items()):
        read = bank_arguments(node)
        is_in_files = home_named(read.home).is_in_files
        if len(read.expert_bounds) > 2 or is_in_files or read.decoder:
            place = "rests in files" if is_in_files else f"lies in shards on {len(read.expert_bounds) - 1} ranks"
            remedy = ", or in the memory of one process"
            if read.decoder:
                place, remedy = f"rests encoded ({read.decoder})", ""
            raise PlanError(
                f"bank {read.bank_name} {place} and is read inside a "
                "branch or loop of the graph, where nothing can complete it: keep these experts out of torch.cond and "
                f"its like{remedy}",
                name=read.bank_name,
            )
        reason = "it is read inside a branch or loop of the graph, where no block is looked for: gathered synchronously"
        refusals.append(refused(node, reason, read.bank_name))
    return refusals


def claimed_bank_tensors(graph: Graph, matches: Sequence[BlockMatch]) -> list[list[Node]]:
    """The bank tensors that each of `matches` reads, in host order: its weights, and the biases of the same bank.

    Where one bank serves several blocks (a layer applied twice), a tensor belongs to the first block whose last
    GEMM comes after it.
    """
    place = positions(graph)
    ends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, match in enumerate(matches):
        if match.record.bank is not None:
            ends[match.record.bank].append((place[match.gemms[-1].node], index))
    claimed: list[list[Node]] = [[] for _ in matches]
    for node in graph.nodes:
        if is_call(node, BANK_TENSOR) and (of_bank := sorted(ends[bank_arguments(node).bank])):
            # A bias is added after the last GEMM, but gathered before or right after it.
            owner = next((index for end, index in of_bank if place[node] <= end), of_bank[-1][1])
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
        """Whether the shard holds the complete bank as it is in a slot."""
        return not self.expert_bounds and not self.decoder

    @property
    def format(self) -> BankFormat:
        # A shard that is the complete bank has its size.
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
    """The banks that `graphs` read, by index; each lists the tensors that they read."""
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
