"""The engine of one rank: requests are packed into a step, the step runs, and its states become answers.

Pseudo-code
    step(requests):
        match the cached blocks of each request
        pack the requests: every distinct needed token once; reserve cache blocks for prefixes that are worth keeping
        run the step: states at the positions that are read
        compute scores of tokens, a few rows at a time, then vectors
        if the device still computes: match and pack the requests of the next step
        copy scores and vectors to the host, and make answers
        out of memory: run two halves instead, and limit later steps
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.pack import PackedStep, pack
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.batching.step_flops import FlopsTable, RequestCost, request_cost, row_cost, unshared_flops
from moepass.runtime.serving.cache.block_index import BlockIndex, StepLease
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.plain_outputs import StatesRunner
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult
from moepass.runtime.serving.engine.step_reads import StepReads
from moepass.runtime.serving.engine.step_view import StepWatch
from moepass.runtime.serving.engine.token_scores import score_tokens, token_scores
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import SequenceTooLongError
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.request_parts import halves, merged_answer
from moepass.runtime.serving.requests.view import EngineView
from moepass.runtime.system.device_errors import is_out_of_memory
from moepass.runtime.system.joint_copies import download
from moepass.runtime.torch_private import frames_compiled

logger = logging.getLogger("moepass")


class StepTooLargeError(InputError):
    """A step has more tokens than fit into memory, and can be split."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PreparedStep:
    """Requests that are packed, and the lease of the cached blocks that they read."""

    requests: list[Request]
    packed: PackedStep
    lease: StepLease


class ModelEngine:
    """A `StepEngine` that runs a model in this process.

    `index` is that of the runner's cache blocks; it has 0 blocks if there is no cache. `exposed_seconds` returns the
    time that computation has waited for experts. With `runs_ahead`, the device still computes when the runner returns.
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
        exposed_seconds: Callable[[], float] = lambda: 0.0,
        block_bytes: int = 0,
        runs_ahead: bool = False,
    ) -> None:
        self._head, self._runner, self._table, self._key, self._index = head, runner, table, key, index
        self.facts, self._exposed_seconds = facts, exposed_seconds
        self._caches = index.block_count > 0
        self._most_tokens = facts.most_tokens
        self._costs: dict[str, RequestCost] = {}
        self._watch = StepWatch(index, block_bytes)
        self._runs_ahead = runs_ahead
        self._prepared: PreparedStep | None = None

    def be_ready(self, flops_per_second: float) -> None:
        """Clear the cache after the warm-up, and store its measured speed in the facts."""
        self._index.evict(self._index.block_count)
        self._index.drain_events()
        self.facts = dataclasses.replace(self.facts, flops_per_second=flops_per_second)
        self._watch.forget()

    def compilations(self) -> int:
        """Return the number of graphs that this process has compiled."""
        return frames_compiled()[0]

    def view(self) -> EngineView:
        """Return the last step and the occupancy of the cache. May be called from any thread."""
        return self._watch.view()

    def check(self, request: Request) -> None:
        """Raise InputError if the model cannot answer `request`."""
        facts = self.facts
        longest = max(depth + len(piece.tokens) for depth, piece in zip(request.depths(), request.pieces, strict=True))
        for piece in request.pieces:
            asked = [piece.tokens, *(read.tokens for read in piece.reads)]
            lowest, highest = (bound([bound(tokens, initial=0) for tokens in asked]) for bound in (np.min, np.max))
            if lowest < 0 or highest >= facts.vocabulary_size:
                wrong = int(lowest if lowest < 0 else highest)
                text = (
                    f"token {wrong} is not in the model's vocabulary of tokens 0 to {facts.vocabulary_size - 1}; if "
                    "the tokenizer made it, tokenizer and model do not belong together"
                )
                raise InputError(text, name="tokens", value=wrong, expected=range(facts.vocabulary_size))
            if (piece.reads or piece.is_scored) and not facts.predicts_tokens:
                raise InputError("the model has no head that predicts tokens; only vectors can be read", name="reads")
            has_mean = facts.vector == "embedding"
            if piece.vector is not None and (facts.vector is None or (piece.vector == "mean" and not has_mean)):
                text = f"the model's head returns no {piece.vector!r} vector of a sequence"
                raise InputError(text, name="vector", value=piece.vector)
        limit = min(facts.max_sequence_tokens, facts.most_tokens)
        if longest > limit:
            text = f"a sequence of request {request.id} has {longest} tokens; this engine computes at most {limit}"
            raise SequenceTooLongError(text, name="tokens", value=longest, expected=limit)

    def choose(self, waiting: Iterable[Request]) -> list[Request]:
        """Return the leading requests of `waiting`, at least one, that fill a step up to saturation.

        They fit into memory, unless the first one alone does not.
        """
        chosen: list[Request] = []
        seen: set[bytes] = set()
        tokens = flops = 0
        # Every choice considers a waiting request until it is chosen, so its cost is computed once.
        earlier_costs, self._costs = self._costs, {}
        for request in waiting:
            if request.id in earlier_costs:
                self._costs[request.id] = earlier_costs[request.id]
            cost = self._cost_of(request)
            new_tokens, new_flops = cost.tokens, cost.flops
            for name, block_flops in zip(cost.hashes.hashes, cost.block_flops, strict=True):
                if name in seen:
                    new_tokens -= BLOCK_TOKENS
                    new_flops -= block_flops
                seen.add(name)
            new_tokens = max(new_tokens, 1)
            if chosen and tokens + new_tokens > self._most_tokens:
                break
            chosen.append(request)
            tokens += new_tokens
            flops += new_flops
            if flops >= self.facts.saturation_flops:
                break
        return chosen

    def step(
        self,
        requests: Sequence[Request],
        upcoming: Callable[[], list[Request]] | None = None,
        *,
        compares: bool = True,
    ) -> StepResult:
        """Compute `requests`, in several steps if memory does not suffice for one.

        `upcoming` returns the likely requests of the next step, which are packed while the device computes this one.
        Without `compares`, `unshared_flops` of the result is 0; counting it takes about as long as packing.
        """
        start, exposed = time.perf_counter(), self._exposed_seconds()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.requests != [*requests]:
            prepared.lease.release()
            prepared = None
        try:
            results = self._run_or_split(requests, prepared, upcoming)
        finally:
            for request in requests:
                self._costs.pop(request.id, None)
        result = StepResult(
            answers=tuple(answer for partial in results for answer in partial.answers),
            stored=tuple(block for partial in results for block in partial.stored),
            evicted=tuple(block for partial in results for block in partial.evicted),
            tokens=sum(partial.tokens for partial in results),
            flops=sum(partial.flops for partial in results),
            unshared_flops=unshared_flops(requests, self._table) if compares else 0,
            seconds=time.perf_counter() - start,
            exposed_seconds=self._exposed_seconds() - exposed,
            refused=tuple(refusal for partial in results for refusal in partial.refused),
            retries=len(results) - 1,
        )
        self._watch.ended(result, len(requests))
        return result

    def answer_now(self, request: Request) -> Answer:
        """Return the answer to one request, computed in a separate step.

        Raises InputError as `check` does, or if the request needs more memory than the device has.
        """
        self.check(request)
        result = self.step([request])
        for _, reason in result.refused:
            raise InputError(f"request {request.id} cannot be computed: {reason}", name="request")
        return result.answers[0]

    def _cost_of(self, request: Request) -> RequestCost:
        if request.id not in self._costs:
            is_trie = self.facts.form == "trie"
            self._costs[request.id] = (
                request_cost(request, self._table, self._key) if is_trie else row_cost(request, self._table)
            )
        return self._costs[request.id]

    # ---- Steps

    def _run_or_split(
        self,
        requests: Sequence[Request],
        prepared: PreparedStep | None = None,
        upcoming: Callable[[], list[Request]] | None = None,
    ) -> list[StepResult]:
        try:
            return [self._run_step(prepared or self._prepare(requests), upcoming)]
        except Exception as error:
            has_no_memory = is_out_of_memory(error)
            if not (has_no_memory or isinstance(error, StepTooLargeError)):
                raise
        # The retry runs outside of the except block, because the error's frames hold the tensors of the failed step.
        if has_no_memory:
            torch.cuda.empty_cache()  # cached blocks of other sizes; does nothing on a CPU
            largest = max(sum(len(piece.tokens) for piece in request.pieces) for request in requests)
            self._most_tokens = min(self._most_tokens, max(largest, self._most_tokens // 2))
            logger.warning("out of memory in a step: steps are limited to %d tokens from now on", self._most_tokens)
        if len(requests) > 1:
            middle = len(requests) // 2
            return [*self._run_or_split(requests[:middle]), *self._run_or_split(requests[middle:])]
        return self._halved_request(requests[0])

    def _halved_request(self, request: Request) -> list[StepResult]:
        """Compute an oversized request as two halves of its questions, or refuse it if it has only one question."""
        both_halves = halves(request)
        if both_halves is None:
            tokens = sum(len(piece.tokens) for piece in request.pieces)
            reason = f"its {tokens} tokens need more memory than the device has left"
            return [StepResult((), (), (), 0, 0, refused=((request.id, reason),))]
        done: list[list[StepResult]] = []
        for number, half in enumerate(both_halves):
            # The half gets a new id, because costs are remembered by id.
            request_half = half.of(request, f"{request.id}/{number}")
            done.append(self._run_or_split([request_half]))
            self._costs.pop(request_half.id, None)
        steps = [step for results in done for step in results]
        if any(step.refused for step in steps):
            reason = next(reason for step in steps for _, reason in step.refused)
            refused = ((request.id, reason),)
            return [dataclasses.replace(step, answers=(), refused=refused * (step is steps[0])) for step in steps]
        answers = [answer for results in done for step in results for answer in step.answers]
        answer = merged_answer(request, list(zip(both_halves, answers, strict=True)))
        return [dataclasses.replace(step, answers=(answer,) if step is steps[0] else ()) for step in steps]

    def _prepare(self, requests: Sequence[Request]) -> PreparedStep:
        lease = self._index.lease()
        try:
            matched = [lease.match(self._cost_of(request).hashes) for request in requests] if self._caches else None
            return PreparedStep([*requests], pack(requests, self._table, matched), lease)
        except BaseException:
            lease.release()
            raise

    def _prepare_next(self, upcoming: Callable[[], list[Request]]) -> None:
        """Pack the requests of the next step, if there are any."""
        # An error of these requests must not fail this step; the next one packs them again, and raises it.
        with contextlib.suppress(Exception):
            if requests := upcoming():
                self._prepared = self._prepare(requests)

    def _run_step(self, prepared: PreparedStep, upcoming: Callable[[], list[Request]] | None) -> StepResult:
        requests, packed = prepared.requests, prepared.packed
        with prepared.lease as lease:
            self._watch.packed(packed.batch)
            count, _ = self._computed(packed)
            if count > self._most_tokens and (len(requests) > 1 or halves(requests[0]) is not None):
                raise StepTooLargeError(f"a step has {count} tokens, and at most {self._most_tokens} fit into memory")
            blocks = lease.reserve(packed.offered)
            batch = packed.storing(blocks)
            reads = StepReads(packed, requests, keeps_scores=self._caches)
            # If the cache holds all outputs, nothing runs.
            is_cached = not len(batch.output_positions)
            states, indices = (torch.empty(0), reads.indices) if is_cached else self._runner.run(batch, reads.indices)
            *score_indices, vector_rows = indices
            on_device = score_tokens(states, self._head, self.facts.vocabulary_size, reads.wanted, score_indices)
            vectors_on_device = self._vectors(states, vector_rows, reads.vector_counts)
            # The device writes the new blocks before a later step reads them.
            lease.commit()
        if self._runs_ahead and upcoming is not None:
            self._prepare_next(upcoming)
        downloaded, vectors = download((on_device, vectors_on_device))
        scores = token_scores(downloaded, reads.wanted)
        answers = reads.answers(scores, vectors.numpy(), self._index.scores)
        if self._caches:
            self._index.scores.write(packed.written_slots(blocks), reads.scored(scores, self._index.scores))
        events = self._index.drain_events()
        return StepResult(
            answers,
            tuple(name for name, kind in events.items() if kind == "stored"),
            tuple(name for name, kind in events.items() if kind == "evicted"),
            *self._computed(packed),
        )

    def _computed(self, packed: PackedStep) -> tuple[int, int]:
        """Return the number of tokens that a step computes, and their FLOPs.

        In padded rows, every row counts all of its tokens, also those that other rows share. Padding does not count.
        """
        if self.facts.form == "trie":
            return packed.batch.count, packed.flops
        rows = [len(positions) for positions in packed.batch.sequences()]
        flops = sum(map(self._table.total, rows)) + len(packed.logit_places) * self._table.logit_flops
        return sum(rows), flops

    def _vectors(self, states: torch.Tensor, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the means [vectors, width] of the head's outputs over `counts` rows each, in fp32."""
        if not counts:
            return torch.empty(0, device=states.device)
        outputs = states[rows]
        if self._head.kind == "classes":
            outputs = self._head(outputs)
        if max(counts) == 1:
            return outputs.float()
        return torch.stack([vector_rows.float().mean(0) for vector_rows in outputs.split(counts)])
