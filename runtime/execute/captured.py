"""Facts about a graph that only Dynamo knows: why it ends, and the names of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.graph.source_lines import ARGUMENT_KEY, INPUT_NAME_KEY, line_of_frame, name_of_source
from moepass.passes.ir.protocol import CaptureNotes

# Switches for sizes that only a run tells: if one is off, Dynamo ends the graph there.
SWITCHES = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")


def capture_notes(graph: GraphModule) -> CaptureNotes:
    """For `graph` as Dynamo hands it to a backend, while it does."""
    config = torch._dynamo.config
    off = tuple(f"torch._dynamo.config.{name}" for name in SWITCHES if not getattr(config, name))
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return CaptureNotes("", off)
    first, *rest = (line.strip() for line in str(reason.reason).splitlines() if line.strip())
    hints = [line.removeprefix("Hint: ") for line in rest if line.startswith("Hint: ")]
    explained = [line.removeprefix("Explanation: ") for line in rest if line.startswith("Explanation: ")]
    why = " ".join([f"{first}.", *(hints or explained)[:1]])
    frames = [frame for frame in reason.user_stack if frame.filename]
    where = ""
    if frames:
        frame = frames[-1]
        where = f" at {line_of_frame(frame.filename, frame.lineno or 0, frame.name, frame.line or '')}"
    return CaptureNotes(f"Dynamo broke it{where} ({why})", off)


def name_inputs(captured: GraphModule, graph: GraphModule) -> None:
    """Write on the inputs of `captured`, which AOT made of Dynamo's `graph`, what they are to the model."""
    given = [(name_of_source(_source(node)), _is_argument(node)) for node in graph_inputs(graph.graph)]
    for node in graph_inputs(captured.graph):
        name, is_argument = _described(node.meta.get("desc"), given)
        if name:
            node.meta[INPUT_NAME_KEY] = name
            node.meta[ARGUMENT_KEY] = is_argument


def _described(description: object, given: Sequence[tuple[str, bool]]) -> tuple[str, bool]:
    """Name, and whether it is an argument, of an input by AOT's `description`; `given` has both of Dynamo's inputs."""
    base = getattr(description, "base", None)
    if base is not None:
        # A part of a tensor that is made of several, as this rank's part of a DTensor is, or their common memory.
        return _described(base, given)
    # AOT names an unchanged input by its index among Dynamo's inputs.
    place = getattr(description, "idx", None)
    if isinstance(place, int) and place < len(given):
        return given[place]
    target = getattr(description, "target", None)
    return (target if isinstance(target, str) else ""), False


def _is_argument(node: torch.fx.Node) -> bool:
    """Whether a caller passes it: no attribute leads to it, nor is it a parameter that somebody passes."""
    source = _source(node)
    return bool(source) and "." not in source and not isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _source(node: torch.fx.Node) -> str:
    """Dynamo's way to an input, as `L['self']._parameters['weight']`; empty where it is not told."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)
