"""The life of a rank: requests come in over a socket, steps run, answers go out.

Two threads: one owns the socket and keeps the requests that wait; the other runs steps. So requests arrive, and are
cancelled, while a step runs, and the frontend hears that this process lives, and for how long it computes.

Pseudo-code
    say what the engine is
    until the frontend says drain and nothing waits, or the frontend is gone:
        take as many waiting requests as make a step
        tell which; run the step; tell the answers
        a step that fails: tell every request of it; a rank that only fails ends, and is started anew
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import zmq

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.engine.step_engine import StepEngine
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.view import EngineView
from moepass.runtime.serving.workers.messages import (
    Alive,
    Cancel,
    Drain,
    FromRank,
    RankReady,
    RequestFailed,
    Run,
    Started,
    StatusReport,
    StatusRequest,
    StepDone,
    decode_for_rank,
    encode,
)
from moepass.runtime.serving.workers.rank_watch import ALIVE_SECONDS

logger = logging.getLogger("moepass")

# Steps that fail one after the other before the rank ends.
MOST_FAILED_STEPS = 3


class ParentWatch(Protocol):
    """Tells whether the process that started this one is gone."""

    def is_gone(self) -> bool: ...


class FailingRankError(MoepassError, RuntimeError):
    """Every step of this rank fails; the last reason is the cause."""


class Mailbox:
    """Requests that wait, and the thread that talks to the frontend."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        name: bytes,
        check: Callable[[Request], None],
        watch: ParentWatch,
        look: Callable[[], EngineView] = EngineView,
    ) -> None:
        """Connects to `endpoint` as `name`. `check` raises InputError for a request that is refused at once; `look`
        gives what those see who look, and must not wait for a step."""
        self._condition = threading.Condition()
        self._waiting: dict[str, Request] = {}
        self._ends = False
        self._busy_since: float | None = None
        self._check, self._watch, self._look = check, watch, look
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(endpoint)
        # Sockets belong to one thread each; what the other one sends comes through this pair.
        inner = f"inproc://mailbox-{id(self)}"
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._inbox.bind(inner)
        self._outbox.connect(inner)
        self._thread = threading.Thread(target=self._talk, name="moepass-mailbox", daemon=True)
        self._thread.start()

    # ---- The thread that runs steps

    def send(self, message: FromRank) -> None:
        self._outbox.send(encode(message))

    def waiting(self) -> list[Request]:
        """The requests that wait, first come first; waits for one. Empty where none will come any more."""
        with self._condition:
            self._busy_since = None
            self._condition.wait_for(lambda: self._waiting or self._ends)
            self._busy_since = time.monotonic()
            return list(self._waiting.values())

    def take(self, requests: list[Request]) -> list[Request]:
        """Those of `requests` that nobody has cancelled since; they wait no longer."""
        with self._condition:
            return [request for request in requests if self._waiting.pop(request.id, None) is not None]

    def close(self) -> None:
        self._outbox.send(b"")
        self._thread.join()
        self._outbox.close()

    # ---- The thread that talks

    def _talk(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._inbox):
            poller.register(socket, zmq.POLLIN)
        said = 0.0
        while True:
            ready = dict(poller.poll(int(ALIVE_SECONDS * 1000)))
            if (now := time.monotonic()) - said >= ALIVE_SECONDS:
                said = now
                since = self._busy_since
                self._socket.send(encode(Alive(0.0 if since is None else now - since)))
            if self._socket in ready:
                self._receive(self._socket.recv())
            if self._inbox in ready:
                content = self._inbox.recv()
                if not content:
                    break
                self._socket.send(content)
            if not ready and self._watch.is_gone():
                self._end(drop=True)
        self._socket.close()
        self._inbox.close()

    def _receive(self, data: bytes) -> None:
        try:
            message = decode_for_rank(data)
        except InputError:
            logger.exception("the frontend sent something else than a message; this rank ends")
            self._end(drop=True)
            return
        if isinstance(message, Drain):
            self._end(drop=False)
            return
        if isinstance(message, StatusRequest):
            self._socket.send(encode(StatusReport(self._look())))
            return
        taken = {}
        for request in message.requests if isinstance(message, Run) else ():
            try:
                self._check(request)
                taken[request.id] = request
            except InputError as error:
                self._socket.send(encode(RequestFailed(request.id, str(error), is_refused=True)))
        with self._condition:
            self._waiting.update(taken)
            for number in message.ids if isinstance(message, Cancel) else ():
                self._waiting.pop(number, None)
            self._condition.notify()

    def _end(self, drop: bool) -> None:
        with self._condition:
            self._ends = True
            if drop:
                self._waiting.clear()
            self._condition.notify()


def run_rank(engine: StepEngine, mailbox: Mailbox) -> None:
    """Answer requests until the frontend says drain, or is gone. Raises FailingRankError where every step fails."""
    before = engine.compilations()
    mailbox.send(RankReady(engine.facts))
    failed = 0
    while waiting := mailbox.waiting():
        requests = mailbox.take(engine.choose(waiting))
        if not requests:
            continue
        mailbox.send(Started(tuple(request.id for request in requests)))
        try:
            result = engine.step(requests)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(requests))
            for request in requests:
                mailbox.send(RequestFailed(request.id, f"a step failed: {type(error).__name__}", is_refused=False))
            failed += 1
            if failed >= MOST_FAILED_STEPS:
                raise FailingRankError(f"{failed} steps failed one after the other", value=failed) from error
        else:
            failed = 0
            for number, reason in result.refused:
                mailbox.send(RequestFailed(number, reason, is_refused=True))
            mailbox.send(StepDone(result, engine.compilations() - before))
