"""Find the MoE blocks of a captured graph.

Contract
    in    a functional ATen inference graph, `meta["val"]` on every node
    out   the same graph, untouched; `plan.blocks` and `plan.banks` filled, one refusal for everything that looked like
          a block and was not taken

Pseudo-code
    for each product (grouped_mm, its fallback, bmm) with expert weights [E, ., .] as an operand:
        follow the weights through views, and through the selection by expert for batched_mm, to where they enter
    group the products that serve the same tokens: the same offsets, the same expert ids, or a chain of dense products
    for each group:
        the products before the last are up projections, the last one is the down projection
        check that experts and widths fit, and that all weights lie in one bank, or all in none
    for each bank tensor that no block claims:
        refuse, and say where it is read
    for each bank that a branch or loop of the graph reads (`torch.cond` has graphs of its own):
        refuse: it is gathered synchronously there
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.models.homes import home_named
from moepass.passes.graph.nodes import fake_value, graphs_within, is_call, is_view, module_path, positions, view_source
from moepass.passes.graph.source_lines import ARGUMENT_KEY, describe_node, place_of, source_line
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BANK_TENSOR, BankSpec, MoEBlock, Plan, Refusal, TensorSpec, dtype_name, gather
from moepass.passes.ir.protocol import PassContext, PassResult, PlanError, graph_pass

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class ExpertProduct:
    """One matrix product with expert weights: `weights` is where they enter, [experts, ., .]."""

    node: Node
    form: str
    key: Node
    weights: Node
    activations: Node
    inner: int
    outer: int

    @property
    def experts(self) -> int:
        return int(fake_value(self.weights).shape[0])


@dataclasses.dataclass(frozen=True)
class BlockMatch:
    """A block in the graph: its record and the nodes behind it."""

    record: MoEBlock
    products: tuple[ExpertProduct, ...]


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
    plan = dataclasses.replace(
        plan,
        blocks=tuple(match.record for match in found.matches),
        banks=banks,
        refusals=plan.refusals + found.refusals + tuple(_inner_reads(module)),
    )
    return PassResult(module, plan, matches=tuple(match.record.name for match in found.matches))


def find_blocks(graph: Graph) -> Detection:
    """Every MoE block of `graph`, in host order, and a refusal for every near miss."""
    products, refusals = _expert_products(graph)
    matches: list[BlockMatch] = []
    for group in _groups(products):
        outcome = _check_group(group)
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
        else:
            matches.append(outcome)
    refusals += _unclaimed_bank_tensors(graph, matches)
    return Detection(tuple(matches), tuple(refusals))


def _expert_products(graph: Graph) -> tuple[list[ExpertProduct], list[Refusal]]:
    products: list[ExpertProduct] = []
    refusals: list[Refusal] = []
    outcome: ExpertProduct | Refusal | None
    for node in graph.nodes:
        if is_grouped_product(node):
            outcome = _grouped_product(node)
        elif is_call(node, aten.bmm.default):
            outcome = _batched_product(node)
        else:
            continue
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
        elif outcome is not None:
            products.append(outcome)
    return products, refusals


def is_grouped_product(node: Node) -> bool:
    """True for `rows[ends[e - 1]:ends[e]] @ weights[e]` for every e, in either of the forms that torch captures."""
    # The fallback operator exists only once transformers was imported, so it is recognised by name.
    return is_call(node, aten._grouped_mm.default) or (
        node.op == "call_function" and str(node.target) == "transformers.grouped_mm_fallback.default"
    )


def _grouped_product(node: Node) -> ExpertProduct | Refusal:
    arguments = {**dict(zip(("input", "weight", "offs"), node.args, strict=False)), **node.kwargs}
    activations, weight, offsets = arguments.get("input"), arguments.get("weight"), arguments.get("offs")
    if not isinstance(weight, Node) or not isinstance(activations, Node):
        return _refused(node, "the grouped product has no weight operand: it needs rows, weights and offsets")
    if not isinstance(offsets, Node):
        return _refused(node, "a grouped product without offsets is no product by expert: pass offs")
    source = _weight_source(weight)
    if not _is_expert_weight(source):
        return _foreign_weight(node, source)
    shape = fake_value(weight).shape
    return ExpertProduct(node, "grouped_mm", offsets, source, activations, int(shape[1]), int(shape[2]))


def _batched_product(node: Node) -> ExpertProduct | Refusal | None:
    for operand, other in (node.args, tuple(reversed(node.args))):
        assert isinstance(operand, Node)
        assert isinstance(other, Node)
        selected = _weight_source(operand)
        if is_call(selected, aten.index.Tensor):
            weights, indices = selected.args[0], selected.args[1]
            if isinstance(weights, Node) and isinstance(indices, (list, tuple)) and len(indices) == 1:
                source = _weight_source(weights)
                ids = indices[0]
                if isinstance(ids, Node) and _is_expert_weight(source):
                    inner, outer = _batched_widths(node, operand)
                    return ExpertProduct(node, "batched_mm", view_source(ids), source, other, inner, outer)
        elif _is_expert_weight(selected) and fake_value(operand).shape[0] == fake_value(selected).shape[0]:
            if selected.op == "placeholder" and _is_expert_weight(_weight_source(other)):
                continue  # two inputs of one kind, as in attention over given queries and keys: neither is a weight
            inner, outer = _batched_widths(node, operand)
            return ExpertProduct(node, "dense_bmm", node, selected, other, inner, outer)
    return None


def _batched_widths(node: Node, weight: Node) -> tuple[int, int]:
    """(inner, outer) width of the product; the weight may stand on either side."""
    shape = fake_value(weight).shape
    if node.args[1] is weight:
        return int(shape[1]), int(shape[2])
    return int(shape[2]), int(shape[1])


def _weight_source(node: Node) -> Node:
    """Where a weight enters: behind all views, but an element of a gather is a tensor of its own."""
    while _gather_of(node) is None and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_expert_weight(node: Node) -> bool:
    """Where expert weights enter a graph: as a tensor of a bank, or as an input [experts, ., .]."""
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 3 or not value.is_floating_point():
        return False
    if is_call(node, BANK_TENSOR) or _gather_of(node) is not None:
        return True
    # A weight has a fixed shape, and nobody passes it from call to call.
    is_weight = node.op == "placeholder" and not node.meta.get(ARGUMENT_KEY, False)
    return is_weight and all(isinstance(size, int) for size in value.shape)


def _foreign_weight(node: Node, source: Node) -> Refusal:
    found = describe_node(source)
    return _refused(
        node,
        f"the weights are computed in the graph (by {found}), so they are not a bank that can be moved; keep "
        "parameters [experts, ., .] in the type in which the product reads them",
    )


def _refused(node: Node, reason: str, where: str | None = None) -> Refusal:
    where = module_path(node) if where is None else where
    return Refusal(node.name, reason, where, source_line=source_line(node))


def _groups(products: list[ExpertProduct]) -> list[list[ExpertProduct]]:
    by_key: dict[tuple[str, Node], list[ExpertProduct]] = defaultdict(list)
    dense: list[ExpertProduct] = []
    for product in products:
        if product.form == "dense_bmm":
            dense.append(product)
        else:
            by_key[product.form, product.key].append(product)
    chains = [chain for sharing in by_key.values() for chain in _split_where_fed(sharing)]
    return chains + _dense_chains(dense)


def _split_where_fed(products: list[ExpertProduct]) -> list[list[ExpertProduct]]:
    """Products of one key, in host order, as blocks: layers that share a routing decision share the key.

    The first product that an earlier one of the same block feeds is that block's last.
    """
    chains: list[list[ExpertProduct]] = [[]]
    for product in products:
        ups = {up.node for up in chains[-1]}
        chains[-1].append(product)
        if ups and _depends_on(product.activations, ups):
            chains.append([])
    return [chain for chain in chains if chain]


def _depends_on(node: Node, sources: set[Node]) -> bool:
    earliest = min(sources)
    seen: set[Node] = set()
    pending = [node]
    while pending:
        used = pending.pop()
        if used in sources:
            return True
        if used not in seen and used > earliest:
            seen.add(used)
            pending.extend(used.all_input_nodes)
    return False


def _dense_chains(products: list[ExpertProduct]) -> list[list[ExpertProduct]]:
    """Dense products that feed each other: a chain ends where a product's output reaches no further one."""
    anchors = {product.node: product for product in products}
    chains: list[list[ExpertProduct]] = []
    fed: set[Node] = set()
    for product in reversed(products):
        if product.node in fed:
            continue
        ups = _feeding_products(product.activations, anchors, product.experts)
        fed.update(up.node for up in ups)
        chains.append([*ups, product])
    return list(reversed(chains))


def _feeding_products(start: Node, anchors: dict[Node, ExpertProduct], experts: int) -> list[ExpertProduct]:
    """Products that `start` depends on through elementwise nodes and views over the same leading expert dimension."""
    found: list[ExpertProduct] = []
    seen: set[Node] = set()
    pending = [start]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in anchors:
            found.append(anchors[node])
            continue
        value = fake_value(node)
        if isinstance(value, torch.Tensor) and (value.dim() == 0 or value.shape[0] != experts):
            continue
        pending.extend(node.all_input_nodes)
    return sorted(found, key=lambda product: product.node)


def _check_group(group: list[ExpertProduct]) -> BlockMatch | Refusal:
    *ups, down = group
    where = module_path(down.node)
    if not ups:
        reason = (
            "a product by expert without a partner: a block has an up and a down, which share offsets or expert ids"
        )
        return _refused(down.node, reason)
    counts = sorted({product.experts for product in group})
    if len(counts) > 1:
        return _refused(down.node, f"the products disagree on the number of experts: {counts}")
    hidden, intermediate = ups[0].inner, down.inner
    total_outer = sum(up.outer for up in ups)
    if any(up.inner != hidden for up in ups) or total_outer not in (intermediate, 2 * intermediate):
        return _refused(
            down.node,
            f"widths do not fit an MLP: up {[(up.inner, up.outer) for up in ups]}, down {(down.inner, down.outer)}, as "
            "(in, out); expected one or two up products whose outputs are as wide, together, as the down product's "
            "input, or twice that",
        )
    banks = {_bank_of(product.weights) for product in group}
    if len(banks) > 1:
        reason = "its weights lie in different banks, or only some of them in a bank: offload them all with one call"
        return _refused(down.node, reason)
    (bank,) = banks
    sources = {product.weights for product in group}
    record = MoEBlock(
        # The bank's name says which layer it is even where a graph break left only a part of the model in sight.
        name=_bank_name(down.weights) or where or place_of(down.node),
        form=down.form,
        experts=counts[0],
        top_k=_top_k(ups[0]),
        hidden=hidden,
        intermediate=intermediate,
        gated=total_outer == 2 * intermediate,
        dtype=dtype_name(fake_value(down.weights).dtype),
        weight_bytes=sum(fake_value(source).numel() * fake_value(source).element_size() for source in sources),
        products=tuple(product.node.name for product in group),
        bank=bank,
        parallel=_parallel_of(down.weights),
    )
    return BlockMatch(record, tuple(group))


def _bank_of(source: Node) -> int | None:
    complete = _gather_of(source)
    if complete is not None:
        return int(complete.kwargs["bank"])  # type: ignore[arg-type]
    return bank_arguments(source).bank if is_call(source, BANK_TENSOR) else None


def _gather_of(node: Node) -> Node | None:
    """The gather that `node` is a tensor of: blocks that pass eliminate_expert_parallelism took have one already."""
    return node.args[0] if is_call(node, operator.getitem) and is_call(node.args[0], gather) else None  # type: ignore[return-value]


def _bank_name(source: Node) -> str:
    complete = _gather_of(source)
    if complete is not None:
        return str(complete.meta.get("moepass_block", ""))
    return bank_arguments(source).bank_name if is_call(source, BANK_TENSOR) else ""


def _parallel_of(source: Node) -> str:
    complete = _gather_of(source)
    return "" if complete is None else str(complete.meta.get("moepass_parallel", ""))


def _top_k(up: ExpertProduct) -> int | None:
    """Rows of the product per row of the tokens that were gathered for it, where that is a number."""
    if up.form == "dense_bmm":
        return None
    rows = fake_value(up.activations).shape[0]
    node = up.activations
    while True:
        if is_call(node, aten.expand.default):
            # repeat_interleave, taken apart: every token's row, k times.
            before, after = fake_value(node.args[0]).shape, fake_value(node).shape  # type: ignore[arg-type]
            ones = [new for old, new in zip(before, after, strict=False) if isinstance(old, int) and old == 1]
            copies = [new for new in ones if isinstance(new, int) and 1 < new <= up.experts]
            if len(before) == len(after) and len(copies) == 1:
                return copies[0]
        if is_view(node) or is_call(node, aten._to_copy.default, aten.masked_fill.Scalar, aten.clone.default):
            node = node.all_input_nodes[0]
            continue
        if is_call(node, aten.index.Tensor, aten.index_select.default, aten.repeat_interleave.self_int):
            tokens = fake_value(node.args[0]).shape[0]  # type: ignore[arg-type]
            return next((k for k in range(1, up.experts + 1) if _always_equal(rows, tokens * k)), None)
        return None


def _always_equal(left: object, right: object) -> bool:
    """Equality of two sizes as expressions, without adding a guard."""
    left_expression = left.node.expr if isinstance(left, torch.SymInt) else left
    right_expression = right.node.expr if isinstance(right, torch.SymInt) else right
    return bool(left_expression == right_expression)


def _unclaimed_bank_tensors(graph: Graph, matches: list[BlockMatch]) -> list[Refusal]:
    claimed = {node for of_match in claimed_bank_tensors(graph, matches) for node in of_match}
    return [
        _refused(
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
            place = f"rests encoded for decoder {read.decoder!r}" if read.decoder else place
            raise PlanError(
                f"bank {read.bank_name} {place} and is read inside a "
                "branch or loop of the graph, where nothing can complete it: keep these experts out of torch.cond and "
                "its like, or in the memory of one process"
            )
        reason = "it is read inside a branch or loop of the graph, where no block is looked for: gathered synchronously"
        refusals.append(_refused(node, reason, read.bank_name))
    return refusals


def claimed_bank_tensors(graph: Graph, matches: Sequence[BlockMatch]) -> list[list[Node]]:
    """The bank tensors that each of `matches` reads, in host order: its weights, and the biases of the same bank.

    Where one bank serves several blocks (a layer applied twice), a tensor belongs to the first block whose last
    product comes after it.
    """
    place = positions(graph)
    ends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, match in enumerate(matches):
        if match.record.bank is not None:
            ends[match.record.bank].append((place[match.products[-1].node], index))
    claimed: list[list[Node]] = [[] for _ in matches]
    for node in graph.nodes:
        if is_call(node, BANK_TENSOR) and (of_bank := sorted(ends[bank_arguments(node).bank])):
            # A bias is added after the last product, but gathered before or right after it.
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
