"""Decoding gives the numbers of other projects' own packages: compressed-tensors, AutoAWQ and GPTQModel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch

from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.models.layouts.published import read_quantization
from moepass.models.layouts.weight_layout import WeightLayout
from tests.helpers.models.quantized_checkpoints import FORMS

pytestmark = pytest.mark.packages

ROWS, COLUMNS = 96, 128


def _stored(form: str) -> tuple[WeightLayout, dict[str, torch.Tensor], torch.Tensor]:
    """Return the layout of a form, the stored tensors of a matrix, and the matrix in fp32 as moepass decodes it."""
    matrix = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    encoded, _ = FORMS[form].encode(matrix)
    tensors = {
        ending.removeprefix("#") if "#" in ending else f"weight{ending}": value for ending, value in encoded.items()
    }
    layout = next(
        layout
        for layout in read_quantization(FORMS[form].config, "qwen3_moe", "").layouts
        if all(any(name.endswith(suffix) for name in tensors) for suffix in layout.suffixes.values())
    )
    assert isinstance(layout.formula, MatrixFormula)
    suffixes = {**layout.optional, **layout.suffixes}
    stored: dict[Role, torch.Tensor] = {}
    for role, suffix in suffixes.items():
        name = suffix if suffix.startswith(("weight", "q", "scales", "g_")) else f"weight{suffix}"
        if name in tensors:
            stored[role] = tensors[name]
    return layout, tensors, layout.formula.decode(stored, torch.float32)


@pytest.mark.parametrize(
    "form",
    [
        "fp8 per channel",
        "nvfp4 packed",
        "mxfp4 packed",
        "int4 packed",
        "int4 packed, zero points",
        "int8 packed",
    ],
)
def test_compressed_tensors(form: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    _, tensors, decoded = _stored(form)
    config = FORMS[form].config
    weights = dict(config["config_groups"]["group_0"]["weights"])
    if "nvfp4" in form:
        weights |= {"strategy": "tensor_group", "group_size": 16}
    if "mxfp4" in form:
        weights |= {"strategy": "group", "group_size": 32}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    floats = {
        name: value.float() if name == "weight_scale" and value.dtype == torch.float16 else value
        for name, value in tensors.items()
    }
    compressor: Any = BaseCompressor.get_value_from_registry(config["format"])
    expected = compressor.decompress(floats, scheme)["weight"]
    # The package computes in the dtype of the scales, or in bf16.
    tolerance = 1e-6 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(expected.float(), decoded, rtol=tolerance, atol=1e-6)


def test_auto_awq() -> None:
    path = importlib.metadata.distribution("autoawq").locate_file("awq/utils/packing_utils.py")
    spec = importlib.util.spec_from_file_location("packing_utils", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, tensors, decoded = _stored("awq")
    scales = tensors["scales"].float()
    expected = module.dequantize_gemm(tensors["qweight"], tensors["qzeros"], scales, 4, 16)
    assert torch.equal(expected.t(), decoded)


@pytest.mark.parametrize("form", ["gptq", "gptq, ordered by activations", "gptq, version 2", "gptq, 8 bits"])
def test_gptq_model(form: str) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    _, tensors, decoded = _stored(form)
    bits = FORMS[form].config["bits"]
    linear = TorchLinear(
        bits=bits, group_size=16, sym=False, desc_act=True, in_features=COLUMNS, out_features=ROWS, bias=False,
        register_buffers=True,
    )  # fmt: skip
    for name in ("qweight", "qzeros", "g_idx"):
        getattr(linear, name).copy_(tensors[name])
    linear.scales = tensors["scales"].float()
    if "version 2" not in form:
        # The package adds one to stored zero points of the first version while it loads a checkpoint.
        word = sum(1 << shift for shift in range(0, 32, bits))
        linear.qzeros.copy_(linear.qzeros + torch.tensor(word, dtype=torch.int64).to(torch.int32))
    linear.post_init()
    expected = linear.dequantize_weight()
    torch.testing.assert_close(expected.t().float(), decoded, rtol=1e-6, atol=1e-6)
