"""Bytes that strategies move between devices, and bytes that a gather moves.

The name of a strategy combines its forms of attention and of experts: `dp` data parallel, `tp` tensor parallel, `sp`
sequence parallel, `pp` pipeline parallel, `ep` expert parallel. The table is from arXiv 2605.02960.
"""

from __future__ import annotations

from moepass.models.errors import InputError
from moepass.models.formulas.memory import element_bytes
from moepass.models.formulas.sizes import Size, divided
from moepass.models.homes import BankPart, home_named
from moepass.models.sizes.architecture import Layer

STRATEGIES = ("dp_ep", "dp_tp", "tp_ep", "tp_tp", "pp_pp", "sp_tp", "sp_ep", "asyncep")


def communication_bytes(strategy: str, layer: Layer, hidden: int, tokens: Size, ranks: Size, dtype: str) -> Size:
    """Return the bytes per device and MoE layer on the critical path, for a step of `tokens` = B·S tokens.

    Sent and received bytes both count. `asyncep` has none, because its transfers overlap with computation
    (`gathered_bytes`). The table does not say how B·S is divided among the devices, so it only compares strategies; the
    time of one collective follows from its own sizes (`all_gather_bytes`, `exchanged_bytes`).

    Raises InputError for an unknown strategy and for a layer without experts.
    """
    if strategy not in STRATEGIES:
        raise InputError.unknown("strategy", strategy, STRATEGIES)
    if layer.experts is None:
        raise InputError("communication_bytes is about layers with experts, and this layer has none")
    row = hidden * element_bytes(dtype)
    routed = layer.experts.top_k * row
    key_values = (layer.attention.key_width + layer.attention.value_width) * element_bytes(dtype)
    if strategy == "asyncep":
        return 0 * tokens
    if strategy == "pp_pp":
        return 2 * tokens * row
    per_token = {
        "dp_tp": 4 * row,
        "tp_tp": 4 * row,
        "dp_ep": 4 * routed,
        "tp_ep": 2 * row + 4 * routed,
        "sp_tp": key_values + 4 * row,
        "sp_ep": key_values + 4 * routed,
    }[strategy]
    return divided(per_token * tokens * (ranks - 1), ranks)


def gathered_bytes(bank_bytes: Size, ranks: Size) -> Size:
    """Return the bytes that one rank pulls from its peers to complete a bank."""
    return divided(bank_bytes * (ranks - 1), ranks)


def part_bytes(part: BankPart, bank_bytes: Size, ranks: Size) -> Size:
    """Return the bytes of a part of a bank."""
    if part == "all":
        return bank_bytes
    return gathered_bytes(bank_bytes, ranks) if part == "others" else divided(bank_bytes, ranks)


def background_bytes(home: str, bank_bytes: Size, ranks: Size) -> Size:
    """Return the bytes per rank and MoE layer that move during computation, over all links.

    Raises InputError for an unknown home.
    """
    parts = [part_bytes(use.part, bank_bytes, ranks) for use in home_named(home).travel]
    return sum(parts, 0 * bank_bytes)


def all_gather_bytes(complete_bytes: Size, ranks: Size | None) -> Size:
    """Return the bytes that a rank sends and receives in an AllGather to, or a ReduceScatter of, `complete_bytes`.

    An AllReduce is one of each. An unknown number of ranks (None) counts as infinite.
    """
    return 2 * complete_bytes if ranks is None else 2 * gathered_bytes(complete_bytes, ranks)


def exchanged_bytes(both_bytes: Size, ranks: Size | None) -> Size:
    """Return the bytes that a rank sends and receives in an AllToAll.

    `both_bytes` counts input and output. One of `ranks` equal parts stays on the rank.
    """
    return both_bytes if ranks is None else gathered_bytes(both_bytes, ranks)
