"""Modules whose expert parameters rest in a bank: reading, state_dict, and moves to other devices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from moepass.models.errors import InputError
from moepass.models.homes import home_named
from moepass.passes.ir.plan import BankSpec, TensorSpec
from moepass.passes.ir.slot_operations import BANK_TENSOR
from moepass.runtime.banks.banks import BankStore, refuse_copy
from moepass.runtime.transfer.lanes import finish_on

# An attribute of the module's class: the derived classes by the names of their banked parameters. It must live as long
# as that class.
_CLASSES = "_moepass_banked_classes"


class BankedParameter(nn.Module):
    """The parametrization of one expert tensor, which reads the tensor of the complete bank.

    In a captured graph a read becomes one `moepass::bank_tensor`, which the compiler turns into a prefetched gather. In
    eager mode it is a synchronous gather. `bank` is an index in the store, and `index` an index in the bank.
    """

    shard: torch.Tensor

    def __init__(self, store: BankStore, bank: int, index: int) -> None:
        super().__init__()
        self.register_buffer("shard", store.bank(bank).shard, persistent=False)
        self.store, self.bank, self.index = store, bank, index
        spec = store.bank(bank).spec
        tensor = self.spec
        # Dynamo guards on the layout, so parameters with equal layouts share code.
        self.layout: tuple[Any, ...] = (
            index, tensor.name, tensor.offset_bytes, list(tensor.shape), tensor.torch_dtype, store.device,
        )  # fmt: skip
        # The rest is left out where the operator's defaults apply.
        if spec.home != "host" or spec.expert_bounds or spec.format.is_encoded:
            sizes = [spec.format.home_bytes, spec.format.link_bytes, spec.format.slot_bytes]
            self.layout += (spec.home, list(spec.expert_bounds), sizes, spec.format.decoder)
        self.slots = store.slots

    @property
    def spec(self) -> TensorSpec:
        """Shape, dtype and offset of the tensor in its bank."""
        return self.store.bank(self.bank).spec.tensors[self.index]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def moepass_bank(self) -> tuple[int, int, str]:
        """Return store number, bank index and bank name, the arguments of `moepass::bank_tensor`, without a guard.

        With a guard, Dynamo would recompile for each layer and each model, and reach its limit after a few. A graph
        that runs with another bank than at capture recognises the bank by its input, the shard: see `Executor`.
        """
        return self.store.number, self.bank, self.store.bank(self.bank).spec.name

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        """Return the complete tensor; `original` is an empty placeholder. Raises InputError in training mode."""
        if torch.compiler.is_compiling():
            # Reading `slots` makes Dynamo guard on it, because the plan depends on it.
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
        """Return the tensor as a view of the bank. Raises InputError unless this process can write the whole bank."""
        bank = self.store.bank(self.bank)
        reason = _why_not_writable(bank.spec)
        if reason:
            remedy = "take or load a state_dict before offload_experts, or use home='host'"
            if bank.spec.format.is_encoded:
                remedy = "take a state_dict from a model that transformers' from_pretrained loaded"
            raise InputError(f"the experts of {bank.spec.name} {reason}: {remedy}", name=bank.spec.name)
        with torch.inference_mode(False):
            return self.spec.view(bank.shard)

    def check_move(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise InputError if `convert` would change the dtype or the device of the experts."""
        # Banks do not move: model.to(...) must keep dtype and device, which applying it to an empty tensor shows.
        dtype = self.spec.torch_dtype
        probe = convert(torch.empty(0, dtype=dtype))
        if probe.dtype != dtype or probe.device not in (torch.device("cpu"), self.store.device):
            raise InputError(
                f"offloaded experts are {dtype} for {self.store.device} and cannot be moved to {probe.dtype} on "
                f"{probe.device}; convert and place the model before offload_experts",
                value=(probe.dtype, probe.device),
                expected=(dtype, self.store.device),
            )

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self.check_move(fn)
        return self


def _why_not_writable(bank: BankSpec) -> str:
    """Return why this process cannot write the tensors of `bank`, as the end of a sentence; empty if it can."""
    home = home_named(bank.home)
    if home.is_in_files:
        return "rest in files, which moepass only reads"
    if home.staging_buffers:
        return "are staged from shards that must not change"
    if len(bank.expert_bounds) > 2:
        return f"are spread over {len(bank.expert_bounds) - 1} ranks, and this rank has only its own shard"
    return f"rest encoded ({bank.format.decoder})" if bank.format.is_encoded else ""


class _BankParametrizations(ParametrizationList):
    """The parametrizations of one parameter: exactly its bank, with no second one on top.

    Adapters (peft's `target_parameters`) add theirs in every forward and remove them afterwards. They do not expect a
    bank underneath: peft leaves some parametrizations behind, so that the next forward would add them twice, and torch
    would remove the bank with them. A graph would keep the adapters of the forward in which it was captured.
    """

    def __init__(self, name: str, bank: BankedParameter, nothing: nn.Parameter) -> None:
        super().__init__([bank], nothing, unsafe=True)
        self.name = name

    @property
    def is_tensor(self) -> bool:
        """True if the parameter is one tensor. torch reads this before removing parametrizations, and gets an error."""
        if "name" not in vars(self):
            return True  # the constructor is running
        raise InputError(
            f"the parametrization of `{self.name}` is the bank that it was offloaded to, and cannot be removed; load "
            "the model again to get it without a bank",
            name=self.name,
        )

    @is_tensor.setter
    def is_tensor(self, value: bool) -> None:
        pass

    def append(self, module: nn.Module) -> NoReturn:
        raise InputError(
            f"{type(module).__name__} changes the expert weights `{self.name}` while the model runs, but they rest in "
            "a bank, which does not change; merge adapters into the model before offload_experts (in peft: model = "
            "model.merge_and_unload())",
            name=self.name,
        )

    def forward(self) -> torch.Tensor:
        tensor: torch.Tensor = self[0](self.original)
        return tensor


def bank_parameters(module: nn.Module, banked: Mapping[str, BankedParameter]) -> None:
    """Let `module` read the parameters with these names from their bank.

    The parameter objects do not change, because other code may reference them.
    """
    lists = {}
    for name, parametrization in banked.items():
        parameter = getattr(module, name)
        nothing = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device), requires_grad=False)
        lists[name] = _BankParametrizations(name, parametrization, nothing).train(module.training)
    for name in banked:
        del module._parameters[name]
    if "parametrizations" not in module._modules:
        module.register_module("parametrizations", nn.ModuleDict().train(module.training))
    module.parametrizations.update(lists)  # type: ignore[operator, union-attr]
    module.__class__ = _banked_class(type(module), tuple(banked))
    module.register_state_dict_post_hook(_show_experts)
    module.register_load_state_dict_pre_hook(_load_experts)


def _banked_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return one class for all modules with the same base and names, because Dynamo recompiles for every class."""
    if _CLASSES not in vars(base):
        setattr(base, _CLASSES, {})
    classes: dict[tuple[str, ...], type[nn.Module]] = vars(base)[_CLASSES]
    if names not in classes:
        members: dict[str, Any] = {name: _bank_property(name) for name in names}
        members |= {"__module__": base.__module__, "__reduce_ex__": _refuse_pickle, "__copy__": _shallow_copy}
        classes[names] = type(f"Parametrized{base.__name__}", (base,), members)
    return classes[names]


def _refuse_pickle(self: nn.Module, protocol: object) -> NoReturn:
    refuse_copy()


def _shallow_copy(self: nn.Module) -> nn.Module:
    """Return a module with the same banks, as `copy.copy` would without our `__reduce_ex__`."""
    twin = type(self).__new__(type(self))
    twin.__setstate__(dict(vars(self)))
    return twin


def _bank_property(name: str) -> property:
    """Return a property that reads `name` from its bank.

    The property of `torch.nn.utils.parametrize` has a closure that keeps the module alive as long as its class.
    Compiled code keeps the class alive, and with it would keep the banks of a deleted model.
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
    """Yield name and parametrization of each parameter of `module` itself that rests in a bank."""
    for name, parametrizations in getattr(module, "parametrizations", {}).items():
        if isinstance(parametrizations[0], BankedParameter):
            yield name, parametrizations[0]


def _original(prefix: str, name: str) -> str:
    """Return the state_dict key of the empty placeholder of a parametrized parameter."""
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
        value, target = state.pop(key), banked.resting()
        if value.shape != target.shape:
            errors.append(
                f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
                f"the shape in current model is {target.shape}."
            )
            continue
        device = banked.store.device
        # Copies that were issued before may still read the old values.
        finish_on(device)
        with torch.no_grad():
            target.copy_(value)
        # The copy stream of a ring does not wait for the stream of this write.
        finish_on(device)


class _CheckedApply:
    """A replacement of `_apply` in a module that contains banks: a move that one bank refuses changes no module.

    `_apply` works module by module, so a refusal in the middle would leave the modules before it converted.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)  # the module references this object

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *arguments: Any, **keywords: Any) -> Any:
        module = self.module()
        assert module is not None
        for banked in {(banked.spec.dtype, banked.store.device): banked for banked in _banked_below(module)}.values():
            banked.check_move(fn)
        return type(module)._apply(module, fn, *arguments, **keywords)

    def __reduce__(self) -> NoReturn:
        refuse_copy()


def _banked_below(module: nn.Module) -> Iterator[BankedParameter]:
    return (child for child in module.modules() if isinstance(child, BankedParameter))


def check_before_moving(model: nn.Module) -> None:
    """Let every module of `model` that contains banks check a move before it converts anything."""
    for module in model.modules():
        if not isinstance(module, BankedParameter) and next(_banked_below(module), None) is not None:
            module.__dict__["_apply"] = _CheckedApply(module)
