"""Texts rendered and encoded chunk by chunk, optionally in a thread that reads ahead.

Encoding needs no model, so texts can be encoded before the model is loaded. Tokenizers release the GIL, so encoding can
overlap with imports and with the model's computation.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from moepass.models.checkpoint.checkpoint_folders import PROMPT_FILE, Prompt, load_prompt, load_tokenizer, read_prompt
from moepass.models.errors import InputError
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.requests.request import Tokens

# A chunk has at most CHUNK_TEXTS texts, and ends with the text that reaches CHUNK_CHARACTERS.
CHUNK_TEXTS, CHUNK_CHARACTERS = 1024, 1 << 20


class NamedText(Protocol):
    """A text, and its name in errors."""

    @property
    def name(self) -> str:
        """The name of the text in errors."""

    @property
    def text(self) -> str:
        """The text."""


_Text = TypeVar("_Text", bound=NamedText)
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class EncodedChunk(Generic[_Text]):
    """A chunk of texts; for each text its rendered prompt and tokens, or the error if it cannot be encoded."""

    texts: list[_Text]
    prompts: list[tuple[str, Tokens] | InputError]


def make_writer(folder: Path, template: str | None) -> PromptWriter:
    """Return a PromptWriter for `template` ("chat", "prompt", "plain" or a file), without a limit on text length.

    Raises InputError if the checkpoint has no such template, or if there is no such file.
    """
    tokenizer = load_tokenizer(folder)
    prompt = load_prompt(folder)
    if template == "chat" and not tokenizer.chat_template:
        text = "template is 'chat', but this checkpoint has no chat template; use prompt, plain or a file"
        raise InputError(text, name="template", value=template)
    if template == "prompt" and not (folder / PROMPT_FILE).is_file():
        text = f"template is 'prompt', but this checkpoint has no {PROMPT_FILE}; use chat, plain or a file"
        raise InputError(text, name="template", value=template)
    if template == "plain":
        prompt = msgspec.structs.replace(prompt, template=Prompt().template, max_text_tokens=None, label_names={})
    elif template not in (None, "chat", "prompt"):
        file = Path(template)
        if not file.is_file():
            text = (
                f"template is {template!r}, but no such file exists; use chat, prompt, plain, or a file in the format "
                f"of {PROMPT_FILE}"
            )
            raise InputError(text, name="template", value=template, expected=("chat", "prompt", "plain", "a file"))
        prompt = read_prompt(file)
    return PromptWriter(tokenizer, prompt, 1 << 30, takes_chat=template in (None, "chat"))


def encoded_chunks(writer: PromptWriter, texts: Iterable[_Text]) -> Iterator[EncodedChunk[_Text]]:
    """Yield the chunks of `texts`, encoded. A chunk is read only when the caller asks for it."""
    source = iter(texts)
    while True:
        chunk: list[_Text] = []
        characters = 0
        while len(chunk) < CHUNK_TEXTS and characters < CHUNK_CHARACTERS and (text := next(source, None)) is not None:
            chunk.append(text)
            characters += len(text.text)
        if not chunk:
            return
        yield EncodedChunk(chunk, _encode_chunk(writer, chunk))


@contextlib.contextmanager
def read_ahead(source: Iterable[_Item], most: int) -> Iterator[Iterator[_Item]]:
    """Iterate over `source` in a thread that stays up to `most` items ahead. No item may be None.

    An exception of `source` is raised at its position. When the block ends, the thread finishes its current item
    first, so `source` must not block for long.
    """
    iterator = iter(source)
    pool = ThreadPoolExecutor(1, "moepass-read-ahead")
    try:
        waiting: deque[Future[_Item | None]] = deque(pool.submit(next, iterator, None) for _ in range(most))

        def read_in_order() -> Iterator[_Item]:
            while (item := waiting.popleft().result()) is not None:
                waiting.append(pool.submit(next, iterator, None))
                yield item

        yield read_in_order()
    finally:
        pool.shutdown(cancel_futures=True)


def named_error(error: InputError, name: str) -> InputError:
    """Return the error with the text's name as prefix, unless its message starts with the name already."""
    return error if str(error).startswith(name) else InputError(f"{name}: {error}", name=name, value=error.value)


def _encode_chunk(writer: PromptWriter, chunk: Sequence[NamedText]) -> list[tuple[str, Tokens] | InputError]:
    try:
        rendered, encoded = writer.encode_texts([_checked(text) for text in chunk], [text.name for text in chunk])
    except InputError as error:
        if len(chunk) == 1:
            return [named_error(error, chunk[0].name)]
        middle = len(chunk) // 2
        return [*_encode_chunk(writer, chunk[:middle]), *_encode_chunk(writer, chunk[middle:])]
    return list(zip(rendered, encoded, strict=True))


def _checked(text: NamedText) -> str:
    if not text.text.strip():
        raise InputError(f"{text.name}: the text is empty; every text needs at least one word", name=text.name)
    return text.text
