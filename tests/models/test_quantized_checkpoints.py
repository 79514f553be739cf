"""Quantised checkpoints in every published layout load as the models of their dequantised weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moepass.models.checkpoint.load_model import load_model
from tests.helpers.models.quantized_checkpoints import FORMS, save_quantized
from tests.helpers.models.tiny import tiny_model


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_model_is_that_of_its_dequantised_weights(form: str, tmp_path: Path) -> None:
    model = tiny_model(FORMS[form].family, dtype=torch.bfloat16, num_hidden_layers=2)
    quantised, plain = save_quantized(model, FORMS[form], tmp_path)
    expected = load_model(plain).state_dict()
    state = load_model(quantised).state_dict()
    assert state.keys() == expected.keys()
    for name, weight in state.items():
        assert torch.equal(weight, expected[name]), name
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, expected[name])}
    assert any("experts" in name for name in changed)
