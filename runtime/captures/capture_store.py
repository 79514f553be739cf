"""The folder of stored captures: one file per capture, which only its owner can write.

A file starts with a line of JSON, the header, which has the digest of the rest: the capture, also JSON. Nothing in a
file is unpickled or evaluated. But a capture contains source code that Inductor generated, and this code is run. So
folders and files that belong to another user, or that other users can write to, are not read. A process that can write
as the owner can run code as the owner anyway.
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
# The limit for all captures together. Beyond it, captures that were not read for longest are removed.
_MOST_BYTES_IN_ALL = 1 << 30
# An unfinished file of this age belongs to a process that has ended.
_UNFINISHED_SECONDS = 3600.0
# The first second of the year 10000, after the last date that Python knows.
_END_OF_DATES = 253402300800.0


class EntryHeader(msgspec.Struct, frozen=True):
    """The first line of a stored capture's file. `created` is in seconds since the epoch."""

    key: str
    digest: str
    model: str
    created: float
    versions: dict[str, str]
    schema: str = SCHEMA


@dataclasses.dataclass(frozen=True)
class StoredEntry:
    """A capture file of the store's folder. `problem` is the reason if it has no usable `header`."""

    path: Path
    nbytes: int
    header: EntryHeader | None
    problem: str = ""


class CaptureStore:
    """Stored captures in `folder`, which is created when the first one is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> Iterator[bytes]:
        """Yield the captures that were saved under `key`. Untrusted files are skipped with a warning in the log."""
        try:
            paths = self._paths(f"{key}-*{_SUFFIX}")
        except UnusableFileError as error:
            logger.warning("stored captures in %s are ignored: %s", self.folder, error)
            return
        for path in paths:
            try:
                header, content = _split(read_own(path, _MOST_BYTES))
                if header.key != key:
                    raise UnusableFileError(
                        f"it is stored under the key {header.key[:12]}, but its name says {key[:12]}"
                    )
                if hashlib.sha256(content).hexdigest() != header.digest:
                    raise UnusableFileError("its content does not match its digest")
            except UnusableFileError as error:
                self.report(path, str(error))
                continue
            with contextlib.suppress(OSError):
                os.utime(path)  # marks it as read
            yield content

    def report(self, path: Path | str, problem: str) -> None:
        """Warn that a stored capture is ignored because of `problem`."""
        logger.warning("stored capture %s is ignored, and the model is compiled again: %s", path, problem)

    def save(self, key: str, name: str, content: bytes, model: str, versions: Mapping[str, str]) -> bool:
        """Store `content` under `key`, replacing an earlier capture of the same `name`. Return whether that succeeded.

        A failure is logged as a warning and has no other effect.
        """
        digest = hashlib.sha256(content).hexdigest()
        header = EntryHeader(key, digest, model, time.time(), dict(versions))
        try:
            write_own(self.folder / f"{key}-{name}{_SUFFIX}", msgspec.json.encode(header) + b"\n" + content)
        except (OSError, UnusableFileError) as error:
            logger.warning("the compiled model is not stored in %s: %s", self.folder, error)
            return False
        self._remove_unread()
        return True

    def _remove_unread(self) -> None:
        """Remove the captures that were not read for longest, down to `_MOST_BYTES_IN_ALL`.

        A process that has opened a removed file can still read it.
        """
        files = []
        for path in [*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f".*{UNFINISHED_SUFFIX}")]:
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                files.append((status.st_mtime_ns, path.name, status.st_size))
        total = 0
        now = time.time_ns()
        for written_ns, name, nbytes in sorted(files, reverse=True):
            total += nbytes
            is_left = name.endswith(UNFINISHED_SUFFIX) and now - written_ns > _UNFINISHED_SECONDS * 1e9
            if is_left or (total > _MOST_BYTES_IN_ALL and name.endswith(_SUFFIX)):
                try:
                    (self.folder / name).unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("stored capture %s cannot be removed: %s", self.folder / name, error)

    def entries(self) -> list[StoredEntry]:
        """Return all entries, the latest first, unusable ones last. Raises InputError if other users can write here."""
        entries = [self._entry(path) for path in self._listed(f"*{_SUFFIX}")]
        return sorted(entries, key=lambda entry: -entry.header.created if entry.header else 0.0)

    def clear(self) -> list[StoredEntry]:
        """Remove every stored capture and return the removed entries. Raises InputError if one cannot be removed."""
        removed = [entry for entry in self.entries() if entry.path.is_symlink() or not entry.path.is_dir()]
        # Unfinished files are removed as well.
        remove_files([*(entry.path for entry in removed), *self._listed(f".*{UNFINISHED_SUFFIX}")])
        return removed

    def _listed(self, pattern: str) -> list[Path]:
        try:
            return self._paths(pattern)
        except UnusableFileError as error:
            raise InputError(f"stored captures in {self.folder} cannot be used: {error}", path=self.folder) from error

    def _entry(self, path: Path) -> StoredEntry:
        nbytes = path.lstat().st_size
        try:
            return StoredEntry(path, nbytes, _split(read_own(path, _MOST_BYTES))[0])
        except UnusableFileError as error:
            return StoredEntry(path, nbytes, None, str(error))

    def _paths(self, pattern: str) -> list[Path]:
        """Return the files that match `pattern`. Raises UnusableFileError if other users can write to the folder."""
        try:
            check_own_folder(self.folder)
            return sorted(self.folder.glob(pattern))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnusableFileError(f"the folder cannot be read: {error.strerror}") from error


def find_store() -> CaptureStore | None:
    """Return the store in the cache folder, or None if `find_cache_folder` says that captures are not stored."""
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
        raise UnusableFileError(f"its date is {header.created:g}; expected seconds since 1970")
    return header, content
