"""The memory that an engine promises: a sum of parts that no step exceeds, and that the memory budget limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moepass.models.errors import InputError
from moepass.models.sizes.families import from_config
from moepass.passes.ir.planner_decisions import DeviceMemory
from moepass.runtime.banks.banked_modules import BankedParameter
from moepass.runtime.homes.options.home_options import Host
from moepass.runtime.offload.loading import offload_report
from moepass.runtime.serving.engine import load_engine as load_engine_module
from moepass.runtime.serving.engine.load_engine import EngineOptions, load_engine, make_engine
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.engine.step_memory import MemoryShare, StepSizes
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from tests.helpers.models.fp8_experts import fp8_folder, interpret_kernels
from tests.helpers.models.peak_memory import peak_bytes
from tests.helpers.models.tiny import tiny_model

CPU = torch.device("cpu")
# The sum is for the worst trie and for operators whose results all are new tensors, so most steps take less.
FACTOR = 2.5
CACHE_BYTES = 200_000
SIZES = {"hidden_size": 192, "moe_intermediate_size": 128, "max_position_embeddings": 4096, "vocab_size": 2048}


def _request(number: int, prompt: int, branches: int = 0, length: int = 0, *, vocabulary: int) -> Request:
    """Return a prompt and branches behind it, with the most likely tokens of every last token."""
    random = np.random.default_rng(number)

    def piece(parent: int, count: int, first: int) -> TokenPiece:
        tokens = random.integers(3, vocabulary, count, dtype=np.int32)
        tokens[0] = first  # no two branches share it
        return TokenPiece(parent, tokens, (TokenRead(count - 1, tokens[:1], 5),), True, 2)

    return Request(str(number), (piece(-1, prompt, number), *(piece(0, length, branch) for branch in range(branches))))


def _largest_steps(engine: ModelEngine, seed: int) -> dict[str, list[Request]]:
    """Return steps of nearly as many tokens as the engine promises to run."""
    facts = engine.facts
    most, vocabulary = min(facts.most_tokens, facts.max_sequence_tokens), facts.vocabulary_size
    eighth = most // 8
    return {
        "one sequence": [_request(seed, most, vocabulary=vocabulary)],
        "branches": [_request(seed + 1, most - 7 * eighth, 7, eighth, vocabulary=vocabulary)],
        "many requests": [_request(seed + number, eighth, vocabulary=vocabulary) for number in range(2, 10)],
        "single tokens": [_request(seed + 10, 8, min(most - 8, vocabulary), 1, vocabulary=vocabulary)],
    }


def _held_bytes(engine: ModelEngine) -> int:
    """Return the bytes of weights, ring and cache."""
    model = engine._head.model
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    held = sum(tensors.values())
    if any(isinstance(module, BankedParameter) for module in model.modules()):
        report = offload_report(model)
        # Banks at rest are parameters too, but they are not on the device.
        held += report.store.device_bytes - report.home_bytes
    blocks = getattr(engine._runner, "memory", None)
    return held + (0 if blocks is None else sum(tensor.nbytes for tensor in (*blocks.keys, *blocks.values)))


def _check(engine: ModelEngine, budget: int) -> None:
    """Check that no step takes more than the budget, and that none needs much less."""
    facts = engine.facts
    assert facts.memory_limit_bytes == budget
    assert facts.memory.peak_bytes <= budget
    for requests in _largest_steps(engine, 0).values():
        engine.step(requests)  # no code is compiled after this
    for name, requests in _largest_steps(engine, 100).items():
        peaks = [peak_bytes(lambda requests=requests: engine.step(requests)) for _ in range(2)]  # type: ignore[misc]
        counted = [_held_bytes(engine) + peak for peak in peaks]
        assert max(counted) <= budget, name
        assert budget <= FACTOR * counted[0], f"{name}; the second time, parts of it are cached"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resident_model_keeps_to_its_budget(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3_moe", dtype=dtype, num_hidden_layers=3, **SIZES)
    weights = sum(value.nbytes for value in model.parameters())
    budget = weights + 8_000_000
    options = EngineOptions(None, CPU, memory_budget=str(budget), cache_bytes=CACHE_BYTES, warms_up=False)
    engine = make_engine(model, options, None, bytes(32))
    assert engine.facts.memory.kv_bytes <= CACHE_BYTES
    _check(engine, budget)


def _compiled(options: dict[str, str]) -> Callable[[nn.Module], Any]:
    """Return the function that compiles a module with these options."""
    return lambda module: torch.compile(module, backend="asyncep", options=options)


def _least_budget(folder: Path, options: EngineOptions) -> int:
    """Return the smallest budget, as the error for a smaller one names it."""
    with pytest.raises(InputError, match="which is too small") as caught:
        load_engine(folder, dataclasses.replace(options, memory_budget="1kB"), None, bytes(32))
    assert isinstance(caught.value.expected, int)
    return caught.value.expected


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_a_streamed_model_keeps_to_its_budget(slots: int, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=3, **SIZES)
    model.save_pretrained(tmp_path)
    options = EngineOptions(Host(), CPU, step_tokens=500, cache_bytes=CACHE_BYTES, warms_up=False)
    experts = model.model.layers[0].mlp.experts
    bank_bytes = sum(value.nbytes for value in experts.parameters())
    budget = _least_budget(tmp_path, options) + (slots - 1) * bank_bytes
    options = dataclasses.replace(options, memory_budget=str(budget))
    engine = load_engine(tmp_path, options, _compiled({"lower": "eager"}), bytes(32))
    report = offload_report(engine._head.model)
    assert (len(report.layers), report.store.slots) == (3, slots)
    assert engine.facts.most_tokens >= 500, "the planner has left as much"
    _check(engine, budget)


@pytest.mark.slow
def test_slots_of_experts_in_fp8_take_what_the_budget_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)
    folder = fp8_folder(tmp_path, num_hidden_layers=2, vocab_size=2048)

    options = EngineOptions(
        Host(), CPU, step_tokens=100, cache_bytes=CACHE_BYTES, warms_up=False, experts_compute="fp8"
    )
    budget = _least_budget(folder, options)
    assert budget < _least_budget(folder, dataclasses.replace(options, experts_compute="model"))
    options = dataclasses.replace(options, memory_budget=str(budget))
    engine = load_engine(folder, options, _compiled({"experts_compute": "fp8"}), bytes(32))
    report = offload_report(engine._head.model)
    ring = report.store.current_ring
    assert ring is not None
    assert engine.facts.memory.slot_bytes == report.ring_bytes == ring.device_bytes
    assert engine.facts.memory.peak_bytes <= budget


def test_an_uncompiled_model_takes_no_ring(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", num_hidden_layers=2).save_pretrained(tmp_path)
    engine = load_engine(tmp_path, EngineOptions(Host(), CPU, step_tokens=64), None, bytes(32))
    assert offload_report(engine._head.model).store.current_ring is None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4"])
def test_sizes_are_known_before_the_model_is_loaded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[StepSizes] = []

    def noted(*arguments: Any) -> StepSizes:
        loaded.append(StepSizes(*arguments))
        return loaded[-1]

    monkeypatch.setattr(load_engine_module, "StepSizes", noted)
    model = tiny_model(family)
    make_engine(model, EngineOptions(None, CPU, cache_bytes=0, warms_up=False), None, bytes(32))
    sizes = StepSizes.of(from_config(model.config), "fp32", "cpu")
    temperatures = {layer.temperature for layer in loaded[0].layers}
    loaded = [dataclasses.replace(loaded[0], layers=tuple(_without_temperature(layer) for layer in loaded[0].layers))]
    assert loaded == [sizes]
    assert (family == "llama4") == (temperatures != {None}), "the config does not have it"


def _without_temperature(layer: Any) -> Any:
    return dataclasses.replace(layer, temperature=None)


@pytest.mark.parametrize("room_bytes", [0, 1_000_000, 50_000_000])
def test_the_largest_step_fits_and_the_next_one_does_not(room_bytes: int) -> None:
    sizes = StepSizes.of(from_config(tiny_model("qwen3_moe").config), "fp32", "cpu")
    most = sizes.most_tokens(room_bytes, CACHE_BYTES)
    assert bool(most) == bool(room_bytes)
    assert most == 0 or sizes.memory(most, CACHE_BYTES).step_bytes <= room_bytes
    assert sizes.memory(most + 1, CACHE_BYTES).step_bytes > room_bytes


def test_logits_count_where_they_take_more_than_the_layers() -> None:
    weights = DeviceMemory(100.0, 10.0, 0.0)
    sizes = StepSizes.of(from_config(tiny_model("qwen3_moe").config), "fp32", "cpu")
    narrow, wide = sizes.memory(64, 0, weights), dataclasses.replace(sizes, width=1 << 20).memory(64, 0, weights)
    assert narrow.step_bytes == narrow.activation_bytes + narrow.attention_bytes
    assert wide.step_bytes == wide.logits_bytes > narrow.step_bytes
    assert wide.peak_bytes == 110 + wide.step_bytes == sum(wide.parts.values())


def test_the_error_for_a_small_budget_names_all_parts(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", num_hidden_layers=2).save_pretrained(tmp_path)
    options = EngineOptions(Host(), CPU, memory_budget="1MB", cache_bytes=700_000, step_tokens=64)
    with pytest.raises(InputError) as caught:
        load_engine(tmp_path, options, None, bytes(32))
    text = str(caught.value)
    for named in (
        "dense weights and staging",
        "activations of 1 sequences of 64 tokens",
        "attention over their trie",
        "logits after them",
        "the cache of keys and values 700000",
        "slots and shards",
    ):
        assert named in text
    assert text.endswith("fewer step_tokens, or a smaller kv_cache")


def test_a_budget_beyond_the_device_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("qwen3_moe", num_hidden_layers=2).save_pretrained(tmp_path)
    share = MemoryShare(10**9, 2 * 10**9, 3e9, "cpu")
    monkeypatch.setattr(MemoryShare, "of", staticmethod(lambda *_: share))
    options = EngineOptions(Host(), CPU, memory_budget="3GB", step_tokens=64)
    with pytest.raises(
        InputError, match="memory_budget is '3GB', but the device has 2000000000 bytes for this process"
    ):
        load_engine(tmp_path, options, None, bytes(32))


def test_a_model_that_the_device_cannot_hold_is_refused_before_loading(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", num_hidden_layers=2).save_pretrained(tmp_path)
    options = EngineOptions(Host(), CPU, step_tokens=64)
    planning = dataclasses.replace(options.planning(), device_bytes=100_000)
    with pytest.raises(
        InputError, match=r"the model does not fit: it needs .* GB \(weights .*, slots .*use fewer slots"
    ):
        load_engine_module.load_planned(tmp_path, Host(), CPU, lambda: planning)


def test_without_a_budget_a_part_of_the_free_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    share = MemoryShare(100_000_000, 200_000_000, None, "cpu")
    monkeypatch.setattr(MemoryShare, "of", staticmethod(lambda *_: share))
    model = tiny_model("qwen3_moe")
    engine = make_engine(model, EngineOptions(None, CPU, warms_up=False), None, bytes(32))
    facts, weights = engine.facts, sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    assert facts.memory_limit_bytes == weights + 50_000_000
    assert 9_000_000 < facts.memory.kv_bytes <= 10_000_000
    assert "GB (weights " in facts.notes["memory"]


def test_a_step_that_no_memory_is_left_for_is_refused() -> None:
    options = EngineOptions(None, CPU, memory_budget="1kB", cache_bytes=0, warms_up=False)
    with pytest.raises(InputError, match=r"a step of one token needs .* more than the limit of"):
        make_engine(tiny_model("qwen3_moe"), options, None, bytes(32))
