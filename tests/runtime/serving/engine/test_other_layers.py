"""Custom layers of user models, in an engine whose last layer computes the read tokens only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.engine.trie_states import TrieBackbone
from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, TokenRead
from tests.helpers.models.tiny import tiny_model

LABELS = np.arange(100, dtype=np.int32)
MEMORY_TOKENS = 16
READ_ALONE = "computes only the read tokens"


class _Layer(Qwen3MoeDecoderLayer):  # type: ignore[misc]
    """A layer with custom operations `before` and `behind` its attention."""

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        passed_on = {name: given[name] for name in ("attention_mask", "position_embeddings")}
        attended = self.self_attn(hidden_states=self.before(self.input_layernorm(hidden_states)), **passed_on)[0]
        states = self.behind(hidden_states + attended, given)
        result: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return self.at_the_end(result)

    def before(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def behind(self, states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        return states

    def at_the_end(self, states: torch.Tensor) -> torch.Tensor:
        return states


class _ReadsMemory(_Layer):
    """Attention that also reads 16 learned vectors."""

    def behind(self, states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        memory = given["memory"]
        return states + torch.softmax(states @ memory.transpose(1, 2) / 4, -1) @ memory


class _IsConditioned(_Layer):
    """A layer that scales its states by a vector of the same width."""

    def behind(self, states: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        return states * (1 + given["condition"][:, None])


class _BreaksTheGraph(_Layer):
    def before(self, states: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return states


class _ReplacesTheFirst(_Layer):
    """A layer that replaces the first token only."""

    def at_the_end(self, states: torch.Tensor) -> torch.Tensor:
        sink = states.new_ones(states.shape[-1]).cumsum(0).sin() * 5
        return torch.cat([states[:, :1] * 0 + sink, states[:, 1:]], 1) if self.self_attn.layer_idx == 1 else states


class _Gives:
    """A hook that passes another argument to a layer."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        self.name, self.value = name, value

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return arguments, {**named, self.name: self.value}


def _model(kind: type[_Layer], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = tiny_model("qwen3_moe", num_hidden_layers=2, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for number, layer in enumerate(model.model.layers):
        replacement = kind(model.config, number).to(dtype).eval()
        replacement.load_state_dict(layer.state_dict())
        model.model.layers[number] = replacement
        width = model.config.hidden_size
        for name, shape in {"memory": (1, MEMORY_TOKENS, width), "condition": (1, width)}.items():
            hook = _Gives(name, torch.randn(shape, generator=generator) / 2)
            replacement.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def _engine(model: PreTrainedModel, compile_module: Callable[[nn.Module], Any] | None = None) -> ModelEngine:
    options = EngineOptions(None, torch.device("cpu"), cache_bytes=0, warms_up=False, step_tokens=64)
    return make_engine(copy.deepcopy(model), options, compile_module, bytes(32))


def _request(count: int) -> Request:
    tokens = np.random.default_rng(count).integers(3, 100, count, dtype=np.int32)
    return Request(f"{count} tokens", (TokenPiece(-1, tokens, (TokenRead(count - 1, LABELS, 1),)),))


def _change(model: PreTrainedModel, engine: ModelEngine, counts: list[int]) -> float:
    """Return by how much log-probabilities of sequences with these lengths, in one step, differ from the model's."""
    requests = [_request(count) for count in counts]
    changes = []
    for request, answer in zip(requests, engine.step(requests).answers, strict=True):
        ids = torch.from_numpy(request.pieces[0].tokens.astype(np.int64))[None]
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits[0, -1].float().log_softmax(-1)[: len(LABELS)]
        changes.append(np.abs(answer.pieces[0].reads[0].log_probabilities - expected.numpy()).max())
    return float(max(changes))


@pytest.mark.parametrize("kind", [_ReadsMemory, _IsConditioned])
def test_an_argument_that_is_as_long_as_the_stream_by_accident_stays_whole(kind: type[_Layer]) -> None:
    model = _model(kind)
    engine = _engine(model)
    assert engine.facts.notes["last layer"] == READ_ALONE
    length = MEMORY_TOKENS if kind is _ReadsMemory else model.config.hidden_size
    for counts in ([length - 1], [length], [length - 6, 6]):
        assert _change(model, engine, counts) < 1e-5


def test_a_last_layer_that_cannot_be_compiled_for_some_tokens_is_compiled_for_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def compiled(module: nn.Module) -> Any:
        def fails(*given: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("two sizes that are not known to be equal\nand much more")

        return module if cast("TrieBackbone", module).last_layer is None else fails

    model = _model(_Layer)
    engine = _engine(model, compiled)
    obstacle = "all tokens, because RuntimeError: two sizes that are not known to be equal"
    assert engine.facts.notes["last layer"] == f"computes {obstacle}"
    assert "the last layer computes all tokens instead of the read ones: " in caplog.text
    assert engine.step([_request(9)]).flops == engine.step([_request(9)]).unshared_flops
    assert _change(model, engine, [40, 7]) < 1e-5


@pytest.mark.slow
def test_a_graph_that_breaks_before_attention_is_compiled() -> None:
    model = _model(_BreaksTheGraph)
    engine = _engine(model, lambda module: torch.compile(module, backend="asyncep", options={"lower": "eager"}))
    assert engine.facts.notes["last layer"] == READ_ALONE
    assert "compiled" not in engine.facts.notes
    assert _change(model, engine, [40, 7]) < 1e-5


def test_a_layer_that_treats_its_first_token_apart_gets_all_tokens_in_half_precision() -> None:
    # In float32 every token is compared, so the probe refuses the trie.
    assert _engine(_model(_ReplacesTheFirst)).facts.form == "rows"
    model = _model(_ReplacesTheFirst, torch.bfloat16)
    engine = _engine(model)
    assert engine.facts.form == "trie"
    assert "all tokens, because InputError: outputs of the only token that is read" in engine.facts.notes["last layer"]
    assert _change(model, engine, [20]) < 0.1


@pytest.mark.parametrize("vector", ["last", "mean"])
def test_a_token_that_is_read_twice_is_computed_once_with_and_without_sharing(vector: Any) -> None:
    engine = _engine(_model(_Layer))
    tokens = np.arange(3, 33, dtype=np.int32)
    reads = (TokenRead(29, NO_TOKENS, 1), TokenRead(29, LABELS, 1))
    result = engine.step([Request("both", (TokenPiece(-1, tokens, reads, vector=vector),))])
    assert result.flops == result.unshared_flops
