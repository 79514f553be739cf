"""Texts become rendered prompts and their tokens, part by part, also ahead of the one who asks for them.

A tokenizer works outside of Python's lock, so that it can run beside imports and beside the model.
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

# Texts are encoded in parts of at most so many texts and, but for the last text, characters.
PART_TEXTS, PART_CHARACTERS = 1024, 1 << 20


class NamedText(Protocol):
    """`name` is what errors call the text."""

    @property
    def name(self) -> str: ...

    @property
    def text(self) -> str: ...


_Text = TypeVar("_Text", bound=NamedText)
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class EncodedPart(Generic[_Text]):
    """Texts, and of each the rendered prompt with its tokens, or the error that it has instead."""

    texts: list[_Text]
    prompts: list[tuple[str, Tokens] | InputError]


def encoded_parts(writer: PromptWriter, texts: Iterable[_Text]) -> Iterator[EncodedPart[_Text]]:
    """The parts of `texts`. A part is read when it is asked for."""
    source = iter(texts)
    while part := _part(source):
        yield EncodedPart(part, _encoded(writer, part))


@contextlib.contextmanager
def read_ahead(source: Iterable[_Item], most: int) -> Iterator[Iterator[_Item]]:
    """`source`, which a thread reads from now on, at most `most` items ahead. None of them may be None.

    What it raises is raised in its turn. The thread has ended when the block ends, after the item that it is at: so a
    source that may wait for long is not for this.
    """
    iterator = iter(source)
    pool = ThreadPoolExecutor(1, "moepass-read-ahead")
    try:
        waiting: deque[Future[_Item | None]] = deque(pool.submit(next, iterator, None) for _ in range(most))
        yield _in_turn(pool, iterator, waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_turn(
    pool: ThreadPoolExecutor, iterator: Iterator[_Item], waiting: deque[Future[_Item | None]]
) -> Iterator[_Item]:
    while (item := waiting.popleft().result()) is not None:
        waiting.append(pool.submit(next, iterator, None))
        yield item


def named_error(error: InputError, name: str) -> InputError:
    """The error with the text's name before it, where it has none."""
    return error if str(error).startswith(name) else InputError(f"{name}: {error}", name=name, value=error.value)


def _part(source: Iterator[_Text]) -> list[_Text]:
    part: list[_Text] = []
    characters = 0
    while len(part) < PART_TEXTS and characters < PART_CHARACTERS and (text := next(source, None)) is not None:
        part.append(text)
        characters += len(text.text)
    return part


def _encoded(writer: PromptWriter, part: Sequence[NamedText]) -> list[tuple[str, Tokens] | InputError]:
    try:
        rendered, encoded = writer.encode_texts([_checked(text) for text in part], [one.name for one in part])
    except InputError as error:
        if len(part) == 1:
            return [named_error(error, part[0].name)]
        middle = len(part) // 2
        return [*_encoded(writer, part[:middle]), *_encoded(writer, part[middle:])]
    return list(zip(rendered, encoded, strict=True))


def _checked(text: NamedText) -> str:
    if not text.text.strip():
        raise InputError(f"{text.name}: the text is empty", name=text.name)
    return text.text
