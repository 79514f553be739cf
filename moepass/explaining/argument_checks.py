"""Checks of the arguments of `explain`, which run first: numbers, machine, memory budget."""

from __future__ import annotations

import dataclasses
import os
import re

from moepass.models.errors import InputError
from moepass.models.limits import MOST_RANKS, MOST_SLOTS, MOST_TOKENS, check_limit
from moepass.passes.machine.hardware import Hardware, with_ranks
from moepass.runtime.profiles.hardware_profiles import load_hardware

# [Empirical] The remaining memory is for the allocator, the kernels' workspaces and the driver; vLLM's default.
DEFAULT_MEMORY_SHARE = 0.9


def check_numbers(batch: int, seq: int, tokens: int | None, slots: int | None, ranks: int | None) -> None:
    """Raise InputError for an argument that is not an integer of at least 1, or that exceeds its limit."""
    numbers = {"batch": batch, "seq": seq, "tokens": tokens, "slots": slots, "ranks": ranks}
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError.wrong(name, value, "a whole number from 1 on")
    per_step = batch * seq if tokens is None else tokens
    what = f"batch {batch} times seq {seq}" if tokens is None else "tokens"
    check_limit(what, per_step, MOST_TOKENS, "use several steps")
    if slots is not None:
        check_limit("slots", slots, MOST_SLOTS, "more slots hide no more transfers")
    if ranks is not None:
        check_limit("ranks", ranks, MOST_RANKS, "moepass plans for no more devices")


def machine_of(hardware: str | os.PathLike[str] | Hardware, ranks: int | None) -> Hardware:
    """Return the profile of a machine, with `ranks` devices if that is not None."""
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    if ranks is None or ranks == machine.ranks:
        return machine
    changed = with_ranks(machine, ranks)
    return dataclasses.replace(changed, name=re.sub(rf"^{machine.ranks}x", f"{ranks}x", machine.name))


def memory_budget(machine: Hardware, requested: float | None) -> float:
    """Return the bytes to use on each device: `requested`, or the default share of its memory for None.

    Raises:
        InputError: if a device has less memory.
    """
    most = machine.memory_bytes.value
    if requested is None:
        return DEFAULT_MEMORY_SHARE * most
    if not 0 < requested <= most:
        raise InputError(
            f"the memory budget is {requested:.0f} bytes; it must be between 1 and {most:.0f}, the memory of a device "
            f"of {machine.name}",
            name="memory_budget",
            value=requested,
            expected=(1, most),
        )
    return requested
