"""What memory buys: the saturation threshold for every number of layers whose experts stay on the device.

A bank that stays need not be moved, and its layer's computation hides the transfers of others: with R of L banks at
rest, what moves in the mean over layers is (L - R) / L of a bank.
"""

from __future__ import annotations

import dataclasses

from moepass.passes.planner.forecast import Forecast
from moepass.passes.planner.model_problem import resting_memory, threshold

_SLOTS = 2
_MOST_POINTS = 9


@dataclasses.dataclass(frozen=True)
class ThresholdPoint:
    """With `resident_layers` banks at rest beside two slots: bytes on one device, and tokens per rank and step."""

    resident_layers: int
    memory_bytes: float
    tokens: int


def threshold_curve(planned: Forecast) -> tuple[ThresholdPoint, ...]:
    """From no bank at rest to all of them, in about equal steps; whether the memory is there is not asked."""
    setting = planned.setting
    architecture = setting.architecture
    layer, count = architecture.typical_moe_layer, len(architecture.moe_layers)
    assert layer.experts is not None
    nbytes = setting.bank(layer.experts).slot_bytes
    resting, gamma = resting_memory(setting, planned.home).peak_bytes, planned.saturation.values["gamma"]
    points = []
    for resident in sorted({round(step * count / (_MOST_POINTS - 1)) for step in range(_MOST_POINTS)}):
        streamed = count - resident
        tokens = threshold(setting, layer, planned.transfer_seconds * streamed / count, gamma).tokens
        slots = min(_SLOTS, streamed)
        points.append(ThresholdPoint(resident, resting + (slots + resident) * nbytes, tokens))
    return tuple(points)
