"""List and remove stored compiled models and tuned kernels: `moepass cache`."""

from __future__ import annotations

import datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from moepass.models.errors import InputError
from moepass.runtime.captures.capture_store import StoredEntry, find_store
from moepass.runtime.kernels.grouped_gemm.tuner import TunedTiles
from moepass.runtime.system.own_files import FOLDER_VARIABLE, remove_files


def show_cache(*, clear: bool) -> None:
    """Print the stored captures and tuned kernels, or remove them all. Raises InputError if that is impossible."""
    store, console = find_store(), Console()
    if store is None:
        text = f"compiled models are not stored, because {FOLDER_VARIABLE} is empty or torch's compiler caches are off"
        raise InputError(text)
    entries = store.clear() if clear else store.entries()
    tuned = TunedTiles(store.folder).files()
    amounts = [_amount("compiled graph", [entry.nbytes for entry in entries])]
    if tuned:
        amounts.append(_amount("tuned kernel", [path.lstat().st_size for path in tuned]))
    if clear:
        remove_files(tuned)
    elif entries:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("model", "stored", "size", "versions"):
            table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
        for entry in entries:
            table.add_row(*map(_shown, _cells(entry)))
        console.print(table)
    where = f"{'removed from' if clear else 'in'} {store.folder}"
    console.print(f"{' and '.join(amounts)} {where}", highlight=False, soft_wrap=True)


def _shown(text: str) -> Text:
    """Return `text` without control characters, which a file could use to manipulate the terminal."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in text))


def _cells(entry: StoredEntry) -> tuple[str, str, str, str]:
    size = decimal(entry.nbytes)
    if entry.header is None:
        return entry.path.name[:12], "", size, f"not used: {entry.problem}"
    stored = datetime.datetime.fromtimestamp(entry.header.created).strftime("%Y-%m-%d %H:%M")
    versions = ", ".join(f"{name} {version}" for name, version in entry.header.versions.items())
    return entry.header.model, stored, size, versions


def _amount(noun: str, sizes: list[int]) -> str:
    return f"{len(sizes)} {noun}{'' if len(sizes) == 1 else 's'}, {decimal(sum(sizes))},"
