"""What the attention of each layer of a model is, as a trie needs to know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from moepass.models.errors import InputError
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.cache.block_memory import KeyValueShape


@dataclasses.dataclass(frozen=True, slots=True)
class Temperature:
    """Queries multiplied by 1 + scale · log(1 + floor((position + 1) / floor_scale)), as Llama 4 has it.

    Its model takes the index in the stream for the position.
    """

    scale: float
    floor_scale: float

    def correction(self, depth: torch.Tensor) -> torch.Tensor:
        """What queries of a stream have to be multiplied with, so that each has the factor of its depth: [n]."""
        right, taken = (self._factor(place) for place in (depth, torch.arange(len(depth), device=depth.device)))
        return right / taken

    def _factor(self, place: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((place.float() + 1.0) / self.floor_scale)) * self.scale + 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLayer:
    """`cache_index`: its place among the layers of the memory of blocks. `past`: what a token sees of its sequence."""

    cache_index: int
    heads: int
    shape: KeyValueShape
    past: VisiblePast
    temperature: Temperature | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionArguments:
    sinks: torch.Tensor | None
    scale: float | None
    softcap: float

    def scaling(self, query: torch.Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale


# Arguments that say the same as the mask, or nothing that changes a result. Others must be None or False.
_WITHOUT_EFFECT = frozenset(
    {
        *("sliding_window", "position_ids", "use_cache", "return_dict", "cache_position", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "logits_to_keep", "position_embeddings"),
    }
)


def attention_arguments(module: torch.nn.Module, arguments: Mapping[str, Any]) -> AttentionArguments:
    """What transformers passes to an attention function. Raises InputError for what attention over a trie has not."""
    scale, softcap = arguments.get("scaling"), arguments.get("softcap")
    known = {"scaling", "softcap", "s_aux", "dropout", "is_causal", *_WITHOUT_EFFECT}
    for name, value in arguments.items():
        if name not in known and value is not None and value is not False:
            text = f"attention is called with {name}, which is not known to leave the result over a trie alone"
            raise InputError(text, name=name, expected=sorted(known))
    for name, value in (("scaling", scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, (int, float)):
            text = f"attention is called with a {type(value).__name__} as {name}; it must be a number"
            raise InputError(text, name=name, expected="a number")
    if arguments.get("dropout"):
        raise InputError(f"attention drops a share of {arguments['dropout']}; call model.eval()", name="dropout")
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise InputError("attention is not causal: tokens see those behind them", name="is_causal")
    return AttentionArguments(arguments.get("s_aux"), scale, float(softcap or 0.0))
