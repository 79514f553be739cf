"""The `torch.compile` backend "asyncep"."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule

from moepass.compilations import note_compilation, pass_context
from moepass.models.errors import InputError, OptionError
from moepass.options import Options, parse_options
from moepass.passes.blocks.detect import bank_arguments
from moepass.passes.finish import finish
from moepass.passes.graph.collectives import group_names
from moepass.passes.graph.nodes import graphs_within, is_call
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import CaptureNotes
from moepass.passes.ir.segment import TENSORRT
from moepass.passes.ir.slot_operations import BANK_TENSOR
from moepass.passes.ops.traits import draws_random_numbers
from moepass.passes.parallel.proposals import NO_CROSSOVER
from moepass.passes.pipeline import compile_graph
from moepass.passes.segments.bank_parts import rests_on_device
from moepass.runtime.banks.banks import BankStore, find_store, whole_model_store
from moepass.runtime.captures.capture_watch import current_watch
from moepass.runtime.execute.adoption import adoption, agreement_on_blocks, captured_forms, process_groups, run_checks
from moepass.runtime.execute.captured import capture_notes, name_inputs
from moepass.runtime.execute.executor import Executor
from moepass.runtime.execute.run_findings import RunFindings
from moepass.runtime.lowering.lower_segments import decompositions, lower_segments
from moepass.runtime.ranks.eager_watch import eager_watch
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.torch_private import errors_past_dynamo

logger = logging.getLogger("moepass")


def asyncep(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph: `torch.compile(model, backend="asyncep", options={...})`.

    Graphs that compute gradients or draw random numbers are refused, because they are for training. A graph does not
    show whether its modules are in training mode. Without random numbers it computes what the uncompiled model computes
    in the same mode under `torch.no_grad()`.

    Raises OptionError for a wrong option, InputError if the graph is for training, and PlanError for too few slots.
    `torch.compile` raises these errors unchanged.
    """
    with errors_past_dynamo():
        return _compile_graph(graph, example_inputs, options, mode)


def _compile_graph(
    graph: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    parsed = parse_options(options)
    if mode not in (None, "default"):
        text = f"mode is {mode!r}, but backend asyncep has no modes; pass its options as options={{...}}"
        raise InputError(text, name="mode", value=mode, expected=(None, "default"))
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise InputError(
            "asyncep compiles inference only, but gradients are on and an input or parameter requires them; call the "
            "compiled model under torch.no_grad() or torch.inference_mode()"
        )
    notes = capture_notes(graph)
    resident = whole_model_store(example_inputs)

    is_on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    with vector_check() if parsed.lower == "inductor" and is_on_cpu else contextlib.nullcontext() as wait_for_check:

        def compile_inference(captured: GraphModule, fake_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            name_inputs(captured, graph)
            return _compile(captured, parsed, wait_for_check, notes, resident)

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=_no_training_graph,
            inference_compiler=compile_inference,
            decompositions=decompositions(parsed.lower),
            keep_inference_input_mutations=True,
        )(graph, example_inputs)
    return compiled


@contextlib.contextmanager
def vector_check() -> Iterator[Callable[[], None]]:
    """Ask for the CPU's vector instructions in a thread, as Inductor does before its first kernel, during the block.

    The answer, which Inductor caches in this process, takes seconds: Inductor compiles a test program and starts a
    process that loads it. Yields a function that waits for the thread, which has ended when the block ends or raises.
    """
    # Imported here, because two threads must not import modules at the same time that import each other.
    from torch._inductor import codecache as codecache
    from torch._inductor import cpp_builder as cpp_builder
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    def ask() -> None:
        try:
            pick_vec_isa()
        except Exception as error:
            # Inductor will ask again, and its error reaches the caller.
            logger.debug("no answer about vector instructions: %s: %s", type(error).__name__, error)

    # A copy of this context has the caller's changes of Inductor's configuration.
    asking = threading.Thread(target=contextvars.copy_context().run, args=(ask,), name="moepass-vector-check")
    asking.start()
    try:
        yield asking.join
    finally:
        asking.join()


def _compile(
    captured: GraphModule,
    options: Options,
    before_lowering: Callable[[], None] | None,
    notes: CaptureNotes,
    resident: BankStore | None,
) -> Callable[[list[Any]], Any]:
    """Run the passes on a functional ATen graph, lower its segments and return what runs it.

    `before_lowering` is called before the first segment is lowered. `resident` is the store of a model whose experts
    were not moved.
    """
    _refuse_random(captured)
    device = _ring_device(captured)
    options.check_device(device)
    store = _store_of(captured)
    groups = process_groups(group_names(captured.graph))
    if store:
        options.refuse_adoption()
    context = dataclasses.replace(pass_context(options, store, resident), groups=groups, capture=notes)
    dump = _GraphDump(options.dump) if options.dump else None
    adoption_options = options.adoption()
    agree = agreement_on_blocks(captured, groups, _crossover(options), adoption_options.timeout_s)
    try:
        result = compile_graph(captured, context, dump, agree)
    except PeerError as error:
        return _raiser(error)
    if dump:
        dump.write_plan(result.plan)
    if before_lowering is not None:
        before_lowering()
    lowered = lower_segments(result.module, options.lower, context.chunk_tokens)
    plan = finish(
        result.plan,
        result.module,
        lowered.lowerings,
        context,
        tensorrt=options.lower == TENSORRT,
        cudagraphs=options.cudagraphs,
    )
    if dump:
        dump.write_plan(plan)
    ring = None
    if store and plan.slot_stays:
        with unset_fake_temporarily():  # AOT calls the backend in fake mode; slots are real memory
            ring = store.ring(options.debug, plan.slot_bytes)
    eager_watch.watch({bank.group for bank in plan.banks if bank.group})
    findings = RunFindings()
    executor = Executor(
        lowered.top,
        plan,
        ring,
        adoption(plan, device, adoption_options),
        captured_forms(plan, captured, options.lower, device, adoption_options, options.debug, findings),
        run_checks(plan, captured, groups, adoption_options.timeout_s),
        options.debug,
        options.cudagraphs,
        findings,
    )
    note_compilation(executor, context)
    _log(plan)
    _warn_of_memory(plan)
    watch = current_watch()
    return executor if watch is None else watch.watched(captured, lowered.top, executor)


class _GraphDump:
    """An observer of the passes: it writes every intermediate graph as `NN-PASS.py` into a new folder `graph-K`.

    Constructing one raises OptionError if `folder`, the option `dump`, cannot be written.
    """

    def __init__(self, folder: str) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            existing = {path.name for path in Path(folder).iterdir()}
            name = next(name for name in map("graph-{}".format, itertools.count()) if name not in existing)
            self.folder = Path(folder) / name
            self.folder.mkdir()
        except OSError as error:
            text = f"option dump is {folder!r}, which cannot be written: {error.strerror}"
            raise OptionError(text, name="dump", value=folder) from error
        self._count = 0

    def __call__(self, name: str, module: GraphModule, plan: Plan) -> None:
        text = _readable(module)
        for child_name, child in module.named_children():
            if isinstance(child, GraphModule):
                text += f"\n\n# {child_name}\n{_readable(child)}"
        (self.folder / f"{self._count:02d}-{name}.py").write_text(text)
        self._count += 1

    def write_plan(self, plan: Plan) -> None:
        (self.folder / "plan.json").write_text(plan.to_json() + "\n")


def _readable(module: GraphModule) -> str:
    # AOT names its graphs <lambda>, which is not a valid class name.
    return module.print_readable(print_output=False).replace("class <lambda>(", "class Graph(")


def _raiser(error: PeerError) -> Callable[[list[Any]], Any]:
    """Return a stand-in for a compiled graph that raises the ranks' disagreement when it is called.

    If the backend raised the error itself, Dynamo would report a failure of the backend instead.
    """

    def raise_error(inputs: list[Any]) -> Any:
        raise error

    raise_error._boxed_call = True  # type: ignore[attr-defined]
    return raise_error


def _crossover(options: Options) -> str:
    """Return the option that sets the crossover, as text that ranks compare."""
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
        for record in (segment.lowering, segment.cuda_graph):
            if record is not None and record.refusal is not None:
                logger.info("%s (%s): %s", segment.name, segment.role, record.refusal)


def _warn_of_memory(plan: Plan) -> None:
    """Warn if a step of this graph exceeds the memory budget that resident layers were chosen for."""
    if plan.decisions is None:  # the pass that predicts was left out
        return
    memory, budget = plan.decisions.memory, plan.decisions.memory_budget_bytes
    if memory is None or budget is None or memory.peak_bytes <= budget:
        return
    needed = (
        f"a step needs {memory.peak_bytes:.0f} bytes, more than the memory budget of {budget:.0f} that resident "
        "layers were chosen for"
    )
    complete = [bank for bank in plan.banks if rests_on_device(bank) and not bank.in_parts]
    if complete:
        banks = complete[0].name if len(complete) == 1 else f"{complete[0].name} and {len(complete) - 1} others"
        logger.warning(
            "%s: the budget assumed slots without this rank's own experts, but this graph reads complete banks (%s). "
            "lower='inductor' reads them in parts if experts are grouped GEMMs (transformers: "
            "experts_implementation='grouped_mm'). Otherwise use a smaller memory_budget",
            needed,
            banks,
        )
    elif plan.activations is None or plan.activations.room_bytes is None:
        logger.warning(
            "%s by a formula: activations of this graph take %.0f bytes. chunk_tokens='auto' processes as many tokens "
            "at a time as fit into the budget. Otherwise use a smaller memory_budget",
            needed,
            memory.activation_bytes,
        )


def _store_of(captured: GraphModule) -> BankStore | None:
    # Banks that are read inside a branch of the graph are gathered synchronously, which needs no ring.
    for node in captured.graph.nodes:
        if is_call(node, BANK_TENSOR):
            return find_store(bank_arguments(node).store)
    return None


def _ring_device(captured: GraphModule) -> torch.device:
    """Return the device that computes. Small tensors may still be on the CPU."""
    values = [node.meta.get("val") for node in captured.graph.nodes]
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


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
