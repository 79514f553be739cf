"""Ranks take the GPUs of the machine in turn, and the CPU where there is none."""

from __future__ import annotations

import pytest
import torch

from moepass.models.errors import InputError
from moepass.runtime.offload.offload import rank_device


def _devices(monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, ranks: int) -> list[str]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return [str(rank_device(device, rank)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("gpus", "device", "devices"),
    [
        (0, "auto", ["cpu"] * 3),
        (1, "auto", ["cuda:0"] * 3),
        (2, "auto", ["cuda:0", "cuda:1", "cuda:0"]),
        (8, "cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        (8, "cuda:5", ["cuda:5"] * 3),
        (8, "cuda:0", ["cuda:0"] * 3),
        (8, "cpu", ["cpu"] * 3),
    ],
)
def test_ranks_take_the_gpus_in_turn(
    gpus: int, device: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _devices(monkeypatch, gpus, device, 3) == devices


@pytest.mark.parametrize(("gpus", "device"), [(0, "cuda"), (2, "cuda:2"), (2, "tpu")])
def test_absent_devices_are_refused(gpus: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^device is"):
        _devices(monkeypatch, gpus, device, 1)
