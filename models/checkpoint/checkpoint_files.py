"""The tensors of a checkpoint's safetensors files, read one by one or in part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moepass.models.checkpoint.file_stamp import FileStamp, FileStamps
from moepass.models.errors import CheckpointError, InputError, one_of

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as described by the header of `file`; `stamp` was the file's stamp when its header was read."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stamp: FileStamp

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRange:
    """`nbytes` contiguous bytes of a stored tensor, from its byte `start`."""

    tensor: StoredTensor
    start: int
    nbytes: int


class CheckpointFiles:
    """All tensors of several safetensors files, by key. The constructor reads only the headers.

    One file is mapped at a time. Reading returns a view of the mapped file without a copy; unused pages are freed when
    another file is opened, or by `close`. Files are checked whenever they are opened, and in `check`: they must not
    change, so that tensors of different versions are never mixed.

    If a key is in two files, the later file is used, as in transformers. `stamps` checks these files, and possibly
    others. Raises CheckpointError if a file is incomplete, and InputError for a dtype that torch lacks.
    """

    def __init__(self, files: Sequence[Path], stamps: FileStamps | None = None) -> None:
        self._stamps = stamps or FileStamps()
        self.tensors: dict[str, StoredTensor] = {}
        self.on_read: Callable[[int], object] | None = None
        """Called with the number of bytes of each read."""
        self._open_file: Path | None = None
        self._handle: Any = None
        for file in files:
            handle = self._opened(file)
            stamp = self._stamps.check(file)
            assert stamp is not None, "it was opened"
            for key in handle.keys():  # noqa: SIM118  no mapping
                stored = handle.get_slice(key)
                self.tensors[key] = StoredTensor(file, key, tuple(stored.get_shape()), _dtype(file, key, stored), stamp)
        self.close()

    @property
    def numbers(self) -> int:
        """Total number of elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def read(self, tensor: StoredTensor, rows: range | None = None) -> torch.Tensor:
        """Return `tensor`, or these rows of its first dimension, as a view of the mapped file; copy it before writing.

        Raises CheckpointError if the file must be opened and changed since its header was read.
        """
        try:
            stored = self._opened(tensor.file).get_slice(tensor.key)
            view: torch.Tensor = stored[...] if rows is None else stored[rows.start : rows.stop]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{tensor.key} cannot be read from {tensor.file}: {error}", name=tensor.key, path=tensor.file
            ) from error
        if self.on_read is not None:
            self.on_read(view.nbytes)
        return view

    def digest(self) -> str:
        """Return a digest of the names, dtypes and shapes of all tensors."""
        digest = hashlib.blake2b(digest_size=8)
        for key, tensor in sorted(self.tensors.items()):
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
        return digest.hexdigest()

    def check(self) -> None:
        """Raise CheckpointError if one of the files changed, so that earlier reads are invalid."""
        self._stamps.check_all()

    def close(self) -> None:
        """Close the open file; views that were read from it stay valid."""
        self._open_file = self._handle = None

    def _opened(self, file: Path) -> Any:
        if self._open_file != file:
            self.close()
            self._stamps.check(file)
            try:
                self._handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is truncated or not a safetensors file: {error}", path=file) from error
            # Equal stamps before and after opening prove that this version of the file was opened.
            self._stamps.check(file)
            self._open_file = file
        return self._handle

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self.tensors.values())


def _dtype(file: Path, key: str, stored: Any) -> torch.dtype:
    name = stored.get_dtype()
    if name not in DTYPES:
        text = f"{key} in {file} is stored as {name}; moepass reads {one_of(DTYPES)}"
        raise InputError(text, name=key, value=name, expected=tuple(DTYPES), path=file)
    return DTYPES[name]
