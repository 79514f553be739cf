"""A module whose expert parameters rest in a bank: how it reads them, its state_dict, and how far it may move."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from moepass.models.errors import InputError
from moepass.models.homes import home_named
from moepass.passes.ir.plan import TensorSpec
from moepass.passes.ir.slot_operations import BANK_TENSOR
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.transfer.streams import finish_on

# The class of a module with banked parameters, by the names of these; an attribute of the module's own class, so that
# it lives as long as that.
_CLASSES = "_moepass_banked_classes"


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
        tensor = self.spec
        # Dynamo guards these: code is shared by parameters for which they are equal.
        self.layout: tuple[Any, ...] = (
            index, tensor.name, tensor.offset_bytes, list(tensor.shape), tensor.torch_dtype, store.device,
        )  # fmt: skip
        # Leave these out where the operator's defaults apply.
        if spec.home != "host" or spec.expert_bounds or spec.format.is_encoded:
            sizes = [spec.format.home_bytes, spec.format.link_bytes, spec.format.slot_bytes]
            self.layout += (spec.home, list(spec.expert_bounds), sizes, spec.format.decoder)
        self.slots = store.slots

    @property
    def spec(self) -> TensorSpec:
        return self.store.banks[self.bank].spec.tensors[self.index]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def moepass_bank(self) -> tuple[int, int, str]:
        """Which bank this is, as `moepass::bank_tensor` says it: a constant without a guard.

        With a guard, Dynamo would compile each layer and each model anew, and give up after a few. A graph that serves
        another bank than it was captured with is told so by its input, the shard: see `Executor`.
        """
        return self.store.number, self.bank, self.store.banks[self.bank].spec.name

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            # Reading `slots` makes Dynamo guard on it: the plan depends on it.
            assert self.slots >= 1
            store, bank, name = self.moepass_bank()
            read: torch.Tensor = BANK_TENSOR(self.shard, store, bank, name, *self.layout)
            return read
        if self.training and torch.is_grad_enabled():
            raise InputError(
                "offloaded experts are for inference, but the model is in training mode with gradients on; call "
                "model.eval(), and run it under torch.no_grad() or torch.inference_mode()"
            )
        return self.store.gather_now(self.bank)[self.index]

    def resting(self) -> torch.Tensor:
        """The tensor in the bank, a view. Raises InputError where this process has only a part of it."""
        bank = self.store.banks[self.bank]
        home = home_named(bank.spec.home)
        if home.is_in_files:
            raise InputError(
                f"the experts of {bank.spec.name} rest in files, which are read and never written: take or load a "
                "state_dict before offload_experts, or use home='host'",
                name=bank.spec.name,
            )
        if home.staging_buffers:
            raise InputError(
                f"the experts of {bank.spec.name} are staged from shards that must not change: take or load a "
                "state_dict before offload_experts, or use home='host'",
                name=bank.spec.name,
            )
        if len(bank.spec.expert_bounds) > 2:
            raise InputError(
                f"the experts of {bank.spec.name} lie in shards on {len(bank.spec.expert_bounds) - 1} ranks, and this "
                "rank has only its part of them: take or load a state_dict before offload_experts, or use home='host'",
                name=bank.spec.name,
            )
        if bank.spec.format.is_encoded:
            raise InputError(
                f"the experts of {bank.spec.name} rest encoded ({bank.spec.format.decoder}): take or load a state_dict "
                "before offload_experts",
                name=bank.spec.name,
            )
        with torch.inference_mode(False):
            return self.spec.view(bank.shard)

    def check_move(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raises InputError where `convert` would change the type or the place of the experts."""
        # Banks rest where they are, so model.to(...) may only do what fits them. Tried on no bytes at all.
        dtype = self.spec.torch_dtype
        probe = convert(torch.empty(0, dtype=dtype))
        if probe.dtype != dtype or probe.device not in (torch.device("cpu"), self.store.device):
            raise InputError(
                f"offloaded experts stay {dtype} for {self.store.device}, but the model is being moved to "
                f"{probe.dtype} on {probe.device}; convert and place the model before offload_experts",
                value=(probe.dtype, probe.device),
                expected=(dtype, self.store.device),
            )

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self.check_move(fn)
        return self


class _OneBank(ParametrizationList):
    """The parametrizations of one parameter: its bank, and nothing that would change what the model reads of it.

    Adapters (peft's `target_parameters`) add theirs in every forward and take it away afterwards. What takes it away
    does not expect a bank beneath: peft leaves some behind, so that the next forward would add them twice, and torch
    takes away the bank with them. A graph would keep those of the forward in which it was captured.
    """

    def __init__(self, name: str, bank: BankedParameter, nothing: nn.Parameter) -> None:
        super().__init__([bank], nothing, unsafe=True)
        self.name = name

    @property
    def is_tensor(self) -> bool:
        """What torch asks before it removes parametrizations, and puts back a parameter that is no more."""
        if "name" not in vars(self):
            return True  # while this is made
        raise InputError(
            f"the parametrization of `{self.name}` is the bank that it was offloaded to, and cannot be removed; load "
            "the model anew to have it without",
            name=self.name,
        )

    @is_tensor.setter
    def is_tensor(self, value: bool) -> None:
        """Set by torch, which tells by it how many tensors a parameter is made of."""

    def append(self, module: nn.Module) -> NoReturn:
        raise InputError(adapter_refusal(self.name, type(module).__name__), name=self.name)

    def forward(self) -> torch.Tensor:
        tensor: torch.Tensor = self[0](self.original)
        return tensor


def adapter_refusal(name: str, what: str) -> str:
    """The remedy for `what`, which changes the expert parameter `name` in each forward."""
    return (
        f"{what} changes the expert weights `{name}` while the model runs, but these rest in a bank, which stays as it "
        "is; merge adapters into the model before offload_experts (in peft: model = model.merge_and_unload())"
    )


def bank_parameters(module: nn.Module, banked: Mapping[str, BankedParameter]) -> None:
    """Let `module` read the parameters with these names from their bank.

    The parameters themselves stay as they are, for whoever else holds them.
    """
    lists = {}
    for name, parametrization in banked.items():
        parameter = getattr(module, name)
        nothing = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device), requires_grad=False)
        lists[name] = _OneBank(name, parametrization, nothing).train(module.training)
    for name in banked:
        del module._parameters[name]
    if "parametrizations" not in module._modules:
        module.register_module("parametrizations", nn.ModuleDict().train(module.training))
    module.parametrizations.update(lists)  # type: ignore[operator, union-attr]
    module.__class__ = _banked_class(type(module), tuple(banked))
    module.register_state_dict_post_hook(_show_experts)
    module.register_load_state_dict_pre_hook(_load_experts)


def _banked_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """One class for all modules that are alike: Dynamo compiles anew for every class."""
    if _CLASSES not in vars(base):
        setattr(base, _CLASSES, {})
    known: dict[tuple[str, ...], type[nn.Module]] = vars(base)[_CLASSES]
    if names not in known:
        members: dict[str, Any] = {name: _bank_property(name) for name in names}
        members |= {"__module__": base.__module__, "__reduce_ex__": _refuse_pickle, "__copy__": _shallow_copy}
        known[names] = type(f"Parametrized{base.__name__}", (base,), members)
    return known[names]


def _refuse_pickle(self: nn.Module, protocol: object) -> NoReturn:
    raise InputError(
        "a model with offloaded experts cannot be copied or pickled: its banks and its ring belong to it alone; copy "
        "or save the model before offload_experts"
    )


def _shallow_copy(self: nn.Module) -> nn.Module:
    """Another module with the same banks, as `copy.copy` makes it where no `__reduce_ex__` is in the way."""
    twin = type(self).__new__(type(self))
    twin.__setstate__(dict(vars(self)))
    return twin


def _bank_property(name: str) -> property:
    """Not that of `parametrize`, whose closure keeps the module alive for as long as its class lives.

    Compiled code keeps the class alive, and with it would keep every bank of a model that is long gone.
    """

    def read(self: nn.Module) -> torch.Tensor:
        tensor: torch.Tensor = self.parametrizations[name]()  # type: ignore[index, operator]
        return tensor

    def write(self: nn.Module, value: object) -> None:
        raise InputError(
            f"`{name}` was offloaded and rests in a bank; change expert weights before offload_experts", name=name
        )

    return property(read, write)


def banked_parameters(module: nn.Module) -> Iterator[tuple[str, BankedParameter]]:
    """The parameters of `module` itself that rest in a bank, by name."""
    for name, parametrizations in getattr(module, "parametrizations", {}).items():
        if isinstance(parametrizations[0], BankedParameter):
            yield name, parametrizations[0]


def _original(prefix: str, name: str) -> str:
    """Where the state_dict of a parametrized module would have what it holds in place of the experts: nothing."""
    return f"{prefix}parametrizations.{name}.original"


def _show_experts(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name, banked in banked_parameters(module):
        state.pop(_original(prefix, name), None)
        state[prefix + name] = banked.resting()


def _load_experts(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: object, strict: bool, missing: list[str],
    unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    for name, banked in banked_parameters(module):
        key = prefix + name
        state[_original(prefix, name)] = module.parametrizations[name].original  # type: ignore[index, union-attr]
        if key not in state:
            missing.append(key)
            continue
        value, place = state.pop(key), banked.resting()
        if value.shape != place.shape:
            errors.append(
                f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {place.shape}."
            )
            continue
        device = banked.store.device
        # Copies of runs that were issued may still read the old values.
        finish_on(device)
        with torch.no_grad():
            place.copy_(value)
        # The copy stream of a ring does not wait for what wrote here.
        finish_on(device)


class _WholeMoves:
    """Replaces `_apply` of a module with banks below it: if one of them refuses a move, the move does not begin.

    `_apply` goes module by module, so without this whatever comes before the refusal would be converted.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)  # the module holds this object

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *arguments: Any, **keywords: Any) -> Any:
        module = self.module()
        assert module is not None
        for banked in {(below.spec.dtype, below.store.device): below for below in _banked_below(module)}.values():
            banked.check_move(fn)
        return type(module)._apply(module, fn, *arguments, **keywords)

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a model with offloaded experts cannot be copied or pickled; copy or save the model before offload_experts"
        )


def _banked_below(module: nn.Module) -> Iterator[BankedParameter]:
    return (below for below in module.modules() if isinstance(below, BankedParameter))


def move_as_a_whole(model: nn.Module) -> None:
    """Let every module of `model` with banks below it refuse a move before anything is converted."""
    for module in model.modules():
        if not isinstance(module, BankedParameter) and next(_banked_below(module), None) is not None:
            module.__dict__["_apply"] = _WholeMoves(module)


__all__ = ["BankedParameter", "bank_parameters", "banked_parameters", "move_as_a_whole"]
