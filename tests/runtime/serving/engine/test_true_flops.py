"""The executed FLOPs of a step are the least that its trie needs, counted in the operators that run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moepass.models.sizes.families import from_config
from moepass.runtime.serving.attention.survey import survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult
from moepass.runtime.serving.engine.trie_states import TrieStates
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from tests.helpers.models.tiny import tiny_model
from tests.helpers.serving.counted_attention import count_attention_flops
from tests.helpers.serving.naive_trie import Sequence_, naive_step
from tests.helpers.serving.narrowed import narrowed_backbone

CPU = torch.device("cpu")
MODEL = tiny_model("qwen3_moe", max_position_embeddings=2048, num_hidden_layers=2)
SURVEY = survey_attention(MODEL)
MODEL.set_attn_implementation(TRIE_ATTENTION_NAME)
BACKBONE = narrowed_backbone(MODEL.base_model, SURVEY)
CONFIG = MODEL.config


@dataclasses.dataclass(frozen=True)
class Executed:
    """FLOPs of matrix products, counted in their calls, and of attention, counted by the shapes of its kernels."""

    products: int
    attention: int
    result: StepResult


def execute(requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> Executed:
    facts = EngineFacts("trie", 1 << 60, 1e9, 100_000, 2048, CONFIG.vocab_size, True, "embedding", (), {}, 4096)
    runner = TrieStates(BACKBONE, SURVEY.layers, None, CPU)
    table = FlopsTable(from_config(CONFIG))
    engine = ModelEngine(ModelHead(MODEL), runner, table, facts, index=BlockIndex(0), key=bytes(16))
    attention_flops = count_attention_flops(monkeypatch)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_mm_flops}) as counter:
        result = engine.step(requests)
    return Executed(counter.get_total_flops(), sum(attention_flops), result)


def _grouped_mm_flops(rows: torch.Size, weights: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * weights[2]


def least_flops(sequences: list[Sequence_]) -> tuple[int, int]:
    """Return the FLOPs of products and of attention, from a dictionary of prefixes.

    The logits at the end of each sequence are read. Unread tokens end with the attention of the last layer.
    """
    step, _ = naive_step(sequences)
    hidden, queries = CONFIG.hidden_size, CONFIG.num_attention_heads * CONFIG.head_dim
    before = weights_before_attention()
    behind = hidden * (CONFIG.num_experts + queries + CONFIG.num_experts_per_tok * 3 * CONFIG.moe_intermediate_size)
    layers, reads = CONFIG.num_hidden_layers, len({*sequences})
    weights = step.count * (layers * before + (layers - 1) * behind) + reads * (behind + hidden * CONFIG.vocab_size)
    products = 2 * weights
    pairs = int((step.depth + 1).sum())
    return products, 4 * queries * layers * pairs


def weights_before_attention() -> int:
    heads = CONFIG.num_attention_heads + 2 * CONFIG.num_key_value_heads
    return int(CONFIG.hidden_size * heads * CONFIG.head_dim)


def drawn(rng: np.random.Generator, count: int) -> Sequence_:
    return tuple(rng.integers(3, CONFIG.vocab_size, count).tolist())


def asked(number: int, sequence: Sequence_) -> Request:
    read = TokenRead(len(sequence) - 1, np.array([1, 2], np.int32))
    return Request(str(number), (TokenPiece(-1, np.array(sequence, np.int32), (read,)),))


def test_a_step_executes_what_its_trie_takes_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    prefixes = [drawn(rng, 64) for _ in range(2)]
    examples = [prefix + drawn(rng, 32) for prefix in prefixes for _ in range(2)]
    sequences = [examples[number % 4] + drawn(rng, 8) for number in range(32)]
    executed = execute([asked(*numbered) for numbered in enumerate(sequences)], monkeypatch)
    products, attention = least_flops(sequences)
    assert executed.result.flops == products + attention
    # Without compilation, read tokens pass twice through the last layer's work before its attention.
    assert executed.products == products + 2 * len({*sequences}) * weights_before_attention()
    # In such small tries, masked pairs are computed as well, because more kernel calls would take longer.
    assert attention <= executed.attention <= 2 * attention
    assert executed.result.unshared_flops >= 3 * executed.result.flops
    alone = [least_flops([sequence]) for sequence in sequences]
    assert executed.result.unshared_flops == sum(map(sum, alone))


def test_a_hundred_questions_over_a_thousand_tokens_cost_what_their_trie_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    prompt = drawn(rng, 1000)
    questions = [drawn(rng, int(count)) for count in rng.integers(3, 20, 100)]
    pieces = [TokenPiece(-1, np.array(prompt, np.int32))]
    pieces += [
        TokenPiece(0, np.array(question, np.int32), (TokenRead(len(question) - 1, np.array([1, 2], np.int32)),))
        for question in questions
    ]
    executed = execute([Request("many", tuple(pieces))], monkeypatch)
    # An oracle over all tokens takes quadratic time, so only the question tokens are added one by one to the prompt.
    table = FlopsTable(from_config(CONFIG))
    least = table.total(1000)
    for beginning in {question[:end] for question in questions for end in range(1, len(question) + 1)}:
        least += table.flops(1000 + len(beginning) - 1, 1)
    least += (table.read_flops + table.logit_flops) * len({*questions})
    assert executed.result.flops == least
    assert executed.products + executed.attention <= 1.1 * least
    assert executed.result.unshared_flops > 30 * executed.result.flops
