"""The layouts of published checkpoints, by the method that their `quantization_config` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moepass.models.errors import CheckpointError, one_of
from moepass.models.layouts.layout import Layout, Packing, Role

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_E4M3 = Packing((torch.float8_e4m3fn,), 8)
_E2M1 = Packing((torch.uint8, torch.int8), 4)

_FP8_SOURCE = "DeepSeek-V3, inference/kernel.py, weight_dequant"
_MX_SOURCE = "OCP Microscaling Formats (MX) v1.0, section 6.3"
_NVFP4_SOURCE = "NVIDIA ModelOpt, quantization/qtensor/nvfp4_tensor.py, dequantize"
_TENSORS_SOURCE = "compressed-tensors, quantization/lifecycle/forward.py, dequantize"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A checkpoint's quantisation according to its configuration.

    Attributes:
        method: its name in the configuration.
        layouts: the layouts that matrices may have.
        ignored: patterns of modules that are not quantised.
    """

    method: str
    layouts: tuple[Layout, ...]
    ignored: tuple[str, ...] = ()


def read_quantization(values: Mapping[str, Any], name: str) -> Quantization:
    """Return the quantisation in `values`, the `quantization_config` of configuration `name`.

    Raises CheckpointError for a method, or a variant of one, that moepass cannot decode.
    """
    method = str(values.get("quant_method"))
    if method not in _METHODS:
        raise CheckpointError(
            f"{name}: the weights are quantised by {method!r}, which moepass cannot decode; it decodes "
            f"{one_of(_METHODS)}; dequantise the weights and save them as a new checkpoint",
            name="quant_method",
            value=method,
            expected=tuple(_METHODS),
        )
    try:
        return _METHODS[method](values)
    except _UnknownVariantError as error:
        raise CheckpointError(
            f"{name}: {error.name} of the {method!r} weights is {error.value!r}; moepass decodes {error.expected}; "
            "dequantise the weights and save them as a new checkpoint",
            name=error.name,
            value=error.value,
            expected=error.expected,
        ) from None


class _UnknownVariantError(Exception):
    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name, self.value, self.expected = name, value, expected


def _fp8(values: Mapping[str, Any]) -> Quantization:
    block = values.get("weight_block_size", (128, 128))
    sizes = (None, None) if block is None else _block(block, "weight_block_size")
    fp8 = _fp8_layout(sizes, "_scale_inv", (*_FLOATS, *_EXPONENTS))
    # DeepSeek-V4 names the scales of `weight` just `scale`.
    suffixes = {Role.VALUES: "weight", Role.SCALES: "scale"}
    layouts = [fp8, dataclasses.replace(fp8, suffixes=suffixes, matrix="weight")]
    if values.get("expert_dtype", "fp8") == "fp4":
        layouts.append(Layout("fp4 blocks", _MX_SOURCE, suffixes, _E2M1, "e2m1", _EXPONENTS, (1, 32)))
    return Quantization("fp8", tuple(layouts), _patterns(values, "modules_to_not_convert", "ignored_layers"))


def _fp8_layout(block: tuple[int | None, int | None], ending: str, scales: tuple[torch.dtype, ...] = _FLOATS) -> Layout:
    name = {(None, None): "fp8 per tensor", (1, None): "fp8 per channel"}.get(block, "fp8 blocks")
    # A fused expert tensor `gate_up_proj` has the scales `gate_up_proj_scale_inv`.
    return Layout(name, _FP8_SOURCE, {Role.VALUES: "", Role.SCALES: ending}, _E4M3, "e4m3", scales, block, matrix="")


def _mxfp4(values: Mapping[str, Any]) -> Quantization:
    suffixes = {Role.VALUES: "_blocks", Role.SCALES: "_scales"}
    values_in_blocks = dataclasses.replace(_E2M1, folded=True)
    layout = Layout(
        "mxfp4", _MX_SOURCE, suffixes, values_in_blocks, "e2m1", (torch.uint8,), (1, 32), matrix="", is_transposed=True
    )
    return Quantization("mxfp4", (layout,), _patterns(values, "modules_to_not_convert"))


def _modelopt(values: Mapping[str, Any]) -> Quantization:
    algorithm = str(values.get("quant_algo"))
    ignored = _patterns(values, "ignore", "exclude_modules")
    fp8 = _fp8_layout((None, None), "_scale")
    if algorithm == "FP8":
        return Quantization("modelopt", (fp8,), ignored)
    if algorithm != "NVFP4":
        raise _UnknownVariantError("quant_algo", algorithm, "FP8 and NVFP4")
    suffixes = {Role.VALUES: "weight", Role.SCALES: "weight_scale", Role.GLOBAL_SCALE: "weight_scale_2"}
    layout = Layout("nvfp4", _NVFP4_SOURCE, suffixes, _E2M1, "e2m1", (torch.float8_e4m3fn,), (1, 16))
    return Quantization("modelopt", (layout, fp8), ignored)


def _compressed_tensors(values: Mapping[str, Any]) -> Quantization:
    layouts = []
    for group in values.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        format = str(group.get("format") or values.get("format"))
        if format not in _FORMATS:
            raise _UnknownVariantError("format", format, f"the formats {one_of(_FORMATS)}")
        layouts.append(_FORMATS[format](weights))
    return Quantization("compressed-tensors", tuple(layouts), _patterns(values, "ignore"))


def _float_quantized(weights: Mapping[str, Any]) -> Layout:
    if (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        kind = f"{weights.get('type')} with {weights.get('num_bits')} bits"
        raise _UnknownVariantError("type", kind, "float with 8 bits")
    layout = _fp8_layout(_strategy_block(weights), "_scale")
    return dataclasses.replace(layout, source=_TENSORS_SOURCE)


def _nvfp4_packed(weights: Mapping[str, Any]) -> Layout:
    suffixes = {
        Role.VALUES: "weight_packed",
        Role.SCALES: "weight_scale",
        Role.GLOBAL_SCALE: "weight_global_scale",
    }
    scales = (torch.float8_e4m3fn,)
    return Layout("nvfp4 packed", _TENSORS_SOURCE, suffixes, _E2M1, "e2m1", scales, (1, 16), divides=True)


def _mxfp4_packed(weights: Mapping[str, Any]) -> Layout:
    suffixes = {Role.VALUES: "weight_packed", Role.SCALES: "weight_scale"}
    return Layout("mxfp4 packed", _MX_SOURCE, suffixes, _E2M1, "e2m1", (torch.uint8,), (1, 32))


def _pack_quantized(weights: Mapping[str, Any]) -> Layout:
    bits = weights.get("num_bits")
    if bits not in (4, 8) or weights.get("type") != "int":
        raise _UnknownVariantError("num_bits", bits, "integers with 4 or 8 bits")
    suffixes = {Role.VALUES: "weight_packed", Role.SCALES: "weight_scale"}
    zeros, zero = None, 1 << (bits - 1)
    if not weights.get("symmetric", True):
        suffixes[Role.ZERO_POINTS] = "weight_zero_point"
        zeros, zero = Packing((torch.int32,), bits, dim=-2), 0
    return Layout(
        f"int{bits} packed",
        _TENSORS_SOURCE,
        suffixes,
        Packing((torch.int32,), bits),
        "int",
        _FLOATS,
        _strategy_block(weights),
        zero_points=zeros,
        zero_point=zero,
        groups_suffix="weight_g_idx",
    )


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Layout]] = {
    "float-quantized": _float_quantized,
    "naive-quantized": _float_quantized,
    "nvfp4-pack-quantized": _nvfp4_packed,
    "mxfp4-pack-quantized": _mxfp4_packed,
    "pack-quantized": _pack_quantized,
}


def _strategy_block(weights: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the block of a strategy of compressed-tensors."""
    strategy = str(weights.get("strategy"))
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, _count(weights.get("group_size"), "group_size")
    if strategy == "block":
        return _block(weights.get("block_structure"), "block_structure")
    raise _UnknownVariantError("strategy", strategy, "the strategies tensor, channel, group and block")


def _gptq(values: Mapping[str, Any]) -> Quantization:
    bits = values.get("bits")
    if bits not in (4, 8):
        raise _UnknownVariantError("bits", bits, "4 and 8 bits")
    version = values.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _UnknownVariantError("checkpoint_format", version, "gptq and gptq_v2")
    overrides = values.get("dynamic") or {}
    changed = [pattern for pattern in overrides if not pattern.startswith("-:")]
    if changed:
        raise _UnknownVariantError("dynamic", changed[0], "one setting for all modules, and excluded ones ('-:...')")
    layout = Layout(
        f"gptq int{bits}",
        "AutoGPTQ, nn_modules/qlinear/qlinear_torch.py, dequantize_weight",
        {Role.VALUES: "qweight", Role.ZERO_POINTS: "qzeros", Role.SCALES: "scales"},
        Packing((torch.int32,), bits, dim=-2, transposed=True),
        "int",
        _FLOATS,
        (1, _group_size(values)),
        zero_points=Packing((torch.int32,), bits, transposed=True),
        zero_point=1 if version == "gptq" else 0,
        groups_suffix="g_idx",
    )
    ignored = (f"re:{pattern[2:]}" for pattern in overrides)
    return Quantization("gptq", (layout,), (*_patterns(values, "modules_to_not_convert"), *ignored))


def _awq(values: Mapping[str, Any]) -> Quantization:
    for name, expected in (("bits", 4), ("version", "gemm"), ("zero_point", True)):
        if values.get(name, expected) != expected:
            raise _UnknownVariantError(name, values.get(name), f"{name}={expected!r}")
    packing = Packing((torch.int32,), 4, transposed=True, order=(0, 4, 1, 5, 2, 6, 3, 7))
    layout = Layout(
        "awq int4",
        "AutoAWQ, awq/utils/packing_utils.py, dequantize_gemm",
        {Role.VALUES: "qweight", Role.ZERO_POINTS: "qzeros", Role.SCALES: "scales"},
        packing,
        "int",
        _FLOATS,
        (1, _group_size(values)),
        zero_points=packing,
    )
    return Quantization("awq", (layout,), _patterns(values, "modules_to_not_convert"))


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}


def _group_size(values: Mapping[str, Any]) -> int | None:
    size = values.get("group_size", 128)
    return None if size == -1 else _count(size, "group_size")


def _block(value: object, name: str) -> tuple[int, int]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise _UnknownVariantError(name, value, "blocks of [rows, columns]")
    return _count(value[0], name), _count(value[1], name)


def _count(value: object, name: str) -> int:
    if type(value) is not int or value < 1:
        raise _UnknownVariantError(name, value, "positive sizes")
    return value


def _patterns(values: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    return tuple(str(pattern) for name in names for pattern in values.get(name) or ())
