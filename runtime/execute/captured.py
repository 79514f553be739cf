"""Facts about a graph that only Dynamo knows: why it ends, and the names of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.graph.source_lines import ARGUMENT_KEY, INPUT_NAME_KEY, line_of_frame, name_of_source
from moepass.passes.ir.protocol import CaptureNotes

# Dynamo's settings for data-dependent sizes. If one is off, the graph ends at such a size.
SWITCHES = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")


def capture_notes(graph: GraphModule) -> CaptureNotes:
    """Return the notes on `graph`, which Dynamo is passing to a backend."""
    config = torch._dynamo.config
    off = tuple(f"torch._dynamo.config.{name}" for name in SWITCHES if not getattr(config, name))
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return CaptureNotes("", off)
    first, *details = (line.strip() for line in str(reason.reason).splitlines() if line.strip())
    hints = [line.removeprefix("Hint: ") for line in details if line.startswith("Hint: ")]
    explained = [line.removeprefix("Explanation: ") for line in details if line.startswith("Explanation: ")]
    why = " ".join([f"{first}.", *(hints or explained)[:1]])
    frames = [frame for frame in reason.user_stack if frame.filename]
    where = ""
    if frames:
        frame = frames[-1]
        where = f" at {line_of_frame(frame.filename, frame.lineno or 0, frame.name, frame.line or '')}"
    return CaptureNotes(f"Dynamo broke it{where} ({why})", off)


def name_inputs(captured: GraphModule, graph: GraphModule) -> None:
    """Write names for the inputs of `captured` into their meta: the names that the model has for the inputs of `graph`.

    AOT traced `captured` from `graph`, which is Dynamo's.
    """
    dynamo_inputs = [(name_of_source(_source(node)), _is_argument(node)) for node in graph_inputs(graph.graph)]
    for node in graph_inputs(captured.graph):
        name, is_argument = _described(node.meta.get("desc"), dynamo_inputs)
        if name:
            node.meta[INPUT_NAME_KEY] = name
            node.meta[ARGUMENT_KEY] = is_argument


def _described(description: object, dynamo_inputs: Sequence[tuple[str, bool]]) -> tuple[str, bool]:
    """Return the name of an input, and whether it is an argument, from AOT's description of it.

    `dynamo_inputs` has the same pair for each of Dynamo's inputs.
    """
    base = getattr(description, "base", None)
    if base is not None:
        # The input is part of another input, as the local tensor of a DTensor, or the memory that inputs share.
        return _described(base, dynamo_inputs)
    # AOT names an unchanged input by its index among Dynamo's inputs.
    index = getattr(description, "idx", None)
    if isinstance(index, int) and index < len(dynamo_inputs):
        return dynamo_inputs[index]
    target = getattr(description, "target", None)
    return (target if isinstance(target, str) else ""), False


def _is_argument(node: torch.fx.Node) -> bool:
    """Return whether a caller passes this input. Attributes do not count, nor do parameters that are passed."""
    source = _source(node)
    return bool(source) and "." not in source and not isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _source(node: torch.fx.Node) -> str:
    """Return Dynamo's path to an input, such as `L['self']._parameters['weight']`, or an empty string."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)
