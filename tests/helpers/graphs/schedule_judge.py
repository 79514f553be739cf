"""Simulate runs of a scheduled graph under many timings, to judge the schedule independently of the verifier.

The simulation knows bank contents, not numbers, and has two parts:

* The host executes runs of graphs one after the other, with the slot operations of the ring (buffers, banks fetched
  ahead of the next run, poison). It issues work to a compute stream, a copy stream and a decode stream.
* An adversary chooses the order of events on these streams, within what CUDA events allow. A buffer contains the bank
  that was copied into it, or nothing while a copy is running or after a release. The content of an encoded buffer
  cannot be read; decoding turns it into the bank.

A graph is wrong if the host raises, if work is left unfinished, or if a read under some timing sees anything but the
bank that the canonical graph gathers for it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch.fx import Graph, Node

from moepass.passes.graph.nodes import is_call
from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.slot_operations import SLOT_OPS, acquire, decode, gather, prefetch, release
from moepass.passes.ops.traits import is_view, mutates
from moepass.passes.ops.walk import readers

# The names of the shards that a bank is copied from, and its number.
Contents = tuple[tuple[str, ...], int]


class WrongRunError(Exception):
    """A run fails, or reads a wrong bank."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A scheduled graph from the host's view: slot operations, and the nodes that read a slot through `sources`."""

    name: str
    plan: Plan
    nodes: tuple[Node, ...]
    sources: dict[Node, list[Node]]
    last_releases: frozenset[Node]


def expected_reads(canonical: Graph) -> dict[str, list[Contents]]:
    """Return, by name of the reading node, the banks that it must see, from the canonical graph alone."""
    reads: dict[str, list[Contents]] = {}
    for node in canonical.nodes:
        if is_call(node, gather):
            names = tuple(shard.name for shard in node.args[0])
            for reader in _real_readers(node):
                reads.setdefault(reader.name, []).append((names, node.kwargs["bank"]))
    return reads


def _real_readers(node: Node) -> Iterator[Node]:
    for reader in readers(node):
        if not is_view(reader) or mutates(reader):
            yield reader


def program(name: str, graph: Graph, plan: Plan, expected: dict[str, list[Contents]]) -> Program:
    """Return the program of `graph`. Raises WrongRunError if a value is used before it is computed."""
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    sources: dict[Node, list[Node]] = {}
    for node in nodes:
        if is_call(node, gather):
            raise WrongRunError(f"{node.name} is not a ring operation")
        if is_call(node, *SLOT_OPS):
            for user in node.users:
                if position[user] < position[node]:
                    raise WrongRunError(f"{user.name} uses {node.name} before it is computed")
            for used in node.all_input_nodes:
                if position[used] > position[node]:
                    raise WrongRunError(f"{node.name} uses {used.name} before it is computed")
            if is_call(node, acquire):
                for reader in _real_readers(node):
                    if not is_call(reader, *SLOT_OPS):
                        sources.setdefault(reader, []).append(node)
    last = {node.kwargs["slot"]: node for node in nodes if is_call(node, release)}
    relevant = []
    for node in nodes:
        if is_call(node, *SLOT_OPS) or node in sources or node.name in expected:
            relevant.append(node)
        if node.op == "output":
            break
    return Program(name, plan, tuple(relevant), sources, frozenset(last.values()))


COPIES, DECODES = 0, 1


@dataclasses.dataclass(eq=False)
class Copy:
    """A copy of `contents` into `buffer`, or the decoding of `contents` from the encoded buffer `source`.

    Encoded buffers have negative numbers. It starts after the event `after`, and after the work `follows`.
    """

    buffer: int
    contents: Contents | None
    after: object
    follows: Copy | None = None
    source: int | None = None
    position: int = -1
    taken: bool = False

    @property
    def lane(self) -> int:
        return COPIES if self.source is None else DECODES


class Host:
    """A model of `moepass.runtime.transfer.ring` that issues work instead of copying. One host serves all runs."""

    def __init__(self, slots: int, slot_bytes: int, expected: dict[str, list[Contents]]) -> None:
        self.expected, self.slots, self.slot_bytes = expected, slots, slot_bytes
        self.compute: list[tuple[str, object, object]] = []
        # Copies and decodes.
        self.lanes: tuple[list[Copy], list[Copy]] = ([], [])
        # Free encoded buffers, with the last decode from each.
        self.free_encoded: deque[tuple[int, Copy | None]]
        self.free_encoded = deque((-1 - number, None) for number in range(ENCODED_BUFFERS))
        self.dropped: dict[int, Copy] = {}
        self.free = list(range(slots))
        self.freed: dict[int, object] = {}
        self.ahead: dict[int, Copy] = {}
        self.beginnings: dict[object, dict[int, Contents]] = {}
        self.last_key: object = None

    def run(self, program: Program) -> None:
        """Issue one run. Raises WrongRunError if the ring or Python would raise."""
        try:
            self._run(program)
        except (IndexError, KeyError) as error:
            raise WrongRunError(f"the ring raises {type(error).__name__}: {error}") from error

    def _run(self, program: Program) -> None:
        self.program = program
        self.buffer_of = self.free
        self.free = self.buffer_of[program.plan.slots :]
        self.beginning: dict[int, Contents] = {}
        self.has_begun = False
        banks = {spec.index: spec.format.slot_bytes for spec in program.plan.banks}
        self.encoded = {spec.index for spec in program.plan.banks if spec.format.is_encoded}
        values: dict[Node, object] = {}
        started: list[Copy] = []
        for node in program.nodes:
            if is_call(node, prefetch):
                if banks[node.kwargs["bank"]] > self.slot_bytes:  # type: ignore[index]
                    raise WrongRunError(f"{node.name} does not fit into its slot")
                values[node] = copy = self._prefetch(node, values)
                started.append(copy)
            elif is_call(node, decode):
                copy = values.get(node.args[0])  # type: ignore[arg-type, assignment]
                if not isinstance(copy, Copy) or copy.taken:
                    raise WrongRunError(
                        f"{node.name} does not decode a copy, or decodes a copy that was already decoded or acquired"
                    )
                if copy.buffer < 0:
                    copy.taken = True
                    banks[node.kwargs["bank"]]  # type: ignore[index]
                    # Decoding as another bank, with other sizes, yields no valid content.
                    is_own = copy.contents is not None and copy.contents[1] == node.kwargs["bank"]
                    contents, buffer = copy.contents if is_own else None, self.buffer_of[node.kwargs["slot"]]  # type: ignore[index]
                    event = self._event(node, values)
                    copy = self._decode(copy, buffer, contents, self.freed.get(buffer) if event is None else event)
                    started.append(copy)
                    self._fill_free_ahead()
                values[node] = copy
            elif is_call(node, acquire):
                copy = values.get(node.args[0])  # type: ignore[arg-type, assignment]
                if not isinstance(copy, Copy) or copy.taken or copy.buffer < 0:
                    raise WrongRunError(
                        f"{node.name} waits for no copy, or for one that was already acquired or is not decoded"
                    )
                copy.taken = True
                self.compute.append(("wait", copy, None))
                banks[node.kwargs["bank"]]  # type: ignore[index]
                values[node] = (self.buffer_of[node.kwargs["slot"]], node.kwargs["bank"])  # type: ignore[index]
            elif is_call(node, release):
                values[node] = self._release(node)
            else:
                self._read(node, values)
        if sorted(self.free) != list(range(self.slots)):
            raise WrongRunError(f"the ring has slots {self.free} after a run, not {self.slots} different ones")
        for copy in started:
            if not copy.taken:
                raise WrongRunError("a copy is never acquired, and stays with the ring forever")

    def _prefetch(self, node: Node, values: dict[Node, object]) -> Copy:
        buffer = self.buffer_of[node.kwargs["slot"]]  # type: ignore[index]
        shards: list[Node] = list(node.args[0])  # type: ignore[arg-type]
        names = tuple(shard.name for shard in shards)
        # A computed tensor may be overwritten, or not be computed yet, while a copy reads it.
        lasts = all(shard.op == "placeholder" for shard in shards)
        contents: Contents | None = (names, node.kwargs["bank"]) if lasts else None  # type: ignore[assignment]
        event = self._event(node, values)
        if event is not None or node.kwargs["slot"] in self.beginning:
            return self._begin_copy(buffer, contents, event, node.kwargs["bank"])
        ahead = self.ahead.get(buffer)
        if ahead and ahead.contents == contents:
            copy = self.ahead.pop(buffer)
        else:
            self._drop_ahead(buffer)
            copy = self._begin_copy(buffer, contents, self.freed.get(buffer), node.kwargs["bank"])
        self.beginning[node.kwargs["slot"]] = contents  # type: ignore[index, assignment]
        if copy.buffer >= 0:
            self._fill_free_ahead()
        return copy

    def _event(self, node: Node, values: dict[Node, object]) -> object:
        after = node.kwargs["after"]
        event = values.get(after)  # type: ignore[arg-type]
        if after is not None and not isinstance(event, _Event):
            raise WrongRunError(f"{node.name} does not wait for an event")
        return event

    def _drop_ahead(self, buffer: int) -> None:
        if buffer in self.ahead:
            self.dropped[buffer] = self.ahead.pop(buffer)

    def _fill_free_ahead(self) -> None:
        if len(self.beginning) == self.program.plan.slots and not self.has_begun:
            self.has_begun = True
            key = (self.program.name, self.beginning[0] and self.beginning[0][1])
            if self.last_key is not None:
                self.beginnings[self.last_key] = dict(self.beginning)
            self.last_key = key
            for position, free in enumerate(self.free):
                self._fill_ahead(position, free)

    def _release(self, node: Node) -> object:
        buffer = self.buffer_of[node.kwargs["slot"]]  # type: ignore[index]
        event = _Event()
        self.compute.append(("release", buffer, event))
        self.freed[buffer] = event
        if node in self.program.last_releases:
            self.free.append(buffer)
            self._fill_ahead(len(self.free) - 1, buffer)
        return event

    def _fill_ahead(self, slot: int, buffer: int) -> None:
        contents = self.beginnings.get(self.last_key, {}).get(slot)
        if contents is None:
            return
        ahead = self.ahead.get(buffer)
        if ahead is not None and ahead.contents == contents:
            return
        self._drop_ahead(buffer)
        if contents[1] in self.encoded and not self.free_encoded:
            return
        copy = self._begin_copy(buffer, contents, self.freed.get(buffer), contents[1])
        if copy.buffer < 0:
            copy = self._decode(copy, buffer, contents, self.freed.get(buffer))
        self.ahead[buffer] = copy

    def _begin_copy(self, buffer: int, contents: Contents | None, after: object, bank: object) -> Copy:
        if bank not in self.encoded:
            return self._issue(Copy(buffer, contents, after, self.dropped.pop(buffer, None)))
        if not self.free_encoded:
            raise WrongRunError(f"no encoded buffer is free for bank {bank}")
        target, decoded = self.free_encoded.popleft()
        return self._issue(Copy(target, contents, None, decoded))

    def _decode(self, copied: Copy, buffer: int, contents: Contents | None, after: object) -> Copy:
        self.dropped.pop(buffer, None)
        decoded = self._issue(Copy(buffer, contents, after, copied, copied.buffer))
        self.free_encoded.append((copied.buffer, decoded))
        return decoded

    def _issue(self, copy: Copy) -> Copy:
        copy.position = len(self.lanes[copy.lane])
        self.lanes[copy.lane].append(copy)
        return copy

    def _read(self, node: Node, values: dict[Node, object]) -> None:
        slots_read = [values[source] for source in self.program.sources.get(node, [])]
        if node.op == "output":
            raise WrongRunError("the caller sees a slot, which the next run overwrites")
        expected = self.expected.get(node.name, [])
        if sorted(bank for _, bank in slots_read) != sorted(bank for _, bank in expected):  # type: ignore[misc]
            raise WrongRunError(f"{node.name} reads {len(slots_read)} banks, or others than {expected}")
        for (buffer, _), wanted in zip(
            sorted(slots_read, key=lambda read: read[1]),  # type: ignore[index]
            sorted(expected, key=lambda read: read[1]),
            strict=True,
        ):  # type: ignore[misc]
            self.compute.append(("read", buffer, wanted))


class _Event:
    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


# What a stream does next: the compute stream a step, the other two the start or the end of a copy or a decode.
COMPUTE, START, END = (0, 0), (1, COPIES), (2, COPIES)
START_DECODE, END_DECODE = (1, DECODES), (2, DECODES)
Action = tuple[int, int]
# Work starts as early and ends as late as possible, so slots are incomplete for as long as possible. Or it ends at
# once. Or it starts as late as possible. Or copies run as far ahead of decodes as possible, or decodes of copies.
ADVERSARIES = (
    (START, START_DECODE, COMPUTE, END, END_DECODE),
    (END, END_DECODE, START, START_DECODE, COMPUTE),
    (COMPUTE, START, START_DECODE, END, END_DECODE),
    (END, START, START_DECODE, COMPUTE, END_DECODE),
    (END_DECODE, START_DECODE, COMPUTE, START, END),
)


def play(host: Host, choose: Callable[[list[Action]], Action]) -> None:
    """Play the issued work in the order in which `choose` picks among the possible actions."""
    for _, _, event in host.compute:
        if isinstance(event, _Event):
            event.done = False
    buffers: dict[object, Contents | None] = {}
    step, compute, lanes = 0, host.compute, host.lanes
    # On each lane: the work that comes next, and whether it has started.
    following, under_way = [0, 0], [False, False]

    def has_ended(copy: Copy | None) -> bool:
        return copy is None or copy.position < following[copy.lane]

    while step < len(compute) or any(following[lane] < len(lanes[lane]) for lane in (COPIES, DECODES)):
        options = []
        if step < len(compute):
            what, subject, detail = compute[step]
            if what != "wait" or has_ended(subject):  # type: ignore[arg-type]
                options.append(COMPUTE)
        for lane in (COPIES, DECODES):
            if under_way[lane]:
                options.append((END[0], lane))
            elif following[lane] < len(lanes[lane]):
                copy = lanes[lane][following[lane]]
                if has_ended(copy.follows) and (copy.after is None or copy.after.done):  # type: ignore[attr-defined]
                    options.append((START[0], lane))
        if not options:
            raise WrongRunError("deadlock")
        action = choose(options) if len(options) > 1 else options[0]
        kind, lane = action
        if kind == START[0]:
            buffers[lanes[lane][following[lane]].buffer], under_way[lane] = None, True
        elif kind == END[0]:
            copy, under_way[lane] = lanes[lane][following[lane]], False
            # Decoding the bytes of another bank, or during the next copy, yields no valid content.
            is_there = copy.source is None or buffers.get(copy.source) == copy.contents
            buffers[copy.buffer] = copy.contents if is_there else None
            following[lane] += 1
        else:
            step += 1
            if what == "release":
                buffers[subject] = None  # the debug mode poisons released slots
                detail.done = True  # type: ignore[attr-defined]
            elif what == "read" and buffers.get(subject) != detail:
                raise WrongRunError(f"a read of {detail} sees {buffers.get(subject)}")


def wrong_because(
    graph: Graph,
    plan: Plan,
    expected: dict[str, list[Contents]],
    reference: tuple[Graph, Plan],
    seed: int = 0,
    timings: int = 6,
) -> str | None:
    """Return why some run of the graph is wrong, or None if all simulated runs are right.

    The graph runs by itself several times, and between runs of `reference`, a correct schedule on the same ring.
    """
    generator = random.Random(seed)
    try:
        mine = program("mutant", graph, plan, expected)
        correct = program("reference", *reference, expected)
        for runs, spare in (([mine] * 3, 0), ([correct, correct, mine, correct, mine], 1)):
            slots = max([plan.slots, *([reference[1].slots] if spare else [])]) + spare
            host = Host(slots, max(plan.slot_bytes, 0), expected)
            if spare:
                host.slot_bytes = max(host.slot_bytes, reference[1].slot_bytes)
            for run in runs:
                host.run(run)
            for order in ADVERSARIES:
                play(host, lambda options, order=order: min(options, key=order.index))  # type: ignore[misc]
            for _ in range(timings):
                play(host, generator.choice)
    except WrongRunError as problem:
        return str(problem)
    return None


__all__ = ["Contents", "Sequence", "WrongRunError", "expected_reads", "wrong_because"]
