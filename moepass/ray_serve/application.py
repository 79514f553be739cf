"""The application: replicas, and in front of them the HTTP server of `moepass serve` with a router for replicas."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from moepass.cli.rank_options import RankSetup
from moepass.cli.serving import read_model
from moepass.ray_serve.ray_backend import RayBackend
from moepass.ray_serve.ray_options import parse_options
from moepass.ray_serve.replica import REPORT_SECONDS, Replica
from moepass.runtime.serving.http.app import create_app
from moepass.runtime.serving.requests.backend import FrontendLimits
from moepass.runtime.serving.routes.server_settings import ServerSettings
from moepass.runtime.serving.routes.service import Service

# The router limits a replica to two steps of FLOPs, so Ray's own limit, which counts requests, must never apply.
_MOST_REQUESTS = 100_000
# A log line for each request would cost more than the request.
_LOGGING = {"enable_access_log": False}


class HttpFrontend:
    """A process that receives the HTTP requests of all routes."""

    async def __init__(self, replicas: Any, name: str, setup_message: bytes, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        setup = msgspec.json.decode(setup_message, type=RankSetup)
        limits = FrontendLimits(settings.pop("waiting_seconds"), settings.pop("open_bytes"))
        self._backend = RayBackend(replicas, name, bytes.fromhex(setup.key), limits)
        self._service = Service(self._backend, read_model(setup.model)[0], ServerSettings(**settings))
        self._starting = asyncio.create_task(self._backend.started())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service)


def application(values: Mapping[str, Any]) -> Any:
    """Return the application with the options `values`. Raises OptionError for wrong ones."""
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
    settings = {
        "model_names": options.names,
        "api_key": frontend_options.api_key,
        "timeout_seconds": frontend_options.timeout,
        "waiting_seconds": frontend_options.queue_seconds,
        "open_bytes": frontend_options.open_bytes,
    }
    frontend = serve.deployment(
        serve.ingress()(HttpFrontend),
        name="Frontend",
        max_ongoing_requests=_MOST_REQUESTS,
        num_replicas=options.application.frontends,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=frontend_options.drain,
    )
    return frontend.bind(replicas.bind(setup_message, frontend_options.timeout), name, setup_message, settings)
