"""The options of `moepass serve`. Each has a twin in the environment: --port is MOEPASS_PORT."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from moepass.cli.arguments import LoweringName, ServedDtype
from moepass.cli.rank_options import RankOptions, check_kernel_tuning, parse_chunk_tokens
from moepass.cli.streams import check_compiler_cache
from moepass.cli.torchrun import checked_ranks, launched_process, run_launched_rank
from moepass.models.byte_counts import parse_bytes
from moepass.models.errors import InputError, OptionError
from moepass.models.homes import HOMES, home_named
from moepass.models.limits import MOST_CONNECTIONS, MOST_RANKS, MOST_THREADS, MOST_TOKENS, MOST_WAIT_SECONDS


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or **demo**.", envvar="MOEPASS_MODEL")
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: any that is free.")] = 8000,
    ranks: Annotated[
        int,
        typer.Option(min=1, max=MOST_RANKS, metavar="N", help="Processes that compute."),
    ] = 1,
    home: Annotated[
        str,
        typer.Option(
            metavar=f"[{'|'.join(HOMES)}]",
            help="Where experts rest; **device** streams none.",
        ),
    ] = "host",
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="What clients call the model; more than one may be given.",
            show_default="the last part of MODEL",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Clients must send it.", show_default="none"),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where ranks compute: cpu or cuda.")
    ] = "cpu",
    dtype: Annotated[
        ServedDtype | None,
        typer.Option(help="Of the weights.", show_default="that of the checkpoint"),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Of each rank's device, such as 6GB: the planner decides which layers stay.",
            show_default="experts of no layer stay",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Slots that experts stream through.", show_default="2"),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A preset or a profile of the machine.",
            show_default="what `moepass calibrate` has stored",
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory of each rank for prefixes that come again; **off** keeps none.",
            show_default="a tenth of what is free",
        ),
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            help="A step is full from so many tokens on.",
            show_default="the plan's saturation threshold",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, max=MOST_WAIT_SECONDS, metavar="SECONDS", help="A request is given up after it."),
    ] = 60.0,
    queue_seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=MOST_WAIT_SECONDS,
            metavar="SECONDS",
            help="Work that may wait; beyond it requests are refused with 429.",
        ),
    ] = 30.0,
    queue_bytes: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Tokens of all open requests."),
    ] = "1GB",
    max_connections: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 20, metavar="N", help="Clients may have so many open; one more is answered with 503."
        ),
    ] = MOST_CONNECTIONS,
    drain: Annotated[
        float,
        typer.Option(
            min=0, max=MOST_WAIT_SECONDS, metavar="SECONDS", help="After SIGTERM, open requests have so long."
        ),
    ] = 30.0,
    chunk_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Between attentions, run at most so many tokens of a step at a time: longer inputs fit into memory. "
            "**auto**: as many as the memory budget leaves room for.",
            show_default="all at once",
        ),
    ] = None,
    tune_kernels: Annotated[
        bool,
        typer.Option(
            "--tune-kernels",
            help="On a GPU, measure which tiles expert kernels are fastest with, before the server is ready.",
        ),
    ] = False,
    lower: Annotated[LoweringName, typer.Option(help="How segments are compiled.")] = LoweringName.inductor,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile at all.")] = False,
    link: Annotated[
        str,
        typer.Option("--link", metavar="LINK", help="real, or emulate:BYTES_PER_S."),
    ] = "real",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_THREADS,
            metavar="N",
            help="CPU threads of each rank.",
            show_default="cores shared out evenly",
        ),
    ] = None,
) -> None:
    """Answer decisions, scores, rankings and embeddings over HTTP, in the shapes of OpenAI's and other clients.

    Ranks compile and warm up first; /ready tells when they are done. All questions of a request and all requests of a
    step share their prefixes.
    """
    if api_key is None and os.environ.get("MOEPASS_API_KEY") == "":
        api_key = ""  # typer takes it for none, and then a key that was lost on its way would let everyone in
    most_bytes = parse_bytes(queue_bytes, "queue_bytes")
    assert most_bytes is not None
    launched = launched_process()
    rank_options = rank_options_of(
        model,
        ranks=ranks if launched is None else checked_ranks(launched, ranks),
        home=home,
        device=device,
        dtype=dtype,
        memory_budget=memory_budget,
        slots=slots,
        hardware=hardware,
        kv_cache=kv_cache,
        step_tokens=step_tokens,
        chunk_tokens=chunk_tokens,
        tune_kernels=tune_kernels,
        lower=lower,
        eager=eager,
        link=link,
        threads=threads,
    )
    check_compiler_cache()
    if launched is not None and launched.rank > 0:
        raise typer.Exit(run_launched_rank(launched))

    from moepass.cli.serving import ServeOptions, run_server

    run_server(
        ServeOptions(
            host=host,
            port=port,
            names=served_names(model, name),
            api_key=api_key,
            timeout_seconds=timeout,
            queue_seconds=queue_seconds,
            queue_bytes=int(most_bytes),
            max_connections=max_connections,
            drain_seconds=drain,
        ),
        rank_options,
        launched=launched,
    )


def rank_options_of(
    model: str,
    *,
    ranks: int,
    home: str,
    device: str,
    dtype: ServedDtype | None,
    memory_budget: str | None,
    slots: int | None,
    hardware: str | None,
    kv_cache: str | None,
    step_tokens: int | None,
    chunk_tokens: str | None,
    tune_kernels: bool,
    lower: LoweringName,
    eager: bool,
    link: str,
    threads: int | None,
) -> RankOptions:
    """What these options of `serve`, by their names, say to the ranks. Raises OptionError."""
    try:
        cache_bytes = 0 if kv_cache == "off" else parse_bytes(kv_cache, "kv_cache")
        parse_bytes(memory_budget)
        home = home_named(home).name
    except InputError as error:
        raise OptionError(str(error), name=error.name, value=error.value, expected=error.expected) from error
    if tune_kernels:
        check_kernel_tuning(device, lower.value, eager)
    return RankOptions(
        model=model,
        ranks=ranks,
        home=home,
        device=device,
        lower=lower.value,
        compiled=not eager,
        link=link,
        key="",
        meeting="",
        threads=threads or max(1, (os.cpu_count() or 1) // ranks),
        dtype=None if dtype is None else dtype.value,
        slots=slots,
        memory_budget=memory_budget,
        hardware=hardware,
        cache_bytes=None if cache_bytes is None else int(cache_bytes),
        step_tokens=step_tokens,
        chunk_tokens=parse_chunk_tokens(chunk_tokens, home, memory_budget),
        tune_kernels=tune_kernels,
    )


def served_names(model: str, given: list[str] | None) -> tuple[str, ...]:
    """What clients may call the model."""
    return tuple(given or [os.path.basename(os.path.abspath(model)) or model])
