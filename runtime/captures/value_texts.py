"""Describe a model and its values as data that is equal where installed code behaves the same.

Code is described by its name only: captures are stored only by processes that run installed code (see
`process_code`). A value without a stable text raises NotStorableError.
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
# Attributes of every module: children and tensors are described one by one, and hooks by their functions, because
# the ids of hooks differ between processes.
_WALKED = {"_modules", "_parameters", "_buffers"}
_HOOKS = "_hooks"
# Suffixes of attributes that hold the ids of some of the hooks.
_OF_SOME_HOOKS = ("_with_kwargs", "_always_called")
# Attributes that do not count: values of Python's `hash`, which differ between processes, and marks of Dynamo.
_NOT_COMPARED = {"_original_object_hash", "_dynamo_static_input_type", "_torchdynamo_wrapper_id"}


class Description:
    """Builds canonical descriptions of values.

    An object that was described before is written as its number, which also ends cycles.
    """

    def __init__(self) -> None:
        # Tensors in the order in which they were described.
        self.tensors: list[torch.Tensor] = []
        self._known: dict[int, int] = {}
        # Objects are identified by their addresses, so they must stay alive.
        self._kept: list[object] = []

    def value(self, value: Any, where: str) -> Any:
        """Return the description of `value`.

        Raises NotStorableError, which names the path `where` it cannot be described.
        """
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
            # A class that is created at run time, as for parametrizations, depends only on its bases and its objects.
            return [_name_of(base) for base in value.__mro__]
        reference = self._number(value)
        if reference is not None:
            return reference
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
            return [_name_of(value), *(self.value(item, where) for item in parts)]
        return [self.value(kind, where), *self._content(value, where)]

    def _content(self, value: Any, where: str) -> list[Any]:
        """Return the items and members of an object."""
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
            raise NotStorableError(
                f"{where} is of type {_name_of(type(value))}, whose objects have state that cannot be read"
            )
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
                parts[name] = [index for index, number in enumerate(hooks) if number in value]
            else:
                parts[name] = self.value(value, f"{where}.{name}")
        return [self.value(type(module), where), parts]

    def _number(self, value: object) -> Any:
        """Return a reference to an earlier description of `value`, or None the first time."""
        if id(value) in self._known:
            return ["as before", self._known[id(value)]]
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        return None


def _parts(value: Any) -> list[Any] | None:
    """Return the parts that decide the behaviour of a callable or reference, or None for other values."""
    if isinstance(value, types.FunctionType):
        # Functions can share a name, as the lambdas of one function do.
        code = value.__code__
        identity = [code.co_firstlineno, *code.co_names, *(text for text in code.co_consts if type(text) in _SIMPLE)]
        return [identity, value.__defaults__, value.__kwdefaults__, _held(value), _compared(value)]
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
    """Return whether objects of this class have memory besides slots and `__dict__`, as classes written in C do."""
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
