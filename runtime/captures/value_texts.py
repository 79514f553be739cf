"""Texts of a model and of the values that it holds, equal where installed code that reads them does the same.

Code is named and not described: a process of which anything is stored runs installed code alone (see `process_code`).
A value without a stable text raises NotStorableError.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import re
import struct
import types
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.banks.banks import BankStore

_SIMPLE = (bool, int, float, complex, str, bytes, range, type(...), type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Of every module: what torch keeps in it, and what is described as the module's children and tensors. Hooks are
# described by their functions, because their numbers differ between processes.
_WALKED = {"_modules", "_parameters", "_buffers"}
_HOOKS = "_hooks"
# Behind that, in names of what torch keeps of some of the hooks.
_OF_SOME_HOOKS = ("_with_kwargs", "_always_called")
# Of objects: what transformers keeps of Python's `hash`, which differs between processes, and Dynamo of itself.
_NOT_COMPARED = {"_original_object_hash", "_dynamo_static_input_type", "_torchdynamo_wrapper_id"}


class Description:
    """Texts of values. A repeated object is replaced by its number, which also ends cycles."""

    def __init__(self) -> None:
        # In the order in which they are described.
        self.tensors: list[torch.Tensor] = []
        self._known: dict[int, int] = {}
        # What is known by its address must stay.
        self._kept: list[object] = []

    def value(self, value: Any, where: str) -> Any:
        """Raises NotStorableError, which names `where` the value without a text is."""
        kind = type(value)
        if kind in (bool, str) or value is None:
            return value
        if kind in _SIMPLE or isinstance(value, _OF_TORCH):
            return [kind.__name__, repr(value)]
        if isinstance(value, re.Pattern):
            return [kind.__name__, repr(value.pattern), value.flags]
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, (types.ModuleType, type(None))):
            return _name_of(value)
        if isinstance(value, type):
            # Of a class that is made later, as torch does for parametrizations, too: what it does, its objects hold.
            return [_name_of(base) for base in value.__mro__]
        known = self._number(value)
        if known is not None:
            return known
        if isinstance(value, nn.Module):
            return self._module(value, where)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return [*_describe_tensor(value, where), self._members(_compared(value), where)]
        if isinstance(value, BankStore):
            specs = [self.value(msgspec.to_builtins(bank.spec), where) for bank in value.banks]
            return ["banks", str(value.device), value.slots, _name_of(type(value.home)), specs]
        parts = _parts(value)
        if parts is not None:
            return [_name_of(value), *(self.value(part, where) for part in parts)]
        return [self.value(kind, where), *self._content(value, where)]

    def _content(self, value: Any, where: str) -> list[Any]:
        """Items and members of an object."""
        items: list[Any] = []
        if isinstance(value, Mapping):
            items = [[self.value(key, where), self.value(item, where)] for key, item in value.items()]
            items.append(self.value(getattr(value, "default_factory", None), where))
        elif isinstance(value, (set, frozenset)):
            items = [self.value(item, where) for item in sorted(value, key=repr)]
        elif isinstance(value, (list, tuple, collections.deque)):
            items = [self.value(item, where) for item in value]
        elif isinstance(value, (bool, int, float, complex, str, bytes)):
            items = [[base.__name__, base.__repr__(value)] for base in _SIMPLE[:6] if isinstance(value, base)]
        elif _has_hidden_state(type(value)):
            raise NotStorableError(f"{where} is of type {_name_of(type(value))}, of which not all can be compared")
        slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
        return [items, self._members({**slots, **_compared(value)}, where)]

    def _members(self, members: Mapping[str, Any], where: str) -> Any:
        return [[name, self.value(item, f"{where}.{name}")] for name, item in members.items()]

    def _module(self, module: nn.Module, where: str) -> Any:
        parts: dict[str, Any] = {}
        for name, value in vars(module).items():
            if name in _WALKED:
                parts[name] = self._members(value, where)
            elif name.endswith(_HOOKS):
                parts[name] = [self.value(item, f"{where}.{name}") for item in value.values()]
            elif name.endswith(_OF_SOME_HOOKS):
                hooks = vars(module)[name[: name.index(_HOOKS) + len(_HOOKS)]]
                parts[name] = [place for place, number in enumerate(hooks) if number in value]
            else:
                parts[name] = self.value(value, f"{where}.{name}")
        return [self.value(type(module), where), parts]

    def _number(self, value: object) -> Any:
        """What `value` was called, where it was described before."""
        if id(value) in self._known:
            return ["as before", self._known[id(value)]]
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        return None


def _parts(value: Any) -> list[Any] | None:
    """What decides what a value of a known kind does; None for other kinds."""
    if isinstance(value, types.FunctionType):
        # Tells functions of one name apart, as the lambdas of one function.
        code = value.__code__
        place = [code.co_firstlineno, *code.co_names, *(text for text in code.co_consts if type(text) in _SIMPLE)]
        return [place, value.__defaults__, value.__kwdefaults__, _held(value), _compared(value)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords, _compared(value)]
    if isinstance(value, weakref.ref):
        return [value()]
    return None


def _held(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


def _compared(value: object) -> dict[str, Any]:
    return {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in _NOT_COMPARED}


def _has_hidden_state(kind: type) -> bool:
    """Whether its objects have memory beside slots and a dictionary, as those of classes written in C."""
    pointers = len(_slots_of(kind)) + sum(offset > 0 for offset in (kind.__dictoffset__, kind.__weakrefoffset__))
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + struct.calcsize("P") * pointers


def _slots_of(kind: type) -> list[str]:
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    return names


def _describe_tensor(value: torch.Tensor, where: str) -> list[Any]:
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, nn.Parameter):
        raise NotStorableError(f"{where} is a {type(value).__name__} of layout {value.layout}")
    layout = [list(value.shape), list(value.stride())]
    return [type(value).__name__, str(value.dtype), str(value.device), layout, value.requires_grad]


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', None) or type(value).__qualname__}"
