"""Gathers of banks in the memory of devices: hosts agree over gloo, NCCL moves the bytes.

If a rank ends, the NCCL transfer with it never ends, and a stream behind it waits forever. So the host of every rank
waits for each gather, with a deadline. "Transport `collective`" in `runtime/homes/README.md` describes the messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch

from moepass.runtime.ranks.device_links import NcclLinks
from moepass.runtime.ranks.gather_group import GatherGroup, Request
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous, about
from moepass.runtime.system.background import run_in_background

# Seconds between two queries of the device, and between two reads of the store.
_PAUSE_S, _STORE_PAUSE_S = 0.0001, 0.05
# [Empirical] The ranks' deadlines start when all of them have come. This long after its deadline every host has
# reported whether its transfer has ended.
_GRACE_S = 2.0


class DeviceGatherGroup(GatherGroup):
    """A gather group for tensors in the memory of `device`, which has an index.

    All ranks call `connect` together. Raises PeerError if devices are not connected in time, and the errors of
    `GatherGroup`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        describe: Callable[[Request], str],
        device: torch.device,
        connect: Callable[[Rendezvous, torch.device], NcclLinks],
    ) -> None:
        self._device = device
        self._links: NcclLinks | None = None
        super().__init__(rendezvous, describe)
        try:
            self._connect(lambda: connect(rendezvous, device))
        except PeerError as error:
            rendezvous.end(error)
            raise

    def _connect(self, connect: Callable[[], NcclLinks]) -> None:
        """Connect the devices on another thread, because this one must not wait forever."""
        links: Future[NcclLinks] = Future()

        def run() -> None:
            try:
                links.set_result(connect())
            except Exception as error:
                links.set_exception(error)

        run_in_background(run, lambda: None, "moepass-connect")

        def is_connected() -> bool:
            if not links.done():
                return False
            if error := links.exception():
                reason = f"rank {self.rank} could not connect its {self._device} to the other ranks: {error}"
                raise self.fail(PeerError(reason, rank=self.rank)) from error
            return True

        self._wait_together(is_connected, "connect to the devices of the others", "devices were connected")
        self._links = links.result()

    def gather(
        self,
        request: Request,
        send: Mapping[int, Sequence[torch.Tensor]],
        receive: Mapping[int, Sequence[torch.Tensor]],
        overlapped: Callable[[], None] = lambda: None,
    ) -> None:
        """Gather after the work on the current stream of the device, and wait until all of it has ended.

        This includes the work that `overlapped` issues. After an error the stream may still write to `receive`, but
        before any work that is issued to it later.
        """
        assert self._links is not None, "devices are connected"
        self.check()
        self._links.exchange(send, receive)
        overlapped()
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        bank = self._describe(request)
        self._wait_together(done.query, f"end the gather of {bank}", f"{bank} was gathered")

    def fail(self, reason: PeerError) -> PeerError:
        """Close the connections on all ranks, and abort NCCL on this device."""
        first = super().fail(reason)
        if self._links is not None:
            self._links.abort()
        return first

    def _wait_together(self, is_done: Callable[[], bool], aim: str, lost: str) -> None:
        """Block until `is_done` on all ranks. Raises PeerError if a rank fails, or after the timeout."""
        deadline = time.monotonic() + self._timeout_s
        next_read = time.monotonic() + _STORE_PAUSE_S
        while not (has_ended := is_done()) and time.monotonic() < deadline:
            self.check()
            if time.monotonic() >= next_read:
                reason = self.rendezvous.outcome(self._end_key)
                if reason is not None:
                    raise self.fail(PeerError.from_store(reason))
                next_read = time.monotonic() + _STORE_PAUSE_S
            time.sleep(_PAUSE_S)
        late = f"did not {aim} within {self._timeout_s:g} s (transport 'collective')"
        ended = self.share(torch.tensor([float(has_ended)]), deadline + _GRACE_S, late, lost)
        missing = [rank for rank in range(self.size) if not ended[rank].item()]
        if missing:
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise self.fail(PeerError(f"{ranks} {late}, though all ranks are there", **about(missing)))
