"""Quantised checkpoints in every published layout load as the models of their dequantised weights, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import moepass
from moepass.models.checkpoint.load_model import load_model
from tests.helpers.graphs.tiny_checkpoint import broken_copy, edit_config, edit_weights
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
    assert any("experts" in name for name in changed) == (form != "lossless")


def _scale(weights: dict[str, torch.Tensor]) -> str:
    return next(key for key in weights if key.endswith("_scale_inv") and ".experts." in key)


def _drop_scale(weights: dict[str, torch.Tensor]) -> None:
    del weights[_scale(weights)]


def _damage_scale(weights: dict[str, torch.Tensor]) -> None:
    weights[_scale(weights)][0, 0] = torch.nan


def _cut_scale(weights: dict[str, torch.Tensor]) -> None:
    weights[_scale(weights)] = weights[_scale(weights)][:, :1].clone()


def _integer_scale(weights: dict[str, torch.Tensor]) -> None:
    weights[_scale(weights)] = weights[_scale(weights)].int()


def _config(**values: object) -> Callable[[Path], None]:
    return edit_config(quantization_config={**FORMS["fp8 blocks"].config, **values})


DAMAGED = {
    "a scale is missing": (edit_weights(_drop_scale), r"lacks \S+_proj\.weight_scale_inv \(fp8 blocks\), or"),
    "a scale is NaN": (edit_weights(_damage_scale), "weight_scale_inv contains NaN or infinity"),
    "a scale is too short": (
        edit_weights(_cut_scale),
        r"_scale_inv is torch\.float32 \[2, 1\]; expected shape \[2, 2\]",
    ),
    "an integer scale": (edit_weights(_integer_scale), r"_scale_inv is torch\.int32 .*; expected torch\.float32 or"),
    "blocks of another size": (_config(weight_block_size=[16, 24]), r"_scale_inv is .*expected shape \[4, 2\]"),
    "blocks without a size": (_config(weight_block_size=[0, 24]), "weight_block_size of the 'fp8' weights is 0"),
    "an unknown method": (
        _config(quant_method="aqlm"),
        "quant_method is 'aqlm', which moepass cannot decode; it .*awq",
    ),
    "another method": (_config(quant_method="awq", bits=4), "quantised by 'awq', but no quantised matrix contains it"),
    "a malformed config": (_config(quant_method="awq"), "is malformed or unknown: .*missing required field `bits`"),
    "no method": (edit_config(quantization_config=None), "F8_E4M3, and the config does not say how to dequantise it"),
    "ignored after all": (_config(modules_to_not_convert=["q_proj"]), "'q_proj' in the quantization_config says that"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_checkpoint_is_one_clear_error(how: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
    quantised, _ = save_quantized(model, FORMS["fp8 blocks"], tmp_path)
    edit, message = DAMAGED[how]
    folder = broken_copy(quantised, tmp_path / "damaged", edit)
    for load in (load_model, moepass.load_pretrained, functools.partial(moepass.load_pretrained, home="disk")):
        with pytest.raises(moepass.CheckpointError, match=message) as caught:
            load(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


def _drop_group_indices(weights: dict[str, torch.Tensor]) -> None:
    for key in [key for key in weights if key.endswith("g_idx")]:
        del weights[key]


def _integer_biases(weights: dict[str, torch.Tensor]) -> None:
    for key in [key for key in weights if key.endswith("_proj_bias")]:
        weights[key] = weights[key].view(torch.int16)


@pytest.mark.parametrize(
    ("form", "damage", "message"),
    [
        ("gptq, ordered by activations", _drop_group_indices, r"lacks \S+\.g_idx \(gptq int4\)"),
        ("mxfp4", _integer_biases, r"_bias is torch\.int16; expected floating-point numbers"),
    ],
)
def test_what_only_some_forms_need(
    form: str, damage: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    model = tiny_model(FORMS[form].family, dtype=torch.bfloat16, num_hidden_layers=1)
    quantised, _ = save_quantized(model, FORMS[form], tmp_path)
    folder = broken_copy(quantised, tmp_path / "damaged", edit_weights(damage))
    with pytest.raises(moepass.CheckpointError, match=message):
        load_model(folder)
