"""The last layer computes, after its attention, only the tokens whose states are read.

Other tokens use a token's keys and values and nothing else of it, and no layer follows the last one. So an unread token
needs neither the output projection nor experts there. Each step saves at most this work of one layer.

Pseudo-code
    learn, from two streams of different lengths, which arguments of the last layer have one entry per token
    before the last layer runs:
        run it for all tokens, store the result of its attention, and stop the run there
        return the arguments of a second run: the entries of the read tokens only
        in the second run, attention returns the entries of the read tokens from the stored result
A captured graph does not contain the work before the attention of the second run, because nothing uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moepass.models.errors import InputError

_NAME = "moepass_last_layer"
# Path of a tensor in the arguments of a call: indices and names, outermost first.
_Path = tuple[int | str, ...]
# Lengths of two streams that differ from other sizes in a model. Vocabularies are larger.
_LEARNED_COUNTS = (19, 23)
_STATES: frozenset[_Path] = frozenset({(0, 0), (1, "hidden_states")})


class AttentionIsDoneError(Exception):
    """Ends the first run of the last layer. It is an exception because nothing else leaves a model's own code early."""


class LastLayer:
    """Tells the last layer of a model which tokens of the running step are read. It serves one step at a time.

    Attributes:
        places: [m] positions in the stream; None if all tokens are computed, so that the model runs unchanged.
        attended: [1, n, heads, value_dim] result of the last layer's attention for all tokens, None before it is known.
    """

    def __init__(self) -> None:
        self.places: torch.Tensor | None = None
        self.attended: torch.Tensor | None = None
        self._paths: frozenset[_Path] = frozenset()
        # Sizes of the arguments of the last run; None unless `learn` runs.
        self._sizes: dict[_Path, torch.Size] | None = None

    def attach(self, backbone: nn.Module, attention: nn.Module) -> RemovableHandle:
        """Connect to the layer of `backbone` that calls `attention`. Removing the returned handle disconnects it.

        Raises InputError if `backbone` has no list of layers that ends with this layer.
        """
        for layers in backbone.modules():
            if isinstance(layers, nn.ModuleList) and len(layers) and attention in layers[-1].modules():
                setattr(attention, _NAME, self)
                return layers[-1].register_forward_pre_hook(self._narrow, with_kwargs=True)
        name = type(attention).__name__
        raise InputError(f"the layer of {name} is not the last entry of a ModuleList", name="model", value=name)

    def learn(self, run: Callable[[int], object]) -> None:
        """Find the arguments of the last layer with one entry per token.

        `run` runs the model on a stream of some number of tokens. A single size does not identify the arguments,
        because a stream may be as long as a model is wide. Raises InputError if the hidden states are not among them.
        """
        paths_by_count: list[frozenset[_Path]] = []
        try:
            for count in _LEARNED_COUNTS:
                self._sizes = {}
                run(count)
                paths_by_count.append(frozenset(path for path, size in self._sizes.items() if size[:2] == (1, count)))
        finally:
            self._sizes = None
        self._paths = paths_by_count[0] & paths_by_count[1]
        if not self._paths & _STATES:
            raise InputError("the hidden states of all tokens are not an argument of the last layer", name="model")

    def read(self, places: torch.Tensor) -> None:
        """Set the tokens that the next run reads."""
        self.places, self.attended = places, None

    def forget(self) -> None:
        """Let the next run compute all tokens."""
        self.places = self.attended = None

    def _narrow(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the layer up to its attention, and return the arguments of the second run."""
        sizes, places = self._sizes, self.places
        if sizes is not None:

            def record(path: _Path, tensor: torch.Tensor) -> torch.Tensor:
                sizes[path] = tensor.shape
                return tensor

            _mapped((arguments, named), (), record)
        if places is None:
            return None
        try:
            layer.forward(*arguments, **named)
        except AttentionIsDoneError:
            pass
        else:
            raise InputError("the last layer's forward did not call its attention module", name="model")

        def at_places(path: _Path, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(1, places) if path in self._paths else tensor

        return _mapped((arguments, named), (), at_places)


def attended_before(attention: nn.Module) -> torch.Tensor | None:
    """Return the result of `attention` [1, m, heads, value_dim] in the second run of the last layer; None otherwise."""
    last: LastLayer | None = getattr(attention, _NAME, None)
    if last is None or last.attended is None or last.places is None:
        return None
    return last.attended.index_select(1, last.places)


def keep_attended(attention: nn.Module, attended: torch.Tensor) -> None:
    """Store `attended` and raise AttentionIsDoneError if this is the first run of the last layer."""
    last: LastLayer | None = getattr(attention, _NAME, None)
    if last is not None and last.places is not None:
        last.attended = attended
        raise AttentionIsDoneError


def _mapped(value: Any, path: _Path, change: Callable[[_Path, torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with the result of `change` for each tensor in it and its path."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {name: _mapped(item, (*path, name), change) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, (*path, index), change) for index, item in enumerate(value))
    return value
