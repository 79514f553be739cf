"""The header of a safetensors file: the dtype, shape and position of each tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import decode_json

# Bytes of the header's length, which precedes the header, and the format's limit on this length.
_LENGTH_BYTES = 8
_LONGEST_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Extent:
    """Position of a tensor in its file; `dtype` is the name in the safetensors format."""

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True)
class FileHeader:
    """Contents of a file of `nbytes` bytes, as stated by its header."""

    tensors: Mapping[str, Extent]
    metadata: Mapping[str, str]
    nbytes: int


def read_header(descriptor: int, file: Path) -> FileHeader:
    """Read the header of the open file `descriptor`; errors call it `file`.

    Raises CheckpointError if it is not a safetensors file, or if its size differs from its header.
    """
    try:
        length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
        if not 0 < length <= _LONGEST_HEADER_BYTES:
            raise CheckpointError(f"{file} is not a safetensors file: its header would have {length} bytes", path=file)
        text = os.pread(descriptor, length, _LENGTH_BYTES)
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", path=file) from error
    try:
        entries: dict[str, Any] = decode_json(text, dict[str, Any])
        metadata = msgspec.convert(entries.pop(_METADATA, {}), dict[str, str])
        tensors = msgspec.convert(entries, dict[str, _HeaderEntry])
    except (InputError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file: {error}", path=file) from error
    begin = _LENGTH_BYTES + length
    extents = {
        key: Extent(
            entry.dtype, entry.shape, begin + entry.data_offsets[0], entry.data_offsets[1] - entry.data_offsets[0]
        )
        for key, entry in tensors.items()
    }
    header = FileHeader(extents, metadata, max((begin, *(e.offset_bytes + e.nbytes for e in extents.values()))))
    if size != header.nbytes:
        message = f"{file} has {size} bytes, but its header says {header.nbytes}: it is truncated"
        raise CheckpointError(message, path=file, value=size, expected=header.nbytes)
    return header


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors (dtype, shape, bytes), stored in this order without gaps."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for key, (dtype, shape, nbytes) in tensors.items():
        entries[key] = _HeaderEntry(dtype, shape, (end, end + nbytes))
        end += nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _LENGTH_BYTES)  # padding that aligns the tensors, as other writers do
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
