"""Whether a file is still the one that it was: where it lies on the disk, its size, its times, samples of its bytes."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moepass.models.errors import CheckpointError

# So many places of a file are looked at where times do not tell: other weights differ in all of them.
_SAMPLES = 32
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class FileStamp:
    """What the file system says of a file. `written_ns` can be set by anybody, `changed_ns` by the kernel alone.

    `changed_ns` also moves where the file gets another name, or loses one, or another owner or mode: then `links`,
    `owner` or `mode` differ too.
    """

    device: int
    inode: int
    nbytes: int
    written_ns: int
    changed_ns: int
    links: int
    owner: tuple[int, int]
    mode: int

    @classmethod
    def of(cls, file: Path | int) -> FileStamp:
        """That of the file with this name, or of an open one by its descriptor. Raises OSError."""
        status = os.stat(file)
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_nlink,
            (status.st_uid, status.st_gid),
            status.st_mode,
        )

    def identity(self) -> tuple[int, ...]:
        """Equal for a file that was neither replaced nor touched."""
        return self.device, self.inode, self.nbytes, self.written_ns, self.changed_ns

    def may_hold_the_same(self, earlier: FileStamp) -> bool:
        """Whether the file may be what it was: whatever has changed can be explained without a write."""
        names = (self.links, self.owner, self.mode) != (earlier.links, earlier.owner, earlier.mode)
        same = (self.nbytes, self.written_ns) == (earlier.nbytes, earlier.written_ns)
        return same and (names or self.changed_ns == earlier.changed_ns)

    def describe(self) -> str:
        written, changed = (_time(nanoseconds) for nanoseconds in (self.written_ns, self.changed_ns))
        return f"{self.nbytes} bytes of {written}, changed {changed} (inode {self.inode})"


def _time(nanoseconds: int) -> str:
    return datetime.datetime.fromtimestamp(nanoseconds / 10**9).isoformat(" ", "milliseconds")


def sample_digest(descriptor: int, nbytes: int) -> str:
    """A word that is equal where samples of an open file of `nbytes` are: of its begin, its end and between.

    Raises OSError.
    """
    digest = hashlib.blake2b(digest_size=16)
    last = max(0, nbytes - _SAMPLE_BYTES)
    for offset in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
    return digest.hexdigest()


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
        if (known and known.identity()) != (now and now.identity()):
            was, has = (stamp.describe() if stamp else "not there" for stamp in (known, now))
            raise CheckpointError(f"{file} changed while it was being read: it was {was}, now it is {has}; load again")
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
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
