"""An engine that is loaded has shown that it works."""

from __future__ import annotations

import pytest
import torch
from error_fields import refused

from moepass.models.errors import CheckpointError
from moepass.models.testing.tiny import tiny_model
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine

OPTIONS = EngineOptions(None, torch.device("cpu"), step_tokens=64, cache_bytes=0)


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_model_whose_outputs_are_no_numbers_is_not_served(damage: float) -> None:
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.lm_head.weight[5] = damage
    with refused(CheckpointError, name="output"):
        make_engine(model, OPTIONS, None, bytes(32))


def test_a_sound_model_is_warm_when_it_is_loaded() -> None:
    engine = make_engine(tiny_model("qwen3_moe"), OPTIONS, None, bytes(32))
    assert engine.facts.flops_per_second > 1
