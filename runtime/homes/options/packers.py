"""The packer of each home. A new home is one entry here, and one record in `moepass.models.homes`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from moepass.models.errors import InputError, OptionError, one_of
from moepass.models.homes import home_named
from moepass.runtime.homes.device_home import SymmetricMemory, check_transport_to, make_transport, packer_on
from moepass.runtime.homes.disk.disk_home import DiskPacker
from moepass.runtime.homes.host_home import HostPacker, Packer
from moepass.runtime.homes.hybrid.device_hybrid import DeviceHybridPacker
from moepass.runtime.homes.hybrid.hybrid_home import HybridPacker
from moepass.runtime.homes.hybrid.staged_pull import StagedPull
from moepass.runtime.homes.options.home_options import Disk, HomeOptions, Host, Hybrid, Peer
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.torch_private import default_group
from moepass.runtime.transfer.link import check_link_to, parse_link


@dataclasses.dataclass(frozen=True)
class RunningHome:
    """The class of a home's options, and the function that makes a packer from them for a compute device."""

    options: type[HomeOptions]
    make_packer: Callable[[Any, torch.device], Packer]


def _host(options: Host, device: torch.device) -> Packer:
    return HostPacker(pin=device.type == "cuda")


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
    group = options.group or default_group()

    def memory() -> SymmetricMemory:
        return SymmetricMemory(group, device, options.timeout_s)

    return DeviceHybridPacker(peers, StagedPull(link), options.staging_buffers, memory, device)


def _disk(options: Disk, device: torch.device) -> Packer:
    return DiskPacker(options.folder, keeps_pages=options.page_cache == "keep")


# The homes by their names in `moepass.models.homes`.
RUNNING_HOMES: dict[str, RunningHome] = {
    home.options.home: home
    for home in (
        RunningHome(Host, _host),
        RunningHome(Peer, _peer),
        RunningHome(Hybrid, _hybrid),
        RunningHome(Disk, _disk),
    )
}


def options_of(home: str | HomeOptions) -> HomeOptions:
    """Return `home` if it is an options object, else the default options of the home with that name.

    Raises OptionError if it is neither.
    """
    if isinstance(home, HomeOptions):
        return home
    if not isinstance(home, str) or home not in RUNNING_HOMES:
        expected = f"one of {one_of(RUNNING_HOMES)}, or its options, such as moepass.Peer(timeout_s=300)"
        raise OptionError.wrong("home", home, expected)
    return RUNNING_HOMES[home].options()


def make_packer(options: HomeOptions, device: torch.device) -> Packer:
    """Return the packer that brings the banks of a model that computes on `device` to a home.

    Raises:
        InputError: `device` cannot compute from that home yet, or this machine or process cannot have it.
        PeerError: the ranks of the group cannot meet any more.
    """
    devices = home_named(options.home).devices
    if device.type not in devices:
        raise InputError(
            f"device is {device}; home={options.home!r} works on {' and '.join(devices)} only; use home='host'",
            name="device",
            value=str(device),
            expected=devices,
        )
    return RUNNING_HOMES[options.home].make_packer(options, device)
