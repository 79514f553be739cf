"""The operator `moepass::trie_attention` against one dense mask, on random tries."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import AuxRequest

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.attention import partial_attention, trie_attention, trie_parts, varlen_attention
from moepass.runtime.serving.attention import running_step as running_step_module
from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import AttentionLayer, survey_attention
from moepass.runtime.serving.attention.trie_attention import trie_attention_forward
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.attention.varlen_attention import varlen_obstacle
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch, StoredBlock, TrieNode, uncached_step
from moepass.runtime.serving.cache.block_memory import BlockMemory, KeyValueShape
from tests.helpers.graphs.error_fields import refused
from tests.helpers.graphs.fake_gpu import pretended_gpu
from tests.helpers.serving.counted_attention import count_attention_flops
from tests.helpers.serving.dense_attention import dense_attention
from tests.helpers.serving.naive_trie import naive_step
from tests.helpers.serving.trie_cases import LAYER, SCALING, TrieCase, trie_setting, trie_tensors


@st.composite
def cases(draw: st.DrawFn) -> TrieCase:
    # A small vocabulary makes sequences share prefixes; some sequences continue others.
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(tuple)
    sequences = draw(st.lists(tokens, min_size=1, max_size=6))
    for number in draw(st.lists(st.integers(0, len(sequences) - 1), max_size=4)):
        sequences.append(sequences[number] + draw(tokens))
    return TrieCase(
        tuple(dict.fromkeys(sequences)),
        tuple(draw(st.lists(st.sampled_from([0, 0, 16, 32, 48]), min_size=10, max_size=10))),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 3])),
        8,
        draw(st.sampled_from([4, 8, 16])),
        draw(
            st.one_of(
                st.just(VisiblePast()),
                st.integers(1, 90).map(lambda window: VisiblePast(window=window)),
                st.integers(1, 90).map(lambda chunk: VisiblePast(chunk=chunk)),
            )
        ),
        draw(st.sampled_from([0.0, 0.0, 2.0])),
        draw(st.booleans()),
    )


def _check(case: TrieCase) -> None:
    step, running, blocks = trie_setting(case)
    query, key, value, sinks = trie_tensors(case, step.count)
    expected = dense_attention(
        step, query, key, value, blocks, SCALING, case.past.window, case.past.chunk, case.softcap, sinks
    )
    with running_step(running):
        actual = torch.ops.moepass.trie_attention(query, key, value, sinks, LAYER, SCALING, case.softcap)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


@settings(max_examples=60, deadline=None)
# All groupings: a part for each node, the predicted parts for real sizes, few parts, a single part.
@given(cases(), st.sampled_from([0, 2_000, 100_000, 1 << 40]))
def test_any_trie_gives_what_one_dense_mask_gives(case: TrieCase, call_flops: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_parts, "CALL_FLOPS", call_flops)
        patch.setattr(partial_attention, "SCORE_BYTES", 1000)  # several blocks of queries
        patch.setattr(trie_parts, "MASK_NUMBERS", 300)
        patch.setattr(trie_parts, "LEAST_PIECE", 16)
        # Several batches of parts, and masks that are computed for each layer.
        patch.setattr(running_step_module, "BATCH_ROWS", 64)
        patch.setattr(running_step_module, "HELD_MASK_BYTES", 500)
        _check(case)


def _varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    return_aux: AuxRequest,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emulate `torch.nn.attention.varlen` as documented, sequence by sequence, and assert what its kernel requires."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert (query_ends[-1], key_ends[-1]) == (len(query), len(key))
    assert (most_queries, most_keys) == (query_ends.diff().max(), key_ends.diff().max())
    assert return_aux.lse
    assert enable_gqa
    groups = query.shape[1] // key.shape[1]
    outputs, sums = [], []
    for first, end, key_first, key_end in zip(query_ends, query_ends[1:], key_ends, key_ends[1:], strict=False):
        q, k, v = query[first:end], key[key_first:key_end], value[key_first:key_end]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * scale
        # The last query is at the last key. A limit of -1 hides nothing.
        ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
        before, after = window_size
        hidden = ((ahead > after) & (after >= 0)) | ((-ahead > before) & (before >= 0))
        assert not hidden.all(1).any()  # the kernel's log-sum-exp of such a query is +inf
        scores.masked_fill_(hidden, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1)))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, -1)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([1, 10_000, 1 << 40]))
def test_calls_for_many_lengths_give_it_as_well(case: TrieCase, gathered_bytes: int) -> None:
    case = dataclasses.replace(case, softcap=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_attention, "takes_varlen", lambda *_: True)
        patch.setattr(trie_attention, "partial_attention", None)  # no past needs a mask
        patch.setattr(varlen_attention, "varlen_attn", _varlen_attn)
        patch.setattr(varlen_attention, "GATHERED_BYTES", gathered_bytes)
        _check(case)


def test_one_call_takes_all_nodes_and_one_each_level() -> None:
    branches = [(*PROMPT, branch, *last) for branch in range(9) for last in ((1,), (2, 2), (3,))]
    _, running, _ = trie_setting(dataclasses.replace(CASE, sequences=tuple(branches)))
    sequences = {}
    for past in (VisiblePast(), VisiblePast(window=3), VisiblePast(window=3, chunk=7)):
        calls = running.calls(dataclasses.replace(running.layers[7], past=past))
        sequences[past] = None if calls is None else [len(call.query_ends) - 1 for call in calls]
    assert list(sequences.values()) == [[1 + 9 + 27, 1, 9, 1], [1 + 9 + 27], None]


def test_layers_of_gpt_oss_take_few_launches() -> None:
    """8,000 tokens: a prefix of 1,200, 50 questions of 100 tokens, and 3 labels of 12 tokens for each question."""
    config = transformers.GptOssConfig(num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    layers = survey_attention(model).layers
    assert [layer.past for layer in layers.values()] == [VisiblePast(window=128), VisiblePast()]
    nodes = [TrieNode(0, 1200, -1, 8000)]
    for start in range(1200, 8000, 136):
        question = len(nodes)
        nodes.append(TrieNode(start, start + 100, 0, start + 136))
        nodes += [TrieNode(label, label + 12, question, label + 12) for label in range(start + 100, start + 136, 12)]
    step = uncached_step(tuple(nodes), np.zeros(8000, np.int64))
    kernel = varlen_attention.varlen_attn
    launches: list[Any] = []

    @functools.wraps(kernel)
    def counted(*arguments: Any, **named: Any) -> Any:
        launches.append(arguments)
        return kernel(*arguments, **named)

    counts: list[int] = []
    with pretended_gpu(), mock.patch.object(varlen_attention, "varlen_attn", counted):
        query, key = (torch.zeros(1, heads, 8000, 64, dtype=torch.bfloat16, device="cuda") for heads in (64, 8))
        with running_step(RunningStep(step, layers, None, "cuda")):
            for number in layers:
                trie_attention.trie_attention(query, key, key, torch.zeros(64, device="cuda"), number, 0.125, 0.0)
                counts.append(len(launches) - sum(counts))
    # A window takes one launch; otherwise, nodes take one, and each level of their ancestors.
    assert counts == [1, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_half_precision_is_rounded_once_whatever_the_parts(dtype: torch.dtype, softcap: float) -> None:
    case = dataclasses.replace(CASE, softcap=softcap, dtype=dtype)
    step, running, blocks = trie_setting(case)
    query, key, value, sinks = trie_tensors(case, step.count)
    expected = dense_attention(step, query, key, value, blocks, SCALING, softcap=softcap, sinks=sinks)
    with running_step(running):
        actual = torch.ops.moepass.trie_attention(query, key, value, sinks, LAYER, SCALING, softcap)
    assert actual.dtype == dtype
    half_a_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(actual.double(), expected, rtol=1.01 * half_a_step, atol=2e-6)


PROMPT = tuple(number % 2 for number in range(40))
CASE = TrieCase(
    ((*PROMPT, 0, 1), (*PROMPT, 1), (*PROMPT[:20], 1, 1), (1, 1, 1)),
    (32, 0, 0, 0),
    *(2, 3, 8, 8),
    VisiblePast(),
    0.0,
    True,
)


def test_stored_blocks_hold_the_keys_and_values_of_their_tokens() -> None:
    step, _ = naive_step([PROMPT], stored={PROMPT[:16]: 2, PROMPT[:32]: 0})
    shape = KeyValueShape(2, 8, 4, torch.float32)
    memory = BlockMemory([shape, shape], 3)
    layers = {number: AttentionLayer(number - 4, 2, shape, VisiblePast()) for number in (4, 5)}
    query, key, value = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 4)
    with running_step(RunningStep(step, layers, memory)):
        torch.ops.moepass.trie_attention(query, key, value, None, 5, 0.3, 0.0)
    stored = memory.read(1, torch.tensor([2, 0]))
    assert torch.equal(stored[0], key[0, :, :32].transpose(0, 1))
    assert torch.equal(stored[1], value[0, :, :32].transpose(0, 1))
    assert not memory.keys[0].any()
    assert not memory.keys[1][1].any()


def test_it_needs_a_step_that_fits() -> None:
    step, running, _ = trie_setting(CASE)
    query, key, value, sinks = trie_tensors(CASE, step.count)

    def call(layer: int = 7, tokens: int = step.count) -> torch.Tensor:
        rows = (tensor[:, :, :tokens] for tensor in (query, key, value))
        output: torch.Tensor = torch.ops.moepass.trie_attention(*rows, sinks, layer, 0.3, 0.0)
        return output

    with refused(MoepassError, name="running_step"):
        call()
    with running_step(running):
        with refused(MoepassError, name="layer 8"):
            call(layer=8)
        with refused(InputError, name="layer 7"):
            call(tokens=step.count - 1)
        errors: list[BaseException] = []

        def in_another_thread() -> None:
            try:
                call()
            except MoepassError as error:
                errors.append(error)

        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        assert len(errors) == 1
        call()
    with refused(MoepassError, name="running_step"):
        call()


def test_a_step_with_cached_blocks_needs_their_memory() -> None:
    step, running, _ = trie_setting(CASE)
    with refused(MoepassError, name="stored", value=[]):
        RunningStep(step, running.layers, None)
    wrong = dataclasses.replace(step, depth=step.depth + 1)
    with pytest.raises(AssertionError):
        RunningStep(wrong, running.layers, running.memory)


def test_blocks_are_written_once_and_not_where_they_are_read() -> None:
    step, running, _ = trie_setting(CASE)
    assert running.memory is not None
    positions = np.arange(BLOCK_TOKENS)

    def with_stored(*blocks: int) -> RunningStep:
        stored = tuple(StoredBlock(block, positions) for block in blocks)
        return RunningStep(dataclasses.replace(step, stored=stored), running.layers, running.memory)

    for blocks in ([step.contexts[0][0]], [5, 5], [-1], [running.memory.count]):
        with refused(MoepassError, name="stored", value=blocks):
            with_stored(*blocks)


def test_heads_whose_numbers_are_no_neighbours() -> None:
    """Some rotations return heads that are not contiguous, which the CPU kernel does not check."""
    step, running, blocks = trie_setting(CASE)
    query, key, value, sinks = trie_tensors(CASE, step.count)
    scattered = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in (query, key, value)]
    assert scattered[0].stride(-1) != 1
    with running_step(running):
        actual = torch.ops.moepass.trie_attention(*scattered, sinks, 7, 0.3, 0.0)
    expected = dense_attention(step, query, key, value, blocks, 0.3, sinks=sinks)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"cu_seq_lens_q": torch.zeros(1)}, "cu_seq_lens_q"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal"),
        ({"scaling": torch.ones(1)}, "scaling"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "mask"),
    ],
)
def test_arguments_that_would_change_the_result_are_refused(arguments: dict[str, object], name: str) -> None:
    module = torch.nn.Module()
    module.layer_idx = 7  # type: ignore[assignment]
    tensors = torch.zeros(3, 1, 2, 4, 8).unbind()
    with pytest.raises(InputError) as raised:
        trie_attention_forward(module, *tensors, **arguments)
    assert raised.value.name == name


def test_a_step_computes_hardly_more_than_each_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has 100 questions of 30 tokens with 3 labels of 2 tokens after 1,000 tokens."""
    nodes = [TrieNode(0, 1000, -1, 4600)]
    for start in range(1000, 4600, 36):
        nodes.append(TrieNode(start, start + 30, 0, start + 36))
        nodes += [
            TrieNode(label_start, label_start + 2, len(nodes) - 1, label_start + 2)
            for label_start in range(start + 30, start + 36, 2)
        ]
    question = [*range(1000, 1030), *[1030, 1031] * 3]
    depth = np.asarray([*range(1000), *question * 100])
    ends = np.concatenate([np.full(node.end - node.start, node.subtree_end) for node in nodes])
    step = StepBatch(depth, depth, ends, tuple(nodes), (), depth[:0], ())
    layer = AttentionLayer(0, 2, KeyValueShape(1, 64, 64, torch.float32), VisiblePast())
    running = RunningStep(step, {0: layer, 1: layer})
    query, key = torch.randn(1, 2, 4600, 64), torch.randn(1, 1, 4600, 64)
    flops = count_attention_flops(monkeypatch)
    with running_step(running):
        for number in (0, 1):
            torch.ops.moepass.trie_attention(query, key, key, None, number, 0.125, 0.0)
    needed = 2 * (4 * 2 * 64) * int((depth + 1).sum())
    assert needed <= sum(flops) <= 1.05 * needed


def test_a_torch_without_the_varlen_kernel_is_named() -> None:
    value = mock.Mock(dtype=torch.bfloat16, device=torch.device("cuda"), shape=(1, 2, 5, 64))
    assert varlen_obstacle(torch.bfloat16, 64, 0.0) == ""
    assert varlen_attention.takes_varlen(value, value, 0.0)

    def older(query: object, key: object, value: object, *, return_aux: object, scale: object) -> None:
        return

    for kernel, words in (
        (older, "has varlen_attn without enable_gqa, num_splits, window_size"),
        (None, "has no torch.nn.attention.varlen"),
    ):
        with mock.patch.object(varlen_attention, "varlen_attn", kernel):
            obstacle = varlen_obstacle(torch.bfloat16, 64, 0.0)
            assert obstacle == f"torch {torch.__version__} {words}; torch 2.13 has it"
            assert not varlen_attention.takes_varlen(value, value, 0.0)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap", "obstacle"),
    [
        (torch.float32, 64, 0.0, "varlen_attn takes bfloat16 and float16, not float32"),
        (torch.float16, 64, 50.0, "varlen_attn has no soft cap"),
        (torch.float16, 512, 0.0, "varlen_attn takes heads of at most 256 numbers, not 512"),
    ],
)
def test_layers_that_the_varlen_kernel_lacks_have_a_reason(
    dtype: torch.dtype, head_dim: int, softcap: float, obstacle: str
) -> None:
    assert varlen_obstacle(dtype, head_dim, softcap) == obstacle
    value = mock.Mock(dtype=dtype, device=torch.device("cuda"), shape=(1, 2, 5, head_dim))
    assert not varlen_attention.takes_varlen(value, value, softcap)
