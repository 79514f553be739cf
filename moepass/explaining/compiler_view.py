"""The compiler's result for a model, as records and as text: the part of `moepass explain` that no formula can compute.

`capture_model.py` makes these records.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import msgspec

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.segment import Segment

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of a capture: one plan for each captured graph.

    Attributes:
        expert_layers: layers whose experts were offloaded.
        expert_bytes: bytes of their experts.
        other_bytes: bytes of all other parameters.
        plans: the plans, in the order of the graphs.
        stopped: the error that ended capture early, or None.
    """

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
        """Return the result as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


@dataclasses.dataclass(frozen=True)
class Moment:
    """A row of the displayed schedule: a segment, and the content of each slot while it runs ("" for an empty slot)."""

    segment: str
    where: str
    slots: tuple[str, ...]


# ---- Text ------------------------------------------------------------------------------------------------------------


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Print the strategy, the blocks that were found, rewritten and refused, and the memory of each graph."""
    tokens = explanation.batch * explanation.seq
    console.print(
        f"[bold]{explanation.model}[/bold] ({explanation.model_type}), {explanation.batch} x {explanation.seq} = "
        f"{tokens} tokens; planned from the config alone, without loading weights or running anything",
        highlight=False,
    )
    several = len(explanation.plans) > 1
    for number, plan in enumerate(explanation.plans, 1):
        console.print()
        title = f"graph {number} of {len(explanation.plans)}: " if several else ""
        console.print(f"{title}[bold green]{plan.strategy}[/bold green]: {plan.reason}", highlight=False)
        console.print(_summary(explanation, plan))

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
        ring += f" + {_bytes(plan.encoded_buffer_bytes)} to decode from" if plan.encoded_buffer_bytes else ""
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
    if chosen := tensorrt_text(plan):
        table.add_row("tensorrt", Text(chosen))
    return table


def segments_text(plan: Plan) -> str:
    """Return the segments of a plan in words.

    The text has the number of segments, the parts of the distinct ones and how often each is called, and a line for
    each segment that was not lowered or recorded as requested.
    """
    calls = sum(len(segment.uses) for segment in plan.segments)
    kinds = [f"{' + '.join(segment.parts) or segment.role} x{len(segment.uses)}" for segment in plan.segments]
    counts = f"{_count(calls, 'segment')}, {plan.distinct_segments} distinct"
    refusals = [
        f"{segment.name}: {record.refusal}"
        for segment in plan.segments
        for record in (segment.lowering, segment.cuda_graph)
        if record is not None and record.refusal is not None
    ]
    return "\n".join([": ".join([counts, *([", ".join(kinds)] if kinds else [])]), *refusals])


def tensorrt_text(plan: Plan) -> str:
    """Return which segments of a plan are for TensorRT, and why others are not.

    The text is empty if TensorRT was not requested.
    """

    def named(segment: Segment) -> str:
        calls = "" if len(segment.uses) == 1 else f", called {len(segment.uses)} times"
        return f"{segment.name} ({' + '.join(segment.parts) or segment.role}{calls})"

    choices = [(segment, segment.tensorrt) for segment in plan.segments if segment.tensorrt is not None]
    if not choices:
        return ""
    taken = [named(segment) for segment, choice in choices if not choice.stays]
    lines = [f"{len(taken)} of {_count(len(choices), 'distinct segment')} would become TensorRT engines"]
    if taken:
        lines[0] += f": {', '.join(taken)}"
        lines.append(
            "whether TensorRT supports all their operators is only known to torch-tensorrt; Inductor compiles the "
            "segments that it refuses, and the plan lists them"
        )
    lines += [f"{named(segment)} stays with Inductor: {choice.stays}" for segment, choice in choices if choice.stays]
    return "\n".join(lines)


def found_text(plan: Plan) -> str:
    """Return the blocks of a plan in words, with equal blocks counted together."""
    kinds: dict[str, int] = {}
    for block in plan.blocks:
        top = "all experts run" if block.top_k is None else f"top {block.top_k}"
        gate = "gated" if block.gated else "not gated"
        kind = (
            f"{block.experts} experts, {top}, {block.hidden} x {block.intermediate} {gate}, {block.dtype}, {block.form}"
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{_count(count, 'MoE block')} of {kind}" for kind, count in kinds.items()) or "no MoE block"


def schedule_table(plan: Plan) -> Table:
    """Return the schedule of a plan as a table with one row per segment."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("segment", no_wrap=True)
    table.add_column("computes in", overflow="fold")
    for slot in range(plan.slots):
        table.add_column(f"slot {slot} meanwhile", overflow="fold")
    for number, row in enumerate(moments(plan), 1):
        table.add_row(str(number), row.segment, row.where, *row.slots)
    return table


def moments(plan: Plan) -> list[Moment]:
    """Return the schedule as one row per segment, with the state of every slot while it runs."""
    slots = [""] * plan.slots
    rows: list[Moment] = []
    for step in plan.steps:
        if step.op == "segment":
            name, _, where = step.name.partition(": ")
            rows.append(Moment(name.replace("segment_", "s"), _short_span(where), tuple(slots)))
        else:
            assert step.slot is not None
            word = {"prefetch": "fills:", "decode": "fills:", "acquire": "in use:", "release": ""}[step.op]
            slots[step.slot] = f"{word} {short_name(step.name)}" if word else ""
    return rows


def short_name(path: str) -> str:
    """Return the layer in a module path: `layer 3` for `model.layers.3.mlp.experts`. A path without a layer is kept."""
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
