"""Texts of values, equal where known code that reads the values does the same: attributes of modules, globals.

The code of packages is not described, because their versions are part of the key (see `known_code`). But a program may
have replaced what that code reads: values, functions, classes. So members are described where they are not as written.
A value without a stable text, and code that is not known, raise NotStorableError.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import logging
import os
import re
import struct
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.captures.known_code import check_known, is_known_class, is_known_file, is_known_module, is_of_torch

_SIMPLE = (bool, int, float, complex, str, bytes, range, type(...), type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Functions that are written in C, and types that only annotations have.
_NAMED = (
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias, types.UnionType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)

# Of every module: what torch keeps in it, and what is described as the module's children and tensors. Hooks are
# described by their code, because their numbers differ between processes.
_WALKED = {"_modules", "_parameters", "_buffers"}
_HOOKS = "_hooks"
# Of objects: what transformers keeps of Python's `hash`, which differs between processes, and Dynamo of itself.
_NOT_COMPARED = {"_original_object_hash", "_dynamo_static_input_type", "_torchdynamo_wrapper_id"}
# Of every class: what does not decide what its methods do, what Dynamo writes there, and what we do.
_NOT_READ = {"__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"}
_WRITTEN = ("___needs_generation_tag", "_moepass")
# Of nn.Module: what Dynamo replaces when it first compiles, and transformers adds where it initialises weights.
_TAGGED = {"__init__", "__setstate__", "smart_apply"}
# The flag of classes that a class statement made, and some of C.
_IS_OF_PYTHON = 1 << 9


def describe_names(names_of: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The values of `names_of` each file in this process, by file. The names come from `names_read`.

    Raises NotStorableError for a value without a stable text, and for a file that is not known, or that this process
    has not loaded.
    """
    modules: dict[str, list[dict[str, Any]]] = {}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and isinstance(file := vars(module).get("__file__"), str):
            modules.setdefault(os.path.abspath(file), []).append(vars(module))
    read = frozenset(name for names in names_of.values() for name in names)
    found = {}
    for file, names in sorted(names_of.items()):
        path = os.path.abspath(file)
        if not is_known_file(file):
            raise NotStorableError(f"{file}, whose code is not known by a version")
        if path not in modules:
            raise NotStorableError(f"{file}, of which this process has loaded no module")
        describe, texts = Description(read), []
        for values in modules[path]:
            here = {name: values[name] for name in sorted(names) if name in values}
            if is_of_torch(path):
                # Its own values change as it works. What a program may have replaced are functions and classes.
                texts.append(describe.replaced(values["__name__"], here))
            else:
                texts.append([[name, describe.value(value, f"{name} in {file}")] for name, value in here.items()])
        # A name that the code reads may be that of an environment variable.
        found[file] = [texts, [[name, os.environ[name]] for name in sorted(names) if name in os.environ]]
    return found


class Description:
    """Texts of values. A repeated object is replaced by its number, which also ends cycles."""

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        """`names` are those that traced code reads: of Python modules, only members of these names are described."""
        self._names = names
        self._known: dict[int, int] = {}
        # What is known by its address must stay.
        self._kept: list[object] = []
        self._described_modules: set[str] = set()

    def value(self, value: Any, where: str) -> Any:
        """Raises NotStorableError, which names `where` the value without a text is."""
        kind = type(value)
        if kind in (bool, str) or value is None:
            return value
        if kind in _SIMPLE or isinstance(value, _OF_TORCH):
            return [kind.__name__, repr(value)]
        if isinstance(value, types.CodeType):
            return _code_text(value)
        if isinstance(value, re.Pattern):
            return [kind.__name__, repr(value.pattern), value.flags]
        if isinstance(value, _NAMED):
            return [kind.__name__, str(value)]
        if isinstance(value, _BOUND) and (value.__self__ is None or isinstance(value.__self__, types.ModuleType)):
            return _name_of(value)
        if isinstance(value, types.ModuleType):
            return [value.__name__, self._python_module(value, where)]
        known = self._number(value)
        if known is not None:
            return known
        if isinstance(value, type):
            return self._class(value, where)
        if isinstance(value, nn.Module):
            return self._module(value, where)
        if isinstance(value, torch.Tensor):
            return [*_describe_tensor(value, where), self._members(_compared(value), where)]
        if isinstance(value, BankStore):
            specs = [self.value(msgspec.to_builtins(bank.spec), where) for bank in value.banks]
            return ["banks", str(value.device), value.slots, _name_of(type(value.home)), specs]
        parts = _parts(value, where)
        if parts is not None:
            return [_name_of(value), *(self.value(part, where) for part in parts)]
        return [self.value(kind, where), *self._content(value, where)]

    def replaced(self, owner: str, members: Mapping[str, Any]) -> list[Any]:
        """The functions, classes and modules among `members` of the module `owner` that are not its own."""
        kinds = (types.FunctionType, type, types.ModuleType)
        return self._owned(owner, {name: value for name, value in members.items() if isinstance(value, kinds)})

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
        slots = [slot for base in type(value).__mro__ for slot in _slots_of(base)]
        members = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
        return [items, self._members({**members, **_compared(value)}, where)]

    def _members(self, members: Mapping[str, Any], where: str) -> Any:
        return [[name, self.value(item, f"{where}.{name}")] for name, item in members.items()]

    def _module(self, module: nn.Module, where: str) -> Any:
        parts: dict[str, Any] = {}
        for name, value in vars(module).items():
            if name in _WALKED:
                parts[name] = self._members(value, where)
            elif name.endswith(_HOOKS):
                parts[name] = [self.value(item, f"{where}.{name}") for item in value.values()]
            else:
                parts[name] = self.value(value, f"{where}.{name}")
        return [self.value(type(module), where), parts]

    def _class(self, kind: type, where: str) -> Any:
        """Its name, and what is not as written in it and its bases.

        Of classes that a program makes, as torch does for parametrizations, all members: known functions and values.
        """
        members = []
        for base in kind.__mro__:
            if not base.__flags__ & _IS_OF_PYTHON:
                continue
            read = {
                name: value
                for name, value in sorted(vars(base).items())
                if name not in _NOT_READ and not name.startswith(_WRITTEN)
                if base is not nn.Module or name not in _TAGGED
            }
            is_known = is_known_class(base)
            members.append(self._owned(_name_of(base), read) if is_known else self._members(read, _name_of(base)))
        of_kind = [] if type(kind) is type else [self.value(type(kind), where)]
        return [_name_of(kind), [_name_of(base) for base in kind.__mro__], members, of_kind]

    def _python_module(self, module: types.ModuleType, where: str) -> Any:
        if not is_known_module(module.__name__):
            raise NotStorableError(
                f"{where} is the Python module {module.__name__}, whose code is not known by a version"
            )
        if module.__name__ in self._described_modules:
            return []
        self._described_modules.add(module.__name__)
        names = sorted(name for name in self._names & vars(module).keys() if not name.startswith("__"))
        return self._owned(module.__name__, {name: vars(module)[name] for name in names})

    def _owned(self, owner: str, members: Mapping[str, Any]) -> list[Any]:
        """Members of a known class or module: those that a program may have put there."""
        described = []
        for name, value in members.items():
            expected = f"{owner}.{name}"
            if isinstance(value, types.ModuleType):
                # Which of torch's modules are loaded, and so are members of others, changes as a program runs.
                # Those of other packages, as torch.os, nobody reads there.
                is_own = value.__name__.partition(".")[0] == owner.partition(".")[0]
                is_read = self._names and type(value) is types.ModuleType and is_own
                members_of_it = self._python_module(value, expected) if is_read else []
                described.extend([[name, members_of_it]] if members_of_it else [])
            elif not _is_as_written(value, expected):
                described.append([name, self._replaceable(value, expected)])
        return described

    def _replaceable(self, value: Any, where: str) -> Any:
        """What a program may have put in the place of a member; of anything else, the type."""
        if isinstance(value, types.FunctionType):
            # A decorator's function holds what it decorates.
            known = self._number(value)
            check_known(value.__code__, where)
            held = [self._replaceable(part, where) for part in _held(value)] if known is None else []
            return known or [_name_of(value), _code_text(value.__code__), *held]
        if isinstance(value, (staticmethod, classmethod)):
            return self._replaceable(value.__func__, where)
        if type(value) is property:
            return self._replaceable(value.fget, where)
        if isinstance(value, type) and is_known_class(value):
            return _name_of(value)
        # Of collections, those that hold texts or numbers alone.
        items = [*value, *value.values()] if type(value) is dict else value if type(value) in (list, tuple, set) else ()
        is_simple = type(value) in _SIMPLE or (bool(items) and all(type(item) in _SIMPLE for item in items))
        if is_simple or isinstance(value, (*_OF_TORCH, type)):
            return self.value(value, where)
        return _name_of(type(value))

    def _number(self, value: object) -> Any:
        """What `value` was called, where it was described before."""
        if id(value) in self._known:
            return ["as before", self._known[id(value)]]
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        return None


def _parts(value: Any, where: str) -> list[Any] | None:
    """What decides what a value of a known kind does; None for other kinds. Raises NotStorableError for other code."""
    if isinstance(value, types.FunctionType):
        check_known(value.__code__, where)
        return [value.__code__, value.__defaults__, value.__kwdefaults__, _held(value), _compared(value)]
    if isinstance(value, (types.MethodType, *_BOUND)):
        return [getattr(value, "__func__", None), value.__self__]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if type(value) is property:
        return [value.fget, value.fset]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords, _compared(value)]
    if isinstance(value, functools._lru_cache_wrapper):
        return [_compared(value)]  # among them the function
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, contextvars.ContextVar):
        return [value.name, *_current(value)]
    if isinstance(value, logging.Logger):
        return [value.name, value.getEffectiveLevel()]
    return None


def _code_text(code: types.CodeType) -> list[Any]:
    """Tells functions of one name apart, as the lambdas of one function."""
    constants = [_constant_text(constant) for constant in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), list(code.co_freevars), constants]


def _constant_text(constant: object) -> Any:
    if isinstance(constant, types.CodeType):
        return _code_text(constant)
    # The order of a set differs between processes.
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def _is_as_written(value: Any, expected: str) -> bool:
    """Whether it is a function or a class that stands in known sources under the name `expected`."""
    if isinstance(value, (staticmethod, classmethod)):
        return _is_as_written(value.__func__, expected)
    if isinstance(value, type):
        return is_known_class(value)
    is_plain = isinstance(value, types.FunctionType) and value.__closure__ is None
    return is_plain and is_known_file(value.__code__.co_filename) and _name_of(value) == expected


def _held(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


def _current(value: contextvars.ContextVar[Any]) -> list[Any]:
    try:
        return [value.get()]
    except LookupError:
        return []


def _compared(value: object) -> dict[str, Any]:
    return {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in _NOT_COMPARED}


def _has_hidden_state(kind: type) -> bool:
    """Whether its objects have memory beside slots and a dictionary, as those of classes written in C."""
    pointer = struct.calcsize("P")
    slots = sum(len(_slots_of(base)) for base in kind.__mro__)
    offsets = sum(offset > 0 for offset in (kind.__dictoffset__, kind.__weakrefoffset__))
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + pointer * (slots + offsets)


def _slots_of(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    own = [name for name in names if name not in ("__dict__", "__weakref__")]
    prefix = f"_{base.__name__.lstrip('_')}"
    return [prefix + name if name.startswith("__") and not name.endswith("__") else name for name in own]


def _describe_tensor(value: torch.Tensor, where: str) -> list[Any]:
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, nn.Parameter):
        raise NotStorableError(f"{where} is a {type(value).__name__} of layout {value.layout}")
    layout = [list(value.shape), list(value.stride())]
    return [type(value).__name__, str(value.dtype), str(value.device), layout, value.requires_grad]


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', None) or type(value).__qualname__}"
