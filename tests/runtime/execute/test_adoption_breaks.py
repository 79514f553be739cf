"""Expert parallelism with a graph break in every layer: layers share compiled code, and each has its own experts."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import moepass
from moepass.runtime.transfer.ring import RingStatistics
from tests.helpers.models.moe_stack import MoEStack, build_stack
from tests.helpers.processes.adopted_stacks import SMALL, hidden_rows
from tests.helpers.processes.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")

CONFIG = dataclasses.replace(SMALL, layers=4)
OPTIONS = {"lower": "eager", "debug": True, "timeout_s": 50}


class BrokenStack(nn.Module):
    """`MoEStack` with a graph break in each layer, between the dense product and the experts."""

    def __init__(self, stack: MoEStack) -> None:
        super().__init__()
        self.dense, self.moe = stack.dense, stack.moe

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        size = hidden_states.shape[-1:]
        for dense, moe in zip(self.dense, self.moe, strict=True):
            hidden_states = hidden_states + dense(F.rms_norm(hidden_states, size))
            torch._dynamo.graph_break()
            hidden_states = hidden_states + moe(F.rms_norm(hidden_states, size))
        return hidden_states


def _broken(model: MoEStack, how: str) -> Any:
    torch._dynamo.config.capture_scalar_outputs = True
    if how == "graph break":
        return torch.compile(BrokenStack(model), backend="asyncep", options=OPTIONS)
    for layer in model.moe:
        layer.compile(backend="asyncep", options=OPTIONS, fullgraph=True)
    return model


def _runs_exact(how: str, form: str) -> tuple[int, RingStatistics]:
    full = build_stack(CONFIG)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = _broken(build_stack(CONFIG, form), how)
        for step, tokens in enumerate((16, 16, 16, 9, 9, 16)):
            hidden = hidden_rows(CONFIG, tokens, 10 * step + (0 if form == "all_reduce" else dist.get_rank()))
            assert torch.equal(compiled(hidden), full(hidden)), f"step {step}"
    adopting = [item.executor for item in compilations if item.plan.slot_stays]
    (ring,) = {executor.ring for executor in adopting}
    assert ring is not None
    assert ring.slots == 2
    # The dense parts of a broken model have plans too, without experts.
    assert not [refusal for item in compilations for refusal in item.plan.refusals]
    return len(adopting), ring.statistics


@pytest.mark.parametrize("form", ["all_to_all", pytest.param("all_reduce", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["layer by layer", pytest.param("graph break", marks=pytest.mark.slow)])
def test_layers_that_share_code_have_their_own_experts_and_fetch_for_each_other(how: str, form: str) -> None:
    for compilations, statistics in run_ranks(2, _runs_exact, how, form):
        if how == "layer by layer":
            assert compilations == 2  # one for the first number of tokens, one for any
        # The last run's guesses wait for a run that does not come.
        assert 0 <= statistics.copies - statistics.ahead_wasted - 6 * CONFIG.layers <= 2
        # Steps of a graph that runs for the first time have nothing to go by.
        assert statistics.ahead_used >= 3 * CONFIG.layers


def _models_side_by_side() -> None:
    """One compilation serves the layers of three models alternately, and of models that are created later."""
    hidden = hidden_rows(CONFIG, 16, dist.get_rank())
    configs = [dataclasses.replace(CONFIG, seed=seed) for seed in range(3)]
    with torch.no_grad(), moepass.record_compilations() as compilations:
        models = [build_stack(config, "all_to_all") for config in configs]
        expected = [build_stack(config)(hidden) for config in configs]
        for _ in range(2):
            for model, want in zip(models, expected, strict=True):
                assert torch.equal(_broken(model, "layer by layer")(hidden), want)
    assert len(compilations) == 1


@pytest.mark.slow
def test_one_compilation_serves_models_side_by_side() -> None:
    run_ranks(2, _models_side_by_side)


def _one_layer_changes() -> None:
    model = build_stack(CONFIG, "all_to_all")
    compiled = _broken(model, "layer by layer")
    hidden = hidden_rows(CONFIG, 8, 0)
    with torch.no_grad():
        compiled(hidden)
        model.moe[2].experts.down_proj.mul_(2.0)
        with pytest.raises(moepass.InputError, match="were changed after their first run"):
            compiled(hidden)


@pytest.mark.slow
def test_a_changed_layer_is_an_error_in_shared_code_too() -> None:
    run_ranks(2, _one_layer_changes)
