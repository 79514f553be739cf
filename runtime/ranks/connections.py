"""gloo connections between some ranks, for small and large messages: every wait ends.

The first error closes the connections for good, on every rank, with that error's text.

This is a process group of torch with a timeout, but not one of `torch.distributed.new_group`: all ranks of the default
group must create that together, and its errors name neither the missing rank nor, on the other ranks, the first cause.
Its `monitored_barrier` names missing ranks on rank 0 alone, and `abort` does not wake waiting threads (torch 2.13).
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
# No message has this tag. It is a multiple of small numbers, because gloo chooses its network device by tag modulo
# their number.
_NEVER_TAG = 720720
_SHORTLY = datetime.timedelta(milliseconds=1)


class Connections:
    """This rank's connections to the other ranks of `rendezvous`; all ranks create them together.

    Only one thread at a time may call `exchange`; any thread may call `check` and `fail`. `name` is unique in this
    rendezvous; `purpose` is for errors. Raises PeerError if ranks do not connect within the rendezvous's timeout.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, purpose: str) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.rendezvous = rendezvous
        self._purpose = purpose
        # The key in the store under which the first error is published.
        self._end_key = f"end of {name}"
        self._owner = OwnerProcess()
        self._failing = threading.Lock()
        self._failure: str | None = None  # from `PeerError.to_store`, because every call raises a new error
        try:
            # Any, because torch's stubs lack `send` and `recv`.
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
        """All ranks except this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def check(self) -> None:
        """Raise PeerError if an exchange has failed on a rank that this one heard of. Never waits."""
        self._owner.check()
        if self._failure is not None:
            raise PeerError.from_store(self._failure)

    def share(self, own: torch.Tensor, deadline: float, late: str, lost: str) -> list[torch.Tensor]:
        """Return each rank's `own`, by rank; all have the same size. `exchange` describes the other arguments."""
        by_rank = [torch.empty_like(own) if rank != self.rank else own for rank in range(self.size)]
        self.exchange(
            {rank: [by_rank[rank]] for rank in self.others}, {rank: [own] for rank in self.others}, deadline, late, lost
        )
        return by_rank

    def exchange(
        self,
        receive: Mapping[int, Sequence[torch.Tensor]],
        send: Mapping[int, Sequence[torch.Tensor]],
        deadline: float,
        late: str,
        lost: str,
        overlapped: Callable[[], None] = lambda: None,
    ) -> None:
        """Send contiguous tensors to other ranks, and receive tensors in place, in the order in which they are sent.

        `deadline` is in the time of `time.monotonic`. Error texts are "rank N `late`" for a late rank, and `lost` for a
        lost connection, which says what the ranks were doing. `overlapped` is called while bytes are on their way.
        Raises PeerError if a rank is late, or the connection to it is lost.
        """
        works: list[tuple[int, Work]] = []
        # Each rank starts with a different peer.
        for rank in [(self.rank + 1 + step) % self.size for step in range(self.size - 1)]:
            try:
                works += [(rank, self._gloo.recv([tensor], rank, _TAG)) for tensor in receive.get(rank, ())]
                works += [(rank, self._gloo.send([tensor], rank, _TAG)) for tensor in send.get(rank, ())]
            except RuntimeError as error:
                raise self._gone(rank, lost, error) from error
        overlapped()
        for rank, work in works:
            # gloo rounds down to milliseconds; the wait must end after the deadline.
            remaining = datetime.timedelta(seconds=max(0.0, deadline - time.monotonic())) + 2 * _SHORTLY
            try:
                work.wait(remaining)
            except RuntimeError as error:
                if time.monotonic() >= deadline:
                    raise self.fail(PeerError(f"rank {rank} {late}", rank=rank)) from error
                raise self._gone(rank, lost, error) from error

    def fail(self, reason: PeerError) -> PeerError:
        """Close the connections on all ranks because of `reason`, so that `exchange` ends; return the first failure."""
        self._owner.check()
        with self._failing:
            if self._failure is None:
                try:
                    self._failure = self.rendezvous.publish_first(self._end_key, reason.to_store())
                except PeerError as error:
                    both = PeerError(f"{reason} ({error})", rank=reason.rank, ranks=reason.ranks)
                    self._failure = both.to_store()
                self._disconnect()
            return PeerError.from_store(self._failure)

    def _disconnect(self) -> None:
        # A receive that times out is the only way to close gloo's connections while another thread waits for them, and
        # to release all memory of pending messages. A connection that is already closed raises at once.
        for rank in self.others:
            try:
                self._gloo.recv([torch.empty(1)], rank, _NEVER_TAG).wait(_SHORTLY)
            except RuntimeError:
                continue

    def _gone(self, rank: int, lost: str, error: RuntimeError) -> PeerError:
        return self.fail(
            PeerError(
                f"rank {rank} has ended or dropped its model: the connection to it ({self._purpose}) was lost while "
                f"{lost}; see its output, and start all ranks again ({_first_line(error)})",
                rank=rank,
            )
        )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].split("] ", 1)[-1]
