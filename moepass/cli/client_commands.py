"""The commands that send requests: `moepass batch` and `moepass bench`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
from msgspec import Meta, Struct

from moepass.cli.progress import progress_bar
from moepass.cli.record_options import takes_records
from moepass.cli.score_command import parse_labels
from moepass.cli.serve_options import RankOptions, RankSetup, served_names
from moepass.cli.streams import check_compiler_cache
from moepass.clients.workloads import BenchOptions
from moepass.models.errors import OptionError
from moepass.models.limits import check_wait
from moepass.option_records import fields_of, option
from moepass.runtime.system.processes import allow_many_files

if TYPE_CHECKING:
    from moepass.clients.batch_run import Batch, BatchCounts

_Result = TypeVar("_Result")

# Options that only a MODEL has, and no server of --url.
_MODEL_OPTIONS = (*(field.name for field in fields_of(RankOptions)), "name")


class BatchOptions(Struct, frozen=True, kw_only=True):
    """The options of `moepass batch`, besides the options of its ranks."""

    input: Annotated[str, option("Requests, one JSON object per line.", metavar="FILE", short="-i")]
    output: Annotated[str, option("Answers, appended in the order in which they arrive.", metavar="FILE", short="-o")]
    url: Annotated[
        str | None, option("Ask this server instead of a MODEL, such as http://127.0.0.1:8000.", metavar="URL")
    ] = None
    api_key: Annotated[str | None, option("The API key of the server at --url.", metavar="KEY")] = None
    name: Annotated[
        tuple[str, ...],
        option(
            "A name by which requests call the MODEL; repeat the option for more names.",
            unset="the last part of MODEL",
            metavar="NAME",
        ),
    ] = ()
    in_flight: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 16)], option("The maximum number of requests that are open at the same time.")
    ] = 512
    retry_errors: Annotated[bool, option("Send the requests again that an earlier run answered with an error.")] = False
    timeout: Annotated[
        Annotated[float, Meta(ge=0.001)],
        option("The time after which an unanswered request is an error.", metavar="SECONDS"),
    ] = 600.0
    patience: Annotated[
        Annotated[float, Meta(ge=0)],
        option("How long to wait for a full queue, or for a server that does not answer.", metavar="SECONDS"),
    ] = 600.0


@takes_records
def batch(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A checkpoint folder, or **demo**, to answer in this process."),
    ] = None,
    *,
    options: BatchOptions,
    rank: RankOptions,
) -> None:
    """Answer a file of requests in the format of OpenAI's batches.

    Each input line has **custom_id**, **method** (POST), **url** (a route of the server, such as /v1/decisions) and
    **body**. Each output line has **custom_id**, **response** (status_code, request_id, body) and **error**, in the
    order in which the answers arrive. A line that is not a valid request gets an error.

    The command may be stopped at any time, even killed. Started again, it skips the requests that the output answers.

    Exit status: 0 if every line has an answer, 1 if some answers are errors or the server stopped answering, 2 for
    invalid options, 130 if the command was interrupted.
    """
    if (model is None) == (options.url is None):
        raise OptionError("give either a MODEL, to run it here, or --url, for a running server", name="model")
    if options.url is not None:
        _refuse_rank_options(context)
    check_wait("timeout", options.timeout)
    from moepass.clients.batch_run import Batch
    from moepass.clients.server_address import parse_server_url

    server = parse_server_url(options.url) if options.url is not None else RankSetup(model or "", rank)
    with Batch(options.input, options.output, retry_errors=options.retry_errors) as asked:
        counts = asked.counts
        stopped: typer.Exit | None = None
        answered_before = f", {counts.answered_before} of them already answered" if counts.answered_before else ""
        typer.echo(f"{counts.lines} lines{answered_before}", err=True)
        if not asked.is_done:
            with progress_bar("starting", counts.lines, rate="lines") as (bar, task):

                def show(counts: BatchCounts) -> None:
                    bar.update(task, completed=counts.done, description=f"{counts.errors} errors")

                bar.update(task, completed=counts.done)
                try:
                    asyncio.run(_until_stopped(_ask(asked, server, options, show)))
                except typer.Exit as end:
                    stopped = end
    typer.echo(f"{counts.answered} lines answered now; {counts.errors} of {counts.done} answers are errors", err=True)
    if stopped is not None:
        left = counts.lines - counts.done
        typer.echo(f"stopped: {left} lines are left; run the same command again to continue", err=True)
        raise stopped
    if counts.errors:
        typer.echo("to ask the requests with errors again, add --retry-errors", err=True)
        raise typer.Exit(1)


@takes_records
def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, such as http://127.0.0.1:8000.")],
    *,
    options: BenchOptions,
) -> None:
    """Measure a server with a workload: latency, requests and tokens per second, goodput, hit rate, FLOPs.

    The server must have the route that **--route** names, in the format of OpenAI (decisions, completions), SGLang
    (score) or Cohere (rerank). Figures that the server does not report are left out.

    Exit status: 0 if every request was answered or refused because the queue was full, 1 otherwise.
    """
    check_wait("timeout", options.timeout)
    shape = options.shape(parse_labels(options.labels) or ())
    from moepass.clients.bench_run import measure, table_of
    from moepass.clients.server_address import parse_server_url

    address = parse_server_url(url)
    allow_many_files()
    total = shape.requests if options.file is None else options.requests
    with progress_bar("warming up", total, rate="requests") as (bar, task):
        show = functools.partial(bar.update, task, advance=1, description="measuring")
        report = asyncio.run(_until_stopped(measure(address, options, shape, show)))
    if options.json:
        typer.echo(msgspec.json.encode(report))
    else:
        from rich.console import Console

        Console().print(table_of(report), highlight=False)
    if report.errors:
        raise typer.Exit(1)


def _refuse_rank_options(context: typer.Context) -> None:
    """Raise OptionError for an option of a MODEL on the command line; only report one of the environment."""
    for name in _MODEL_OPTIONS:
        source = context.get_parameter_source(name)
        option = name.replace("_", "-")
        if source is not None and source.name == "COMMANDLINE":
            text = f"--{option} only applies to a MODEL, but --url names a running server; remove --{option}"
            raise OptionError(text, name=name)
        if source is not None and source.name == "ENVIRONMENT":
            variable = f"MOEPASS_{name.upper()}"
            typer.echo(f"{variable} is ignored: it only applies to a MODEL, but --url names a running server", err=True)


async def _ask(
    asked: Batch, server: str | RankSetup, options: BatchOptions, show: Callable[[BatchCounts], None]
) -> None:
    """Ask the server at an address, or one in this process."""
    from moepass.clients.server_address import make_client

    async with contextlib.AsyncExitStack() as opened:
        if isinstance(server, str):
            client = make_client(server, options.api_key, timeout_seconds=options.timeout)
        else:
            check_compiler_cache()
            from moepass.cli.serving import in_process
            from moepass.runtime.serving.routes.server_settings import ServerSettings

            settings = ServerSettings(served_names(server.model, options.name), None, options.timeout)
            transport = await opened.enter_async_context(in_process(server, settings))
            client = make_client("http://moepass", None, timeout_seconds=None, transport=transport)
        await opened.enter_async_context(client)
        await asked.run(client, most_open=options.in_flight, patience_seconds=options.patience, on_answer=show)


async def _until_stopped(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`. Raise typer.Exit if SIGINT or SIGTERM cancels it."""
    task = asyncio.ensure_future(work)
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, int(number))
    try:
        return await task
    except asyncio.CancelledError:
        if not signals:
            raise
        raise typer.Exit(128 + signals[0]) from None
