"""Packing of a checkpoint: a copy of it whose expert matrices take fewer bytes.

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
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moepass.models.checkpoint.checkpoint_files import CheckpointFiles, StoredTensor
from moepass.models.checkpoint.checkpoint_folders import CONFIG_FILE, load_config
from moepass.models.checkpoint.load_model import build_unread, is_quantized
from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.checkpoint.weight_files import PACKED_INDEX_FILE, one_line, read_json
from moepass.models.errors import CheckpointError, InputError, one_of
from moepass.models.layouts.published import PACKED_METHOD, PACKED_NUMBERS, PackedFormat, packed_formulas
from moepass.models.layouts.weight_layout import PackedMatrixFormula
from moepass.runtime.kernels.decoders import decode_matrices
from moepass.runtime.kernels.encoders import encode_matrices
from moepass.runtime.offload.offload import expert_parameters, find_expert_modules

_SOURCE_FILE = "moepass-pack.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_WEIGHT_PATTERNS = (*(f"*{suffix}" for suffix in _WEIGHT_SUFFIXES), "*.index.json")

# A function of (bytes done so far, total bytes).
Progress = Callable[[int, int], object]
Formulas = Mapping[torch.dtype, PackedMatrixFormula]


@dataclasses.dataclass(frozen=True)
class PackReport:
    """Bytes of all expert matrices before and after packing, and of all other tensors.

    `unpacked_layers` have matrices that were copied because packing would not make them smaller. `largest_error` is the
    largest absolute error of an element; None if this process did not write all files.
    """

    expert_bytes: int
    packed_bytes: int
    dense_bytes: int
    unpacked_layers: int
    largest_error: float | None


def pack_checkpoint(source: Path, target: Path, format: PackedFormat, progress: Progress) -> PackReport:
    """Write a copy of the checkpoint in the folder `source`, with its experts packed in `format`, to `target`.

    Matrices that would not become smaller are copied, with all others of their shape in the same layer. Raises
    InputError if `target` contains other files or cannot be written to, and CheckpointError if `source` is quantised
    already, has no experts, or changes while it is read.
    """
    numbers = PACKED_NUMBERS[format]
    if is_quantized(source):
        text = f"{source} is quantised or packed already; {format} packing needs experts in {one_of(numbers)}"
        raise CheckpointError(text, path=source)
    files, model = build_unread(source, None)
    formulas: Formulas = packed_formulas(format)
    layers: list[list[StoredTensor]] = []
    experts: set[str] = set()
    for module in find_expert_modules(model).values():
        # Layers may share experts.
        matrices = [
            matrix for matrix in _matrices(expert_parameters(module).values(), formulas) if matrix.key not in experts
        ]
        experts |= {matrix.key for matrix in matrices}
        if matrices:
            layers.append(matrices)
    if not experts:
        text = (
            f"{source} has no experts that {format} packing takes: matrices of 2 or more experts per layer, stored and "
            f"computed in {one_of(numbers)}"
        )
        raise CheckpointError(text, path=source)
    dense: dict[Path, list[StoredTensor]] = defaultdict(list)
    for tensor in files:
        if tensor.key not in experts:
            dense[tensor.file].append(tensor)
    jobs: list[tuple[str, list[StoredTensor], Formulas]] = [
        *((f"experts-{number:05d}.safetensors", tensors, formulas) for number, tensors in enumerate(layers)),
        *((f"dense-{number:05d}.safetensors", tensors, {}) for number, tensors in enumerate(dense.values())),
    ]
    total = sum(tensor.nbytes for tensor in files)
    weight_map: dict[str, str] = {}
    errors: list[float | None] = []
    done = packed_bytes = unpacked_layers = 0
    with _writing(target), _locked(target):
        _begin(source, target, format, files, total)
        for name, tensors, formulas_of_file in jobs:
            is_new = not (target / name).exists()
            errors.append(_write(target / name, files, tensors, formulas_of_file) if is_new else None)
            sizes = {tensor.key: tensor.nbytes for tensor in CheckpointFiles([target / name])}
            weight_map |= dict.fromkeys(sizes, name)
            if formulas_of_file:
                packed_bytes += sum(sizes.values())
                unpacked_layers += not experts.isdisjoint(sizes)
            done += sum(tensor.nbytes for tensor in tensors)
            progress(done, total)
        files.check()
        _finish(source, target, format, weight_map, model.dtype)
    expert_bytes = sum(matrix.nbytes for matrices in layers for matrix in matrices)
    written_errors = [error for error in errors if error is not None]
    largest_error = max(written_errors) if len(written_errors) == len(errors) else None
    return PackReport(expert_bytes, packed_bytes, total - expert_bytes, unpacked_layers, largest_error)


def _matrices(parameters: Iterable[torch.Tensor], formulas: Formulas) -> list[StoredTensor]:
    """Return the stored matrices, or stacks of matrices, that make up `parameters` without a conversion, by key."""
    stored = {
        item.tensor.key: item.tensor
        for parameter in parameters
        if isinstance(parameter, UnreadTensor) and parameter.dim() == 3 and parameter.dtype in formulas
        for item in parameter.recipe.stored()
        if item.dtype == parameter.dtype and len(item.tensor.shape) > 1
    }
    return [stored[key] for key in sorted(stored)]


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Raise InputError for errors of writing to the folder `target`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"{target} cannot be written to: {reason}", name="output", path=target) from error


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Make the folder `target`, and lock it. The kernel unlocks it if the process is killed."""
    import fcntl  # only on platforms with POSIX locks

    target.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is writing to {target}; wait for it", path=target) from None
        yield
    finally:
        os.close(descriptor)


def _begin(source: Path, target: Path, format: str, files: CheckpointFiles, needed_bytes: int) -> None:
    """Check that the folder `target` is empty, or was begun for the same files, and has enough space."""
    digest = hashlib.blake2b(digest_size=16)
    for file, stamp in sorted({(tensor.file.resolve(), tensor.stamp) for tensor in files}, key=str):
        digest.update(f"{file} {stamp}\n".encode())
    made_of = {"source": source.resolve().name, "format": format, "digest": digest.hexdigest()}
    marker = target / _SOURCE_FILE
    if marker.exists():
        begun = read_json(marker, dict)
        if begun != made_of:
            text = (
                f"{target} was begun for {begun.get('source')} in {begun.get('format')} format, or {source} has "
                "changed since; delete it, or name a new folder"
            )
            raise InputError(text, name="output", path=target, value=begun, expected=made_of)
    elif any(not _is_unfinished(file) for file in target.iterdir()):
        text = f"{target} is not empty, and `moepass pack` did not write it; name a new folder"
        raise InputError(text, name="output", path=target)
    free = shutil.disk_usage(target).free + sum(file.stat().st_size for file in target.glob("*.safetensors"))
    if free < needed_bytes:
        text = f"{target} has room for {free} bytes; packing {source} needs up to {needed_bytes} bytes"
        raise InputError(text, name="output", value=free, expected=needed_bytes)
    _write_json(marker, made_of)


def _is_unfinished(file: Path) -> bool:
    return file.name.startswith(".") and file.name.endswith(".part")


def _write(file: Path, files: CheckpointFiles, tensors: Sequence[StoredTensor], formulas: Formulas) -> float:
    """Write `tensors` to `file`, read them back, and return the largest absolute error of an element.

    Raises CheckpointError if the error exceeds the bound of the formula, which is 0 for all but ELF.
    """
    temporary = file.with_name(f".{file.name}.part")
    try:
        written = (
            _packed(files, tensors, formulas) if formulas else {tensor.key: files.read(tensor) for tensor in tensors}
        )
        save_file(written, temporary, {"format": "pt"})
        with open(temporary, "rb") as complete:
            os.fsync(complete.fileno())
        del written
        largest_error = 0.0
        with safe_open(temporary, framework="pt") as opened:
            keys = set(opened.keys())
            for tensor in tensors:
                formula = None if tensor.key in keys else formulas[tensor.dtype]
                error = _largest_error(_read_back(opened, tensor, formula), files.read(tensor))
                if not error <= (formula.bound if formula else 0.0):
                    text = f"{file}: {tensor.key} was read back with other bytes; the disk or the memory is faulty"
                    raise CheckpointError(text, path=file, name=tensor.key)
                largest_error = max(largest_error, error)
        shutil.copymode(tensors[0].file, temporary)  # safetensors writes files that other users cannot read
        os.replace(temporary, file)
        return largest_error
    finally:
        temporary.unlink(missing_ok=True)


def _read_back(opened: Any, tensor: StoredTensor, formula: PackedMatrixFormula | None) -> torch.Tensor:
    """Return the numbers of `tensor` in the written file `opened`, which packs it by `formula` if there is one."""
    if formula is None:
        copy: torch.Tensor = opened.get_tensor(tensor.key)
        return copy
    stored = {role: opened.get_tensor(tensor.key + suffix) for role, suffix in formula.suffixes.items()}
    is_stack = len(tensor.shape) == 3
    batches = stored if is_stack else {role: values[None] for role, values in stored.items()}
    decoded = torch.empty(tensor.shape, dtype=tensor.dtype)
    decode_matrices(formula, batches, decoded if is_stack else decoded[None])
    return decoded


def _packed(files: CheckpointFiles, tensors: Sequence[StoredTensor], formulas: Formulas) -> dict[str, torch.Tensor]:
    """Return the packed tensors of all matrices by key, and those that packing does not make smaller as they are.

    Matrices of one shape have sections of one length, because experts are stacked.
    """
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.shape[-2:], tensor.dtype].append(tensor)
    written: dict[str, torch.Tensor] = {}
    for group in groups.values():
        formula = formulas[group[0].dtype]
        rows, columns = group[0].shape[-2:]
        counts = [math.prod(tensor.shape[:-2]) for tensor in group]
        matrices = (matrix for tensor in group for matrix in _as_stack(files.read(tensor)))
        encoded = encode_matrices(formula, matrices, (sum(counts), rows, columns))
        stored = encoded.stored(encoded.section_bytes)
        if sum(values.nbytes for values in stored.values()) >= sum(tensor.nbytes for tensor in group):
            written |= {tensor.key: files.read(tensor) for tensor in group}
            continue
        for role, suffix in formula.suffixes.items():
            for tensor, stack in zip(group, stored[role].split(counts), strict=True):
                written[tensor.key + suffix] = (stack if len(tensor.shape) == 3 else stack[0]).clone()
    return written


def _as_stack(matrices: torch.Tensor) -> torch.Tensor:
    return matrices if matrices.dim() == 3 else matrices[None]


def _largest_error(copy: torch.Tensor, original: torch.Tensor) -> float:
    """Return the largest absolute error of an element; NaN if an element that is no finite number has other bits."""
    if torch.equal(_bytes(copy), _bytes(original)):
        return 0.0
    differs = (_bytes(copy) != _bytes(original)).view(-1, original.dtype.itemsize).any(-1)
    return float((copy.flatten()[differs].double() - original.flatten()[differs].double()).abs().max())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _finish(source: Path, target: Path, format: str, weight_map: Mapping[str, str], dtype: torch.dtype) -> None:
    """Write the index, copy the tokenizer and other files, and write the config."""
    _write_json(target / PACKED_INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    for path in source.iterdir():
        if (
            path.name == CONFIG_FILE
            or path.name.startswith(".")
            or path.name.endswith((".index.json", *_WEIGHT_SUFFIXES))
        ):
            continue
        if path.is_file():
            shutil.copyfile(path, target / path.name)
        elif path.is_dir() and not target.resolve().is_relative_to(path.resolve()):
            shutil.copytree(
                path, target / path.name, ignore=shutil.ignore_patterns(*_WEIGHT_PATTERNS), dirs_exist_ok=True
            )
    config = read_json(source / CONFIG_FILE, dict)
    if load_config(source).dtype is None:
        config["dtype"] = str(dtype).removeprefix("torch.")  # otherwise that of the weights, which are bytes now
    quantization = {"quant_method": PACKED_METHOD, "format": format}
    _write_json(target / CONFIG_FILE, {**config, "quantization_config": quantization})


def _write_json(file: Path, value: object) -> None:
    temporary = file.with_name(f".{file.name}.part")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
    os.replace(temporary, file)
