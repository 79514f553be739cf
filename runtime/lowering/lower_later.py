"""Compile a captured graph after its capture, for the sizes of the run that needs it.

Contract
    in    a captured graph, and the sizes by name of the run that it is compiled for
    out   a callable for it, and the conditions on sizes under which it is right
    the graph may have host syncs, collectives and sizes that are known only at run time

The graph is cut into segments like a scheduled one, so that equal layers are compiled once, and experts run on the same
kernels.

Inductor makes decisions by the sizes that it sees (for example, that 16-bit indices suffice) and adds each as a guard.
The guards of `torch.compile` are complete by then, and the sizes at capture may be far from those of the run. So the
graph is described again with new symbols that have the run's sizes, and the guards on these symbols are checked in
every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule

from moepass.passes.blocks.detect import find_blocks
from moepass.passes.finish import with_lowerings
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import copy_graph_module, fake_value, graph_inputs
from moepass.passes.ir.segment import Segment
from moepass.passes.segments.partition import cut_into_segments, mark_block_edges
from moepass.runtime.lowering.lower_segments import Lowered, by_operators, lower_segments

# Meta entries that the new descriptions replace.
_STALE = ("val", "tensor_meta", "unbacked_bindings", "eager_input_vals")


@dataclasses.dataclass(frozen=True)
class LateGraph:
    """A captured graph, compiled for the sizes of one run.

    `run` is valid while the `guards` hold. `symbols` are their symbols by the names of sizes. `empty` has the names of
    sizes that are 0; they must be the same in a run, because guards assume positive sizes. Without `segments` it runs
    operator by operator.
    """

    run: Lowered
    guards: tuple[sympy.Basic, ...] = ()
    symbols: Mapping[str, sympy.Symbol] = dataclasses.field(default_factory=dict)
    segments: tuple[Segment, ...] | None = None
    empty: frozenset[str] = frozenset()

    def is_right_for(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the graph may run with these sizes, which have their names in the captured graph."""
        if _empty(sizes, self.symbols) != self.empty:
            return False
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        return all(guard.xreplace(values) == sympy.true for guard in self.guards)


def lower_later(captured: GraphModule, sizes: Mapping[str, int], how: str) -> LateGraph:
    """Compile a copy of `captured` for these sizes. `how` is a key of `lower_segments.LOWERINGS`."""
    if how == "eager":
        return LateGraph(by_operators(captured))
    private = copy_graph_module(captured)
    # Tensors made here must not belong to the fake mode of a capture that may be in progress.
    with tracing(None), unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        symbols, fake_mode = _describe_anew(private, sizes)
        # The plan has the blocks of the rewritten graph, but this one still has its exchanges.
        mark_block_edges(private.graph, [match.record for match in find_blocks(private.graph).matches])
        cut = cut_into_segments(private)
        lowered = lower_segments(cut.top, how)
    guards = tuple(guard.expr for guard in fake_mode.shape_env.guards)
    segments = with_lowerings(cut.segments, lowered.lowerings)
    return LateGraph(lowered.top, guards, symbols, segments, _empty(sizes, symbols))


def _empty(sizes: Mapping[str, int], names: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in names if sizes[name] == 0)


def _describe_anew(module: GraphModule, sizes: Mapping[str, int]) -> tuple[dict[str, sympy.Symbol], Any]:
    """Describe every node of `module` in a new fake mode, whose symbols have these sizes as values.

    Returns the symbols by their names in the captured graph, and the mode.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    env = ShapeEnv()
    symbols = {
        name: env.create_symbol(
            size, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
        )
        for name, size in sizes.items()
    }
    fake_mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)

    def renew_size(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        captured = size_expression(size)
        expression = captured.xreplace({symbol: symbols[str(symbol)] for symbol in captured.free_symbols})
        hint = captured.xreplace({symbol: sympy.Integer(sizes[str(symbol)]) for symbol in captured.free_symbols})
        return env.create_symintnode(expression, hint=int(hint))

    def renew(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return renew_size(value)
        with fake_mode:
            return torch.empty_strided(
                [renew_size(size) for size in value.shape],
                [renew_size(stride) for stride in value.stride()],
                dtype=value.dtype,
                device=value.device,
            )

    inputs = [renew(fake_value(node)) for node in graph_inputs(module.graph)]
    for node in module.graph.nodes:
        for key in _STALE:
            node.meta.pop(key, None)
    # Without this dispatcher some operators treat symbolic sizes as numbers.
    with enable_python_dispatcher():
        FakeTensorProp(module, fake_mode).propagate_dont_convert_inputs(*inputs)
    return symbols, fake_mode
