"""The compiler's view in a report: captured now, or for a preset read from what the package stores.

`captured_presets.json` holds what capture gives with the versions of torch and transformers that it names. With others
installed a preset is captured, which takes seconds. A test compares what is stored with what capture gives.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib import metadata, resources
from typing import Any

import msgspec

from moepass.explaining.explained_models import ExplainedModel
from moepass.explaining.report_parts import CompilerPart
from moepass.models.errors import CheckpointError, MoepassError

STORED_FILE = "data/captured_presets.json"
# Plans that are stored are those of a compilation with this.
STORED_LOWERING = "inductor"
# What the compiler finds does not depend on the number of tokens, but some families are captured token by token.
_CAPTURE_BATCH, _CAPTURE_SEQ = 2, 16


class StoredCaptures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`parts` by preset: captured with a ring of 1 slot, of 2, and so on. More slots give the plans of the last."""

    versions: dict[str, str]
    parts: dict[str, tuple[CompilerPart, ...]]


def compiler_part(found: ExplainedModel, slots: int, lower: str) -> CompilerPart:
    """The compiler's result for the model, or for enough of its first layers, planned with `slots` slots.

    Raises CheckpointError where the model cannot be captured.
    """
    if not is_stored(found.preset, lower):
        return captured_part(found, slots, lower)
    return preset_part(found.preset, slots)


def is_stored(model: str, lower: str) -> bool:
    """Whether `model` is a preset whose capture is stored, for this lowering and the installed versions."""
    return lower == STORED_LOWERING and model in _stored().parts and _stored().versions == installed_versions()


def preset_part(preset: str, slots: int) -> CompilerPart:
    """The stored result for a preset. Raises KeyError for any other name."""
    parts = _stored().parts[preset]
    part = parts[min(slots, len(parts)) - 1]
    explanation = dataclasses.replace(part.explanation, slots=slots)
    return msgspec.structs.replace(part, explanation=explanation)


def captured_part(found: ExplainedModel, slots: int, lower: str) -> CompilerPart:
    """As `compiler_part`, captured now."""
    # They bring Dynamo and transformers along, which a stored preset needs nothing of.
    from moepass.explaining.capture_model import explain_meta_model
    from moepass.models.checkpoint.checkpoint_folders import meta_model_of
    from moepass.models.sizes.cut_configs import cut_config
    from moepass.runtime.serving.attention.survey import trie_refusal

    cut = cut_config(found.config, found.architecture) if found.architecture is not None else None
    chosen = getattr(found.config, "_experts_implementation", None)
    # The eager loop over experts depends on values, and cannot be captured.
    form = chosen if chosen in ("grouped_mm", "batched_mm") else "grouped_mm"
    model = meta_model_of(found.config if cut is None else cut, found.name, form)
    try:
        refusal = trie_refusal(model)
        explanation = explain_meta_model(model, _CAPTURE_BATCH, _CAPTURE_SEQ, slots, lower)
    except (RuntimeError, NotImplementedError) as error:  # torch's, about shapes that do not fit together, or values
        if isinstance(error, MoepassError):
            raise
        told = " ".join(str(error).split())
        # Dynamo tells of the call with all of its arguments first, then of what it gave.
        told = told.partition(": got ")[2] or told
        told = told.partition(" Hint: ")[0][:300]
        raise CheckpointError(
            f"{found.name} cannot be captured; perhaps the numbers of its config do not fit together: {told}",
            name="model",
            value=found.name,
        ) from error
    text: Any = (found.config if cut is None else cut).get_text_config()
    return CompilerPart(int(text.num_hidden_layers), cut is not None, explanation, refusal)


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide how a model is captured, without the name of a build (`+cpu`)."""
    return {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}


@functools.cache
def _stored() -> StoredCaptures:
    content = (resources.files("moepass.explaining") / STORED_FILE).read_bytes()
    try:
        return msgspec.json.decode(content, type=StoredCaptures)
    except msgspec.ValidationError as error:  # records of plans were changed, and this file was not made anew
        raise MoepassError(
            f"{STORED_FILE} holds plans of another version of moepass ({error}); in a checkout, "
            "python tests/helpers/graphs/store_presets.py makes it anew",
            path=STORED_FILE,
        ) from error
