"""Errors become responses in OpenAI's shape: one sentence that says what was wrong and what would be right.

`param` is a field of the body that the route takes, or a place within one (`questions[0].choices`), or null. What an
error's name says beyond that, as `items[3] with the query` does, is for its sentence.

Status codes: 400 for an input that cannot be answered, 401 for a wrong key, 404 for an unknown model or route, 408 for
a body that does not come, 413 for one beyond the limit, 429 with Retry-After where the queue is full, 503 with
Retry-After where nothing is answered now, and 504 for a request that was not answered in time.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Set

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.requests.backend import (
    AnswerTimeoutError,
    NotServingError,
    QueueFullError,
    SequenceTooLongError,
)

logger = logging.getLogger("moepass")

# Seconds until a client may try again while nothing is answered.
_RETRY_SECONDS = 1.0
_PLACE = re.compile(r"(\w+)(?:\.\w+|\[\d+\])*")


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class HttpError(MoepassError):
    """An error with a status of its own; `name` is the parameter that it is about."""

    def __init__(self, status: int, message: str, *, code: str | None = None, name: str | None = None) -> None:
        super().__init__(message, name=name)
        self.status = status
        self.code = code


class DecodingError(InputError):
    """More than one token is asked for, which would have to be decoded one by one."""


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = ErrorReply(ErrorBody(message, kind, param, code))
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def response_of(error: Exception, fields: Set[str] = frozenset()) -> Response:
    """The response to a request that ended with `error`; `fields` are those that its body may have."""
    match error:
        case HttpError():
            return error_response(error.status, _text(error), param=_param(error.name, fields), code=error.code)
        case QueueFullError():
            headers = _retry_after(error.retry_after_seconds)
            return error_response(429, _text(error), code="queue_full", headers=headers)
        case NotServingError():
            return error_response(503, _text(error), code="not_serving", headers=_retry_after(_RETRY_SECONDS))
        case AnswerTimeoutError():
            return error_response(504, _text(error), code="timeout")
        case SequenceTooLongError():
            return error_response(400, _text(error), code="context_length_exceeded")
        case InputError():
            return error_response(400, _text(error), param=_param(error.name, fields))
        case HTTPException():
            return error_response(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        case MoepassError() if error.path is None:
            logger.error("a request failed: %s", error)
            return error_response(500, _text(error))
    logger.error("a request failed", exc_info=error)
    return error_response(500, "the server failed to answer this request; its log says why")


def add_handlers(app: FastAPI) -> None:
    """Errors on purpose become responses in OpenAI's shape; others pass, so that they are logged."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            error = _no_route(request, error)
        return response_of(error, request.scope["moepass"].get("fields", frozenset()))

    for kind in (MoepassError, HTTPException):
        app.add_exception_handler(kind, handle)


def _no_route(request: Request, error: HTTPException) -> HTTPException:
    """The framework's own error, in words that say what would be right."""
    path = request.url.path[:200]
    if error.status_code == 404:
        words = f"there is no route {path!r}; GET /openapi.json has all routes"
    else:
        allowed = ", ".join(sorted(_methods(request)))  # the framework's own are those of one route of several
        words = f"{path} takes no {request.method}; it takes {allowed}"
        return HTTPException(error.status_code, words, {"Allow": allowed})
    return HTTPException(error.status_code, words, error.headers)


def _methods(request: Request) -> set[str]:
    """What the request's path takes."""
    routes = (route for route in request.app.routes if isinstance(route, Route) and route.path == request.url.path)
    return {method for route in routes for method in route.methods or ()}


def _param(name: str | None, fields: Set[str]) -> str | None:
    """The place in the body that `name` begins with, None where it begins with none."""
    found = _PLACE.match(name or "")
    return found[0] if found is not None and found[1] in fields else None


def _text(error: Exception) -> str:
    # A surrogate that came in must not break the response; nor must a name of a megabyte fill it.
    text = str(error).encode("utf-8", "replace").decode()
    return text if len(text) <= 2000 else text[:2000] + "…"


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
