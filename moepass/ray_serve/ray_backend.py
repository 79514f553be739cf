"""The application's side: a `Backend` whose ranks are replicas of Ray Serve."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
import itertools
import math
import time
from typing import Any

import msgspec
from ray.exceptions import RayActorError

from moepass.ray_serve.replica import TOLD_SECONDS, status_of
from moepass.ray_serve.replica_routing import live_router
from moepass.runtime.serving.batching.block_hashes import path_hashes
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import (
    BackendStatus,
    NotServingError,
    answer_within,
)
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.view import BackendView
from moepass.runtime.serving.router.routable import routable_request
from moepass.runtime.serving.router.router import ATTEMPTS
from moepass.runtime.serving.workers.frontend_limits import FrontendLimits
from moepass.runtime.serving.workers.remote_answers import answer_of, encode_asked

_VIEW_SECONDS = 1.0
_NOTHING = BackendStatus(state="starting", max_sequence_tokens=0, vocabulary_size=0)


class RayBackend:
    """Asks the replicas behind `handle`, whose router in this process is called `name`.

    `key` is that of the replicas' hashes of blocks.
    """

    def __init__(self, handle: Any, name: str, key: bytes, limits: FrontendLimits) -> None:
        self._handle, self._name, self._key, self._limits = handle, name, key, limits
        self._open_bytes = 0
        self._numbers = itertools.count()
        self._last_status = _NOTHING

    def check_room(self) -> None:
        """As `Backend.check_room`."""
        router = live_router(self._name)
        state = self.status().state
        if router is None or state != "ready":
            raise NotServingError(f"no request is taken now: {state}", value=state)
        facts = [replica.replica_metadata for replica in router.replicas_by_name().values()]
        seconds = router.routing.waiting_flops / (sum(one["flops_per_second"] for one in facts) or math.inf)
        self._limits.check(seconds, self._open_bytes)

    async def answer(
        self, request: Request, *, priority: int = 0, timeout_seconds: float, is_admitted: bool = False
    ) -> Answer:
        """As `Backend.answer`. A request whose replica dies is sent to another one, once."""
        if not is_admitted:
            self.check_room()
        size = sum(piece.tokens.nbytes for piece in request.pieces)
        self._open_bytes += size
        try:
            return await answer_within(timeout_seconds, self._answer(request, priority, timeout_seconds))
        finally:
            self._open_bytes -= size

    def status(self) -> BackendStatus:
        """That of the replicas, their counts added up. It is as old as what they told last."""
        router = live_router(self._name)
        told = [_status(replica) for replica in router.replicas_by_name().values()] if router is not None else []
        if not told:
            is_new = self._last_status is _NOTHING
            return dataclasses.replace(self._last_status, state="starting" if is_new else "no rank")
        ready = [status for status in told if status.state == "ready"]
        shown = (ready or told)[0]
        metrics: collections.Counter[str] = collections.Counter()
        for status in told:
            metrics.update(status.metrics)
        details = {**shown.details, "replicas": f"{len(ready)} of {len(told)} replicas on Ray are ready"}
        self._last_status = dataclasses.replace(shown, details=details, metrics=dict(metrics))
        return self._last_status

    async def view(self) -> BackendView:
        """As `Backend.view`, with the ranks of all replicas. Histograms of times are left to Ray's own metrics."""
        router = live_router(self._name)
        names = list(router.replicas_by_name()) if router is not None else []
        seen = await asyncio.gather(*(self._view_of(name) for name in names))
        ranks = itertools.chain.from_iterable(view.ranks for view in seen)
        return BackendView(
            tuple(dataclasses.replace(rank, rank=number) for number, rank in enumerate(ranks)),
            sum(view.waiting for view in seen),
            sum(view.running for view in seen),
        )

    async def started(self) -> None:
        """Waits until a replica is there and this process knows it. Without a first call Ray looks for none."""
        await self._call("view", routing=None)

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
            asked = encode_asked(request, priority, max(0.001, deadline - time.monotonic()))
            try:
                return answer_of(await self._call("answer", asked, routing=routable))
            except NotServingError:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(TOLD_SECONDS)  # by then its replica has said that it has no ranks
            except RayActorError as error:
                if attempt == ATTEMPTS:
                    text = "the replicas that had the request were lost, twice"
                    raise NotServingError(text, value="replica lost") from error
        raise AssertionError("the last attempt returns or raises")

    async def _call(self, method: str, *given: Any, routing: object) -> bytes:
        # Calls of one HTTP request would all have its number. The router tells requests apart by it, so each call is
        # made as if for nobody.
        call = getattr(self._handle, method)
        response = contextvars.Context().run(call.remote, *given, routing=routing)
        try:
            found: bytes = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return found

    async def _view_of(self, name: str) -> BackendView:
        try:
            text = await asyncio.wait_for(self._call("view", routing=name), _VIEW_SECONDS)
        except (TimeoutError, RayActorError):
            return BackendView()
        return msgspec.json.decode(text, type=BackendView)


def _status(replica: Any) -> BackendStatus:
    return status_of(replica.routing_stats.get("status") or replica.replica_metadata["status"])
