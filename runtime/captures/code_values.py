"""What code does beyond what its text says: the values behind the names that it reads, and its classes' members.

A file's text does not tell that a number in it came from the environment, that a function was replaced after the file
was read, or that the class of a model is one of the same name in another file. Values that code can be traced for are
described: numbers, texts, functions, and collections of them. Of every other value its type counts.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from moepass.passes.graph.graph_records import NotStorableError

# Their code is known by their versions.
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_SIMPLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEEPEST = 4
# What we keep in a class of a model.
_OUR_PREFIX = "_moepass"


def describe_names(names_of: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The values of `names_of` each file in this process, by file.

    Raises NotStorableError for a file that this process has not loaded: the model's code then lies elsewhere.
    """
    modules: dict[str, list[dict[str, Any]]] = {}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and isinstance(file := vars(module).get("__file__"), str):
            modules.setdefault(os.path.abspath(file), []).append(vars(module))
    found = {}
    for file, names in names_of.items():
        path = os.path.abspath(file)
        if path.startswith(_OF_TORCH):
            continue
        if path not in modules:
            raise NotStorableError(f"{file}, of which this process has loaded no module")
        found[file] = [
            [name, _describe(values[name])] for values in modules[path] for name in sorted(names) if name in values
        ]
    return found


def describe_class(kind: type) -> Any:
    """Members of `kind` and of its bases, but those of torch and Python."""
    return [
        [f"{base.__module__}.{base.__qualname__}", name, _describe(value)]
        for base in kind.__mro__
        if base not in (object, nn.Module) and not base.__module__.startswith("torch.")
        for name, value in sorted(vars(base).items())
        if not name.startswith(_OUR_PREFIX)
    ]


def describe_code(code: types.CodeType) -> Any:
    """Equal for code that does the same with what it is given, wherever it stands."""
    return [code.co_code.hex(), list(code.co_names), list(code.co_freevars), [_describe(one) for one in code.co_consts]]


def _describe(value: Any, depth: int = _DEEPEST) -> Any:
    if value is None or isinstance(value, _SIMPLE):
        return [type(value).__name__, repr(value)]
    if isinstance(value, enum.Enum):
        return [_name_of(type(value)), value.name]
    if isinstance(value, types.CodeType):
        return describe_code(value)
    if isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
        return _name_of(value)
    if not depth:
        return _name_of(type(value))
    describe = functools.partial(_describe, depth=depth - 1)
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [describe_code(value.__code__), *map(describe, (value.__defaults__, value.__kwdefaults__, held))]
    if isinstance(value, types.MethodType):
        return [describe(value.__func__), _name_of(type(value.__self__))]
    if isinstance(value, (staticmethod, classmethod)):
        return describe(value.__func__)
    if isinstance(value, property):
        return describe(value.fget)
    if isinstance(value, functools.partial):
        return [describe(value.func), describe(value.args), describe(value.keywords)]
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(describe, value)]
    if type(value) in (set, frozenset):
        return [type(value).__name__, *map(describe, sorted(value, key=repr))]
    if type(value) is dict or _is_registry(value):
        return [type(value).__name__, *([describe(key), describe(item)] for key, item in value.items())]
    return _name_of(type(value))


def _is_registry(value: object) -> bool:
    """Of functions that transformers calls by name, for attention, masks or experts."""
    from transformers.utils.generic import GeneralInterface

    return isinstance(value, GeneralInterface)


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', None) or type(value).__name__}"
