"""Progress bars of the command line, and control of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextlib.contextmanager
def progress_bar(
    description: str, total: int | None = None, rate: str | None = None
) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar on standard error if that is a terminal, and yield it with its one task.

    `total` is the number of steps, None if it is not known yet. `rate` is the unit of the displayed speed, if any.
    """
    from rich import progress
    from rich.console import Console

    class RateColumn(progress.ProgressColumn):
        def render(self, task: progress.Task) -> str:
            return f"{task.speed:.0f} {rate}/s" if task.speed else ""

    columns = [
        *(progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()),
        *([RateColumn()] if rate else []),
        *(progress.TimeElapsedColumn(), progress.TimeRemainingColumn()),
    ]
    console = Console(stderr=True)
    with progress.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield bar, bar.add_task(description, total=total)


def freeze_live_objects() -> None:
    """Exempt all objects that exist now from garbage collection, after everything is imported and loaded.

    Otherwise each full collection walks through several hundred thousand permanent objects, which blocks the process
    for 0.3 seconds.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which saves an eighth of the time of imports and tracing: they make little garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
