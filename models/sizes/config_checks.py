"""Checks of a model's configuration before a library builds anything from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moepass.models.errors import CheckpointError
from moepass.models.limits import MOST_EXPERTS, MOST_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Names of the number of experts in a layer, and of the number of experts per token, in various families.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts", "moe_topk")


def check_raw_config(values: Mapping[Any, Any], name: str) -> None:
    """Raise CheckpointError if the JSON of a configuration requests unbounded work, or code from elsewhere.

    Errors call the configuration `name`.
    """
    for key, value in ((str(key), value) for key, value in values.items()):
        if isinstance(value, Mapping):
            check_raw_config(value, f"{name}: {key}")
        elif isinstance(value, int):
            _check_count(name, key, value)
        elif isinstance(value, str) and key.endswith("_implementation") and "/" in value:
            raise CheckpointError(
                f"{name}: {key} is {value!r}, a kernel on the Hugging Face hub; moepass does not run code that a "
                f"checkpoint names: remove {key}",
                name=key,
                value=value,
                path=name,
            )


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Raise CheckpointError for a configuration without a language model, or with a top_k above its number of experts.

    Errors call the configuration `name`.
    """
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
            raise CheckpointError(
                f"{name}: {top_k[0]} is {top_k[1]}, but {count[0]} is {count[1]}; a token can use 1 to {count[1]} "
                "experts",
                name=top_k[0],
                value=top_k[1],
                expected=range(1, count[1] + 1),
                path=name,
            )


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
