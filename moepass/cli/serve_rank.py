"""One rank of a server, as a process: `python -m moepass.cli.serve_rank ENDPOINT RANK ATTEMPT SERVER`.

Its options come on standard input. SERVER is the process number of the server, without which a rank ends.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # its modules take seconds to import
    from moepass.cli.rank_options import RankSetup
    from moepass.runtime.serving.engine.model_engine import ModelEngine
    from moepass.runtime.serving.workers.rank_loop import ParentWatch

# Where cores are few, the server comes first: what it does for a request is short, and a rank computes all the time.
# [Empirical] A third of the server's share where both want the same core.
RANK_NICENESS = 5


def main() -> int:
    """A rank that the server has started. Returns the exit status."""
    from moepass.cli.rank_options import RankSetup

    endpoint, rank, attempt, server = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSetup)
    return serve_as_rank(setup, endpoint, rank, attempt, _Server(server))


def serve_as_rank(setup: RankSetup, endpoint: str, rank: int, attempt: int, watch: ParentWatch) -> int:
    """Serve until the server says that it ends, or is gone. Returns the exit status."""
    # Ctrl-C reaches all processes of a terminal, and the end of a service all of its processes. The server decides what
    # either means. Children of this process must not inherit that SIGTERM is ignored, so it gets a handler.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.nice(RANK_NICENESS)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s")

    import zmq

    from moepass.cli.progress import keep_what_is_there, no_garbage_collection
    from moepass.models.errors import MoepassError
    from moepass.runtime.serving.workers.rank_loop import Mailbox, run_rank
    from moepass.runtime.serving.workers.rank_names import rank_name

    try:
        with no_garbage_collection():
            engine = _engine(setup, rank, attempt)
        keep_what_is_there()
        mailbox = Mailbox(zmq.Context(), endpoint, rank_name(rank, attempt), engine.check, watch, engine.look)
        try:
            run_rank(engine, mailbox)
        finally:
            mailbox.close()
    except MoepassError as error:
        print(f"moepass: error: rank {rank}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        _leave_group()
    return 0


def _leave_group() -> None:
    """Threads of a process group that still run when the process ends abort it, with a message."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class _Server:
    """The server that started this process, which may be gone before this is made."""

    def __init__(self, number: int) -> None:
        self._number = number

    def is_gone(self) -> bool:
        return os.getppid() != self._number


def _engine(setup: RankSetup, rank: int, attempt: int) -> ModelEngine:
    import torch
    from torch import nn

    from moepass.models.checkpoint.checkpoint_folders import load_prompt, load_tokenizer, resolve_model
    from moepass.models.homes import home_named
    from moepass.models.sizes.architecture import DTYPES
    from moepass.runtime.homes.registry.home_options import Host
    from moepass.runtime.homes.registry.packers import options_of
    from moepass.runtime.kernels.grouped_gemm.tuner import tune_kernels
    from moepass.runtime.offload.offload import check_device
    from moepass.runtime.serving.engine.load_engine import EngineOptions, load_engine
    from moepass.runtime.serving.questions.known_answer import check_known_answer
    from moepass.runtime.serving.questions.prompts import PromptWriter
    from moepass.stored_compile import StoredModule

    options = setup.options
    torch.set_num_threads(options.threads_per_rank)
    home = None
    if options.home != "device":
        if home_named(options.home).is_spread:
            # Every attempt of the ranks is a group of its own.
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{setup.meeting}/group-{attempt}",
                rank=rank,
                world_size=options.ranks,
                timeout=datetime.timedelta(minutes=10),
            )
        home = Host(link=options.link) if options.home == Host.home else options_of(options.home)

    def compile_module(module: nn.Module) -> StoredModule:
        return StoredModule(module, {"lower": options.lower, "chunk_tokens": options.chunk_tokens}, setup.model)

    dtypes = {short: getattr(torch, name) for name, short in DTYPES.items()}
    asked = EngineOptions(
        home,
        check_device(options.device),
        dtypes[options.dtype] if options.dtype is not None else None,
        slots=options.slots,
        memory_budget=options.memory_budget,
        hardware=options.hardware,
        cache_bytes=options.cache_bytes,
        step_tokens=options.step_tokens,
        sharers=options.ranks if options.device == "cpu" else 1,
    )
    key = bytes.fromhex(setup.key)
    folder = resolve_model(setup.model)
    with tune_kernels() if options.tune_kernels else contextlib.nullcontext():
        engine = load_engine(folder, asked, None if options.eager else compile_module, key)
    prompt = load_prompt(folder)
    if prompt.probe is not None:
        facts = engine.facts
        writer = PromptWriter(load_tokenizer(folder), prompt, facts.max_sequence_tokens)
        check_known_answer(writer, engine.answer_now, facts.class_names)
        engine.be_ready(facts.flops_per_second)
    return engine


if __name__ == "__main__":
    sys.exit(main())
