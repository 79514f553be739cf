"""The frontend: it sends requests to the ranks that the router picks, and collects their answers.

Everything runs in one event loop. A request has a future, and one or more assignments (parts of a request with many
questions). Messages about assignments that are over are dropped, so that no request is answered twice.

Pseudo-code
    answer(request):    refuse it if the queue is full; submit it to the router; wait for its answer or the timeout
    after every event:  let the router decide a round; send the new assignments
    rank message:       ready, started, done, failed: update the router; answer completed requests
    lost rank:          the router runs its requests once more, or they fail
    periodically:       kill ranks that hang, so that they count as lost
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import zmq
import zmq.asyncio

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.block_hashes import path_hashes
from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import (
    AnswerTimeoutError,
    BackendStatus,
    FrontendLimits,
    NotServingError,
    QueueFullError,
    ServingState,
    answer_within,
)
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.request_parts import RequestPart, merged_answer, request_part
from moepass.runtime.serving.requests.view import BackendView
from moepass.runtime.serving.router.routable import Assignment, FlopsFormula, Withdrawal, routable_request
from moepass.runtime.serving.router.router import RankRouter
from moepass.runtime.serving.workers import messages
from moepass.runtime.serving.workers.rank_status import RankStatusPoller, rank_views
from moepass.runtime.serving.workers.rank_watch import CHECK_SECONDS, HangLimits, RankWatch
from moepass.runtime.serving.workers.serving_counters import RequestTimes, ServingCounters
from moepass.runtime.serving.workers.supervisor import RankProcess, Supervisor

# While a rank computes a step, it already holds the requests of the next one, so that it never waits for the frontend.
STEPS_AT_A_RANK = 2
# Weight of the last full step in the moving average of a rank's FLOPs per second. [Empirical] A disturbed step has
# little influence after ten more steps.
RATE_WEIGHT = 0.2

HANGS = HangLimits()

logger = logging.getLogger("moepass")


@dataclasses.dataclass(eq=False, slots=True)
class _WaitingRequest:
    """A request whose answer is awaited. `began` is the time when a rank started it.

    The first `prompt_pieces` pieces form the prompt of all assignments. The remaining pieces are the parts that the
    router may distribute over ranks.
    """

    request: Request
    prompt_pieces: int
    future: asyncio.Future[Answer]
    began: float | None = None
    answers: list[tuple[RequestPart, Answer]] = dataclasses.field(default_factory=list)

    def part(self, assignment: Assignment) -> RequestPart:
        """Return the pieces of an assignment. The assignment with part 0 also answers the prompt's reads."""
        if assignment.parts is None:
            return request_part(len(self.request.pieces), (), answers_prompt=True)
        behind = [self.prompt_pieces + part for part in assignment.parts]
        return request_part(self.prompt_pieces, behind, answers_prompt=0 in assignment.parts)


class Frontend:
    """A `Backend` whose ranks are processes of their own.

    `Supervisor` describes `start_process`, `ends_together` and `restarts`. A process of a rank connects to `endpoint`,
    an unused `ipc://` address, with the socket name `rank_name(rank, attempt)`. `formula` may be a future, because
    ranks may start before it is known, and `make_router` is called once the facts of all engines are known. The engines
    of the ranks use the same `key` of block hashes.
    """

    def __init__(
        self,
        ranks: int,
        start_process: Callable[[int, int], Awaitable[RankProcess]],
        *,
        endpoint: str,
        formula: FlopsFormula | asyncio.Future[FlopsFormula],
        make_router: Callable[[int, FlopsFormula, list[EngineFacts]], RankRouter],
        key: bytes,
        limits: FrontendLimits,
        ends_together: bool = False,
        hangs: HangLimits = HANGS,
        restarts: bool = True,
    ) -> None:
        self._ranks, self._endpoint, self._key, self._limits = ranks, endpoint, key, limits
        self._formula, self._make_router = formula, make_router
        self._supervisor = Supervisor(
            ranks, start_process, self._handle_lost_ranks, ends_together=ends_together, restarts=restarts
        )
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._facts: dict[int, EngineFacts] = {}
        self._last_facts: EngineFacts | None = None
        self._router: RankRouter | None = None
        self._shares_prefixes = True
        self._state: ServingState = "starting"
        self._waiting: dict[str, _WaitingRequest] = {}
        self._assigned: dict[str, Assignment] = {}
        self._numbers = itertools.count()
        self._open_bytes = 0
        self._is_routing = False
        self._compilations: dict[int, int] = {}
        self._watch = RankWatch(hangs)
        self._tasks: list[asyncio.Task[None]] = []
        self._status_poller = RankStatusPoller(lambda rank: self._send(rank, messages.StatusRequest()))
        self._times = RequestTimes()
        self.counters = ServingCounters()

    # ---- Start and end

    async def start(self) -> None:
        """Start the ranks and wait until all are ready. Raise RankStartError if one ends first."""
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self._endpoint)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._end_hung_ranks())]
        await self._supervisor.start()
        facts = [self._facts[rank] for rank in sorted(self._facts)]
        self._shares_prefixes = all(engine_facts.form == "trie" for engine_facts in facts)
        formula = await self._formula if isinstance(self._formula, asyncio.Future) else self._formula
        self._router = self._make_router(self._ranks, formula, facts)
        self._state = "ready"

    async def lost(self) -> None:
        """Wait until a rank ends that is not restarted, and raise RankLostError. Call it after `start`."""
        await self._supervisor.lost()

    async def close(self, seconds: float) -> None:
        """Refuse new requests, wait up to `seconds` for the open ones, and end the ranks."""
        was_starting, self._state = self._state == "starting", "draining"
        end = time.monotonic() + seconds
        while self._waiting and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for rank in self._supervisor.processes:
            self._send(rank, messages.Drain())
        for number in list(self._waiting):
            self._fail(number, NotServingError("the server is shutting down; send the request again", value="draining"))
        # A rank that is still starting reads no messages.
        await self._supervisor.close(0.0 if was_starting else max(1.0, end - time.monotonic()))
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    # ---- Backend

    def check_room(self) -> None:
        """Raise QueueFullError or NotServingError if a new call must be refused now.

        A call is accepted as a whole, however large, while less work than the limits is waiting. So an idle server
        never refuses a call that its ranks can compute, and the queue exceeds the limits by one call at most.
        """
        router = self._serving_router()
        seconds = router.queue.flops / sum(facts.flops_per_second for facts in self._facts.values())
        try:
            self._limits.check(seconds, self._open_bytes)
        except QueueFullError:
            self.counters.turned_away += 1
            raise

    async def answer(
        self, request: Request, *, priority: int = 0, timeout_seconds: float, is_admitted: bool = False
    ) -> Answer:
        """Return the answer to `request`, as `Backend.answer` specifies."""
        router = self._serving_router()
        if not is_admitted:
            self.check_room()
        size = sum(piece.tokens.nbytes for piece in request.pieces)
        number = str(next(self._numbers))
        arrived = time.monotonic()
        routable, prompt_pieces = routable_request(
            dataclasses.replace(request, id=number),
            lambda tokens, salt: path_hashes(tokens, self._key, salt),
            priority=-priority,
            deadline=arrived + timeout_seconds,
            arrived=arrived,
            shares_prefixes=self._shares_prefixes,
        )
        router.submit(routable)
        self.counters.requests += 1
        waiting = _WaitingRequest(request, prompt_pieces, asyncio.get_running_loop().create_future())
        self._waiting[number] = waiting
        self._open_bytes += size
        self._route_soon()
        try:
            answer = await answer_within(timeout_seconds, waiting.future)
            now = time.monotonic()
            return self._times.answered(answer, arrived, waiting.began or now, now)
        finally:
            self._open_bytes -= size
            if self._waiting.pop(number, None) is not None:  # the request timed out or its client left
                self.counters.given_up += 1
                self._withdraw(router.cancel(number))
                self._route_soon()

    def status(self) -> BackendStatus:
        """Return the abilities of the ranks, and all counters, as `Backend.status` specifies."""
        state = self._state
        if state == "ready" and not self._facts:
            state = "no rank"
        facts = next(iter(self._facts.values()), None) or self._last_facts
        metrics = {name: float(value) for name, value in dataclasses.asdict(self.counters).items()}
        metrics["compilations_after_ready"] = float(sum(self._compilations.values()))
        if facts is None:
            return BackendStatus(state, 0, 0, predicts_tokens=False, metrics=metrics)
        abilities = (facts.max_sequence_tokens, facts.vocabulary_size, facts.predicts_tokens, facts.vector)
        classes = (facts.class_names, facts.class_activation, facts.padding_token)
        return BackendStatus(state, *abilities, *classes, dict(facts.notes), metrics)

    def notes(self, name: str) -> list[str]:
        """Return the notes of the ranks with this name, such as "device", each once."""
        return list(dict.fromkeys(self._facts[rank].notes[name] for rank in sorted(self._facts)))

    async def view(self) -> BackendView:
        """Return the state of the ranks and the histograms, as `Backend.view` specifies."""
        engine_views = await self._status_poller.poll(list(self._facts))
        running = sum(waiting.began is not None for waiting in self._waiting.values())
        attempts, assigned = self._supervisor.attempts, self._assigned.values()
        ranks = rank_views(self._ranks, self._router, self._facts, attempts, assigned, engine_views)
        return BackendView(ranks, len(self._waiting) - running, running, self._times.histograms)

    def engine_facts(self) -> tuple[EngineFacts, ...]:
        """Return the facts of the ranks that are ready."""
        return tuple(self._facts.values())

    def held_blocks(self, most: int) -> list[bytes]:
        """Return the hashes of up to `most` cached blocks, ordered so that a prompt's earlier blocks come first."""
        committed = self._router.tables.committed if self._router is not None else {}
        # The table is in the order of storing, and a rank stores a block after the blocks that precede it.
        return [block for block in itertools.islice(committed, most) if isinstance(block, bytes)]

    # ---- Requests

    def _serving_router(self) -> RankRouter:
        """Return the router. Raise NotServingError unless the server is ready and has a ready rank."""
        router = self._router
        if self._state != "ready" or router is None or not self._facts:
            state = self.status().state
            raise NotServingError(f"the state of the server is {state!r}, not 'ready'; try again later", value=state)
        return router

    def _fail(self, number: str, error: Exception) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_exception(error)

    def _withdraw(self, withdrawal: Withdrawal | None, error: Exception | None = None) -> None:
        """Cancel the assignments of `withdrawal` at their ranks, and fail its request with `error`."""
        if withdrawal is None:
            return
        if error is not None:
            self._fail(withdrawal.request_id, error)
        by_rank: dict[int, list[str]] = {}
        for assignment in withdrawal.assignments:
            by_rank.setdefault(assignment.rank, []).append(str(assignment.number))
            self._assigned.pop(str(assignment.number), None)
        for rank, numbers in by_rank.items():
            self._send(rank, messages.Cancel(tuple(numbers)))

    # ---- Routing

    def _route_soon(self) -> None:
        """Schedule one round for all events of this loop iteration, so that simultaneous requests share a step."""
        if not self._is_routing:
            self._is_routing = True
            asyncio.get_running_loop().call_soon(self._route)

    def _route(self) -> None:
        self._is_routing = False
        if self._router is None:
            return
        decided = self._router.route(time.monotonic())
        for withdrawal in decided.expired:
            self.counters.given_up += 1
            reason = "no rank started the request before its timeout; try again when the server has less load"
            self._withdraw(withdrawal, AnswerTimeoutError(reason, name="timeout"))
        by_rank: dict[int, list[Request]] = {}
        for assignment in decided.assignments:
            self._assigned[str(assignment.number)] = assignment
            self._watch.assigned(assignment.rank, str(assignment.number), assignment.flops)
            waiting = self._waiting[assignment.request_id]
            work = waiting.part(assignment).of(waiting.request, str(assignment.number))
            by_rank.setdefault(assignment.rank, []).append(work)
        for rank, requests in by_rank.items():
            self._send(rank, messages.Run(tuple(requests)))

    # ---- Ranks

    def _send(self, rank: int, message: messages.ToRank) -> None:
        name = messages.rank_name(rank, self._supervisor.attempts[rank])
        # This never blocks: the router bounds the work of a rank, so the socket's queue needs no limit. Messages to a
        # rank that has ended are dropped; the supervisor notices its end.
        self._socket.send_multipart([name, messages.encode(message)], zmq.NOBLOCK)

    async def _receive(self) -> None:
        while True:
            name, content = await self._socket.recv_multipart()
            rank, attempt = messages.parsed_rank_name(name)
            if self._supervisor.is_current(rank, attempt):
                try:
                    self._handle_message(rank, content)
                except Exception:
                    # One bad message must not stop the loop.
                    logger.exception("a message of rank %d could not be processed", rank)

    def _handle_message(self, rank: int, content: bytes) -> None:
        message = messages.decode_from_rank(content)
        if isinstance(message, messages.StatusReport):  # a report does not reset the time of the current step
            self._status_poller.report(rank, message.engine)
            return
        self._watch.message_received(
            rank, time.monotonic(), message.busy_seconds if isinstance(message, messages.Alive) else None
        )
        if isinstance(message, messages.Alive):
            return
        if isinstance(message, messages.RankReady):
            self._watch.begin(rank, time.monotonic())
            self._facts[rank] = self._last_facts = message.facts
            self._supervisor.ready(rank)
            if self._router is not None:
                self._router.rank_back(rank)
        elif self._router is None:
            return
        elif isinstance(message, messages.Started):
            self._watch.started(rank, message.ids)
            for number in message.ids:
                self._router.started(int(number))
                assignment = self._assigned.get(number)
                waiting = self._waiting.get(assignment.request_id) if assignment is not None else None
                if waiting is not None and waiting.began is None:
                    waiting.began = time.monotonic()
        elif isinstance(message, messages.StepDone):
            self._step_done(self._router, rank, message)
        elif isinstance(message, messages.RequestFailed):
            self._request_failed(self._router, message)
        self._route_soon()

    async def _end_hung_ranks(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for rank, reason in self._watch.hung(time.monotonic(), self._facts).items():
                logger.error("rank %d hangs and is killed: %s", rank, reason)
                self._watch.forget(rank)
                self.counters.ranks_hung += 1
                self._supervisor.kill(rank)

    def _step_done(self, router: RankRouter, rank: int, message: messages.StepDone) -> None:
        result = message.result
        for block in result.stored:
            router.block_stored(rank, block)
        for block in result.evicted:
            router.block_evicted(rank, block)
        for answer in result.answers:
            assignment = self._assigned.pop(answer.id, None)
            remaining = router.done(int(answer.id))
            if assignment is None or remaining is None:
                continue  # the assignment was withdrawn, or another rank has answered it
            waiting = self._waiting[assignment.request_id]
            waiting.answers.append((waiting.part(assignment), answer))
            self.counters.request_tokens += answer.usage.tokens
            self.counters.cached_tokens += answer.usage.cached_tokens
            if not remaining:
                del self._waiting[assignment.request_id]
                self.counters.answered += 1
                if not waiting.future.done():
                    waiting.future.set_result(merged_answer(waiting.request, waiting.answers))
        self._compilations[rank] = message.compilations
        facts = self._facts[rank]
        if result.flops >= facts.saturation_flops / 2 and result.seconds > 0:
            # The rate changes with the other load of the machine.
            rate = (1 - RATE_WEIGHT) * facts.flops_per_second + RATE_WEIGHT * result.flops / result.seconds
            self._facts[rank] = dataclasses.replace(facts, flops_per_second=rate)
        self.counters.add_step(result)
        self._times.stepped(result.tokens)

    def _request_failed(self, router: RankRouter, message: messages.RequestFailed) -> None:
        assignment = self._assigned.pop(message.id, None)
        if assignment is None:
            return
        withdrawal = router.cancel(assignment.request_id)
        if message.is_refused:
            self.counters.refused += 1
            self._withdraw(withdrawal, InputError(message.reason, name="request"))
        else:
            self.counters.failed += 1
            self._withdraw(withdrawal, NotServingError(message.reason, value="failed"))

    def _handle_lost_ranks(self, ranks: Sequence[int]) -> None:
        """Remove all lost ranks from the router before anything is routed again."""
        for rank in ranks:
            self._watch.forget(rank)
            self._facts.pop(rank, None)
            self._status_poller.lost(rank)
            self._compilations.pop(rank, None)
            self.counters.ranks_lost += 1
            self._assigned = {
                number: assignment for number, assignment in self._assigned.items() if assignment.rank != rank
            }
            if self._router is not None:
                loss = self._router.rank_lost(rank)
                self.counters.rerun += len(loss.rerun)
                for withdrawal in loss.failed:
                    self.counters.failed += 1
                    text = "two ranks were lost while they computed this request; send it again"
                    self._withdraw(withdrawal, NotServingError(text, value="rank lost", rank=rank))
        self._route_soon()
