"""The ranks that share the experts of one model: they agree once, map each other's shards, then work independently.

agree    every rank publishes its banks; a difference is one error, the same on every rank
share    every rank publishes its shards and opens the other ranks' shards
settle   all ranks have mapped the shards; from then on they stay readable even if a rank ends
check    before every run: has a rank failed?  No rank ever waits for another here.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from moepass.models.errors import InputError
from moepass.models.homes import HOMES, PULL
from moepass.models.limits import check_wait
from moepass.passes.ir.plan import BankSpec, DecodedPart, TensorSpec
from moepass.runtime.ranks.agree import Topic, agree
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous, about
from moepass.runtime.system.forking import OwnerProcess, finalize_in_owner
from moepass.runtime.system.processes import ProcessIdentity, ProcessWatch, this_process
from moepass.runtime.system.shared_memory import (
    PAGE_BYTES,
    SegmentAddress,
    SharedMemoryError,
    SharedSegment,
    create_segment,
    open_segment,
)
from moepass.runtime.torch_private import default_group, store_of

DEFAULT_TIMEOUT_S = 60.0

# Keys of the records that ranks publish, in the order of publication.
_BANKS, _SHARDS, _MAPPED = "list of banks", "segment of shards", "note that all is mapped"
_PROCESS = "process"
# Value of a segment's first byte once its rank has left; zero before.
_LEFT = 1
OFFLOADING = "every rank of the group must call offload_experts with the same home, and with the same group"


class PeerGroup:
    """This rank among the ranks of a group, all on one machine unless the transport is `collective`.

    With transport `pull` a rank may end without an error, or drop its model: its shards stay mapped in the ranks that
    need them. A rank that is killed, or ends by an uncaught exception, makes `check_alive` raise on the others. (A
    process without exit handlers, such as a forked worker of multiprocessing, must call `leave` to end quietly.)

    Raises PeerError if the store is gone, or if ranks of this store got out of step before.

    Args:
        store: the store for the rendezvous. Every rank makes its groups on it in the same order.
        timeout_s: seconds that ranks wait for each other. Raises OptionError unless it is above 0 and at
            most MOST_WAIT_SECONDS.
        title: the advice in the error about missing ranks: what every rank must do.
        transport: `pull` or `collective`.
        watch: the watch over the processes of the ranks; groups of the same ranks may share it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        title: str = OFFLOADING,
        transport: str = PULL,
        watch: ProcessWatch | None = None,
    ) -> None:
        check_wait("timeout_s", timeout_s)
        self.rank, self.size, self.transport = rank, size, transport
        self.rendezvous = Rendezvous(store, rank, size, float(timeout_s), title)
        self._watch = watch or ProcessWatch()
        self._processes: dict[int, ProcessIdentity] = {}
        self._states: dict[int, np.ndarray] = {}
        self._segment: SharedSegment | None = None
        self._leave: weakref.finalize[..., object] | None = None
        self._owner = OwnerProcess()

    @staticmethod
    def of(
        group: ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        title: str = OFFLOADING,
        transport: str = PULL,
        watch: ProcessWatch | None = None,
    ) -> PeerGroup:
        """Return the ranks of `group`, by default all.

        Raises the constructor's errors, and InputError if torch.distributed is not initialised or this process is not
        in the group.
        """
        if not torch.distributed.is_initialized():
            spread = " and ".join(f"home={home.name!r}" for home in HOMES.values() if home.is_spread)
            raise InputError(
                f"{spread} spread experts over the ranks of torch.distributed, which is not initialised; launch with "
                "torchrun and call torch.distributed.init_process_group(), or use home='host' on a single process"
            )
        if group is None:
            group = default_group()
        if not isinstance(group, ProcessGroup) or torch.distributed.get_rank(group) < 0:
            raise InputError(
                f"group is {group!r}, which is not a process group with this process in it; pass a group of "
                "torch.distributed.new_group that contains this process, or None for all ranks",
                name="group",
                value=group,
            )
        store = store_of(group)
        return PeerGroup(store, group.rank(), group.size(), timeout_s, title, transport, watch)

    def agree(
        self, banks: Sequence[BankSpec], digests: Sequence[str], staging_buffers: int = 0, device_type: str = "cpu"
    ) -> None:
        """Wait until every rank has published the same banks, digests of weights, staging buffers and kind of device.

        Raises PeerError if ranks differ (it names both values and ranks, the same on every rank), do not respond within
        the timeout, or have ended.
        """
        process = this_process() if self.transport == PULL else None
        # Counts come first.
        compared: list[tuple[str, object]] = [
            ("the number of ranks", self.size),
            ("the transport", self.transport),
            ("the machine", None if process is None else process.machine),
            ("the number of staging buffers", staging_buffers),
            ("the kind of device", device_type),
            ("the number of banks", len(banks)),
        ]
        for bank, digest in zip(banks, digests, strict=True):
            compared += [
                (f"the name of bank {bank.index}", bank.name),
                (f"the tensors of bank {bank.name}", _described(bank.tensors)),
                (f"the experts of each rank in bank {bank.name}", list(bank.expert_bounds)),
                (f"the stored tensors of bank {bank.name}", _described(bank.stored)),
                (f"the decoded parts of bank {bank.name}", _described_parts(bank.parts)),
                (f"the format of bank {bank.name}", bank.format),
                (f"the weights of bank {bank.name} (a digest)", digest),
            ]
        remedy = f"give every rank the same model and checkpoint, in one group{' on one machine' if process else ''}"
        # Ranks watch each other's processes.
        topics = [Topic(name, value, remedy) for name, value in compared]
        topics.append(Topic(_PROCESS, process, is_vote=True))
        for rank, votes in agree(self.rendezvous, _BANKS, topics, self.check_alive):
            if rank != self.rank and votes[_PROCESS] is not None:
                self._processes[rank] = msgspec.convert(votes[_PROCESS], ProcessIdentity)
                self._watch.add(rank, self._processes[rank])
        # The store keeps the records of a rank that has ended.
        self.check_alive()

    def make_segment(self, nbytes: int) -> SharedSegment:
        """Return shared memory with `nbytes` usable bytes from `PAGE_BYTES` on.

        Raises SharedMemoryError if the machine has no shared memory left.
        """
        self._segment = create_segment(PAGE_BYTES + nbytes, f"moepass-rank-{self.rank}")
        # numpy, because torch may be tracing a graph when the garbage collector frees this object.
        state = self._segment.map(0, 1).numpy()
        self._leave = finalize_in_owner(self, state.fill, _LEFT)
        self._leave.atexit = False  # `_leave_all` runs at exit
        _groups.add(self)
        return self._segment

    def share(self) -> dict[int, SharedSegment]:
        """Publish this rank's segment, and return the segments of the other ranks by rank.

        Raises PeerError if a rank has ended or does not respond within the timeout.
        """
        assert self._segment is not None, "make_segment comes first"
        segments: dict[int, SharedSegment] = {}
        for rank, address in self.rendezvous.exchange(
            _SHARDS, self._segment.address(), SegmentAddress, self.check_alive
        ):
            if rank == self.rank:
                continue
            try:
                segments[rank] = open_segment(address)
                self._states[rank] = segments[rank].map(0, 1).numpy()
            except SharedMemoryError as error:
                # The rank may have closed its segment because a third rank ended, which is then the cause.
                self.check_alive()
                raise PeerError(f"the shards of {self._name(rank)} cannot be opened: {error}", rank=rank) from error
        return segments

    def settle(self) -> None:
        """Wait until every rank has mapped the shards; later no process opens memory of another.

        Raises PeerError like `share`.
        """
        deque(self.rendezvous.exchange(_MAPPED, True, bool, self.check_alive), maxlen=0)
        self._segment = None

    def check_alive(self) -> None:
        """Raise PeerError if a rank has ended without `leave`. Makes one system call and never waits."""
        self._owner.check()
        gone = sorted(self._watch.gone())
        missed = [rank for rank in gone if rank not in self._states or self._states[rank][0] != _LEFT]
        if missed:
            verb = "is" if len(missed) == 1 else "are"
            raise PeerError(
                f"{' and '.join(map(self._name, missed))} {verb} gone, after a signal or an error; see its output, and "
                "start all ranks again",
                **about(missed),
            )

    def leave(self) -> None:
        """Signal to other ranks that this rank ends on purpose, as when this object is freed or the process ends."""
        if self._leave is not None:
            self._leave()

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank].pid})"


def _described(tensors: Sequence[TensorSpec]) -> list[str]:
    return [f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in tensors]


def _described_parts(parts: Sequence[DecodedPart]) -> list[str]:
    return [
        f"indices {part.start} to {part.stop} of dimension {part.dim} of {part.tensor.name}: "
        f"{', '.join(f'{role} {position}' for role, position in part.stored)}, formula {part.formula}"
        for part in parts
    ]


_groups: weakref.WeakSet[PeerGroup] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    # `last_value` is set if an uncaught exception ends the process; the other ranks must notice that.
    if getattr(sys, "last_value", None) is None:
        for group in list(_groups):
            group.leave()
