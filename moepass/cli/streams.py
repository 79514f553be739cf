"""Input and output of the command line: standard streams that may be closed, disks that may be full.

Nothing heavy is imported here: `moepass --help` must not wait for it.
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

# Exit status that a shell reports for tools that SIGPIPE (13) ended: 128 and the signal's number.
READER_LEFT = 128 + 13
# And for those that Ctrl-C ended.
STOPPED = 128 + signal.SIGINT
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class _Output(io.FileIO):
    """A file to write to. What goes wrong is an InputError that names it; a reader that left stays BrokenPipeError."""

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
    what = "standard output" if output == "-" else f"output {output!r}"
    path = None if output == "-" else output
    return InputError(f"{what} cannot be written: {error.strerror}", name="output", path=path)


@contextlib.contextmanager
def process_streams() -> Iterator[None]:
    """For the whole process: closed standard streams, a standard output that fails, and a request to terminate.

    A request to terminate becomes an exception, so that what cleans up does so.
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
            # It was reported when it first failed; what is left must not fail again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fill_closed_descriptors() -> None:
    """Give a closed standard stream a descriptor that fails when it is used: the next file opened would get its number.

    Python leaves None in place of such a stream; nothing is said on a closed standard error.
    """
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number, which this is
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  it lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second request is obeyed at once
    raise SystemExit(128 + number)


def check_standard_output() -> None:
    """Raises InputError where standard output is closed. Whether a disk is full shows only when it is written to."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if raw is not None:
        raw.write(b"")


def check_output(output: str) -> Path | None:
    """The path to write to, None for standard output. Raises InputError if it cannot be written to."""
    if output == "-":
        check_standard_output()
        return None
    try:
        target = Path(output).resolve()  # a link is written through, not replaced
    except (ValueError, RuntimeError) as error:  # a null byte, a loop of links
        raise InputError(f"output {output!r} is no name of a file: {error}", name="output", path=output) from error
    try:
        if target.is_dir():
            raise InputError(f"output {output!r} is a folder; give the name of a file", name="output", path=output)
        if not target.parent.is_dir():
            raise InputError(
                f"output {output!r}: the folder {target.parent} does not exist", name="output", path=output
            )
        with contextlib.suppress(FileNotFoundError):
            target.lstat()  # raises for a name that is too long
        if _is_special(target):
            if not os.access(target, os.W_OK):
                raise InputError(f"output {output!r} cannot be written to", name="output", path=output)
        else:
            number, name = _temporary(target)
            os.close(number)
            os.unlink(name)
    except OSError as error:
        raise cannot_write(output, error) from error
    return target


def compiler_cache() -> str:
    """Where torch keeps compiled code, as its `cache_dir` says; this imports no torch, which takes seconds."""
    given = os.environ.get(_CACHE_VARIABLE)
    if given is not None:
        return os.path.abspath(given)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def check_compiler_cache() -> None:
    """Raises InputError where torch's compiler has no folder that it can write compiled code to.

    torch asks for that folder when parts of it are imported, and its error then names no remedy.
    """
    given = os.environ.get(_CACHE_VARIABLE)
    folder = compiler_cache()
    try:
        os.makedirs(folder, exist_ok=True)
        number, name = tempfile.mkstemp(dir=folder, prefix=".moepass-")
        os.close(number)
        os.unlink(name)
    except OSError as error:
        where = f"{_CACHE_VARIABLE} is {given!r}, which" if given else "the folder of torch's compiled code"
        raise InputError(
            f"{where} cannot be written to: {error.strerror}; set {_CACHE_VARIABLE} to a folder that can",
            name=_CACHE_VARIABLE,
            value=given,
        ) from error


@contextlib.contextmanager
def open_output(output: str, target: Path | None) -> Iterator[BinaryIO]:
    """Open what `check_output` gave for `output`. Raises InputError where it cannot be written.

    A file appears under its name complete or not at all: it is written beside it and renamed at the end.
    """
    if target is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if _is_special(target):  # it keeps its place
        with _opened(str(target), output) as opened:
            yield opened
        return
    try:
        number, name = _temporary(target)
    except OSError as error:
        raise cannot_write(output, error) from error
    try:
        with _opened(number, output) as opened:
            yield opened
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
    """True for a pipe or a device."""
    return target.exists() and not target.is_file()


def _temporary(target: Path) -> tuple[int, str]:
    # Not made from the target's name, which may be as long as a name can be.
    return tempfile.mkstemp(dir=target.parent, prefix=".moepass-", suffix=".part")


def _usual_mode(target: Path) -> int:
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
