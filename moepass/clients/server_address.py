"""The connection to a server: its URL, its key, timeouts, and errors in its responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx

from moepass.models.errors import InputError, OptionError
from moepass.models.limits import decode_json

_CONNECT_SECONDS = 10.0
_REASON_CHARACTERS = 300
_SHOWN_CHARACTERS = 60


def parse_server_url(text: str) -> str:
    """Return a server's URL without a slash or /v1 at its end, which routes contain.

    Raises OptionError if `text` is not the address of a server.
    """
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise OptionError.wrong("url", text[:200], f"such as http://127.0.0.1:8000 ({error})") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise OptionError.wrong("url", text[:200], "an address such as http://127.0.0.1:8000")
    return str(url).rstrip("/").removesuffix("/v1")


class HttpConnections(httpx.AsyncBaseTransport):
    """One connection for each open request, reused by later requests.

    httpx's own pool checks all of its connections for each request. With 64 connections that takes two thirds of a
    client's time.
    """

    def __init__(self) -> None:
        self._context = httpx.create_ssl_context(trust_env=False)
        self._free: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response after its whole body was read."""
        if not self._free:
            limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
            self._free.append(httpx.AsyncHTTPTransport(verify=self._context, trust_env=False, limits=limits))
        connection = self._free.pop()
        try:
            response = await connection.handle_async_request(request)
            await response.aread()
        except BaseException:
            await connection.aclose()
            raise
        self._free.append(connection)
        return response

    async def aclose(self) -> None:
        """Close the connections that no request uses."""
        for connection in self._free:
            await connection.aclose()
        self._free.clear()


def make_client(
    url: str, api_key: str | None, *, timeout_seconds: float | None, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """Return a client for `get` and `post` requests. `transport` carries them instead of connections to `url`.

    The client follows no redirects and ignores the proxies of the environment, so that only this server gets the key.
    """
    headers = {b"Content-Type": b"application/json"}
    if api_key is not None:
        headers[b"Authorization"] = f"Bearer {api_key}".encode()
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=httpx.Timeout(timeout_seconds, connect=_CONNECT_SECONDS, pool=None),
        transport=transport or HttpConnections(),
        trust_env=False,
    )


def body_of(response: httpx.Response) -> Any:
    """Return the JSON object or list of a response, the text of an event stream, or None for anything else."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return response.text
    try:
        body = decode_json(response.content)
    except InputError:
        return None
    return body if isinstance(body, (dict, list)) else None


def reason_of(response: httpx.Response) -> str:
    """Return the status and the message of an error response, in one line."""
    try:
        body = response.json()
        error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (json.JSONDecodeError, UnicodeDecodeError):
        text = f"not JSON: {response.text[:_SHOWN_CHARACTERS]!r}"
    return f"{response.status_code}: {' '.join(text.split())[:_REASON_CHARACTERS]}"


def retry_after(response: httpx.Response, most_seconds: float) -> float:
    """Return the seconds of the header Retry-After, between 0 and `most_seconds`, or 1 without a valid header."""
    try:
        seconds = float(response.headers.get("retry-after", "1"))
    except ValueError:  # a date
        seconds = 1.0
    return min(max(seconds, 0.0), most_seconds) if seconds == seconds else 1.0


async def run_all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of `work`. If one of them raises an error, cancel the others before it is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
