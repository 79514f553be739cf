"""A stored graph is not used if a value in the model differs, or a tensor of the call."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import moepass
from moepass.runtime.captures.capture_store import CaptureStore
from moepass.stored_compile import StoredModule
from tests.helpers.graphs.stored_models import EAGER, compiles

pytestmark = pytest.mark.usefixtures("known_tests", "no_grad")


# ---- values that modules hold ----------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor


class Settings:
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def scale(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor


def _times(rows: torch.Tensor, factor: float) -> torch.Tensor:
    return rows * factor


class Holder(nn.Module):
    """Calls an object that is no child module. The description reaches this object before the children."""

    def __init__(self, held: Any, child: nn.Module | None = None) -> None:
        super().__init__()
        self.held = [held]
        self.child = child

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.held[0](rows)  # type: ignore[no-any-return]


def _child(factor: float) -> nn.Module:
    child = Scale(factor)
    return Holder(child, child)


def _closure(factor: float) -> nn.Module:
    child = Scale(factor)
    return Holder(lambda rows: child(rows), child)


def _parametrized(factor: float) -> nn.Module:
    model = nn.Linear(4, 4, bias=False)
    model.weight.requires_grad_(False)
    nn.init.ones_(model.weight)
    torch.nn.utils.parametrize.register_parametrization(model, "weight", Scale(factor))
    return model


def _replaced_forward(factor: float) -> nn.Module:
    model = Scale(1.0)
    model.forward = types.MethodType(lambda self, rows: rows * factor, model)  # type: ignore[method-assign]
    return model


class Hook:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def called(self, module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output * self.factor

    def called_with_names(self, module: nn.Module, given: Any, named: dict[str, Any], output: torch.Tensor) -> Any:
        return output * self.factor


def _hooked(factor: float) -> nn.Module:
    model = Scale(1.0)
    model.register_forward_hook(Hook(factor).called)
    return nn.Sequential(model)


def _hooked_with_names(factor: float) -> nn.Module:
    model = Scale(1.0)
    model.register_forward_hook(Hook(factor).called_with_names, with_kwargs=True)
    return nn.Sequential(model)


def _attribute_of_parameter(factor: float) -> nn.Module:
    model = Scale(1.0)
    model.weight = nn.Parameter(torch.ones(4), requires_grad=False)
    model.weight.factor = factor  # type: ignore[attr-defined]
    return model


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize(
    "make",
    [
        _child,
        _closure,
        lambda factor: Holder(Scale(factor)),
        lambda factor: Holder(functools.partial(Scale(factor))),
        lambda factor: Holder(functools.partial(_times, factor=factor)),
        lambda factor: Holder(Settings(factor).scale),
        _parametrized,
        _replaced_forward,
        _hooked,
        _hooked_with_names,
        _attribute_of_parameter,
    ],
)
def test_a_value_that_is_held_anywhere_in_a_model_is_compared(
    store: CaptureStore, make: Callable[[float], nn.Module]
) -> None:
    assert compiles(store, make(2.0))
    assert not compiles(store, make(2.0))
    assert compiles(store, make(3.0))


def test_a_value_without_a_stable_description_is_named(store: CaptureStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="moepass")
    model = Scale()
    model.generator = torch.Generator()
    assert compiles(store, model)
    assert store.entries() == []
    assert "Scale.generator is of type torch._C.Generator" in caplog.text


def _nested(depth: int) -> list[Any]:
    return [] if depth == 0 else [_nested(depth - 1)]


@pytest.mark.parametrize(
    ("value", "reason"),
    [(10**5000, "4300 digits"), ("\ud800", "surrogates not allowed"), (_nested(900), "RecursionError")],
    ids=["long number", "half of a character", "deep list"],
)
def test_a_value_that_cannot_be_written_down_is_no_error(
    store: CaptureStore, caplog: pytest.LogCaptureFixture, value: Any, reason: str
) -> None:
    caplog.set_level("INFO", logger="moepass")
    model = Scale()
    model.held = value
    assert compiles(store, model)
    assert store.entries() == []
    assert reason in caplog.text


# ---- tensors at each call --------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.to(rows.dtype)


@pytest.mark.parametrize(
    "swap",
    [
        lambda weight: setattr(weight, "data", weight.data.half()),
        lambda weight: setattr(weight, "data", weight.data.t().contiguous().t()),
        lambda weight: weight.t_(),
    ],
)
def test_a_parameter_that_gets_other_memory_is_compiled_anew(
    store: CaptureStore, swap: Callable[[nn.Parameter], Any]
) -> None:
    assert compiles(store, Weighted())
    model = Weighted()
    loaded = StoredModule(model, EAGER, "model", store)
    (capture,) = loaded._load(store)
    assert capture.inputs_for([torch.ones(4)]) is not None
    swap(model.weight)
    assert capture.inputs_for([torch.ones(4)]) is None


# ---- the context -----------------------------------------------------------------------------------------------------


def test_a_second_start_reports_by_the_profile_of_the_options(store: CaptureStore) -> None:
    options = {
        **EAGER,
        "hardware": "8xh100-80g",
        "disable": ["sink_token_gather"],
        "slots": 3,
        "transport": "collective",
    }
    contexts = []
    for _ in range(2):
        torch._dynamo.reset()
        with moepass.record_compilations() as compilations:
            StoredModule(Scale(), options, "model", store)(torch.ones(4))
        contexts.append(compilations[0].context)
    first, second = contexts
    assert second.hardware is not None
    for name in ("hardware", "disabled", "slots", "transport", "all_to_all_below", "placed"):
        assert getattr(first, name) == getattr(second, name)
