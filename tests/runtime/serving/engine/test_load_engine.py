"""A loaded engine has been checked against the model itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from moepass.models.errors import CheckpointError, InputError
from moepass.runtime.homes.options.home_options import Device, HomeOptions, Host
from moepass.runtime.kernels.grouped_gemm.tuner import rows_bucket
from moepass.runtime.offload.loading import offload_report
from moepass.runtime.offload.offload import NoExpertsError, offload_experts
from moepass.runtime.serving.engine import load_engine as load_engine_module
from moepass.runtime.serving.engine.load_engine import EngineOptions, load_engine, make_engine, warm_up
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.padded_rows import RowsBackbone
from moepass.runtime.serving.engine.plain_outputs import plain_outputs
from moepass.runtime.serving.engine.step_engine import StepResult
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.quantized_checkpoints import FORMS, save_quantized
from tests.helpers.models.tiny import tiny_model

OPTIONS = EngineOptions(None, torch.device("cpu"), step_tokens=64, cache_bytes=0)


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_model_whose_outputs_are_no_numbers_is_not_served(damage: float) -> None:
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.lm_head.weight[5] = damage
    with refused(CheckpointError, name="output"):
        make_engine(model, OPTIONS, None, bytes(32))


def test_a_sound_model_is_warm_when_it_is_loaded() -> None:
    engine = make_engine(tiny_model("qwen3_moe"), OPTIONS, None, bytes(32))
    assert engine.facts.flops_per_second > 1


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (256, 1)])
def test_the_warm_up_for_a_gpu_compiles_the_tiles_of_every_step(
    experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_step_tokens = 1000
    engine = make_engine(tiny_model("qwen3_moe"), dataclasses.replace(OPTIONS, warms_up=False), None, bytes(32))
    engine.facts = dataclasses.replace(engine.facts, full_step_tokens=full_step_tokens)
    warm: list[int] = []
    step = engine.step

    def recorded(requests: list[Request]) -> StepResult:
        warm.append(sum(len(piece.tokens) for request in requests for piece in request.pieces))
        return step(requests)

    monkeypatch.setattr(engine, "step", recorded)
    warm_up(engine, sizes_double=True)

    def tiles(steps: Iterable[int]) -> tuple[set[int], set[bool], set[bool]]:
        rows = [tokens * top_k for tokens in steps]
        # From 24 and 192 rows on, an expert has larger tiles by default on an H100.
        few, many = ({count >= least * experts for count in rows} for least in (24, 192))
        return {rows_bucket(count, experts) for count in rows}, few, many

    assert tiles(range(1, max(warm) + 1)) == tiles(warm)
    assert max(warm) > 0.7 * full_step_tokens


def test_the_warm_up_of_padded_rows_has_few_and_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than 16 rows may need another graph than more: torch chooses another convolution."""
    heights = []
    run = RowsBackbone.forward

    def forward(self: RowsBackbone, tokens: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        heights.append(len(tokens))
        return run(self, tokens, *others)

    monkeypatch.setattr(load_engine_module, "probe_trie", lambda model, survey: "rows are asked for")
    monkeypatch.setattr(RowsBackbone, "forward", forward)
    make_engine(tiny_model("qwen3_moe"), OPTIONS, None, bytes(32))
    assert {2, 3} <= {*heights}
    assert max(heights) >= 16


def test_a_model_without_a_plan_says_what_makes_one() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    offload_experts(model, home=Host(), device="cpu")
    options = dataclasses.replace(OPTIONS, step_tokens=None)
    notes = make_engine(model, options, None, bytes(32)).facts.notes
    assert "without a plan" in notes["full step"]
    assert "moepass calibrate --device cpu --ranks 1 --threads" in notes["full step"]


def with_embeddings_in_the_head(model: Any, input_ids: torch.Tensor, position_ids: Any, **_: Any) -> torch.Tensor:
    return model.model(input_ids=input_ids, position_ids=position_ids)[0] + model.model.embed_tokens(input_ids)


def with_scaled_embeddings(model: Any, input_ids: torch.Tensor, position_ids: Any, **_: Any) -> torch.Tensor:
    return model.model(inputs_embeds=3 * model.model.embed_tokens(input_ids), position_ids=position_ids)[0]


def with_neighbours_in_the_head(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    states = model.model(input_ids=input_ids)[0]
    return states + states.roll(1, 1)


def model_of(states_of: Callable[..., torch.Tensor], *, has_positions: bool) -> PreTrainedModel:
    """Return a tiny model of a custom class, whose head gets the result of `states_of`."""

    class OwnModel(Qwen3MoeForCausalLM):  # type: ignore[misc]  # transformers has no types
        def forward(self, input_ids: Any = None, position_ids: Any = None, **others: Any) -> Any:
            return CausalLMOutputWithPast(logits=self.lm_head(states_of(self, input_ids, position_ids=position_ids)))

    class OwnModelWithoutPositions(OwnModel):
        def forward(self, input_ids: Any = None, **others: Any) -> Any:
            return super().forward(input_ids, **others)

    base = tiny_model("qwen3_moe")
    model = (OwnModel if has_positions else OwnModelWithoutPositions)(base.config).eval()
    model.load_state_dict(base.state_dict())
    return model


@pytest.mark.parametrize("has_positions", [True, False])
@pytest.mark.parametrize(
    "states_of", [with_embeddings_in_the_head, with_scaled_embeddings, with_neighbours_in_the_head]
)
def test_a_model_that_is_more_than_its_backbone_and_its_head_is_not_served(
    states_of: Callable[..., torch.Tensor], has_positions: bool
) -> None:
    model = model_of(states_of, has_positions=has_positions)
    with refused(InputError, name="model", value=type(model).__name__):
        make_engine(model, OPTIONS, None, bytes(32))


def test_a_model_whose_tokens_see_those_behind_them_is_not_served() -> None:
    model = tiny_model("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, inputs: (inputs[0] + inputs[0].mean(1, keepdim=True),))
    with refused(InputError, name="model"):
        make_engine(model, OPTIONS, None, bytes(32))


def test_a_padding_token_that_is_the_last_of_the_vocabulary_is_none_of_the_tokens_that_are_tried() -> None:
    model = tiny_model("qwen3_moe")
    last = model.config.vocab_size - 1
    tried = set()
    for padding in (0, last):
        model.config.pad_token_id = padding
        tokens = plain_outputs(model, ModelHead(model), with_prefix=False).tokens
        assert padding not in tokens
        tried |= {*tokens.tolist()}
    assert tried <= {*range(last + 1)}


@pytest.mark.slow
def test_quantised_experts_rest_as_stored_on_the_device(tmp_path: Path) -> None:
    form = FORMS["nvfp4"]
    quantised, plain = save_quantized(tiny_model(form.family, dtype=torch.bfloat16), form, tmp_path)
    options = dataclasses.replace(OPTIONS, home=Device(), warms_up=False)
    engines = [load_engine(folder, options, None, bytes(32)) for folder in (quantised, plain)]
    tokens = np.arange(20, dtype=np.int32)
    request = Request("a", (TokenPiece(-1, tokens, (TokenRead(19, tokens[:1], 5),)),))
    answers = [engine.step([request]).answers[0].pieces[0].reads[0].top_log_probabilities for engine in engines]
    np.testing.assert_allclose(*answers, rtol=0, atol=1e-3)
    (bank, *_) = offload_report(engines[0]._head.model).store.banks
    assert bank.spec.home == "device"
    assert bank.spec.format.is_encoded


@pytest.mark.parametrize("home", [Host(), Device()], ids=str)
def test_experts_are_packed_while_an_engine_loads(home: HomeOptions, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, hidden_size=128, moe_intermediate_size=96)
    model.save_pretrained(tmp_path)
    options = dataclasses.replace(OPTIONS, home=home, warms_up=False, expert_format="lossless")
    # The engine compares its outputs with those of the model, and the weights are those of the checkpoint.
    loaded = load_engine(tmp_path, options, None, bytes(32))._head.model
    assert [*offload_report(loaded).formats] == ["lossless bf16"]
    for layer, original in zip(loaded.model.layers, model.model.layers, strict=True):
        assert torch.equal(layer.mlp.experts.down_proj, original.mlp.experts.down_proj)


def test_a_dense_model_has_no_experts_to_pack(tmp_path: Path) -> None:
    config = Qwen3Config(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, head_dim=16)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    options = dataclasses.replace(OPTIONS, home=Device(), warms_up=False, expert_format="lossless")
    with pytest.raises(NoExpertsError, match="has no expert weights to offload"):
        load_engine(tmp_path, options, None, bytes(32))
