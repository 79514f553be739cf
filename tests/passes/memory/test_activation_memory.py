"""The memory that the plan predicts, compared with the peak of torch's allocator in a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import moepass
from moepass.models.errors import InputError
from moepass.passes.ir.activation_memory import LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS, ActivationMemory, ActivationPeak
from moepass.passes.ir.plan import Plan
from moepass.passes.memory.activation_memory import COUNTED, ESTIMATED
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.peak_memory import peak_bytes
from tests.helpers.models.tiny import tiny_inputs, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")

# Long enough that memory that grows with the tokens dominates.
BATCH, LENGTH = 2, 512
# Gated experts, experts with biases and attention with sinks, latent attention and shared experts, linear attention,
# and all experts for every token.
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4")


def _measured_and_predicted(model: PreTrainedModel, batch: int, length: int, **options: Any) -> tuple[int, float, Plan]:
    inputs = tiny_inputs(model, batch, length)
    with moepass.record_compilations() as compilations:
        run = torch.compile(model, backend="asyncep", options=options)
        run(**inputs)
    run(**inputs)
    measured = peak_bytes(lambda: run(**inputs))
    (compilation,) = compilations
    plan = compilation.plan
    predicted, where = plan.largest_activations(dict(plan.sizes))
    assert where
    return measured, predicted, plan


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("chunk_tokens", [None, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_operators_one_by_one_are_counted(family: str, chunk_tokens: int | None) -> None:
    model = tiny_model(family)
    measured, predicted, plan = _measured_and_predicted(model, BATCH, LENGTH, lower="eager", chunk_tokens=chunk_tokens)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert plan.activations is not None
    assert plan.activations.source == COUNTED


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_fused_segments_are_estimated(family: str) -> None:
    measured, predicted, plan = _measured_and_predicted(tiny_model(family), BATCH, LENGTH, lower="inductor")
    assert predicted == pytest.approx(measured, rel=0.1)
    assert plan.activations is not None
    assert plan.activations.source == ESTIMATED


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_scores_of_attention_in_memory_are_the_peak(lower: str) -> None:
    model = tiny_model("mixtral", num_hidden_layers=1, attn_implementation="eager")
    measured, predicted, _ = _measured_and_predicted(model, BATCH, LENGTH, lower=lower)
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("chunk_tokens", [64, None])
def test_wide_experts_are_the_peak_and_chunks_lower_it(lower: str, chunk_tokens: int | None) -> None:
    model = tiny_model("mixtral", num_hidden_layers=1, intermediate_size=1024, max_position_embeddings=4096)
    # With Inductor, one expert gets the largest number of rows that are computed together.
    length = 512 if lower == "eager" else 3000
    measured, predicted, _ = _measured_and_predicted(model, 1, length, lower=lower, chunk_tokens=chunk_tokens)
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
def test_new_sizes_need_no_new_plan() -> None:
    model = tiny_model("qwen3_moe")
    run = torch.compile(model, backend="asyncep", options={"lower": "eager"}, dynamic=True)
    with moepass.record_compilations() as compilations:
        run(**tiny_inputs(model, 2, 64))
    (compilation,) = compilations
    for batch, length in ((1, 700), (3, 300)):
        inputs = tiny_inputs(model, batch, length)
        measured = peak_bytes(lambda inputs=inputs: run(**inputs))  # type: ignore[misc]
        sizes = {name: {2: batch, 64: length}[size] for name, size in compilation.plan.sizes}
        predicted, _ = compilation.plan.largest_activations(sizes)
        assert predicted == pytest.approx(measured, rel=0.1)


def test_a_plan_without_the_pass_says_so() -> None:
    with pytest.raises(ValueError, match="activation_memory"):
        Plan().largest_activations({})


def test_a_size_below_zero_is_refused() -> None:
    memory = ActivationMemory((ActivationPeak("8*tokens**2", "whole"),), COUNTED)
    with refused(InputError, name="tokens", value=-3):
        memory.largest({"tokens": -3})


def test_a_run_takes_the_largest_chunk_that_fits() -> None:
    peaks = (ActivationPeak("1000*tokens", "whole"), ActivationPeak("400*tokens + 900*chunk_tokens", "chunks"))
    memory = ActivationMemory(peaks, COUNTED, LEAST_CHUNK_TOKENS, room_bytes=8e6)
    assert memory.chosen_chunk_tokens({"tokens": 100}, (1, 100)) == (MOST_CHUNK_TOKENS, 130_000)
    assert memory.chosen_chunk_tokens({"tokens": 8000}, (1, 8000)) == (4096, 8e6)
    # The largest of two nearly equal chunks.
    assert memory.chosen_chunk_tokens({"tokens": 7900}, (1, 7900)) == (4096, 7.9e6)
    chunk, nbytes = memory.chosen_chunk_tokens({"tokens": 20000}, (1, 20000))
    assert (chunk, nbytes) == (LEAST_CHUNK_TOKENS, 20e6)


@pytest.mark.slow
def test_chunks_are_chosen_within_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("mixtral", num_hidden_layers=1, intermediate_size=1024, max_position_embeddings=4096)
    inputs = tiny_inputs(model, 1, 1000)
    expected = model(**inputs).logits
    needed, _, _ = _measured_and_predicted(model, 1, 1000, lower="eager")
    torch._dynamo.reset()
    # The model was placed for shorter steps; the same budget must suffice for longer ones.
    moepass.offload_experts(model, memory_budget=_weights(model) + needed // 2, slots=1, tokens=600)
    run = torch.compile(model, backend="asyncep", options={"lower": "eager", "chunk_tokens": "auto"}, dynamic=False)
    with moepass.record_compilations() as compilations:
        assert torch.allclose(run(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    (compilation,) = compilations
    memory = compilation.plan.activations
    assert memory is not None
    assert memory.room_bytes is not None
    assert peak_bytes(lambda: run(**inputs)) <= memory.room_bytes < 0.6 * needed
    # The mask of all pairs of tokens is already too large.
    caplog.clear()
    run(**tiny_inputs(model, 1, 2500))
    assert "the memory budget leaves" in caplog.text


def _weights(model: PreTrainedModel) -> int:
    """Dense weights and one slot."""
    experts = model.model.layers[0].mlp.experts  # type: ignore[union-attr]
    bank = sum(parameter.nbytes for parameter in experts.parameters())  # type: ignore[union-attr]
    every = sum(parameter.nbytes for parameter in model.parameters())
    return every - bank * model.config.num_hidden_layers + bank


@pytest.mark.slow
def test_without_a_budget_nothing_can_be_chosen() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    with pytest.raises(moepass.OptionError, match="memory_budget"):
        torch.compile(model, backend="asyncep", options={"chunk_tokens": "auto"})(**tiny_inputs(model))
