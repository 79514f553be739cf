"""One value for each process group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup

T = TypeVar("T")


def of_group(make: Callable[[ProcessGroup], T]) -> Callable[[ProcessGroup], T]:
    """Return a function that returns one object for each group: made on first use, it lives as long as the group."""
    values: weakref.WeakKeyDictionary[ProcessGroup, T] = weakref.WeakKeyDictionary()
    lock = threading.Lock()

    def value_of(group: ProcessGroup) -> T:
        with lock:
            if group not in values:
                values[group] = make(group)
            return values[group]

    return value_of
