"""Scheduled graphs to try the verifier on: several models, mutants of their schedules, and other correct schedules."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.nodes import copy_graph_module, graph_inputs, is_call
from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.plan import Plan, SlotStay
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.slot_operations import SLOT_OPS, acquire, decode, gather, prefetch, release
from moepass.passes.ops.traits import is_view
from moepass.passes.ops.walk import readers
from moepass.passes.schedule.assign_slots import lifetimes
from moepass.passes.schedule.assign_slots import plan as plan_slots
from moepass.passes.schedule.schedule_slots import schedule
from tests.helpers.graphs.backend_helper import BatchedBlock, DenseBlock, Stack, find, streamed, tokens, up_to
from tests.helpers.graphs.schedule_judge import Contents, expected_reads
from tests.helpers.processes import halved_format


class Shared(nn.Module):
    """One layer twice, and two blocks that share their routing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = BatchedBlock(seed=0), BatchedBlock(seed=1), DenseBlock(seed=2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.a(self.c(self.b(self.a(x, ids), ids), ids), ids)


class Uneven(nn.Module):
    """Banks of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DenseBlock(width=width, seed=width) for width in (32, 128, 64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x, x).tanh()
        return x


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's canonical graph, what its reads must see, and the schedule that the passes make of it."""

    canonical: GraphModule
    expected: dict[str, list[Contents]]
    graph: Graph
    plan: Plan
    inputs: tuple[object, ...]


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "dense": lambda: (Stack("dense_bmm", depth=4), (tokens(),)),
    "batched": lambda: (Stack("batched_mm", depth=3), (tokens(),)),
    "grouped": lambda: (Stack("grouped_mm", depth=3), (tokens(),)),
    "shared": lambda: (Shared(), (tokens(), torch.tensor([[0, 1]] * 6))),
    "uneven": lambda: (Uneven(), (tokens(),)),
    # Like "uneven", but banks 0, 1 and 3 are encoded at home, or all banks.
    "encoded": lambda: (Uneven(), (tokens(),)),
    "all encoded": lambda: (Uneven(), (tokens(),)),
}
ENCODED = {"encoded": (0, 1, 3), "all encoded": (0, 1, 2, 3)}


@functools.cache
def _canonical(model: str) -> tuple[GraphModule, Plan, tuple[object, ...]]:
    built, inputs = MODELS[model]()
    captured = streamed(built, *inputs)
    result = up_to("rewrite", captured.module)
    inputs, banks = list(captured.inputs), list(result.plan.banks)
    names = [node.name for node in graph_inputs(captured.module.graph)]
    for number in ENCODED.get(model, ()):
        (complete,) = (node for node in find(result.module, gather) if node.kwargs["bank"] == number)
        position = names.index(complete.args[0][0].name)
        banks[number], inputs[position] = halved_format.halved(banks[number], inputs[position])
    plan = dataclasses.replace(result.plan, banks=tuple(banks))
    return _skeleton(result.module), plan, tuple(inputs)


def _skeleton(module: GraphModule) -> GraphModule:
    """Return the readers of banks, and remove what they do not need: the graph is copied thousands of times."""
    copied = copy_graph_module(module)
    bank_readers = {reader for node in find(copied, gather) for reader in readers(node) if not is_view(reader)}
    for node in reversed(list(copied.graph.nodes)):
        if node.op == "output":
            node.args = (tuple(reader for reader in copied.graph.nodes if reader in bank_readers),)
        elif node.op != "placeholder" and not node.users:
            copied.graph.erase_node(node)
    copied.recompile()
    return copied


@functools.cache
def case(model: str, slots: int) -> Case:
    canonical, before, inputs = _canonical(model)
    context = PassContext(slots=slots)
    planned = plan_slots(canonical, before, context)
    scheduled = schedule(planned.module, planned.plan, context)
    return Case(canonical, expected_reads(canonical.graph), scheduled.module.graph, scheduled.plan, inputs)


CASES = tuple((model, slots) for model in MODELS for slots in (1, 2, 3))


# ---- Mutants ---------------------------------------------------------------------------------------------------------


class Mutation:
    """One copy of a schedule, to be damaged in place; `done` says how."""

    def __init__(self, correct: Case, generator: random.Random) -> None:
        self.graph = Graph()
        self.graph.output(self.graph.graph_copy(correct.graph, {}))
        self.plan = correct.plan
        self.random = generator
        self.done: list[str] = []

    def mutate(self) -> None:
        kind = self.random.choices(tuple(KINDS), tuple(weight for weight, _ in KINDS.values()))[0]
        if all(self.ops(target) for target in SLOT_OPS if target is not decode):
            KINDS[kind][1](self)
            self.done.append(kind)

    def ops(self, *targets: object) -> list[Node]:
        return [node for node in self.graph.nodes if is_call(node, *(targets or SLOT_OPS))]

    def pick(self, nodes: list[Node]) -> Node:
        return self.random.choice(nodes)

    def pair(self) -> tuple[Node, Node] | None:
        """Return two slot operations of one kind, or None."""
        node = self.pick(self.ops())
        alike = [candidate for candidate in self.ops(node.target) if candidate is not node]
        return (node, self.pick(alike)) if alike else None

    def stay(self) -> tuple[Node, Node, Node] | None:
        """Return the prefetch, acquire and release of one stay; None if mutations have separated them."""
        done = self.pick(self.ops(release))
        tensors = done.args[0]
        filled = tensors.args[0] if isinstance(tensors, Node) and is_call(tensors, acquire) else None
        if isinstance(filled, Node) and is_call(filled, decode):
            filled = filled.args[0]
        return (filled, tensors, done) if isinstance(filled, Node) and is_call(filled, prefetch) else None  # type: ignore[return-value]

    def put(self, node: Node, behind: Node) -> None:
        if behind is not node and node.prev is not behind:
            behind.append(node)


def _move(mutation: Mutation) -> None:
    """Move a slot operation. Half of the moves are short, because these are the hardest to detect."""
    node = mutation.pick(mutation.ops())
    order = list(mutation.graph.nodes)
    position = order.index(node)
    remaining = [candidate for candidate in order if candidate is not node and candidate.op != "output"]
    target = (
        position - 1 + mutation.random.randint(-4, 4)
        if mutation.random.random() < 0.5
        else mutation.random.randrange(len(remaining))
    )
    mutation.put(node, remaining[max(0, min(target, len(remaining) - 1))])


def _drop(mutation: Mutation) -> None:
    node = mutation.pick(mutation.ops())
    alike: list[Node | None] = [candidate for candidate in mutation.ops(node.target) if candidate is not node]
    heir = mutation.random.choice([*alike, None])
    node.replace_all_uses_with(heir)  # type: ignore[arg-type]
    mutation.graph.erase_node(node)


def _drop_stay(mutation: Mutation) -> None:
    stay, heir = mutation.stay(), mutation.stay()
    if stay is None or heir is None or stay[0] is heir[0] or stay[1] is heir[1]:
        return
    for mine, theirs in zip(reversed(stay), reversed(heir), strict=True):
        for decoded in [user for user in mine.users if is_call(user, decode)]:
            decoded.replace_all_uses_with(theirs)
            mutation.graph.erase_node(decoded)
        mine.replace_all_uses_with(theirs)
        mutation.graph.erase_node(mine)


def _decode_otherwise(mutation: Mutation) -> None:
    """Leave out a decode, decode a bank twice, or decode it as late as possible."""
    decodes = [decoded for decoded in mutation.ops(decode) if decoded.users]
    if not decodes:
        return
    decoded, choice = mutation.pick(decodes), mutation.random.randrange(3)
    if choice == 0:
        mutation.put(decoded, min(decoded.users).prev)
    elif choice == 1:
        decoded.replace_all_uses_with(decoded.args[0])  # type: ignore[arg-type]
        mutation.graph.erase_node(decoded)
    else:
        with mutation.graph.inserting_after(decoded):
            twin = mutation.graph.node_copy(decoded)
        decoded.replace_all_uses_with(twin, delete_user_cb=lambda user: user is not twin)


def _duplicate(mutation: Mutation) -> None:
    node = mutation.pick(mutation.ops())
    with mutation.graph.inserting_after(node):
        twin = mutation.graph.node_copy(node)
    for user in list(node.users):
        if user is not twin and mutation.random.random() < 0.5:
            user.replace_input_with(node, twin)
    if mutation.random.random() < 0.5:
        twin.update_kwarg("slot", mutation.random.randrange(3))


def _double_stay(mutation: Mutation) -> None:
    """Fetch a bank once more after the release that its slot waits for, without reading it."""
    stay = mutation.stay()
    if stay is None:
        return
    filled, tensors, done = stay
    with mutation.graph.inserting_after(done):
        again = mutation.graph.call_function(prefetch, filled.args, {**filled.kwargs, "after": done})
    if mutation.random.random() < 0.5:
        with mutation.graph.inserting_after(again):
            read = mutation.graph.call_function(acquire, (again,), dict(tensors.kwargs))
        if mutation.random.random() < 0.5:
            with mutation.graph.inserting_after(read):
                mutation.graph.call_function(release, (read,), dict(done.kwargs))
    for refill in mutation.ops(prefetch, decode):
        if refill.kwargs["after"] is done and refill is not again and mutation.random.random() < 0.5:
            refill.update_kwarg("after", mutation.ops(release)[-1])


def _swap(mutation: Mutation) -> None:
    """Exchange one argument of two operations of the same kind."""
    pair = mutation.pair()
    if pair is None:
        return
    node, twin = pair
    name = mutation.random.choice([*node.kwargs, "args"])
    if name == "args":
        node.args, twin.args = twin.args, node.args
    else:
        mine, theirs = node.kwargs[name], twin.kwargs[name]
        node.update_kwarg(name, theirs)
        twin.update_kwarg(name, mine)


def _exchange(mutation: Mutation) -> None:
    """Exchange the positions of any two slot operations."""
    node, second = mutation.pick(mutation.ops()), mutation.pick(mutation.ops())
    before_node, before_other = node.prev, second.prev
    if node is not second and second not in (node.prev, node.next):
        before_node.append(second)
        before_other.append(node)


def _exchange_readers(mutation: Mutation) -> None:
    """Make most readers of two acquires read the bank of the opposite acquire."""
    node, second = mutation.pick(mutation.ops(acquire)), mutation.pick(mutation.ops(acquire))
    for mine, theirs in ((node, second), (second, node)):
        users = [user for user in mine.users if not is_call(user, release)]
        for user in users:
            if "moved" not in user.meta and mutation.random.random() < 0.8:
                user.replace_input_with(mine, theirs)
                user.meta = {**user.meta, "moved": True}
    for user in [*node.users, *second.users]:
        user.meta.pop("moved", None)


def _retarget(mutation: Mutation) -> None:
    node = mutation.pick(mutation.ops())
    name = mutation.random.choice([name for name in ("slot", "bank", "after") if name in node.kwargs])
    if name == "after":
        node.update_kwarg(name, mutation.random.choice([None, *mutation.ops(release)]))
    else:
        node.update_kwarg(name, mutation.random.randint(-1, 4))


def _rename_stay(mutation: Mutation) -> None:
    """Change the slot or the bank of a complete stay, in the plan too or only in the graph."""
    stay = mutation.stay()
    if stay is None:
        return
    name = mutation.random.choice(["slot", "bank"])
    old, new = stay[0].kwargs[name], mutation.random.randint(-1, 4)
    for node in stay:
        node.update_kwarg(name, new)
    if mutation.random.random() < 0.5:
        stays = list(mutation.plan.slot_stays)
        bank, slot = stay[0].kwargs["bank"], stay[0].kwargs["slot"]
        for index, planned in enumerate(stays):
            if getattr(planned, name) == old and (name == "bank" or planned.bank == bank):
                stays[index] = dataclasses.replace(planned, bank=bank, slot=slot)  # type: ignore[arg-type]
                break
        mutation.plan = dataclasses.replace(mutation.plan, slot_stays=tuple(stays))


def _rename_slot(mutation: Mutation) -> None:
    """Change the number of a slot everywhere, in the plan too."""
    old, new = mutation.random.randint(0, 2), mutation.random.randint(-1, 4)
    for node in mutation.ops():
        if node.kwargs["slot"] == old:
            node.update_kwarg("slot", new)
    stays = [dataclasses.replace(stay, slot=new) if stay.slot == old else stay for stay in mutation.plan.slot_stays]
    mutation.plan = dataclasses.replace(mutation.plan, slot_stays=tuple(stays))


def _other_source(mutation: Mutation) -> None:
    """Make a prefetch copy from another shard, or from a computed tensor, even under the shard's name."""
    filled = mutation.pick(mutation.ops(prefetch))
    shards = list(filled.args[0])  # type: ignore[arg-type]
    if mutation.random.random() < 0.3:
        filled.args = mutation.pick(mutation.ops(prefetch)).args
        return
    with mutation.graph.inserting_before(filled):
        fresh = mutation.graph.call_function(torch.ops.aten.clone.default, (shards[0],))
    fresh.meta, name = dict(shards[0].meta), shards[0].name
    if mutation.random.random() < 0.8:
        shards[0]._rename("original")
        fresh.name = name
    filled.args = ([fresh, *shards[1:]],)


def _late_release(mutation: Mutation) -> None:
    """Make a refill wait for another release, and move the release of its slot behind it."""
    refills = [filled for filled in mutation.ops(prefetch, decode) if filled.kwargs["after"] is not None]
    if not refills:
        return
    refill = mutation.pick(refills)
    awaited = refill.kwargs["after"]
    order = list(mutation.graph.nodes)
    releases = [done for done in mutation.ops(release) if done is not awaited]
    if not releases or not isinstance(awaited, Node):
        return
    refill.update_kwarg("after", mutation.pick(releases))
    spots = [node for node in order[order.index(awaited) :] if node.op != "output"]
    mutation.put(awaited, mutation.pick(spots))
    if mutation.random.random() < 0.5:
        mutation.put(
            refill, mutation.pick([node for node in spots if node is not refill and node is not awaited] or [awaited])
        )


def _wait_at_first(mutation: Mutation) -> None:
    """Make the first fill of a slot wait for a release."""
    fresh = [filled for filled in mutation.ops(prefetch, decode) if filled.kwargs["after"] is None]
    if not fresh:
        return
    filled, done = mutation.pick(fresh), mutation.pick(mutation.ops(release))
    filled.update_kwarg("after", done)
    if mutation.random.random() < 0.8:
        mutation.put(filled, done)


def _escape(mutation: Mutation) -> None:
    """Return a view of a slot to the caller, and sometimes move the release to the end of the graph."""
    tensors = mutation.pick(mutation.ops(acquire))
    (output,) = (node for node in mutation.graph.nodes if node.op == "output")
    pieces = [user for user in tensors.users if is_view(user)]
    if not pieces:
        return
    output.args = ((*output.args[0], mutation.pick(pieces)),)  # type: ignore[misc]
    if mutation.random.random() < 0.7:
        for done in mutation.ops(release):
            if done.args[0] is tensors:
                output.append(done)


def _put_gather_back(mutation: Mutation) -> None:
    filled, tensors = mutation.pick(mutation.ops(prefetch)), mutation.pick(mutation.ops(acquire))
    with mutation.graph.inserting_before(tensors):
        complete = mutation.graph.call_function(gather, (filled.args[0],), {"bank": filled.kwargs["bank"]})
    users = [user for user in tensors.users if not is_call(user, release)]
    for user in users if mutation.random.random() < 0.5 else []:
        user.replace_input_with(tensors, complete)


def _other_ring(mutation: Mutation) -> None:
    """Make the plan claim a smaller or larger ring, or smaller slots."""
    field = mutation.random.choice(["slots", "slot_bytes"])
    change = mutation.random.choice([-1, 1]) if field == "slots" else -1
    mutation.plan = dataclasses.replace(mutation.plan, **{field: getattr(mutation.plan, field) + change})


KINDS: dict[str, tuple[int, Callable[[Mutation], None]]] = {
    "move": (20, _move),
    "drop": (6, _drop),
    "drop stay": (3, _drop_stay),
    "decode otherwise": (4, _decode_otherwise),
    "duplicate": (6, _duplicate),
    "double stay": (4, _double_stay),
    "swap": (10, _swap),
    "exchange": (8, _exchange),
    "exchange readers": (4, _exchange_readers),
    "retarget": (12, _retarget),
    "rename stay": (6, _rename_stay),
    "rename slot": (4, _rename_slot),
    "other source": (5, _other_source),
    "late release": (8, _late_release),
    "wait at first": (3, _wait_at_first),
    "escape": (3, _escape),
    "put gather back": (4, _put_gather_back),
    "other ring": (4, _other_ring),
}


def mutant(correct: Case, generator: random.Random) -> Mutation:
    """Return a correct schedule with one to three mutations."""
    mutation = Mutation(correct, generator)
    for _ in range(generator.choice((1, 1, 2, 3))):
        mutation.mutate()
    return mutation


# ---- Correct schedules -----------------------------------------------------------------------------------------------


def correct_schedule(model: str, slots: int, generator: random.Random) -> tuple[Graph, Plan]:
    """Return another correct schedule: any free slot, any order of copies, and operations at any valid position.

    The rules of a slot limit the positions: the acquire precedes the first read, the release follows the last read, the
    prefetch, or the decode of an encoded bank, follows the release of the slot's previous content, and the release
    precedes the refill of the slot. Encoded buffers limit the prefetches of encoded banks.
    """
    base = case(model, slots)
    stays = lifetimes(base.canonical.graph)
    plan = dataclasses.replace(base.plan, slot_stays=tuple(_residencies(base, generator)))
    module = schedule(base.canonical, plan, PassContext(slots=slots)).module
    assert len(stays) == len(plan.slot_stays)
    for _ in range(generator.randrange(8)):
        _move_legally(module, generator)
    return module.graph, plan


def _residencies(found: Case, generator: random.Random) -> list[SlotStay]:
    """Assign each bank to a slot whose previous content is no longer read. Slots are numbered by their first fill."""
    order = list(found.canonical.graph.nodes)
    position_of = {node: index for index, node in enumerate(order)}
    stays = lifetimes(found.canonical.graph)
    held_by: list[int] = []
    chosen: list[SlotStay] = []
    for position, (stay, planned) in enumerate(zip(stays, found.plan.slot_stays, strict=True)):
        begin = position_of[stay.first_reader]
        free = [slot for slot, last in enumerate(held_by) if position_of[stays[last].last_reader] < begin]
        if len(held_by) < found.plan.slots and (not free or planned.after is None or generator.random() < 0.5):
            chosen.append(dataclasses.replace(planned, slot=len(held_by), after=None))
            held_by.append(position)
            continue
        slot = generator.choice(free)
        chosen.append(dataclasses.replace(planned, slot=slot, after=held_by[slot]))
        held_by[slot] = position
    return chosen


def _move_legally(module: GraphModule, generator: random.Random) -> None:
    operation = generator.choice((prefetch, acquire, release, decode))
    node = generator.choice(find(module, operation) or find(module, release))
    previous = node.prev
    order = list(module.graph.nodes)
    position_of = {listed: index for index, listed in enumerate(order)}
    first = max(position_of[used] for used in node.all_input_nodes)
    last = min([position_of[user] for user in node.users] or [len(order) - 1])
    if is_call(node, release):
        assert isinstance(node.args[0], Node)
        first = max(position_of[reader] for reader in readers(node.args[0]) if reader is not node)
    if is_call(node, prefetch) and node.kwargs["after"] is None:
        first = max(first, max(index for listed, index in position_of.items() if listed.op == "placeholder"))
    spots = [listed for listed in order[first:last] if listed is not node]
    if spots:
        generator.choice(spots).append(node)
        if not _keeps_order(module):
            previous.append(node)


def _keeps_order(module: GraphModule) -> bool:
    """Return whether copies fit into the encoded buffers, and slots are filled in the order of their prefetches."""
    position_of = {node: index for index, node in enumerate(module.graph.nodes)}
    write_of = {decoded.args[0]: decoded for decoded in find(module, decode)}
    waiting = 0
    last_write: dict[object, int] = {}
    for node in filter(lambda node: is_call(node, prefetch, decode), module.graph.nodes):
        if is_call(node, decode):
            waiting -= 1
            continue
        waiting += node in write_of
        write = position_of[write_of.get(node, node)]
        if waiting > ENCODED_BUFFERS or write < last_write.get(node.kwargs["slot"], -1):
            return False
        last_write[node.kwargs["slot"]] = write
    return True


__all__ = ["CASES", "KINDS", "Case", "Mutation", "case", "correct_schedule", "mutant"]
