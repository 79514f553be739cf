"""Errors as responses in OpenAI's format; the message names the problem and the supported values.

`param` is a field of the route's body, or a path within one (`questions[0].choices`), or null. An error's name may
continue after the path, such as `items[3] with the query`; only the path becomes `param`.

Status codes: 400 for an input that cannot be answered, 401 for a wrong key, 404 for an unknown model or route, 408 for
a body that arrives too slowly, 413 for one that is too large, 429 with Retry-After if the queue is full, 503 with
Retry-After while the server takes no requests, and 504 for a request that was not answered in time.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Set

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.requests import backend

logger = logging.getLogger("moepass")

# The start of an error's name that locates a field, such as `questions[0].choices`.
_FIELD = re.compile(r"(\w+)(?:\.\w+|\[\d+\])*")


class ErrorBody(msgspec.Struct):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """The body of every error response."""

    error: ErrorBody


class HttpError(MoepassError):
    """An error with an explicit HTTP status; `name` is the parameter at fault."""

    def __init__(self, status: int, message: str, *, code: str | None = None, name: str | None = None) -> None:
        super().__init__(message, name=name)
        self.status = status
        self.code = code


class DecodingError(InputError):
    """More than one token is requested, which would require decoding."""


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return an error response; its `type` follows from the status."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = ErrorReply(ErrorBody(message, kind, param, code))
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def response_of(error: Exception, fields: Set[str] = frozenset()) -> Response:
    """Return the response to a request that failed with `error`; `fields` are the fields of the route's bodies."""
    match error:
        case HttpError():
            return error_response(error.status, _text(error), param=_param(error.name, fields), code=error.code)
        case backend.QueueFullError():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_seconds)))}
            return error_response(429, _text(error), code="queue_full", headers=headers)
        case backend.NotServingError():
            return error_response(503, _text(error), code="not_serving", headers={"Retry-After": "1"})
        case backend.AnswerTimeoutError():
            return error_response(504, _text(error), code="timeout")
        case InputError():
            code = "context_length_exceeded" if isinstance(error, backend.SequenceTooLongError) else None
            return error_response(400, _text(error), param=_param(error.name, fields), code=code)
        case MoepassError() if error.path is None:
            logger.error("a request failed: %s", error)
            return error_response(500, _text(error))
    logger.error("a request failed", exc_info=error)
    return error_response(500, "the server failed to answer this request; the server's log has the reason")


async def framework_error_response(request: Request, error: Exception) -> Response:
    """Return the response to an error of the framework; for 404 and 405 it lists the supported routes or methods."""
    assert isinstance(error, HTTPException)
    path, message, headers = request.url.path, str(error.detail), dict(error.headers or {})
    if error.status_code == 404:
        message = f"there is no route {path[:200]!r}; GET /openapi.json lists all routes"
    elif error.status_code == 405:  # the framework's error has the methods of one route only
        routes = (route for route in request.app.routes if isinstance(route, Route) and route.path == path)
        allowed = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
        message, headers = f"{path[:200]} does not support {request.method}; it supports {allowed}", {"Allow": allowed}
    return error_response(error.status_code, message, headers=headers)


def _param(name: str | None, fields: Set[str]) -> str | None:
    """Return the path in the body at the start of `name`, or None."""
    match = _FIELD.match(name or "")
    return match[0] if match is not None and match[1] in fields else None


def _text(error: Exception) -> str:
    # Surrogates of the input cannot be encoded, and a long name of the input would make a long message.
    text = str(error).encode("utf-8", "replace").decode()
    return text if len(text) <= 2000 else text[:2000] + "…"
