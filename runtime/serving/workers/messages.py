"""What frontend and ranks tell each other, as MessagePack: typed, and never a pickle.

Arrays travel as an extension type: one byte for the number of dimensions, the dimensions, the numbers.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from moepass.models.errors import InputError
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.view import EngineView

# Extension codes of MessagePack, and the little-endian type of an array's numbers.
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<i4"), 2: np.dtype("<i8"), 3: np.dtype("<f4")}
_MOST_DIMENSIONS = 2


class Run(msgspec.Struct, frozen=True, tag=True):
    """To a rank: compute these requests."""

    requests: tuple[Request, ...]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """To a rank: nobody waits for these requests any more. Those of the running step are computed nevertheless."""

    ids: tuple[str, ...]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """To a rank: end when all requests are answered."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it takes requests."""

    facts: EngineFacts


class Started(msgspec.Struct, frozen=True, tag=True):
    """From a rank: a step with these requests begins."""

    ids: tuple[str, ...]


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """From a rank: a step is over. `compilations` are those since the rank was ready, which should stay 0."""

    result: StepResult
    compilations: int


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it cannot answer this request. `is_refused`: because of what is asked, so that no rank can."""

    id: str
    reason: str
    is_refused: bool


class Alive(msgspec.Struct, frozen=True, tag=True):
    """From a rank, again and again: its process runs. `busy_seconds`: since when it computes what it computes."""

    busy_seconds: float


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """To a rank: say what you are doing. It answers at once, while a step runs, too."""


class StatusReport(msgspec.Struct, frozen=True, tag=True):
    """From a rank: what it is doing."""

    engine: EngineView


ToRank = Run | Cancel | Drain | StatusRequest
FromRank = RankReady | Started | StepDone | RequestFailed | Alive | StatusReport


def extension_of_array(value: Any) -> msgspec.msgpack.Ext:
    """An array, for an encoder of msgspec; it raises NotImplementedError for anything else."""
    for code, kind in _TYPES.items():
        if isinstance(value, np.ndarray) and value.dtype == kind and value.ndim <= _MOST_DIMENSIONS:
            header = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
            return msgspec.msgpack.Ext(code, header + np.ascontiguousarray(value, kind).tobytes())
    raise NotImplementedError(f"{type(value).__name__} has no form as a message")


def array_of_extension(code: int, data: memoryview) -> Any:
    """The array, for a decoder of msgspec. Raises ValueError for what is none."""
    kind = _TYPES.get(code)
    if kind is None or not len(data) or data[0] > _MOST_DIMENSIONS or len(data) < 1 + 4 * data[0]:
        raise ValueError(f"extension {code} is no array that a message can hold")
    shape = struct.unpack_from(f"<{data[0]}I", data, 1)
    numbers = data[1 + 4 * len(shape) :]
    if len(numbers) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"an array of shape {shape} has {len(numbers)} bytes of numbers")
    return np.frombuffer(numbers, kind).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=extension_of_array)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, ext_hook=array_of_extension)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank, ext_hook=array_of_extension)


def encode(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_for_rank(data: bytes) -> ToRank:
    """Raises InputError for what is no message to a rank."""
    with _refusing(data):
        return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """Raises InputError for what is no message from a rank."""
    with _refusing(data):
        return _from_rank.decode(data)


@contextlib.contextmanager
def _refusing(data: bytes) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InputError(f"{len(data)} bytes are no message: {error}", name="message") from error
