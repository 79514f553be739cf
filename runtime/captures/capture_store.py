"""The folder of stored captures: one file per capture, which only its owner can write.

A file is a line of JSON about it and, behind it, the capture, also JSON, whose digest that line has. Nothing in them is
unpickled or evaluated. But a capture holds the source text of code that Inductor wrote, and that text is run. So a
folder or a file that belongs to somebody else, or that others can write to, is not read. Whoever can write as the owner
needs no cache to run code as him.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from moepass.models.errors import InputError
from moepass.runtime.system.own_files import (
    UNFINISHED_SUFFIX,
    UnusableFileError,
    check_own_folder,
    find_cache_folder,
    read_own,
    remove_files,
    write_own,
)

logger = logging.getLogger("moepass")

SCHEMA = "moepass.capture/1"
_SUFFIX = ".capture"
# The largest captures take about 10 MB.
_MOST_BYTES = 256 << 20
# Of all captures together: those that were not read for the longest time are removed beyond it.
_MOST_BYTES_IN_ALL = 1 << 30
# No process takes that long for a file.
_UNFINISHED_SECONDS = 3600.0
# The first second of the year 10000, after the last date that Python knows.
_END_OF_DATES = 253402300800.0


class EntryHeader(msgspec.Struct, frozen=True):
    """What is known of a stored capture without reading it. `created` is in seconds since the epoch."""

    key: str
    digest: str
    model: str
    created: float
    versions: dict[str, str]
    schema: str = SCHEMA


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of the folder; `header` is None where it cannot be used, because of `problem`."""

    path: Path
    nbytes: int
    header: EntryHeader | None
    problem: str = ""


class CaptureStore:
    """Stored captures in `folder`, which is made when the first one is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> Iterator[bytes]:
        """The captures that were saved under `key`. What cannot be trusted is reported in the log, and left out."""
        try:
            paths = self._paths(f"{key}-*{_SUFFIX}")
        except UnusableFileError as error:
            logger.warning("stored captures in %s are ignored: %s", self.folder, error)
            return
        for path in paths:
            try:
                header, content = _split(read_own(path, _MOST_BYTES))
                if header.key != key:
                    raise UnusableFileError(f"it was stored for {header.key[:12]}, not for {key[:12]}")
                if hashlib.sha256(content).hexdigest() != header.digest:
                    raise UnusableFileError("its content is not what was written")
            except UnusableFileError as error:
                self.report(path, str(error))
                continue
            with contextlib.suppress(OSError):
                os.utime(path)  # it was read now
            yield content

    def report(self, path: Path | str, problem: str) -> None:
        logger.warning("stored capture %s is ignored, and the model compiled anew: %s", path, problem)

    def save(self, key: str, name: str, content: bytes, model: str, versions: Mapping[str, str]) -> bool:
        """Store `content` under `key`, in place of what had the same `name` there.

        Where that fails, the log says why: whatever is computed does not depend on it.
        """
        digest = hashlib.sha256(content).hexdigest()
        header = EntryHeader(key, digest, model, time.time(), dict(versions))
        try:
            write_own(self.folder / f"{key}-{name}{_SUFFIX}", msgspec.json.encode(header) + b"\n" + content)
        except (OSError, UnusableFileError) as error:
            logger.warning("what was compiled is not stored in %s: %s", self.folder, error)
            return False
        self._remove_unread()
        return True

    def _remove_unread(self) -> None:
        """Keep within `_MOST_BYTES_IN_ALL`. Other processes may do so too, and keep what they have open."""
        found = []
        for path in [*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f".*{UNFINISHED_SUFFIX}")]:
            with contextlib.suppress(FileNotFoundError):
                known = path.lstat()
                found.append((known.st_mtime_ns, path.name, known.st_size))
        total = 0
        now = time.time_ns()
        for written_ns, name, nbytes in sorted(found, reverse=True):
            total += nbytes
            is_left = name.endswith(UNFINISHED_SUFFIX) and now - written_ns > _UNFINISHED_SECONDS * 1e9
            if is_left or (total > _MOST_BYTES_IN_ALL and name.endswith(_SUFFIX)):
                try:
                    (self.folder / name).unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("stored capture %s cannot be removed: %s", self.folder / name, error)

    def entries(self) -> list[Entry]:
        """The latest first, and what cannot be used last. Raises InputError where others can write to the folder."""
        found = [self._entry(path) for path in self._listed(f"*{_SUFFIX}")]
        return sorted(found, key=lambda entry: -entry.header.created if entry.header else 0.0)

    def clear(self) -> list[Entry]:
        """Remove every stored capture; gives what was removed. Raises InputError where one cannot be.

        A folder is none, whatever its name is.
        """
        removed = [entry for entry in self.entries() if entry.path.is_symlink() or not entry.path.is_dir()]
        # What a process began to write, and did not finish, goes too.
        remove_files([*(entry.path for entry in removed), *self._listed(f".*{UNFINISHED_SUFFIX}")])
        return removed

    def _listed(self, pattern: str) -> list[Path]:
        try:
            return self._paths(pattern)
        except UnusableFileError as error:
            raise InputError(f"stored captures in {self.folder} cannot be used: {error}", path=self.folder) from error

    def _entry(self, path: Path) -> Entry:
        nbytes = path.lstat().st_size
        try:
            return Entry(path, nbytes, _split(read_own(path, _MOST_BYTES))[0])
        except UnusableFileError as error:
            return Entry(path, nbytes, None, str(error))

    def _paths(self, pattern: str) -> list[Path]:
        """Raises UnusableFileError."""
        try:
            check_own_folder(self.folder)
            return sorted(self.folder.glob(pattern))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnusableFileError(f"the folder cannot be read: {error.strerror}") from error


def find_store() -> CaptureStore | None:
    """The store in the cache folder; None where stored captures are switched off, as `find_cache_folder` says."""
    folder = find_cache_folder()
    return None if folder is None else CaptureStore(folder)


def _split(data: bytes) -> tuple[EntryHeader, bytes]:
    first, _, content = data.partition(b"\n")
    try:
        header = msgspec.json.decode(first, type=EntryHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableFileError(f"its first line is damaged: {error}") from error
    if header.schema != SCHEMA:
        raise UnusableFileError(f"its schema is {header.schema!r}; this version reads {SCHEMA!r}")
    if not 0 <= header.created < _END_OF_DATES:
        raise UnusableFileError(f"its date is {header.created:g}; expected are seconds since 1970")
    return header, content
