"""Inductor waits for C++ compilers at the end of a block, in this thread only, and for all of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import async_compile
from torch._inductor.codecache import PyCodeCache

from moepass.runtime.torch_private import compilers_side_by_side


class _Compilers:
    """A replacement for Inductor's compilers that records each wait."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait(self, scope: dict[str, Any]) -> None:
        if scope["name"] == "broken":
            raise RuntimeError("no such instruction")
        self.waited.append(scope["name"])


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> _Compilers:
    fresh = type("Fresh", (_Compilers,), {"wait": _Compilers.wait})  # its own `wait`, which is replaced
    monkeypatch.setattr(async_compile, "AsyncCompile", fresh)
    compilers: _Compilers = fresh()
    return compilers


def test_all_waits_come_at_the_end_of_the_block_in_their_order(compilers: _Compilers) -> None:
    for turn in range(2):  # the second time everything is in its place already
        with compilers_side_by_side():
            compilers.wait({"name": "first"})
            with compilers_side_by_side():
                compilers.wait({"name": "inner"})
            compilers.wait({"name": "last"})
            assert compilers.waited == ["first", "inner", "last", "outside"] * turn
        compilers.wait({"name": "outside"})
        assert compilers.waited == ["first", "inner", "last", "outside"] * (turn + 1)


def test_other_threads_wait_at_once(compilers: _Compilers) -> None:
    with compilers_side_by_side():
        compilers.wait({"name": "here"})
        thread = threading.Thread(target=compilers.wait, args=({"name": "there"},))
        thread.start()
        thread.join()
        assert compilers.waited == ["there"]
    assert compilers.waited == ["there", "here"]


@pytest.mark.parametrize("fails", ["the block", "a compiler"])
def test_after_an_error_no_module_without_kernels_is_left(
    fails: str, compilers: _Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(PyCodeCache, "cache_clear", lambda: cleared.append(True))

    def compile_something() -> None:
        with compilers_side_by_side():
            compilers.wait({"name": "broken" if fails == "a compiler" else "whole"})
            if fails == "the block":
                raise RuntimeError("no such operator")

    with pytest.raises(RuntimeError, match="no such"):
        compile_something()
    assert cleared == [True]
    compilers.wait({"name": "outside"})
    assert compilers.waited == ["outside"]


def test_a_failing_compiler_is_an_error_of_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, scope: dict[str, Any]) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(async_compile.AsyncCompile, "wait", fail)
    torch.manual_seed(0)
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU()), backend="asyncep")
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such instruction"):
        compiled(torch.ones(2, 4))
