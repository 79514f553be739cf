"""The compiler's part of a report, captured now or read from the package for a preset, and the MoE blocks in it.

`captured_presets.json` contains the captures with the versions of torch and transformers that it names. With other
versions a preset is captured again, which takes seconds. A test compares the file with new captures.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Hashable, Sequence
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from moepass.explaining.arguments import ExplainedModel
from moepass.explaining.report_parts import Block, CompilerPart
from moepass.models.errors import CheckpointError, MoepassError
from moepass.models.formulas.stored_weights import bank_sizes
from moepass.models.sizes.architecture import Architecture
from moepass.models.sizes.families import from_config
from moepass.models.sizes.weight_formats import WeightFormat
from moepass.passes.ir.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STORED_FILE = "data/captured_presets.json"
# The lowering of the stored plans.
STORED_LOWERING = "inductor"
# The result does not depend on the number of tokens, but some families are captured token by token.
_CAPTURE_BATCH, _CAPTURE_SEQ = 2, 16
_LAYER = re.compile(r"((?:layers?|blocks?|h)\.)(\d+)")


class StoredCaptures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The captures of each preset with 1 slot, 2 slots, and so on, and the versions of packages that made them."""

    versions: dict[str, str]
    parts: dict[str, tuple[CompilerPart, ...]]


def compiler_part(model: ExplainedModel, slots: int, lower: str) -> CompilerPart:
    """Return the compiler's result for the model or its first layers. Raises CheckpointError if capture fails."""
    return preset_part(model.preset, slots) if is_stored(model.preset, lower) else captured_part(model, slots, lower)


def is_stored(name: str, lower: str) -> bool:
    """Return True if `name` is a preset whose capture is stored, for this lowering and the installed versions."""
    return lower == STORED_LOWERING and name in _stored().parts and _stored().versions == installed_versions()


def preset_part(preset: str, slots: int) -> CompilerPart:
    """Return the stored result for a preset. Raises KeyError for any other name."""
    parts = _stored().parts[preset]
    stored = parts[min(slots, len(parts)) - 1]
    return replace(stored, explanation=dataclasses.replace(stored.explanation, slots=slots))


def captured_part(model: ExplainedModel, slots: int, lower: str) -> CompilerPart:
    """Capture the model now, and return the compiler's result; see `compiler_part`."""
    # These import Dynamo and transformers, which a stored preset does not need.
    from moepass.explaining.capture_model import explain_meta_model
    from moepass.models.checkpoint.checkpoint_folders import meta_model_of
    from moepass.runtime.serving.attention.survey import survey_attention

    cut = cut_config(model.config, model.architecture) if model.architecture is not None else None
    config = model.config if cut is None else cut
    implementation = getattr(model.config, "_experts_implementation", None)
    # The eager loop over experts depends on values, so it cannot be captured.
    form = implementation if implementation in ("grouped_mm", "batched_mm") else "grouped_mm"
    meta_model = meta_model_of(config, model.name, form)
    try:
        refusal = survey_attention(meta_model).refusal
        explanation = explain_meta_model(meta_model, _CAPTURE_BATCH, _CAPTURE_SEQ, slots, lower)
    except (RuntimeError, NotImplementedError) as error:  # torch's errors about mismatched shapes or missing values
        if isinstance(error, MoepassError):
            raise
        message = " ".join(str(error).split())
        # Dynamo's message has the call with all of its arguments first, and then the error.
        message = message.partition(": got ")[2] or message
        message = message.partition(" Hint: ")[0][:300]
        problem = f"{model.name} cannot be captured; perhaps the numbers of its config do not match: {message}"
        raise CheckpointError(problem, name="model", value=model.name) from error
    text: Any = config.get_text_config()
    return CompilerPart(int(text.num_hidden_layers), cut is not None, explanation, refusal)


def telling_prefix(layers: Sequence[Hashable]) -> int:
    """Return the smallest number of first layers in which every kind of layer occurs."""
    return max((layers.index(kind) for kind in set(layers)), default=-1) + 1


def cut_config(config: PreTrainedConfig, architecture: Architecture) -> PreTrainedConfig | None:
    """Return a copy of `config` with only the telling prefix of its layers, or None if it cannot be cut.

    94 equal layers are detected, rewritten or refused like one of them, but take a minute to capture. Returns None if
    nothing would be gained, and if the cut configuration does not describe the prefix. `architecture` describes
    `config`.
    """
    keep, count = telling_prefix(architecture.layers), len(architecture.layers)
    if keep == count:
        return None
    cut = copy.deepcopy(config)
    text: Any = cut.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:keep])
    text.num_hidden_layers = keep
    same = from_config(cut, name=architecture.name, dtype=architecture.dtype).layers == architecture.layers[:keep]
    return cut if same else None


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that affect captures, without the name of a build (`+cpu`)."""
    return {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}


@functools.cache
def _stored() -> StoredCaptures:
    content = (resources.files("moepass.explaining") / STORED_FILE).read_bytes()
    try:
        return msgspec.json.decode(content, type=StoredCaptures)
    except msgspec.ValidationError as error:  # the records changed, and the file was not made again
        raise MoepassError(
            f"{STORED_FILE} has plans of another version of moepass ({error}); in a checkout, update it with "
            "python -m tests.helpers.graphs.store_presets",
            path=STORED_FILE,
        ) from error


# ---- Blocks ----------------------------------------------------------------------------------------------------------


def explained_blocks(
    compiler: CompilerPart, architecture: Architecture | None, dtype: str, stored: WeightFormat | None = None
) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """Return all blocks of the model in the order of its layers, and the reasons of refusals.

    If only the first layers were captured, any other layer is reported with the block of an equal layer. If the sizes
    of the layers are unknown, only the captured blocks are returned. `stored` is the format of banks that are used as
    stored.
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
    """Return the blocks of one layer, or if it was not captured, of the last captured layer that equals it."""
    blocks = [block for block in captured if _layer_of(block.name) == layer]
    if blocks or architecture.layers[layer].experts is None:
        return blocks
    kind = architecture.layers[layer]
    numbers = {_layer_of(block.name) for block in captured}
    equal_layers = [number for number in numbers if number is not None and architecture.layers[number] == kind]
    if not equal_layers:
        return []
    return [
        replace(block, name=_LAYER.sub(lambda match: f"{match[1]}{layer}", block.name, count=1), by_analogy=True)
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
    return replace(block, bank_bytes=bank_sizes(experts, architecture.hidden, dtype, stored).link_bytes)
