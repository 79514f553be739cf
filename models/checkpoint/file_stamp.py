"""Whether a file is still the one that it was: its inode, its size, and the time of its last write."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moepass.models.errors import CheckpointError


@dataclass(frozen=True)
class FileStamp:
    """Identity of a file's contents: equal if the file was neither replaced nor written to.

    A write that sets the time of the last write back is not seen.
    """

    inode: int
    nbytes: int
    written_ns: int

    @classmethod
    def of(cls, file: Path | int) -> FileStamp:
        """The stamp of a file, given by its name or by an open descriptor. Raises OSError."""
        status = os.stat(file)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)

    def describe(self) -> str:
        written = datetime.datetime.fromtimestamp(self.written_ns / 10**9).isoformat(" ", "milliseconds")
        return f"{self.nbytes} bytes of {written} (inode {self.inode})"


class FileStamps:
    """Files that must stay what they are while something is read from them, in however many steps."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        """Begins with `files`, of which some may not exist."""
        self._stamps = {file: _stamp_or_none(file) for file in files}

    def check(self, file: Path) -> FileStamp | None:
        """The stamp of `file`, None where it does not exist; what it is the first time it must stay.

        Raises CheckpointError where it is another one by now, or was changed.
        """
        now = _stamp_or_none(file)
        known = self._stamps.setdefault(file, now)
        if known != now:
            was, has = (stamp.describe() if stamp else "not there" for stamp in (known, now))
            raise CheckpointError(
                f"{file} changed while it was being read: it was {was}, now it is {has}; load again", path=file
            )
        return now

    def check_all(self) -> None:
        """Raises CheckpointError as `check`, for any of the files."""
        for file in list(self._stamps):
            self.check(file)


def _stamp_or_none(file: Path) -> FileStamp | None:
    try:
        return FileStamp.of(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", path=file) from error
