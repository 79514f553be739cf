"""Progress bars of the command line."""

from __future__ import annotations

import contextlib
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
