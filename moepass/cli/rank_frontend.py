"""What starts the ranks of a model and talks to them.

Nothing heavy is imported here, so that ranks start before the server imports what answers clients.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from pathlib import Path

import msgspec

from moepass.cli.rank_options import RankSetup
from moepass.cli.torchrun import LaunchedProcess, RankStart, tell_ranks
from moepass.models.checkpoint.checkpoint_folders import resolve_model
from moepass.models.homes import home_named
from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.router.router import RankRouter
from moepass.runtime.serving.workers.frontend import HANGS, STEPS_AT_A_RANK, Frontend
from moepass.runtime.serving.workers.frontend_limits import FrontendLimits
from moepass.runtime.serving.workers.launched_ranks import LaunchedRank
from moepass.runtime.serving.workers.rank_watch import HangLimits
from moepass.runtime.serving.workers.supervisor import RankCommand, RankStarter

# After the server has answered what is open, its ranks have so long to end by themselves.
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
    """What starts the ranks of a model, which meet in the folder `meeting`. It is to be started and closed.

    `timeout_seconds`: what a request is given up after; a step that takes as long as half of it counts as hung.
    Where this process was `launched` with others, they are the ranks but for the first, and none is started again.
    Raises OptionError and InputError for what a rank would refuse.
    """
    _check(setup)
    key = bytes.fromhex(setup.key) or secrets.token_bytes(32)
    setup = msgspec.structs.replace(setup, key=key.hex(), meeting=meeting)
    message = msgspec.json.encode(setup)
    endpoint = f"ipc://{meeting}/ranks"

    def command(rank: int, attempt: int, endpoint: str) -> RankStarter:
        if launched is not None and rank != launched.rank:
            return LaunchedRank(Path(meeting), rank)
        program = (sys.executable, "-m", "moepass.cli.serve_rank", endpoint, str(rank), str(attempt), str(os.getpid()))
        return RankCommand(program, message)

    if launched is not None:
        tell_ranks(launched, Path(meeting), RankStart(endpoint, os.getpid(), setup))
    return Frontend(
        setup.options.ranks,
        command,
        endpoint=endpoint,
        formula=formula,
        make_router=make_router,
        key=key,
        limits=limits,
        ends_together=home_named(setup.options.home).is_spread,
        # Early enough for requests to run once more.
        hangs=HangLimits(step_seconds=max(HANGS.silent_seconds, timeout_seconds / 2)),
        restarts=launched is None,
    )


def make_router(ranks: int, formula: FlopsFormula, facts: list[EngineFacts]) -> RankRouter:
    """The router of a server: its ranks are saturated by the steps that may be at a rank at once."""
    saturation = STEPS_AT_A_RANK * max(one.saturation_flops for one in facts)
    rate = min(one.flops_per_second for one in facts)
    return PrefixRouter(ranks, formula, saturation_flops=saturation, flops_per_second=rate)


def _check(setup: RankSetup) -> None:
    """Raise OptionError or InputError, before a rank starts, for a setup that it would refuse."""
    resolve_model(setup.model)
    options = setup.options
    # The defaults need no check, and these imports take long: a server has no other use for torch.
    if options.device != "cpu":
        from moepass.runtime.offload.offload import check_device

        check_device(options.device)
    if options.link != "real":
        from moepass.runtime.transfer.link import parse_link

        parse_link(options.link)
    if options.hardware is not None:
        from moepass.runtime.profiles.hardware_profiles import load_hardware

        load_hardware(options.hardware)
