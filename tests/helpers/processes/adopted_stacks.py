"""Compiled stacks that run with expert parallelism, and checks that ranks stay exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

import moepass
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ir.shards import shard_layout
from moepass.runtime.execute.executor import Executor
from moepass.runtime.homes.adopted_banks import AdoptedHome
from moepass.runtime.transfer.ring import Ring
from tests.helpers.models.moe_stack import StackConfig, build_stack

FORBIDDEN = ("_c10d_functional", "aten._local_scalar_dense", "aten._assert_scalar", "aten.nonzero")
SMALL = StackConfig(layers=2)


def compile_whole(model: torch.nn.Module, **options: Any) -> Callable[..., Any]:
    torch._dynamo.config.capture_scalar_outputs = True
    dynamic = options.pop("dynamic", None)
    chosen = {"lower": "eager", "debug": True, "timeout_s": 50, **options}
    compiled: Callable[..., Any] = torch.compile(
        model, backend="asyncep", options=chosen, fullgraph=True, dynamic=dynamic
    )
    return compiled


def shard_bytes(home: AdoptedHome) -> int:
    """Return the bytes of this rank's shards."""
    return sum(shard_layout(bank.spec, bank.group.rank).nbytes for bank in home.banks.values())


def ring_of(home: AdoptedHome) -> Ring:
    """Return the ring of the store whose home this is; it must exist."""
    store = home.store()
    assert store is not None
    assert store.current_ring is not None
    return store.current_ring


def hidden_rows(config: StackConfig, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, config.hidden, generator=generator).to(config.dtype)


def remains(executor: Executor) -> list[str]:
    """Return the names of collectives, host syncs and data-dependent sizes in the final graphs."""
    remaining = []
    for module in executor.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if str(node.target).startswith(FORBIDDEN):
                remaining.append(node.name)
            value = fake_value(node)
            for item in value if isinstance(value, (tuple, list)) else (value,):
                for size in item.shape if isinstance(item, torch.Tensor) else (item,):
                    if isinstance(size, torch.SymInt):
                        unbacked = size.node.shape_env.is_unbacked_symint
                        remaining += [
                            f"{node.name}: {size}" for symbol in size.node.expr.free_symbols if unbacked(symbol)
                        ]
    return remaining


def stays_exact(form: str, config: StackConfig, tokens: list[list[int]], dynamic: bool | None = None) -> None:
    """Check that the compiled stack equals the stack on one process, for `tokens[step][rank]` tokens in each step."""
    rank = dist.get_rank()
    full = build_stack(config)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(build_stack(config, form), dynamic=dynamic)
        for step, counts in enumerate(tokens):
            hidden = hidden_rows(config, counts[rank], 100 * step + (0 if form == "all_reduce" else rank))
            assert torch.equal(compiled(hidden), full(hidden)), f"step {step} with {counts} tokens"
    for compilation in compilations:
        assert not compilation.plan.refusals, compilation.plan.refusals
        assert [block.parallel for block in compilation.plan.blocks] == [form] * config.layers
        assert remains(compilation.executor) == []
