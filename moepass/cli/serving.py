"""A model that is served: over HTTP by `moepass serve`, or to this process alone, for `moepass batch`.

Either way the routes are those of one application in one event loop, and the ranks are processes. They are started
before the application is imported: both sides import libraries for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import typer

from moepass.cli.progress import keep_what_is_there, no_garbage_collection
from moepass.cli.rank_frontend import RANKS_END_SECONDS, make_frontend
from moepass.cli.rank_options import RankOptions, RankSetup
from moepass.cli.server_options import ServerOptions, served_names
from moepass.cli.torchrun import LaunchedProcess
from moepass.models.checkpoint.checkpoint_folders import load_config, load_prompt, load_tokenizer, resolve_model
from moepass.models.errors import InputError, one_of
from moepass.models.sizes.architecture import Architecture
from moepass.models.sizes.families import FAMILIES, from_config
from moepass.runtime.serving.http.listening_socket import open_socket
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.routes.server_settings import ServerSettings
from moepass.runtime.serving.workers.frontend import Frontend
from moepass.runtime.serving.workers.frontend_limits import FrontendLimits
from moepass.runtime.serving.workers.supervisor import RankLostError
from moepass.runtime.system.open_files import allow_many_files

if TYPE_CHECKING:
    import httpx
    from transformers import PreTrainedConfig

    from moepass.runtime.serving.routes.service import Service

# Files that a server has open beside connections: those of ranks, of the model, of its libraries.
_OWN_FILES = 256


def run_server(
    options: ServerOptions,
    setup: RankSetup,
    visit: Callable[[str], Awaitable[None]] | None = None,
    launched: LaunchedProcess | None = None,
) -> None:
    """Serve until a signal ends it, or `visit`, which is called with the server's URL when it is ready, has returned.

    Raises OptionError for an address that cannot be had, RankStartError, and RankLostError where a rank ends that was
    `launched` with this process.
    """
    listening = open_socket(options.host, options.port)
    with listening, tempfile.TemporaryDirectory(prefix="moepass-") as folder:
        asyncio.run(_serve(options, setup, folder, listening, visit, launched))


def serve_once(model: str, threads: int | None, visit: Callable[[str], Awaitable[None]]) -> bool:
    """Serve `model` at any free port, uncompiled, which starts soonest, until `visit` has returned.

    False where a signal ended it before. Raises as `run_server`, and what `visit` raises.
    """
    done = False

    async def visit_and_note(url: str) -> None:
        nonlocal done
        await visit(url)
        done = True

    setup = RankSetup(model, RankOptions(lower="eager", eager=True, threads=threads))
    run_server(ServerOptions(port=0, drain=1.0), setup, visit_and_note)
    return done


def read_model(name: str) -> tuple[PromptWriter, Architecture]:
    """What the server itself needs of a model. Raises InputError for one that is not served."""
    folder = resolve_model(name)
    config = load_config(folder)  # its checks come before the tokenizer's loader reads it too
    architecture = _architecture(config, name)
    longest = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30)
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), longest)
    writer.check()
    highest = max(writer.tokenizer.get_vocab().values(), default=0)
    if highest >= architecture.vocab:
        typer.echo(
            f"moepass: warning: the tokenizer has tokens up to {highest}, the model up to {architecture.vocab - 1}; "
            "texts that need the others are refused",
            err=True,
        )
    return writer, architecture


def _architecture(config: PreTrainedConfig, name: str) -> Architecture:
    """Raises InputError for a model that is not served."""
    family = str(config.get_text_config().model_type)
    if family not in FAMILIES:
        raise InputError(
            f"{name} cannot be served: its model_type {family!r} is no mixture-of-experts family whose FLOPs "
            f"are known here ({one_of(FAMILIES)}), and without FLOPs no request can be admitted. A dense model has no "
            "experts to stream; other servers run it",
            name="model_type",
            value=family,
            expected=tuple(FAMILIES),
        )
    return from_config(config)


@contextlib.asynccontextmanager
async def _starting(
    setup: RankSetup,
    meeting: str,
    settings: ServerSettings,
    limits: FrontendLimits,
    end_seconds: float,
    launched: LaunchedProcess | None = None,
) -> AsyncIterator[tuple[Service, Frontend, asyncio.Task[None]]]:
    """The service of a model, its frontend, and the start of its ranks, which end with the block.

    Raises OptionError and InputError for what a rank would refuse.
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
    """For a thread beside the event loop, which starts the ranks meanwhile. Raises InputError."""
    with no_garbage_collection():
        from moepass.runtime.serving.batching.step_flops import FlopsTable
        from moepass.runtime.serving.http import listen  # noqa: F401  so that the event loop need not wait for it
        from moepass.runtime.serving.routes.service import Service

        writer, architecture = read_model(model)
        return Service(frontend, writer, settings), FlopsTable(architecture)


@contextlib.asynccontextmanager
async def in_process(setup: RankSetup, settings: ServerSettings) -> AsyncIterator[httpx.AsyncBaseTransport]:
    """Start the ranks, and give what takes a client's requests to the application without a socket.

    Nothing is refused because the queue is full: who holds this bounds what is open. Raises RankStartError.
    """
    with tempfile.TemporaryDirectory(prefix="moepass-") as folder:
        async with _starting(setup, folder, settings, FrontendLimits(), 0.0) as (service, _, starting):
            await starting
            keep_what_is_there()
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
    async with _starting(setup, meeting, settings, limits, end_seconds, launched) as (
        service,
        frontend,
        starting,
    ):
        from moepass.runtime.serving.http.listen import server_of
        from moepass.runtime.serving.http.patience import ConnectionLimits

        url = f"http://{options.host}:{listening.getsockname()[1]}"
        typer.echo(f"moepass serves {names[0]} at {url}; starting", err=True)
        most = possible_connections(options.max_connections)
        connections = ConnectionLimits(most, read_seconds=options.timeout)
        server = server_of(service, drain_seconds=options.drain, limits=connections)
        serving = asyncio.create_task(server.serve([listening]))
        later: list[asyncio.Future[None]] = []
        try:
            await asyncio.wait((serving, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                keep_what_is_there()
                typer.echo("ready", err=True)
                later.append(asyncio.create_task(frontend.lost()))
                if visit is not None:
                    later.append(asyncio.ensure_future(visit(url)))
                await asyncio.wait((serving, *later), return_when=asyncio.FIRST_COMPLETED)
                for ended in (task for task in later if task.done()):
                    ended.result()
                typer.echo("ending: what is open is answered", err=True)
        except RankLostError:
            await frontend.close(0.0)  # the answers that are open will not come
            raise
        finally:
            server.should_exit = True
            starting.cancel()
            for task in later:
                task.cancel()
            await asyncio.gather(serving, *later, return_exceptions=True)


def possible_connections(wanted: int) -> int:
    """As many of `wanted` as the system lets this process have; each takes a file descriptor."""
    possible = max(1, allow_many_files() - _OWN_FILES)
    if possible < wanted:
        typer.echo(
            f"moepass: warning: {possible} connections at most, not {wanted}: this process may have no more files open "
            "(ulimit -Hn)",
            err=True,
        )
    return min(wanted, possible)
