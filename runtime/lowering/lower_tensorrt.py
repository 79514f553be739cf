"""Lower a dense segment to a TensorRT engine, by Torch-TensorRT.

Contract
    in    a segment for TensorRT (`passes/segments/tensorrt_choice.py`), whose inputs are tensors of constant sizes
    out   a callable that returns tensors of the same types, shapes and strides; or why TensorRT does not take all of it
    weights are inputs of the engine, so that equal layers share it and weights may be in slots

Written from the sources of torch-tensorrt 2.13.0. It has not run with TensorRT itself yet.
"""

from __future__ import annotations

import importlib
import operator
from types import ModuleType
from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from moepass.models.errors import OptionError
from moepass.passes.graph.nodes import copy_graph_module, fake_value, graph_inputs, is_call
from moepass.passes.ir.segment import TENSORRT, NotLowered

_PACKAGE = "torch_tensorrt"
_NAMESPACE = "tensorrt"


def torch_tensorrt() -> ModuleType:
    """Return the package torch_tensorrt. Raises OptionError if it cannot be imported."""
    try:
        return importlib.import_module(_PACKAGE)
    except ImportError as error:
        text = (
            "option lower is 'tensorrt', which needs Torch-TensorRT, and that cannot be imported here "
            f"({type(error).__name__}: {error}); install it with pip install 'moepass[tensorrt]', or use "
            "lower='inductor'"
        )
        raise OptionError(text, name="lower", value=TENSORRT, expected=("inductor", "eager")) from error


def lower_to_tensorrt(segment: GraphModule) -> TensorrtEngine | NotLowered:
    """Return `segment` as an engine, or why TensorRT does not take it. Raises OptionError without Torch-TensorRT."""
    package = torch_tensorrt()
    inputs = [fake_value(node) for node in graph_inputs(segment.graph)]
    # The fake mode of the capture must not see the operations of TensorRT.
    with tracing(None), unset_fake_temporarily(), torch.no_grad():
        try:
            exported = torch.export.export(_in_core_operators(segment), tuple(inputs), strict=False)
            engine = package.dynamo.compile(
                exported,
                arg_inputs=[package.Input(shape=tuple(value.shape), dtype=value.dtype) for value in inputs],
                device=inputs[0].device,
                require_full_compilation=True,
                min_block_size=1,
                # Products of float32 follow torch's setting, and float16 is summed in float32 as in torch.
                disable_tf32=torch.get_float32_matmul_precision() == "highest",
                use_fp32_acc=any(value.dtype == torch.float16 for value in inputs),
            )
        except Exception as error:  # errors of TensorRT and of its converters have no common type
            lines = str(error).strip().splitlines()
            reason = f"Torch-TensorRT refuses it: {type(error).__name__}: {lines[0] if lines else ''}"
            return NotLowered(TENSORRT, "", reason)
    left = _left_to_torch(engine)
    if left:
        return NotLowered(TENSORRT, "", f"Torch-TensorRT leaves {', '.join(left)} of it to torch")
    return TensorrtEngine(engine, segment)


class TensorrtEngine:
    """Runs an engine on the segment's inputs. Its outputs have the strides of the captured graph."""

    def __init__(self, engine: Any, segment: GraphModule) -> None:
        self._engine = engine
        outputs = segment.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        values = [fake_value(node) for node in outputs if isinstance(node, Node)]
        self._expected = [(value.dtype, tuple(value.shape)) for value in values]
        self._strides = [value.stride() for value in values]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the segment's outputs. Raises RuntimeError if one has another type or shape than the segment's."""
        results = self._engine(*inputs)
        outputs = results if isinstance(results, (list, tuple)) else (results,)
        actual = [(value.dtype, tuple(value.shape)) for value in outputs]
        if actual != self._expected:
            raise RuntimeError(f"TensorRT returned {actual}, but the captured graph has {self._expected}")
        return tuple(map(_with_strides, outputs, self._strides))


def _with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return `value` with these strides, copied if necessary, because code of Inductor that reads it needs them."""
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _in_core_operators(segment: GraphModule) -> GraphModule:
    """Return a copy without operators that only Inductor has, for which Torch-TensorRT has no converter."""
    copied = copy_graph_module(segment)
    for node in copied.graph.nodes:
        if is_call(node, torch.ops.prims.convert_element_type.default):
            value, dtype = node.args
            node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (value,), {"dtype": dtype}
    copied.recompile()
    return copied


def _left_to_torch(engine: GraphModule) -> list[str]:
    """Return the operators that no engine runs. Torch-TensorRT returns a graph without converters unchanged."""
    nodes = list(engine.graph.nodes)
    operators = [node.target for node in nodes if node.op == "call_function" and node.target is not operator.getitem]
    left = [str(target) for target in operators if getattr(target, "namespace", "") != _NAMESPACE]
    modules = [engine.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
    for module in modules:
        if isinstance(module, GraphModule):
            left += _left_to_torch(module)
    has_engine = bool(modules) or len(left) < len(operators)
    return left if left or has_engine else ["all"]
