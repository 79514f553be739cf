"""Progress bars and notes of the command line."""

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
    """A bar on standard error, where that is a terminal, and its one task; its speed is shown in `rate`."""
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
    for compilation in compilations:
        for refusal in compilation.plan.refusals:
            typer.echo(f"moepass: note: left unchanged: {refusal}", err=True)


def keep_what_is_there() -> None:
    """What exists now is never looked at again by the garbage collector.

    For processes that have imported and loaded all that they need: each of its full collections walks through some
    hundred thousand objects that stay, and takes 0.3 seconds in which nothing is answered.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For work that makes millions of objects and little garbage, as imports and tracing do: an eighth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
