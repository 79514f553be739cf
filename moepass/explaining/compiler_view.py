"""The compiler's result for a model, as records, which `capture_model.py` makes, and as text."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.segment import Segment


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of a capture: one plan for each captured graph, and the error that ended capture early, or None.

    The experts of `expert_layers` layers were offloaded; `other_bytes` counts all other parameters.
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
        title = f"graph {number} of {len(explanation.plans)}: " if several else ""
        console.print(f"\n{title}[bold green]{plan.strategy}[/bold green]: {plan.reason}", highlight=False)
        console.print(grid(_rows(explanation, plan)))
    if explanation.stopped:
        console.print(f"\nCapture ended early: {explanation.stopped}", highlight=False, markup=False)


def _rows(explanation: Explanation, plan: Plan) -> Iterator[tuple[str, str]]:
    yield "found", found_text(plan)
    if plan.blocks:
        streamed = {stay.block for stay in plan.slot_stays}
        yield rewritten_row([block.name for block in plan.blocks if block.name in streamed], len(plan.blocks))
    yield "refused", "\n".join(map(str, plan.refusals)) or "nothing"
    experts, other_text = decimal(explanation.expert_bytes), decimal(explanation.other_bytes)
    if plan.slot_stays:
        ring = f"{decimal(plan.device_bank_bytes)} = {count_of(plan.slots, 'slot')} x {decimal(plan.slot_bytes)}"
        ring += (
            f" + {ENCODED_BUFFERS} x {decimal(plan.encoded_buffer_bytes)} to decode from"
            if plan.encoded_buffer_bytes
            else ""
        )
        memory = f"ring on the device {ring} (one bank); all experts {experts}, in host memory; "
    else:
        memory = f"experts {experts}; " if explanation.expert_bytes else ""
    yield "memory", f"{memory}everything else {other_text}"
    yield from compile_rows(plan)


def grid(rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table without lines, of rows with a name, a text, and perhaps the style of the text."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, *text in rows:
        table.add_row(name, Text(*text))
    return table


def count_of(number: int, noun: str) -> str:
    """Return the number with the noun in singular or plural."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def rewritten_row(names: list[str], blocks: int) -> tuple[str, str]:
    """Return the row about the blocks `names` that were rewritten, of `blocks` in total."""
    span = f": {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "") if names else ""
    return "rewritten", f"{len(names)} of {blocks} to gathers{span}"


def compile_rows(plan: Plan, scope: str = "") -> Iterator[tuple[str, str]]:
    """Yield the rows about the segments of a plan; the first row begins with `scope`."""
    yield "compile", scope + _segments_text(plan)
    if chosen := tensorrt_text(plan):
        yield "tensorrt", chosen


def _segments_text(plan: Plan) -> str:
    """Return the number of segments, the parts and calls of the distinct ones, and a line for each refusal."""
    calls = sum(len(segment.uses) for segment in plan.segments)
    kinds = [f"{' + '.join(segment.parts) or segment.role} x{len(segment.uses)}" for segment in plan.segments]
    counts = f"{count_of(calls, 'segment')}, {plan.distinct_segments} distinct"
    refusals = [
        f"{segment.name}: {record.refusal}"
        for segment in plan.segments
        for record in (segment.lowering, segment.cuda_graph)
        if record is not None and record.refusal is not None
    ]
    return "\n".join([f"{counts}: {', '.join(kinds)}" if kinds else counts, *refusals])


def tensorrt_text(plan: Plan) -> str:
    """Return which segments of a plan are for TensorRT, and why others are not; "" if it was not requested."""

    def named(segment: Segment) -> str:
        calls = "" if len(segment.uses) == 1 else f", called {len(segment.uses)} times"
        return f"{segment.name} ({' + '.join(segment.parts) or segment.role}{calls})"

    choices = [(segment, segment.tensorrt) for segment in plan.segments if segment.tensorrt is not None]
    if not choices:
        return ""
    taken = [named(segment) for segment, choice in choices if not choice.stays]
    lines = [f"{len(taken)} of {count_of(len(choices), 'distinct segment')} would become TensorRT engines"]
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
    kinds: collections.Counter[str] = collections.Counter()
    for block in plan.blocks:
        top = "all experts run" if block.top_k is None else f"top {block.top_k}"
        size = f"{block.hidden} x {block.intermediate} {'gated' if block.gated else 'not gated'}"
        kinds[f"{block.experts} experts, {top}, {size}, {block.dtype}, {block.form}"] += 1
    return "; ".join(f"{count_of(count, 'MoE block')} of {kind}" for kind, count in kinds.items()) or "no MoE block"


def schedule_table(plan: Plan) -> Table:
    """Return a table with one row for each segment: its layers, and the state of every slot while it runs."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("segment", no_wrap=True)
    table.add_column("computes in", overflow="fold")
    for slot in range(plan.slots):
        table.add_column(f"slot {slot} meanwhile", overflow="fold")
    slots = [""] * plan.slots
    for step in plan.steps:
        if step.op == "segment":
            name, _, where = step.name.partition(": ")
            table.add_row(str(len(table.rows) + 1), name.replace("segment_", "s"), _short_span(where), *slots)
        else:
            assert step.slot is not None
            assert step.bank is not None
            if step.op == "prefetch" and plan.bank(step.bank).format.is_encoded:
                continue  # its decode fills the slot
            word = {"prefetch": "fills:", "decode": "fills:", "acquire": "in use:", "release": ""}[step.op]
            slots[step.slot] = f"{word} {_short_name(step.name)}" if word else ""
    return table


def _short_name(path: str) -> str:
    """Return the layer in a module path: `layer 3` for `model.layers.3.mlp.experts`. A path without a layer is kept."""
    match = re.search(r"(?:layers?|blocks?|h)\.(\d+)", path)
    return f"layer {match.group(1)}" if match else path.removeprefix("model.")


def _short_span(where: str) -> str:
    begin, _, end = where.partition(" to ")
    first, last = _short_name(begin), _short_name(end) if end else ""
    if not last or first == last:
        return first
    return f"{first} to {last.removeprefix('layer ')}" if first.startswith("layer ") else f"{first} to {last}"
