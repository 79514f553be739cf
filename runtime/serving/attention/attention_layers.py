"""The properties of a model's attention layers that trie attention needs."""

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
    """The position-dependent scale of queries in Llama 4: 1 + scale · log(1 + floor((position + 1) / floor_scale)).

    The model's code uses the index in the stream as the position, which `correction` undoes.
    """

    scale: float
    floor_scale: float

    def correction(self, depth: torch.Tensor) -> torch.Tensor:
        """Return the factors [n] by which queries must be multiplied, so that each has the scale of its depth."""
        target_scale, applied_scale = (
            self._factor(positions) for positions in (depth, torch.arange(len(depth), device=depth.device))
        )
        return target_scale / applied_scale

    def _factor(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale)) * self.scale + 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention layer of a model.

    Attributes:
        cache_index: index of the layer in the memory of blocks.
        heads: number of query heads.
        shape: shape of the keys and values.
        past: the earlier tokens that a token sees.
        temperature: position-dependent scale of the queries, None for none.
    """

    cache_index: int
    heads: int
    shape: KeyValueShape
    past: VisiblePast
    temperature: Temperature | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionArguments:
    """The arguments of an attention call that change its result.

    Attributes:
        sinks: [heads] logits of the attention sinks, None for none.
        scale: factor of the scores, None for the default.
        softcap: limit of the scores, 0 for none.
    """

    sinks: torch.Tensor | None
    scale: float | None
    softcap: float

    def scaling(self, query: torch.Tensor) -> float:
        """Return the factor of the scores of `query`."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale


# Arguments that repeat the mask or do not change the result. All others must be None or False.
_WITHOUT_EFFECT = frozenset(
    {
        *("sliding_window", "position_ids", "use_cache", "return_dict", "cache_position", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "logits_to_keep", "position_embeddings"),
    }
)


def attention_arguments(module: torch.nn.Module, arguments: Mapping[str, Any]) -> AttentionArguments:
    """Return the supported arguments that transformers passes to an attention function.

    Raises:
        InputError: an argument is not supported by attention over a trie.
    """
    scale, softcap = arguments.get("scaling"), arguments.get("softcap")
    supported = {"scaling", "softcap", "s_aux", "dropout", "is_causal", *_WITHOUT_EFFECT}
    for name, value in arguments.items():
        if name not in supported and value is not None and value is not False:
            text = f"attention is called with {name}, which attention over a trie does not support"
            raise InputError(text, name=name, expected=sorted(supported))
    for name, value in (("scaling", scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, (int, float)):
            text = f"attention is called with {name} of type {type(value).__name__}; it must be a number"
            raise InputError(text, name=name, expected="a number")
    if arguments.get("dropout"):
        raise InputError(f"attention has a dropout of {arguments['dropout']}; call model.eval()", name="dropout")
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise InputError("attention is not causal: tokens see later tokens", name="is_causal")
    return AttentionArguments(arguments.get("s_aux"), scale, float(softcap or 0.0))
