"""The last layer computes, behind its attention, the tokens alone whose states are read.

Other tokens see keys and values of a token, and nothing else of it; and no layer follows the last one. So a token that
nobody reads needs neither output projection nor experts there. That saves up to one layer's worth of them in each step.

Pseudo-code, before the last layer runs:
    run it for all tokens and stop it as soon as its attention has a result; keep that
    give it the read tokens alone: their states, and their part of its other arguments
    let its attention answer with their part of the kept result
In a captured graph, nothing reads what the second run computes before its attention, so that falls away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moepass.models.errors import InputError
from moepass.runtime.torch_private import is_always_equal

_NAME = "moepass_last_layer"


class AttentionIsDoneError(Exception):
    """Ends the first run of the last layer. Not an error: no other way leads out of a model's own code."""


class LastLayer:
    """Which tokens are read, known to the last layer of a model while that runs.

    places      [m] of the stream, None where all tokens are computed: then the model runs as it came
    attended    [1, n, heads, value_dim] what attention of the last layer gives for all tokens, once it is known
    """

    def __init__(self) -> None:
        self.places: torch.Tensor | None = None
        self.attended: torch.Tensor | None = None

    def attach(self, backbone: nn.Module, attention: nn.Module) -> RemovableHandle:
        """Make it known to the layer of `backbone` that calls `attention`; removing what is returned ends that.

        Raises InputError where `backbone` has no list of layers of which that is the last one.
        """
        layer = _layer_with(backbone, attention)
        setattr(attention, _NAME, self)
        return layer.register_forward_pre_hook(self._narrow, with_kwargs=True)

    def read(self, places: torch.Tensor) -> None:
        self.places, self.attended = places, None

    def forget(self) -> None:
        self.places = self.attended = None

    def _narrow(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The arguments of the second run."""
        if self.places is None:
            return None
        try:
            layer.forward(*arguments, **named)
        except AttentionIsDoneError:
            pass
        else:
            raise InputError("the last layer does not call its attention", name="model")
        states = arguments[0] if arguments else named["hidden_states"]
        count = states.shape[1]
        return _of_tokens(arguments, self.places, count), _of_tokens(named, self.places, count)


def attended_before(attention: nn.Module) -> torch.Tensor | None:
    """In the second run of the last layer the result of its `attention` [1, m, heads, value_dim], else None."""
    last: LastLayer | None = getattr(attention, _NAME, None)
    if last is None or last.attended is None or last.places is None:
        return None
    return last.attended.index_select(1, last.places)


def keep_attended(attention: nn.Module, attended: torch.Tensor) -> None:
    """Raises AttentionIsDoneError in the first run of the last layer, for which `attended` is kept."""
    last: LastLayer | None = getattr(attention, _NAME, None)
    if last is not None and last.places is not None:
        last.attended = attended
        raise AttentionIsDoneError


def _layer_with(backbone: nn.Module, attention: nn.Module) -> nn.Module:
    for _, layers in backbone.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) and any(one is attention for one in layers[-1].modules()):
            return layers[-1]
    name = type(attention).__name__
    raise InputError(f"no list of layers ends with the one that has {name}", name="model", value=name)


def _of_tokens(value: Any, places: torch.Tensor, count: int) -> Any:
    """`value` for the tokens at `places` alone: all tensors [1, count, ...] in it."""
    if isinstance(value, torch.Tensor):
        has_tokens = value.dim() > 1 and value.shape[0] == 1 and is_always_equal(value.shape[1], count)
        return value.index_select(1, places) if has_tokens else value
    if isinstance(value, dict):
        return {name: _of_tokens(one, places, count) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_of_tokens(one, places, count) for one in value)
    return value
