"""A stored graph is not used where something around the model differs: operators, torch, modes, ranks, the environment.

Nor is one stored that is only a part of what a call runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_models import EAGER, compiles
from torch import nn
from torch.overrides import TorchFunctionMode

from moepass.runtime.captures import fingerprint
from moepass.runtime.captures.capture_store import CaptureStore
from moepass.runtime.captures.fingerprint import describe_model, digest_of
from moepass.stored_compile import StoredModule

pytestmark = pytest.mark.usefixtures("known_tests", "no_grad")
Script = Callable[..., nn.Module]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """The model of a file whose text is given, beside a file of constants, as a new process would load both."""
    monkeypatch.setattr(fingerprint.psutil.Process, "create_time", lambda process: time.time() + 1)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(text: str, constants: str = "") -> nn.Module:
        texts = {"constants": constants, "model": f"import torch\nfrom torch import nn\n{text}"}
        for name, content in texts.items():
            path = tmp_path / f"{tmp_path.name}_{name}.py"
            path.write_text(content.replace("constants", f"{tmp_path.name}_constants"))
            monkeypatch.delitem(sys.modules, path.stem, raising=False)
        importlib.invalidate_caches()
        made: nn.Module = importlib.import_module(f"{tmp_path.name}_model").Model()
        return made

    return make


# ---- a graph that is a part of the call ------------------------------------------------------------------------------

PREDICATE = """
class Model(nn.Module):
    @torch.compiler.disable
    def is_hot(self, rows):
        return float(rows.sum()) > 0
    def forward(self, rows):
        return rows * 2 if self.is_hot(rows) else rows * 3
"""
CHANGED_AFTER = """
@torch.compiler.disable
def clip(rows):
    rows.clamp_(min=0)
class Model(nn.Module):
    def forward(self, rows):
        result = rows * 2
        clip(result)
        return result
"""
SKIPPED = """
def routed(rows):
    return rows * 2
class Model(nn.Module):
    def forward(self, rows):
        for _ in range(1):
            torch._dynamo.graph_break()
        return routed(rows) if float(rows.numpy().sum()) > 0 else rows * 3
"""
NOT_COMPILED = """
class Part(nn.Module):
    def forward(self, rows):
        return rows * 2
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
    @torch._dynamo.disable(recursive=False)
    def forward(self, rows):
        return self.part(rows) if float(rows.sum()) > 0 else rows * 3
"""


@pytest.mark.parametrize("text", [PREDICATE, CHANGED_AFTER, SKIPPED, NOT_COMPILED])
def test_a_graph_that_is_a_part_of_a_call_is_not_stored(
    store: CaptureStore, script: Script, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="moepass")
    assert compiles(store, script(text))
    assert "does not compile as one function" in caplog.text
    compiles(store, script(text), -torch.ones(4))
    assert store.entries() == []


# ---- operators and torch ---------------------------------------------------------------------------------------------

OWN_OPERATOR = """
class Model(nn.Module):
    def forward(self, rows):
        result = torch.ops.moepass_test.own(rows)
        return result * result.shape[0]
"""


@pytest.mark.parametrize("key", [("CompositeImplicitAutograd",), ("CPU", "Meta")])
def test_a_graph_with_an_operator_of_the_program_is_not_stored(
    store: CaptureStore, script: Script, key: tuple[str, ...]
) -> None:
    """Its code, or what it says of its results, is in the graph, and in no list of sources."""
    for times in (2, 3):
        library = torch.library.Library("moepass_test", "FRAGMENT")
        try:
            library.define("own(Tensor rows) -> Tensor")
            for one in key:
                library.impl("own", lambda rows, times=times: rows.repeat(times), one)
            assert compiles(store, script(OWN_OPERATOR))
        finally:
            library._destroy()
    assert store.entries() == []


def test_a_function_of_torch_that_only_torch_calls_is_compared(
    store: CaptureStore, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        nn.init.ones_(self.layer.weight)
    def forward(self, rows):
        return self.layer(rows)
"""
    assert compiles(store, script(text))
    assert not compiles(store, script(text))
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *given: 2 * linear(*given))
    assert compiles(store, script(text))


def test_a_method_of_tensors_that_was_replaced_is_compared(
    store: CaptureStore, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class Model(nn.Module):\n    def forward(self, rows):\n        return rows.silently_doubled()\n"
    monkeypatch.setattr(torch.Tensor, "silently_doubled", lambda rows: rows * 2, raising=False)
    assert compiles(store, script(text))
    assert not compiles(store, script(text))
    monkeypatch.setattr(torch.Tensor, "silently_doubled", lambda rows: rows * 3)
    assert compiles(store, script(text))


# ---- values ----------------------------------------------------------------------------------------------------------


def test_an_attribute_of_a_metaclass_is_compared(store: CaptureStore, script: Script) -> None:
    text = """
from constants import Config
class Model(nn.Module):
    def forward(self, rows):
        return rows * Config.LIMIT
"""
    constants = "class Kind(type):\n    LIMIT = {}\nclass Config(metaclass=Kind):\n    pass\n"
    assert compiles(store, script(text, constants.format(2.0)))
    assert not compiles(store, script(text, constants.format(2.0)))
    assert compiles(store, script(text, constants.format(3.0)))


@pytest.mark.parametrize("read", ["os.getenv('VALUE_OF_TEST')", "getenv('VALUE_OF_TEST')", "environ['VALUE_OF_TEST']"])
def test_an_environment_variable_that_code_reads_is_compared(
    store: CaptureStore, script: Script, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    text = f"""
import os
from os import environ, getenv
class Model(nn.Module):
    def forward(self, rows):
        return rows * float({read})
"""
    monkeypatch.setenv("VALUE_OF_TEST", "2")
    assert compiles(store, script(text))
    assert not compiles(store, script(text))
    monkeypatch.setenv("VALUE_OF_TEST", "3")
    assert compiles(store, script(text))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: contextvars.ContextVar("limit", default=value),
        lambda value: re.compile("a" * 300 + str(value)),
    ],
)
def test_what_a_value_does_not_show_is_described(make: Callable[[int], Any]) -> None:
    def key(value: int) -> str:
        model = nn.Linear(4, 4)
        model.held = make(value)
        return digest_of(describe_model(model))

    assert key(2) == key(2) != key(3)


# ---- the context of a call -------------------------------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.exp else result


@contextlib.contextmanager
def _rank(rank: int, ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _autocast_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        ("return torch.exp(rows)", contextlib.nullcontext, Doubling),
        ("return torch.exp(rows)", Doubling, contextlib.nullcontext),
        ("return rows * (1 + torch.distributed.get_rank())", lambda: _rank(0, 2), lambda: _rank(1, 2)),
        ("return rows * torch.distributed.get_world_size()", lambda: _rank(0, 2), lambda: _rank(0, 4)),
        (
            "with torch.autocast('cpu'): return rows[None] @ rows[:, None]",
            contextlib.nullcontext,
            lambda: _autocast_dtype(torch.float16),
        ),
    ],
)
def test_the_context_of_a_process_is_compared(
    store: CaptureStore, script: Script, body: str, first: Callable[[], Any], second: Callable[[], Any]
) -> None:
    text = f"class Model(nn.Module):\n    def forward(self, rows):\n        {body}\n"
    rows = torch.randn(4, generator=torch.Generator().manual_seed(0))
    for context, is_compiled in ((first, True), (first, False), (second, True)):
        with context():
            assert compiles(store, script(text), rows) == is_compiled


def test_a_mode_that_is_entered_after_the_first_call_goes_to_the_compiler(store: CaptureStore, script: Script) -> None:
    model = script("class Model(nn.Module):\n    def forward(self, rows):\n        return torch.exp(rows)\n")
    stored = StoredModule(model, EAGER, "model", store)
    rows = torch.ones(4)
    expected = torch.exp(rows)
    assert torch.equal(stored(rows), expected)
    loaded = StoredModule(model, EAGER, "model", store)
    assert torch.equal(loaded(rows), expected)
    with Doubling():
        doubled = loaded(rows)
    assert torch.equal(doubled, 2 * expected)
    assert torch.equal(loaded(rows), expected)


def test_a_parameter_as_an_argument_is_told_apart(store: CaptureStore, script: Script) -> None:
    text = """
class Model(nn.Module):
    def forward(self, rows):
        return rows * 2 if isinstance(rows, nn.Parameter) else rows * 3
"""
    parameter = nn.Parameter(torch.ones(4), requires_grad=False)
    assert compiles(store, script(text), parameter)
    assert store.entries() == []
    assert compiles(store, script(text))
    assert not compiles(store, script(text))
    assert compiles(store, script(text), parameter)
