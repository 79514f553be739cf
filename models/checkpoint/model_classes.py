"""Checks of a configuration before a library uses it, and its class: a language model, a classifier or a backbone."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepass.models.errors import CheckpointError
from moepass.models.limits import MOST_EXPERTS, MOST_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The suffixes of class names, and transformers' mappings from model types and configurations to these classes.
_MAPPINGS = {
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "Model": "MODEL_MAPPING",
    "": "MODEL_FOR_CAUSAL_LM_MAPPING",
}
# Names of the number of experts in a layer, and of the number of experts per token, in various families.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts", "moe_topk")


def check_raw_config(values: Mapping[Any, Any], name: str) -> None:
    """Raise CheckpointError if the JSON of configuration `name` requests unbounded work, or code from elsewhere."""
    for key, value in ((str(key), value) for key, value in values.items()):
        if isinstance(value, Mapping):
            check_raw_config(value, f"{name}: {key}")
        elif isinstance(value, int):
            _check_count(name, key, value)
        elif isinstance(value, str) and key.endswith("_implementation") and "/" in value:
            text = (
                f"{name}: {key} is {value!r}, a kernel on the Hugging Face hub; moepass does not run code that a "
                f"checkpoint names: remove {key}"
            )
            raise CheckpointError(text, name=key, value=value, path=name)


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Raise CheckpointError unless configuration `name` has a language model, and no top_k above its experts."""
    try:
        text: Any = config.get_text_config()
        str(text.model_type)
    except (AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{name}: the part that describes its language model cannot be read: {error}", path=name
        ) from error
    for section in (config, text):
        count, top_k = _first(section, _COUNTS), _first(section, _TOP_K)
        # Some configs have a top_k without experts.
        if count is not None and top_k is not None and count[1] > 0 and not 1 <= top_k[1] <= count[1]:
            message = (
                f"{name}: {top_k[0]} is {top_k[1]}, but {count[0]} is {count[1]}; a token can use 1 to {count[1]} "
                "experts"
            )
            raise CheckpointError(message, name=top_k[0], value=top_k[1], expected=range(1, count[1] + 1), path=name)


def _check_count(name: str, key: str, value: int) -> None:
    """Raise CheckpointError if `value` is above the limit of what `key` counts.

    Families have dozens of such keys, so only the end of the name counts: `num_hidden_layers`, `n_routed_experts`.
    """
    limits = {"layers": MOST_LAYERS, "n_layer": MOST_LAYERS, "experts": MOST_EXPERTS}
    for ending, most in limits.items():
        if key.endswith(ending) and value > most:
            text = f"{name}: {key} is {value}; the limit is {most}: no model of that size is known; correct the config"
            raise CheckpointError(text, name=key, value=value, expected=most, path=name)


def _first(config: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    values = ((name, getattr(config, name, None)) for name in names)
    return next(((name, value) for name, value in values if type(value) is int), None)


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
