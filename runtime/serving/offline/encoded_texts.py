"""Texts rendered and encoded chunk by chunk, optionally in a thread that reads ahead.

Tokenizers release Python's lock, so that encoding can overlap with imports and with the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

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
        ...

    @property
    def text(self) -> str:
        """The text."""
        ...


_Text = TypeVar("_Text", bound=NamedText)
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class EncodedChunk(Generic[_Text]):
    """A chunk of texts; for each text its rendered prompt and tokens, or the error if it cannot be encoded."""

    texts: list[_Text]
    prompts: list[tuple[str, Tokens] | InputError]


def encoded_chunks(writer: PromptWriter, texts: Iterable[_Text]) -> Iterator[EncodedChunk[_Text]]:
    """Yield the chunks of `texts`, encoded. A chunk is read only when the caller asks for it."""
    source = iter(texts)
    while chunk := _read_chunk(source):
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
        yield _read_in_order(pool, iterator, waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _read_in_order(
    pool: ThreadPoolExecutor, iterator: Iterator[_Item], waiting: deque[Future[_Item | None]]
) -> Iterator[_Item]:
    while (item := waiting.popleft().result()) is not None:
        waiting.append(pool.submit(next, iterator, None))
        yield item


def named_error(error: InputError, name: str) -> InputError:
    """Return the error with the text's name as prefix, unless its message starts with the name already."""
    return error if str(error).startswith(name) else InputError(f"{name}: {error}", name=name, value=error.value)


def _read_chunk(source: Iterator[_Text]) -> list[_Text]:
    chunk: list[_Text] = []
    characters = 0
    while len(chunk) < CHUNK_TEXTS and characters < CHUNK_CHARACTERS and (text := next(source, None)) is not None:
        chunk.append(text)
        characters += len(text.text)
    return chunk


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
