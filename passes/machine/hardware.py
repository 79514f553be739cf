"""A machine's rates, sizes and tables of seconds, each with its source. Pure data.

A profile is a preset of datasheet figures, a user's file, or what `moepass calibrate` measured. `times.py` turns one
into seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from moepass.models.errors import InputError, one_of
from moepass.models.formulas.memory import ELEMENT_BYTES
from moepass.models.homes import LINKS
from moepass.models.limits import LEAST_RATE, MOST_RANKS, MOST_RATE, MOST_SECONDS, MOST_SLOWDOWN, check_limit
from moepass.passes.machine.seconds_table import SecondsTable, Source

HARDWARE_SCHEMA = "moepass.hardware/1"

# What a table of seconds exists for, and the sizes that it goes by. `rows`, `inner`, `columns`: [rows, inner] times
# [inner, columns]. Of a grouped GEMM: rows per expert, and the seconds of one expert. Of attention: the seconds of
# one head over one sequence, causal by a flag, which leaves half of it out, or by a mask, which is applied to it all.
COMPUTE_AXES: dict[str, tuple[str, ...]] = {
    "gemm": ("rows", "inner", "columns"),
    "grouped_gemm": ("rows", "inner", "columns"),
    "attention": ("sequence", "head_dim"),
    "masked_attention": ("sequence", "head_dim"),
}
# What `bytes` of a collective are, on every rank: what it sends to all ranks, its own part included (all_to_all); the
# complete result (all_gather); the complete input (reduce_scatter); the buffer (all_reduce); the message (p2p); the
# bank (bank_gather: as transport `collective` gathers one, which is not by the backend's own AllGather everywhere).
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p", "bank_gather")

# The three efficiencies that stand in for measurements where a profile has none. [Empirical] all three:
#
#   dense_gemm   One H200 reaches 790 of the 989 TFLOP/s of its datasheet in a bf16 GEMM of 8192 x 8192 x 8192; half
#                a wave of tiles (`moepass.passes.machine.times`) is 1.6 % of that one.
#   irregular    Attention and grouped GEMMs, whose tiles are ragged. FlashAttention's authors report 0.50 to 0.73
#                of the peak on A100 (arXiv 2307.08691), up to 0.75 in fp16 and 0.61 in fp8 on H100 (arXiv 2407.08608);
#                0.60 is within all three. That grouped GEMMs reach as much is assumed.
#   bandwidth    8 x H100 reach 370 of 450 GB/s over NVLink; the memory of an H200 reaches 4.3 of 4.8 TB/s, so the
#                same number is on the safe side there.
LEAST_EFFICIENCY = 1e-6
DENSE_GEMM_EFFICIENCY = 0.81
IRREGULAR_EFFICIENCY = 0.60
BANDWIDTH_EFFICIENCY = 0.82


# Figures that are bytes, or something per second.
_RATES = ("flops.", "memory_bytes", "host_memory_bytes", "peer.", "host.", "disk.", "local.")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number and where it comes from. Raises InputError where it is not finite or below 0."""

    value: float
    source: Source
    note: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or self.value < 0:
            raise InputError(
                f"a figure is {self.value!r}; it must be a finite number from 0 on",
                name="figure",
                value=self.value,
                expected="a finite number from 0 on",
            )


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Parts of its stated rates that a machine reaches; 1 in a profile whose rates were reached."""

    dense_gemm: Figure
    irregular: Figure
    bandwidth: Figure


EMPIRICAL_EFFICIENCY = Efficiency(
    Figure(DENSE_GEMM_EFFICIENCY, "empirical", "790 of 989 TFLOP/s on one H200, 8192^3, bf16"),
    Figure(
        IRREGULAR_EFFICIENCY, "empirical", "attention reaches 0.50 to 0.75 on A100 and H100; assumed alike by expert"
    ),
    Figure(BANDWIDTH_EFFICIENCY, "empirical", "370 of 450 GB/s over NVLink on 8 x H100"),
)


# [Empirical] The order of magnitude on recent NVIDIA devices of one machine; it shows in collectives of few bytes.
EMPIRICAL_COLLECTIVE_LATENCY = Figure(10e-6, "empirical", "for each step of a collective")


@dataclasses.dataclass(frozen=True)
class TransferLink:
    """A link that moves banks into slots: `bytes_per_s` in one direction, and a latency for each slice of a transfer.

    `seconds`, where there is one, goes by the `bytes` of a whole transfer, which is cut into slices as the runtime does
    it, and is used in place of both. With `emulated_bytes_per_s` a transfer takes no less than its bytes at that rate,
    and no less than the true copies take.
    """

    bytes_per_s: Figure
    latency_seconds: Figure
    seconds: SecondsTable | None = None
    emulated_bytes_per_s: Figure | None = None


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How many times as long something takes while a bank is copied: GEMMs, memory traffic, and the copy itself."""

    gemm: Figure
    memory: Figure
    copy: Figure


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Collectives of `ranks` ranks, by kind and bytes (see COLLECTIVES)."""

    ranks: int
    seconds: dict[str, SecondsTable]

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise InputError(
                f"collectives were measured on {self.ranks} rank(s); they need 2 or more",
                name="ranks",
                value=self.ranks,
                expected="2 or more",
            )
        for kind, table in self.seconds.items():
            if kind not in COLLECTIVES:
                raise InputError(
                    f"{kind!r} is no collective; they are {one_of(COLLECTIVES)}",
                    name="collective",
                    value=kind,
                    expected=tuple(COLLECTIVES),
                )
            _check_axes(f"collective {kind}", table, ("bytes",))


@dataclasses.dataclass(frozen=True)
class Conditions:
    """When and how a machine was measured, and what was not.

    `device` is its name. With `computes_on_host` it is a CPU, on which the host's thread computes too.
    """

    date: str
    device: str
    ranks: int
    threads_per_rank: int
    versions: dict[str, str]
    remarks: tuple[str, ...] = ()
    not_measured: tuple[str, ...] = ()
    computes_on_host: bool = False


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A machine of `ranks` equal devices; every figure is per device, every link in one direction.

    flops                 peak FLOP/s by dtype: bf16, fp8, fp16, fp32
    memory_bytes          of the device; memory_bytes_per_s counts bytes read and bytes written
    host_memory_bytes     of the machine that holds all ranks, not per device; None: not known
    peer, host, disk      links into the device from another device, from host memory, from files; None: there is none
    local                 copies inside the device's memory; None: at the rate of its memory
    collective_latency_seconds   that a step of a collective takes before its first byte, where it has no table
    processors            that take one tile of a GEMM each (a GPU's multiprocessors); None: there are no tiles
    overlap               what copies and computation do to each other
    compute               tables of seconds by kind (COMPUTE_AXES) and dtype
    memory                seconds of elementwise traffic, by `bytes`
    collectives           tables of seconds of collectives
    """

    name: str
    ranks: int
    flops: dict[str, Figure]
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    efficiency: Efficiency
    overlap: Overlap
    collective_latency_seconds: Figure
    processors: Figure | None = None
    host_memory_bytes: Figure | None = None
    peer: TransferLink | None = None
    host: TransferLink | None = None
    disk: TransferLink | None = None
    local: TransferLink | None = None
    compute: dict[str, dict[str, SecondsTable]] = dataclasses.field(default_factory=dict)
    memory: SecondsTable | None = None
    collectives: Collectives | None = None
    conditions: Conditions | None = None
    schema: str = HARDWARE_SCHEMA

    @property
    def device_kind(self) -> str:
        """torch's name of the computing device: `cpu` or `cuda`. A profile that was not measured is one of GPUs."""
        return "cpu" if self.conditions is not None and self.conditions.computes_on_host else "cuda"

    def __post_init__(self) -> None:
        if self.schema != HARDWARE_SCHEMA:
            raise InputError(
                f"the schema of a profile is {self.schema!r}; this version reads {HARDWARE_SCHEMA!r}",
                name="schema",
                value=self.schema,
                expected=HARDWARE_SCHEMA,
            )
        if self.ranks < 1:
            raise InputError(
                f"profile {self.name!r} has {self.ranks} ranks; it must have 1 or more",
                name="ranks",
                value=self.ranks,
                expected="1 or more",
            )
        check_limit("ranks", self.ranks, MOST_RANKS, "no plan is made for more devices than that")
        if not self.flops:
            raise InputError(
                f"profile {self.name!r} has no flops; give FLOP/s for one dtype or more, such as bf16",
                name="flops",
                expected=tuple(ELEMENT_BYTES),
            )
        for dtype in self.flops:
            if dtype not in ELEMENT_BYTES:
                raise InputError(
                    f"profile {self.name!r}: flops has {dtype!r}; it can have {one_of(ELEMENT_BYTES)}",
                    name="flops",
                    value=dtype,
                    expected=tuple(ELEMENT_BYTES),
                )
        named: dict[str, Figure] = {f"flops.{dtype}": rate for dtype, rate in self.flops.items()}
        named |= {"memory_bytes": self.memory_bytes, "memory_bytes_per_s": self.memory_bytes_per_s}
        named |= {
            f"efficiency.{name}": getattr(self.efficiency, name) for name in ("dense_gemm", "irregular", "bandwidth")
        }
        for name in ("processors", "host_memory_bytes"):
            stated: Figure | None = getattr(self, name)
            if stated is not None:
                named[name] = stated
        for name in (*LINKS, "local"):
            link: TransferLink | None = getattr(self, name)
            if link is not None:
                named[f"{name}.bytes_per_s"] = link.bytes_per_s
                if link.emulated_bytes_per_s is not None:
                    named[f"{name}.emulated_bytes_per_s"] = link.emulated_bytes_per_s
                if link.seconds is not None:
                    _check_axes(name, link.seconds, ("bytes",))
                latency = link.latency_seconds.value
                check_limit(f"{name}.latency_seconds", latency, MOST_SECONDS, "a slice of a copy takes microseconds")
        latency = self.collective_latency_seconds.value
        check_limit("collective_latency_seconds", latency, MOST_SECONDS, "a step of a collective takes microseconds")
        for name in ("gemm", "memory", "copy"):
            slowdown: float = getattr(self.overlap, name).value
            check_limit(f"overlap.{name}", slowdown, MOST_SLOWDOWN, "it is a factor, 1 where copies cost nothing")
        for name, figure in named.items():
            if figure.value == 0:
                raise InputError(
                    f"profile {self.name!r}: {name} is 0; it must be above 0",
                    name=name,
                    value=0,
                    expected="above 0",
                )
            if name.startswith(_RATES) and not LEAST_RATE <= figure.value <= MOST_RATE:
                raise InputError(
                    f"profile {self.name!r}: {name} is {figure.value:g}; it must lie between {LEAST_RATE:g} and "
                    f"{MOST_RATE:g}",
                    name=name,
                    value=figure.value,
                    expected=(LEAST_RATE, MOST_RATE),
                )
            if name.startswith("efficiency.") and figure.value < LEAST_EFFICIENCY:
                raise InputError(
                    f"profile {self.name!r}: {name} is {figure.value:g}; it must be {LEAST_EFFICIENCY:g} or more",
                    name=name,
                    value=figure.value,
                    expected=(LEAST_EFFICIENCY, 1),
                )
            if name.startswith("efficiency.") and figure.value > 1:
                raise InputError(
                    f"profile {self.name!r}: {name} is {figure.value:g}; it is a part of the peak, up to 1",
                    name=name,
                    value=figure.value,
                    expected=(LEAST_EFFICIENCY, 1),
                )
        for kind, tables in self.compute.items():
            if kind not in COMPUTE_AXES:
                raise InputError(
                    f"profile {self.name!r}: compute has {kind!r}; it can have {one_of(COMPUTE_AXES)}",
                    name="compute",
                    value=kind,
                    expected=tuple(COMPUTE_AXES),
                )
            for dtype, table in tables.items():
                _check_axes(f"compute.{kind}.{dtype}", table, COMPUTE_AXES[kind])
        if self.memory is not None:
            _check_axes("memory", self.memory, ("bytes",))

    def sources(self) -> dict[str, str]:
        """For every figure and table, where it comes from and its note: `host.bytes_per_s` to `datasheet: PCIe 5`."""
        return dict(_sources("", {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}))


def with_ranks(hardware: Hardware, ranks: int) -> Hardware:
    """The same devices in another number. Raises InputError for fewer than one."""
    return dataclasses.replace(hardware, ranks=ranks)


def with_emulated_link(hardware: Hardware, bytes_per_s: float, links: Collection[str] = LINKS) -> Hardware:
    """The machine with transfers over `links` slowed to `bytes_per_s`, as `link="emulate:BYTES_PER_S"` does it.

    The true copies still take their time, and the computation beside them its slowdown. Collectives stay as they are.
    """
    slow = Figure(bytes_per_s, "emulated", "link emulated")
    if bytes_per_s <= 0:
        raise InputError(
            f"the emulated link has {bytes_per_s} bytes/s; it must have more than 0",
            name="bytes_per_s",
            value=bytes_per_s,
            expected="more than 0",
        )

    def slowed(link: TransferLink | None) -> TransferLink | None:
        return None if link is None else dataclasses.replace(link, emulated_bytes_per_s=slow)

    return _with_links(hardware, {name: slowed(getattr(hardware, name)) for name in links})


def without_emulation(hardware: Hardware) -> Hardware:
    """The machine with its links as fast as they are."""

    def true(link: TransferLink | None) -> TransferLink | None:
        return None if link is None else dataclasses.replace(link, emulated_bytes_per_s=None)

    return _with_links(hardware, {name: true(getattr(hardware, name)) for name in LINKS})


def _with_links(hardware: Hardware, links: Mapping[str, TransferLink | None]) -> Hardware:
    return dataclasses.replace(hardware, **links)  # type: ignore[arg-type]


def with_collectives(hardware: Hardware, collectives: Collectives) -> Hardware:
    """The machine with a table of somebody's own; kinds that it lacks keep the times that they had.

    Raises InputError where both have tables, for different numbers of ranks.
    """
    known = hardware.collectives
    if known is not None and known.ranks != collectives.ranks:
        raise InputError(
            f"the table is for {collectives.ranks} ranks, that of profile {hardware.name!r} for {known.ranks}; they "
            "must be for one number of ranks",
            name="ranks",
            value=collectives.ranks,
            expected=known.ranks,
        )
    seconds = {**(known.seconds if known else {}), **collectives.seconds}
    return dataclasses.replace(hardware, collectives=Collectives(collectives.ranks, seconds))


def _check_axes(where: str, table: SecondsTable, names: tuple[str, ...]) -> None:
    found = tuple(axis.name for axis in table.axes)
    if found != names:
        raise InputError(
            f"the table of {where} goes by {', '.join(found)}; it must go by {', '.join(names)}",
            name=where,
            value=tuple(found),
            expected=tuple(names),
        )


def _sources(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, (Figure, SecondsTable)):
        return [(prefix, f"{value.source}: {value.note}" if value.note else value.source)]
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif not isinstance(value, dict):
        return []
    found: list[tuple[str, str]] = []
    for name, part in value.items():
        found += _sources(f"{prefix}.{name}" if prefix else str(name), part)
    return found
