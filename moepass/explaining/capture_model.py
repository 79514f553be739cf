"""Compilation of a model from its config alone, to see what the compiler does with it.

The model is built on the meta device, so no weights are loaded and nothing is computed. The results come from the
plans that the passes make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moepass.explaining.compiler_view import Explanation
from moepass.models.errors import MoepassError
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.segment import TENSORRT
from moepass.passes.ir.slot_operations import BANK_TENSOR
from moepass.passes.pipeline import compile_graph
from moepass.passes.segments.tensorrt_choice import with_tensorrt_choices
from moepass.runtime.execute.captured import capture_notes, name_inputs
from moepass.runtime.lowering.lower_segments import decompositions
from moepass.runtime.offload.offload import find_expert_modules, offload_experts
from moepass.runtime.torch_private import quiet_log

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A process may make any number of captures, because each is discarded after use.
_NO_LIMIT = 1 << 30


def explain_meta_model(
    model: PreTrainedModel, batch: int, seq: int, slots: int = 2, lower: str = "inductor"
) -> Explanation:
    """Offload the experts of a model on the meta device, and plan it for `batch` sequences of `seq` tokens.

    Raises OptionError for a wrong number of slots, and PlanError if the ring has too few slots for the model.
    """
    expert_bytes = expert_layers = 0
    if find_expert_modules(model):
        report = offload_experts(model, device="meta", slots=slots)
        expert_bytes, expert_layers = report.home_bytes, len(report.layers)
    plans, stopped = capture_plans(model, batch, seq, slots=slots, lower=lower)
    return Explanation(
        model=type(model).__name__,
        model_type=str(model.config.model_type),
        batch=batch,
        seq=seq,
        slots=slots,
        expert_layers=expert_layers,
        expert_bytes=expert_bytes,
        other_bytes=sum(value.nbytes for value in model.parameters()),  # offloaded experts are not parameters any more
        plans=plans,
        stopped=stopped,
    )


def capture_plans(
    model: nn.Module, batch: int, seq: int, *, slots: int = 2, lower: str = "inductor"
) -> tuple[tuple[Plan, ...], str | None]:
    """Return the plans of a model on the meta device for input_ids [batch, seq], one for each captured graph.

    The passes run up to lowering. The "compiled" graph then returns outputs of the right shapes, so that capture
    continues after a graph break. The second result is the error that ended capture early, or None. A model that reads
    a value from a tensor ends capture, because tensors on the meta device have no values.
    """
    plans: list[Plan] = []

    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        notes = capture_notes(graph)

        def plan_only(captured: GraphModule, fake_inputs: Sequence[Any]) -> Callable[..., Any]:
            name_inputs(captured, graph)
            reads_banks = any(node.target is BANK_TENSOR for node in captured.graph.nodes)
            # The report has the prediction for the whole model, so none is made for its first layers.
            context = PassContext(slots=slots if reads_banks else 0, capture=notes, disabled=frozenset({"predict"}))
            result = compile_graph(captured, context)
            plan = result.plan
            if lower == TENSORRT:
                plan = dataclasses.replace(plan, segments=with_tensorrt_choices(plan.segments, result.module))
            plans.append(plan)
            return _shapes_only(captured)

        capture = aot_autograd(
            fw_compiler=plan_only, decompositions=decompositions(lower), keep_inference_input_mutations=True
        )
        return capture(graph, example_inputs)

    # Isolated, because Dynamo counts compilations by code, which all models of a family share, and gives up after 8.
    compiled: Any = torch.compile(model, backend=backend, dynamic=False, isolate_recompiles=True)  # type: ignore[call-overload]
    unlimited = torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT)
    stopped = None
    try:
        with torch.no_grad(), unlimited, quiet_log("torch._subclasses.fake_tensor"):
            compiled(input_ids=torch.zeros((batch, seq), dtype=torch.int64, device="meta"), use_cache=False)
    except MoepassError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        if not plans:
            raise
        stopped = " ".join(str(error).split())[:160]
    return tuple(plans), stopped


def _shapes_only(captured: GraphModule) -> Callable[[list[Any]], list[Any]]:
    """Return a stand-in for a compiled graph, with outputs of the right shapes on the meta device."""
    (outputs,) = captured.graph.output_node().args
    values = [getattr(node, "meta", {}).get("val") for node in outputs]  # type: ignore[union-attr]

    def run(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for value in values
        ]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
