"""The frontend that starts the ranks of a model and sends requests to them.

This module imports nothing heavy, so that ranks start before the server imports its HTTP packages.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable
from pathlib import Path

import msgspec

from moepass.cli.serve_options import RankSetup
from moepass.cli.torchrun import LaunchedProcess, RankStart, publish_setup
from moepass.models.checkpoint.checkpoint_folders import resolve_model
from moepass.models.homes import home_named
from moepass.models.limits import AUTO
from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.requests.backend import FrontendLimits
from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.router.router import RankRouter
from moepass.runtime.serving.workers.frontend import HANGS, STEPS_AT_A_RANK, Frontend
from moepass.runtime.serving.workers.rank_watch import HangLimits
from moepass.runtime.serving.workers.supervisor import RankProcess, launched_rank, start_process

# The time that ranks have to end by themselves after the server has answered the open requests.
RANKS_END_SECONDS = 5.0


def make_frontend(
    setup: RankSetup,
    meeting: str,
    limits: FrontendLimits,
    formula: FlopsFormula | asyncio.Future[FlopsFormula],
    *,
    timeout_seconds: float,
    launched: LaunchedProcess | None = None,
) -> Frontend:
    """Return the frontend for the ranks of a model, which the caller starts and closes.

    `meeting` is a folder for the socket and for the rendezvous of ranks with a spread home. A step of half of
    `timeout_seconds` counts as hung. `launched` is set if torchrun started this process. The other processes of
    torchrun are then ranks, which are not restarted. Raises OptionError or InputError for a setup that a rank would
    refuse.
    """
    _check(setup)
    key = bytes.fromhex(setup.key) or secrets.token_bytes(32)
    setup = msgspec.structs.replace(setup, key=key.hex(), meeting=meeting)
    message = msgspec.json.encode(setup)
    endpoint = f"ipc://{meeting}/ranks"

    def start_rank(rank: int, attempt: int) -> Awaitable[RankProcess]:
        if launched is not None and rank != launched.rank:
            return launched_rank(Path(meeting), rank)
        program = (sys.executable, "-m", "moepass.cli.serve_rank", endpoint, str(rank), str(attempt), str(os.getpid()))
        return start_process(program, message)

    if launched is not None:
        publish_setup(launched, Path(meeting), RankStart(endpoint, os.getpid(), setup))
    return Frontend(
        setup.options.ranks,
        start_rank,
        endpoint=endpoint,
        formula=formula,
        make_router=make_router,
        key=key,
        limits=limits,
        ends_together=home_named(setup.options.home).is_spread,
        # A hung step is detected early enough to run its requests again.
        hangs=HangLimits(step_seconds=max(HANGS.silent_seconds, timeout_seconds / 2)),
        restarts=launched is None,
    )


def make_router(ranks: int, formula: FlopsFormula, facts: list[EngineFacts]) -> RankRouter:
    """Return the router of a server. A rank gets no more work once it has STEPS_AT_A_RANK full steps."""
    saturation = STEPS_AT_A_RANK * max(rank.saturation_flops for rank in facts)
    rate = min(rank.flops_per_second for rank in facts)
    return PrefixRouter(ranks, formula, saturation_flops=saturation, flops_per_second=rate)


def _check(setup: RankSetup) -> None:
    """Raise OptionError or InputError, before a rank starts, for a setup that it would refuse."""
    resolve_model(setup.model)
    options = setup.options
    # The defaults need no check, and a server needs torch for nothing else, whose import takes long.
    if options.device not in (AUTO, "cpu"):
        from moepass.runtime.offload.offload import rank_device

        rank_device(options.device)
    if options.link != "real":
        from moepass.runtime.transfer.link import parse_link

        parse_link(options.link)
    if options.hardware is not None:
        from moepass.runtime.profiles.hardware_profiles import load_hardware

        load_hardware(options.hardware)
