"""Cut a graph at its scheduling points into segments, each compiled as one unit.

Contract
    in    a graph, scheduled or without anything to schedule
    out   a top-level graph of `call_module` segments, slot operations and size arithmetic, in unchanged order
          equal segments share one module; the output specification stays

Pseudo-code
    walk the nodes in host order:
        slot operations, their elements, synchronous bank reads, expert stacks, updates of inputs and size arithmetic
        stay at the top level
        a slot operation, an update, or the edge of a resident block ends the current segment
        a region that runs in chunks of tokens is one segment, including the blocks in it
    for each segment: inputs are the values that it reads from outside, outputs those that are read after it
    segments with the same text (operations, constants, shapes of inputs) become one module
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.models.errors import one_of
from moepass.passes.blocks.detect import blocks_in
from moepass.passes.blocks.hoist_token_return import block_ends
from moepass.passes.blocks.sink_token_gather import is_lookup
from moepass.passes.cost.graph_cost import total_cost
from moepass.passes.graph.canonical_text import CanonicalText, describe_constant_here, describe_value
from moepass.passes.graph.nodes import (
    copy_graph_module,
    fake_value,
    graph_inputs,
    is_call,
    module_path,
    positions,
    symbolic_sizes,
    unbacked_conditions,
)
from moepass.passes.ir.plan import MoEBlock, Plan, Step
from moepass.passes.ir.protocol import PassContext, PassResult, PlanError, graph_pass
from moepass.passes.ir.segment import BLOCK_EDGE_KEY, PART_KEY, REGION_KEY, TOKENS_KEY, Segment, SegmentUse, role_of
from moepass.passes.ir.slot_operations import BANK_TENSOR, EXPERT_STACK, SLOT_OPS, gather
from moepass.passes.ops.traits import is_view, mutates
from moepass.passes.ops.walk import ancestors
from moepass.passes.segments.parts import parts_of_nodes


@graph_pass(requires={"blocks"}, provides={"segments"})
def partition(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Cut `module` into segments, and set `plan.steps` and `plan.segments`."""
    left = [node.name for node in module.graph.nodes if is_call(node, gather)]
    if left:
        raise PlanError(
            f"{one_of(left)} would run as a synchronous gather, which the executor does not support: do not disable "
            "pass schedule, or disable rewrite and plan too",
            name="disable",
            value=sorted(context.disabled),
        )
    cut = cut_into_segments(module, plan.blocks)
    plan = dataclasses.replace(plan, steps=cut.steps, segments=cut.segments)
    return PassResult(cut.top, plan, matches=tuple(segment.name for segment in cut.segments))


@dataclasses.dataclass(frozen=True)
class Segmented:
    """A top-level graph, its steps in order, and its distinct segments."""

    top: GraphModule
    steps: tuple[Step, ...]
    segments: tuple[Segment, ...]


def cut_into_segments(module: GraphModule, blocks: Sequence[MoEBlock] = (), within_regions: bool = False) -> Segmented:
    """Cut a copy of `module` into segments. A captured graph is cut only at the edges of its blocks.

    `blocks` are the detected blocks of the graph; a graph made from a segment has their marks already. With
    `within_regions`, regions that run in chunks of tokens are cut too.
    """
    sized = _with_symbol_nodes(module)
    mark_block_edges(sized.graph, blocks)
    builder = _TopLevel(sized, blocks)
    for run in _runs(sized.graph, within_regions):
        builder.add(run)
    return builder.finish()


@dataclasses.dataclass(frozen=True)
class NodeRun:
    """Successive nodes that stay at the top level, or that form one segment."""

    nodes: tuple[Node, ...]
    is_segment: bool


def _runs(graph: Graph, within_regions: bool) -> list[NodeRun]:
    edges = _edges_without_slots(graph)
    runs: list[NodeRun] = []
    current: list[Node] = []
    region: int | None = None

    def close() -> None:
        if current:
            runs.append(NodeRun(tuple(current), is_segment=True))
            current.clear()

    for node in graph.nodes:
        number = None if within_regions else node.meta.get(REGION_KEY)
        if number != region and node.op == "call_function":
            close()
            region = number
        if node.op == "call_function" and region is not None:
            current.append(node)
        elif node.op in ("placeholder", "output", "get_attr"):
            if node.op == "output":
                close()
            runs.append(NodeRun((node,), is_segment=False))
        elif _is_size_arithmetic(node) or is_call(node, torch.ops.aten._assert_scalar.default):
            # At the top level, sizes are plain integers and assertions on them plain booleans. A segment that needs a
            # size computes it from the symbols.
            if any(used in current for used in node.all_input_nodes):
                close()
            runs.append(NodeRun((node,), is_segment=False))
        elif is_call(node, *SLOT_OPS, BANK_TENSOR, EXPERT_STACK) or _is_slot_element(node) or mutates(node):
            # An update of a buffer is a copy, which gains nothing from a compiler. Between segments, it cannot change
            # an earlier copy of the buffer that Inductor turned into a view (see LoweredSegment).
            close()
            runs.append(NodeRun((node,), is_segment=False))
        else:
            if node in edges:
                close()
            current.append(node)
    return runs


def _is_slot_element(node: Node) -> bool:
    return is_call(node, operator.getitem) and is_call(node.args[0], *SLOT_OPS)


def _is_size_arithmetic(node: Node) -> bool:
    scalars = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return node.op == "call_function" and isinstance(fake_value(node), scalars)


def mark_block_edges(graph: Graph, blocks: Sequence[MoEBlock]) -> None:
    """Mark the first and the last GEMM of each of `blocks`, so that graphs made from this one can be cut there too."""
    for block, gemms in blocks_in(graph, blocks):
        gemms[-1].meta[BLOCK_EDGE_KEY] = False, block.bank
        gemms[0].meta[BLOCK_EDGE_KEY] = True, block.bank


def _edges_without_slots(graph: Graph) -> set[Node]:
    """Return the first node of each block, and the node after its last one, without blocks that read a slot.

    Cuts there make deep resident models compile as fast as streamed ones.
    """
    ends = block_ends(graph)
    streamed = {node.kwargs["bank"] for node in graph.nodes if is_call(node, *SLOT_OPS)}
    edges: set[Node] = set()
    for gemm in graph.nodes:
        is_first, bank = gemm.meta.get(BLOCK_EDGE_KEY, (None, None))
        if is_first is not None and bank not in streamed:
            edges.add(_first_of_block(gemm) if is_first else ends.get(gemm, gemm).next)
    return edges


def _first_of_block(gemm: Node) -> Node:
    """Return the first node of the segment of `gemm`.

    The segment begins with the lookup of the GEMM's rows and the view of its weights, if these nodes directly precede
    the GEMM. Otherwise it begins with `gemm` itself.
    """
    first = gemm
    while is_view(first.prev) and first.prev is gemm.args[1]:
        first = first.prev
    return first.prev if is_lookup(first.prev) and first.prev in gemm.all_input_nodes else first


class _TopLevel:
    """The builder of the top-level graph."""

    def __init__(self, module: GraphModule, blocks: Sequence[MoEBlock]) -> None:
        self.source = module
        self.parts = parts_of_nodes(module.graph, blocks)
        for node, name in self.parts.items():
            node.meta[PART_KEY] = name
        self.block_of = {name: block.name for block in blocks for name in block.gemms}
        self.graph = Graph()
        self.values: dict[Node, Node] = {}
        self.modules: dict[str, GraphModule] = {}
        self.segment_of_text: dict[str, Segment] = {}
        self.steps: list[Step] = []
        self.symbols = _symbol_sources(module.graph)
        self.host_order = positions(module.graph)

    def add(self, run: NodeRun) -> None:
        if run.is_segment:
            self._add_segment(run.nodes)
            return
        (node,) = run.nodes
        copied = self.graph.node_copy(node, lambda used: self.values[used])
        self.values[node] = copied
        if is_call(node, *SLOT_OPS):
            op = node.target.__name__  # type: ignore[union-attr]
            bank, slot = node.kwargs["bank"], node.kwargs["slot"]
            self.steps.append(Step(op, str(node.meta.get("moepass_block", node.name)), bank, slot))  # type: ignore[arg-type]

    def finish(self) -> Segmented:
        attributes: dict[str, object] = dict(self.modules)
        for node in self.graph.nodes:
            if node.op == "get_attr":
                attributes[str(node.target)] = operator.attrgetter(str(node.target))(self.source)
        top = GraphModule(attributes, self.graph)
        top.meta = dict(self.source.meta)
        return Segmented(top, tuple(self.steps), tuple(self.segment_of_text.values()))

    def _add_segment(self, nodes: tuple[Node, ...]) -> None:
        segment = _SegmentGraph(self.source, nodes, self.symbols, self.host_order)
        cost = total_cost(nodes)
        record = self.segment_of_text.get(segment.text)
        if record is None:
            parts = tuple(dict.fromkeys(self.parts[node] for node in nodes if node in self.parts))
            record = Segment(f"segment_{len(self.modules)}", role_of(parts), parts, cost=cost)
            self.modules[record.name] = segment.module()
        blocks = tuple(dict.fromkeys(self.block_of[node.name] for node in nodes if node.name in self.block_of))
        use = SegmentUse(segment.layers, blocks)
        self.segment_of_text[segment.text] = dataclasses.replace(record, uses=(*record.uses, use))
        name = record.name
        call = self.graph.call_module(name, tuple(self.values[node] for node in segment.inputs))
        call.meta["val"] = tuple(fake_value(node) for node in segment.outputs)
        call.meta["moepass_layers"] = segment.layers
        for position, node in enumerate(segment.outputs):
            element = self.graph.call_function(operator.getitem, (call, position))
            element.meta = dict(node.meta)
            self.values[node] = element
        label = f"{name}: {segment.layers}" if segment.layers else name
        self.steps.append(Step("segment", label, cost=cost))


class _SegmentGraph:
    """A run of nodes as a separate graph. Segments with equal `text` can share one compilation."""

    def __init__(
        self, source: GraphModule, nodes: tuple[Node, ...], symbols: dict[str, Node], host_order: dict[Node, int]
    ) -> None:
        inside = set(nodes)
        self.layers = _layers(nodes)
        self.outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        sizes = _size_arithmetic_of(nodes, host_order)
        constants = [node for node in _read_from_outside(nodes, inside) if node.op == "get_attr"]
        read = [node for node in _read_from_outside([*sizes, *nodes], inside | set(sizes)) if node.op != "get_attr"]
        # Inductor reads the symbols of shapes from inputs, so each symbol in use becomes an input.
        needed = sorted(_free_symbols([*nodes, *read]))
        # A symbol that the segment itself defines, such as a number of nonzero elements, cannot be an input.
        outer = [
            symbols[name] for name in needed if name in symbols and host_order[symbols[name]] < host_order[nodes[0]]
        ]
        read += [symbol for symbol in outer if symbol not in read]
        self.inputs = sorted(read, key=host_order.__getitem__)

        graph = Graph()
        values: dict[Node, Node] = {}
        for index, node in enumerate(self.inputs):
            values[node] = graph.placeholder(f"input_{index}")
            values[node].meta = dict(node.meta)
            # An input does not define its sizes, and does not belong to a part or block of this segment.
            for key in ("unbacked_bindings", PART_KEY, BLOCK_EDGE_KEY, REGION_KEY):
                values[node].meta.pop(key, None)
        for node in [*constants, *sizes, *nodes]:
            values[node] = graph.node_copy(node, lambda used: values[used])
        output = graph.output(tuple(values[node] for node in self.outputs))
        output.meta["val"] = tuple(fake_value(node) for node in self.outputs)
        self.graph = graph
        self.constants = {str(node.target): operator.attrgetter(str(node.target))(source) for node in constants}
        self.text = _text(graph, self.constants)

    def module(self) -> GraphModule:
        return GraphModule(self.constants, self.graph)


def _read_from_outside(nodes: tuple[Node, ...] | list[Node], inside: set[Node]) -> list[Node]:
    return list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))


def _size_arithmetic_of(nodes: tuple[Node, ...], host_order: dict[Node, int]) -> list[Node]:
    """Return the size arithmetic on which `nodes` depend, in host order, without the symbols that are graph inputs."""

    def is_size(node: Node) -> bool:
        return _is_size_arithmetic(node) and not _reads_tensor(node)

    sizes = {used for node in ancestors(*nodes, follow=is_size) for used in filter(is_size, node.all_input_nodes)}
    return sorted(sizes, key=host_order.__getitem__)


def _reads_tensor(node: Node) -> bool:
    """Return whether a size comes from a tensor, so that its value must be passed in and not computed again."""
    return any(isinstance(fake_value(used), torch.Tensor) for used in node.all_input_nodes)


def _with_symbol_nodes(module: GraphModule) -> GraphModule:
    """Return a copy with a node for every symbol of an input's shape, and with elements right after their source.

    AOT passes some symbols as inputs. Other symbols appear only in the shape of a tensor, and a segment that does not
    read this tensor could not use them. And if a release separates an operator with several results from their
    getitems, a cut there would pass on a tuple, which no segment can return.
    """
    copied = copy_graph_module(module)
    host_order = positions(copied.graph)
    for node in list(copied.graph.nodes):
        for element in sorted(node.users, key=host_order.__getitem__, reverse=True):
            if is_call(element, operator.getitem) and element.args[0] is node:
                node.append(element)
    inputs = graph_inputs(copied.graph)
    carried = set(_symbol_sources(copied.graph))
    for node in inputs:
        value = fake_value(node)
        if not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and str(size.node.expr) not in carried:
                carried.add(str(size.node.expr))
                with copied.graph.inserting_after(inputs[-1]):
                    symbol = copied.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                symbol.meta["val"] = size
    copied.recompile()
    return copied


def _symbol_sources(graph: Graph) -> dict[str, Node]:
    """Return the node that carries each symbol of the graph's shapes."""
    sources: dict[str, Node] = {}
    for node in graph.nodes:
        value = fake_value(node)
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            sources.setdefault(str(value.node.expr), node)
    return sources


def _free_symbols(nodes: list[Node]) -> set[str]:
    return {str(symbol) for size in symbolic_sizes(nodes) for symbol in size.node.expr.free_symbols}


def _layers(nodes: tuple[Node, ...]) -> str:
    """Return the modules in which a segment begins and ends, for error messages."""
    paths = [path for path in (module_path(node) for node in nodes) if path]
    if not paths:
        return ""
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} to {paths[-1]}"


def _text(graph: Graph, constants: dict[str, object]) -> str:
    """Return a canonical description of a segment: its operations, input types and constants."""

    def describe(node: Node) -> str:
        if node.op == "get_attr":
            return f"constant {describe_constant_here(str(node.target), constants[str(node.target)])}"
        return f"input {describe_value(fake_value(node))}"

    text = CanonicalText(describe)
    for node in graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            text.add_source(node)
        else:
            text.add(node)
    if any(REGION_KEY in node.meta for node in graph.nodes):
        text.remark(*(f"tokens in {node.meta.get(TOKENS_KEY)}" for node in graph_inputs(graph)))
    # Data-dependent sizes are inputs, so their names do not matter, but known bounds on them are compiled in.
    text.remark(*unbacked_conditions(graph))
    return str(text)
