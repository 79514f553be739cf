"""Files that this user's processes keep for later ones: written whole, and read only if they are his.

What belongs to somebody else, or can be written by others, is not read.
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
# What a process that was killed began to write.
UNFINISHED_SUFFIX = ".part"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnusableFileError(Exception):
    """A file or a folder is not what this user wrote; the text says why."""


def find_cache_folder() -> Path | None:
    """The folder that the environment names, else one beside Inductor's cache.

    None where nothing is to be kept: the variable is empty, or torch's own caches are off.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if given == "":
        return None
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if torch.compiler.config.force_disable_caches:
        return None
    # Only a shell expands what it finds at the beginning of a word; services and containers have none.
    return Path(os.path.expanduser(given or os.path.join(cache_dir(), "moepass"))).absolute()


def write_own(path: Path, content: bytes) -> None:
    """Write a file, complete under its name or not at all, whoever else writes or reads it now. Makes its folder.

    Raises UnusableFileError for a folder of somebody else, and OSError.
    """
    with contextlib.suppress(FileExistsError):  # which also says that a file is there
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
    """Raises UnusableFileError, also for a file of more than `most_bytes`."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # The checks are of the file that is open, whatever takes its name meanwhile.
            known = os.fstat(number)
            if not stat.S_ISREG(known.st_mode):
                raise UnusableFileError("it is no ordinary file")
            _check_own(known, "it")
            if known.st_size > most_bytes:
                raise UnusableFileError(f"it has {known.st_size} bytes; the limit is {most_bytes}")
            with open(number, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(number)
    except OSError as error:
        problem = "it is a link" if error.errno == errno.ELOOP else f"it cannot be read: {error.strerror}"
        raise UnusableFileError(problem) from error


def remove_files(paths: Iterable[Path]) -> None:
    """Raises InputError where one cannot be removed. A file that is gone already is no error."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be removed: {error.strerror}", path=path) from error


def check_own_folder(folder: Path) -> None:
    """Raises UnusableFileError, and OSError for a folder that is not there."""
    known = folder.stat()
    if not stat.S_ISDIR(known.st_mode):
        raise UnusableFileError("it is a file, not a folder")
    _check_own(known, "the folder")


def _check_own(known: os.stat_result, what: str) -> None:
    if known.st_uid != os.geteuid():
        raise UnusableFileError(f"{what} belongs to user {known.st_uid}, not to {os.geteuid()}, who runs this")
    if known.st_mode & _OTHERS_MAY_WRITE:
        raise UnusableFileError(f"{what} can be written by others (mode {stat.S_IMODE(known.st_mode):o}, expected 700)")
