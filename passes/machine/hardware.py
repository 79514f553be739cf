"""Hardware profiles: a machine's rates, sizes and tables of seconds, each with its source. Pure data.

A profile is a preset of datasheet figures, a user's file, or a measurement by `moepass calibrate`. `times.py` computes
seconds from a profile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Annotated, Any

from moepass.models.errors import InputError
from moepass.models.formulas.memory import ELEMENT_BYTES
from moepass.models.homes import LINKS
from moepass.models.limits import LEAST_RATE, MOST_RANKS, MOST_RATE, MOST_SECONDS, MOST_SLOWDOWN
from moepass.passes.machine.field_rules import Keys, NumberBounds, TableAxes, check_fields, check_value
from moepass.passes.machine.seconds_table import SecondsTable, Source

HARDWARE_SCHEMA = "moepass.hardware/1"

# The axes of a table of seconds, by kind of work. A GEMM multiplies [rows, inner] by [inner, columns]. A grouped GEMM
# states the rows and the seconds of one expert. Attention states the seconds of one head over one sequence: `attention`
# is causal by a flag and skips half of the pairs, `masked_attention` applies a mask and computes all pairs.
COMPUTE_AXES: dict[str, tuple[str, ...]] = {
    "gemm": ("rows", "inner", "columns"),
    "grouped_gemm": ("rows", "inner", "columns"),
    "attention": ("sequence", "head_dim"),
    "masked_attention": ("sequence", "head_dim"),
}
# The kinds of collectives, each with what its `bytes` count on every rank:
#
#   all_to_all       what a rank sends to all ranks, itself included
#   all_gather       the complete result
#   reduce_scatter   the complete input
#   all_reduce       the buffer
#   p2p              the message
#   bank_gather      the bank. Transport `collective` gathers one, not always with the backend's own AllGather.
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "p2p", "bank_gather")

# The three efficiencies of a profile without measurements. All three are [Empirical]:
#
#   dense_gemm   One H200 reaches 790 of the 989 TFLOP/s of its datasheet in a bf16 GEMM of 8192 x 8192 x 8192. Half a
#                wave of tiles (`moepass.passes.machine.times`) is 1.6 % of this GEMM.
#   irregular    Attention and grouped GEMMs, whose tiles are ragged. FlashAttention's authors report 0.50 to 0.73
#                of the peak on A100 (arXiv 2307.08691), up to 0.75 in fp16 and 0.61 in fp8 on H100 (arXiv 2407.08608);
#                0.60 is within all three ranges. We assume that grouped GEMMs reach the same.
#   bandwidth    8 x H100 reach 370 of 450 GB/s over NVLink. The memory of an H200 reaches 4.3 of 4.8 TB/s, so the
#                same number is a safe estimate for memory.
LEAST_EFFICIENCY = 1e-6
DENSE_GEMM_EFFICIENCY = 0.81
IRREGULAR_EFFICIENCY = 0.60
BANDWIDTH_EFFICIENCY = 0.82


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number and its source. Raises InputError if the number is negative or not finite."""

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


Rate = Annotated[Figure, NumberBounds(LEAST_RATE, MOST_RATE, "bytes, bytes per second or FLOPs per second")]
Latency = Annotated[Figure, NumberBounds(0, MOST_SECONDS, "seconds; real latencies are microseconds")]
Fraction = Annotated[Figure, NumberBounds(LEAST_EFFICIENCY, 1, "it is a fraction of the peak")]
Slowdown = Annotated[Figure, NumberBounds(0, MOST_SLOWDOWN, "it is a factor, 1 if copies cost nothing")]
BytesTable = Annotated[SecondsTable, TableAxes(("bytes",))]


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Fractions of its stated rates that a machine reaches; 1 in a profile whose rates were measured."""

    dense_gemm: Fraction
    irregular: Fraction
    bandwidth: Fraction


EMPIRICAL_EFFICIENCY = Efficiency(
    Figure(DENSE_GEMM_EFFICIENCY, "empirical", "790 of 989 TFLOP/s on one H200, 8192^3, bf16"),
    Figure(
        IRREGULAR_EFFICIENCY,
        "empirical",
        "attention reaches 0.50 to 0.75 on A100 and H100; grouped GEMMs are assumed to reach the same",
    ),
    Figure(BANDWIDTH_EFFICIENCY, "empirical", "370 of 450 GB/s over NVLink on 8 x H100"),
)


# [Empirical] The order of magnitude on recent NVIDIA devices of one machine; it matters for collectives of few bytes.
EMPIRICAL_COLLECTIVE_LATENCY = Figure(10e-6, "empirical", "for each step of a collective")


@dataclasses.dataclass(frozen=True)
class TransferLink:
    """A link that moves banks into slots, in one direction.

    Attributes:
        bytes_per_s: rate of the link
        latency_seconds: added for each slice of a transfer
        seconds: measured times by the `bytes` of a complete transfer, slices included; replaces rate and latency
        emulated_bytes_per_s: lower bound: a transfer takes at least its bytes at this rate, and at least as long as
            the real copies
    """

    bytes_per_s: Rate
    latency_seconds: Latency
    seconds: BytesTable | None = None
    emulated_bytes_per_s: Rate | None = None


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Factors by which GEMMs, memory traffic and the copy itself slow down while a bank is copied."""

    gemm: Slowdown
    memory: Slowdown
    copy: Slowdown


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Measured seconds of collectives on `ranks` ranks, by kind (see COLLECTIVES) and bytes."""

    ranks: Annotated[int, NumberBounds(2, MOST_RANKS, "a collective needs two ranks")]
    seconds: Annotated[dict[str, BytesTable], Keys(COLLECTIVES)]

    def __post_init__(self) -> None:
        check_fields(self, "collectives")


@dataclasses.dataclass(frozen=True)
class Conditions:
    """When and how a machine was measured.

    Attributes:
        device: name of the device
        not_measured: figures and tables that the calibration skipped, with the reason
        computes_on_host: the device is a CPU, whose cores also run the host's thread
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

    Raises InputError if a value violates the rule in the annotation of its field.

    Attributes:
        flops: peak FLOP/s by dtype: bf16, fp8, fp16, fp32
        memory_bytes: memory of the device
        memory_bytes_per_s: bytes read plus bytes written
        host_memory_bytes: memory of the machine that holds all ranks, not per device; None if unknown
        peer, host, disk: links into the device from another device, from host memory, from files; None if missing
        local: copies inside the device's memory; None if they run at the rate of its memory
        collective_latency_seconds: latency of each step of a collective that has no table
        processors: units that compute one tile of a GEMM each (a GPU's multiprocessors); None if GEMMs have no tiles
        overlap: slowdowns while copies and computation overlap
        compute: tables of seconds by kind (COMPUTE_AXES) and dtype
        memory: seconds of elementwise traffic, by `bytes`
        decode: seconds of decoding a quantised bank into its slot, by the `bytes` that it has there; None if decoding
            is traffic at the rate of the memory
        collectives: tables of seconds of collectives
    """

    name: str
    ranks: Annotated[int, NumberBounds(1, MOST_RANKS, "no plan is made for more devices")]
    flops: Annotated[dict[str, Rate], Keys(ELEMENT_BYTES)]
    memory_bytes: Rate
    memory_bytes_per_s: Rate
    efficiency: Efficiency
    overlap: Overlap
    collective_latency_seconds: Latency
    processors: Annotated[Figure, NumberBounds(1, MOST_RATE, "it is a number of units")] | None = None
    host_memory_bytes: Rate | None = None
    peer: TransferLink | None = None
    host: TransferLink | None = None
    disk: TransferLink | None = None
    local: TransferLink | None = None
    compute: Annotated[dict[str, dict[str, SecondsTable]], Keys(COMPUTE_AXES)] = dataclasses.field(default_factory=dict)
    memory: BytesTable | None = None
    decode: BytesTable | None = None
    collectives: Collectives | None = None
    conditions: Conditions | None = None
    schema: str = HARDWARE_SCHEMA

    @property
    def device_kind(self) -> str:
        """Name the computing device as torch does: `cpu` or `cuda`. Profiles that were not measured describe GPUs."""
        return "cpu" if self.conditions is not None and self.conditions.computes_on_host else "cuda"

    def __post_init__(self) -> None:
        if self.schema != HARDWARE_SCHEMA:
            raise InputError(
                f"the schema of a profile is {self.schema!r}; this version reads {HARDWARE_SCHEMA!r}",
                name="schema",
                value=self.schema,
                expected=HARDWARE_SCHEMA,
            )
        context = f"profile {self.name!r}"
        if not self.flops:
            raise InputError(
                f"{context} has no flops; give FLOP/s for one dtype or more, such as bf16",
                name="flops",
                expected=tuple(ELEMENT_BYTES),
            )
        check_fields(self, context)
        for kind, tables in self.compute.items():
            for dtype, table in tables.items():
                check_value(f"compute.{kind}.{dtype}", table, TableAxes(COMPUTE_AXES[kind]), context)

    def sources(self) -> dict[str, str]:
        """Return the source and note of every figure and table by path: `host.bytes_per_s` to `datasheet: PCIe 5`."""
        return dict(_sources("", self))


def with_ranks(hardware: Hardware, ranks: int) -> Hardware:
    """Return the machine with `ranks` devices of the same kind. Raises InputError below 1 and above MOST_RANKS."""
    return dataclasses.replace(hardware, ranks=ranks)


def with_emulated_link(hardware: Hardware, bytes_per_s: float, links: Collection[str] = LINKS) -> Hardware:
    """Return the machine with transfers over `links` slowed to `bytes_per_s`, as `link="emulate:BYTES_PER_S"` does it.

    The real copies still take their time and slow the computation down. Collectives keep their times.
    """
    return _with_emulated_rate(hardware, Figure(bytes_per_s, "emulated", "link emulated"), links)


def without_emulation(hardware: Hardware) -> Hardware:
    """Return the machine with its links at their real rates."""
    return _with_emulated_rate(hardware, None, LINKS)


def _with_emulated_rate(hardware: Hardware, rate: Figure | None, links: Collection[str]) -> Hardware:
    changed: dict[str, Any] = {}
    for name in links:
        link: TransferLink | None = getattr(hardware, name)
        if link is not None:
            changed[name] = dataclasses.replace(link, emulated_bytes_per_s=rate)
    return dataclasses.replace(hardware, **changed)


def with_collectives(hardware: Hardware, collectives: Collectives) -> Hardware:
    """Return the machine with `collectives` in place of its tables of the same kinds; tables of other kinds stay.

    Raises InputError if the tables of the two are for different numbers of ranks.
    """
    previous = hardware.collectives
    if previous is not None and previous.ranks != collectives.ranks:
        raise InputError(
            f"the tables of collectives are for {collectives.ranks} ranks, those of profile {hardware.name!r} for "
            f"{previous.ranks}; give tables for {previous.ranks} ranks",
            name="ranks",
            value=collectives.ranks,
            expected=previous.ranks,
        )
    seconds = {**(previous.seconds if previous else {}), **collectives.seconds}
    return dataclasses.replace(hardware, collectives=Collectives(collectives.ranks, seconds))


def _sources(path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, (Figure, SecondsTable)):
        return [(path, f"{value.source}: {value.note}" if value.note else value.source)]
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif not isinstance(value, dict):
        return []
    sources: list[tuple[str, str]] = []
    for name, item in value.items():
        sources += _sources(f"{path}.{name}" if path else str(name), item)
    return sources
