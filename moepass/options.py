"""The options of the backend: one frozen, validated object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from moepass.models.errors import OptionError
from moepass.models.homes import ADOPTED
from moepass.models.limits import FP8, MOST_WAIT_SECONDS
from moepass.option_records import Count, check_names, option, read_options
from moepass.passes.ir.segment import EAGER, TENSORRT
from moepass.passes.machine.hardware import Hardware
from moepass.runtime.homes.adopted_banks import AdoptionOptions
from moepass.runtime.lowering.lower_tensorrt import torch_tensorrt
from moepass.runtime.profiles.hardware_profiles import load_hardware
from moepass.runtime.ranks.agree import LARGEST_EXACT
from moepass.runtime.transfer.home_protocol import check_transport
from moepass.runtime.transfer.link import parse_link

# The first compute capability on which experts multiply in FP8.
_FP8_CAPABILITY = 9


class Options(msgspec.Struct, frozen=True):
    """The options of `torch.compile(model, backend="asyncep", options={...})`.

    docs/options.md lists them with their meanings. Options from `slots` on are for models that run with expert
    parallelism. For offloaded models, `slots` is an argument of `offload_experts`, and `link`, `timeout_s` and
    `transport` are options of the home.
    """

    lower: Annotated[
        Literal["inductor", "eager", "tensorrt"],
        option(
            "How segments are compiled.",
            details='`"eager"` runs the captured operators one by one and is bit-identical to the model, except for '
            "[loops over experts](#loops-over-experts) and [dense experts](#dense-experts). "
            '`"tensorrt"` compiles dense segments with TensorRT and all others as with `"inductor"` '
            "([below](#tensorrt)).",
        ),
    ] = "inductor"
    disable: Annotated[tuple[str, ...], option("Names of passes to skip.", expected="a list of pass names")] = ()
    debug: Annotated[
        bool,
        option(
            "Fill released slots with NaN, so that a read after a release shows in the output.",
            details="With expert parallelism, every run also compares this rank's experts byte by byte with the copies "
            "that the other ranks received. This catches writes that bypass torch's version counter (`.data`, numpy, "
            "`dist.recv` and `dist.broadcast` into a parameter). With AllReduce, the experts of all ranks must get the "
            "same tokens, so in every run the ranks also compare the parameters, buffers and arguments that determine "
            "these tokens.",
        ),
    ] = False
    dump: Annotated[
        str | None,
        option(
            "A folder for the graph before and after every pass, and for the plan as JSON.",
            expected="the path of a folder",
        ),
    ] = None
    cudagraphs: Annotated[
        bool, option("Record segments as CUDA graphs when shapes repeat, and replay them ([below](#cuda-graphs)).")
    ] = False
    chunk_tokens: Annotated[
        Count | Literal["auto"] | None,
        option(
            "Maximum number of tokens that the operations between two attention layers process at once.",
            details='`"auto"`: as many as fit into the memory budget. None: all at once. See '
            "[hybrid prefill](#hybrid-prefill).",
            expected="a number of tokens from 1 on, 'auto' to fit the memory budget, or None for all tokens at once",
        ),
    ] = None
    experts_compute: Annotated[
        Literal["model", "fp8"],
        option(
            "The arithmetic of experts.",
            details='`"model"`: the dtype of the model. `"fp8"`: experts that are stored as blocks of FP8 stay FP8 in '
            "their slots and multiply in FP8, on GPUs of compute capability 9.0 and higher; the numbers differ "
            "slightly ([below](#fp8-arithmetic)).",
        ),
    ] = "model"
    slots: Annotated[
        Count | None,
        option(
            "Number of slots in the ring through which the experts of all ranks stream.",
            unset="2",
            expected="a number from 1 on; from 2 on, transfers overlap with computation",
        ),
    ] = None
    link: Annotated[
        str | None,
        option(
            '`"emulate:BYTES_PER_S"` makes transfers take as long as on a link of that rate (CPU only).',
            unset='`"real"`',
        ),
    ] = None
    timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=MOST_WAIT_SECONDS)] | None,
        option(
            'Seconds that ranks wait for each other in the first run, and in every run with `"collective"` or '
            "AllReduce.",
            unset="60",
            expected=f"a number of seconds above 0 and at most {MOST_WAIT_SECONDS:g}",
        ),
    ] = None
    transport: Annotated[
        str | None,
        option(
            '`"pull"`: each rank copies from the others when it needs a bank, which requires all ranks on one machine. '
            '`"collective"`: all ranks gather together, also over a network.',
            unset='`"pull"`',
        ),
    ] = None
    all_to_all_below: Annotated[
        Annotated[int, Meta(ge=1, le=LARGEST_EXACT)] | None,
        option(
            "Tokens per rank (mean over the ranks) below which a run exchanges tokens, as the model itself does, "
            "instead of gathering weights.",
            details="Within 10 % of this number, a run does what the previous run did. None: all runs gather. The "
            "ranks decide together at the beginning of each run, so every rank must take part in every run, with zero "
            "tokens if it has none. If a rank does not respond within `timeout_s`, the others raise an error, and "
            "later runs of the group fail.",
            expected=f"a number of tokens per rank from 1 to {LARGEST_EXACT}, or None",
        ),
    ] = None
    hardware: Annotated[
        Hardware | None,
        option(
            'A preset such as `"8xh100-80g"`, or the file of a [profile](hardware.md). moepass computes '
            "`all_to_all_below` from it, for each graph.",
            expected="a preset such as 8xh100-80g, or the path of a profile",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise OptionError for values that exclude each other, and for an unknown link or transport."""
        if "partition" in self.disable and (self.lower != EAGER or self.cudagraphs):
            needs = "cudagraphs=True records" if self.cudagraphs else f"lower={self.lower!r} compiles"
            text = f"option disable has 'partition', but {needs} segments; use lower='eager' without cudagraphs"
            raise OptionError(text, name="disable", value=self.disable)
        if self.experts_compute == FP8 and self.lower == EAGER:
            text = "option experts_compute is 'fp8', but lower='eager' runs the model's own operators; use 'inductor'"
            raise OptionError(text, name="experts_compute", value=FP8, expected=("model",))
        if self.link is not None:
            parse_link(self.link)
        if self.transport is not None:
            check_transport(self.transport, ADOPTED)
        if self.hardware is not None and self.all_to_all_below is not None:
            message = (
                f"options all_to_all_below is {self.all_to_all_below!r} and hardware is {self.hardware.name!r}: use "
                "one of them, because moepass computes all_to_all_below from hardware"
            )
            raise OptionError(message, name="all_to_all_below", value=self.all_to_all_below)

    def adoption(self) -> AdoptionOptions:
        """Return the options for models that run with expert parallelism, with their defaults filled in."""
        link = None if self.link is None else parse_link(self.link)
        chosen = {"slots": self.slots, "link": link, "timeout_s": self.timeout_s, "transport": self.transport}
        return AdoptionOptions(**{name: value for name, value in chosen.items() if value is not None})  # type: ignore[arg-type]

    def check_device(self, device: torch.device) -> None:
        """Raise OptionError if an option cannot be used on `device`, or needs a package that is not installed."""
        if self.lower == TENSORRT:
            if device.type != "cuda":
                text = (
                    f"option lower is 'tensorrt', but the graph computes on {device}: TensorRT needs an NVIDIA GPU; "
                    "move the model to cuda, or use lower='inductor'"
                )
                raise OptionError(text, name="lower", value=TENSORRT, expected=("inductor", "eager"))
            torch_tensorrt()
        if self.experts_compute == FP8:
            _check_multiplies_in_fp8(device)
        if self.cudagraphs and device.type != "cuda":
            text = (
                f"option cudagraphs is True, but the graph computes on {device}: CUDA graphs record only GPU work; "
                "move the model to cuda, or leave the option out"
            )
            raise OptionError(text, name="cudagraphs", value=True, expected=(False,))

    def refuse_adoption(self) -> None:
        """Raise OptionError if an option for expert parallelism is set, for a model whose experts were offloaded."""
        nothing = "its ranks exchange no tokens, so there is nothing to choose; leave the option out"
        remedies = {"all_to_all_below": nothing, "hardware": nothing} | {
            name: f"pass {name} to offload_experts instead" for name in ("slots", "link", "timeout_s", "transport")
        }
        for name, remedy in remedies.items():
            value = getattr(self, name)
            if value is not None:
                shown = value.name if isinstance(value, Hardware) else value
                text = f"option {name} is {shown!r}, but the experts of this model were offloaded: {remedy}"
                raise OptionError(text, name=name, value=shown)


def _check_multiplies_in_fp8(device: torch.device) -> None:
    name = str(device)
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        if major >= _FP8_CAPABILITY:
            return
        name = f"{torch.cuda.get_device_name(device)}, of compute capability {major}.{minor}"
    elif device.type == "cuda":
        return  # a plan for an absent GPU
    text = (
        f"option experts_compute is 'fp8', but the graph computes on {name}: kernels in FP8 are for NVIDIA GPUs of "
        f"compute capability {_FP8_CAPABILITY}.0 and higher; leave the option out"
    )
    raise OptionError(text, name="experts_compute", value=FP8, expected=("model",))


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Check the options that `torch.compile` received.

    Raises OptionError with the name of the first option that is unknown or has a wrong value, that value, and the valid
    values.
    """
    values = dict(options or {})
    check_names(values, [Options])
    dump, hardware = values.get("dump"), values.get("hardware")
    if isinstance(dump, bytes | os.PathLike):
        values["dump"] = os.fsdecode(dump)
    if isinstance(hardware, str | os.PathLike):
        values["hardware"] = load_hardware(hardware)
    return read_options(Options, values)
