"""Input and output of the command line, which must cope with closed standard streams and full disks.

This module imports nothing heavy, because `moepass --help` must not wait for it.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from moepass.models.errors import InputError

# The exit status of a program that SIGPIPE (13) or Ctrl-C ended, as shells report it.
EXIT_BROKEN_PIPE = 128 + 13
EXIT_INTERRUPTED = 128 + signal.SIGINT
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class _Output(io.FileIO):
    """A file to write to. Its errors become an InputError that names it; BrokenPipeError is raised unchanged."""

    def __init__(self, file: str | int, output: str, closefd: bool = True) -> None:
        super().__init__(file, "wb", closefd=closefd)
        self.output = output

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise cannot_write(self.output, error) from error


def cannot_write(output: str, error: OSError) -> InputError:
    """Return the InputError for `output`, which failed with `error`."""
    what = "standard output" if output == "-" else f"output {output!r}"
    path = None if output == "-" else output
    return InputError(f"{what} cannot be written: {error.strerror}", name="output", path=path)


@contextlib.contextmanager
def process_streams() -> Iterator[None]:
    """Prepare the standard streams of this process, and let SIGTERM raise SystemExit.

    Closed streams are replaced, and errors of standard output become InputError. An exception on SIGTERM lets cleanup
    code run.
    """
    _fill_closed_descriptors()
    standard_output = sys.stdout
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(1, "-", closefd=False)),
        encoding=getattr(standard_output, "encoding", None),
        errors=getattr(standard_output, "errors", None),
        line_buffering=getattr(standard_output, "line_buffering", False),
    )
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except (InputError, BrokenPipeError):
            # The error was reported when it first occurred. The interpreter must not fail again when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fill_closed_descriptors() -> None:
    """Give a closed standard stream a descriptor that fails on use: else the next opened file would get its number.

    Python sets the stream's object to None in this case.
    """
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  open as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    raise SystemExit(128 + number)


def check_standard_output() -> None:
    """Raise InputError if standard output is closed. A full disk is only detected by writing."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if raw is not None:
        raw.write(b"")


def check_output(output: str) -> Path | None:
    """Return the path to write to, or None for standard output. Raises InputError if it cannot be written to."""
    if output == "-":
        check_standard_output()
        return None

    def refusal(text: str) -> InputError:
        return InputError(f"output {output!r}{text}", name="output", path=output)

    try:
        target = Path(output).resolve()  # follow a link instead of replacing it
    except (ValueError, RuntimeError) as error:  # a null byte, a loop of links
        raise refusal(f" is not a valid file name: {error}") from error
    try:
        if target.is_dir():
            raise refusal(" is a folder; give the name of a file")
        if not target.parent.is_dir():
            raise refusal(f": the folder {target.parent} does not exist")
        with contextlib.suppress(FileNotFoundError):
            target.lstat()  # raises for a name that is too long
        if _is_special(target):
            if not os.access(target, os.W_OK):
                raise refusal(" cannot be written to")
        else:
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise cannot_write(output, error) from error
    return target


def compiler_cache() -> str:
    """Return the folder of torch's compiled code, as torch's `cache_dir` does, without importing torch."""
    configured = os.environ.get(_CACHE_VARIABLE)
    if configured is not None:
        return os.path.abspath(configured)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def check_compiler_cache() -> None:
    """Raise InputError if torch's compiler has no writable folder for compiled code; its own error has no remedy."""
    configured = os.environ.get(_CACHE_VARIABLE)
    folder = compiler_cache()
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        where = f"{_CACHE_VARIABLE} is {configured!r}, which" if configured else "the folder of torch's compiled code"
        text = f"{where} cannot be written to: {error.strerror}; set {_CACHE_VARIABLE} to a writable folder"
        raise InputError(text, name=_CACHE_VARIABLE, value=configured) from error


@contextlib.contextmanager
def open_output(output: str, target: Path | None) -> Iterator[BinaryIO]:
    """Open `target`, which `check_output` returned for `output`. Raises InputError if it cannot be written.

    A regular file appears under its name only when it is complete: the block writes a temporary file in the same
    folder, which is renamed at the end.
    """
    if target is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if _is_special(target):  # a device or a pipe cannot be replaced
        with _opened(str(target), output) as file:
            yield file
        return
    try:
        # The target's name may have the maximum length, so the temporary name does not contain it.
        number, name = tempfile.mkstemp(dir=target.parent, prefix=".moepass-", suffix=".part")
    except OSError as error:
        raise cannot_write(output, error) from error
    try:
        with _opened(number, output) as file:
            yield file
        try:
            os.chmod(name, _usual_mode(target))
            os.replace(name, target)
        except OSError as error:
            raise cannot_write(output, error) from error
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _opened(file: str | int, output: str) -> BinaryIO:
    try:
        return io.BufferedWriter(_Output(file, output))
    except OSError as error:
        raise cannot_write(output, error) from error


def _is_special(target: Path) -> bool:
    """Return True for a pipe or a device."""
    return target.exists() and not target.is_file()


def _usual_mode(target: Path) -> int:
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
