"""The request router of Ray Serve that chooses a replica by the router's state machine.

Ray makes one router in each process that calls replicas, and copies the source of this module there. So the state of a
process is in another module, and is not imported by name. All methods run in one event loop. The application has
another event loop and only reads `replicas_by_name` and `routing.waiting_flops`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from moepass.models.checkpoint.checkpoint_folders import load_config, resolve_model
from moepass.models.sizes.families import from_config
from moepass.ray_serve.replica_routing import ReplicaFacts, ReplicaRouting, announce_router
from moepass.runtime.serving.batching.block_hashes import HASH_BYTES
from moepass.runtime.serving.batching.step_flops import FlopsTable

# A waiting call costs nothing here. Ray's own limit is made for routers that ask replicas for their queue lengths.
_MOST_ROUTED = 1 << 20


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # ray has no types where it is not installed
    """A router for calls with the argument `routing`.

    `routing` is a RoutableRequest, the name of a replica, or None for any replica.
    """

    def initialize_state(self, *, model: str, name: str) -> None:
        """Make the state machine for `model`, and register this router under `name`."""
        self.routing = ReplicaRouting(FlopsTable(from_config(load_config(resolve_model(model)))), time.monotonic)
        self._reports: dict[str, int] = {}
        announce_router(name, self)

    @property
    def max_num_routing_tasks(self) -> int:
        """The largest number of calls that wait for a replica at the same time."""
        return _MOST_ROUTED

    def replicas_by_name(self) -> dict[str, RunningReplica]:
        """Return the running replicas by their names."""
        return {identity.unique_id: replica for identity, replica in dict(self.curr_replicas).items()}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Receive the running replicas and their reports from Ray."""
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self.routing.update({name: _facts(replica) for name, replica in by_name.items()})
        for name, replica in by_name.items():
            report, hashes = replica.routing_stats.get("report"), replica.routing_stats.get("blocks", b"")
            if report is not None and report != self._reports.get(name):  # Ray repeats the last report
                self._reports[name] = report
                starts = range(0, len(hashes), HASH_BYTES)
                blocks = frozenset(hashes[start : start + HASH_BYTES] for start in starts)
                self.routing.report_blocks(name, blocks)
        self._reports = {name: report for name, report in self._reports.items() if name in by_name}
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for a call, after waiting until one accepts it."""
        routing: Any = None if pending_request is None else pending_request.kwargs.get("routing")
        if pending_request is None or routing is None:
            return [candidate_replicas]
        name = routing
        if not isinstance(routing, str):
            number = pending_request.metadata.internal_request_id
            pending_request.future.add_done_callback(lambda chosen: self._given_up(number, chosen))
            name = await self.routing.choose(number, routing)
        return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == name]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica has accepted a call."""
        self.routing.started(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a call was answered."""
        self.routing.over(internal_request_id, is_answered=True)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica that has died."""
        self.routing.lost(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    def _given_up(self, number: str, chosen: asyncio.Future[Any]) -> None:
        if chosen.cancelled():
            self.routing.over(number, is_answered=False)


def _facts(replica: RunningReplica) -> ReplicaFacts:
    metadata = replica.replica_metadata
    is_ready = replica.routing_stats.get("state", "ready") == "ready"
    return ReplicaFacts(int(metadata["saturation_flops"]), float(metadata["flops_per_second"]), is_ready)
