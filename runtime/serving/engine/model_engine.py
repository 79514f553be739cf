"""The engine of one rank: requests become a step, the step runs, answers are read from its states.

Pseudo-code
    step(requests):
        what does the cache hold of each?
        pack them: every distinct token that is needed, once; blocks that are worth keeping get a place in the cache
        run the step: states at the places that are read
        scores of tokens, a few rows at a time; vectors; answers
        where memory does not suffice: the same in two halves, and smaller steps from then on
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.pack import PackedStep, pack
from moepass.runtime.serving.batching.request_costs import RequestCost, request_cost, row_cost, unshared_flops
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices, StepBatch
from moepass.runtime.serving.batching.step_flops import FlopsTable, row_lengths
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.out_of_memory import is_out_of_memory
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult
from moepass.runtime.serving.engine.step_reads import StepReads
from moepass.runtime.serving.engine.step_view import StepWatch
from moepass.runtime.serving.engine.token_scores import score_tokens
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.request_parts import halves, merged_answer
from moepass.runtime.serving.requests.view import EngineView

logger = logging.getLogger("moepass")


class StepTooLargeError(InputError):
    """A step has `value` tokens and memory for `expected`; it can be split."""


class StatesRunner(Protocol):
    def states(self, batch: StepBatch) -> torch.Tensor:
        """The states at `batch.places`, [m, hidden]."""
        ...


@dataclasses.dataclass(frozen=True)
class EngineCounters:
    """How to read what other parts count: seconds in which computation waited for experts, and compiled graphs."""

    exposed_seconds: Callable[[], float] = lambda: 0.0
    compilations: Callable[[], int] = lambda: 0


_NO_COUNTERS = EngineCounters()


class ModelEngine:
    """A `StepEngine` over a model in this process.

    Args:
        head: of the model.
        runner: gives states of a step.
        table: FLOPs of the model's architecture.
        facts: what the engine serves, and its limits.
        index: of the runner's blocks; one of 0 blocks where it has none.
        block_bytes: of one of them.
        key: of the hashes of blocks.
    """

    def __init__(
        self,
        head: ModelHead,
        runner: StatesRunner,
        table: FlopsTable,
        facts: EngineFacts,
        *,
        index: BlockIndex,
        key: bytes,
        counters: EngineCounters = _NO_COUNTERS,
        block_bytes: int = 0,
    ) -> None:
        self._head, self._runner, self._table, self._key, self._counters = head, runner, table, key, counters
        self._facts, self._index = facts, index
        self._caches = index.block_count > 0
        self._most_tokens = facts.most_tokens
        self._costs: dict[str, RequestCost] = {}
        self._watch = StepWatch(index, block_bytes)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def be_ready(self, flops_per_second: float) -> None:
        """The engine is warm: it forgets what the cache holds of that, and how fast it is stands in its facts."""
        self._index.evict(self._index.block_count)
        self._index.drain_events()
        self._facts = dataclasses.replace(self._facts, flops_per_second=flops_per_second)
        self._watch.forget()

    def compilations(self) -> int:
        return self._counters.compilations()

    def look(self) -> EngineView:
        """The last step and the cache, for people. Any thread may call this."""
        return self._watch.look()

    def check(self, request: Request) -> None:
        """Raises InputError for tokens that the model does not have, too long sequences, and reads that the model's
        head does not give."""
        facts = self._facts
        longest = max(depth + len(piece.tokens) for depth, piece in zip(request.depths(), request.pieces, strict=True))
        for piece in request.pieces:
            asked = [piece.tokens, *(read.tokens for read in piece.reads)]
            lowest, highest = (bound([bound(tokens, initial=0) for tokens in asked]) for bound in (np.min, np.max))
            if lowest < 0 or highest >= facts.vocabulary_size:
                wrong = int(lowest if lowest < 0 else highest)
                raise InputError(
                    f"token {wrong} is none of the model, which has tokens 0 to {facts.vocabulary_size - 1}; where it "
                    "is one of the text's, tokenizer and model do not belong together",
                    name="tokens",
                    value=wrong,
                    expected=range(facts.vocabulary_size),
                )
            if (piece.reads or piece.is_scored) and not facts.predicts_tokens:
                raise InputError("the model has no head that predicts tokens", name="reads")
            has_mean = facts.vector == "embedding"
            if piece.vector is not None and (facts.vector is None or (piece.vector == "mean" and not has_mean)):
                raise InputError(
                    f"the model gives no vector {piece.vector!r} of a sequence", name="vector", value=piece.vector
                )
        limit = min(facts.max_sequence_tokens, facts.most_tokens)
        if longest > limit:
            raise InputError(
                f"a sequence of request {request.id} has {longest} tokens; at most {limit} can be computed",
                name="tokens",
                value=longest,
                expected=limit,
            )

    def choose(self, waiting: Iterable[Request]) -> list[Request]:
        """As many of `waiting` as bring a step to the saturation threshold, and not beyond what fits into memory."""
        chosen: list[Request] = []
        seen: set[bytes] = set()
        tokens = flops = 0
        # Every choice considers a waiting request until it is chosen, so its cost is computed once.
        earlier_costs, self._costs = self._costs, {}
        for request in waiting:
            if request.id in earlier_costs:
                self._costs[request.id] = earlier_costs[request.id]
            new_tokens, new_flops = self._additional(request, seen)
            if chosen and tokens + new_tokens > self._most_tokens:
                break
            chosen.append(request)
            tokens += new_tokens
            flops += new_flops
            if flops >= self._facts.saturation_flops:
                break
        return chosen

    def step(self, requests: Sequence[Request], *, compares: bool = True) -> StepResult:
        """Compute `requests`. Where memory does not suffice, in several steps.

        Without `compares` nobody counts what they would have cost unshared, which takes as long as to pack them.
        """
        began, exposed = time.perf_counter(), self._counters.exposed_seconds()
        try:
            parts = self._in_parts(requests)
        finally:
            for request in requests:
                self._costs.pop(request.id, None)
        result = StepResult(
            answers=tuple(answer for part in parts for answer in part.answers),
            stored=tuple(block for part in parts for block in part.stored),
            evicted=tuple(block for part in parts for block in part.evicted),
            tokens=sum(part.tokens for part in parts),
            flops=sum(part.flops for part in parts),
            unshared_flops=unshared_flops(requests, self._table) if compares else 0,
            seconds=time.perf_counter() - began,
            exposed_seconds=self._counters.exposed_seconds() - exposed,
            refused=tuple(refusal for part in parts for refusal in part.refused),
            retries=len(parts) - 1,
        )
        self._watch.ended(result, len(requests))
        return result

    def answer_now(self, request: Request) -> Answer:
        """The answer to one request, in a step of its own. Raises InputError where it has none."""
        self.check(request)
        result = self.step([request])
        for _, reason in result.refused:
            raise InputError(f"request {request.id} cannot be computed: {reason}", name="request")
        return result.answers[0]

    # ---- What a request adds to a step

    def _additional(self, request: Request, seen: set[bytes]) -> tuple[int, int]:
        """Tokens and FLOPs that `request` adds to a step whose blocks are `seen`, to which its own are added."""
        cost = self._cost_of(request)
        tokens, flops = cost.tokens, cost.flops
        for name, block_flops in zip(cost.hashes.hashes, cost.block_flops, strict=True):
            if name in seen:
                tokens -= BLOCK_TOKENS
                flops -= block_flops
            seen.add(name)
        return max(tokens, 1), flops

    def _cost_of(self, request: Request) -> RequestCost:
        if request.id not in self._costs:
            is_trie = self._facts.form == "trie"
            self._costs[request.id] = (
                request_cost(request, self._table, self._key) if is_trie else row_cost(request, self._table)
            )
        return self._costs[request.id]

    # ---- Steps

    def _in_parts(self, requests: Sequence[Request]) -> list[StepResult]:
        try:
            return [self._once(requests)]
        except Exception as error:
            if not (is_out_of_memory(error) or isinstance(error, StepTooLargeError)):
                raise
            why = error
        # Outside of the except block: the error's frames hold the tensors of the step that failed.
        if not isinstance(why, StepTooLargeError):
            largest = max(sum(len(piece.tokens) for piece in request.pieces) for request in requests)
            self._most_tokens = min(self._most_tokens, max(largest, self._most_tokens // 2))
            logger.warning("memory does not suffice for a step; steps have %d tokens at most now", self._most_tokens)
        del why
        if len(requests) > 1:
            middle = len(requests) // 2
            return [*self._in_parts(requests[:middle]), *self._in_parts(requests[middle:])]
        return self._one_in_parts(requests[0])

    def _one_in_parts(self, request: Request) -> list[StepResult]:
        """One request that does not fit: its questions in two steps, or a refusal where it has but one."""
        cut = halves(request)
        if cut is None:
            tokens = sum(len(piece.tokens) for piece in request.pieces)
            reason = f"its {tokens} tokens need more memory than the device has left"
            return [StepResult((), (), (), 0, 0, 0, 0.0, 0.0, ((request.id, reason),))]
        done: list[list[StepResult]] = []
        for number, part in enumerate(cut):
            # A name of its own: what is remembered of a request by its name is of other pieces.
            half = part.of(request, f"{request.id}/{number}")
            done.append(self._in_parts([half]))
            self._costs.pop(half.id, None)
        steps = [step for found in done for step in found]
        if any(step.refused for step in steps):
            reason = next(reason for step in steps for _, reason in step.refused)
            refused = ((request.id, reason),)
            return [dataclasses.replace(step, answers=(), refused=refused * (step is steps[0])) for step in steps]
        answers = [answer for found in done for step in found for answer in step.answers]
        whole = merged_answer(request, list(zip(cut, answers, strict=True)))
        return [dataclasses.replace(step, answers=(whole,) if step is steps[0] else ()) for step in steps]

    def _once(self, requests: Sequence[Request]) -> StepResult:
        with self._index.lease() as lease:
            matched = [lease.match(self._cost_of(request).hashes) for request in requests] if self._caches else None
            packed = pack(requests, self._table, matched)
            self._watch.packed(packed.batch)
            self._check_size(packed, requests)
            blocks = lease.reserve(packed.offered)
            batch = packed.storing(blocks)
            # Nothing is computed where nothing is read, or the cache holds it all.
            states = self._runner.states(batch) if len(batch.places) else torch.empty(0)
            reads = StepReads(packed, requests, keeps_scores=self._caches)
            scores = score_tokens(states, self._head, self._facts.vocabulary_size, reads.wanted)
            answers = reads.answers(scores, lambda rows: self._vectors(states, rows), self._index.scores)
            if self._caches:
                slots = packed.scores.written_slots(packed.stored_slots(blocks))
                self._index.scores.write(slots, reads.scored(scores, self._index.scores))
            lease.commit()
        events = self._index.drain_events()
        return StepResult(
            answers,
            tuple(event.hash for event in events if event.kind == "stored"),
            tuple(event.hash for event in events if event.kind == "evicted"),
            *(*self._computed(packed), 0, 0.0, 0.0),
        )

    def _computed(self, packed: PackedStep) -> tuple[int, int]:
        """Tokens and FLOPs of a step. Of padded rows those of every row whole, padding not counted."""
        if self._facts.form == "trie":
            return packed.batch.count, packed.flops
        rows = row_lengths(packed.batch)
        flops = sum(map(self._table.total, rows)) + len(packed.logit_places) * self._table.logit_flops
        return sum(rows), flops

    def _vectors(self, states: torch.Tensor, rows: Indices) -> torch.Tensor:
        chosen = states[torch.from_numpy(rows).to(states.device)]
        return self._head(chosen) if self._head.kind == "classes" else chosen

    def _check_size(self, packed: PackedStep, requests: Sequence[Request]) -> None:
        count, _ = self._computed(packed)
        if count > self._most_tokens and (len(requests) > 1 or halves(requests[0]) is not None):
            raise StepTooLargeError(
                f"a step has {count} tokens; {self._most_tokens} fit into memory",
                value=count,
                expected=self._most_tokens,
            )
