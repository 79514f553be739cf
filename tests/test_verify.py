"""The verifier: a broken schedule for every rule, and an interpreter with an adversary's timing as the judge.

The interpreter runs the three actors of a schedule (host, compute stream, copy stream) on contents instead of numbers:
a slot holds the name of the shard that was copied into it, or nothing while a copy is under way. The host has already
issued everything; which copy starts or ends next to which computation is up to the adversary, within what the events
allow. A schedule is wrong where some timing lets a read see anything but the bank that its block gathers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from backend_helper import BatchedBlock, DenseBlock, Stack, find, fingerprint, gather, streamed, tokens, up_to
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, Node

from moepass.passes.graph import copy_graph_module, is_call, is_view, readers
from moepass.passes.ir import SLOT_OPS, Plan, acquire, prefetch, release
from moepass.passes.protocol import PassContext, PassResult
from moepass.passes.verify import RULES, ScheduleError, verify

Breaker = Callable[[GraphModule, PassResult], None]


@functools.cache
def _canonical(depth: int, form: str = "dense_bmm") -> GraphModule:
    return up_to("rewrite", streamed(Stack(form, depth=depth), tokens()).module).module


@functools.cache
def scheduled(depth: int = 4, slots: int = 2, form: str = "dense_bmm") -> PassResult:
    captured = streamed(Stack(form, depth=depth), tokens())
    return up_to("schedule", captured.module, slots=slots)


def _verify(module: GraphModule, plan: Plan) -> None:
    verify(module, plan, PassContext())


# A broken schedule for every rule


def _put_gather_back(module: GraphModule, result: PassResult) -> None:
    first = find(module, acquire)[0]
    with module.graph.inserting_before(first):
        complete = module.graph.call_function(gather, (find(module, prefetch)[0].args[0],), {"bank": 0})
    complete.meta = dict(first.meta)


def _drop_release(module: GraphModule, result: PassResult) -> None:
    module.graph.erase_node(find(module, release)[-1])


def _rename_slot(module: GraphModule, result: PassResult) -> None:
    find(module, acquire)[0].update_kwarg("slot", 1)


def _other_slots_than_planned(module: GraphModule, result: PassResult) -> None:
    for target in SLOT_OPS:
        node = find(module, target)[0]
        node.update_kwarg("slot", 1 - int(node.kwargs["slot"]))  # type: ignore[arg-type]


def _too_large_for_its_slot(module: GraphModule, result: PassResult) -> None:
    object.__setattr__(result.plan, "slot_bytes", result.plan.slot_bytes - 1)


def _read_before_acquire(module: GraphModule, result: PassResult) -> None:
    """A read in front of the acquire: no valid graph, but the verifier must not depend on the lint."""
    first = find(module, acquire)[1]
    element = next(user for user in first.users if user not in find(module, release))
    first.prepend(element)


def _early_release(module: GraphModule, result: PassResult) -> None:
    find(module, acquire)[0].append(find(module, release)[0])


def _wait_for_the_wrong_release(module: GraphModule, result: PassResult) -> None:
    refill = find(module, prefetch)[3]
    refill.update_kwarg("after", find(module, release)[0])


def _refill_before_its_release_is_recorded(module: GraphModule, result: PassResult) -> None:
    find(module, acquire)[0].append(find(module, prefetch)[2])


def _copy_from_memory_of_the_graph(module: GraphModule, result: PassResult) -> None:
    filled = find(module, prefetch)[0]
    (shard,) = filled.args[0]  # type: ignore[misc]
    with module.graph.inserting_before(filled):
        fresh = module.graph.call_function(torch.ops.aten.clone.default, (shard,))
    fresh.meta, name = dict(shard.meta), shard.name  # type: ignore[union-attr]
    shard._rename("original")  # type: ignore[union-attr]
    fresh.name = name
    filled.args = ([fresh],)


def _return_a_slot(module: GraphModule, result: PassResult) -> None:
    output = module.graph.output_node()
    done = find(module, release)[-1]
    element = next(user for user in find(module, acquire)[-1].users if user is not done)
    output.args = ((*output.args[0], element),)  # type: ignore[misc]
    output.prepend(done)
    # The release marks the end of all reads but the one that nobody sees: the caller's.
    output.append(done)


BROKEN: dict[str, Breaker] = {
    "all_scheduled": _put_gather_back,
    "one_acquire_one_release": _drop_release,
    "same_bank_and_slot": _rename_slot,
    "follows_plan": _other_slots_than_planned,
    "fits_ring": _too_large_for_its_slot,
    "read_after_write": _read_before_acquire,
    "read_before_release": _early_release,
    "event_not_host_order": _wait_for_the_wrong_release,
    "write_after_read": _refill_before_its_release_is_recorded,
    "source_outlives_copy": _copy_from_memory_of_the_graph,
    "slot_stays_inside": _return_a_slot,
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_catches_its_broken_schedule_by_name(rule: str) -> None:
    good = up_to("schedule", streamed(Stack("dense_bmm", depth=4), tokens()).module)
    module = copy_graph_module(good.module)
    _verify(module, good.plan)
    assert rule in BROKEN, f"rule {rule} has no broken schedule in this test; add one to BROKEN"
    BROKEN[rule](module, good)
    with pytest.raises(ScheduleError) as caught:
        _verify(module, good.plan)
    assert caught.value.rule == rule
    assert f"rule {rule} ({RULES[rule].sentence})" in str(caught.value)


def test_an_error_names_the_nodes() -> None:
    module = copy_graph_module(scheduled().module)
    _wait_for_the_wrong_release(module, scheduled())
    with pytest.raises(ScheduleError, match=r"prefetch_3 refills slot 1 but waits for release, not for release_1"):
        _verify(module, scheduled().plan)


def test_a_refill_that_waits_for_nothing_is_caught() -> None:
    module = copy_graph_module(scheduled().module)
    find(module, prefetch)[2].update_kwarg("after", None)
    with pytest.raises(ScheduleError, match="event_not_host_order"):
        _verify(module, scheduled().plan)


def test_a_bank_copied_from_another_banks_shard_is_caught() -> None:
    module = copy_graph_module(scheduled().module)
    first, second = find(module, prefetch)[:2]
    first.args, second.args = second.args, first.args
    with pytest.raises(ScheduleError, match=r"rule follows_plan .*the plan takes bank 0 from"):
        _verify(module, scheduled().plan)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("form", ["dense_bmm", "batched_mm", "grouped_mm"])
def test_correct_schedules_are_accepted_and_left_alone(form: str, slots: int) -> None:
    result = scheduled(4, slots, form)
    before = fingerprint(result.module)
    checked = verify(result.module, result.plan, PassContext())
    assert checked.module is result.module
    assert checked.plan == result.plan
    assert fingerprint(result.module) == before


# The judge


class WrongReadError(Exception):
    """A read saw something else than the bank that its block gathers."""


def expected_reads(depth: int) -> dict[str, tuple[str, int]]:
    """What every node that reads a bank must see: (shard, bank), from the canonical graph alone."""
    reads = {}
    for node in find(_canonical(depth), gather):
        (shard,) = node.args[0]  # type: ignore[misc]
        for reader in readers(node):
            if not is_view(reader):
                reads[reader.name] = (shard.name, int(node.kwargs["bank"]))  # type: ignore[union-attr, arg-type]
    return reads


def _sources(node: Node) -> Iterator[Node]:
    """The acquires whose memory `node` reads."""
    pending = [used for used in node.all_input_nodes if is_view(used) or is_call(used, acquire)]
    while pending:
        used = pending.pop()
        if is_call(used, acquire):
            yield used
        else:
            pending.extend(inner for inner in used.all_input_nodes if is_view(inner) or is_call(inner, acquire))


class Interpreter:
    """One run of a scheduled graph; `choose(options)` is the adversary, asked what happens next."""

    def __init__(self, module: GraphModule, depth: int, choose: Callable[[list[str]], str]) -> None:
        self.nodes = list(module.graph.nodes)
        self.expected = expected_reads(depth)
        self.choose = choose

    def run(self) -> None:
        copies = [node for node in self.nodes if is_call(node, prefetch)]
        compute = [node for node in self.nodes if not is_call(node, prefetch)]
        issued_at = {node: place for place, node in enumerate(self.nodes)}
        slots: dict[object, str | None] = {}
        past: set[Node] = set()
        finished: set[Node] = set()
        next_copy, under_way, step = 0, False, 0
        while step < len(compute) or next_copy < len(copies):
            options = []
            if step < len(compute) and self._may_compute(compute[step], finished, issued_at):
                options.append("compute")
            if next_copy < len(copies):
                after = copies[next_copy].kwargs["after"]
                # An event that is recorded later than the wait was issued is no event to wait for.
                recorded = isinstance(after, Node) and issued_at[after] < issued_at[copies[next_copy]]
                if under_way:
                    options.append("end copy")
                elif not recorded or after in past:
                    options.append("start copy")
            if not options:
                raise WrongReadError("deadlock")
            action = self.choose(options)
            if action == "compute":
                self._compute(compute[step], slots)
                past.add(compute[step])
                step += 1
                continue
            copy = copies[next_copy]
            if action == "start copy":
                slots[copy.kwargs["slot"]], under_way = None, True
            else:
                (shard,) = copy.args[0]  # type: ignore[misc]
                slots[copy.kwargs["slot"]], under_way = shard.name, False  # type: ignore[union-attr]
                finished.add(copy)
                next_copy += 1

    def _may_compute(self, node: Node, finished: set[Node], issued_at: dict[Node, int]) -> bool:
        if not is_call(node, acquire) or not isinstance(node.args[0], Node):
            return True
        filled = node.args[0]
        return filled in finished or issued_at[filled] > issued_at[node]

    def _compute(self, node: Node, slots: dict[object, str | None]) -> None:
        if is_call(node, release):
            slots[node.kwargs["slot"]] = None  # the debug mode poisons what was released
            return
        seen = [(slots.get(source.kwargs["slot"]), source.kwargs["bank"]) for source in _sources(node)]
        if node.name in self.expected and not is_call(node, *SLOT_OPS) and seen != [self.expected[node.name]]:
            raise WrongReadError(f"{node.name} sees {seen}, not {self.expected[node.name]}")


def _eager_copies(options: list[str]) -> str:
    """A copy starts as soon as it may, and ends as late as it may: the slot is in pieces all the while."""
    return next(action for action in ("start copy", "compute", "end copy") if action in options)


def _fast_copies(options: list[str]) -> str:
    return next(action for action in ("end copy", "start copy", "compute") if action in options)


def _late_copies(options: list[str]) -> str:
    return next(action for action in ("compute", "start copy", "end copy") if action in options)


def is_wrong(module: GraphModule, depth: int) -> str | None:
    """Why some timing goes wrong, or None where all that were tried are right."""
    generator = random.Random(0)
    adversaries = [_eager_copies, _fast_copies, _late_copies] + [generator.choice] * 6
    for adversary in adversaries:
        try:
            Interpreter(module, depth, adversary).run()
        except WrongReadError as problem:
            return str(problem)
    return None


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_judge_finds_schedules_of_ours_right(slots: int) -> None:
    assert is_wrong(scheduled(4, slots).module, 4) is None
    assert len(expected_reads(4)) >= 8


def test_the_judge_finds_races() -> None:
    for breaker in (_early_release, _wait_for_the_wrong_release, _refill_before_its_release_is_recorded):
        module = copy_graph_module(scheduled().module)
        breaker(module, scheduled())
        assert is_wrong(module, 4), breaker.__name__


def _mutate(module: GraphModule, draw: Callable[[int], int]) -> str:
    """Move, drop, duplicate, swap or retarget slot operations; gives what was done."""
    graph = module.graph
    ops = [node for node in graph.nodes if is_call(node, *SLOT_OPS)]
    node = ops[draw(len(ops))]
    alike = [other for other in ops if other.target is node.target and other is not node]
    kind = ("move", "drop", "duplicate", "swap", "exchange", "retarget")[draw(6)]
    if kind == "move":
        # Near its old place as often as anywhere: small moves are the hard ones.
        rest = [other for other in graph.nodes if other is not node and other.op != "output"]
        place = list(graph.nodes).index(node) + draw(9) - 4 if draw(2) else draw(len(rest))
        rest[max(0, min(place, len(rest) - 1))].append(node)
    elif kind == "drop":
        other = alike[draw(len(alike))] if alike and draw(2) else None
        node.replace_all_uses_with(other)  # type: ignore[arg-type]
        graph.erase_node(node)
    elif kind == "duplicate":
        with graph.inserting_after(node):
            twin = graph.node_copy(node)
        for user in list(node.users):
            if user is not twin and draw(2):
                user.replace_input_with(node, twin)
        if draw(2):
            twin.update_kwarg("slot", draw(3))
    elif kind == "swap" and alike:
        other = alike[draw(len(alike))]
        names = [name for name in ("bank", "slot", "after") if name in node.kwargs]
        name = (*names, "args")[draw(len(names) + 1)]
        if name == "args":
            node.args, other.args = other.args, node.args
        else:
            mine, theirs = node.kwargs[name], other.kwargs[name]
            node.update_kwarg(name, theirs)
            other.update_kwarg(name, mine)
    elif kind == "exchange" and alike:
        other = alike[draw(len(alike))]
        before_node, before_other = node.prev, other.prev
        if other not in (node.prev, node.next):
            before_node.append(other)
            before_other.append(node)
    elif kind == "retarget":
        name = ("slot", "bank", "after")[draw(3)] if "after" in node.kwargs else ("slot", "bank")[draw(2)]
        releases = [None, *(other for other in ops if is_call(other, release))]
        value = releases[draw(len(releases))] if name == "after" else draw(4)
        node.update_kwarg(name, value)
    return kind


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_mutant_that_can_go_wrong_is_rejected(data: st.DataObject) -> None:
    slots = data.draw(st.sampled_from([1, 2, 3]), label="slots")
    result = scheduled(4, slots)
    module = copy_graph_module(result.module)
    done = [
        _mutate(module, lambda bound: data.draw(st.integers(0, bound - 1)))
        for _ in range(data.draw(st.integers(1, 3), label="mutations"))
    ]
    problem = is_wrong(module, 4)
    try:
        _verify(module, result.plan)
    except ScheduleError:
        return
    assert problem is None, f"accepted after {done}, but {problem}:\n{module.graph}"


def test_the_mutants_are_a_mixture_of_right_and_wrong() -> None:
    verdicts = []
    generator = random.Random(0)
    for _ in range(150):
        module = copy_graph_module(scheduled().module)
        _mutate(module, generator.randrange)
        verdicts.append(is_wrong(module, 4) is None)
    assert 0.1 < sum(verdicts) / len(verdicts) < 0.9


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_correct_schedules_are_never_rejected(data: st.DataObject) -> None:
    """Later prefetches, earlier acquires and later releases, within what the events allow."""
    slots = data.draw(st.sampled_from([1, 2, 3]))
    result = scheduled(4, slots)
    module = copy_graph_module(result.module)
    for _ in range(data.draw(st.integers(1, 6))):
        ops = find(module, data.draw(st.sampled_from(SLOT_OPS)))
        node = ops[data.draw(st.integers(0, len(ops) - 1))]
        order = list(module.graph.nodes)
        place = {other: index for index, other in enumerate(order)}
        first = max(place[used] for used in node.all_input_nodes)
        last = min([place[user] for user in node.users] or [len(order) - 1])
        if is_call(node, release):
            first = max(place[reader] for reader in readers(node.args[0]) if reader is not node)  # type: ignore[arg-type]
        if is_call(node, prefetch) and node.kwargs["after"] is None:
            first = max(first, max(index for other, index in place.items() if other.op == "placeholder"))
        spots = [other for other in order[first:last] if other is not node]
        if spots:
            spots[data.draw(st.integers(0, len(spots) - 1))].append(node)
    module.graph.lint()
    assert is_wrong(module, 4) is None
    _verify(module, result.plan)


class Shared(nn.Module):
    """One layer twice, and two blocks that share their routing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = BatchedBlock(seed=0), BatchedBlock(seed=1), DenseBlock(seed=2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.a(self.c(self.b(self.a(x, ids), ids), ids), ids)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_layers_applied_twice_are_scheduled_safely(slots: int) -> None:
    captured = streamed(Shared(), tokens(), torch.tensor([[0, 1]] * 6))
    result = up_to("verify", captured.module, slots=slots)
    assert [stay.bank for stay in result.plan.residencies] == [0, 1, 2, 0]
