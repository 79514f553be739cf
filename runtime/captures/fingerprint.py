"""What a capture depends on beside its inputs, as one digest: the model, its settings, and everything that compiles it.

Whatever code may branch on while it is traced belongs here: attributes of modules, configurations, hooks, torch's
settings. Installed code counts by its version (see `process_code`). A value without a stable text raises
NotStorableError, and the model is not stored.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch import nn

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.captures.process_code import distributions
from moepass.runtime.captures.value_texts import Description
from moepass.runtime.system.device_names import cpu_info, device_name

# What it is and what it can, in the kernel's words for x86 and for Arm.
_PROCESSOR = ("model name", "flags", "CPU part", "Features")
# Of the packages whose code is traced or compiles. Some of these variables they read once, as they are imported.
_VARIABLES = ("ACCELERATE_", "HF_", "PYTORCH", "TORCH", "TRANSFORMERS_", "USE_")


def versions() -> dict[str, Any]:
    """Of Python and of all that is installed. A local build of torch has no other version, but another revision."""
    return {
        "python": [platform.python_implementation(), sys.version, sys.flags.optimize],
        "torch": torch.version.git_version,
        "packages": distributions(),
    }


def short_versions() -> dict[str, str]:
    """For people."""
    import transformers

    packages = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    return {"python": platform.python_version(), **packages}


def environment() -> dict[str, str]:
    """The variables that packages may read before the model's code is traced."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # sets its variable now, where it is not set: otherwise whatever compiles first would change it
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES) and name != "TORCH_LOGS"}


def variables_of(code: types.CodeType) -> dict[str, str | None]:
    """The values of all environment variables that `code` may read: those of its texts that may be a name of one."""
    texts = [text for text in code.co_consts if isinstance(text, str) and text.isidentifier() and text.isupper()]
    inner = [variables_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {
        name: value
        for found in ({text: os.environ.get(text) for text in texts}, *inner)
        for name, value in found.items()
    }


def machine(devices: Iterable[torch.device]) -> dict[str, Any]:
    """What compiled code is made for: the processor, and those of `devices` that are GPUs.

    On them attention is chosen while a model is traced, by what they can.
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
    """torch's settings that tracing and compiling look at."""
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
        "ranks": _ranks(),
        "inference": torch.is_inference_mode_enabled(),
    }


def _precisions() -> list[str]:
    """How exact products in fp32 must be, as one call or a setting for each library says."""
    libraries: Any = torch.backends
    mkldnn, cudnn = libraries.mkldnn, libraries.cudnn
    on_cpu, on_gpu = (mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn), (cudnn, cudnn.conv, cudnn.rnn)
    # Not `get_float32_matmul_precision`: it raises where a setting for one library was made.
    return [str(part.fp32_precision) for part in (libraries, *on_cpu, libraries.cuda.matmul, *on_gpu)]


def _config(config: Any) -> Any:
    """Raises NotStorableError where a function is set, as a custom pass of Inductor: it is code of a program."""
    for name, value in config.get_config_copy().items():
        if any(callable(item) for item in (value if isinstance(value, (list, tuple)) else [value])):
            raise NotStorableError(f"{config.__name__}.{name}, which is set to code: {value!r}")
    # Not `get_hash`, which writes sets in the order of this process.
    return Description().value(config.save_config_portable(), config.__name__)


def _ranks() -> list[Any]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    return [torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.distributed.get_backend()]


def digest_of(description: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(description, order="sorted")).hexdigest()


def process_began() -> float:
    """A time before all that this process has read, in seconds since the epoch."""
    # Times of files and of processes are counted in steps of some hundredths of a second.
    return float(psutil.Process().create_time()) - 0.1


def file_digests(files: Iterable[str | Path]) -> dict[str, str]:
    """By path. Raises NotStorableError where a file may be another one than this process has read as code."""
    latest = process_began()
    found = {}
    links: dict[str, float] = {}
    for file in map(Path, sorted(files)):
        try:
            if file.stat().st_ctime > latest:
                raise NotStorableError(f"{file}, which was changed since this process began")
            if _last_linked(os.path.abspath(file), links) > latest:
                raise NotStorableError(f"{file}, to which another link leads since this process began")
            found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise NotStorableError(f"{file}, which cannot be read ({error.strerror})") from error
    return found


def _last_linked(path: str, known: dict[str, float]) -> float:
    """When the latest of the links was made that lead to `path`, 0 where there is none. Raises OSError.

    A release that is switched by a link has files as old as it is, whichever of them this process has read.
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
    """Everything in `model` but the numbers of its tensors; and these tensors, in a fixed order.

    Raises NotStorableError, which names what has no text.
    """
    description = Description()
    return description.value(model, type(model).__name__), description.tensors
