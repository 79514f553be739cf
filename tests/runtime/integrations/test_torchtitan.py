"""Compiled expert parallel layers of torchtitan: their AllToAlls are removed, and results equal those of one process.

torchtitan is no dependency: `pip install torchtitan` enables these tests.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moepass
from tests.helpers.processes.adopted_stacks import remains
from tests.helpers.processes.ranks import run_ranks

pytest.importorskip("torchtitan", reason="torchtitan, whose layers are tested here, is not installed")

EXPERTS, TOP_K, HIDDEN, WIDTH, RANKS = 8, 2, 64, 32, 2


def _without_triton() -> None:
    """Let torchtitan import without triton. Its MoE layer imports a module that needs it and does not use it here."""
    if importlib.util.find_spec("triton") is None:
        stub: Any = types.ModuleType("torchtitan.distributed.minimal_async_ep")
        stub.__path__ = []
        for name in ("combine_op", "dispatch_op", "init_buffer", "MinimalAsyncEPDispatchMetadata"):
            setattr(stub, name, type(name, (), {}))
        sys.modules[stub.__name__] = stub


def _build(dtype: torch.dtype) -> Any:
    from torchtitan.models.common import config_utils

    init = torch.nn.init.normal_
    config = config_utils.make_moe_config(
        num_experts=EXPERTS,
        load_balance_coeff=None,
        router=config_utils.make_router_config(
            dim=HIDDEN,
            num_experts=EXPERTS,
            gate_param_init={"weight": init},
            top_k=TOP_K,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=config_utils.make_routed_experts_config(
            dim=HIDDEN,
            hidden_dim=WIDTH,
            num_experts=EXPERTS,
            top_k=TOP_K,
            param_init={"w1_EFD": init, "w2_EDF": init, "w3_EFD": init},
            comm_backend="standard",
        ),
    )
    layer = config.build().to(dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for _, parameter in sorted(layer.named_parameters()):
        parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.08).to(dtype))
    return layer


def _spread(layer: Any) -> Any:
    """Return the layer with this rank's experts and an AllToAll of tokens."""
    experts = layer.routed_experts.inner_experts
    for name, parameter in list(experts._parameters.items()):
        shard = parameter.chunk(RANKS)[dist.get_rank()].clone()
        experts._parameters[name] = torch.nn.Parameter(shard, requires_grad=False)
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layer


def _run(dtype: torch.dtype, lower: str) -> tuple[list[str], list[str], list[str]]:
    """Run three exact steps. Returns blocks, reasons of refusals and the collectives that remain in the graphs."""
    _without_triton()
    from torchtitan.distributed import parallel_dims, utils

    parallel_dims.device_type = "cpu"
    utils.set_spmd_backend("partial_dtensor")
    torch._dynamo.config.capture_scalar_outputs = True
    with torch.no_grad(), moepass.record_compilations() as compilations:
        complete, layer = _build(dtype), _spread(_build(dtype))
        options = {"lower": lower, "debug": True, "timeout_s": 50}
        compiled = torch.compile(layer, backend="asyncep", fullgraph=True, dynamic=False, options=options)
        for step in range(3):
            generator = torch.Generator().manual_seed(20 + 10 * step + dist.get_rank())
            hidden = torch.randn(2, 12, HIDDEN, generator=generator).to(dtype)
            assert torch.equal(compiled(hidden), complete(hidden)), f"step {step}"
    (compilation,) = compilations
    blocks = [block.parallel for block in compilation.plan.blocks]
    reasons = [refusal.reason for refusal in compilation.plan.refusals]
    return blocks, reasons, remains(compilation.executor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_are_gathered_and_stay_exact(dtype: torch.dtype) -> None:
    """In float32 the layer casts weights and rows to bfloat16 in every run: a rank casts its weights once."""
    for blocks, reasons, remain in run_ranks(RANKS, _run, dtype, "eager", timeout=120):
        assert not reasons, reasons
        assert blocks == ["all_to_all"]
        assert remain == []
