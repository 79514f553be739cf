"""The application: all routes, with authentication, timing headers, and an OpenAPI document."""

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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepass.models.limits import MOST_BODY_BYTES
from moepass.models.version import __version__
from moepass.runtime.serving.http import server_routes
from moepass.runtime.serving.http.tracing import TracingMiddleware, configured_tracer
from moepass.runtime.serving.requests.backend import Backend
from moepass.runtime.serving.routes import token_routes
from moepass.runtime.serving.routes.errors import (
    ErrorReply,
    HttpError,
    error_response,
    framework_error_response,
    response_of,
)
from moepass.runtime.serving.routes.service import Call, Route, Service, json_response, new_id

ROUTES = (*server_routes.MODEL_ROUTES, *token_routes.ROUTES, *server_routes.ROUTES)
# These paths need no API key, except for requests to the model. The status page is public; it asks for the key that its
# own requests need.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# nginx's status for a client that closed the connection. Only logs and traces show it.
_CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service) -> FastAPI:
    """Return the application of `service`. Its requests are traced if the process or its environment enables that."""
    app = FastAPI(title="moepass", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    schemas, components = _schemas()
    for route in ROUTES:
        endpoint = _endpoint(route, service)
        if route.method == "GET":  # load balancers probe with HEAD; uvicorn omits the body
            app.add_api_route(route.path, endpoint, methods=["HEAD"], include_in_schema=False)
        app.add_api_route(
            route.path,
            endpoint,
            methods=[route.method],
            operation_id=route.method.lower() + re.sub(r"\W+", "_", route.path),
            response_class=Response,
            openapi_extra=_description(route, schemas),
        )
    app.add_exception_handler(HTTPException, framework_error_response)
    model_paths = frozenset(route.path for route in ROUTES if route.bodies and route.asks_model)
    app.add_middleware(
        _RequestGuard, api_key=service.settings.api_key, backend=service.backend, model_paths=model_paths
    )
    tracer = configured_tracer(os.environ)
    if tracer is not None:
        app.add_middleware(TracingMiddleware, tracer=tracer)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        document.setdefault("components", {})["schemas"] = components
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this assignment
    return app


def _endpoint(route: Route, service: Service) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(request: HttpRequest) -> Response:
        request.scope["moepass"]["fields"] = route.fields
        chunks: list[bytes] = []
        try:
            if route.bodies:
                await _read_body(request, chunks, service)
            call = Call(service, b"".join(chunks), request.scope["moepass"]["id"], request.path_params)
            return await _run_handler(request, call, route)
        finally:
            service.bodies.taken -= sum(map(len, chunks))

    return endpoint


async def _run_handler(request: HttpRequest, call: Call, route: Route) -> Response:
    request.scope["moepass"]["call"] = call
    work = asyncio.ensure_future(route.handler(call))
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return error_response(_CLIENT_CLOSED_REQUEST, "the client has closed the connection")
        result = work.result()
        return result if isinstance(result, Response) else json_response(result)
    finally:
        # Cancelling the handler also cancels its requests in the backend.
        for task in (work, disconnect):
            task.cancel()
        await asyncio.gather(work, disconnect, return_exceptions=True)


async def _read_body(request: HttpRequest, chunks: list[bytes], service: Service) -> None:
    """Append the body to `chunks`, and count the bytes against the body budget of `service`.

    Raises HttpError if the body is compressed (415), too large (413) or too slow (408), or the client left (499), and
    QueueFullError if bodies of all clients together would exceed the budget.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HttpError(415, f"the body has the content encoding {encoding[:40]!r}; send it uncompressed")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        _check_size(int(declared), f"{int(declared)} bytes")
    seconds = service.settings.read_seconds
    try:
        await asyncio.wait_for(_read_chunks(request, chunks, service), seconds)
    except TimeoutError:
        raise HttpError(
            408,
            f"only {sum(map(len, chunks))} bytes of the body arrived within {seconds:g} seconds; send it faster, or in "
            "smaller requests",
        ) from None
    except ClientDisconnect as error:
        raise HttpError(_CLIENT_CLOSED_REQUEST, "the client has closed the connection") from error


async def _read_chunks(request: HttpRequest, chunks: list[bytes], service: Service) -> None:
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        _check_size(size, f"{size} bytes or more")
        service.bodies.take(len(chunk))
        chunks.append(chunk)


def _check_size(size: int, description: str) -> None:
    if size > MOST_BODY_BYTES:
        problem = f"the body has {description}, but the limit is {MOST_BODY_BYTES} bytes; send several requests"
        raise HttpError(413, problem, code="body_too_large")


async def _wait_for_disconnect(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _RequestGuard:
    """Middleware that gives every request an id and timing headers, checks its API key, and reports errors."""

    def __init__(self, app: ASGIApp, api_key: str | None, backend: Backend, model_paths: frozenset[str]) -> None:
        self.app, self._backend, self._model_paths = app, backend, model_paths
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        request_headers = dict(scope["headers"])
        client_id = request_headers.get(b"x-request-id", b"").decode("latin-1")
        state: dict[str, Any] = {"id": client_id if _REQUEST_ID.fullmatch(client_id) else new_id("req")}
        scope["moepass"] = state

        async def send_timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["has_started"] = True
                headers = MutableHeaders(scope=message)
                total = (time.monotonic() - started) * 1000
                call: Call | None = state.get("call")
                # The client of the System One API reads its own header.
                headers["x-request-id"] = headers["x-typesafe-request-id"] = state["id"]
                headers["openai-processing-ms"] = str(round(total))
                headers["server-timing"] = f"total;dur={total:.1f}{'' if call is None else _timing_metrics(call)}"
            await send(message)

        asks_model = scope["path"] in self._model_paths and scope["method"] == "POST"
        is_open = scope["path"] in OPEN_PATHS and not asks_model
        if not is_open and not self._has_valid_key(request_headers.get(b"authorization", b"")):
            refusal = error_response(
                401,
                "the API key is missing or wrong; send it as the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send_timed)
            return
        try:
            if asks_model:
                # A full queue refuses the request before its body is read, so that a refusal is cheap.
                self._backend.check_room()
            await self.app(scope, receive, send_timed)
        except Exception as error:
            if "has_started" in state:  # it is too late to send another response
                raise
            await response_of(error, state.get("fields", frozenset()))(scope, receive, send_timed)
        except asyncio.CancelledError:
            # The server shuts down, and its time to drain is over.
            if "has_started" in state:
                raise
            refusal = error_response(
                503, "the server has ended before it could answer; send the request again", headers={"Retry-After": "1"}
            )
            await refusal(scope, receive, send_timed)

    def _has_valid_key(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        # A comparison in constant time does not leak how many bytes of a guess are right.
        return self._key is None or (scheme.lower() == b"bearer" and hmac.compare_digest(key.lstrip(b" "), self._key))


def _timing_metrics(call: Call) -> str:
    """Return the Server-Timing metrics of a call in milliseconds: backend, and its queue and compute time."""
    text = f", backend;dur={1000 * call.backend_seconds:.1f}"
    all_times = [answered.times for answered in call.answered if answered.times is not None]
    if all_times:
        # The requests of one call run in parallel.
        queue = max(times.queue_seconds for times in all_times)
        compute = max(times.compute_seconds for times in all_times)
        text += f", queue;dur={1000 * queue:.1f}, compute;dur={1000 * compute:.1f}"
    return text


def _schemas() -> tuple[dict[Any, Any], dict[str, Any]]:
    kinds = list(dict.fromkeys([ErrorReply, *(kind for route in ROUTES for kind in (*route.bodies, *route.replies))]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, schemas, strict=True)), components


def _description(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    def content(kinds: tuple[Any, ...], media_type: str = "application/json") -> dict[str, Any]:
        schema = schemas[kinds[0]] if len(kinds) == 1 else {"anyOf": [schemas[kind] for kind in kinds]}
        return {media_type: {"schema": schema}}

    streams = {"text/event-stream": {"schema": {"type": "string"}}} if route.has_streams else {}
    answer = {"description": "The answer", "content": content(route.replies, route.media_type) | streams}
    error = {"description": "An error", "content": content((ErrorReply,))}
    body = {"requestBody": {"required": True, "content": content(route.bodies)}} if route.bodies else {}
    variables = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)", route.path)
    ]
    return {"responses": {"200": answer, "default": error}, "parameters": variables, **body}
