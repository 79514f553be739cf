"""The application: every route of every family, guarded, timed, and described by an OpenAPI document."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepass.models.limits import MOST_BODY_BYTES
from moepass.models.version import __version__
from moepass.runtime.serving.http import looking, server_routes
from moepass.runtime.serving.http.tracing import TracingMiddleware, configured_tracer
from moepass.runtime.serving.requests.backend import Backend
from moepass.runtime.serving.routes import (
    chat,
    completions,
    decisions,
    rerank,
    scores,
    systemone,
    token_routes,
    vectors,
)
from moepass.runtime.serving.routes.errors import ErrorReply, HttpError, add_handlers, error_response, response_of
from moepass.runtime.serving.routes.service import Call, Route, Service, new_id, reply

ROUTES: tuple[Route, ...] = tuple(
    route
    for family in (
        decisions,
        systemone,
        scores,
        completions,
        chat,
        token_routes,
        vectors,
        rerank,
        server_routes,
        looking,
    )
    for route in family.ROUTES
)
# What is answered without a key. The page is the same for everyone, and asks for the key that its own calls need.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Nobody is left to read it, but the log is.
_CLIENT_GONE = 499


def create_app(service: Service) -> FastAPI:
    """The application that answers with `service`; it is traced where the process or its environment asks for that."""
    app = FastAPI(title="moepass", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for route in ROUTES:
        if route.method == "GET":  # load balancers ask with HEAD; uvicorn leaves the body out
            app.add_api_route(route.path, _endpoint(route, service), methods=["HEAD"], include_in_schema=False)
        app.add_api_route(
            route.path,
            _endpoint(route, service),
            methods=[route.method],
            operation_id=f"{route.method.lower()}{route.path.replace('/', '_')}",
            response_class=Response,
            openapi_extra=_description(route),
        )
    add_handlers(app)
    asking = frozenset(route.path for route in ROUTES if route.bodies and route.asks_model)
    app.add_middleware(_Guard, api_key=service.settings.api_key, backend=service.backend, asking=asking)
    tracer = configured_tracer(os.environ)
    if tracer is not None:
        app.add_middleware(TracingMiddleware, tracer=tracer)
    describe = app.openapi
    _, schemas = _schemas()

    def openapi() -> dict[str, Any]:
        document = describe()
        document.setdefault("components", {})["schemas"] = schemas
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents
    return app


def _endpoint(route: Route, service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(request: HttpRequest) -> Response:
        request.scope["moepass"]["fields"] = route.fields
        parts: list[bytes] = []
        try:
            if route.bodies:
                await _read(request, parts, service)
            return await _answer(request, Call(service, b"".join(parts), request.scope["moepass"]["id"]), route)
        finally:
            service.bodies.taken -= sum(map(len, parts))

    return endpoint


async def _answer(request: HttpRequest, call: Call, route: Route) -> Response:
    request.scope["moepass"]["call"] = call
    work = asyncio.ensure_future(route.handler(call))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return error_response(_CLIENT_GONE, "the client has closed the connection")
        found = work.result()
        return found if isinstance(found, Response) else reply(found)
    finally:
        # A cancelled call frees its place in the backend.
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _read(request: HttpRequest, parts: list[bytes], service: Service) -> None:
    """Append the body to `parts`, each of which has been taken from the budget of the service."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HttpError(415, f"the body has the content encoding {encoding[:40]!r}; send it as it is")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        _check_size(int(declared), f"{int(declared)} bytes")
    seconds = service.settings.read_seconds
    try:
        await asyncio.wait_for(_read_parts(request, parts, service), seconds)
    except TimeoutError:
        raise HttpError(
            408, f"the body has not come within {seconds:g} seconds; {sum(map(len, parts))} bytes of it have"
        ) from None
    except ClientDisconnect as error:
        raise HttpError(_CLIENT_GONE, "the client has closed the connection") from error


async def _read_parts(request: HttpRequest, parts: list[bytes], service: Service) -> None:
    size = 0
    async for part in request.stream():
        size += len(part)
        _check_size(size, f"{size} bytes or more")
        service.bodies.take(len(part))
        parts.append(part)


def _check_size(size: int, words: str) -> None:
    if size > MOST_BODY_BYTES:
        raise HttpError(413, f"the body has {words}; the limit is {MOST_BODY_BYTES}", code="body_too_large")


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Guard:
    """Names, times and lets in every request."""

    def __init__(self, app: ASGIApp, api_key: str | None, backend: Backend, asking: frozenset[str]) -> None:
        self.app, self._backend, self._asking = app, backend, asking
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        given = dict(scope["headers"])
        wanted = given.get(b"x-request-id", b"").decode("latin-1")
        state: dict[str, Any] = {"id": wanted if _REQUEST_ID.fullmatch(wanted) else new_id("req")}
        scope["moepass"] = state

        async def send_timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["answered"] = True
                headers = MutableHeaders(scope=message)
                total = (time.monotonic() - started) * 1000
                call: Call | None = state.get("call")
                headers["x-request-id"] = state["id"]
                headers["openai-processing-ms"] = str(round(total))
                headers["server-timing"] = f"total;dur={total:.1f}{'' if call is None else _parts_of(call)}"
            await send(message)

        if scope["path"] not in OPEN_PATHS and not self._is_let_in(given.get(b"authorization", b"")):
            refusal = error_response(
                401,
                "the API key is missing or wrong; send it as the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send_timed)
            return
        try:
            if scope["path"] in self._asking and scope["method"] == "POST":
                # Before anything of the request is read: a refusal costs little, however large what is refused.
                self._backend.check_room()
            await self.app(scope, receive, send_timed)
        except Exception as error:
            if "answered" in state:  # too late for another answer
                raise
            await response_of(error, state.get("fields", frozenset()))(scope, receive, send_timed)
        except asyncio.CancelledError:
            # The server ends, and has waited for what is open as long as it was told to.
            if "answered" in state:
                raise
            refusal = error_response(503, "the server has ended before this was answered", headers={"Retry-After": "1"})
            await refusal(scope, receive, send_timed)

    def _is_let_in(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        # Compared in constant time, so that nobody learns the key byte by byte.
        return self._key is None or (scheme.lower() == b"bearer" and hmac.compare_digest(key.lstrip(b" "), self._key))


def _parts_of(call: Call) -> str:
    """What a call waited for, in milliseconds: the backend, and of that the queue and the computation."""
    parts = [f", backend;dur={1000 * call.backend_seconds:.1f}"]
    found = [answered.times for answered in call.answered if answered.times is not None]
    if found:
        # Requests of one call run side by side.
        queue = max(times.queue_seconds for times in found)
        compute = max(times.compute_seconds for times in found)
        parts.append(f", queue;dur={1000 * queue:.1f}, compute;dur={1000 * compute:.1f}")
    return "".join(parts)


def _schemas() -> tuple[dict[Any, Any], dict[str, Any]]:
    kinds = list(dict.fromkeys([ErrorReply, *(kind for route in ROUTES for kind in (*route.bodies, *route.replies))]))
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, found, strict=True)), components


def _description(route: Route) -> dict[str, Any]:
    schemas, _ = _schemas()

    def content(kinds: tuple[Any, ...]) -> dict[str, Any]:
        schema = schemas[kinds[0]] if len(kinds) == 1 else {"anyOf": [schemas[kind] for kind in kinds]}
        return {"application/json": {"schema": schema}}

    answers = {route.media_type: content(route.replies)["application/json"]}
    if route.has_streams:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer", "content": answers},
            "default": {"description": "An error", "content": content((ErrorReply,))},
        }
    }
    if route.bodies:
        described["requestBody"] = {"required": True, "content": content(route.bodies)}
    return described
