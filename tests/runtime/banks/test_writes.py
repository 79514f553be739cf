"""Writes to offloaded experts are errors of the next run, compiled or not: they change a copy of the bank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import moepass
from tests.helpers.models.tiny import tiny_inputs, tiny_model
from tests.helpers.processes.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("no_grad")


def _replace_data(weights: torch.Tensor) -> None:
    weights.data = torch.zeros_like(weights)


def _assign_item(weights: torch.Tensor) -> None:
    weights[1, 2, 3] = 7.0


def _fill_slowly(weights: torch.Tensor) -> None:
    for expert in weights:
        expert.add_(1.0)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda weights: weights.mul_(0.5),
    "copy_": lambda weights: weights.copy_(torch.randn_like(weights)),
    "zero_": lambda weights: weights.zero_(),
    "one number": _assign_item,
    "one expert": lambda weights: weights[2].mul_(2.0),
    "expert by expert": _fill_slowly,
    "init": lambda weights: nn.init.normal_(weights),
    "replaced data": _replace_data,
    "data.mul_": lambda weights: weights.data.mul_(0.5),
    "lerp_": lambda weights: weights.lerp_(torch.ones_like(weights), 0.1),
    "index_copy_": lambda weights: weights.index_copy_(0, torch.tensor([1]), torch.ones_like(weights[:1])),
}
MESSAGE = "offloaded expert weights have been written to"


def _tiny_model() -> nn.Module:
    return tiny_model("qwen3_moe", num_hidden_layers=2)


def _compiled(model: nn.Module) -> Callable[[], torch.Tensor]:
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
    inputs = tiny_inputs(model)
    return lambda: compiled(**inputs).logits


def _experts(model: nn.Module, layer: int = 1) -> nn.Module:
    return model.model.layers[layer].mlp.experts  # type: ignore[no-any-return, union-attr, index]


def test_a_write_is_an_error_of_the_next_compiled_run() -> None:
    model = _tiny_model()
    moepass.offload_experts(model)
    run = _compiled(model)
    expected = run()
    for name, write in WRITES.items():
        write(_experts(model).down_proj)
        with pytest.raises(moepass.InputError, match=MESSAGE):
            run()
        # The bank has not changed, so the model runs as before once the error was raised.
        assert torch.equal(run(), expected), name


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_before_the_first_run_is_its_error(write: str) -> None:
    model = _tiny_model()
    expected = model(**tiny_inputs(model)).logits
    moepass.offload_experts(model)
    run = _compiled(model)
    WRITES[write](_experts(model).down_proj)
    with pytest.raises(moepass.InputError, match=MESSAGE):
        run()
    assert torch.equal(run(), expected)


def test_a_write_to_a_tensor_that_was_read_long_ago_is_noticed() -> None:
    model = _tiny_model()
    moepass.offload_experts(model)
    run = _compiled(model)
    run()
    weights = [_experts(model, layer).gate_up_proj for layer in (0, 1)]
    run()
    weights[0].mul_(2.0)
    with pytest.raises(moepass.InputError, match=MESSAGE):
        run()


def test_reads_are_no_writes_and_keep_no_memory() -> None:
    model = _tiny_model()
    store = moepass.offload_experts(model).store
    run = _compiled(model)
    expected = run()
    for layer in (0, 1, 0):
        (_experts(model, layer).down_proj * 2).sum()
        assert torch.equal(run(), expected)
        assert store._eager is None
        assert len(store._handed_out) == 0


def _error_of_a_write(home: str, folder: Path) -> str:
    torch._dynamo.reset()
    model = _tiny_model()
    moepass.offload_experts(model, home=moepass.Disk(folder=folder) if home == "disk" else home)
    run = _compiled(model)
    run()
    _experts(model).down_proj.mul_(0.5)
    try:
        run()
    except moepass.MoepassError as error:
        return str(error)
    return "none"


def test_writes_are_noticed_where_experts_rest_in_files(tmp_path: Path) -> None:
    assert MESSAGE in _error_of_a_write("disk", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["peer", "hybrid"])
def test_writes_are_noticed_where_ranks_share_experts(home: str, tmp_path: Path) -> None:
    assert all(MESSAGE in error for error in run_ranks(2, _error_of_a_write, home, tmp_path))
