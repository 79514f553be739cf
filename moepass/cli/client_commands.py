"""The commands that send requests: `moepass batch` and `moepass bench`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from moepass.cli.arguments import parse_labels, parse_range
from moepass.cli.progress import progress_bar
from moepass.cli.rank_options import RankOptions, RankSetup
from moepass.cli.record_options import takes_records
from moepass.cli.server_options import served_names
from moepass.cli.streams import check_compiler_cache
from moepass.clients.workloads import PRESETS, ROUTES, WorkloadShape
from moepass.models.errors import OptionError
from moepass.models.limits import MOST_BENCH_REQUESTS, check_wait
from moepass.option_records import fields_of
from moepass.runtime.system.processes import allow_many_files

if TYPE_CHECKING:
    from moepass.clients.batch_run import Batch, BatchCounts
    from moepass.clients.bench_report import BenchReport

# Options that only a MODEL has, and no server of --url.
_MODEL_OPTIONS = (*(field.name for field in fields_of(RankOptions)), "name")


@takes_records
def batch(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A checkpoint folder, or **demo**, to answer in this process."),
    ] = None,
    *,
    input: Annotated[str, typer.Option("--input", "-i", metavar="FILE", help="Requests, one JSON object per line.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Answers, appended in the order in which they arrive.")
    ],
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Ask this server instead of a MODEL, such as http://127.0.0.1:8000."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="The API key of the server at --url.")] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="A name by which requests call the MODEL; repeat the option for more names.",
            show_default="the last part of MODEL",
        ),
    ] = None,
    in_flight: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 16, metavar="N", help="The maximum number of requests that are open at the same time."
        ),
    ] = 512,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Send the requests again that an earlier run answered with an error.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, metavar="SECONDS", help="The time after which an unanswered request is an error."),
    ] = 600.0,
    patience: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="How long to wait for a full queue, or for a server that does not answer."
        ),
    ] = 600.0,
    rank: RankOptions,
) -> None:
    """Answer a file of requests in the format of OpenAI's batches.

    Each input line has **custom_id**, **method** (POST), **url** (a route of the server, such as /v1/decisions) and
    **body**. Each output line has **custom_id**, **response** (status_code, request_id, body) and **error**, in the
    order in which the answers arrive. A line that is not a valid request gets an error.

    The command may be stopped at any time, even killed. Started again, it skips the requests that the output answers.

    Exit status: 0 if every line has an answer, 1 if some answers are errors or the server stopped answering, 130 if the
    command was interrupted.
    """
    if (model is None) == (url is None):
        raise OptionError("give either a MODEL, to run it here, or --url, for a running server", name="model")
    if url is not None:
        _refuse_rank_options(context)
    check_wait("timeout", timeout)
    from moepass.clients.batch_run import Batch
    from moepass.clients.server_address import parse_server_url

    address = parse_server_url(url) if url is not None else None
    with Batch(input, output, retry_errors=retry_errors) as asked:
        counts, stopped = asked.counts, 0
        answered_before = f", {counts.answered_before} of them already answered" if counts.answered_before else ""
        typer.echo(f"{counts.lines} lines{answered_before}", err=True)
        if not asked.is_done:
            with progress_bar("starting", counts.lines, rate="lines") as (bar, task):

                def show(counts: BatchCounts) -> None:
                    bar.update(task, completed=counts.done, description=f"{counts.errors} errors")

                bar.update(task, completed=counts.done)
                stopped = asyncio.run(
                    _until_stopped(
                        _ask_server(asked, address, api_key, timeout, in_flight, patience, show)
                        if address is not None
                        else _ask_model(
                            asked, RankSetup(model or "", rank), tuple(name or ()), timeout, in_flight, patience, show
                        )
                    )
                )
    typer.echo(f"{counts.answered} lines answered now; {counts.errors} of {counts.done} answers are errors", err=True)
    if stopped:
        typer.echo(
            f"stopped: {counts.lines - counts.done} lines are left; run the same command again to continue", err=True
        )
        raise typer.Exit(128 + stopped)
    if counts.errors:
        typer.echo("to ask the requests with errors again, add --retry-errors", err=True)
        raise typer.Exit(1)


def bench(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server, such as http://127.0.0.1:8000.")],
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Lengths and shared prefixes of a data set: {', '.join(PRESETS)}.",
            show_default="none",
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="A file of requests in the format of **moepass batch**, instead of generated ones.",
        ),
    ] = None,
    route: Annotated[str, typer.Option(metavar=f"[{'|'.join(ROUTES)}]", help="The route to call.")] = "decisions",
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_BENCH_REQUESTS,
            metavar="N",
            help="The number of requests to send.",
            show_default="256; all lines of --file",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="N",
            help="Send N requests per second at random times, however slow the answers are.",
            show_default="none",
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            max=1 << 16,
            metavar="N",
            help="Without --rate: the number of requests that are open at the same time.",
        ),
    ] = 32,
    prefixes: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="The number of prefixes that requests share; 0: every request has its own.",
            show_default="0",
        ),
    ] = None,
    prefix_length: Annotated[
        str | None,
        typer.Option(
            metavar="N[-M]",
            help="The length of a prefix in tokens, or in words if the route takes text.",
            show_default="0",
        ),
    ] = None,
    own_length: Annotated[
        str | None, typer.Option(metavar="N[-M]", help="The length of the text after the prefix.", show_default="64")
    ] = None,
    items: Annotated[
        int, typer.Option(min=1, max=4096, metavar="N", help="Questions, prompts, items or documents in a request.")
    ] = 1,
    labels: Annotated[str, typer.Option(metavar="A,B,...", help="The choices of decisions.")] = "yes,no",
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed makes the same requests.")] = 0,
    goodput: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="MS",
            help="Count the requests that were answered within MS milliseconds.",
            show_default="none",
        ),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_BENCH_REQUESTS, metavar="N", help="Requests to send first, which are not counted."
        ),
    ] = 8,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The model to ask for.", show_default="the model that the server has"),
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="The API key of the server.")] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, metavar="SECONDS", help="The time after which an unanswered request is an error."),
    ] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Measure a server with a workload: latency, requests and tokens per second, goodput, hit rate, FLOPs.

    Works with any server that has the route in OpenAI's, SGLang's (score) or Cohere's (rerank) format. Figures that the
    server does not report are left out.

    Exit status: 0 if every request was answered or refused because the queue was full, 1 otherwise.
    """
    check_wait("timeout", timeout)
    if file is not None and workload is not None:
        raise OptionError("--file already contains the requests; leave out --workload", name="workload")
    if workload is not None and workload not in PRESETS:
        raise OptionError.wrong("workload", workload, f"one of {', '.join(PRESETS)}")
    start = PRESETS[workload] if workload is not None else WorkloadShape()
    lengths: dict[str, Any] = {
        "requests": requests if file is None or requests is not None else MOST_BENCH_REQUESTS,
        "prefixes": prefixes,
        "prefix_length": None if prefix_length is None else parse_range("prefix_length", prefix_length),
        "own_length": None if own_length is None else parse_range("own_length", own_length),
    }
    lengths = {name: value for name, value in lengths.items() if value is not None}
    choices = tuple(parse_labels(labels) or ())
    shape = dataclasses.replace(start, route=route, items=items, labels=choices, seed=seed, **lengths)
    generated_name = f"{workload or 'generated'}, {route}"

    from moepass.clients.bench_report import table_of
    from moepass.clients.bench_run import BenchOptions, measure
    from moepass.clients.server_address import parse_server_url

    options = BenchOptions(
        url=parse_server_url(url),
        name=generated_name if file is None else file,
        shape=shape,
        file=file,
        rate=rate,
        concurrency=concurrency,
        goodput_ms=goodput,
        warmup=warmup,
        model=model,
        api_key=api_key,
        timeout_seconds=timeout,
    )
    allow_many_files()
    reports: list[BenchReport] = []
    total = shape.requests if file is None else requests
    with progress_bar("warming up", total, rate="requests") as (bar, task):

        async def run() -> None:
            reports.append(await measure(options, lambda: bar.update(task, advance=1, description="measuring")))

        if stopped := asyncio.run(_until_stopped(run())):
            raise typer.Exit(128 + stopped)
    (report,) = reports
    if json:
        typer.echo(msgspec.json.encode(report))
    else:
        from rich.console import Console

        Console().print(table_of(report), highlight=False)
    if report.errors:
        raise typer.Exit(1)


def _refuse_rank_options(context: typer.Context) -> None:
    """Raise OptionError for an option of a MODEL on the command line.

    The environment may set such an option for other commands, so there it is only reported.
    """
    for name in _MODEL_OPTIONS:
        source = context.get_parameter_source(name)
        option = name.replace("_", "-")
        if source is not None and source.name == "COMMANDLINE":
            raise OptionError(
                f"--{option} only applies to a MODEL, but --url names a running server; remove --{option}", name=name
            )
        if source is not None and source.name == "ENVIRONMENT":
            variable = f"MOEPASS_{name.upper()}"
            typer.echo(f"{variable} is ignored: it only applies to a MODEL, but --url names a running server", err=True)


async def _ask_server(
    asked: Batch,
    address: str,
    api_key: str | None,
    timeout: float,
    in_flight: int,
    patience: float,
    show: Callable[[BatchCounts], None],
) -> None:
    from moepass.clients.server_address import make_client

    async with make_client(address, api_key, timeout_seconds=timeout) as client:
        await asked.run(client, most_open=in_flight, patience_seconds=patience, on_answer=show)


async def _ask_model(
    asked: Batch,
    setup: RankSetup,
    names: tuple[str, ...],
    timeout: float,
    in_flight: int,
    patience: float,
    show: Callable[[BatchCounts], None],
) -> None:
    check_compiler_cache()
    from moepass.cli.serving import in_process
    from moepass.clients.server_address import make_client
    from moepass.runtime.serving.routes.server_settings import ServerSettings

    settings = ServerSettings(served_names(setup.model, names), None, timeout)
    async with contextlib.AsyncExitStack() as opened:
        transport = await opened.enter_async_context(in_process(setup, settings))
        client = make_client("http://moepass", None, timeout_seconds=None, transport=transport)
        await opened.enter_async_context(client)
        await asked.run(client, most_open=in_flight, patience_seconds=patience, on_answer=show)


async def _until_stopped(work: Coroutine[Any, Any, None]) -> int:
    """Run `work` until it ends or SIGINT or SIGTERM cancels it.

    Returns:
        The number of the signal, or 0 if `work` ended by itself.
    """
    task = asyncio.ensure_future(work)
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, int(number))
    try:
        await task
    except asyncio.CancelledError:
        if not signals:
            raise
    return signals[0] if signals else 0
