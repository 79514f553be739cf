"""Transport `collective` on CUDA: banks are gathered from device memory into device memory, beside the computation.

The copy thread agrees with the other ranks and issues the gather to the copy stream, behind the event "the slot is
free". It begins once that has happened on all ranks, so that no kernel of NCCL takes processors only to wait. Then it
waits until the gather has ended: a run comes beyond its acquire when the bank is there, and gets an error where it will
never be.

Unmeasured: tests run this on emulated streams, and it has not been on a GPU yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.ranks.device_gathers import DeviceGatherGroup
from moepass.runtime.ranks.device_links import DeviceLinks, NcclLinks
from moepass.runtime.ranks.gather_group import GatherGroup, Request
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.transfer.lanes import Lane, StreamLane
from moepass.runtime.transfer.link import Link


class DeviceCollectiveTransport(CollectiveTransport):
    """As `CollectiveTransport`, into the memory of `device`, which has an index; `connect` connects the devices."""

    def __init__(
        self,
        link: Link,
        device: torch.device,
        connect: Callable[[Rendezvous, torch.device], DeviceLinks] = NcclLinks,
    ) -> None:
        super().__init__(link)
        self._device, self._connect = device, connect

    def _make_group(self, rendezvous: Rendezvous, describe: Callable[[Request], str]) -> GatherGroup:
        return DeviceGatherGroup(rendezvous, describe, self._device, self._connect)

    @functools.cached_property
    def _lane(self) -> Lane:
        return StreamLane(self._device)
