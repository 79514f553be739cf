"""Replacement of a model's expert parameters by banks, so that the unmodified forward streams them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from moepass.models.errors import InputError, OptionError
from moepass.models.limits import AUTO, MODEL, STORED, ExpertFormat
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.machine.hardware import Hardware
from moepass.runtime.banks.banked_modules import (
    BankedParameter,
    bank_parameters,
    banked_parameters,
    check_before_moving,
)
from moepass.runtime.banks.banks import BankStore, keep_whole_model_store
from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.homes.options.home_options import HomeOptions
from moepass.runtime.homes.options.packers import Packer, make_packer, options_of
from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.offload.pack_experts import Banks, check_format, format_topic, pack_experts
from moepass.runtime.offload.placement import Placement, PlanningOptions, place
from moepass.runtime.offload.residents import Residents, is_count
from moepass.runtime.ranks.agree import agree
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.transfer.link import parse_link

# Ranks compare the causes of their plans first.
_PLAN, _PACKED_PLAN = "plan of its layers", "plan of its packed layers"


class NoExpertsError(InputError):
    """The model has no experts that could be offloaded."""


@dataclasses.dataclass(frozen=True)
class OffloadReport:
    """The result of `offload_experts`: the home, the layers that were moved, and those that stayed.

    Attributes:
        home_bytes: bytes at rest in this process, or in files.
        ring_bytes: most bytes that the ring takes on the compute device. Graphs that read this rank's own experts from
            its shard need smaller slots.
        staging_bytes: bytes of staging buffers on the compute device, with home `hybrid`.
    """

    store: BankStore
    home: str
    layers: tuple[str, ...]
    home_bytes: int
    ring_bytes: int
    resident_layers: tuple[str, ...] = ()
    staging_bytes: int = 0

    @staticmethod
    def of(store: BankStore, resident_layers: tuple[str, ...]) -> OffloadReport:
        """Return the report on the banks in `store`, whose model keeps `resident_layers`."""
        assert store.placed is not None, "a plan decides what moves"
        home, layers = store.placed.decisions.home, tuple(bank.spec.name for bank in store.banks)
        staging_bytes = store.home.staging_bytes
        return OffloadReport(store, home, layers, store.home_bytes, store.ring_bytes, resident_layers, staging_bytes)

    @property
    def formats(self) -> dict[str, BankFormat]:
        """The bytes of all banks together, of all ranks, by format: layouts of a quantised checkpoint, or a dtype."""
        sums: dict[str, BankFormat] = {}
        for bank in self.store.banks:
            sizes, added = bank.spec.format, sums.get(name := bank.spec.format.decoder or bank.spec.tensors[0].dtype)
            sums[name] = sizes if added is None else sizes + added
        return sums

    @property
    def transport(self) -> str:
        """The transport that copies from the home into a slot: `host`, `pull` or `collective`."""
        return self.store.home.transport.name


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` that form a bank, by name; empty if it has no two matching expert matrices.

    Parameters are recognised by shape, not by class: all matrices [experts, ., .] have the same first dimension, and
    two of them, an up and a down projection, have a width in common. All other parameters with that first dimension
    belong to the bank too: biases, scales, adapters.
    """
    named = module.named_parameters(recurse=False, remove_duplicate=False)
    parameters = {name: value for name, value in named if value.dim() >= 1 and value.is_floating_point()}
    matrices = [value for value in parameters.values() if value.dim() == 3]
    experts = {value.shape[0] for value in matrices}
    if len(experts) != 1 or experts == {1}:
        return {}
    (count,) = experts
    widths = [{width for width in value.shape[1:] if width > 1} for value in matrices]
    if all(left.isdisjoint(right) for left, right in itertools.combinations(widths, 2)):
        return {}
    return {name: value for name, value in parameters.items() if value.shape[0] == count}


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that have expert banks, by path, in the model's order."""
    return {path: module for path, module in model.named_modules() if expert_parameters(module)}


def expert_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `model` that form banks."""
    return [value for module in find_expert_modules(model).values() for value in expert_parameters(module).values()]


def streamed_layers(model: nn.Module, resident: Collection[str]) -> dict[str, list[nn.Module]]:
    """Return the modules of each bank that moves, by path: all but those at the paths `resident`."""
    return {path: modules for path, modules in _modules_of_banks(model).items() if path not in resident}


def packed_experts(
    model: nn.Module, expert_format: ExpertFormat, meeting: Rendezvous | None, title: str
) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return the banks of `model` that rest packed, by path; {} if experts rest as they are stored.

    Ranks of `meeting` first compare `expert_format`; `title` is that of the exchange in which ranks that pack nothing
    compare it. Raises the errors of `pack_experts`.
    """
    if expert_format == STORED:
        return {}
    if meeting is not None:
        deque(agree(meeting, title, [format_topic(expert_format)]), maxlen=0)
    with torch.inference_mode(False), torch.no_grad():
        banks = {path: expert_parameters(modules[0]) for path, modules in _modules_of_banks(model).items()}
        return pack_experts(banks, expert_format, meeting)


def place_experts(
    model: nn.Module, planning: PlanningOptions, options: HomeOptions, device: torch.device, packed: Banks
) -> Placement:
    """Decide which layers of `model` stay on the device, and the number of slots.

    `packed` has the banks that rest packed, by path. Raises OptionError for fewer than 1 slot, InputError if the model
    has no experts, and the errors of `place`.
    """
    slots = planning.slots
    if slots is not None and not is_count(slots, 1):
        text = f"slots is {slots!r}; a ring needs at least 1, and 2 to overlap transfers with computation"
        raise OptionError(text, name="slots", value=slots, expected="at least 1")
    banks = _modules_of_banks(model)
    if not banks:
        banked = any(isinstance(module, BankedParameter) for module in model.modules())
        reason = (
            "they were offloaded before"
            if banked
            else "no module has two parameters [experts, ., .] with a width in common, as an up and a down projection "
            "have, or a module has parameters with different numbers of experts"
        )
        raise NoExpertsError(f"{type(model).__name__} has no expert weights to offload: {reason}")
    experts = {path: expert_parameters(modules[0]) for path, modules in banks.items()}
    return place(model, experts, planning, options, device, packed)


def _modules_of_banks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules of each bank, by the path of the first. Modules that share all parameters share a bank."""
    banks: dict[tuple[tuple[str, int], ...], tuple[str, list[nn.Module]]] = {}
    for path, module in find_expert_modules(model).items():
        shared = tuple((name, id(value)) for name, value in expert_parameters(module).items())
        banks.setdefault(shared, (path, []))[1].append(module)
    return dict(banks.values())


def offload_experts(
    model: nn.Module,
    home: str | HomeOptions = "host",
    device: torch.device | str | None = None,
    slots: int | None = None,
    resident_bytes: int = 0,
    resident_layers: Sequence[int] = (),
    memory_budget: str | float | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    tokens: int | tuple[int, int] | None = None,
    experts_compute: str = MODEL,
    expert_format: ExpertFormat = STORED,
) -> OffloadReport:
    """Move the experts of `model` to `home`; its unmodified forward then gathers them, layer by layer, on `device`.

    The model is changed in place. Compiled with backend "asyncep" it copies the experts of the next layers while a
    layer computes; uncompiled it waits for each copy. If this process has all experts, the state_dict contains them as
    before. Layers that share all parameters of their experts share a bank.

    Args:
        model: any module with expert weights [experts, ., .], already converted, merged and placed.
        home: where the experts rest: `"host"`, `"device"`, `"peer"`, `"hybrid"` or `"disk"`, or, with other options
            than the defaults, a `moepass.Host`, `Device`, `Peer`, `Hybrid` or `Disk`. With `peer` and `hybrid` all
            ranks call this, each with the complete model.
        device: where the model computes, by default the device of its other parameters.
        slots: buffers on `device`, each for the experts of one layer. 2 overlap copies with computation, 1 takes less
            memory, and more than a few hide no more time. By default 2, or the planner's choice for a memory budget.
        resident_bytes: the first layers whose experts fit into this many bytes together stay on `device`, on every
            rank. It is a good use of free memory: the first copies overlap with the compute time of these layers.
        resident_layers: instead of `resident_bytes`, the layers that stay on `device`, by the numbers in their modules'
            paths; see `moepass explain`.
        memory_budget: bytes on `device` for this process, or text such as "6GB" or "512MiB": dense weights, resident
            layers, slots, staging buffers, this rank's shards if they are there, and activations. The planner chooses
            the resident layers so that the step is fastest. Banks at rest in host memory or in files do not count, even
            if the device is the CPU.
        hardware: the machine to plan for, a preset or a profile, by default the one that `moepass calibrate` has stored
            for this machine. Without a profile, or for a family without size formulas, no times are predicted, and the
            resident layers are spread evenly over the model.
        tokens: the tokens of a step to plan for: a number, or the number of sequences and the tokens of each.
            By default one sequence of 4096.
        experts_compute: "fp8" for a model that is compiled with this option: slots take half of the bytes, and all
            layers stream, because resident experts would compute in the model's dtype.
        expert_format: `"stored"`: experts rest as they are. `"lossless"` or `"elf"`: they are packed first, rest and
            travel packed, and are decoded into the slot; all packed experts are in memory before the first layer moves.
            Layers that stay on `device` are not packed. docs/homes.md describes the formats.

    Raises:
        OptionError: an unknown home, fewer than 1 slot, a wrong number of bytes, layers or tokens, a memory budget
            together with resident layers, or an `expert_format` that is unknown or that these experts, or experts at
            this home, cannot be packed in.
        InputError: the model has no experts, they are on the meta device, or all of them would stay; the device is
            missing, or cannot compute from that home; the budget is too small; the profile lacks a link or a rate;
            there is no process group; home `disk` needs a folder, or disk space. The model is unchanged.
        PeerError: ranks are missing, or have different models or options. The model is unchanged, unless a rank is lost
            after all have agreed. Ranks that got out of step cannot use their group again.
        SharedMemoryError: ranks on this machine cannot share memory. The model is unchanged.
    """
    options = options_of(home)
    check_format(expert_format, options.home)
    residents = Residents(resident_bytes, resident_layers)
    planning = PlanningOptions(memory_budget, hardware, tokens, slots, residents, experts_compute)
    compute_device = resolve_device(model, device)
    if device is None or compute_device.type != "meta" or expert_format != STORED:
        _check_values(model)
    packer = make_packer(options, compute_device)
    meeting = packer.group.rendezvous if isinstance(packer, PeerPacker) else None
    with meeting.publishing_failures() if meeting is not None else contextlib.nullcontext():
        packed = packed_experts(model, expert_format, meeting, _PLAN)
        placement = place_experts(model, planning, options, compute_device, packed)
    if meeting is not None:
        title = _PLAN if expert_format == STORED else _PACKED_PLAN
        deque(agree(meeting, title, [format_topic(expert_format), *placement.topics]), maxlen=0)
    return move_experts(model, options, packer, compute_device, planning, placement, packed)


def _check_values(model: nn.Module) -> None:
    """Raise InputError if experts are on the meta device: they have no values."""
    without = [
        f"{path}.{name}" if path else name
        for path, module in find_expert_modules(model).items()
        for name, value in expert_parameters(module).items()
        if value.is_meta
    ]
    if without:
        others = f" and {len(without) - 1} other parameters" if len(without) > 1 else ""
        raise InputError(
            f"{without[0]}{others} are on the meta device, so they have no values: accelerate's cpu_offload, "
            "disk_offload and device_map leave parameters there; use moepass.load_pretrained (with home='disk' if the "
            "experts exceed the memory), or load the model without device_map before offload_experts",
            name=without[0],
        )


def move_experts(
    model: nn.Module,
    options: HomeOptions,
    packer: Packer,
    device: torch.device,
    planning: PlanningOptions,
    placement: Placement,
    packed: dict[str, Mapping[str, torch.Tensor]],
) -> OffloadReport:
    """Move the experts of `model` as `placement` says, which all ranks have agreed on.

    `make_packer` made `packer` from `options`. The banks in `packed`, by path, move in their packed form, and are
    removed from it. Raises the errors of `offload_experts`.
    """
    resident = placement.resident
    for path in resident:
        packed.pop(path, None)
    banks = streamed_layers(model, resident)
    # With home `device` all plain experts stay, whichever layers the user has chosen.
    if resident and not banks and planning.residents.is_given and options.home != "device":
        raise planning.residents.all_resident_error(len(resident))
    store = BankStore(device, placement.slots, parse_link(options.link), packer.home)
    store.placed, store.multiplies_in_fp8 = placement.placed, planning.multiplies_in_fp8
    if not banks:  # all experts fit into the memory budget
        keep_whole_model_store(expert_weights(model), store)
        return OffloadReport.of(store, resident)
    with torch.inference_mode(False), torch.no_grad():
        packer.agree({path: packed.get(path) or expert_parameters(modules[0]) for path, modules in banks.items()})
        for index, (path, modules) in enumerate(banks.items()):
            _bank(store, packer, index, path, modules, packed.pop(path, None))
        check_before_moving(model)
        packer.connect(store.banks)
    if isinstance(packer.home.transport, CollectiveTransport):
        _mark_forwards(model, packer.home.transport)
    keep_whole_model_store(expert_weights(model), None)
    return OffloadReport.of(store, resident)


def _bank(
    store: BankStore,
    packer: Packer,
    index: int,
    path: str,
    modules: Sequence[nn.Module],
    packed: Mapping[str, torch.Tensor] | None,
) -> None:
    """Move the parameters that all `modules` share, or `packed`, into bank `index`; remove them from the modules."""
    parameters = expert_parameters(modules[0])
    store.add(packer.pack(index, path, packed or parameters))
    for module in modules:
        bank_parameters(
            module, {name: BankedParameter(store, index, position) for position, name in enumerate(parameters)}
        )
        if not store.home.transport.is_one_sided:
            module.register_forward_pre_hook(_gather_anew)


def _gather_anew(module: nn.Module, arguments: object) -> None:
    """Make every eager call of `module` gather exactly once, because the other ranks take part in each gather."""
    if not torch.compiler.is_compiling():
        for _, banked in banked_parameters(module):
            banked.store.forget_gathered()


def _mark_forwards(model: nn.Module, transport: CollectiveTransport) -> None:
    """Let `transport` know when an eager forward of `model` begins and ends."""

    # In compiled code the executor marks the run, so both calls are no-ops.
    def begin(module: nn.Module, arguments: object) -> None:
        if not torch.compiler.is_compiling():
            transport.begin_forward()

    def end(module: nn.Module, arguments: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            transport.end_forward()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


def resolve_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return `device`, by default that of the model's dense parameters. Raises InputError if it does not exist."""
    if device is None:
        experts = {id(value) for module in model.modules() for value in expert_parameters(module).values()}
        return next((value.device for value in model.parameters() if id(value) not in experts), torch.device("cpu"))
    return check_device(device)


def rank_device(device: str, rank: int = 0) -> torch.device:
    """Return the device that `rank`, of the ranks of this machine, computes on.

    "auto" is a GPU if this machine has one, else the CPU. Without an index, ranks take the GPUs in turn. Raises
    InputError as `check_device` does.
    """
    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    checked = check_device(device)
    takes_turns = checked.type == "cuda" and torch.device(device).index is None
    return torch.device("cuda", rank % torch.cuda.device_count()) if takes_turns else checked


def check_device(device: torch.device | str) -> torch.device:
    """Return `device` with its index. Raises InputError if it is not a device, or this machine does not have it."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError.wrong("device", device, "cpu, cuda or cuda:INDEX") from None
    if resolved.type not in ("cpu", "cuda", "meta"):
        raise InputError.wrong("device", str(device), "cpu or cuda, to which experts stream")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        text = f"device is {str(device)!r}, but this machine has {count or 'no'} CUDA devices; use cpu"
        raise InputError(text, name="device", value=str(device), expected="cpu")
    # With its index the device equals that of its tensors, "cuda:0", and means the same in all threads.
    has_index = resolved.type != "cuda" or resolved.index is not None
    return resolved if has_index else torch.device("cuda", torch.cuda.current_device())
