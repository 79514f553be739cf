"""Digests of everything that a capture depends on, except its inputs: the model, its settings, and the compiler.

All values that traced code may branch on belong here: attributes of modules, configurations, hooks, torch's settings.
Installed code is represented by its version (see `process_code`). If a value has no stable text, NotStorableError is
raised and the model is not stored.
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

# Fields of /proc/cpuinfo on x86 and Arm that identify the processor and its instructions.
_PROCESSOR = ("model name", "flags", "CPU part", "Features")
# Prefixes of the variables of packages that are traced or that compile. Some are read only once, on import.
_VARIABLES = ("ACCELERATE_", "HF_", "PYTORCH", "TORCH", "TRANSFORMERS_", "USE_")


def versions() -> dict[str, Any]:
    """Return the versions of Python and of all installed packages.

    Local builds of torch share a version, so the git revision of torch is included.
    """
    return {
        "python": [platform.python_implementation(), sys.version, sys.flags.optimize],
        "torch": torch.version.git_version,
        "packages": distributions(),
    }


def short_versions() -> dict[str, str]:
    """Return the versions that people read in `moepass cache`."""
    import transformers

    packages = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    return {"python": platform.python_version(), **packages}


def environment() -> dict[str, str]:
    """Return the environment variables that packages may read before the model's code is traced."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # sets its variable now if it is not set: otherwise the first compilation would change it
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES) and name != "TORCH_LOGS"}


def variables_of(code: types.CodeType) -> dict[str, str | None]:
    """Return the values of environment variables that `code` may read: all its constants that can name a variable."""
    texts = [text for text in code.co_consts if isinstance(text, str) and text.isidentifier() and text.isupper()]
    inner = [variables_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {
        name: value
        for variables in ({text: os.environ.get(text) for text in texts}, *inner)
        for name, value in variables.items()
    }


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
        "ranks": _ranks(),
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

    Raises NotStorableError if it holds a function, such as a pass.
    """
    for name, value in config.get_config_copy().items():
        if any(callable(item) for item in (value if isinstance(value, (list, tuple)) else [value])):
            raise NotStorableError(f"the setting {config.__name__}.{name} is a function: {value!r}")
    # `get_hash` depends on the order of sets in this process, so it is not used.
    return Description().value(config.save_config_portable(), config.__name__)


def _ranks() -> list[Any]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    return [torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.distributed.get_backend()]


def digest_of(description: Any) -> str:
    """Return the SHA-256 digest of a value that is encoded as JSON."""
    return hashlib.sha256(msgspec.json.encode(description, order="sorted")).hexdigest()


def process_began() -> float:
    """Return a time before this process read its first file, in seconds since the epoch."""
    # Times of files and processes have a resolution of some hundredths of a second.
    return float(psutil.Process().create_time()) - 0.1


def file_digests(files: Iterable[str | Path]) -> dict[str, str]:
    """Return the digests of `files` by path.

    Raises NotStorableError if a file changed after this process read its code.
    """
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
