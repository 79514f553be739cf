"""The transformers class for a checkpoint's configuration: a language model, a classifier or a backbone."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepass.models.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The suffixes of class names, and transformers' mappings from model types and configurations to these classes.
_MAPPINGS = {
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "Model": "MODEL_MAPPING",
    "": "MODEL_FOR_CAUSAL_LM_MAPPING",
}


def check_model_type(file: Path, values: Mapping[str, Any]) -> str:
    """Return the model type of the configuration `values` in `file`.

    Raises CheckpointError if the installed transformers does not know it, or has no class for it that moepass can run.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        text = f"{file} has no model_type; it must be one that transformers knows, such as qwen3_moe"
        raise CheckpointError(text, path=file, expected="one that transformers knows, as qwen3_moe")
    if model_type not in CONFIG_MAPPING_NAMES:
        text = f"{file}: model_type {model_type!r} is unknown to transformers {_did_you_mean(model_type)}"
        raise CheckpointError(text, path=file, name="model_type", value=model_type)
    names = values.get("architectures")
    end = _end_of(names)
    if model_type not in _mapping(end, "_NAMES"):
        raise CheckpointError(
            f"{file}: model_type {model_type!r} has no language-model head; moepass reads its answers from the "
            "next-token logits of causal language models, as qwen3_moe"
            if not end
            else f"{file}: architectures is {names!r}, and transformers has no such class for {model_type!r}",
            path=file,
            name="architectures" if end else "model_type",
            value=names if end else model_type,
        )
    return model_type


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class in `config.architectures`, or by default the family's causal language model."""
    classes = _mapping(_end_of(config.architectures))[type(config)]
    chosen: type[PreTrainedModel] = classes[0] if isinstance(classes, (list, tuple)) else classes
    return chosen


def class_options(model_class: type[PreTrainedModel], experts_implementation: str = "grouped_mm") -> dict[str, str]:
    """Return the arguments for constructing this class; families without experts have no `experts_implementation`."""
    settable = model_class._can_set_experts_implementation()
    return {"experts_implementation": experts_implementation} if settable else {}


def _end_of(architectures: object) -> str:
    """Return the suffix of the class name in a configuration, if it is a known one."""
    name = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else ""
    return next((end for end in _MAPPINGS if isinstance(name, str) and name.endswith(end)), "")


def _mapping(end: str, suffix: str = "") -> Any:
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, _MAPPINGS[end] + suffix)


def _did_you_mean(model_type: str) -> str:
    import transformers

    close = difflib.get_close_matches(model_type, _mapping("", "_NAMES"), n=1)
    hint = f"did you mean {close[0]}?" if close else "give one that it knows, as qwen3_moe"
    return f"{transformers.__version__}; {hint}"
