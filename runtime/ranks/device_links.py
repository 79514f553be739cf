"""NCCL connections between the devices of some ranks: streams move the bytes, and the host does not wait."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moepass.models.errors import InputError
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.system.forking import finalize_in_owner
from moepass.runtime.system.processes import environment_variable

# With 0, read once for each communicator, torch leaves NCCL's errors to its callers. By default it ends the process
# when a rank has ended or is late, without an exception.
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
_TAG = 0  # NCCL ignores tags

TensorsByRank = Mapping[int, Sequence[torch.Tensor]]


class NcclLinks:
    """Connections between the CUDA devices of all ranks, which connect together. `device` has an index.

    If a rank has ended, an exchange with it waits without a timeout. There is a separate communicator: a process group
    of torch, but not one of `torch.distributed.new_group`, for the reasons in `connections.py`. Raises RuntimeError if
    NCCL cannot connect the ranks.

    Unmeasured: tests run this with a stand-in for torch's class. It has not run on a GPU yet.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        # Any, because torch's stubs lack `send` and `recv`.
        group: Any = torch.distributed.ProcessGroupNCCL
        options = group.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
        with environment_variable(*_ERROR_HANDLING):
            self._nccl = group(rendezvous.open_store("nccl"), rendezvous.rank, rendezvous.size, options)
        self._end = finalize_in_owner(self, self._nccl.abort)
        self._nccl.eager_connect_single_device(device)
        self._connect_pairs(rendezvous.rank, rendezvous.size, device)

    def _connect_pairs(self, rank: int, size: int, device: torch.device) -> None:
        """Exchange one byte between all pairs of ranks: their first exchange blocks the host until both are there."""
        peers = [peer for peer in range(size) if peer != rank]
        with torch.cuda.device(device):
            bytes_of_ranks = torch.zeros(size, dtype=torch.uint8, device=device)
            send = {peer: [bytes_of_ranks[rank : rank + 1]] for peer in peers}
            self.exchange(send, {peer: [bytes_of_ranks[peer : peer + 1]] for peer in peers})
            torch.cuda.synchronize(device)

    def exchange(self, send: TensorsByRank, receive: TensorsByRank) -> None:
        """Send contiguous tensors to other ranks, and receive tensors in place, in the order in which they are sent.

        The exchange runs in order with the work on the current stream. All ranks call this in the same order. Raises
        RuntimeError if it cannot be issued.
        """
        outgoing = [(rank, tensor) for rank, tensors in sorted(send.items()) for tensor in tensors if tensor.numel()]
        incoming = [(rank, tensor) for rank, tensors in sorted(receive.items()) for tensor in tensors if tensor.numel()]
        if not outgoing and not incoming:
            return
        # All transfers form one NCCL operation, because in sequence two ranks could wait for each other.
        self._nccl._start_coalescing()
        for rank, tensor in incoming:
            self._nccl.recv([tensor], rank, _TAG)
        for rank, tensor in outgoing:
            self._nccl.send([tensor], rank, _TAG)
        # NCCL runs on torch's internal stream. This makes the current stream wait for it, not the host.
        self._nccl._end_coalescing().wait()

    def abort(self) -> None:
        """End all exchanges soon, complete or not, on this device. No exchange can be issued afterwards.

        Any thread may call it, several times, and also while another thread is in `exchange`.
        """
        self._end()


def check_nccl(device: torch.device) -> None:
    """Raise InputError if this build of torch has no NCCL."""
    if not torch.distributed.is_nccl_available():
        text = f"transport='collective' on {device} needs NCCL, which this build of torch lacks; use transport='pull'"
        raise InputError(text, name="transport", value="collective", expected="pull")
