"""The other arguments of `explain`: numbers, machine, memory budget. All are checked first."""

from __future__ import annotations

import dataclasses
import os
import re

from moepass.models.errors import InputError
from moepass.models.limits import MOST_RANKS, MOST_SLOTS, MOST_TOKENS, check_limit
from moepass.passes.machine.hardware import Hardware, with_ranks
from moepass.runtime.profiles.hardware_profiles import load_hardware

# [Empirical] The rest is for the allocator, the kernels' workspaces and the driver; vLLM's default.
DEFAULT_MEMORY_SHARE = 0.9


def check_numbers(batch: int, seq: int, tokens: int | None, slots: int | None, ranks: int | None) -> None:
    """Raises InputError for a number that is not a whole number from 1 on, or beyond its limit."""
    numbers = {"batch": batch, "seq": seq, "tokens": tokens, "slots": slots, "ranks": ranks}
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError.wrong(name, value, "a whole number from 1 on")
    per_step = batch * seq if tokens is None else tokens
    what = f"batch {batch} times seq {seq}" if tokens is None else "tokens"
    check_limit(what, per_step, MOST_TOKENS, "share the sequences out over several steps")
    if slots is not None:
        check_limit("slots", slots, MOST_SLOTS, "a ring of a few slots hides as much as one of many")
    if ranks is not None:
        check_limit("ranks", ranks, MOST_RANKS, "no plan is made for more devices than that")


def machine_of(hardware: str | os.PathLike[str] | Hardware, ranks: int | None) -> Hardware:
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    if ranks is None or ranks == machine.ranks:
        return machine
    changed = with_ranks(machine, ranks)
    return dataclasses.replace(changed, name=re.sub(rf"^{machine.ranks}x", f"{ranks}x", machine.name))


def memory_budget(machine: Hardware, wanted: float | None) -> float:
    most = machine.memory_bytes.value
    if wanted is None:
        return DEFAULT_MEMORY_SHARE * most
    if not 0 < wanted <= most:
        raise InputError(
            f"the memory budget is {wanted:.0f} bytes; a device of {machine.name} has {most:.0f}, so it must lie "
            "between 1 and that",
            name="memory_budget",
            value=wanted,
            expected=(1, most),
        )
    return wanted
