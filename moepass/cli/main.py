"""The command line: `moepass demo`, `explain`, `calibrate`, `score`, `serve`, `batch`, `bench` and `cache`.

Nothing heavy is imported before a command runs: `moepass --help` must not wait for torch.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from moepass.cli.arguments import set_threads
from moepass.cli.client_commands import batch, bench
from moepass.cli.progress import no_garbage_collection, progress_bar
from moepass.cli.score_command import score
from moepass.cli.serve_command import serve
from moepass.cli.streams import (
    READER_LEFT,
    STOPPED,
    check_compiler_cache,
    check_output,
    check_standard_output,
    open_output,
    process_streams,
)
from moepass.models.byte_counts import parse_bytes
from moepass.models.errors import InputError, MoepassError, OptionError
from moepass.models.homes import HOMES
from moepass.models.limits import (
    MOST_THREADS,
    check_limit,
)
from moepass.models.version import __version__

_LONGEST_ERROR = 1000
_ORDER = ("demo", "explain", "calibrate", "score", "serve", "batch", "bench", "cache")


class _Commands(TyperGroup):
    """Errors that moepass raises on purpose end as one line, without a traceback; all others keep theirs.

    Commands are listed in the order in which a newcomer needs them.
    """

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=_ORDER.index)

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


app.command(
    epilog="Examples:\n\n"
    "**moepass score demo < texts.jsonl**\n\n"
    "**moepass score ./checkpoint --labels ' yes, no' --input texts.jsonl --output scores.jsonl**"
)(score)


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
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(HOMES)}]",
            help="Where the experts rest.",
            show_default=f"the fastest of {', '.join(home.name for home in HOMES.values() if home.is_candidate)}",
        ),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp8", "fp32"] | None, typer.Option(help="Of the weights.", show_default="that of the config")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences of one rank and step.")] = 16,
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
    lower: Annotated[
        Literal["inductor", "eager", "tensorrt"],
        typer.Option(
            help="How segments would be compiled; eager is bit-identical to the plain model, and tensorrt shows which "
            "segments are for TensorRT. Nothing has to be installed for that."
        ),
    ] = "inductor",
    format: Annotated[
        Literal["text", "json", "html", "trace"],
        typer.Option(help="text for people, json for programs, html for browsers, trace for ui.perfetto.dev."),
    ] = "text",
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
    with Console(stderr=True).status("planning ..."), no_garbage_collection():
        from moepass.explaining.compiler_part import is_stored
        from moepass.explaining.explain_model import explain as explain_it
        from moepass.explaining.report_text import print_report

        if not is_stored(model, lower):
            check_compiler_cache()
        report = explain_it(
            model,
            hardware=hardware,
            ranks=ranks,
            home=home,
            dtype=dtype,
            batch=batch,
            seq=seq,
            tokens=tokens,
            memory_budget_bytes=budget,
            slots=slots,
            lower=lower,
        )
    if format == "text" and target is None:
        print_report(Console(), report, all_rows)
        return
    if format == "trace" and report.schedule is None:
        raise InputError(
            f"{report.model.name} has no timeline on {report.hardware.name}: nothing could be scheduled",
            name="format",
            value=format,
        )
    made = {
        "text": lambda: report.text(every_row=all_rows),
        "json": report.to_json,
        "html": report.html,
        "trace": report.trace,
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
        Literal["cpu", "cuda"] | None,
        typer.Option(help="What to measure.", show_default="cuda where there is a GPU, else cpu"),
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
    """Measure this machine, write a hardware profile of it, and store that as the profile of this machine.

    Models on this machine are then planned with it. With --quick it is written and not stored.

    GEMMs, grouped GEMMs, attention, memory, copies into slots, collectives, and how much copies slow
    computation down. Leave the machine alone meanwhile: what else runs is measured too.
    """
    target = check_output(output)
    if threads is not None:
        check_limit("threads", threads, MOST_THREADS, "more than there are cores make nothing faster")
    import torch
    from rich.console import Console

    from moepass.explaining.hardware_report import print_hardware
    from moepass.runtime.calibrate.calibration import calibrate as measure
    from moepass.runtime.profiles.hardware_profiles import profile_json
    from moepass.runtime.profiles.stored_profiles import store_profile

    kind = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    with progress_bar("starting") as (bar, task):

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        hardware = measure(kind, ranks, threads, is_quick=quick, versions={"moepass": __version__}, report=report)
    with open_output(output, target) as sink:
        sink.write(profile_json(hardware))
    console = Console(stderr=target is None)
    print_hardware(console, hardware)
    if not quick:
        stored = store_profile(hardware)
        console.print(f"stored as the profile of this machine: {stored}", highlight=False, soft_wrap=True)


app.command(
    epilog="Examples:\n\n**moepass serve demo**\n\n**moepass serve ./checkpoint --ranks 2 --home peer --port 8080**",
    context_settings={"auto_envvar_prefix": "MOEPASS"},
)(serve)


app.command(
    epilog="Examples:\n\n**moepass batch demo -i requests.jsonl -o answers.jsonl**\n\n"
    "**moepass batch --url http://127.0.0.1:8000 -i requests.jsonl -o answers.jsonl**",
    context_settings={"auto_envvar_prefix": "MOEPASS"},
)(batch)


app.command(
    epilog="Examples:\n\n**moepass bench http://127.0.0.1:8000 --workload shared-profiles --goodput 500**\n\n"
    "**moepass bench http://127.0.0.1:8000 --route completions --rate 20 --prefixes 4 --prefix-length 512**",
)(bench)


@app.command()
def demo(
    texts: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Held-out texts to score.", show_default="all")
    ] = None,
    lower: Annotated[
        Literal["inductor", "eager"],
        typer.Option(help="How segments are compiled; eager is bit-identical to the plain model."),
    ] = "inductor",
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="CPU threads to compute with.", show_default="all cores")
    ] = None,
) -> None:
    """Compile the embedded model, stream its experts, compare every prediction with plain PyTorch, then serve it.

    The server is started at a free port, asked one decision over HTTP, and ended.
    """
    check_standard_output()
    set_threads(threads)
    check_compiler_cache()
    from moepass.cli.serving import serve_once
    from moepass.demo.comparison import run_demo
    from moepass.demo.decision import ask_decision

    if not run_demo(texts, lower):
        raise typer.Exit(1)
    if not serve_once("demo", threads, ask_decision):
        raise typer.Exit(STOPPED)


@app.command(epilog="Examples:\n\n**moepass cache --list**\n\n**moepass cache --clear**")
def cache(
    list_: Annotated[bool, typer.Option("--list", help="Show what is stored; the default.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove it all.")] = False,
) -> None:
    """Show or remove the compiled models and tuned kernels that later starts use at once.

    They are kept in the folder that MOEPASS_CACHE_DIR names, by default beside the code that torch's compiler keeps.
    Where MOEPASS_CACHE_DIR is empty, nothing is stored or used. A model is compiled anew where anything that it depends
    on has changed: its code or configuration, options, versions, the processor.
    """
    if list_ and clear:
        raise OptionError("--list and --clear exclude each other; give one")
    check_standard_output()
    check_compiler_cache()
    from moepass.stored_models import clear_cache, list_cache

    (clear_cache if clear else list_cache)()
