"""Lower a dense segment to an engine of TensorRT, by Torch-TensorRT.

Contract
    in    a segment for TensorRT (`passes/segments/tensorrt_choice.py`): of tensors of constant sizes
    out   a callable that gives tensors of the same types, shapes and strides; or why TensorRT does not take it whole
    weights are inputs of the engine, so that all layers that are alike share it, and slots may hold them

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
    """The package. Raises OptionError where it cannot be imported."""
    try:
        return importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise OptionError(
            "option lower is 'tensorrt', which needs Torch-TensorRT, and that cannot be imported here "
            f"({type(error).__name__}: {error}); install it with pip install 'moepass[tensorrt]', or use "
            "lower='inductor'",
            name="lower",
            value=TENSORRT,
            expected=("inductor", "eager"),
        ) from error


def lower_to_tensorrt(segment: GraphModule) -> TensorrtEngine | NotLowered:
    """`segment` as an engine, or why TensorRT does not take it. Raises OptionError without Torch-TensorRT."""
    package = torch_tensorrt()
    inputs = [fake_value(node) for node in graph_inputs(segment.graph)]
    # The fake mode of the capture around this must not see what TensorRT does.
    with tracing(None), unset_fake_temporarily(), torch.no_grad():
        try:
            exported = torch.export.export(_in_core_operators(segment), tuple(inputs), strict=False)
            engine = package.dynamo.compile(
                exported,
                arg_inputs=[package.Input(shape=tuple(value.shape), dtype=value.dtype) for value in inputs],
                device=inputs[0].device,
                require_full_compilation=True,
                min_block_size=1,
                # float32 is multiplied as torch was told to, and sums of float16 are float32 as torch's are.
                disable_tf32=torch.get_float32_matmul_precision() == "highest",
                use_fp32_acc=any(value.dtype == torch.float16 for value in inputs),
            )
        except Exception as error:  # TensorRT's own, and those of its converters, have no common type
            told = str(error).strip().splitlines()
            reason = f"Torch-TensorRT refuses it: {type(error).__name__}: {told[0] if told else ''}"
            return NotLowered(TENSORRT, "", reason)
    left = _left_to_torch(engine)
    if left:
        return NotLowered(TENSORRT, "", f"Torch-TensorRT leaves {', '.join(left)} of it to torch")
    return TensorrtEngine(engine, segment)


class TensorrtEngine:
    """Runs an engine: called with the segment's inputs, gives its outputs, with the strides of the captured graph."""

    def __init__(self, engine: Any, segment: GraphModule) -> None:
        self._engine = engine
        outputs = segment.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        values = [fake_value(node) for node in outputs if isinstance(node, Node)]
        self._expected = [(value.dtype, tuple(value.shape), value.stride()) for value in values]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Raises RuntimeError where an output has another type or shape than the segment's."""
        found = self._engine(*inputs)
        outputs = found if isinstance(found, (list, tuple)) else (found,)
        given = [(value.dtype, tuple(value.shape)) for value in outputs]
        wanted = [(dtype, shape) for dtype, shape, _ in self._expected]
        if given != wanted:
            raise RuntimeError(f"TensorRT gave {given}, and the captured graph has {wanted}")
        return tuple(map(_with_strides, outputs, [strides for _, _, strides in self._expected]))


def _with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """`value`, copied where it has other strides: what Inductor compiled for its readers counts on them."""
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _in_core_operators(segment: GraphModule) -> GraphModule:
    """A copy without operators that Inductor alone decomposes to, and for which Torch-TensorRT has no converter."""
    copied = copy_graph_module(segment)
    for node in copied.graph.nodes:
        if is_call(node, torch.ops.prims.convert_element_type.default):
            value, dtype = node.args
            node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (value,), {"dtype": dtype}
    copied.recompile()
    return copied


def _left_to_torch(engine: GraphModule) -> list[str]:
    """What of the compiled graph no engine runs. Torch-TensorRT gives back a graph without a converter as it came."""
    nodes = list(engine.graph.nodes)
    operators = [node.target for node in nodes if node.op == "call_function" and node.target is not operator.getitem]
    left = [str(one) for one in operators if getattr(one, "namespace", "") != _NAMESPACE]
    modules = [engine.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
    for module in modules:
        if isinstance(module, GraphModule):
            left += _left_to_torch(module)
    has_engine = bool(modules) or len(left) < len(operators)
    return left if left or has_engine else ["all"]
