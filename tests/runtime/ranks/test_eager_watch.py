"""If Dynamo would run one rank in eager mode, all ranks raise an error, and none waits for an exchange."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moepass.models.errors import InputError
from moepass.runtime.ranks import eager_watch
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.models.moe_stack import build_stack
from tests.helpers.processes.adopted_stacks import SMALL, hidden_rows
from tests.helpers.processes.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


def _compiled(model: nn.Module, timeout_s: float = 30.0, **more: object) -> nn.Module:
    torch._dynamo.config.capture_scalar_outputs = True
    options = {"lower": "eager", "timeout_s": timeout_s}
    compiled: nn.Module = torch.compile(model, backend="asyncep", options=options, **more)  # type: ignore[arg-type, call-overload]
    return compiled


def _one_has_many_shapes() -> str:
    """Let rank 1 compile for a new shape in every run, until it reaches Dynamo's recompile limit."""
    eager_watch.FAILURE_CHECK_SECONDS = 0.0
    full, model = build_stack(SMALL), build_stack(SMALL, "all_to_all")
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=3):
        compiled = _compiled(model, dynamic=False)
        shapes = [8, 9, 10, 11] if dist.get_rank() == 1 else [8, 8, 8]
        for tokens in shapes[:3]:
            torch.testing.assert_close(compiled(hidden_rows(SMALL, tokens, 0)), full(hidden_rows(SMALL, tokens, 0)))
        dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises(PeerError) as caught:
                compiled(hidden_rows(SMALL, 11, 0))
            # Compiled shapes could still run, but the other ranks gave up.
            dist.barrier()
        else:
            dist.barrier()
            with pytest.raises(PeerError) as caught:
                compiled(hidden_rows(SMALL, 8, 0))
        assert caught.value.rank == 1
        return str(caught.value)


@pytest.mark.slow
def test_a_rank_beyond_the_recompile_limit_is_one_error_on_all() -> None:
    error, own_error = run_ranks(2, _one_has_many_shapes)
    assert error == own_error
    assert "would run it in eager mode, where it waits at an exchange that no other rank joins" in own_error
    assert "on rank 1" in own_error
    assert "torch._dynamo.config.recompile_limit=3" in own_error
    assert "mark_dynamic" in own_error


class _BreaksForOddShapes(nn.Module):
    """A model that is one graph for most shapes and several graphs, with other blocks, for one shape."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[0] == 9:
            torch._dynamo.graph_break()
        output: torch.Tensor = self.layer(hidden_states)
        return output


def _one_breaks_its_graph() -> None:
    """Let rank 1 compile some of the model again, alone; all ranks took its blocks before."""
    full, model = build_stack(SMALL), _BreaksForOddShapes(build_stack(SMALL, "all_to_all"))
    with torch.no_grad():
        compiled = _compiled(model, dynamic=False, timeout_s=3.0)
        torch.testing.assert_close(compiled(hidden_rows(SMALL, 8, 0)), full(hidden_rows(SMALL, 8, 0)))
        dist.barrier()
        if dist.get_rank() == 1:
            torch.testing.assert_close(compiled(hidden_rows(SMALL, 9, 0)), full(hidden_rows(SMALL, 9, 0)))
        dist.barrier()


@pytest.mark.slow
def test_a_rank_that_cuts_its_graph_differently_for_a_shape_does_not_wait() -> None:
    run_ranks(2, _one_breaks_its_graph)


def _stances() -> list[str]:
    full, model = build_stack(SMALL), build_stack(SMALL, "all_to_all")
    with torch.no_grad():
        compiled, hidden = _compiled(model, dynamic=False), hidden_rows(SMALL, 8, 0)
        expected = full(hidden)
        torch.testing.assert_close(compiled(hidden), expected)
        with torch.compiler.set_stance("eager_on_recompile"), pytest.raises(InputError) as eager:
            compiled(hidden)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(hidden), expected)
            with pytest.raises(RuntimeError) as failed:
                compiled(hidden_rows(SMALL, 9, 0))
        torch.testing.assert_close(compiled(hidden), expected)
    return [str(eager.value), str(failed.value)]


@pytest.mark.slow
def test_a_stance_that_sends_new_shapes_to_eager_mode_is_refused_before_one_comes() -> None:
    for eager, failed in run_ranks(2, _stances):
        assert eager.startswith("torch.compiler.set_stance('eager_on_recompile') would run the model in eager mode")
        assert eager.endswith("use set_stance('fail_on_recompile')")
        assert "Detected recompile" in failed


def _models_that_keep_their_exchanges() -> None:
    """Run models whose exchanges were not taken out, so that a rank in eager mode joins the others."""
    model = build_stack(SMALL, "all_to_all")
    full = build_stack(SMALL)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        torch._dynamo.config.capture_scalar_outputs = True
        compiled = torch.compile(
            model,
            backend="asyncep",
            options={"lower": "eager", "disable": ["eliminate_expert_parallelism"]},
            dynamic=False,
        )
        for tokens in (8, 9, 10):
            torch.testing.assert_close(compiled(hidden_rows(SMALL, tokens, 0)), full(hidden_rows(SMALL, tokens, 0)))


@pytest.mark.slow
def test_where_exchanges_stay_eager_mode_is_no_error() -> None:
    run_ranks(2, _models_that_keep_their_exchanges)
