"""A checkpoint is loaded as the class that its configuration names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification, Qwen3MoeModel

import moepass
from moepass.models.checkpoint.checkpoint_folders import load_config
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import CheckpointError
from tests.helpers.models.tiny import tiny_model


@pytest.mark.parametrize("model_class", [Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification, Qwen3MoeModel])
@torch.no_grad()
def test_the_class_is_that_of_the_configuration(model_class: type[PreTrainedModel], tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = model_class(tiny_model("qwen3_moe").config).eval()
    saved.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 1, 4]])
    for loaded in (load_model(tmp_path), moepass.load_pretrained(tmp_path)):
        assert type(loaded) is model_class
        torch.testing.assert_close(loaded(input_ids=ids)[0], saved(input_ids=ids)[0])


def test_a_class_that_the_family_lacks_is_refused(tmp_path: Path) -> None:
    values = {"model_type": "olmoe", "architectures": ["OlmoeForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as refused:
        load_config(tmp_path)
    assert (refused.value.name, refused.value.value) == ("architectures", ["OlmoeForSequenceClassification"])
