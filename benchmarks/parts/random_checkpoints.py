"""Writes checkpoints with random weights, of models of any size, layer by layer, in bf16 and quantised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

_FP8_BLOCK = 128
# The quantization_config of each format.
FORMATS: Mapping[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {
        "quant_method": "fp8",
        "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
        "modules_to_not_convert": ["lm_head"],
    },
    "mxfp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"format": "mxfp4-pack-quantized", "weights": {"type": "float", "num_bits": 4}}},
    },
}
# Different tensors are different parts of this many random numbers.
_POOL = 1 << 26


def write_checkpoint(config: PreTrainedConfig, folder: Path, format: str) -> int:
    """Write a checkpoint with one file per layer into `folder`, experts in `format`, and return its bytes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    if FORMATS[format] is not None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": FORMATS[format]}))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    numbers, layers = _Numbers(), config.num_hidden_layers
    total, weight_map = 0, {}
    for number, prefix in enumerate(["", *[f"model.layers.{index}." for index in range(layers)]]):
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            if name.startswith(prefix) if prefix else ".layers." not in name:
                for key, matrix in _stored_shapes(name, shape):
                    tensors |= numbers.stored(key, matrix, format if ".experts." in key else "bf16")
        file = f"model-{number:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def _stored_shapes(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the keys and shapes under which checkpoints store the tensor `name` of the model."""
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("gate_up_proj", "down_proj") or len(shape) != 3:
        yield name, shape
        return
    half = (shape[1] // 2, shape[2])
    matrices = {"down_proj": shape[1:]} if leaf == "down_proj" else {"gate_proj": half, "up_proj": half}
    for expert in range(shape[0]):
        for matrix, size in matrices.items():
            yield f"{stem}.{expert}.{matrix}.weight", size


class _Numbers:
    """Random tensors: weights of about 1/32, as real ones, so that activations stay finite."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = (torch.randn(_POOL, generator=generator) / 32).bfloat16()
        self._codes = torch.randint(0, 256, (_POOL,), dtype=torch.uint8, generator=generator)
        self._next = 0

    def stored(self, key: str, shape: tuple[int, ...], format: str) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a weight."""
        if format == "bf16":
            return {key: self._taken(self._weights, shape)}
        (rows, columns), stem = shape, key.removesuffix("weight")
        if format == "mxfp4":
            # Scales of 2^-8 to 2^-5.
            scales = self._taken(self._codes, (rows, columns // 32)) % 4 + 119
            return {
                f"{stem}weight_packed": self._taken(self._codes, (rows, columns // 2)),
                f"{stem}weight_scale": scales,
            }
        values = (self._taken(self._weights, shape).float() * 1000).to(torch.float8_e4m3fn)
        blocks = -(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK)
        return {key: values, f"{key}_scale_inv": torch.full(blocks, 1e-3)}

    def _taken(self, pool: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        self._next = (self._next + 104729) % (_POOL // 2)
        return pool[self._next :].repeat(-(-count // (_POOL - self._next)))[:count].view(shape)
