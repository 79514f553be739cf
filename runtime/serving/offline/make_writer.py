"""A writer of prompts for a checkpoint. It loads no model, so that texts can be encoded before there is one."""

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
    """A writer of prompts, by the template that is asked for; it takes texts of any length."""
    tokenizer = load_tokenizer(folder)
    own = load_prompt(folder)
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
        own = msgspec.structs.replace(own, template=Prompt().template, max_text_tokens=None, label_names={})
    elif template not in (None, "chat", "prompt"):
        file = Path(template)
        if not file.is_file():
            raise InputError(
                f"template is {template!r}, and there is no such file; it must be chat, prompt, plain, or a file as "
                f"{PROMPT_FILE}",
                name="template",
                value=template,
                expected=("chat", "prompt", "plain", "a file"),
            )
        own = read_prompt(file)
    return PromptWriter(tokenizer, own, 1 << 30, takes_chat=template in (None, "chat"))
