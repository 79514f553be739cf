"""Tiny checkpoints in the published layouts of quantised weights, and the same models with dequantised weights.

Each encoder quantises a matrix [out, in] and returns its stored tensors and the matrix that they describe. It computes
this matrix number by number from the published formula, without the decoders that it tests.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from moepass.models.layouts.lossless import LosslessFormula

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

Encoded = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class PublishedForm:
    """A layout as published: its configuration, and the encoder of a matrix.

    Attributes:
        config: the `quantization_config`
        encode: from a matrix to its stored tensors by the end of their keys, and the dequantised matrix in fp32
        takes: whether the matrix with this key is quantised
        family: a family of tiny models that is published in this form
    """

    config: Mapping[str, Any]
    encode: Callable[[torch.Tensor], Encoded]
    takes: Callable[[str], bool] = lambda key: ".experts." in key
    family: str = "qwen3_moe"


def spread(numbers: torch.Tensor, rows: int, columns: int, block: tuple[int, int]) -> torch.Tensor:
    """Return the number of the block of every element of a matrix [rows, columns]."""
    row = torch.arange(rows) // block[0]
    column = torch.arange(columns) // block[1]
    return numbers[row][:, column]


def blocks_maximum(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest magnitude of every block, at least 1e-6."""
    rows = range(0, matrix.shape[0], block[0])
    columns = range(0, matrix.shape[1], block[1])
    cut = [[matrix[r : r + block[0], c : c + block[1]].abs().max() for c in columns] for r in rows]
    return torch.tensor(cut).clamp(min=1e-6)


def nearest_e2m1(matrix: torch.Tensor) -> torch.Tensor:
    """Return the code of the nearest e2m1 number of every element."""
    return (matrix.unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)


def packed_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack pairs of codes along the last dimension, the first in the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def packed_words(numbers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack non-negative numbers along `dim` into int32; number n of a word starts at bit `order[n] * bits`."""
    count = 32 // bits
    columns = numbers.transpose(dim, -1)
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[-1] % count)).long().unflatten(-1, (-1, count))
    words = sum(padded[..., n] << (position * bits) for n, position in enumerate(order or range(count)))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).transpose(dim, -1).contiguous()


def fp8(matrix: torch.Tensor, block: tuple[int, int], scale_dtype: torch.dtype, ending: str) -> Encoded:
    """Quantise to e4m3 with a scale per block; uint8 and e8m0 scales are powers of two."""
    scale = blocks_maximum(matrix, block) / 448
    exponents = scale.log2().ceil()
    is_exponent = scale_dtype in (torch.uint8, torch.float8_e8m0fnu)
    scale = exponents.exp2() if is_exponent else scale.to(scale_dtype).float()
    full = spread(scale, *matrix.shape, block)
    values = (matrix / full).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = (exponents + 127).to(torch.uint8) if scale_dtype == torch.uint8 else scale.to(scale_dtype)
    return {"": values, ending: stored}, values.float() * full


def fp8_per_channel(matrix: torch.Tensor) -> Encoded:
    """Quantise to e4m3 with a scale [out, 1]."""
    return fp8(matrix, (1, matrix.shape[1]), torch.bfloat16, "_scale")


def fp8_per_tensor(matrix: torch.Tensor) -> Encoded:
    """Quantise to e4m3 with one scale, and store a scale for activations beside it, as ModelOpt does."""
    stored, dequantised = fp8(matrix, tuple(matrix.shape), torch.float32, "_scale")
    return {**stored, "_scale": stored["_scale"].reshape(()), "#input_scale": torch.tensor(0.5)}, dequantised


def fp4_blocks(matrix: torch.Tensor) -> Encoded:
    """Quantise as the experts of DeepSeek-V4: int8 with two e2m1 numbers, an e8m0 scale for 32 columns."""
    stored, dequantised = mxfp4_packed(matrix)
    scale = stored["#weight_scale"].view(torch.float8_e8m0fnu)
    return {"": stored["#weight_packed"].view(torch.int8), "#scale": scale}, dequantised


def mxfp4_packed(matrix: torch.Tensor) -> Encoded:
    """Quantise to e2m1 with an exponent for 32 columns."""
    exponents = (blocks_maximum(matrix, (1, 32)) / 6).log2().ceil()
    full = spread(exponents.exp2(), *matrix.shape, (1, 32))
    codes = nearest_e2m1(matrix / full)
    stored = {"#weight_packed": packed_nibbles(codes), "#weight_scale": (exponents + 127).to(torch.uint8)}
    return stored, E2M1[codes.long()] * full


def mxfp4(matrices: torch.Tensor) -> Encoded:
    """Quantise the matrices [experts, in, out] of gpt-oss to blocks of 32 e2m1 numbers [experts, out, blocks, 16]."""
    encoded = [mxfp4_packed(matrix.t()) for matrix in matrices]
    blocks = torch.stack([stored["#weight_packed"] for stored, _ in encoded]).unflatten(-1, (-1, 16))
    scales = torch.stack([stored["#weight_scale"] for stored, _ in encoded])
    return {"_blocks": blocks, "_scales": scales}, torch.stack([matrix.t() for _, matrix in encoded])


def nvfp4(matrix: torch.Tensor, divides: bool) -> Encoded:
    """Quantise to e2m1 with an e4m3 scale for 16 columns, and a scale of the scales."""
    global_scale = matrix.abs().max().clamp(min=1e-6) / (6 * 448)
    stored_global = (1 / global_scale if divides else global_scale).reshape(1) if divides else global_scale
    block_scale = (blocks_maximum(matrix, (1, 16)) / 6 / global_scale).to(torch.float8_e4m3fn)
    scale = block_scale.float() / stored_global if divides else block_scale.float() * stored_global
    full = spread(scale, *matrix.shape, (1, 16))
    codes = nearest_e2m1(torch.where(full > 0, matrix / full, 0))
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    stored = {f"#{names[0]}": packed_nibbles(codes), "#weight_scale": block_scale, f"#{names[1]}": stored_global}
    return {**stored, "#input_scale": torch.tensor(0.5)}, E2M1[codes.long()] * full


def integers(
    matrix: torch.Tensor, group: int, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return non-negative numbers, zero points [out, groups], scales [out, groups], and the dequantised matrix."""
    groups = matrix.unflatten(-1, (-1, group))
    low, high, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0), (1 << bits) - 1
    if symmetric:
        scale = (torch.maximum(-low, high) * 2 / most).clamp(min=1e-6).to(scale_dtype)
        zero = torch.full_like(scale, 1 << (bits - 1), dtype=torch.long)
    else:
        scale = ((high - low) / most).clamp(min=1e-6).to(scale_dtype)
        # GPTQ stores zero points less one, so none of them is zero.
        zero = (-low / scale.float()).round().clamp(1, most).long()
    full, zeros = (spread(item, *matrix.shape, (1, group)) for item in (scale.float(), zero))
    numbers = ((matrix / full).round().long() + zeros).clamp(0, most)
    return numbers, zero, scale, (numbers - zeros) * full


def packed_integers(matrix: torch.Tensor, group: int, bits: int = 4, symmetric: bool = True) -> Encoded:
    """Quantise as compressed-tensors packs integers."""
    numbers, zero, scale, dequantised = integers(matrix, group, bits, symmetric, torch.bfloat16)
    stored = {
        "#weight_packed": packed_words(numbers, bits, -1),
        "#weight_scale": scale,
        "#weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        stored["#weight_zero_point"] = packed_words(zero, bits, -2)
    return stored, dequantised


def packed_integers_in_order(matrix: torch.Tensor, group: int) -> Encoded:
    """Quantise like `packed_integers`, with block indices of -1, which mean that columns are in order."""
    stored, dequantised = packed_integers(matrix, group)
    return {**stored, "#weight_g_idx": torch.full(matrix.shape[1:], -1, dtype=torch.int32)}, dequantised


def gptq(matrix: torch.Tensor, group: int, bits: int = 4, version: int = 1, reorders: bool = False) -> Encoded:
    """Quantise as GPTQ stores matrices: transposed, with the group of every column."""
    columns = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(0))
    order = columns if reorders else torch.arange(matrix.shape[1])
    numbers, zero, scale, dequantised = integers(matrix[:, order], group, bits, False, torch.float16)
    back = order.argsort()
    stored = {
        "#qweight": packed_words(numbers[:, back].t(), bits, -2),
        "#qzeros": packed_words((zero - (2 - version)).t(), bits, -1),
        "#scales": scale.t().contiguous(),
        "#g_idx": (torch.arange(matrix.shape[1]) // group)[back].to(torch.int32),
    }
    return stored, dequantised[:, back]


def awq(matrix: torch.Tensor, group: int) -> Encoded:
    """Quantise as AWQ stores matrices: transposed, with interleaved columns."""
    numbers, zero, scale, dequantised = integers(matrix, group, 4, False, torch.float16)
    stored = {
        "#qweight": packed_words(numbers.t(), 4, -1, AWQ_ORDER),
        "#qzeros": packed_words(zero.t(), 4, -1, AWQ_ORDER),
        "#scales": scale.t().contiguous(),
    }
    return stored, dequantised


def lossless(matrix: torch.Tensor) -> Encoded:
    """Pack as moepass does, in bf16, with room for an escape of every eighth element, because experts are stacked."""
    formula = LosslessFormula("bf16")
    stored = formula.encode(matrix.bfloat16())
    stored = formula.padded(stored, formula.least_bytes(*matrix.shape) + matrix.numel() // 8)
    return {suffix: stored[role] for role, suffix in formula.suffixes.items()}, matrix


def _tensors(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": format, "weights": {"type": "float", "num_bits": 8, **weights}}
    config = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return {**config, "ignore": ["lm_head", "re:.*mlp.gate$"]}


_FP8 = {"quant_method": "fp8", "weight_block_size": [32, 24], "modules_to_not_convert": ["lm_head"]}
_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}

# Matrices of 32 and 64 rows and columns: blocks of 24 are partial at the edges.
FORMS: Mapping[str, PublishedForm] = {
    "fp8 blocks": PublishedForm(
        _FP8, lambda m: fp8(m, (32, 24), torch.float32, "_scale_inv"), lambda key: "_proj" in key
    ),
    "fp8 blocks, bf16 scales": PublishedForm(_FP8, lambda m: fp8(m, (32, 24), torch.bfloat16, "_scale_inv")),
    "fp8 blocks, e8m0 scales": PublishedForm(
        {**_FP8, "scale_fmt": "ue8m0"}, lambda m: fp8(m, (32, 24), torch.float8_e8m0fnu, "_scale_inv")
    ),
    "fp8 blocks, uint8 scales": PublishedForm(_FP8, lambda m: fp8(m, (32, 24), torch.uint8, "_scale_inv")),
    "fp8 per channel": PublishedForm(_tensors("float-quantized", strategy="channel"), fp8_per_channel),
    "fp8 per tensor": PublishedForm({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_per_tensor),
    "fp4 blocks": PublishedForm({**_FP8, "expert_dtype": "fp4", "scale_fmt": "ue8m0"}, fp4_blocks),
    "mxfp4": PublishedForm(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.mlp.router"]},
        mxfp4,
        lambda key: key.endswith(("experts.gate_up_proj", "experts.down_proj")),
        "gpt_oss",
    ),
    "mxfp4 packed": PublishedForm(_tensors("mxfp4-pack-quantized", num_bits=4), mxfp4_packed),
    "nvfp4": PublishedForm(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, lambda m: nvfp4(m, divides=False)
    ),
    "nvfp4 packed": PublishedForm(_tensors("nvfp4-pack-quantized", num_bits=4), lambda m: nvfp4(m, divides=True)),
    "int4 packed": PublishedForm(_tensors("pack-quantized", **_INT4), lambda m: packed_integers(m, 16)),
    "int4 packed, zero points": PublishedForm(
        _tensors("pack-quantized", **_INT4, symmetric=False), lambda m: packed_integers(m, 16, symmetric=False)
    ),
    "int4 packed, indices of -1": PublishedForm(
        _tensors("pack-quantized", **_INT4), lambda m: packed_integers_in_order(m, 16)
    ),
    "int8 packed": PublishedForm(
        _tensors("pack-quantized", **{**_INT4, "num_bits": 8}), lambda m: packed_integers(m, 16, bits=8)
    ),
    "gptq": PublishedForm({"quant_method": "gptq", "bits": 4, "group_size": 16}, lambda m: gptq(m, 16)),
    "gptq, ordered by activations": PublishedForm(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, lambda m: gptq(m, 16, reorders=True)
    ),
    "gptq, version 2": PublishedForm(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
        lambda m: gptq(m, 16, version=2),
    ),
    "gptq, 8 bits": PublishedForm(
        {"quant_method": "gptq", "bits": 8, "group_size": 16}, lambda m: gptq(m, 16, bits=8)
    ),
    "awq": PublishedForm({"quant_method": "awq", "bits": 4, "group_size": 16}, lambda m: awq(m, 16)),
    "lossless": PublishedForm({"quant_method": "moepass", "format": "lossless"}, lossless),
}  # fmt: skip


def save_quantized(model: PreTrainedModel, form: PublishedForm, folder: Path) -> tuple[Path, Path]:
    """Save `model` quantised and, as a second checkpoint, with the dequantised weights. Return both folders."""
    plain = folder / "plain"
    model.save_pretrained(plain)
    return quantize(plain, form, folder / "quantised"), plain


def quantize(plain: Path, form: PublishedForm, quantised: Path) -> Path:
    """Write the checkpoint `plain` quantised into `quantised`, and dequantise its own weights in the same way."""
    shutil.copytree(plain, quantised)
    weights = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for key, weight in list(weights.items()):
        if not form.takes(key):
            stored[key] = weight
            continue
        parts, dequantised = form.encode(weight.float())
        weights[key] = dequantised.to(weight.dtype)
        for ending, tensor in parts.items():
            # An end that begins with # replaces the last part of the key.
            name = f"{key.rpartition('.')[0]}.{ending[1:]}" if ending.startswith("#") else key + ending
            stored[name] = tensor.contiguous()
    metadata = {"format": "pt"}
    save_file(weights, plain / "model.safetensors", metadata)
    save_file(stored, quantised / "model.safetensors", metadata)
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return quantised
