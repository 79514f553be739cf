"""The weight files of a checkpoint folder: their names, and checks that they are complete and fit the config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MOST_INDEX_BYTES, MOST_JSON_BYTES, TooLargeError, decode_json, read_limited

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Of packed checkpoints. transformers does not know it: it would load such a checkpoint with random experts.
PACKED_INDEX_FILE = "moepass.safetensors.index.json"
_LONGEST_NAME = 200
# Dtypes of quantised weights in safetensors files.
_EIGHT_BITS = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. Raises CheckpointError if files are missing."""
    single = folder / WEIGHTS_FILE
    index = folder / (PACKED_INDEX_FILE if (folder / PACKED_INDEX_FILE).is_file() else INDEX_FILE)
    if single.is_file():
        return [single]
    if index.is_file():
        weight_map = read_json(index, dict, MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map that says which file holds which weight", path=index)
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors") or len(name) > _LONGEST_NAME:
                text = f"{index} names {name!r}; it must be a .safetensors file in the same folder"
                raise CheckpointError(text, path=index, value=name, expected="a .safetensors file in the same folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {_some(missing)}, which {index.name} names", path=folder, expected=missing
            )
        return [folder / name for name in names]
    pickles = [name for name in _PICKLES if (folder / name).is_file()]
    if pickles:
        text = f"{folder} holds {pickles[0]}, a pickle, which moepass does not open; convert it to {WEIGHTS_FILE}"
        raise CheckpointError(text, path=folder, value=pickles[0], expected=WEIGHTS_FILE)
    raise CheckpointError(f"{folder} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE} exists", path=folder)


def check_weight_files(folder: Path, is_quantised: bool) -> int:
    """Check that every weight file is complete, and return the number of elements in all of them.

    Raises CheckpointError, also for 8-bit weights unless `is_quantised`: they would be read without their scales.
    """
    from safetensors import SafetensorError, safe_open

    numbers = 0
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118  it is no mapping
                    stored = opened.get_slice(key)
                    numbers += math.prod(stored.get_shape())
                    if not is_quantised and stored.get_dtype() in _EIGHT_BITS:
                        text = (
                            f"{file}: {key} is stored as {stored.get_dtype()}, and the config does not say how to "
                            "dequantise it; dequantise the weights, for example to bfloat16, and save them as a new "
                            "checkpoint"
                        )
                        raise CheckpointError(text, name=key, value=stored.get_dtype(), path=file)
        except (SafetensorError, OSError) as error:
            text = f"{file} ({file.stat().st_size} bytes) is truncated or not a safetensors file: {one_line(error)}"
            raise CheckpointError(text, path=file) from error
    return numbers


def check_type(name: str, dtype: torch.dtype | None) -> None:
    """Raise CheckpointError for weights in a dtype that moepass cannot compute in."""
    import torch

    if dtype not in (None, torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{name} is {dtype}, in which moepass cannot compute; dequantise the weights, for example to bfloat16, "
            "and save them as a new checkpoint",
            name=name,
            value=dtype,
        )


def check_loading(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise CheckpointError if transformers found that weights and config do not fit together.

    `info` is the result of `from_pretrained` with `output_loading_info`. Without this check transformers would continue
    with random weights, or without some layers.
    """
    if info.get("mismatched_keys"):
        name, shape, expected = sorted(info["mismatched_keys"])[0]
        text = f"{folder}: {name} has shape {list(shape)}, but the config asks for {list(expected)}" + _and_more(
            len(info["mismatched_keys"])
        )
        raise CheckpointError(text, name=name, value=tuple(shape), expected=tuple(expected), path=folder)
    if missing := sorted(info.get("missing_keys") or ()):
        text = f"{folder} lacks weights that the config asks for: {_some(missing)}"
        raise CheckpointError(text, path=folder, expected=missing)
    if unexpected := sorted(info.get("unexpected_keys") or ()):
        text = f"{folder} holds weights that the config does not use: {_some(unexpected)}"
        raise CheckpointError(text, path=folder, value=unexpected)
    if info.get("error_msgs"):
        raise CheckpointError(f"{folder} cannot be loaded: {one_line(info['error_msgs'])}", path=folder)


def read_json(file: Path, kind: type[Any], most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Return the value of type `kind` in a JSON file. Raises CheckpointError if it is malformed or too long."""
    try:
        return decode_json(read_limited(file, most_bytes), kind)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", path=file) from error
    except TooLargeError as error:
        raise CheckpointError(str(error), path=file, value=error.value, expected=error.expected) from error
    except InputError as error:
        raise CheckpointError(f"{file} is malformed: {error}", path=file) from error


def loading_problem(error: Exception) -> str:
    """Return why transformers could not load weights, for an error message."""
    if "automatic conversion" in str(error):  # it refers to a report that is one of the silenced warnings
        return (
            "the weights of single experts do not merge into one bank per layer; one of them is missing, or its shape "
            "differs from the others"
        )
    return one_line(error)


def one_line(error: object) -> str:
    """Return an error's text as one line of at most 200 characters, with whitespace collapsed."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _some(names: list[str]) -> str:
    return names[0] + _and_more(len(names))


def _and_more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
