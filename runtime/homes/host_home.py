"""Home `host`, and what every home has: a packer, which brings the banks of a model there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from moepass.runtime.banks.banks import Bank, pack_bank
from moepass.runtime.transfer.home_protocol import Home


class Packer(Protocol):
    """Brings the banks of a model to a home: `agree`, then `pack` for each, then `connect`."""

    @property
    def home(self) -> Home: ...

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raise where these banks, given as name and tensors [experts, ...], cannot be packed. Changes nothing."""

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """The part of a bank that stays in this process; its tensors are freed right after."""

    def connect(self, banks: Sequence[Bank]) -> None:
        """Make the packed banks readable from the packer's home."""


class HostPacker:
    """Complete banks in host memory, pinned where a CUDA device will read them."""

    def __init__(self, pin: bool) -> None:
        self.home = Home()
        self.pin = pin

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        return

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        return pack_bank(index, name, tensors, home="host", pin=self.pin)

    def connect(self, banks: Sequence[Bank]) -> None:
        return
