"""A `Backend` whose ranks are replicas of Ray Serve, for the processes that receive HTTP requests."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import msgspec
from ray.exceptions import RayActorError

from moepass.ray_serve.replica_routing import live_router
from moepass.runtime.serving.batching.block_hashes import path_hashes
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import BackendStatus, FrontendLimits, NotServingError, answer_within
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.view import BackendView
from moepass.runtime.serving.router.routable import routable_request
from moepass.runtime.serving.router.router import ATTEMPTS
from moepass.runtime.serving.workers.remote_answers import decode_answer, encode_request

# The interval of a replica's reports to routers.
REPORT_SECONDS = 1.0
_VIEW_SECONDS = 1.0
_NO_STATUS = BackendStatus(state="starting", max_sequence_tokens=0, vocabulary_size=0)


class RayBackend:
    """A backend that sends requests to replicas. `name` is the name of their router, `key` the key of block hashes."""

    def __init__(self, handle: Any, name: str, key: bytes, limits: FrontendLimits) -> None:
        self._handle, self._name, self._key, self._limits = handle, name, key, limits
        self._open_bytes = 0
        self._numbers = itertools.count()
        self._last_status = _NO_STATUS

    def check_room(self) -> None:
        """Raise an error if no request is accepted now; see `Backend.check_room`."""
        router = live_router(self._name)
        state = self.status().state
        if router is None or state != "ready":
            raise NotServingError(f"no request is accepted now: {state}", value=state)
        rates = [replica.replica_metadata["flops_per_second"] for replica in self._replicas().values()]
        seconds = router.routing.waiting_flops / (sum(rates) or math.inf)
        self._limits.check(seconds, self._open_bytes)

    async def answer(
        self, request: Request, *, priority: int = 0, timeout_seconds: float, is_admitted: bool = False
    ) -> Answer:
        """Answer a request; see `Backend.answer`. If its replica dies, it is sent once more to another one."""
        if not is_admitted:
            self.check_room()
        size = sum(piece.tokens.nbytes for piece in request.pieces)
        self._open_bytes += size
        try:
            return await answer_within(timeout_seconds, self._answer(request, priority, timeout_seconds))
        finally:
            self._open_bytes -= size

    def status(self) -> BackendStatus:
        """Return the status of the replicas with their metrics added up, as of their last reports."""
        reports = [_status(replica) for replica in self._replicas().values()]
        if not reports:
            is_new = self._last_status is _NO_STATUS
            return dataclasses.replace(self._last_status, state="starting" if is_new else "no rank")
        ready = [status for status in reports if status.state == "ready"]
        shown = (ready or reports)[0]
        metrics: collections.Counter[str] = collections.Counter()
        for status in reports:
            metrics.update(status.metrics)
        details = {**shown.details, "replicas": f"{len(ready)} of {len(reports)} replicas on Ray are ready"}
        self._last_status = dataclasses.replace(shown, details=details, metrics=dict(metrics))
        return self._last_status

    async def view(self) -> BackendView:
        """Return the ranks of all replicas; see `Backend.view`. Ray's own metrics have the histograms of times."""
        views = await asyncio.gather(*(self._view_of(name) for name in self._replicas()))
        ranks = itertools.chain.from_iterable(view.ranks for view in views)
        return BackendView(
            tuple(dataclasses.replace(rank, rank=number) for number, rank in enumerate(ranks)),
            sum(view.waiting for view in views),
            sum(view.running for view in views),
        )

    async def started(self) -> None:
        """Wait until this process knows a replica. Ray looks for replicas only after a first call."""
        await self._call("view", routing=None)

    def _replicas(self) -> dict[str, Any]:
        router = live_router(self._name)
        return {} if router is None else router.replicas_by_name()

    async def _answer(self, request: Request, priority: int, timeout_seconds: float) -> Answer:
        now = time.monotonic()
        deadline = now + timeout_seconds
        number = str(next(self._numbers))
        for attempt in range(1, ATTEMPTS + 1):
            routable, _ = routable_request(
                dataclasses.replace(request, id=number),
                lambda tokens, salt: path_hashes(tokens, self._key, salt),
                priority=-priority,
                deadline=deadline,
                arrived=now,
            )
            message = encode_request(request, priority, max(0.001, deadline - time.monotonic()))
            try:
                return decode_answer(await self._call("answer", message, routing=routable))
            except NotServingError:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(REPORT_SECONDS)  # the replica reports that it has no ranks in this time
            except RayActorError as error:
                if attempt == ATTEMPTS:
                    text = "two replicas were lost while they computed the request; send it again"
                    raise NotServingError(text, value="replica lost") from error
        raise AssertionError("the last attempt returns or raises")

    async def _call(self, method: str, *arguments: Any, routing: object) -> bytes:
        # Ray gives all calls of one HTTP request the same number, but the router needs a number for each call. An empty
        # context hides the HTTP request from Ray.
        call = getattr(self._handle, method)
        response = contextvars.Context().run(call.remote, *arguments, routing=routing)
        try:
            answer: bytes = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return answer

    async def _view_of(self, name: str) -> BackendView:
        try:
            text = await asyncio.wait_for(self._call("view", routing=name), _VIEW_SECONDS)
        except (TimeoutError, RayActorError):
            return BackendView()
        return msgspec.json.decode(text, type=BackendView)


def _status(replica: Any) -> BackendStatus:
    return _decoded_status(replica.routing_stats.get("status") or replica.replica_metadata["status"])


@functools.lru_cache(maxsize=1024)  # every request reads the last one of each replica
def _decoded_status(text: str) -> BackendStatus:
    return msgspec.json.decode(text, type=BackendStatus)
