"""Raise on all ranks if Dynamo falls back to eager on one of them, or if ranks missed each other.

In a rewritten graph no rank joins the exchanges any more. If Dynamo stops compiling a rank's model (recompile limit),
that rank would run the exchanges uncompiled, and wait for ranks that never come. It raises an error instead; the others
find the error in the store of the group before a later run. (If Dynamo cannot capture a function for another shape, it
still compiles the function's parts, and these reach `decisions.py`.) If `torch.compiler.set_stance` sends new shapes to
eager mode, no code of ours runs at that moment, so an earlier run refuses that setting.

A rank may wait in vain for a meeting that it alone began. The others were computing with its experts until then, and
their results may be wrong. They find the error in the same way.
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
# A rank looks for failures of others no more often: the store is another process, perhaps on another machine.
LOOK_SECONDS = 1.0

_REMEDY = (
    "; let one compilation serve all shapes (torch._dynamo.mark_dynamic on the token dimension, or dynamic=True in "
    "torch.compile), or raise torch._dynamo.config.recompile_limit, on all ranks"
)


class EagerWatch:
    """The Python functions whose graphs had their exchanges taken out, and the groups that these belonged to."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[CodeType, frozenset[str]] = weakref.WeakKeyDictionary()
        self._is_registered = False

    def watch(self, groups: Iterable[str]) -> None:
        """The exchanges of `groups`, perhaps none, were taken out of the function that Dynamo compiles now."""
        code = compiled_code()
        if code is None:  # a graph that somebody gave the backend by hand: nothing falls back to eager mode
            return
        self._groups[code] = frozenset(groups)
        # Dynamo compiles one function at a time.
        if not self._is_registered:
            self._is_registered = True
            on_recompilation(self._check_limit)

    def _check_limit(self) -> None:
        code = compiled_code()
        groups = frozenset() if code is None else self._groups.get(code, frozenset())
        limit = exceeded_recompile_limit() if groups else None
        if limit is None:
            return
        known = process_groups_by_name()
        told: list[PeerError] = []
        for group in [known[name] for name in sorted(groups & known.keys())]:
            failure = PeerError(
                f"torch.compile gave up compiling the model for this shape on rank {group.rank()}, after as many "
                f"compilations as torch._dynamo.config.{limit} allows, and would run it in eager mode, where it waits "
                f"at an exchange that no other rank joins{_REMEDY}",
                rank=group.rank(),
            )
            told.append(tell_failure(group, failure))
        if told:
            raise told[0]


def tell_failure(group: ProcessGroup, failure: PeerError) -> PeerError:
    """Raise `failure` on all ranks of `group` from now on, unless there is an earlier error; return the one that
    holds."""
    told: bytes = store_of(group).compare_set(_FAILED, "", failure.to_store())
    return PeerError.from_store(told)


class FailureLook:
    """Tells a rank whether another one of its group failed for good. Costs next to nothing between two looks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._store: Store = store_of(group)
        self._next_look = 0.0

    def check(self) -> None:
        """Raises PeerError with what the first rank said that failed, or that waited for others in vain."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        try:
            failure = PeerError.from_store(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None
            ended = why_ended(self._store)
        except DistError:  # whoever held the store has ended; whether well or badly, others tell
            self._next_look = float("inf")
            return
        if failure is not None:
            raise failure
        if ended is not None:
            raise PeerError(
                "the ranks of this group missed each other, so that what they computed since may be wrong: "
                f"{ended}; start all ranks again, or let all of them use a new process group",
                rank=ended.rank,
                ranks=ended.ranks,
            )


def refuse_eager_stance() -> None:
    """Raises InputError where Dynamo would run the next new shape in eager mode: it asks nobody when it does."""
    stance = eager_stance()
    if stance is not None:
        raise InputError(
            f"torch.compiler.set_stance({stance!r}) would run the model in eager mode for a shape that was not "
            "compiled: where other ranks have another shape it waits at an exchange that none of them joins; use "
            "set_stance('fail_on_recompile')",
            name="stance",
            value=stance,
            expected="fail_on_recompile",
        )


eager_watch = EagerWatch()
