"""A model in two parts: the backbone, which gives states, and the head, which makes logits of chosen states alone.

With a large vocabulary the logits of all tokens would be the largest tensor by far. Families scale, cap and project
logits in ways that no attribute announces, so the head is the model itself with another backbone: one that returns the
given states.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from moepass.models.errors import InputError, one_of

HeadKind = Literal["tokens", "classes", "states"]


class ModelHead:
    """What a model does with the states of its backbone.

    kind    "tokens": logits of the next token; "classes": scores of classes, or a reward; "states": nothing, the
            states are the answer
    width   numbers that it gives for each state: entries of the vocabulary, classes, or the width of the states

    Raises InputError for a model whose head needs more of its backbone than states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.kind: HeadKind = _kind(model)
        self._model, self._name = model, _backbone_name(model) if self.kind != "states" else ""
        self.backbone: nn.Module = model.get_submodule(self._name)
        states = torch.zeros(2, _state_width(model), dtype=model.dtype, device=model.device)
        self.width: int = self(states).shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self._model.dtype
        return found

    @property
    def model_name(self) -> str:
        return type(self._model).__name__

    @torch.no_grad()
    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, width] for the states [rows, hidden], in the type of the model."""
        if self.kind == "states":
            return states
        if self.kind == "classes" and self._model.config.get_text_config().pad_token_id is None:
            # transformers refuses several sequences then, because it cannot tell where they end.
            return torch.cat([self._logits(row) for row in states.split(1)]) if len(states) else self._logits(states)
        return self._logits(states)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        # The model with another backbone; the model itself stays as it is, for threads that run it.
        probe = copy.copy(self._model)
        given = _StandInBackbone(self.backbone, states[:, None])
        probe.__dict__["_modules"] = {**self._model._modules, self._name: given}
        inputs = torch.ones((len(states), 1), dtype=torch.int64, device=states.device)
        try:
            logits: torch.Tensor = probe(input_ids=inputs, use_cache=False).logits
        except (TypeError, AttributeError, IndexError) as error:
            kind = type(self._model).__name__
            raise InputError(
                f"the head of {kind} needs more of its backbone than states ({type(error).__name__}: {error}); "
                "such models cannot be served",
                name="model",
                value=kind,
            ) from error
        return logits[:, 0] if self.kind == "tokens" else logits


def _kind(model: PreTrainedModel) -> HeadKind:
    name = type(model).__name__
    if model.get_output_embeddings() is not None:
        return "tokens"
    if name.endswith("ForSequenceClassification"):
        return "classes"
    if model.base_model is model:
        return "states"
    known = ("ForCausalLM", "ForSequenceClassification", "Model")
    raise InputError(
        f"{name} has a head that is not served; classes that end in {one_of(known)} are",
        name="model",
        value=name,
        expected=known,
    )


def _backbone_name(model: PreTrainedModel) -> str:
    """The name of the part that gives states. A few classes announce one that they do not have (Llama 4)."""
    names: list[str] = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    if model.base_model_prefix in names:
        return str(model.base_model_prefix)
    if len(names) == 1:
        return names[0]
    raise InputError(
        f"{type(model).__name__} has no backbone of its own; such models cannot be served",
        name="model",
        value=type(model).__name__,
    )


def _state_width(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().hidden_size)


class _BackboneOutput(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """The output of a backbone: its last states, and nothing else that a model may look for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _StandInBackbone(nn.Module):
    """Stands in for a backbone: returns `states` for any input, and otherwise has the backbone's attributes."""

    def __init__(self, backbone: nn.Module, states: torch.Tensor) -> None:
        super().__init__()
        self.__dict__["backbone"] = backbone  # not as a child
        self.states = states

    def forward(self, *args: object, **kwargs: object) -> _BackboneOutput:
        return _BackboneOutput(last_hidden_state=self.states)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["backbone"], name)
