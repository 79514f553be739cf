"""A stored graph is not used where a value differs that the traced code may have read, wherever the value lies."""

from __future__ import annotations

import functools
import importlib
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_models import EAGER, compiles
from torch import nn

import moepass
from moepass.runtime.captures import fingerprint
from moepass.runtime.captures.capture_store import CaptureStore
from moepass.runtime.captures.fingerprint import describe_model, digest_of
from moepass.stored_compile import StoredModule

pytestmark = pytest.mark.usefixtures("known_tests", "no_grad")


# ---- values that modules hold ----------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor


class Settings:
    flag = 1.0

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def scale(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor * self.flag


def _times(rows: torch.Tensor, factor: float) -> torch.Tensor:
    return rows * factor


class Holder(nn.Module):
    """Calls what it holds outside of its children, which is met before the children are."""

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


def _hooked(factor: float) -> nn.Module:
    model = Scale(1.0)
    model.register_forward_hook(Hook(factor).called)
    return nn.Sequential(model)


def _attribute_of_parameter(factor: float) -> nn.Module:
    model = Scale(1.0)
    model.weight = nn.Parameter(torch.ones(4), requires_grad=False)
    model.weight.factor = factor  # type: ignore[attr-defined]
    return model


def _class_of_held(factor: float) -> nn.Module:
    return Holder(type("Own", (Settings,), {"flag": factor})().scale)


@pytest.mark.parametrize(
    "make",
    [
        _child,
        _closure,
        lambda factor: Holder(Scale(factor)),
        lambda factor: Holder(functools.partial(Scale(factor))),
        lambda factor: Holder(functools.partial(_times, factor=factor)),
        lambda factor: Holder(Settings(factor).scale),
        _class_of_held,
        _parametrized,
        _replaced_forward,
        _hooked,
        _attribute_of_parameter,
    ],
)
def test_a_value_that_is_held_anywhere_in_a_model_is_compared(
    store: CaptureStore, make: Callable[[float], nn.Module]
) -> None:
    assert compiles(store, make(2.0))
    assert not compiles(store, make(2.0))
    assert compiles(store, make(3.0))


def test_a_class_attribute_that_changes_while_a_program_runs_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Holder(Settings().scale)
    before = digest_of(describe_model(model))
    monkeypatch.setattr(Settings, "flag", 5.0)
    assert digest_of(describe_model(model)) != before


def test_a_value_without_a_stable_description_is_named(store: CaptureStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="moepass")
    model = Scale()
    model.generator = torch.Generator()
    assert compiles(store, model)
    assert store.entries() == []
    assert "Scale.generator is of type torch._C.Generator" in caplog.text


def test_sets_in_code_have_the_same_text_in_each_process() -> None:
    def is_one(name: str) -> bool:
        return name in {"one", "two", "three", "four", "five"}

    model = Holder(is_one)
    assert "['five', 'four', 'one', 'three', 'two']" in str(describe_model(model)).replace('"', "")


# ---- values that code reads by name ----------------------------------------------------------------------------------

LAYER = """
from torch import nn
import {prefix}constants
from {prefix}constants import Config, settings, table, scaled

class Model(nn.Module):
    def forward(self, rows):
        {body}
"""
CONSTANTS = """
import functools, os
LIMIT = {value}
class Config:
    FLAG = {value}
class Settings:
    kind = {value}
    def __init__(self):
        self.limit = {value}
    @property
    def read(self):
        return float(os.environ.get("VALUE_OF_TEST", "2"))
settings = Settings()
table = {{"limit": {value}}}
def scaled(rows, factor={value}):
    return rows * factor
@functools.lru_cache
def cached():
    return LIMIT
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    """A model of a file of its own, whose code has `body` and reads another file, as a new process would load both."""
    monkeypatch.setattr(fingerprint.psutil.Process, "create_time", lambda process: time.time() + 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    prefix = f"{tmp_path.name}_"

    def make(body: str, value: float = 2.0) -> nn.Module:
        for name, text in (("constants", CONSTANTS.format(value=value)), ("layer", LAYER)):
            path = tmp_path / f"{prefix}{name}.py"
            text = text if name == "constants" else LAYER.format(prefix=prefix, body=body)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            monkeypatch.delitem(sys.modules, path.stem, raising=False)
        importlib.invalidate_caches()
        made: nn.Module = importlib.import_module(f"{prefix}layer").Model()
        return made

    return make


@pytest.mark.parametrize(
    "body",
    [
        "return rows * {prefix}constants.LIMIT",
        "return rows * Config.FLAG",
        "return rows * getattr(Config, 'FLAG')",
        "return rows * settings.limit",
        "return rows * settings.kind",
        "return rows * table['limit']",
        "return scaled(rows)",
        "return rows * {prefix}constants.cached()",
        "import {prefix}constants as other; return rows * other.LIMIT",
        "from {prefix}constants import LIMIT; return rows * LIMIT",
    ],
)
def test_a_value_of_another_file_is_compared(
    store: CaptureStore, script: Callable[..., nn.Module], body: str, tmp_path: Path
) -> None:
    body = body.format(prefix=f"{tmp_path.name}_")
    assert compiles(store, script(body))
    assert not compiles(store, script(body))
    assert compiles(store, script(body, 3.0))


def test_code_of_no_file_that_reads_globals_is_not_stored(store: CaptureStore) -> None:
    text = "class Model(nn.Module):\n    def forward(self, rows):\n        return rows * LIMIT\n"
    for limit in (2.0, 3.0):
        values: dict[str, Any] = {"nn": nn, "LIMIT": limit, "__name__": "made"}
        exec(text, values)
        assert compiles(store, values["Model"]())
    assert store.entries() == []


def test_a_class_that_claims_a_module_of_torch_is_described() -> None:
    keys = set()
    for module in ("builtins", "torch.nn", None):
        for factor in (2.0, 3.0):
            model = Scale()
            model.held = type("Linear", (), {"factor": factor, "__module__": module})()
            keys.add(digest_of(describe_model(model)))
    assert len(keys) == 6


def test_an_environment_variable_that_transformers_reads_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import sdpa_attention

    file = str(sdpa_attention.__file__)
    names = {file: ["os", "environ", "TRANSFORMERS_SDPA_FORCE_GQA"]}
    monkeypatch.delenv("TRANSFORMERS_SDPA_FORCE_GQA", raising=False)
    before = fingerprint.describe_names(names)
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    assert fingerprint.describe_names(names) != before


def test_a_function_of_torch_that_was_replaced_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(4, 4)
    names = {str(sys.modules[Scale.__module__].__file__): ["torch", "nn", "functional", "silu"]}
    before = (digest_of(describe_model(linear)), digest_of(fingerprint.describe_names(names)))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, rows: rows)
    monkeypatch.setattr(nn.functional, "silu", lambda rows: rows)
    after = (digest_of(describe_model(linear)), digest_of(fingerprint.describe_names(names)))
    assert all(old != new for old, new in zip(before, after, strict=True))


# ---- code that is not known ------------------------------------------------------------------------------------------


class Calls(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2 if self.held is None else self.held(rows)  # type: ignore[no-any-return]


def _made(text: str) -> Any:
    """What stands in a file of the program."""
    return eval(compile(text, "/srv/program.py", "eval"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Calls(_made("lambda rows: rows * 2")),
        lambda: Calls(functools.partial(_made("lambda rows, factor: rows * factor"), factor=2)),
        lambda: Calls(_made("type('Own', (), {'__call__': lambda self, rows: rows * 2})()")),
        lambda: _made("type('Own', (Scale,), {'forward': lambda self, rows: rows * 2})()"),
    ],
)
def test_a_model_with_other_code_is_not_stored(
    store: CaptureStore, make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="moepass")
    assert compiles(store, make())
    assert store.entries() == []
    assert "whose code is not known by a version" in caplog.text


def test_a_model_whose_traced_code_is_other_code_is_not_stored(
    store: CaptureStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="moepass")
    monkeypatch.setattr(sys.modules[__name__], "_times", _made("lambda rows, factor: rows * factor * 2"))
    assert compiles(store, Scaled())
    assert store.entries() == []
    assert "whose code is not known by a version" in caplog.text


class Scaled(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _times(rows, 2.0)


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
        lambda weight: setattr(weight, "data", torch.complex(weight.data, weight.data).conj().imag),
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


def test_an_argument_with_attributes_or_lazy_numbers_goes_to_the_compiler(store: CaptureStore) -> None:
    assert compiles(store, Scale())
    (capture,) = StoredModule(Scale(), EAGER, "model", store)._load(store)
    assert capture.inputs_for([torch.ones(4)]) is not None
    marked = torch.ones(4)
    marked.factor = 3.0  # type: ignore[attr-defined]
    negative = torch.complex(torch.ones(4), torch.ones(4)).conj().imag
    assert negative.is_neg()
    for rows in (marked, negative):
        assert capture.inputs_for([rows]) is None

    def batched(rows: torch.Tensor) -> torch.Tensor:
        assert capture.inputs_for([rows]) is None
        return rows

    torch.vmap(batched)(torch.ones(2, 4))


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
