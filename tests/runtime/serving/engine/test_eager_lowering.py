"""A family of each kind in a compiled engine whose segments run operator by operator, as a trie and padded rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import moepass
from moepass.runtime.serving.engine import load_engine
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from tests.helpers.models.tiny import tiny_model

OPTIONS = EngineOptions(None, torch.device("cpu"), step_tokens=64, cache_bytes=0, warms_up=False)
# Recurrent layers have chunks of 64 tokens: lengths within a chunk, of exactly one chunk, and of several chunks.
LENGTHS = (5, 64, 130)
# Recurrent layers cannot run a trie, and they run uncompiled, because they loop over tokens or chunks.
RECURRENT = "qwen3_next"
# Experts as most, transposed with biases, behind latent attention, and experts that compute every token.
COMPILED = ("qwen3_moe", "gpt_oss", "deepseek_v3", "llama4")

# Fewer tokens than a step of the longer lengths.
CHUNK_TOKENS = 24


def _compiled(chunk_tokens: int | None, module: nn.Module) -> Callable[..., torch.Tensor]:
    options = {"lower": "eager", "chunk_tokens": chunk_tokens}
    compiled: Callable[..., torch.Tensor] = torch.compile(module, backend="asyncep", options=options)
    return compiled


def _request(length: int) -> Request:
    tokens = np.random.default_rng(length).integers(3, 100, size=length, dtype=np.int32)
    return Request(f"{length} tokens", (TokenPiece(-1, tokens, (TokenRead(length - 1, tokens[:1], 5),)),))


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("family", COMPILED)
@pytest.mark.parametrize("chunk_tokens", [None, CHUNK_TOKENS])
@pytest.mark.parametrize("form", ["trie", "rows"])
def test_answers_are_those_of_the_uncompiled_engine(
    family: str, form: str, chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(family, form, chunk_tokens, monkeypatch)


@pytest.mark.slow
def test_a_family_with_recurrent_layers_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    _check(RECURRENT, "rows", None, monkeypatch)


def _check(family: str, form: str, chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "rows":
        monkeypatch.setattr(load_engine, "probe_trie", lambda model, survey: "rows are asked for")
    how = functools.partial(_compiled, chunk_tokens)
    plain = make_engine(tiny_model(family), OPTIONS, None, bytes(32))
    with moepass.record_compilations() as recorded:
        compiled = make_engine(tiny_model(family), OPTIONS, how, bytes(32))
    assert compiled.facts.form == form
    assert ("compiled" in compiled.facts.notes) == (family == RECURRENT)
    compilations = None
    with moepass.record_compilations() as later:
        for length in LENGTHS:
            actual, expected = (
                engine.step([_request(length)]).answers[0].pieces[0].reads[0].top_log_probabilities
                for engine in (compiled, plain)
            )
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
            compilations = compilations or compiled.compilations()
    if family == RECURRENT:
        assert later == []  # only the attempt was recorded
    else:
        lowerings = [segment.lowering for record in [*recorded, *later] for segment in record.plan.segments]
        runs_in_chunks = any(lowering is not None and lowering.chunk_tokens is not None for lowering in lowerings)
        assert runs_in_chunks == (chunk_tokens is not None)
    assert compiled.compilations() == compilations  # only steps of the first length compile anything
