"""What a capture depends on beside its inputs, as one digest: the model, its settings, and everything that compiles it.

Whatever code may branch on while it is traced belongs here: attributes of modules, configurations, hooks, torch's
settings. A value without a stable text raises NotStorableError, and the model is not stored.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch import nn

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.captures.value_texts import Description, describe_names
from moepass.runtime.system.device_names import cpu_info
from moepass.runtime.torch_private import function_modes


def versions() -> dict[str, str]:
    """Of everything whose code counts as known."""
    import huggingface_hub
    import numpy
    import transformers

    return {
        "python": f"{platform.python_implementation()} {sys.version}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "transformers": transformers.__version__,
        "huggingface_hub": huggingface_hub.__version__,
        "numpy": numpy.__version__,
        "typing_extensions": importlib.metadata.version("typing_extensions"),
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
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def settings() -> dict[str, Any]:
    """torch's settings that tracing and compiling look at."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return {
        # Not `get_hash`, which writes sets in the order of this process.
        "configs": [
            Description().value(config.save_config_portable(), config.__name__)
            for config in (dynamo, functorch, inductor)
        ],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ],
        "hooks": [
            [name, [Description().value(hook, name) for hook in hooks.values()]]
            for name, hooks in sorted(vars(torch.nn.modules.module).items())
            if name.startswith("_global_") and name.endswith("_hooks")
        ],
        "precision": torch.get_float32_matmul_precision(),
        "libraries": [torch.backends.mkldnn.enabled, torch.backends.mkl.is_available()],
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ],
        "autocast": [str(torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")],
        "ranks": _ranks(),
        "modes": [
            torch.is_inference_mode_enabled(),
            [Description().value(mode, "a mode") for mode in function_modes()],
        ],
        # A program may have replaced its methods.
        "tensors": Description().value(torch.Tensor, "torch.Tensor"),
    }


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


class TracedSource(msgspec.Struct, frozen=True):
    """A file whose code was traced: the digest of its text, the names that it reads, the digest of their values."""

    digest: str
    names: tuple[str, ...]
    values: str


def traced_sources(names_of: Mapping[str, Iterable[str]]) -> dict[str, TracedSource]:
    """By file. Raises NotStorableError as `file_digests` and `describe_names`."""
    values = describe_names(names_of)
    return {
        file: TracedSource(digest, tuple(sorted(names_of[file])), digest_of(values.get(file)))
        for file, digest in file_digests(names_of).items()
    }


def describe_model(model: nn.Module) -> Any:
    """Everything in `model` but the numbers of its tensors. Raises NotStorableError, which names what has no text."""
    return Description().value(model, type(model).__name__)
