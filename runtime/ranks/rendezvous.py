"""Exchange of small records through a store of torch.distributed: every wait ends, with a reason.

Either all ranks get each other's records, or all raise the same error: see "Failed meetings" in
runtime/homes/README.md. Ranks that only run compiled code check for a failed meeting too (`eager_watch.py`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from moepass.models.errors import MoepassError
from moepass.runtime.system.forking import OwnerProcess

T = TypeVar("T")

# [Empirical] The first and last pause between two reads of the store. A meeting takes a few milliseconds if all ranks
# come at once, and a long wait must not load the store's server.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05
_FAILURE = "failure"
_ENDED, _ABANDONED = "moepass/ended", "abandoned"
_ALL_CAME = "all came"


def no_check() -> None:
    """Do nothing: the default check while a rank waits."""


class PeerError(MoepassError, RuntimeError):
    """Another rank has ended, did not respond, or does not match this one.

    `rank` is its number, or `ranks` has several numbers, the same on all ranks.
    """

    def to_store(self) -> str:
        """Return the error as text, for `from_store` on other ranks."""
        return msgspec.json.encode((str(self), self.rank, self.ranks)).decode()

    @staticmethod
    def from_store(stored: str | bytes) -> PeerError:
        """Return an error with the text and the ranks of another rank's error."""
        text, rank, ranks = msgspec.json.decode(stored, type=tuple[str, int | None, list[int] | None])
        return PeerError(text, rank=rank, ranks=ranks)


def about(ranks: Sequence[int]) -> dict[str, Any]:
    """Return the field of an error that names `ranks`, as a keyword argument: `rank` for one rank, else `ranks`."""
    return {"rank": ranks[0]} if len(ranks) == 1 else {"ranks": ranks}


class Rendezvous:
    """One meeting of ranks. Records are dataclasses, encoded by msgspec.

    Every rank opens its meetings in the same order, so a counter in the store identifies a meeting. No single wait
    takes longer than `timeout_s`. The error of a failed meeting quotes `title`: what ranks must do to join. A failure
    is ignored if `is_optional` for all ranks that came. All methods raise PeerError if the store is gone, and the
    constructor if ranks of this store got out of step before.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, title: str, is_optional: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.title = title
        self._is_optional = is_optional
        # A forked child shares its parent's connection to the store, and must not use it.
        _owners.setdefault(store, OwnerProcess()).check()
        with _store_errors():
            ended = why_ended(store)
        if ended is not None:
            raise PeerError(
                f"the ranks of this group got out of step before, and cannot meet any more: {ended}; start all ranks "
                "again, or let all of them use a new process group",
                rank=ended.rank,
                ranks=ended.ranks,
            )
        skip_abandoned(store, rank)
        with _store_errors():
            # The number is the same on all ranks, and unique among the meetings of the group.
            self.number = store.add(_counter(rank), 1)
        self._group_store = store
        self._store = PrefixStore(_meeting(self.number), store)

    def publish(self, name: str, record: object) -> None:
        """Publish `record` as this rank's `name` for the other ranks."""
        with _store_errors():
            self._store.set(_key(name, self.rank), msgspec.json.encode(record).decode())

    def exchange(
        self, name: str, own: T, kind: type[T], check: Callable[[], None] = no_check
    ) -> Iterator[tuple[int, T]]:
        """Publish `own`, and yield each rank with its record, in the order of ranks.

        Once all records were read, no other rank gets an error. `check` is called while this rank waits, and may raise
        PeerError. Raises PeerError if ranks did not publish within `timeout_s`, or a rank has published a failure.
        """
        self.publish(name, own)
        deadline = time.monotonic() + self.timeout_s
        for rank in range(self.size):
            if rank == self.rank:
                yield rank, own
                continue
            try:
                self._wait(name, rank, deadline, check)
            except KeyboardInterrupt:
                with suppress(PeerError):
                    reason = f"rank {self.rank} was interrupted while it waited for a {name}"
                    self._give_up(name, PeerError(reason, rank=self.rank))
                raise
            with _store_errors():
                text = self._store.get(_key(name, rank))
            try:
                record = msgspec.json.decode(text, type=kind)
            except msgspec.DecodeError as error:
                raise PeerError(
                    f"rank {rank} sent a {name} that this version of moepass cannot read: {error}; run the same "
                    "version on all ranks",
                    rank=rank,
                ) from error
            yield rank, record
        outcome = self.publish_first(_outcome(name), _ALL_CAME)
        if outcome != _ALL_CAME:
            raise PeerError.from_store(outcome)

    def end(self, reason: PeerError) -> None:
        """End all meetings of this group's ranks because of `reason`, unless they have ended before.

        Ranks look for this before every meeting, and now and then before a run, but not during a meeting.
        """
        with _store_errors():
            self._group_store.compare_set(_ENDED, "", reason.to_store())

    @contextmanager
    def publishing_failures(self) -> Iterator[None]:
        """Publish an exception inside the block to the ranks that wait for this one, and re-raise it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, PeerError):  # the other ranks get this error on their own
                failure = PeerError(f"rank {self.rank} failed: {type(error).__name__}: {error}", rank=self.rank)
                with _store_errors():
                    self._store.set(_FAILURE, failure.to_store())
            raise

    def publish_first(self, name: str, text: str) -> str:
        """Set the `name` of all ranks to `text`, unless another rank has set it; return the stored text."""
        with _store_errors():
            stored: bytes = self._store.compare_set(name, "", text)
            return stored.decode()

    def outcome(self, name: str) -> str | None:
        """Return the text that `publish_first` has set; None if no rank has set it yet."""
        with _store_errors():
            return self._store.get(name).decode() if self._store.check([name]) else None

    def open_store(self, name: str) -> Store:
        """Return a store for this meeting's ranks alone."""
        return PrefixStore(name, self._store)

    def _wait(self, name: str, rank: int, deadline: float, check: Callable[[], None]) -> None:
        pause = _FIRST_PAUSE_S
        while not self._is_there(_key(name, rank)):
            try:
                check()
            except PeerError as error:
                self._give_up(name, error)
            if self._is_there(_FAILURE):
                with _store_errors():
                    raise PeerError.from_store(self._store.get(_FAILURE))
            if time.monotonic() > deadline:
                # `rank` may come while the missing ranks are listed; it was late nevertheless.
                missing = [peer for peer in range(self.size) if not self._is_there(_key(name, peer))] or [rank]
                ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                text = f"{ranks} did not publish a {name} within {self.timeout_s:g} s; {self.title}"
                self._give_up(name, PeerError(f"{text} (rank {self.rank} waited)", **about(missing)))
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)

    def _give_up(self, name: str, reason: PeerError) -> None:
        """Raise PeerError on all ranks, with the first reason, unless all ranks came after all."""
        outcome = self.publish_first(_outcome(name), reason.to_store())
        if outcome == _ALL_CAME:
            return
        first = PeerError.from_store(outcome)
        if self._is_optional:
            with _store_errors():
                self._store.set(_ABANDONED, outcome)
        else:
            self.end(first)
        raise first

    def _is_there(self, key: str) -> bool:
        with _store_errors():
            return bool(self._store.check([key]))


_owners: weakref.WeakKeyDictionary[Store, OwnerProcess] = weakref.WeakKeyDictionary()


def _key(name: str, rank: int) -> str:
    return f"{name}/{rank}"


def _outcome(name: str) -> str:
    return f"{name}/outcome"


def _meeting(number: int) -> str:
    return f"moepass/{number}"


def _counter(rank: int) -> str:
    return f"moepass/meetings/{rank}"


def why_ended(store: Store) -> PeerError | None:
    """Return why the ranks of this store cannot meet any more, or None. Raises DistError if the store is gone."""
    return PeerError.from_store(store.get(_ENDED)) if store.check([_ENDED]) else None


def skip_abandoned(store: Store, rank: int) -> bool:
    """Skip optional meetings that failed without this rank, and return whether there were any. Raises PeerError."""
    is_behind = False
    with _store_errors():
        while store.check([f"{_meeting(store.add(_counter(rank), 0) + 1)}/{_ABANDONED}"]):
            store.add(_counter(rank), 1)
            is_behind = True
    return is_behind


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        text = str(error).splitlines()[0]
        raise PeerError(f"the store of torch.distributed is gone, probably because rank 0 has ended: {text}") from error
