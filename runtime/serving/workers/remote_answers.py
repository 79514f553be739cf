"""A backend in another process: requests, answers and errors as MessagePack bytes."""

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
from moepass.runtime.serving.workers.messages import array_of_extension, encode

# Errors that are sent to the caller with their class, subclasses first. Other errors propagate as those of the call.
_ERRORS: dict[str, type[MoepassError]] = {
    kind.__name__: kind
    for kind in (QueueFullError, SequenceTooLongError, InputError, AnswerTimeoutError, NotServingError)
}


class RemoteRequest(msgspec.Struct, frozen=True):
    """The arguments of `Backend.answer`."""

    request: Request
    priority: int
    timeout_seconds: float


class AnswerReply(msgspec.Struct, frozen=True, tag=True):
    """The reply to a request that was answered."""

    answer: Answer


class NoAnswerReply(msgspec.Struct, frozen=True, tag=True):
    """An error instead of an answer: its class, text and name; `retry_after_seconds` only if the queue is full."""

    kind: str
    text: str
    name: str | None
    retry_after_seconds: float | None = None


_request_decoder = msgspec.msgpack.Decoder(RemoteRequest, ext_hook=array_of_extension)
_reply_decoder: msgspec.msgpack.Decoder[AnswerReply | NoAnswerReply] = msgspec.msgpack.Decoder(
    AnswerReply | NoAnswerReply, ext_hook=array_of_extension
)


def encode_request(request: Request, priority: int, timeout_seconds: float) -> bytes:
    """Encode a request for `answer_encoded_request`."""
    return encode(RemoteRequest(request, priority, timeout_seconds))


async def answer_encoded_request(backend: Backend, encoded_request: bytes) -> bytes:
    """Let `backend` answer an encoded request, and encode its answer or its error for `decode_answer`."""
    remote = _request_decoder.decode(encoded_request)
    try:
        answer = await backend.answer(remote.request, priority=remote.priority, timeout_seconds=remote.timeout_seconds)
    except tuple(_ERRORS.values()) as error:
        kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
        return encode(NoAnswerReply(kind, str(error), error.name, getattr(error, "retry_after_seconds", None)))
    return encode(AnswerReply(answer))


def decode_answer(reply: bytes) -> Answer:
    """Decode an answer, or raise the error that was encoded instead."""
    decoded = _reply_decoder.decode(reply)
    if isinstance(decoded, AnswerReply):
        return decoded.answer
    if decoded.retry_after_seconds is not None:
        raise QueueFullError(decoded.text, retry_after_seconds=decoded.retry_after_seconds, name=decoded.name)
    raise _ERRORS.get(decoded.kind, NotServingError)(decoded.text, name=decoded.name)
