"""Seconds on a machine: of transfers of banks, of computation, of collectives. One formula for each, here alone.

Every function takes a `Hardware` and plain numbers, and gives seconds. Tables that were measured are used where the
profile has them; else rates, with what part of them is reached. Sizes of 0 take 0 seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from moepass.models.errors import InputError, one_of
from moepass.models.formulas.communication import part_bytes
from moepass.models.formulas.gemms import gemm_bytes, gemm_flops
from moepass.models.formulas.memory import element_bytes
from moepass.models.homes import COLLECTIVE, LINKS, PULL, LinkName, LinkUse, home_named
from moepass.models.sizes.architecture import short_dtype
from moepass.passes.machine.hardware import COLLECTIVES, Figure, Hardware, TransferLink

Work = Literal["gemm", "grouped_gemm", "attention", "masked_attention"]

_ATTENTION: tuple[Work, ...] = ("attention", "masked_attention")

# [Empirical] Size of the slices of a transfer: large enough that taking the interpreter lock once per
# slice costs little; small enough that an abandoned copy ends within a millisecond or two.
SLICE_BYTES = 4 << 20

# [Empirical] The most slices of one bank that a stream is given. The host issues each of them beside the kernels of the
# model: 19 to 24 microseconds on a busy CPU, measured without the driver's part. So a bank costs the host one or two
# milliseconds, and eight ranks still change the rank that they read from nine times.
MOST_STREAM_SLICES = 64

# Ranks tell each other numbers of rows in int64.
_COUNT_BYTES = 8

# Rows and columns of one tile of a GEMM on GPUs: those of CUTLASS's and DeepGEMM's kernels for large shapes.
# FlashAttention's tiles have as many queries (of one head).
TILE_ROWS, TILE_COLUMNS = 128, 128


# ---- Transfers of banks into slots -----------------------------------------------------------------------------------


def stream_slice_bytes(nbytes: float) -> int:
    """Size of the slices in which a stream is given a bank of `nbytes`: those of a copy thread, or larger ones."""
    return SLICE_BYTES * max(1, math.ceil(nbytes / (SLICE_BYTES * MOST_STREAM_SLICES)))


def transfer_seconds(link: TransferLink, nbytes: float, efficiency: float = 1.0) -> float:
    """One transfer over `link`: a latency for each slice, and the bytes at `efficiency` of its rate."""
    if nbytes <= 0:
        return 0.0
    if link.seconds is not None:
        seconds = link.seconds.at(bytes=nbytes)
    else:
        slices = math.ceil(nbytes / stream_slice_bytes(nbytes))
        seconds = slices * link.latency_seconds.value + nbytes / (link.bytes_per_s.value * efficiency)
    if link.emulated_bytes_per_s is not None:
        seconds = max(seconds, nbytes / link.emulated_bytes_per_s.value)
    return seconds


def pull_seconds(
    hardware: Hardware, bank_bytes: float, *, copies_own_shard: bool = False, link: LinkName = "peer"
) -> float:
    """A bank from its shards on `hardware.ranks` devices: W (N - 1) / N over `link`.

    `copies_own_shard`: this rank's part is copied into the slot too, inside the device's memory, on the same stream;
    else it is read where it rests. Raises InputError if the machine has no such link.
    """
    ranks = hardware.ranks
    own = bank_bytes / ranks
    local = _local_copy_seconds(hardware, own) if copies_own_shard else 0.0
    if ranks == 1:
        return local
    used = _link(hardware, link)
    # An emulated link counts from the start of the copy, own part included.
    true_link = dataclasses.replace(used, emulated_bytes_per_s=None)
    copies = local + transfer_seconds(true_link, bank_bytes - own, hardware.efficiency.bandwidth.value)
    return max(copies, _emulated_seconds(used, bank_bytes - own))


def _emulated_seconds(link: TransferLink | None, nbytes: float) -> float:
    """The least that `nbytes` take over an emulated link; 0 where the link is none."""
    rate = None if link is None else link.emulated_bytes_per_s
    return 0.0 if rate is None else nbytes / rate.value


def link_seconds(hardware: Hardware, bank_bytes: float, home: str) -> tuple[float, ...]:
    """Seconds of each link for its part of a bank from `home` into a slot; the links work at the same time.

    Raises InputError for an unknown home, and where the machine lacks a link.
    """
    return tuple(_use_seconds(hardware, bank_bytes, use) for use in home_named(home).travel)


def gather_seconds(hardware: Hardware, bank_bytes: float, home: str, transport: str = PULL) -> float:
    """A complete bank in its slot, from `home`. Raises as `link_seconds`, and InputError for an unknown transport.

    `transport` is how ranks exchange shards, where the home has more than one way.
    """
    if transport not in (PULL, COLLECTIVE):
        raise InputError.wrong("transport", transport, one_of((PULL, COLLECTIVE)))
    if transport == COLLECTIVE and COLLECTIVE in home_named(home).transports:
        others = bank_bytes * (hardware.ranks - 1) / hardware.ranks
        return max(collective_seconds(hardware, "bank_gather", bank_bytes), _emulated_seconds(hardware.peer, others))
    return max((0.0, *link_seconds(hardware, bank_bytes, home)))


def _use_seconds(hardware: Hardware, bank_bytes: float, use: LinkUse) -> float:
    if use.part == "others":
        return pull_seconds(hardware, bank_bytes, link=use.link)
    nbytes = part_bytes(use.part, bank_bytes, hardware.ranks)
    return transfer_seconds(_link(hardware, use.link), nbytes, hardware.efficiency.bandwidth.value)


def _link(hardware: Hardware, name: LinkName) -> TransferLink:
    link: TransferLink | None = getattr(hardware, name)
    if link is None:
        known = [other for other in LINKS if getattr(hardware, other) is not None]
        raise InputError(
            f"profile {hardware.name!r} has no {name} link (it has {one_of(known) or 'none'}); choose another home, or "
            f"add `{name}` to a profile of your own",
            name=name,
            expected=known,
        )
    return link


def _local_copy_seconds(hardware: Hardware, nbytes: float) -> float:
    """Inside the memory of one device: every byte is read and written."""
    if hardware.local is not None:
        return transfer_seconds(hardware.local, nbytes, hardware.efficiency.bandwidth.value)
    return memory_seconds(hardware, 2 * nbytes)


# ---- Computation -----------------------------------------------------------------------------------------------------


def memory_seconds(hardware: Hardware, moved_bytes: float) -> float:
    """Elementwise work on a device's memory: `moved_bytes` are read and written in all."""
    if moved_bytes <= 0:
        return 0.0
    if hardware.memory is not None:
        return hardware.memory.at(bytes=moved_bytes)
    return moved_bytes / (hardware.memory_bytes_per_s.value * hardware.efficiency.bandwidth.value)


def peak_flops_per_s(hardware: Hardware, dtype: str) -> Figure:
    """The peak rate for `dtype`. Raises InputError where the profile has none, naming those that it has."""
    key = short_dtype(dtype)
    if key not in hardware.flops:
        raise InputError(
            f"profile {hardware.name!r} has no {key} rate; it has {one_of(hardware.flops)}",
            name="dtype",
            value=key,
            expected=tuple(hardware.flops),
        )
    return hardware.flops[key]


def reached_flops_per_s(hardware: Hardware, dtype: str, work: Work = "gemm") -> Figure:
    """The rate that work of large shapes reaches: the best of the profile's table, else a part of the peak."""
    table = hardware.compute.get(work, {}).get(short_dtype(dtype))
    if table is not None:
        last = {axis.name: axis.points[-1] for axis in table.axes}
        return Figure(work_flops(work, last) / table.at(**last), table.source, f"{work} of the largest measured shape")
    peak = peak_flops_per_s(hardware, dtype)
    part = hardware.efficiency.dense_gemm if work == "gemm" else hardware.efficiency.irregular
    note = f"{part.value:g} ({part.source}) of {peak.value:.4g} FLOP/s ({peak.source})"
    return Figure(peak.value * part.value, "derived", note)


def work_seconds(hardware: Hardware, dtype: str, flops: float, moved_bytes: float = 0.0, work: Work = "gemm") -> float:
    """Work of no particular shape: FLOPs at the reached rate, and no less than its bytes take."""
    seconds = flops / reached_flops_per_s(hardware, dtype, work).value
    return max(seconds, _floor_seconds(hardware, moved_bytes))


def gemm_seconds(hardware: Hardware, dtype: str, rows: float, inner: float, columns: float) -> float:
    """[rows, inner] times [inner, columns]: by the table, and no less than reading and writing everything once."""
    flops = gemm_flops(rows, inner, columns)
    if flops <= 0:
        return 0.0
    moved = gemm_bytes(rows, inner, columns, element_bytes(short_dtype(dtype)))
    tiles = rows / TILE_ROWS * columns / TILE_COLUMNS
    seconds = _table_seconds(hardware, dtype, "gemm", flops, tiles, rows=rows, inner=inner, columns=columns)
    return max(seconds, _floor_seconds(hardware, moved))


def grouped_gemm_seconds(
    hardware: Hardware, dtype: str, rows: float, experts: float, inner: float, columns: float
) -> float:
    """`rows` in all, spread evenly over `experts`, each with weights [inner, columns] of its own.

    Where there are fewer rows than experts, only as many experts run. Kernels compute whole tiles, so without a table
    that has measured it each expert is given half a tile more than its rows. Skew changes little else: rates are nearly
    flat above a few hundred rows, and below them weights dominate.
    """
    if min(rows, experts, inner, columns) <= 0:
        return 0.0
    running = min(experts, rows)
    each = rows / running
    flops = gemm_flops(rows, inner, columns)
    table = hardware.compute.get("grouped_gemm", {}).get(short_dtype(dtype))
    if table is not None:
        seconds = running * table.at(rows=each, inner=inner, columns=columns)
    else:
        padded = (each + TILE_ROWS / 2) / each
        seconds = padded * flops / reached_flops_per_s(hardware, dtype, "grouped_gemm").value
        seconds *= _last_wave_factor(hardware, running * padded * each / TILE_ROWS * columns / TILE_COLUMNS)
    moved = gemm_bytes(each, inner, columns, element_bytes(short_dtype(dtype)), count=running)
    return max(seconds, _floor_seconds(hardware, moved))


def attention_seconds(
    hardware: Hardware,
    dtype: str,
    flops: float,
    moved_bytes: float,
    sequence: float,
    head_dim: float,
    *,
    is_masked: bool = False,
    queries: float | None = None,
) -> float:
    """Attention of `flops` in all; `sequence` (keys that a query sees at most) and `head_dim` say how fast it runs.

    `queries` are those of all heads and sequences, which kernels take a tile at a time; None: it is not known how many.

    `is_masked`: by a mask, so `flops` are those of all pairs of queries and keys; else what a causal kernel leaves out
    is not in `flops`. A profile without a table of one has the rate of the other.
    """
    if flops <= 0:
        return _floor_seconds(hardware, moved_bytes)
    tables = [work for work in _ATTENTION if short_dtype(dtype) in hardware.compute.get(work, {})]
    wanted: Work = "masked_attention" if is_masked else "attention"
    work = wanted if wanted in tables or not tables else tables[0]
    tiles = None if queries is None else queries / TILE_ROWS
    seconds = _table_seconds(hardware, dtype, work, flops, tiles, sequence=sequence, head_dim=head_dim)
    return max(seconds, _floor_seconds(hardware, moved_bytes))


def _table_seconds(
    hardware: Hardware, dtype: str, work: Work, flops: float, tiles: float | None, **shape: float
) -> float:
    """`flops` at the rate that the profile's table has for `shape`; at the reached rate where it has no table.

    The reached rate is that of many `tiles`; None: it is not known how many there are.
    """
    table = hardware.compute.get(work, {}).get(short_dtype(dtype))
    if table is None:
        last_wave = 1.0 if tiles is None else _last_wave_factor(hardware, tiles)
        return last_wave * flops / reached_flops_per_s(hardware, dtype, work).value
    # Beyond the table the rate stays, whatever power of a size FLOPs grow with.
    known = {axis.name: min(shape[axis.name], axis.points[-1]) for axis in table.axes}
    return table.at(**known) * flops / work_flops(work, known)


def _last_wave_factor(hardware: Hardware, tiles: float) -> float:
    """How many times as long a kernel of that many tiles takes because of processors without one at its end.

    Half a wave on average; where there is less than one wave, kernels cut their tiles smaller.
    """
    if hardware.processors is None:
        return 1.0
    waves = tiles / hardware.processors.value
    return 1.0 + 0.5 * min(1.0, waves) / waves


def work_flops(work: Work, shape: Mapping[str, float]) -> float:
    """FLOPs of one point of a table of `work`, with a size for each of its axes."""
    if work in _ATTENTION:  # one head, both GEMMs; the diagonal of a causal one is counted as half
        return (2.0 if work == "attention" else 4.0) * shape["sequence"] ** 2 * shape["head_dim"]
    return float(gemm_flops(shape["rows"], shape["inner"], shape["columns"]))


def _floor_seconds(hardware: Hardware, moved_bytes: float) -> float:
    """Seconds of memory traffic at the full rate, without the caches and latencies that a table of memory includes."""
    return max(0.0, moved_bytes) / (hardware.memory_bytes_per_s.value * hardware.efficiency.bandwidth.value)


# ---- Collectives -----------------------------------------------------------------------------------------------------


def collective_seconds(hardware: Hardware, kind: str, nbytes: float, ranks: int | None = None) -> float:
    """A collective of `ranks` (all of the machine's, by default); what `nbytes` are is said in `hardware.COLLECTIVES`.

    By the profile's table where it has one (for bank_gather also by that of all_gather); for another number of ranks,
    scaled by what crosses the link of one rank.
    Else steps of latency, and the bytes that cross the link at the reached part of its rate: (N - 1) / N of `nbytes`,
    twice that for all_reduce, all of them for p2p. Raises InputError for an unknown kind.
    """
    if kind not in COLLECTIVES:
        raise InputError(
            f"{kind!r} is no collective; they are {one_of(COLLECTIVES)}",
            name="collective",
            value=kind,
            expected=tuple(COLLECTIVES),
        )
    count = hardware.ranks if ranks is None else ranks
    if count < 1:
        raise InputError(
            f"a collective has {count} ranks; it needs 1 or more", name="ranks", value=count, expected="1 or more"
        )
    if nbytes <= 0 or count == 1:
        return 0.0
    measured = hardware.collectives
    if measured is not None:
        table = measured.seconds.get(kind)
        if table is None and kind == "bank_gather":
            table = measured.seconds.get("all_gather")
        if table is not None:
            return table.at(bytes=nbytes * _link_share(kind, count) / _link_share(kind, measured.ranks))
    link = hardware.peer or _link(hardware, "host")  # devices without a link of their own meet in host memory
    rate = link.bytes_per_s.value * hardware.efficiency.bandwidth.value
    latency = _steps(kind, count) * hardware.collective_latency_seconds.value
    return latency + _link_share(kind, count) * nbytes / rate


def token_exchange_seconds(hardware: Hardware, rows_bytes: float, experts: int) -> float:
    """By AllToAll, `rows_bytes` of each device to the devices of their experts, and as many results back.

    Ranks tell each other first how many rows each expert gets. And rows arrive in the order of ranks: they are brought
    into that of experts and back, read and written each time.
    """
    if hardware.ranks == 1 or rows_bytes <= 0:
        return 0.0
    exchanged = 2 * collective_seconds(hardware, "all_to_all", rows_bytes)
    exchanged += collective_seconds(hardware, "all_to_all", _COUNT_BYTES * experts)
    return exchanged + memory_seconds(hardware, 4 * rows_bytes)


def _link_share(kind: str, ranks: int) -> float:
    """Bytes that leave one rank, for each byte of the collective."""
    if kind == "p2p":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _steps(kind: str, ranks: int) -> int:
    """Messages that follow one another: one where all links are used at once, trees for sums."""
    if kind not in ("all_reduce", "reduce_scatter"):
        return 1
    return math.ceil(math.log2(ranks)) * (2 if kind == "all_reduce" else 1)
