"""Measure the memory of each rank while `load_pretrained` reads a checkpoint: its shard, dense weights, and overhead.

Counted is memory that the kernel cannot reclaim while the rank lives:

    anonymous       RssAnon of /proc/self/status, the maximum seen by a thread: interpreter, libraries, tensors
    shard           Rss of the rank's own segment in /proc/self/smaps after loading. It never shrinks, so its sum with
                    the maximum of anonymous memory is an upper bound of the peak. Other ranks' segments are not counted
    dense weights   all their bytes: they are views of mapped files, which the two rows above do not include

Further pages of mapped files are the kernel's cache, which it drops when memory is needed. VmHWM, like any resident set
size, includes them, and every mapped page of other ranks' shards; it is shown for comparison.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moepass
from benchmarks.common import print_table, verdict

ALLOWANCE_BYTES = 300_000_000
SAMPLE_SECONDS = 0.005
EXPERTS = 64


def main(gigabytes: float = 2.2, ranks: int = 2, folder: Path | None = None) -> None:
    """Write a bf16 checkpoint of at least GIGABYTES below FOLDER (by default that for temporary files) and load it."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        stored = write_checkpoint(checkpoint, round(gigabytes * 1e9))
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        torch.multiprocessing.spawn(_rank, (ranks, temporary, queue), nprocs=ranks)
        results = sorted((queue.get() for _ in range(ranks)), key=lambda result: result["rank"])
        files = len(list(checkpoint.glob("*.safetensors")))
    rows = []
    holds = True
    for result in results:
        limit = result["shard"] + result["dense"] + ALLOWANCE_BYTES
        holds = holds and result["peak"] <= limit
        figures = [result[name] for name in ("shard", "dense", "read", "before", "peak")]
        cells = [f"{value / 1e6:.0f}" for value in (*figures, limit)]
        rows.append(
            [
                result["rank"],
                *cells,
                verdict(result["peak"] <= limit),
                f"{result['seconds']:.1f}",
                f"{result['vmhwm'] / 1e6:.0f}",
            ]
        )
    print_table(
        f"load_pretrained(home='peer'), {ranks} ranks, qwen3_moe, bf16, {stored / 1e9:.2f} GB in {files} files (MB)",
        ["rank", "shard", "dense", "read", "anonymous before", "peak", "limit", "holds", "seconds", "VmHWM"],
        rows,
        f"peak: most anonymous memory (seen every {1000 * SAMPLE_SECONDS:.0f} ms, what was there before included) + "
        "own shared memory + dense weights; limit: shard + dense + 300 MB. The files were just written, so most of "
        "them come from the kernel's cache.",
    )
    if not holds:
        raise typer.Exit(1)


def write_checkpoint(folder: Path, least_bytes: int) -> int:
    """Write a checkpoint with one tensor per expert and projection, one file per layer; returns its bytes.

    Holds one layer in memory at a time.
    """
    config = Qwen3MoeConfig(
        hidden_size=1024,
        moe_intermediate_size=512,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=16384,
        dtype=torch.bfloat16,
    )
    layer_bytes = EXPERTS * 3 * config.hidden_size * config.moe_intermediate_size * 2
    config.num_hidden_layers = -(-least_bytes // layer_bytes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    total = 0
    parts = ["", *[f"model.layers.{index}." for index in range(config.num_hidden_layers)]]
    for number, prefix in enumerate(parts):
        names = [name for name in model.state_dict() if name.startswith(prefix) and (prefix or ".layers." not in name)]
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors |= _as_stored(name, model.get_parameter(name).shape, generator)
        file = f"model-{number:05d}-of-{len(parts) - 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def _as_stored(name: str, shape: torch.Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def draw(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator) / 32).bfloat16()

    stem, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        half = [shape[1] // 2, shape[2]]
        kinds = {"gate_proj": half, "up_proj": half}
    elif leaf == "down_proj":
        kinds = {"down_proj": list(shape[1:])}
    else:
        return {name: draw(*shape)}
    return {
        f"{stem}.{expert}.{kind}.weight": draw(*sizes) for expert in range(shape[0]) for kind, sizes in kinds.items()
    }


def _rank(rank: int, ranks: int, place: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=ranks)
    read = 0

    def count(done: int, total: int) -> None:
        nonlocal read
        read = done

    dist.barrier()
    before = _anonymous_bytes()
    with PeakAnonymous() as anonymous:
        started = time.perf_counter()
        model = moepass.load_pretrained(f"{place}/checkpoint", home="peer", progress=count)
        seconds = time.perf_counter() - started
    dense = {value.data_ptr(): value.nbytes for value in model.parameters() if value.numel()}
    report = moepass.offload_report(model)
    dense_bytes = sum(dense.values())
    queue.put(
        {
            "rank": rank,
            "shard": report.home_bytes,
            "dense": dense_bytes,
            "read": read,
            "before": before,
            "peak": anonymous.peak_bytes + _mapped_bytes(f"moepass-rank-{rank}") + dense_bytes,
            "vmhwm": _status_bytes("VmHWM"),
            "seconds": seconds,
        }
    )
    dist.barrier()
    dist.destroy_process_group()


class PeakAnonymous:
    """The peak of anonymous memory of this process in the `with` block."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakAnonymous:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    return _status_bytes("RssAnon")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _mapped_bytes(label: str) -> int:
    """Return the resident bytes of the mappings whose name ends with `label`."""
    total = 0
    is_wanted = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            is_wanted = line.removesuffix(" (deleted)").endswith(label)
        elif is_wanted and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    typer.run(main)
