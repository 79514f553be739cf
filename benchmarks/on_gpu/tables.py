"""Tables of results in Markdown: printed when they are complete, and written to a file row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


class ResultTable:
    """One table. If `folder` is None, it is only printed."""

    def __init__(
        self, name: str, title: str, header: Sequence[str], conditions: Mapping[str, str], folder: Path | None
    ) -> None:
        self.title, self.header = title, list(header)
        self.rows: list[list[str]] = []
        self.note = ""
        self._conditions = conditions
        self._path = None if folder is None else folder / f"{name}.md"

    def add(self, *cells: object) -> None:
        """Add a row and write the table at once, so that a later failure does not lose it."""
        row = [str(cell) for cell in cells]
        if len(row) != len(self.header):
            raise ValueError(f"a row of {self.title!r} has {len(row)} cells, and {len(self.header)} columns")
        self.rows.append(row)
        self._write()

    def finish(self, note: str) -> None:
        """Print the table with `note`, which explains its columns."""
        self.note = note
        self._write()
        print(self.text())

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Return the table in Markdown, with the conditions of the measurement."""
        lines = [f"# {self.title}", "", *(f"* {name}: {value}" for name, value in self._conditions.items()), ""]
        lines += [_line(self.header), _line(["---", *["---:"] * (len(self.header) - 1)]), *map(_line, self.rows)]
        lines += ["", self.note] if self.note else ["", "Not complete yet."]
        return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
