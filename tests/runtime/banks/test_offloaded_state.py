"""The state_dict and checkpoints of an offloaded model, and moves that are refused before anything is converted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import moepass
from tests.helpers.graphs.backend_helper import BLOCKS, Stack, tokens
from tests.helpers.models.tiny import tiny_inputs, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("form", BLOCKS)
def test_a_state_dict_holds_the_experts_under_their_own_names(form: str) -> None:
    model = Stack(form, depth=2, bias=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moepass.offload_experts(model)
    after = model.state_dict()
    assert set(after) == set(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert {f"m.{name}" for name in before} == set(model.state_dict(prefix="m."))
    assert set(model.blocks[1].state_dict()) == {"up", "down", "up_bias", "down_bias"}


def test_a_state_dict_costs_no_second_copy_of_the_experts() -> None:
    model = Stack("dense_bmm", depth=2)
    report = moepass.offload_experts(model)
    shard = report.store.banks[1].shard
    assert model.state_dict()["blocks.1.up"].untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()


@pytest.mark.parametrize("assign", [False, True])
def test_loading_writes_into_the_banks(assign: bool) -> None:
    source, target = Stack("dense_bmm", depth=2), Stack("dense_bmm", depth=2)
    source.blocks.load_state_dict({name: value * 1.5 for name, value in source.blocks.state_dict().items()})
    expected = source(tokens())
    moepass.offload_experts(target)
    compiled = torch.compile(target, backend="asyncep", options={"lower": "eager", "debug": True})
    for run in (target, compiled, compiled, compiled):
        assert not torch.equal(run(tokens()), expected)
    assert target.load_state_dict(source.state_dict(), assign=assign) == ([], [])
    # The tensors that eager mode caches, and those that were prefetched, are outdated now.
    for run in (target, compiled, compiled):
        assert torch.equal(run(tokens()), expected)


def test_loading_one_half_says_what_is_missing() -> None:
    model = Stack("dense_bmm", depth=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moepass.offload_experts(model)
    del state["blocks.1.up"]
    state["blocks.1.sideways"] = torch.zeros(1)
    outcome = model.load_state_dict(state, strict=False)
    assert outcome.missing_keys == ["blocks.1.up"]
    assert outcome.unexpected_keys == ["blocks.1.sideways"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "blocks.1.up"'):
        model.load_state_dict(state)


def test_loading_a_wrong_shape_names_it() -> None:
    model = Stack("dense_bmm", depth=1)
    expected = model(tokens())
    moepass.offload_experts(model)
    state = model.state_dict()
    state["blocks.0.up"] = torch.zeros(4, 1, 32)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.up.*\[4, 1, 32\].*\[4, 128, 32\]"):
        model.load_state_dict(state)
    assert torch.equal(model(tokens()), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_saved_model_is_the_model_that_was_offloaded(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    moepass.offload_experts(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=model.dtype).eval()
    assert torch.equal(again(**inputs).logits, expected)


def test_torch_save_holds_the_experts(tmp_path: Path) -> None:
    model, twin = Stack("dense_bmm", depth=2), Stack("dense_bmm", depth=2)
    expected = model(tokens())
    moepass.offload_experts(model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    nn.init.zeros_(twin.blocks[0].up)
    twin.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    twin.linears.load_state_dict(model.linears.state_dict())
    assert torch.equal(twin(tokens()), expected)


MOVES: list[Callable[[nn.Module], object]] = [
    lambda model: model.half(),
    lambda model: model.to(torch.bfloat16),
    lambda model: model.to("meta"),
]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("part", ["", "layers", "layers.0"])
def test_a_refused_move_changes_nothing(move: Callable[[nn.Module], object], part: str) -> None:
    class Layer(nn.Module):
        """A layer with its experts as the last child, so that a move converts the dense weights first."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.stack = Stack("dense_bmm", depth=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.stack(self.norm(x))
            return result

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(self.first(x))
            return x

    model = Model().eval()
    expected = model(tokens())
    moepass.offload_experts(model)
    with pytest.raises(moepass.InputError, match=r"offloaded experts are torch\.float32 for cpu"):
        move(model.get_submodule(part))
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert {value.device.type for value in model.parameters()} == {"cpu"}
    assert torch.equal(model(tokens()), expected)
    model.first.double().float()
    assert torch.equal(model.float().cpu()(tokens()), expected)


def test_an_offloaded_model_is_freed_with_its_last_reference() -> None:
    """Free the model without the garbage collector: its hooks must not form a cycle."""
    model = Stack("dense_bmm", depth=2)
    gone = weakref.ref(moepass.offload_experts(model).store)
    model(tokens())
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
