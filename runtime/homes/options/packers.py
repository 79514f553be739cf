"""The packer of each home. A new home is one entry here, and one record in `moepass.models.homes`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from moepass.models.errors import InputError, OptionError, one_of
from moepass.models.homes import home_named
from moepass.runtime.banks.banks import Bank, pack_bank
from moepass.runtime.homes.device_home import SymmetricMemory, check_transport_to, make_transport, packer_on
from moepass.runtime.homes.disk.disk_home import DiskPacker
from moepass.runtime.homes.hybrid.hybrid_home import DeviceHybridPacker, HybridPacker
from moepass.runtime.homes.hybrid.staged_pull import StagedPull
from moepass.runtime.homes.options.home_options import Device, Disk, HomeOptions, Host, Hybrid, Peer
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.torch_private import default_group
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.link import check_link_to, parse_link


class Packer(Protocol):
    """Brings a model's banks to a home: call `agree`, then `pack` for each bank, then `connect`."""

    @property
    def home(self) -> Home:
        """The home that the banks are readable from after `connect`."""

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raise an error if these banks, tensors [experts, ...] by bank name, cannot be packed. Changes nothing."""
        return

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """Return a bank with this process's shard; the caller frees `tensors` right after."""

    def connect(self, banks: Sequence[Bank]) -> None:
        """Make the packed banks readable from the packer's home."""
        return


class WholeBankPacker(Packer):
    """A packer of complete banks at `home_name`, in memory of `device`, or in host memory pinned for a GPU."""

    home = Home()

    def __init__(self, home_name: str, device: torch.device, pinned_for: torch.device | None = None) -> None:
        self.home_name, self.device, self.pinned_for = home_name, device, pinned_for

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """Return the complete bank."""
        return pack_bank(index, name, tensors, home=self.home_name, device=self.device, pinned_for=self.pinned_for)


@dataclasses.dataclass(frozen=True)
class RunningHome:
    """The class of a home's options, and the function that makes a packer from them for a compute device."""

    options: type[HomeOptions]
    make_packer: Callable[[Any, torch.device], Packer]


def _host(options: Host, device: torch.device) -> Packer:
    return WholeBankPacker("host", torch.device("cpu"), device if device.type == "cuda" else None)


def _device(options: Device, device: torch.device) -> Packer:
    return WholeBankPacker("device", device)


def _peer(options: Peer, device: torch.device) -> Packer:
    check_transport_to(device, options.transport)
    peers = PeerGroup.of(options.group, options.timeout_s, transport=options.transport)
    transport = make_transport(options.transport, parse_link(options.link), device)
    return packer_on(device, options.group or default_group(), peers, transport)


def _hybrid(options: Hybrid, device: torch.device) -> Packer:
    link = parse_link(options.host_link)
    check_link_to(device, link)
    peers = PeerGroup.of(options.group, options.timeout_s)
    if device.type == "cpu":
        return HybridPacker(peers, StagedPull(link), options.staging_buffers)
    memory = functools.partial(SymmetricMemory, options.group or default_group(), device, options.timeout_s)
    return DeviceHybridPacker(peers, StagedPull(link), options.staging_buffers, memory, device)


def _disk(options: Disk, device: torch.device) -> Packer:
    return DiskPacker(options.folder, page_cache=options.page_cache)


# The homes by their names in `moepass.models.homes`.
RUNNING_HOMES = {
    running.options.home: running
    for running in (
        RunningHome(Host, _host),
        RunningHome(Device, _device),
        RunningHome(Peer, _peer),
        RunningHome(Hybrid, _hybrid),
        RunningHome(Disk, _disk),
    )
}


def options_of(home: str | HomeOptions) -> HomeOptions:
    """Return `home`, or the default options of the home with that name. Raises OptionError if it is neither."""
    if isinstance(home, HomeOptions):
        return home
    if not isinstance(home, str) or home not in RUNNING_HOMES:
        expected = f"one of {one_of(RUNNING_HOMES)}, or its options, such as moepass.Peer(timeout_s=300)"
        raise OptionError.wrong("home", home, expected)
    return RUNNING_HOMES[home].options()


def make_packer(options: HomeOptions, device: torch.device) -> Packer:
    """Return the packer that brings the banks of a model that computes on `device` to a home.

    Raises InputError if `device` cannot compute from that home, or this machine or process cannot have it, and
    PeerError if an earlier rendezvous of the group has failed.
    """
    devices = home_named(options.home).devices
    if device.type not in devices:
        text = f"device is {device}; home={options.home!r} works on {' and '.join(devices)} only; use home='host'"
        raise InputError(text, name="device", value=str(device), expected=devices)
    return RUNNING_HOMES[options.home].make_packer(options, device)
