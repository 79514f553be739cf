"""Banks written to a folder: one safetensors file for each, whose metadata says what it was made of.

A file is complete or absent: it is written under a temporary name, flushed to the disk, and renamed. A file is reused
if it was made in the same way from unchanged files. Its contents are not checked, so only trusted users may write to
the folder. Processes that use the same folder take turns, and the first one writes.

A file is unchanged if it has the same path, inode, size and time of the last write. A copied or renamed checkpoint
counts as another one: its banks are written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import torch

from moepass.models.checkpoint.checkpoint_files import DTYPES
from moepass.models.checkpoint.file_header import make_header
from moepass.models.checkpoint.file_stamp import FileStamp
from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.errors import CheckpointError, InputError
from moepass.runtime.homes.disk.disk_files import DiskFile

# The entry of a file's metadata that says what it was made of. Another way of writing files needs another name.
_MADE_OF = "moepass_bank_1"
_LOCK_FILE = ".moepass-lock"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = Mapping[str, torch.Tensor]


class BankFolder:
    """A folder with files of banks, made when the first one is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, banks: Mapping[str, Tensors]) -> dict[str, DiskFile]:
        """The files of `banks`, given as name and tensors [experts, ...]: written, or as they are where they still fit.

        In a file tensors are called BANK.TENSOR. Of tensors that are not read yet, one expert at a time is in memory.

        Raises InputError where the folder cannot be written to, is too small, or holds such a file of somebody else;
        CheckpointError where the checkpoint is changed while it is read.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                made_of = {name: _made_of(tensors) for name, tensors in banks.items()}
                files = {name: self._found(name, made_of[name], tensors) for name, tensors in banks.items()}
                self._check_room([banks[name] for name, file in files.items() if file is None])
                return {name: file or self._written(name, made_of[name], banks[name]) for name, file in files.items()}
        except OSError as error:
            raise InputError(
                f"folder {self.folder} cannot be written to: {error.strerror or error}", name="folder", path=self.folder
            ) from error

    def _path(self, name: str) -> Path:
        return self.folder / f"{quote(name or 'experts', safe='')}.safetensors"

    def _found(self, name: str, made_of: str, tensors: Tensors) -> DiskFile | None:
        """The file that is there, if it was made of the same. Raises InputError where it was not made here at all."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            file = DiskFile(path)
        except CheckpointError:
            file = None
        if file is None or _MADE_OF not in file.header.metadata:
            raise InputError(f"{path} is no bank that moepass wrote; give a folder of its own", path=path)
        if file.header.metadata[_MADE_OF] != made_of:
            return None
        for tensor in tensors.values():
            if isinstance(tensor, UnreadTensor):
                for stored in tensor.recipe.stored():
                    if stored.files.on_read is not None:
                        stored.files.on_read(stored.nbytes)  # it need not be read, and so is done
        return file

    def _check_room(self, banks: list[Tensors]) -> None:
        needed = sum(tensor.nbytes for tensors in banks for tensor in tensors.values())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise InputError(
                f"folder {self.folder} has room for {free} bytes, but the banks need {needed}",
                name="folder",
                value=free,
                expected=needed,
                path=self.folder,
            )

    def _written(self, name: str, made_of: str, tensors: Tensors) -> DiskFile:
        path = self._path(name)
        part = path.with_name(f".{path.name}.part")
        try:
            with open(part, "wb") as opened:
                described = {
                    f"{name}.{key}": (_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
                    for key, tensor in tensors.items()
                }
                opened.write(make_header(described, {"format": "pt", _MADE_OF: made_of}))
                for tensor in tensors.values():
                    for row in _rows(tensor):
                        opened.write(row.numpy().data)
                opened.flush()
                os.fsync(opened.fileno())
            if _is_unread(tensors) and _made_of(tensors) != made_of:
                raise CheckpointError(
                    f"the checkpoint of {name} was changed while it was read; load the model again", name=name
                )
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return DiskFile(path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the kernel lets go of the lock however a process ends."""
        import fcntl  # not there on every platform, where home `disk` is not either

        with open(self.folder / _LOCK_FILE, "wb") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield


def _rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of each row, in memory that the next row overwrites."""
    row = torch.empty((1, *tensor.shape[1:]), dtype=tensor.dtype)
    for index in range(tensor.shape[0]):
        row.copy_(tensor.detach()[index : index + 1])
        yield row.reshape(-1).view(torch.uint8)


def _is_unread(tensors: Tensors) -> bool:
    return all(isinstance(tensor, UnreadTensor) for tensor in tensors.values())


def _made_of(tensors: Tensors) -> str:
    """A word that is equal where tensors are made in the same way of the same files, unchanged since.

    What only memory holds equals nothing.
    """
    if not _is_unread(tensors):
        return uuid.uuid4().hex
    digest = hashlib.blake2b(digest_size=16)
    files: set[Path] = set()
    for name, tensor in tensors.items():
        assert isinstance(tensor, UnreadTensor)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.recipe.describe()}\n".encode())
        files |= {stored.tensor.file for stored in tensor.recipe.stored()}
    for file in sorted(files):
        try:
            stamp = FileStamp.of(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}", path=file) from error
        digest.update(f"{file.resolve()} {stamp}\n".encode())
    return digest.hexdigest()
