"""A stored graph is not used if the surroundings of the model differ: torch, modes, ranks, the environment.

A graph is not stored if it is only part of a call.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moepass.runtime.captures import fingerprint
from moepass.runtime.captures.capture_store import CaptureStore
from tests.helpers.graphs.stored_models import compiles

pytestmark = pytest.mark.usefixtures("known_tests", "no_grad")
Script = Callable[..., nn.Module]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a function that loads the model of a file with this code, as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(text: str) -> nn.Module:
        path = tmp_path / f"{tmp_path.name}_model.py"
        path.write_text(f"import torch\nfrom torch import nn\n{text}")
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
        importlib.invalidate_caches()
        made: nn.Module = importlib.import_module(path.stem).Model()
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
    assert "does not compile a call as one function" in caplog.text
    compiles(store, script(text), -torch.ones(4))
    assert store.entries() == []


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


def test_variables_that_packages_read_as_they_are_imported_are_compared(
    store: CaptureStore, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class Model(nn.Module):\n    def forward(self, rows):\n        return rows * 2\n"
    assert compiles(store, script(text))
    assert not compiles(store, script(text))
    monkeypatch.setenv("TRANSFORMERS_VALUE_OF_TEST", "1")
    assert compiles(store, script(text))


# ---- torch -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_another_path_of_attention_is_compiled_anew(store: CaptureStore, script: Script) -> None:
    text = """
class Model(nn.Module):
    def forward(self, rows):
        return rows * (2 if torch.backends.mha.get_fastpath_enabled() else 3)
"""
    assert compiles(store, script(text))
    assert not compiles(store, script(text))
    with _without_fast_path():
        assert compiles(store, script(text))


@pytest.mark.parametrize(
    "part",
    [torch.backends.mkldnn.matmul, torch.backends.mkldnn, torch.backends.cuda.matmul],
    ids=["mkldnn.matmul", "mkldnn", "cuda.matmul"],
)
def test_the_precision_that_one_library_may_use_is_compared(part: Any) -> None:
    """Inductor's passes read this setting. The call for all libraries raises once it was set."""
    settings, before = fingerprint.settings(), part.fp32_precision
    part.fp32_precision = "tf32"
    try:
        assert fingerprint.settings() != settings
    finally:
        part.fp32_precision = before
    assert fingerprint.settings() == settings


@pytest.mark.parametrize("name", ["post_grad_custom_post_pass", "_pre_fusion_custom_pass", "custom_partitioner_fn"])
def test_nothing_is_stored_where_inductor_has_a_pass_of_the_program(
    store: CaptureStore, script: Script, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="moepass")
    text = "class Model(nn.Module):\n    def forward(self, rows):\n        return rows * 2\n"
    with torch._inductor.config.patch({name: lambda graph: None}):
        assert compiles(store, script(text))
    assert store.entries() == []
    assert f"the setting torch._inductor.config.{name} is a function" in caplog.text


@pytest.mark.parametrize("other", [("NVIDIA L4", (8, 9)), ("NVIDIA A100", (8, 9)), ("NVIDIA L4", (8, 0))])
def test_gpus_that_the_model_lies_on_are_compared(
    other: tuple[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES can hide all but one of several different GPUs."""
    devices = [torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:0")]
    seen = []
    for name, ability in (("NVIDIA L4", (8, 9)), other):
        monkeypatch.setattr(fingerprint, "device_name", lambda device, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, ability=ability: ability)
        seen.append(fingerprint.digest_of(fingerprint.machine(devices)))
    assert (seen[0] == seen[1]) == (other == ("NVIDIA L4", (8, 9)))


@pytest.mark.parametrize("field", ["model name", "flags", "CPU part", "Features"])
def test_what_the_kernel_says_of_a_processor_is_compared(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Arm there is no model name and there are no flags."""
    before = fingerprint.machine([])
    monkeypatch.setattr(fingerprint, "cpu_info", lambda name: "other" if name == field else None)
    other_machine = fingerprint.machine([])
    monkeypatch.setattr(fingerprint, "cpu_info", lambda name: None)
    machines = (before, other_machine, fingerprint.machine([]))
    assert len({fingerprint.digest_of(description) for description in machines}) == 3


# ---- the context of a call -------------------------------------------------------------------------------------------


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
