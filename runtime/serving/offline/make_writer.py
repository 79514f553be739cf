"""Prompt writers for checkpoints. They need no model, so that texts can be encoded before the model is loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moepass.models.checkpoint.checkpoint_folders import (
    PROMPT_FILE,
    Prompt,
    load_prompt,
    load_tokenizer,
    read_prompt,
)
from moepass.models.errors import InputError
from moepass.runtime.serving.questions.prompts import PromptWriter


def make_writer(folder: Path, template: str | None) -> PromptWriter:
    """Return a writer of prompts with the requested template; it takes texts of any length.

    Raises:
        InputError: The checkpoint has no such template, or the file does not exist.
    """
    tokenizer = load_tokenizer(folder)
    prompt = load_prompt(folder)
    if template == "chat" and not tokenizer.chat_template:
        raise InputError(
            "template is 'chat', but this checkpoint has no chat template; use prompt, plain or a file",
            name="template",
            value=template,
        )
    if template == "prompt" and not (folder / PROMPT_FILE).is_file():
        raise InputError(
            f"template is 'prompt', but this checkpoint has no {PROMPT_FILE}; use chat, plain or a file",
            name="template",
            value=template,
        )
    if template == "plain":
        prompt = msgspec.structs.replace(prompt, template=Prompt().template, max_text_tokens=None, label_names={})
    elif template not in (None, "chat", "prompt"):
        file = Path(template)
        if not file.is_file():
            raise InputError(
                f"template is {template!r}, but no such file exists; use chat, prompt, plain, or a file in the format "
                f"of {PROMPT_FILE}",
                name="template",
                value=template,
                expected=("chat", "prompt", "plain", "a file"),
            )
        prompt = read_prompt(file)
    return PromptWriter(tokenizer, prompt, 1 << 30, takes_chat=template in (None, "chat"))
