"""Clients that are slow, or gone, or too many: they hold nothing for long, and cost little."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from served import Served

from moepass.models.limits import MOST_BODY_BYTES
from moepass.runtime.serving.http.listen import open_socket, server_of

HEAD_SECONDS, READ_SECONDS = 0.3, 0.4
BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()


def head(length: int, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.fixture(scope="module")
def impatient(chat: Served) -> Iterator[tuple[str, int]]:
    settings = dataclasses.replace(chat.service.settings, read_seconds=READ_SECONDS)
    server = server_of(dataclasses.replace(chat.service, settings=settings), head_seconds=HEAD_SECONDS)
    with open_socket("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield listening.getsockname()[:2]
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address) as opened:
        opened.settimeout(20)
        yield opened


def answered(opened: socket.socket) -> int:
    """The status of the next answer, which is read whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = opened.recv(1 << 16)
        assert part, f"closed behind {data!r}"
        data += part
    start, _, rest = data.partition(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1]) for line in start.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(rest) < length:
        rest += opened.recv(1 << 16)
    return int(start.split()[1])


def is_closed_while_it_trickles(opened: socket.socket, part: bytes) -> bool:
    """Whether the server closes a connection on which a byte comes now and then."""
    end = time.monotonic() + 20
    opened.settimeout(0.02)
    while time.monotonic() < end:
        try:
            opened.send(part)
            if not opened.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("behind_an_answer", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_head_that_never_ends_is_cut_off(impatient: tuple[str, int], behind_an_answer: bool) -> None:
    with connected(impatient) as opened:
        if behind_an_answer:
            opened.sendall(head(len(BODY)) + BODY)
            assert answered(opened) == 200
        opened.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert is_closed_while_it_trickles(opened, b"X-More: more\r\n")


def test_a_body_that_never_ends_is_an_error_and_frees_what_it_took(chat: Served, impatient: tuple[str, int]) -> None:
    with connected(impatient) as opened:
        opened.sendall(head(1000) + BODY)
        assert answered(opened) == 408
    assert chat.service.bodies.taken == 0


def test_a_body_that_is_declared_too_large_is_refused_unread(impatient: tuple[str, int]) -> None:
    with connected(impatient) as opened:
        opened.sendall(head(MOST_BODY_BYTES + 1) + BODY)
        assert answered(opened) == 413  # and not 408 when its time is over


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
            # The connection is as good as new, and what the model is not asked for is answered.
            text = json.dumps({"prompt": "a"}).encode()
            opened.sendall(head(len(text), "/tokenize") + text)
            assert answered(opened) == 200
            chat.backend.is_full = False
            opened.sendall(head(len(BODY)) + BODY)
            assert answered(opened) == 200
    finally:
        chat.backend.is_full = False


def test_a_call_of_many_requests_is_admitted_whole(chat: Served) -> None:
    chat.backend.admitted.clear()
    chat.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1})
    chat.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    assert chat.backend.admitted == [True, True, True, False]
