"""The verifier rejects one broken schedule for every rule; test_verify_mutants.py has thousands of mutants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.nodes import copy_graph_module, is_call
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult
from moepass.passes.ir.slot_operations import acquire, decode, prefetch, release
from moepass.passes.schedule.verify import RULES, ScheduleError, verify, violations
from tests.helpers.graphs.backend_helper import Stack, find, fingerprint, gather, streamed, tokens, up_to
from tests.helpers.mutants.schedule_mutants import Shared, case

Breaker = Callable[[GraphModule, PassResult], None]


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
    for target in (prefetch, acquire, release):
        node = find(module, target)[0]
        node.update_kwarg("slot", 1 - int(node.kwargs["slot"]))  # type: ignore[arg-type]


def _too_large_for_its_slot(module: GraphModule, result: PassResult) -> None:
    object.__setattr__(result.plan, "slot_bytes", result.plan.slot_bytes - 1)


def _read_before_acquire(module: GraphModule, result: PassResult) -> None:
    """Move a read before the acquire. The lint rejects such a graph, but the verifier must not depend on the lint."""
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
    # The release marks the end of all reads except that of the caller, which is not in the graph.
    output.append(done)


def _decode_what_is_not_encoded(module: GraphModule, result: PassResult) -> None:
    filled = find(module, prefetch)[0]
    with module.graph.inserting_after(filled):
        decoded = module.graph.call_function(decode, (filled,), {"bank": filled.kwargs["bank"], "slot": 0})
    find(module, acquire)[0].replace_input_with(filled, decoded)


BROKEN: dict[str, Breaker] = {
    "all_scheduled": _put_gather_back,
    "one_acquire_one_release": _drop_release,
    "decoded_behind_copy": _decode_what_is_not_encoded,
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


@pytest.mark.sampled(every=12)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_first_filling_that_waits_is_caught() -> None:
    """The ring would keep the bank that it fetched ahead of the run, as if it were still in the slot."""
    module = copy_graph_module(scheduled(slots=3).module)
    done = find(module, release)[0]
    second = find(module, prefetch)[1]
    done.append(second)
    second.update_kwarg("after", done)
    with pytest.raises(ScheduleError, match=r"prefetch_1 is the first to fill slot 1, but waits for release"):
        _verify(module, scheduled(slots=3).plan)


def test_a_later_release_will_do() -> None:
    """It follows the release of the slot's previous content on the same stream."""
    module = copy_graph_module(scheduled().module)
    first, later = find(module, release)[:2]
    refill = find(module, prefetch)[2]
    later.append(refill)
    refill.update_kwarg("after", later)
    assert refill.kwargs["slot"] == first.kwargs["slot"] != later.kwargs["slot"]
    _verify(module, scheduled().plan)


def test_a_slot_that_the_plan_has_and_nothing_fills_is_caught() -> None:
    plan = dataclasses.replace(scheduled().plan, slots=3)
    with pytest.raises(ScheduleError, match=r"fits_ring .* nothing fills slot 2, which the ring would lose"):
        _verify(scheduled().module, plan)


def test_an_acquire_that_comes_late_enough_by_chance_is_caught() -> None:
    """The reader of one bank follows its own acquire, which precedes its prefetch."""
    module = copy_graph_module(scheduled().module)
    tensors = find(module, acquire)[1]
    filled = find(module, prefetch)[1]
    tensors.append(filled)
    with pytest.raises(ScheduleError, match=r"read_after_write .*acquire_1 precedes prefetch_1"):
        _verify(module, scheduled().plan)


def test_a_bank_copied_from_another_banks_shard_is_caught() -> None:
    module = copy_graph_module(scheduled().module)
    first, second = find(module, prefetch)[:2]
    first.args, second.args = second.args, first.args
    with pytest.raises(ScheduleError, match=r"rule follows_plan .*the plan takes bank 0 from"):
        _verify(module, scheduled().plan)


@pytest.mark.sampled(every=15)
@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("form", ["dense_bmm", "batched_mm", "grouped_mm"])
def test_correct_schedules_are_accepted_and_unchanged(form: str, slots: int) -> None:
    result = scheduled(4, slots, form)
    before = fingerprint(result.module)
    checked = verify(result.module, result.plan, PassContext())
    assert checked.module is result.module
    assert checked.plan == result.plan
    assert fingerprint(result.module) == before


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_layers_applied_twice_are_scheduled_safely(slots: int) -> None:
    captured = streamed(Shared(), tokens(), torch.tensor([[0, 1]] * 6))
    result = up_to("verify", captured.module, slots=slots)
    assert [stay.bank for stay in result.plan.slot_stays] == [0, 1, 2, 0]


# Encoded banks: the decode is ordered like a copy


def _drop_decode(graph: Graph) -> None:
    decoded = _ops(graph, decode)[0]
    decoded.replace_all_uses_with(decoded.args[0])  # type: ignore[arg-type]
    graph.erase_node(decoded)


def _acquire_what_is_still_encoded(graph: Graph) -> None:
    decoded = _ops(graph, decode)[0]
    (tensors,) = decoded.users
    tensors.replace_input_with(decoded, decoded.args[0])  # type: ignore[arg-type]


def _decode_twice(graph: Graph) -> None:
    decoded = _ops(graph, decode)[0]
    with graph.inserting_after(decoded):
        graph.node_copy(decoded)


def _decode_behind_the_next_copy(graph: Graph) -> None:
    """Move a decode after the next copy, when the encoded buffer contains another bank."""
    decoded, following = _ops(graph, decode)[0], _ops(graph, prefetch)[1]
    following.append(decoded)


def _decode_behind_a_release(graph: Graph) -> None:
    """Move a decode after a release, which may start to fill its slot for the next run through the encoded buffer."""
    filled = next(node for node in _ops(graph, prefetch) if node.kwargs["after"] is not None and _decode_of(node))
    awaited, later = filled.kwargs["after"], _ops(graph, release)[-1]
    assert awaited is not later
    later.append(_decode_of(filled)[0])


def _decode_before_its_copy(graph: Graph) -> None:
    decoded = _ops(graph, decode)[0]
    decoded.args[0].prepend(decoded)  # type: ignore[union-attr]


def _decode_another_bank(graph: Graph) -> None:
    first, second = _ops(graph, decode)[:2]
    first.args, second.args = second.args, first.args


def _decode_into_another_slot(graph: Graph) -> None:
    decoded = _ops(graph, decode)[0]
    decoded.update_kwarg("slot", 1 - decoded.kwargs["slot"])  # type: ignore[operator]


def _acquire_before_the_decode(graph: Graph) -> None:
    tensors = _ops(graph, acquire)[0]
    decoded = tensors.args[0]
    assert is_call(decoded, decode)
    decoded.prepend(tensors)  # type: ignore[union-attr]


def _decode_before_the_last_read(graph: Graph) -> None:
    """Move the copy and decode of a refill before the release that they should wait for."""
    filled = next(node for node in _ops(graph, prefetch) if node.kwargs["after"] is not None and _decode_of(node))
    (decoded,) = _decode_of(filled)
    done = filled.kwargs["after"]
    tensors = done.args[0]  # type: ignore[union-attr]
    tensors.append(filled)  # type: ignore[union-attr]
    filled.append(decoded)


def _ops(graph: Graph, operation: object) -> list[Node]:
    return [node for node in graph.nodes if is_call(node, operation)]


def _decode_of(filled: Node) -> list[Node]:
    return [user for user in filled.users if is_call(user, decode)]


@pytest.mark.parametrize(
    ("breaker", "rules"),
    [
        (_drop_decode, {"decoded_behind_copy"}),
        (_acquire_what_is_still_encoded, {"decoded_behind_copy", "read_after_write"}),
        (_decode_twice, {"decoded_behind_copy"}),
        (_decode_behind_the_next_copy, {"decoded_behind_copy"}),
        (_decode_behind_a_release, {"decoded_behind_copy", "read_after_write"}),
        (_decode_before_its_copy, {"decoded_behind_copy"}),
        (_decode_another_bank, {"decoded_behind_copy", "same_bank_and_slot"}),
        (_decode_into_another_slot, {"same_bank_and_slot"}),
        (_acquire_before_the_decode, {"read_after_write"}),
        (_decode_before_the_last_read, {"write_after_read"}),
    ],
)
def test_a_decode_that_is_missing_or_out_of_order_is_refused(breaker: Callable[[Graph], None], rules: set[str]) -> None:
    base = case("encoded", 2)
    graph = Graph()
    graph.output(graph.graph_copy(base.graph, {}))
    assert list(violations(graph, base.plan)) == []
    breaker(graph)
    assert rules <= {rule for rule, _ in violations(graph, base.plan)}
