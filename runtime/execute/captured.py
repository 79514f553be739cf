"""What Dynamo knows of a graph and the passes do not: why it ends where it does, and what its inputs are called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.graph.source_lines import INPUT_NAME_KEY, line_of_frame, name_of_source
from moepass.passes.ir.protocol import CaptureNotes

# What Dynamo asks before it captures a size that only a run tells; where it is off, it ends the graph.
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
    """Write on the inputs of `captured`, which AOT made of Dynamo's `graph`, what they are called in the model."""
    names = [_name(node) for node in graph_inputs(graph.graph)]
    for node in graph_inputs(captured.graph):
        name = _name_of(node.meta.get("desc"), names)
        if name:
            node.meta[INPUT_NAME_KEY] = name


def _name_of(description: object, names: Sequence[str]) -> str:
    """What AOT's `description` of an input says that it is called; `names` are those of Dynamo's inputs."""
    base = getattr(description, "base", None)
    if base is not None:
        # A part of a tensor that is made of several, as this rank's part of a DTensor is, or their common memory.
        return _name_of(base, names)
    # AOT calls an input that it passes on as it came by its place among Dynamo's.
    place = getattr(description, "idx", None)
    if isinstance(place, int) and place < len(names):
        return names[place]
    target = getattr(description, "target", None)
    return target if isinstance(target, str) else ""


def _name(node: torch.fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return name_of_source(name() if callable(name) else str(name)) if name else ""
