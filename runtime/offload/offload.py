"""Swap a model's expert parameters for banks, so that the unmodified forward streams them."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from moepass.models.errors import InputError, OptionError, one_of
from moepass.passes.machine.hardware import Hardware
from moepass.runtime.banks.banked_modules import BankedParameter, bank_parameters, banked_parameters, move_as_a_whole
from moepass.runtime.banks.banks import Bank, BankStore, pack_bank
from moepass.runtime.homes.collective import CollectiveTransport, make_transport
from moepass.runtime.homes.device_home import check_transport_to, packer_on
from moepass.runtime.homes.disk.disk_home import DiskPacker
from moepass.runtime.homes.hybrid.hybrid_home import HybridPacker
from moepass.runtime.homes.hybrid.staged_pull import StagedPull
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S, PeerGroup
from moepass.runtime.offload.placement import BankRoute, Placement, PlanWish, place
from moepass.runtime.offload.residents import Residents
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.link import parse_link
from moepass.runtime.transfer.transports import PULL, Transport, check_transport

HOMES = ("host", "peer", "hybrid", "disk")
# Those that spread experts over the ranks of a process group.
SPREAD_HOMES = ("peer", "hybrid")
DEFAULT_STAGES = 2


@dataclasses.dataclass(frozen=True)
class OffloadReport:
    """What `offload_experts` moved. Bytes at rest in this process, and bytes that the ring takes on `device`; with home
    `hybrid` the stages take `stage_bytes` there.

    `layers` moved; `resident_layers` stayed as they were.
    """

    store: BankStore
    home: str
    layers: tuple[str, ...]
    home_bytes: int
    ring_bytes: int
    resident_layers: tuple[str, ...] = ()
    stage_bytes: int = 0

    @property
    def transport(self) -> str:
        """What moves bytes from the home into a slot: `host`, `pull` or `collective`."""
        return self.store.home.transport.name


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `module` that form a bank: empty unless it holds two expert matrices [experts, ., .] that fit.

    Told by shape, not by class: all matrices have one first dimension E, and two of them, an up and a down projection,
    have a width in common. Whatever else has the first dimension E comes along: biases, scales, adapters.
    """
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    own = {name: value for name, value in own.items() if value.dim() >= 1 and value.is_floating_point()}
    matrices = [value for value in own.values() if value.dim() == 3]
    experts = {value.shape[0] for value in matrices}
    if len(experts) != 1 or experts == {1}:
        return {}
    (count,) = experts
    widths = [{width for width in value.shape[1:] if width > 1} for value in matrices]
    if all(one.isdisjoint(other) for one, other in itertools.combinations(widths, 2)):
        return {}
    return {name: value for name, value in own.items() if value.shape[0] == count}


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of `model` that hold expert banks, by path, in the model's order."""
    return {path: module for path, module in model.named_modules() if expert_parameters(module)}


def split_layers(model: nn.Module, residents: Residents) -> tuple[dict[str, list[nn.Module]], tuple[str, ...]]:
    """What moves and what stays: the modules of each bank by path, and the paths of those that are `residents`.

    Raises InputError where a resident layer has no bank.
    """
    banks = _in_banks(find_expert_modules(model))
    sizes = {
        path: sum(value.nbytes for value in expert_parameters(module).values()) for path, (module, *_) in banks.items()
    }
    resident = residents.among(sizes)
    return {path: modules for path, modules in banks.items() if path not in resident}, resident


def place_experts(
    model: nn.Module, wish: PlanWish, route: BankRoute, residents: Residents, slots: int | None
) -> Placement:
    """What stays of `model` and how many slots there are. Raises as `place`."""
    banks = _in_banks(find_expert_modules(model))
    return place(
        model, {path: expert_parameters(modules[0]) for path, modules in banks.items()}, wish, route, residents, slots
    )


def route_of(
    home: str,
    device: torch.device,
    group: ProcessGroup | None,
    transport: str | None,
    link: str,
    host_link: str,
    stages: int,
) -> BankRoute:
    """How banks travel, as the planner needs to know it."""
    is_spread = home in SPREAD_HOMES and dist.is_available() and dist.is_initialized()
    names = {
        "host": {"host": link},
        "peer": {"peer": link},
        "hybrid": {"peer": link, "host": host_link},
        "disk": {"disk": link},
    }
    rates = {name: parse_link(text).bytes_per_s for name, text in names[home].items()}
    emulated = {name: rate for name, rate in rates.items() if rate is not None}
    return BankRoute(home, device, dist.get_world_size(group) if is_spread else 1, transport or PULL, emulated, stages)


def _in_banks(found: Mapping[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """The modules of each bank, by the path of the first: more than one where they share all of its parameters."""
    banks: dict[tuple[tuple[str, int], ...], tuple[str, list[nn.Module]]] = {}
    for path, module in found.items():
        shared = tuple((name, id(value)) for name, value in expert_parameters(module).items())
        banks.setdefault(shared, (path, []))[1].append(module)
    return dict(banks.values())


class Packer(Protocol):
    """Brings the banks of a model to a home: `agree`, then `pack` for each, then `connect`."""

    @property
    def home(self) -> Home: ...

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raise where these banks, given as name and tensors [experts, ...], cannot be packed. Changes nothing."""

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """What stays of a bank in this process; its tensors are freed right after."""

    def connect(self, banks: Sequence[Bank]) -> None:
        """Make the packed banks readable from the packer's home."""


class HostPacker:
    """Complete banks in host memory, pinned where a CUDA device will read them."""

    def __init__(self, pin: bool) -> None:
        self.home = Home()
        self.pin = pin

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        return

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        return pack_bank(index, name, tensors, home="host", pin=self.pin)

    def connect(self, banks: Sequence[Bank]) -> None:
        return


def offload_experts(
    model: nn.Module,
    home: str = "host",
    device: torch.device | str | None = None,
    slots: int | None = None,
    link: str = "real",
    group: ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    transport: str | None = None,
    bank_folder: str | os.PathLike[str] | None = None,
    page_cache: str = "keep",
    resident_bytes: int = 0,
    stages: int = DEFAULT_STAGES,
    host_link: str = "real",
    resident_layers: Sequence[int] = (),
    memory_budget: str | float | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    tokens: int | tuple[int, int] | None = None,
) -> OffloadReport:
    """Move the experts of `model` to `home`; its unmodified forward then gathers them, layer by layer, on `device`.

    Compiled with backend "asyncep" the gathers are prefetched through a ring of `slots` slots, 2 where neither they nor
    a memory budget are given. `device` defaults to
    the device of the model's other parameters; `link="emulate:BYTES_PER_S"` makes transfers take that long (CPU only).
    The model is changed in place. Its parameters are not: a model that shares them keeps them. Layers that share all
    parameters of their experts share a bank. The state_dict holds the experts as before, as views of the banks, and
    load_state_dict writes into them.

    The first layers whose complete experts fit into `resident_bytes` together stay what they are, ordinary parameters,
    on every rank. That is memory well spent: the stream has their compute time to begin with. `resident_layers` names
    the layers that stay instead, by the numbers in their modules' paths: those that `moepass explain` found best.

    With `memory_budget` the planner decides which layers stay, and how many slots there are unless `slots` says so: the
    fastest step whose memory fits. A budget is bytes, or text such as "6GB" or "512MiB", on `device` for this process:
    dense weights, layers that stay, slots, staging buffers, this rank's shards where they lie there, and activations of
    `tokens`. `tokens` are those of a step that is planned for: a number, or the number of sequences and the tokens of
    each; one sequence of 4096 by default. `hardware` is the machine that it is planned for, a preset or a profile; by
    default that which `moepass calibrate` has stored for this machine. Where there is none, or where the sizes of the
    model's family are not known, nothing is predicted, and layers that stay are spread evenly over the model. Banks at
    rest in host memory or in files do not count, even where the device is the CPU.

    home="host": complete banks in memory of this process.
    home="peer": each rank of `group` (default: all ranks of torch.distributed, which must be initialised) keeps 1/N of
    every bank and gets the rest from the others when it needs it; an emulated link counts these bytes only. No rank has
    a complete state_dict then, so to take one is an error. All ranks call this, each with the complete model. They wait
    for each other here, each time for `timeout_s` at most. On CUDA each rank's part lies in the memory of its own GPU,
    of one machine and with peer access: `home_bytes` are then on the device. That has not run on GPUs yet, and a rank
    that dies while the GPUs exchange addresses may leave the others waiting. Where one did not come there, no group of
    these processes can try again.
    home="hybrid": shards as with "peer", in host memory. Each rank copies its own into `stages` stages on the compute
    side before ranks need them, and ranks copy from each other's stages: a rank's `host_link` carries 1/N of a bank,
    its `link` the rest. What no stage holds is copied from host memory: slower, never wrong, and counted in
    `ring.statistics`. So ranks should not be more banks apart than there are stages; that never makes one wait for
    another. On a CPU host and compute side are the same memory, so only emulated links show a gain there. Not on CUDA
    yet, and on x86-64 Linux only.
    home="disk": banks are written to `bank_folder`, one safetensors file each, and read from there into the slots. They
    are not written again, so load_state_dict and state_dict are errors. While one bank is copied the kernel begins to
    read the next one. With page_cache="keep" what was read stays in the kernel's cache for as long as there is room for
    it, with "drop" it goes at once: for machines where others need that cache more. Not on CUDA yet.

    With home="peer" or "hybrid", transport="pull" (default): ranks of one machine copy from each other's memory.
    They never wait for each other again: afterwards ranks run as many steps as they like, when they like.
    With home="peer", transport="collective": for ranks on several machines, on CPUs. All ranks gather a bank together,
    over gloo connections of their own, so they run the same layers, equally often, compiled with equally many slots,
    and no rank may come `timeout_s` later than another; one without work for a step calls `moepass.gather_only_step`.
    Whatever goes wrong on one rank, an exception in its model included, is an error on all of them, and they must be
    started again. With pull this holds for ranks that die.

    Raises OptionError (unknown home or transport, slots or stages below 1, a malformed link or timeout) and InputError
    (no experts, a missing device, no process group). For home="peer" and "hybrid" also PeerError where ranks are
    missing or differ in what they bring, and SharedMemoryError where the machine has none and transport is "pull"; the
    model is then as it was, unless a rank is lost after all agreed. Where ranks missed each other, their group cannot
    be used again: use a new one, or start them again. For home="disk" also InputError where there is no bank_folder, or
    it has no room; the model is then as it was.
    """
    if home not in HOMES:
        raise OptionError(f"home is {home!r}; it must be one of {one_of(HOMES)}")
    check_transport_of(home, transport)
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
        raise OptionError(f"slots is {slots!r}; a ring needs at least 1, and 2 to overlap transfers with computation")
    given = Residents(resident_bytes, resident_layers)
    _check_staging(home, stages, host_link)
    compute_device = resolve_device(model, device)
    placement = place_experts(
        model,
        PlanWish(memory_budget, hardware, tokens),
        route_of(home, compute_device, group, transport, link, host_link, stages),
        given,
        slots,
    )
    slots = placement.slots
    banks, resident = split_layers(model, placement.residents)
    if resident and not banks and given.is_given:
        raise InputError(given.complaint(len(resident)))
    if not banks and not resident:
        banked = any(isinstance(module, BankedParameter) for module in model.modules())
        reason = (
            "they were offloaded before"
            if banked
            else "no module holds two matrices [experts, ., .] with a width in common, as an up and a down projection "
            "have, or one holds matrices with different numbers of experts"
        )
        raise InputError(f"{type(model).__name__} has no expert weights to offload: {reason}")
    parsed_link = parse_link(link)
    if home == "hybrid":
        moved_by: Transport = StagedPull(parse_link(host_link, "host_link"))
    else:
        moved_by = make_transport(transport or PULL, parsed_link)
    packer = _packer(home, compute_device, group, timeout_s, bank_folder, page_cache, moved_by, stages)
    store = BankStore(compute_device, slots, parsed_link, packer.home)
    store.placed = placement.placed
    if not banks:  # all of them fit into the memory budget
        return OffloadReport(store, home, (), 0, 0, resident)
    with torch.inference_mode(False), torch.no_grad():
        packer.agree({path: expert_parameters(modules[0]) for path, modules in banks.items()})
        for index, (path, modules) in enumerate(banks.items()):
            _bank(store, packer, index, path, modules)
        move_as_a_whole(model)
        packer.connect(store.banks)
    if isinstance(moved_by, CollectiveTransport):
        _mark_forwards(model, moved_by)
    return OffloadReport(
        store, home, tuple(banks), store.home_bytes, store.ring_bytes, resident, packer.home.stage_bytes
    )


def _bank(store: BankStore, packer: Packer, index: int, path: str, modules: Sequence[nn.Module]) -> None:
    """Move the parameters that `modules` share to the home, as bank `index`; the modules let go of them."""
    parameters = expert_parameters(modules[0])
    store.add(packer.pack(index, path, parameters))
    for module in modules:
        bank_parameters(
            module, {name: BankedParameter(store, index, position) for position, name in enumerate(parameters)}
        )
        if not store.home.transport.is_one_sided:
            module.register_forward_pre_hook(_gather_anew)


def _gather_anew(module: nn.Module, arguments: object) -> None:
    """Let an eager call of `module` gather once, whatever was called before: the other ranks count on it."""
    if not torch.compiler.is_compiling():
        for _, banked in banked_parameters(module):
            banked.store.forget_gathered()


def _mark_forwards(model: nn.Module, transport: CollectiveTransport) -> None:
    """Let `transport` know where an eager forward of `model` begins and ends."""

    # Compiled, neither does anything: there a run is what a graph runs.
    def begin(module: nn.Module, arguments: object) -> None:
        if not torch.compiler.is_compiling():
            transport.begin_forward()

    def end(module: nn.Module, arguments: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            transport.end_forward()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


def check_transport_of(home: str, transport: str | None) -> None:
    """Raises OptionError where `transport` does not exist, or not for `home`; None stands for the default."""
    if transport is None:
        return
    check_transport(transport)
    if home == "hybrid" and transport != PULL:
        raise OptionError(
            f"transport is {transport!r}, but home is 'hybrid', where ranks pull from each other's stages; "
            "use transport='pull', or home='peer'"
        )
    if home not in SPREAD_HOMES:
        raise OptionError(
            f"transport is {transport!r}, but home is {home!r}, from which nothing but copies of this process's own "
            "memory are needed; a transport goes with home='peer'"
        )


def _check_staging(home: str, stages: object, host_link: str) -> None:
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise OptionError(
            f"stages is {stages!r}; a rank needs at least 1, and 2 to stage one bank while ranks copy another"
        )
    parse_link(host_link, "host_link")
    if home != "hybrid" and (stages != DEFAULT_STAGES or host_link != "real"):
        given = f"stages is {stages}" if stages != DEFAULT_STAGES else f"host_link is {host_link!r}"
        raise OptionError(f"{given}, but home is {home!r}; it goes with home='hybrid'")


def _packer(
    home: str,
    device: torch.device,
    group: ProcessGroup | None,
    timeout_s: float,
    bank_folder: str | os.PathLike[str] | None,
    page_cache: str,
    transport: Transport,
    stages: int,
) -> Packer:
    if group is not None and home not in SPREAD_HOMES:
        raise OptionError(
            f"home is {home!r}, which concerns one process alone; a group goes with home='peer' or home='hybrid'"
        )
    if home != "disk" and (bank_folder is not None or page_cache != "keep"):
        given = f"bank_folder is {str(bank_folder)!r}" if bank_folder is not None else f"page_cache is {page_cache!r}"
        raise OptionError(f"{given}, but home is {home!r}; it goes with home='disk'")
    if home == "host":
        return HostPacker(pin=device.type == "cuda")
    if home == "peer":
        check_transport_to(device, transport.name)
        peers = PeerGroup.of(group, timeout_s, transport=transport.name)
        return packer_on(device, group or c10d._get_default_group(), peers, transport)
    if device.type != "cpu":
        raise InputError(f"device is {device}; home={home!r} works on cpu only so far, use home='host' there")
    if home == "disk":
        return DiskPacker(bank_folder, page_cache)
    assert isinstance(transport, StagedPull)
    return HybridPacker(PeerGroup.of(group, timeout_s, transport=transport.name), transport, stages)


def resolve_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The compute device: the given one, else where the model's dense parameters lie.

    Raises InputError where the device does not exist.
    """
    if device is None:
        experts = {id(value) for module in model.modules() for value in expert_parameters(module).values()}
        return next((value.device for value in model.parameters() if id(value) not in experts), torch.device("cpu"))
    return check_device(device)


def check_device(device: torch.device | str) -> torch.device:
    """Raises InputError where `device` is no device, or one that this machine does not have."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device is {device!r}; it must be cpu, cuda or cuda:INDEX") from None
    if resolved.type not in ("cpu", "cuda", "meta"):
        raise InputError(f"device is {str(device)!r}; experts stream to cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        raise InputError(f"device is {str(device)!r}, but this machine has {count or 'no'} CUDA devices; use cpu")
    # An index makes devices comparable: tensors on "cuda" say "cuda:0".
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


__all__ = [
    "DEFAULT_STAGES",
    "HOMES",
    "SPREAD_HOMES",
    "BankedParameter",
    "HostPacker",
    "OffloadReport",
    "Packer",
    "check_device",
    "check_transport_of",
    "expert_parameters",
    "find_expert_modules",
    "offload_experts",
    "place_experts",
    "resolve_device",
    "route_of",
    "split_layers",
]  # fmt: skip
