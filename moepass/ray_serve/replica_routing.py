"""The router's state machine for replicas that come and go, and for requests that wait for one of them.

A replica is a rank of the state machine: one of a fixed number of slots, which are lost and back as replicas come and
go. What it holds is told by the replica from time to time. Until it is, a replica is taken to hold the prompts that it
has answered since, so that prefixes stay together in the meantime.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import BlockHash, FlopsFormula, RoutableRequest

MOST_REPLICAS = 512
_live: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
# A request is over so long after its deadline, whoever has forgotten to say so.
_GRACE_SECONDS = 10.0


def announce_router(name: str, router: object) -> None:
    """`router` is this process's request router of the deployment that was built as `name`."""
    _live[name] = router


def live_router(name: str) -> Any:
    """This process's request router of that deployment; None as long as nothing was asked of it."""
    return _live.get(name)


@dataclasses.dataclass(frozen=True)
class ReplicaFacts:
    """`saturation_flops` of load and it takes no more; `flops_per_second` are those of all its ranks together.

    One that is not ready, because its ranks are lost, gets no requests.
    """

    saturation_flops: int
    flops_per_second: float
    is_ready: bool = True


@dataclasses.dataclass(eq=False)
class _Placed:
    """A request that is open. `chosen` becomes the name of its replica."""

    request: RoutableRequest
    chosen: asyncio.Future[str]
    replica: str | None = None
    assignment: int = -1


@dataclasses.dataclass(eq=False)
class _Replica:
    """`told` are blocks that it said it holds; `answered` those of requests that it has answered since it said so, and
    `before` those of the time before, because what it says is older than its arrival.
    """

    slot: int
    told: frozenset[BlockHash] = frozenset()
    answered: set[BlockHash] = dataclasses.field(default_factory=set)
    before: set[BlockHash] = dataclasses.field(default_factory=set)


class ReplicaRouting:
    """One event loop calls it; `clock` gives the seconds of the requests' deadlines."""

    def __init__(self, formula: FlopsFormula, clock: Callable[[], float]) -> None:
        self._formula, self._clock = formula, clock
        self._router: PrefixRouter | None = None
        self._replicas: dict[str, _Replica] = {}
        self._names: dict[int, str] = {}
        self._placed: dict[str, _Placed] = {}
        self._ends: list[tuple[float, str]] = []

    @property
    def waiting_flops(self) -> int:
        """Of requests that no replica has yet."""
        return self._router.waiting_flops if self._router is not None else 0

    @property
    def loads(self) -> dict[str, int]:
        """Of each replica, true FLOPs of what it has and has not answered."""
        loads = self._router.loads if self._router is not None else ()
        return {name: loads[replica.slot] for name, replica in self._replicas.items()}

    def update(self, replicas: Mapping[str, ReplicaFacts]) -> None:
        """These replicas are there, and no others."""
        ready = {name for name, facts in replicas.items() if facts.is_ready}
        for name in self._replicas.keys() - ready:
            self.lost(name)
        for name, facts in replicas.items():
            router = self._router_for(facts)
            if name in self._replicas or not facts.is_ready:
                continue
            slot = next((slot for slot in range(MOST_REPLICAS) if slot not in self._names), None)
            if slot is None:
                continue  # it gets no requests; parse_options allows no more of them
            self._replicas[name] = _Replica(slot)
            self._names[slot] = name
            router.rank_back(slot)
        self.route()

    def holds(self, name: str, blocks: frozenset[BlockHash]) -> None:
        """What a replica says that it holds."""
        replica = self._replicas.get(name)
        if replica is None or self._router is None:
            return
        old = replica.told | replica.answered | replica.before
        replica.before, replica.answered, replica.told = replica.answered, set(), blocks
        new = blocks | replica.before
        for block in old - new:
            self._router.block_evicted(replica.slot, block)
        for block in new - old:
            self._router.block_stored(replica.slot, block)

    async def place(self, number: str, request: RoutableRequest) -> str:
        """The name of the replica that gets request `number`; waits until one takes it."""
        placed = self._placed.get(number)
        if placed is None:
            router = self._router
            assert router is not None, "requests are routed where a replica is"
            placed = _Placed(request, asyncio.get_running_loop().create_future())
            self._placed[number] = placed
            if request.deadline != math.inf:
                heapq.heappush(self._ends, (request.deadline + _GRACE_SECONDS, number))
            router.submit(dataclasses.replace(request, id=number))
            self.route()
        return await asyncio.shield(placed.chosen)

    def started(self, number: str) -> None:
        """Its replica has taken the request."""
        placed = self._placed.get(number)
        if placed is not None and self._router is not None:
            self._router.started(placed.assignment)

    def over(self, number: str, *, is_answered: bool) -> None:
        """A request is answered, or given up. Nothing happens where that was said before."""
        placed = self._placed.pop(number, None)
        if placed is None or self._router is None:
            return
        if placed.replica is None or not is_answered:
            self._router.cancel(number)
        elif self._router.done(placed.assignment) is not None:
            replica = self._replicas[placed.replica]
            for block in placed.request.blocks:
                if block not in replica.answered and block not in replica.told:
                    replica.answered.add(block)
                    self._router.block_stored(replica.slot, block)
        placed.chosen.cancel()
        self.route()

    def lost(self, name: str) -> None:
        """A replica is gone. Who sent it requests sends them again."""
        replica = self._replicas.pop(name, None)
        if replica is None or self._router is None:
            return
        for number in [number for number, placed in self._placed.items() if placed.replica == name]:
            self._router.cancel(number)
            del self._placed[number]
        del self._names[replica.slot]
        self._router.rank_lost(replica.slot)
        self.route()

    def route(self) -> None:
        """Give requests to replicas, as far as they take them."""
        router, now = self._router, self._clock()
        if router is None:
            return
        while self._ends and self._ends[0][0] <= now:
            _, number = heapq.heappop(self._ends)
            if number in self._placed:
                router.cancel(number)
                self._placed.pop(number).chosen.cancel()
        found = router.route(now)
        for withdrawal in found.expired:
            self._placed.pop(withdrawal.request_id).chosen.cancel()
        for assignment in found.assignments:
            placed = self._placed[assignment.request_id]
            placed.assignment = assignment.number
            placed.replica = self._names[assignment.rank]
            if not placed.chosen.done():
                placed.chosen.set_result(placed.replica)

    def _router_for(self, facts: ReplicaFacts) -> PrefixRouter:
        if self._router is None:
            self._router = PrefixRouter(
                MOST_REPLICAS,
                self._formula,
                saturation_flops=facts.saturation_flops,
                flops_per_second=facts.flops_per_second,
                splits=False,
            )
            for slot in range(MOST_REPLICAS):
                self._router.rank_lost(slot)
        return self._router
