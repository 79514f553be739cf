"""The command `moepass explain`, and its options."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import typer
from msgspec import Struct

from moepass.cli.record_options import takes_records
from moepass.cli.streams import check_compiler_cache, check_output, open_output
from moepass.models.byte_counts import parse_bytes
from moepass.models.errors import InputError
from moepass.models.homes import HOMES
from moepass.option_records import Count, option
from moepass.runtime.system.garbage import no_garbage_collection

_CANDIDATES = ", ".join(home.name for home in HOMES.values() if home.is_candidate)


class ExplainOptions(Struct, frozen=True, kw_only=True):
    """The options of `moepass explain`."""

    hardware: Annotated[
        str,
        option(
            "A preset such as 8xh100-80g, or the path of a profile (see **moepass calibrate**).",
            details="See [hardware](hardware.md).",
            metavar="NAME",
        ),
    ] = "8xh100-80g"
    ranks: Annotated[Count | None, option("The number of devices.", unset="the number in --hardware")] = None
    home: Annotated[
        str | None,
        option(
            "Where the experts rest.",
            details="If several homes are within 1 % of the fastest, the first of them in the order "
            f"{_CANDIDATES} is chosen. With one device, the default is host.",
            unset=f"the fastest of {_CANDIDATES} that fits",
            metavar=f"[{'|'.join(HOMES)}]",
        ),
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp8", "fp32"] | None,
        option(
            "The dtype of the weights.",
            details="If the config names none, it is bf16. For a model object, it is the dtype of its weights.",
            unset="the config's",
        ),
    ] = None
    batch: Annotated[Count, option("Sequences per rank and step.")] = 16
    seq: Annotated[Count, option("Tokens of each sequence.")] = 4096
    tokens: Annotated[Count | None, option("One sequence of N tokens, instead of --batch and --seq.", unset="none")] = (
        None
    )
    memory_budget: Annotated[
        str | None,
        option(
            "The memory to use on each device, such as 60e9, 60GB or 56GiB.",
            unset="0.9 of the device's memory",
            metavar="BYTES",
        ),
    ] = None
    slots: Annotated[
        Count | None,
        option(
            "The maximum number of slots that experts stream through.", unset="as many as shorten the step, up to 4"
        ),
    ] = None
    lower: Annotated[
        Literal["inductor", "eager", "tensorrt"],
        option(
            "How segments would be compiled: **eager** is bit-identical to the plain model; **tensorrt** shows which "
            "segments would become TensorRT engines, and needs no TensorRT."
        ),
    ] = "inductor"
    format: Annotated[
        Literal["text", "json", "html", "trace"],
        option(
            "The format of the report: **text**, **json**, **html** (one self-contained file), or **trace** (a "
            "timeline for ui.perfetto.dev)."
        ),
    ] = "text"
    output: Annotated[str, option("The file to write; - is standard output.", metavar="FILE")] = "-"
    all: Annotated[bool, option("With --format text: add the schedule of the captured layers, row by row.")] = False


@takes_records
def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint folder, a config.json, the name of a known model such as qwen3-235b-a22b, or **demo**.",
        ),
    ],
    *,
    options: ExplainOptions,
) -> None:
    """Show what moepass would do with a model on a machine, how fast that would be, and why.

    The report has the chosen strategy, the MoE blocks that are found, rewritten and refused, memory, the saturation
    threshold, a timeline, and a comparison with other strategies. It needs only the config: no weights are loaded and
    nothing is computed.
    """
    from rich.console import Console

    target = check_output(options.output)
    budget = parse_bytes(options.memory_budget)
    with Console(stderr=True).status("planning ..."), no_garbage_collection():
        from moepass.explaining.compiler_part import is_stored
        from moepass.explaining.explain_model import explain as explain_it
        from moepass.explaining.report import print_report

        if not is_stored(model, options.lower):
            check_compiler_cache()
        asked = msgspec.structs.asdict(options)
        for name in ("memory_budget", "format", "output", "all"):
            del asked[name]
        report = explain_it(model, memory_budget_bytes=budget, **asked)
    if options.format == "text" and target is None:
        print_report(Console(), report, options.all)
        return
    if options.format == "trace" and report.schedule is None:
        text = (
            f"{report.model.name} has no timeline on {report.hardware.name}, because nothing was scheduled; use "
            "another format"
        )
        raise InputError(text, name="format", value=options.format)
    write = {
        "text": lambda: report.text(every_row=options.all),
        "json": report.to_json,
        "html": report.html,
        "trace": report.trace,
    }[options.format]
    content = write().rstrip("\n").encode() + b"\n"
    with open_output(options.output, target) as sink:
        sink.write(content)
