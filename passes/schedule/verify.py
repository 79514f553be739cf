"""Prove that a scheduled graph is safe, independent of timing.

Contract
    in    scheduled graph and its plan
    out   the same graph, untouched; ScheduleError names the broken rule and the node that breaks it

Three actors run at once. The host issues nodes in graph order. The compute stream runs what the host issued, in that
order. The copy stream runs copies and decodes in the order in which they were issued. Between the two streams, only
events define an order, not the host. So the happens-before graph has an edge for

    compute order     between successive nodes on the compute stream
    copy order        between successive copies and decodes
    an event          from a release to the copy of the prefetch that names it in `after`,
                      and from a copy, or the decode of an encoded bank, to the acquire that takes it

and a rule holds only if a path proves it. An encoded bank is copied into the only encoded buffer, and decoded from
there into its slot.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import networkx
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.nodes import is_call, positions, readers
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassError, PassResult, graph_pass
from moepass.passes.ir.slot_operations import SLOT_OPS, acquire, decode, gather, prefetch, release


class ScheduleError(PassError):
    """An unsafe scheduled graph. `rule` is the name of the broken rule in `RULES`."""

    def __init__(self, rule: str, problem: str) -> None:
        super().__init__(
            f"unsafe schedule, rule {rule} ({RULES[rule].sentence}): {problem}", expected=RULES[rule].sentence
        )
        self.rule = rule


@dataclasses.dataclass(frozen=True)
class Rule:
    """A property of safe schedules. `check` yields one sentence for every violation."""

    sentence: str
    check: Callable[[ScheduleFacts], Iterator[str]]


@dataclasses.dataclass(frozen=True)
class ScheduleFacts:
    """The slot operations of a scheduled graph, and its happens-before relation.

    Attributes:
        host_order: position of each node in host order
        order: the happens-before graph, of nodes on the compute stream and work on the copy stream
    """

    graph: Graph
    plan: Plan
    host_order: dict[Node, int]
    prefetches: tuple[Node, ...]
    decodes: tuple[Node, ...]
    acquires: tuple[Node, ...]
    releases: tuple[Node, ...]
    order: networkx.DiGraph

    def happens_before(self, earlier: object, later: object) -> bool:
        """Return whether a path proves that `earlier` happens before `later`."""
        return earlier in self.order and later in self.order and networkx.has_path(self.order, earlier, later)

    def decodes_of(self, copied: Node) -> list[Node]:
        """Return the decodes of the prefetch `copied`."""
        return [node for node in self.decodes if node.args[0] is copied]

    def acquires_of(self, filled: Node) -> list[Node]:
        """Return the acquires of the prefetch `filled`, or of a decode of it."""
        return [node for node in self.acquires if node.args[0] in (filled, *self.decodes_of(filled))]

    def slot_writes(self, filled: Node) -> list[SideWork]:
        """Return the writes of the prefetch `filled` into its slot."""
        decodes = self.decodes_of(filled)
        return [side_work(node) for node in decodes] if decodes else [side_work(filled)]

    def releases_of(self, tensors: Node) -> list[Node]:
        """Return the releases of the acquire `tensors`."""
        return [node for node in self.releases if node.args[0] is tensors]

    def compute_readers(self, tensors: Node) -> list[Node]:
        """Return the nodes that read the slot through `tensors`, without its releases, which only mark the end."""
        return [node for node in readers(tensors) if node not in self.releases]

    def successive_fillings(self) -> Iterator[tuple[Node, Node]]:
        """Yield each prefetch into a slot with the next one into the same slot."""
        previous: dict[object, Node] = {}
        for filled in self.prefetches:
            slot = filled.kwargs["slot"]
            if slot in previous:
                yield previous[slot], filled
            previous[slot] = filled


@graph_pass(requires={"scheduled"}, provides={"verified"})
def verify(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Check every rule. Raises ScheduleError on the first violation."""
    for name, problem in violations(module.graph, plan):
        raise ScheduleError(name, problem)
    return PassResult(module, plan, matches=tuple(RULES))


def violations(graph: Graph, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield every violation: the name of its rule and a sentence. Later violations may follow from the first."""
    facts = schedule_facts(graph, plan)
    for name, rule in RULES.items():
        for problem in rule.check(facts):
            yield name, problem


def schedule_facts(graph: Graph, plan: Plan) -> ScheduleFacts:
    """Collect the facts that the rules check."""
    nodes = list(graph.nodes)
    return ScheduleFacts(
        graph=graph,
        plan=plan,
        host_order=positions(graph),
        prefetches=tuple(node for node in nodes if is_call(node, prefetch)),
        decodes=tuple(node for node in nodes if is_call(node, decode)),
        acquires=tuple(node for node in nodes if is_call(node, acquire)),
        releases=tuple(node for node in nodes if is_call(node, release)),
        order=_happens_before(nodes),
    )


# Work that a prefetch or a decode starts on the copy stream.
SideWork = tuple[str, Node]


def side_work(node: Node) -> SideWork:
    """Return the work on the copy stream that a prefetch or a decode starts."""
    return ("on the copy stream", node)


def _happens_before(nodes: list[Node]) -> networkx.DiGraph:
    order = networkx.DiGraph()
    last_compute: Node | None = None
    last_work: SideWork | None = None
    for node in nodes:
        if is_call(node, prefetch, decode):
            work = side_work(node)
            order.add_node(work)
            if last_work is not None:
                order.add_edge(last_work, work)
            last_work = work
            after = node.kwargs.get("after")
            if isinstance(after, Node) and after in order:
                # The release records the event. Waiting for an event that is not yet recorded does not wait at all.
                order.add_edge(after, work)
            continue
        order.add_node(node)
        if last_compute is not None:
            order.add_edge(last_compute, node)
        last_compute = node
        if is_call(node, acquire) and isinstance(node.args[0], Node) and side_work(node.args[0]) in order:
            order.add_edge(side_work(node.args[0]), node)
    return order


def _no_gather_left(facts: ScheduleFacts) -> Iterator[str]:
    for node in facts.graph.nodes:
        if is_call(node, gather):
            yield f"{node.name} is still a synchronous gather"


def _paired(facts: ScheduleFacts) -> Iterator[str]:
    for filled in facts.prefetches:
        acquires = facts.acquires_of(filled)
        if len(acquires) != 1:
            yield f"{filled.name} has {len(acquires)} acquires"
        for tensors in acquires:
            releases = facts.releases_of(tensors)
            if len(releases) != 1:
                yield f"{tensors.name} has {len(releases)} releases"
    for tensors in facts.acquires:
        if tensors.args[0] not in (*facts.prefetches, *facts.decodes):
            yield f"{tensors.name} acquires no prefetch"
    for decoded in facts.decodes:
        if decoded.args[0] not in facts.prefetches:
            yield f"{decoded.name} decodes no copy"
    for done in facts.releases:
        if done.args[0] not in facts.acquires:
            yield f"{done.name} releases no acquire"


def _decoded(facts: ScheduleFacts) -> Iterator[str]:
    formats = {spec.index: spec.format for spec in facts.plan.banks}
    operations = [node for node in facts.graph.nodes if is_call(node, *SLOT_OPS)]
    following = dict(itertools.pairwise(operations))
    for filled in facts.prefetches:
        bank, decodes = filled.kwargs["bank"], facts.decodes_of(filled)
        bank_format = formats.get(bank)  # type: ignore[arg-type]
        expected = int(bank_format is not None and bank_format.is_encoded)
        if len(decodes) != expected:
            state = f"is encoded ({bank_format.decoder})" if bank_format is not None and expected else "needs none"
            yield f"{filled.name} has {len(decodes)} decodes, and bank {bank} {state}"
        for decoded in decodes:
            if following.get(filled) is not decoded:
                # An operation between them may copy another bank into the encoded buffer.
                yield f"{decoded.name} does not directly follow {filled.name}, whose copy it decodes"
            for tensors in facts.acquires:
                if tensors.args[0] is filled:
                    yield f"{tensors.name} acquires {filled.name}, which is not yet decoded, instead of {decoded.name}"


def _same_bank_and_slot(facts: ScheduleFacts) -> Iterator[str]:
    for filled in facts.prefetches:
        for tensors in facts.acquires_of(filled):
            for node in (*facts.decodes_of(filled), tensors, *facts.releases_of(tensors)):
                for what in ("bank", "slot"):
                    if node.kwargs.get(what) != filled.kwargs.get(what):
                        yield (
                            f"{node.name} says {what} {node.kwargs.get(what)}, "
                            f"its prefetch {filled.name} says {filled.kwargs.get(what)}"
                        )


def _follows_plan(facts: ScheduleFacts) -> Iterator[str]:
    planned = sorted((stay.bank, stay.slot) for stay in facts.plan.slot_stays)
    actual = sorted((node.kwargs["bank"], node.kwargs["slot"]) for node in facts.acquires)
    if planned != actual:
        yield f"the plan has (bank, slot) {planned}, the graph {actual}"
    sources = {stay.bank: stay.shards for stay in facts.plan.slot_stays}
    for filled in facts.prefetches:
        bank, shards = filled.kwargs["bank"], tuple(node.name for node in filled.args[0])  # type: ignore[union-attr]
        if shards != sources.get(bank, shards):  # type: ignore[arg-type]
            yield f"{filled.name} copies {shards}, the plan takes bank {bank} from {sources[bank]}"  # type: ignore[index]
    acquired = {tensors: str(tensors.meta.get("moepass_block")) for tensors in facts.acquires}
    expected = {stay.block: stay.bank for stay in facts.plan.slot_stays}
    for tensors, block in acquired.items():
        if block in expected and expected[block] != tensors.kwargs["bank"]:
            yield f"block {block} reads bank {tensors.kwargs['bank']}, the plan gives it bank {expected[block]}"


def _read_after_write(facts: ScheduleFacts) -> Iterator[str]:
    for filled in facts.prefetches:
        for tensors in facts.acquires_of(filled):
            for write in facts.slot_writes(filled):
                if not facts.happens_before(write, tensors):
                    yield f"{tensors.name} precedes {write[1].name}, so that it waits for nothing"
            for reader in facts.compute_readers(tensors):
                # The reader uses the tensors of this acquire, even if another acquire happens to be late enough.
                if not facts.happens_before(tensors, reader):
                    yield f"{reader.name} may read slot {filled.kwargs['slot']} before {filled.name} has filled it"


def _read_before_release(facts: ScheduleFacts) -> Iterator[str]:
    for tensors in facts.acquires:
        for done in facts.releases_of(tensors):
            for reader in [tensors, *facts.compute_readers(tensors)]:
                if not facts.happens_before(reader, done):
                    yield f"{reader.name} reads slot {tensors.kwargs['slot']} after {done.name} has released it"


def _write_after_read(facts: ScheduleFacts) -> Iterator[str]:
    for earlier, later in facts.successive_fillings():
        after = later.kwargs.get("after")
        if isinstance(after, Node) and facts.host_order[after] > facts.host_order[later]:
            yield f"{later.name} waits for {after.name}, which comes after it, so that it waits for nothing"
        for tensors in facts.acquires_of(earlier):
            for reader in [tensors, *facts.compute_readers(tensors)]:
                if not all(facts.happens_before(reader, write) for write in facts.slot_writes(later)):
                    yield f"{later.name} may overwrite slot {later.kwargs['slot']} while {reader.name} reads it"


def _waits_for_event(facts: ScheduleFacts) -> Iterator[str]:
    refills = {later for _, later in facts.successive_fillings()}
    for filled in facts.prefetches:
        after = filled.kwargs.get("after")
        if filled not in refills and after is not None:
            # The ring would treat it as a refill, and discard the slot's content from before the run.
            yield f"{filled.name} is the first to fill slot {filled.kwargs['slot']}, but waits for {_name(after)}"
    for earlier, later in facts.successive_fillings():
        after = later.kwargs.get("after")
        expected = [done for tensors in facts.acquires_of(earlier) for done in facts.releases_of(tensors)]
        # A later release is also safe, because it happens on the same stream.
        if after not in facts.releases or not any(facts.happens_before(done, after) for done in expected):
            yield (
                f"{later.name} refills slot {later.kwargs['slot']} but waits for {_name(after)}, not for "
                f"{' or '.join(node.name for node in expected) or 'any release'}"
            )


def _name(value: object) -> object:
    return value.name if isinstance(value, Node) else value


def _fits_ring(facts: ScheduleFacts) -> Iterator[str]:
    for unused in sorted(set(range(facts.plan.slots)) - {filled.kwargs["slot"] for filled in facts.prefetches}):
        # A run takes the planned number of slots from the ring, and returns those that it releases.
        yield f"the plan has {facts.plan.slots} slots, and nothing fills slot {unused}, which the ring would lose"
    for filled in facts.prefetches:
        slot, bank = filled.kwargs["slot"], filled.kwargs["bank"]
        if not isinstance(slot, int) or not 0 <= slot < facts.plan.slots:
            yield f"{filled.name} fills slot {slot}, the ring has slots 0 to {facts.plan.slots - 1}"
        nbytes = next((spec.format.slot_bytes for spec in facts.plan.banks if spec.index == bank), None)
        if nbytes is None:
            yield f"{filled.name} fetches bank {bank}, which the plan does not know"
        elif nbytes > facts.plan.slot_bytes:
            yield f"{filled.name} puts {nbytes} bytes into a slot of {facts.plan.slot_bytes}"


def _source_outlives_copy(facts: ScheduleFacts) -> Iterator[str]:
    for filled in facts.prefetches:
        for source in filled.all_input_nodes:
            if facts.host_order[source] > facts.host_order[filled] and source.op == "placeholder":
                yield f"{filled.name} copies from {source.name}, which comes after it"
            if source is not filled.kwargs.get("after") and source.op != "placeholder":
                yield f"{filled.name} copies from {source.name}, memory that the allocator may reuse during the copy"


def _stays_inside(facts: ScheduleFacts) -> Iterator[str]:
    for tensors in facts.acquires:
        for reader in facts.compute_readers(tensors):
            if reader.op == "output":
                yield f"the graph returns memory of slot {tensors.kwargs['slot']}"


# In this order: later rules assume the earlier ones.
RULES: dict[str, Rule] = {
    "all_scheduled": Rule("no synchronous gather is left", _no_gather_left),
    "one_acquire_one_release": Rule("every prefetch has exactly one acquire and one release", _paired),
    "decoded_behind_copy": Rule("an encoded bank is decoded once, right behind its copy, and no other is", _decoded),
    "same_bank_and_slot": Rule("a stay keeps its bank and its slot", _same_bank_and_slot),
    "follows_plan": Rule("the graph holds exactly the stays of the plan", _follows_plan),
    "fits_ring": Rule("a bank goes into a slot that exists and is large enough", _fits_ring),
    "read_after_write": Rule("a read happens after the slot was filled", _read_after_write),
    "read_before_release": Rule("a release happens after the last read", _read_before_release),
    "event_not_host_order": Rule("a refill waits for the release event of the slot's content", _waits_for_event),
    "write_after_read": Rule("a refill happens after the last read of the slot's content", _write_after_read),
    "source_outlives_copy": Rule("a copy reads from memory that outlives it", _source_outlives_copy),
    "slot_stays_inside": Rule("no slot is visible outside the graph", _stays_inside),
}
