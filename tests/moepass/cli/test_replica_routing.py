"""The state machine of Ray's router: replicas start and end, requests wait, loads return to 0."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.ray_serve.replica_routing import ReplicaFacts, ReplicaRouting
from moepass.runtime.serving.router.routable import RoutableQuestion, RoutableRequest

FACTS = ReplicaFacts(saturation_flops=100, flops_per_second=100.0)


class TokensFormula:
    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        return new_tokens


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(first_block: int, tokens: int = 40, deadline: float = 60.0) -> RoutableRequest:
    blocks = (bytes([first_block]) * 16, bytes([first_block, 1]) * 8)
    return RoutableRequest("", blocks, tokens, deadline=deadline)


def loads_of(routing: ReplicaRouting) -> dict[str, int]:
    """Return the FLOPs of the open requests of each replica, by its name."""
    loads = routing._router.loads if routing._router is not None else ()
    return {name: loads[replica.slot] for name, replica in routing._replicas.items()}


def run(work: Callable[[ReplicaRouting, Clock], Awaitable[None]]) -> None:
    clock = Clock()
    asyncio.run(asyncio.wait_for(work(ReplicaRouting(TokensFormula(), clock), clock), 10))  # type: ignore[arg-type]


def test_equal_prefixes_go_to_one_replica_and_loads_return_to_zero() -> None:
    async def work(routing: ReplicaRouting, clock: Clock) -> None:
        routing.update({"a": FACTS, "b": FACTS})
        first = await routing.choose("1", request(1))
        second = await routing.choose("2", request(2))
        assert {first, second} == {"a", "b"}
        assert await routing.choose("3", request(1)) == first
        assert loads_of(routing) == {first: 48, second: 40}  # the third request shares 32 tokens
        for number in ("1", "2", "3"):
            routing.started(number)
            routing.over(number, is_answered=True)
            routing.over(number, is_answered=True)
        assert loads_of(routing) == {"a": 0, "b": 0}
        # Answered prompts count as cached until the second report of the replica.
        assert await routing.choose("4", request(2)) == second
        assert loads_of(routing)[second] == 8

    run(work)


def test_the_report_of_a_replica_replaces_the_assumed_blocks() -> None:
    async def work(routing: ReplicaRouting, clock: Clock) -> None:
        routing.update({"a": FACTS, "b": FACTS})
        held = request(7)
        routing.report_blocks("b", frozenset(held.blocks))
        routing.report_blocks("unknown", frozenset(held.blocks))
        assert await routing.choose("1", held) == "b"
        assert loads_of(routing)["b"] == 8
        routing.over("1", is_answered=True)
        answered = request(8)
        assert await routing.choose("2", answered) == "a"
        routing.over("2", is_answered=True)
        routing.report_blocks("a", frozenset())  # the report may have been sent before the answer
        assert await routing.choose("3", answered) == "a"
        assert loads_of(routing)["a"] == 8
        routing.over("3", is_answered=False)
        routing.report_blocks("a", frozenset())
        routing.report_blocks("b", frozenset())
        await routing.choose("4", answered)
        assert sum(loads_of(routing).values()) == 40

    run(work)


def test_requests_wait_until_a_replica_accepts_more() -> None:
    async def work(routing: ReplicaRouting, clock: Clock) -> None:
        routing.update({"a": FACTS})
        assert await routing.choose("1", request(1, 120)) == "a"
        waiting = asyncio.create_task(routing.choose("2", request(2)))
        await asyncio.sleep(0)
        assert routing.waiting_flops == 40
        routing.over("1", is_answered=True)
        assert await waiting == "a"
        given_up = asyncio.create_task(routing.choose("3", request(3, 120)))
        later = asyncio.create_task(routing.choose("4", request(4)))
        assert await given_up == "a"
        await asyncio.sleep(0)
        assert not later.done()
        routing.over("4", is_answered=False)
        with pytest.raises(asyncio.CancelledError):
            await later
        assert routing.waiting_flops == 0

    run(work)


def test_a_lost_replica_forgets_its_requests_and_its_blocks() -> None:
    async def work(routing: ReplicaRouting, clock: Clock) -> None:
        routing.update({"a": FACTS, "b": FACTS})
        lost = await routing.choose("1", request(1, 150))
        (remaining,) = {"a", "b"} - {lost}
        await routing.choose("2", request(2, 150))
        waiting = asyncio.create_task(routing.choose("3", request(3)))
        await asyncio.sleep(0)
        routing.lost(lost)
        routing.lost(lost)
        assert loads_of(routing) == {remaining: 150}
        routing.over("1", is_answered=True)  # Ray also reports the end of the request
        again = asyncio.create_task(routing.choose("1 again", request(1)))
        await asyncio.sleep(0)
        assert not waiting.done()
        routing.update({remaining: FACTS, "c": FACTS})
        assert await waiting == await again == "c"
        assert loads_of(routing) == {remaining: 150, "c": 80}
        routing.update({})
        assert loads_of(routing) == {}

    run(work)


def test_a_replica_without_ranks_gets_nothing_until_it_is_ready_again() -> None:
    async def work(routing: ReplicaRouting, clock: Clock) -> None:
        routing.update({"a": dataclasses.replace(FACTS, is_ready=False)})
        waiting = asyncio.create_task(routing.choose("1", request(1)))
        await asyncio.sleep(0)
        assert routing.waiting_flops == 40
        routing.update({"a": FACTS})
        assert await waiting == "a"
        routing.update({"a": dataclasses.replace(FACTS, is_ready=False), "b": FACTS})
        assert await routing.choose("2", request(1)) == "b"
        assert loads_of(routing) == {"b": 40}

    run(work)


def test_a_request_without_a_reported_end_is_over_after_its_deadline() -> None:
    async def work(routing: ReplicaRouting, clock: Clock) -> None:
        routing.update({"a": FACTS})
        await routing.choose("1", request(1, 150, deadline=5))
        routing.started("1")
        late = asyncio.create_task(routing.choose("2", request(2, deadline=5)))
        await asyncio.sleep(0)
        clock.now = 6
        routing.route()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert loads_of(routing) == {"a": 150}
        clock.now = 16
        routing.route()
        assert loads_of(routing) == {"a": 0}

    run(work)


def test_questions_of_a_request_stay_together() -> None:
    async def work(routing: ReplicaRouting, clock: Clock) -> None:
        routing.update({"a": FACTS, "b": FACTS})
        many = RoutableRequest("", (), 10, tuple(RoutableQuestion((part,), ((10, 10),)) for part in range(50)))
        assert await routing.choose("1", many) in ("a", "b")
        assert sorted(loads_of(routing).values()) == [0, 510]

    run(work)


NAMES = "abc"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["place", "over", "lost", "update", "report", "later"]), st.integers(0, 20))))
def test_after_any_events_every_request_is_placed_and_loads_return_to_zero(events: list[tuple[str, int]]) -> None:
    async def work(routing: ReplicaRouting, clock: Clock) -> None:
        routing.update({"a": FACTS})
        tasks: dict[str, asyncio.Task[str]] = {}
        for kind, number in events:
            if kind == "place":
                name = str(len(tasks))
                routable = request(number % 4, 33 + 10 * number, deadline=clock.now + 30)
                tasks[name] = asyncio.create_task(routing.choose(name, routable))
            elif kind == "over":
                routing.over(str(number), is_answered=number % 2 == 0)
            elif kind == "lost":
                routing.lost(NAMES[number % 3])
            elif kind == "report":
                routing.report_blocks(NAMES[number % 3], frozenset(request(number % 4).blocks[: number % 3]))
            elif kind == "update":
                routing.update({name: FACTS for bit, name in enumerate(NAMES) if number >> bit & 1})
            else:
                clock.now += number
                routing.route()
            await asyncio.sleep(0)
            assert all(load >= 0 for load in loads_of(routing).values())
        # With all replicas, every request that is neither over nor late gets a replica.
        routing.update(dict.fromkeys(NAMES, FACTS))
        for _ in range(len(tasks) + 1):
            await asyncio.sleep(0)
            for name, task in tasks.items():
                if task.done():
                    assert task.cancelled() or task.result() in NAMES
                    routing.over(name, is_answered=True)
        assert all(task.done() for task in tasks.values())
        assert loads_of(routing) == dict.fromkeys(NAMES, 0)
        assert routing.waiting_flops == 0

    run(work)
