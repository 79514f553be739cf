"""A model in two parts: the backbone, which computes states, and the head, which computes logits of chosen states.

With a large vocabulary, the logits of all tokens would be by far the largest tensor. Models scale, cap and project
logits in ways that no attribute reveals. So the head is the model itself with another backbone, which returns the
chosen states.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from moepass.models.errors import InputError, one_of
from moepass.runtime.serving.requests.backend import ClassActivation

HeadKind = Literal["tokens", "classes", "states"]


class ModelHead:
    """The head of a model, applied to states of its backbone.

    `kind` is "tokens" for next-token logits, "classes" for class scores or a reward, "states" if the states are the
    output. `width` is the number of outputs per state: the size of the vocabulary, the classes, or the width of the
    states. A head of classes reads the last token of a sequence that is not `padding_token`; None if it reads the last
    one. Raises InputError if the head needs more from its backbone than states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.kind: HeadKind = _kind(model)
        self.model, self._name = model, _backbone_name(model) if self.kind != "states" else ""
        self.backbone: nn.Module = model.get_submodule(self._name)
        config = model.config.get_text_config()
        self.padding_token: int | None = config.pad_token_id if self.kind == "classes" else None
        states = torch.zeros(2, config.hidden_size, dtype=model.dtype, device=model.device)
        self.width: int = self(states).shape[-1]

    @torch.no_grad()
    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs [rows, width] for the states [rows, hidden], in the dtype of the model."""
        if self.kind == "states":
            return states
        if self.kind == "classes" and self.padding_token is None:
            # Without a padding token, transformers refuses several sequences, because it cannot find their ends.
            return torch.cat([self._logits(row) for row in states.split(1)]) if len(states) else self._logits(states)
        return self._logits(states)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        # A shallow copy gets another backbone. The model itself is not changed, because other threads may run it.
        probe = copy.copy(self.model)
        stand_in = _StandInBackbone(self.backbone, states[:, None])
        probe.__dict__["_modules"] = {**self.model._modules, self._name: stand_in}
        inputs = torch.ones((len(states), 1), dtype=torch.int64, device=states.device)
        try:
            logits: torch.Tensor = probe(input_ids=inputs, use_cache=False).logits
        except (TypeError, AttributeError, IndexError) as error:
            kind = type(self.model).__name__
            text = (
                f"{kind} cannot be served, because its head needs more from its backbone than hidden states "
                f"({type(error).__name__}: {error})"
            )
            raise InputError(text, name="model", value=kind) from error
        return logits[:, 0] if self.kind == "tokens" else logits


def _kind(model: PreTrainedModel) -> HeadKind:
    name = type(model).__name__
    if model.get_output_embeddings() is not None:
        return "tokens"
    if name.endswith("ForSequenceClassification"):
        return "classes"
    if model.base_model is model:
        return "states"
    supported = ("ForCausalLM", "ForSequenceClassification", "Model")
    text = f"the head of {name} is not supported; serve a class whose name ends in {one_of(supported)}"
    raise InputError(text, name="model", value=name, expected=supported)


def _backbone_name(model: PreTrainedModel) -> str:
    """Return the attribute name of the backbone. A few classes announce one that they do not have (Llama 4)."""
    names: list[str] = [name for name, module in model.named_children() if isinstance(module, PreTrainedModel)]
    if model.base_model_prefix in names:
        return str(model.base_model_prefix)
    if len(names) == 1:
        return names[0]
    text = f"{type(model).__name__} cannot be served, because it has no separate backbone module"
    raise InputError(text, name="model", value=type(model).__name__)


class _BackboneOutput(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """The output of a backbone: its last states. All other attributes are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _StandInBackbone(nn.Module):
    """A replacement backbone that returns `states` for any input, and has the attributes of the original."""

    def __init__(self, backbone: nn.Module, states: torch.Tensor) -> None:
        super().__init__()
        self.__dict__["backbone"] = backbone  # nn.Module would register it as a child
        self.states = states

    def forward(self, *args: object, **kwargs: object) -> _BackboneOutput:
        return _BackboneOutput(last_hidden_state=self.states)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["backbone"], name)


def class_activation(config: PreTrainedConfig) -> ClassActivation:
    """Return the function of class scores that transformers' text classification applies for this configuration."""
    if config.problem_type == "regression":
        return "identity"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"
