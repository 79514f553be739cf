"""A hardware profile as text: its figures with their sources, and figures that were not measured."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moepass.models.homes import LINKS
from moepass.passes.machine.hardware import Figure, Hardware


def print_hardware(console: Console, hardware: Hardware) -> None:
    """Print a table of the figures, followed by the conditions of the measurement and the missing figures."""
    table = Table(
        "figure", "value", "source", box=SIMPLE_HEAD, pad_edge=False, title=hardware.name, title_justify="left"
    )
    for name, text, figure in _rows(hardware):
        table.add_row(name, text, f"{figure.source}: {figure.note}" if figure.note else figure.source)
    console.print(table)
    conditions = hardware.conditions
    if conditions is None:
        return
    versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
    lines = [
        f"{conditions.date}; {conditions.ranks} rank(s) of {conditions.threads_per_rank} thread(s); {versions}",
        *conditions.remarks,
        *[f"not measured: {what}" for what in conditions.not_measured],
    ]
    for line in lines:
        console.print(line, style="dim", highlight=False, markup=False)


def _rows(hardware: Hardware) -> Iterator[tuple[str, str, Figure]]:
    for dtype, rate in hardware.flops.items():
        yield f"{dtype} GEMM", si(rate.value, "FLOP/s"), rate
    yield "memory", si(hardware.memory_bytes.value, "B"), hardware.memory_bytes
    yield "memory rate", si(hardware.memory_bytes_per_s.value, "B/s"), hardware.memory_bytes_per_s
    if hardware.decode is not None:
        largest = hardware.decode.axes[0].points[-1]
        decoding = Figure(largest / hardware.decode.at(bytes=largest), hardware.decode.source, hardware.decode.note)
        yield "decoding into slot", si(decoding.value, "B/s"), decoding
    for name in LINKS:
        link = getattr(hardware, name)
        if link is not None:
            yield f"{name} to slot", si(link.bytes_per_s.value, "B/s"), link.bytes_per_s
            yield f"{name} latency", si(link.latency_seconds.value, "s"), link.latency_seconds
    for kind, ratio in vars(hardware.overlap).items():
        yield "copy beside GEMMs" if kind == "copy" else f"{kind} beside copies", f"x {ratio.value:.2f}", ratio
    if hardware.collectives is not None:
        for kind, seconds in hardware.collectives.seconds.items():
            largest = seconds.axes[0].points[-1]
            took = Figure(seconds.at(bytes=largest), seconds.source, seconds.note)
            yield f"{kind}, {si(largest, 'B')}", si(took.value, "s"), took


def si(value: float, unit: str) -> str:
    """Format a value with three significant digits and an SI prefix, such as `989 TFLOP/s`. Seconds have no kilo."""
    prefixes = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")]
    prefixes = prefixes[4:] if unit == "s" else prefixes
    scale, prefix = next(((scale, prefix) for scale, prefix in prefixes if value >= scale), (1.0, ""))
    return f"{value / scale:.3g} {prefix}{unit}"
