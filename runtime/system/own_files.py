"""Files that processes of a user store for later processes: written atomically, read only if that user wrote them.

Files that belong to another user, or that others can write, are not read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from moepass.models.errors import InputError

FOLDER_VARIABLE = "MOEPASS_CACHE_DIR"
# The suffix of files that were not written completely, because the process was killed.
UNFINISHED_SUFFIX = ".part"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnusableFileError(Exception):
    """A file or a folder was not written by this user, or is damaged; the text says why."""


def find_cache_folder() -> Path | None:
    """Return the folder of MOEPASS_CACHE_DIR, else a folder in Inductor's cache.

    Returns None if nothing may be stored: the variable is empty, or torch's own caches are off.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder == "":
        return None
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if torch.compiler.config.force_disable_caches:
        return None
    # A shell would expand `~`, but services and containers start without one.
    return Path(os.path.expanduser(folder or os.path.join(cache_dir(), "moepass"))).absolute()


def write_own(path: Path, content: bytes) -> None:
    """Write a file atomically, even if other processes write or read it now. Makes its folder.

    Raises UnusableFileError if the folder belongs to another user, and OSError.
    """
    with contextlib.suppress(FileExistsError):  # raised for a file, too
        path.parent.mkdir(mode=0o700, parents=True)
    check_own_folder(path.parent)
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=UNFINISHED_SUFFIX)
    try:
        with open(number, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_own(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file. Raises UnusableFileError, also for a file of more than `most_bytes`."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # Check the open file: another file may get its name at the same time.
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode):
                raise UnusableFileError("it is not a regular file")
            _check_own(status, "it")
            if status.st_size > most_bytes:
                raise UnusableFileError(f"it has {status.st_size} bytes; the limit is {most_bytes}")
            with open(number, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(number)
    except OSError as error:
        problem = "it is a link" if error.errno == errno.ELOOP else f"it cannot be read: {error.strerror}"
        raise UnusableFileError(problem) from error


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files, if they exist. Raises InputError if one cannot be removed."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be removed: {error.strerror}", path=path) from error


def check_own_folder(folder: Path) -> None:
    """Raise UnusableFileError if the folder is not this user's, and OSError if it does not exist."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise UnusableFileError("it is a file, not a folder")
    _check_own(status, "the folder")


def _check_own(status: os.stat_result, subject: str) -> None:
    if status.st_uid != os.geteuid():
        raise UnusableFileError(
            f"{subject} belongs to user {status.st_uid}, not to user {os.geteuid()}, who runs this process"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise UnusableFileError(
            f"{subject} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}, expected 700)"
        )
