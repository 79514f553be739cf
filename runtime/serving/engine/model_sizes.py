"""The cost of one token of a model: FLOPs and bytes of activations, from its architecture or its parameter count."""

from __future__ import annotations

import dataclasses

from torch import nn
from transformers import PreTrainedModel

from moepass.models.errors import InputError
from moepass.models.sizes.architecture import short_dtype
from moepass.models.sizes.families import from_config
from moepass.passes.planner.strategies import peak_activation_bytes
from moepass.runtime.serving.batching.step_flops import FlopsTable

# [Empirical] Generous bound of the activations of a layer that are alive at once, in widths of its widest product.
_WIDTHS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSizes:
    """The costs of a model. `note` explains their source if it is not the architecture.

    Attributes:
        table: FLOPs of sequences.
        token_bytes: bytes of activations per token of a step.
    """

    table: FlopsTable
    token_bytes: float
    note: str | None = None


def model_sizes(model: PreTrainedModel, *, narrows: bool) -> ModelSizes:
    """Return the costs of `model`; `narrows` as in `FlopsTable`.

    A model with an unknown architecture costs 2 FLOPs per parameter and token. Attention is not counted then, and all
    tokens pass through all layers.
    """
    try:
        architecture = from_config(model.config)
    except InputError as error:
        return _by_parameters(model, str(error).partition(";")[0])
    token_bytes = peak_activation_bytes(architecture, 1, short_dtype(model.dtype))
    return ModelSizes(FlopsTable(architecture, narrows=narrows), token_bytes)


def _by_parameters(model: PreTrainedModel, reason: str) -> ModelSizes:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    logit_numbers = 0 if head is None else head.weight.numel()
    outside = tables | ({id(head.weight)} if head is not None else set())
    numbers = sum(value.numel() for value in model.parameters() if id(value) not in outside)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    width = max([int(model.config.get_text_config().hidden_size), *(linear.out_features for linear in linears)])
    table = FlopsTable.of_parameters(numbers, logit_numbers)
    return ModelSizes(table, float(_WIDTHS * width * 4), f"2 FLOPs per parameter and token, because {reason}")
