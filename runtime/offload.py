"""Swap a model's expert parameters for banks, so that the unmodified forward streams them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.utils import parametrize

from moepass.models.errors import InputError, OptionError, one_of
from moepass.passes.ir import BANK_TENSOR, TensorSpec
from moepass.runtime.banks import Bank, BankStore, pack_bank
from moepass.runtime.homes import Home
from moepass.runtime.link import parse_link
from moepass.runtime.peer_home import PeerPacker
from moepass.runtime.peers import DEFAULT_TIMEOUT_S, PeerGroup

HOMES = ("host", "peer")


@dataclasses.dataclass(frozen=True)
class OffloadReport:
    """What `offload_experts` moved. Bytes at rest in this process, and bytes that the ring takes on `device`."""

    store: BankStore
    home: str
    layers: tuple[str, ...]
    home_bytes: int
    ring_bytes: int


class BankedParameter(nn.Module):
    """The parametrization of one expert tensor: gives the tensor of the complete bank whenever the model reads it.

    In a captured graph it leaves one `moepass::bank_tensor`, which the compiler turns into a prefetched gather. In
    eager mode it is a synchronous gather.
    """

    shard: torch.Tensor

    def __init__(self, store: BankStore, bank: int, index: int) -> None:
        super().__init__()
        self.register_buffer("shard", store.banks[bank].shard, persistent=False)
        self.store = store
        self.bank = bank
        self.index = index
        spec = store.banks[bank].spec
        tensor: TensorSpec = spec.tensors[index]
        # Constants of the captured graph; a tuple, so that Dynamo need not look into the store.
        self.arguments: tuple[Any, ...] = (
            store.number, bank, spec.name, index, tensor.name, tensor.offset_bytes,
            list(tensor.shape), tensor.torch_dtype, store.device,
        )  # fmt: skip
        if spec.expert_bounds:
            self.arguments += (spec.home, list(spec.expert_bounds), spec.nbytes)

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            read: torch.Tensor = BANK_TENSOR(self.shard, *self.arguments)
            return read
        if self.training and torch.is_grad_enabled():
            raise InputError(
                "offloaded experts are for inference, but the model is in training mode with gradients on; call "
                "model.eval(), and run it under torch.no_grad() or torch.inference_mode()"
            )
        return self.store.gather_now(self.bank)[self.index]

    def right_inverse(self, weights: torch.Tensor) -> torch.Tensor:
        """What stays behind in the module: nothing."""
        return weights.new_empty(0)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # Banks rest where they are, so model.to(...) may only do what fits them. Tried on no bytes at all.
        spec = self.store.banks[self.bank].spec.tensors[self.index]
        probe = fn(torch.empty(0, dtype=spec.torch_dtype))
        if probe.dtype != spec.torch_dtype or probe.device not in (torch.device("cpu"), self.store.device):
            raise InputError(
                f"offloaded experts stay {spec.torch_dtype} for {self.store.device}, but the model is being moved to "
                f"{probe.dtype} on {probe.device}; convert and place the model before offload_experts"
            )
        return self


def _bank_property(name: str) -> property:
    """In place of the property of `parametrize`, whose closure keeps the module alive for as long as its class lives.

    Compiled code keeps the class alive, and with it would keep every bank of a model that is long gone.
    """

    def read(self: nn.Module) -> torch.Tensor:
        tensor: torch.Tensor = self.parametrizations[name]()  # type: ignore[index, operator]
        return tensor

    def write(self: nn.Module, value: object) -> None:
        raise InputError(f"`{name}` was offloaded and rests in a bank; change expert weights before offload_experts")

    return property(read, write)


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `module` that form a bank: empty unless it holds at least two expert matrices [experts, ., .].

    Told by shape, not by class: an up projection [E, a, b] and a down projection whose widths fit it, with every
    further parameter whose first dimension is E (biases).
    """
    own = {name: value for name, value in module.named_parameters(recurse=False) if value.dim() >= 1}
    matrices = {name: value for name, value in own.items() if value.dim() == 3 and value.is_floating_point()}
    experts = {value.shape[0] for value in matrices.values()}
    if len(matrices) < 2 or len(experts) != 1 or experts == {1}:
        return {}
    (count,) = experts
    widths = [set(value.shape[1:]) for value in matrices.values()]
    if not set.intersection(*widths):
        return {}
    return {name: value for name, value in own.items() if value.shape[0] == count and value.is_floating_point()}


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of `model` that hold expert banks, by path, in the model's order."""
    return {path: module for path, module in model.named_modules() if expert_parameters(module)}


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
    slots: int = 2,
    link: str = "real",
    group: ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> OffloadReport:
    """Move the experts of `model` to `home`; its unmodified forward then gathers them, layer by layer, on `device`.

    Compiled with backend "asyncep" the gathers are prefetched through a ring of `slots` slots. `device` defaults to
    the device of the model's other parameters; `link="emulate:BYTES_PER_S"` makes transfers take that long (CPU only).
    The model is changed in place; afterwards its state_dict no longer holds the experts.

    home="host": complete banks in memory of this process.
    home="peer": each rank of `group` (default: all ranks of torch.distributed, which must be initialised) keeps 1/N of
    every bank in shared memory and copies the rest from the others when it needs it; an emulated link counts these
    bytes only. All ranks call this, each with the complete model. They wait for each other here, each time for
    `timeout_s` at most, and never again: afterwards ranks run as many steps as they like, when they like. Not on CUDA
    yet.

    Raises OptionError (unknown home, slots below 1, a malformed link or timeout) and InputError (no experts, a missing
    device, no process group). For home="peer" also PeerError where ranks are missing or differ in what they bring, and
    SharedMemoryError where the machine has none; the model is then as it was, unless a rank is lost after all agreed.
    """
    if home not in HOMES:
        raise OptionError(f"home is {home!r}; it must be one of {one_of(HOMES)}")
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
        raise OptionError(f"slots is {slots!r}; a ring needs at least 1, and 2 to overlap transfers with computation")
    found = find_expert_modules(model)
    if not found:
        banked = any(isinstance(module, BankedParameter) for module in model.modules())
        raise InputError(
            f"{type(model).__name__} has no expert weights to offload: "
            + ("they were offloaded before" if banked else "no module holds matrices of shape [experts, ., .]")
        )
    compute_device = resolve_device(model, device)
    parsed_link = parse_link(link)
    packer = _packer(home, compute_device, group, timeout_s)
    packer.agree({path: expert_parameters(module) for path, module in found.items()})
    store = BankStore(compute_device, slots, parsed_link, packer.home)
    for index, (path, module) in enumerate(found.items()):
        parameters = expert_parameters(module)
        store.banks.append(packer.pack(index, path, parameters))
        for position, name in enumerate(parameters):
            parameters[name].requires_grad_(False)
            parametrization = BankedParameter(store, index, position)
            parametrization.train(module.training)
            parametrize.register_parametrization(module, name, parametrization, unsafe=True)
            setattr(type(module), name, _bank_property(name))
    packer.connect(store.banks)
    return OffloadReport(store, home, tuple(found), store.home_bytes, store.ring_bytes)


def _packer(home: str, device: torch.device, group: ProcessGroup | None, timeout_s: float) -> Packer:
    if home == "host":
        if group is not None:
            raise OptionError("home is 'host', which concerns one process alone; a group goes with home='peer'")
        return HostPacker(pin=device.type == "cuda")
    if device.type != "cpu":
        raise InputError(f"device is {device}; home='peer' works on cpu only so far, use home='host' there")
    return PeerPacker(PeerGroup.of(group, timeout_s))


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
    except RuntimeError:
        raise InputError(f"device is {str(device)!r}; it must be cpu, cuda or cuda:INDEX") from None
    if resolved.type not in ("cpu", "cuda", "meta"):
        raise InputError(f"device is {str(device)!r}; experts stream to cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        raise InputError(f"device is {str(device)!r}, but this machine has {count or 'no'} CUDA devices; use cpu")
    # An index makes devices comparable: tensors on "cuda" say "cuda:0".
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
