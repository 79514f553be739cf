"""What a forked child must make anew: threads do not come along, and locks may be held by those that did not."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    def after_fork(self) -> None:
        """Called in a forked child, while it has one thread. Must take no lock that existed before."""


_renewables: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_after_fork(item: Renewable) -> None:
    """From now on `item.after_fork()` is called in every forked child, for as long as `item` lives."""
    _renewables.add(item)


def _renew_all() -> None:
    for item in list(_renewables):
        item.after_fork()


if hasattr(os, "register_at_fork"):  # not there on every platform; where it is missing there is no fork
    os.register_at_fork(after_in_child=_renew_all)
