"""Checkpoints with random weights, for models of any size, in bf16 or in a published quantised form.

All tensors are slices of the same random numbers, and files are written past the kernel's page cache: in a virtual
machine, filling that cache can cost several CPU seconds per GB.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedConfig

from moepass.models.checkpoint.checkpoint_files import DTYPES
from moepass.models.checkpoint.file_header import make_header
from moepass.models.sizes.weight_formats import EXPERTS, WeightFormat

INT4_GROUP, NVFP4_BLOCK, FP4_BLOCK, FP8_BLOCK = 32, 16, 32, 128
_LEFT_OUT = ["lm_head", "self_attn", "mlp.gate"]
# The quantization_config of each format.
FORMATS: Mapping[str, dict[str, Any] | None] = {
    "bf16": None,
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": INT4_GROUP},
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*", "*mlp.gate"]},
    "fp8": {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "modules_to_not_convert": _LEFT_OUT},
    # The numbers of MXFP4, as DeepSeek-V4 stores them.
    "fp4": {"quant_method": "fp8", "expert_dtype": "fp4", "scale_fmt": "ue8m0", "modules_to_not_convert": _LEFT_OUT},
}


def _stored(name: str, bits: float, rows: int, columns: int, scale_bytes: int) -> WeightFormat:
    return WeightFormat(name, bits, rows, columns, scale_bytes, (EXPERTS,), "bf16")


# Sizes of the experts of each format; None for bf16.
SIZES: Mapping[str, WeightFormat | None] = {
    "bf16": None,
    "fp8": _stored("fp8", 8, FP8_BLOCK, FP8_BLOCK, 4),
    "fp4": _stored("fp4", 4, 1, FP4_BLOCK, 1),
    "nvfp4": _stored("nvfp4", 4, 1, NVFP4_BLOCK, 1),
    "int4": _stored("int4", 4, 1, INT4_GROUP, 2),
}
POOL_BYTES = 64 << 20
# Bytes that a checkpoint leaves free on the disk.
SPARE_BYTES = 2 << 30
_WRITE_BYTES = 16 << 20
# Writes past the page cache start and end at multiples of this.
_BLOCK_BYTES = 4096
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class RandomTensor:
    """A tensor to write, whose elements are those of the flat tensor `numbers`, repeated from element `start` on."""

    shape: tuple[int, ...]
    numbers: torch.Tensor
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.numbers.dtype.itemsize

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes of the tensor."""
        pool = memoryview(self.numbers.view(torch.uint8).numpy())
        start, remaining = self.start * self.numbers.dtype.itemsize, self.nbytes
        while remaining:
            chunk = pool[start : start + remaining]
            yield chunk
            start, remaining = 0, remaining - len(chunk)


def write_random_checkpoint(config: PreTrainedConfig, folder: Path, format: str) -> int:
    """Write a checkpoint with experts in `format`, one file for each layer, and return the bytes of its files.

    Exits with a message if the disk has too little room.
    """
    if format not in FORMATS:
        raise typer.BadParameter(f"format is {format!r}; use one of {', '.join(FORMATS)}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    numbers, layers = _Numbers(), config.num_hidden_layers
    files: list[dict[str, RandomTensor]] = []
    for prefix in ["", *[f"model.layers.{index}." for index in range(layers)]]:
        names = [name for name in shapes if (name.startswith(prefix) if prefix else ".layers." not in name)]
        files.append(dict(item for name in names for item in numbers.stored(name, shapes[name], format)))
    needed = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        typer.echo(
            f"{folder} has {free / 1e9:.1f} GB free, but this checkpoint needs {needed / 1e9:.1f} GB, and "
            f"{SPARE_BYTES / 1e9:.1f} GB must stay free; use fewer layers, or another folder",
            err=True,
        )
        raise typer.Exit(1)
    config.save_pretrained(folder)
    if FORMATS[format] is not None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": FORMATS[format]}))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files):
        name = f"model-{number:05d}-of-{layers:05d}.safetensors"
        _write(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


class _Numbers:
    """Random numbers: weights of about 1/32, as in trained models, so that activations stay finite."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = (torch.randn(POOL_BYTES // 2, generator=generator) / 32).bfloat16()
        self._codes = torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, generator=generator)
        # Without the codes of NaN.
        self._fp8 = torch.where(self._codes & 127 == 127, 0, self._codes).view(torch.float8_e4m3fn)
        scales = torch.rand(1 << 20, generator=generator)
        self._scales = {
            "int4": (scales / 128).bfloat16(),
            "nvfp4": scales.to(torch.float8_e4m3fn),
            "fp8": scales / 4096,
            "fp4": (scales / 64).to(torch.float8_e8m0fnu),
        }
        self._taken = 0

    def stored(self, name: str, shape: tuple[int, ...], format: str) -> Iterator[tuple[str, RandomTensor]]:
        """Yield the keys and tensors under which a checkpoint stores the weight `name` of the model."""
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj") or len(shape) != 3:
            yield name, self._random(shape, self._weights)
            return
        rows, columns = shape[1:]
        matrices = {"down_proj": rows} if leaf == "down_proj" else {"gate_proj": rows // 2, "up_proj": rows // 2}
        for expert in range(shape[0]):
            for matrix, count in matrices.items():
                yield from self._matrix(f"{stem}.{expert}.{matrix}.weight", count, columns, format)

    def _matrix(self, key: str, rows: int, columns: int, format: str) -> Iterator[tuple[str, RandomTensor]]:
        if format == "int4":
            yield f"{key}_packed", self._random((rows, columns // 8), self._codes.view(torch.int32))
            yield f"{key}_scale", self._random((rows, columns // INT4_GROUP), self._scales[format])
            yield f"{key}_shape", RandomTensor((2,), torch.tensor([rows, columns]))
        elif format == "nvfp4":
            yield key, self._random((rows, columns // 2), self._codes)
            yield f"{key}_scale", self._random((rows, columns // NVFP4_BLOCK), self._scales[format])
            yield f"{key}_scale_2", RandomTensor((), torch.tensor([1 / 32]))
            yield key.removesuffix("weight") + "input_scale", RandomTensor((), torch.tensor([1.0]))
        elif format == "fp8":
            yield key, self._random((rows, columns), self._fp8)
            blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
            yield f"{key}_scale_inv", self._random(blocks, self._scales[format])
        elif format == "fp4":
            yield key, self._random((rows, columns // 2), self._codes.view(torch.int8))
            scale = key.removesuffix("weight") + "scale"
            yield scale, self._random((rows, columns // FP4_BLOCK), self._scales[format])
        else:
            yield key, self._random((rows, columns), self._weights)

    def _random(self, shape: tuple[int, ...], numbers: torch.Tensor) -> RandomTensor:
        self._taken += 104729  # a prime, so that tensors start at different numbers
        return RandomTensor(shape, numbers, self._taken % len(numbers))


def _write(file: Path, tensors: Mapping[str, RandomTensor]) -> None:
    # Published files store tensors with wide elements first, which keeps all of them aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].numbers.dtype.itemsize, item[0])))
    described = {key: (_NAMES[item.numbers.dtype], item.shape, item.nbytes) for key, item in ordered.items()}
    header = make_header(described, {"format": "pt"})
    chunks = (chunk for tensor in ordered.values() for chunk in tensor.chunks())
    nbytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    descriptor = _opened_past_the_cache(file)
    try:
        for block in _blocks([memoryview(header), *chunks]):
            os.write(descriptor, block)
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened_past_the_cache(file: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(file, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(file, flags, 0o644)  # this file system always uses the cache


def _blocks(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of `chunks` in aligned memory that the next block overwrites, the last one padded."""
    buffer = memoryview(mmap.mmap(-1, _WRITE_BYTES))
    filled = 0
    for chunk in chunks:
        while len(chunk):
            count = min(len(chunk), len(buffer) - filled)
            buffer[filled : filled + count] = chunk[:count]
            filled, chunk = filled + count, chunk[count:]
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[: -(-filled // _BLOCK_BYTES) * _BLOCK_BYTES]
