"""Measure the cost of proving one block.

    python -m tests.helpers.graphs.proof_cost FORM static|dynamic TOKENS HIDDEN WIDTH EXPERTS TOP_K RANKS

prints JSON: the CPU seconds of the pass, the bytes of memory that it added, the number of banks, and the refusals.
Capturing takes longer and more memory than the proof. The proof therefore runs in a forked child, whose peak memory
starts at the memory that it inherits.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, run_passes
from moepass.passes.parallel.eliminate_expert_parallelism import eliminate_expert_parallelism
from tests.helpers.graphs.simulated_ranks import Captured, capture
from tests.helpers.models.moe_stack import StackConfig


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def _measure(captured: Captured) -> dict[str, object]:
    before, start = _resident_bytes(), time.process_time()
    result = run_passes((eliminate_expert_parallelism,), captured.module, Plan(), PassContext(groups=captured.groups))
    return {
        "cpu_seconds": time.process_time() - start,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "banks": len(result.plan.banks),
        "refusals": [refusal.reason for refusal in result.refusals],
    }


def main() -> None:
    form, mode = sys.argv[1:3]
    tokens, hidden, width, experts, top_k, ranks = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    config = StackConfig(layers=1, hidden=hidden, width=width, experts=experts, top_k=top_k, dtype=torch.bfloat16)
    rank = ranks // 2
    captured = capture(config, form, rank, ranks, tokens, dynamic=mode == "dynamic", moe_alone=True)
    captured = dataclasses.replace(captured, inputs=())
    gc.collect()
    child = os.fork()
    if child == 0:
        print(json.dumps(_measure(captured)), flush=True)
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
