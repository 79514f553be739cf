"""Home `host`, and the protocol of packers, which bring the banks of a model to a home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from moepass.runtime.banks.banks import Bank, pack_bank
from moepass.runtime.transfer.home_protocol import Home


class Packer(Protocol):
    """The path of a model's banks to a home: call `agree`, then `pack` for each bank, then `connect`."""

    @property
    def home(self) -> Home:
        """The home that the banks are readable from after `connect`."""

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raise an error if these banks, tensors [experts, ...] by bank name, cannot be packed. Changes nothing."""

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """Return a bank with this process's shard; the caller frees `tensors` right after."""

    def connect(self, banks: Sequence[Bank]) -> None:
        """Make the packed banks readable from the packer's home."""


class HostPacker:
    """A packer of complete banks in host memory, pinned if `pin`, so that a CUDA device can read them."""

    def __init__(self, pin: bool) -> None:
        self.home = Home()
        self.pin = pin

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Do nothing: every bank fits."""
        return

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """Return the complete bank."""
        return pack_bank(index, name, tensors, home="host", pin=self.pin)

    def connect(self, banks: Sequence[Bank]) -> None:
        """Do nothing: complete banks are readable at once."""
        return
