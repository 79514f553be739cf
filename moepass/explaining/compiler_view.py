"""What the compiler does with a model, told from its config alone: the part of `moepass explain` that no formula knows.

The model is built on the meta device, so that weights are neither needed nor loaded and nothing is computed; everything
shown comes from the plans that the passes made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moepass.models.checkpoint.checkpoint_folders import meta_model
from moepass.models.errors import MoepassError
from moepass.passes.ir.plan import BANK_TENSOR, Plan
from moepass.passes.ir.protocol import PassContext
from moepass.passes.pipeline import compile_graph
from moepass.runtime.execute.captured import capture_notes, name_inputs
from moepass.runtime.lowering.lower_segments import decompositions
from moepass.runtime.offload.offload import find_expert_modules, offload_experts

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from transformers import PreTrainedModel

# A schedule of more rows than this is abbreviated.
SCREENFUL_ROWS = 16
# A capture is made once and thrown away, so there is no end to how many a process may make.
_NO_LIMIT = 1 << 30


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` found out. One plan per captured graph; `stopped` says why capture ended early, or is None."""

    model: str
    model_type: str
    batch: int
    seq: int
    slots: int
    expert_layers: int
    expert_bytes: int
    other_bytes: int
    plans: tuple[Plan, ...]
    stopped: str | None = None

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


@dataclasses.dataclass(frozen=True)
class Moment:
    """One row of the shown schedule: a segment, and what is in each slot meanwhile ("" for nothing)."""

    segment: str
    where: str
    slots: tuple[str, ...]


def explain_model(path: Path, batch: int = 8, seq: int = 512, slots: int = 2, lower: str = "inductor") -> Explanation:
    """Plan the checkpoint folder or config file `path` for `batch` texts of `seq` tokens.

    Raises CheckpointError where the config makes no model, OptionError and PlanError for slots that do not do.
    """
    return explain_meta_model(meta_model(path), batch, seq, slots, lower)


def explain_meta_model(
    model: PreTrainedModel, batch: int, seq: int, slots: int = 2, lower: str = "inductor"
) -> Explanation:
    """As `explain_model`, of a model on the meta device, whose experts are offloaded by this."""
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
        other_bytes=_bytes_of(model),  # offloaded experts are no parameters any more
        plans=plans,
        stopped=stopped,
    )


def capture_plans(
    model: nn.Module, batch: int, seq: int, *, slots: int = 2, lower: str = "inductor"
) -> tuple[tuple[Plan, ...], str | None]:
    """The plans of a model on the meta device for input_ids [batch, seq], one for each graph that is captured.

    The pipeline runs up to lowering; the "compiled" graph then gives outputs of the right shapes, so that capture goes
    on behind a graph break. The second value says why capture ended early: where a model looks at values, there are
    none.
    """
    plans: list[Plan] = []

    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        notes = capture_notes(graph)

        def plan_only(captured: GraphModule, fake_inputs: Sequence[Any]) -> Callable[..., Any]:
            name_inputs(captured, graph)
            context = PassContext(slots=slots if _reads_banks(captured) else 0, capture=notes)
            plans.append(compile_graph(captured, context).plan)
            return _ShapesOnly(captured)

        capture = aot_autograd(
            fw_compiler=plan_only, decompositions=decompositions(lower), keep_inference_input_mutations=True
        )
        return capture(graph, example_inputs)

    compiled = _compile_apart(model, backend)
    unlimited = torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT)
    stopped = None
    try:
        with torch.no_grad(), unlimited, _quiet_shapes():
            compiled(input_ids=torch.zeros((batch, seq), dtype=torch.int64, device="meta"), use_cache=False)
    except MoepassError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        if not plans:
            raise
        stopped = " ".join(str(error).split())[:160]
    return tuple(plans), stopped


@contextlib.contextmanager
def _quiet_shapes() -> Iterator[None]:
    """No log of a failed operator, which torch writes with a traceback: the error that follows says it again."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _compile_apart(model: nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compile`, but what is captured does not count as a compilation of the models that others compile.

    Dynamo counts by code, which all models of a family share, and gives up after 8. Versions of torch that cannot keep
    compilations apart count them together.
    """
    apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=False, **apart)  # type: ignore[call-overload]
    return compiled


class _ShapesOnly:
    """Stands for a compiled graph: outputs on the meta device, with the shapes that the graph's outputs have."""

    _boxed_call = True

    def __init__(self, captured: GraphModule) -> None:
        (outputs,) = captured.graph.output_node().args
        self.outputs = [getattr(node, "meta", {}).get("val") for node in outputs]  # type: ignore[union-attr]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for value in self.outputs
        ]


def _reads_banks(captured: GraphModule) -> bool:
    return any(node.target is BANK_TENSOR for node in captured.graph.nodes)


def _bytes_of(model: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in model.parameters())


# ---- What a person sees ----------------------------------------------------------------------------------------------


def print_explanation(
    console: Console, explanation: Explanation, *, every_row: bool = False, schedule: bool = True
) -> None:
    """The verdict first, then what was found, rewritten and refused, memory, and the schedule of each graph."""
    tokens = explanation.batch * explanation.seq
    console.print(
        f"[bold]{explanation.model}[/bold] ({explanation.model_type}), {explanation.batch} x {explanation.seq} = "
        f"{tokens} tokens; planned from the config alone: no weight loaded, nothing run",
        highlight=False,
    )
    several = len(explanation.plans) > 1
    for number, plan in enumerate(explanation.plans, 1):
        console.print()
        title = f"graph {number} of {len(explanation.plans)}: " if several else ""
        console.print(f"{title}[bold green]{plan.strategy}[/bold green]: {plan.reason}", highlight=False)
        console.print(_summary(explanation, plan))
        if schedule and plan.slot_stays:
            console.print(schedule_table(plan, every_row))
    if explanation.stopped:
        console.print(f"\nCapture ended early: {explanation.stopped}", highlight=False, markup=False)


def _summary(explanation: Explanation, plan: Plan) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    streamed = {stay.block for stay in plan.slot_stays}
    table.add_row("found", Text(found_text(plan)))
    if plan.blocks:
        names = [block.name for block in plan.blocks if block.name in streamed]
        span = f": {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "") if names else ""
        table.add_row("rewritten", Text(f"{len(names)} of {len(plan.blocks)} to gathers{span}"))
    refusals = [str(refusal) for refusal in plan.refusals]
    table.add_row("refused", Text("\n".join(refusals) or "nothing"))
    if plan.slot_stays:
        ring = f"{_bytes(plan.device_bank_bytes)} = {_count(plan.slots, 'slot')} x {_bytes(plan.slot_bytes)}"
        table.add_row(
            "memory",
            Text(
                f"ring on the device {ring} (one bank); all experts {_bytes(explanation.expert_bytes)}, in host "
                f"memory; everything else {_bytes(explanation.other_bytes)}"
            ),
        )
    else:
        experts = f"experts {_bytes(explanation.expert_bytes)}; " if explanation.expert_bytes else ""
        table.add_row("memory", Text(f"{experts}everything else {_bytes(explanation.other_bytes)}"))
    table.add_row("compile", Text(segments_text(plan)))
    return table


def segments_text(plan: Plan) -> str:
    """The segments of a plan in words: how many, what the distinct ones compute, how often each is called, and a line
    for each that a compilation did not lower as wanted."""
    calls = sum(len(segment.uses) for segment in plan.segments)
    kinds = [f"{' + '.join(segment.parts) or segment.role} x{len(segment.uses)}" for segment in plan.segments]
    counts = f"{_count(calls, 'segment')}, {plan.distinct_segments} distinct"
    refusals = [
        f"{segment.name}: {segment.lowering.refusal}"
        for segment in plan.segments
        if segment.lowering is not None and segment.lowering.refusal is not None
    ]
    return "\n".join([": ".join([counts, *([", ".join(kinds)] if kinds else [])]), *refusals])


def found_text(plan: Plan) -> str:
    """The blocks of a plan in words, those that are alike together."""
    kinds: dict[str, int] = {}
    for block in plan.blocks:
        top = "all experts run" if block.top_k is None else f"top {block.top_k}"
        gate = "gated" if block.gated else "not gated"
        kind = (
            f"{block.experts} experts, {top}, {block.hidden} x {block.intermediate} {gate}, {block.dtype}, {block.form}"
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{_count(count, 'MoE block')} of {kind}" for kind, count in kinds.items()) or "no MoE block"


def schedule_table(plan: Plan, every_row: bool) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("segment", no_wrap=True)
    table.add_column("computes in", overflow="fold")
    for slot in range(plan.slots):
        table.add_column(f"slot {slot} meanwhile", overflow="fold")
    rows = moments(plan)
    kept, left_out = (list(range(len(rows))), 0) if every_row else abbreviate(rows)
    previous = -1
    for index in kept:
        if index != previous + 1:
            table.add_row(
                "...", f"{left_out} more", "in the same rhythm; --all shows them", *[""] * plan.slots, style="dim"
            )
        row = rows[index]
        table.add_row(str(index + 1), row.segment, row.where, *row.slots)
        previous = index
    return table


def moments(plan: Plan) -> list[Moment]:
    """The schedule as one row per segment, with the state of every slot while it runs."""
    slots = [""] * plan.slots
    rows: list[Moment] = []
    for step in plan.steps:
        if step.op == "segment":
            name, _, where = step.name.partition(": ")
            rows.append(Moment(name.replace("segment_", "s"), _short_span(where), tuple(slots)))
        else:
            assert step.slot is not None
            word = {"prefetch": "fills:", "acquire": "in use:", "release": ""}[step.op]
            slots[step.slot] = f"{word} {short_name(step.name)}" if word else ""
    return rows


def abbreviate(rows: Sequence[Moment]) -> tuple[list[int], int]:
    """Indices of the rows to show, and how many are left out: the repeats of a stretch that runs in one rhythm.

    Two rows have the same rhythm where segment and slot states are equal but for the layers' numbers.
    """
    count = len(rows)
    signs = [re.sub(r"\d+", "", " | ".join((row.where, *row.slots))) + row.segment for row in rows]
    best: tuple[int, int, int] = (0, 0, 1)
    for period in range(1, count // 3 + 1):
        start = 0
        for index in range(period, count + 1):
            if index == count or signs[index] != signs[index - period]:
                if index - start > best[1] - best[0]:
                    best = (start, index, period)
                start = index - period + 1
        if best[1] - best[0] >= 3 * best[2] and best[2] == period:
            break
    start, end, period = best
    left_out = end - start - 2 * period
    if count <= SCREENFUL_ROWS or left_out < 2:
        return list(range(count)), 0
    return [*range(start + period), *range(end - period, count)], left_out


def short_name(path: str) -> str:
    """The layer in a module path: `layer 3` for `model.layers.3.mlp.experts`; the path itself where it has none."""
    match = re.search(r"(?:layers?|blocks?|h)\.(\d+)", path)
    return f"layer {match.group(1)}" if match else path.removeprefix("model.")


def _short_span(where: str) -> str:
    begin, _, end = where.partition(" to ")
    first, last = short_name(begin), short_name(end) if end else ""
    if not last or first == last:
        return first
    return f"{first} to {last.removeprefix('layer ')}" if first.startswith("layer ") else f"{first} to {last}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _bytes(number: int) -> str:
    from rich.filesize import decimal

    return decimal(number)
