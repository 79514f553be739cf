"""A rank over a real socket: its answers and refusals, cancelled requests, and its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from moepass.models.errors import InputError
from moepass.runtime.execute.bound_graph import SegmentError
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult
from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, Usage
from moepass.runtime.serving.requests.request import Request, TokenPiece
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
    ToRank,
    decode_from_rank,
    encode,
)
from moepass.runtime.serving.workers.rank_loop import FailingRankError, Mailbox, run_rank

FACTS = EngineFacts("trie", 10, 1e6, 100, 50, 32, True, None, (), {"attention": "trie"}, 4096)
STEP_FAILED = "the step of this request failed with RuntimeError; the server's log has the details"


class CountingEngine:
    """An engine that answers with the number of tokens. A step has two requests, and waits for `gate`."""

    facts = FACTS

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.upcoming: list[list[str]] = []

    def check(self, request: Request) -> None:
        if request.id.startswith("bad"):
            raise InputError(f"{request.id} is bad")

    def choose(self, waiting: Iterable[Request]) -> list[Request]:
        return list(waiting)[:2]

    def step(self, requests: Sequence[Request], upcoming: Callable[[], list[Request]] | None = None) -> StepResult:
        assert self.gate.wait(20)
        assert upcoming is not None
        self.upcoming.append([request.id for request in upcoming()])
        if self.error is not None:
            raise self.error
        large = {request.id for request in requests if request.id.startswith("large")}
        answers = tuple(
            Answer(request.id, (PieceAnswer(),), Usage(len(request.pieces[0].tokens), 0, 1))
            for request in requests
            if request.id not in large
        )
        return StepResult(answers, (), (), 1, 1, 1, 0.0, 0.0, tuple((number, "too large") for number in large))

    def compilations(self) -> int:
        return 3

    def view(self) -> EngineView:
        return EngineView(cache_blocks=7)


class FakeFrontend:
    """The frontend's end of the socket, with the rank in a thread."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        endpoint = f"ipc://{folder}/ranks"
        self.socket.bind(endpoint)
        self.engine, self.is_orphan = CountingEngine(), False
        self.raised: list[Exception] = []
        self.thread = threading.Thread(target=self._run, args=(endpoint,), daemon=True)
        self.thread.start()

    def _run(self, endpoint: str) -> None:
        mailbox = Mailbox(
            self.context, endpoint, b"rank 0", self.engine.check, lambda: self.is_orphan, self.engine.view
        )
        try:
            run_rank(self.engine, mailbox)
        except FailingRankError as error:
            self.raised.append(error)
        finally:
            mailbox.close()

    def send(self, message: ToRank) -> None:
        self.socket.send_multipart([b"rank 0", encode(message)])

    def receive(self) -> FromRank:
        """Return the next message that is not `Alive`."""
        while isinstance(message := self.receive_any(), Alive):
            pass
        return message

    def receive_any(self) -> FromRank:
        name, content = self.socket.recv_multipart()
        assert name == b"rank 0"
        return decode_from_rank(content)

    def ended(self) -> bool:
        self.thread.join(20)
        return not self.thread.is_alive()


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[FakeFrontend]:
    made = FakeFrontend(tmp_path)
    yield made
    made.engine.gate.set()
    made.is_orphan = True
    assert made.ended()
    made.context.destroy(linger=0)


def request(number: str, tokens: int = 1) -> Request:
    return Request(number, (TokenPiece(-1, np.arange(tokens, dtype=np.int32)),))


def ids(message: FromRank) -> list[str]:
    assert isinstance(message, StepDone)
    return [answer.id for answer in message.result.answers]


def test_requests_are_answered_in_order_of_arrival(frontend: FakeFrontend) -> None:
    ready = frontend.receive()
    assert isinstance(ready, RankReady)
    assert ready.facts == FACTS
    frontend.send(Run((request("a", 3), request("b"), request("c"))))
    assert frontend.receive() == Started(("a", "b"))
    done = frontend.receive()
    assert ids(done) == ["a", "b"]
    assert isinstance(done, StepDone)
    assert done.result.answers[0].usage.tokens == 3
    assert done.compilations == 0
    assert frontend.receive() == Started(("c",))
    assert ids(frontend.receive()) == ["c"]
    frontend.send(Drain())
    assert frontend.ended()


@pytest.mark.slow
def test_a_rank_reports_how_long_its_step_has_run(frontend: FakeFrontend) -> None:
    frontend.receive()
    while not isinstance(idle := frontend.receive_any(), Alive):
        pass
    assert idle.busy_seconds == 0
    frontend.engine.gate.clear()
    frontend.send(Run((request("a"),)))
    assert isinstance(frontend.receive(), Started)
    busy = [
        message.busy_seconds
        for message in (frontend.receive_any(), frontend.receive_any())
        if isinstance(message, Alive)
    ]
    assert len(busy) == 2
    assert 0 < busy[0] < busy[1]


def test_cancelled_requests_do_not_run(frontend: FakeFrontend) -> None:
    frontend.receive()
    frontend.engine.gate.clear()
    frontend.send(Run((request("a"),)))
    assert frontend.receive() == Started(("a",))
    frontend.send(Run((request("b"), request("c"))))
    frontend.send(Cancel(("b", "unknown")))
    frontend.send(Run((request("bad one"),)))
    refused = frontend.receive()  # so the previous messages have been read too
    assert isinstance(refused, RequestFailed)
    assert (refused.id, refused.is_refused) == ("bad one", True)
    frontend.engine.gate.set()
    assert ids(frontend.receive()) == ["a"]
    assert frontend.receive() == Started(("c",))


def test_a_step_knows_the_requests_of_the_next_one_if_they_fill_it(frontend: FakeFrontend) -> None:
    frontend.receive()
    frontend.send(Run(tuple(map(request, "abcde"))))
    for expected in (("a", "b"), ("c", "d"), ("e",)):
        assert frontend.receive() == Started(expected)
        assert ids(frontend.receive()) == [*expected]
    assert frontend.engine.upcoming == [["c", "d"], [], []]


def test_a_rank_reports_its_status_during_a_step(frontend: FakeFrontend) -> None:
    frontend.receive()
    frontend.engine.gate.clear()
    frontend.send(Run((request("a"),)))
    assert frontend.receive() == Started(("a",))
    frontend.send(StatusRequest())
    assert frontend.receive() == StatusReport(EngineView(cache_blocks=7))


def test_a_draining_rank_answers_its_waiting_requests(frontend: FakeFrontend) -> None:
    frontend.receive()
    frontend.engine.gate.clear()
    frontend.send(Run(tuple(request(number) for number in "abc")))
    frontend.send(Drain())
    frontend.engine.gate.set()
    received = [frontend.receive() for _ in range(4)]
    assert [number for message in received if isinstance(message, StepDone) for number in ids(message)] == [
        "a",
        "b",
        "c",
    ]
    assert frontend.ended()


def test_requests_that_exceed_the_memory_are_refused_and_others_answered(frontend: FakeFrontend) -> None:
    frontend.receive()
    frontend.send(Run((request("large"), request("a"))))
    assert isinstance(frontend.receive(), Started)
    assert frontend.receive() == RequestFailed("large", "too large", True)
    assert ids(frontend.receive()) == ["a"]


def test_a_rank_whose_steps_all_fail_ends(frontend: FakeFrontend) -> None:
    frontend.receive()
    frontend.engine.error = RuntimeError("secret /path")
    for number in "abc":
        frontend.send(Run((request(number),)))
        assert frontend.receive() == Started((number,))
        assert frontend.receive() == RequestFailed(number, STEP_FAILED, False)
    assert frontend.ended()
    assert isinstance(frontend.raised[0].__cause__, RuntimeError)


def test_a_rank_ends_at_once_if_its_device_is_lost(frontend: FakeFrontend) -> None:
    frontend.receive()
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for cudaError...")
    frontend.engine.error = SegmentError("in segment 3: AcceleratorError", name="segment 3")
    frontend.engine.error.__cause__ = lost
    frontend.send(Run((request("a"),)))
    assert frontend.receive() == Started(("a",))
    assert isinstance(frontend.receive(), RequestFailed)
    assert frontend.ended()
    assert "cannot compute any more" in str(frontend.raised[0])


def test_a_step_that_fails_once_does_not_end_the_rank(frontend: FakeFrontend) -> None:
    frontend.receive()
    for number in "abcd":
        frontend.engine.error = RuntimeError("now and then") if number in "ac" else None
        frontend.send(Run((request(number),)))
        assert isinstance(frontend.receive(), Started)
        assert isinstance(frontend.receive(), RequestFailed if number in "ac" else StepDone)


@pytest.mark.parametrize("ending", ["the frontend is gone", "no message"])
def test_a_rank_ends_with_its_frontend(frontend: FakeFrontend, ending: str) -> None:
    frontend.receive()
    if ending == "no message":
        frontend.socket.send_multipart([b"rank 0", b"\xc1"])
    frontend.is_orphan = True
    assert frontend.ended()
