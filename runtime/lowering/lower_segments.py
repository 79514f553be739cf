"""Compile the segments of a partitioned graph, each distinct segment once.

Contract
    in    a top-level graph of segments
    out   LoweredGraph: the same top-level graph with callables as segments, and how each segment was lowered, with the
          reason if that differs from the requested lowering
    `eager` runs the captured operators one by one and is bit-identical to the model; `inductor` fuses them; `tensorrt`
          builds engines for dense segments and leaves the others to `inductor`
    an output that has its own memory in the partitioned graph keeps it: see `LoweredSegment`

Segments are compiled here, with fake inputs, and not in the first call, because the guards that Inductor adds while it
compiles must become guards of the graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.passes.graph.nodes import copy_graph_module, fake_value, graph_inputs, is_call, unbacked_conditions
from moepass.passes.ir.segment import (
    BY_EXPERT,
    EAGER,
    EXPERT_LOOP,
    INDUCTOR,
    TENSORRT,
    TRITON,
    Lowering,
    NotLowered,
)
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.walk import view_source
from moepass.passes.segments.tensorrt_choice import stays_out_of_tensorrt
from moepass.passes.segments.token_program import is_region
from moepass.runtime.lowering.boxed_code import TakesList, run_by_list
from moepass.runtime.lowering.cpu_gemms import use_faster_gemms
from moepass.runtime.lowering.lower_experts import ExpertLoop, lower_experts
from moepass.runtime.lowering.lower_tensorrt import lower_to_tensorrt
from moepass.runtime.lowering.lower_token_loop import lower_token_loop
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton
from moepass.runtime.torch_private import compilers_side_by_side

Lowered = Callable[..., Any]
# Inductor unrolls sums of fewer terms. No supported model routes a token to more than 16 experts.
_UNROLLED_BELOW = 17
_SORTS_TAG = "sorts any number"
_VIEWS_OF_TRACED_STRIDES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def decompositions(how: str) -> dict[Any, Callable[..., Any]]:
    """Return the operators that AOT decomposes for the lowering `how`: none for `eager`, which stays bit-identical."""
    if how == EAGER:
        return {}
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Callable[..., Any]] = select_decomp_table()
    return table


class LoweredSegment(TakesList):
    """A lowered segment in the top-level graph. It returns a tuple.

    The schedule relies on copies: `w * ones_like(w)` outlives the slot of `w`, and a copy of a buffer outlives the
    buffer's update. Inductor removes such copies, and then an output is an input, or a view of an input. So each output
    that the captured segment computes as new memory is compared with the inputs after the run, and copied if they share
    a storage.

    This covers every case, for any lowering. Memory that exists before a segment can leave it only as an output, and
    such an output has the storage of an input. The copy is in time, because nothing is overwritten inside a segment:
    releases and updates of buffers are between segments. An input without references cannot be overwritten.

    Inputs at positions `tensors` are compared with outputs at positions `fresh`. If `boxed`, `run` takes a list.
    """

    def __init__(self, run: Lowered, tensors: Sequence[int], fresh: Sequence[int], boxed: bool) -> None:
        super().__init__()
        self.run = run
        self.boxed = boxed
        self.tensors = list(tensors)
        self.fresh = list(fresh)
        # Created in the first run.
        self._call: Callable[[list[Any]], Any] | None = None

    @staticmethod
    def of(run: Lowered, segment: GraphModule, boxed: bool) -> LoweredSegment:
        """Return `run`, compiled from `segment`, as a lowered segment."""
        inputs, outputs = graph_inputs(segment.graph), segment.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        tensors = [position for position, node in enumerate(inputs) if _is_strided(fake_value(node))]
        fresh = [
            position
            for position, node in enumerate(outputs)
            if isinstance(node, Node) and _is_strided(fake_value(node)) and view_source(node).op != "placeholder"
        ]
        return LoweredSegment(run, tensors, fresh, boxed)

    def forward(self, *inputs: Any) -> Any:
        """Return the outputs for `inputs`."""
        return self.run_list(list(inputs))

    def run_list(self, inputs: list[Any]) -> Any:
        """Return the outputs and empty `inputs`."""
        if self._call is None:
            self._call = self._by_list()
        if not self.fresh:
            return self._call(inputs)
        storages = [
            tensor.untyped_storage()
            for position in self.tensors
            # Weights of experts may come in parts.
            for tensor in (inputs[position] if isinstance(inputs[position], tuple) else (inputs[position],))
        ]
        # An input may be freed while the segment runs; then another tensor may get its address.
        input_storages = [(StorageWeakRef(storage), storage.data_ptr()) for storage in storages]
        del storages
        outputs = self._call(inputs)
        living = {address for storage, address in input_storages if not storage.expired()}
        shared = [position for position in self.fresh if outputs[position].untyped_storage().data_ptr() in living]
        if not shared:
            return outputs
        return tuple(value.clone() if position in shared else value for position, value in enumerate(outputs))

    def _by_list(self) -> Callable[[list[Any]], Any]:
        if self.boxed:
            return self.run
        return run_by_list(self.run) if isinstance(self.run, GraphModule) else lambda inputs: self.run(*inputs)


def _is_strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class LoweredGraph(NamedTuple):
    """A top-level graph of lowered segments, and how each segment was lowered, by its name."""

    top: GraphModule
    lowerings: dict[str, Lowering]


def lower_segments(top: GraphModule, how: str, chunk_tokens: int | None = None) -> LoweredGraph:
    """Lower every segment of `top`, which is not changed. `how` is a key of `LOWERINGS`.

    Segments that treat every token alone run at most `chunk_tokens` tokens at a time; with None, all at once.
    """
    lowered = copy_graph_module(top)
    lowerings = {}
    with compilers_side_by_side() if how != EAGER else contextlib.nullcontext():
        for name, segment in list(lowered.named_children()):
            if isinstance(segment, GraphModule):
                if chunk_tokens is not None and is_region(segment):
                    run, lowerings[name] = _in_chunks(segment, how, chunk_tokens)
                else:
                    run, lowerings[name] = LOWERINGS[how](segment)
                setattr(lowered, name, run)
    return LoweredGraph(lowered, lowerings)


def _in_chunks(segment: GraphModule, how: str, chunk_tokens: int) -> tuple[LoweredSegment, Lowering]:
    inside: list[Lowering] = []

    def lower_body(body: GraphModule) -> GraphModule:
        lowered = lower_segments(body, how)
        inside.extend(lowered.lowerings.values())
        return lowered.top

    loop = lower_token_loop(segment, chunk_tokens, lower_body)
    if isinstance(loop, NotLowered):
        run, lowering = LOWERINGS[how](segment)
        return run, dataclasses.replace(lowering, refusal=loop)
    experts = next((lowering.how for lowering in inside if lowering.how in BY_EXPERT), "")
    refusal = next((lowering.refusal for lowering in inside if lowering.refusal is not None), None)
    return LoweredSegment.of(loop, segment, boxed=True), Lowering(how, refusal, chunk_tokens, experts)


def by_operators(captured: GraphModule) -> GraphModule:
    """Return a copy of `captured` that runs its operators one by one.

    Views that real strides do not allow become copies.

    Strides at capture come from torch's fake kernels, and some real kernels return other strides. For example,
    `constant_pad_nd` with a symbolic padding that is 0 keeps the strides of its input, but the fake one is contiguous.
    Then a view of the captured graph can be impossible. The model itself uses `reshape`, which checks the real strides,
    or it fails for these strides as well.
    """
    copied = copy_graph_module(captured)
    for node in copied.graph.nodes:
        if is_call(node, *_VIEWS_OF_TRACED_STRIDES):
            node.target = torch.ops.aten.reshape.default
    copied.recompile()
    return copied


def _lower_eager(segment: GraphModule) -> tuple[LoweredSegment, Lowering]:
    # Here the comparison of storages catches operators whose schema hides that they return a view.
    return LoweredSegment.of(by_operators(segment), segment, boxed=False), Lowering(EAGER)


def _lower_inductor(segment: GraphModule) -> tuple[LoweredSegment, Lowering]:
    by_expert = _by_expert(segment)
    if isinstance(by_expert, (ExpertLoop, TritonExperts)):
        how = EXPERT_LOOP if isinstance(by_expert, ExpertLoop) else TRITON
        return LoweredSegment.of(by_expert, segment, boxed=True), Lowering(how)
    # Inductor edits the graph that it compiles; the partitioned one stays readable.
    private = copy_graph_module(segment)
    inputs: Sequence[Any] = [fake_value(node) for node in graph_inputs(private.graph)]
    run = compile_with_inductor(private, _fake_mode_of(segment, inputs))
    return LoweredSegment.of(run, segment, boxed=True), Lowering(INDUCTOR, refusal=by_expert)


def _lower_tensorrt(segment: GraphModule) -> tuple[LoweredSegment, Lowering]:
    if stays_out_of_tensorrt(segment):
        return _lower_inductor(segment)
    engine = lower_to_tensorrt(segment)
    if isinstance(engine, NotLowered):
        run, lowering = _lower_inductor(segment)
        return run, dataclasses.replace(lowering, refusal=engine)
    return LoweredSegment.of(engine, segment, boxed=False), Lowering(TENSORRT)


def _by_expert(segment: GraphModule) -> ExpertLoop | TritonExperts | NotLowered | None:
    """Lower the segment's experts to a loop or kernels; return why not, or None if the segment has no experts."""
    inputs = [fake_value(node) for node in graph_inputs(segment.graph)]
    if any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in inputs):
        mode = _fake_mode_of(segment, inputs)
        return lower_to_triton(segment, lambda graph: compile_with_inductor(graph, mode))
    return lower_experts(segment, compile_with_inductor)


def compile_with_inductor(module: GraphModule, fake_mode: Any) -> Lowered:
    """Compile a graph whose nodes have values of `fake_mode`. Changes the graph.

    Returns a callable that takes the graph's inputs as one list.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    for node in graph_inputs(module.graph):
        node.meta["val"] = _own_symbol(fake_value(node))
    inputs: Sequence[Any] = [fake_value(node) for node in graph_inputs(module.graph)]
    # Inductor's layout optimisation returns wrong results for depthwise 1-d convolutions on CPUs (seen on jamba with
    # torch 2.13.0, for the graph and for its segments), and does not speed up language models.
    correct: dict[str, Any] = {"layout_optimization": False}
    # The top-level graph asserts conditions on sizes. Inductor would assert them again, with sizes that are no inputs
    # of the segment. Older versions have no such switch.
    if hasattr(inductor_config, "do_not_emit_runtime_assertions"):
        correct["do_not_emit_runtime_assertions"] = True
    if any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in inputs):
        # This adds the outputs of a token's experts element by element: a reduction would read memory at a third of the
        # speed. [Empirical] 8 experts, hidden 2048, 32,768 tokens on an H100 with torch 2.11: 1.26 ms for 1.2 GB.
        correct["unroll_reductions_threshold"] = _UNROLLED_BELOW
    # Inductor's cache key includes neither conditions on data-dependent sizes, which it compiles into its code, nor the
    # choice for sorts.
    tag = "; ".join([torch.compiler.config.cache_key_tag, _SORTS_TAG, *unbacked_conditions(module.graph)])
    with_tag = torch.compiler.config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), inductor_config.patch(correct), with_tag:
        joint_graph_passes(module)
        _sort_any_number(module)
        use_faster_gemms(module)
        run: Lowered = compile_fx_inner(
            module, inputs, cudagraphs=BoxedBool(False), is_inference=True, is_backward=False, static_input_idxs=()
        )
    return run


def _sort_any_number(module: GraphModule) -> None:
    """Let Inductor call ATen's sort for a dynamic number of values.

    Inductor would do so in any case, because it sorts at most 512 values itself. But first it would compare the number
    with the limit of 16-bit indices, and so add a guard to the graph, which would be compiled again for more values.
    """
    for node in module.graph.nodes:
        if is_call(node, torch.ops.aten.sort.default, torch.ops.aten.sort.stable):
            arguments = all_arguments(node)
            if isinstance(fake_value(arguments["self"]).shape[arguments["dim"]], torch.SymInt):
                node.meta["should_fallback"] = True


def _own_symbol(value: Any) -> Any:
    """Return a size under the symbol that shapes use for it.

    If the sizes of two inputs turned out equal, shapes use one symbol for both, but each input keeps its own, and
    Inductor would bind the size under that name.
    """
    if not isinstance(value, torch.SymInt) or value.node._expr == value.node.expr:
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)


def _fake_mode_of(segment: GraphModule, inputs: Sequence[Any]) -> Any:
    from torch._guards import detect_fake_mode
    from torch._subclasses import FakeTensorMode

    mode = detect_fake_mode([value for value in inputs if not isinstance(value, py_sym_types)])
    if mode is None:
        mode = detect_fake_mode([fake_value(node) for node in segment.graph.nodes])
    return mode or FakeTensorMode(allow_non_fake_inputs=True)


LOWERINGS: dict[str, Callable[[GraphModule], tuple[LoweredSegment, Lowering]]] = {
    INDUCTOR: _lower_inductor,
    EAGER: _lower_eager,
    TENSORRT: _lower_tensorrt,
}
