"""Messages are decoded unchanged, and other bytes are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.runtime.serving.engine.step_engine import StepResult
from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, ReadAnswer, ScoredTokens, Usage
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from moepass.runtime.serving.workers import messages
from moepass.runtime.serving.workers.messages import Run, StepDone, decode_for_rank, decode_from_rank, encode


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


REQUEST = Request(
    "a",
    (
        TokenPiece(-1, ints(1, 2, 3), (TokenRead(2, ints(7, 8), 3), TokenRead(0, ints()))),
        TokenPiece(0, ints(4), is_scored=True, scored_top=1),
        TokenPiece(0, ints(4, 5), vector="mean"),
    ),
    b"\x00salt",
)
ANSWER = Answer(
    "a",
    (
        PieceAnswer((ReadAnswer(floats(-0.5, -2), ints(7), floats(-0.5)),)),
        PieceAnswer(scored=ScoredTokens(floats(-1), ints(4).reshape(1, 1), floats(-1).reshape(1, 1))),
        PieceAnswer(vector=floats(0.5, 0.25)),
    ),
    Usage(6, 2, 2**62),
)


def plain(value: Any) -> Any:
    """Return nested tuples, because records that contain arrays cannot be compared."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if dataclasses.is_dataclass(value):
        return tuple(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, msgspec.Struct):
        return tuple(plain(getattr(value, name)) for name in value.__struct_fields__)
    return tuple(map(plain, value)) if isinstance(value, (tuple, list)) else value


def test_requests_and_answers_are_decoded_unchanged() -> None:
    run = Run((REQUEST, REQUEST))
    assert plain(decode_for_rank(encode(run))) == plain(run)
    done = StepDone(StepResult((ANSWER,), (b"x" * 16,), (), 6, 2**62, 2**63, 0.25, 0.0), 0)
    assert plain(decode_from_rank(encode(done))) == plain(done)


@given(data=st.binary(max_size=60))
def test_malformed_bytes_are_refused(data: bytes) -> None:
    for decode in (decode_for_rank, decode_from_rank):
        with pytest.raises(InputError):
            decode(data)


@pytest.mark.parametrize("position", range(0, 200, 7))
def test_a_damaged_message_is_refused_or_still_well_formed(position: int) -> None:
    content = bytearray(encode(Run((REQUEST,))))
    content[position % len(content)] ^= 0xFF
    try:
        decoded = decode_for_rank(bytes(content))
    except InputError:
        return
    assert isinstance(decoded, Run)
    assert all(isinstance(piece.tokens, np.ndarray) for request in decoded.requests for piece in request.pieces)


@pytest.mark.parametrize(
    "data", [b"", b"\x03", b"\x01\x02", b"\x01\x02\x00\x00\x00\x01", b"\x01\xff\xff\xff\xff" + b"\x00" * 8]
)
def test_damaged_arrays_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="array"):
        messages.array_of_extension(1, memoryview(data))


def test_values_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        messages.extension_of_array(object())
