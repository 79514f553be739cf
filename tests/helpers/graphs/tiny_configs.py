"""Configurations of tiny models, by family, and models without memory."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.helpers.models.tiny import TINY_FAMILIES


def tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    entry = TINY_FAMILIES[family]
    config: PreTrainedConfig = getattr(transformers, entry.config_class)(**{**entry.config, **changes})
    return config


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model
