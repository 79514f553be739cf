"""The router's state machine for replicas that start and end, and for requests that wait for one of them.

A replica is a rank of the state machine: it has one of a fixed number of slots, which are lost when replicas end and
return when they start. Each replica regularly reports the blocks in its cache. Between reports, the prompts that it
answered are assumed to be cached, so that requests with the same prefix go to the same replica.
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
# A router is made at the first call.
_live_routers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
# A request is removed this long after its deadline, in case its end was not reported.
_GRACE_SECONDS = 10.0


def announce_router(name: str, router: object) -> None:
    """Register `router` as this process's request router of the deployment `name`."""
    _live_routers[name] = router


def live_router(name: str) -> Any:
    """Return this process's request router of the deployment `name`, or None before its first call."""
    return _live_routers.get(name)


@dataclasses.dataclass(frozen=True)
class ReplicaFacts:
    """The capacity of a replica: the FLOPs of open requests up to which it accepts more, and the rate of its ranks.

    If its ranks are lost, it is not ready and gets no requests.
    """

    saturation_flops: int
    flops_per_second: float
    is_ready: bool = True


@dataclasses.dataclass(eq=False)
class _OpenRequest:
    """A request that has no answer yet. While it waits, `replica` is None; `chosen` becomes the name of its replica."""

    request: RoutableRequest
    chosen: asyncio.Future[str]
    replica: str | None = None
    assignment: int = -1


@dataclasses.dataclass(eq=False)
class _ReplicaBlocks:
    """The blocks that a replica probably has in its cache: from its last report, and from later requests.

    A report is older than its arrival, so `before` keeps the requests that were answered between the last two reports.
    """

    slot: int
    reported: frozenset[BlockHash] = frozenset()
    answered: set[BlockHash] = dataclasses.field(default_factory=set)
    before: set[BlockHash] = dataclasses.field(default_factory=set)


class ReplicaRouting:
    """The state of all replicas and open requests. All calls come from one event loop, whose time `clock` returns."""

    def __init__(self, formula: FlopsFormula, clock: Callable[[], float]) -> None:
        self._formula, self._clock = formula, clock
        self._router: PrefixRouter | None = None
        self._replicas: dict[str, _ReplicaBlocks] = {}
        self._names: dict[int, str] = {}
        self._open: dict[str, _OpenRequest] = {}
        self._ends: list[tuple[float, str]] = []

    @property
    def waiting_flops(self) -> int:
        """FLOPs of the requests that wait for a replica."""
        return self._router.queue.flops if self._router is not None else 0

    def update(self, replicas: Mapping[str, ReplicaFacts]) -> None:
        """Set the replicas that exist now."""
        ready = {name for name, facts in replicas.items() if facts.is_ready}
        for name in self._replicas.keys() - ready:
            self.lost(name)
        for name, facts in replicas.items():
            router = self._router_for(facts)
            if name in self._replicas or not facts.is_ready:
                continue
            slot = next((slot for slot in range(MOST_REPLICAS) if slot not in self._names), None)
            if slot is None:
                continue  # parse_options allows no more replicas than slots
            self._replicas[name] = _ReplicaBlocks(slot)
            self._names[slot] = name
            router.rank_back(slot)
        self.route()

    def report_blocks(self, name: str, blocks: frozenset[BlockHash]) -> None:
        """Set the blocks that a replica reports to have in its cache."""
        replica = self._replicas.get(name)
        if replica is None or self._router is None:
            return
        old = replica.reported | replica.answered | replica.before
        replica.before, replica.answered, replica.reported = replica.answered, set(), blocks
        new = blocks | replica.before
        for block in old - new:
            self._router.block_evicted(replica.slot, block)
        for block in new - old:
            self._router.block_stored(replica.slot, block)

    async def choose(self, number: str, request: RoutableRequest) -> str:
        """Return the name of the replica for request `number`, after waiting until one accepts it."""
        placed = self._open.get(number)
        if placed is None:
            router = self._router
            assert router is not None, "Ray routes requests only if there is a replica"
            placed = _OpenRequest(request, asyncio.get_running_loop().create_future())
            self._open[number] = placed
            if request.deadline != math.inf:
                heapq.heappush(self._ends, (request.deadline + _GRACE_SECONDS, number))
            router.submit(dataclasses.replace(request, id=number))
            self.route()
        return await asyncio.shield(placed.chosen)

    def started(self, number: str) -> None:
        """Note that the replica has accepted the request."""
        placed = self._open.get(number)
        if placed is not None and self._router is not None:
            self._router.started(placed.assignment)

    def over(self, number: str, *, is_answered: bool) -> None:
        """Note that a request was answered or abandoned. Further calls for the same request do nothing."""
        placed = self._open.pop(number, None)
        if placed is None or self._router is None:
            return
        if placed.replica is None or not is_answered:
            self._router.cancel(number)
        elif self._router.done(placed.assignment) is not None:
            replica = self._replicas[placed.replica]
            for block in placed.request.blocks:
                if block not in replica.answered and block not in replica.reported:
                    replica.answered.add(block)
                    self._router.block_stored(replica.slot, block)
        placed.chosen.cancel()
        self.route()

    def lost(self, name: str) -> None:
        """Remove a replica that has ended. Its callers send their requests again."""
        replica = self._replicas.pop(name, None)
        if replica is None or self._router is None:
            return
        for number in [number for number, placed in self._open.items() if placed.replica == name]:
            self._router.cancel(number)
            del self._open[number]
        del self._names[replica.slot]
        self._router.rank_lost(replica.slot)
        self.route()

    def route(self) -> None:
        """Assign waiting requests to the replicas that accept more."""
        router, now = self._router, self._clock()
        if router is None:
            return
        while self._ends and self._ends[0][0] <= now:
            _, number = heapq.heappop(self._ends)
            if number in self._open:
                router.cancel(number)
                self._open.pop(number).chosen.cancel()
        step = router.route(now)
        for withdrawal in step.expired:
            self._open.pop(withdrawal.request_id).chosen.cancel()
        for assignment in step.assignments:
            placed = self._open[assignment.request_id]
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
