"""Progress of reading a checkpoint: a bar on a terminal, or calls of a function of two numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A function of (bytes read so far, total bytes).
Progress = Callable[[int, int], object]


@contextmanager
def shown_progress(hook: Progress | None, is_first: bool, total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """Yield the function to call with the bytes of each read; None if progress is not shown.

    Args:
        hook: called with (bytes read, total bytes), by default a progress bar if `is_first` and stderr is a terminal.
        is_first: whether this is rank 0.
        total_bytes: all bytes to read.
    """
    if hook is not None:
        yield _summing(hook, total_bytes)
    elif is_first and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total_bytes)
            yield lambda nbytes: bar.advance(task, nbytes)
    else:
        yield None


def _summing(hook: Progress, total_bytes: int) -> Callable[[int], None]:
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        hook(done, total_bytes)

    return add
