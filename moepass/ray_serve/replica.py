"""A replica: a frontend and its ranks in an actor of Ray, asked in bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from typing import Any

import msgspec

from moepass.cli.rank_frontend import RANKS_END_SECONDS, make_frontend
from moepass.cli.rank_options import RankSetup
from moepass.cli.serving import read_model
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.requests.backend import BackendStatus
from moepass.runtime.serving.workers.frontend import STEPS_AT_A_RANK
from moepass.runtime.serving.workers.frontend_limits import FrontendLimits
from moepass.runtime.serving.workers.remote_answers import answer_asked

# A replica says how it is, and what it holds, so often.
TOLD_SECONDS = 1.0
# Of its cache, it tells so many blocks at most: 128 KiB each time.
_MOST_TOLD_BLOCKS = 8192


class Replica:
    """What Ray runs. Its ranks are ready when it is made."""

    async def __init__(self, setup_message: bytes, timeout_seconds: float) -> None:  # type: ignore[misc]  # Ray awaits it
        setup = msgspec.json.decode(setup_message, type=RankSetup)
        self._folder = tempfile.TemporaryDirectory(prefix="moepass-")
        formula = FlopsTable(read_model(setup.model)[1])
        limits = FrontendLimits()  # what waits, waits in the application before it
        self._frontend = make_frontend(setup, self._folder.name, limits, formula, timeout_seconds=timeout_seconds)
        try:
            await self._frontend.start()
        except BaseException:
            await self._frontend.close(0.0)
            raise
        self._facts = self._frontend.engine_facts()
        self._reports = itertools.count()

    async def answer(self, asked: bytes, routing: object = None) -> bytes:
        """The answer to a request; `routing` is for the router."""
        return await answer_asked(self._frontend, asked)

    async def view(self, routing: object = None) -> bytes:
        """A BackendView, but for its histograms."""
        view = await self._frontend.view()
        return msgspec.json.encode(dataclasses.replace(view, histograms={}))

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers must know of it, once."""
        return {
            "saturation_flops": STEPS_AT_A_RANK * sum(one.saturation_flops for one in self._facts),
            "flops_per_second": sum(one.flops_per_second for one in self._facts),
            "status": status_text(self._frontend.status()),
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers are told from time to time."""
        status = self._frontend.status()
        held = b"".join(self._frontend.held_blocks(_MOST_TOLD_BLOCKS))
        report = next(self._reports)
        return {"report": report, "blocks": held, "state": status.state, "status": status_text(status)}

    async def __del__(self) -> None:  # Ray awaits it where the replica ends in order
        await self._frontend.close(RANKS_END_SECONDS)
        self._folder.cleanup()


def status_text(status: BackendStatus) -> str:
    return msgspec.json.encode(status).decode()


@functools.lru_cache(maxsize=1024)  # of each replica, the last one is asked for with every request
def status_of(text: str) -> BackendStatus:
    return msgspec.json.decode(text, type=BackendStatus)
