"""The hardware preset of the current GPU."""

from __future__ import annotations

import torch

from moepass.passes.machine.hardware import Hardware
from moepass.runtime.profiles.hardware_profiles import load_hardware, preset_names


def profile_of_gpu(device: torch.device) -> Hardware | None:
    """Return the preset for a name such as "NVIDIA H100 80GB HBM3"; None for a CPU, and if no preset matches."""
    if device.type != "cuda":
        return None
    return profile_of_name(torch.cuda.get_device_name(device))


def profile_of_name(name: str) -> Hardware | None:
    """Return the first preset whose model is a word of `name`, or None."""
    words = name.upper().replace("-", " ").split()
    presets = [preset for preset in preset_names() if preset.split("-")[0].upper() in words]
    return load_hardware(f"1x{presets[0]}") if presets else None
