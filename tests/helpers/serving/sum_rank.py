"""A rank without a model, as a process: it answers every read with the sum of the tokens of its sequence.

    python -m tests.helpers.serving.sum_rank ENDPOINT RANK ATTEMPT [OPTION]...

Options: `--step-seconds S` is the duration of a step; `--fails` ends the process before it is ready; `--error` fails
every step; `--hangs` never ends a step; `--start-seconds S` is the duration of the start; `--dies-after S` ends the
process S seconds after it is ready.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
import zmq

from moepass.models.errors import InputError
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult
from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, ReadAnswer, Usage
from moepass.runtime.serving.requests.request import NO_TOKENS, Request
from moepass.runtime.serving.workers.messages import rank_name
from moepass.runtime.serving.workers.rank_loop import Mailbox, run_rank

STEP_TOKENS = 40
NO_FLOATS = np.empty(0, np.float32)


class SumEngine:
    facts = EngineFacts("trie", STEP_TOKENS, 1000.0, 1000, 500, 512, True, None, (), {"attention": "none"}, 4096)

    def __init__(self, step_seconds: float, fails: bool, hangs: bool = False) -> None:
        self.step_seconds, self.fails, self.hangs = step_seconds, fails, hangs

    def check(self, request: Request) -> None:
        if any(int(piece.tokens.max()) >= self.facts.vocabulary_size for piece in request.pieces):
            raise InputError("a token is beyond the vocabulary")

    def choose(self, waiting: Iterable[Request]) -> list[Request]:
        chosen, tokens = [], 0
        for request in waiting:
            chosen.append(request)
            tokens += sum(len(piece.tokens) for piece in request.pieces)
            if tokens >= STEP_TOKENS:
                break
        return chosen

    def step(self, requests: Sequence[Request], upcoming: object = None) -> StepResult:
        if self.fails:
            raise RuntimeError("this rank only fails")
        if self.hangs:
            threading.Event().wait()
        time.sleep(self.step_seconds)
        answers = tuple(self._answer(request) for request in requests)
        return StepResult(answers, (), (), 1, 1, 1, self.step_seconds, 0.0)

    def _answer(self, request: Request) -> Answer:
        sums: list[int] = []
        pieces = []
        for piece in request.pieces:
            sums.append((sums[piece.parent] if piece.parent >= 0 else 0) + int(piece.tokens.sum()))
            value = np.array([sums[-1]], np.float32)
            pieces.append(PieceAnswer(tuple(ReadAnswer(value, NO_TOKENS, NO_FLOATS) for _ in piece.reads)))
        return Answer(request.id, tuple(pieces), Usage(len(request.pieces), 0, 1))

    def compilations(self) -> int:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("rank", type=int)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--start-seconds", type=float, default=0.0)
    parser.add_argument("--dies-after", type=float, default=0.0)
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--error", action="store_true")
    parser.add_argument("--hangs", action="store_true")
    asked = parser.parse_args()
    assert sys.stdin.buffer.read() == b"options"
    if asked.fails:
        sys.exit(3)
    time.sleep(asked.start_seconds)
    if asked.dies_after:
        threading.Timer(asked.dies_after, os._exit, (9,)).start()
    engine = SumEngine(asked.step_seconds, asked.error, asked.hangs)
    name, parent = rank_name(asked.rank, asked.attempt), os.getppid()
    mailbox = Mailbox(zmq.Context(), asked.endpoint, name, engine.check, lambda: os.getppid() != parent)
    try:
        run_rank(engine, mailbox)
    finally:
        mailbox.close()


if __name__ == "__main__":
    main()
