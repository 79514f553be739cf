"""The folder of written banks: a complete file with the same sources is reused, and other files are written again."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import moepass
from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.checkpoint.unread_tensors import unread
from moepass.runtime.homes.disk.bank_files import BankFolder
from tests.helpers.graphs.error_fields import refused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="home disk locks its folder as Linux does")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Save a checkpoint file with stacked experts."""
    path = tmp_path / "weights.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(3, 4, 6, generator=generator).bfloat16() for name in ("up", "down")}, path)
    return path


def _transposed(weights: Path) -> Tensors:
    tensors = unread(CheckpointFiles([weights]))
    return {name: tensors[name].transpose(1, 2) for name in ("up", "down")}


def _inode(folder: Path, name: str = "layer") -> int:
    return (folder / f"{name}.safetensors").stat().st_ino


def _check_content(file: Path, weights: Path) -> None:
    written = load_file(file)
    for name, expected in load_file(weights).items():
        assert torch.equal(written[f"layer.{name}"], expected.transpose(1, 2))


def test_a_written_bank_is_a_safetensors_file(weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "banks"
    files = BankFolder(folder).write({"layer": _transposed(weights)})
    assert files["layer"].path == folder / "layer.safetensors"
    _check_content(files["layer"].path, weights)
    with safe_open(files["layer"].path, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
    assert not list(folder.glob(".*part"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_in_memory_are_written_as_they_are_seen(dtype: torch.dtype, tmp_path: Path) -> None:
    up = torch.randn(4, 3, 5).to(dtype).transpose(1, 2)
    tensors = {"up": torch.nn.Parameter(up, requires_grad=False), "bias": torch.randn(4).to(dtype)}
    file = BankFolder(tmp_path).write({"a/b": tensors})["a/b"]
    assert file.path.parent == tmp_path
    written = load_file(file.path)
    assert torch.equal(written["a/b.up"].float(), up.float())
    assert torch.equal(written["a/b.bias"].float(), tensors["bias"].float())


def test_a_bank_of_the_same_sources_is_reused(weights: Path, tmp_path: Path) -> None:
    folder = BankFolder(tmp_path / "banks")
    folder.write({"layer": _transposed(weights)})
    inode = _inode(folder.folder)
    folder.write({"layer": _transposed(weights)})
    assert _inode(folder.folder) == inode


def _double(weights: Path) -> None:
    stored = {name: tensor * 2 for name, tensor in load_file(weights).items()}
    replacement = weights.with_name("other")
    save_file(stored, replacement)
    os.replace(replacement, weights)


def _double_with_the_old_time(weights: Path) -> None:
    status = weights.stat()
    _double(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        _double, _double_with_the_old_time, lambda weights: os.utime(weights, (1, 1)),
    ],
)  # fmt: skip
def test_a_bank_of_other_files_is_written_again(weights: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = BankFolder(tmp_path / "banks")
    held = folder.write({"layer": _transposed(weights)})["layer"]
    inode = _inode(folder.folder)
    change(weights)
    folder.write({"layer": _transposed(weights)})
    assert _inode(folder.folder) != inode
    _check_content(folder.folder / "layer.safetensors", weights)
    held.check()  # readers of the old file continue


def test_a_bank_with_another_recipe_is_written_again(weights: Path, tmp_path: Path) -> None:
    folder = BankFolder(tmp_path / "banks")
    folder.write({"layer": {name: tensor.float() for name, tensor in _transposed(weights).items()}})
    folder.write({"layer": _transposed(weights)})
    _check_content(folder.folder / "layer.safetensors", weights)


def test_a_model_in_memory_is_always_written(tmp_path: Path) -> None:
    folder = BankFolder(tmp_path)
    for value in (1.0, 2.0):
        folder.write({"layer": {"up": torch.full((2, 3), value)}})
        assert load_file(tmp_path / "layer.safetensors")["layer.up"].unique().tolist() == [value]


@pytest.mark.parametrize("content", [b"", b"something else", None])
def test_files_of_others_are_not_overwritten(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    if content is None:
        save_file({"layer.up": torch.zeros(2, 3)}, path)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with refused(moepass.InputError, path=path):
        BankFolder(tmp_path).write({"layer": {"up": torch.zeros(2, 3)}})
    assert path.read_bytes() == before


def test_a_folder_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=47)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with refused(moepass.InputError, name="folder", value=47, expected=48, path=tmp_path):
        BankFolder(tmp_path).write({name: {"up": torch.zeros(2, 3)} for name in ("a", "b")})
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(moepass.InputError, match=r"folder .*file.* cannot be written to: (File exists|Not a dir)"):
        BankFolder(tmp_path / "file").write({"layer": {"up": torch.zeros(2, 3)}})


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    folder = BankFolder(tmp_path)
    folder.write({"layer": {"up": torch.ones(2, 3)}})
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(moepass.InputError, match=r"folder .* cannot be written to: No space left on device"):
        folder.write({"layer": {"up": torch.zeros(2, 3)}})
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["layer.safetensors"]
    assert load_file(tmp_path / "layer.safetensors")["layer.up"].sum() == 6
    assert not list(tmp_path.glob(".*part"))


def test_a_checkpoint_that_changes_while_it_is_read_is_an_error(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def change(descriptor: int) -> None:
        fsync(descriptor)
        os.utime(weights, (1, 1))

    monkeypatch.setattr(os, "fsync", change)
    with refused(moepass.CheckpointError, name="layer"):
        BankFolder(tmp_path / "banks").write({"layer": _transposed(weights)})
    assert not list((tmp_path / "banks").glob("*.safetensors"))
