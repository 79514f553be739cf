"""Compile the segments of a partitioned graph, each distinct one once.

Contract
    in    a top-level graph of segments
    out   the same top-level graph, its segments replaced by callables of the chosen lowering
    `eager` runs the captured operators one by one: bit-identical to the model; `inductor` fuses them

Compilation happens here, with fake inputs, and not inside the first call: the guards that Inductor adds while it
compiles must still reach the graph's own guards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import py_sym_types

from moepass.passes.graph import copy_graph_module, fake_value, graph_inputs

Lowered = Callable[..., Any]

# Operators that stand in a graph only in training mode; refused, so they must not be taken apart before.
RANDOM_IN_TRAINING = ("aten.native_dropout", "aten.bernoulli", "aten.dropout", "aten.alpha_dropout")


def decompositions(how: str) -> dict[Any, Callable[..., Any]]:
    """What AOT takes apart while it captures for the lowering `how`: nothing for `eager`, to stay bit-identical."""
    if how != "inductor":
        return {}
    from torch._inductor.decomposition import select_decomp_table

    return {
        operator: decomposition
        for operator, decomposition in select_decomp_table().items()
        if not str(operator).startswith(RANDOM_IN_TRAINING)
    }


class CompiledSegment(torch.nn.Module):
    """A lowered segment in the top-level graph: called with its inputs, gives a tuple."""

    def __init__(self, run: Lowered, boxed: bool) -> None:
        super().__init__()
        self.run = run
        self.boxed = boxed

    def forward(self, *inputs: Any) -> Any:
        return self.run(list(inputs)) if self.boxed else self.run(*inputs)


def lower_segments(top: GraphModule, how: str) -> GraphModule:
    """Replace every segment of `top` by its compiled form. `how` is a key of `LOWERINGS`."""
    lowered = copy_graph_module(top)
    for name, segment in list(lowered.named_children()):
        if isinstance(segment, GraphModule):
            setattr(lowered, name, LOWERINGS[how](segment))
    return lowered


def _lower_eager(segment: GraphModule) -> torch.nn.Module:
    return segment


def _lower_inductor(segment: GraphModule) -> torch.nn.Module:
    from torch._guards import TracingContext, tracing
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    # Inductor edits the graph that it compiles; the partitioned one stays readable.
    private = copy_graph_module(segment)
    for node in graph_inputs(private.graph):
        node.meta["val"] = _own_symbol(fake_value(node))
    inputs: Sequence[Any] = [fake_value(node) for node in graph_inputs(private.graph)]
    fake_mode = _fake_mode_of(segment, inputs)
    # Inductor's layout optimisation gives wrong results for depthwise 1-d convolutions on CPUs (seen with torch 2.13.0
    # on jamba, whole graph and segment alike), and has nothing to gain in a language model.
    correct = inductor_config.patch(layout_optimization=False)
    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), correct:
        joint_graph_passes(private)
        run = compile_fx_inner(
            private, inputs, cudagraphs=BoxedBool(False), is_inference=True, is_backward=False, static_input_idxs=()
        )
    return CompiledSegment(run, boxed=True)


def _own_symbol(value: Any) -> Any:
    """A size under the symbol that shapes use for it.

    Two inputs' sizes that turned out equal share one symbol in shapes, but each keeps its own as an input, and that is
    the name under which Inductor would bind it.
    """
    if not isinstance(value, torch.SymInt) or value.node._expr == value.node.expr:
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)


def _fake_mode_of(segment: GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._guards import detect_fake_mode
    from torch._subclasses import FakeTensorMode

    found = detect_fake_mode([value for value in inputs if not isinstance(value, py_sym_types)])
    if found is None:
        found = detect_fake_mode([fake_value(node) for node in segment.graph.nodes])
    return found or FakeTensorMode(allow_non_fake_inputs=True)


LOWERINGS: dict[str, Callable[[GraphModule], torch.nn.Module]] = {
    "inductor": _lower_inductor,
    "eager": _lower_eager,
}
