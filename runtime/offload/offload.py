"""Swap a model's expert parameters for banks, so that the unmodified forward streams them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from moepass.models.errors import InputError, OptionError
from moepass.passes.machine.hardware import Hardware
from moepass.runtime.banks.banked_modules import BankedParameter, bank_parameters, banked_parameters, move_as_a_whole
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.banks.whole_models import keep_whole_model_store
from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.homes.host_home import Packer
from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.homes.registry.home_options import BankRoute, HomeOptions
from moepass.runtime.homes.registry.packers import make_packer, options_of
from moepass.runtime.offload.placement import Placement, PlanWish, place
from moepass.runtime.offload.residents import Residents
from moepass.runtime.ranks.agree import agree
from moepass.runtime.transfer.link import parse_link

# What ranks compare first: what all of them decide their plans by.
_PLAN = "plan of its layers"


@dataclasses.dataclass(frozen=True)
class OffloadReport:
    """What `offload_experts` moved. Bytes at rest in this process, and bytes that the ring takes on `device`, at most:
    graphs that read this rank's own experts where they rest need smaller slots. With home `hybrid` the staging buffers
    take `staging_bytes` there.

    `layers` moved; `resident_layers` stayed as they were.
    """

    store: BankStore
    home: str
    layers: tuple[str, ...]
    home_bytes: int
    ring_bytes: int
    resident_layers: tuple[str, ...] = ()
    staging_bytes: int = 0

    @property
    def transport(self) -> str:
        """The transport that moves bytes from the home into a slot: `host`, `pull` or `collective`."""
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


def expert_weights(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that form banks."""
    return [value for module in find_expert_modules(model).values() for value in expert_parameters(module).values()]


def split_layers(model: nn.Module, residents: Residents) -> tuple[dict[str, list[nn.Module]], tuple[str, ...]]:
    """Layers that move and layers that stay: the modules of each bank by path, and the paths of the `residents`.

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
    """What stays of `model` and how many slots there are.

    Raises as `place`, OptionError for fewer than 1 slot, and InputError for a model without experts.
    """
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
        raise OptionError(
            f"slots is {slots!r}; a ring needs at least 1, and 2 to overlap transfers with computation",
            name="slots",
            value=slots,
            expected="at least 1",
        )
    banks = _in_banks(find_expert_modules(model))
    if not banks:
        banked = any(isinstance(module, BankedParameter) for module in model.modules())
        reason = (
            "they were offloaded before"
            if banked
            else "no module holds two matrices [experts, ., .] with a width in common, as an up and a down projection "
            "have, or one holds matrices with different numbers of experts"
        )
        raise InputError(f"{type(model).__name__} has no expert weights to offload: {reason}")
    return place(
        model, {path: expert_parameters(modules[0]) for path, modules in banks.items()}, wish, route, residents, slots
    )


def _in_banks(found: Mapping[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """The modules of each bank, by the path of the first: more than one where they share all of its parameters."""
    banks: dict[tuple[tuple[str, int], ...], tuple[str, list[nn.Module]]] = {}
    for path, module in found.items():
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
) -> OffloadReport:
    """Move the experts of `model` to `home`; its unmodified forward then gathers them, layer by layer, on `device`.

    The model is changed in place. Compiled with backend "asyncep" it copies the experts of the next layers while a
    layer computes; uncompiled it waits for each copy. The state_dict holds the experts as before where this process
    has them all. Layers that share all parameters of their experts share a bank.

    Args:
        model: any module with expert weights [experts, ., .], already converted, merged and placed.
        home: where the experts rest: `"host"`, `"peer"`, `"hybrid"` or `"disk"`, or, for other options than the
            defaults, one of `moepass.Host`, `Peer`, `Hybrid` and `Disk`. With `peer` and `hybrid` all ranks call this,
            each with the complete model.
        device: where the model computes. None: where its other parameters lie.
        slots: buffers on `device`, each for the experts of one layer. 2 overlap copies with computation, 1 takes less
            memory, and more than a few hide no more. None: 2, or what the planner chooses for a memory budget.
        resident_bytes: the first layers whose experts fit into so many bytes together stay on `device`, on every rank.
            Memory that is left is well spent on it: the stream has their compute time to begin with.
        resident_layers: the layers that stay instead, by the numbers in their modules' paths, as `moepass explain`
            gives them.
        memory_budget: bytes, or text such as "6GB" or "512MiB", on `device` for this process: dense weights, layers
            that stay, slots, staging buffers, this rank's shards where they lie there, and activations. The planner
            then decides which layers stay: the fastest step whose memory fits. Banks at rest in host memory or in files
            do not count, even where the device is the CPU.
        hardware: the machine that is planned for, a preset or a profile. None: the profile that `moepass calibrate` has
            stored for this machine. Without one, or for a family whose sizes are not known, nothing is predicted, and
            layers that stay are spread evenly over the model.
        tokens: those of a step that is planned for: a number, or the number of sequences and the tokens of each. None:
            one sequence of 4096.

    Returns:
        What rests where, and how many bytes that takes.

    Raises:
        OptionError: an unknown home, fewer slots than 1, no number of bytes, layers or tokens, a memory budget beside
            layers that are to stay.
        InputError: a model without experts, or whose experts would all stay; a missing device, or one that cannot
            compute from that home yet; a budget that is too small; a profile without a link or rate that is needed; no
            process group; home `disk` without a folder where it needs one, or without room. The model is then as it
            was.
        PeerError: ranks are missing, or differ in what they bring. The model is then as it was, unless a rank is lost
            after all agreed. Ranks that missed each other cannot use their group again.
        SharedMemoryError: ranks on this machine can have no memory in common. The model is then as it was.
    """
    options = options_of(home)
    given = Residents(resident_bytes, resident_layers)
    compute_device = resolve_device(model, device)
    route = options.route(compute_device)
    packer = make_packer(options, compute_device)
    meeting = packer.group.rendezvous if isinstance(packer, PeerPacker) else None
    with meeting.telling_failures() if meeting is not None else contextlib.nullcontext():
        wish = PlanWish(memory_budget, hardware, tokens)
        placement = place_experts(model, wish, route, given, slots)
    if meeting is not None:
        deque(agree(meeting, _PLAN, placement.topics), maxlen=0)
    return move_experts(model, options, packer, compute_device, given, placement)


def move_experts(
    model: nn.Module,
    options: HomeOptions,
    packer: Packer,
    device: torch.device,
    given: Residents,
    placement: Placement,
) -> OffloadReport:
    """`offload_experts` of a model for which all ranks have decided `placement`, where `given` was to stay.

    `packer` is that of `options`. Raises as `offload_experts`.
    """
    banks, resident = split_layers(model, placement.residents)
    if resident and not banks and given.is_given:
        raise given.complaint(len(resident))
    store = BankStore(device, placement.slots, parse_link(options.link), packer.home)
    store.placed = placement.placed
    if not banks:  # all of them fit into the memory budget
        keep_whole_model_store(expert_weights(model), store)
        return OffloadReport(store, options.home, (), 0, 0, resident)
    with torch.inference_mode(False), torch.no_grad():
        packer.agree({path: expert_parameters(modules[0]) for path, modules in banks.items()})
        for index, (path, modules) in enumerate(banks.items()):
            _bank(store, packer, index, path, modules)
        move_as_a_whole(model)
        packer.connect(store.banks)
    if isinstance(packer.home.transport, CollectiveTransport):
        _mark_forwards(model, packer.home.transport)
    keep_whole_model_store(expert_weights(model), None)
    staging_bytes = packer.home.staging_bytes
    return OffloadReport(store, options.home, tuple(banks), store.home_bytes, store.ring_bytes, resident, staging_bytes)


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
    """Make an eager call of `module` gather once, whatever was called before: the other ranks count on it."""
    if not torch.compiler.is_compiling():
        for _, banked in banked_parameters(module):
            banked.store.forget_gathered()


def _mark_forwards(model: nn.Module, transport: CollectiveTransport) -> None:
    """Tell `transport` when an eager forward of `model` begins and ends."""

    # Compiled, neither does anything: there a run is what a graph runs.
    def begin(module: nn.Module, arguments: object) -> None:
        if not torch.compiler.is_compiling():
            transport.begin_forward()

    def end(module: nn.Module, arguments: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            transport.end_forward()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


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
        raise InputError.wrong("device", device, "cpu, cuda or cuda:INDEX") from None
    if resolved.type not in ("cpu", "cuda", "meta"):
        raise InputError.wrong("device", str(device), "cpu or cuda, to which experts stream")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        raise InputError(
            f"device is {str(device)!r}, but this machine has {count or 'no'} CUDA devices; use cpu",
            name="device",
            value=str(device),
            expected="cpu",
        )
    # An index makes devices comparable: tensors on "cuda" say "cuda:0".
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


__all__ = [
    "BankedParameter", "OffloadReport", "check_device", "expert_parameters", "expert_weights", "find_expert_modules",
    "move_experts", "offload_experts", "place_experts", "resolve_device", "split_layers",
]  # fmt: skip
