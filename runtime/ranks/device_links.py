"""NCCL between the devices of some ranks: what one sends to another, streams move, and the host waits for nothing."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from moepass.models.errors import InputError
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.system.environment import environment_variable
from moepass.runtime.system.forking import finalize_in_owner

# 0: torch leaves errors of NCCL to its callers, which it reads once for each communicator. By default it ends the
# process where a rank is gone or late, with no exception that anybody could catch.
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
_TAG = 0  # NCCL has none

PartsByRank = Mapping[int, Sequence[torch.Tensor]]


class DeviceLinks(Protocol):
    """Connections between the devices of all ranks."""

    def exchange(self, send: PartsByRank, receive: PartsByRank) -> None:
        """Send tensors, contiguous and by rank, and receive some into place, in the order in which they are sent.

        This goes to the current stream: it begins behind what was issued there, and what is issued there from now on
        runs behind it. All ranks come here in the same order. Raises RuntimeError where it cannot be issued.
        """

    def abort(self) -> None:
        """What was issued ends soon, on this device, whatever it has moved; nothing can be issued any more.

        Any thread may call it, also while another one is in `exchange`, and again.
        """


class NcclLinks:
    """`DeviceLinks` of the CUDA device of each rank.

    A communicator of its own: a process group of torch, but not one of `torch.distributed.new_group`, for the reasons
    that `connections.py` gives.

    Unmeasured: tests run this with a stand-in for torch's class, and it has not been on a GPU yet.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Connects to all ranks, which come here together; `device` has an index. May wait for ever for a rank that is
        gone. Raises RuntimeError where NCCL cannot connect them.
        """
        # Any: the stubs of torch leave out how it sends and receives.
        group: Any = torch.distributed.ProcessGroupNCCL
        options = group.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
        with environment_variable(*_ERROR_HANDLING):
            self._nccl = group(rendezvous.open_store("nccl"), rendezvous.rank, rendezvous.size, options)
        self._end = finalize_in_owner(self, self._nccl.abort)
        self._nccl.eager_connect_single_device(device)
        self._connect_pairs(rendezvous.rank, rendezvous.size, device)

    def _connect_pairs(self, rank: int, size: int, device: torch.device) -> None:
        """Let every rank send to every other one: the first time, the host waits until both are there."""
        others = [other for other in range(size) if other != rank]
        with torch.cuda.device(device):
            bytes_of_ranks = torch.zeros(size, dtype=torch.uint8, device=device)
            own = [bytes_of_ranks[rank : rank + 1]]
            self.exchange(dict.fromkeys(others, own), {other: [bytes_of_ranks[other : other + 1]] for other in others})
            torch.cuda.synchronize(device)

    def exchange(self, send: PartsByRank, receive: PartsByRank) -> None:
        outgoing = [(rank, part) for rank, parts in sorted(send.items()) for part in parts if part.numel()]
        incoming = [(rank, part) for rank, parts in sorted(receive.items()) for part in parts if part.numel()]
        if not outgoing and not incoming:
            return
        # As one operation of NCCL: one behind the other, two ranks would wait for each other.
        self._nccl._start_coalescing()
        for rank, part in incoming:
            self._nccl.recv([part], rank, _TAG)
        for rank, part in outgoing:
            self._nccl.send([part], rank, _TAG)
        # It runs on a stream of torch's own. This makes the current stream wait for that, not the host.
        self._nccl._end_coalescing().wait()

    def abort(self) -> None:
        self._end()


def check_nccl(device: torch.device) -> None:
    """Raises InputError where this torch has no NCCL."""
    if not torch.distributed.is_nccl_available():
        raise InputError(
            f"transport='collective' needs NCCL where device is {device}, which this build of torch lacks; use "
            "transport='pull'",
            name="transport",
            value="collective",
            expected="pull",
        )
