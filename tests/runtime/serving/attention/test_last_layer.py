"""The last layer computes the same for the read tokens alone as for all tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

from moepass.models.errors import InputError
from moepass.runtime.serving.attention.last_layer import LastLayer
from moepass.runtime.serving.attention.survey import survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.batching.pack import pack
from moepass.runtime.serving.batching.step_batch import StepBatch
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.trie_states import TrieBackbone, TrieStates
from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, TokenRead
from tests.helpers.models.tiny import TINY_FAMILIES, discover_expert_families, discovered_tiny_model, tiny_model
from tests.helpers.serving.narrowed import narrowed_backbone

CPU = torch.device("cpu")
# Models with recurrent layers cannot run a trie.
FAMILIES = sorted(set(TINY_FAMILIES) - {"jamba", "qwen3_next"})


def step_with_reads(vocabulary: int) -> StepBatch:
    """Two prompts, one of them with two branches; 4 of 52 tokens are read."""
    tokens = np.random.default_rng(0).integers(3, vocabulary, 52).astype(np.int32)
    read = (TokenRead(9, NO_TOKENS, 1),)
    pieces = (TokenPiece(-1, tokens[:20], (TokenRead(4, NO_TOKENS, 1),)), TokenPiece(0, tokens[20:30], read))
    tree = Request("tree", (*pieces, TokenPiece(0, tokens[30:40], read)))
    prompt = Request("other", (TokenPiece(-1, tokens[40:], (TokenRead(11, NO_TOKENS, 1),)),))
    return pack([tree, prompt], FlopsTable.of_parameters(1, 1)).batch


@pytest.mark.parametrize("family", FAMILIES)
def test_read_tokens_get_the_same_states(family: str) -> None:
    model = tiny_model(family)
    survey = survey_attention(model)
    model.set_attn_implementation(TRIE_ATTENTION_NAME)
    backbone = ModelHead(model).backbone
    step = step_with_reads(int(model.config.get_text_config().vocab_size))
    assert (len(step.output_positions), step.count) == (4, 52)
    expected = TrieStates(TrieBackbone(backbone), survey.layers, None, CPU).states(step)
    rows: list[int] = []
    experts = [module for name, module in model.named_modules() if name.endswith("experts")]
    for module in experts:
        module.register_forward_pre_hook(lambda _, given: rows.append(given[0].flatten(0, -2).shape[0]))
    narrowed = narrowed_backbone(backbone, survey)
    rows.clear()
    torch.testing.assert_close(
        TrieStates(narrowed, survey.layers, None, CPU).states(step), expected, rtol=1e-5, atol=1e-6
    )
    # llama4 repeats all rows for every expert.
    assert rows[-1] * 52 == rows[0] * 4 or len(experts) == 1
    assert narrowed.last_layer is not None
    assert (narrowed.last_layer.places, narrowed.last_layer.attended) == (None, None)


@pytest.mark.slow
def test_a_captured_graph_computes_nothing_twice() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    survey = survey_attention(model)
    model.set_attn_implementation(TRIE_ATTENTION_NAME)
    step = step_with_reads(int(model.config.vocab_size))

    def products_of(backbone: TrieBackbone) -> list[str]:
        products: list[str] = []

        def keep(graph: GraphModule, _: object) -> GraphModule:
            calls = [node for node in graph.graph.nodes if node.op == "call_function"]
            products.extend(str(node.target) for node in calls if "mm" in str(node.target))
            products.append(
                f"{sum(str(node.target).startswith('moepass.trie_attention') for node in calls)} attentions"
            )
            return graph

        from torch._dynamo.backends.common import aot_autograd

        compiled = torch.compile(backbone, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
        states = TrieStates(compiled, survey.layers, None, CPU).states(step)
        assert states.shape[0] == 4
        return products

    unnarrowed = products_of(TrieBackbone(model.base_model))
    assert products_of(narrowed_backbone(model.base_model, survey)) == unnarrowed
    assert unnarrowed[-1] == "2 attentions"


def test_a_model_that_needs_all_tokens_gets_them() -> None:
    # Its layers read residuals from a list that an earlier layer has filled.
    (family,) = (candidate for candidate in discover_expert_families() if candidate.name == "beam")
    model = discovered_tiny_model(family)
    engine = make_engine(model, EngineOptions(None, CPU, warms_up=False, cache_bytes=0), None, bytes(16))
    assert engine.facts.form == "trie"
    assert engine.facts.notes["last layer"].startswith("computes all tokens, because RuntimeError: ")


def test_the_model_itself_is_left_as_it_was() -> None:
    model = tiny_model("qwen3_moe")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        engine = make_engine(model, EngineOptions(None, CPU, warms_up=False, cache_bytes=0), None, bytes(16))
        assert engine.facts.notes["last layer"] == "computes only the read tokens"
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-6)


def test_attention_must_belong_to_the_last_layer_of_a_list() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    with pytest.raises(InputError, match="the layer of Qwen3MoeAttention is not the last entry"):
        LastLayer().attach(model.base_model, model.base_model.layers[0].self_attn)
