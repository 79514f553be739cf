"""The list of what `moepass.stored_compile` has stored for later starts, and its removal: `moepass cache`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from moepass.models.errors import InputError
from moepass.runtime.captures.capture_store import CaptureStore, Entry, find_store
from moepass.runtime.system.own_files import FOLDER_VARIABLE


def list_cache() -> None:
    """Raises InputError where captures are not stored, or belong to somebody else."""
    store, console = _store(), Console()
    entries = store.entries()
    if entries:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("model", "stored", "size", "versions"):
            table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
        for entry in entries:
            table.add_row(*map(_shown, _cells(entry)))
        console.print(table)
    console.print(f"{_amount(entries)} in {store.folder}", highlight=False, soft_wrap=True)


def clear_cache() -> None:
    """Raises InputError as `list_cache`, and where a file cannot be removed."""
    store = _store()
    console = Console()
    console.print(f"Removed {_amount(store.clear())} from {store.folder}", highlight=False, soft_wrap=True)


def _store() -> CaptureStore:
    store = find_store()
    if store is None:
        raise InputError(
            f"compiled models are not stored: {FOLDER_VARIABLE} is empty, or torch's compiler caches are switched off"
        )
    return store


def _shown(text: str) -> Text:
    """As plain text: files may hold anything, and a terminal obeys some letters."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in text))


def _cells(entry: Entry) -> tuple[str, str, str, str]:
    size = decimal(entry.nbytes)
    if entry.header is None:
        return entry.path.name[:12], "", size, f"not used: {entry.problem}"
    stored = datetime.datetime.fromtimestamp(entry.header.created).strftime("%Y-%m-%d %H:%M")
    versions = ", ".join(f"{name} {version}" for name, version in entry.header.versions.items())
    return entry.header.model, stored, size, versions


def _amount(entries: Iterable[Entry]) -> str:
    sizes = [entry.nbytes for entry in entries]
    return f"{len(sizes)} compiled {'graph' if len(sizes) == 1 else 'graphs'}, {decimal(sum(sizes))},"
