"""The profiles that `moepass calibrate` stored for this machine, and the choice of one for a model.

There is one file per processor, number of ranks and number of CPU threads, in `$XDG_DATA_HOME/moepass/profiles`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from moepass.models.errors import InputError
from moepass.passes.machine.hardware import Hardware
from moepass.runtime.profiles.hardware_profiles import profile_json, read_profile
from moepass.runtime.system.device_names import device_name


def profiles_folder() -> Path:
    """Return the folder of stored profiles; it may not exist yet."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data, "moepass", "profiles")


def store_profile(hardware: Hardware) -> Path:
    """Store a measured profile and return its file. Replaces the profile of the same device, ranks and threads.

    Raises InputError if the profile was not measured, or the folder cannot be written.
    """
    conditions = hardware.conditions
    if conditions is None:
        raise InputError(
            f"profile {hardware.name!r} was not measured: it has no conditions; store a profile of `moepass calibrate`",
            name="profile",
            value=hardware.name,
        )
    stem = _stem(conditions.device, conditions.ranks, conditions.threads_per_rank)
    path = profiles_folder() / f"{stem}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process that reads the file at the same time gets the old or the new profile, never a part of one.
        written = path.with_suffix(f".{os.getpid()}.part")
        written.write_bytes(profile_json(hardware))
        written.replace(path)
    except OSError as error:
        raise InputError(f"profile {str(path)!r} cannot be written: {error.strerror}", path=path) from error
    return path


def stored_profile(device: torch.device, ranks: int) -> Hardware | None:
    """Return this machine's profile for `ranks` processes that compute on devices like `device`; None if not stored.

    Ranks on a CPU share its cores, so their numbers of ranks and threads must match. GPUs are not shared, so any number
    of ranks matches, and the same number is preferred. Raises InputError if a stored file is damaged.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    name = device_name(device)
    if device.type == "cpu":
        wanted = [_stem(name, ranks, torch.get_num_threads())]
    else:
        stored = sorted(path.stem for path in profiles_folder().glob(f"{_slug(name)}-*-ranks-*-threads.json"))
        wanted = sorted(stored, key=lambda stem: f"-{ranks}-ranks-" not in stem)
    for stem in wanted:
        path = profiles_folder() / f"{stem}.json"
        if path.is_file():
            return read_profile(path)
    return None


def calibrate_command(device: torch.device, ranks: int) -> str:
    """Return the command that stores the profile that `stored_profile` looks for."""
    threads = f" --threads {torch.get_num_threads()}" if device.type == "cpu" else ""
    return f"moepass calibrate --device {device.type} --ranks {ranks}{threads}"


def _stem(device: str, ranks: int, threads: int) -> str:
    return f"{_slug(device)}-{ranks}-ranks-{threads}-threads"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
