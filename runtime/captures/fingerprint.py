"""What a capture depends on beside its inputs, as one digest: the model, its settings, and everything that compiles it.

Whatever code may branch on while it is traced belongs here: attributes of modules, configurations, hooks, torch's
settings. Installed code counts by its version (see `process_code`). A value without a stable text raises
NotStorableError, and the model is not stored.
"""

from __future__ import annotations

import hashlib
import os
import platform
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
from moepass.runtime.system.device_names import cpu_info

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


def machine() -> dict[str, Any]:
    """What compiled code is made for."""
    return {
        "processor": [platform.machine(), cpu_info("model name"), cpu_info("flags")],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
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
        "precision": torch.get_float32_matmul_precision(),
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


def describe_model(model: nn.Module) -> tuple[Any, list[torch.Tensor]]:
    """Everything in `model` but the numbers of its tensors; and these tensors, in a fixed order.

    Raises NotStorableError, which names what has no text.
    """
    description = Description()
    return description.value(model, type(model).__name__), description.tensors
