"""Errors on all ranks if Dynamo falls back to eager on one of them, or if ranks got out of step.

The reasons are in README.md, under "Ranks in eager mode" and "Decisions when ranks compile". If Dynamo cannot capture a
function for another shape, it still compiles the function in pieces, which reach `block_decisions.py`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from types import CodeType

from torch.distributed import DistError, ProcessGroup
from torch.distributed.distributed_c10d import Store

from moepass.models.errors import InputError
from moepass.runtime.ranks.rendezvous import PeerError, why_ended
from moepass.runtime.torch_private import (
    compiled_code,
    eager_stance,
    exceeded_recompile_limit,
    on_recompilation,
    process_groups_by_name,
    store_of,
)

_FAILED = "moepass/failed"
# The least time between two reads of the store, which is another process, perhaps on another machine.
FAILURE_CHECK_SECONDS = 1.0

_REMEDY = (
    "; let one compilation serve all shapes (torch._dynamo.mark_dynamic on the token dimension, or dynamic=True in "
    "torch.compile), or raise torch._dynamo.config.recompile_limit, on all ranks"
)


class EagerWatch:
    """The Python functions whose graphs had their exchanges taken out, and the groups of these exchanges."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[CodeType, frozenset[str]] = weakref.WeakKeyDictionary()
        self._is_registered = False

    def watch(self, groups: Iterable[str]) -> None:
        """Record that the exchanges of `groups` were taken out of the function that Dynamo compiles now."""
        code = compiled_code()
        if code is None:  # the backend was called without Dynamo, so nothing can fall back to eager mode
            return
        self._groups[code] = frozenset(groups)
        # No lock is needed, because Dynamo compiles one function at a time.
        if not self._is_registered:
            self._is_registered = True
            on_recompilation(self._check_limit)

    def _check_limit(self) -> None:
        code = compiled_code()
        groups = frozenset() if code is None else self._groups.get(code, frozenset())
        limit = exceeded_recompile_limit() if groups else None
        if limit is None:
            return
        groups_by_name = process_groups_by_name()
        failures: list[bytes] = []
        for group in [groups_by_name[name] for name in sorted(groups & groups_by_name.keys())]:
            failure = PeerError(
                f"torch.compile reached torch._dynamo.config.{limit} on rank {group.rank()} and would run it in eager "
                f"mode, where it waits at an exchange that no other rank joins{_REMEDY}",
                rank=group.rank(),
            )
            # All ranks of the group raise the first failure from now on.
            failures.append(store_of(group).compare_set(_FAILED, "", failure.to_store()))
        if failures:
            raise PeerError.from_store(failures[0])


class FailureCheck:
    """A check whether another rank of a group failed for good. It reads the store at most once per interval."""

    def __init__(self, group: ProcessGroup) -> None:
        self._store: Store = store_of(group)
        self._next_read = 0.0

    def check(self) -> None:
        """Raise the PeerError of the first rank that failed, or whose meeting no other rank joined."""
        now = time.monotonic()
        if now < self._next_read:
            return
        self._next_read = now + FAILURE_CHECK_SECONDS
        try:
            failure = PeerError.from_store(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None
            ended = why_ended(self._store)
        except DistError:  # the process with the store has ended; other checks report whether it failed
            self._next_read = float("inf")
            return
        if failure is not None:
            raise failure
        if ended is not None:
            raise PeerError(
                "the ranks of this group got out of step, and anything that they have computed since then may be "
                f"wrong: {ended}; start all ranks again, or let all of them use a new process group",
                rank=ended.rank,
                ranks=ended.ranks,
            )


def refuse_eager_stance() -> None:
    """Raise InputError if `torch.compiler.set_stance` would make Dynamo run the next new shape in eager mode."""
    stance = eager_stance()
    if stance is not None:
        text = (
            f"torch.compiler.set_stance({stance!r}) would run the model in eager mode for a new shape, and this rank "
            "would wait at an exchange that no other rank joins; use set_stance('fail_on_recompile')"
        )
        raise InputError(text, name="stance", value=stance, expected="fail_on_recompile")


eager_watch = EagerWatch()
