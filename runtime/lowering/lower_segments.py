"""Compile the segments of a partitioned graph, each distinct one once.

Contract
    in    a top-level graph of segments
    out   the same top-level graph, its segments replaced by callables of the chosen lowering, each of which says how it
          was lowered, and why where that is not as wanted
    `eager` runs the captured operators one by one: bit-identical to the model; `inductor` fuses them; `tensorrt` makes
          engines of dense segments, and leaves the others to `inductor`
    an output that was memory of its own in the partitioned graph still is: see `LoweredSegment`

Compilation happens here, with fake inputs, and not inside the first call: the guards that Inductor adds while it
compiles must still reach the graph's own guards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.passes.graph.nodes import (
    copy_graph_module,
    fake_value,
    graph_inputs,
    is_call,
    unbacked_conditions,
    view_source,
)
from moepass.passes.ir.segment import (
    BY_EXPERT,
    EAGER,
    EXPERT_LOOP,
    INDUCTOR,
    TENSORRT,
    TRITON,
    Lowering,
    NotLowered,
    Segment,
)
from moepass.passes.segments.tensorrt_choice import stays_out_of_tensorrt
from moepass.passes.segments.token_program import is_region
from moepass.runtime.lowering.boxed_code import TakesList, run_by_list
from moepass.runtime.lowering.lower_experts import ExpertLoop, lower_experts
from moepass.runtime.lowering.lower_tensorrt import lower_to_tensorrt
from moepass.runtime.lowering.lower_token_loop import lower_token_loop
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton
from moepass.runtime.torch_private import compilers_side_by_side

Lowered = Callable[..., Any]
# Terms of a sum; no model here gives a token to more than 16 experts.
_UNROLLED_BELOW = 17
_VIEWS_OF_TRACED_STRIDES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def decompositions(how: str) -> dict[Any, Callable[..., Any]]:
    """The operators that AOT decomposes for the lowering `how`: none for `eager`, which stays bit-identical."""
    if how == EAGER:
        return {}
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Callable[..., Any]] = select_decomp_table()
    return table


class LoweredSegment(TakesList):
    """A lowered segment in the top-level graph: called with its inputs, gives a tuple.

    The schedule was made for a graph in which a copy is a copy: `w * ones_like(w)` outlives the slot of `w`, and a copy
    of a buffer outlives the buffer's update. Inductor removes such copies, in its passes and while it lowers, and then
    an output is an input, or a view of one. So every output that `segment` computes as fresh memory is compared with
    the inputs when the segment has run, and copied where it shares a storage with one.

    This is complete, whatever the lowering did. Memory that is alive when a segment begins can reach what comes after
    it only through an output, and an output that shows an input has that input's storage. The copy comes in time,
    because nothing is overwritten inside a segment: releases and updates of buffers stand between segments. An input
    that nobody holds any more when the segment has run is overwritten by nobody.
    """

    def __init__(
        self, run: Lowered, tensors: Sequence[int], fresh: Sequence[int], boxed: bool, lowering: Lowering
    ) -> None:
        """`tensors` are the inputs, and `fresh` the outputs, that are compared. `run` takes a list where `boxed`."""
        super().__init__()
        self.run = run
        self.boxed = boxed
        self.lowering = lowering
        self.tensors = list(tensors)
        self.fresh = list(fresh)
        # Made in the first run.
        self._call: Callable[[list[Any]], Any] | None = None

    @staticmethod
    def of(run: Lowered, segment: GraphModule, boxed: bool, lowering: Lowering) -> LoweredSegment:
        """The lowered form of `segment`."""
        inputs, outputs = graph_inputs(segment.graph), segment.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        tensors = [position for position, node in enumerate(inputs) if _is_strided(fake_value(node))]
        fresh = [
            position
            for position, node in enumerate(outputs)
            if isinstance(node, Node) and _is_strided(fake_value(node)) and view_source(node).op != "placeholder"
        ]
        return LoweredSegment(run, tensors, fresh, boxed, lowering)

    def forward(self, *inputs: Any) -> Any:
        return self.run_list(list(inputs))

    def run_list(self, inputs: list[Any]) -> Any:
        if self._call is None:
            self._call = self._by_list()
        if not self.fresh:
            return self._call(inputs)
        storages = [
            part.untyped_storage()
            for position in self.tensors
            # Weights of experts may come in parts.
            for part in (inputs[position] if isinstance(inputs[position], tuple) else (inputs[position],))
        ]
        # Their memory may be given away while the segment runs: the same address is another tensor then.
        given = [(StorageWeakRef(storage), storage.data_ptr()) for storage in storages]
        del storages
        outputs = self._call(inputs)
        taken = {address for storage, address in given if not storage.expired()}
        shared = [place for place in self.fresh if outputs[place].untyped_storage().data_ptr() in taken]
        if not shared:
            return outputs
        return tuple(value.clone() if place in shared else value for place, value in enumerate(outputs))

    def _by_list(self) -> Callable[[list[Any]], Any]:
        if self.boxed:
            return self.run
        return run_by_list(self.run) if isinstance(self.run, GraphModule) else lambda inputs: self.run(*inputs)


def _is_strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def lower_segments(top: GraphModule, how: str, chunk_tokens: int | None = None) -> GraphModule:
    """Replace every segment of `top` by its compiled form. `how` is a key of `LOWERINGS`.

    Segments that treat every token alone run at most `chunk_tokens` tokens at a time; None: all at once.
    """
    lowered = copy_graph_module(top)
    with compilers_side_by_side() if how != EAGER else contextlib.nullcontext():
        for name, segment in list(lowered.named_children()):
            if isinstance(segment, GraphModule):
                if chunk_tokens is not None and is_region(segment):
                    setattr(lowered, name, _in_chunks(segment, how, chunk_tokens))
                else:
                    setattr(lowered, name, LOWERINGS[how](segment))
    return lowered


def _in_chunks(segment: GraphModule, how: str, chunk_tokens: int) -> LoweredSegment:
    run = lower_token_loop(segment, chunk_tokens, lambda body: lower_segments(body, how))
    if isinstance(run, NotLowered):
        whole = LOWERINGS[how](segment)
        whole.lowering = dataclasses.replace(whole.lowering, refusal=run)
        return whole
    inside = [part.lowering for part in run.body.children() if isinstance(part, LoweredSegment)]
    experts = next((lowering.how for lowering in inside if lowering.how in BY_EXPERT), "")
    refusal = next((lowering.refusal for lowering in inside if lowering.refusal is not None), None)
    return LoweredSegment.of(run, segment, boxed=True, lowering=Lowering(how, refusal, chunk_tokens, experts))


def with_lowerings(segments: Sequence[Segment], lowered: GraphModule) -> tuple[Segment, ...]:
    """The records of `segments` with how each came to run in `lowered`, which `lower_segments` gave."""
    modules = dict(lowered.named_children())
    found = {name: module.lowering for name, module in modules.items() if isinstance(module, LoweredSegment)}
    return tuple(dataclasses.replace(segment, lowering=found[segment.name]) for segment in segments)


def by_operators(captured: GraphModule) -> GraphModule:
    """A copy that runs the operators of `captured` one by one. Where no view can give a shape, it copies.

    Strides while capturing are those of torch's fake kernels, and some real kernels give others. `constant_pad_nd` does
    with a padding of 0 that is a symbol: it keeps the strides of its input, and the fake one is contiguous. Views that
    the captured graph holds for possible are not possible then. The model itself asks for a shape by `reshape`, which
    looks at the real strides, or is wrong for them too.
    """
    copied = copy_graph_module(captured)
    for node in copied.graph.nodes:
        if is_call(node, *_VIEWS_OF_TRACED_STRIDES):
            node.target = torch.ops.aten.reshape.default
    copied.recompile()
    return copied


def _lower_eager(segment: GraphModule) -> LoweredSegment:
    # Here the comparison of storages catches operators whose schema hides that they give a view.
    return LoweredSegment.of(by_operators(segment), segment, boxed=False, lowering=Lowering(EAGER))


def _lower_inductor(segment: GraphModule) -> LoweredSegment:
    by_expert = _by_expert(segment)
    if isinstance(by_expert, (ExpertLoop, TritonExperts)):
        how = EXPERT_LOOP if isinstance(by_expert, ExpertLoop) else TRITON
        return LoweredSegment.of(by_expert, segment, boxed=True, lowering=Lowering(how))
    # Inductor edits the graph that it compiles; the partitioned one stays readable.
    private = copy_graph_module(segment)
    inputs: Sequence[Any] = [fake_value(node) for node in graph_inputs(private.graph)]
    fake_mode = _fake_mode_of(segment, inputs)
    run = compile_with_inductor(private, fake_mode)
    return LoweredSegment.of(run, segment, boxed=True, lowering=Lowering(INDUCTOR, refusal=by_expert))


def _lower_tensorrt(segment: GraphModule) -> LoweredSegment:
    if stays_out_of_tensorrt(segment):
        return _lower_inductor(segment)
    engine = lower_to_tensorrt(segment)
    if isinstance(engine, NotLowered):
        lowered = _lower_inductor(segment)
        lowered.lowering = dataclasses.replace(lowered.lowering, refusal=engine)
        return lowered
    return LoweredSegment.of(engine, segment, boxed=False, lowering=Lowering(TENSORRT))


def _by_expert(segment: GraphModule) -> ExpertLoop | TritonExperts | NotLowered | None:
    """The segment's experts by code of ours, or why not; None where it has none."""
    inputs = [fake_value(node) for node in graph_inputs(segment.graph)]
    if any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in inputs):
        mode = _fake_mode_of(segment, inputs)
        return lower_to_triton(segment, lambda graph: compile_with_inductor(graph, mode))
    return lower_experts(segment, compile_with_inductor)


def compile_with_inductor(module: GraphModule, fake_mode: Any) -> Lowered:
    """Compile a graph whose nodes have values of `fake_mode`; the graph is changed. Takes its inputs as a list."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    for node in graph_inputs(module.graph):
        node.meta["val"] = _own_symbol(fake_value(node))
    inputs: Sequence[Any] = [fake_value(node) for node in graph_inputs(module.graph)]
    # Inductor's layout optimisation gives wrong results for depthwise 1-d convolutions on CPUs (seen with torch 2.13.0
    # on jamba, whole graph and segment alike), and has nothing to gain in a language model.
    correct: dict[str, Any] = {"layout_optimization": False}
    # What is asserted of sizes stands in the top-level graph; Inductor would assert it again, with sizes that are no
    # inputs of the segment. Versions that cannot be told so are left to it.
    if hasattr(inductor_config, "do_not_emit_runtime_assertions"):
        correct["do_not_emit_runtime_assertions"] = True
    if any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in inputs):
        # The sum over a token's experts, added up element by element: as a reduction, it reads memory at a third of the
        # speed. [Empirical] 8 experts, hidden 2048, 32,768 tokens on an H100 with torch 2.11: 1.26 ms for 1.2 GB.
        correct["unroll_reductions_threshold"] = _UNROLLED_BELOW
    # Inductor compiles in what is known of sizes that only a run tells, but its cache does not look at that.
    tag = "; ".join([torch.compiler.config.cache_key_tag, *unbacked_conditions(module.graph)])
    known = torch.compiler.config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), inductor_config.patch(correct), known:
        joint_graph_passes(module)
        run: Lowered = compile_fx_inner(
            module, inputs, cudagraphs=BoxedBool(False), is_inference=True, is_backward=False, static_input_idxs=()
        )
    return run


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


LOWERINGS: dict[str, Callable[[GraphModule], LoweredSegment]] = {
    INDUCTOR: _lower_inductor,
    EAGER: _lower_eager,
    TENSORRT: _lower_tensorrt,
}
