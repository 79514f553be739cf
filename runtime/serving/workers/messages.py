"""Messages between the frontend and the ranks, typed and encoded as MessagePack, never as pickle; names of sockets.

An array is encoded as an extension whose code is the dtype: one byte with the number of dimensions, the shape, and the
elements.
"""

from __future__ import annotations

import math
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

from moepass.models.errors import InputError
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.view import EngineView

# Extension codes of MessagePack, and the little-endian type of an array's numbers.
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<i4"), 2: np.dtype("<i8"), 3: np.dtype("<f4")}
_MOST_DIMENSIONS = 2
_Message = TypeVar("_Message")


class Run(msgspec.Struct, frozen=True, tag=True):
    """To a rank: compute these requests."""

    requests: tuple[Request, ...]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """To a rank: drop these requests, unless the running step computes them already."""

    ids: tuple[str, ...]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """To a rank: end when all requests are answered."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it is ready and takes requests."""

    facts: EngineFacts


class Started(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it has started a step with these requests."""

    ids: tuple[str, ...]


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """From a rank: a step has ended. `compilations` counts graphs compiled since the rank was ready; it must stay 0."""

    result: StepResult
    compilations: int


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it cannot answer this request. If `is_refused`, the request is invalid, so no rank can."""

    id: str
    reason: str
    is_refused: bool


class Alive(msgspec.Struct, frozen=True, tag=True):
    """From a rank, periodically: its process runs. `busy_seconds`: how long the current step has run, 0 if idle."""

    busy_seconds: float


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """To a rank: report your status. The rank answers at once, even during a step."""


class StatusReport(msgspec.Struct, frozen=True, tag=True):
    """From a rank: the view of its engine."""

    engine: EngineView


ToRank = Run | Cancel | Drain | StatusRequest
FromRank = RankReady | Started | StepDone | RequestFailed | Alive | StatusReport


def rank_name(rank: int, attempt: int) -> bytes:
    """Return the name of a rank's socket; `attempt` is the number of restarts."""
    return f"{rank}.{attempt}".encode()


def parsed_rank_name(name: bytes) -> tuple[int, int]:
    """Return the rank and the attempt of a socket name, or (-1, -1) if it is not the name of a rank."""
    rank, _, attempt = name.decode(errors="replace").partition(".")
    return (int(rank), int(attempt)) if rank.isdecimal() and attempt.isdecimal() else (-1, -1)


def extension_of_array(value: Any) -> msgspec.msgpack.Ext:
    """Encode an array, as msgspec's `enc_hook`. Raise NotImplementedError for any other value."""
    for code, kind in _TYPES.items():
        if isinstance(value, np.ndarray) and value.dtype == kind and value.ndim <= _MOST_DIMENSIONS:
            header = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
            return msgspec.msgpack.Ext(code, header + np.ascontiguousarray(value, kind).tobytes())
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded in a message")


def array_of_extension(code: int, data: memoryview) -> Any:
    """Decode an array, as msgspec's `ext_hook`. Raise ValueError for a malformed one."""
    kind = _TYPES.get(code)
    if kind is None or not len(data) or data[0] > _MOST_DIMENSIONS or len(data) < 1 + 4 * data[0]:
        raise ValueError(f"extension {code} of {len(data)} bytes is not an array")
    shape = struct.unpack_from(f"<{data[0]}I", data, 1)
    numbers = data[1 + 4 * len(shape) :]
    if len(numbers) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"an array of shape {shape} and type {kind} cannot have {len(numbers)} bytes")
    return np.frombuffer(numbers, kind).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=extension_of_array)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, ext_hook=array_of_extension)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank, ext_hook=array_of_extension)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def decode_for_rank(data: bytes) -> ToRank:
    """Decode a message to a rank. Raise InputError for malformed bytes."""
    return _decode(_to_rank, data)


def decode_from_rank(data: bytes) -> FromRank:
    """Decode a message from a rank. Raise InputError for malformed bytes."""
    return _decode(_from_rank, data)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], data: bytes) -> _Message:
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InputError(f"{len(data)} bytes cannot be decoded as a message: {error}", name="message") from error
