"""Seconds of bank transfers, computation and collectives on a machine. The only formula for each of them.

Every function takes a `Hardware` and plain numbers, and returns seconds. A measured table is used if the profile has
one; otherwise the peak rate times the fraction that is reached. Sizes of 0 take 0 seconds.
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
from moepass.models.formulas.stored_weights import BankSizes
from moepass.models.homes import COLLECTIVE, LINKS, PULL, LinkName, LinkUse, home_named
from moepass.models.sizes.architecture import short_dtype
from moepass.passes.machine.hardware import COLLECTIVES, Figure, Hardware, TransferLink

Work = Literal["gemm", "grouped_gemm", "attention", "masked_attention"]

_ATTENTION: tuple[Work, ...] = ("attention", "masked_attention")

# [Empirical] Size of the slices of a transfer: large enough that taking the interpreter lock once per
# slice costs little; small enough that an abandoned copy ends within a millisecond or two.
SLICE_BYTES = 4 << 20

# [Empirical] The most slices of one bank on a stream. The host issues each slice between the kernels of the model, in
# 19 to 24 microseconds on a busy CPU, measured without the driver. So a bank costs the host one or two milliseconds,
# and each of eight ranks still changes nine times the rank from which it reads.
MOST_STREAM_SLICES = 64

# Ranks exchange numbers of rows as int64.
_COUNT_BYTES = 8

# Rows and columns of one tile of a GEMM on GPUs, as in CUTLASS's and DeepGEMM's kernels for large shapes.
# FlashAttention's tiles also have 128 queries (of one head).
TILE_ROWS, TILE_COLUMNS = 128, 128


# ---- Transfers of banks into slots -----------------------------------------------------------------------------------


def stream_slice_bytes(nbytes: float) -> int:
    """Return the slice size of a bank of `nbytes` on a stream; it grows where slices would be too many."""
    return SLICE_BYTES * max(1, math.ceil(nbytes / (SLICE_BYTES * MOST_STREAM_SLICES)))


def transfer_seconds(link: TransferLink, nbytes: float, efficiency: float = 1.0) -> float:
    """Return the seconds of one transfer over `link`: a latency per slice, plus nbytes / (efficiency * link rate)."""
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
    """Return the seconds to pull a bank from its shards on `hardware.ranks` devices: W (N - 1) / N over `link`.

    With `copies_own_shard` the rank also copies its own shard into the slot, inside the device's memory and on the same
    stream. Otherwise the shard is read in place. Raises InputError if the machine has no such link.
    """
    ranks = hardware.ranks
    shard_bytes = bank_bytes / ranks
    local = _local_copy_seconds(hardware, shard_bytes) if copies_own_shard else 0.0
    if ranks == 1:
        return local
    used = _link(hardware, link)
    # The time of an emulated link starts with the first copy, which includes the local one.
    true_link = dataclasses.replace(used, emulated_bytes_per_s=None)
    copies = local + transfer_seconds(true_link, bank_bytes - shard_bytes, hardware.efficiency.bandwidth.value)
    return max(copies, _emulated_seconds(used, bank_bytes - shard_bytes))


def _emulated_seconds(link: TransferLink | None, nbytes: float) -> float:
    """Return the lower bound for `nbytes` over an emulated link; 0 if the link is not emulated."""
    rate = None if link is None else link.emulated_bytes_per_s
    return 0.0 if rate is None else nbytes / rate.value


def link_seconds(hardware: Hardware, bank_bytes: float, home: str) -> tuple[float, ...]:
    """Return the seconds of each link for its part of a bank from `home`. The links work at the same time.

    Raises InputError for an unknown home, and if the machine lacks a link.
    """
    return tuple(_use_seconds(hardware, bank_bytes, use) for use in home_named(home).travel)


def gather_seconds(hardware: Hardware, bank_bytes: float, home: str, transport: str = PULL) -> float:
    """Return the seconds to bring a complete bank of `bank_bytes` on the link from `home` to the device.

    `transport` is how ranks exchange shards, for homes that support several. Raises the errors of `link_seconds`,
    and InputError for an unknown transport.
    """
    if transport not in (PULL, COLLECTIVE):
        raise InputError.wrong("transport", transport, one_of((PULL, COLLECTIVE)))
    if transport == COLLECTIVE and COLLECTIVE in home_named(home).transports:
        received = bank_bytes * (hardware.ranks - 1) / hardware.ranks
        return max(collective_seconds(hardware, "bank_gather", bank_bytes), _emulated_seconds(hardware.peer, received))
    return max((0.0, *link_seconds(hardware, bank_bytes, home)))


def fill_seconds(hardware: Hardware, bank: BankSizes, home: str, transport: str = PULL) -> float:
    """Return the seconds in which one bank after the other from `home` is brought into a slot.

    A bank is decoded while the next one is transferred, so this is the longer of transfer and decoding; the first bank
    takes both. Raises the errors of `gather_seconds`.
    """
    return max(gather_seconds(hardware, bank.link_bytes, home, transport), decode_seconds(hardware, bank))


def decode_seconds(hardware: Hardware, bank: BankSizes) -> float:
    """Return the seconds to decode `bank` into its slot; 0 if it travels as it is there."""
    if not bank.is_encoded:
        return 0.0
    if hardware.decode is not None:
        return hardware.decode.at(bytes=bank.slot_bytes)
    return memory_seconds(hardware, bank.link_bytes + bank.slot_bytes)


def _use_seconds(hardware: Hardware, bank_bytes: float, use: LinkUse) -> float:
    if use.part == "others":
        return pull_seconds(hardware, bank_bytes, link=use.link)
    nbytes = part_bytes(use.part, bank_bytes, hardware.ranks)
    return transfer_seconds(_link(hardware, use.link), nbytes, hardware.efficiency.bandwidth.value)


def _link(hardware: Hardware, name: LinkName) -> TransferLink:
    link: TransferLink | None = getattr(hardware, name)
    if link is None:
        links = [name for name in LINKS if getattr(hardware, name) is not None]
        existing = f"its links: {one_of(links)}" if links else "it has no links"
        raise InputError(
            f"profile {hardware.name!r} has no {name} link ({existing}); choose another home, or add the link `{name}` "
            "to a profile of your own",
            name=name,
            expected=links,
        )
    return link


def _local_copy_seconds(hardware: Hardware, nbytes: float) -> float:
    """Return the seconds of a copy inside one device's memory, which reads and writes every byte."""
    if hardware.local is not None:
        return transfer_seconds(hardware.local, nbytes, hardware.efficiency.bandwidth.value)
    return memory_seconds(hardware, 2 * nbytes)


# ---- Computation -----------------------------------------------------------------------------------------------------


def memory_seconds(hardware: Hardware, moved_bytes: float) -> float:
    """Return the seconds of elementwise work that reads and writes `moved_bytes` in total."""
    if moved_bytes <= 0:
        return 0.0
    if hardware.memory is not None:
        return hardware.memory.at(bytes=moved_bytes)
    return moved_bytes / (hardware.memory_bytes_per_s.value * hardware.efficiency.bandwidth.value)


def peak_flops_per_s(hardware: Hardware, dtype: str) -> Figure:
    """Return the peak rate for `dtype`.

    Raises InputError, with the dtypes that the profile has, if it lacks this one.
    """
    key = short_dtype(dtype)
    if key not in hardware.flops:
        raise InputError(
            f"profile {hardware.name!r} has no {key} rate; it has {one_of(hardware.flops)}: choose one of these "
            f"dtypes, or add `flops.{key}` to a profile of your own",
            name="dtype",
            value=key,
            expected=tuple(hardware.flops),
        )
    return hardware.flops[key]


def reached_flops_per_s(hardware: Hardware, dtype: str, work: Work = "gemm") -> Figure:
    """Return the rate of large shapes: the rate at the table's largest point, or a fraction of the peak."""
    table = hardware.compute.get(work, {}).get(short_dtype(dtype))
    if table is not None:
        last = {axis.name: axis.points[-1] for axis in table.axes}
        return Figure(work_flops(work, last) / table.at(**last), table.source, f"{work} of the largest measured shape")
    peak = peak_flops_per_s(hardware, dtype)
    fraction = hardware.efficiency.dense_gemm if work == "gemm" else hardware.efficiency.irregular
    note = f"{fraction.value:g} ({fraction.source}) of {peak.value:.4g} FLOP/s ({peak.source})"
    return Figure(peak.value * fraction.value, "derived", note)


def work_seconds(hardware: Hardware, dtype: str, flops: float, moved_bytes: float = 0.0, work: Work = "gemm") -> float:
    """Return the seconds of work without a particular shape: FLOPs at the reached rate, or memory traffic if longer."""
    seconds = flops / reached_flops_per_s(hardware, dtype, work).value
    return max(seconds, _floor_seconds(hardware, moved_bytes))


def gemm_seconds(hardware: Hardware, dtype: str, rows: float, inner: float, columns: float) -> float:
    """Return the seconds of [rows, inner] times [inner, columns]: from the table, at least for its traffic."""
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
    """Return the seconds of `rows` spread evenly over `experts`, with weights [inner, columns] for each expert.

    With fewer rows than experts, only `rows` experts run. Kernels compute complete tiles, so without a measured table
    each expert computes half a tile more than its rows. Skew changes little: rates are nearly flat above a few hundred
    rows, and below that the weights dominate.
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
    """Return the seconds of attention.

    A profile that has a table for only one of causal and masked attention uses its rate for both.

    Args:
        hardware: The machine.
        dtype: The dtype of queries, keys and values.
        flops: FLOPs of all heads and sequences. With `is_masked` they count all pairs of queries and keys, else only
            the pairs that a causal kernel computes.
        moved_bytes: Memory traffic, which is a lower bound of the time.
        sequence: The largest number of keys that a query attends to. With `head_dim` it selects the rate.
        head_dim: Width of a head.
        is_masked: The kernel applies a mask.
        queries: Queries of all heads and sequences, of which kernels take a tile at a time; None if unknown.
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
    """Return the seconds of `flops` at the table's rate for `shape`, or at the reached rate if there is no table.

    The reached rate holds for many `tiles`; None means that their number is unknown.
    """
    table = hardware.compute.get(work, {}).get(short_dtype(dtype))
    if table is None:
        last_wave = 1.0 if tiles is None else _last_wave_factor(hardware, tiles)
        return last_wave * flops / reached_flops_per_s(hardware, dtype, work).value
    # Beyond the table the rate stays constant, even if FLOPs grow with the square of a size.
    clipped = {axis.name: min(shape[axis.name], axis.points[-1]) for axis in table.axes}
    return table.at(**clipped) * flops / work_flops(work, clipped)


def _last_wave_factor(hardware: Hardware, tiles: float) -> float:
    """Return the factor by which processors without a tile at the end of a kernel of `tiles` tiles lengthen it.

    The last wave is half full on average. Kernels with less than one wave use smaller tiles.
    """
    if hardware.processors is None:
        return 1.0
    waves = tiles / hardware.processors.value
    return 1.0 + 0.5 * min(1.0, waves) / waves


def work_flops(work: Work, shape: Mapping[str, float]) -> float:
    """Return the FLOPs of one point of a table of `work`; `shape` has a size for each of its axes."""
    if work in _ATTENTION:  # one head, both GEMMs; causal attention counts half of the diagonal
        return (2.0 if work == "attention" else 4.0) * shape["sequence"] ** 2 * shape["head_dim"]
    return float(gemm_flops(shape["rows"], shape["inner"], shape["columns"]))


def _floor_seconds(hardware: Hardware, moved_bytes: float) -> float:
    """Return the seconds of memory traffic at the full rate, without the caches and latencies of a measured table."""
    return max(0.0, moved_bytes) / (hardware.memory_bytes_per_s.value * hardware.efficiency.bandwidth.value)


# ---- Collectives -----------------------------------------------------------------------------------------------------


def collective_seconds(hardware: Hardware, kind: str, nbytes: float, ranks: int | None = None) -> float:
    """Return the seconds of a collective on `ranks` ranks (by default all of the machine's).

    Uses the profile's table if it has one (for bank_gather, the table of all_gather), scaled to `ranks` by the bytes
    that cross one rank's link. Otherwise adds up the latency of each step and the bytes that cross the link at its
    reached rate: (N - 1) / N of `nbytes`, twice that for all_reduce, all of them for p2p.

    `hardware.COLLECTIVES` lists the kinds and defines `nbytes` for each. Raises InputError for any other kind.
    """
    if kind not in COLLECTIVES:
        raise InputError(
            f"{kind!r} is not a collective; it must be one of {one_of(COLLECTIVES)}",
            name="collective",
            value=kind,
            expected=tuple(COLLECTIVES),
        )
    count = hardware.ranks if ranks is None else ranks
    if count < 1:
        raise InputError(
            f"a collective has {count} ranks; it must have 1 or more", name="ranks", value=count, expected="1 or more"
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
    link = hardware.peer or _link(hardware, "host")  # devices without peer links exchange through host memory
    rate = link.bytes_per_s.value * hardware.efficiency.bandwidth.value
    latency = _steps(kind, count) * hardware.collective_latency_seconds.value
    return latency + _link_share(kind, count) * nbytes / rate


def token_exchange_seconds(hardware: Hardware, rows_bytes: float, experts: int) -> float:
    """Return the seconds of an AllToAll of `rows_bytes` per device to the experts, and of the results back.

    Ranks first exchange the number of rows for each expert. Rows arrive in the order of ranks; sorting them by expert,
    and back, reads and writes them twice.
    """
    if hardware.ranks == 1 or rows_bytes <= 0:
        return 0.0
    exchanged = 2 * collective_seconds(hardware, "all_to_all", rows_bytes)
    exchanged += collective_seconds(hardware, "all_to_all", _COUNT_BYTES * experts)
    return exchanged + memory_seconds(hardware, 4 * rows_bytes)


def _link_share(kind: str, ranks: int) -> float:
    """Return the bytes that leave one rank for each byte of the collective."""
    if kind == "p2p":
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _steps(kind: str, ranks: int) -> int:
    """Return the number of successive messages: trees for sums, otherwise 1, because all links work at once."""
    if kind not in ("all_reduce", "reduce_scatter"):
        return 1
    return math.ceil(math.log2(ranks)) * (2 if kind == "all_reduce" else 1)
