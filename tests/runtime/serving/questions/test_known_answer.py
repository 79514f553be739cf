"""A model that fails the probe of its checkpoint is refused with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moepass.models.checkpoint.checkpoint_folders import KnownAnswer, Prompt, load_prompt, load_tokenizer, resolve_model
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import CheckpointError
from moepass.runtime.serving.questions.known_answer import check_known_answer
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from tests.helpers.serving.byte_checkpoint import classifier, save_byte_checkpoint
from tests.helpers.serving.reference_backend import ReferenceBackend
from tests.helpers.serving.served import CHAT_TEMPLATE

Ask = Callable[[Request], Answer]


def ask_of(backend: ReferenceBackend) -> Ask:
    return lambda request: asyncio.run(backend.answer(request, timeout_seconds=9))


@pytest.fixture(scope="module")
def demo() -> tuple[PromptWriter, Ask]:
    folder = resolve_model("demo")
    return PromptWriter(load_tokenizer(folder), load_prompt(folder), 512), ask_of(ReferenceBackend(load_model(folder)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_checkpoint(tmp_path_factory.mktemp("probed") / "tiny")


def with_prompt(writer: PromptWriter, **changes: object) -> PromptWriter:
    return PromptWriter(writer.tokenizer, msgspec.structs.replace(writer.prompt, **changes), 512)


def passes(writer: PromptWriter, ask: Ask, class_names: tuple[str, ...] = ()) -> bool:
    try:
        check_known_answer(writer, ask, class_names)
    except CheckpointError:
        return False
    return True


def test_the_demo_passes_its_probe_and_fails_a_wrong_one(demo: tuple[PromptWriter, Ask]) -> None:
    writer, ask = demo
    probe = writer.prompt.probe
    assert probe is not None
    check_known_answer(writer, ask)
    wrong = msgspec.structs.replace(probe, expected="Dutch")
    with pytest.raises(
        CheckpointError, match=r"best answer is 'German' with 0.99.* expected answer 'Dutch' has 0.000"
    ) as caught:
        check_known_answer(with_prompt(writer, probe=wrong), ask)
    assert (caught.value.value, caught.value.expected) == ("German", "Dutch")


def test_a_prompt_without_a_probe_asks_nothing(demo: tuple[PromptWriter, Ask]) -> None:
    def ask(request: Request) -> Answer:
        raise AssertionError("something was asked")

    check_known_answer(with_prompt(demo[0], probe=None), ask)


def test_a_probe_with_an_unknown_label_is_an_error(demo: tuple[PromptWriter, Ask]) -> None:
    writer, ask = demo
    probe = KnownAnswer("ein Text", ("German", "Klingon"), "German")
    with pytest.raises(CheckpointError, match=r"cannot be asked: .*'Klingon' is not one of them"):
        check_known_answer(with_prompt(writer, probe=probe), ask)


def test_a_chat_model_is_probed_through_its_chat_template(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.chat_template = CHAT_TEMPLATE
    backend = ReferenceBackend(load_model(checkpoint))
    results = []
    for expected in ("red", "blue"):
        probe = KnownAnswer("The sky.", ("red", "blue"), expected, "Which colour?")
        results.append(passes(PromptWriter(tokenizer, Prompt(probe=probe), 512), ask_of(backend)))
    # The model has random weights, so it gives one of the two answers. Both probes have the same prompt.
    assert sorted(results) == [False, True]
    first, second = (b"".join(piece.tokens.tobytes() for piece in asked.pieces) for asked in backend.requests)
    assert first == second


def test_a_model_that_scores_classes_must_know_its_class(checkpoint: Path) -> None:
    names = ("bad", "good", "neither")
    ask = ask_of(ReferenceBackend(classifier(3), names))
    results = []
    for expected in names:
        probe = KnownAnswer("The cat sat.", names, expected)
        results.append(passes(PromptWriter(load_tokenizer(checkpoint), Prompt(probe=probe), 512), ask, names))
    assert sorted(results) == [False, False, True]
    unknown = PromptWriter(load_tokenizer(checkpoint), Prompt(probe=KnownAnswer("x", ("good", "ugly"), "good")), 512)
    with pytest.raises(CheckpointError, match="'ugly' is not one of the model's classes: bad, good, neither"):
        check_known_answer(unknown, ask, names)
