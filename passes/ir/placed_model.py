"""Record of a model whose experts were moved to their home, for the plans of its graphs."""

from __future__ import annotations

import dataclasses

from moepass.models.sizes.architecture import Architecture
from moepass.passes.ir.planner_decisions import Decisions, DeviceMemory
from moepass.passes.machine.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class PlacedModel:
    """The decisions for a model, and what its graphs need to plan consistently with them.

    Attributes:
        banks: names of the streamed banks, each with the number of its layer
        weights: bytes on the device that are independent of the decisions, without activations
        bank_bytes: bytes of resident banks and of shards on the device
        architecture: sizes of the model; None if no formula covers them
        hardware: the machine, with the emulated links of the model; None without a profile
        unknown: why the architecture or the hardware is missing
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
