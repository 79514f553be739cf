"""gloo connections of some ranks' own, on which small and large messages go from rank to rank: every wait ends.

The first error ends the connections for good, on every rank, with that error's text.

This is a process group of torch with a timeout, but not one of `torch.distributed.new_group`: that is made by all ranks
of the default group together, and its errors name neither the rank that is missing nor, on the other ranks, the first
cause. Its `monitored_barrier` names missing ranks on rank 0 alone, and `abort` wakes nobody who waits (torch 2.13).
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import Work

from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous
from moepass.runtime.system.forking import OwnerProcess

_TAG = 0
# Nobody sends with this one. A multiple of small numbers: gloo spreads tags over its network devices by remainder.
_NEVER_TAG = 720720
_SHORTLY = datetime.timedelta(milliseconds=1)


class Connections:
    """This rank's connections to the others of `rendezvous`, which all come here together.

    `exchange` belongs to one thread at a time; `check` and `fail` may be called by any.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, purpose: str) -> None:
        """`name` tells these connections from others of the same meeting; `purpose` stands for them in errors.

        Raises PeerError where ranks do not connect within the rendezvous's timeout.
        """
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.rendezvous = rendezvous
        self._purpose = purpose
        # Where the first error is told to all ranks.
        self._end_key = f"end of {name}"
        self._owner = OwnerProcess()
        self._failing = threading.Lock()
        self._failure: str | None = None  # as `PeerError.to_store` gives it: every call raises an error of its own
        try:
            # Any: the stubs of torch leave out how it sends and receives.
            self._gloo: Any = torch.distributed.ProcessGroupGloo(
                rendezvous.open_store(name),
                self.rank,
                self.size,
                timeout=datetime.timedelta(seconds=rendezvous.timeout_s),
            )
        except RuntimeError as error:
            reason = PeerError(
                f"rank {self.rank} could not connect to all of the {self.size} ranks for {purpose} within "
                f"{rendezvous.timeout_s:g} s: {_first_line(error)}",
                rank=self.rank,
            )
            rendezvous.end(reason)
            raise reason from error

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def check(self) -> None:
        """Raises PeerError where an exchange failed before, on any rank that this one heard of; waits for nothing."""
        self._owner.check()
        if self._failure is not None:
            raise PeerError.from_store(self._failure)

    def share(self, own: torch.Tensor, deadline: float, late: str, lost: str) -> list[torch.Tensor]:
        """Each rank's `own`, by rank; all have one size. The rest is as in `exchange`."""
        found = [torch.empty_like(own) if rank != self.rank else own for rank in range(self.size)]
        self.exchange(
            {rank: [found[rank]] for rank in self.others}, {rank: [own] for rank in self.others}, deadline, late, lost
        )
        return found

    def exchange(
        self,
        receive: Mapping[int, Sequence[torch.Tensor]],
        send: Mapping[int, Sequence[torch.Tensor]],
        deadline: float,
        late: str,
        lost: str,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Send tensors, contiguous and by rank, and receive some into place, in the order in which they are sent.

        `meanwhile` is called while bytes are on their way. Raises PeerError: "rank N `late`" where rank N does not do
        its part before `deadline` (of `time.monotonic`), and one that says `lost` where the connection to it is lost.
        """
        works: list[tuple[int, Work]] = []
        # Every rank begins at another one.
        for rank in [(self.rank + 1 + step) % self.size for step in range(self.size - 1)]:
            try:
                works += [(rank, self._gloo.recv([part], rank, _TAG)) for part in receive.get(rank, ())]
                works += [(rank, self._gloo.send([part], rank, _TAG)) for part in send.get(rank, ())]
            except RuntimeError as error:
                raise self._gone(rank, lost, error) from error
        meanwhile()
        for rank, work in works:
            remaining = datetime.timedelta(seconds=max(0.0, deadline - time.monotonic()))
            try:
                work.wait(remaining + 2 * _SHORTLY)  # gloo counts whole milliseconds: beyond the deadline, not before
            except RuntimeError as error:
                if time.monotonic() >= deadline:
                    raise self.fail(PeerError(f"rank {rank} {late}", rank=rank)) from error
                raise self._gone(rank, lost, error) from error

    def fail(self, reason: PeerError) -> PeerError:
        """End the connections on all ranks, because of `reason` unless one failed before; gives the first reason.

        On return nobody waits in `exchange` any more, but for the time that it takes to notice.
        """
        self._owner.check()
        with self._failing:
            if self._failure is None:
                try:
                    self._failure = self.rendezvous.tell_first(self._end_key, reason.to_store())
                except PeerError as error:
                    both = PeerError(f"{reason} ({error})", rank=reason.rank, ranks=reason.ranks)
                    self._failure = both.to_store()
                self._disconnect()
            return PeerError.from_store(self._failure)

    def _disconnect(self) -> None:
        # To wait in vain is the one thing that closes gloo's connections while another thread waits for them, and lets
        # go of all memory that was to be sent or received. Where a connection is closed already the next is tried.
        for rank in self.others:
            try:
                self._gloo.recv([torch.empty(1)], rank, _NEVER_TAG).wait(_SHORTLY)
            except RuntimeError:
                continue

    def _gone(self, rank: int, lost: str, error: RuntimeError) -> PeerError:
        return self.fail(
            PeerError(
                f"rank {rank} is gone, or its model is: the connection to it ({self._purpose}) was lost while {lost}; "
                f"see its output, and start all ranks again ({_first_line(error)})",
                rank=rank,
            )
        )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].split("] ", 1)[-1]
