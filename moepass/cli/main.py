"""The command line: `moepass score`, `moepass explain`, `moepass calibrate`, `moepass demo`.

Nothing heavy is imported before a command runs: `moepass --help` must not wait for torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import typer
from typer.core import TyperGroup

from moepass import __version__
from moepass.cli.streams import (
    READER_LEFT,
    check_compiler_cache,
    check_output,
    check_standard_output,
    open_output,
    process_streams,
)
from moepass.models.errors import InputError, MoepassError, OptionError
from moepass.models.limits import (
    MOST_INPUT_BYTES,
    MOST_LINE_BYTES,
    MOST_LINES,
    MOST_THREADS,
    TooLargeError,
    check_limit,
    decode_json,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from moepass.backend import Compilation
    from moepass.runtime.serving.scoring import Score, Scorer

# What `score` writes itself; where an input line has a key of that name, it comes back as `input_KEY`.
_ANSWER_KEYS = ("label", "probabilities", "mass")
_LONGEST_ERROR = 1000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Lowering(str, enum.Enum):
    inductor = "inductor"
    eager = "eager"


class _DeviceKind(str, enum.Enum):
    cpu = "cpu"
    cuda = "cuda"


class _Format(str, enum.Enum):
    text = "text"
    json = "json"
    html = "html"
    trace = "trace"


class _Home(str, enum.Enum):
    device = "device"
    peer = "peer"
    host = "host"
    hybrid = "hybrid"
    disk = "disk"


class _Dtype(str, enum.Enum):
    bf16 = "bf16"
    fp8 = "fp8"
    fp32 = "fp32"


class _Commands(TyperGroup):
    """Errors that moepass raises on purpose end as one line, without a traceback; all others keep theirs."""

    def main(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().main(*arguments, **keywords)
        except SystemExit as end:
            # Both typer and rich end the process where the reader of a pipe has left.
            if isinstance(end.__context__, BrokenPipeError):
                raise SystemExit(READER_LEFT) from None
            raise
        except Exception as error:
            ours = _on_purpose(error)
            if ours is None:
                raise
            typer.echo(f"moepass: error: {_shortened(' '.join(str(ours).split()))}", err=True)
            raise SystemExit(2 if isinstance(ours, OptionError) else 1) from error


def _shortened(text: str) -> str:
    """Errors quote what was wrong, however long that is; what would be right stands behind it."""
    if len(text) <= _LONGEST_ERROR:
        return text
    half = _LONGEST_ERROR // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


def _on_purpose(error: BaseException) -> MoepassError | None:
    # torch.compile wraps what a backend raises and keeps the original as `inner_exception`.
    wrapped = getattr(error, "inner_exception", None)
    return error if isinstance(error, MoepassError) else wrapped if isinstance(wrapped, MoepassError) else None


app = typer.Typer(
    cls=_Commands,
    name="moepass",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Mixture-of-experts models for prefill-only work, their experts streamed while other layers compute.",
    epilog="Try it without a checkpoint of your own: **moepass demo**",
)


def main() -> None:
    with process_streams():
        app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moepass {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # Checkpoints are local folders: no library may look anything up on a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


_Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or **demo** for the embedded one.")]
_Slots = Annotated[
    int, typer.Option(metavar="N", help="Slots of the ring that the experts stream through; each holds one layer's.")
]
_Lower = Annotated[
    _Lowering, typer.Option(help="How segments are compiled; eager is bit-identical to the plain model.")
]
_Threads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="CPU threads to compute with.", show_default="all cores")
]


@app.command(
    epilog="Examples:\n\n"
    "**moepass score demo < texts.jsonl**\n\n"
    "**moepass score ./checkpoint --labels ' yes, no' --input texts.jsonl --output scores.jsonl**"
)
def score(
    model: _Model,
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Candidate answers: separated by commas, blanks count; or a JSON list. Default: those of prompt.json.",
        ),
    ] = None,
    input: Annotated[str, typer.Option(metavar="FILE", help="JSON lines to read; - is standard input.")] = "-",
    output: Annotated[str, typer.Option(metavar="FILE", help="JSON lines to write; - is standard output.")] = "-",
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Texts that run together.")] = 32,
    lower: _Lower = _Lowering.inductor,
    slots: _Slots = 2,
    stream: Annotated[
        bool, typer.Option(help="Stream the experts from host memory, or keep them on the device.")
    ] = True,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where to compute: cpu, cuda or cuda:INDEX.")] = "cpu",
    link: Annotated[
        str, typer.Option(metavar="LINK", help="real, or emulate:BYTES_PER_S to see how a slower link would do.")
    ] = "real",
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile at all.")] = False,
    threads: _Threads = None,
) -> None:
    """Score texts against candidate labels, one JSON object per line.

    Each line in is an object with a **text**. Each line out has **label** (the most probable one), **probabilities**
    (they sum to 1) and **mass** (what the model gives to all labels together).

    Further keys of a line, such as an id, come back with it. Those called label, probabilities or mass come back as
    input_label and so on.
    """
    # The whole input is checked before anything is loaded, and long before anything is written.
    lines = read_lines(input)
    target = check_output(output)
    candidates = parse_labels(labels)
    _set_threads(threads)
    check_compiler_cache()

    from moepass.backend import record_compilations

    with record_compilations() as compilations:
        scorer = make_scorer(
            model, lower=lower.value, slots=slots, stream=stream, device=device, link=link, compiled=not eager
        )
        prepared = scorer.labels(candidates if candidates is not None else scorer.prompt.labels)
        prompts = [scorer.encode(line.text, prepared, f"line {line.number}") for line in lines]
        names = [f"line {line.number}" for line in lines]
        results = zip(lines, scorer.score_prompts(prompts, prepared, batch_size, names), strict=True)
        with open_output(output, target) as sink:
            for line, result in _progress(results, len(lines)):
                sink.write(msgspec.json.encode(_answer(line, result)) + b"\n")
    _note_refusals(compilations)


@app.command(
    epilog="Examples:\n\n**moepass explain qwen3-235b-a22b --hardware 8xh100-80g --dtype fp8**\n\n"
    "**moepass explain ./config.json --tokens 65536 --format html --output plan.html**"
)
def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint folder, a config.json alone, the name of a well-known model such as qwen3-235b-a22b, "
            "or **demo**.",
        ),
    ],
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="A number of devices such as 8xh100-80g, or a profile (see moepass calibrate)."
        ),
    ] = "8xh100-80g",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Devices, in place of the number in --hardware.", show_default=False),
    ] = None,
    home: Annotated[
        _Home | None,
        typer.Option(help="Where the experts rest.", show_default="the fastest of peer, hybrid and host that fits"),
    ] = None,
    dtype: Annotated[_Dtype | None, typer.Option(help="Of the weights.", show_default="that of the config")] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Texts of one rank and step.")] = 16,
    seq: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each text.")] = 4096,
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="One text of that many tokens, instead.", show_default=False)
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory to use on each device: bytes, or as 60GB or 60GiB.",
            show_default="0.9 of the device's",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The most slots that experts stream through.", show_default="as many as help, to 4"
        ),
    ] = None,
    lower: _Lower = _Lowering.inductor,
    format: Annotated[
        _Format, typer.Option(help="text for people, json for programs, html for browsers, trace for ui.perfetto.dev.")
    ] = _Format.text,
    output: Annotated[str, typer.Option(metavar="FILE", help="Where to write; - is standard output.")] = "-",
    all_rows: Annotated[
        bool, typer.Option("--all", help="With text: the schedule of the captured layers, row by row.")
    ] = False,
) -> None:
    """Show what moepass would do with a model on a machine, how fast that would be, and why.

    The verdict, the blocks that are found, rewritten and refused, memory, the saturation threshold, a timeline, and the
    other strategies beside it. Needs a config alone: no weights are loaded and nothing is computed.
    """
    from rich.console import Console

    target = check_output(output)
    budget = parse_bytes(memory_budget)
    check_compiler_cache()
    with Console(stderr=True).status("planning ..."), _no_garbage_collection():
        from moepass.explaining.explain_model import explain as explain_it
        from moepass.explaining.report_text import print_report

        report = explain_it(
            model,
            hardware=hardware,
            ranks=ranks,
            home=home.value if home else None,
            dtype=dtype.value if dtype else None,
            batch=batch,
            seq=seq,
            tokens=tokens,
            memory_budget_bytes=budget,
            slots=slots,
            lower=lower.value,
        )
    if format is _Format.text and target is None:
        print_report(Console(), report, all_rows)
        return
    if format is _Format.trace and report.schedule is None:
        raise InputError(f"{report.model.name} has no timeline on {report.hardware.name}: nothing could be scheduled")
    made = {
        _Format.text: lambda: report.text(every_row=all_rows),
        _Format.json: report.to_json,
        _Format.html: report.html,
        _Format.trace: report.trace,
    }[format]()
    with open_output(output, target) as sink:
        sink.write(made.rstrip("\n").encode() + b"\n")


@app.command(
    epilog="Examples:\n\n**moepass calibrate --output hardware.json**\n\n"
    "**moepass calibrate --device cpu --ranks 1 --threads 1 --quick**"
)
def calibrate(
    output: Annotated[str, typer.Option(metavar="FILE", help="The profile, as JSON; - is standard output.")] = "-",
    device: Annotated[
        _DeviceKind | None, typer.Option(help="What to measure.", show_default="cuda where there is a GPU, else cpu")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks that run at once.", show_default="one per GPU; 2 on a CPU"),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="CPU threads of each rank.", show_default="cores shared out evenly"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Coarse grids and few samples, for a first look.")] = False,
) -> None:
    """Measure this machine, and write a hardware profile of it.

    Products, products by expert, attention, memory, copies into slots, collectives, and how much copies slow
    computation down. Leave the machine alone meanwhile: what else runs is measured too.
    """
    target = check_output(output)
    if threads is not None:
        check_limit("threads", threads, MOST_THREADS, "more than there are cores make nothing faster")
    import torch
    from rich.console import Console

    from moepass.explaining.hardware_report import print_hardware
    from moepass.profiles.hardware_profiles import profile_json
    from moepass.runtime.calibrate.calibration import calibrate as measure

    kind = device.value if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    with _progress_bar("starting") as (bar, task):

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        hardware = measure(kind, ranks, threads, is_quick=quick, versions={"moepass": __version__}, report=report)
    with open_output(output, target) as sink:
        sink.write(profile_json(hardware))
    print_hardware(Console(stderr=target is None), hardware)


@app.command()
def demo(
    texts: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Held-out texts to score.", show_default="all")
    ] = None,
    lower: _Lower = _Lowering.inductor,
    threads: _Threads = None,
) -> None:
    """Compile the embedded model, stream its experts, and compare every prediction with plain PyTorch."""
    check_standard_output()
    _set_threads(threads)
    check_compiler_cache()
    from moepass.cli.demo import run_demo

    if not run_demo(texts, lower.value):
        raise typer.Exit(1)


# ---- The parts of `score` --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of input: `number` as an editor counts it, `further` the keys beside `text`."""

    number: int
    text: str
    further: dict[str, Any]


def read_lines(source: str) -> list[Line]:
    """All lines of the file `source`, or of standard input for "-"; blank lines are skipped.

    Raises InputError, which names the line, where one is no JSON object with a string `text`.
    """
    try:
        if source == "-":
            return parse_lines(limited_lines(sys.stdin.buffer, "standard input"), "standard input")
        with open(source, "rb") as opened:
            return parse_lines(limited_lines(opened, source), source)
    except OSError as error:
        raise InputError(f"input {source!r} cannot be read: {error.strerror}") from error


def limited_lines(source: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of `source`, of which none is read beyond the limits. Raises TooLargeError; `name` stands in it."""
    number = nbytes = 0
    while raw := source.readline(MOST_LINE_BYTES + 1):
        number += 1
        nbytes += len(raw)
        if len(raw) > MOST_LINE_BYTES:
            raise TooLargeError(f"line {number} of {name} is longer than {MOST_LINE_BYTES} bytes, the limit; split it")
        check_limit(f"the number of lines of {name}", number, MOST_LINES, "split it into several files")
        check_limit(f"the size of {name} in bytes", nbytes, MOST_INPUT_BYTES, "split it into several files")
        yield raw


def parse_lines(source: Iterable[bytes], name: str) -> list[Line]:
    """As `read_lines`, from the lines themselves; `name` stands in errors."""
    lines: list[Line] = []
    for number, raw in enumerate(source, 1):
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if not raw.strip():
            continue
        where = f"line {number}"
        try:
            record = decode_json(raw)
        except InputError as error:
            raise InputError(f"{where} of {name} is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise InputError(f'{where} of {name} is {_kind(record)}; it must be an object such as {{"text": "..."}}')
        if "text" not in record:
            keys = ", ".join(repr(key) for key in record) or "none"
            raise InputError(f'{where} of {name} has no "text"; its keys are {keys}')
        text = record.pop("text")
        if not isinstance(text, str):
            raise InputError(f'{where} of {name}: "text" is {_kind(text)}; it must be a string')
        if not text.strip():
            raise InputError(f'{where} of {name}: "text" is empty')
        lines.append(Line(number, text, record))
    if not lines:
        raise InputError(f'{name} is empty; it must hold one JSON object per line, such as {{"text": "..."}}')
    return lines


def parse_labels(text: str | None) -> list[str] | None:
    """`a,b` or `["a", "b"]` as a list; None for None. Raises InputError for a list that is not one of strings."""
    if text is None:
        return None
    if not text.startswith("["):
        return text.split(",")
    try:
        labels: list[str] = decode_json(text, list[str])
        return labels
    except InputError as error:
        raise InputError(f"labels {text!r} are no JSON list of strings: {error}") from error


def parse_bytes(text: str | None) -> float | None:
    """`60e9`, `60GB` or `56GiB` as bytes; None for None. Raises InputError for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*(?:([kMGT])(i?)B|B)?", text.strip())
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or not 0 < number < math.inf:
        raise InputError(f"memory budget {text!r} is no number of bytes above 0, such as 60e9, 60GB or 56GiB")
    power = " kMGT".index(found[2]) if found[2] else 0
    scale: int = (1024 if found[3] else 1000) ** power
    return number * scale


def make_scorer(model: str, *, lower: str, slots: int, stream: bool, device: str, link: str, compiled: bool) -> Scorer:
    """Load and, if asked for, offload and compile the checkpoint `model`.

    Raises CheckpointError, InputError (a device that is not there, no experts to stream) and OptionError.
    """
    import torch
    from transformers import PreTrainedModel

    from moepass.models.checkpoint.checkpoint_folders import (
        load_config,
        load_model,
        load_prompt,
        load_tokenizer,
        resolve_model,
    )
    from moepass.runtime.offload.offload import check_device, find_expert_modules, offload_experts
    from moepass.runtime.serving.scoring import Forward, Scorer
    from moepass.runtime.transfer.link import parse_link

    folder = resolve_model(model)
    compute_device = check_device(device)
    if compute_device.type == "meta":
        raise InputError("device is 'meta', which computes nothing; it must be cpu, cuda or cuda:INDEX")
    if parse_link(link).is_emulated and compute_device.type != "cpu":
        raise OptionError(f"link is {link!r}, which exists for device cpu only; the device is {device}")
    load_config(folder)  # its checks come before the tokenizer's loader reads it too
    tokenizer, prompt = load_tokenizer(folder), load_prompt(folder)
    loaded: PreTrainedModel = load_model(folder)
    if stream:
        if not find_expert_modules(loaded):
            raise InputError(f"{model} has no experts to stream: {type(loaded).__name__} is dense; use --no-stream")
        offload_experts(loaded, device=compute_device, slots=slots, link=link)
    loaded.to(compute_device)

    def compile_module(module: torch.nn.Module) -> Forward:
        return torch.compile(module, backend="asyncep", options={"lower": lower})

    return Scorer.of(loaded, tokenizer, prompt, compile_module if compiled else None)


def _answer(line: Line, result: Score) -> dict[str, Any]:
    further = {f"input_{key}" if key in _ANSWER_KEYS else key: value for key, value in line.further.items()}
    # Seven digits are what a 32-bit logit carries.
    probabilities = {label: float(f"{value:.7g}") for label, value in result.probabilities.items()}
    return {"label": result.label, "probabilities": probabilities, "mass": float(f"{result.mass:.7g}"), **further}


def _progress(results: Iterable[tuple[Line, Score]], total: int) -> Iterator[tuple[Line, Score]]:
    with _progress_bar("compiling, then scoring", total) as (bar, task):
        for result in results:
            bar.update(task, advance=1, description="scoring")
            yield result


@contextlib.contextmanager
def _progress_bar(description: str, total: int | None = None) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on standard error, where that is a terminal, and its one task."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress, progress.add_task(description, total=total)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """For work that makes millions of objects and little garbage, as imports and tracing do: an eighth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _note_refusals(compilations: Sequence[Compilation]) -> None:
    for compilation in compilations:
        for refusal in compilation.plan.refusals:
            typer.echo(f"moepass: note: runs as it came: {refusal}", err=True)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        check_limit("threads", threads, MOST_THREADS, "more than there are cores make nothing faster")
        import torch

        torch.set_num_threads(threads)


def _kind(value: object) -> str:
    names: dict[type[Any], str] = {
        dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), "a number")
