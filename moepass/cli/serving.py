"""`moepass serve`: the server in one event loop, its ranks as processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import tempfile

import msgspec
from rich.console import Console

from moepass.cli.rank_options import RankOptions
from moepass.models.checkpoint.checkpoint_folders import load_config, load_prompt, load_tokenizer, resolve_model
from moepass.models.homes import home_named
from moepass.models.sizes.families import from_config
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.http.listen import open_socket, server_of
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.router.router import RankRouter
from moepass.runtime.serving.routes.service import ServerSettings, Service
from moepass.runtime.serving.workers.frontend import STEPS_AT_A_RANK, Frontend, FrontendLimits
from moepass.runtime.serving.workers.supervisor import RankCommand

# After the server has answered what is open, its ranks have so long to end by themselves.
RANKS_END_SECONDS = 5.0


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says beside the options of the ranks."""

    host: str
    port: int
    names: tuple[str, ...]
    api_key: str | None
    timeout_seconds: float
    queue_seconds: float
    queue_bytes: int
    drain_seconds: float


def run_server(options: ServeOptions, rank_options: RankOptions) -> None:
    """Serve until a signal ends it. Raises OptionError for an address that cannot be had, and RankStartError."""
    listening = open_socket(options.host, options.port)
    with listening, tempfile.TemporaryDirectory(prefix="moepass-") as folder:
        meeting = msgspec.structs.replace(rank_options, meeting=folder)
        asyncio.run(_serve(options, meeting, f"ipc://{folder}/ranks", listening))


async def _serve(options: ServeOptions, rank_options: RankOptions, endpoint: str, listening: socket.socket) -> None:
    console = Console(stderr=True)
    folder = resolve_model(rank_options.model)
    config = load_config(folder)  # its checks come before the tokenizer's loader reads it too
    longest = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30)
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), longest)
    key = secrets.token_bytes(32)
    given = msgspec.json.encode(msgspec.structs.replace(rank_options, key=key.hex()))

    def command(rank: int, attempt: int, endpoint: str) -> RankCommand:
        program = (sys.executable, "-m", "moepass.cli.serve_rank", endpoint, str(rank), str(attempt), str(os.getpid()))
        return RankCommand(program, given)

    frontend = Frontend(
        rank_options.ranks,
        command,
        endpoint=endpoint,
        formula=FlopsTable(from_config(config)),
        make_router=make_router,
        key=key,
        limits=FrontendLimits(options.queue_seconds, options.queue_bytes),
        ends_together=home_named(rank_options.home).is_spread,
    )
    settings = ServerSettings(options.names, options.api_key, options.timeout_seconds)
    server = server_of(Service(frontend, writer, settings), drain_seconds=options.drain_seconds)
    address = listening.getsockname()
    console.print(f"moepass serves {options.names[0]} at http://{options.host}:{address[1]}; starting", highlight=False)
    serving = asyncio.create_task(server.serve([listening]))
    starting = asyncio.create_task(frontend.start())
    try:
        await asyncio.wait((serving, starting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            console.print("ready", highlight=False)
            await serving
            console.print("ending: what is open is answered", highlight=False)
    finally:
        server.should_exit = True
        starting.cancel()
        await asyncio.gather(serving, starting, return_exceptions=True)
        await frontend.close(min(RANKS_END_SECONDS, options.drain_seconds))


def make_router(ranks: int, formula: FlopsFormula, facts: list[EngineFacts]) -> RankRouter:
    """The router of a server: its ranks are saturated by the steps that may be at a rank at once."""
    saturation = STEPS_AT_A_RANK * max(one.saturation_flops for one in facts)
    rate = min(one.flops_per_second for one in facts)
    return PrefixRouter(ranks, formula, saturation_flops=saturation, flops_per_second=rate)
