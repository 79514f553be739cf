"""The index of a batch: its lines and which of them are answered, on disk because memory would grow with the file."""

from __future__ import annotations

import sqlite3

from moepass.models.errors import InputError

_CACHE_KILOBYTES = 16 << 10


class BatchIndex:
    """A temporary database of the custom_ids of a file.

    A line without a custom_id is identified by its number. The database has no name on disk and ends with the process.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute(f"PRAGMA cache_size = -{_CACHE_KILOBYTES}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(
            "CREATE TABLE lines (key BLOB PRIMARY KEY, number INTEGER, answered INTEGER) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def close(self) -> None:
        """Delete the database."""
        self._database.close()

    def add(self, custom_id: str | None, number: int) -> None:
        """Add a line. Raise InputError with both line numbers if an earlier line has the same custom_id."""
        try:
            self._database.execute("INSERT INTO lines VALUES (?, ?, 0)", (_key(custom_id, number), number))
        except sqlite3.IntegrityError:
            row = self._database.execute("SELECT number FROM lines WHERE key = ?", (_key(custom_id, number),))
            (first,) = row.fetchone()
            raise InputError(
                f"lines {first} and {number} have the same custom_id, {_shown(custom_id)}; it must be unique",
                name="custom_id",
                value=custom_id,
                expected="each once",
            ) from None

    def mark_answered(self, custom_id: str | None, number: int) -> bool:
        """Mark a line as answered, and return False if the file has no such line."""
        updated = self._database.execute("UPDATE lines SET answered = 1 WHERE key = ?", (_key(custom_id, number),))
        return updated.rowcount == 1

    def is_unanswered(self, custom_id: str | None, number: int) -> bool:
        """Return True if the file has that custom_id on that line, and no earlier run has answered it."""
        row = self._database.execute(
            "SELECT 1 FROM lines WHERE key = ? AND number = ? AND answered = 0", (_key(custom_id, number), number)
        )
        return row.fetchone() is not None

    def count(self, *, answered: bool) -> int:
        """Return the number of lines that are answered, or that are not."""
        (count,) = self._database.execute("SELECT count(*) FROM lines WHERE answered = ?", (answered,)).fetchone()
        return int(count)


def _key(custom_id: str | None, number: int) -> bytes:
    return b"line %d" % number if custom_id is None else b"id " + custom_id.encode()


def _shown(custom_id: str | None) -> str:
    text = repr(custom_id)
    return text if len(text) <= 100 else text[:100] + "…"
