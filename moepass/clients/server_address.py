"""Where a server is, and how it is spoken to: its URL, its key, its connections, how long it is waited for."""

from __future__ import annotations

import json
from typing import Any

import httpx

from moepass.models.errors import InputError, OptionError
from moepass.models.limits import decode_json

_CONNECT_SECONDS = 10.0
_REASON_CHARACTERS = 300
_SHOWN_CHARACTERS = 60


def parse_server_url(text: str) -> str:
    """`text` without a slash or /v1 at its end: routes have that themselves. Raises OptionError."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise OptionError.wrong("url", text[:200], f"such as http://127.0.0.1:8000 ({error})") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise OptionError.wrong("url", text[:200], "an address such as http://127.0.0.1:8000")
    return str(url).rstrip("/").removesuffix("/v1")


class HttpConnections(httpx.AsyncBaseTransport):
    """A connection for each request that is open, kept for later ones.

    httpx's own pool looks at all of its connections for each request: with 64 that is two thirds of a client's time.
    """

    def __init__(self) -> None:
        self._context = httpx.create_ssl_context(trust_env=False)
        self._free: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The response, which has been read as a whole."""
        connection = self._free.pop() if self._free else self._new()
        try:
            response = await connection.handle_async_request(request)
            await response.aread()
        except BaseException:
            await connection.aclose()
            raise
        self._free.append(connection)
        return response

    async def aclose(self) -> None:
        for connection in self._free:
            await connection.aclose()
        self._free.clear()

    def _new(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(
            verify=self._context, trust_env=False, limits=httpx.Limits(max_connections=1, max_keepalive_connections=1)
        )


def make_client(
    url: str, api_key: str | None, *, timeout_seconds: float | None, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """A client of the server at `url`, or of what `transport` leads to, to be used with plain `get` and `post`.

    It follows no redirects and asks no proxy of the environment, so that the key goes to this server alone.
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
    """An object or a list of JSON, or the text of events; None where it is neither: a page for people, say."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return response.text
    try:
        body = decode_json(response.content)
    except InputError:
        return None
    return body if isinstance(body, (dict, list)) else None


def reason_of(response: httpx.Response) -> str:
    """What an answer that is an error says, in a line."""
    try:
        found = response.json()
        error = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (json.JSONDecodeError, UnicodeDecodeError):
        text = f"no JSON, but {response.text[:_SHOWN_CHARACTERS]!r}"
    return f"{response.status_code}: {' '.join(text.split())[:_REASON_CHARACTERS]}"


def retry_after(response: httpx.Response, most_seconds: float) -> float:
    """The seconds of the header Retry-After, within 0 to `most_seconds`; 1 where it has none."""
    try:
        seconds = float(response.headers.get("retry-after", "1"))
    except ValueError:  # a date
        seconds = 1.0
    return min(max(seconds, 0.0), most_seconds) if seconds == seconds else 1.0
