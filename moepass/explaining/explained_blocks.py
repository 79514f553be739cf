"""The MoE blocks in a report: those that were captured, and those of layers that are equal to captured ones."""

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
    """Return all blocks of the model in the order of its layers, and the reasons of the refused ones.

    Args:
        compiler: the captured layers.
        architecture: the sizes of all layers. If only the first were captured, a block of another layer is that of an
            equal layer. With None, only the captured blocks are returned.
        dtype: the dtype of the banks.
        stored: the format of the banks, if they are used as the checkpoint stores them.
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
    for refusal in plan.refusals:
        line = f"{refusal.source_line}: " if refusal.source_line else ""
        # The first refusal is the nearest to the cause.
        reasons.setdefault(refusal.where or refusal.node, f"{line}{refusal.reason}")
    blocks = []
    for block in plan.blocks:
        rewritten = block.name in streamed
        reason = None if rewritten else reasons.pop(block.name, plan.reason)
        blocks.append(Block(block.name, block.form, rewritten, reason, block.weight_bytes, False))
    # Near misses are refusals without a block.
    return blocks + [Block(where, "not recognised", False, reason, 0, False) for where, reason in reasons.items()]


def _layer(captured: list[Block], layer: int, architecture: Architecture) -> list[Block]:
    """Return the blocks of one layer, or if it was not captured, those of the last captured layer that equals it."""
    blocks = [block for block in captured if _layer_of(block.name) == layer]
    if blocks or architecture.layers[layer].experts is None:
        return blocks
    kind = architecture.layers[layer]
    numbers = {_layer_of(block.name) for block in captured}
    equal_layers = [number for number in numbers if number is not None and architecture.layers[number] == kind]
    if not equal_layers:
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
        if _layer_of(block.name) == max(equal_layers)
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
