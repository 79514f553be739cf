"""Attention over a trie in captured graphs: one graph serves all steps and contains nothing of any step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moepass
from moepass.runtime.captures.capture_store import CaptureStore
from moepass.runtime.serving.attention.partial_attention import partial_attention
from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import AttentionLayer, Temperature, survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME, trie_attention
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch, TrieNode
from moepass.runtime.serving.cache.block_memory import BlockMemory, KeyValueShape
from moepass.stored_compile import StoredModule
from tests.helpers.graphs.fake_gpu import captured_graph, device_copies, pretended_gpu, put_on_gpu
from tests.helpers.graphs.stored_models import EAGER, graphs_compiled_by
from tests.helpers.models.tiny import tiny_model
from tests.helpers.serving.naive_trie import naive_step

pytestmark = pytest.mark.usefixtures("no_grad")

PREFIX = tuple(range(3, 3 + BLOCK_TOKENS))
# Steps of different shapes; the last two store a block and read it.
STEPS: list[tuple[list[tuple[int, ...]], dict[str, Any]]] = [
    ([PREFIX[:5], (*PREFIX[:4], 9, 9, 8), (50, 51)], {}),
    ([(*PREFIX, 7), (*PREFIX, 8, 9)], {}),
    ([(*PREFIX, 7), (*PREFIX, 8, 9), (40, 41)], {"stored": {PREFIX: 1}}),
    ([(*PREFIX, 7), (*PREFIX, 8, 9), (40, 41)], {"cached": {PREFIX: 1}}),
]


class Logits(nn.Module):
    """A model that is called as the engine calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=tokens, position_ids=depth, use_cache=False, attention_mask=None
        ).logits
        return logits


class Runs:
    """The answers of a model to each of STEPS, called by `call`."""

    def __init__(self, model: Any) -> None:
        self.layers = survey_attention(model).layers
        self.shapes = survey_attention(model).shapes
        model.set_attn_implementation(TRIE_ATTENTION_NAME)

    def all(self, call: Any) -> list[torch.Tensor]:
        memory = BlockMemory(self.shapes, 2)
        results = []
        for sequences, blocks in STEPS:
            step, places = naive_step(sequences, **blocks)
            tokens, depth = torch.from_numpy(step.tokens)[None], torch.from_numpy(step.depth)[None]
            for argument in (tokens, depth):
                torch._dynamo.mark_dynamic(argument, 1)
            with running_step(RunningStep(step, self.layers, memory)):
                results.append(call(tokens, depth)[0, places])
        return results


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_one_graph_serves_all_steps_and_gives_what_the_model_gives(family: str, streaming: bool) -> None:
    model = tiny_model(family, num_hidden_layers=2)
    runs = Runs(model)
    module = Logits(model)
    expected = runs.all(module)
    torch.testing.assert_close(expected[1], expected[2][:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected[2], expected[3], rtol=1e-5, atol=1e-5)
    if streaming:
        moepass.offload_experts(model)
    with moepass.record_compilations() as compilations:
        actual = runs.all(torch.compile(module, backend="asyncep", fullgraph=True, options={"lower": "eager"}))
    for states, expected_states in zip(actual, expected, strict=True):
        assert torch.equal(states, expected_states)
    (compilation,) = compilations
    plan = compilation.plan
    assert plan.uncosted == ()
    assert len(plan.blocks) == 2
    assert plan.refusals == ()


@pytest.mark.slow
def test_inductor_compiles_around_it() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    runs = Runs(model)
    module = Logits(model)
    expected = runs.all(module)
    moepass.offload_experts(model)
    for states, expected_states in zip(runs.all(torch.compile(module, backend="asyncep")), expected, strict=True):
        torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("known_tests")
def test_a_graph_with_it_is_stored_and_serves_other_steps(store: CaptureStore) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    runs = Runs(model)
    module = Logits(model)
    expected = runs.all(module)
    runs.all(StoredModule(module, EAGER, "trie", store))
    assert len(store.entries()) == 1
    actual: list[torch.Tensor] = []
    assert graphs_compiled_by(lambda: actual.extend(runs.all(StoredModule(module, EAGER, "trie", store)))) == 0
    for states, expected_states in zip(actual, expected, strict=True):
        assert torch.equal(states, expected_states)


@pytest.mark.slow
def test_graphs_for_gpus_hold_it_once_a_layer() -> None:
    model = tiny_model("gpt_oss", num_hidden_layers=2)
    model.set_attn_implementation(TRIE_ATTENTION_NAME)
    with pretended_gpu():
        put_on_gpu(model)
        tokens = torch.zeros(1, 20, dtype=torch.int64, device="cuda")
        graph = captured_graph(Logits(model), tokens, tokens)
    calls = [node for node in graph.graph.nodes if node.target == torch.ops.moepass.trie_attention.default]
    assert [node.args[4] for node in calls] == [0, 1]
    assert {node.meta["val"].device.type for node in calls} == {"cuda"}


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("is_masked", [False, True])
def test_parts_of_attention_trace_for_gpus(softcap: float, is_masked: bool) -> None:
    with pretended_gpu():
        query, key = (torch.zeros(3, heads, 40, 16, device="cuda") for heads in (4, 2))
        mask = torch.zeros(3, 40, 40, device="cuda") if is_masked else None
        output, log_sum_exp = partial_attention(query, key, key[..., :8], 0.25, softcap, not is_masked, mask)
    assert (output.device.type, output.shape, log_sum_exp.shape) == ("cuda", (3, 4, 40, 8), (3, 4, 40))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("past", [VisiblePast(), VisiblePast(window=5), VisiblePast(chunk=12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_host_waits_for_nothing(past: VisiblePast, dtype: torch.dtype) -> None:
    """Fake tensors raise when a value is read, so any wait of the host would raise. bf16 uses the varlen kernel.

    One copy uploads a step, before attention begins.
    """
    sequences, blocks = [(*PREFIX, 7, *range(60)), (*PREFIX, 8, 9), (*PREFIX, 8, 10), (40, 41)], {PREFIX: 1}
    shape = KeyValueShape(2, 16, 16, dtype)
    layers = {0: AttentionLayer(0, 4, shape, past, Temperature(0.1, 8.0))}
    for named in ({"stored": blocks}, {"cached": blocks}):
        step, _ = naive_step(sequences, **named)
        with pretended_gpu():
            memory = BlockMemory([shape], 2, "cuda")
            query, key = (torch.zeros(1, heads, step.count, 16, dtype=dtype, device="cuda") for heads in (4, 2))
            with device_copies() as copies:
                running = RunningStep(step, layers, memory, "cuda")
                assert copies.uploads == [True]
                with running_step(running):
                    output = trie_attention(query, key, key, torch.zeros(4, device="cuda"), 0, 0.25, 0.0)
        assert len(copies.uploads + copies.downloads) == 1
        assert (output.device.type, output.dtype, tuple(output.shape)) == ("cuda", dtype, (1, step.count, 4, 16))


class _LargeResults(TorchDispatchMode):
    """Count the operators that make tensors of at least `rows` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.count, self._rows = 0, rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.count += not function.is_view and any(max(tensor.shape[:2], default=0) >= self._rows for tensor in tensors)
        return result


def test_cached_keys_and_values_are_copied_once() -> None:
    blocks = 64
    first = blocks * BLOCK_TOKENS
    depth = np.arange(first, first + 3)
    nodes = (TrieNode(0, 3, -1, 3, 0),)
    step = StepBatch(depth, depth, np.full(3, 3), nodes, (tuple(range(blocks)),), depth[:0], ())
    shape = KeyValueShape(2, 16, 16, torch.bfloat16)
    with pretended_gpu():
        memory = BlockMemory([shape], blocks, "cuda")
        query, key = (torch.zeros(1, heads, 3, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        running = RunningStep(step, {0: AttentionLayer(0, 4, shape, VisiblePast())}, memory, "cuda")
        with running_step(running), _LargeResults(first) as large:
            trie_attention(query, key, key, None, 0, 0.25, 0.0)
    assert large.count == 2  # keys and values
