"""The layouts of published and of packed checkpoints, by the method that their `quantization_config` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
import torch

from moepass.models.errors import CheckpointError, one_of
from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.layout import MatrixFormula, Number, Packing, Role
from moepass.models.layouts.lossless import LosslessFormula
from moepass.models.layouts.packed_floats import FLOAT_TYPES, FloatName
from moepass.models.layouts.weight_layout import PackedMatrixFormula, WeightLayout

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_BYTES = (torch.uint8, torch.int8)
_WORDS = (torch.int32,)
_E2M1 = Packing(4, count=2)
_MX = MatrixFormula(_E2M1, Number.E2M1, (1, 32))

# Name of the layout with one scale for each block of rows and columns.
FP8_BLOCKS = "fp8 blocks"
_FP8_SOURCE = "DeepSeek-V3, inference/kernel.py, weight_dequant"
_MX_SOURCE = "OCP Microscaling Formats (MX) v1.0, section 6.3"
_NVFP4_SOURCE = "NVIDIA ModelOpt, quantization/qtensor/nvfp4_tensor.py, dequantize"
_COMPRESSED_SOURCE = "compressed-tensors, quantization/lifecycle/forward.py, dequantize"
_GPTQ_SOURCE = "AutoGPTQ, nn_modules/qlinear/qlinear_cuda_old.py, forward"
_AWQ_SOURCE = "AutoAWQ, utils/packing_utils.py, dequantize_gemm"

# Checkpoints that `moepass pack` writes: their method, their formats, and the numbers that each format packs.
PACKED_METHOD = "moepass"
PackedFormat = Literal["lossless", "elf"]
PACKED_NUMBERS: Mapping[PackedFormat, tuple[FloatName, ...]] = {
    "lossless": ("bf16", "fp16", "fp32"),
    "elf": ("fp16", "fp32"),
}

_Block = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The quantisation of a checkpoint, as its configuration states it.

    Attributes:
        method: its name in the configuration.
        layouts: the layouts that its matrices may have.
        ignored: patterns of modules that are not quantised.
    """

    method: str
    layouts: tuple[WeightLayout, ...]
    ignored: tuple[str, ...] = ()


def read_quantization(config: object, model_type: str, name: str) -> Quantization:
    """Return the quantisation in `config`, the `quantization_config` of a `model_type` model; errors call it `name`.

    Raises CheckpointError if `config` is malformed, or names a method or a variant that moepass cannot decode.
    """
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"{name}: quant_method is {method!r}, which moepass cannot decode; it decodes {one_of(_METHODS)}; "
            "dequantise the weights and save them as a new checkpoint",
            name="quant_method",
            value=method,
            expected=tuple(_METHODS),
        )
    kind, quantization_of = _METHODS[method]
    try:
        if method == "mxfp4" and not model_type.startswith("gpt_oss"):
            # Other families may store their matrices in another order.
            raise _UnknownVariantError("model_type", model_type, "this method in gpt_oss models only")
        return quantization_of(msgspec.convert(config, kind))
    except msgspec.ValidationError as error:
        text = f"{name}: the quantization_config of method {method!r} is malformed or unknown: {error}"
        raise CheckpointError(text, name="quantization_config", path=name) from error
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


class _Fp8(msgspec.Struct):
    weight_block_size: tuple[int, int] | None = (128, 128)
    expert_dtype: Literal["fp8", "fp4"] | None = None
    moe_quant_algo: Literal["NVFP4"] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None
    ignored_layers: tuple[str, ...] | None = None


def _fp8(config: _Fp8) -> Quantization:
    block = (None, None) if config.weight_block_size is None else _block("weight_block_size", config.weight_block_size)
    fp8 = _fp8_layout(block, "_scale_inv", (*_FLOATS, *_EXPONENTS))
    # DeepSeek-V4 calls the scales of `weight` just `scale`, AutoFP8 `weight_scale`.
    suffixes = {Role.VALUES: "weight", Role.SCALES: "scale"}
    layouts = [fp8, dataclasses.replace(fp8, suffixes=suffixes, matrix_suffix="weight")]
    layouts += [_fp8_layout(block, "_scale") for block in ((None, None), (1, None))]
    if config.expert_dtype == "fp4":
        layouts.append(WeightLayout("fp4 blocks", _MX_SOURCE, suffixes, _BYTES, _EXPONENTS, _MX))
    if config.moe_quant_algo == "NVFP4":  # NVIDIA's DeepSeek-V4: FP8 attention, NVFP4 experts
        layouts.append(_NVFP4)
    return Quantization("fp8", tuple(layouts), (*(config.modules_to_not_convert or ()), *(config.ignored_layers or ())))


def _fp8_layout(block: _Block, suffix: str, scales: tuple[torch.dtype, ...] = _FLOATS) -> WeightLayout:
    names: Mapping[_Block, str] = {(None, None): "fp8 per tensor", (1, None): "fp8 per channel"}
    name = names.get(block, FP8_BLOCKS)
    # A fused tensor of experts `gate_up_proj` has the scales `gate_up_proj_scale_inv`.
    suffixes = {Role.VALUES: "", Role.SCALES: suffix}
    formula = MatrixFormula(Packing(8), Number.E4M3, block)
    return WeightLayout(name, _FP8_SOURCE, suffixes, (torch.float8_e4m3fn,), scales, formula, matrix_suffix="")


class _Mxfp4(msgspec.Struct):
    modules_to_not_convert: tuple[str, ...] | None = None


def _mxfp4(config: _Mxfp4) -> Quantization:
    suffixes = {Role.VALUES: "_blocks", Role.SCALES: "_scales"}
    formula = msgspec.structs.replace(_MX, packing=dataclasses.replace(_E2M1, folded=True), is_transposed=True)
    layout = WeightLayout("mxfp4", _MX_SOURCE, suffixes, _BYTES, (torch.uint8,), formula, matrix_suffix="")
    return Quantization("mxfp4", (layout,), config.modules_to_not_convert or ())


class _QuantizedLayer(msgspec.Struct):
    quant_algo: str | None = None


class _ModelOpt(msgspec.Struct):
    quant_algo: str | None = None
    quantized_layers: dict[str, _QuantizedLayer] | None = None
    ignore: tuple[str, ...] | None = None
    exclude_modules: tuple[str, ...] | None = None


_NVFP4 = WeightLayout(
    "nvfp4",
    _NVFP4_SOURCE,
    {Role.VALUES: "weight", Role.SCALES: "weight_scale", Role.GLOBAL_SCALE: "weight_scale_2"},
    _BYTES,
    (torch.float8_e4m3fn,),
    MatrixFormula(_E2M1, Number.E2M1, (1, 16)),
)


def _modelopt(config: _ModelOpt) -> Quantization:
    # Without an algorithm only caches are quantised.
    algorithms: set[str | None] = set() if config.quant_algo is None else {config.quant_algo}
    if config.quant_algo == "MIXED_PRECISION":
        algorithms = {layer.quant_algo for layer in (config.quantized_layers or {}).values()}
    for algorithm in algorithms:
        if algorithm not in ("FP8", "NVFP4", "W4A16_NVFP4"):
            raise _UnknownVariantError("quant_algo", algorithm, "FP8, NVFP4, W4A16_NVFP4, and mixtures of these")
    ignored = (
        () if config.quant_algo == "MIXED_PRECISION" else (*(config.ignore or ()), *(config.exclude_modules or ()))
    )
    return Quantization("modelopt", (_NVFP4, _fp8_layout((None, None), "_scale")), ignored)


class _Weights(msgspec.Struct):
    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    group_size: int | None = None
    actorder: bool | str | None = None
    block_structure: tuple[int, int] | str | None = None


class _SchemeGroup(msgspec.Struct):
    weights: _Weights | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _SchemeGroup]
    format: str = "dense"
    ignore: tuple[str, ...] | None = None
    transform_config: dict[str, Any] | None = None


def _compressed_tensors(config: _CompressedTensors) -> Quantization:
    if config.transform_config and config.transform_config.get("config_groups"):
        raise _UnknownVariantError("transform_config", sorted(config.transform_config), "weights without transforms")
    layouts = []
    for group in config.config_groups.values():
        format = group.format or config.format
        if group.weights is None or format == "dense":
            continue
        if format not in _FORMATS:
            raise _UnknownVariantError("format", format, f"the formats {one_of(_FORMATS)}")
        layouts.append(_FORMATS[format](group.weights))
    return Quantization("compressed-tensors", tuple(layouts), config.ignore or ())


def _float_quantized(weights: _Weights) -> WeightLayout:
    if (weights.num_bits, weights.type) != (8, "float"):
        raise _UnknownVariantError("type", f"{weights.type} with {weights.num_bits} bits", "float with 8 bits")
    return dataclasses.replace(_fp8_layout(_strategy_block(weights), "_scale"), source=_COMPRESSED_SOURCE)


def _nvfp4_packed(weights: _Weights) -> WeightLayout:
    suffixes = {
        Role.VALUES: "weight_packed",
        Role.SCALES: "weight_scale",
        Role.GLOBAL_SCALE: "weight_global_scale",
    }
    formula = msgspec.structs.replace(_NVFP4.formula, divides=True)
    return WeightLayout("nvfp4 packed", _COMPRESSED_SOURCE, suffixes, _NVFP4.dtypes, _NVFP4.scales, formula)


def _mxfp4_packed(weights: _Weights) -> WeightLayout:
    suffixes = {Role.VALUES: "weight_packed", Role.SCALES: "weight_scale"}
    return WeightLayout("mxfp4 packed", _MX_SOURCE, suffixes, _BYTES, (torch.uint8,), _MX)


def _pack_quantized(weights: _Weights) -> WeightLayout:
    bits = weights.num_bits
    if bits not in (4, 8) or weights.type != "int":
        raise _UnknownVariantError("num_bits", bits, "integers with 4 or 8 bits")
    suffixes = {Role.VALUES: "weight_packed", Role.SCALES: "weight_scale"}
    formula = MatrixFormula(Packing(bits, 32 // bits), Number.INT, _strategy_block(weights), zero_point=1 << (bits - 1))
    if not weights.symmetric:
        suffixes[Role.ZERO_POINTS] = "weight_zero_point"
        zero_points = dataclasses.replace(formula.packing, dim=-2)
        formula = msgspec.structs.replace(formula, zero_points=zero_points, zero_point=0)
    layout = WeightLayout(f"int{bits} packed", _COMPRESSED_SOURCE, suffixes, _WORDS, _FLOATS, formula)
    return _with_block_indices(layout, "weight_g_idx", weights.actorder in (True, "group", "dynamic"))


_FORMATS: Mapping[str, Callable[[_Weights], WeightLayout]] = {
    "float-quantized": _float_quantized,
    "naive-quantized": _float_quantized,
    "nvfp4-pack-quantized": _nvfp4_packed,
    "mxfp4-pack-quantized": _mxfp4_packed,
    "pack-quantized": _pack_quantized,
}


def _strategy_block(weights: _Weights) -> _Block:
    """Return the block of a strategy of compressed-tensors."""
    strategy = weights.strategy
    if strategy is None:
        strategy = "group" if (weights.group_size or 0) > 0 else "channel" if weights.group_size == -1 else "tensor"
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "block":
        structure = weights.block_structure
        sizes = structure.split("x") if isinstance(structure, str) else structure
        if sizes is None or len(sizes) != 2 or not all(str(size).isdecimal() for size in sizes):
            raise _UnknownVariantError("block_structure", structure, "blocks of [rows, columns]")
        return _block("block_structure", (int(sizes[0]), int(sizes[1])))
    return 1, _size("group_size", weights.group_size)


_QWEIGHT = {Role.VALUES: "qweight", Role.ZERO_POINTS: "qzeros", Role.SCALES: "scales"}


class _Gptq(msgspec.Struct):
    bits: int
    group_size: int = 128
    desc_act: bool = False
    checkpoint_format: str | None = None
    dynamic: dict[str, dict[str, Any]] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None


def _gptq(config: _Gptq) -> Quantization:
    if config.bits not in (4, 8):
        raise _UnknownVariantError("bits", config.bits, "4 and 8 bits")
    version = config.checkpoint_format or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise _UnknownVariantError("checkpoint_format", version, "gptq and gptq_v2")
    default = {"bits": config.bits, "group_size": config.group_size}
    for pattern, settings in (config.dynamic or {}).items():
        differs = any(settings.get(name, value) != value for name, value in default.items())
        if differs and not pattern.startswith("-:"):
            raise _UnknownVariantError("dynamic", pattern, "the same bits and group_size in all modules")
    packing = Packing(config.bits, 32 // config.bits, transposed=True)
    formula = MatrixFormula(
        dataclasses.replace(packing, dim=-2),
        Number.INT,
        (1, _group_size(config.group_size)),
        zero_points=packing,
        zero_point_offset=1 if version == "gptq" else 0,
    )
    layout = WeightLayout(f"gptq int{config.bits}", _GPTQ_SOURCE, _QWEIGHT, _WORDS, _FLOATS, formula)
    layout = _with_block_indices(layout, "g_idx", config.desc_act and config.group_size > 0)
    return Quantization("gptq", (layout,), config.modules_to_not_convert or ())


def _with_block_indices(layout: WeightLayout, suffix: str, is_needed: bool) -> WeightLayout:
    """Return `layout` with the group of each column, which a matrix may lack unless columns were reordered."""
    indices = {Role.BLOCK_INDICES: suffix}
    if is_needed:
        return dataclasses.replace(layout, suffixes={**layout.suffixes, **indices})
    return dataclasses.replace(layout, optional=indices)


class _Awq(msgspec.Struct):
    bits: int
    group_size: int = 128
    version: str = "gemm"
    zero_point: bool = True
    modules_to_not_convert: tuple[str, ...] | None = None


def _awq(config: _Awq) -> Quantization:
    version = config.version.casefold()
    settings = (("bits", config.bits, 4), ("version", version, "gemm"), ("zero_point", config.zero_point, True))
    for name, value, expected in settings:
        if value != expected:
            raise _UnknownVariantError(name, value, f"{name}={expected!r}")
    packing = Packing(4, 8, transposed=True, order=(0, 4, 1, 5, 2, 6, 3, 7))
    formula = MatrixFormula(packing, Number.INT, (1, _group_size(config.group_size)), zero_points=packing)
    layout = WeightLayout("awq int4", _AWQ_SOURCE, _QWEIGHT, _WORDS, _FLOATS, formula)
    return Quantization("awq", (layout,), config.modules_to_not_convert or ())


class _Packed(msgspec.Struct):
    format: PackedFormat


def _packed(config: _Packed) -> Quantization:
    layouts = tuple(packed_layout(config.format, number) for number in PACKED_NUMBERS[config.format])
    return Quantization(PACKED_METHOD, layouts)


def packed_layout(format: PackedFormat, number: FloatName) -> WeightLayout:
    """Return the layout of matrices of `number`s that `moepass pack` writes in `format`."""
    formula = packed_formula(format, number)
    suffixes = formula.suffixes
    return WeightLayout(f"{format} {number}", "moepass", suffixes, (torch.uint8,), (), formula, matrix_suffix="")


def packed_formulas(format: PackedFormat) -> dict[torch.dtype, PackedMatrixFormula]:
    """Return the formulas of `format` by the dtype of the matrices that they pack."""
    return {FLOAT_TYPES[number].dtype: packed_formula(format, number) for number in PACKED_NUMBERS[format]}


def packed_formula(format: PackedFormat, number: FloatName) -> PackedMatrixFormula:
    """Return the formula of matrices of `number`s that `moepass pack` writes in `format`."""
    return LosslessFormula(number) if format == "lossless" else ElfFormula(number)


_METHODS: Mapping[str, tuple[type[msgspec.Struct], Callable[[Any], Quantization]]] = {
    "fp8": (_Fp8, _fp8),
    "mxfp4": (_Mxfp4, _mxfp4),
    "modelopt": (_ModelOpt, _modelopt),
    "compressed-tensors": (_CompressedTensors, _compressed_tensors),
    "gptq": (_Gptq, _gptq),
    "awq": (_Awq, _awq),
    PACKED_METHOD: (_Packed, _packed),
}


def _group_size(size: int) -> int | None:
    return None if size == -1 else _size("group_size", size)


def _block(name: str, sizes: tuple[int, int]) -> tuple[int, int]:
    return _size(name, sizes[0]), _size(name, sizes[1])


def _size(name: str, size: int | None) -> int:
    if size is None or size < 1:
        raise _UnknownVariantError(name, size, "positive sizes")
    return size
