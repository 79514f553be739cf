"""A template that loops is an error, and later templates render normally."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from moepass.models.checkpoint.checkpoint_folders import Prompt, load_tokenizer
from moepass.runtime.serving.questions.prompts import PromptWriter, RenderLimit, RenderTimeoutError
from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def writer(tmp_path: Path) -> PromptWriter:
    tokenizer: Any = load_tokenizer(save_tiny_checkpoint(tmp_path / "tiny"))
    tokenizer.chat_template = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
    prompt_writer = PromptWriter(tokenizer, Prompt(), 64)
    prompt_writer.render_limit = RenderLimit(0.05)
    return prompt_writer


def _expect_loop_then_answer(writer: PromptWriter) -> None:
    for _ in range(3):
        with pytest.raises(RenderTimeoutError, match="check it for a loop"):
            writer.ask("loop")
        assert writer.ask("the cat") == "the cat"


def test_a_template_that_loops_is_an_error(writer: PromptWriter) -> None:
    _expect_loop_then_answer(writer)


def test_a_loop_in_another_thread_ends_there(writer: PromptWriter) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _expect_loop_then_answer(writer)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []
