"""The command `moepass serve`. Each option can also be set in the environment: `--port` is `MOEPASS_PORT`."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
import typer

from moepass.cli.rank_options import RankOptions, RankSetup
from moepass.cli.record_options import takes_records
from moepass.cli.server_options import ServerOptions
from moepass.cli.streams import check_compiler_cache
from moepass.cli.torchrun import checked_ranks, launched_process, run_launched_rank


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
    check_compiler_cache()
    if launched is not None and launched.rank > 0:
        raise typer.Exit(run_launched_rank(launched))

    from moepass.cli.serving import run_server

    run_server(server, RankSetup(model, rank), launched=launched)
