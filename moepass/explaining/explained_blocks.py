"""The blocks of experts in a report: those that were captured, and those of layers like them."""

from __future__ import annotations

import re

from moepass.explaining.report_parts import Block, CompilerPart
from moepass.models.formulas.stored_weights import bank_sizes
from moepass.models.sizes.architecture import Architecture
from moepass.models.sizes.weight_formats import WeightFormat
from moepass.passes.ir.plan import Plan

_LAYER = re.compile(r"((?:layers?|blocks?|h)\.)(\d+)")


def explained_blocks(
    compiler: CompilerPart, architecture: Architecture | None, dtype: str, stored: WeightFormat | None = None
) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """All blocks of the model in the order of its layers, and why those are refused that are.

    With an `architecture` bank sizes are those of `dtype`, or of banks as they are `stored`; where only its first
    layers were captured, a block of another layer is named as that of a layer of the same kind.
    """
    captured = [block for plan in compiler.explanation.plans for block in _blocks_of(plan)]
    blocks = captured
    if architecture is not None:
        blocks = [block for layer in range(len(architecture.layers)) for block in _layer(captured, layer, architecture)]
        blocks += [block for block in captured if _layer_of(block.name) is None]
        blocks = [_sized(block, architecture, dtype, stored) for block in blocks]
    refusals = [f"{block.name}: {block.refusal}" for block in blocks if block.refusal is not None]
    if compiler.explanation.stopped:
        refusals.append(f"capture ended early: {compiler.explanation.stopped}")
    return tuple(blocks), tuple(refusals)


def _blocks_of(plan: Plan) -> list[Block]:
    streamed = {stay.block for stay in plan.slot_stays}
    reasons: dict[str, str] = {}
    for one in plan.refusals:
        line = f"{one.source_line}: " if one.source_line else ""
        # The first one is the nearest to the cause.
        reasons.setdefault(one.where or one.node, f"{line}{one.reason}")
    blocks = []
    for block in plan.blocks:
        rewritten = block.name in streamed
        refusal = None if rewritten else reasons.pop(block.name, plan.reason)
        blocks.append(Block(block.name, block.form, rewritten, refusal, block.weight_bytes, False))
    # Near misses have no block of their own.
    return blocks + [Block(where, "not recognised", False, reason, 0, False) for where, reason in reasons.items()]


def _layer(captured: list[Block], layer: int, architecture: Architecture) -> list[Block]:
    """The blocks of one layer: its own, or those of the last captured layer that is equal to it."""
    own = [block for block in captured if _layer_of(block.name) == layer]
    if own or architecture.layers[layer].experts is None:
        return own
    kind = architecture.layers[layer]
    numbers = {_layer_of(block.name) for block in captured}
    alike = [number for number in numbers if number is not None and architecture.layers[number] == kind]
    if not alike:
        return []
    return [
        Block(
            _LAYER.sub(lambda match: f"{match[1]}{layer}", block.name, count=1),
            block.form,
            block.rewritten,
            block.refusal,
            block.bank_bytes,
            True,
        )
        for block in captured
        if _layer_of(block.name) == max(alike)
    ]


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[2]) if match else None


def _sized(block: Block, architecture: Architecture, dtype: str, stored: WeightFormat | None) -> Block:
    layer = _layer_of(block.name)
    experts = architecture.layers[layer].experts if layer is not None else None
    if experts is None:
        return block
    nbytes = bank_sizes(experts, architecture.hidden, dtype, stored).link_bytes
    return Block(block.name, block.form, block.rewritten, block.refusal, nbytes, block.by_analogy)
