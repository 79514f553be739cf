"""The main loop of a rank: requests arrive through a socket, steps run, and answers are sent.

One thread owns the socket and stores the waiting requests; the other runs the steps. So requests arrive and are
cancelled during a step, and the frontend learns that this process is alive and how long its step has run.

Pseudo-code
    send the facts of the engine
    until the frontend drains this rank and no request waits, or the frontend is gone:
        take as many waiting requests as fit a step
        report that they start; run the step while the next one is prepared; send the answers
        if the step fails: report that to each of its requests; after several failures in a row, end
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.engine.step_engine import StepEngine
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.view import EngineView
from moepass.runtime.serving.workers import messages
from moepass.runtime.serving.workers.rank_watch import ALIVE_SECONDS
from moepass.runtime.system.device_errors import is_sticky

logger = logging.getLogger("moepass")

# The rank ends after this number of failed steps in a row.
MOST_FAILED_STEPS = 3


class FailingRankError(MoepassError, RuntimeError):
    """Several steps of this rank failed in a row, or its device is lost; the cause is the last failure."""


class Mailbox:
    """The waiting requests of a rank, and the thread that talks to the frontend.

    `name` is the name of this rank's socket, from `rank_name`. `check` raises InputError for a request that must be
    refused, `is_orphan` returns True if the server has ended, and `engine_view` must not wait for a step.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        name: bytes,
        check: Callable[[Request], None],
        is_orphan: Callable[[], bool],
        engine_view: Callable[[], EngineView] = EngineView,
    ) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[str, Request] = {}
        self._ends = False
        self._busy_since: float | None = None
        self._check, self._is_orphan, self._engine_view = check, is_orphan, engine_view
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(endpoint)
        # A ZeroMQ socket belongs to one thread. The step thread sends its messages through this pair.
        inner = f"inproc://mailbox-{id(self)}"
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._inbox.bind(inner)
        self._outbox.connect(inner)
        self._thread = threading.Thread(target=self._communicate, name="moepass-mailbox", daemon=True)
        self._thread.start()

    # ---- The thread that runs steps

    def send(self, message: messages.FromRank) -> None:
        """Send a message to the frontend, from the thread that runs steps."""
        self._outbox.send(messages.encode(message))

    def waiting(self) -> list[Request]:
        """Return the waiting requests in order of arrival; block until there is one. Return [] if the rank ends."""
        with self._condition:
            self._busy_since = None
            self._condition.wait_for(lambda: self._waiting or self._ends)
            self._busy_since = time.monotonic()
            return list(self._waiting.values())

    def queued(self) -> list[Request]:
        """Return the waiting requests in order of arrival; the list may be empty."""
        with self._condition:
            return list(self._waiting.values())

    def take(self, requests: list[Request]) -> list[Request]:
        """Remove `requests` from the waiting requests, and return those that were not cancelled."""
        with self._condition:
            return [request for request in requests if self._waiting.pop(request.id, None) is not None]

    def close(self) -> None:
        """Send the remaining messages, stop the thread, and close the sockets."""
        self._outbox.send(b"")
        self._thread.join()
        self._outbox.close()

    # ---- The thread that owns the socket

    def _communicate(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._inbox):
            poller.register(socket, zmq.POLLIN)
        last_alive = 0.0
        while True:
            ready = dict(poller.poll(int(ALIVE_SECONDS * 1000)))
            if (now := time.monotonic()) - last_alive >= ALIVE_SECONDS:
                last_alive = now
                since = self._busy_since
                self._socket.send(messages.encode(messages.Alive(0.0 if since is None else now - since)))
            if self._socket in ready:
                self._receive(self._socket.recv())
            if self._inbox in ready:
                content = self._inbox.recv()
                if not content:
                    break
                self._socket.send(content)
            if not ready and self._is_orphan():
                self._end(drop=True)
        self._socket.close()
        self._inbox.close()

    def _receive(self, data: bytes) -> None:
        try:
            message = messages.decode_for_rank(data)
        except InputError:
            logger.exception("the frontend sent a malformed message; this rank ends")
            self._end(drop=True)
            return
        if isinstance(message, messages.Drain):
            self._end(drop=False)
            return
        if isinstance(message, messages.StatusRequest):
            self._socket.send(messages.encode(messages.StatusReport(self._engine_view())))
            return
        accepted = {}
        for request in message.requests if isinstance(message, messages.Run) else ():
            try:
                self._check(request)
                accepted[request.id] = request
            except InputError as error:
                self._socket.send(messages.encode(messages.RequestFailed(request.id, str(error), is_refused=True)))
        with self._condition:
            self._waiting.update(accepted)
            for number in message.ids if isinstance(message, messages.Cancel) else ():
                self._waiting.pop(number, None)
            self._condition.notify()

    def _end(self, drop: bool) -> None:
        with self._condition:
            self._ends = True
            if drop:
                self._waiting.clear()
            self._condition.notify()


def run_rank(engine: StepEngine, mailbox: Mailbox) -> None:
    """Answer requests until drained or the frontend exits.

    Raises FailingRankError if several steps in a row fail, or after an error that ends the use of the device.
    """

    def upcoming() -> list[Request]:
        queued = mailbox.queued()
        chosen = engine.choose(queued)
        # If all fit into a step, requests that arrive until then will also be in it.
        return chosen if len(chosen) < len(queued) else []

    before = engine.compilations()
    mailbox.send(messages.RankReady(engine.facts))
    failed = 0
    while waiting := mailbox.waiting():
        requests = mailbox.take(engine.choose(waiting))
        if not requests:
            continue
        mailbox.send(messages.Started(tuple(request.id for request in requests)))
        try:
            result = engine.step(requests, upcoming)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(requests))
            reason = f"the step of this request failed with {type(error).__name__}; the server's log has the details"
            for request in requests:
                mailbox.send(messages.RequestFailed(request.id, reason, is_refused=False))
            failed += 1
            if is_sticky(error):
                raise FailingRankError("the device cannot compute any more in this process") from error
            if failed >= MOST_FAILED_STEPS:
                raise FailingRankError(f"{failed} steps failed in a row", value=failed) from error
        else:
            failed = 0
            for number, reason in result.refused:
                mailbox.send(messages.RequestFailed(number, reason, is_refused=True))
            mailbox.send(messages.StepDone(result, engine.compilations() - before))
