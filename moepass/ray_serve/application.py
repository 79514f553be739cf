"""The application: the HTTP server of `moepass serve` with a router for replicas, which are actors of Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
import tempfile
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from moepass.cli.rank_frontend import RANKS_END_SECONDS, make_frontend
from moepass.cli.serve_options import RankSetup
from moepass.cli.serving import read_model
from moepass.ray_serve.ray_backend import REPORT_SECONDS, RayBackend
from moepass.ray_serve.ray_options import RayOptions, parse_options
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.http.app import create_app
from moepass.runtime.serving.requests.backend import FrontendLimits
from moepass.runtime.serving.routes.server_settings import ServerSettings
from moepass.runtime.serving.routes.service import Service
from moepass.runtime.serving.workers.frontend import STEPS_AT_A_RANK
from moepass.runtime.serving.workers.remote_answers import answer_encoded_request

# The router limits a replica to two steps of FLOPs, so Ray's own limit, which counts requests, must never apply.
_MOST_REQUESTS = 100_000
# A log line for each request would cost more than the request.
_LOGGING = {"enable_access_log": False}
# The most cached blocks in a report: 128 KiB.
_MOST_REPORTED_BLOCKS = 8192


class Replica:
    """The actor that Ray runs. Its ranks are ready when its constructor returns.

    `setup_message` is a `RankSetup` as JSON. A request fails after `timeout_seconds`.
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
            "status": msgspec.json.encode(self._frontend.status()).decode(),
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the state of this replica and its cached blocks, which Ray passes to routers periodically."""
        status = self._frontend.status()
        held = b"".join(self._frontend.held_blocks(_MOST_REPORTED_BLOCKS))
        report = next(self._reports)
        return {"report": report, "blocks": held, "state": status.state, "status": msgspec.json.encode(status).decode()}

    async def __del__(self) -> None:  # Ray awaits it if the replica ends normally
        await self._frontend.close(RANKS_END_SECONDS)
        self._folder.cleanup()


class HttpFrontend:
    """A process that receives the HTTP requests of all routes."""

    async def __init__(self, replicas: Any, name: str, setup_message: bytes, options: RayOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        setup, frontend = msgspec.json.decode(setup_message, type=RankSetup), options.frontend
        limits = FrontendLimits(frontend.queue_seconds, frontend.open_bytes)
        self._backend = RayBackend(replicas, name, bytes.fromhex(setup.key), limits)
        settings = ServerSettings(options.names, frontend.api_key, frontend.timeout)
        self._service = Service(self._backend, read_model(setup.model)[0], settings)
        self._starting = asyncio.create_task(self._backend.started())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service)


def application(values: Mapping[str, Any]) -> Any:
    """Return the application with the options `values`. Raises OptionError for wrong options."""
    options = parse_options(values)
    frontend_options = options.frontend
    # All replicas and their routers must compute the same hashes of blocks.
    key, name = secrets.token_bytes(32), secrets.token_hex(8)
    setup_message = msgspec.json.encode(options.rank_setup(key))
    router = RequestRouterConfig(
        request_router_class="moepass.ray_serve.request_router.PrefixRequestRouter",
        request_router_kwargs={"model": options.application.model, "name": name},
        request_routing_stats_period_s=REPORT_SECONDS,
    )
    replicas = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=options.application.replicas,
        max_ongoing_requests=_MOST_REQUESTS,
        ray_actor_options=options.actor_resources,
        graceful_shutdown_timeout_s=frontend_options.drain,
        request_router_config=router,
        logging_config=_LOGGING,
    )
    frontend = serve.deployment(
        serve.ingress()(HttpFrontend),
        name="Frontend",
        max_ongoing_requests=_MOST_REQUESTS,
        num_replicas=options.application.frontends,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=frontend_options.drain,
    )
    return frontend.bind(replicas.bind(setup_message, frontend_options.timeout), name, setup_message, options)
