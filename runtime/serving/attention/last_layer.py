"""The last layer computes, after its attention, only the tokens whose states are read.

Other tokens use a token's keys and values and nothing else of it, and no layer follows the last one. So an unread token
needs neither the output projection nor experts there. This saves up to one layer's worth of them in each step.

Pseudo-code
    learn, from two streams of different lengths, which arguments of the last layer have one entry per token
    before the last layer runs:
        run it for all tokens, store the result of its attention, and stop the run there
        return the arguments of a second run: the entries of the read tokens only
        in the second run, attention returns the entries of the read tokens from the stored result
A captured graph does not contain the work before the attention of the second run, because nothing uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moepass.models.errors import InputError

_NAME = "moepass_last_layer"
# Path of a tensor in the arguments of a call: indices and names, outermost first.
_Path = tuple[int | str, ...]
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

        Raises:
            InputError: `backbone` has no list of layers that ends with this layer.
        """
        layer = _layer_with(backbone, attention)
        setattr(attention, _NAME, self)
        return layer.register_forward_pre_hook(self._narrow, with_kwargs=True)

    def learn(self, run: Callable[[int], object], counts: tuple[int, int]) -> None:
        """Find the arguments of the last layer with one entry per token.

        A single size does not identify them, because a stream may be as long as a model is wide.

        Args:
            run: runs the model on a stream with this number of tokens.
            counts: two different numbers of tokens.

        Raises:
            InputError: the hidden states are not among these arguments.
        """
        paths_by_count: list[frozenset[_Path]] = []
        try:
            for count in counts:
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
        if self._sizes is not None:
            self._sizes.update({path: tensor.shape for path, tensor in _tensors((arguments, named), ())})
        if self.places is None:
            return None
        try:
            layer.forward(*arguments, **named)
        except AttentionIsDoneError:
            pass
        else:
            raise InputError("the last layer does not call its attention", name="model")
        return _at_places((arguments, named), (), self._paths, self.places)


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


def _layer_with(backbone: nn.Module, attention: nn.Module) -> nn.Module:
    for _, layers in backbone.named_modules():
        if (
            isinstance(layers, nn.ModuleList)
            and len(layers)
            and any(module is attention for module in layers[-1].modules())
        ):
            return layers[-1]
    name = type(attention).__name__
    raise InputError(f"the layer with {name} is not the last one of a ModuleList", name="model", value=name)


def _tensors(value: Any, path: _Path) -> Iterator[tuple[_Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _tensors(item, (*path, name))
    elif type(value) in (tuple, list):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, index))


def _at_places(value: Any, path: _Path, paths: frozenset[_Path], places: torch.Tensor) -> Any:
    """Return `value` with the tensors at `paths` reduced to the entries at `places`."""
    if isinstance(value, torch.Tensor):
        return value.index_select(1, places) if path in paths else value
    if isinstance(value, dict):
        return {name: _at_places(item, (*path, name), paths, places) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_at_places(item, (*path, index), paths, places) for index, item in enumerate(value))
    return value
