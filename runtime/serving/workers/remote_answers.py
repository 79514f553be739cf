"""A backend behind a call of bytes: what is asked, and the answer or the error, as MessagePack."""

from __future__ import annotations

import msgspec

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import (
    AnswerTimeoutError,
    Backend,
    NotServingError,
    QueueFullError,
    SequenceTooLongError,
)
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.workers.messages import array_of_extension, extension_of_array

# Errors that are told apart where they arrive, subclasses first. All others are errors of the backend itself.
_ERRORS: dict[str, type[MoepassError]] = {
    kind.__name__: kind for kind in (SequenceTooLongError, InputError, AnswerTimeoutError, NotServingError)
}


class RemoteRequest(msgspec.Struct, frozen=True):
    request: Request
    priority: int
    timeout_seconds: float


class AnswerReply(msgspec.Struct, frozen=True, tag=True):
    answer: Answer


class NoAnswerReply(msgspec.Struct, frozen=True, tag=True):
    """An error in place of an answer: its kind, text and name; `retry_after_seconds` where the queue is full."""

    kind: str
    text: str
    name: str | None
    retry_after_seconds: float | None = None


_encoder = msgspec.msgpack.Encoder(enc_hook=extension_of_array)
_asked = msgspec.msgpack.Decoder(RemoteRequest, ext_hook=array_of_extension)
_reply: msgspec.msgpack.Decoder[AnswerReply | NoAnswerReply] = msgspec.msgpack.Decoder(
    AnswerReply | NoAnswerReply, ext_hook=array_of_extension
)


def encode_asked(request: Request, priority: int, timeout_seconds: float) -> bytes:
    """What `answer_asked` takes."""
    return _encoder.encode(RemoteRequest(request, priority, timeout_seconds))


async def answer_asked(backend: Backend, asked: bytes) -> bytes:
    """What `answer_of` takes: the answer of `backend`, or its error if it is one of those that a backend raises."""
    given = _asked.decode(asked)
    try:
        answer = await backend.answer(given.request, priority=given.priority, timeout_seconds=given.timeout_seconds)
    except QueueFullError as error:
        refusal = NoAnswerReply(QueueFullError.__name__, str(error), error.name, error.retry_after_seconds)
        return _encoder.encode(refusal)
    except tuple(_ERRORS.values()) as error:
        kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
        return _encoder.encode(NoAnswerReply(kind, str(error), error.name))
    return _encoder.encode(AnswerReply(answer))


def answer_of(reply: bytes) -> Answer:
    """The answer. Raises the error that came in its place."""
    found = _reply.decode(reply)
    if isinstance(found, AnswerReply):
        return found.answer
    if found.retry_after_seconds is not None:
        raise QueueFullError(found.text, retry_after_seconds=found.retry_after_seconds, name=found.name)
    raise _ERRORS.get(found.kind, NotServingError)(found.text, name=found.name)
