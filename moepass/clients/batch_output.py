"""The output of a batch: answers are appended as they arrive, and a later run reads which requests are answered."""

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
# The most bytes of a line that an earlier run wrote. Embeddings of the largest accepted request have 130 MB.
_MOST_ANSWER_BYTES = 256 << 20


class _StoredResponse(msgspec.Struct):
    status_code: int


class StoredAnswer(msgspec.Struct):
    """The fields of an answer in the output that identify its line and say whether it is an error."""

    id: str
    custom_id: str | None
    response: _StoredResponse | None

    @property
    def number(self) -> int:
        """The number of the line in the input."""
        return int(self.id.removeprefix(ID_START))

    @property
    def is_error(self) -> bool:
        """True unless the response has a status of success."""
        return self.response is None or not 200 <= self.response.status_code < 300


class BatchOutput:
    """The output file at `path`, locked so that two batches cannot write to it at the same time.

    Each answer is appended by one write. If the process is killed during a write, the last line is incomplete, and
    `read` removes it.

    Methods raise InputError if the file cannot be written, contains something other than answers, or is deleted,
    replaced or changed by another program. Otherwise a batch could report success although its answers are lost.
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
        """Yield the answers of earlier runs, and remove an incomplete last line."""
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
        """Append an answer."""
        self._write(encode_answer(answer))

    def filter(self, is_kept: Callable[[StoredAnswer], bool]) -> None:
        """Remove the answers that `is_kept` rejects. The file is replaced in one step."""
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
        """Wait until the answers are on the disk."""
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
                f"output {str(self.path)!r} is being written by another batch; wait for it, or choose another file",
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
            answer: StoredAnswer = decode_json(raw, StoredAnswer)
        except InputError as error:
            raise self._foreign(number) from error
        if not _ID.fullmatch(answer.id):
            raise self._foreign(number)
        return answer

    def _check_unchanged(self) -> None:
        opened = os.fstat(self._file)
        try:
            named = os.stat(self.path)
        except OSError:
            named = None
        if named is None or not os.path.samestat(opened, named):
            what = "has been deleted or replaced"
        elif opened.st_size != self._bytes:
            what = f"has {opened.st_size} bytes although {self._bytes} were written, so another program changed it"
        else:
            return
        raise InputError(
            f"output {str(self.path)!r} {what} while answers were appended to it; keep other programs away from it, "
            "and run the same command again",
            name="output",
            path=self.path,
        )

    def _write(self, data: bytes) -> None:
        self._check_unchanged()
        remaining = memoryview(data)
        try:
            while remaining:
                written = os.write(self._file, remaining)
                self._bytes += written
                remaining = remaining[written:]
        except OSError as error:
            raise self._failure("written", error) from error

    def _foreign(self, number: int) -> InputError:
        return InputError(
            f"line {number} of the output {str(self.path)!r} is not an answer of moepass batch; choose another file, "
            "nothing was written to this one",
            name="output",
            path=self.path,
        )

    def _failure(self, what: str, error: OSError) -> InputError:
        return InputError(
            f"output {str(self.path)!r} cannot be {what}: {error.strerror}", name="output", path=self.path
        )
