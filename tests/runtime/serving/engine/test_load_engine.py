"""An engine that is loaded has shown that it works."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from error_fields import refused

from moepass.models.errors import CheckpointError
from moepass.models.testing.tiny import tiny_model
from moepass.runtime.homes.registry.home_options import Host
from moepass.runtime.offload.offload import offload_experts
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


def test_a_model_without_a_plan_says_what_makes_one() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    offload_experts(model, home=Host(), device="cpu")
    options = dataclasses.replace(OPTIONS, step_tokens=None)
    notes = make_engine(model, options, None, bytes(32)).facts.notes
    assert "without a plan" in notes["full step"]
    assert "moepass calibrate --device cpu --ranks 1 --threads" in notes["full step"]
