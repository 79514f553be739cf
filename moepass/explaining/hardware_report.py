"""A hardware profile as text: its figures with their sources, and figures that were not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepass.models.homes import LINKS
from moepass.passes.machine.hardware import Figure, Hardware

if TYPE_CHECKING:
    from rich.console import Console


def print_hardware(console: Console, hardware: Hardware) -> None:
    """Print a table of the figures, followed by the conditions of the measurement and the missing figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

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


def _rows(hardware: Hardware) -> list[tuple[str, str, Figure]]:
    rows = [(f"{dtype} GEMM", _si(rate.value, "FLOP/s"), rate) for dtype, rate in hardware.flops.items()]
    rows += [
        ("memory", _si(hardware.memory_bytes.value, "B"), hardware.memory_bytes),
        ("memory rate", _si(hardware.memory_bytes_per_s.value, "B/s"), hardware.memory_bytes_per_s),
    ]
    for name in LINKS:
        link = getattr(hardware, name)
        if link is not None:
            rows.append((f"{name} to slot", _si(link.bytes_per_s.value, "B/s"), link.bytes_per_s))
            rows.append((f"{name} latency", _si(link.latency_seconds.value, "s"), link.latency_seconds))
    for kind, ratio in vars(hardware.overlap).items():
        what = "copy beside GEMMs" if kind == "copy" else f"{kind} beside copies"
        rows.append((what, f"x {ratio.value:.2f}", ratio))
    if hardware.collectives is not None:
        for kind, seconds in hardware.collectives.seconds.items():
            largest = seconds.axes[0].points[-1]
            took = Figure(seconds.at(bytes=largest), seconds.source, seconds.note)
            rows.append((f"{kind}, {_si(largest, 'B')}", _si(took.value, "s"), took))
    return rows


def _si(value: float, unit: str) -> str:
    """Format a value with three significant digits and an SI prefix, such as `989 TFLOP/s`."""
    prefixes = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")]
    scale, prefix = next(((scale, prefix) for scale, prefix in prefixes if value >= scale), (1.0, ""))
    return f"{value / scale:.3g} {prefix}{unit}"
