"""Reports on quantised checkpoints and on host memory: as stored, and as moepass runs them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import moepass
from moepass.models.formulas.stored_weights import dense_bytes
from moepass.models.sizes.presets import preset, preset_config
from moepass.passes.machine.hardware import Figure, Hardware
from moepass.runtime.profiles.hardware_profiles import load_hardware

QWEN3_FP8 = "qwen3-235b-a22b in FP8"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "explain.md"


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_an_fp8_checkpoint_is_shown_as_stored_and_as_run() -> None:
    report, model = moepass.explain("deepseek-v3"), preset("deepseek-v3")
    stored = report.stored
    assert stored is not None
    # The published files without the prediction layer.
    assert stored.expert_bytes == 58 * 256 * 3 * (7168 * 2048 + 56 * 16 * 4)
    assert stored.other_bytes == dense_bytes(model, "bf16", model.stored)
    assert report.model.dtype == stored.runs_as == "bf16"
    assert report.model.expert_bytes == stored.expert_bytes
    assert report.model.other_bytes == dense_bytes(model, "bf16")
    assert stored.bank_link_bytes == stored.bank_slot_bytes == stored.expert_bytes // 58
    assert {block.bank_bytes for block in report.blocks} == {stored.bank_link_bytes}
    assert any("experts rest and travel in fp8, and are decoded to bf16" in text for text in report.assumptions)
    text = words(report.text())
    assert "checkpoint fp8: 654.1 GB of experts, 19.1 GB of other weights; experts rest and travel as stored" in text
    assert "Forecast for kernels in fp8" in text


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["8xh100-80g", "h100-80g"])
@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", QWEN3_FP8])
def test_the_threshold_is_that_of_the_bytes_that_travel(name: str, hardware: str) -> None:
    model: Any = name
    if name == QWEN3_FP8:
        model = preset_config("qwen3-235b-a22b")
        model.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    report = moepass.explain(model, hardware=hardware)
    stored, saturation, machine = report.stored, report.saturation, report.hardware
    assert stored is not None
    assert saturation is not None
    assert machine.host_bytes_per_s is not None
    assert saturation.gather_bytes == stored.bank_link_bytes
    # By hand: seconds of the stored bytes over the link, in which the bank before is decoded in memory, and tokens
    # whose FLOPs take 1.2 times as long.
    rate, part = machine.host_bytes_per_s, 1.0
    if report.strategy.home == "peer":
        assert machine.peer_bytes_per_s is not None
        rate, part = machine.peer_bytes_per_s, 7 / 8
    assert 0.75 < saturation.gather_bytes * part / rate / saturation.gather_seconds < 0.85
    sizes = report.model
    slot_bytes = sizes.experts * 3 * sizes.hidden * sizes.moe_intermediate * 2
    slot_bytes += sizes.experts * (sizes.hidden + 2 * sizes.moe_intermediate) * 2 * (name == "gpt-oss-120b")  # biases
    decode_seconds = (saturation.gather_bytes + slot_bytes) / (0.82 * machine.hbm_bytes_per_s)
    assert saturation.decode_seconds == pytest.approx(decode_seconds)
    assert saturation.decode_seconds < saturation.gather_seconds
    flops_per_token = saturation.flops_per_token + saturation.values["score_flops_per_token"]
    at_peak = 1.2 * saturation.gather_seconds * machine.flops / flops_per_token
    assert saturation.tokens_per_rank_at_peak == pytest.approx(at_peak, rel=0.01)
    # Experts take half or a quarter of the bytes of bf16. FLOPs of attention grow with the tokens, so tokens differ
    # by a little more or less than that.
    ratio = stored.decoded_tokens_per_rank / saturation.tokens_per_rank
    assert ratio == pytest.approx({"fp8": 2.0, "mxfp4": 1 / 0.266}[stored.format], rel=0.15)
    text = (
        f"{saturation.tokens_per_rank} tokens per rank, {stored.decoded_tokens_per_rank} if experts travelled in bf16"
    )
    assert text in words(report.text())
    # The table in docs/explain.md.
    (row,) = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    cells = [cell.strip().replace(",", "") for cell in row.strip("| ").split("|")]
    column = 3 if hardware.startswith("8x") else 1
    assert cells[column : column + 2] == [str(saturation.tokens_per_rank), str(stored.decoded_tokens_per_rank)]


@pytest.mark.slow
def test_the_thresholds_with_packed_experts_are_those_of_the_documentation() -> None:
    cells = []
    for hardware, home in (("h100-80g", "host"), ("8xh100-80g", "peer")):
        saturation = moepass.explain("qwen3-235b-a22b", hardware=hardware, home=home).saturation
        assert saturation is not None
        cells += [f"{saturation.packed_tokens_per_rank:,}", f"{saturation.tokens_per_rank:,}"]
    assert f"| qwen3-235b-a22b, packed without loss | {' | '.join(cells)} |" in DOCS.read_text(encoding="utf-8")


def test_the_threshold_with_packed_experts_is_that_of_their_bytes() -> None:
    report = moepass.explain("qwen3-30b-a3b", hardware="h100-80g", home="host")
    saturation, sizes, machine = report.saturation, report.model, report.hardware
    assert saturation is not None
    assert saturation.packed_tokens_per_rank is not None
    # By hand: 11 bits of each number, a byte of each fortieth, and 8 bytes of each row. Decoding takes less time.
    rows = sizes.experts * (2 * sizes.moe_intermediate + sizes.hidden)
    numbers = sizes.experts * 3 * sizes.moe_intermediate * sizes.hidden
    packed_bytes = numbers * (11 / 8 + 1 / 40) + 8 * rows
    assert packed_bytes / saturation.gather_bytes == pytest.approx(0.70, abs=0.005)
    seconds = saturation.gather_seconds * packed_bytes / saturation.gather_bytes
    assert (packed_bytes + saturation.gather_bytes) / (0.82 * machine.hbm_bytes_per_s) < seconds
    # FLOPs of attention grow with the tokens.
    ratio = saturation.packed_tokens_per_rank / saturation.tokens_per_rank
    assert ratio == pytest.approx(seconds / saturation.gather_seconds, rel=0.02)
    assert f"with experts packed by `moepass pack`: {saturation.packed_tokens_per_rank} tokens" in report.text()
    assert moepass.explain("gpt-oss-120b").saturation.packed_tokens_per_rank is None  # type: ignore[union-attr]


@pytest.mark.slow
def test_an_mxfp4_bank_is_larger_in_a_slot() -> None:
    stored = moepass.explain("gpt-oss-120b").stored
    assert stored is not None
    assert stored.expert_bytes + stored.other_bytes == 65_248_815_744
    assert (stored.format, stored.computes_in, stored.runs_as) == ("mxfp4", "bf16", "bf16")
    assert stored.bank_slot_bytes > 3.7 * stored.bank_link_bytes
    assert stored.asyncep_step_seconds is not None


@pytest.mark.slow
def test_all_figures_refer_to_the_stored_format_if_it_is_requested() -> None:
    default, asked = moepass.explain("deepseek-v3").stored, moepass.explain("deepseek-v3", dtype="fp8")
    assert default is not None
    assert asked.stored is not None
    assert asked.schedule is not None
    assert asked.stored.runs_as == "fp8"
    assert asked.model.expert_bytes == default.expert_bytes
    assert asked.schedule.step_seconds == default.asyncep_step_seconds
    assert asked.model.other_bytes == default.other_bytes
    assert {block.bank_bytes for block in asked.blocks} == {default.bank_link_bytes}
    assert asked.memory is not None
    slots, buffers = asked.schedule.slots * default.bank_slot_bytes, 2 * default.bank_link_bytes
    assert asked.memory.slot_bytes == slots + buffers


def test_a_machine_without_fp8_computes_fp8_weights_in_bf16() -> None:
    stored = moepass.explain("deepseek-v3", hardware="8xa100").stored
    assert stored is not None
    assert stored.computes_in == "bf16"
    assert stored.bank_slot_bytes > 1.9 * stored.bank_link_bytes


@pytest.mark.slow
def test_a_format_of_unknown_sizes_is_named_and_a_plain_checkpoint_has_none(tmp_path: Path) -> None:
    assert moepass.explain("olmoe-1b-7b").stored is None
    values = preset_config("olmoe-1b-7b", layers=1).to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    report = moepass.explain(file)
    assert report.stored is None
    assert any("quantised by 'gptq'" in text and "to bf16" in text for text in report.assumptions)


def machine(host_memory_bytes: float) -> Hardware:
    return dataclasses.replace(load_hardware("8xh100-80g"), host_memory_bytes=Figure(host_memory_bytes, "user"))


def test_host_memory_is_that_of_all_ranks() -> None:
    report = moepass.explain("qwen3-30b-a3b", hardware=machine(1e12), home="host", memory_budget_bytes=30e9)
    assert report.memory is not None
    assert report.memory.host_bytes == 8 * report.model.expert_bytes
    assert report.memory.host_fits
    assert "host memory of the machine fits: 463.9 GB of 1.0 TB" in words(report.text())
    assert "host memory of the machine fits" in report.html()
    unknown = moepass.explain("qwen3-30b-a3b", home="host", memory_budget_bytes=30e9)
    assert unknown.memory is not None
    assert unknown.memory.host_fits is None
    assert "(the profile does not say how much it has)" in words(unknown.text())


@pytest.mark.slow
def test_a_home_that_needs_too_much_host_memory_is_not_chosen() -> None:
    report = moepass.explain("qwen3-235b-a22b", hardware=machine(1e12))
    notes = {attempt.home: attempt.note for attempt in report.strategy.homes_tried}
    assert notes["host"] == "needs 3633.5 GB of host memory, but the machine has 1000.0 GB"
    assert report.strategy.home == "hybrid"
    alone = moepass.explain("qwen3-235b-a22b", hardware=machine(1e12), home="host")
    assert alone.memory is not None
    assert alone.memory.host_fits is False
    assert alone.schedule is None
    assert "host memory of the machine does not fit: 3.6 TB of 1.0 TB" in words(alone.text())
    assert alone.verdict != "asyncep"
