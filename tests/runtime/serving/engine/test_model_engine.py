"""The engine gives the same answers as each sequence alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.models.sizes.families import from_config
from moepass.runtime.execute.bound_graph import SegmentCall
from moepass.runtime.serving.attention.survey import survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.batching.step_batch import StepBatch
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.cache.block_memory import BlockMemory
from moepass.runtime.serving.engine import model_engine
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.padded_rows import PaddedRows, RowsBackbone
from moepass.runtime.serving.engine.plain_outputs import StatesRunner
from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.engine.trie_states import TrieStates
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from tests.helpers.models.tiny import tiny_model
from tests.helpers.serving.alone import check_answers
from tests.helpers.serving.narrowed import narrowed_backbone

CPU = torch.device("cpu")
PLAIN = tiny_model("qwen3_moe")
SERVED = tiny_model("qwen3_moe")
SURVEY = survey_attention(SERVED)
LAYERS = SURVEY.layers
SERVED.set_attn_implementation(TRIE_ATTENTION_NAME)
BACKBONE = narrowed_backbone(SERVED.base_model, SURVEY)
VOCABULARY = int(PLAIN.config.vocab_size)


def engine(
    form: Literal["trie", "rows"],
    most_tokens: int = 10_000,
    saturation_flops: int = 1 << 60,
    blocks: int = 0,
    runs_ahead: bool = False,
) -> ModelEngine:
    runner: StatesRunner
    if form == "trie":
        shapes = tuple(layer.shape for layer in LAYERS.values())
        memory = BlockMemory(shapes, blocks) if blocks else None
        model, runner = SERVED, TrieStates(BACKBONE, LAYERS, memory, CPU)
    else:
        model, runner = PLAIN, PaddedRows(RowsBackbone(PLAIN.base_model), CPU, 64)
    facts = EngineFacts(form, saturation_flops, 1e9, most_tokens, 64, VOCABULARY, True, "embedding", (), {}, 4096)
    table = FlopsTable(from_config(PLAIN.config), narrows=form == "trie")
    index = BlockIndex(blocks)
    return ModelEngine(ModelHead(model), runner, table, facts, index=index, key=bytes(16), runs_ahead=runs_ahead)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[TokenPiece, ...]:
    """A small vocabulary makes pieces share prefixes."""
    pieces: list[TokenPiece] = []
    depths: list[int] = []
    for number in range(draw(st.integers(1, 5))):
        parent = draw(st.integers(-1, number - 1))
        tokens = np.array(draw(st.lists(st.integers(3, 5), min_size=1, max_size=20)), np.int32)
        before = depths[parent] if parent >= 0 else 0
        if before + len(tokens) > 60:
            parent, before = -1, 0
        depths.append(before + len(tokens))
        reads = tuple(
            TokenRead(draw(st.integers(0, len(tokens) - 1)), np.array(wanted, np.int32), draw(st.integers(0, 3)))
            for wanted in draw(st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=3), max_size=2))
        )
        is_scored, top = draw(st.booleans()), draw(st.integers(0, 2))
        vector: Any = draw(st.sampled_from([None, None, "last", "mean"]))
        pieces.append(TokenPiece(parent, tokens, reads, is_scored, top if is_scored else 0, vector))
    return tuple(pieces)


def named(all_pieces: Sequence[tuple[TokenPiece, ...]]) -> list[Request]:
    return [Request(str(number), some) for number, some in enumerate(all_pieces)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("form", ["trie", "rows"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(asked=st.lists(pieces(), min_size=1, max_size=4).map(named))
def test_answers_are_those_of_every_sequence_alone(form: str, asked: list[Request]) -> None:
    result = engine(form).step(asked)
    check_answers(PLAIN, asked, result.answers, 1e-5)
    assert result.unshared_flops >= result.flops
    if form == "trie":
        assert result.flops == sum(answer.usage.flops for answer in result.answers)


def test_rows_count_what_is_computed_and_not_what_could_be_shared() -> None:
    table = FlopsTable(from_config(PLAIN.config), narrows=False)
    asked = [request("a", 40, 3), request("a", 40, 3)]
    asked[1] = dataclasses.replace(asked[0], id="b", salt=b"another")
    length = 42  # the prompt and a question
    row = table.total(length)
    result = engine("rows").step(asked)
    assert result.tokens == 6 * length
    assert result.flops == 6 * row + 8 * table.logit_flops == result.unshared_flops
    # The rows of one request fill a step; as a trie they would have less than half as many tokens.
    assert engine("rows", saturation_flops=3 * row).choose(asked) == asked[:1]
    assert engine("rows", saturation_flops=3 * row + 1).choose(asked) == asked
    assert engine("rows", most_tokens=6 * length - 1).choose(asked) == asked[:1]
    assert engine("trie", saturation_flops=3 * row).choose(asked) == asked
    split = engine("rows", most_tokens=2 * length).step(asked[:1])
    assert (split.retries, split.tokens) == (1, 3 * length)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.lists(pieces(), min_size=1, max_size=3).map(named), min_size=2, max_size=5),
    blocks=st.integers(1, 9),
)
def test_answers_are_the_same_with_any_cache(steps: list[list[Request]], blocks: int) -> None:
    served = engine("trie", blocks=blocks)
    held: set[bytes] = set()
    for asked in steps:
        result = served.step(asked)
        check_answers(PLAIN, asked, result.answers, 1e-5)
        held = (held | set(result.stored)) - set(result.evicted)
        assert len(held) == len(served._index) <= blocks


def test_what_is_asked_again_comes_from_the_cache() -> None:
    served = engine("trie", blocks=20)
    asked = [request("a", 40, 3)]
    scored = [Request("scored", (TokenPiece(-1, np.arange(3, 43, dtype=np.int32), is_scored=True, scored_top=1),))]
    tokens = [served.step(asked).tokens for _ in range(3)]
    assert tokens == [46, 14, 14]  # two blocks of the prompt are shared by three questions
    results = [served.step(scored) for _ in range(3)]
    for result in results:
        check_answers(PLAIN, scored, result.answers, 1e-5)
    # The scores of the prompt are cached from the second step on. Token 32 is predicted by the previous block.
    assert [result.tokens for result in results] == [39, 23, 23]
    assert [result.answers[0].usage.cached_tokens for result in results] == [0, 16, 16]


def request(number: str, tokens: int, questions: int = 0) -> Request:
    wanted = np.array([1, 2], np.int32)
    prompt = TokenPiece(-1, np.arange(3, 3 + tokens, dtype=np.int32), (TokenRead(tokens - 1, wanted),))
    question_pieces = (
        TokenPiece(0, np.array([40 + question, 7], np.int32), (TokenRead(1, wanted),)) for question in range(questions)
    )
    return Request(number, (prompt, *question_pieces))


@pytest.mark.parametrize(("form", "blocks"), [("trie", 0), ("trie", 9), ("rows", 0)])
def test_a_step_that_is_too_large_runs_in_parts(form: str, blocks: int) -> None:
    asked = [request("a", 20, 8), request("b", 30), request("c", 10, 2)]
    served = engine(form, most_tokens=30, blocks=blocks)
    assert served.choose(asked) == asked[:1]
    result = served.step(asked)
    assert result.retries > 0
    assert not served._costs
    check_answers(PLAIN, asked, sorted(result.answers, key=lambda answer: answer.id), 1e-5)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_next_step_is_packed_while_the_device_computes_this_one(
    monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    served = engine("trie", blocks=20, runs_ahead=runs_ahead)
    order: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            order.append(name)
            return function(*arguments, **named)

        return run

    monkeypatch.setattr(model_engine, "pack", noted("pack", model_engine.pack))
    monkeypatch.setattr(model_engine, "download", noted("read", model_engine.download))
    monkeypatch.setattr(served._runner, "run", noted("run", served._runner.run))
    steps = [[request("a", 40, 3)], [request("b", 40, 3), request("c", 20)], [request("d", 30)]]
    tokens = []
    for number, asked in enumerate(steps):
        result = served.step(asked, lambda number=number: [*itertools.chain(*steps[number + 1 : number + 2])])
        check_answers(PLAIN, asked, result.answers, 1e-5)
        tokens.append(result.tokens)
    if runs_ahead:
        assert order == ["pack", "run", "pack", "read", "run", "pack", "read", "run", "read"]
    else:
        assert order == ["pack", "run", "read"] * 3
    # The prompt of the first step is in the cache before the second one is packed.
    assert tokens == [46, 18, 14]
    assert served._index.used == 0


def test_a_prepared_step_is_packed_again_if_other_requests_run() -> None:
    served = engine("trie", blocks=20, runs_ahead=True)
    first, second, third = request("a", 40, 3), request("b", 40), request("c", 33)
    served.step([first], lambda: [second, third])
    assert served._index.used > 0
    result = served.step([third])
    check_answers(PLAIN, [third], result.answers, 1e-5)
    assert served._index.used == 0


def test_a_step_does_not_fail_if_the_next_one_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine("trie", blocks=20, runs_ahead=True)
    first, damaged = request("a", 40, 3), request("b", 40)
    pack = model_engine.pack

    def failing(requests: Sequence[Request], *others: Any) -> Any:
        if damaged in requests:
            raise ValueError("damaged")
        return pack(requests, *others)

    monkeypatch.setattr(model_engine, "pack", failing)
    check_answers(PLAIN, [first], served.step([first], lambda: [damaged]).answers, 1e-5)
    assert served._index.used == 0
    with pytest.raises(ValueError, match="damaged"):
        served.step([damaged])


class Scarce:
    """A runner whose only segment has memory for steps of a limited number of tokens."""

    def __init__(self, runner: StatesRunner, most: int, error: Exception | None = None) -> None:
        self.runner, self.most = runner, most
        self.error = error or torch.OutOfMemoryError("no memory")
        self.seen: list[int] = []

    def states(self, batch: StepBatch) -> torch.Tensor:
        self.seen.append(batch.count)
        states: torch.Tensor = SegmentCall(self._segment, "segment 1", "layer 0")(batch)
        return states

    def run(self, batch: StepBatch, indices: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self.states(batch), indices

    def _segment(self, batch: StepBatch) -> torch.Tensor:
        if batch.count > self.most:
            raise self.error
        return self.runner.states(batch)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=str,
)
def test_where_memory_ends_the_step_is_split_and_later_ones_are_smaller(error: Exception) -> None:
    served = engine("trie", most_tokens=100)
    scarce = Scarce(served._runner, 40, error)
    served._runner = scarce
    asked = [request("a", 20, 8), request("b", 30), request("long", 50), request("c", 10, 2)]
    result = served.step(asked)
    assert [number for number, _ in result.refused] == ["long"]
    assert "50 tokens" in result.refused[0][1]
    check_answers(PLAIN, [answered for answered in asked if answered.id != "long"], result.answers, 1e-5)
    assert served.choose(asked) == asked[:1]


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    served = engine("trie")

    def run(*_: object) -> None:
        raise RuntimeError("the memory of a rank is damaged")

    served._runner = mock.Mock(run=run)
    with pytest.raises(RuntimeError, match="damaged"):
        served.step([request("a", 3)])


def test_nothing_is_remembered_of_requests_that_do_not_wait_any_more() -> None:
    served = engine("trie", saturation_flops=1)
    for number in range(20):
        served.choose([request(str(number), 5)])
    assert len(served._costs) == 1
    failing = Scarce(served._runner, 0)
    served._runner = failing
    served.step([request("failed", 5)])
    assert "failed" not in served._costs


def test_a_step_is_filled_to_the_threshold_and_shared_blocks_count_once() -> None:
    table = FlopsTable(from_config(PLAIN.config))
    same = [request(str(number), 32) for number in range(6)]
    served = engine("trie", saturation_flops=2 * table.flops(0, 32))
    assert len(served.choose(same)) == 6
    waiting = [request("other", 31), *same]
    assert len(served.choose(waiting)) == 7
    low = engine("trie", saturation_flops=table.flops(0, 32))
    assert served.choose([]) == []
    assert low.choose(same) == same[:1]


@pytest.mark.parametrize(
    ("piece", "name", "value"),
    [
        (TokenPiece(-1, np.array([VOCABULARY], np.int32)), "tokens", VOCABULARY),
        (TokenPiece(-1, np.array([-1], np.int32)), "tokens", -1),
        (
            TokenPiece(-1, np.array([1], np.int32), (TokenRead(0, np.array([VOCABULARY], np.int32)),)),
            "tokens",
            VOCABULARY,
        ),
        (TokenPiece(-1, np.ones(65, np.int32)), "tokens", 65),
    ],
)
def test_what_the_model_cannot_take_is_refused(piece: TokenPiece, name: str, value: int) -> None:
    with pytest.raises(InputError) as refused:
        engine("trie").check(Request("a", (piece,)))
    assert (refused.value.name, refused.value.value) == (name, value)


def test_what_the_model_takes_is_not_refused() -> None:
    engine("trie").check(request("a", 60, 3))


def test_a_cache_has_as_many_complete_blocks_as_fit() -> None:
    def make(cache_bytes: int) -> ModelEngine:
        options = EngineOptions(None, torch.device("cpu"), cache_bytes=cache_bytes, warms_up=False)
        return make_engine(tiny_model("qwen3_moe"), options, None, bytes(32))

    with pytest.raises(InputError, match="bytes, but one block takes") as refused:
        make(1)
    block_bytes = refused.value.expected
    assert isinstance(block_bytes, int)
    assert make(4 * block_bytes - 1).view().cache_blocks == 3
    assert make(0).view().cache_blocks == 0


@pytest.mark.parametrize("cache_bytes", [1 << 50, 10**39], ids=["more than there is", "more than can be counted"])
def test_a_cache_that_is_larger_than_the_memory_is_refused(cache_bytes: int) -> None:
    options = EngineOptions(None, torch.device("cpu"), cache_bytes=cache_bytes, warms_up=False)
    with pytest.raises(InputError, match="of memory are free for this rank; choose a smaller size") as refused:
        make_engine(tiny_model("qwen3_moe"), options, None, bytes(32))
    assert (refused.value.name, refused.value.value) == ("kv_cache", cache_bytes)
