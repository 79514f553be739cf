"""Loading of models: at once, or built from unread tensors, whose experts can then be read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.checkpoint.checkpoint_folders import (
    CONFIG_FILE,
    check_numbers,
    load_config,
    quiet_transformers,
)
from moepass.models.checkpoint.file_stamp import FileStamps
from moepass.models.checkpoint.model_classes import class_options, model_class_of
from moepass.models.checkpoint.unread_tensors import UnreadTensor, unread
from moepass.models.checkpoint.weight_files import (
    INDEX_FILE,
    PACKED_INDEX_FILE,
    check_loading,
    check_type,
    check_weight_files,
    loading_problem,
    one_line,
    read_json,
    weight_files,
)
from moepass.models.errors import CheckpointError, InputError
from moepass.models.layouts.published import Quantization, read_quantization

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_GENERATION_FILE = "generation_config.json"
# ModelOpt writes its configuration into this file, and only newer versions also into the model's configuration.
_MODELOPT_FILE = "hf_quant_config.json"
_FILES = (CONFIG_FILE, INDEX_FILE, PACKED_INDEX_FILE, _GENERATION_FILE, _MODELOPT_FILE)


def load_model(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the model of a checkpoint folder on the CPU: eval mode, no key-value cache, no gradients.

    `dtype` is the dtype of the weights, by default the config's. Quantised weights are decoded. Raises CheckpointError
    if files are missing, truncated or not safetensors; if weights are missing, unexpected, or do not have the shapes of
    the config; if a file changes while it is read; or if the quantisation is unknown.
    """
    stamps = FileStamps(folder / name for name in _FILES)
    config = load_config(folder)
    if _pop_quantization(folder, config) is not None:
        files, model = build_unread(folder, dtype)
        read_weights(model, torch.device("cpu"))
        files.check()
        return model
    check_type(f"{folder / CONFIG_FILE}: dtype", config.dtype)
    for file in weight_files(folder):
        stamps.check(file)
    check_numbers(folder, check_weight_files(folder, is_quantised=False))
    # transformers reads the files.
    model = _built(folder, config, dtype, "grouped_mm", folder, local_files_only=True, use_safetensors=True)
    stamps.check_all()
    return model


def is_quantized(folder: Path) -> bool:
    """Return whether the checkpoint is quantised. Raises CheckpointError if its configuration cannot be read."""
    return _pop_quantization(folder, load_config(folder)) is not None


def build_unread(
    folder: Path, dtype: torch.dtype | None, experts_implementation: str = "grouped_mm"
) -> tuple[CheckpointFiles, PreTrainedModel]:
    """Return the files of a checkpoint, and its model, built by transformers from unread tensors.

    Quantised matrices are tensors in `dtype`, by default the configuration's, that are decoded when they are read.
    Raises CheckpointError, and InputError if a conversion of transformers needs the values of weights.
    """
    stamps = FileStamps(folder / name for name in _FILES)
    config = load_config(folder)
    quantization = _pop_quantization(folder, config)
    check_type(f"{folder / CONFIG_FILE}: dtype", config.dtype)
    check_weight_files(folder, quantization is not None)
    files = CheckpointFiles(weight_files(folder), stamps)
    if quantization is not None:
        # Without a dtype transformers would take that of some stored tensor, and matrices are decoded to one as well.
        dtype = dtype or config.dtype or config.get_text_config().dtype or torch.bfloat16
    tensors = unread(files, quantization, dtype or torch.bfloat16, str(folder))
    check_numbers(folder, sum(tensor.numel() for tensor in tensors.values()))
    model = _built(folder, config, dtype, experts_implementation, None, state_dict=tensors)
    _name_after(model, folder)
    return files, model


def _built(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    experts_implementation: str,
    source: Path | None,
    **options: Any,
) -> PreTrainedModel:
    """Return the model of `config` that transformers builds from `source` and `options`; errors name `folder`.

    Raises CheckpointError if the weights do not fit the config, and InputError if a conversion needs unread values.
    """
    model_class = model_class_of(config)
    try:
        with quiet_transformers():
            model, info = model_class.from_pretrained(
                source,
                config=config,
                dtype="auto" if dtype is None else dtype,
                # Mismatches are then returned in `info`, and refused below in one line.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
                **options,
                **class_options(model_class, experts_implementation),
            )
    except InputError as error:
        raise InputError(
            f"{folder}: weights of family {config.model_type!r} cannot be read one by one: {error}; use "
            "from_pretrained, then moepass.offload_experts",
            path=folder,
        ) from error
    except Exception as error:  # transformers raises many types if the files do not fit the config
        raise CheckpointError(f"{folder} cannot be loaded: {loading_problem(error)}", path=folder) from error
    check_loading(folder, info)
    built: PreTrainedModel = model
    built.requires_grad_(False)
    return built.eval()


def read_weights(model: nn.Module, device: torch.device) -> None:
    """Read every weight that has not been read yet, and move the model to `device`. Tied weights stay tied."""
    read: dict[int, torch.Tensor] = {}
    holders: list[dict[str, Any]] = [held for item in model.modules() for held in (item._parameters, item._buffers)]
    for tensors in holders:
        for name, tensor in tensors.items():
            if not isinstance(tensor, UnreadTensor):
                continue
            if id(tensor) not in read:
                numbers = tensor.recipe.read().to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                read[id(tensor)] = nn.Parameter(numbers, requires_grad=False) if is_parameter else numbers
            tensors[name] = read[id(tensor)]
    if device.type != "cpu":
        model.to(device)  # moves buffers that are not in the checkpoint


def _pop_quantization(folder: Path, config: PreTrainedConfig) -> Quantization | None:
    """Return how the checkpoint is quantised, and remove it from `config`; None if it is not quantised.

    transformers then builds the unquantised model. Raises CheckpointError if moepass cannot decode the weights.
    """
    quantization: Quantization | None = None
    model_type = config.get_text_config().model_type
    for section in (config, config.get_text_config()):
        values = getattr(section, "quantization_config", None)
        if values:
            values = values.to_dict() if hasattr(values, "to_dict") else values
            quantization = read_quantization(values, model_type, str(folder / CONFIG_FILE))
            del section.quantization_config
    file = folder / _MODELOPT_FILE
    if quantization is None and file.is_file():
        values = read_json(file, dict).get("quantization")
        values = {**values, "quant_method": "modelopt"} if isinstance(values, Mapping) else values
        quantization = read_quantization(values, model_type, str(file))
    return quantization


def _name_after(model: PreTrainedModel, folder: Path) -> None:
    """Set the name and the generation config of `model`, as from_pretrained does."""
    from transformers import GenerationConfig

    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / _GENERATION_FILE).is_file() and model.can_generate():
        try:
            with quiet_transformers():
                model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises many types for a malformed file
            file = folder / _GENERATION_FILE
            raise CheckpointError(f"{file} cannot be read: {one_line(error)}", path=file) from error
