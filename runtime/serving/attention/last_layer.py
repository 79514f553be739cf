"""The last layer computes, behind its attention, the tokens alone whose states are read.

Other tokens see keys and values of a token, and nothing else of it; and no layer follows the last one. So a token that
nobody reads needs neither output projection nor experts there. That saves up to one layer's worth of them in each step.

Pseudo-code
    learn, from two streams of different lengths, which arguments of the last layer are of tokens
    before the last layer runs:
        run it for all tokens and stop it as soon as its attention has a result; keep that
        give it the read tokens alone: their part of the arguments that are of tokens
        let its attention answer with their part of the kept result
In a captured graph, nothing reads what the second run computes before its attention, so that falls away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moepass.models.errors import InputError

_NAME = "moepass_last_layer"
# Where an argument stands: its index or name, and the same of what it is part of.
_Path = tuple[int | str, ...]
_STATES: frozenset[_Path] = frozenset({(0, 0), (1, "hidden_states")})


class AttentionIsDoneError(Exception):
    """Ends the first run of the last layer. Not an error: no other way leads out of a model's own code."""


class LastLayer:
    """Which tokens are read, known to the last layer of a model while that runs: one step at a time.

    places      [m] of the stream, None where all tokens are computed: then the model runs as it came
    attended    [1, n, heads, value_dim] what attention of the last layer gives for all tokens, once it is known
    """

    def __init__(self) -> None:
        self.places: torch.Tensor | None = None
        self.attended: torch.Tensor | None = None
        self._paths: frozenset[_Path] = frozenset()
        # Sizes of the arguments of the last run, while it is learned what they are.
        self._sizes: dict[_Path, torch.Size] | None = None

    def attach(self, backbone: nn.Module, attention: nn.Module) -> RemovableHandle:
        """Make it known to the layer of `backbone` that calls `attention`; removing what is returned ends that.

        Raises InputError where `backbone` has no list of layers of which that is the last one.
        """
        layer = _layer_with(backbone, attention)
        setattr(attention, _NAME, self)
        return layer.register_forward_pre_hook(self._narrow, with_kwargs=True)

    def learn(self, run: Callable[[int], object], counts: tuple[int, int]) -> None:
        """Find the arguments that are of tokens; `run` computes all tokens of a stream of so many.

        A size alone does not tell them: a stream may be as long as a model is wide. Raises InputError where the states
        are not among them.
        """
        found: list[frozenset[_Path]] = []
        try:
            for count in counts:
                self._sizes = {}
                run(count)
                found.append(frozenset(path for path, size in self._sizes.items() if size[:2] == (1, count)))
        finally:
            self._sizes = None
        self._paths = found[0] & found[1]
        if not self._paths & _STATES:
            raise InputError("the last layer is not called with the states of all tokens", name="model")

    def read(self, places: torch.Tensor) -> None:
        self.places, self.attended = places, None

    def forget(self) -> None:
        self.places = self.attended = None

    def _narrow(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The arguments of the second run."""
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


def _tensors(value: Any, path: _Path) -> Iterator[tuple[_Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _tensors(one, (*path, name))
    elif type(value) in (tuple, list):
        for number, one in enumerate(value):
            yield from _tensors(one, (*path, number))


def _at_places(value: Any, path: _Path, paths: frozenset[_Path], places: torch.Tensor) -> Any:
    """`value` with the tensors at `paths` for the tokens at `places` alone."""
    if isinstance(value, torch.Tensor):
        return value.index_select(1, places) if path in paths else value
    if isinstance(value, dict):
        return {name: _at_places(one, (*path, name), paths, places) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_at_places(one, (*path, number), paths, places) for number, one in enumerate(value))
    return value
