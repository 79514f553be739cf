"""Detection of changed files by inode, size and modification time."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moepass.models.errors import CheckpointError


@dataclass(frozen=True)
class FileStamp:
    """Identity of a file's contents, changed by replacing and writing, unless a write resets the modification time."""

    inode: int
    nbytes: int
    written_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileStamp:
        """Return the stamp of a file name or an open descriptor. Raises OSError."""
        status = os.stat(file)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)

    def describe(self) -> str:
        """Return size, modification time and inode for an error message."""
        written = datetime.datetime.fromtimestamp(self.written_ns / 10**9).isoformat(" ", "milliseconds")
        return f"{self.nbytes} bytes of {written} (inode {self.inode})"


class FileStamps:
    """Files that must not change while they are read in several steps. The first ones may not exist."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        self._stamps = {file: _stamp_or_none(file) for file in files}

    def check(self, file: Path) -> FileStamp | None:
        """Return the stamp of `file`, None without it. Raises CheckpointError if it differs from the first check."""
        now = _stamp_or_none(file)
        first = self._stamps.setdefault(file, now)
        if first != now:
            before, after = (stamp.describe() if stamp else "not there" for stamp in (first, now))
            raise CheckpointError(
                f"{file} changed while it was being read: it was {before}, now it is {after}; load again", path=file
            )
        return now

    def check_all(self) -> None:
        """Raise CheckpointError if any of the files changed."""
        for file in list(self._stamps):
            self.check(file)


def _stamp_or_none(file: Path) -> FileStamp | None:
    try:
        return FileStamp.of(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", path=file) from error
