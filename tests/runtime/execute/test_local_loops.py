"""Local models whose experts are modules in a loop: every compiled run is correct, also after parameters changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import moepass
from tests.helpers.project_styles.local_loops import (
    HIDDEN,
    AnyPlace,
    FlatPairs,
    LastExpertStays,
    MixtralLoop,
    OneExpert,
    SelectedLoop,
)

SWITCHES = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def tokens(number: int) -> torch.Tensor:
    return torch.randn(number, HIDDEN, generator=torch.Generator().manual_seed(number))


def check(model: nn.Module, compiled: Callable[..., torch.Tensor], dtype: torch.dtype, *numbers: int) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for number in numbers:
        hidden = tokens(number).to(dtype)
        torch.testing.assert_close(compiled(hidden), model(hidden), rtol=tolerance, atol=tolerance)


def experts_memories(model: nn.Module) -> list[int]:
    """Return the memory of each expert's weight, by layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, MixtralLoop | SelectedLoop)]
    return [expert.w1.weight.untyped_storage().data_ptr() for layer in layers for expert in layer.experts]


@pytest.mark.parametrize(
    ("lower", "dtype"),
    [
        ("eager", torch.float32),
        pytest.param("eager", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("inductor", torch.float32, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_local_model_of_loops(lower: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    # Rounding to bfloat16 in one layer may change what the next one's router chooses.
    layers: list[nn.Module] = [MixtralLoop(), SelectedLoop()] if dtype is torch.float32 else [MixtralLoop()]
    model = Stack(*layers).to(dtype).eval()
    with torch._dynamo.config.patch(SWITCHES), moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", dynamic=True, fullgraph=True, options={"lower": lower})
        check(model, compiled, dtype, 13, 5, 40)
        (compilation,) = compilations
        plan = compilation.plan
        assert len(plan.blocks) == len(layers)
        assert plan.refusals == ()
        text = compilation.executor.graph_module.print_readable(print_output=False)
        assert "nonzero" not in text
        memories = experts_memories(model)
        assert len(set(memories)) == len(layers)
        state = {name: torch.randn_like(value) / 4 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        check(model, compiled, dtype, 7)
        assert experts_memories(model) == memories
        model.load_state_dict({name: value * 2 for name, value in state.items()}, assign=True)
        check(model, compiled, dtype, 7, 9)
        assert len(set(experts_memories(model))) == len(layers)
    assert compilations == [compilation]  # nothing of this made Dynamo compile again


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@torch.no_grad()
def test_loops_over_boolean_masks(lower: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Stack(AnyPlace(), FlatPairs(), OneExpert(), LastExpertStays()).eval()
    with torch._dynamo.config.patch(SWITCHES), moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", dynamic=True, fullgraph=True, options={"lower": lower})
        check(model, compiled, torch.float32, 13, 5, 40)
    (compilation,) = compilations
    assert len(compilation.plan.blocks) == 3
    (refusal,) = compilation.plan.refusals
    assert "overwrites rows" in refusal.reason


@pytest.mark.slow
@torch.no_grad()
def test_two_models_that_share_a_module() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    shared = MixtralLoop()
    stack, loop = Stack(shared).eval(), Stack(SelectedLoop(), shared).eval()
    with torch._dynamo.config.patch(SWITCHES):
        compiled = [
            torch.compile(model, backend="asyncep", dynamic=True, fullgraph=True, options={"lower": "eager"})
            for model in (stack, loop)
        ]
        check(stack, compiled[0], torch.float32, 8)
        memories = experts_memories(stack)
        check(loop, compiled[1], torch.float32, 8, 12)
        assert experts_memories(stack) == memories
        nn.init.normal_(shared.experts[1].w2.weight)
        check(stack, compiled[0], torch.float32, 8)
        check(loop, compiled[1], torch.float32, 12)


@pytest.mark.slow
def test_a_model_in_inference_mode() -> None:
    torch._dynamo.reset()
    with torch.inference_mode(), torch._dynamo.config.patch(SWITCHES), moepass.record_compilations() as compilations:
        torch.manual_seed(0)
        model = Stack(MixtralLoop()).eval()
        compiled = torch.compile(model, backend="asyncep", dynamic=True, fullgraph=True, options={"lower": "eager"})
        check(model, compiled, torch.float32, 8, 3)
        assert len(compilations) == 1
        assert len(set(experts_memories(model))) == 1
