"""A report as a person reads it on a terminal: the verdict first, then what it rests on."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moepass.explaining.compiler_view import found_text, schedule_table, segments_text, tensorrt_text
from moepass.explaining.report_parts import Block, MemoryCurveRow, ReportContent, SchedulePart
from moepass.passes.ir.timeline import COMPUTE, HOST, Event
from moepass.runtime.serving.engine.step_engine import step_form_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

# Layers with experts that the bars show: enough to see one bank arrive while the layer before computes.
_SHOWN_LAYERS = 4
_LABEL_WIDTH = 9
_MOST_REFUSALS = 4


def report_text(report: ReportContent, width: int = 80, every_row: bool = False) -> str:
    """The report as plain text of lines of `width` at most."""
    from rich.console import Console

    sink = io.StringIO()
    print_report(Console(file=sink, width=width, color_system=None), report, every_row)
    return sink.getvalue()


def print_report(console: Console, report: ReportContent, every_row: bool = False) -> None:
    """Write `report` to `console`. `every_row` adds the schedule of every captured graph, row by row."""
    for part in _parts(report):
        console.print(part, highlight=False)
    schedule = report.schedule
    if schedule is not None:
        for line in timeline_lines(schedule, min(console.width, 100)):
            console.print(line, highlight=False, markup=False)
    if report.comparison:
        console.print(_comparison(report))
    console.print(_notes(report), highlight=False)
    if every_row:
        for plan in report.compiler.explanation.plans:
            if plan.slot_stays:
                console.print(schedule_table(plan))


def _parts(report: ReportContent) -> Iterator[RenderableType]:
    from rich.markup import escape

    model, hardware, work, strategy = report.model, report.hardware, report.workload, report.strategy
    yield (
        f"[bold]{escape(model.name)}[/bold] ({model.model_type}), {model.layers} layers, {model.moe_layers} with "
        f"experts, {_number(model.parameters, '')} parameters, {model.dtype}, on [bold]{escape(hardware.name)}[/bold] "
        f"({hardware.source}); {work.batch} x {work.seq} = {work.tokens} tokens per rank and step. Told from sizes "
        "alone: no weight loaded, nothing run"
    )
    yield ""
    colour = "green" if report.verdict in ("asyncep", "resident") else "yellow"
    yield f"[bold {colour}]{report.verdict}[/bold {colour}]: {escape(strategy.reason)}"
    yield _summary(report)


def _summary(report: ReportContent) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, text in _rows(report):
        table.add_row(name, Text(text))
    return table


def _rows(report: ReportContent) -> Iterator[tuple[str, str]]:
    strategy, schedule, memory, saturation = report.strategy, report.schedule, report.memory, report.saturation
    if schedule is not None:
        share = schedule.exposed_seconds / schedule.step_seconds
        yield (
            "step",
            f"{schedule.strategy} {_seconds(schedule.step_seconds)}, of which it waits "
            f"{_seconds(schedule.exposed_seconds)} ({share:.1%}) for experts; no order of "
            f"copies gives less than {_seconds(schedule.least_step_seconds)}; MFU {schedule.mfu:.1%}",
        )
    if report.stored is not None:
        yield "checkpoint", stored_text(report)
    tried = [
        f"{one.home} {_seconds(one.step_seconds) if one.step_seconds is not None else one.note}"
        for one in strategy.homes_tried
    ]
    if tried:
        yield "home", f"{strategy.home}" + (f" (tried: {'; '.join(tried)})" if len(tried) > 1 else "")
    yield from _compiler_rows(report)
    if memory is not None:
        slots = f", {_count(schedule.slots, 'slot')}" if schedule is not None and schedule.slots else ""
        stay = f", {len(schedule.resident_layers)} banks stay" if schedule and schedule.resident_layers else ""
        yield (
            "memory",
            f"{memory.strategy} {'fits' if memory.fits else 'does not fit'}: {_bytes(memory.peak_bytes)} of "
            f"{_bytes(memory.budget_bytes)} per device = {_bytes(memory.resident_bytes)} resident{stay} + "
            f"{_bytes(memory.slot_bytes)} for slots{slots} + {_bytes(memory.activation_bytes)} activations",
        )
        if memory.host_bytes:
            yield "", host_memory_text(report)
    else:
        explanation = report.compiler.explanation
        yield (
            "memory",
            f"experts {_bytes(explanation.expert_bytes)}; everything else {_bytes(explanation.other_bytes)}",
        )
    if saturation is not None:
        yield (
            "threshold",
            f"{saturation.tokens_per_rank} tokens per rank and step hide a bank of {_bytes(saturation.gather_bytes)} "
            f"({_seconds(saturation.gather_seconds)}) with a margin of {saturation.gamma:g}; "
            f"{saturation.tokens_per_rank_at_peak} at the peak rate. {saturation.formula}",
        )
        if report.memory_curve:
            yield "", f"by memory: {_threshold_by_memory(report.memory_curve)}"
        if strategy.crossover_tokens is not None:
            yield "", f"asyncep overtakes AllToAll (dp_ep) at {strategy.crossover_tokens} tokens"


def stored_text(report: ReportContent) -> str:
    """A quantised checkpoint, what moepass runs of it, and the forecast in its own format."""
    stored, model = report.stored, report.model
    assert stored is not None
    text = f"{stored.format}: {_bytes(stored.expert_bytes)} of experts, {_bytes(stored.other_bytes)} else"
    if stored.runs_as == stored.format:
        return text + ", which all numbers here are of"
    text += (
        f"; moepass runs it dequantised to {stored.runs_as}: {_bytes(model.expert_bytes)} and "
        f"{_bytes(model.other_bytes)}, as all strategies here"
    )
    asyncep = (
        f"asyncep would take {_seconds(stored.asyncep_step_seconds)} (home {stored.home}, "
        f"{_bytes(stored.asyncep_memory_bytes)} per device)"
        if stored.asyncep_step_seconds is not None
        else f"asyncep would not fit ({_bytes(stored.asyncep_memory_bytes)} per device)"
    )
    other = (
        f"{stored.fastest_other}, the fastest other, {_seconds(stored.fastest_other_step_seconds)}"
        if stored.fastest_other is not None
        else "no other strategy would fit"
    )
    slot = f"{_bytes(stored.bank_link_bytes)} travel"
    if stored.bank_slot_bytes != stored.bank_link_bytes:
        slot += f" and become {_bytes(stored.bank_slot_bytes)} in a slot"
    return f"{text}. In {stored.format}, a forecast alone: {asyncep}, {other}; of a bank {slot}"


def host_memory_text(report: ReportContent) -> str:
    """Host memory of the machine, beside what it has."""
    memory = report.memory
    assert memory is not None
    if memory.host_fits is None:
        return f"host memory of the machine: {_bytes(memory.host_bytes)} (the profile does not say how much it has)"
    assert memory.host_limit_bytes is not None
    verb = "fits" if memory.host_fits else "does not fit"
    return f"host memory of the machine {verb}: {_bytes(memory.host_bytes)} of {_bytes(memory.host_limit_bytes)}"


def _threshold_by_memory(curve: Sequence[MemoryCurveRow]) -> str:
    """Five points at most: from no bank at rest to all."""
    shown = curve[:: max(1, len(curve) // 4)]
    parts = [f"{row.tokens_per_rank} with {_bytes(row.memory_bytes)} ({row.resident_layers})" for row in shown]
    return f"{', '.join(parts)} per device (banks that stay)"


def _compiler_rows(report: ReportContent) -> Iterator[tuple[str, str]]:
    plans, blocks = report.compiler.explanation.plans, report.blocks
    cut = f" (captured: {report.compiler.captured_text}; others by analogy)" if report.compiler.is_cut else ""
    yield "found", _count(len(blocks), "MoE block") + cut + "; " + "; ".join(found_text(plan) for plan in plans)
    if blocks:
        names = [block.name for block in blocks if block.rewritten]
        span = f": {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "") if names else ""
        yield "rewritten", f"{len(names)} of {len(blocks)} to gathers{span}"
    yield "refused", _refused(blocks, report.refusals)
    of = "of what was captured, " if report.compiler.is_cut else ""
    for plan in plans:
        yield "compile", of + segments_text(plan)
        if chosen := tensorrt_text(plan):
            yield "tensorrt", chosen
    yield "serving", serving_text(report)


def serving_text(report: ReportContent) -> str:
    """How a server computes steps of the model, or why it cannot serve it."""
    if report.serving.form is None:
        return f"cannot be served: {report.serving.reason}"
    return step_form_text(report.serving.reason)


def _refused(blocks: tuple[Block, ...], refusals: tuple[str, ...]) -> str:
    """Blocks with one reason together; what is refused without being a block as it stands."""
    by_reason: dict[str, list[str]] = {}
    for block in blocks:
        if block.refusal is not None:
            by_reason.setdefault(block.refusal, []).append(block.name)
    lines = [
        f"{names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") + f": {reason}"
        for reason, names in by_reason.items()
    ]
    lines += [text for text in refusals if not any(text == f"{b.name}: {b.refusal}" for b in blocks)]
    more = [f"and {len(lines) - _MOST_REFUSALS} more reasons; --format json has them"] * (len(lines) > _MOST_REFUSALS)
    return "\n".join([*lines[:_MOST_REFUSALS], *more]) or "nothing"


def _comparison(report: ReportContent) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    for heading in ("step", "of chosen", "waited for\nper layer", "background\nper layer", "memory", "fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = next((row.step_seconds for row in report.comparison if row.strategy == report.strategy.chosen), None)
    rows = sorted(report.comparison, key=lambda row: (not row.fits, row.step_seconds or float("inf")))
    for row in rows:
        step = "-" if row.step_seconds is None else _seconds(row.step_seconds)
        ratio = "-" if row.step_seconds is None or not base else f"{row.step_seconds / base:.2f}"
        style = "bold" if row.strategy == report.strategy.chosen else None if row.fits else "dim"
        table.add_row(
            row.strategy,
            step,
            ratio,
            _bytes(row.comm_bytes_per_layer),
            _bytes(row.background_bytes_per_layer),
            _bytes(row.memory_bytes),
            "yes" if row.fits else "no",
            style=style,
        )
    return table


def _notes(report: ReportContent) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    if report.advice:
        table.add_row("advice", Text("\n".join(report.advice)))
    if report.how_to_run:
        table.add_row("run it", Text(report.how_to_run))
    table.add_row("assumed", Text("; ".join(report.assumptions), style="dim"))
    table.add_row("sources", Text(source_text(report), style="dim"))
    return table


def source_text(report: ReportContent) -> str:
    """One sentence on the sources of the numbers; for the machine by the kind of source."""
    kinds: dict[str, list[str]] = {}
    for name, source in report.sources.items():
        if name.startswith("hardware."):
            figure = re.sub(r"\.(bytes_per_s|value)$", "", name.removeprefix("hardware."))
            kinds.setdefault(source.split(":")[0], []).append(figure)
    machine = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())
    return f"{machine}; all else derived from these and the sizes of the model ({report.sources['model']})"


# ---- The timeline ----------------------------------------------------------------------------------------------------


def timeline_lines(schedule: SchedulePart, width: int) -> list[str]:
    """Bars of some layers in the middle of a step: what computes, what waits, which banks arrive meanwhile."""
    start, end = _window(schedule)
    columns = width - _LABEL_WIDTH
    if end <= start or columns < 20:
        return []
    lines = []
    for stream in _streams(schedule):
        events = [event for event in schedule.timeline if event.stream == stream]
        lines.append(f"{stream:<{_LABEL_WIDTH}}" + _bar(events, start, end, columns))
    first, last = f"{start * 1e3:.1f} ms", f"{end * 1e3:.1f} ms of {schedule.step_seconds * 1e3:.1f} ms"
    lines.append(" " * _LABEL_WIDTH + first + last.rjust(columns - len(first)))
    legend = "number: a layer; = attention, # experts or mlp, . waits for experts, > a bank arrives"
    return [*lines, " " * _LABEL_WIDTH + legend] if len(legend) <= columns else [*lines, legend]


def _streams(schedule: SchedulePart) -> list[str]:
    names = {event.stream for event in schedule.timeline}
    return sorted(names - {HOST}, key=lambda name: (name != COMPUTE, name))


def _window(schedule: SchedulePart) -> tuple[float, float]:
    """Some layers in the middle of the step, from the start of the first to the start of what follows the last."""
    starts: dict[str, float] = {}
    for event in schedule.timeline:
        if event.op == "segment":
            starts.setdefault(_layer_of(event), event.start_seconds)
    moments = list(starts.values())
    if len(moments) <= _SHOWN_LAYERS + 1:
        return 0.0, schedule.step_seconds
    middle = max(0, len(moments) // 2 - _SHOWN_LAYERS // 2)
    return moments[middle], moments[min(middle + _SHOWN_LAYERS, len(moments) - 1)]


def _layer_of(event: Event) -> str:
    return " ".join(event.layer.split()[:2])


def _bar(events: list[Event], start: float, end: float, columns: int) -> str:
    """One character per column: what took most of it; numbers of layers where their first event begins."""
    scale = columns / (end - start)
    bar = [" "] * columns
    labels: list[tuple[int, str]] = []
    named: set[str] = set()
    for event in events:
        left = max(0, round((event.start_seconds - start) * scale))
        right = min(columns, round((event.end_seconds - start) * scale))
        if right <= left:
            continue
        bar[left:right] = _sign(event) * (right - left)
        layer = _layer_of(event)
        if layer not in named and event.start_seconds >= start:
            named.add(layer)
            labels.append((left, layer.removeprefix("layer ")))
    for left, label in labels:
        bar[left : min(columns, left + len(label))] = label[: columns - left]
    return "".join(bar)


def _sign(event: Event) -> str:
    if event.op != "segment":
        return "." if event.op == "wait" else ">"
    return "=" if event.layer.endswith("attention") else "#"


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _bytes(number: float) -> str:
    from rich.filesize import decimal

    return decimal(round(number))


def _number(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return "0 s" if value == 0 else f"{value / 1e-9:.3g} ns"
