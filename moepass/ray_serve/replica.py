"""A replica: a frontend and its ranks in an actor of Ray, called with bytes."""

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
from moepass.runtime.serving.requests.backend import BackendStatus, FrontendLimits
from moepass.runtime.serving.workers.frontend import STEPS_AT_A_RANK
from moepass.runtime.serving.workers.remote_answers import answer_encoded_request

# The interval of a replica's reports to routers.
REPORT_SECONDS = 1.0
# The most cached blocks in a report: 128 KiB.
_MOST_REPORTED_BLOCKS = 8192


class Replica:
    """The actor that Ray runs. Its ranks are ready when its constructor returns.

    Args:
        setup_message: a `RankSetup` as JSON.
        timeout_seconds: the time after which a request is given up.
    """

    async def __init__(self, setup_message: bytes, timeout_seconds: float) -> None:  # type: ignore[misc]  # Ray awaits it
        setup = msgspec.json.decode(setup_message, type=RankSetup)
        self._folder = tempfile.TemporaryDirectory(prefix="moepass-")
        formula = FlopsTable(read_model(setup.model)[1])
        limits = FrontendLimits()  # requests wait in the application instead
        self._frontend = make_frontend(setup, self._folder.name, limits, formula, timeout_seconds=timeout_seconds)
        try:
            await self._frontend.start()
        except BaseException:
            await self._frontend.close(0.0)
            raise
        self._facts = self._frontend.engine_facts()
        self._reports = itertools.count()

    async def answer(self, asked: bytes, routing: object = None) -> bytes:
        """Return the encoded answer to an encoded request. The router reads `routing`."""
        return await answer_encoded_request(self._frontend, asked)

    async def view(self, routing: object = None) -> bytes:
        """Return a BackendView without its histograms, as JSON."""
        view = await self._frontend.view()
        return msgspec.json.encode(dataclasses.replace(view, histograms={}))

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the facts about this replica that do not change, for routers."""
        return {
            "saturation_flops": STEPS_AT_A_RANK * sum(rank.saturation_flops for rank in self._facts),
            "flops_per_second": sum(rank.flops_per_second for rank in self._facts),
            "status": status_text(self._frontend.status()),
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the state of this replica and its cached blocks, which Ray passes to routers periodically."""
        status = self._frontend.status()
        held = b"".join(self._frontend.held_blocks(_MOST_REPORTED_BLOCKS))
        report = next(self._reports)
        return {"report": report, "blocks": held, "state": status.state, "status": status_text(status)}

    async def __del__(self) -> None:  # Ray awaits it if the replica ends normally
        await self._frontend.close(RANKS_END_SECONDS)
        self._folder.cleanup()


def status_text(status: BackendStatus) -> str:
    """Return a status as JSON text."""
    return msgspec.json.encode(status).decode()


@functools.lru_cache(maxsize=1024)  # every request reads the last one of each replica
def status_of(text: str) -> BackendStatus:
    """Return the status in a JSON text."""
    return msgspec.json.decode(text, type=BackendStatus)
