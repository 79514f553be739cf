"""Progress bars and notes of the command line, and control of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from moepass.compilations import Compilation


@contextlib.contextmanager
def progress_bar(
    description: str, total: int | None = None, rate: str | None = None
) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar on standard error if that is a terminal, and yield it with its one task.

    Args:
        description: the text before the bar.
        total: the number of steps, None if it is not known yet.
        rate: the unit of the displayed speed; None displays no speed.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> str:
            return f"{task.speed:.0f} {rate}/s" if task.speed else ""

    columns = [
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        *([RateColumn()] if rate else []),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
    ]
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress, progress.add_task(description, total=total)


def note_refusals(compilations: Sequence[Compilation]) -> None:
    """Print a note for each block that the compiled graphs leave unchanged, with the reason."""
    for compilation in compilations:
        for refusal in compilation.plan.refusals:
            typer.echo(f"moepass: note: left unchanged: {refusal}", err=True)


def freeze_live_objects() -> None:
    """Exempt all objects that exist now from garbage collection.

    A process calls this after it has imported and loaded everything that it needs. Otherwise each full collection walks
    through several hundred thousand permanent objects, which blocks the process for 0.3 seconds.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection in the block, which saves an eighth of the time of imports and tracing.

    They create millions of objects and little garbage.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
