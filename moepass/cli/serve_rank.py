"""One rank of a server, as a process: `python -m moepass.cli.serve_rank ENDPOINT RANK ATTEMPT SERVER`.

The rank reads a `RankSetup` from standard input. It ends when the process with the id SERVER has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # these imports take seconds
    from moepass.cli.serve_options import RankSetup
    from moepass.runtime.serving.engine.model_engine import ModelEngine


def main() -> int:
    """Run a rank that the server has started, and return the exit status."""
    from moepass.cli.serve_options import RankSetup

    endpoint, rank, attempt, server = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSetup)
    # The server may have ended already.
    return serve_as_rank(setup, endpoint, rank, attempt, lambda: os.getppid() != server)


def serve_as_rank(setup: RankSetup, endpoint: str, rank: int, attempt: int, is_orphan: Callable[[], bool]) -> int:
    """Serve requests until the server ends the rank or is gone (`is_orphan`), and return the exit status."""
    # Ctrl-C reaches all processes of a terminal, and SIGTERM all processes of a service; the server decides when ranks
    # end. SIGTERM gets a handler, because child processes would inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(message)s")

    import zmq

    from moepass.models.errors import MoepassError
    from moepass.runtime.serving.workers.messages import rank_name
    from moepass.runtime.serving.workers.rank_loop import Mailbox, run_rank
    from moepass.runtime.system.garbage import freeze_live_objects, no_garbage_collection

    try:
        with no_garbage_collection():
            engine = _engine(setup, rank, attempt)
        freeze_live_objects()
        mailbox = Mailbox(zmq.Context(), endpoint, rank_name(rank, attempt), engine.check, is_orphan, engine.view)
        try:
            run_rank(engine, mailbox)
        finally:
            mailbox.close()
    except MoepassError as error:
        print(f"moepass: error: rank {rank}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        import torch

        if torch.distributed.is_initialized():  # threads of a group would abort the process with a message
            torch.distributed.destroy_process_group()
    return 0


def _engine(setup: RankSetup, rank: int, attempt: int) -> ModelEngine:
    import torch
    from torch import nn

    from moepass.models.checkpoint.checkpoint_folders import load_prompt, load_tokenizer, resolve_model
    from moepass.models.homes import home_named
    from moepass.models.sizes.architecture import DTYPES
    from moepass.runtime.homes.options.home_options import Host
    from moepass.runtime.homes.options.packers import options_of
    from moepass.runtime.kernels.grouped_gemm.tuner import tune_kernels
    from moepass.runtime.offload.offload import rank_device
    from moepass.runtime.serving.engine.load_engine import EngineOptions, load_engine
    from moepass.runtime.serving.questions.known_answer import check_known_answer
    from moepass.runtime.serving.questions.prompts import PromptWriter
    from moepass.stored_compile import StoredModule

    options = setup.options
    devices = [rank_device(options.device, number) for number in range(options.ranks)]
    device = devices[rank]
    options.check_kernels(device.type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(options.threads_per_rank)
    if home_named(options.home).is_spread:
        # Each attempt to start the ranks needs a new group.
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{setup.meeting}/group-{attempt}",
            rank=rank,
            world_size=options.ranks,
            timeout=datetime.timedelta(minutes=10),
        )
    home = options_of(options.home)
    if options.home == Host.home:
        home = Host(link=options.link)

    def compile_module(module: nn.Module) -> StoredModule:
        compiler_options = {name: getattr(options, name) for name in ("lower", "chunk_tokens", "experts_compute")}
        return StoredModule(module, compiler_options, setup.model)

    dtypes = {short: getattr(torch, name) for name, short in DTYPES.items()}
    asked = EngineOptions(
        home,
        device,
        dtypes[options.dtype] if options.dtype is not None else None,
        slots=options.slots,
        memory_budget=options.memory_budget,
        experts_compute=options.experts_compute,
        hardware=options.hardware,
        cache_bytes=options.cache_bytes,
        step_tokens=options.step_tokens,
        sharers=devices.count(device),
        expert_format=options.expert_format,
    )
    key = bytes.fromhex(setup.key)
    folder = resolve_model(setup.model)
    with tune_kernels() if options.tune_kernels else contextlib.nullcontext():
        engine = load_engine(folder, asked, None if options.eager else compile_module, key)
    prompt = load_prompt(folder)
    if prompt.probe is not None:
        facts = engine.facts
        writer = PromptWriter(load_tokenizer(folder), prompt, facts.max_sequence_tokens)
        check_known_answer(writer, engine.answer_now, facts.class_names, facts.padding_token)
        engine.be_ready(facts.flops_per_second)
    return engine


if __name__ == "__main__":
    sys.exit(main())
