"""The `torch.compile` backend "asyncep"."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule

from moepass.compilations import note_compilation, pass_context
from moepass.dump import GraphDump
from moepass.models.errors import InputError
from moepass.options import Options, parse_options
from moepass.passes.blocks.detect import bank_arguments
from moepass.passes.graph.collectives import group_names
from moepass.passes.graph.nodes import draws_random_numbers, graphs_within, is_call
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import CaptureNotes, PassContext
from moepass.passes.ir.segment import TENSORRT
from moepass.passes.ir.slot_operations import BANK_TENSOR
from moepass.passes.parallel.proposals import NO_CROSSOVER
from moepass.passes.pipeline import compile_graph
from moepass.passes.schedule.predict import decisions_for
from moepass.passes.segments.bank_parts import rests_on_device, with_bank_parts
from moepass.passes.segments.cuda_graphs import with_cuda_graphs
from moepass.passes.segments.tensorrt_choice import with_tensorrt_choices
from moepass.runtime.banks.banks import BankStore, find_store
from moepass.runtime.banks.whole_models import whole_model_store
from moepass.runtime.captures.capture_watch import current_watch
from moepass.runtime.execute.adoption import (
    adoption,
    agreement_on_blocks,
    dispatching,
    process_groups,
    replica_check,
    run_checks,
)
from moepass.runtime.execute.captured import capture_notes, name_inputs
from moepass.runtime.execute.dispatching import CapturedFallback
from moepass.runtime.execute.executor import Executor
from moepass.runtime.lowering.lower_segments import decompositions, lower_segments, with_lowerings
from moepass.runtime.lowering.vector_check import vector_check
from moepass.runtime.ranks.eager_watch import eager_watch
from moepass.runtime.ranks.rendezvous import PeerError

logger = logging.getLogger("moepass")


def asyncep(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph: `torch.compile(model, backend="asyncep", options={...})`.

    Raises OptionError for a wrong option, InputError for training, PlanError where the ring has too few slots.

    Training shows in a graph as gradients, or as random numbers that it draws; both are refused. A graph does not say
    whether its modules are in training mode, and one that draws nothing needs no refusal: it gives what the uncompiled
    model gives in that mode under `torch.no_grad()`.
    """
    parsed = parse_options(options)
    if mode not in (None, "default"):
        raise InputError(
            f"mode is {mode!r}; asyncep has no modes, its options are given as options={{...}}",
            name="mode",
            value=mode,
            expected=(None, "default"),
        )
    _refuse_training(example_inputs)
    notes = capture_notes(graph)
    whole = whole_model_store(example_inputs)

    is_for_cpu_compiler = parsed.lower == "inductor" and _is_on_cpu(example_inputs)
    with vector_check() if is_for_cpu_compiler else contextlib.nullcontext() as wait_for_check:

        def compile_inference(captured: GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            name_inputs(captured, graph)
            return _compile(captured, parsed, wait_for_check, notes, whole)

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=_no_training_graph,
            inference_compiler=compile_inference,
            decompositions=decompositions(parsed.lower),
            keep_inference_input_mutations=True,
        )(graph, example_inputs)
    return compiled


def _is_on_cpu(example_inputs: Sequence[Any]) -> bool:
    return all(value.device.type == "cpu" for value in example_inputs if isinstance(value, torch.Tensor))


def _compile(
    captured: GraphModule,
    options: Options,
    before_lowering: Callable[[], None] | None,
    notes: CaptureNotes,
    whole: BankStore | None,
) -> Callable[[list[Any]], Any]:
    _refuse_random(captured)
    device = _ring_device(captured)
    options.check_device(device)
    store = _store_of(captured)
    groups = process_groups(group_names(captured.graph))
    if store:
        options.refuse_adoption()
    context = dataclasses.replace(pass_context(options, store, whole), groups=groups, capture=notes)
    dump = GraphDump(options.dump) if options.dump else None
    agree = agreement_on_blocks(captured, groups, _crossover(options), options.adoption().timeout_s)
    try:
        result = compile_graph(captured, context, dump, agree)
    except PeerError as error:
        return _Raises(error)
    if dump:
        dump.write_plan(result.plan)
    if before_lowering is not None:
        before_lowering()
    lowered = lower_segments(result.module, options.lower, context.chunk_tokens)
    segments = with_lowerings(result.plan.segments, lowered)
    if options.lower == TENSORRT:
        segments = with_tensorrt_choices(segments, result.module)
    if options.cudagraphs:
        segments = with_cuda_graphs(segments, result.module)
    plan = dataclasses.replace(result.plan, segments=segments)
    result = dataclasses.replace(result, plan=_with_parts_as_lowered(result.module, plan, context))
    if dump:
        dump.write_plan(result.plan)  # again: now it says how segments were lowered
    ring = None
    if store and result.plan.slot_stays:
        with unset_fake_temporarily():  # AOT calls the backend in fake mode; slots are real memory
            ring = store.ring(options.debug, result.plan.slot_bytes)
    adopt = adoption(result.plan, device, options.adoption())
    spread_over = {bank.group for bank in result.plan.banks} | {block.group for block in result.plan.local_blocks}
    eager_watch.watch(spread_over - {""})
    dispatcher = dispatching(result.plan, captured, options.lower, device, options.adoption())
    check = replica_check(result.plan, captured, options.adoption(), options.debug)
    fallback = None if check is None else CapturedFallback(check, captured, options.lower)
    checks = run_checks(result.plan, captured, groups, options.adoption().timeout_s)
    executor = Executor(
        lowered, result.plan, ring, adopt, dispatcher, fallback, checks, options.debug, options.cudagraphs
    )
    note_compilation(executor, context)
    _log(result.plan)
    _warn_of_memory(result.plan)
    watch = current_watch()
    return executor if watch is None else watch.watched(captured, lowered, executor)


def _with_parts_as_lowered(module: GraphModule, plan: Plan, context: PassContext) -> Plan:
    """`plan`, where banks come whole if a segment that was to run expert by expert was not lowered so."""
    if not any(bank.in_parts for bank in plan.banks):
        return plan
    lowered = with_bank_parts(module, plan)
    if lowered == plan or plan.decisions is None:
        return lowered
    return dataclasses.replace(lowered, decisions=decisions_for(lowered, dict(plan.sizes), context))


class _Raises:
    """Stands in for a compiled graph and raises the ranks' disagreement when called.

    If the backend raised it, Dynamo would report a failure of the backend instead of this error.
    """

    _boxed_call = True

    def __init__(self, error: PeerError) -> None:
        self._error = error

    def __call__(self, inputs: list[Any]) -> Any:
        raise self._error


def _crossover(options: Options) -> str:
    """The option that sets the crossover, as text that ranks compare."""
    if options.all_to_all_below is not None:
        return str(options.all_to_all_below)
    return NO_CROSSOVER if options.hardware is None else "estimated from a profile"


def _log(plan: Plan) -> None:
    counts = f"{len(plan.blocks)} blocks, {plan.distinct_segments} distinct segments"
    logger.info("%s: %s (%s)", plan.strategy, plan.reason, counts)
    if plan.dispatch is not None:
        logger.info("dispatch: %s", plan.dispatch.reason)
    for refusal in plan.refusals:
        logger.info("refused %s", refusal)
    for segment in plan.segments:
        if segment.lowering is not None and segment.lowering.refusal is not None:
            logger.info("%s (%s): %s", segment.name, segment.role, segment.lowering.refusal)
        if segment.cuda_graph is not None and segment.cuda_graph.refusal is not None:
            logger.info("%s (%s): %s", segment.name, segment.role, segment.cuda_graph.refusal)


def _warn_of_memory(plan: Plan) -> None:
    """Where a step of this graph no longer fits into the memory budget that layers were placed for, and why."""
    if plan.decisions is None:  # the pass that predicts was left out
        return
    memory, budget = plan.decisions.memory, plan.decisions.memory_budget_bytes
    if memory is None or budget is None or memory.peak_bytes <= budget:
        return
    needed = (
        f"a step needs {memory.peak_bytes:.0f} bytes, more than the memory budget of {budget:.0f} that layers were "
        "placed for"
    )
    whole = [bank for bank in plan.banks if rests_on_device(bank) and not bank.in_parts]
    if whole:
        banks = whole[0].name if len(whole) == 1 else f"{whole[0].name} and {len(whole) - 1} others"
        logger.warning(
            "%s: slots were to be without this rank's own experts, but this graph reads whole banks (%s). "
            "lower='inductor' takes them in parts where experts are grouped GEMMs (transformers: "
            "experts_implementation='grouped_mm'). Else ask for a smaller budget",
            needed,
            banks,
        )
    elif plan.activations is None or plan.activations.room_bytes is None:
        logger.warning(
            "%s by a formula: activations of this graph take %.0f bytes. chunk_tokens='auto' runs as many tokens at a "
            "time as there is room for, where that helps. Else ask for a smaller budget",
            needed,
            memory.activation_bytes,
        )


def _store_of(captured: GraphModule) -> BankStore | None:
    # Banks that a branch inside the graph reads are gathered synchronously, which needs no ring.
    for node in captured.graph.nodes:
        if is_call(node, BANK_TENSOR):
            return find_store(bank_arguments(node).store)
    return None


def _ring_device(captured: GraphModule) -> torch.device:
    """The device of a ring for this graph's parameters: the one that computes. Small tensors may be on the CPU."""
    values = [node.meta.get("val") for node in captured.graph.nodes]
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _refuse_training(example_inputs: Sequence[Any]) -> None:
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise InputError(
            "asyncep compiles inference only, but gradients are on and an input or parameter requires them; call the "
            "compiled model under torch.no_grad() or torch.inference_mode()"
        )


def _refuse_random(captured: GraphModule) -> None:
    for graph in graphs_within(captured):
        for node in graph.nodes:
            if draws_random_numbers(node):
                raise InputError(
                    f"asyncep compiles inference only, but the graph draws random numbers ({node.target}), as dropout "
                    "and router noise do in training mode; call model.eval() first"
                )


def _no_training_graph(captured: GraphModule, fake_inputs: Sequence[Any]) -> Any:
    raise InputError("asyncep compiles inference only; call the compiled model under torch.no_grad()")
