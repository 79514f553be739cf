"""Host memory of a machine: the banks that rest there, summed over all ranks."""

from __future__ import annotations

import dataclasses

from moepass.models.homes import home_named
from moepass.passes.planner.strategies import Setting, banks_bytes


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory on the machine of all ranks, while steps run.

    Attributes:
        available_bytes: None if the profile does not state it
        holds_devices: the machine computes on its CPU, so both numbers include the memory of the ranks as devices
    """

    needed_bytes: float
    available_bytes: float | None
    holds_devices: bool

    @property
    def fits(self) -> bool | None:
        """True if there is enough memory; None if the profile does not state it."""
        return None if self.available_bytes is None else self.needed_bytes <= self.available_bytes


def host_memory(setting: Setting, home: str, device_peak_bytes: float) -> HostMemory:
    """Return the host memory of asyncep with experts at rest in `home`.

    A machine holds banks in host memory once if they are sharded; else each rank holds complete ones.
    `device_peak_bytes` is the memory of each device.
    """
    hardware, banks = setting.hardware, banks_bytes(setting)
    record, available = home_named(home), hardware.host_memory_bytes
    needed = float((banks if record.is_spread else setting.ranks * banks) if record.rests_in == "host" else 0)
    if hardware.device_kind != "cpu":
        return HostMemory(needed, available.value if available is not None else None, False)
    total = available.value if available is not None else setting.ranks * hardware.memory_bytes.value
    return HostMemory(needed + setting.ranks * device_peak_bytes, total, True)
