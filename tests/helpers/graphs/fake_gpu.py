"""Capture graphs for a GPU on a machine without one: fake CUDA tensors, and a device guard that does nothing.

with pretended_gpu():                     CUDA tensors created here are fake
    with device_copies() as copies:       records copies between host and device
    with computed_values() as values:     gives fake tensors values, which the CPU computes
    put_on_gpu(model)                     replaces its tensors with fake CUDA tensors
    graph = captured_graph(model, ...)    the first ATen graph of its forward
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.cpp_extension import include_paths, library_paths

from moepass.runtime.lowering.lower_segments import decompositions

# Indexing needs the guard of a tensor's device, even if it is fake, which torch without CUDA does not have.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


@contextlib.contextmanager
def pretended_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Pretend that there is a GPU with this compute capability, by default that of an H100."""
    if not torch.cuda.is_available():
        _load_guard()

    def get_device_capability(device: torch.device | None = None) -> tuple[int, int]:
        return capability

    has_capability = mock.patch.object(torch.cuda, "get_device_capability", get_device_capability)
    with has_capability, FakeTensorMode(allow_non_fake_inputs=True):
        yield


@functools.cache
def _load_guard() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD, encoding="utf-8")
        paths = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
        options = ["-std=c++20", "-shared", "-fPIC", *paths, "-lc10"]
        subprocess.run([get_cpp_compiler(), str(source), "-o", str(library), *options], check=True)
        return ctypes.CDLL(str(library))


class device_copies(TorchDispatchMode):  # noqa: N801  used like a function
    """Record in `uploads` and `downloads` whether each copy between the CPU and another device is non-blocking.

    Operators that take tensors of both count too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[bool] = []
        self.downloads: list[bool] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        taken, made = (
            {leaf.device.type for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor) and leaf.dim()}
            for nest in ((args, kwargs), result)
        )
        non_blocking = bool((kwargs or {}).get("non_blocking"))
        if "cpu" in taken and "cuda" in made:
            self.uploads.append(non_blocking)
        if "cuda" in taken and "cpu" in made:
            self.downloads.append(non_blocking)
        return result


class computed_values(TorchDispatchMode):  # noqa: N801  used like a function
    """Give the fake tensors that are made in the block values, which the CPU computes.

    An operator first runs on the fake tensors, which refuse operands on different devices as a GPU does.
    """

    def on_gpu(self, value: torch.Tensor) -> torch.Tensor:
        """Return a fake CUDA tensor with the values of `value`."""
        fake: Any = on_gpu(value)
        fake.values_on_cpu = value
        return fake

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values, named = tree_map_only(FakeTensor, lambda fake: fake.values_on_cpu, (args, kwargs))

        def compute() -> Any:
            with _disable_current_modes():
                return function(*values, **{**named, **({"device": "cpu"} if "device" in named else {})})

        try:
            fakes = function(*args, **kwargs)
            results = compute()
        except (DataDependentOutputException, DynamicOutputShapeException):
            results = compute()
            device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            fakes = tree_map_only(
                torch.Tensor,
                lambda value: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device),
                results,
            )
        for fake, result in zip(tree_leaves(fakes), tree_leaves(results), strict=True):
            if isinstance(fake, FakeTensor):
                fake.values_on_cpu = result  # type: ignore[attr-defined]
        return fakes


def on_gpu(value: torch.Tensor) -> torch.Tensor:
    """Return a fake CUDA tensor with the shape, strides and type of `value`."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def put_on_gpu(model: torch.nn.Module, move: Callable[[torch.Tensor], torch.Tensor] = on_gpu) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(move(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = move(buffer)


class _GraphComplete(Exception):  # noqa: N818  no error
    """Raised when the graph is captured, because it cannot be run."""


def captured_graph(model: torch.nn.Module, *args: Any, lower: str = "eager", **kwargs: Any) -> GraphModule:
    """Return the first ATen graph of `model(*args, **kwargs)`, as the backend receives it."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(module)

        def run(values: list[Any]) -> Any:
            raise _GraphComplete

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, decompositions=decompositions(lower))
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True), contextlib.suppress(_GraphComplete):
        torch.compile(model, backend=backend)(*args, **kwargs)
    return graphs[0]
