"""Nothing is compiled after the warm-up, at any length that the model takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._inductor.utils import fresh_cache

from moepass.runtime.homes.options.home_options import Host
from moepass.runtime.offload.offload import offload_experts
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead, Tokens
from tests.helpers.models.tiny import discover_expert_families, discovered_tiny_model, tiny_model

# Inductor would sort fewer pairs of token and expert with 16-bit indices.
PAIRS = 32_767


def request(tokens: Tokens, name: str = "a") -> Request:
    """Return a request for the probability of a token behind `tokens`."""
    return Request(name, (TokenPiece(-1, tokens, (TokenRead(len(tokens) - 1, tokens[:1]),)),))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2, 4, 6, 8])
def test_nothing_is_compiled_for_any_length(experts: int) -> None:
    """The first layer has a window, so that long prompts take little time; the last one computes only read tokens."""
    most = PAIRS // experts + 200
    model = tiny_model(
        "mixtral",
        hidden_size=16,
        num_hidden_layers=2,
        num_experts_per_tok=experts,
        sliding_window=32,
        max_position_embeddings=most,
    )
    offload_experts(model, home=Host(), device="cpu")
    random = np.random.default_rng(experts)
    lengths = [1, 2, PAIRS // experts, PAIRS // experts + 1, most, *random.integers(1, most, 200, endpoint=True)]
    options = EngineOptions(None, torch.device("cpu"), step_tokens=64, cache_bytes=0)
    with fresh_cache():
        engine = make_engine(model, options, lambda module: torch.compile(module, backend="asyncep"), bytes(32))
        assert engine.facts.max_sequence_tokens == most
        at_ready = engine.compilations()
        for length in lengths:
            engine.answer_now(request(random.integers(3, 100, length, dtype=np.int32)))
            assert engine.compilations() == at_ready, length


@pytest.mark.slow
def test_nothing_is_compiled_for_any_number_of_rows() -> None:
    """Its short convolutions over tokens need padded rows, and torch chooses them by the number of rows."""
    (family,) = (family for family in discover_expert_families() if family.name == "lfm2_moe")
    options = EngineOptions(None, torch.device("cpu"), step_tokens=64, cache_bytes=0)
    eager = {"lower": "eager"}
    engine = make_engine(
        discovered_tiny_model(family),
        options,
        lambda module: torch.compile(module, backend="asyncep", options=eager),
        bytes(32),
    )
    assert (engine.facts.form, "compiled" in engine.facts.notes) == ("rows", False)
    at_ready = engine.compilations()
    random = np.random.default_rng(0)
    for rows in (1, 2, 5, 15, 16, 17, 70, 300):
        for length in (1, 2, 9):
            tokens = random.integers(3, 60, (rows, length), dtype=np.int32)
            engine.step([request(row, str(number)) for number, row in enumerate(tokens)])
            assert engine.compilations() == at_ready, (rows, length)
