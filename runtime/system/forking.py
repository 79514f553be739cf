"""Errors for forked children, which inherit neither threads, locks nor connections."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from moepass.models.errors import MoepassError


class ForkedProcessError(MoepassError, RuntimeError):
    """An object of process `owner` was used in process `child`, which was forked from it."""

    def __init__(self, owner: int, child: int) -> None:
        super().__init__(
            f"process {child} was forked from process {owner}, which offloaded or compiled the model; copy threads, "
            f"locks and connections to other ranks stay there. Run the model in process {owner}, or start processes "
            "with multiprocessing's 'spawn' and load the model in each"
        )
        self.owner, self.child = owner, child


class OwnerProcess:
    """The process in which this object was made. Its objects call `check` before they take a lock."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def check(self) -> None:
        """Raise ForkedProcessError in a forked child."""
        process = os.getpid()
        if process != self._process:
            raise ForkedProcessError(self._process, process)


def finalize_in_owner(
    item: object, function: Callable[..., object], *arguments: object
) -> weakref.finalize[..., object]:
    """Return a `weakref.finalize` that runs at exit too, but not in a forked child: it may write to shared memory."""
    return weakref.finalize(item, _call_in, os.getpid(), function, arguments)


def _call_in(process: int, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    if os.getpid() == process:
        function(*arguments)
