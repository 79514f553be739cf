"""The options of the backend: one frozen, validated object."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

import torch

from moepass.models.errors import OptionError, one_of
from moepass.models.homes import ADOPTED
from moepass.models.limits import AUTO, check_wait
from moepass.passes.ir.segment import TENSORRT
from moepass.passes.machine.hardware import Hardware
from moepass.runtime.homes.adopted_banks import AdoptionOptions
from moepass.runtime.lowering.lower_segments import LOWERINGS
from moepass.runtime.lowering.lower_tensorrt import torch_tensorrt
from moepass.runtime.profiles.hardware_profiles import load_hardware
from moepass.runtime.ranks.agree import LARGEST_EXACT
from moepass.runtime.transfer.link import parse_link
from moepass.runtime.transfer.transports import check_transport


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `torch.compile(model, backend="asyncep", options={...})`.

    lower      how segments are compiled: "inductor" (default); "eager": operator by operator, bit-identical; or
               "tensorrt": dense segments by Torch-TensorRT, the others by Inductor
    disable    names of passes to leave out
    debug      fill released slots with NaN, so that a read after a release shows in the output;
               where ranks add up results, compare what tokens are computed from in every run
    dump       a folder: the graph before and after every pass, and the plan as JSON, are written there
    cudagraphs whether segments are recorded as CUDA graphs when shapes repeat, and replayed from then on
    chunk_tokens
               what treats every token alone runs at most so many tokens at a time, so that its temporary values take
               the memory of these alone; attention runs whole. None (default): all at once. "auto": as many as fit
               into the memory budget that the experts were placed for

    For models that run with expert parallelism; where `offload_experts` was called, these are arguments of it:

    slots      slots of the ring that the experts of all ranks stream through, 2 by default
    link       "real" (default), or "emulate:BYTES_PER_S" (CPU only)
    timeout_s  seconds that ranks wait for each other, 60 by default: in the first run; in every run with "collective"
               and where ranks add up results (all_reduce)
    transport  "pull" (default): ranks on one machine copy when they like; or "collective": all gather together
    all_to_all_below
               tokens per rank, in the mean over ranks, below which a run exchanges tokens as the model itself does,
               instead of gathering weights; within 10 % of this number a run keeps the form of the previous run. None
               (default): all runs gather. The ranks agree at the beginning of each run. So every rank of the group
               must call every forward, with no tokens if it has none. If a rank does not come within timeout_s, the
               others raise an error, and no later run of the group can agree.
    hardware   a preset or the file of a profile (docs/hardware.md), from which moepass computes all_to_all_below
    """

    lower: str = "inductor"
    disable: tuple[str, ...] = ()
    debug: bool = False
    dump: str | None = None
    cudagraphs: bool = False
    chunk_tokens: int | str | None = None
    slots: int | None = None
    link: str | None = None
    timeout_s: float | None = None
    transport: str | None = None
    all_to_all_below: int | None = None
    hardware: Hardware | None = None

    def adoption(self) -> AdoptionOptions:
        """The options for models that run with expert parallelism."""
        defaults = AdoptionOptions()
        return AdoptionOptions(
            defaults.slots if self.slots is None else self.slots,
            defaults.link if self.link is None else parse_link(self.link),
            defaults.timeout_s if self.timeout_s is None else self.timeout_s,
            self.transport or defaults.transport,
        )

    def check_device(self, device: torch.device) -> None:
        """Raises OptionError if an option does not go with a graph that computes on `device`, or lacks a package."""
        if self.lower == TENSORRT:
            if device.type != "cuda":
                raise OptionError(
                    f"option lower is 'tensorrt', but the graph computes on {device}: TensorRT needs an NVIDIA GPU; "
                    "move the model to cuda, or use lower='inductor'",
                    name="lower",
                    value=TENSORRT,
                    expected=("inductor", "eager"),
                )
            torch_tensorrt()
        if self.cudagraphs and device.type != "cuda":
            raise OptionError(
                f"option cudagraphs is True, but the graph computes on {device}: CUDA graphs record work of a GPU; "
                "move the model to cuda, or leave the option out",
                name="cudagraphs",
                value=True,
                expected=(False,),
            )

    def refuse_adoption(self) -> None:
        """Raises OptionError if an option for expert parallelism was given; the model has a ring already."""
        asked = {"all_to_all_below": self.all_to_all_below, "hardware": self.hardware and self.hardware.name}
        for name, value in asked.items():
            if value is not None:
                raise OptionError(
                    f"option {name} is {value!r}, but the experts of this model were offloaded: no rank computes for "
                    "another, so there is no exchange that a run could keep; leave the option out",
                    name=name,
                    value=value,
                )
        for name in ("slots", "link", "timeout_s", "transport"):
            if getattr(self, name) is not None:
                raise OptionError(
                    f"option {name} is {getattr(self, name)!r}, but the experts of this model were offloaded: give "
                    f"{name} to offload_experts",
                    name=name,
                    value=getattr(self, name),
                )


def parse_options(given: Mapping[str, Any] | None) -> Options:
    """Raises OptionError naming the first option that is unknown or has a wrong value, and what would be right."""
    given = dict(given or {})
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise OptionError(
                f"option {name!r} is unknown; {hint}the options are {', '.join(known)}",
                name=name,
                value=given[name],
                expected=known,
            )
    lower = given.get("lower", Options.lower)
    if not isinstance(lower, str) or lower not in LOWERINGS:
        raise _wrong("lower", lower, f"one of {one_of(LOWERINGS)}")
    disable = given.get("disable", ())
    if not isinstance(disable, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in disable):
        raise _wrong("disable", disable, "a list of pass names")
    if lower != "eager" and "partition" in disable:
        raise OptionError(
            f"option disable has 'partition', but lower={lower!r} compiles segments; use lower='eager'",
            name="disable",
            value=disable,
        )
    chunk_tokens = given.get("chunk_tokens")
    is_number = isinstance(chunk_tokens, int) and not isinstance(chunk_tokens, bool)
    if chunk_tokens not in (None, AUTO) and (not is_number or chunk_tokens < 1):
        wanted = f"a number of tokens from 1 on, {AUTO!r} for what the memory budget leaves, or None for all at once"
        raise _wrong("chunk_tokens", chunk_tokens, wanted)
    debug = given.get("debug", Options.debug)
    if not isinstance(debug, bool):
        raise _wrong("debug", debug, "True or False")
    cudagraphs = given.get("cudagraphs", Options.cudagraphs)
    if not isinstance(cudagraphs, bool):
        raise _wrong("cudagraphs", cudagraphs, "True or False")
    if cudagraphs and "partition" in disable:
        raise OptionError(
            "option disable has 'partition', but cudagraphs=True records segments; leave one of them out",
            name="disable",
            value=disable,
        )
    dump = given.get("dump")
    if dump is not None and not isinstance(dump, (str, bytes)) and not hasattr(dump, "__fspath__"):
        raise _wrong("dump", dump, "the path of a folder")
    slots = given.get("slots")
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
        raise _wrong("slots", slots, "a number from 1 on, 2 to overlap")
    timeout_s = given.get("timeout_s")
    if timeout_s is not None:
        check_wait("timeout_s", timeout_s)
    link = given.get("link")
    if link is not None:
        parse_link(link)
    transport = given.get("transport")
    if transport is not None:
        check_transport(transport, ADOPTED)
    below = given.get("all_to_all_below")
    if below is not None and (not isinstance(below, int) or isinstance(below, bool) or not 1 <= below <= LARGEST_EXACT):
        raise OptionError(
            f"option all_to_all_below is {below!r}; it must be a number of tokens per rank from 1 to {LARGEST_EXACT}, "
            "or None",
            name="all_to_all_below",
            value=below,
        )
    hardware = _hardware(given.get("hardware"), below)
    folder = None if dump is None else os.fsdecode(dump)
    return Options(
        lower=lower,
        disable=tuple(disable),
        chunk_tokens=chunk_tokens,
        debug=debug,
        dump=folder,
        cudagraphs=cudagraphs,
        slots=slots,
        link=link,
        timeout_s=timeout_s,
        transport=transport,
        all_to_all_below=below,
        hardware=hardware,
    )


def _hardware(given: object, below: object) -> Hardware | None:
    if given is None or isinstance(given, Hardware):
        machine = given
    elif isinstance(given, (str, os.PathLike)):
        machine = load_hardware(given)
    else:
        raise _wrong("hardware", given, "a preset such as 8xh100-80g, or a profile's file")
    if machine is not None and below is not None:
        raise OptionError(
            f"options all_to_all_below is {below!r} and hardware is {machine.name!r}: give either all_to_all_below or "
            "hardware: moepass computes all_to_all_below from hardware",
            name="all_to_all_below",
            value=below,
        )
    return machine


def _wrong(name: str, value: object, expected: str) -> OptionError:
    text = f"option {name} is {value!r}; it must be {expected}"
    return OptionError(text, name=name, value=value, expected=expected)
