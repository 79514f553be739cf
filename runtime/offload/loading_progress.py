"""Progress of reading a checkpoint: a bar on a terminal, or a caller's function of two numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Takes (bytes read so far, bytes in all).
Progress = Callable[[int, int], object]


@contextmanager
def shown_progress(hook: Progress | None, is_first: bool, total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """The function to call with the number of bytes that were read just now; None if no progress is wanted.

    `hook` is told the sum. Without one there is a progress bar, where `is_first` and stderr is a terminal.
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
