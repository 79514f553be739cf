"""What a rank's loop asks of an engine, and what a step gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request

StepForm = Literal["trie", "rows"]


def step_form_text(refusal: str | None) -> str:
    """How steps are computed, for people; `refusal` is why they are no tries, or None."""
    return "tries: every shared prefix is computed once" if refusal is None else f"padded rows, because {refusal}"


@dataclasses.dataclass(frozen=True)
class EngineFacts:
    """What an engine serves, and how much at once.

    form                  "trie": shared prefixes are computed once; "rows": every sequence is a padded row
    saturation_flops      a step with so many hides all transfers of experts; it is full then
    full_step_tokens      tokens that make as many, each as the first of its sequence
    flops_per_second      that a full step reaches
    most_tokens           that fit into memory in one step
    max_sequence_tokens   of one sequence, as the model takes them
    vector                what `TokenPiece.vector` is answered with, None where it is not
    notes                 how the model runs, for people: a name and a sentence each
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


@dataclasses.dataclass(frozen=True, eq=False)
class StepResult:
    """What a step gave.

    answers            in the order of the requests, but for those that are
    refused            with a reason: alone they take more memory than there is
    stored, evicted    hashes of blocks that the cache holds from now on, or holds no more
    tokens, flops      that were computed; `unshared_flops`: each request alone, without a cache
    seconds            that it took; of them computation waited for experts in `exposed_seconds`
    retries            how often it was split because memory did not suffice
    """

    answers: tuple[Answer, ...]
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]
    tokens: int
    flops: int
    unshared_flops: int
    seconds: float
    exposed_seconds: float
    refused: tuple[tuple[str, str], ...] = ()
    retries: int = 0


class StepEngine(Protocol):
    """Answers requests in steps. One thread calls it, but for `check`."""

    @property
    def facts(self) -> EngineFacts: ...

    def check(self, request: Request) -> None:
        """Raises InputError for a request that it can never answer. Any thread may call this."""
        ...

    def choose(self, waiting: Iterable[Request]) -> list[Request]:
        """The first of `waiting`, as many as one step takes, and one at least."""
        ...

    def step(self, requests: Sequence[Request]) -> StepResult:
        """Compute `requests`. Where memory does not suffice, in several steps."""
        ...

    def compilations(self) -> int:
        """Graphs that were compiled in this process so far."""
        ...
