"""`chunk_tokens` on real architectures: the model's own results for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import moepass
from moepass.models.errors import OptionError
from moepass.options import parse_options
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.tiny import tiny_inputs, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")

# One of each kind: as most, transposed with biases, with shared experts, with experts that compute every token, and
# with recurrent layers.
KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "llama4", "jamba")


def _compile(model: PreTrainedModel, **options: Any) -> Any:
    return torch.compile(model, backend="asyncep", options={"lower": "eager", "chunk_tokens": 7, **options})


def _check_chunks(compilations: list[moepass.Compilation]) -> None:
    """Check that some segments run some tokens at a time."""
    for compilation in compilations:
        lowered = [segment.lowering for segment in compilation.plan.segments if segment.lowering]
        assert any(lowering.chunk_tokens == 7 for lowering in lowered)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("slots", [None, 1, 2])
@pytest.mark.parametrize("family", KINDS)
def test_eager_lowering_is_bit_identical(family: str, slots: int | None) -> None:
    """Experts are resident, or streamed through one or two slots. Released slots are filled with NaN."""
    model = tiny_model(family, dtype=torch.bfloat16)
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    if slots is not None:
        moepass.offload_experts(model, slots=slots)
    with moepass.record_compilations() as compilations:
        logits = _compile(model, debug=slots is not None)(**inputs).logits
    assert torch.equal(logits, expected)
    _check_chunks(compilations)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_inductor_is_close(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=2)
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    with moepass.record_compilations() as compilations:
        logits = _compile(model, lower="inductor")(**inputs).logits
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5
    _check_chunks(compilations)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_sizes_may_change(family: str) -> None:
    """Sequences are shorter than a chunk, equal to it, or longer, and there are one or several.

    The attention of some families multiplies one matrix for each sequence and head, which share a dimension.
    """
    model = tiny_model(family, dtype=torch.bfloat16, num_hidden_layers=2)
    run = _compile(model)
    with moepass.record_compilations() as compilations:
        for batch, length in ((2, 12), (3, 17), (1, 30), (5, 7), (6, 3), (1, 2)):
            inputs = tiny_inputs(model, batch, length)
            assert torch.equal(run(**inputs).logits, model(**inputs).logits), (batch, length)
    _check_chunks(compilations[:2])
    assert [refusal for compilation in compilations for refusal in _refused_loops(compilation)] == []


def _refused_loops(compilation: moepass.Compilation) -> list[str]:
    lowered = [segment.lowering for segment in compilation.plan.segments if segment.lowering]
    return [str(lowering.refusal) for lowering in lowered if lowering.refusal]


def test_a_graph_of_few_tokens_stays_as_it_is() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    with moepass.record_compilations() as compilations:
        torch.compile(model, backend="asyncep", options={"lower": "eager", "chunk_tokens": 24})(**tiny_inputs(model))
    (compilation,) = compilations
    assert compilation.plan.refusals == ()
    assert all(segment.lowering.chunk_tokens is None for segment in compilation.plan.segments if segment.lowering)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_other_values_are_refused(value: object) -> None:
    with refused(OptionError, name="chunk_tokens", value=value):
        parse_options({"chunk_tokens": value})
