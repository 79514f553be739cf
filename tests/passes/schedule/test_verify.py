"""The verifier rejects one broken schedule for every rule; test_verify_mutants.py has thousands of mutants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.graph.nodes import copy_graph_module, is_call
from moepass.passes.ir.bank_format import BankFormat
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
        arguments = {"bank": filled.kwargs["bank"], "slot": 0, "after": None}
        decoded = module.graph.call_function(decode, (filled,), arguments)
    find(module, acquire)[0].replace_input_with(filled, decoded)


def _three_copies_before_a_decode(module: GraphModule, result: PassResult) -> None:
    """Let all banks be encoded, and copy three of them before the first is decoded."""
    for spec in result.plan.banks:
        object.__setattr__(spec, "format", BankFormat(60, 50, spec.format.slot_bytes, "packed"))
    copies = find(module, prefetch)
    for filled in copies:
        after, (tensors,) = filled.kwargs["after"], filled.users
        filled.update_kwarg("after", None)
        with module.graph.inserting_after(filled):
            arguments = {"bank": filled.kwargs["bank"], "slot": filled.kwargs["slot"], "after": after}
            decoded = module.graph.call_function(decode, (filled,), arguments)
        tensors.replace_input_with(filled, decoded)
    copies[0].append(copies[1])
    copies[1].append(copies[2])


BROKEN: dict[str, Breaker] = {
    "all_scheduled": _put_gather_back,
    "one_acquire_one_release": _drop_release,
    "decoded_once": _decode_what_is_not_encoded,
    "buffer_is_free": _three_copies_before_a_decode,
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


# Encoded banks: copies go into encoded buffers, and decodes into slots


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


def _copy_three_before_a_decode(graph: Graph) -> None:
    """Move the copies of all encoded banks before the first decode; there are two encoded buffers."""
    first, *others = [decoded.args[0] for decoded in _ops(graph, decode)]
    for copied in reversed(others):
        first.append(copied)  # type: ignore[union-attr, arg-type]


def _decode_behind_its_acquire(graph: Graph) -> None:
    _ops(graph, release)[-1].append(_refill(graph))


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
    """Move the decode of a refill before the release that it should wait for."""
    decoded = _refill(graph)
    decoded.kwargs["after"].args[0].append(decoded)  # type: ignore[union-attr]


def _decode_without_waiting(graph: Graph) -> None:
    _refill(graph).update_kwarg("after", None)


def _copy_when_the_slot_is_free(graph: Graph) -> None:
    """Make the copy of an encoded bank wait for the slot, which it does not fill."""
    decoded = _refill(graph)
    decoded.args[0].update_kwarg("after", decoded.kwargs["after"])  # type: ignore[union-attr]


def _decode_at_first_after_a_release(graph: Graph) -> None:
    decoded, done = _ops(graph, decode)[0], _ops(graph, release)[0]
    assert decoded.kwargs["after"] is None
    decoded.update_kwarg("after", done)


def _ops(graph: Graph, operation: object) -> list[Node]:
    return [node for node in graph.nodes if is_call(node, operation)]


def _refill(graph: Graph) -> Node:
    """Return the first decode that waits for a release."""
    return next(node for node in _ops(graph, decode) if node.kwargs["after"] is not None)


@pytest.mark.parametrize(
    ("breaker", "rules"),
    [
        (_drop_decode, {"decoded_once"}),
        (_acquire_what_is_still_encoded, {"decoded_once", "read_after_write"}),
        (_decode_twice, {"decoded_once"}),
        (_copy_three_before_a_decode, {"buffer_is_free"}),
        (_decode_behind_its_acquire, {"read_after_write"}),
        (_decode_before_its_copy, {"read_after_write"}),
        (_decode_another_bank, {"same_bank_and_slot"}),
        (_decode_into_another_slot, {"same_bank_and_slot"}),
        (_acquire_before_the_decode, {"read_after_write"}),
        (_decode_before_the_last_read, {"write_after_read"}),
        (_decode_without_waiting, {"event_not_host_order", "write_after_read"}),
        (_copy_when_the_slot_is_free, {"event_not_host_order"}),
        (_decode_at_first_after_a_release, {"event_not_host_order"}),
    ],
)
def test_a_decode_that_is_missing_or_out_of_order_is_refused(breaker: Callable[[Graph], None], rules: set[str]) -> None:
    base = case("encoded", 2)
    graph = Graph()
    graph.output(graph.graph_copy(base.graph, {}))
    assert list(violations(graph, base.plan)) == []
    breaker(graph)
    assert rules <= {rule for rule, _ in violations(graph, base.plan)}
