"""The command line: `moepass demo`, `explain`, `calibrate`, `pack`, `score`, `serve`, `batch`, `bench` and `cache`.

Commands import heavy packages when they run, because `moepass --help` must not wait for torch.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import msgspec
import typer
from msgspec import Struct
from typer.core import TyperGroup

from moepass.cli import streams
from moepass.cli.client_commands import batch, bench
from moepass.cli.explain_command import explain
from moepass.cli.pack_command import pack
from moepass.cli.progress import progress_bar
from moepass.cli.record_options import takes_records
from moepass.cli.score_command import score, set_threads
from moepass.cli.serve_options import RankOptions, RankSetup, ServerOptions
from moepass.cli.torchrun import checked_ranks, launched_process, run_launched_rank
from moepass.models.errors import MoepassError, OptionError
from moepass.models.limits import MOST_THREADS, check_limit
from moepass.models.version import __version__
from moepass.option_records import Count, option

_LONGEST_ERROR = 1000
_ORDER = ("demo", "explain", "calibrate", "pack", "score", "serve", "batch", "bench", "cache")


class _Commands(TyperGroup):
    """The commands in the order in which a newcomer needs them. Errors raised on purpose are reported in one line."""

    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=_ORDER.index)

    def main(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().main(*arguments, **keywords)
        except SystemExit as end:
            # Typer and rich both exit if the reader of a pipe has left.
            if isinstance(end.__context__, BrokenPipeError):
                raise SystemExit(streams.EXIT_BROKEN_PIPE) from None
            raise
        except Exception as error:
            # torch.compile wraps what a backend raises and keeps the original as `inner_exception`.
            refusal = error if isinstance(error, MoepassError) else getattr(error, "inner_exception", None)
            if not isinstance(refusal, MoepassError):
                raise
            typer.echo(f"moepass: error: {_shortened(' '.join(str(refusal).split()))}", err=True)
            raise SystemExit(2 if isinstance(refusal, OptionError) else 1) from error


def _shortened(text: str) -> str:
    """Return `text` without its middle if it is long: an error ends with the valid values, which must stay visible."""
    half = _LONGEST_ERROR // 2
    more = len(text) - 2 * half
    return text if more <= 0 else f"{text[:half]} ... ({more} characters) ... {text[-half:]}"


app = typer.Typer(
    cls=_Commands,
    name="moepass",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Run mixture-of-experts models for prefill-only work, streaming their experts while other layers compute.",
    epilog="Try it without a checkpoint: **moepass demo**",
)


def main() -> None:
    """Run the command line of this process."""
    with streams.process_streams():
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
    # Checkpoints are local folders, so no library may access the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


app.command(
    epilog="Examples:\n\n"
    "**moepass score demo < texts.jsonl**\n\n"
    "**moepass score ./checkpoint --labels ' yes, no' --input texts.jsonl --output scores.jsonl**"
)(score)
app.command(
    epilog="Examples:\n\n**moepass explain qwen3-235b-a22b --hardware 8xh100-80g --dtype fp8**\n\n"
    "**moepass explain ./config.json --tokens 65536 --format html --output plan.html**"
)(explain)
app.command(epilog="Example:\n\n**moepass pack ./checkpoint -o ./packed && moepass serve ./packed**")(pack)


class CalibrateOptions(Struct, frozen=True, kw_only=True):
    """The options of `moepass calibrate`."""

    output: Annotated[str, option("The file for the profile, as JSON; - is standard output.", metavar="FILE")] = "-"
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        option("The kind of device to measure.", unset="cuda if there is a GPU, else cpu"),
    ] = None
    ranks: Annotated[
        Count | None, option("The number of ranks that run at the same time.", unset="one per GPU; 2 on a CPU")
    ] = None
    threads: Annotated[Count | None, option("CPU threads of each rank.", unset="the cores, divided evenly")] = None
    quick: Annotated[bool, option("Measure coarse grids with few samples.")] = False


@app.command(
    epilog="Examples:\n\n**moepass calibrate --output hardware.json**\n\n"
    "**moepass calibrate --device cpu --ranks 1 --threads 1 --quick**"
)
@takes_records
def calibrate(options: CalibrateOptions) -> None:
    """Measure this machine, write its hardware profile, and store that as the profile of this machine.

    moepass then uses the stored profile to plan models on this machine. With --quick the profile is written but not
    stored.

    Measures GEMMs, grouped GEMMs, attention, memory, copies into slots, collectives, and how much copies slow
    computation down. Other programs that run at the same time distort the figures.
    """
    target = streams.check_output(options.output)
    if options.threads is not None:
        check_limit("threads", options.threads, MOST_THREADS, "more threads than cores make nothing faster")
    import torch
    from rich.console import Console

    from moepass.explaining.hardware_report import print_hardware
    from moepass.runtime.calibrate.calibration import calibrate as measure
    from moepass.runtime.profiles.hardware_profiles import profile_json
    from moepass.runtime.profiles.stored_profiles import store_profile

    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with progress_bar("starting") as (bar, task):

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        versions = {"moepass": __version__}
        hardware = measure(
            kind, options.ranks, options.threads, is_quick=options.quick, versions=versions, report=report
        )
    with streams.open_output(options.output, target) as sink:
        sink.write(profile_json(hardware))
    console = Console(stderr=target is None)
    print_hardware(console, hardware)
    if not options.quick:
        stored = store_profile(hardware)
        console.print(f"stored as the profile of this machine: {stored}", highlight=False, soft_wrap=True)


@app.command(
    epilog="Examples:\n\n**moepass serve demo**\n\n**moepass serve ./checkpoint --ranks 2 --home peer --port 8080**",
    context_settings={"auto_envvar_prefix": "MOEPASS"},
)
@takes_records
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or **demo**.", envvar="MOEPASS_MODEL")
    ],
    *,
    server: ServerOptions,
    rank: RankOptions,
) -> None:
    """Serve decisions, scores, rankings and embeddings over HTTP, in the formats of OpenAI's and other clients.

    Ranks compile and warm up first; /ready answers 200 when they have finished. All questions of a request and all
    requests of a step share their prefixes.
    """
    if server.api_key is None and os.environ.get("MOEPASS_API_KEY") == "":
        # Typer reads an empty variable as unset. A key that was lost on its way must not open the server to everyone.
        server = msgspec.structs.replace(server, api_key="")
    _ = server.open_bytes  # raises before anything starts
    launched = launched_process()
    if launched is not None:
        rank = msgspec.structs.replace(rank, ranks=checked_ranks(launched, rank.ranks))
    streams.check_compiler_cache()
    if launched is not None and launched.rank > 0:
        raise typer.Exit(run_launched_rank(launched))

    from moepass.cli.serving import run_server

    run_server(server, RankSetup(model, rank), launched=launched)


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
        int | None, typer.Option(min=1, metavar="N", help="The number of held-out texts to score.", show_default="all")
    ] = None,
    lower: Annotated[
        Literal["inductor", "eager"],
        typer.Option(help="How segments are compiled; **eager** is bit-identical to the plain model."),
    ] = "inductor",
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="CPU threads to compute with.", show_default="all cores")
    ] = None,
) -> None:
    """Compile the demo model, stream its experts, compare every prediction with plain PyTorch, then serve it.

    The server starts at a free port, answers one decision over HTTP, and ends.
    """
    streams.check_standard_output()
    set_threads(threads)
    streams.check_compiler_cache()
    from moepass.cli.serving import serve_once
    from moepass.demo.comparison import ask_decision, run_demo

    if not run_demo(texts, lower):
        raise typer.Exit(1)
    if not serve_once("demo", threads, ask_decision):
        raise typer.Exit(streams.EXIT_INTERRUPTED)


@app.command(epilog="Examples:\n\n**moepass cache --list**\n\n**moepass cache --clear**")
def cache(
    list_: Annotated[bool, typer.Option("--list", help="List what is stored. This is the default.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything that is stored.")] = False,
) -> None:
    """Show or remove the compiled models and tuned kernels that later starts reuse.

    They are stored in the folder that MOEPASS_CACHE_DIR names, by default a folder in the cache of torch's compiler. If
    MOEPASS_CACHE_DIR is empty, nothing is stored or reused. A model is compiled again if its code, its configuration,
    the options, the versions or the processor have changed.
    """
    if list_ and clear:
        raise OptionError("--list and --clear exclude each other; use one of them")
    streams.check_standard_output()
    streams.check_compiler_cache()
    from moepass.stored_models import show_cache

    show_cache(clear=clear)
