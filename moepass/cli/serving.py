"""A model that is served over HTTP by `moepass serve`, or inside this process by `moepass batch`.

Both use the routes of one application in one event loop, with ranks as processes. The ranks start before the
application is imported, because both import libraries for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import typer

from moepass.cli.rank_frontend import RANKS_END_SECONDS, make_frontend
from moepass.cli.serve_options import RankOptions, RankSetup, ServerOptions, served_names
from moepass.cli.torchrun import LaunchedProcess
from moepass.models.checkpoint.checkpoint_folders import load_config, load_prompt, load_tokenizer, resolve_model
from moepass.models.errors import InputError, OptionError, one_of
from moepass.models.sizes.architecture import Architecture
from moepass.models.sizes.families import FAMILIES, from_config
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.requests.backend import FrontendLimits
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.routes.server_settings import ServerSettings
from moepass.runtime.serving.workers.frontend import Frontend
from moepass.runtime.serving.workers.supervisor import RankLostError
from moepass.runtime.system.garbage import freeze_live_objects, no_garbage_collection
from moepass.runtime.system.processes import allow_many_files

if TYPE_CHECKING:
    import httpx

    from moepass.runtime.serving.routes.service import Service

# Files that a server opens in addition to connections, for its ranks, the model and libraries.
_OWN_FILES = 256
_WAITING_CONNECTIONS = 2048


def run_server(
    options: ServerOptions,
    setup: RankSetup,
    visit: Callable[[str], Awaitable[None]] | None = None,
    launched: LaunchedProcess | None = None,
) -> None:
    """Serve until a signal ends the server, or until `visit`, which gets its URL when it is ready, returns.

    Raises OptionError if the server cannot listen on the address, RankStartError if a rank cannot start, and
    RankLostError if a rank ends that torchrun started.
    """
    listening = open_socket(options.host, options.port)
    with listening, tempfile.TemporaryDirectory(prefix="moepass-") as folder:
        asyncio.run(_serve(options, setup, folder, listening, visit, launched))


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`, 0 for a free one. Raises OptionError if that is impossible."""
    if not 0 <= port < 1 << 16:
        raise OptionError.wrong("port", port, "0 to 65535")
    try:
        # asyncio sets TCP_NODELAY only if the socket's protocol is IPPROTO_TCP.
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(_WAITING_CONNECTIONS)
        except OSError:
            opened.close()
            raise
    except (OSError, UnicodeError) as error:
        text = (
            f"the server cannot listen on {host[:100]} port {port}: {getattr(error, 'strerror', None) or error}; use "
            "another --port, or --host 127.0.0.1"
        )
        raise OptionError(text, name="host", value=(host, port)) from error
    return opened


def url_of(host: str, port: int) -> str:
    """Return the URL of a server, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_once(model: str, threads: int | None, visit: Callable[[str], Awaitable[None]]) -> bool:
    """Serve `model` on a free port until `visit` returns, uncompiled because that starts soonest.

    Returns False if a signal ended the server first.
    """
    visited: list[str] = []

    async def visit_and_note(url: str) -> None:
        await visit(url)
        visited.append(url)

    setup = RankSetup(model, RankOptions(lower="eager", eager=True, threads=threads))
    run_server(ServerOptions(port=0, drain=1.0), setup, visit_and_note)
    return bool(visited)


def read_model(name: str) -> tuple[PromptWriter, Architecture]:
    """Return the prompt writer and the sizes of a model. Raises InputError for a model that cannot be served."""
    folder = resolve_model(name)
    config = load_config(folder)  # checks the config before the tokenizer's loader reads it
    text = config.get_text_config()
    family = str(text.model_type)
    if family not in FAMILIES:
        message = (
            f"{name} cannot be served: its model_type {family!r} is not a mixture-of-experts family whose FLOPs "
            f"moepass knows ({one_of(FAMILIES)}), and requests are admitted by their FLOPs. A dense model has no "
            "experts to stream; use another server for it"
        )
        raise InputError(message, name="model_type", value=family, expected=tuple(FAMILIES))
    architecture = from_config(config)
    longest = int(getattr(text, "max_position_embeddings", None) or 1 << 30)
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), longest)
    writer.check()
    highest = max(writer.tokenizer.get_vocab().values(), default=0)
    if highest >= architecture.vocab:
        typer.echo(
            f"moepass: warning: the tokenizer has token ids up to {highest}, the model up to {architecture.vocab - 1}; "
            "texts with higher ids are refused",
            err=True,
        )
    return writer, architecture


@contextlib.asynccontextmanager
async def _starting(
    setup: RankSetup,
    meeting: str,
    settings: ServerSettings,
    limits: FrontendLimits,
    end_seconds: float,
    launched: LaunchedProcess | None = None,
) -> AsyncIterator[tuple[Service, Frontend, asyncio.Task[None]]]:
    """Start the ranks of a model and end them with the block.

    Yields the service, its frontend, and the task that waits until the ranks have started. Raises OptionError or
    InputError for options or a model that a rank would refuse.
    """
    formula: asyncio.Future[FlopsFormula] = asyncio.get_running_loop().create_future()
    frontend = make_frontend(
        setup, meeting, limits, formula, timeout_seconds=settings.timeout_seconds, launched=launched
    )
    starting = asyncio.create_task(frontend.start())
    try:
        service, costs = await asyncio.to_thread(_service_and_costs, setup.model, frontend, settings)
        formula.set_result(costs)
        yield service, frontend, starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await frontend.close(end_seconds)


def _service_and_costs(model: str, frontend: Frontend, settings: ServerSettings) -> tuple[Service, FlopsFormula]:
    """Return the service and the FLOPs formula of a model. Called in a thread while the event loop starts the ranks."""
    with no_garbage_collection():
        from moepass.runtime.serving.batching.step_flops import FlopsTable
        from moepass.runtime.serving.http import draining_server  # noqa: F401  imported here, so that the event loop does not wait for it
        from moepass.runtime.serving.routes.service import Service

        writer, architecture = read_model(model)
        return Service(frontend, writer, settings), FlopsTable(architecture)


@contextlib.asynccontextmanager
async def in_process(setup: RankSetup, settings: ServerSettings) -> AsyncIterator[httpx.AsyncBaseTransport]:
    """Start the ranks, and yield a transport that passes a client's requests to the application without a socket.

    The queue never refuses a request, so the caller limits the number of open requests. Raises RankStartError.
    """
    with tempfile.TemporaryDirectory(prefix="moepass-") as folder:
        async with _starting(setup, folder, settings, FrontendLimits(), 0.0) as (service, _, starting):
            await starting
            freeze_live_objects()
            import httpx

            from moepass.runtime.serving.http.app import create_app

            yield httpx.ASGITransport(create_app(service), raise_app_exceptions=False)


async def _serve(
    options: ServerOptions,
    setup: RankSetup,
    meeting: str,
    listening: socket.socket,
    visit: Callable[[str], Awaitable[None]] | None,
    launched: LaunchedProcess | None,
) -> None:
    names = served_names(setup.model, options.name)
    settings = ServerSettings(names, options.api_key, options.timeout, options.timeout)
    limits = FrontendLimits(options.queue_seconds, options.open_bytes)
    end_seconds = min(RANKS_END_SECONDS, options.drain)
    started = _starting(setup, meeting, settings, limits, end_seconds, launched)
    async with started as (service, frontend, starting):
        from moepass.runtime.serving.http.draining_server import ConnectionLimits, make_server

        url = url_of(options.host, listening.getsockname()[1])
        typer.echo(f"moepass serves {names[0]} at {url}; starting", err=True)
        most = possible_connections(options.max_connections)
        connections = ConnectionLimits(most, read_seconds=options.timeout)
        server = make_server(service, drain_seconds=options.drain, limits=connections)
        serving = asyncio.create_task(server.serve([listening]))
        later: list[asyncio.Future[None]] = []
        try:
            await asyncio.wait((serving, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                freeze_live_objects()
                typer.echo(f"computes on {', '.join(frontend.notes('device'))}", err=True)
                typer.echo(f"memory of each rank: {', '.join(frontend.notes('memory'))}", err=True)
                typer.echo("ready", err=True)
                later.append(asyncio.create_task(frontend.lost()))
                if visit is not None:
                    later.append(asyncio.ensure_future(visit(url)))
                await asyncio.wait((serving, *later), return_when=asyncio.FIRST_COMPLETED)
                for task in later:
                    if task.done():
                        task.result()
                typer.echo("ending: answering the open requests", err=True)
        except RankLostError:
            await frontend.close(0.0)  # no more answers will arrive
            raise
        finally:
            server.should_exit = True
            starting.cancel()
            for task in later:
                task.cancel()
            await asyncio.gather(serving, *later, return_exceptions=True)


def possible_connections(wanted: int) -> int:
    """Return `wanted`, or fewer if the system lets this process open fewer files: each connection needs one."""
    possible = max(1, allow_many_files() - _OWN_FILES)
    if possible < wanted:
        typer.echo(
            f"moepass: warning: at most {possible} connections, not {wanted}: the system lets this process open no "
            "more files (ulimit -Hn)",
            err=True,
        )
    return min(wanted, possible)
