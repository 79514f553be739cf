"""Transport `collective` on CUDA: banks are gathered from device memory into device memory, during the computation.

The copy thread agrees with the other ranks and issues the gather to the copy stream, behind the event "the slot is
free". The gather begins once this has happened on all ranks, so that no NCCL kernel occupies processors only to wait.
Then the thread waits until the gather has ended: a run passes its acquire when the bank is complete, and gets an error
if the gather failed.

Unmeasured: tests run this on emulated streams. It has not run on a GPU yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.ranks.device_gathers import DeviceGatherGroup
from moepass.runtime.ranks.device_links import NcclLinks
from moepass.runtime.ranks.gather_group import GatherGroup, Request
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.transfer.lanes import Lane, StreamLane
from moepass.runtime.transfer.link import Link


class DeviceCollectiveTransport(CollectiveTransport):
    """The collective transport into the memory of `device`, which has an index. `connect` connects the devices."""

    def __init__(
        self,
        link: Link,
        device: torch.device,
        connect: Callable[[Rendezvous, torch.device], NcclLinks] = NcclLinks,
    ) -> None:
        super().__init__(link)
        self._device, self._connect = device, connect

    def _make_group(self, rendezvous: Rendezvous, describe: Callable[[Request], str]) -> GatherGroup:
        return DeviceGatherGroup(rendezvous, describe, self._device, self._connect)

    @functools.cached_property
    def _lane(self) -> Lane:
        return StreamLane(self._device)
