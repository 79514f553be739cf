"""The verifier: a broken schedule for every rule. Mutants by the thousand are in test_verify_mutants.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from backend_helper import Stack, find, fingerprint, gather, streamed, tokens, up_to
from schedule_mutants import Shared
from torch.fx import GraphModule

from moepass.passes.graph.nodes import copy_graph_module
from moepass.passes.ir.plan import SLOT_OPS, Plan, acquire, prefetch, release
from moepass.passes.ir.protocol import PassContext, PassResult
from moepass.passes.schedule.verify import RULES, ScheduleError, verify

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


def test_a_first_filling_that_waits_is_caught() -> None:
    """The ring would keep what it has brought into the slot before the run, and believe that it is still there."""
    module = copy_graph_module(scheduled(slots=3).module)
    done = find(module, release)[0]
    second = find(module, prefetch)[1]
    done.append(second)
    second.update_kwarg("after", done)
    with pytest.raises(ScheduleError, match=r"prefetch_1 is the first to fill slot 1, but waits for release"):
        _verify(module, scheduled(slots=3).plan)


def test_a_later_release_will_do() -> None:
    """It happens on the same stream as the release of what the slot held, and behind it."""
    module = copy_graph_module(scheduled().module)
    own, later = find(module, release)[:2]
    refill = find(module, prefetch)[2]
    later.append(refill)
    refill.update_kwarg("after", later)
    assert refill.kwargs["slot"] == own.kwargs["slot"] != later.kwargs["slot"]
    _verify(module, scheduled().plan)


def test_a_slot_that_the_plan_has_and_nothing_fills_is_caught() -> None:
    plan = dataclasses.replace(scheduled().plan, slots=3)
    with pytest.raises(ScheduleError, match=r"fits_ring .* nothing fills slot 2, which the ring would lose"):
        _verify(scheduled().module, plan)


def test_an_acquire_that_comes_late_enough_by_chance_is_caught() -> None:
    """The reader of one bank behind its own acquire, which stands in front of its prefetch."""
    module = copy_graph_module(scheduled().module)
    tensors = find(module, acquire)[1]
    filled = find(module, prefetch)[1]
    tensors.append(filled)
    with pytest.raises(ScheduleError, match=r"read_after_write .*acquire_1 stands before prefetch_1"):
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


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_layers_applied_twice_are_scheduled_safely(slots: int) -> None:
    captured = streamed(Shared(), tokens(), torch.tensor([[0, 1]] * 6))
    result = up_to("verify", captured.module, slots=slots)
    assert [stay.bank for stay in result.plan.slot_stays] == [0, 1, 2, 0]
