"""The folder of stored captures: one file per capture, which only its owner can write.

A file is a line of JSON about it and, behind it, the capture, also JSON, whose digest that line has. Nothing in them is
unpickled or evaluated. But a capture holds the source text of code that Inductor wrote, and that text is run. So a
folder or a file that belongs to somebody else, or that others can write to, is not read. Whoever can write as the owner
needs no cache to run code as him.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from moepass.models.errors import InputError

logger = logging.getLogger("moepass")

FOLDER_VARIABLE = "MOEPASS_CACHE_DIR"
SCHEMA = "moepass.capture/1"
_SUFFIX, _UNFINISHED = ".capture", ".part"
# The largest captures take about 10 MB.
_MOST_BYTES = 256 << 20
# Of all captures together: those that were not read for the longest time are removed beyond it.
_MOST_BYTES_IN_ALL = 1 << 30
# What a process that was killed began to write. None takes that long for a file.
_UNFINISHED_SECONDS = 3600.0
# The first second of the year 10000, after the last date that Python knows.
_END_OF_DATES = 253402300800.0
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


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


class _UnusableError(Exception):
    """A file or a folder is not what this user wrote; the text says why."""


class CaptureStore:
    """Stored captures in `folder`, which is made when the first one is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> Iterator[bytes]:
        """The captures that were saved under `key`. What cannot be trusted is reported in the log, and left out."""
        try:
            paths = self._paths(f"{key}-*{_SUFFIX}")
        except _UnusableError as error:
            logger.warning("stored captures in %s are ignored: %s", self.folder, error)
            return
        for path in paths:
            try:
                header, content = _split(_read_own(path))
                if header.key != key:
                    raise _UnusableError(f"it was stored for {header.key[:12]}, not for {key[:12]}")
                if hashlib.sha256(content).hexdigest() != header.digest:
                    raise _UnusableError("its content is not what was written")
            except _UnusableError as error:
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
            with contextlib.suppress(FileExistsError):  # which also says that a file is there
                self.folder.mkdir(mode=0o700, parents=True)
            _check_folder(self.folder.stat())
            # Complete under its name or not at all, whoever else writes or reads it now.
            number, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=_UNFINISHED)
            try:
                with open(number, "wb") as file:
                    file.write(msgspec.json.encode(header) + b"\n" + content)
                os.replace(temporary, self.folder / f"{key}-{name}{_SUFFIX}")
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except (OSError, _UnusableError) as error:
            logger.warning("what was compiled is not stored in %s: %s", self.folder, error)
            return False
        self._remove_unread()
        return True

    def _remove_unread(self) -> None:
        """Keep within `_MOST_BYTES_IN_ALL`. Other processes may do so too, and keep what they have open."""
        found = []
        for path in [*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f".*{_UNFINISHED}")]:
            with contextlib.suppress(FileNotFoundError):
                known = path.lstat()
                found.append((known.st_mtime_ns, path.name, known.st_size))
        total = 0
        now = time.time_ns()
        for written_ns, name, nbytes in sorted(found, reverse=True):
            total += nbytes
            is_left = name.endswith(_UNFINISHED) and now - written_ns > _UNFINISHED_SECONDS * 1e9
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
        for path in [*(entry.path for entry in removed), *self._listed(f".*{_UNFINISHED}")]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise InputError(f"{path} cannot be removed: {error.strerror}", path=path) from error
        return removed

    def _listed(self, pattern: str) -> list[Path]:
        try:
            return self._paths(pattern)
        except _UnusableError as error:
            raise InputError(f"stored captures in {self.folder} cannot be used: {error}", path=self.folder) from error

    def _entry(self, path: Path) -> Entry:
        nbytes = path.lstat().st_size
        try:
            return Entry(path, nbytes, _split(_read_own(path))[0])
        except _UnusableError as error:
            return Entry(path, nbytes, None, str(error))

    def _paths(self, pattern: str) -> list[Path]:
        """Raises _UnusableError."""
        try:
            _check_folder(self.folder.stat())
            return sorted(self.folder.glob(pattern))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _UnusableError(f"the folder cannot be read: {error.strerror}") from error


def find_store() -> CaptureStore | None:
    """The store that the environment names, else the one beside Inductor's cache.

    None where stored captures are switched off: the variable is empty, or torch's own caches are off.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if given == "":
        return None
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if torch.compiler.config.force_disable_caches:
        return None
    # Only a shell expands what it finds at the beginning of a word; services and containers have none.
    return CaptureStore(Path(os.path.expanduser(given or os.path.join(cache_dir(), "moepass"))).absolute())


def _read_own(path: Path) -> bytes:
    """Raises _UnusableError."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # The checks are of the file that is open, whatever takes its name meanwhile.
            known = os.fstat(number)
            if not stat.S_ISREG(known.st_mode):
                raise _UnusableError("it is no ordinary file")
            _check_own(known, "it")
            if known.st_size > _MOST_BYTES:
                raise _UnusableError(f"it has {known.st_size} bytes; the limit is {_MOST_BYTES}")
            with open(number, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(number)
    except OSError as error:
        problem = "it is a link" if error.errno == errno.ELOOP else f"it cannot be read: {error.strerror}"
        raise _UnusableError(problem) from error


def _check_folder(known: os.stat_result) -> None:
    if not stat.S_ISDIR(known.st_mode):
        raise _UnusableError("it is a file, not a folder")
    _check_own(known, "the folder")


def _check_own(known: os.stat_result, what: str) -> None:
    if known.st_uid != os.geteuid():
        raise _UnusableError(f"{what} belongs to user {known.st_uid}, not to {os.geteuid()}, who runs this")
    if known.st_mode & _OTHERS_MAY_WRITE:
        raise _UnusableError(f"{what} can be written by others (mode {stat.S_IMODE(known.st_mode):o}, expected 700)")


def _split(data: bytes) -> tuple[EntryHeader, bytes]:
    first, _, content = data.partition(b"\n")
    try:
        header = msgspec.json.decode(first, type=EntryHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _UnusableError(f"its first line is damaged: {error}") from error
    if header.schema != SCHEMA:
        raise _UnusableError(f"its schema is {header.schema!r}; this version reads {SCHEMA!r}")
    if not 0 <= header.created < _END_OF_DATES:
        raise _UnusableError(f"its date is {header.created:g}; expected are seconds since 1970")
    return header, content
