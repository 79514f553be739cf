"""Storage of quantised and packed matrices in checkpoints, according to their configuration.

A configuration states one dtype, nearly always bf16, and the method by which most matrices were quantised. The dtype
describes the weights after dequantisation.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Parts of a layer that are quantised as a whole: the names of their modules and matrices in various families.
ATTENTION, EXPERTS, SHARED_EXPERTS, DENSE_MLP = "attention", "experts", "shared experts", "dense MLP"
_MLP = ("gate_proj", "up_proj", "down_proj")
_MODULES: Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    ATTENTION: (
        ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("self_attn", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    ),
    EXPERTS: (("mlp.experts", ("0.gate_proj", "0.up_proj", "0.down_proj")), ("block_sparse_moe.experts", ())),
    SHARED_EXPERTS: (("mlp.shared_experts", _MLP), ("mlp.shared_expert", _MLP)),
    DENSE_MLP: (("mlp", _MLP),),
}


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """Storage of the matrices of `parts`; all other weights are in the dtype of the architecture.

    `block_rows` x `block_columns` numbers share a scale, fewer at the edges. None: the complete dimension shares one.
    Kernels for this format compute in `computes_in`. `bits` is a mean if the bits depend on the numbers.
    """

    name: str
    bits: float
    block_rows: int | None
    block_columns: int | None
    scale_bytes: int
    parts: tuple[str, ...]
    computes_in: str

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of one matrix [rows, columns] with its scales."""
        blocks = -(-rows // (self.block_rows or rows)) * -(-columns // (self.block_columns or columns))
        return math.ceil(rows * columns * self.bits / 8) + blocks * self.scale_bytes


# [Empirical] Three bits for the exponent instead of 8 or 5; 2.5 % of normally distributed weights take another byte.
_LOSSLESS_BITS: Mapping[str, float] = {"bf16": 11.2, "fp16": 14.2, "fp32": 27.2}
# Sign and mantissa.
_ELF_BITS: Mapping[str, float] = {"fp16": 11, "fp32": 24}


def packed_format(dtype: str, format: object = "lossless") -> WeightFormat | None:
    """Return the format of experts that `moepass pack` has packed in `format`; None if it cannot pack `dtype`."""
    if format == "elf" and dtype in _ELF_BITS:
        return WeightFormat("elf", _ELF_BITS[dtype], None, None, 16, (EXPERTS,), dtype)
    if format == "lossless" and dtype in _LOSSLESS_BITS:
        # Each row has eight bytes: its first exponent, and where its escapes begin.
        return WeightFormat("lossless", _LOSSLESS_BITS[dtype], 1, None, 8, (EXPERTS,), dtype)
    return None


def stored_format(config: Any, parts_of_layers: Sequence[Sequence[str]], dtype: str) -> tuple[WeightFormat | None, str]:
    """Return the format in which a checkpoint of weights in `dtype` stores most matrices, and a note.

    `config` is the part of a transformers configuration that may have a `quantization_config`. Returns (None, "") if
    nothing is quantised, and (None, reason) for a method, or exceptions, whose sizes are unknown.
    """
    raw = getattr(config, "quantization_config", None)
    if raw is None:
        return None, ""
    values: Mapping[str, Any] = raw if isinstance(raw, Mapping) else raw.to_dict()
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if values.get("dequantize"):
        return None, ""  # the weights are converted to the dtype while they are loaded
    if method == "moepass" and (packed := packed_format(dtype, values.get("format"))):
        return packed, ""
    if method == "mxfp4":
        # transformers quantises only the experts, even if the configuration excludes other modules.
        return WeightFormat("mxfp4", 4, 1, 32, 1, (EXPERTS,), "bf16"), ""
    if method != "fp8" or values.get("expert_dtype", "fp8") != "fp8" or values.get("modules_to_convert"):
        return None, f"the checkpoint is quantised by {method!r}, whose sizes moepass does not know"
    left_out = values.get("modules_to_not_convert") or values.get("ignored_layers") or ()
    parts, partly = _quantised_parts([str(pattern) for pattern in left_out], parts_of_layers)
    if partly:
        return None, f"the checkpoint quantises only a part of its {partly}, whose sizes are not counted here"
    block = values.get("weight_block_size", (128, 128))
    rows, columns = (int(block[0]), int(block[1])) if block else (None, None)
    scale_bytes = 1 if values.get("scale_fmt") == "ue8m0" else 4
    return WeightFormat("fp8", 8, rows, columns, scale_bytes, parts, "fp8"), ""


def _quantised_parts(left_out: Sequence[str], parts_of_layers: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], str]:
    """Return the parts that no pattern excludes, and the first part that is excluded only partly."""
    quantised = []
    for name in _MODULES:
        exclusions = {
            _is_left_out(left_out, f"model.layers.{index}", name)
            for index, parts in enumerate(parts_of_layers)
            if name in parts
        }
        if exclusions == {False}:
            quantised.append(name)
        elif exclusions - {True}:
            return (), name
    return tuple(quantised), ""


def _is_left_out(left_out: Sequence[str], layer: str, part: str) -> bool | None:
    """Return whether a part of a layer is excluded; None if only some of its matrices are excluded."""
    some = False
    for module, matrices in _MODULES[part]:
        path = f"{layer}.{module}"
        hits = [any(_matches(pattern, f"{path}.{matrix}") for pattern in left_out) for matrix in matrices]
        if any(_matches(pattern, path) for pattern in left_out) or (hits and all(hits)):
            return True
        some = some or any(hits)
    return None if some else False


def _matches(pattern: str, name: str) -> bool:
    """Return whether `pattern` (as in transformers a suffix, a parent module, or with stars) excludes module `name`."""
    if name.endswith(pattern) or name == pattern or name.startswith(f"{pattern}."):
        return True
    # Configurations use a single kind of regular expression: a star for any layer.
    expression = ".*".join(re.escape(piece) for piece in pattern.split("*"))
    return re.match(rf"{expression}(?:\.|$)", name) is not None
