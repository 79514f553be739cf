"""Digests of everything that a capture depends on, except its inputs: the model, its settings, and the compiler.

All values that traced code may branch on belong here: attributes of modules, configurations, hooks, torch's settings.
Installed code is represented by its version (see `process_code`). If a value has no stable text, NotStorableError is
raised and the model is not stored. Descriptions are equal where installed code behaves the same.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import hashlib
import os
import platform
import re
import stat
import struct
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import nn

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.captures.process_code import distributions
from moepass.runtime.system.device_names import cpu_info, device_name

# Fields of /proc/cpuinfo on x86 and Arm that identify the processor and its instructions.
_PROCESSOR = ("model name", "flags", "CPU part", "Features")
# Prefixes of the variables of packages that are traced or that compile. Some are read only once, on import.
_VARIABLES = ("ACCELERATE_", "HF_", "PYTORCH", "TORCH", "TRANSFORMERS_", "USE_")
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


def versions() -> dict[str, Any]:
    """Return the versions of Python and all installed packages; a git revision tells local builds of torch apart."""
    return {
        "python": [platform.python_implementation(), sys.version, sys.flags.optimize],
        "torch": torch.version.git_version,
        "packages": distributions(),
    }


def short_versions() -> dict[str, str]:
    """Return the versions that people read in `moepass cache`."""
    import transformers

    torch_version = str(torch.__version__)
    return {"python": platform.python_version(), "torch": torch_version, "transformers": transformers.__version__}


def environment() -> dict[str, str]:
    """Return the environment variables that packages may read before the model's code is traced."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # sets its variable now if it is not set: otherwise the first compilation would change it
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES) and name != "TORCH_LOGS"}


def variables_of(code: types.CodeType) -> dict[str, str | None]:
    """Return the values of environment variables that `code` may read: all its constants that can name a variable."""
    variables: dict[str, str | None] = {}
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier() and constant.isupper():
            variables[constant] = os.environ.get(constant)
        elif isinstance(constant, types.CodeType):
            variables |= variables_of(constant)
    return variables


def machine(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Return the hardware that compiled code is made for: the processor, and the GPUs among `devices`.

    The capabilities of a GPU decide which attention a model calls while it is traced.
    """
    used = sorted({device for device in devices if device.type == "cuda"}, key=str)
    return {
        "processor": [platform.machine(), *map(cpu_info, _PROCESSOR)],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "used": [[str(device), device_name(device), torch.cuda.get_device_capability(device)] for device in used],
    }


def settings() -> dict[str, Any]:
    """Return the settings of torch that tracing and compilation read."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return {
        "configs": [_config(config) for config in (dynamo, functorch, inductor)],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ],
        "precision": _precisions(),
        "libraries": [torch.backends.mkldnn.enabled, torch.backends.mkl.is_available()],
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ],
        "autocast": [str(torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")],
        "ranks": [dist.get_rank(), dist.get_world_size(), dist.get_backend()] if dist.is_initialized() else [],
        "inference": torch.is_inference_mode_enabled(),
    }


def _precisions() -> list[str]:
    """Return the precision of fp32 products, for all libraries that have a setting of their own."""
    libraries: Any = torch.backends
    mkldnn, cudnn = libraries.mkldnn, libraries.cudnn
    on_cpu, on_gpu = (mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn), (cudnn, cudnn.conv, cudnn.rnn)
    # `get_float32_matmul_precision` raises if a single library has a setting, so it is not used.
    return [str(library.fp32_precision) for library in (libraries, *on_cpu, libraries.cuda.matmul, *on_gpu)]


def _config(config: Any) -> Any:
    """Return the text of one of torch's configurations.

    Raises NotStorableError if a setting is a function, such as a pass.
    """
    for name, value in config.get_config_copy().items():
        if any(callable(item) for item in (value if isinstance(value, (list, tuple)) else [value])):
            raise NotStorableError(f"the setting {config.__name__}.{name} is a function: {value!r}")
    # `get_hash` depends on the order of sets in this process, so it is not used.
    return Description().value(config.save_config_portable(), config.__name__)


def digest_of(description: Any) -> str:
    """Return the SHA-256 digest of a value that is encoded as JSON."""
    return hashlib.sha256(msgspec.json.encode(description, order="sorted")).hexdigest()


def process_began() -> float:
    """Return a time before this process read its first file, in seconds since the epoch."""
    # Times of files and processes have a resolution of some hundredths of a second.
    return float(psutil.Process().create_time()) - 0.1


def file_digests(files: Iterable[str | Path]) -> dict[str, str]:
    """Return the digests of `files` by path. Raises NotStorableError if one changed after this process read it."""
    latest = process_began()
    digests = {}
    links: dict[str, float] = {}
    for file in map(Path, sorted(files)):
        try:
            if file.stat().st_ctime > latest:
                raise NotStorableError(f"{file} changed after this process began")
            if _last_linked(os.path.abspath(file), links) > latest:
                raise NotStorableError(f"{file} is reached by a link that changed after this process began")
            digests[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise NotStorableError(f"{file} cannot be read ({error.strerror})") from error
    return digests


def _last_linked(path: str, known: dict[str, float]) -> float:
    """Return the creation time of the latest symbolic link on the way to `path`, 0 without links. Raises OSError.

    Deployments switch releases by a link, so the files themselves may be older than this process.
    """
    parent = os.path.dirname(path)
    if path == parent:
        return 0.0
    if path not in known:
        status = os.lstat(path)
        known[path] = _last_linked(parent, known)
        if stat.S_ISLNK(status.st_mode):
            target = _last_linked(os.path.join(parent, os.readlink(path)), known)
            known[path] = max(known[path], status.st_ctime, target)
    return known[path]


def describe_model(model: nn.Module) -> tuple[Any, list[torch.Tensor]]:
    """Return a description of `model` without the numbers in its tensors, and these tensors in a fixed order.

    Raises NotStorableError, which names the attribute that cannot be described.
    """
    description = Description()
    return description.value(model, type(model).__name__), description.tensors


class Description:
    """Builds canonical descriptions of values. An object met again is written as its number, which also ends cycles."""

    def __init__(self) -> None:
        # Tensors in the order in which they were described.
        self.tensors: list[torch.Tensor] = []
        # The number of each object by its address, and the object itself, so that it stays alive.
        self._known: dict[int, tuple[int, object]] = {}

    def value(self, value: Any, where: str) -> Any:
        """Return the description of `value`, whose path is `where`. Raises NotStorableError, which names the path."""
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
        if id(value) in self._known:
            return ["as before", self._known[id(value)][0]]
        self._known[id(value)] = len(self._known), value
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


def _parts(value: Any) -> list[Any] | None:
    """Return the parts that decide the behaviour of a callable or reference, or None for other values."""
    if isinstance(value, types.FunctionType):
        # Functions can share a name, as the lambdas of one function do.
        code = value.__code__
        identity = [code.co_firstlineno, *code.co_names, *(text for text in code.co_consts if type(text) in _SIMPLE)]
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [identity, value.__defaults__, value.__kwdefaults__, held, _compared(value)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords, _compared(value)]
    if isinstance(value, weakref.ref):
        return [value()]
    return None


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
