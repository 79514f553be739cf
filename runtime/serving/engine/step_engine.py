"""The protocol between a rank's loop and its engine, and the result of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from moepass.passes.ir.planner_decisions import NO_MEMORY, DeviceMemory
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import ClassActivation
from moepass.runtime.serving.requests.request import Request

StepForm = Literal["trie", "rows"]


def step_form_text(refusal: str | None) -> str:
    """Describe how steps are computed; `refusal` is the reason why they are not tries, or None."""
    return "tries: every shared prefix is computed once" if refusal is None else f"padded rows, because {refusal}"


@dataclasses.dataclass(frozen=True)
class EngineFacts:
    """The properties and limits of an engine.

    `form` "trie" computes shared prefixes once; "rows" computes every sequence as a padded row. A full step of
    `saturation_flops`, or of `full_step_tokens` that are each the first of their sequence, hides all transfers of
    experts. A step of `most_tokens` fits into memory, and the model limits a sequence to `max_sequence_tokens`.
    `vector` is the kind of the vectors that `TokenPiece.vector` returns, None if the model has none; routes apply
    `class_activation` to class scores, which skip `padding_token` at the end of a sequence. `notes` describe how the
    model runs, by name, for people. `memory` is that of a full step, or of the largest step if a full one does not fit,
    and `memory_limit_bytes` the limit of its sum.
    """

    form: StepForm
    saturation_flops: int
    flops_per_second: float
    most_tokens: int
    max_sequence_tokens: int
    vocabulary_size: int
    predicts_tokens: bool
    vector: Literal["class scores", "embedding"] | None
    class_names: tuple[str, ...]
    notes: Mapping[str, str]
    full_step_tokens: int
    class_activation: ClassActivation = "softmax"
    padding_token: int | None = None
    memory: DeviceMemory = NO_MEMORY
    memory_limit_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a step.

    `answers` are in the order of the requests, without the refused ones. `unshared_flops` are the FLOPs if each request
    ran alone and without a cache. `exposed_seconds` is the time that computation waited for experts. `refused` are ids
    of requests that need more memory than the device has, with a reason. `retries` is how often the step was split for
    lack of memory.
    """

    answers: tuple[Answer, ...]
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]
    tokens: int
    flops: int
    unshared_flops: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    refused: tuple[tuple[str, str], ...] = ()
    retries: int = 0


class StepEngine(Protocol):
    """Answers requests in steps. One thread calls it, except for `check`."""

    @property
    def facts(self) -> EngineFacts:
        """The properties and limits of the engine."""

    def check(self, request: Request) -> None:
        """Raise InputError if the engine can never answer `request`. May be called from any thread."""

    def choose(self, waiting: Iterable[Request]) -> list[Request]:
        """Return the leading requests of `waiting` that form one step, at least one."""

    def step(self, requests: Sequence[Request], upcoming: Callable[[], list[Request]] | None = None) -> StepResult:
        """Compute `requests`, in several steps if memory does not suffice for one.

        `upcoming` returns the likely requests of the next step, or none if they are not known yet.
        """

    def compilations(self) -> int:
        """Return the number of graphs that this process has compiled."""
