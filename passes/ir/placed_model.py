"""A model whose experts were brought to their home: what was decided then, and what its graphs need to plan alike."""

from __future__ import annotations

import dataclasses

from moepass.models.sizes.architecture import Architecture
from moepass.passes.ir.decisions import Decisions, DeviceMemory
from moepass.passes.machine.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class PlacedModel:
    """`banks` are those that are streamed, by name, with the number of the layer of each.

    `architecture` is None where no formula knows the model's sizes, `hardware` where no profile is known; `unknown`
    then says so. Links of `hardware` are emulated where those of the model are. `weights` are the bytes that rest on
    the device whatever is decided, without activations; `bank_bytes` those of resident banks and of shards there.
    """

    decisions: Decisions
    banks: tuple[tuple[str, int], ...]
    weights: DeviceMemory
    bank_bytes: int
    dtype: str
    architecture: Architecture | None = None
    hardware: Hardware | None = None
    transport: str = "pull"
    unknown: str = ""
