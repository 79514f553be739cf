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
from moepass.models.layouts.elf import ElfFormula
from moepass.models.layouts.layout import Role
from moepass.models.layouts.lossless import LosslessFormula
from moepass.models.layouts.packed_floats import FLOAT_TYPES
from moepass.models.layouts.published import PACKED_METHOD, PACKED_NUMBERS, PackedFormat, packed_formula
from moepass.runtime.kernels.decoders import decode_matrices
from moepass.runtime.offload.offload import expert_parameters, find_expert_modules

_SOURCE_FILE = "moepass-pack.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

# A function of (bytes done so far, total bytes).
Progress = Callable[[int, int], object]
Formulas = Mapping[torch.dtype, LosslessFormula | ElfFormula]


@dataclasses.dataclass(frozen=True)
class PackReport:
    """Bytes of all expert matrices before and after packing, and of all other tensors.

    `largest_error` is the largest absolute error of an element; None if this process did not write all files.
    """

    expert_bytes: int
    packed_bytes: int
    dense_bytes: int
    largest_error: float | None


def pack_checkpoint(source: Path, target: Path, format: PackedFormat, progress: Progress) -> PackReport:
    """Write a copy of the checkpoint in the folder `source`, with its experts packed in `format`, to `target`.

    Matrices that would not become smaller are copied. Raises InputError if `target` contains other files or has too
    little space, and CheckpointError if `source` is quantised already, has no experts, or changes meanwhile.
    """
    numbers = PACKED_NUMBERS[format]
    if is_quantized(source):
        text = f"{source} is quantised or packed already; packing needs weights in {' or '.join(numbers)}"
        raise CheckpointError(text, path=source)
    files, model = build_unread(source, None)
    formulas = {FLOAT_TYPES[number].dtype: packed_formula(format, number) for number in numbers}
    layers = [
        [matrix for matrix in _matrices(expert_parameters(module).values()) if matrix.dtype in formulas]
        for module in find_expert_modules(model).values()
    ]
    experts = {matrix.key for matrices in layers for matrix in matrices}
    if not experts:
        text = f"{source} has no experts in {' or '.join(numbers)}, which {format} packing takes"
        raise CheckpointError(text, path=source)
    dense: dict[Path, list[StoredTensor]] = defaultdict(list)
    for tensor in files:
        if tensor.key not in experts:
            dense[tensor.file].append(tensor)
    total = sum(tensor.nbytes for tensor in files)
    weight_map: dict[str, str] = {}
    done = packed_bytes = 0
    errors: list[float | None] = []
    with _begun(source, target, format, files, total):
        for prefix, groups, packs in (("experts", layers, True), ("dense", list(dense.values()), False)):
            for number, tensors in enumerate(groups):
                name = f"{prefix}-{number:05d}.safetensors"
                is_new = not (target / name).exists()
                errors.append(_write(target / name, files, tensors, formulas if packs else {}) if is_new else None)
                sizes = _stored_sizes(target / name)
                weight_map |= dict.fromkeys(sizes, name)
                packed_bytes += sum(sizes.values()) if packs else 0
                done += sum(tensor.nbytes for tensor in tensors)
                progress(done, total)
        files.check()
        _finish(source, target, format, weight_map)
    expert_bytes = sum(matrix.nbytes for matrices in layers for matrix in matrices)
    written_errors = [error for error in errors if error is not None]
    largest_error = max(written_errors) if len(written_errors) == len(errors) else None
    return PackReport(expert_bytes, packed_bytes, total - expert_bytes, largest_error)


def _matrices(parameters: Iterable[torch.Tensor]) -> list[StoredTensor]:
    """Return the stored matrices, or stacks of matrices, that make up `parameters`, in the order of their keys."""
    stored = {
        item.tensor.key: item.tensor
        for parameter in parameters
        if isinstance(parameter, UnreadTensor) and parameter.dim() == 3
        for item in parameter.recipe.stored()
    }
    return [stored[key] for key in sorted(stored) if len(stored[key].shape) > 1]


@contextlib.contextmanager
def _begun(source: Path, target: Path, format: str, files: CheckpointFiles, needed_bytes: int) -> Iterator[None]:
    """Make the folder `target`, or check that an earlier process made it from the same files, and lock it."""
    digest = hashlib.blake2b(digest_size=16)
    for file, stamp in sorted({(tensor.file.resolve(), tensor.stamp) for tensor in files}, key=str):
        digest.update(f"{file} {stamp}\n".encode())
    made_of = {"source": str(source.resolve()), "format": format, "digest": digest.hexdigest()}
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
        text = (
            f"{target} was begun with other files, or in another format: {begun.get('source')} in "
            f"{begun.get('format')}; delete it, or name a new folder"
        )
        raise InputError(text, name="output", path=target, value=begun, expected=made_of)
    import fcntl  # only on platforms with POSIX locks

    with open(marker, "rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel unlocks it if the process is killed
        except BlockingIOError:
            raise InputError(f"another process is writing to {target}; wait for it", path=target) from None
        yield


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
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        del written
        largest_error = 0.0
        with safe_open(temporary, framework="pt") as opened:
            keys = set(opened.keys())
            for tensor in tensors:
                original, bound = files.read(tensor), 0.0
                if tensor.key in keys:
                    copy = opened.get_tensor(tensor.key)
                else:
                    formula, copy = formulas[tensor.dtype], torch.empty_like(original)
                    bound = formula.bound if isinstance(formula, ElfFormula) else 0.0
                    stored = {role: opened.get_tensor(tensor.key + end) for role, end in formula.suffixes.items()}
                    batches = {role: value if copy.dim() == 3 else value[None] for role, value in stored.items()}
                    decode_matrices(formula, batches, _as_stack(copy))
                error = _largest_error(copy, original)
                if not error <= bound:
                    text = f"{file}: {tensor.key} was read back with other bytes; the disk or the memory is faulty"
                    raise CheckpointError(text, path=file, name=tensor.key)
                largest_error = max(largest_error, error)
        os.replace(temporary, file)
        return largest_error
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}", name="output", path=file) from error
    finally:
        temporary.unlink(missing_ok=True)


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
        encoded = {tensor.key: [formula.encode(matrix) for matrix in _as_stack(files.read(tensor))] for tensor in group}
        longest = max(len(matrix[Role.SECTIONS]) for matrices in encoded.values() for matrix in matrices)
        first = encoded[group[0].key][0]
        matrix_bytes = group[0].nbytes // len(encoded[group[0].key])
        if first[Role.VALUES].numel() + longest >= matrix_bytes:
            written |= {tensor.key: files.read(tensor) for tensor in group}
            continue
        for tensor in group:
            matrices = [formula.padded(matrix, longest) for matrix in encoded.pop(tensor.key)]
            for role, suffix in formula.suffixes.items():
                stack = torch.stack([matrix[role] for matrix in matrices])
                written[tensor.key + suffix] = stack if len(tensor.shape) == 3 else stack[0]
    return written


def _as_stack(matrices: torch.Tensor) -> torch.Tensor:
    return matrices if matrices.dim() == 3 else matrices[None]


def _largest_error(copy: torch.Tensor, original: torch.Tensor) -> float:
    """Return the largest absolute error of an element; NaN if an element that is no finite number has other bits."""
    if torch.equal(_bytes(copy), _bytes(original)):
        return 0.0
    differs = (_bytes(copy) != _bytes(original)).unflatten(-1, (-1, original.dtype.itemsize)).any(-1)
    return float((copy[differs].double() - original[differs].double()).abs().max())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _stored_sizes(file: Path) -> Mapping[str, int]:
    """Return the bytes of each tensor in `file`, by key."""
    return {tensor.key: tensor.nbytes for tensor in CheckpointFiles([file])}


def _finish(source: Path, target: Path, format: str, weight_map: Mapping[str, str]) -> None:
    """Write the index, copy the tokenizer and other small files, and write the config."""
    _write_json(target / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and file.name not in (INDEX_FILE, CONFIG_FILE):
            shutil.copyfile(file, target / file.name)
    config = read_json(source / CONFIG_FILE, dict)
    quantization = {"quant_method": PACKED_METHOD, "format": format}
    _write_json(target / CONFIG_FILE, {**config, "quantization_config": quantization})


def _write_json(file: Path, value: object) -> None:
    temporary = file.with_name(f".{file.name}.part")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
    os.replace(temporary, file)
