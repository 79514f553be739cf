"""Banks written to a folder: one safetensors file for each, with a digest of its sources in the metadata.

A file is complete or absent: it is written under a temporary name, flushed to the disk, and renamed. A file is reused
if it was made by the same recipe from files with the same paths and stamps. Its contents are not checked, so only
trusted users may write to the folder. Processes that use the same folder lock it, and the first one writes.
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

# The metadata key of the digest of a file's sources. A change of the file format needs a new key.
_MADE_OF = "moepass_bank_1"
_LOCK_FILE = ".moepass-lock"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = Mapping[str, torch.Tensor]


class BankFolder:
    """A folder with files of banks, created when the first bank is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, banks: Mapping[str, Tensors]) -> dict[str, DiskFile]:
        """Return the file of each bank; write those that are missing or out of date.

        In a file, tensors are called BANK.TENSOR. Tensors that are not read yet are in memory one expert at a time.

        Raises InputError if the folder cannot be written to, is too small, or contains a file with that name that
        moepass did not write, and CheckpointError if the checkpoint changed while it was read.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                made_of = {name: _made_of(tensors) for name, tensors in banks.items()}
                files = {name: self._existing(name, made_of[name], tensors) for name, tensors in banks.items()}
                self._check_space([banks[name] for name, file in files.items() if file is None])
                return {name: file or self._written(name, made_of[name], banks[name]) for name, file in files.items()}
        except OSError as error:
            raise InputError(
                f"folder {self.folder} cannot be written to: {error.strerror or error}; name a folder that this user "
                "can write to",
                name="folder",
                path=self.folder,
            ) from error

    def _path(self, name: str) -> Path:
        return self.folder / f"{quote(name or 'experts', safe='')}.safetensors"

    def _existing(self, name: str, made_of: str, tensors: Tensors) -> DiskFile | None:
        """Return the file if it has the same sources, else None. Raises InputError if moepass did not write it."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            file = DiskFile(path)
        except CheckpointError:
            file = None
        if file is None or _MADE_OF not in file.header.metadata:
            raise InputError(
                f"{path} exists, but moepass did not write it; name a folder that only moepass uses", path=path
            )
        if file.header.metadata[_MADE_OF] != made_of:
            return None
        unread = [tensor for tensor in tensors.values() if isinstance(tensor, UnreadTensor)]
        for stored in (stored for tensor in unread for stored in tensor.recipe.stored()):
            if stored.files.on_read is not None:
                stored.files.on_read(stored.nbytes)  # counts as read, because the file is reused
        return file

    def _check_space(self, banks: list[Tensors]) -> None:
        needed = sum(tensor.nbytes for tensors in banks for tensor in tensors.values())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            text = (
                f"folder {self.folder} has {free} free bytes, but the banks need {needed}; free some space or name "
                "another folder"
            )
            raise InputError(text, name="folder", value=free, expected=needed, path=self.folder)

    def _written(self, name: str, made_of: str, tensors: Tensors) -> DiskFile:
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.part")
        try:
            with open(temporary, "wb") as opened:
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
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return DiskFile(path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder for one process. The kernel releases the lock even if the process is killed."""
        import fcntl  # missing on platforms that do not support home `disk`

        with open(self.folder / _LOCK_FILE, "wb") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            yield


def _rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of each row, in memory that the next row overwrites."""
    row = torch.empty((1, *tensor.shape[1:]), dtype=tensor.dtype)
    for index in range(tensor.shape[0]):
        row.copy_(tensor.detach()[index : index + 1])
        yield row.reshape(-1).view(torch.uint8)


def _is_unread(tensors: Tensors) -> bool:
    return all(isinstance(tensor, UnreadTensor) for tensor in tensors.values())


def _made_of(tensors: Tensors) -> str:
    """Return a digest that is equal only for equal recipes of equal files; for tensors in memory it equals no other."""
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
