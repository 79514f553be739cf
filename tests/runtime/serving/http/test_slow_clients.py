"""Slow, absent and too many clients do not hold resources for long."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from moepass.cli.serving import open_socket
from moepass.models.limits import MOST_BODY_BYTES
from moepass.runtime.serving.http.draining_server import ConnectionLimits, DrainingServer, make_server
from tests.helpers.serving.served import Served

HEAD_SECONDS, READ_SECONDS = 0.3, 0.4
BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


def head(length: int, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {length}\r\n\r\n".encode()


@contextlib.contextmanager
def limited(chat: Served, limits: ConnectionLimits) -> Iterator[tuple[DrainingServer, tuple[str, int]]]:
    settings = dataclasses.replace(chat.service.settings, read_seconds=READ_SECONDS)
    server = make_server(dataclasses.replace(chat.service, settings=settings), limits=limits)
    with open_socket("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield server, listening.getsockname()[:2]
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def impatient_server(chat: Served) -> Iterator[tuple[DrainingServer, tuple[str, int]]]:
    with limited(chat, ConnectionLimits(head_seconds=HEAD_SECONDS, read_seconds=READ_SECONDS)) as running:
        yield running


@pytest.fixture
def impatient(impatient_server: tuple[DrainingServer, tuple[str, int]]) -> tuple[str, int]:
    return impatient_server[1]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address) as opened:
        opened.settimeout(20)
        yield opened


def answered(opened: socket.socket) -> int:
    """Read the next response completely, and return its status."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = opened.recv(1 << 16)
        assert chunk, f"closed behind {data!r}"
        data += chunk
    start, _, body = data.partition(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1]) for line in start.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += opened.recv(1 << 16)
    return int(start.split()[1])


def is_closed_while_it_trickles(opened: socket.socket, chunk: bytes) -> bool:
    """Return True if the server closes a connection on which the client sends a few bytes now and then."""
    end = time.monotonic() + 20
    opened.settimeout(0.02)
    while time.monotonic() < end:
        try:
            opened.send(chunk)
            if not opened.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("behind_an_answer", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_head_that_never_ends_is_cut_off(impatient: tuple[str, int], behind_an_answer: bool) -> None:
    with connected(impatient) as opened:
        if behind_an_answer:
            opened.sendall(head(len(BODY)) + BODY)
            assert answered(opened) == 200
        opened.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert is_closed_while_it_trickles(opened, b"X-More: more\r\n")


def test_a_client_that_says_nothing_is_cut_off(impatient: tuple[str, int]) -> None:
    with connected(impatient) as opened:
        assert opened.recv(1) == b""


# These responses exceed the socket buffers of both sides.
MANY_ANSWERS = 150


def ask_for_many(address: tuple[str, int]) -> socket.socket:
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    opened.settimeout(20)
    opened.connect(address)
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: here\r\n"
    opened.sendall((ask + b"\r\n") * (MANY_ANSWERS - 1) + ask + b"Connection: close\r\n\r\n")
    return opened


def test_a_client_that_reads_no_answer_is_cut_off(impatient_server: tuple[DrainingServer, tuple[str, int]]) -> None:
    server, address = impatient_server
    wait_until(lambda: not server.server_state.connections)
    with ask_for_many(address):
        wait_until(
            lambda: any(connection.transport.get_write_buffer_size() for connection in server.server_state.connections)
        )
        wait_until(lambda: not server.server_state.connections)
        assert not server.server_state.tasks


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_its_answers(chat: Served, impatient: tuple[str, int]) -> None:
    size = MANY_ANSWERS * len(chat.client.get("/openapi.json").content)
    with ask_for_many(impatient) as opened:
        responses = bytearray()
        while chunk := opened.recv(1 << 16):
            # Reading all responses takes twice as long as a single one may be left unread.
            time.sleep(2 * READ_SECONDS * len(chunk) / size)
            responses += chunk
    assert responses.count(b"HTTP/1.1 200 ") == MANY_ANSWERS


def test_a_connection_above_the_limit_is_refused(chat: Served) -> None:
    with contextlib.ExitStack() as opened, limited(chat, ConnectionLimits(most=2)) as (server, address):
        first, *later = [opened.enter_context(connected(address)) for _ in range(40)]
        for connection in later[1:]:  # in order of arrival
            answer = b"".join(iter(lambda connection=connection: connection.recv(1 << 16), b""))
            start, _, body = answer.partition(b"\r\n\r\n")
            assert start.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in start
            assert "2 connections are open" in json.loads(body)["error"]["message"]
        assert len(server.server_state.connections) == 2
        first.close()
        wait_until(lambda: len(server.server_state.connections) == 1)
        with connected(address) as next_one:
            for connection in (later[0], next_one):
                connection.sendall(head(len(BODY)) + BODY)
                assert answered(connection) == 200


def test_a_body_that_never_ends_is_an_error_and_frees_what_it_took(chat: Served, impatient: tuple[str, int]) -> None:
    with connected(impatient) as opened:
        opened.sendall(head(1000) + BODY)
        assert answered(opened) == 408
    assert chat.service.bodies.taken == 0


def test_a_body_that_is_declared_too_large_is_refused_unread(impatient: tuple[str, int]) -> None:
    with connected(impatient) as opened:
        opened.sendall(head(MOST_BODY_BYTES + 1) + BODY)
        assert answered(opened) == 413  # not 408 after the time to read a body


@pytest.mark.slow
def test_a_connection_that_is_used_stays_open(impatient: tuple[str, int]) -> None:
    with connected(impatient) as opened:
        end = time.monotonic() + 4 * HEAD_SECONDS
        while time.monotonic() < end:
            opened.sendall(head(len(BODY)) + BODY)
            assert answered(opened) == 200
            time.sleep(HEAD_SECONDS / 3)


def test_a_full_server_refuses_before_it_has_read_a_body(chat: Served, impatient: tuple[str, int]) -> None:
    chat.backend.is_full = True
    try:
        with connected(impatient) as opened:
            opened.sendall(head(len(BODY)))
            assert answered(opened) == 429
            opened.sendall(BODY)
            # The connection stays usable, and routes that do not ask the model are answered.
            text = json.dumps({"prompt": "a"}).encode()
            opened.sendall(head(len(text), "/tokenize") + text)
            assert answered(opened) == 200
            chat.backend.is_full = False
            opened.sendall(head(len(BODY)) + BODY)
            assert answered(opened) == 200
    finally:
        chat.backend.is_full = False


def test_a_call_of_many_requests_is_admitted_as_one(chat: Served) -> None:
    chat.backend.admitted.clear()
    chat.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1})
    chat.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    assert chat.backend.admitted == [True, True, True, False]
