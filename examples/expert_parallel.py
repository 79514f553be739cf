"""Run a model of transformers with expert parallelism by gathering weights instead of exchanging tokens.

    torchrun --nproc-per-node 2 -m examples.expert_parallel
    torchrun --nproc-per-node 2 -m examples.expert_parallel --checkpoint FOLDER --experts all_reduce

from the root of the repository. Every rank loads its shard of the experts. Compiled with backend "asyncep", each rank
gathers the next layer's experts from its peers while it computes, and exchanges no activations for them. With
`--experts all_reduce` the model has the expert parallelism of transformers itself, which the compiler removes from the
graph.

Needs transformers 5.23 or newer, and accelerate. Without `--checkpoint` it uses a tiny model with random weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import moepass
from tests.helpers.models.tiny import tiny_model


def main() -> None:
    """Compile the model, and compare and time it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint", help="a folder with a mixture-of-experts model; the default is a tiny model with random weights"
    )
    parser.add_argument("--experts", default="asyncep", choices=["asyncep", "all_reduce"], help="ep_implementation")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the prompt")
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        model = load(arguments.checkpoint or make_checkpoint(folder), arguments.experts)
        with torch.no_grad():
            run(model, arguments.tokens)
    dist.destroy_process_group()


def make_checkpoint(folder: str) -> str:
    """Save a tiny checkpoint in a folder of rank 0, and return the folder on all ranks."""
    folders = [folder]
    if dist.get_rank() == 0:
        tiny_model("qwen3_moe").save_pretrained(folder)
    dist.broadcast_object_list(folders)
    return folders[0]


def load(checkpoint: str, implementation: str) -> PreTrainedModel:
    """Load the model with its dense layers and experts spread over all ranks, which share one batch."""
    moepass.register_transformers()  # makes ep_implementation="asyncep" known
    ranks = dist.get_world_size()
    config = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation=implementation)
    return AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=config).eval()


def run(model: PreTrainedModel, tokens: int) -> None:
    """Compare the compiled model with the uncompiled one, and print the plan and the times."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, tokens), generator=generator).to(model.device)
    expected = model(prompt, use_cache=False).logits
    compiled = torch.compile(model, backend="asyncep", fullgraph=True)
    with moepass.record_compilations() as compilations:
        compiled(prompt, use_cache=False)
    started = time.perf_counter()
    logits = compiled(prompt, use_cache=False).logits
    seconds = time.perf_counter() - started
    if dist.get_rank() == 0:
        (compilation,) = compilations
        print(compilation.plan.reason)
        for bank in compilation.plan.banks:
            print(f"  {bank.name}: {bank.format.slot_bytes / 1e6:.2f} MB, experts of the ranks {bank.expert_bounds}")
        for refusal in compilation.plan.refusals:
            print(f"  refused {refusal.where}: {refusal.reason}")
        difference = float((logits - expected).abs().max())
        print(f"{tokens} tokens in {seconds:.3f} s (measured); at most {difference:.1e} off the uncompiled model")


if __name__ == "__main__":
    main()
