"""Damaged quantised checkpoints: a clear error, or the numbers of the undamaged one, and never anything else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import MoepassError
from tests.helpers.models.quantized_checkpoints import FORMS, save_quantized
from tests.helpers.models.tiny import tiny_model
from tests.helpers.mutants.random_cases import times

WEIGHTS = "model.safetensors"
# Junk in place of a value of the configuration. 25 for a block of 24 and other meaningful values are no damage.
JUNK = st.sampled_from([None, "x", -1, 0, [], {}, 1.5, True, [0, 0], ["x"], 10**30, 3])
# These choose between formulas for tensors of the same names and shapes, so that nothing contradicts them.
MEANINGFUL = ("checkpoint_format", "weight_block_size")
# Forms whose tensors have the same names, shapes and dtypes.
ALIKE = (("gptq", "gptq, version 2", "gptq, ordered by activations"),)

Weights = dict[str, torch.Tensor]


def _quantised(weights: Weights, draw: st.DrawFn) -> str:
    """Draw the key of a tensor of a quantised expert."""
    return draw(st.sampled_from(sorted(key for key in weights if ".experts." in key)))


def _drop(weights: Weights, key: str, draw: st.DrawFn) -> None:
    del weights[key]


def _rename(weights: Weights, key: str, draw: st.DrawFn) -> None:
    ending = draw(st.sampled_from(["_x", "", "s", ".weight", "_scale"]))
    weights[key.removesuffix("e") + ending] = weights.pop(key)


def _retype(weights: Weights, key: str, draw: st.DrawFn) -> None:
    """Let the bytes of the tensor be numbers of another type. Scales may be of any floating type."""
    value = weights[key]
    types = {
        1: [torch.int8, torch.uint8, torch.float8_e5m2, torch.float8_e4m3fn],
        2: [torch.int16, torch.float16],
        4: [torch.int32, torch.float32],
        8: [torch.int64, torch.float64],
    }[value.dtype.itemsize]
    dtype = draw(st.sampled_from([other for other in types if other != value.dtype]))
    if not (value.is_floating_point() and dtype.is_floating_point):
        weights[key] = value.view(dtype)


def _reshape(weights: Weights, key: str, draw: st.DrawFn) -> None:
    value = weights[key]
    shapes = [value.flatten(), value.unsqueeze(0), value.unsqueeze(-1), value.mT if value.dim() > 1 else value]
    for dim in range(value.dim()):
        shapes += [value.narrow(dim, 0, value.shape[dim] - 1), torch.cat([value, value.narrow(dim, 0, 1)], dim)]
    changed = [other for other in shapes if other.shape != value.shape]
    weights[key] = draw(st.sampled_from(changed)).contiguous()


def _make_infinite(weights: Weights, key: str, draw: st.DrawFn) -> None:
    """Make a scale NaN or infinite."""
    value = weights[key]
    if "scale" not in key or not value.numel():
        return
    position = draw(st.integers(0, value.numel() - 1))
    if value.dtype.itemsize == 1:
        nan = 255 if value.dtype in (torch.uint8, torch.float8_e8m0fnu) else 127
        value.view(torch.uint8).view(-1)[position] = nan
    elif value.is_floating_point():
        value.view(-1)[position] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))


def _swap(weights: Weights, key: str, draw: st.DrawFn) -> None:
    """Exchange two tensors of different sizes or dtypes."""
    value = weights[key]
    unlike = [
        name for name, other in sorted(weights.items()) if (other.numel(), other.dtype) != (value.numel(), value.dtype)
    ]
    other = draw(st.sampled_from(unlike))
    weights[key], weights[other] = weights[other], value


TENSOR_DAMAGES = (_drop, _rename, _retype, _reshape, _make_infinite, _swap)


def _damage_tensor(folder: Path, draw: st.DrawFn) -> None:
    weights = load_file(folder / WEIGHTS)
    draw(st.sampled_from(TENSOR_DAMAGES))(weights, _quantised(weights, draw), draw)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def _damage_header(folder: Path, draw: st.DrawFn) -> None:
    """Change a byte of the header, which has names, dtypes, shapes and offsets."""
    data = bytearray((folder / WEIGHTS).read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[draw(st.integers(0, 7 + length))] = draw(st.integers(0, 255))
    (folder / WEIGHTS).write_bytes(bytes(data))


def _cut_file(folder: Path, draw: st.DrawFn) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: draw(st.integers(0, len(data) - 1))])


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else []
    return [path] * bool(path) + [longer for name, inner in items for longer in _paths(inner, (*path, name))]


def _damage_config(form: str, folder: Path, draw: st.DrawFn) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    if draw(st.booleans()):
        alike = next((names for names in ALIKE if form in names), (form,))
        other = draw(st.sampled_from([name for name in FORMS if name not in alike]))
        config["quantization_config"] = dict(FORMS[other].config)
    else:
        *parents, last = draw(st.sampled_from([path for path in _paths(quantization) if path[-1] not in MEANINGFUL]))
        section = quantization
        for name in parents:
            section = section[name]
        if draw(st.booleans()):
            del section[last]
        else:
            section[last] = draw(JUNK)
    (folder / "config.json").write_text(json.dumps(config))


@dataclasses.dataclass(frozen=True, repr=False)
class Checkpoints:
    """A checkpoint in every form: its folder, and the weights of the model that it loads as."""

    forms: dict[str, tuple[Path, Weights]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folders = {}
    for number, (form, published) in enumerate(FORMS.items()):
        folder = tmp_path_factory.mktemp(f"form{number}")
        model = tiny_model(published.family, dtype=torch.bfloat16, num_hidden_layers=1)
        quantised, plain = save_quantized(model, published, folder)
        folders[form] = quantised, load_model(plain).state_dict()
    return Checkpoints(folders)


@pytest.mark.slow
@settings(max_examples=times(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_checkpoint_is_an_error_or_changes_nothing(
    data: st.DataObject, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> None:
    form = data.draw(st.sampled_from(sorted(FORMS)))
    source, expected = checkpoints.forms[form]
    folder = tmp_path_factory.mktemp("damaged")
    try:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        how = data.draw(st.sampled_from(["tensor", "tensor", "header", "file", "config"]))
        if how == "tensor":
            _damage_tensor(folder, data.draw)
        elif how == "header":
            _damage_header(folder, data.draw)
        elif how == "file":
            _cut_file(folder, data.draw)
        else:
            _damage_config(form, folder, data.draw)
        with contextlib.suppress(MoepassError):
            state = load_model(folder).state_dict()
            assert state.keys() == expected.keys()
            for name, value in state.items():
                assert torch.equal(value, expected[name]), name
    finally:
        shutil.rmtree(folder)
