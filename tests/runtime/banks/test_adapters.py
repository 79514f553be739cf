"""Adapters of expert weights that are added and removed in every forward, as by peft's `target_parameters`."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import moepass
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.graphs.error_fields import refused

RANK = 2

pytestmark = pytest.mark.usefixtures("no_grad")


class _Delta(nn.Module):
    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class _OtherDelta(_Delta):
    """The parametrization that peft registers for a single adapter and does not find when it removes adapters."""


class ParameterAdapter(nn.Module):
    """A short version of peft 0.21's `ParamWrapper`: wraps `base` and changes its parameter `name` in each forward."""

    def __init__(self, base: nn.Module, name: str, seed: int) -> None:
        super().__init__()
        self.base, self.name = base, name
        self.experts, height, width = self.weight().shape
        generator = torch.Generator().manual_seed(seed)
        # Matrices as in peft: a tensor [experts, ., .] would become a bank.
        self.lora_a = nn.Parameter(torch.randn(RANK * self.experts, width, generator=generator), requires_grad=False)
        self.lora_b = nn.Parameter(torch.randn(height, RANK * self.experts, generator=generator), requires_grad=False)

    def delta(self) -> torch.Tensor:
        a = self.lora_a.reshape(self.experts, RANK, -1)
        b = self.lora_b.reshape(-1, RANK, self.experts).permute(2, 0, 1)
        return b @ a / 8

    def innermost(self) -> nn.Module:
        return self.base.innermost() if isinstance(self.base, ParameterAdapter) else self.base

    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = getattr(self.innermost(), self.name)
        return weight

    def merge(self) -> nn.Module:
        self.weight().data += self.delta()
        return self.base.merge() if isinstance(self.base, ParameterAdapter) else self.base

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        module = self.innermost()
        parametrize.register_parametrization(module, self.name, _OtherDelta(self.delta()))
        try:
            with parametrize.cached():
                result: torch.Tensor = self.base(*arguments)
        finally:
            self._remove(module)
        return result

    def _remove(self, module: nn.Module) -> None:
        registered = module.parametrizations[self.name]  # type: ignore[index, union-attr]
        if len(registered) == 1:
            parametrize.remove_parametrizations(module, self.name, leave_parametrized=False)
            return
        for index in reversed(range(len(registered))):
            if type(registered[index]) is _Delta:
                del registered[index]
                return
        warnings.warn("no adapter was found", stacklevel=1)


def plain() -> Stack:
    torch.manual_seed(0)
    return Stack("dense_bmm", depth=2)


def adapted() -> Stack:
    model = plain()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = ParameterAdapter(ParameterAdapter(block, "up", 2 * index), "down", 2 * index + 1)
    return model.eval()


def merged(model: Stack) -> Stack:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = block.merge()
    return model


@pytest.fixture
def expected() -> torch.Tensor:
    model = adapted()
    expected = model(tokens())
    assert torch.equal(model(tokens()), expected)
    assert not torch.allclose(plain()(tokens()), expected)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_temporary_adapter_is_refused_with_a_remedy(compiled: bool, expected: torch.Tensor) -> None:
    model = adapted()
    moepass.offload_experts(model)
    run = torch.compile(model, backend="asyncep", options={"lower": "eager"}) if compiled else model
    for _ in range(3):
        # The outermost adapter comes first. A refused adapter must leave nothing behind.
        with pytest.raises(
            moepass.InputError, match=r"_OtherDelta changes .*`down`.* merge adapters .* before offload"
        ):
            run(tokens())


def test_an_adapter_of_a_layer_that_stays_works(expected: torch.Tensor) -> None:
    model = adapted()
    model.blocks[1] = model.blocks[1].merge()
    moepass.offload_experts(model, resident_layers=[0])
    for _ in range(3):
        torch.testing.assert_close(model(tokens()), expected)


def test_merged_adapters_are_offloaded(expected: torch.Tensor) -> None:
    model = merged(adapted())
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
    for run in (model, model, compiled, compiled):
        torch.testing.assert_close(run(tokens()), expected)


def test_merging_into_offloaded_weights_is_noticed() -> None:
    model = adapted()
    moepass.offload_experts(model)
    with pytest.raises(moepass.InputError, match=r"have been written to.*change or merge weights before"):
        merged(model)


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda up: up.data.mul_(2), lambda up: up.data.copy_(up + 1)])
def test_a_write_to_the_tensors_of_eager_code_is_noticed_in_the_next_forward(write: object) -> None:
    model = plain()
    expected = model(tokens())
    moepass.offload_experts(model)
    assert callable(write)
    write(model.blocks[0].up)
    with pytest.raises(moepass.InputError, match="have been written to"):
        model(tokens())
    assert torch.equal(model(tokens()), expected)  # the banks are unchanged


def test_weights_with_nan_are_no_write() -> None:
    model = plain()
    model.blocks[0].up[:] = float("nan")
    moepass.offload_experts(model)
    for _ in range(2):
        assert model(tokens()).isnan().all()


@pytest.mark.parametrize("leave", [False, True])
def test_the_bank_is_not_removed_as_a_parametrization(leave: bool) -> None:
    model = plain()
    expected = model(tokens())
    moepass.offload_experts(model)
    with refused(moepass.InputError, name="up"):
        parametrize.remove_parametrizations(model.blocks[0], "up", leave_parametrized=leave)
    assert torch.equal(model(tokens()), expected)
