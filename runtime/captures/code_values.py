"""Texts of values, equal where code that reads the values does the same: of attributes of modules, of globals, of code.

A file's text does not tell that a number in it came from the environment, that a function was replaced after the file
was read, or that the class of a model is one of the same name in another file. So values are described down to their
numbers, and objects with their classes. A value without a stable description raises NotStorableError. Classes and
modules of torch, transformers, NumPy and Python are known by their versions; of them, functions and simple values are
described, which a program may have replaced.
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
import sysconfig
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.torch_private import IMPORTED

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
_READ_ENVIRONMENT = (os.getenv, os.getenvb)
# The flag of classes that a class statement made, and some of C.
_IS_OF_PYTHON = 1 << 9
# The folders of this package, whose sources decide what is compiled.
OUR_PACKAGES = ("moepass", "moepass.models", "moepass.passes", "moepass.runtime")


def describe_names(names_of: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The values of `names_of` each file in this process, by file. The names come from `traced_names`.

    Raises NotStorableError for a value without a stable description, and for a file that this process has not loaded:
    the model's code then lies elsewhere.
    """
    modules: dict[str, list[dict[str, Any]]] = {}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and isinstance(file := vars(module).get("__file__"), str):
            modules.setdefault(os.path.abspath(file), []).append(vars(module))
    read = frozenset(name for names in names_of.values() for name in names)
    found = {}
    for file, names in sorted(names_of.items()):
        path = os.path.abspath(file)
        if path not in modules:
            raise NotStorableError(f"{file}, of which this process has loaded no module")
        # Which variables other code asks the environment for is not known.
        describe = Description(read, is_environment_known=is_covered_file(path))
        if path.startswith(_folder_of(torch)):
            # Its own values change as it works. What a program may have put in their place are functions and classes.
            found[file] = [describe.replaced(values, names) for values in modules[path]]
            continue
        found[file] = [
            [name, describe.value(value, f"{name} in {file}")]
            for values in modules[path]
            for name in sorted(names)
            for value in ([values[name]] if name in values else _imported(name, values))
        ]
    return found


def _imported(name: str, values: Mapping[str, Any]) -> list[types.ModuleType]:
    """The modules that a statement in a function may import, where `name` is of such a statement."""
    if not name.startswith(IMPORTED):
        return []
    # A relative import of `a.b` has that name too, and one of nothing is of the package.
    name = name.removeprefix(IMPORTED) or str(values.get("__package__")).rpartition(".")[2]
    return [
        module
        for key, module in sorted(sys.modules.items())
        if (key == name or key.endswith(f".{name}")) and isinstance(module, types.ModuleType)
    ]


def describe_code(code: types.CodeType) -> Any:
    """Equal for code that does the same with what it is given, wherever it stands."""
    constants = [describe_code(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), list(code.co_freevars), constants]


class Description:
    """Texts of values. A repeated object is replaced by its number, which also ends cycles."""

    def __init__(self, names: frozenset[str] = frozenset(), *, is_environment_known: bool = False) -> None:
        """`names` are those that traced code reads: of Python modules, only members of these names are described.

        `is_environment_known` says that they include those of all environment variables that the code reads.
        """
        self._names = names
        self._is_environment_known = is_environment_known
        self._known: dict[int, int] = {}
        # What is known by its address must stay.
        self._kept: list[object] = []
        self._described_modules: set[str] = set()

    def value(self, value: Any, where: str) -> Any:
        """Raises NotStorableError, which names `where` the value without a description is."""
        kind = type(value)
        if kind in (bool, str) or value is None:
            return value
        if kind in _SIMPLE or isinstance(value, _OF_TORCH):
            return [kind.__name__, repr(value)]
        if isinstance(value, re.Pattern):
            return [kind.__name__, repr(value.pattern), value.flags]
        if isinstance(value, types.CodeType):
            return describe_code(value)
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
        parts = self._parts(value, where)
        if parts is not None:
            return [_name_of(value), *(self.value(part, where) for part in parts)]
        return [self.value(kind, where), *self._content(value, where)]

    def replaced(self, values: Mapping[str, Any], names: Iterable[str]) -> Any:
        """Those of `names` whose function, class or module in the covered module of `values` is not its own."""
        kinds = (types.FunctionType, type, types.ModuleType)
        read = {name: values[name] for name in sorted(names) if isinstance(values.get(name), kinds)}
        return self._owned(values["__name__"], read, is_covered=True)

    def _parts(self, value: Any, where: str) -> list[Any] | None:
        """What decides what a value of a known kind does; None for other kinds."""
        if isinstance(value, types.FunctionType):
            if value in _READ_ENVIRONMENT:
                return [self._environment(where)]
            if "_dynamo_marked_constant" in vars(value) and not is_covered_file(value.__code__.co_filename):
                raise NotStorableError(f"{where} is marked with assume_constant_result")
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

    def _content(self, value: Any, where: str) -> list[Any]:
        """Items and members of an object."""
        items: list[Any] = []
        if isinstance(value, os._Environ):
            return [self._environment(where)]
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

    def _environment(self, where: str) -> Any:
        if not self._is_environment_known:
            raise NotStorableError(f"{where} has the environment, which traced code reads")
        return [[name, os.environ.get(name)] for name in sorted(self._names)]

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
        """Its members and those of its bases."""
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
            members.append(self._owned(_name_of(base), read, is_covered=_is_covered_class(base)))
        of_kind = [] if type(kind) is type else [self.value(type(kind), where)]
        return [_name_of(kind), [_name_of(base) for base in kind.__mro__], members, of_kind]

    def _python_module(self, module: types.ModuleType, where: str) -> Any:
        is_covered = is_covered_module(module.__name__)
        if not is_covered and not self._names:
            raise NotStorableError(f"{where} is the Python module {module.__name__}")
        if not is_covered and ("__getattr__" in vars(module) or type(module) is not types.ModuleType):
            raise NotStorableError(f"{where} is the Python module {module.__name__}, which makes its members when read")
        if module.__name__ in self._described_modules:
            return []
        self._described_modules.add(module.__name__)
        names = sorted(name for name in self._names & vars(module).keys() if not name.startswith("__"))
        read = {name: vars(module)[name] for name in names}
        return self._owned(module.__name__, read, is_covered=is_covered)

    def _owned(self, owner: str, members: Mapping[str, Any], *, is_covered: bool) -> Any:
        """Members of a class or a module."""
        described = []
        for name, value in members.items():
            expected = f"{owner}.{name}"
            if not is_covered:
                described.append([name, self.value(value, expected)])
            elif isinstance(value, types.ModuleType):
                # Which of torch's modules are loaded, and so are members of others, changes as a program runs.
                # Those of other packages, as torch.os, nobody reads there.
                is_own = value.__name__.partition(".")[0] == owner.partition(".")[0]
                is_read = self._names and type(value) is types.ModuleType and is_own
                members_of_it = self._python_module(value, expected) if is_read else []
                described.extend([[name, members_of_it]] if members_of_it else [])
            elif not self._is_as_written(value, expected):
                described.append([name, self._replaceable(value, expected)])
        return described

    def _is_as_written(self, value: Any, expected: str) -> bool:
        """Whether it is a function or a class that stands in sources that are covered, under the name `expected`."""
        if isinstance(value, (staticmethod, classmethod)):
            return self._is_as_written(value.__func__, expected)
        if isinstance(value, type):
            return _is_covered_class(value)
        is_plain = (
            isinstance(value, types.FunctionType) and value.__closure__ is None and value not in _READ_ENVIRONMENT
        )
        return is_plain and is_covered_file(value.__code__.co_filename) and _name_of(value) == expected

    def _replaceable(self, value: Any, where: str) -> Any:
        """What a program may have put in the place of a member that is covered; of anything else, the type."""
        is_read = isinstance(value, types.FunctionType) and value in _READ_ENVIRONMENT
        if isinstance(value, types.FunctionType) and is_covered_file(value.__code__.co_filename) and not is_read:
            # A decorator's function holds what it decorates.
            known = self._number(value)
            return known or [_name_of(value), *(self._replaceable(part, where) for part in _held(value))]
        if isinstance(value, (staticmethod, classmethod)):
            return self._replaceable(value.__func__, where)
        if type(value) is property:
            return self._replaceable(value.fget, where)
        if isinstance(value, type) and _is_covered_class(value):
            return _name_of(value)
        # Of collections, those of Python's modules that hold texts or numbers, as sys.argv.
        items = [*value, *value.values()] if type(value) is dict else value if type(value) in (list, tuple, set) else ()
        is_simple = type(value) in _SIMPLE or (bool(items) and all(type(item) in _SIMPLE for item in items))
        if is_simple or isinstance(value, (*_OF_TORCH, type, types.FunctionType, os._Environ)):
            return self.value(value, where)
        return _name_of(type(value))

    def _number(self, value: object) -> Any:
        """What `value` was called, where it was described before."""
        if id(value) in self._known:
            return ["as before", self._known[id(value)]]
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        return None


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


def is_covered_module(module: str) -> bool:
    """Whether the text of `module` is known by a version, or by the digest of our own sources."""
    root = module.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None)
    return root in sys.builtin_module_names or (file is None and root == "os") or bool(file and is_covered_file(file))


def _is_covered_class(kind: type) -> bool:
    """Whether a covered module has it under its name: a class that a program makes may claim any module."""
    if not isinstance(kind.__module__, str) or not is_covered_module(kind.__module__):
        return False
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is kind


@functools.cache
def is_covered_file(file: str) -> bool:
    path = os.path.abspath(file)
    if file.startswith("<frozen ") or path.startswith(_folders()):
        return True
    python = sysconfig.get_path("stdlib") + os.sep
    return path.startswith(python) and "site-packages" not in path


@functools.cache
def _folders() -> tuple[str, ...]:
    import numpy
    import transformers

    own = [os.path.join(path, "") for name in OUR_PACKAGES for path in sys.modules[name].__path__]
    return (*(_folder_of(package) for package in (torch, transformers, numpy)), *own)


def _folder_of(package: types.ModuleType) -> str:
    assert package.__file__ is not None
    return os.path.dirname(os.path.abspath(package.__file__)) + os.sep


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', None) or type(value).__qualname__}"
