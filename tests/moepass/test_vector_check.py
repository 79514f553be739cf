"""Inductor's check for vector instructions runs while the model is captured."""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import Any

import pytest
import torch
from torch._inductor import cpu_vec_isa

from moepass.backend import vector_check
from moepass.runtime import torch_private
from moepass.runtime.lowering import segment_records
from tests.helpers.graphs.backend_helper import Stack, tokens

_context: contextvars.ContextVar[str] = contextvars.ContextVar("context", default="nobody's")


def test_it_is_asked_once_in_a_thread_with_the_callers_context(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    may_answer = threading.Event()

    def ask() -> None:
        assert may_answer.wait(10)
        asked.append((_context.get(), threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", ask)
    token = _context.set("the caller's")
    try:
        with vector_check() as wait:
            assert asked == []
            may_answer.set()
            wait()
            assert asked == [("the caller's", False)]
    finally:
        _context.reset(token)
    assert asked == [("the caller's", False)]


def test_the_thread_has_ended_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", fail)

    def capture() -> None:
        with vector_check() as wait:
            wait()
            raise ValueError("of the capture")

    with pytest.raises(ValueError, match="of the capture"):
        capture()
    assert "moepass-vector-check" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("lower", "is_asked"), [("eager", False), pytest.param("inductor", True, marks=pytest.mark.slow)]
)
def test_only_what_inductor_compiles_asks(lower: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    pick = cpu_vec_isa.pick_vec_isa

    def counted() -> Any:
        asked.append(threading.current_thread().name)
        return pick()

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", counted)
    with torch.no_grad():
        torch.compile(Stack("dense_bmm", depth=1), backend="asyncep", options={"lower": lower})(tokens())
    assert ("moepass-vector-check" in asked) == is_asked


def test_stored_code_for_other_vector_instructions_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler may have changed since it was stored, or a variable may ask for other instructions."""
    asked = iter(["avx512", "avx2", "avx2"])
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: next(asked))
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(lambda: []))
    assert torch_private.vector_instructions() == "avx512"
    with pytest.raises(ValueError, match="avx512; the compiler now targets avx2"):
        segment_records.read_segments({}, "avx512")
