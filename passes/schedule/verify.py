"""Prove that a scheduled graph is safe, independent of timing.

Contract
    in    scheduled graph and its plan
    out   the same graph, untouched; ScheduleError names the broken rule and the node that breaks it

Four actors run at once. The host issues nodes in graph order. The compute stream, the copy stream and the decode stream
each run what the host issued to them, in that order. Between the streams, only events define an order, not the host. So
the happens-before graph has an edge for

    compute order     between successive nodes on the compute stream
    copy order        between successive copies
    decode order      between successive decodes
    an event          from a release to the copy or decode that names it in `after`,
                      from a copy, or the decode of an encoded bank, to the acquire that takes it,
                      from the copy of an encoded bank to its decode,
                      and from a decode to the next copy into the encoded buffer that it has read

and a rule holds only if a path proves it. An encoded bank is copied into the encoded buffer that has been free for
longest, and decoded from there into its slot. The ring keeps this order, and lets the copy wait for the decode.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

import networkx
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.nodes import is_call, positions
from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassError, PassResult, graph_pass
from moepass.passes.ir.slot_operations import acquire, decode, gather, prefetch, release
from moepass.passes.ops.walk import readers


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
        encoded: indices of the encoded banks
        order: the happens-before graph, of nodes on the compute stream and work on other streams
        last_decodes: the last decode from the encoded buffer of each prefetch of an encoded bank; None if its buffer is
            fresh. Prefetches for which no buffer is free are missing
    """

    graph: Graph
    plan: Plan
    host_order: dict[Node, int]
    prefetches: tuple[Node, ...]
    decodes: tuple[Node, ...]
    acquires: tuple[Node, ...]
    releases: tuple[Node, ...]
    encoded: frozenset[int]
    order: networkx.DiGraph
    last_decodes: dict[Node, Node | None]

    def happens_before(self, earlier: object, later: object) -> bool:
        """Return whether a path proves that `earlier` happens before `later`."""
        return earlier in self.order and later in self.order and networkx.has_path(self.order, earlier, later)

    def decodes_of(self, copied: Node) -> list[Node]:
        """Return the decodes of the prefetch `copied`."""
        return [node for node in self.decodes if node.args[0] is copied]

    def acquires_of(self, filled: Node) -> list[Node]:
        """Return the acquires of the prefetch `filled`, or of a decode of it."""
        return [node for node in self.acquires if node.args[0] in (filled, *self.decodes_of(filled))]

    def is_encoded(self, filled: Node) -> bool:
        """Return whether the prefetch `filled` copies an encoded bank."""
        return filled.kwargs["bank"] in self.encoded

    def slot_writes(self, filled: Node) -> list[Node]:
        """Return the nodes that write the bank of the prefetch `filled` into its slot."""
        return self.decodes_of(filled) or [filled]

    def releases_of(self, tensors: Node) -> list[Node]:
        """Return the releases of the acquire `tensors`."""
        return [node for node in self.releases if node.args[0] is tensors]

    def compute_readers(self, tensors: Node) -> list[Node]:
        """Return the nodes that read the slot through `tensors`, without its releases, which only mark the end."""
        return [node for node in readers(tensors) if node not in self.releases]

    def successive_fillings(self) -> Iterator[tuple[Node, Node]]:
        """Yield the prefetch of each bank in a slot, with the prefetch of the next bank in the same slot."""
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
    encoded = frozenset(spec.index for spec in plan.banks if spec.format.is_encoded)
    order, last_decodes = _happens_before(nodes, encoded)
    return ScheduleFacts(
        graph=graph,
        plan=plan,
        host_order=positions(graph),
        prefetches=tuple(node for node in nodes if is_call(node, prefetch)),
        decodes=tuple(node for node in nodes if is_call(node, decode)),
        acquires=tuple(node for node in nodes if is_call(node, acquire)),
        releases=tuple(node for node in nodes if is_call(node, release)),
        encoded=encoded,
        order=order,
        last_decodes=last_decodes,
    )


# Work that a prefetch or a decode starts on a stream beside the compute stream.
SideWork = tuple[str, Node]


def side_work(node: Node) -> SideWork:
    """Return the work on another stream that a prefetch or a decode starts."""
    return ("on another stream", node)


def _happens_before(nodes: list[Node], encoded: frozenset[int]) -> tuple[networkx.DiGraph, dict[Node, Node | None]]:
    """Return the happens-before graph, and `ScheduleFacts.last_decodes`."""
    order = networkx.DiGraph()
    last_on: dict[str, object] = {}
    # Encoded buffers that are free, each by the last decode from there.
    free_buffers: deque[Node | None] = deque([None] * ENCODED_BUFFERS)
    last_decodes: dict[Node, Node | None] = {}
    for node in nodes:
        is_side, is_decode = is_call(node, prefetch, decode), is_call(node, decode)
        work = side_work(node) if is_side else node
        stream = ("decode" if is_decode else "copy") if is_side else "compute"
        order.add_node(work)
        if stream in last_on:
            order.add_edge(last_on[stream], work)
        last_on[stream] = work
        copied, is_encoded = node.args[0] if node.args else None, node.kwargs.get("bank") in encoded
        if is_call(node, decode, acquire) and isinstance(copied, Node) and side_work(copied) in order:
            order.add_edge(side_work(copied), work)
        after = node.kwargs.get("after")
        if is_call(node, prefetch) and is_encoded:
            if free_buffers:
                last_decodes[node] = last = free_buffers.popleft()
                if last is not None:
                    order.add_edge(side_work(last), work)
        elif is_side and isinstance(after, Node) and after in order:
            # The release records the event. Waiting for an event that is not yet recorded does not wait at all.
            order.add_edge(after, work)
        if is_decode and is_encoded:
            free_buffers.append(node)
    return order, last_decodes


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
    for filled in facts.prefetches:
        bank, decodes = filled.kwargs["bank"], facts.decodes_of(filled)
        expected = int(facts.is_encoded(filled))
        if len(decodes) != expected:
            state = f"is encoded ({facts.plan.bank(bank).format.decoder})" if expected else "needs none"  # type: ignore[arg-type]
            yield f"{filled.name} has {len(decodes)} decodes, and bank {bank} {state}"
        for decoded in decodes:
            for tensors in facts.acquires:
                if tensors.args[0] is filled:
                    yield f"{tensors.name} acquires {filled.name}, which is not yet decoded, instead of {decoded.name}"
    for earlier, later in facts.successive_fillings():
        first, second = facts.slot_writes(earlier)[-1], facts.slot_writes(later)[0]
        if facts.host_order[second] < facts.host_order[first]:
            # The ring takes the first prefetch of a run for the first filling of its slot.
            yield f"{second.name} fills slot {later.kwargs['slot']} before {first.name}, but {earlier.name} comes first"


def _buffer_is_free(facts: ScheduleFacts) -> Iterator[str]:
    for filled in filter(facts.is_encoded, facts.prefetches):
        if filled not in facts.last_decodes:
            yield f"{filled.name} copies an encoded bank, and {ENCODED_BUFFERS} others are not yet decoded"
        last = facts.last_decodes.get(filled)
        if last is not None and not facts.happens_before(side_work(last), side_work(filled)):
            yield f"{filled.name} may overwrite the encoded buffer that {last.name} reads"


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
                if not facts.happens_before(side_work(write), tensors):
                    yield f"{tensors.name} precedes {write.name}, so that it waits for nothing"
                if write is not filled and not facts.happens_before(side_work(filled), side_work(write)):
                    yield f"{write.name} precedes {filled.name}, whose copy it decodes"
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
        for write in facts.slot_writes(later):
            after = write.kwargs.get("after")
            if isinstance(after, Node) and facts.host_order[after] > facts.host_order[write]:
                yield f"{write.name} waits for {after.name}, which comes after it, so that it waits for nothing"
            for tensors in facts.acquires_of(earlier):
                for reader in [tensors, *facts.compute_readers(tensors)]:
                    if not facts.happens_before(reader, side_work(write)):
                        yield f"{write.name} may overwrite slot {later.kwargs['slot']} while {reader.name} reads it"


def _waits_for_event(facts: ScheduleFacts) -> Iterator[str]:
    refills = {later for _, later in facts.successive_fillings()}
    for filled in facts.prefetches:
        if facts.is_encoded(filled) and filled.kwargs.get("after") is not None:
            yield f"{filled.name} waits for {_name(filled.kwargs['after'])}, but only its decode writes into the slot"
        for write in facts.slot_writes(filled) if filled not in refills else ():
            if (after := write.kwargs.get("after")) is not None:
                # The ring would treat it as a refill, and discard the slot's content from before the run.
                yield f"{write.name} is the first to fill slot {filled.kwargs['slot']}, but waits for {_name(after)}"
    for earlier, later in facts.successive_fillings():
        expected = [done for tensors in facts.acquires_of(earlier) for done in facts.releases_of(tensors)]
        for write in facts.slot_writes(later):
            after = write.kwargs.get("after")
            # A later release is also safe, because it happens on the same stream.
            if after not in facts.releases or not any(facts.happens_before(done, after) for done in expected):
                yield (
                    f"{write.name} refills slot {later.kwargs['slot']} but waits for {_name(after)}, not for "
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
    "decoded_once": Rule("an encoded bank is decoded once, and no other is", _decoded),
    "buffer_is_free": Rule("a copy into an encoded buffer happens after the last decode from there", _buffer_is_free),
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
