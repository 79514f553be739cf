"""Packing of a checkpoint: a copy of it whose expert matrices take fewer bytes and decode to the same bits.

    moepass-pack.json        written first: which files the copy is made of
    experts-N.safetensors    the experts of a layer, read back and compared before the file gets its name
    dense-N.safetensors      the other tensors of a file of the checkpoint
    config.json              written last, so that an unfinished folder is no checkpoint

If the process is killed, the next one continues after the files that are complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moepass.models.checkpoint.checkpoint_files import CheckpointFiles, StoredTensor
from moepass.models.checkpoint.checkpoint_folders import CONFIG_FILE
from moepass.models.checkpoint.load_model import build_unread, is_quantized
from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.checkpoint.weight_files import INDEX_FILE, read_json
from moepass.models.errors import CheckpointError, InputError
from moepass.models.layouts.layout import Role
from moepass.models.layouts.lossless import FLOAT_TYPES, LosslessFormula
from moepass.models.layouts.published import PACKED_METHOD, lossless_suffixes
from moepass.runtime.kernels.decoders import decode_matrices
from moepass.runtime.offload.offload import expert_parameters, find_expert_modules

_SOURCE_FILE = "moepass-pack.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_NUMBERS = {float_type.dtype: number for number, float_type in FLOAT_TYPES.items()}

# A function of (bytes done so far, total bytes).
Progress = Callable[[int, int], object]


@dataclasses.dataclass(frozen=True)
class PackReport:
    """Bytes of all expert matrices before and after packing, and of all other tensors."""

    expert_bytes: int
    packed_bytes: int
    dense_bytes: int


def pack_checkpoint(source: Path, target: Path, progress: Progress) -> PackReport:
    """Write a copy of the checkpoint in the folder `source`, with its experts packed without loss, to `target`.

    Matrices that would not become smaller are copied. Raises InputError if `target` contains other files or has too
    little space, and CheckpointError if `source` is quantised already, has no experts, or changes meanwhile.
    """
    if is_quantized(source):
        text = f"{source} is quantised or packed already; packing needs weights in bf16, fp16 or fp32"
        raise CheckpointError(text, path=source)
    files, model = build_unread(source, None)
    layers = [_matrices(expert_parameters(module).values()) for module in find_expert_modules(model).values()]
    experts = {matrix.key for matrices in layers for matrix in matrices}
    if not experts:
        raise CheckpointError(f"{source} has no experts in bf16, fp16 or fp32", path=source)
    dense: dict[Path, list[StoredTensor]] = defaultdict(list)
    for tensor in files:
        if tensor.key not in experts:
            dense[tensor.file].append(tensor)
    total = sum(tensor.nbytes for tensor in files)
    weight_map: dict[str, str] = {}
    done = packed_bytes = 0
    with _begun(source, target, files, total):
        for prefix, groups in (("experts", layers), ("dense", list(dense.values()))):
            for number, tensors in enumerate(groups):
                name = f"{prefix}-{number:05d}.safetensors"
                if not (target / name).exists():
                    _write(target / name, files, tensors, packs=prefix == "experts")
                sizes = _stored_sizes(target / name)
                weight_map |= dict.fromkeys(sizes, name)
                packed_bytes += sum(sizes.values()) if prefix == "experts" else 0
                done += sum(tensor.nbytes for tensor in tensors)
                progress(done, total)
        files.check()
        _finish(source, target, weight_map)
    expert_bytes = sum(matrix.nbytes for matrices in layers for matrix in matrices)
    return PackReport(expert_bytes, packed_bytes, total - expert_bytes)


def _matrices(parameters: Iterable[torch.Tensor]) -> list[StoredTensor]:
    """Return the stored matrices, or stacks of matrices, that make up `parameters`, in the order of their keys."""
    stored = {
        item.tensor.key: item.tensor
        for parameter in parameters
        if isinstance(parameter, UnreadTensor) and parameter.dim() == 3
        for item in parameter.recipe.stored()
    }
    return [stored[key] for key in sorted(stored) if stored[key].dtype in _NUMBERS and len(stored[key].shape) > 1]


@contextlib.contextmanager
def _begun(source: Path, target: Path, files: CheckpointFiles, needed_bytes: int) -> Iterator[None]:
    """Make the folder `target`, or check that an earlier process made it from the same files, and lock it."""
    digest = hashlib.blake2b(digest_size=16)
    for file, stamp in sorted({(tensor.file.resolve(), tensor.stamp) for tensor in files}, key=str):
        digest.update(f"{file} {stamp}\n".encode())
    made_of = {"source": str(source.resolve()), "digest": digest.hexdigest()}
    marker = target / _SOURCE_FILE
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            if any(target.iterdir()):
                text = f"{target} is not empty, and `moepass pack` did not write it; name a new folder"
                raise InputError(text, name="output", path=target)
            free = shutil.disk_usage(target).free
            if free < needed_bytes:
                raise InputError(
                    f"{target} has {free} free bytes; packing may need as many as {source} has, {needed_bytes}",
                    name="output",
                    value=free,
                    expected=needed_bytes,
                )
            _write_json(marker, made_of)
    except OSError as error:
        raise InputError(f"{target} cannot be written to: {error.strerror}", name="output", path=target) from error
    begun = read_json(marker, dict)
    if begun != made_of:
        text = f"{target} was packed from {begun.get('source')} at another time; delete it, or name a new folder"
        raise InputError(text, name="output", path=target, value=begun, expected=made_of)
    import fcntl  # only on platforms with POSIX locks

    with open(marker, "rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel unlocks it if the process is killed
        except BlockingIOError:
            raise InputError(f"another process is writing to {target}; wait for it", path=target) from None
        yield


def _write(file: Path, files: CheckpointFiles, tensors: Sequence[StoredTensor], *, packs: bool) -> None:
    """Write `tensors` to `file`, and compare what can be read from it with `tensors`, bit by bit."""
    temporary = file.with_name(f".{file.name}.part")
    try:
        written = _packed(files, tensors) if packs else {tensor.key: files.read(tensor) for tensor in tensors}
        save_file(written, temporary, {"format": "pt"})
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        del written
        with safe_open(temporary, framework="pt") as opened:
            keys = set(opened.keys())
            for tensor in tensors:
                original = files.read(tensor)
                formula = _formula(tensor)
                roles = {role: tensor.key + suffix for role, suffix in lossless_suffixes(formula.number).items()}
                if tensor.key in keys:
                    copy = opened.get_tensor(tensor.key)
                else:
                    copy = torch.empty_like(original)
                    stored = {role: opened.get_tensor(key) for role, key in roles.items()}
                    batches = {role: value if copy.dim() == 3 else value[None] for role, value in stored.items()}
                    decode_matrices(formula, batches, copy if copy.dim() == 3 else copy[None])
                if not torch.equal(_bytes(copy), _bytes(original)):
                    text = f"{file}: {tensor.key} was read back with other bytes; the disk or the memory is faulty"
                    raise CheckpointError(text, path=file, name=tensor.key)
        os.replace(temporary, file)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}", name="output", path=file) from error
    finally:
        temporary.unlink(missing_ok=True)


def _packed(files: CheckpointFiles, tensors: Sequence[StoredTensor]) -> dict[str, torch.Tensor]:
    """Return the packed tensors of all matrices by key, and those that packing does not make smaller as they are.

    Matrices of one shape have exponents of one length, because experts are stacked.
    """
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.shape[-2:], tensor.dtype].append(tensor)
    written: dict[str, torch.Tensor] = {}
    for group in groups.values():
        formula = _formula(group[0])
        encoded = {tensor.key: [formula.encode(matrix) for matrix in _as_stack(files.read(tensor))] for tensor in group}
        longest = max(len(matrix[Role.EXPONENTS]) for matrices in encoded.values() for matrix in matrices)
        first = encoded[group[0].key][0]
        matrix_bytes = group[0].nbytes // len(encoded[group[0].key])
        if first[Role.VALUES].numel() + longest >= matrix_bytes:
            written |= {tensor.key: files.read(tensor) for tensor in group}
            continue
        for tensor in group:
            matrices = [formula.padded(matrix, longest) for matrix in encoded.pop(tensor.key)]
            for role, suffix in lossless_suffixes(formula.number).items():
                stack = torch.stack([matrix[role] for matrix in matrices])
                written[tensor.key + suffix] = stack if len(tensor.shape) == 3 else stack[0]
    return written


def _formula(tensor: StoredTensor) -> LosslessFormula:
    return LosslessFormula(_NUMBERS.get(tensor.dtype, "bf16"))


def _as_stack(matrices: torch.Tensor) -> torch.Tensor:
    return matrices if matrices.dim() == 3 else matrices[None]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _stored_sizes(file: Path) -> Mapping[str, int]:
    """Return the bytes of each tensor in `file`, by key."""
    return {tensor.key: tensor.nbytes for tensor in CheckpointFiles([file])}


def _finish(source: Path, target: Path, weight_map: Mapping[str, str]) -> None:
    """Write the index, copy the tokenizer and other small files, and write the config."""
    _write_json(target / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and file.name not in (INDEX_FILE, CONFIG_FILE):
            shutil.copyfile(file, target / file.name)
    config = read_json(source / CONFIG_FILE, dict)
    quantization = {"quant_method": PACKED_METHOD, "format": "lossless"}
    _write_json(target / CONFIG_FILE, {**config, "quantization_config": quantization})


def _write_json(file: Path, value: object) -> None:
    temporary = file.with_name(f".{file.name}.part")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
    os.replace(temporary, file)
