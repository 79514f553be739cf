"""The report of `moepass explain`, and the forms in which it can be read: JSON, text, a web page, a trace."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from importlib import resources

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from moepass.explaining import compiler_view as view
from moepass.explaining import report_parts as parts
from moepass.explaining.hardware_report import si
from moepass.passes.ir.planner_decisions import Decisions
from moepass.passes.ir.timeline import COMPUTE, HOST, Event, Timeline, chrome_trace
from moepass.runtime.serving.engine.step_engine import step_form_text

# Layers with experts that the bars show: enough to see one bank arrive while the layer before computes.
_SHOWN_LAYERS = 4
_LABEL_WIDTH = 9
_MOST_REFUSALS = 4


class Report(parts.ReportPart, frozen=True, kw_only=True):
    """A report that can be converted to JSON, text, HTML and a trace.

    Attributes:
        saturation: None if no figures are known; `assumptions` has the reason. The same holds for `memory`.
        schedule: also None if asyncep does not fit.
        stored: None if the checkpoint is not quantised.
        plan: the planner's decisions, as every compiled plan has them. `schedule` and `memory` are derived from it.
    """

    schema: str
    version: str
    model: parts.ModelPart
    hardware: parts.HardwarePart
    workload: parts.WorkloadPart
    strategy: parts.StrategyPart
    blocks: tuple[parts.Block, ...]
    saturation: parts.SaturationPart | None = None
    schedule: parts.SchedulePart | None = None
    memory: parts.MemoryPart | None = None
    comparison: tuple[parts.ComparisonRow, ...] = ()
    curve: tuple[parts.CurveRow, ...] = ()
    memory_curve: tuple[parts.MemoryCurveRow, ...] = ()
    refusals: tuple[str, ...]
    advice: tuple[str, ...] = ()
    assumptions: tuple[str, ...]
    sources: dict[str, str]
    compiler: parts.CompilerPart
    serving: parts.ServingPart
    how_to_run: str = ""
    stored: parts.StoredPart | None = None
    plan: Decisions | None = None

    @property
    def verdict(self) -> str:
        """The name of the chosen strategy, or "nothing fits"."""
        unfit = any(row.strategy == self.strategy.chosen and not row.fits for row in self.comparison)
        return "nothing fits" if unfit else self.strategy.chosen

    def to_json(self) -> str:
        """Return the report as JSON, which `from_json` reads."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        """Read a report. Raises msgspec.ValidationError if `text` is not a report of this schema."""
        report = msgspec.json.decode(text, type=Report)
        if report.schema != parts.REPORT_SCHEMA:
            raise msgspec.ValidationError(f"schema is {report.schema!r}, this version reads {parts.REPORT_SCHEMA!r}")
        return report

    def text(self, width: int = 80, every_row: bool = False) -> str:
        """Return the report in lines of `width` characters. `every_row` adds the schedule of the captured graphs."""
        sink = io.StringIO()
        print_report(Console(file=sink, width=width, color_system=None), self, every_row)
        return sink.getvalue()

    def html(self) -> str:
        """Return the report as one HTML page, which a browser opens from the file, without a server or a network.

        It is `data/report.html` with the report inserted, as JSON for the page's script and as texts.
        """
        page = (resources.files("moepass.explaining") / "data/report.html").read_text(encoding="utf-8")
        # The JSON must not end its script element in the HTML, so less-than signs are escaped.
        json = msgspec.json.encode(self).decode().replace("<", "\\u003c")
        texts = {
            "@@TITLE@@": f"{self.model.name} on {self.hardware.name}",
            "@@CHECKPOINT@@": stored_text(self),
            "@@HOST_MEMORY@@": host_memory_text(self),
            "@@SERVING@@": serving_text(self),
            "@@SOURCES@@": source_text(self),
        }
        # One pass over the page, because the texts may contain marks.
        insertions = {mark: html.escape(text, quote=False) for mark, text in texts.items()} | {"@@REPORT@@": json}
        return re.sub("|".join(insertions), lambda match: insertions[match[0]], page)

    def trace(self) -> str:
        """Return the timeline for ui.perfetto.dev. Raises ValueError if nothing was scheduled."""
        if self.schedule is None:
            raise ValueError("the report has no timeline, because nothing was scheduled")
        timeline = Timeline(self.schedule.timeline, "derived")
        return chrome_trace({f"{self.model.name} on {self.hardware.name}, {self.schedule.strategy}": timeline})

    def __repr__(self) -> str:
        return f"<moepass report: {self.model.name} on {self.hardware.name}: {self.strategy.chosen}>"


def print_report(console: Console, report: Report, every_row: bool = False) -> None:
    """Print the report. `every_row` adds the schedule of every captured graph, row by row."""
    model, hardware, work = report.model, report.hardware, report.workload
    colour = "green" if report.verdict in ("asyncep", "resident") else "yellow"
    console.print(
        f"[bold]{escape(model.name)}[/bold] ({model.model_type}), {model.layers} layers, {model.moe_layers} with "
        f"experts, {si(model.parameters, '').strip()} parameters, {model.dtype}, on "
        f"[bold]{escape(hardware.name)}[/bold] ({hardware.source}); {work.batch} x {work.seq} = {work.tokens} tokens "
        "per rank and step. Computed from sizes alone, without loading weights or running anything\n\n"
        f"[bold {colour}]{report.verdict}[/bold {colour}]: {escape(report.strategy.reason)}",
        highlight=False,
    )
    console.print(view.grid(_rows(report)), highlight=False)
    if report.schedule is not None:
        for line in _timeline_lines(report.schedule, min(console.width, 100)):
            console.print(line, highlight=False, markup=False)
    if report.comparison:
        console.print(_comparison(report))
    notes = [("advice", "\n".join(report.advice)), ("run it", report.how_to_run)]
    sources = [("assumed", "; ".join(report.assumptions), "dim"), ("sources", source_text(report), "dim")]
    console.print(view.grid([*(note for note in notes if note[1]), *sources]), highlight=False)
    if every_row:
        for plan in report.compiler.explanation.plans:
            if plan.slot_stays:
                console.print(view.schedule_table(plan))


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    strategy, schedule, memory, saturation = report.strategy, report.schedule, report.memory, report.saturation
    if schedule is not None:
        share = schedule.exposed_seconds / schedule.step_seconds
        yield (
            "step",
            f"{schedule.strategy} {_seconds(schedule.step_seconds)}, including "
            f"{_seconds(schedule.exposed_seconds)} ({share:.1%}) of waiting for experts; no order of copies takes less "
            f"than {_seconds(schedule.least_step_seconds)}; MFU {schedule.mfu:.1%}",
        )
    if text := stored_text(report):
        yield "checkpoint", text
    tried = [
        f"{attempt.home} {attempt.note if attempt.step_seconds is None else _seconds(attempt.step_seconds)}"
        for attempt in strategy.homes_tried
    ]
    if tried:
        yield "home", strategy.home + (f" (tried: {'; '.join(tried)})" if len(tried) > 1 else "")
    yield from _compiler_rows(report)
    if memory is not None:
        slots = f", {view.count_of(schedule.slots, 'slot')}" if schedule is not None and schedule.slots else ""
        stay = f", {len(schedule.resident_layers)} banks included" if schedule and schedule.resident_layers else ""
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
        expert_bytes, other_bytes = explanation.expert_bytes, explanation.other_bytes
        yield "memory", f"experts {_bytes(expert_bytes)}; everything else {_bytes(other_bytes)}"
    if saturation is not None:
        decoding = ""
        if saturation.decode_seconds:
            decoding = f"; {_seconds(saturation.decode_seconds)} to decode it during the next transfer"
        yield (
            "threshold",
            f"{saturation.tokens_per_rank} tokens per rank and step hide the transfer of a bank of "
            f"{_bytes(saturation.gather_bytes)} ({_seconds(saturation.gather_seconds)}{decoding}) with a margin of "
            f"{saturation.gamma:g}; {saturation.tokens_per_rank_at_peak} at the peak rate. {saturation.formula}",
        )
        packed = saturation.packed_tokens_per_rank
        if packed is not None and packed < saturation.tokens_per_rank:
            yield "", f"with experts packed by `moepass pack`: {packed} tokens"
        if report.memory_curve:
            shown = report.memory_curve[:: max(1, len(report.memory_curve) // 4)]  # up to five, from none to all
            points = [f"{row.tokens_per_rank} with {_bytes(row.memory_bytes)} ({row.resident_layers})" for row in shown]
            yield "", f"by memory: {', '.join(points)} per device (resident banks)"
        if strategy.crossover_tokens is not None:
            yield "", f"asyncep is faster than AllToAll (dp_ep) from {strategy.crossover_tokens} tokens on"


def stored_text(report: Report) -> str:
    """Return the sizes of a quantised checkpoint, and the forecast for kernels in its own format; else ""."""
    stored, model, saturation = report.stored, report.model, report.saturation
    if stored is None:
        return ""
    text = f"{stored.format}: {_bytes(stored.expert_bytes)} of experts, {_bytes(stored.other_bytes)} of other weights"
    if stored.runs_as == stored.format:
        return text + ", which all figures refer to"
    text += (
        f"; experts rest and travel as stored, and are decoded to {stored.runs_as} into the slot, other weights while "
        f"the model is loaded ({_bytes(model.other_bytes)})"
    )
    if saturation is not None:
        text += (
            f". Threshold: {saturation.tokens_per_rank} tokens per rank, "
            f"{stored.decoded_tokens_per_rank} if experts travelled in {stored.runs_as}"
        )
    if stored.computes_in == stored.runs_as:
        return text
    asyncep = (
        f"asyncep would take {_seconds(stored.asyncep_step_seconds)} (home {stored.home}, "
        f"{_bytes(stored.asyncep_memory_bytes)} per device)"
        if stored.asyncep_step_seconds is not None
        else f"asyncep would not fit ({_bytes(stored.asyncep_memory_bytes)} per device)"
    )
    alternative = (
        f"the fastest other strategy, {stored.fastest_other}, {_seconds(stored.fastest_other_step_seconds)}"
        if stored.fastest_other is not None
        else "no other strategy would fit"
    )
    transfer = f"a bank transfers {_bytes(stored.bank_link_bytes)}"
    if stored.bank_slot_bytes != stored.bank_link_bytes:
        transfer += f" and takes {_bytes(stored.bank_slot_bytes)} in a slot"
    return f"{text}. Forecast for kernels in {stored.format}: {asyncep}, {alternative}; {transfer}"


def host_memory_text(report: Report) -> str:
    """Return the needed host memory, compared with the machine's; "" without figures."""
    memory = report.memory
    if memory is None:
        return ""
    if memory.host_fits is None:
        return f"host memory of the machine: {_bytes(memory.host_bytes)} (the profile does not say how much it has)"
    assert memory.host_limit_bytes is not None
    verb = "fits" if memory.host_fits else "does not fit"
    return f"host memory of the machine {verb}: {_bytes(memory.host_bytes)} of {_bytes(memory.host_limit_bytes)}"


def _compiler_rows(report: Report) -> Iterator[tuple[str, str]]:
    plans, blocks = report.compiler.explanation.plans, report.blocks
    cut = f" (captured: {report.compiler.captured_text}; the others are equal)" if report.compiler.is_cut else ""
    yield "found", "; ".join([view.count_of(len(blocks), "MoE block") + cut, *map(view.found_text, plans)])
    if blocks:
        yield view.rewritten_row([block.name for block in blocks if block.rewritten], len(blocks))
    yield "refused", _refused(blocks, report.refusals)
    scope = "of the captured layers: " if report.compiler.is_cut else ""
    for plan in plans:
        yield from view.compile_rows(plan, scope)
    yield "serving", serving_text(report)


def serving_text(report: Report) -> str:
    """Return the form in which a server computes steps of the model, or the reason why it cannot be served."""
    if report.serving.form is None:
        return f"cannot be served: {report.serving.reason}"
    return step_form_text(report.serving.reason)


def _refused(blocks: tuple[parts.Block, ...], refusals: tuple[str, ...]) -> str:
    """Return the refused blocks, grouped by reason, and the refusals that concern no block."""
    by_reason: dict[str, list[str]] = {}
    for block in blocks:
        if block.refusal is not None:
            by_reason.setdefault(block.refusal, []).append(block.name)
    lines = [
        names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") + f": {reason}"
        for reason, names in by_reason.items()
    ]
    lines += [text for text in refusals if not any(text == f"{b.name}: {b.refusal}" for b in blocks)]
    more = [f"and {len(lines) - _MOST_REFUSALS} more reasons; --format json has them"] * (len(lines) > _MOST_REFUSALS)
    return "\n".join([*lines[:_MOST_REFUSALS], *more]) or "nothing"


def _comparison(report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    for heading in ("step", "of chosen", "waited for\nper layer", "background\nper layer", "memory", "fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = next((row.step_seconds for row in report.comparison if row.strategy == report.strategy.chosen), None)
    for row in sorted(report.comparison, key=lambda row: (not row.fits, row.step_seconds or float("inf"))):
        ratio = "-" if row.step_seconds is None or not base else f"{row.step_seconds / base:.2f}"
        style = "bold" if row.strategy == report.strategy.chosen else None if row.fits else "dim"
        table.add_row(
            row.strategy,
            _seconds(row.step_seconds),
            ratio,
            _bytes(row.comm_bytes_per_layer),
            _bytes(row.background_bytes_per_layer),
            _bytes(row.memory_bytes),
            "yes" if row.fits else "no",
            style=style,
        )
    return table


def source_text(report: Report) -> str:
    """Return one sentence with the sources of the figures; figures of the machine are grouped by kind of source."""
    kinds: dict[str, list[str]] = {}
    for name, source in report.sources.items():
        if name.startswith("hardware."):
            figure = re.sub(r"\.(bytes_per_s|value)$", "", name.removeprefix("hardware."))
            kinds.setdefault(source.split(":")[0], []).append(figure)
    machine = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())
    return f"{machine}; all other figures are derived from these and the sizes of the model ({report.sources['model']})"


# ---- The timeline ----------------------------------------------------------------------------------------------------


def _timeline_lines(schedule: parts.SchedulePart, width: int) -> list[str]:
    """Return bars for some layers in the middle of a step: computation, waits, and the banks that arrive."""
    start, end = _window(schedule)
    columns = width - _LABEL_WIDTH
    if end <= start or columns < 20:
        return []
    streams = sorted({event.stream for event in schedule.timeline} - {HOST}, key=lambda name: (name != COMPUTE, name))
    lines = [
        f"{stream:<{_LABEL_WIDTH}}"
        + _bar([event for event in schedule.timeline if event.stream == stream], start, end, columns)
        for stream in streams
    ]
    first, last = f"{start * 1e3:.1f} ms", f"{end * 1e3:.1f} ms of {schedule.step_seconds * 1e3:.1f} ms"
    lines.append(" " * _LABEL_WIDTH + first + last.rjust(columns - len(first)))
    legend = "number: a layer; = attention, # experts or mlp, . waits for experts, > a bank arrives"
    return [*lines, " " * _LABEL_WIDTH + legend] if len(legend) <= columns else [*lines, legend]


def _window(schedule: parts.SchedulePart) -> tuple[float, float]:
    """Return the time range of some layers in the middle of the step."""
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
    """Return a bar with one character per column for the longest event in it, and layer numbers where layers begin."""
    scale = columns / (end - start)
    bar = [" "] * columns
    labels: dict[str, int] = {}
    for event in events:
        left = max(0, round((event.start_seconds - start) * scale))
        right = min(columns, round((event.end_seconds - start) * scale))
        if right <= left:
            continue
        bar[left:right] = _sign(event) * (right - left)
        if event.start_seconds >= start:
            labels.setdefault(_layer_of(event).removeprefix("layer "), left)
    for label, left in labels.items():
        bar[left : min(columns, left + len(label))] = label[: columns - left]
    return "".join(bar)


def _sign(event: Event) -> str:
    if event.op != "segment":
        return "." if event.op == "wait" else ">"
    return "=" if event.layer.endswith("attention") else "#"


def _bytes(number: float) -> str:
    return decimal(round(number))


def _seconds(value: float | None) -> str:
    return "-" if value is None else si(value, "s")
