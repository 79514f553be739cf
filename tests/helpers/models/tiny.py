"""Tiny randomly initialised mixture-of-experts models, for tests, benchmarks and first experiments.

``tiny_model("mixtral")`` gives one of the families of ``TINY_FAMILIES``, of which the configuration is written by hand.
``discover_expert_families()`` lists every family of the installed Transformers that uses its experts interface, and
``discovered_tiny_model(record)`` shrinks the default configuration of such a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.helpers.models.tiny_build import TinyModelUnavailableError, build_tiny
from tests.helpers.models.tiny_discovery import (
    UNAVAILABLE_FAMILIES,
    ExpertFamily,
    ExpertsClass,
    discover_expert_families,
    discovered_tiny_model,
)
from tests.helpers.models.tiny_families import EXPERT_KINDS, TINY_FAMILIES, TinyFamily

__all__ = [
    "EXPERT_KINDS",
    "TINY_FAMILIES",
    "UNAVAILABLE_FAMILIES",
    "ExpertFamily",
    "ExpertsClass",
    "TinyFamily",
    "TinyModelUnavailableError",
    "discover_expert_families",
    "discovered_tiny_model",
    "main_result",
    "tiny_inputs",
    "tiny_model",
]

# Smaller ids are padding, begin and end of text in every tiny configuration.
_FIRST_ORDINARY_ID = 3


def tiny_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    experts_implementation: str = "grouped_mm",
    seed: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Build a tiny causal language model of a family of ``TINY_FAMILIES``.

    Args:
        family: a key of ``TINY_FAMILIES``, such as ``"qwen3_moe"``.
        dtype: type of the weights; what the family always keeps in float32 stays in float32.
        experts_implementation: ``"eager"``, ``"grouped_mm"`` or ``"batched_mm"`` (llama4 supports only its own).
        seed: the same seed gives the same weights.
        config_overrides: attributes of the family's configuration.  Where ``num_hidden_layers`` is one of them, a
            ``layer_types`` that the family's table sets is cut or repeated to that length.

    Returns:
        The model in eval mode on the CPU, cache off; it maps ids of shape (batch, seq) to ``.logits`` of shape
        (batch, seq, vocabulary).

    Raises:
        ValueError: ``family`` is not a key of ``TINY_FAMILIES``.
    """
    entry = TINY_FAMILIES.get(family)
    if entry is None:
        raise ValueError(f"unknown family {family!r}; valid families: {', '.join(sorted(TINY_FAMILIES))}")
    config = getattr(transformers, entry.config_class)(**_merged(entry.config, config_overrides))
    return build_tiny(
        getattr(transformers, entry.model_class),
        config,
        dtype=dtype,
        experts_implementation=experts_implementation,
        seed=seed,
    )


def tiny_inputs(model: PreTrainedModel, batch: int = 2, seq: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs for ``model``.

    Args:
        model: a model of this module (any text model whose forward method takes ``input_ids`` will do).
        batch: number of sequences.
        seq: tokens per sequence.
        seed: the same seed gives the same ids.

    Returns:
        ``{"input_ids": ids}`` with int64 ids of shape (batch, seq), on the device of the model.  No padding, so no
        mask.

    Raises:
        ValueError: ``batch`` or ``seq`` is below 1.
    """
    if batch < 1 or seq < 1:
        raise ValueError(f"batch and seq must be at least 1, got batch={batch} and seq={seq}")
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(_FIRST_ORDINARY_ID, vocabulary, (batch, seq), generator=generator)
    return {"input_ids": ids.to(model.device)}


def main_result(output: Any) -> torch.Tensor:
    """Return the logits [batch, seq, vocabulary] of an output; without a head, the last hidden states."""
    value = output.logits if "logits" in output else output[0]
    assert isinstance(value, torch.Tensor)
    return value


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**config, **overrides}
    layers = merged["num_hidden_layers"]
    if "layer_types" in config and "layer_types" not in overrides:
        types = config["layer_types"]
        merged["layer_types"] = [types[i % len(types)] for i in range(layers)]
    return merged
