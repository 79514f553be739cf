"""How a checkpoint stores the matrices that it quantised, as its configuration says: fp8 and MXFP4.

A configuration names one dtype, bf16 nearly always, and beside it the method by which most matrices were quantised.
Both together say what a checkpoint's files hold; the dtype alone is what the weights are after dequantisation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Parts of a layer that are quantised as a whole or not at all. Of each: the module that holds it, and its matrices as
# families name them.
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
    """How the matrices of `parts` are stored; all other weights are in the dtype of the architecture.

    A number takes `bits`. Each block of `block_rows` x `block_columns` numbers has a scale of `scale_bytes`; blocks at
    the edge of a matrix may be smaller. A block size of None is the whole dimension. `computes_in` is the dtype of the
    GEMMs that kernels for this format run.
    """

    name: str
    bits: int
    block_rows: int | None
    block_columns: int | None
    scale_bytes: int
    parts: tuple[str, ...]
    computes_in: str

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one matrix [rows, columns] with its scales."""
        blocks = -(-rows // (self.block_rows or rows)) * -(-columns // (self.block_columns or columns))
        return -(-rows * columns * self.bits // 8) + blocks * self.scale_bytes


def stored_format(config: Any, parts_of_layers: Sequence[Sequence[str]]) -> tuple[WeightFormat | None, str]:
    """The format that the checkpoint of a transformers configuration stores most matrices in, and a note.

    Args:
        config: any part of a configuration that may have a `quantization_config`.
        parts_of_layers: the parts that each layer has.

    Returns:
        (None, "") where nothing is quantised; (None, why) for a method, or exceptions, whose sizes are not known here.
    """
    raw = getattr(config, "quantization_config", None)
    if raw is None:
        return None, ""
    values: Mapping[str, Any] = raw if isinstance(raw, Mapping) else raw.to_dict()
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if values.get("dequantize"):
        return None, ""  # the weights become what the dtype says while they are loaded
    if method == "mxfp4":
        # transformers quantises the experts alone, whatever else the configuration leaves out.
        return WeightFormat("mxfp4", 4, 1, 32, 1, (EXPERTS,), "bf16"), ""
    if method != "fp8" or values.get("expert_dtype", "fp8") != "fp8" or values.get("modules_to_convert"):
        return None, f"the checkpoint is quantised by {method!r}, of which the sizes are not known here"
    left_out = values.get("modules_to_not_convert") or values.get("ignored_layers") or ()
    parts, partly = _quantised_parts([str(pattern) for pattern in left_out], parts_of_layers)
    if partly:
        return None, f"the checkpoint quantises a part of its {partly} only, of which the sizes are not counted here"
    block = values.get("weight_block_size", (128, 128))
    rows, columns = (int(block[0]), int(block[1])) if block else (None, None)
    scale_bytes = 1 if values.get("scale_fmt") == "ue8m0" else 4
    return WeightFormat("fp8", 8, rows, columns, scale_bytes, parts, "fp8"), ""


def _quantised_parts(left_out: Sequence[str], parts_of_layers: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], str]:
    """The parts that no pattern leaves out, and the first of which some layers or some matrices alone are left out."""
    quantised = []
    for part in _MODULES:
        found = {
            _is_left_out(left_out, f"model.layers.{index}", part)
            for index, parts in enumerate(parts_of_layers)
            if part in parts
        }
        if found == {False}:
            quantised.append(part)
        elif found - {True}:
            return (), part
    return tuple(quantised), ""


def _is_left_out(left_out: Sequence[str], layer: str, part: str) -> bool | None:
    """Whether all of that part of a layer is left out; None: some of it."""
    some = False
    for module, matrices in _MODULES[part]:
        whole = f"{layer}.{module}"
        hits = [any(_matches(pattern, f"{whole}.{matrix}") for pattern in left_out) for matrix in matrices]
        if any(_matches(pattern, whole) for pattern in left_out) or (hits and all(hits)):
            return True
        some = some or any(hits)
    return None if some else False


def _matches(pattern: str, name: str) -> bool:
    """Whether `pattern` excludes the module `name`. As in transformers it may be a suffix, a parent module, or have
    stars.
    """
    if name.endswith(pattern) or name == pattern or name.startswith(f"{pattern}."):
        return True
    # Configurations use a single kind of regular expression: a star for any layer.
    expression = ".*".join(re.escape(piece) for piece in pattern.split("*"))
    return re.match(rf"{expression}(?:\.|$)", name) is not None
