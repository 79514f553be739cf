"""One value for each process group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch.distributed import ProcessGroup

T = TypeVar("T")


class OfGroup(Generic[T]):
    """One object for each process group, created by `make` on first use; it lives as long as the group."""

    def __init__(self, make: Callable[[ProcessGroup], T]) -> None:
        self._make = make
        self._found: weakref.WeakKeyDictionary[ProcessGroup, T] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, group: ProcessGroup) -> T:
        """Return the object of `group`."""
        with self._lock:
            if group not in self._found:
                self._found[group] = self._make(group)
            return self._found[group]
