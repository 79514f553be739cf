"""What a capture depends on beside its inputs, as one digest: the model, its settings, and everything that compiles it.

Whatever code may branch on while it is traced belongs here: attributes of modules, configurations, hooks, torch's
settings. What cannot be described, and so not compared with another process, is an error: the model is not stored.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import platform
import re
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch import nn

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.captures.code_values import describe_class, describe_code, describe_names
from moepass.runtime.system.device_names import cpu_info

# Of every module: what torch keeps in it, and what the walk over modules reaches by itself. Hooks count by what they
# are, not by the numbers that a process gives them.
_WALKED = {"_modules", "_parameters", "_buffers"}
_HOOKS = "_hooks"
# What transformers keeps of Python's `hash`, which differs from process to process.
_HASHES = {"_original_object_hash"}

_SHOWN_AS_THEY_ARE = (
    *(float, complex, bytes, re.Pattern),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def versions() -> dict[str, str]:
    import transformers

    return {
        "python": f"{platform.python_implementation()} {sys.version}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "transformers": transformers.__version__,
    }


def short_versions() -> dict[str, str]:
    """For people."""
    return {name: text.split()[1 if name == "python" else 0] for name, text in versions().items()}


def machine() -> dict[str, Any]:
    """What compiled code is made for."""
    return {
        "processor": [platform.machine(), cpu_info("model name"), cpu_info("flags")],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def settings() -> dict[str, Any]:
    """torch's settings that tracing and compiling look at."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return {
        # Not `get_hash`, which writes sets in the order of this process.
        "configs": [
            _ModelDescription().value(config.save_config_portable(), config.__name__)
            for config in (dynamo, functorch, inductor)
        ],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ],
        "hooks": [
            [name, [_ModelDescription().value(hook, name) for hook in hooks.values()]]
            for name, hooks in sorted(vars(torch.nn.modules.module).items())
            if name.startswith("_global_") and name.endswith(_HOOKS)
        ],
        "precision": torch.get_float32_matmul_precision(),
        "libraries": [torch.backends.mkldnn.enabled, torch.backends.mkl.is_available()],
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
    }


def digest_of(description: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(description, order="sorted")).hexdigest()


def file_digests(files: Iterable[str | Path]) -> dict[str, str]:
    """By path. Raises NotStorableError where a file may be another one than this process has read as code."""
    # Times of files and of processes are counted in steps of some hundredths of a second.
    latest = psutil.Process().create_time() - 0.1
    found = {}
    for file in map(Path, sorted(files)):
        try:
            if file.stat().st_ctime > latest:
                raise NotStorableError(f"{file}, which was changed since this process began")
            found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise NotStorableError(f"{file}, which cannot be read ({error.strerror})") from error
    return found


class TracedSource(msgspec.Struct, frozen=True):
    """A file whose code was traced: the digest of its text, the names that this code reads, and that of their values.

    Of torch's own files the text alone counts.
    """

    digest: str
    names: tuple[str, ...]
    values: str


def traced_sources(names_of: Mapping[str, Iterable[str]]) -> dict[str, TracedSource]:
    """By file. Raises NotStorableError as `file_digests`, and for a file that this process has not loaded."""
    values = describe_names(names_of)
    return {
        file: TracedSource(digest, tuple(sorted(names_of[file])), digest_of(values.get(file)))
        for file, digest in file_digests(names_of).items()
    }


def describe_model(model: nn.Module) -> Any:
    """Everything in `model` but the numbers of its tensors. Raises NotStorableError, which names what has no text."""
    describe = _ModelDescription()
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {_name_of(type(module)): type(module) for module in modules.values()}
    return [
        {path: describe.module(module, path) for path, module in modules.items()},
        {name: describe_class(kind) for name, kind in kinds.items()},
    ]


class _ModelDescription:
    """Texts of values; an object that was described once is its number from then on, so that circles end."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        # What is known by its address must stay.
        self._kept: list[object] = []

    def module(self, module: nn.Module, path: str) -> Any:
        known = self._number(module)
        if known is not None:
            return known
        parts: dict[str, Any] = {}
        for name, value in vars(module).items():
            where = f"{path}.{name}"
            if name in _WALKED:
                parts[name] = {key: self._leaf(item, f"{path}.{key}") for key, item in value.items()}
            elif name.endswith(_HOOKS):
                parts[name] = [self.value(item, where) for item in value.values()]
            else:
                parts[name] = self.value(value, where)
        return [_name_of(type(module)), parts]

    def _leaf(self, value: object, where: str) -> Any:
        return "module" if isinstance(value, nn.Module) else self.value(value, where)

    def value(self, value: Any, where: str) -> Any:
        if value is None or value is ... or isinstance(value, (bool, int, str)):
            return str(value) if value is ... or type(value) is int else value  # JSON's integers are small
        if isinstance(value, _SHOWN_AS_THEY_ARE):
            return [type(value).__name__, repr(value)]
        if isinstance(value, enum.Enum):
            return [_name_of(type(value)), value.name]
        if isinstance(value, (type, types.BuiltinFunctionType, torch._ops.OpOverload)):
            return _name_of(value)
        if isinstance(value, types.CodeType):
            return describe_code(value)
        if isinstance(value, types.MethodType):
            return [self.value(value.__func__, where), _name_of(type(value.__self__))]
        known = self._number(value)
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            return _describe_tensor(value, where)
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            parts = (value.__code__, value.__defaults__, value.__kwdefaults__, held)
            return [_name_of(value), *(self.value(part, where) for part in parts)]
        if isinstance(value, functools.partial):
            return [_name_of(value.func), *(self.value(part, where) for part in (value.args, value.keywords))]
        if isinstance(value, Mapping):
            items = [[self.value(key, where), self.value(item, where)] for key, item in value.items()]
            return [type(value).__name__, items]
        if isinstance(value, (set, frozenset)):
            return [type(value).__name__, *(self.value(item, where) for item in sorted(value, key=repr))]
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *(self.value(item, where) for item in value)]
        if isinstance(value, BankStore):
            specs = [self.value(msgspec.to_builtins(bank.spec), where) for bank in value.banks]
            return ["banks", str(value.device), value.slots, _name_of(type(value.home)), specs]
        if isinstance(value, nn.Module):
            return ["module", _name_of(type(value))]
        if isinstance(value, weakref.ref):
            return "reference"
        members = _members(value)
        if members is not None:
            return [_name_of(type(value)), [[key, self.value(item, f"{where}.{key}")] for key, item in members]]
        raise NotStorableError(f"{where} is of type {_name_of(type(value))}")

    def _number(self, value: object) -> Any:
        """What `value` was called, where it was described before."""
        if id(value) in self._known:
            return ["as before", self._known[id(value)]]
        self._known[id(value)] = len(self._known)
        self._kept.append(value)
        return None


def _members(value: object) -> list[tuple[str, Any]] | None:
    """What an object of a Python class holds; None for one whose class is written in another language."""
    slots = [slot for base in type(value).__mro__ for slot in _slots_of(base)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    held = [(slot, getattr(value, slot)) for slot in slots if hasattr(value, slot)]
    return held + [item for item in getattr(value, "__dict__", {}).items() if item[0] not in _HASHES]


def _slots_of(base: type) -> list[str]:
    slots = vars(base).get("__slots__", ())
    return [slot for slot in ([slots] if isinstance(slots, str) else slots) if slot not in ("__dict__", "__weakref__")]


def _describe_tensor(value: torch.Tensor, where: str) -> Any:
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, nn.Parameter):
        raise NotStorableError(f"{where} is a {type(value).__name__} of layout {value.layout}")
    layout = [list(value.shape), list(value.stride())]
    return [type(value).__name__, str(value.dtype), str(value.device), layout, value.requires_grad]


def _name_of(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', None) or value}"
