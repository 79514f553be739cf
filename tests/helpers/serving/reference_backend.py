"""A backend that computes every path of a request separately, with plain transformers."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import torch
from transformers import PreTrainedModel

from moepass.runtime.serving.engine.model_head import class_activation
from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, ReadAnswer, ScoredTokens, Usage
from moepass.runtime.serving.requests.backend import BackendStatus, QueueFullError
from moepass.runtime.serving.requests.request import Request, TokenPiece
from moepass.runtime.serving.requests.view import BackendView
from tests.helpers.serving.piece_paths import piece_path


class ReferenceBackend:
    """A backend that answers with `model`, which is causal or classifies sequences.

    Attributes:
        requests: The received requests.
        priorities: The priority of each request.
        admitted: Whether each request had been admitted before.
        error: An exception to raise instead of an answer.
        is_full: Whether no request is admitted.
        gate: An event to wait for before each answer, or None.
        cancelled: Number of requests that were cancelled while they waited for `gate`.
        seen: The result of `view`.
    """

    def __init__(self, model: PreTrainedModel, class_names: tuple[str, ...] = ()) -> None:
        self.model = model
        self.class_names = class_names
        self.requests: list[Request] = []
        self.priorities: list[int] = []
        self.admitted: list[bool] = []
        self.error: Exception | None = None
        self.is_full = False
        self.gate: asyncio.Event | None = None
        self.cancelled = 0
        self.state = "ready"
        self.seen = BackendView()

    def status(self) -> BackendStatus:
        config = self.model.config
        is_classifier = bool(self.class_names)
        return BackendStatus(
            state=self.state,
            max_sequence_tokens=config.max_position_embeddings,
            vocabulary_size=config.vocab_size,
            predicts_tokens=not is_classifier,
            vector="class scores" if is_classifier else "embedding",
            class_names=self.class_names,
            class_activation=class_activation(config),
            padding_token=config.pad_token_id if is_classifier else None,
            details={"attention": "eager"},
            metrics={"requests": float(len(self.requests))},
        )

    async def view(self) -> BackendView:
        return self.seen

    def check_room(self) -> None:
        if self.is_full:
            raise QueueFullError("it is full", retry_after_seconds=3.0)

    async def answer(
        self, request: Request, *, priority: int = 0, timeout_seconds: float, is_admitted: bool = False
    ) -> Answer:
        self.requests.append(request)
        self.admitted.append(is_admitted)
        self.priorities.append(priority)
        if self.error is not None:
            raise self.error
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self._computed(request)

    def _computed(self, request: Request) -> Answer:
        parents = {piece.parent for piece in request.pieces}
        answers: dict[int, PieceAnswer] = {}
        for leaf in (number for number in range(len(request.pieces)) if number not in parents):
            self._answer_path(request, piece_path(request, leaf), answers)
        tokens = sum(len(piece.tokens) for piece in request.pieces)
        return Answer(request.id, tuple(answers[number] for number in range(len(request.pieces))), Usage(tokens, 0, 0))

    @torch.no_grad()
    def _answer_path(self, request: Request, path: tuple[int, ...], found: dict[int, PieceAnswer]) -> None:
        tokens = np.concatenate([request.pieces[number].tokens for number in path])
        output = self.model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], output_hidden_states=True)
        log_probabilities = None
        if not self.class_names:
            log_probabilities = output.logits[0].double().log_softmax(-1).float().numpy()
        start = 0
        for number in path:
            piece = request.pieces[number]
            end = start + len(piece.tokens)
            if number not in found:
                answer = PieceAnswer()
                if log_probabilities is not None:
                    answer = _token_answers(piece, tokens, start, log_probabilities)
                if piece.vector is not None:
                    answer = dataclasses.replace(answer, vector=self._vector(piece, output, tokens[:end]))
                found[number] = answer
            start = end

    def _vector(self, piece: TokenPiece, output: object, tokens: np.ndarray) -> np.ndarray:
        if self.class_names:
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            return self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float().numpy()
        states = output.hidden_states[-1][0, : len(tokens)]
        return (states[-1] if piece.vector == "last" else states.mean(0)).float().numpy()


def _token_answers(piece: TokenPiece, tokens: np.ndarray, start: int, table: np.ndarray) -> PieceAnswer:
    reads = []
    for read in piece.reads:
        row = table[start + read.index]
        best = np.argsort(-row, kind="stable")[: read.top].astype(np.int32)
        reads.append(ReadAnswer(row[read.tokens], best, row[best]))
    scored = None
    if piece.is_scored:
        count, top = len(piece.tokens), piece.scored_top
        log_probabilities = np.full(count, np.nan, np.float32)
        best_tokens, best = np.full((count, top), -1, np.int32), np.full((count, top), np.nan, np.float32)
        for position in range(count):
            if start + position == 0:
                continue
            row, token = table[start + position - 1], piece.tokens[position]
            log_probabilities[position] = row[token]
            best_tokens[position] = np.argsort(-row, kind="stable")[:top]
            best[position] = row[best_tokens[position]]
        scored = ScoredTokens(log_probabilities, best_tokens, best)
    return PieceAnswer(tuple(reads), scored)
