"""Parts of a model, classified by the operations of nodes, and compared with the names of modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import moepass
from moepass.passes.blocks.detect import find_blocks
from moepass.passes.graph.nodes import module_path
from moepass.passes.ir.segment import role_of
from moepass.passes.segments.parts import parts_of_nodes
from moepass.runtime.execute.captured import name_inputs
from moepass.runtime.lowering.lower_segments import decompositions
from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from tests.helpers.models.tiny import tiny_inputs, tiny_model
from tests.helpers.serving.naive_trie import naive_step

# Parts by the end of a module's path in transformers.
_PART_OF_PATH = {
    r"embed_tokens$": "embedding",
    r"(self_attn|linear_attn|mamba)(\.\w+)?$": "attention",
    r"\.(gate|router)$": "router",
    r"\.experts$": "experts",
    r"lm_head$": "head",
}


def _named_part(node: Node) -> str:
    path = module_path(node)
    return next((name for pattern, name in _PART_OF_PATH.items() if re.search(pattern, path)), "dense")


def _captured(model: nn.Module, lower: str, *args: Any, **inputs: Any) -> GraphModule:
    """Return the graph that the backend would receive, with its metadata about inputs."""
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def keep(module: GraphModule, fake_inputs: Sequence[Any]) -> Callable[..., Any]:
            name_inputs(module, graph)
            graphs.append(module)

            def run(values: list[Any]) -> Any:
                return module(*values)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=keep, inference_compiler=keep, decompositions=decompositions(lower)
        )(graph, example_inputs)
        return compiled

    with torch.no_grad():
        torch.compile(model, backend=backend)(*args, **inputs)
    (module,) = graphs
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lower", "experts"),
    [
        ("deepseek_v3", "inductor", "grouped_mm"),
        ("gpt_oss", "eager", "batched_mm"),
        ("llama4", "inductor", "all"),
        ("mixtral", "eager", "grouped_mm"),
    ],
)
def test_families(family: str, lower: str, experts: str) -> None:
    model = tiny_model(family, num_hidden_layers=2)
    if experts != "all":
        model.set_experts_implementation(experts)
    moepass.offload_experts(model)
    graph = _captured(model, lower, **tiny_inputs(model, batch=2, seq=9)).graph
    parts = parts_of_nodes(graph, [match.record for match in find_blocks(graph).matches])
    wrong = [(node.name, module_path(node), actual) for node, actual in parts.items() if actual != _named_part(node)]
    assert wrong == []
    assert {"embedding", "attention", "router", "experts", "head"} <= set(parts.values())
    gemms = [node for node in graph.nodes if re.search(r"\.(mm|addmm|bmm)\.|grouped_mm", str(node.target))]
    assert gemms
    assert set(gemms) <= set(parts)


@pytest.mark.slow
def test_attention_over_a_trie_is_attention() -> None:
    model = tiny_model("gpt_oss", num_hidden_layers=2)
    model.set_attn_implementation(TRIE_ATTENTION_NAME)
    moepass.offload_experts(model)
    step, _ = naive_step([tuple(range(3, 12))])
    with running_step(RunningStep(step, survey_attention(model).layers)):
        graph = _captured(model, "eager", **tiny_inputs(model, batch=1, seq=9)).graph
    parts = parts_of_nodes(graph, [match.record for match in find_blocks(graph).matches])
    assert [(node.name, actual) for node, actual in parts.items() if actual != _named_part(node)] == []
    assert [actual for node, actual in parts.items() if "trie_attention" in str(node.target)] == ["attention"] * 2


@pytest.mark.slow
def test_a_convolution_over_any_number_of_tokens() -> None:
    """Its last dimension is a symbolic size, which is not a number of experts."""
    model = tiny_model("qwen3_next", num_hidden_layers=1)
    moepass.offload_experts(model)
    inputs = tiny_inputs(model, batch=2, seq=9)
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    graph = _captured(model, "eager", **inputs).graph
    parts = parts_of_nodes(graph, [match.record for match in find_blocks(graph).matches])
    assert {actual for node, actual in parts.items() if "convolution" in str(node.target)} == {"attention"}


def _parts(function: Callable[..., Any], *example: torch.Tensor) -> Counter[str]:
    return Counter(parts_of_nodes(make_fx(function, tracing_mode="fake")(*example).graph).values())


def test_a_residual_stream_leads_to_no_head() -> None:
    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        x = x.cos().cumsum(0)
        return x + (x @ up).relu() @ down

    assert _parts(mlp, torch.ones(3, 4), torch.ones(4, 8), torch.ones(8, 4)) == {"dense": 2}


def test_a_head_may_be_scaled_and_selected_from() -> None:
    def scores(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = (x.cumsum(0) @ up).relu() @ down
        return torch.tanh(logits / 30)[ids.cumsum(0)].log_softmax(-1)

    example = torch.ones(3, 4), torch.ones(4, 8), torch.ones(8, 2), torch.zeros(2, dtype=torch.int64)
    assert _parts(scores, *example) == {"dense": 1, "head": 1}


def test_the_likeliest_words_are_no_choice_of_experts() -> None:
    def words(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(0) @ head).topk(2).indices

    assert _parts(words, torch.ones(3, 4), torch.ones(4, 8)) == {"head": 1}


def test_tokens_that_gemms_dispatch_and_combine() -> None:
    """GShard multiplies one-hot masks and tokens. This is no attention, although neither factor is a weight."""

    def gshard(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        x = x.cumsum(0)
        weights, ids = (x @ gate).softmax(-1).topk(2)
        mask = (F.one_hot(ids, 4).to(x.dtype) * weights[..., None]).sum(1)
        rows = torch.bmm(mask.t()[:, :, None], x.expand(4, 3, 8)[:, :1, :])
        out = torch.bmm(torch.bmm(rows, up).relu(), down)
        return x + torch.bmm(mask[:, None, :], out.transpose(0, 1)).squeeze(1)

    example = torch.ones(3, 8), torch.ones(8, 4), torch.ones(4, 8, 16), torch.ones(4, 16, 8)
    assert _parts(gshard, *example)["attention"] == 0


@pytest.mark.parametrize(
    ("parts", "role"),
    [
        ((), "elementwise"),
        (("embedding",), "embedding"),
        (("embedding", "router"), "router"),
        (("embedding", "attention", "router"), "attention"),
        (("attention", "dense", "router"), "mixed"),
        (("dense", "head"), "mixed"),
        (("experts",), "experts"),
    ],
)
def test_roles(parts: tuple[str, ...], role: str) -> None:
    assert role_of(parts) == role
