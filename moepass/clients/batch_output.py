"""The output of a batch, to which answers are added as they come, and which says after any end what is left to ask."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from moepass.clients.batch_lines import ID_START, BatchAnswer, encode_answer
from moepass.models.errors import InputError
from moepass.models.limits import decode_json

_ID = re.compile(rf"{ID_START}[0-9]{{1,18}}")
_FIRST_BYTES = b'{"id":"' + ID_START.encode()
# Of what an earlier run wrote. Embeddings of the largest request that a server takes have 130 MB.
_MOST_ANSWER_BYTES = 256 << 20


class _StoredResponse(msgspec.Struct):
    status_code: int


class StoredAnswer(msgspec.Struct):
    """What has to be known of an answer that stands in the output: whose it is, and whether it is an error."""

    id: str
    custom_id: str | None
    response: _StoredResponse | None

    @property
    def number(self) -> int:
        return int(self.id.removeprefix(ID_START))

    @property
    def is_error(self) -> bool:
        return self.response is None or not 200 <= self.response.status_code < 300


class BatchOutput:
    """The file at `path`, locked: two batches cannot write to it at once.

    Every answer is one write at its end. Where a process was killed within one, the line has no end, and `read` cuts it
    off. Raises InputError where the file cannot be written, holds something else than answers, or is deleted, replaced
    or changed by others meanwhile: else a batch would end well whose answers are nowhere.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = self._opened(os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._bytes = os.fstat(self._file).st_size

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def read(self) -> Iterator[StoredAnswer]:
        """The answers of earlier runs. When all are read, the file ends with a complete line."""
        with os.fdopen(os.dup(self._file), "rb") as source:
            source.seek(0)
            number = end = 0
            while raw := source.readline(_MOST_ANSWER_BYTES):
                number += 1
                if not raw.endswith(b"\n"):
                    self._cut(raw, number, end)
                    return
                end += len(raw)
                yield self._stored(raw, number)

    def write(self, answer: BatchAnswer) -> None:
        self._write(encode_answer(answer))

    def keep(self, is_kept: Callable[[StoredAnswer], bool]) -> None:
        """Leave out the answers that are not kept. The file appears as a whole: before, or after."""
        folder = self.path.parent
        try:
            number, name = tempfile.mkstemp(dir=folder, prefix=".moepass-", suffix=".part")
        except OSError as error:
            raise self._failure("written", error) from error
        try:
            with os.fdopen(number, "wb") as target, self.path.open("rb") as source:
                for raw in source:
                    if is_kept(self._stored(raw, 0)):
                        target.write(raw)
                target.flush()
                os.fsync(target.fileno())
            os.chmod(name, self.path.stat().st_mode & 0o777)
            new = self._opened(os.O_RDWR | os.O_APPEND, Path(name))
            os.replace(name, self.path)
        except OSError as error:
            Path(name).unlink(missing_ok=True)
            raise self._failure("written", error) from error
        os.close(self._file)
        self._file = new
        self._bytes = os.fstat(new).st_size

    def save(self) -> None:
        """Wait until the disk has it."""
        os.fsync(self._file)
        self._check_unchanged()

    def _opened(self, flags: int, path: Path | None = None) -> int:
        try:
            opened = os.open(path or self.path, flags, 0o666)
        except OSError as error:
            raise self._failure("written", error) from error
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(opened)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise self._failure("locked", error) from error
            raise InputError(
                f"output {str(self.path)!r} is being written by another batch; wait for it, or give another file",
                name="output",
                path=self.path,
            ) from error
        return opened

    def _cut(self, raw: bytes, number: int, end: int) -> None:
        start = _FIRST_BYTES[: len(raw)]
        if not raw.startswith(start):
            raise self._foreign(number)
        os.ftruncate(self._file, end)
        self._bytes = end

    def _stored(self, raw: bytes, number: int) -> StoredAnswer:
        try:
            found: StoredAnswer = decode_json(raw, StoredAnswer)
        except InputError as error:
            raise self._foreign(number) from error
        if not _ID.fullmatch(found.id):
            raise self._foreign(number)
        return found

    def _check_unchanged(self) -> None:
        opened = os.fstat(self._file)
        try:
            named = os.stat(self.path)
        except OSError:
            named = None
        if named is None or not os.path.samestat(opened, named):
            what = "has been deleted or replaced"
        elif opened.st_size != self._bytes:
            what = f"has {opened.st_size} bytes where {self._bytes} were written: something else has changed it"
        else:
            return
        raise InputError(
            f"output {str(self.path)!r} {what} while answers were added to it; let nothing else touch it, and start "
            "the same again with it, or with another file",
            name="output",
            path=self.path,
        )

    def _write(self, data: bytes) -> None:
        self._check_unchanged()
        rest = memoryview(data)
        try:
            while rest:
                written = os.write(self._file, rest)
                self._bytes += written
                rest = rest[written:]
        except OSError as error:
            raise self._failure("written", error) from error

    def _foreign(self, number: int) -> InputError:
        return InputError(
            f"line {number} of the output {str(self.path)!r} is no answer of moepass batch; nothing was written to it. "
            "Give another file",
            name="output",
            path=self.path,
        )

    def _failure(self, what: str, error: OSError) -> InputError:
        return InputError(
            f"output {str(self.path)!r} cannot be {what}: {error.strerror}", name="output", path=self.path
        )
