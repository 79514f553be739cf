"""Ranks that gather banks together in the memory of their devices: gloo agrees, NCCL moves the bytes.

ask       as on a CPU, between hosts
gather    the bytes go from device to device; all hosts wait until they are there

Nothing ends a transfer of NCCL whose other side is gone, and a stream that waits for it waits for ever. So the host of
every rank waits for each gather, with a deadline, before the computation may read it. Where that is over, hosts tell
each other whose part has ended, by which they know who is missing, and abort NCCL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from moepass.runtime.ranks.device_links import DeviceLinks
from moepass.runtime.ranks.gather_group import GatherGroup, Request
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous, about
from moepass.runtime.system.background import run_in_background

# Between two looks at the device; and between two looks into the store, whether another rank has failed.
_PAUSE_S, _LOOK_S = 0.0001, 0.05
# [Empirical] The deadlines of all ranks begin once all of them have come. So much later each host knows what became of
# its own part, and says so.
_GRACE_S = 2.0


class DeviceGatherGroup(GatherGroup):
    """As `GatherGroup`, for parts in the memory of `device`."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        describe: Callable[[Request], str],
        device: torch.device,
        connect: Callable[[Rendezvous, torch.device], DeviceLinks],
    ) -> None:
        """`connect` connects the devices; all ranks come to it together. Raises as `GatherGroup`, and PeerError where
        devices cannot be connected, or not within the rendezvous's timeout.
        """
        self._device = device
        self._links: DeviceLinks | None = None
        super().__init__(rendezvous, describe)
        try:
            self._connect(lambda: connect(rendezvous, device))
        except PeerError as error:
            rendezvous.end(error)
            raise

    def _connect(self, connect: Callable[[], DeviceLinks]) -> None:
        """Not in this thread, which may not wait for ever."""
        links: list[DeviceLinks] = []
        errors: list[Exception] = []
        has_ended = threading.Event()

        def run() -> None:
            try:
                links.append(connect())
            except Exception as error:
                errors.append(error)
            has_ended.set()

        run_in_background(run, lambda: None, "moepass-connect")

        def is_connected() -> bool:
            has_ended.wait(_PAUSE_S)
            if errors:
                reason = f"rank {self.rank} could not connect its {self._device} to the other ranks: {errors[0]}"
                raise self.fail(PeerError(reason, rank=self.rank)) from errors[0]
            return has_ended.is_set()

        self._wait_together(is_connected, "connect to the devices of the others", "devices were connected")
        (self._links,) = links

    def gather(
        self,
        request: Request,
        send: Mapping[int, Sequence[torch.Tensor]],
        receive: Mapping[int, Sequence[torch.Tensor]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """As `GatherGroup.gather`, behind what was issued to the current stream of the device.

        What `meanwhile` issues there is waited for too. Where this raises, the stream may still write to `receive`, but
        not behind what is issued to it afterwards.
        """
        assert self._links is not None, "devices are connected"
        self.check()
        self._links.exchange(send, receive)
        meanwhile()
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        what = self._describe(request)
        self._wait_together(done.query, f"end the gather of {what}", f"{what} was gathered")

    def fail(self, reason: PeerError) -> PeerError:
        first = super().fail(reason)
        if self._links is not None:
            self._links.abort()
        return first

    def _wait_together(self, is_done: Callable[[], bool], aim: str, lost: str) -> None:
        """Return when `is_done` on all ranks. Raises PeerError where one of them fails, or the timeout is over."""
        deadline = time.monotonic() + self._timeout_s
        next_look = time.monotonic() + _LOOK_S
        while not (has_ended := is_done()) and time.monotonic() < deadline:
            self.check()
            if time.monotonic() >= next_look:
                self._look_for_failures()
                next_look = time.monotonic() + _LOOK_S
            time.sleep(_PAUSE_S)
        late = f"did not {aim} within {self._timeout_s:g} s (transport 'collective')"
        own = torch.tensor([float(has_ended)])
        ended = self.share(own, deadline + _GRACE_S, late, lost)
        missing = [rank for rank in range(self.size) if not ended[rank].item()]
        if missing:
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise self.fail(PeerError(f"{ranks} {late}, though all ranks are there", **about(missing)))

    def _look_for_failures(self) -> None:
        reason = self.rendezvous.told(self._end_key)
        if reason is not None:
            raise self.fail(PeerError.from_store(reason))
